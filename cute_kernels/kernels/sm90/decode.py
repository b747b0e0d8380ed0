"""Active-length attention for few query rows (decode) on Hopper: the host side.

`can_implement` says whether a case runs here, `launch` runs it into given outputs, `active_attention_decode` allocates them. The
kernel itself, and how it works, is in decode_kernel.py. One launch per call; nothing is allocated but outputs: the workspace for
partial results and its counters are kept per device and stream. Calls on one stream run in order, so they share it safely. All
captured graphs of a device share one: two of them must not replay at the same time on different streams.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.jit import current_target, kernel_builder
from cute_kernels.kernels.sm90 import prefill
from cute_kernels.kernels.splits import split_bound, split_count
from cute_kernels.kernels.workspace import workspace

ARCH = "sm_90a"
LOG2E = 1.4426950408889634
_DTYPES = (torch.bfloat16, torch.float16)
# Below so many (batch row, KV head) pairs two ring slots a warp are faster, from there on one, which lets a fourth CTA run on each
# SM (1024 keys, batch 1: 5.13 against 5.60 us; batch 8: 13.8 against 12.8). The arithmetic is the same, instruction by instruction.
FEW = 64
# More CTAs than this in a launch are replaced by ones that take several splits in a row: CTAs run in waves, and between two waves
# the memory idles (batch 32, 4096 keys: 4096 CTAs 136.3 us, 2048 CTAs 130.7). The bits stay the same.
TARGET_CTAS = 264


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
    stages: int
    chunked: bool
    ctas: int  # host only: see `TARGET_CTAS`


_plans: dict[tuple, _Plan] = {}


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
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache), ("k_new", k_new), ("v_new", v_new)):
        if x is not None and x.stride(2) >= 1 << 30:
            return f"the row stride of {name} must be below 2**30 elements, not {x.stride(2)}"
    return None


def split_cap(kv_heads: int) -> int:
    """Most splits of one sequence: enough CTAs for one sequence to use the GPU. Depends on the head count alone."""
    return max(2, min(32, 64 // max(1, kv_heads)))


def _aligned(*tensors: Tensor | None) -> bool:
    """Every row starts at a multiple of 16 bytes (strides of dimensions of size 1 do not matter)."""
    for x in tensors:
        if x is not None:
            s0, s1, s2, _ = x.stride()
            if x.data_ptr() & 15:
                return False
            if (s0 | s1 | s2) & 7 and any(st & 7 and n > 1 for st, n in zip((s0, s1, s2), x.shape)):
                return False
    return True


def choose(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_len: int | Tensor, causal: bool, window_left: int, softcap: float,
    attn_sink: Tensor | None, k_new: Tensor | None, v_new: Tensor | None,
) -> Variant:  # fmt: skip
    """The variant for these arguments. Nothing that data decides, and no arithmetic that depends on the batch."""
    b, h_q, s, d = q.shape
    kv_heads = k_cache.shape[1]
    group = h_q // kv_heads
    return Variant(
        bf16=q.dtype == torch.bfloat16,
        head_dim=d,
        group=group,
        single_token=s == 1,
        row_tile=8 if s * group <= 8 or d > 128 else 16,
        # Several tokens: merging more rows takes longer, so more warps share it and there are fewer splits (q_len 4, 4096 keys:
        # 10.7 against 12.0 us). One token is better off with less to start and to merge (400 keys: 4.36 against 4.69).
        warps=4 if s == 1 else 8,
        split_cap=split_cap(kv_heads) if s == 1 else split_cap(kv_heads) // 2,
        wide=_aligned(q, k_cache, v_cache, k_new, v_new),
        causal=causal,
        window=window_left >= 0,
        softcap=softcap > 0.0,
        sink=attn_sink is not None,
        append=k_new is not None,
        device_length=not isinstance(kv_len, int),
        min_blocks=0,
        stages=2 if b * kv_heads < FEW and d <= 128 else 1,
        chunked=False,
        ctas=TARGET_CTAS,
    )


def _common_variants(arch: str) -> tuple[Variant, ...]:
    """bf16, D 128, 4 query heads a KV head, 8 KV heads, one token, int and device lengths."""
    return tuple(
        Variant(True, 128, 4, True, 8, 4, 8, True, True, False, False, False, False, dev, 0, stages, False, TARGET_CTAS)
        for dev in (False, True)
        for stages in (2, 1)
    )


@kernel_builder("active_attention_decode", archs=(ARCH,), variants=_common_variants)
def decode_kernel(variant: Variant, arch: str) -> tuple[Any, tuple[Any, ...]]:
    """The kernel of one variant and the arguments of cute.compile."""
    import cutlass
    import cutlass.cute as cute
    from cutlass import Float32, Int32

    from cute_kernels.kernels.sm90.decode_kernel import DecodeKernel

    dtype = cutlass.BFloat16 if variant.bf16 else cutlass.Float16

    def rows() -> Any:
        """[., ., ., D]; that rows start at multiples of 16 bytes is checked by the generated host code, cheaper than in Python."""
        shape = tuple(cute.sym_int() for _ in range(4))
        stride = tuple(cute.sym_int64(divisibility=8 if variant.wide else 1) for _ in range(3))
        return cute.runtime.make_fake_tensor(dtype, shape, (*stride, 1), assumed_align=16 if variant.wide else 2)

    def flat(element: Any) -> Any:
        return cute.runtime.make_fake_tensor(element, (cute.sym_int64(),), (1,), assumed_align=element.width // 8)

    lse = cute.runtime.make_fake_tensor(
        Float32, tuple(cute.sym_int() for _ in range(3)), tuple(cute.sym_int64() for _ in range(3)), assumed_align=4
    )
    tensor = [rows() for _ in range(6)]
    options = variant._asdict()
    del options["ctas"]
    return DecodeKernel(**options), (
        *tensor[:4], lse, flat(Int32) if variant.device_length else None, Int32(1),
        flat(Float32), flat(Int32), flat(Float32) if variant.sink else None,
        tensor[4] if variant.append else None, tensor[5] if variant.append else None,
        Float32(1.0), Float32(1.0), Int32(0), Int32(1), Int32(1), Int32(1), Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )  # fmt: skip


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
    _, kv_heads, capacity, _ = k_cache.shape
    if capacity == 0:
        out.zero_()
        lse.fill_(-math.inf)
        return
    if s > 1 and variant is None and k_new is None and prefill.suits(s, h_q, kv_heads) and prefill.aligned(q, k_cache, v_cache):
        prefill.launch(q, k_cache, v_cache, kv_len, sm_scale, causal, window_left, softcap, attn_sink, out, lse)
        return
    # What follows is most of the host time of a call: one small tuple finds everything that lengths do not change.
    device_length = not isinstance(kv_len, int)
    device = q.device
    # On a GPU the device decides the target; on a CPU the emulator does, per call.
    target = None if device.type == "cuda" else current_target(device)
    key = (
        device, q.dtype, h_q, s, d, kv_heads, b * kv_heads < FEW, causal, window_left >= 0, softcap > 0.0, attn_sink is None,
        k_new is None, device_length, variant, target and target.key,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        chosen = variant or choose(q, k_cache, v_cache, kv_len, causal, window_left, softcap, attn_sink, k_new, v_new)
        plan = _plans[key] = _Plan(chosen, s, target or current_target(device))
    if device_length:
        lengths, length, slots = kv_len, 0, split_bound(capacity, plan.tile, plan.cap)
    else:
        lengths, length = None, kv_len
        if plan.row_tiles == 1:
            slots = split_count(min(kv_len, window_left + s) if window_left >= 0 else kv_len, plan.tile, plan.cap)
        else:
            slots = split_bound(kv_len, plan.tile, plan.cap)
    pairs = b * kv_heads
    allowed = plan.variant.ctas // (pairs * plan.row_tiles) or 1
    if slots <= allowed:
        run, chunks, per_chunk = plan.wide, slots, 1
    else:
        run, chunks, per_chunk = plan.chunked(), allowed, 0
        if not device_length and plan.row_tiles == 1:
            per_chunk = -(-slots // allowed)
            chunks = -(-slots // per_chunk)
    records = pairs * plan.rows
    ws = workspace(device, records * slots * (d + 4) if slots > 1 else 0, records)
    if softcap > 0.0:
        scale, cap_log2 = sm_scale / softcap, softcap * LOG2E
    else:
        scale, cap_log2 = sm_scale * LOG2E, 0.0
    arguments = (
        q, k_cache, v_cache, out, lse, lengths, length, ws.partials, ws.counters, attn_sink, k_new, v_new,
        scale, cap_log2, window_left, slots, chunks, per_chunk, plan.row_tiles,
    )  # fmt: skip
    try:
        run(*arguments)
    except ValueError:
        # The host code found a row that does not start at a multiple of 16 bytes (nothing was launched).
        if _aligned(q, k_cache, v_cache, k_new, v_new):
            raise
        plan.narrow(run is not plan.wide)(*arguments)


class _Plan:
    """A variant's compiled functions and numbers."""

    def __init__(self, variant: Variant, q_len: int, target: Any) -> None:
        self.variant, self.target = variant, target
        self.tile, self.cap = 16 * variant.warps, variant.split_cap
        self.row_tiles = -(-q_len * variant.group // variant.row_tile)
        self.rows = self.row_tiles * variant.row_tile  # packed rows of a KV head, with padding
        self.wide = decode_kernel(variant._replace(wide=True, chunked=False), target)
        self._chunked: Any = None

    def chunked(self) -> Any:
        if self._chunked is None:
            self._chunked = decode_kernel(self.variant._replace(wide=True, chunked=True), self.target)
        return self._chunked

    def narrow(self, chunked: bool) -> Any:
        return decode_kernel(self.variant._replace(wide=False, chunked=chunked), self.target)


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
    # Both twice as fast on the host as new_empty (and a transpose).
    out = torch.empty_strided((b, h_q, s, d), (s * h_q * d, d, h_q * d, 1), dtype=q.dtype, device=q.device)
    lse = torch.empty((b, h_q, s), dtype=torch.float32, device=q.device)
    scale = d**-0.5 if sm_scale is None else sm_scale
    launch(q, k_cache, v_cache, kv_len, scale, causal, window_left, softcap, attn_sink, k_new, v_new, out, lse, variant)
    return out, lse
