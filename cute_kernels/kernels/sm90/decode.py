"""Active-length attention for few query rows (decode) on Hopper: the host side.

`can_implement` says whether a case runs here, `launch` runs it into given outputs, `active_attention_decode` allocates them. The
kernel itself, and how it works, is in decode_kernel.py. One launch per call; nothing is allocated but the outputs: the workspace for
partial results and its counters are kept per device and stream (calls on one stream run in order, so they share it safely; a
captured graph uses the workspace of the stream it was captured on, so two such graphs must not replay at the same time).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.kernels.sm90.splits import split_bound, split_count

ARCH = "sm_90a"
LOG2E = 1.4426950408889634
_DTYPES = (torch.bfloat16, torch.float16)


class Variant(NamedTuple):
    """What is compiled separately; field names as in decode_kernel.DecodeKernel."""

    bf16: bool
    head_dim: int
    group: int
    single_token: bool
    row_tile: int
    warps: int
    split_cap: int
    wide: bool
    causal: bool
    window: bool
    softcap: bool
    sink: bool
    append: bool
    device_length: bool
    min_blocks: int


_compiled: dict[Variant, Any] = {}
_workspaces: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}


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
    if q.dtype not in _DTYPES:
        return f"dtype must be bfloat16 or float16, not {q.dtype}"
    d = q.shape[3]
    if d % 8 or not 16 <= d <= 256:
        return f"the head dimension must be a multiple of 8 from 16 to 256, not {d}"
    if max(k_cache.shape[0], k_cache.shape[1]) > 65535:
        return f"batch size and KV heads must be at most 65535, not {k_cache.shape[0]} and {k_cache.shape[1]}"
    return None


def split_cap(kv_heads: int) -> int:
    """Most splits of one sequence: enough CTAs for one sequence to use the GPU. Depends on the head count alone."""
    return max(4, min(64, 128 // max(1, kv_heads)))


def _aligned(*tensors: Tensor | None) -> bool:
    """Every row starts at a multiple of 16 bytes (strides of dimensions of size 1 do not matter)."""
    for x in tensors:
        if x is None:
            continue
        s0, s1, s2, _ = x.stride()
        if x.data_ptr() & 15:
            return False
        if (s0 | s1 | s2) & 7 and any(st & 7 and n > 1 for st, n in zip(x.stride()[:3], x.shape[:3], strict=True)):
            return False
    return True


def choose(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_len: int | Tensor, causal: bool, window_left: int, softcap: float,
    attn_sink: Tensor | None, k_new: Tensor | None, v_new: Tensor | None,
) -> Variant:  # fmt: skip
    """The variant for these arguments. Nothing that data decides, and nothing that would make a row's result depend on the batch."""
    d, s, kv_heads = q.shape[3], q.shape[2], k_cache.shape[1]
    group = q.shape[1] // kv_heads
    return Variant(
        q.dtype == torch.bfloat16, d, group, s == 1, 8 if s * group <= 8 or d > 128 else 16, 4, split_cap(kv_heads),
        _aligned(q, k_cache, v_cache, k_new, v_new), causal, window_left >= 0, softcap > 0.0, attn_sink is not None,
        k_new is not None, not isinstance(kv_len, int), 0,
    )  # fmt: skip


