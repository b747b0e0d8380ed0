"""Plans of tensor copies between global and shared memory (cp.async.bulk.tensor, cp.reduce.async.bulk.tensor).

A plan is cut along dimension 0: one *chunk* per innermost row of the box. All rows share the same in-range part of
dimension 0, so a chunk is (address, bytes) with one byte count for the whole plan; rows outside the tensor in another
dimension have address -1. In shared memory the tile is dense with dimension 0 fastest, or its rows stand a swizzle's width
apart where they are narrower than that, and the swizzle then XORs the absolute byte address, 16 bytes at a time. Elements
outside the tensor read as zero (or the out-of-bound NaN) and still count towards the transaction bytes; they are never
written.

Geometry (which rows, where in shared memory) is cached apart from coordinates, so a plan costs a few microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache

import numpy as np

from .errors import IllegalOperand
from .formats import decode, encode
from .swizzle import SPAN, swizzle_offset
from .tensormap import TensorMap

ReadGlobal = Callable[[np.ndarray, int], np.ndarray]
WriteGlobal = Callable[[np.ndarray, np.ndarray], None]
Update = Callable[[np.ndarray], np.ndarray]
UpdateGlobal = Callable[[np.ndarray, int, Update], None]

_SMEM_BYTES = 228 * 1024
_GRANULE = np.dtype("V16")  # 16 opaque bytes: moves without touching the bits
_OOB_NAN = {  # what an H200 fills with: 0x7ff7 in every 16 bits, whatever the type
    "f16": (np.uint16, 0x7FF7), "bf16": (np.uint16, 0x7FF7), "f32": (np.uint32, 0x7FF77FF7),
    "f32_ftz": (np.uint32, 0x7FF77FF7), "tf32": (np.uint32, 0x7FF77FF7), "tf32_ftz": (np.uint32, 0x7FF77FF7),
    "f64": (np.uint64, 0x7FF77FF77FF77FF7),
}
_NAN = {  # a sum that is no number; f64 by analogy
    "f32": np.uint32(0x7FFFFFFF).view(np.float32), "f32_ftz": np.uint32(0x7FFFFFFF).view(np.float32),
    "f64": np.uint64(0x7FFFFFFFFFFFFFFF).view(np.float64),
}
REDUCE_OPS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


def _row_pitch(row_bytes: int, swizzle: str) -> int:
    """Bytes from one row of the tile to the next: a row narrower than the swizzle's takes the swizzle's width all the same."""
    return row_bytes if swizzle == "none" else max(row_bytes, SPAN[swizzle])


@lru_cache(maxsize=1024)
def _smem_granules(rows: int, row_bytes: int, smem_offset: int, swizzle: str) -> np.ndarray:
    """int64[rows * row_bytes / 16]: index of the 16-byte granule where each granule of the tile lands."""
    starts = smem_offset + np.arange(rows, dtype=np.int64) * _row_pitch(row_bytes, swizzle)
    linear = (starts[:, None] + np.arange(0, row_bytes, 16, dtype=np.int64)).reshape(-1)
    granules = swizzle_offset(linear, swizzle) >> 4
    granules.setflags(write=False)
    return granules


@lru_cache(maxsize=1024)
def _row_grid(counts: tuple[int, ...], steps: tuple[int, ...]) -> np.ndarray:
    """int64[rank-1, rows]: offset in elements of every row of the box, per outer dimension, dimension 1 fastest."""
    axes = [np.arange(c, dtype=np.int64) * s for c, s in zip(counts, steps)]
    if not axes:
        return np.zeros((0, 1), np.int64)
    mesh = np.meshgrid(*reversed(axes), indexing="ij")
    return np.stack([m.ravel() for m in reversed(mesh)])


def merge_ranges(granules: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Contiguous byte ranges (starts, lengths; int32) that a set of 16-byte granule indices covers."""
    g = np.unique(granules)
    cut = np.flatnonzero(np.diff(g) != 1) + 1
    first = np.concatenate([[0], cut])
    last = np.concatenate([cut, [len(g)]])
    return (g[first] * 16).astype(np.int32), ((last - first) * 16).astype(np.int32)


