"""wgmma.mma_async: shared memory that one instruction reads, register fragments, arithmetic.

One warpgroup (128 threads) computes D[64, N] = A[64, K] * B[K, N] (+ D), K = 32 bytes of an operand. B, and A unless it
is in registers, come from shared memory through the same canonical layouts as tcgen05 (see `descriptors`). Fragments
(w = warp in the warpgroup, t = thread in the warp, i = element index in the thread; PTX ISA 9.7.15.5.1.1):

* D: row 16w + t/4 + 8*((i/2)%2), column 8*(i/4) + 2*(t%4) + i%2
* A, 16-bit: row 16w + t/4 + 8*((i/2)%2), column 2*(t%4) + i%2 + 8*(i/4); A, 8-bit: row ... 8*((i/4)%2), column
  4*(t%4) + i%4 + 16*(i/8); A, tf32: row ... 8*(i%2), column t%4 + 4*(i/2)

Arithmetic as in `umma`: exact products, float32 sums over K, one more rounding when added to D. Hopper accumulates
8-bit floats with fewer mantissa bits than float32; that is not modelled, so such results are the better ones.
"""

from __future__ import annotations

from functools import cached_property, lru_cache

import numpy as np

from .descriptors import decode_wgmma_desc, descriptor_lints, operand_granules
from .errors import IllegalOperand
from .formats import STORAGE_BYTES, decode, encode
from .tma import merge_ranges
from .umma import Operand, decode_elements

THREADS = 128
# D types each operand type allows, and operand types that may be mixed
_DTYPES = {"f16": ("f16", "f32"), "bf16": ("f32",), "tf32": ("f32",), "e4m3": ("f16", "f32"), "e5m2": ("f16", "f32"),
           "s8": ("s32",), "u8": ("s32",)}
_MIXED = ({"e4m3", "e5m2"}, {"s8", "u8"})
#: Dense FLOP per clock and SM with 16-bit operands on Hopper (narrower types keep the time per instruction).
_RATE = 4096