def compile_variant(variant: Variant, options: str = "") -> Any:
    """Compile for sm_90a (no GPU needed). Returns a TVM-FFI function with the arguments of DecodeKernel.__call__ but the stream."""
    import cutlass
    import cutlass.cute as cute
    from cutlass import Float32, Int32

    from cute_kernels.kernels.sm90.decode_kernel import DecodeKernel

    dtype = cutlass.BFloat16 if variant.bf16 else cutlass.Float16

    def strided(element: Any, rank: int, unit: bool) -> Any:
        shape = tuple(cute.sym_int() for _ in range(rank))
        stride = tuple(cute.sym_int64() for _ in range(rank - 1)) + (1 if unit else cute.sym_int64(),)
        return cute.runtime.make_fake_tensor(element, shape, stride, assumed_align=element.width // 8)

    def flat(element: Any) -> Any:
        return cute.runtime.make_fake_tensor(element, (cute.sym_int64(),), (1,), assumed_align=element.width // 8)

    tensor = [strided(dtype, 4, True) for _ in range(6)]
    return cute.compile(
        DecodeKernel(**variant._asdict()),
        *tensor[:4], strided(Float32, 3, False), flat(Int32) if variant.device_length else None, Int32(1),
        flat(Float32), flat(Int32), flat(Float32) if variant.sink else None,
        tensor[4] if variant.append else None, tensor[5] if variant.append else None,
        Float32(1.0), Float32(1.0), Int32(0), Int32(1), Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {ARCH} {options}".rstrip(),
    )  # fmt: skip


def _workspace(device: torch.device, floats: int, counters: int) -> tuple[Tensor, Tensor]:
    index = device.index
    key = (index, torch._C._cuda_getCurrentRawStream(index))
    found = _workspaces.get(key)
    if found is None or found[0].numel() < floats or found[1].numel() < counters:
        # Counters return to zero after every launch; new ones start there. Grown in powers of two, so rarely.
        grow = [1 << (n - 1).bit_length() for n in (max(floats, 1 << 18), max(counters, 1 << 12))]
        found = (
            torch.empty(grow[0], dtype=torch.float32, device=device),
            torch.zeros(grow[1], dtype=torch.int32, device=device),
        )
        _workspaces[key] = found
    return found


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

    out [B, Hq, S, D] and lse [B, Hq, S] are written in full. `variant` overrides the choice (benchmarks).
    """
    b, h_q, s, d = q.shape
    if b == 0 or h_q == 0 or s == 0:
        return
    v = variant or choose(q, k_cache, v_cache, kv_len, causal, window_left, softcap, attn_sink, k_new, v_new)
    run = _compiled.get(v)
    if run is None:
        run = _compiled[v] = compile_variant(v)
    kv_heads, capacity = k_cache.shape[1], k_cache.shape[2]
    tile = 16 * v.warps
    row_tiles = -(-s * v.group // v.row_tile)
    if v.device_length:
        lengths, length, slots = kv_len, 0, split_bound(capacity, tile, v.split_cap)
    else:
        lengths, length = None, kv_len
        if row_tiles == 1:
            keys = min(kv_len, window_left + s) if window_left >= 0 else kv_len
            slots = split_count(keys, tile, v.split_cap)
        else:
            slots = split_bound(kv_len, tile, v.split_cap)
    records = b * kv_heads * row_tiles * v.row_tile
    workspace, counters = _workspace(q.device, records * slots * (d + 4) if slots > 1 else 0, records)
    if softcap > 0.0:
        scale, cap_log2 = sm_scale / softcap, softcap * LOG2E
    else:
        scale, cap_log2 = sm_scale * LOG2E, 0.0
    run(
        q, k_cache, v_cache, out, lse, lengths, length, workspace, counters, attn_sink, k_new, v_new,
        scale, cap_log2, window_left, slots, row_tiles,
    )  # fmt: skip


def active_attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_len: int | Tensor,
    *,
    sm_scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    softcap: float = 0.0,
    attn_sink: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    variant: Variant | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of q [B, Hq, S, D] over the first kv_len rows of the caches [B, Hkv, C, D] on a Hopper GPU.

    Semantics, options and results as `cute_kernels.active_attention` (with k_new and v_new: `active_attention_append`), without its
    argument checks. Any S works; the kernel is made for S * Hq / Hkv up to 16 and re-reads the cache for every 16 rows.

    Returns:
        out, q's shape and dtype with the strides of a contiguous [B, S, Hq, D]; lse [B, Hq, S] fp32, natural logarithm.
    """
    b, h_q, s, d = q.shape
    out = q.new_empty((b, s, h_q, d)).transpose(1, 2)
    lse = q.new_empty((b, h_q, s), dtype=torch.float32)
    scale = d**-0.5 if sm_scale is None else sm_scale
    launch(q, k_cache, v_cache, kv_len, scale, causal, window_left, softcap, attn_sink, k_new, v_new, out, lse, variant)
    return out, lse
