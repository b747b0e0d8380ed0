"""tcgen05.mma: which shared and tensor memory one instruction touches, and its arithmetic.

Layouts of D in tensor memory (PTX ISA 9.7.16.10.5; CUTLASS's TMEM fragments), as *blocks*: a set of lanes that holds a
range of D's columns.

* M=128, cta_group::1 (layout D) and M=256, cta_group::2 (A): lane m of each CTA, all N columns.
* M=64 (F): lane 32*(m/16) + m%16, plus 16 if the address says so; half of the lanes stay untouched.
* M=128, cta_group::2 (B): each CTA has 64 rows; lanes 0-63 hold N's first half, lanes 64-127 its second half.
* .ws M=64 (E): lanes 0-63 and 64-127 hold the halves of N; .ws M=32 (G): four groups of 32 lanes hold its quarters.

With A in tensor memory, each lane of D uses the A row in the same lane. Where lanes repeat the rows (B, E, G) the two
copies may differ, which kernels use as two GEMMs in one instruction.

cta_group::2 splits the operands: each CTA's shared memory holds its half of A's rows and its half of B's rows (N), at
the same offsets; both tensor cores read both halves of B.

Arithmetic: products of decoded operands are exact in float32 for every supported kind; they are summed over K in
float32 by the host's BLAS and then added to D with one more rounding (the order inside the tensor core is not
documented). Integer kinds are exact: |sum| over K=32 is below 2^24. tf32 ignores the low 13 bits of its operands. An
f16 D is rounded to nearest, and the upper half of its 32-bit cell becomes 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np

from .descriptors import (
    ELEMENT_BYTES,
    InstrDesc,
    decode_idesc,
    decode_smem_desc,
    descriptor_lints,
    encode_idesc,
    encode_smem_desc,
    explain,
    operand_granules,
)
from .errors import IllegalOperand
from .formats import decode, decode_table, encode
from .tma import merge_ranges

__all__ = ["MmaPlan", "plan_mma", "decode_idesc", "decode_smem_desc", "encode_idesc", "encode_smem_desc", "explain"]

_GRANULE = np.dtype("V16")
TMEM_LANES, TMEM_COLUMNS = 128, 512

# FLOP per clock with 16-bit operands (narrower types keep the same time per instruction, as K grows); B200 figures.
_RATE = {(1, 64): 4096, (1, 128): 8192, (2, 128): 16384, (2, 256): 16384}
_WS_RATE = 8192
_SMEM_BYTES_PER_CLOCK = 128


def decode_elements(fmt: str, granules: np.ndarray) -> np.ndarray:
    """float32 [rows, 16 * chunks / element size] from opaque 16-byte granules [rows, chunks] (C-contiguous)."""
    if fmt == "bf16":
        raw = granules.view(np.uint16)
        out = np.zeros(raw.shape, np.uint32)
        out.view(np.uint16)[:, 1::2] = raw
        return out.view(np.float32)
    if fmt == "f16":
        return granules.view(np.float16).astype(np.float32)
    if fmt == "tf32":
        return (granules.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    if fmt == "s8":
        return granules.view(np.int8).astype(np.float32)
    if fmt == "u8":
        return granules.view(np.uint8).astype(np.float32)
    return decode_table(fmt)[granules.view(np.uint8)]


class Operand:
    """A or B in shared memory: gathers and decodes its tile as float32 [extent, k]."""

    __slots__ = ("fmt", "granules", "swizzle", "transposed", "extent", "negate")

    def __init__(self, fmt: str, granules: np.ndarray, swizzle: str, major: str, extent: int, negate: bool = False) -> None:
        self.fmt = fmt
        self.swizzle = swizzle
        self.granules = granules
        self.transposed = major == "MN"
        self.extent = extent
        self.negate = negate

    def read(self, smem: np.ndarray) -> np.ndarray:
        """float32 [extent, k] from a CTA's uint8 shared memory."""
        out = decode_elements(self.fmt, smem.view(_GRANULE)[self.granules])
        if self.transposed:
            out = out[:, : self.extent].T
        return -out if self.negate else out


