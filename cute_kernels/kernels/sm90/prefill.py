"""Active-length attention for many query rows (prefill) on Hopper: the host side.

`suits` says which calls are better off here than in the decode kernel; `prepare` makes a function that runs them. How the kernel
works is in prefill_kernel.py. One launch per call, two when rows are appended (see append_kernel.py); no workspace. K and V
go by TMA, hence rows at multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.jit import kernel_builder
from cute_kernels.kernels.scales import LOG2E, PLAIN_SCALE

ARCH = "sm_90a"
ROWS_PER_TILE = 128


class Variant(NamedTuple):
    """What is compiled separately; field names as in prefill_kernel.PrefillKernel."""

    bf16: bool
    head_dim: int
    group: int
    positive: bool
    causal: bool
    window: bool
    softcap: bool
    sink: bool
    device_length: bool


def suits(q_len: int, h_q: int, kv_heads: int) -> bool:
    """Enough 128-row tiles of one sequence (32: a quarter of the SMs), each at least half full. A function of what a batch and a
    length do not change, as the two kernels round differently."""
    return q_len * (h_q // kv_heads) >= ROWS_PER_TILE // 2 and q_len * h_q >= 32 * ROWS_PER_TILE


def aligned(*tensors: Tensor) -> bool:
    """What TMA and 16-byte loads need: base and every stride (of a dimension longer than 1) a multiple of 16 bytes."""
    return all(
        not t.data_ptr() & 15 and not any(st & 7 for st, n in zip(t.stride()[:3], t.shape) if n > 1) for t in tensors
    )


def _plain_strides(t: Tensor) -> Tensor:
    """The same tensor; dimensions of size 1 get a stride that a TMA descriptor accepts."""
    if not any(st & 7 for st in t.stride()[:3]):
        return t
    return t.as_strided(t.shape, [st if n > 1 else 8 for st, n in zip(t.stride()[:3], t.shape)] + [1])


def _variants(arch: str) -> tuple[Variant, ...]:
    """bf16, D 128, 4 query heads a KV head, causal, int and device lengths."""
    return tuple(Variant(True, 128, 4, True, True, False, False, False, dev) for dev in (False, True))


def _rows(dtype: Any, head_dim: int) -> Any:
    """[., ., ., D], rows at multiples of 16 bytes."""
    import cutlass.cute as cute

    shape = (*(cute.sym_int() for _ in range(3)), head_dim)
    stride = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
    return cute.runtime.make_fake_tensor(dtype, shape, (*stride, 1), assumed_align=16)


def _flat(element: Any) -> Any:
    import cutlass.cute as cute

    return cute.runtime.make_fake_tensor(element, (cute.sym_int64(),), (1,), assumed_align=4)


@kernel_builder("active_attention_prefill", archs=(ARCH,), variants=_variants)
def prefill_kernel(variant: Variant, arch: str) -> tuple[Any, tuple[Any, ...]]:
    import cutlass
    import cutlass.cute as cute
    from cutlass import Float32, Int32

    from cute_kernels.kernels.sm90.prefill_kernel import PrefillKernel

    dtype = cutlass.BFloat16 if variant.bf16 else cutlass.Float16
    lse = cute.runtime.make_fake_tensor(
        Float32, tuple(cute.sym_int() for _ in range(3)), tuple(cute.sym_int64() for _ in range(3)), assumed_align=4
    )
    return PrefillKernel(**variant._asdict()), (
        *(_rows(dtype, variant.head_dim) for _ in range(4)), lse, _flat(Int32) if variant.device_length else None, Int32(1),
        _flat(Float32) if variant.sink else None, Float32(1.0), Float32(1.0), Int32(0), Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )  # fmt: skip


class AppendVariant(NamedTuple):
    bf16: bool
    head_dim: int


@kernel_builder("active_attention_prefill_append", archs=(ARCH,), variants=(AppendVariant(True, 128),))
def append_kernel(variant: AppendVariant, arch: str) -> tuple[Any, tuple[Any, ...]]:
    import cutlass
    import cutlass.cute as cute
    from cutlass import Int32

    from cute_kernels.kernels.sm90.append_kernel import AppendKernel

    dtype = cutlass.BFloat16 if variant.bf16 else cutlass.Float16
    return AppendKernel(variant.head_dim), (
        *(_rows(dtype, variant.head_dim) for _ in range(4)), _flat(Int32),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )  # fmt: skip


def prepare(
    *,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_len: int | Tensor,
    sm_scale: float,
    causal: bool,
    window_left: int,
    softcap: float,
    attn_sink: Tensor | None,
    k_new: Tensor | None,
    v_new: Tensor | None,
    target: Any,
    otherwise: Callable[..., None],
) -> Callable[..., None]:
    """run(q, k_cache, v_cache, kv_len, attn_sink, k_new, v_new, out, lse) for every call of these layouts, numbers and options.
    Arguments as `cute_kernels.active_attention_append`, already checked; tensors that are not `aligned` go to `otherwise`."""
    variant = Variant(
        bf16=q.dtype == torch.bfloat16,
        head_dim=q.shape[3],
        group=q.shape[1] // k_cache.shape[1],
        positive=0.0 < sm_scale <= PLAIN_SCALE and softcap == 0.0,
        causal=causal,
        window=window_left >= 0,
        softcap=softcap > 0.0,
        sink=attn_sink is not None,
        device_length=not isinstance(kv_len, int),
    )
    kernel = prefill_kernel(variant, target)
    append = None if k_new is None else append_kernel(AppendVariant(variant.bf16, variant.head_dim), target)
    scales = (sm_scale / softcap, softcap * LOG2E) if softcap > 0.0 else (sm_scale * LOG2E, 0.0)

    def run(q, k_cache, v_cache, kv_len, attn_sink, k_new, v_new, out, lse):
        if not aligned(q, k_cache, v_cache) or not (append is None or aligned(k_new, v_new)):
            otherwise(q, k_cache, v_cache, kv_len, attn_sink, k_new, v_new, out, lse)
            return
        lengths, length = (kv_len, 0) if variant.device_length else (None, kv_len)
        q, k_cache, v_cache = (_plain_strides(t) for t in (q, k_cache, v_cache))
        if append is not None:
            append(k_cache, v_cache, _plain_strides(k_new), _plain_strides(v_new), kv_len)
        kernel(q, k_cache, v_cache, out, lse, lengths, length, attn_sink, *scales, window_left, target.num_sms)

    return run
