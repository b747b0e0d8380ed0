"""Tensor memory moves: tcgen05.ld / .st register maps, tcgen05.cp and tcgen05.shift.

Tensor memory is uint32[128 lanes, 512 columns] per CTA; an address is ``lane << 16 | column``. A warp may touch only
the quarter of lanes that its rank in the warpgroup selects (PTX ISA 9.7.16.8.1). Maps of the load and store shapes
(t = thread in the warp, r = register; row and column relative to the address):

=========== ============= =================================================================
shape       registers     (row, column)
=========== ============= =================================================================
32x32b      num           (t, r)
16x64b      num           (t/4 + 8*(t%2), (t/2)%2 + 2r)
16x128b     2*num         (t/4 + 8*(r%2), t%4 + 4*(r/2))
16x256b     4*num         (t/4 + 8*((r/2)%2), 2*(t%4) + r%2 + 8*(r/4))
16x32bx2    num           (t%16, r), and `imm` columns further for threads 16-31
=========== ============= =================================================================

With .pack::16b / .unpack::16b a register holds the low halves of two neighbouring columns, so the columns double.
"""

from __future__ import annotations

from functools import cached_property, lru_cache

import numpy as np

from .descriptors import decode_smem_desc, descriptor_lints, operand_granules
from .errors import IllegalOperand
from .tma import merge_ranges

LANES, COLUMNS = 128, 512
_GRANULE = np.dtype("V16")
#: shape -> (registers per unit of num, largest num)
LD_SHAPES: dict[str, tuple[int, int]] = {
    "32x32b": (1, 128), "16x64b": (1, 128), "16x128b": (2, 64), "16x256b": (4, 32), "16x32bx2": (1, 128),
}