class MmaPlan:
    """One tcgen05.mma.

    Attributes:
        idesc: the decoded instruction descriptor.
        cta_group: 1 or 2; index 0 below is the even CTA of a pair (or the only one), 1 the odd one.
        layout: the ISA's letter of D's layout, "A".."G".
        smem_reads: [(peer, starts int32[n], lengths int32[n])], merged byte ranges that A and B occupy.
        smem_granules: [(peer, int64[m])], the same as sorted 16-byte granule indices.
        swizzled: [(swizzle of the descriptor, 16-byte granule indices)] of each operand in shared memory, the same for each peer.
        tmem_reads: [(peer, lane0, lanes, column0, columns)] of A in tensor memory (D is read too when accumulating).
        tmem_writes: the same of D, without lanes that disable-output-lane excludes; with .ashift, of A too.
        lints: remarks on descriptors that are legal to encode but name no canonical layout, empty as a rule.
        cycles: issue interval by the published B200 table's rule, one CTA's or pair's tensor-core clocks.
        flops: 2*M*N*K.
    """

    def __init__(self, idesc: InstrDesc, cta_group: int, layout: str, ws: bool, a: Operand | tuple[int, int],
                 b: Operand, blocks: Sequence[tuple[int, int, int, int, int]], d_lane: int, d_col: int,
                 disable_lanes: int, scale_input_d: int, operands: tuple, ashift: bool,
                 lints: tuple[str, ...]) -> None:
        self.idesc = idesc
        self.lints = lints
        self.ashift = ashift
        self.cta_group = cta_group
        self.layout = layout
        self.ws = ws
        self._a = a
        self._b = b
        # blocks: (lane0, lanes, first A row, first N, N count), the same for each peer
        self._blocks = tuple(blocks)
        self._d_lane, self._d_col = d_lane, d_col
        self._disable = disable_lanes
        self._scale_d = np.float32(2.0 ** -scale_input_d)
        self._operands = operands
        self.peers = tuple(range(cta_group))
        self.flops = 2 * idesc.m * idesc.n * idesc.k
        rate = _WS_RATE if ws else _RATE[cta_group, idesc.m]
        operand_bytes = 32 * idesc.n // cta_group + (32 * idesc.m // cta_group if isinstance(a, Operand) else 0)
        self.cycles = max(2 * idesc.m * idesc.n * 16 / rate, operand_bytes / _SMEM_BYTES_PER_CLOCK)

    def explain(self) -> str:
        """Readable dump of shape, layout and descriptors."""
        kind, idesc, a, b, a_is_tmem = self._operands
        text = explain(kind, idesc, a, b, a_is_tmem=a_is_tmem)
        return f"tcgen05.mma{'.ws' if self.ws else ''} cta_group::{self.cta_group} layout {self.layout}\n{text}"

    @cached_property
    def smem_granules(self) -> list[tuple[int, np.ndarray]]:
        parts = [self._b.granules.ravel()]
        if isinstance(self._a, Operand):
            parts.append(self._a.granules.ravel())
        both = np.unique(np.concatenate(parts))
        return [(peer, both) for peer in self.peers]

    @cached_property
    def swizzled(self) -> list[tuple[str, np.ndarray]]:
        return [(o.swizzle, o.granules.ravel()) for o in (self._a, self._b) if isinstance(o, Operand)]

    @cached_property
    def smem_reads(self) -> list[tuple[int, np.ndarray, np.ndarray]]:
        return [(peer, *merge_ranges(granules)) for peer, granules in self.smem_granules]

    @cached_property
    def tmem_reads(self) -> list[tuple[int, int, int, int, int]]:
        if isinstance(self._a, Operand):
            return []
        columns = 8  # 32 bytes of K
        return [(peer, lane, lanes, self._a[1], columns) for peer in self.peers for lane, lanes in self._a_lanes()]

    def _a_lanes(self) -> list[tuple[int, int]]:
        if self.layout == "F":
            return [(lane0, lanes) for lane0, lanes, _, _, _ in self._blocks]
        return [(0, 128)]

    @cached_property
    def tmem_writes(self) -> list[tuple[int, int, int, int, int]]:
        out = []
        for peer in self.peers:
            mask = (self._disable >> (128 * peer)) & ((1 << 128) - 1)
            for lane0, lanes, _, _, count in self._blocks:
                start = None
                for lane in range(lane0, lane0 + lanes + 1):
                    live = lane < lane0 + lanes and not (mask >> lane) & 1
                    if live and start is None:
                        start = lane
                    elif not live and start is not None:
                        out.append((peer, start, lane - start, self._d_col, count))
                        start = None
            if self.ashift:
                out += [(peer, 32 * quarter, 31, self._a[1], 8) for quarter in range(4)]
        return out

    def _a_from_tmem(self, tmem: np.ndarray) -> np.ndarray:
        """float32 [128, k]: the A row that lies in each lane."""
        column = self._a[1]
        words = np.ascontiguousarray(tmem[:, column : column + 8])
        a = decode_elements(self.idesc.atype, words)
        return -a if self.idesc.negate_a else a

    def apply(self, smems: Sequence[np.ndarray], tmems: Sequence[np.ndarray], accumulate: bool) -> None:
        """Execute.

        Args:
            smems: uint8 shared memory of the CTA, or of the pair as (even, odd).
            tmems: uint32[128, 512] tensor memory, likewise.
            accumulate: enable-input-d; False computes D = A*B.
        """
        self._multiply(smems, tmems, accumulate)
        if self.ashift:
            for peer in self.peers:
                a = tmems[peer].reshape(4, 32, TMEM_COLUMNS)[:, :, self._a[1] : self._a[1] + 8]
                a[:, :31] = a[:, 1:].copy()

    def _multiply(self, smems: Sequence[np.ndarray], tmems: Sequence[np.ndarray], accumulate: bool) -> None:
        blocks = self._blocks
        b = [self._b.read(smems[peer]) for peer in self.peers]
        from_smem = isinstance(self._a, Operand)
        if self.cta_group == 2 and len(blocks) == 1:
            b = [np.concatenate(b)]
        for peer in self.peers:
            a = self._a.read(smems[peer]) if from_smem else self._a_from_tmem(tmems[peer])
            mask = (self._disable >> (128 * peer)) & ((1 << 128) - 1) if self._disable else 0
            if self.layout == "F":
                if not from_smem:
                    a = a.reshape(4, 32, -1)[:, self._d_lane : self._d_lane + 16].reshape(64, -1)
                product = np.matmul(a, b[0].T).reshape(4, 16, -1)
                cells = tmems[peer].reshape(4, 32, TMEM_COLUMNS)[
                    :, self._d_lane : self._d_lane + 16, self._d_col : self._d_col + self.idesc.n]
                self._merge(cells, product, accumulate, self._live_lanes(mask, None))
                continue
            for i, (lane0, lanes, row0, n0, count) in enumerate(blocks):
                rows = a[lane0 : lane0 + lanes] if not from_smem else a[row0 : row0 + lanes]
                if self.cta_group == 2 and len(blocks) == 2:
                    part = b[i]
                else:
                    part = b[0][n0 : n0 + count]
                cells = tmems[peer][lane0 : lane0 + lanes, self._d_col : self._d_col + count]
                if not mask and not accumulate and self.idesc.dtype == "f32":
                    np.matmul(rows, part.T, out=cells.view(np.float32))
                    continue
                product = np.matmul(rows, part.T)
                live = self._live_lanes(mask, (lane0, lanes)) if mask else None
                self._merge(cells, product, accumulate, live)

    def _live_lanes(self, mask: int, span: tuple[int, int] | None) -> np.ndarray | None:
        """bool per lane of the cells array, False where disabled; None when nothing is disabled."""
        if not mask:
            return None
        live = np.array([not (mask >> lane) & 1 for lane in range(TMEM_LANES)])
        if span is None:
            return live.reshape(4, 32)[:, self._d_lane : self._d_lane + 16]
        return live[span[0] : span[0] + span[1]]

    def _merge(self, cells: np.ndarray, product: np.ndarray, accumulate: bool, live: np.ndarray | None) -> None:
        """cells (a view of tensor memory) (+)= product (float32), where `live`."""
        dtype = self.idesc.dtype
        if dtype == "f32":
            d = cells.view(np.float32)
            if accumulate:
                if self._scale_d != 1:
                    product += d * self._scale_d
                elif live is None:
                    d += product
                    return
                else:
                    product += d
            new = product
            target = d
        elif dtype == "s32":
            total = product.astype(np.int64)
            if accumulate:
                total += cells.view(np.int32)
            if self.idesc.saturate:
                total = np.clip(total, -(2**31), 2**31 - 1)
            new = (total & 0xFFFFFFFF).astype(np.uint32)
            target = cells
        else:
            if accumulate:
                product += decode("f16", (cells & np.uint32(0xFFFF)).astype(np.uint16)) * self._scale_d
            new = encode("f16", product).astype(np.uint32)
            target = cells
        if live is None:
            target[...] = new
        else:
            target[live] = new[live]


