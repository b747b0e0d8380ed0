"""Warp-level matrix instructions: mma.sync, ldmatrix, stmatrix, movmatrix.

Registers are arrays uint32[registers, 32 threads] (uint64 for f64). Fragment maps follow PTX ISA 9.7.14.5: with group
g = t/4 and q = t%4 of thread t, rows and columns step as in the figures for each shape. Arithmetic: exact products,
float32 sums over K, one more rounding when C is added; f64 in float64; integers exact.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .errors import IllegalOperand
from .formats import STORAGE_BYTES, decode, decode_table, encode

_GRANULE = np.dtype("V16")

#: (shape, operand type class) -> supported; classes by element size and kind
_SHAPES: dict[str, tuple[str, ...]] = {
    "m16n8k8": ("f16", "bf16", "tf32", "f64"),
    "m16n8k16": ("f16", "bf16", "s8", "u8", "e4m3", "e5m2", "f64"),
    "m16n8k32": ("s8", "u8", "e4m3", "e5m2"),
    "m16n8k4": ("tf32", "f64"),
    "m8n8k4": ("f64",),
    "m8n8k16": ("s8", "u8"),
}
_DTYPES = {"f16": ("f16", "f32"), "bf16": ("f32",), "tf32": ("f32",), "f64": ("f64",), "s8": ("s32",), "u8": ("s32",),
           "e4m3": ("f16", "f32"), "e5m2": ("f16", "f32")}


def _shape(text: str) -> tuple[int, int, int]:
    m, rest = text[1:].split("n")
    n, k = rest.split("k")
    return int(m), int(n), int(k)


@lru_cache(maxsize=64)
def fragment(operand: str, shape: str, element_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each thread's elements lie in the matrix.

    Args:
        operand: "A" (rows M, columns K), "B" (rows K, columns N) or "C" (rows M, columns N; also D).
        shape: such as "m16n8k16".
        element_bytes: of A and B; ignored for "C".

    Returns:
        (row, column), int64[32, elements per thread], elements in register order, low bits first.
    """
    m, n, k = _shape(shape)
    t = np.arange(32, dtype=np.int64)[:, None]
    g, q = t >> 2, t & 3
    if operand == "C":
        i = np.arange(m * n // 32, dtype=np.int64)[None, :]
        return g + 8 * (i >> 1) + 0 * q, 2 * q + (i & 1)
    per = max(4 // element_bytes, 1)  # elements in one register
    if operand == "A":
        i = np.arange(m * k // 32, dtype=np.int64)[None, :]
        halves = m // 8
        row = g + 8 * ((i // per) % halves)
        return row, per * q + i % per + 4 * per * (i // (per * halves))
    i = np.arange(k * n // 32, dtype=np.int64)[None, :]
    return per * q + i % per + 4 * per * (i // per), g + 0 * i


class MmaSync:
    """A planned mma.sync of one shape and type combination; holds the fragment maps.

    Attributes:
        a_registers, b_registers, d_registers: 32-bit registers per thread (64-bit ones for f64).
        flops: 2*M*N*K.
    """

    def __init__(self, shape: str, dtype: str, atype: str, btype: str, ctype: str, saturate: bool) -> None:
        self.m, self.n, self.k = _shape(shape)
        self.dtype, self.atype, self.btype, self.ctype = dtype, atype, btype, ctype
        self._saturate = saturate
        size = STORAGE_BYTES[atype]
        word = max(size, 4)
        self.a_map, self.b_map = fragment("A", shape, size), fragment("B", shape, size)
        self.c_map = fragment("C", shape, size)
        self.a_registers = self.m * self.k // 32 * size // word
        self.b_registers = self.k * self.n // 32 * size // word
        self.d_registers = self.m * self.n // 32 // (2 if dtype == "f16" else 1)
        self.c_registers = self.m * self.n // 32 // (2 if ctype == "f16" else 1)
        self.flops = 2 * self.m * self.n * self.k

    @staticmethod
    def _elements(fmt: str, registers: np.ndarray) -> np.ndarray:
        """[32, elements] numbers of a fragment."""
        words = np.ascontiguousarray(registers.T)
        if fmt in ("f16", "bf16"):
            return decode(fmt, words.view(np.uint16))
        if fmt == "f64":
            return words.view(np.float64)
        if fmt == "tf32":
            return decode("tf32", words)
        return decode_table(fmt)[words.view(np.uint8)]

    def apply(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        """D registers from A, B and C registers, uint32[registers, 32] (uint64 for f64)."""
        real = np.float64 if self.dtype == "f64" else np.float32
        am, bm = np.empty((self.m, self.k), real), np.empty((self.k, self.n), real)
        am[self.a_map] = self._elements(self.atype, a)
        bm[self.b_map] = self._elements(self.btype, b)
        product = np.matmul(am, bm)[self.c_map]  # [32, elements]
        if self.dtype == "s32":
            total = product.astype(np.int64) + c.view(np.int32).T
            if self._saturate:
                total = np.clip(total, -(2**31), 2**31 - 1)
            return np.ascontiguousarray((total & 0xFFFFFFFF).astype(np.uint32).T)
        if self.ctype == "f16":
            product = product + decode("f16", np.ascontiguousarray(c.T).view(np.uint16))
        else:
            product = product + c.view(real).T
        if self.dtype == "f16":
            out = encode("f16", product).view(np.uint32)
        else:
            out = product.astype(real, copy=False).view(np.uint64 if self.dtype == "f64" else np.uint32)
        return np.ascontiguousarray(out.T)


@lru_cache(maxsize=64)
def plan_mma_sync(shape: str, dtype: str, atype: str, btype: str, ctype: str, satfinite: bool = False) -> MmaSync:
    """mma.sync.aligned.<shape>.row.col.<dtype>.<atype>.<btype>.<ctype>. Cached.

    Raises:
        IllegalOperand: a combination that is not supported (sub-byte, sparse and block-scaled forms among them).
    """
    if shape not in _SHAPES or atype not in _SHAPES[shape]:
        raise IllegalOperand("mma.sync shape", f"{shape} {atype}", "this shape and operand type is not supported")
    groups = ({"s8", "u8"}, {"e4m3", "e5m2"})
    if atype != btype and not any({atype, btype} <= x for x in groups):
        raise IllegalOperand("mma.sync btype", btype, f"cannot be combined with A of type {atype}")
    if dtype not in _DTYPES[atype] or ctype not in _DTYPES[atype]:
        raise IllegalOperand("mma.sync dtype", f"{dtype} {ctype}", f"{atype} has {' or '.join(_DTYPES[atype])}")
    if dtype != ctype and not (dtype in ("f16", "f32") and ctype in ("f16", "f32") and shape == "m8n8k4"):
        raise IllegalOperand("mma.sync ctype", ctype, f"must equal dtype {dtype}")
    if satfinite and dtype != "s32":
        raise IllegalOperand("mma.sync .satfinite", dtype, "is for s32 only")
    return MmaSync(shape, dtype, atype, btype, ctype, satfinite)


# ---------------------------------------------------------------------------------- ldmatrix, stmatrix, movmatrix

def _rows(addresses: np.ndarray, num: int, shape: str, dtype: str, name: str) -> np.ndarray:
    """Granule index of the 8*num rows that threads 0..8*num-1 name."""
    if (shape, dtype) != ("m8n8", "b16"):
        raise IllegalOperand(name, f"{shape} {dtype}", "only m8n8 b16 is supported")
    if num not in (1, 2, 4):
        raise IllegalOperand(f"{name} num", num, "must be x1, x2 or x4")
    rows = np.asarray(addresses)[: 8 * num]
    if (rows & 15).any():
        bad = int(rows[(rows & 15) != 0][0])
        raise IllegalOperand(f"{name} address", bad, "each row must be 16-byte aligned")
    return rows >> 4


def ldmatrix(smem: np.ndarray, addresses: np.ndarray, num: int, trans: bool = False, *, shape: str = "m8n8",
             dtype: str = "b16") -> np.ndarray:
    """ldmatrix.sync.aligned.m8n8.x<num>{.trans}.shared.b16.

    Args:
        smem: uint8 shared memory.
        addresses: integer[32] byte offsets, one per thread; threads 0..8*num-1 name the rows (16 bytes each).
        num: 1, 2 or 4 matrices.
        trans: load transposed.

    Returns:
        uint32[num, 32].
    """
    rows = smem.view(_GRANULE)[_rows(addresses, num, shape, dtype, "ldmatrix")]
    if not trans:
        return rows.view(np.uint32).reshape(num, 32)
    halves = rows.view(np.uint16).reshape(num, 8, 8).transpose(0, 2, 1)
    return np.ascontiguousarray(halves).view(np.uint32).reshape(num, 32)


def stmatrix(smem: np.ndarray, addresses: np.ndarray, registers: np.ndarray, trans: bool = False, *,
             shape: str = "m8n8", dtype: str = "b16") -> None:
    """stmatrix.sync.aligned.m8n8.x<num>{.trans}.shared.b16 of uint32[num, 32]; arguments as for `ldmatrix`."""
    num = registers.shape[0]
    where = _rows(addresses, num, shape, dtype, "stmatrix")
    data = np.ascontiguousarray(registers)
    if trans:
        halves = data.view(np.uint16).reshape(num, 8, 8).transpose(0, 2, 1)
        data = np.ascontiguousarray(halves)
    smem.view(_GRANULE)[where] = data.reshape(-1).view(_GRANULE)


def movmatrix(register: np.ndarray) -> np.ndarray:
    """movmatrix.sync.aligned.m8n8.trans.b16: uint32[32] to the transposed fragment."""
    halves = np.ascontiguousarray(register).view(np.uint16).reshape(8, 8)
    return np.ascontiguousarray(halves.T).view(np.uint32).reshape(32)