@lru_cache(maxsize=256)
def ld_map(shape: str, num: int, pack: bool = False, imm: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Lane and column, relative to the address, of every register of every thread.

    Args:
        shape: a key of `LD_SHAPES`.
        num: the .xN repeat, a power of two.
        pack: .pack::16b or .unpack::16b; the column is then the first of the two that share the register.
        imm: 16x32bx2's immHalfSplitoff, in columns.

    Returns:
        (lane_rel, col_rel): int64[32, registers] each.

    Raises:
        IllegalOperand: a shape or num that Table 49 does not list.
    """
    if shape not in LD_SHAPES:
        raise IllegalOperand("tcgen05.ld/.st shape", shape, f"must be one of {', '.join(LD_SHAPES)}")
    per, most = LD_SHAPES[shape]
    if num < 1 or num & (num - 1) or num > most:
        raise IllegalOperand("tcgen05.ld/.st num", num, f".{shape} has .x1 to .x{most} (Table 49)")
    t = np.arange(32, dtype=np.int64)[:, None]
    r = np.arange(per * num, dtype=np.int64)[None, :]
    if shape == "32x32b":
        lane, col = t + 0 * r, r + 0 * t
    elif shape == "16x64b":
        lane, col = (t >> 2) + 8 * (t & 1) + 0 * r, ((t >> 1) & 1) + 2 * r
    elif shape == "16x128b":
        lane, col = (t >> 2) + 8 * (r & 1), (t & 3) + 4 * (r >> 1)
    elif shape == "16x256b":
        lane, col = (t >> 2) + 8 * ((r >> 1) & 1), 2 * (t & 3) + (r & 1) + 8 * (r >> 2)
    else:
        lane, col = (t & 15) + 0 * r, r + 0 * t
    if pack:
        col = col * 2
    if shape == "16x32bx2":
        col = col + imm * (t >> 4)
    for a in (lane, col):
        a.setflags(write=False)
    return lane, col


st_map = ld_map


class LdStPlan:
    """One tcgen05.ld or tcgen05.st of a warp.

    Attributes:
        shape, num, pack: the qualifiers.
        registers: 32-bit registers per thread.
        ranges: [(lane0, lanes, column0, columns)] that the access covers.
        lane_implied: the address named quarter 0 and the warp's own quarter was taken instead (see `plan_ldst`).
    """

    __slots__ = ("shape", "num", "pack", "registers", "ranges", "lane_implied", "_box", "_flat")

    def __init__(self, shape: str, num: int, pack: bool, lane: int, column: int, imm: int, implied: bool) -> None:
        self.lane_implied = implied
        rel_lane, rel_col = ld_map(shape, num, pack, imm)
        self.shape, self.num, self.pack = shape, num, pack
        self.registers = rel_lane.shape[1]
        width = 2 if pack else 1
        rows = 32 if shape == "32x32b" else 16
        if shape == "16x32bx2":
            each = self.registers * width
            pieces = [(column, each), (column + imm, each)]
            if abs(imm) < each:  # the halves overlap or touch
                pieces = [(min(column, column + imm), each + abs(imm))]
        else:
            pieces = [(column, int(rel_col.max()) + width)]
        for first, count in pieces:
            if first < 0 or first + count > COLUMNS:
                raise IllegalOperand("taddr column", column, f"columns {first}..{first + count - 1} pass 0..{COLUMNS - 1}")
        self.ranges = [(lane, rows, first, count) for first, count in pieces]
        self._box = (slice(lane, lane + 32), slice(column, column + num)) if shape == "32x32b" and not pack else None
        self._flat = ((rel_lane + lane) * COLUMNS + rel_col + column).T.copy() if self._box is None else None

    def load(self, tmem: np.ndarray) -> np.ndarray:
        """uint32[registers, 32]: what each register of each thread receives. A view of `tmem` only if the caller copies.

        The result is always a fresh array.
        """
        if self._box is not None:
            return tmem[self._box].T.copy()
        cells = tmem.reshape(-1)
        if not self.pack:
            return cells[self._flat]
        return (cells[self._flat] & np.uint32(0xFFFF)) | (cells[self._flat + 1] << np.uint32(16))

    def store(self, tmem: np.ndarray, registers: np.ndarray) -> None:
        """Write uint32[registers, 32] to tensor memory. Unpacked halves clear the upper 16 bits of their cells."""
        if self._box is not None:
            tmem[self._box] = registers.T
            return
        cells = tmem.reshape(-1)
        if not self.pack:
            cells[self._flat] = registers
            return
        cells[self._flat] = registers & np.uint32(0xFFFF)
        cells[self._flat + 1] = registers >> np.uint32(16)


def plan_ldst(shape: str, num: int, taddr: int, warp_rank: int, *, pack: bool = False, imm: int = 0) -> LdStPlan:
    """Plan of a tcgen05.ld or tcgen05.st. Cached.

    Args:
        shape, num, pack, imm: as for `ld_map`.
        taddr: tensor-memory address, warp-uniform.
        warp_rank: warp index in the CTA (its value mod 4 selects the lanes it may touch).

    An address in quarter 0 from a warp of another quarter reaches that warp's own quarter. The ISA does not allow it,
    but NVIDIA's experimental/primitives/tcgen05/1cta_mma_a_from_tmem.py stores A that way from four warps and checks
    the product; plans say so in `lane_implied`, for a strict checker to report.

    Raises:
        IllegalOperand: an unknown shape, lanes of another warp, or columns out of range.
    """
    return _plan_ldst(shape, int(num), int(taddr), int(warp_rank) & 3, bool(pack), int(imm))


@lru_cache(maxsize=8192)
def _plan_ldst(shape: str, num: int, taddr: int, quarter: int, pack: bool, imm: int) -> LdStPlan:
    ld_map(shape, num, pack, imm)  # legality of shape and num first
    lane, column = taddr >> 16, taddr & 0xFFFF
    starts = (0,) if shape == "32x32b" else (0, 16)
    legal = [32 * quarter + start for start in starts]
    implied = quarter != 0 and lane in starts
    if implied:
        lane += 32 * quarter
    if lane not in legal:
        raise IllegalOperand("taddr lane", lane, f"warp {quarter} of its warpgroup may access lanes {32 * quarter}.."
                                                 f"{32 * quarter + 31} and .{shape} must start at lane "
                                                 f"{' or '.join(map(str, legal))} (ISA 9.7.16.8.1)")
    return LdStPlan(shape, num, pack, lane, column, imm, implied)


# ---------------------------------------------------------------------------------------------- cp, shift

#: tcgen05.cp shape -> (source rows, bytes per row)
CP_SHAPES: dict[str, tuple[int, int]] = {
    "128x256b": (128, 32), "4x256b": (4, 32), "128x128b": (128, 16), "64x128b": (64, 16), "32x128b": (32, 16),
}
_CP_MULTICAST = {"64x128b": ("warpx2::02_13", "warpx2::01_23"), "32x128b": ("warpx4",)}


class CpPlan:
    """One tcgen05.cp (shared memory to tensor memory), the same in each CTA of the group.

    Attributes:
        smem_granules: int64[m], sorted 16-byte granules read (async proxy).
        smem_reads: (starts, lengths) int32, the same as merged byte ranges.
        swizzled: [(swizzle of the descriptor, 16-byte granule indices)].
        tmem_writes: [(lane0, lanes, column0, columns)].
        bytes: bytes read from one CTA's shared memory.
        lints: remarks on a descriptor that is legal to encode but names no canonical layout, empty as a rule.
    """

    def __init__(self, granules: np.ndarray, targets: list[tuple[int, int, int]], column: int, text: str,
                 lints: tuple[str, ...], swizzle: str) -> None:
        self.lints = lints
        self.swizzled = [(swizzle, granules.ravel())]
        self._granules = granules  # [rows, chunks]
        self._targets = targets  # (first lane, lanes, first source row)
        self._column = column
        self._text = text
        columns = 4 * granules.shape[1]
        self._columns = columns
        self.bytes = 16 * granules.size
        self.tmem_writes = [(first, lanes, column, columns) for first, lanes, _ in targets]

    @cached_property
    def smem_granules(self) -> np.ndarray:
        return np.unique(self._granules)

    @cached_property
    def smem_reads(self) -> tuple[np.ndarray, np.ndarray]:
        return merge_ranges(self._granules)

    def explain(self) -> str:
        """Readable dump of the source descriptor."""
        return self._text

    def apply(self, smem: np.ndarray, tmem: np.ndarray) -> None:
        """Copy within one CTA: `smem` uint8, `tmem` uint32[128, 512]."""
        words = smem.view(_GRANULE)[self._granules].view(np.uint32)
        for first, lanes, row in self._targets:
            tmem[first : first + lanes, self._column : self._column + self._columns] = words[row : row + lanes]


def plan_cp(shape: str, multicast: str | None, decompress: str | None, desc: int, taddr: int) -> CpPlan:
    """Plan of tcgen05.cp. Cached.

    Args:
        shape: a key of `CP_SHAPES`.
        multicast: "warpx2::02_13" or "warpx2::01_23" with 64x128b, "warpx4" with 32x128b, else None.
        decompress: the source format qualifier (b6x16_p32, b4x16_p64); only None is supported.
        desc: 64-bit matrix descriptor of the source.
        taddr: tensor-memory address; lane 0 (4x256b: a lane below 32, one row goes to that lane of each quarter).

    Raises:
        IllegalOperand: as the ISA forbids (9.7.16.9.2), or decompression.
    """
    return _plan_cp(shape, (multicast or "").lstrip(".") or None, decompress or None, int(desc), int(taddr))


@lru_cache(maxsize=4096)
def _plan_cp(shape: str, multicast: str | None, decompress: str | None, desc: int, taddr: int) -> CpPlan:
    if shape not in CP_SHAPES:
        raise IllegalOperand("tcgen05.cp shape", shape, f"must be one of {', '.join(CP_SHAPES)}")
    need = _CP_MULTICAST.get(shape, (None,))
    if multicast not in need:
        raise IllegalOperand("tcgen05.cp multicast", multicast, f".{shape} needs {' or '.join(map(str, need))}")
    if decompress:
        raise IllegalOperand("tcgen05.cp format", decompress, "decompressing copies are not supported")
    source = decode_smem_desc(desc)
    if source.swizzle == "128B_32B-atom":
        raise IllegalOperand("tcgen05.cp swizzle", source.swizzle, "is for MN-major 32-bit matrices")
    rows, width = CP_SHAPES[shape]
    granules = operand_granules(source, "K", rows, width, 1)
    lane, column = taddr >> 16, taddr & 0xFFFF
    if column + width // 4 > COLUMNS:
        raise IllegalOperand("taddr column", column, f"{width // 4} columns pass the last column {COLUMNS - 1}")
    if shape == "4x256b":
        if lane >= 32:
            raise IllegalOperand("taddr lane", lane, "must be below 32: one row goes to this lane of each quarter")
        targets = [(lane + 32 * i, 1, i) for i in range(4)]
    else:
        if lane:
            raise IllegalOperand("taddr lane", lane, f".{shape} writes from lane 0")
        if shape == "64x128b":
            order = (0, 1, 0, 1) if multicast == "warpx2::02_13" else (0, 0, 1, 1)
            targets = [(32 * quarter, 32, 32 * half) for quarter, half in enumerate(order)]
        elif shape == "32x128b":
            targets = [(32 * quarter, 32, 0) for quarter in range(4)]
        else:
            targets = [(0, 128, 0)]
    return CpPlan(granules, targets, column, source.explain(f"tcgen05.cp.{shape} source"),
                  descriptor_lints(source, "K", rows, width, 1), source.swizzle)


class ShiftPlan:
    """One tcgen05.shift.down: 31 rows of 8 columns move to the lane below their own; the last lane keeps its value.

    Attributes:
        tmem_reads, tmem_writes: [(lane0, lanes, column0, columns)].
    """

    def __init__(self, lane: int, column: int) -> None:
        self._lane, self._column = lane, column
        self.tmem_reads = [(lane + 1, 31, column, 8)]
        self.tmem_writes = [(lane, 31, column, 8)]

    def apply(self, tmem: np.ndarray) -> None:
        """Shift within one CTA's tensor memory."""
        lane, columns = self._lane, slice(self._column, self._column + 8)
        tmem[lane : lane + 31, columns] = tmem[lane + 1 : lane + 32, columns].copy()


@lru_cache(maxsize=512)
def plan_shift(taddr: int) -> ShiftPlan:
    """Plan of tcgen05.shift.down. The ISA says "downwards, except the last row"; that row i takes row i+1's value is
    inferred from .ashift, where NVIDIA states it as observed on a B200.

    Raises:
        IllegalOperand: lane not a multiple of 32, or columns out of range.
    """
    lane, column = taddr >> 16, taddr & 0xFFFF
    if lane % 32 or lane >= LANES:
        raise IllegalOperand("taddr lane", lane, "must be a multiple of 32 below 128 (ISA 9.7.16.9.3)")
    if column + 8 > COLUMNS:
        raise IllegalOperand("taddr column", column, f"8 columns pass the last column {COLUMNS - 1}")
    return ShiftPlan(lane, column)