def _check_shape(d: InstrDesc, cta_group: int, ws: bool) -> None:
    """Table 39 (shapes), Tables 52 and 54 (transposes)."""
    if ws:
        if cta_group != 1:
            raise IllegalOperand("cta_group", cta_group, ".ws exists for cta_group::1 only")
        if d.m not in (32, 64, 128):
            raise IllegalOperand("idesc.M", d.m, ".ws has M = 32, 64, 128 (Table 39)")
        if d.n not in (64, 128, 256):
            raise IllegalOperand("idesc.N", d.n, ".ws has N = 64, 128, 256 (Table 39)")
    else:
        shapes = {1: (64, 128), 2: (128, 256)}[cta_group]
        if d.m not in shapes:
            raise IllegalOperand("idesc.M", d.m, f"cta_group::{cta_group} has M = {shapes[0]}, {shapes[1]} (Table 39)")
        if d.kind == "i8":
            legal = (d.n in (8, 24) or d.n % 16 == 0) if cta_group == 1 else d.n % 32 == 0
            step = "8, 16, 24, 32 and steps of 16" if cta_group == 1 else "multiples of 32"
        else:
            unit = 8 if (cta_group, d.m) == (1, 64) else 16
            legal = d.n % unit == 0
            step = f"multiples of {unit}"
        if not legal or not 8 * cta_group <= d.n <= 256:
            raise IllegalOperand("idesc.N", d.n, f"cta_group::{cta_group} M = {d.m} kind::{d.kind} has N in {step} up to 256 "
                                                 "(Table 39)")
    if d.b_major == "MN" and ELEMENT_BYTES[d.kind] == 1 and d.n % (16 * cta_group):
        raise IllegalOperand("idesc.N", d.n, f"an 8-bit MN-major B needs a multiple of {16 * cta_group} (Table 52)")