class TmaPlan:
    """What one tensor copy moves.

    Attributes:
        tensor: the TensorMap.
        gmem_chunks: int64[n], global byte address of the in-range part of each innermost row, -1 where the row is
            outside the tensor.
        chunk_bytes: in-range bytes of every row (0 where dimension 0 is wholly out of range: all chunks are then -1).
        row_bytes: bytes of a whole row of the box; `chunk_skip` of them precede the in-range part.
        smem_offset: destination or source byte offset in the CTA's shared memory.
        smem_granules: int64[m], index of the 16-byte granule of shared memory of every 16 bytes of the tile, in tile
            order, after the swizzle. `smem_offsets` are the same in bytes.
        tx_bytes: bytes that complete on the mbarrier: the full box, out-of-range elements included.
        smem_span: bytes from the tile's first to its last in shared memory: more than tx_bytes where its rows are narrower than
            the swizzle's.
        spill_bytes: bytes by which `chunk_bytes` falls short of a multiple of 16 where a store or reduction ends inside
            one. The hardware writes those too (seen on an H200), with what the tile holds there.
    """

    __slots__ = ("tensor", "gmem_chunks", "chunk_bytes", "chunk_skip", "row_bytes", "smem_offset", "smem_granules",
                 "tx_bytes", "spill_bytes", "_inside", "__dict__")

    def __init__(self, tensor: TensorMap, addresses: np.ndarray, inside: np.ndarray | None, skip: int, count: int,
                 row_bytes: int, smem_offset: int, granules: np.ndarray, spill: int = 0) -> None:
        self.tensor = tensor
        self.spill_bytes = spill
        self.chunk_skip = skip
        self.chunk_bytes = count
        self.row_bytes = row_bytes
        self.smem_offset = smem_offset
        self.smem_granules = granules
        self.tx_bytes = 16 * len(granules)
        self._inside = inside  # None: every row is inside the tensor
        self.gmem_chunks = addresses if inside is None else np.where(inside, addresses, -1)

    @property
    def smem_offsets(self) -> np.ndarray:
        return self.smem_granules << 4

    @property
    def smem_span(self) -> int:
        rows = len(self.gmem_chunks)
        return (rows - 1) * _row_pitch(self.row_bytes, self.tensor.swizzle) + self.row_bytes

    @cached_property
    def smem_ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """(starts, lengths), int32: the shared-memory bytes the tile covers, merged."""
        return merge_ranges(self.smem_granules)

    @property
    def gmem_bytes(self) -> int:
        """Global bytes actually read or written."""
        return self.chunk_bytes * int(np.count_nonzero(self.gmem_chunks >= 0))

    def _live(self) -> np.ndarray:
        return self.gmem_chunks if self._inside is None else self.gmem_chunks[self._inside]

    def load(self, read_gmem: ReadGlobal, smem: np.ndarray) -> None:
        """Global to shared memory.

        Args:
            read_gmem: (int64[k] addresses, nbytes) -> uint8[k, nbytes].
            smem: the destination CTA's uint8 shared memory.
        """
        rows, width = len(self.gmem_chunks), self.row_bytes
        if self._inside is None and self.chunk_bytes == width:
            tile = np.ascontiguousarray(read_gmem(self.gmem_chunks, width))
        else:
            tile = np.zeros((rows, width), np.uint8)
            if self.tensor.oob_fill == "nan":
                dtype, bits = _OOB_NAN[self.tensor.dtype]
                tile.view(dtype)[...] = bits
            live = self._live()
            if len(live) and self.chunk_bytes:
                got = read_gmem(live, self.chunk_bytes)
                columns = slice(self.chunk_skip, self.chunk_skip + self.chunk_bytes)
                if self._inside is None:
                    tile[:, columns] = got
                else:
                    tile[self._inside, columns] = got
        smem.view(_GRANULE)[self.smem_granules] = tile.reshape(-1).view(_GRANULE)

    def tile(self, smem: np.ndarray) -> np.ndarray:
        """uint8[rows, row_bytes]: the tile as it lies in shared memory, un-swizzled."""
        return smem.view(_GRANULE)[self.smem_granules].view(np.uint8).reshape(len(self.gmem_chunks), self.row_bytes)

    def _source(self, smem: np.ndarray, start: int, size: int) -> np.ndarray:
        tile = self.tile(smem)[:, start : start + size]
        return np.ascontiguousarray(tile if self._inside is None else tile[self._inside])

    def store(self, smem: np.ndarray, write_gmem: WriteGlobal, spill: WriteGlobal | None = None) -> None:
        """Shared to global memory; out-of-range elements are not written, but for the rest of a row's last 16 bytes.

        Args:
            smem: the source CTA's uint8 shared memory.
            write_gmem: (int64[k] addresses, uint8[k, nbytes]) -> None.
            spill: the same, for the bytes past the tensor (`spill_bytes`); None leaves them alone.
        """
        live = self._live()
        if len(live) and self.chunk_bytes:
            write_gmem(live, self._source(smem, self.chunk_skip, self.chunk_bytes))
            if spill is not None and self.spill_bytes:
                spill(live + self.chunk_bytes, self._source(smem, self.chunk_skip + self.chunk_bytes, self.spill_bytes))

    def reduce(self, smem: np.ndarray, rmw_gmem: UpdateGlobal, op: str, spill: UpdateGlobal | None = None) -> None:
        """Shared memory combined into global memory (cp.reduce.async.bulk.tensor).

        Args:
            smem: the source CTA's uint8 shared memory.
            rmw_gmem: (int64[k] addresses, nbytes, update) -> None, where update maps uint8[k, nbytes] old contents to
                the new contents of the same shape.
            op: one of `REDUCE_OPS`.
            spill: as rmw_gmem, for the bytes past the tensor (`spill_bytes`); None leaves them alone.
        """
        live = self._live()
        if not len(live) or not self.chunk_bytes:
            return
        dtype = self.tensor.dtype
        values = self._source(smem, self.chunk_skip, self.chunk_bytes)
        rmw_gmem(live, self.chunk_bytes, lambda old: reduce_bytes(dtype, op, old, values))
        if spill is not None and self.spill_bytes:
            beyond = self._source(smem, self.chunk_skip + self.chunk_bytes, self.spill_bytes)
            spill(live + self.chunk_bytes, self.spill_bytes, lambda old: reduce_bytes(dtype, op, old, beyond))