@lru_cache(maxsize=64)
def d_fragment(n: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column), int64[128 threads, n/2 elements] each, of the accumulator fragment."""
    t = np.arange(THREADS, dtype=np.int64)[:, None]
    i = np.arange(n // 2, dtype=np.int64)[None, :]
    row = 16 * (t >> 5) + ((t & 31) >> 2) + 8 * ((i >> 1) & 1)
    return row, 8 * (i >> 2) + 2 * (t & 3) + (i & 1)


@lru_cache(maxsize=8)
def a_fragment(element_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column), int64[128 threads, 16/element_bytes elements] each, of A in registers."""
    t = np.arange(THREADS, dtype=np.int64)[:, None]
    i = np.arange(16 // element_bytes, dtype=np.int64)[None, :]
    per = 4 // element_bytes  # elements in one register
    row = 16 * (t >> 5) + ((t & 31) >> 2) + 8 * ((i // per) & 1)
    return row, per * (t & 3) + i % per + 4 * per * (i // (2 * per))


def matrix_from_registers(registers: np.ndarray) -> np.ndarray:
    """Rearrange D fragments [n/2, 128] (any dtype) to the matrix [64, n]."""
    n = 2 * registers.shape[0]
    x = registers.reshape(n // 8, 2, 2, 4, 8, 4)  # column block, row half, j, warp, row, column pair
    return x.transpose(3, 1, 4, 0, 5, 2).reshape(64, n)


def registers_from_matrix(matrix: np.ndarray) -> np.ndarray:
    """Inverse of `matrix_from_registers`: [64, n] to [n/2, 128]."""
    n = matrix.shape[1]
    x = matrix.reshape(4, 2, 8, n // 8, 4, 2)  # warp, row half, row, column block, column pair, j
    return x.transpose(3, 1, 5, 0, 2, 4).reshape(n // 2, THREADS)


class WgmmaPlan:
    """One wgmma.mma_async.

    Attributes:
        n, k: shape (M is 64).
        d_registers: 32-bit registers per thread of D.
        a_registers: 4 when A is in registers, else 0.
        smem_granules: int64, sorted 16-byte granules read (async proxy).
        smem_reads: (starts, lengths) int32, the same as merged byte ranges.
        swizzled: [(swizzle of the descriptor, 16-byte granule indices)] of each operand in shared memory.
        lints: remarks on descriptors that are legal to encode but name no canonical layout, empty as a rule.
        flops, cycles: 2*64*N*K, and the tensor-core clocks at the dense rate of an H100 SM.
    """

    def __init__(self, n: int, k: int, dtype: str, atype: str, a: Operand | None, b: Operand, negate_a: bool,
                 saturate: bool, text: str, lints: tuple[str, ...]) -> None:
        self.lints = lints
        self.n, self.k, self.dtype, self.atype = n, k, dtype, atype
        self.d_registers = n // 4 if dtype == "f16" else n // 2
        self.a_registers = 0 if a else 4
        self._a, self._b = a, b
        self._negate_a = negate_a
        self._saturate = saturate
        self._text = text
        self.flops = 2 * 64 * n * k
        self.cycles = 2 * 64 * n * 16 / _RATE

    @cached_property
    def smem_granules(self) -> np.ndarray:
        parts = [self._b.granules.ravel()] + ([self._a.granules.ravel()] if self._a else [])
        return np.unique(np.concatenate(parts))

    @cached_property
    def swizzled(self) -> list[tuple[str, np.ndarray]]:
        return [(o.swizzle, o.granules.ravel()) for o in (self._a, self._b) if o]

    @cached_property
    def smem_reads(self) -> tuple[np.ndarray, np.ndarray]:
        return merge_ranges(self.smem_granules)

    def explain(self) -> str:
        """Readable dump of shape and descriptors."""
        return self._text

    def _a_matrix(self, a_regs: np.ndarray) -> np.ndarray:
        size = STORAGE_BYTES[self.atype]
        words = np.ascontiguousarray(a_regs.T)  # [128, 4]
        values = decode_elements(self.atype, words)  # [128, 16/size]
        row, col = a_fragment(size)
        out = np.empty((64, self.k), np.float32)
        out[row, col] = values
        return -out if self._negate_a else out

    def apply(self, smem: np.ndarray, d_regs: np.ndarray, accumulate: bool,
              a_regs: np.ndarray | None = None) -> np.ndarray:
        """Execute.

        Args:
            smem: the CTA's uint8 shared memory.
            d_regs: uint32[d_registers, 128], thread 32*warp + lane; ignored when not accumulating.
            accumulate: scale-d.
            a_regs: uint32[4, 128] when A is in registers.

        Returns:
            uint32[d_registers, 128], a fresh array.
        """
        if (self._a is None) != (a_regs is not None):
            raise IllegalOperand("A registers", a_regs is not None, "must be given exactly when A has no descriptor")
        a = self._a.read(smem) if self._a else self._a_matrix(a_regs)
        product = registers_from_matrix(np.matmul(a, self._b.read(smem).T))
        if self.dtype == "f32":
            if accumulate:
                product += d_regs.view(np.float32)
            return np.ascontiguousarray(product).view(np.uint32)
        if self.dtype == "s32":
            total = product.astype(np.int64)
            if accumulate:
                total += d_regs.view(np.int32)
            if self._saturate:
                total = np.clip(total, -(2**31), 2**31 - 1)
            return (total & 0xFFFFFFFF).astype(np.uint32)
        pairs = product.reshape(self.d_registers, 2, THREADS)
        if accumulate:
            old = np.stack([d_regs & np.uint32(0xFFFF), d_regs >> np.uint32(16)], 1).astype(np.uint16)
            pairs = pairs + decode("f16", old)
        half = encode("f16", pairs).astype(np.uint32)
        return half[:, 0] | half[:, 1] << np.uint32(16)


@lru_cache(maxsize=8192)
def plan_wgmma(
    n: int, dtype: str, atype: str, btype: str, a_desc: int | None, b_desc: int, *, trans_a: bool = False,
    trans_b: bool = False, scale_a: int = 1, scale_b: int = 1, satfinite: bool = False,
) -> WgmmaPlan:
    """Plan of one wgmma.mma_async.sync.aligned.m64nNkK. Cached.

    Args:
        n: 8..256.
        dtype, atype, btype: "f32" / "f16" / "s32" and "f16" "bf16" "tf32" "e4m3" "e5m2" "s8" "u8".
        a_desc: 64-bit descriptor of A, or None when A is in registers.
        b_desc: 64-bit descriptor of B.
        trans_a, trans_b: imm-trans: True for an MN-major operand (16-bit types only).
        scale_a, scale_b: 1 or -1.
        satfinite: saturate an s32 D.

    Raises:
        IllegalOperand: shapes, types, majors or ranges that the ISA does not have.
    """
    for name, fmt in (("atype", atype), ("btype", btype)):
        if fmt not in _DTYPES:
            raise IllegalOperand(f"wgmma {name}", fmt, f"must be one of {', '.join(_DTYPES)}")
    if atype != btype and not any({atype, btype} <= group for group in _MIXED):
        raise IllegalOperand("wgmma btype", btype, f"cannot be combined with A of type {atype}")
    if dtype not in _DTYPES[atype]:
        raise IllegalOperand("wgmma dtype", dtype, f"{atype} operands accumulate in {' or '.join(_DTYPES[atype])}")
    size = STORAGE_BYTES[atype]
    legal_n = n % 8 == 0 and 8 <= n <= 256 and (dtype != "s32" or n in (8, 24) or n % 16 == 0)
    if not legal_n:
        raise IllegalOperand("wgmma N", n, "must be a multiple of 8 up to 256 (integers: 8, 16, 24, then steps of 16)")
    for name, trans in (("imm-trans-a", trans_a), ("imm-trans-b", trans_b)):
        if trans and size != 2:
            raise IllegalOperand(name, 1, "only 16-bit operands can be MN-major")
    if trans_a and a_desc is None:
        raise IllegalOperand("imm-trans-a", 1, "A in registers cannot be transposed")
    for name, scale in (("imm-scale-a", scale_a), ("imm-scale-b", scale_b)):
        if scale not in (1, -1) or (scale == -1 and dtype == "s32"):
            raise IllegalOperand(name, scale, "must be 1 or -1 (integers: 1)")
    k = 32 // size
    lints: tuple[str, ...] = ()
    lines = [f"wgmma m64n{n}k{k} {dtype} {atype} {btype}"]
    a = None
    if a_desc is not None:
        desc = decode_wgmma_desc(a_desc)
        major = "MN" if trans_a else "K"
        a = Operand(atype, operand_granules(desc, major, 64, k, size), desc.swizzle, major, 64, scale_a < 0)
        lines.append(desc.explain(f"A {major}-major"))
        lints += tuple(f"A: {text}" for text in descriptor_lints(desc, major, 64, k, size))
    else:
        lines.append("A in registers")
    desc = decode_wgmma_desc(b_desc)
    major = "MN" if trans_b else "K"
    b = Operand(btype, operand_granules(desc, major, n, k, size), desc.swizzle, major, n, scale_b < 0)
    lines.append(desc.explain(f"B {major}-major"))
    lints += tuple(f"B: {text}" for text in descriptor_lints(desc, major, n, k, size))
    return WgmmaPlan(n, k, dtype, atype, a, b, scale_a < 0, satfinite, "\n".join(lines), lints)