def _check_swizzle(name: str, swizzle: str, major: str, element_bytes: int) -> None:
    atom32 = swizzle == "128B_32B-atom"
    if major == "K" and atom32:
        raise IllegalOperand(f"{name} swizzle", swizzle, "32-byte atoms exist for MN-major tiles only (Table 55)")
    if major == "MN" and (element_bytes == 4) != atom32:
        rule = "a 32-bit MN-major tile needs 128B_32B-atom" if element_bytes == 4 else \
            "128B_32B-atom MN-major is for 32-bit elements"
        raise IllegalOperand(f"{name} swizzle", swizzle, f"{rule} (Table 54)")


def plan_mma(
    kind: str, cta_group: int, idesc: int, a: int, b_desc: int, d_tmem: int, *, ws: bool = False,
    disable_lanes: int = 0, scale_input_d: int = 0, a_is_tmem: bool | None = None, ashift: bool = False,
) -> MmaPlan:
    """Plan of one tcgen05.mma or tcgen05.mma.ws. Cached: equal operands give the same object.

    Args:
        kind: "f16", "tf32", "f8f6f4" or "i8".
        cta_group: 1 or 2.
        idesc: 32-bit instruction descriptor.
        a: 64-bit matrix descriptor, or tensor-memory address of A.
        b_desc: 64-bit matrix descriptor.
        d_tmem: tensor-memory address of D, lane << 16 | column.
        ws: tcgen05.mma.ws.
        disable_lanes: disable-output-lane as one integer, 128 bits per CTA, the even CTA's in the low bits.
        scale_input_d: D is scaled by 2**-this before accumulation (f16 and tf32 kinds, 0..15).
        a_is_tmem: whether `a` is a tensor-memory address; None decides by a < 2**32 (a legal descriptor is larger).
        ashift: .ashift. The product uses A as it is; then A's rows in tensor memory move down by one within each
            quarter of 32 lanes, row r taking row r+1 and the last row staying (an NVIDIA example states this as
            observed on a B200; the ISA text is silent on when).

    Raises:
        IllegalOperand: shape, type, layout, alignment or range that the ISA forbids or this emulator lacks.
    """
    if a_is_tmem is None:
        a_is_tmem = a < 1 << 32
    return _plan(kind, int(cta_group), int(idesc), int(a), int(b_desc), int(d_tmem), bool(ws), int(disable_lanes),
                 int(scale_input_d), bool(a_is_tmem), bool(ashift))