def reduce_bytes(dtype: str, op: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Element-wise `old op new` on raw bytes, as the bulk reductions compute it.

    Args:
        dtype: u32 s32 u64 s64 f16 bf16 f32 f64 (u8/u16 maps carry no arithmetic).
        op: one of `REDUCE_OPS`. inc and dec wrap at `new` like atomicInc/atomicDec, u32 only.
        old, new: uint8 arrays of equal shape [..., nbytes].

    Returns:
        uint8 array of the same shape.

    Raises:
        IllegalOperand: for a combination the instruction set does not define.
    """
    if op not in REDUCE_OPS:
        raise IllegalOperand("reduction", op, f"must be one of {', '.join(REDUCE_OPS)}")
    integers = {"u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64}
    old, new = np.ascontiguousarray(old), np.ascontiguousarray(new)
    if op in ("and", "or", "xor"):
        fn = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op]
        return fn(old, new)
    if op in ("inc", "dec") and dtype != "u32":
        raise IllegalOperand(f"reduction {op}", dtype, "is defined on u32 only")
    if dtype in integers:
        a, b = old.view(integers[dtype]), new.view(integers[dtype])
        if op == "add":
            out = a + b
        elif op == "min":
            out = np.minimum(a, b)
        elif op == "max":
            out = np.maximum(a, b)
        elif op == "inc":
            out = np.where(a >= b, np.uint32(0), a + np.uint32(1))
        else:
            out = np.where((a == 0) | (a > b), b, a - np.uint32(1))
        return np.ascontiguousarray(out).view(np.uint8)
    if dtype in ("f16", "bf16"):
        a, b = decode(dtype, old.view(np.uint16)), decode(dtype, new.view(np.uint16))
        if op == "add":
            # the exact sum of two 16-bit floats needs more than float32 only when one vanishes beside the other
            out = encode(dtype, a + b)
        else:
            out = encode(dtype, np.fmin(a, b) if op == "min" else np.fmax(a, b))
        return np.ascontiguousarray(out).view(np.uint8)
    floats = {"f32": np.float32, "f32_ftz": np.float32, "f64": np.float64}
    if dtype in floats and op == "add":
        out = old.view(floats[dtype]) + new.view(floats[dtype])
        out[np.isnan(out)] = _NAN[dtype]
        return out.view(np.uint8)
    raise IllegalOperand(f"reduction {op}", dtype, "is not defined for this element type")


def plan_tile(
    tmap: TensorMap, coords: Sequence[int], smem_offset: int, *, mode: str = "tile", direction: str = "load",
) -> TmaPlan:
    """Plan of one tensor copy.

    Args:
        tmap: the tensor map.
        coords: signed coordinates, dimension 0 first: one per dimension for "tile"; (column, row0, row1, row2, row3)
            for "gather4" and "scatter4".
        smem_offset: byte offset of the tile in the CTA's shared memory, a multiple of 128.
        mode: "tile", "gather4" (loads) or "scatter4" (stores).
        direction: "load", "store" or "reduce"; used for the legality rules only.

    Returns:
        TmaPlan. Nothing is read or written yet.

    Raises:
        IllegalOperand: illegal mode, coordinate count, alignment (also of the innermost coordinate), a store below 0, or
            an unsupported map (im2col, interleave, 6-bit).
    """
    granules, rows, row_bytes = _geometry(tmap, smem_offset, mode, direction)
    bits = tmap.element_bits
    if mode == "tile":
        if len(coords) != tmap.rank:
            raise IllegalOperand("coordinates", tuple(coords), f"this map has {tmap.rank} dimensions")
        grid = _row_grid(tmap.box_counts[1:], tmap.element_strides[1:])
        address: np.ndarray | int = tmap.address
        inside = None
        for d in range(1, tmap.rank):
            position = grid[d - 1] + int(coords[d])
            address = address + position * tmap.strides[d - 1]
            first, last = int(coords[d]), int(coords[d]) + (tmap.box_counts[d] - 1) * tmap.element_strides[d]
            if first < 0 or last >= tmap.dims[d]:
                ok = (position >= 0) & (position < tmap.dims[d])
                inside = ok if inside is None else inside & ok
        if tmap.rank == 1:
            address = np.array([tmap.address], np.int64)
    else:
        if len(coords) != 5:
            raise IllegalOperand("coordinates", tuple(coords), f"{mode} takes a column and four rows")
        position = np.array([int(c) for c in coords[1:]], np.int64)
        address = tmap.address + position * tmap.strides[0]
        ok = (position >= 0) & (position < tmap.dims[1])
        inside = None if ok.all() else ok
    column = int(coords[0])
    # Seen on an H200, written nowhere: these two end the kernel with "illegal instruction" (test_datapath_gpu.py).
    if column * bits % 128:
        raise IllegalOperand("coordinates", tuple(coords), "the innermost one must fall on a multiple of 16 bytes")
    if direction != "load" and mode == "tile" and any(int(c) < 0 for c in coords):
        raise IllegalOperand("coordinates", tuple(coords), "a store or a reduction takes none below 0")
    low, high = max(column, 0), min(column + tmap.box[0], tmap.dims[0])
    if high <= low:
        count = skip = 0
        inside = np.zeros(rows, bool)
    else:
        if (low * bits) % 8 or (high * bits) % 8:
            raise IllegalOperand("coordinates", tuple(coords), "must fall on a byte boundary of packed elements")
        skip, count = (low - column) * bits // 8, (high - low) * bits // 8
        address = address + low * bits // 8
    spill = -count % 16 if direction != "load" else 0
    return TmaPlan(tmap, np.asarray(address, np.int64), inside, skip, count, row_bytes, smem_offset, granules, spill)


@lru_cache(maxsize=4096)
def _geometry(tmap: TensorMap, smem_offset: int, mode: str, direction: str) -> tuple[np.ndarray, int, int]:
    """(granule indices, rows, bytes per row), after every check that does not depend on coordinates."""
    if mode not in ("tile", "gather4", "scatter4"):
        raise IllegalOperand("tensor access mode", mode, "only tile, gather4 and scatter4 are supported (no im2col)")
    if direction not in ("load", "store", "reduce"):
        raise IllegalOperand("direction", direction, "must be load, store or reduce")
    tmap.check()
    if tmap.interleave != "none":
        raise IllegalOperand("tensormap.interleave", tmap.interleave, "interleaved layouts are not supported")
    if tmap.dtype in ("b4x16_p64", "b6x16_p32"):
        raise IllegalOperand("tensormap.elemtype", tmap.dtype, "padded sub-byte types are not supported")
    if tmap.swizzle == "128B_32B-atom_8B-flip":
        raise IllegalOperand("tensormap.swizzle", tmap.swizzle, "the 8-byte flip is not supported")
    if smem_offset % 128:
        raise IllegalOperand("shared-memory address", smem_offset, "a tensor copy needs 128-byte alignment")
    row_bytes = tmap.box[0] * tmap.element_bits // 8
    rows = tmap.box_bytes // row_bytes
    if mode != "tile":
        if tmap.rank != 2:
            raise IllegalOperand("tensormap.rank", tmap.rank, f"{mode} works on 2-dimensional tensors")
        if tmap.box[1] != 1:
            raise IllegalOperand("tensormap.box", tmap.box, f"{mode} needs an extent of 1 in dimension 1")
        if (mode == "gather4") != (direction == "load"):
            raise IllegalOperand("direction", direction, "gather4 loads, scatter4 stores")
        rows = 4
    span = rows * _row_pitch(row_bytes, tmap.swizzle)
    if smem_offset < 0 or smem_offset + span > _SMEM_BYTES:
        raise IllegalOperand("shared-memory address", smem_offset, f"{span} bytes pass the end of {_SMEM_BYTES}")
    return _smem_granules(rows, row_bytes, smem_offset, tmap.swizzle), rows, row_bytes
