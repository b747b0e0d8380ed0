"""Active-length attention for few query rows (decode) on Hopper: the host side.

`can_implement` says whether a case runs here, `prepare` makes a function for a layout of arguments, `launch` runs one call. The
kernel itself, and how it works, is in decode_kernel.py; many query rows go to prefill.py's. One launch per call; nothing is
allocated but outputs and, once per stream, the workspace for partial results (see cute_kernels.kernels.workspace).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.jit import current_target, kernel_builder
from cute_kernels.kernels.attention_arguments import aligned, output_layouts, unsupported
from cute_kernels.kernels.launching import layout_block, raw_stream, ready, stream_pointer
from cute_kernels.kernels.scales import LOG2E
from cute_kernels.kernels.sm90 import prefill
from cute_kernels.kernels.splits import split_bound, split_cap, split_count
from cute_kernels.kernels.workspace import stream_workspace, workspace

ARCH = "sm_90a"
# Below so many (batch row, KV head) pairs two ring slots a warp are faster, from there on one, which lets a fourth CTA run on each
# SM (1024 keys, batch 1: 5.13 against 5.60 us; batch 8: 13.8 against 12.8). The arithmetic is the same, instruction by instruction.
FEW = 64
# More CTAs than this in a launch are replaced by ones that take several splits in a row: CTAs run in waves, and between two waves
# the memory idles (batch 32, 4096 keys: 4096 CTAs 136.3 us, 2048 CTAs 130.7). The bits stay the same.
TARGET_CTAS = 264
# Beyond so many keys (or rows of a cache, for device lengths) one CTA an SM has all there is to do, and three ring slots a warp.
LONG = 8192
# Splits of one row tile that merge through the shared memory of a cluster, where the whole launch is so few clusters: q_len 2 over
# 4096 keys 8.9 against 9.2 us, q_len 4 9.9 against 10.5; 400 keys 4.22 against 4.41. With 64 clusters (batch 8) it is 1.4 us
# slower, and with more splits than a cluster has CTAs, 0.2 to 6 us.
CLUSTER, MOST_CLUSTERS = 8, 8


class Variant(NamedTuple):
    """What is compiled separately; field names as in decode_kernel.DecodeKernel."""

    bf16: bool
    head_dim: int
    group: int
    single_token: bool
    row_tile: int
    one_tile: bool
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
    cluster: int
    ctas: int  # host only: see `TARGET_CTAS`


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
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache), ("k_new", k_new), ("v_new", v_new)):
        if x is not None and x.stride(2) >= 1 << 30:
            return f"the row stride of {name} must be below 2**30 elements, not {x.stride(2)}"
    return None


def kernel_name(*, q: Tensor, k_cache: Tensor, **_: Any) -> str:
    """Which kernel `prepare` takes for these arguments."""
    return "prefill" if q.numel() and prefill.suits(q.shape[2], q.shape[1], k_cache.shape[1]) else "decode"


def choose(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_len: int | Tensor, causal: bool, window_left: int, softcap: float,
    attn_sink: Tensor | None, k_new: Tensor | None, v_new: Tensor | None,
) -> Variant:  # fmt: skip
    """The variant for these arguments. Nothing that data decides, and no arithmetic that depends on the batch."""
    b, h_q, s, d = q.shape
    kv_heads = k_cache.shape[1]
    group = h_q // kv_heads
    row_tile = 8 if s * group <= 8 or d > 128 else 16
    return Variant(
        bf16=q.dtype == torch.bfloat16,
        head_dim=d,
        group=group,
        single_token=s == 1,
        row_tile=row_tile,
        one_tile=s * group <= row_tile,
        # Several tokens: merging more rows takes longer, so more warps share it and there are fewer splits (q_len 4, 4096 keys:
        # 10.7 against 12.0 us). One token is better off with less to start and to merge (400 keys: 4.36 against 4.69).
        warps=4 if s == 1 else 8,
        split_cap=split_cap(kv_heads) if s == 1 else split_cap(kv_heads) // 2,
        wide=aligned(q, k_cache, v_cache, k_new, v_new),
        causal=causal,
        window=window_left >= 0,
        softcap=softcap > 0.0,
        sink=attn_sink is not None,
        append=k_new is not None,
        device_length=not isinstance(kv_len, int),
        min_blocks=0,
        stages=2 if b * kv_heads < FEW and d <= 128 else 1,
        chunked=False,
        cluster=CLUSTER,
        ctas=TARGET_CTAS if s == 1 else TARGET_CTAS // 2,  # of 8 warps one fits an SM (batch 8, q_len 4: 14.4 against 17.3 us)
    )


def _common_variants(arch: str) -> tuple[Variant, ...]:
    """bf16, D 128, 4 query heads a KV head, 8 KV heads, one token, int and device lengths."""
    plain = Variant(True, 128, 4, True, 8, True, 4, 8, True, True, False, False, False, False, False, 0, 2, False, 0, TARGET_CTAS)
    few, many = [{}, {"cluster": CLUSTER}, {"stages": 3}], [{"stages": 1}, {"stages": 1, "chunked": True}]
    changes = few + many + [{"stages": 3, "chunked": True}]
    return tuple(plain._replace(device_length=dev, **change) for dev in (False, True) for change in changes)


@kernel_builder("active_attention_decode", archs=(ARCH,), variants=_common_variants)
def decode_kernel(variant: Variant, arch: str) -> tuple[Any, tuple[Any, ...]]:
    """The kernel of one variant and the arguments of cute.compile."""
    import cutlass
    import cutlass.cute as cute
    from cutlass import Float32, Int32

    from cute_kernels.kernels.by_address import by_address
    from cute_kernels.kernels.sm90.decode_kernel import DecodeKernel

    dtype = cutlass.BFloat16 if variant.bf16 else cutlass.Float16

    def rows() -> Any:
        """[., ., ., D]"""
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
    return by_address(DecodeKernel(**options), (
        *tensor[:4], lse, flat(Int32) if variant.device_length else None, Int32(1),
        flat(Float32), flat(Int32), flat(Float32) if variant.sink else None,
        tensor[4] if variant.append else None, tensor[5] if variant.append else None,
        Float32(1.0), Float32(1.0), Int32(0), Int32(1), Int32(1), Int32(1), Int32(1),
        cute.runtime.make_fake_stream(),
    ))  # fmt: skip


class _Plan:
    """Calls of one layout: the compiled functions, and how each length is launched."""

    def __init__(self, variant: Variant, arguments: dict[str, Any], outputs: tuple, target: Any) -> None:
        q, k_cache = arguments["q"], arguments["k_cache"]
        b, _, q_len, d = q.shape
        self.variant, self.target, self.device = variant, target, q.device
        self.tile, self.cap, self.record = 16 * variant.warps, variant.split_cap, d + 4
        self.row_tiles = -(-q_len * variant.group // variant.row_tile)
        self.pairs = b * k_cache.shape[1]
        self.records = self.pairs * self.row_tiles * variant.row_tile  # packed rows, with padding
        self.seen = arguments["window_left"] + q_len if variant.window else None  # keys that a row tile sees, at most
        rows = [arguments[name] for name in ("q", "k_cache", "v_cache", "k_new", "v_new")]
        self.wide = all(
            stride % 8 == 0 for x in rows if x is not None for size, stride in zip(x.shape[:3], x.stride()) if size > 1
        )  # and then every row starts at a multiple of 16 bytes if the first does
        lengths, flat = arguments["kv_len"] if variant.device_length else None, ((1 << 31,), (1,))
        self.block = layout_block(*rows[:3], *outputs, lengths, flat, flat, arguments["attn_sink"], *rows[3:])
        self.layouts, self.raw, self.index = ctypes.addressof(self.block), raw_stream(target), q.device.index
        self.note = None if target.backend is None else target.backend.note_memory
        softcap, sm_scale = arguments["softcap"], arguments["sm_scale"]
        scales = (sm_scale / softcap, softcap * LOG2E) if variant.softcap else (sm_scale * LOG2E, 0.0)
        self.numbers = *scales, arguments["window_left"]
        self.shapes: dict[int, tuple] = {}  # length -> what launching it takes
        self.shape = self.shape_of(k_cache.shape[2]) if variant.device_length else None

    def shape_of(self, length: int) -> tuple:
        """(function, its variant, floats of workspace, last arguments) for an int length or all device lengths to a capacity."""
        variant = self.variant
        device_length = variant.device_length
        if device_length or self.row_tiles > 1:
            slots = split_bound(length, self.tile, self.cap)
        else:
            slots = split_count(length if self.seen is None else min(length, self.seen), self.tile, self.cap)
        allowed = variant.ctas // (self.pairs * self.row_tiles) or 1
        chunks, per_chunk = slots, 1
        chunked = slots > allowed
        if chunked:
            chunks, per_chunk = allowed, 0
            if not device_length and self.row_tiles == 1:
                per_chunk = -(-slots // allowed)
                chunks = -(-slots // per_chunk)
        few = 1 < slots <= variant.cluster and self.pairs * self.row_tiles <= MOST_CLUSTERS
        cluster = variant.cluster if few and not chunked else 0
        stages = variant.stages
        if chunked and variant.warps == 4 and variant.head_dim <= 128 and self.pairs * self.row_tiles > variant.ctas:
            stages = 3  # leaves room for two CTAs an SM, so that no third delays a later one (batch 64: 243 us, 257 with one)
        if not chunked and length > LONG and variant.warps == 4 and variant.head_dim <= 128:
            stages = 3
        if cluster:
            chunks = -(-slots // cluster) * cluster
        kind = variant._replace(wide=self.wide, chunked=chunked, cluster=cluster, stages=stages)
        run = decode_kernel(kind, self.target)
        floats = self.records * slots * self.record if slots > 1 else 0
        found = run, kind, floats, (*self.numbers, slots, chunks, per_chunk, self.row_tiles)
        if len(self.shapes) < 1 << 16:
            self.shapes[length] = found
        return found

    def run(self, q, k_cache, v_cache, kv_len, attn_sink, k_new, v_new, out, lse) -> None:
        shape = self.shape
        if shape is None:
            length = (kv_len,)
            shape = self.shapes.get(kv_len) or self.shape_of(kv_len)
        else:
            length = kv_len.data_ptr(), 0
        run, kind, floats, last = shape
        q, k_cache, v_cache, out = q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr()
        starts, optional = q | k_cache | v_cache | out, ()
        if k_new is not None:
            optional = k_new.data_ptr(), v_new.data_ptr()
            starts |= optional[0] | optional[1]
        if attn_sink is not None:
            optional = attn_sink.data_ptr(), *optional
        if starts & 15 and kind.wide:
            run = decode_kernel(kind._replace(wide=False), self.target)
        stream = self.raw(self.index)
        room = (0, 0)  # one split needs none
        if floats:
            if self.note is None:
                ws = stream_workspace(self.index, stream, floats, self.records)
            else:
                ws = workspace(self.device, floats, self.records)
                self.note(ws.partials)
                self.note(ws.counters)
            room = ws.addresses
        run(
            self.layouts, q, k_cache, v_cache, out, lse.data_ptr(), *length, *room, *optional, *last,
            stream_pointer(stream),
        )  # fmt: skip


def prepare(
    *, target: Any, variant: Variant | None = None, outputs: tuple | None = None, **arguments: Any
) -> Callable[..., None]:
    """Choose and compile. Returns run(q, k_cache, v_cache, kv_len, attn_sink, k_new, v_new, out, lse), which serves every call of
    the same layouts, numbers and options, whatever its addresses and (int or device) length, on the current stream.

    Arguments as `cute_kernels.active_attention_append`, checked and complete. outputs: of out and lse, each the tensor or its
    (sizes, strides), where they are not what the operator allocates. `variant` overrides the choice (benchmarks).
    """
    q, k_cache, v_cache, kv_len = (arguments[name] for name in ("q", "k_cache", "v_cache", "kv_len"))
    if k_cache.shape[2] == 0:
        return _without_keys
    layout = ("q", "k_cache", "v_cache", "kv_len", "causal", "window_left", "softcap", "attn_sink", "k_new", "v_new")
    chosen = variant or choose(*(arguments[name] for name in layout))
    plan = ready(_Plan(chosen, arguments, outputs or output_layouts(q), target).run, q.device, target)
    if variant is None and kernel_name(q=q, k_cache=k_cache) == "prefill":
        return prefill.prepare(target=target, otherwise=plan, **arguments)
    return plan


def _without_keys(q, k_cache, v_cache, kv_len, attn_sink, k_new, v_new, out, lse) -> None:
    out.zero_()
    lse.fill_(-math.inf)


def launch(*, out: Tensor, lse: Tensor, variant: Variant | None = None, **arguments: Any) -> None:
    """One call: out [B, Hq, S, D] and lse [B, Hq, S] are written in full."""
    q = arguments["q"]
    if q.numel():
        run = prepare(target=current_target(q.device), variant=variant, outputs=(out, lse), **arguments)
        run(*(arguments[name] for name in ("q", "k_cache", "v_cache", "kv_len", "attn_sink", "k_new", "v_new")), out, lse)
