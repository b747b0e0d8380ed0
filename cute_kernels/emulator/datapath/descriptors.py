"""Shared-memory matrix descriptors and instruction descriptors of tcgen05 and wgmma: decode, check, explain, index.

A matrix descriptor names a tile by start address, two strides and a swizzle; which stride means what depends on the
major-ness (PTX ISA 9.7.16.3 and .4; wgmma's differs only in a few bits). `operand_granules` turns one into the indices
of the 16-byte granules of shared memory that hold the tile, in tile order, which is all that MMA and tcgen05.cp need.

The rule, in bytes, W being the swizzle's row (16 without swizzle) and T the elements in 16 bytes:

* K-major, row r, 16-byte chunk c: ``start + (r / 8) * SBO + (r % 8) * W + c * (16, or LBO without swizzle)``
* MN-major, k, 16-byte chunk j of MN: ``start + (j / (W/16)) * LBO + (j % (W/16)) * 16 + (k / 8) * SBO + (k % 8) * W``
  (without swizzle LBO and SBO trade places; with 32-byte atoms the groups have 4 k, not 8)

and the swizzle XORs the absolute address. Tile rows and k steps may be entered anywhere, as CUTLASS does when it adds
to the start address only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .errors import IllegalOperand
from .swizzle import REPEAT, SPAN, swizzle_offset

SMEM_BYTES = 228 * 1024
_TCGEN05_SWIZZLE = {0: "none", 1: "128B_32B-atom", 2: "128B", 4: "64B", 6: "32B"}
_WGMMA_SWIZZLE = {0: "none", 1: "128B", 2: "64B", 3: "32B"}


@dataclass(frozen=True)
class SmemDesc:
    """A decoded shared-memory matrix descriptor; addresses and strides in bytes.

    Attributes:
        raw: the 64 bits it came from.
        start: start address in the CTA's shared memory, 0..0x3fff0.
        lbo: leading-dimension byte offset.
        sbo: stride-dimension byte offset.
        base_offset: 0..7, row of the swizzle pattern at which the tile's pattern starts.
        swizzle: a mode of `swizzle.MODES`.
        lbo_absolute: bit 52 (sm_103a's absolute address mode).
    """

    raw: int
    start: int
    lbo: int
    sbo: int
    base_offset: int
    swizzle: str
    lbo_absolute: bool = False

    def explain(self, name: str = "descriptor") -> str:
        """One readable line for reports."""
        base = f" base_offset={self.base_offset}" if self.base_offset else ""
        return (f"{name} 0x{self.raw:016x}: start=0x{self.start:05x} LBO={self.lbo}B SBO={self.sbo}B "
                f"swizzle={self.swizzle}{base}")


@lru_cache(maxsize=8192)
def decode_smem_desc(raw: int) -> SmemDesc:
    """Decode a tcgen05 matrix descriptor (PTX ISA Table 40).

    Raises:
        IllegalOperand: wrong constant bits, an undefined swizzle code, or sm_103a's absolute mode.
    """
    raw = int(raw)
    constant = (raw >> 46) & 7
    if constant != 1:
        raise IllegalOperand("matrix descriptor bits 46-48", constant, "must hold the constant 0b001 (Table 40)")
    if (raw >> 53) & 0xFF:
        raise IllegalOperand("matrix descriptor bits 53-60", (raw >> 53) & 0xFF, "must be 0 (Table 40)")
    code = (raw >> 61) & 7
    if code not in _TCGEN05_SWIZZLE:
        raise IllegalOperand("matrix descriptor swizzle", code, "3, 5 and 7 are invalid (Table 40)")
    if (raw >> 52) & 1:
        raise IllegalOperand("matrix descriptor bit 52", 1, "absolute leading-dimension addresses need sm_103a")
    return SmemDesc(raw, (raw & 0x3FFF) << 4, ((raw >> 16) & 0x3FFF) << 4, ((raw >> 32) & 0x3FFF) << 4,
                    (raw >> 49) & 7, _TCGEN05_SWIZZLE[code])


@lru_cache(maxsize=8192)
def decode_wgmma_desc(raw: int) -> SmemDesc:
    """Decode a wgmma matrix descriptor (PTX ISA 9.7.15.5.1.2.2): no constant bits, swizzle in bits 62-63.

    Every bit pattern is legal; the undefined bits 14-15, 30-31, 46-48 and 52-61 are ignored.
    """
    raw = int(raw)
    return SmemDesc(raw, (raw & 0x3FFF) << 4, ((raw >> 16) & 0x3FFF) << 4, ((raw >> 32) & 0x3FFF) << 4,
                    (raw >> 49) & 7, _WGMMA_SWIZZLE[(raw >> 62) & 3])


def encode_smem_desc(start: int, lbo: int, sbo: int, swizzle: str, *, base_offset: int = 0, wgmma: bool = False) -> int:
    """The 64 bits of a descriptor, all arguments in bytes; `wgmma` picks sm_90's format."""
    bits = ((start & 0x3FFFF) >> 4) | ((lbo & 0x3FFFF) >> 4) << 16 | ((sbo & 0x3FFFF) >> 4) << 32 | base_offset << 49
    if wgmma:
        return bits | {v: k for k, v in _WGMMA_SWIZZLE.items()}[swizzle] << 62
    return bits | 1 << 46 | {v: k for k, v in _TCGEN05_SWIZZLE.items()}[swizzle] << 61


@lru_cache(maxsize=8192)
def operand_granules(desc: SmemDesc, major: str, extent: int, k: int, element_bytes: int) -> np.ndarray:
    """Granule indices (byte offset / 16) of a tile, after the swizzle.

    Args:
        desc: the descriptor.
        major: "K" or "MN".
        extent: rows of the tile (M or N).
        k: K extent in elements; K-major needs ``k * element_bytes`` a multiple of 16.
        element_bytes: 1, 2 or 4.

    Returns:
        int64 [extent, k * element_bytes / 16] for K-major, [k, extent * element_bytes / 16] for MN-major, read only.

    Raises:
        IllegalOperand: the tile passes the end of shared memory.
    """
    width = SPAN[desc.swizzle]
    if major == "K":
        r = np.arange(extent, dtype=np.int64)[:, None]
        c = np.arange(k * element_bytes // 16, dtype=np.int64)[None, :]
        offset = (r >> 3) * desc.sbo + (r & 7) * width + c * (desc.lbo if desc.swizzle == "none" else 16)
    else:
        kk = np.arange(k, dtype=np.int64)[:, None]
        j = np.arange(-(-extent * element_bytes // 16), dtype=np.int64)[None, :]
        per = width // 16
        if desc.swizzle == "none":
            offset = j * desc.sbo + (kk & 7) * 16 + (kk >> 3) * desc.lbo
        else:
            group = 4 if desc.swizzle == "128B_32B-atom" else 8
            offset = (j // per) * desc.lbo + (j % per) * 16 + (kk // group) * desc.sbo + (kk % group) * width
    address = swizzle_offset((desc.start + offset) & 0x3FFFF, desc.swizzle, desc.base_offset)
    if address.max() + 16 > SMEM_BYTES:
        raise IllegalOperand("matrix descriptor", desc.raw,
                             f"the tile reads byte 0x{int(address.max()):x}, past the end of shared memory "
                             f"({desc.explain()})")
    granules = address >> 4
    granules.setflags(write=False)
    return granules


@lru_cache(maxsize=8192)
def descriptor_lints(desc: SmemDesc, major: str, extent: int, k: int, element_bytes: int) -> tuple[str, ...]:
    """What is legal to encode but names no canonical layout (PTX ISA 9.7.16.3.3), in words; usually empty.

    Hardware would read such a tile without complaint, so these are remarks for a checker, not errors: they catch a
    stride or an address that is off by a field. Arguments as for `operand_granules`.
    """
    out = []
    granules = operand_granules(desc, major, extent, k, element_bytes)
    if np.unique(granules).size < granules.size:
        out.append("different elements of the tile share shared-memory bytes")
    if desc.swizzle != "none":
        width, repeat = SPAN[desc.swizzle], REPEAT[desc.swizzle]
        groups = extent > 8 if major == "K" else k > repeat // width
        if groups and desc.sbo % repeat:
            out.append(f"SBO {desc.sbo} is no multiple of the {repeat}-byte {desc.swizzle} swizzle pattern")
        if major == "MN" and extent * element_bytes > width and desc.lbo % repeat:
            out.append(f"LBO {desc.lbo} is no multiple of the {repeat}-byte {desc.swizzle} swizzle pattern")
        # A start inside the pattern with base offset 0 is no remark: the ISA wants the offset set, but NVIDIA's tf32
        # dense GEMM and 2cta_mma_tma_store examples leave it 0 on tiles that are only 128-byte aligned, and are right
        # because the XOR takes absolute address bits.
        row, inner = divmod(desc.start % repeat, width)
        if desc.base_offset and not row:
            out.append(f"base offset {desc.base_offset} although the start address lies on a pattern boundary")
        if major == "K":
            if inner + k * element_bytes > width:
                out.append(f"the K slice starts {inner} bytes into a swizzled row of {width} and crosses its end")
            elif inner % min(32, k * element_bytes):
                out.append(f"the K slice starts {inner} bytes into a swizzled row, not on a multiple of its size")
    return tuple(out)


# ---------------------------------------------------------------------- instruction descriptor

_ATYPES = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"},
    "i8": {0: "u8", 1: "s8"},
}
_DTYPES = {"f16": {0: "f16", 1: "f32"}, "tf32": {1: "f32"}, "f8f6f4": {0: "f16", 1: "f32"}, "i8": {2: "s32"}}
K_OF_KIND = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32}
ELEMENT_BYTES = {"f16": 2, "tf32": 4, "f8f6f4": 1, "i8": 1}


@dataclass(frozen=True)
class InstrDesc:
    """A decoded tcgen05 instruction descriptor (PTX ISA Table 42).

    Attributes:
        raw: the 32 bits.
        kind: "f16", "tf32", "f8f6f4" or "i8".
        m, n, k: the shape; m is the pair's total for cta_group::2.
        atype, btype, dtype: element formats.
        a_major, b_major: "K" or "MN".
        negate_a, negate_b, saturate: flags.
        max_shift: bits 30-31, B reuse shift of .ws (a hint).
    """

    raw: int
    kind: str
    m: int
    n: int
    k: int
    atype: str
    btype: str
    dtype: str
    a_major: str
    b_major: str
    negate_a: bool
    negate_b: bool
    saturate: bool
    max_shift: int

    def explain(self) -> str:
        """One readable line for reports."""
        signs = ("-A " if self.negate_a else "") + ("-B " if self.negate_b else "") + ("sat " if self.saturate else "")
        return (f"idesc 0x{self.raw:08x}: kind::{self.kind} M={self.m} N={self.n} K={self.k} D={self.dtype} "
                f"A={self.atype} {self.a_major}-major B={self.btype} {self.b_major}-major {signs}".rstrip())


@lru_cache(maxsize=1024)
def decode_idesc(kind: str, raw: int) -> InstrDesc:
    """Decode an instruction descriptor.

    Args:
        kind: "f16", "tf32", "f8f6f4" or "i8" (with or without a leading ``kind::`` or ``.kind::``).
        raw: 32 bits.

    Raises:
        IllegalOperand: an unsupported kind, reserved bits, or a type code the kind does not have.
    """
    kind = kind.rpartition("::")[2]
    if kind not in K_OF_KIND:
        raise IllegalOperand("tcgen05.mma kind", kind, "block-scaled kinds are not supported; f16, tf32, f8f6f4, i8 are")
    raw = int(raw) & 0xFFFFFFFF

    def bits(low: int, count: int) -> int:
        return (raw >> low) & ((1 << count) - 1)

    if bits(2, 1):
        raise IllegalOperand("idesc.sparsity", 1, "sparse MMA is not supported")
    for bit in (6, 23, 29):
        if bits(bit, 1):
            raise IllegalOperand(f"idesc bit {bit}", 1, "reserved, must be 0 (Table 42)")
    if bits(0, 2):
        raise IllegalOperand("idesc.sparsity selector", bits(0, 2), "must be 0 for a dense MMA")

    def pick(field: str, table: dict[int, str], code: int) -> str:
        if code not in table:
            known = ", ".join(f"{v}={k}" for k, v in table.items())
            raise IllegalOperand(f"idesc.{field}", code, f"kind::{kind} has {known} (Table 42)")
        return table[code]

    out = InstrDesc(
        raw, kind, bits(24, 5) << 4, bits(17, 6) << 3, K_OF_KIND[kind],
        pick("atype", _ATYPES[kind], bits(7, 3)), pick("btype", _ATYPES[kind], bits(10, 3)),
        pick("dtype", _DTYPES[kind], bits(4, 2)),
        "MN" if bits(15, 1) else "K", "MN" if bits(16, 1) else "K",
        bool(bits(13, 1)), bool(bits(14, 1)), bool(bits(3, 1)), bits(30, 2),
    )
    if kind == "i8" and (out.negate_a or out.negate_b):
        raise IllegalOperand("idesc.negate", raw, "kind::i8 cannot negate (Table 51)")
    if kind != "i8" and out.saturate:
        raise IllegalOperand("idesc.saturate", 1, "only kind::i8 saturates (Table 42)")
    for name, fmt in (("atype", out.atype), ("btype", out.btype)):
        if fmt in ("e2m3", "e3m2", "e2m1"):
            raise IllegalOperand(f"idesc.{name}", fmt, "6- and 4-bit operands are not supported")
    if kind == "f16" and out.dtype == "f16" and "bf16" in (out.atype, out.btype):
        raise IllegalOperand("idesc.dtype", "f16", "an f16 accumulator needs f16 operands (Table 39)")
    return out


def encode_idesc(
    kind: str, m: int, n: int, *, atype: str | None = None, btype: str | None = None, dtype: str | None = None,
    a_major: str = "K", b_major: str = "K", negate_a: bool = False, negate_b: bool = False, saturate: bool = False,
) -> int:
    """The 32 bits of an instruction descriptor; types default to the kind's first A type and last D type."""
    codes = {v: k for k, v in _ATYPES[kind].items()}
    dcodes = {v: k for k, v in _DTYPES[kind].items()}
    a = codes[atype] if atype else min(codes.values())
    b = codes[btype] if btype else a
    d = dcodes[dtype] if dtype else max(dcodes.values())
    return (int(saturate) << 3 | d << 4 | a << 7 | b << 10 | int(negate_a) << 13 | int(negate_b) << 14
            | (a_major == "MN") << 15 | (b_major == "MN") << 16 | (n >> 3) << 17 | (m >> 4) << 24)


def explain(kind: str, idesc: int, a: int, b: int, *, a_is_tmem: bool = False) -> str:
    """Readable dump of an MMA's descriptors, one per line; undecodable ones are shown with the reason."""
    lines = []
    for call in (
        lambda: decode_idesc(kind, idesc).explain(),
        (lambda: f"A in TMEM at lane {a >> 16} column {a & 0xFFFF}") if a_is_tmem
        else (lambda: decode_smem_desc(a).explain("A")),
        lambda: decode_smem_desc(b).explain("B"),
    ):
        try:
            lines.append(call())
        except IllegalOperand as error:
            lines.append(f"illegal: {error}")
    return "\n".join(lines)
