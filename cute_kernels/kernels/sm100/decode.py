"""Active-length attention on Blackwell: the host side, and the choice between the kernel for few query rows and that for many.

`can_implement` says whether a case runs here, `launch` runs it into given outputs. How the kernels work is told in decode_kernel.py
and prefill_kernel.py. One launch per call; nothing is allocated but outputs (see cute_kernels.kernels.workspace). The tensor maps
are made by the launch from the caches' strides, so one compiled variant serves every capacity.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.jit import current_target, kernel_builder
from cute_kernels.kernels.attention_arguments import aligned, unsupported
from cute_kernels.kernels.scales import LOG2E
from cute_kernels.kernels.sm100 import prefill
from cute_kernels.kernels.splits import split_bound, split_cap, split_count
from cute_kernels.kernels.workspace import workspace

ARCHS = ("sm_100a", "sm_103a")
TILE = 128  # keys, as decode_kernel.TILE


class Variant(NamedTuple):
    """What is compiled separately; field names as in decode_kernel.DecodeKernel."""

    bf16: bool
    head_dim: int
    group: int
    single_token: bool
    n: int
    split_cap: int
    wide: bool
    causal: bool
    window: bool
    softcap: bool
    sink: bool
    append: bool
    device_length: bool


def kernel_name(*, q: Tensor, k_cache: Tensor, **_: Any) -> str:
    """Which kernel `launch` takes for these arguments."""
    return "prefill" if q.numel() and prefill.suits(q.shape[2], q.shape[1] // k_cache.shape[1]) else "decode"


def can_implement(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_len: int | Tensor,
    sm_scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    softcap: float = 0.0,
    attn_sink: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
) -> str | None:
    """None, or why this case has no kernel here (arguments as `cute_kernels.active_attention`, already checked)."""
    reason = unsupported(q, k_cache)
    if reason is not None:
        return reason
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if any(stride >= 1 << 39 for stride, size in zip(x.stride(), x.shape) if size > 1):
            return f"strides of {name} must be below 2**39 elements (a tensor map holds 40 bits of bytes), not {x.stride()}"
    return None


def choose(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_len: int | Tensor, causal: bool, window_left: int, softcap: float,
    attn_sink: Tensor | None, k_new: Tensor | None, v_new: Tensor | None,
) -> Variant:  # fmt: skip
    """The variant for these arguments. Nothing that data decides, and no arithmetic that depends on the batch."""
    h_q, s, d = q.shape[1:]
    kv_heads = k_cache.shape[1]
    group = h_q // kv_heads
    # 32 rows of 256 dims would not fit the registers, nor would 32 rows whose tokens differ at run time.
    n = 16 if s * group <= 16 or d > 128 or (group > 32 and s > 1) else 32
    return Variant(
        bf16=q.dtype == torch.bfloat16,
        head_dim=d,
        group=group,
        single_token=s == 1,
        n=n,
        split_cap=split_cap(kv_heads),
        wide=aligned(q, k_cache, v_cache, k_new, v_new),
        causal=causal,
        window=window_left >= 0,
        softcap=softcap > 0.0,
        sink=attn_sink is not None,
        append=k_new is not None,
        device_length=not isinstance(kv_len, int),
    )


def _common_variants(arch: str) -> tuple[Variant, ...]:
    """bf16, D 128, 4 query heads a KV head, 8 KV heads, one token, int and device lengths."""
    return tuple(Variant(True, 128, 4, True, 16, 8, True, True, False, False, False, False, dev) for dev in (False, True))


@kernel_builder(
    "active_attention_decode_sm100", archs=ARCHS, variants=_common_variants,
    options="--ptxas-options -O2",  # -O3 of ptxas 13.0 and 13.4 crashes on some loops around tcgen05.mma
)  # fmt: skip
def decode_kernel(variant: Variant, arch: str) -> tuple[Any, tuple[Any, ...]]:
    """The kernel of one variant and the arguments of cute.compile."""
    import cutlass.cute as cute
    from cutlass import Float32, Int32

    from cute_kernels.kernels.sm100.decode_kernel import DecodeKernel
    from cute_kernels.kernels.sm100.fakes import flat, rows, stats

    tensor = [rows(variant.bf16, variant.wide) for _ in range(6)]
    return DecodeKernel(**variant._asdict()), (
        *tensor[:4], stats(), flat(Int32) if variant.device_length else None, Int32(1),
        flat(Float32), flat(Int32), flat(Float32) if variant.sink else None,
        tensor[4] if variant.append else None, tensor[5] if variant.append else None,
        Float32(1.0), Float32(1.0), Int32(0), Int32(1), Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )  # fmt: skip


_plans: dict[tuple, _Plan] = {}


class _Plan:
    """A variant's compiled functions and numbers. `builder` is decode_kernel or prefill_kernel."""

    def __init__(self, builder: Any, variant: Variant | prefill.Variant, q_len: int, target: Any) -> None:
        self.builder, self.variant, self.target = builder, variant, target
        self.prefill = builder is not decode_kernel
        if not self.prefill:
            n, group, self.cap = variant.n, variant.group, variant.split_cap
            self.rows = n - n % group if group <= n else n  # of a tile, as attention_base.rows_per_tile
            self.row_tiles = -(-q_len * group // self.rows)
        self.wide = builder(variant._replace(wide=True), target)

    def run(self, arguments: tuple[Any, ...], rows: tuple[Tensor | None, ...]) -> None:
        try:
            self.wide(*arguments)
        except ValueError:
            # The host code found a row that does not start at a multiple of 16 bytes (nothing was launched).
            if aligned(*rows):
                raise
            self.builder(self.variant._replace(wide=False), self.target)(*arguments)


def launch(
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
    out: Tensor,
    lse: Tensor,
    variant: Variant | None = None,
) -> None:
    """Run the kernel on the current stream; arguments as `cute_kernels.active_attention_append`, already checked.

    out [B, Hq, S, D] and lse [B, Hq, S] are written in full. `variant` overrides the choice (tests).
    """
    b, h_q, s, d = q.shape
    if b == 0 or h_q == 0 or s == 0:
        return
    _, kv_heads, capacity, _ = k_cache.shape
    if capacity == 0:
        out.zero_()
        lse.fill_(-math.inf)
        return
    # What follows is most of the host time of a call: one small tuple finds everything that lengths do not change.
    device_length = not isinstance(kv_len, int)
    device = q.device
    # On a GPU the device decides the target; on a CPU the emulator does, per call.
    target = None if device.type == "cuda" else current_target(device)
    key = (
        device, q.dtype, h_q, s, d, kv_heads, causal, window_left >= 0, softcap > 0.0, attn_sink is None,
        k_new is None, device_length, variant, target and target.key,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        chosen = variant or choose(q, k_cache, v_cache, kv_len, causal, window_left, softcap, attn_sink, k_new, v_new)
        builder = decode_kernel
        if variant is None and prefill.suits(s, chosen.group):
            builder = prefill.prefill_kernel
            chosen = prefill.Variant(*(getattr(chosen, field) for field in prefill.Variant._fields))
        plan = _plans[key] = _Plan(builder, chosen, s, target or current_target(device))
    if softcap > 0.0:
        scale, cap_log2 = sm_scale / softcap, softcap * LOG2E
    else:
        scale, cap_log2 = sm_scale * LOG2E, 0.0
    rows = q, k_cache, v_cache, k_new, v_new
    if plan.prefill:
        lengths, length = (kv_len, 0) if device_length else (None, kv_len)
        plan.run(
            (q, k_cache, v_cache, out, lse, lengths, length, attn_sink, k_new, v_new, scale, cap_log2, window_left), rows
        )
        return
    if device_length:
        lengths, length, slots = kv_len, 0, split_bound(capacity, TILE, plan.cap)
    else:
        lengths, length = None, kv_len
        if plan.row_tiles == 1:
            slots = split_count(min(kv_len, window_left + s) if window_left >= 0 else kv_len, TILE, plan.cap)
        else:
            slots = split_bound(kv_len, TILE, plan.cap)
    tiles = b * kv_heads * plan.row_tiles
    ws = workspace(device, tiles * slots * plan.rows * (d + 4) if slots > 1 else 0, tiles)
    arguments = (
        q, k_cache, v_cache, out, lse, lengths, length, ws.partials, ws.counters, attn_sink, k_new, v_new,
        scale, cap_log2, window_left, slots, plan.row_tiles,
    )  # fmt: skip
    plan.run(arguments, rows)