@lru_cache(maxsize=8192)
def _plan(kind: str, cta_group: int, idesc: int, a: int, b_desc: int, d_tmem: int, ws: bool, disable_lanes: int,
          scale_input_d: int, a_is_tmem: bool, ashift: bool) -> MmaPlan:
    d = decode_idesc(kind, idesc)
    if cta_group not in (1, 2):
        raise IllegalOperand("cta_group", cta_group, "must be 1 or 2")
    _check_shape(d, cta_group, ws)
    if not 0 <= scale_input_d <= 15:
        raise IllegalOperand("scale-input-d", scale_input_d, "must be 0..15")
    if scale_input_d and d.kind not in ("f16", "tf32"):
        raise IllegalOperand("scale-input-d", scale_input_d, "is for kind::f16 and kind::tf32 only")
    if disable_lanes and ws:
        raise IllegalOperand("disable-output-lane", disable_lanes, ".ws has no such operand")
    if ashift and (ws or not a_is_tmem or d.m == 64):
        raise IllegalOperand(".ashift", True, "needs A in tensor memory and M = 128 or 256 (ISA 9.7.16.10.9.1)")
    size = ELEMENT_BYTES[d.kind]

    # Layout of D: blocks (lane0, lanes, first A row, first N, N count).
    lane, column = (d_tmem >> 16) & 0xFFFF, d_tmem & 0xFFFF
    if ws and d.m < 128:
        parts = 128 // d.m
        layout = "E" if d.m == 64 else "G"
        blocks = [(i * d.m, d.m, 0, i * (d.n // parts), d.n // parts) for i in range(parts)]
    elif cta_group == 2 and d.m == 128:
        layout, blocks = "B", [(0, 64, 0, 0, d.n // 2), (64, 64, 0, d.n // 2, d.n // 2)]
    elif d.m == 64:
        layout, blocks = "F", [(32 * i + lane, 16, 16 * i, 0, d.n) for i in range(4)]
    else:
        layout, blocks = ("A" if cta_group == 2 else "D"), [(0, 128, 0, 0, d.n)]
    if lane not in ((0, 16) if layout == "F" else (0,)):
        raise IllegalOperand("d-tmem lane", lane, f"layout {layout} must start at lane "
                                                  f"{'0 or 16' if layout == 'F' else '0'} (ISA 9.7.16.10.5)")
    columns = max(count for *_, count in blocks)
    if column + columns > TMEM_COLUMNS:
        raise IllegalOperand("d-tmem column", column, f"{columns} columns pass the last column {TMEM_COLUMNS - 1}")

    operand_a: Operand | tuple[int, int]
    lints: tuple[str, ...] = ()
    if a_is_tmem:
        if d.a_major == "MN":
            raise IllegalOperand("idesc.transpose A", 1, "A in tensor memory cannot be transposed")
        a_lane, a_column = (a >> 16) & 0xFFFF, a & 0xFFFF
        if a_lane != lane:
            raise IllegalOperand("a-tmem lane", a_lane, f"must equal D's lane {lane} (ISA 9.7.16.10.5)")
        if a_column + 8 > TMEM_COLUMNS:
            raise IllegalOperand("a-tmem column", a_column, f"8 columns pass the last column {TMEM_COLUMNS - 1}")
        operand_a = (a_lane, a_column)
    else:
        desc = decode_smem_desc(a)
        _check_swizzle("a-desc", desc.swizzle, d.a_major, size)
        rows = d.m // cta_group
        granules = operand_granules(desc, d.a_major, rows, d.k, size)
        operand_a = Operand(d.atype, granules, desc.swizzle, d.a_major, rows, d.negate_a)
        lints += tuple(f"A: {text}" for text in descriptor_lints(desc, d.a_major, rows, d.k, size))
    desc = decode_smem_desc(b_desc)
    _check_swizzle("b-desc", desc.swizzle, d.b_major, size)
    rows = d.n // cta_group
    granules = operand_granules(desc, d.b_major, rows, d.k, size)
    operand_b = Operand(d.btype, granules, desc.swizzle, d.b_major, rows, d.negate_b)
    lints += tuple(f"B: {text}" for text in descriptor_lints(desc, d.b_major, rows, d.k, size))
    return MmaPlan(d, cta_group, layout, ws, operand_a, operand_b, blocks, lane, column, disable_lanes, scale_input_d,
                   (kind, idesc, a, b_desc, a_is_tmem), ashift, lints)
