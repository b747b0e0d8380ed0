"""CUtensorMap: the 128 opaque bytes that TMA instructions name, as a typed value.

`TensorMap` holds the fields, `encode` packs them as the driver does, `decode` reads maps that were packed by the CUDA
driver or by CuTe DSL host code. NVIDIA does not document the layout; it was recovered from the DSL's host code and
compared with `cuTensorMapEncodeTiled` of driver 13.0 on an H200. Legality checks are those of
`cuTensorMapEncodeTiled` (CUDA driver API, "Tensor Map Object Management").

Layout, 64-bit words (bits): 0 address (4-56) | 1 rank-1 (4-6), element code (7-10), interleave (11-12), swizzle
(13-14), NaN fill (15), tf32 (16), L2 promotion (17-18), swizzle atom (19-20), large footprint (21), stride1>>4
(32-63) | 2 stride2>>4, stride3>>4 | 3 stride4>>4 and the four strides' bits 36-39 | 4, 5 dims-1 | 6 dim4-1, element
strides-1 (32+3i), box0-1 (56-63) | 7 box1..4 - 1. The driver fills words 8-15 too; their fields are not known, and the one
difference seen on an H200 when they are 0 is that a store writes zeros, not the tile, past the end of a row in its last
16 bytes (plans write the tile).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from .errors import IllegalOperand

#: dtype name -> (code in the map, tf32 bit, bits of one element in global memory)
DTYPES: dict[str, tuple[int, int, int]] = {
    "u8": (0, 0, 8), "u16": (1, 0, 16), "u32": (2, 0, 32), "s32": (3, 0, 32), "u64": (4, 0, 64), "s64": (5, 0, 64),
    "f16": (6, 0, 16), "f32": (7, 0, 32), "f32_ftz": (8, 0, 32), "f64": (9, 0, 64), "bf16": (10, 0, 16),
    "tf32": (7, 1, 32), "tf32_ftz": (8, 1, 32),
    "b4x16": (11, 0, 4), "b4x16_p64": (12, 0, 4), "b6x16_p32": (13, 0, 6),
}
_DTYPE_OF = {(code, tf32): name for name, (code, tf32, _) in DTYPES.items()}
_FLOATS = ("f16", "f32", "f32_ftz", "f64", "bf16", "tf32", "tf32_ftz")

#: swizzle name -> (code in bits 13-14, atom code in bits 19-20). The atom codes of 64 B (3) and of the 8-byte flip (2)
#: follow the numbering of tensormap.replace's .swizzle_atomicity and were not seen in a driver's output.
SWIZZLES: dict[str, tuple[int, int]] = {
    "none": (0, 0), "32B": (1, 0), "64B": (2, 0), "128B": (3, 0),
    "128B_32B-atom": (3, 1), "128B_32B-atom_8B-flip": (3, 2), "128B_64B-atom": (3, 3),
}
_SWIZZLE_OF = {codes: name for name, codes in SWIZZLES.items()}
_SPAN = {"32B": 32, "64B": 64, "128B": 128, "128B_32B-atom": 128, "128B_32B-atom_8B-flip": 128, "128B_64B-atom": 128}
INTERLEAVES = ("none", "16B", "32B")
L2_PROMOTIONS = (0, 64, 128, 256)
_LARGE_FOOTPRINT = 131072  # bytes; the driver sets bit 21 from here on

# tensormap.replace .elemtype values (PTX Table 33), which are not the codes inside the map.
_REPLACE_ELEMTYPE = (
    "u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32_ftz", "f64", "bf16", "tf32", "tf32_ftz", "b4x16",
    "b4x16_p64", "b6x16_p32",
)
_REPLACE_ATOM = ("128B", "128B_32B-atom", "128B_32B-atom_8B-flip", "128B_64B-atom")

_NUMPY_DTYPE = {
    "uint8": "u8", "int8": "u8", "bool": "u8", "uint16": "u16", "int16": "u16", "uint32": "u32", "int32": "s32",
    "uint64": "u64", "int64": "s64", "float16": "f16", "float32": "f32", "float64": "f64",
}


@dataclass(frozen=True)
class TensorMap:
    """A tiled tensor map. Dimension 0 is the fastest (contiguous) one, as in the driver API.

    Attributes:
        address: global byte address of element 0, a multiple of 16.
        dtype: a key of `DTYPES`.
        dims: extents in elements, 1 to 5 of them.
        strides: byte strides of dimensions 1.., one fewer than `dims`, multiples of 16.
        box: box extents in elements, each 1..256.
        element_strides: traversal strides, each 1..8; dimension 0's is ignored without interleave.
        interleave: "none", "16B" or "32B".
        swizzle: a key of `SWIZZLES`.
        oob_fill: "zero" or "nan".
        l2_promotion: 0, 64, 128 or 256 (a hint).
        array: what `tiled` was given, kept alive as long as the map is; None for a map made from an address or from bytes.
    """

    address: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: str = "none"
    swizzle: str = "none"
    oob_fill: str = "zero"
    l2_promotion: int = 128
    array: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def rank(self) -> int:
        return len(self.dims)

    @cached_property
    def element_bits(self) -> int:
        """Bits of one element in global memory."""
        return DTYPES[self.dtype][2]

    @cached_property
    def box_counts(self) -> tuple[int, ...]:
        """Elements traversed per dimension: ceil(box / element stride), dimension 0 always in full."""
        rest = zip(self.box[1:], self.element_strides[1:])
        return (self.box[0], *(-(-b // s) for b, s in rest))

    @cached_property
    def box_bytes(self) -> int:
        """Bytes a full tile occupies in shared memory, which is also what it adds to an mbarrier's tx-count."""
        n = 1
        for count in self.box_counts:
            n *= count
        if self.dtype in ("b4x16_p64", "b6x16_p32"):
            return n  # unpacked to one 8-bit container per element, 16 bytes per 16 elements
        return n * self.element_bits // 8

    # ------------------------------------------------------------------ building

    @classmethod
    def tiled(
        cls, array: np.ndarray, *, box: Sequence[int], swizzle: str = "none",
        element_strides: Sequence[int] | None = None, oob: str = "zero", dtype: str | None = None,
        l2_promotion: int = 128, check: bool = True,
    ) -> TensorMap:
        """Map over a numpy array, as cuTensorMapEncodeTiled would build it. The map keeps the array alive.

        Args:
            array: 1 to 5 axes, its last axis contiguous; other strides multiples of 16 bytes.
            box: one extent per axis, in the array's own axis order (the last one is TMA's dimension 0).
            swizzle: a key of `SWIZZLES`.
            element_strides: one per axis in the array's order, default all 1.
            oob: "zero" or "nan", what out-of-range elements read as.
            dtype: element type; default from the array (name it for bf16, tf32 or packed 4-bit data held in integers).
            check: raise on an illegal map. Pass False to build a map for a negative test.

        Raises:
            IllegalOperand: where the driver would refuse the map.
        """
        if array.ndim and array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
            raise IllegalOperand("array.strides", array.strides, "the last axis must be contiguous")
        dtype = dtype or _NUMPY_DTYPE.get(array.dtype.name)
        if dtype is None:
            raise IllegalOperand("array.dtype", array.dtype.name, "has no TMA element type; name one with dtype=")
        scale = 8 * array.itemsize // DTYPES[dtype][2] if dtype in DTYPES and DTYPES[dtype][2] < 8 else 1
        dims = tuple(reversed(array.shape))
        tmap = cls(
            address=array.__array_interface__["data"][0], dtype=dtype,
            dims=(dims[0] * scale, *dims[1:]) if dims else (), strides=tuple(reversed(array.strides[:-1])),
            box=tuple(int(b) for b in reversed(box)),
            element_strides=tuple(int(s) for s in reversed(element_strides or [1] * array.ndim)),
            swizzle=swizzle, oob_fill=oob, l2_promotion=l2_promotion, array=array,
        )
        if check:
            tmap.check()
        return tmap

    def check(self) -> None:
        """Raise IllegalOperand where cuTensorMapEncodeTiled would refuse these parameters."""
        def need(ok: bool, field: str, value: object, rule: str) -> None:
            if not ok:
                raise IllegalOperand(f"tensormap.{field}", value, rule)

        need(self.dtype in DTYPES, "dtype", self.dtype, f"must be one of {', '.join(DTYPES)}")
        need(self.swizzle in SWIZZLES, "swizzle", self.swizzle, f"must be one of {', '.join(SWIZZLES)}")
        need(self.interleave in INTERLEAVES, "interleave", self.interleave, "must be none, 16B or 32B")
        need(self.oob_fill in ("zero", "nan"), "oob_fill", self.oob_fill, "must be zero or nan")
        need(self.l2_promotion in L2_PROMOTIONS, "l2_promotion", self.l2_promotion, "must be 0, 64, 128 or 256")
        need(1 <= self.rank <= 5, "rank", self.rank, "must be 1..5")
        need(len(self.box) == self.rank, "box", self.box, "needs one extent per dimension")
        need(len(self.element_strides) == self.rank, "element_strides", self.element_strides, "needs one per dimension")
        need(len(self.strides) == self.rank - 1, "strides", self.strides, "needs rank-1 byte strides")
        wide = self.dtype in ("b4x16_p64", "b6x16_p32")
        align = 32 if wide or self.interleave == "32B" else 16
        need(self.address % align == 0, "address", self.address, f"must be a multiple of {align}")
        for d in self.dims:
            need(1 <= d <= 1 << 32, "dims", self.dims, "each must be 1..2^32")
        for s in self.strides:
            need(s % align == 0 and 0 <= s < 1 << 40, "strides", self.strides,
                 f"each must be a multiple of {align} below 2^40")
        for b in self.box:
            need(1 <= b <= 256, "box", self.box, "each extent must be 1..256")
        for e in self.element_strides:
            need(1 <= e <= 8, "element_strides", self.element_strides, "each must be 1..8")
        if self.interleave == "none":
            inner_bits = self.box[0] * (8 if wide else self.element_bits)
            need(inner_bits % 128 == 0, "box", self.box, "inner extent must be a multiple of 16 bytes")
            span = _SPAN.get(self.swizzle)
            need(span is None or inner_bits <= 8 * span, "box", self.box,
                 f"inner extent must be at most the swizzle's {span} bytes")
        else:
            need(self.rank >= 3, "rank", self.rank, "must be at least 3 with interleave")
            need(self.interleave != "32B" or self.swizzle == "32B", "swizzle", self.swizzle,
                 "must be 32B with 32-byte interleave")
        if wide:
            need(self.dims[0] % 128 == 0, "dims", self.dims, f"dimension 0 of {self.dtype} must be a multiple of 128")
            need(self.box[0] == 128, "box", self.box, f"inner extent of {self.dtype} must be 128")
        elif self.dtype == "b4x16":
            need(self.dims[0] % 2 == 0, "dims", self.dims, "dimension 0 of b4x16 must be even")
        need(self.oob_fill == "zero" or self.dtype in _FLOATS, "oob_fill", self.oob_fill,
             f"needs a floating-point element type, not {self.dtype}")

    # ------------------------------------------------------------------ bits

    def encode(self) -> bytes:
        """The 128 bytes of the map."""
        code, tf32, bits = DTYPES[self.dtype]
        swizzle, atom = SWIZZLES[self.swizzle]
        rank = self.rank
        dims = [d - 1 for d in self.dims] + [0] * (5 - rank)
        strides = [s >> 4 for s in self.strides] + [0] * (5 - rank)
        box = [b - 1 for b in self.box] + [0] * (5 - rank)
        estr = [e - 1 for e in self.element_strides] + [0] * (5 - rank)
        footprint = self.dims[0] * bits // 8 + sum((d - 1) * s for d, s in zip(self.dims[1:], self.strides))
        q = [0] * 16
        q[0] = self.address & ((1 << 57) - 1)
        q[1] = (
            (rank - 1) << 4 | code << 7 | INTERLEAVES.index(self.interleave) << 11 | swizzle << 13
            | (self.oob_fill == "nan") << 15 | tf32 << 16 | L2_PROMOTIONS.index(self.l2_promotion) << 17 | atom << 19
            | (footprint >= _LARGE_FOOTPRINT) << 21
        )
        low = [s & 0xFFFFFFFF for s in strides]
        high = [(s >> 32) & 0xF for s in strides]
        if rank > 1:
            q[1] |= low[0] << 32
            q[2] = low[1] | low[2] << 32
            q[3] = low[3] | sum(h << (32 + 4 * i) for i, h in enumerate(high))
        q[4] = (dims[0] & 0xFFFFFFFF) | (dims[1] & 0xFFFFFFFF) << 32
        q[5] = (dims[2] & 0xFFFFFFFF) | (dims[3] & 0xFFFFFFFF) << 32
        q[6] = (dims[4] & 0xFFFFFFFF) | sum((e & 7) << (32 + 3 * i) for i, e in enumerate(estr)) | (box[0] & 255) << 56
        q[7] = sum((b & 255) << (8 * i) for i, b in enumerate(box[1:]))
        return np.array(q, np.uint64).tobytes()

    @classmethod
    def decode(cls, raw: bytes | bytearray | memoryview | np.ndarray) -> TensorMap:
        """Read a map back from its 128 bytes (packed by the driver, by CuTe DSL host code, or by `encode`).

        Raises:
            IllegalOperand: for bytes that hold no tiled tensor map.
        """
        data = raw.tobytes() if isinstance(raw, np.ndarray) else bytes(raw)
        if len(data) < 64:
            raise IllegalOperand("tensormap", len(data), "needs 128 bytes")
        q = [int(v) for v in np.frombuffer(data[:64], np.uint64)]
        rank = ((q[1] >> 4) & 7) + 1
        if rank > 5:
            raise IllegalOperand("tensormap.rank", rank, "must be 1..5 (these bytes are no tensor map)")
        code, tf32 = (q[1] >> 7) & 15, (q[1] >> 16) & 1
        dtype = _DTYPE_OF.get((code, tf32))
        if dtype is None:
            raise IllegalOperand("tensormap.elemtype", code, "is no element type code (these bytes are no tensor map)")
        swizzle = _SWIZZLE_OF.get(((q[1] >> 13) & 3, (q[1] >> 19) & 3))
        if swizzle is None:
            raise IllegalOperand("tensormap.swizzle", (q[1] >> 13) & 3, "an atom size needs the 128-byte swizzle")
        interleave = (q[1] >> 11) & 3
        if interleave > 2:
            raise IllegalOperand("tensormap.interleave", interleave, "must be 0, 1 or 2")
        low = [q[1] >> 32, q[2] & 0xFFFFFFFF, q[2] >> 32, q[3] & 0xFFFFFFFF]
        strides = [(low[i] | ((q[3] >> (32 + 4 * i)) & 15) << 32) << 4 for i in range(4)]
        dims = [q[4] & 0xFFFFFFFF, q[4] >> 32, q[5] & 0xFFFFFFFF, q[5] >> 32, q[6] & 0xFFFFFFFF]
        estr = [((q[6] >> (32 + 3 * i)) & 7) + 1 for i in range(5)]
        box = [(q[6] >> 56) + 1] + [((q[7] >> (8 * i)) & 255) + 1 for i in range(4)]
        return cls(
            address=q[0] & ((1 << 57) - 16), dtype=dtype, dims=tuple(d + 1 for d in dims[:rank]),
            strides=tuple(strides[: rank - 1]), box=tuple(box[:rank]), element_strides=tuple(estr[:rank]),
            interleave=INTERLEAVES[interleave], swizzle=swizzle, oob_fill="nan" if (q[1] >> 15) & 1 else "zero",
            l2_promotion=L2_PROMOTIONS[(q[1] >> 17) & 3],
        )

    # ------------------------------------------------------------------ tensormap.replace

    def replace_field(self, field: str, value: int, ord: int | None = None) -> TensorMap:
        """A copy with one field replaced, as tensormap.replace.tile does (PTX ISA 9.7.9.28).

        Args:
            field: global_address, rank (value is rank-1), box_dim, global_dim, global_stride (bytes),
                element_stride, elemtype, interleave_layout, swizzle_mode, swizzle_atomicity or fill_mode.
            value: the new value.
            ord: for box_dim, global_dim and element_stride the dimension; for global_stride 0 is dimension 1's stride.

        Raises:
            IllegalOperand: unknown field, ordinal out of range, or a value the table does not list. Legality of the
                whole map is not checked here: it may be half replaced. Use `check` at the instruction that uses it.
        """
        def bad(rule: str) -> IllegalOperand:
            return IllegalOperand(f"tensormap.replace.{field}", value, rule)

        def pick(names: Sequence[str], rule: str) -> str:
            if not 0 <= value < len(names):
                raise bad(rule)
            return names[value]

        if field == "global_address":
            return replace(self, address=value)
        if field == "rank":
            rank = value + 1
            if not 1 <= rank <= 5:
                raise bad("new value is rank-1, 0..4")

            def fit(seq: tuple[int, ...], n: int, fill: int) -> tuple[int, ...]:
                return (seq + (fill,) * n)[:n]

            return replace(self, dims=fit(self.dims, rank, 1), strides=fit(self.strides, rank - 1, 0),
                           box=fit(self.box, rank, 1), element_strides=fit(self.element_strides, rank, 1))
        lists = {"box_dim": "box", "global_dim": "dims", "global_stride": "strides",
                 "element_stride": "element_strides"}
        if field in lists:
            name = lists[field]
            seq = list(getattr(self, name))
            if ord is None or not 0 <= ord < 5:
                raise IllegalOperand(f"tensormap.replace.{field} ordinal", ord, "must be 0..4")
            if ord < len(seq):  # ordinals beyond the rank change unused fields
                seq[ord] = value
            changes: dict[str, Any] = {name: tuple(seq)}
            return replace(self, **changes)
        if field == "elemtype":
            return replace(self, dtype=pick(_REPLACE_ELEMTYPE, "must be 0..15"))
        if field == "interleave_layout":
            return replace(self, interleave=pick(INTERLEAVES, "must be 0..2"))
        if field == "swizzle_mode":
            name = pick(("none", "32B", "64B", "128B"), "must be 0..3 (96-byte swizzle is sm_103a only)")
            keep = name == "128B" and self.swizzle.startswith("128B")
            return replace(self, swizzle=self.swizzle if keep else name)
        if field == "swizzle_atomicity":
            name = pick(_REPLACE_ATOM, "must be 0..3")
            if not self.swizzle.startswith("128B"):
                if value:
                    raise bad("only the 128-byte swizzle has an atomicity other than 16 bytes")
                return self
            return replace(self, swizzle=name)
        if field == "fill_mode":
            return replace(self, oob_fill=pick(("zero", "nan"), "must be 0 or 1"))
        raise bad("no such field")

    def explain(self) -> str:
        """One readable line for reports."""
        steps = "" if all(e == 1 for e in self.element_strides[1:]) else f" element_strides={self.element_strides}"
        return (
            f"tensormap {self.dtype} dims={self.dims} strides={self.strides}B box={self.box}{steps} "
            f"swizzle={self.swizzle} interleave={self.interleave} oob={self.oob_fill} at 0x{self.address:x}"
        )
