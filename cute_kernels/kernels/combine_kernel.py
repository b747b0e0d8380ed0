"""Merging split attention results: the device side.

Work. A group of T lanes (8, 16 or 32, the fewest that cover d with 16-byte loads) owns one row and up to T * vec columns; a warp
holds 32 / T rows, a CTA 4 warps. Columns beyond that are other CTAs (grid.y), which compute the row's weights again: n_split * 4
bytes against the n_split * 16 * T bytes that a group reads, and it lets a decode step's few rows fill the GPU.

Steps of a group. 1. Lane i reads the lse of parts i, i + T, ...; the maximum over the group's lanes, with the part that has it.
2. For each T parts: lane i computes part i's weight exp(lse - max), 0 if empty; the group then reads those parts one after the
other (4 in flight, no branch in between), the weight comes by shuffle. A lane that must not read an empty part (it may hold NaN,
and 0 * NaN is NaN) reads the row's largest part instead, which has the weight 1 and lies in L1 already. 3. Division by the sum
plus exp(sink - max).

Budgets (measured by ptxas, see tests/jit): no shared memory, no stack, at most 64 registers, so that 8 CTAs fit an SM: 32 warps
with four 16-byte loads in flight a lane are 64 KiB an SM. Its speed has not been measured.

Numbers. fp32; base-2 exponentials and logarithms (ex2.approx, lg2.approx, 2 ulp). A NaN lse is not empty: it makes its row NaN.
The order of a row's sums depends on n_split alone. Offsets are 64-bit.

Not supported: per-row part counts (mark the missing ones as empty), float64, gradients.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


class Combine:
    """One compiled variant.

    Args:
        part: cutlass dtype of the partial outputs. out: of the result. d: columns. has_sink: a sink tensor is given.
        wide: rows of partial outputs and of the result start at multiples of 16 bytes and d fills whole 16-byte pieces; else one
            element a lane.
    """

    WARPS = 4
    MIN_BLOCKS = 8  # an SM: 64 registers a thread
    IN_FLIGHT = 4  # loads of different parts

    def __init__(self, part: type, out: type, d: int, has_sink: bool, wide: bool) -> None:
        self.part, self.out, self.d, self.has_sink = part, out, d, has_sink
        self.vec = 128 // part.width if wide else 1
        if d < 1 or d % self.vec:
            raise ValueError(f"d must be a positive multiple of {self.vec}, got {d}")
        pieces = d // self.vec
        self.lanes = next(t for t in (8, 16, 32) if t >= pieces or t == 32)
        self.columns = self.lanes * self.vec
        self.chunks = -(-d // self.columns)
        self.rows_per_cta = self.WARPS * 32 // self.lanes

    @cute.jit
    def __call__(
        self,
        parts: cute.Tensor,  # [n_split, rows, d]
        part_lse: cute.Tensor,  # [n_split, rows] fp32
        out: cute.Tensor,  # [rows, d]
        lse: cute.Tensor,  # [rows] fp32
        sink: cute.Tensor | None,  # [h] fp32, row r takes r % h
        stream,
    ):
        self.kernel(parts, part_lse, out, lse, sink).launch(
            grid=[(out.shape[0] + (self.rows_per_cta - 1)) // self.rows_per_cta, self.chunks, 1],
            block=[32 * self.WARPS, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.MIN_BLOCKS,
            # All of it to L1. Without a number the DSL asks the driver at compile time, which needs a GPU.
            preferred_smem_carveout=0,
        )

    @cute.kernel
    def kernel(self, parts: cute.Tensor, part_lse: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, sink: cute.Tensor | None):
        t, vec = self.lanes, self.vec
        tid, _, _ = cute.arch.thread_idx()
        tile, chunk, _ = cute.arch.block_idx()
        lane = tid % t
        group = (tid % 32) - lane  # first lane of this row's group
        rows, n_split = Int32(out.shape[0]), Int32(parts.shape[0])
        row = tile * self.rows_per_cta + tid // t
        # Shuffles need every lane, so a group past the end does the last row's work and stores nothing.
        in_range = row < rows
        row = cutlass.min(row, rows - 1)
        column = chunk * self.columns + lane * vec
        stores = Boolean(in_range and column < self.d)
        if column >= self.d:
            column = Int32(0)

        # 1. The largest lse of the row's parts and where it is; -1: all parts are empty.
        top, at = Float32(-cutlass.Float32.inf), Int32(-1)
        for first in cutlass.range(0, n_split, t, unroll=1):
            x, present = self._lse(part_lse, first + lane, row, n_split)
            if present and (at < 0 or x > top):
                top, at = x, first + lane
        for step in cutlass.range_constexpr(t.bit_length() - 1):
            other = cute.arch.shuffle_sync_bfly(top, offset=1 << step)
            other_at = cute.arch.shuffle_sync_bfly(at, offset=1 << step)
            if other_at >= 0 and (at < 0 or other > top):
                top, at = other, other_at
        some = at >= 0

        # 2. The weighted sum.
        acc = [Float32(0.0) for _ in range(vec)]
        total = Float32(0.0)
        base = parts.iterator.toint() + (Int64(row) * parts.stride[1] + column) * (self.part.width // 8)
        split_bytes = Int64(parts.stride[0]) * (self.part.width // 8)
        for first in cutlass.range(0, n_split, t, unroll=1):
            x, present = self._lse(part_lse, first + lane, row, n_split)
            weight, source = Float32(0.0), cutlass.max(at, 0)
            if present:
                weight, source = cute.math.exp2((x - top) * LOG2E, fastmath=True), first + lane
            total = total + weight
            for j in cutlass.range(cutlass.min(t, n_split - first), unroll=self.IN_FLIGHT):
                w = cute.arch.shuffle_sync(weight, offset=group + j)
                s = cute.arch.shuffle_sync(source, offset=group + j)
                values = self._load(base + Int64(s) * split_bytes)
                acc = [a + w * v for a, v in zip(acc, values)]
        for step in cutlass.range_constexpr(t.bit_length() - 1):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << step)

        # 3. Normalise and store.
        denominator = total
        if cutlass.const_expr(self.has_sink):
            denominator = total + cute.math.exp2((sink[row % Int32(sink.shape[0])] - top) * LOG2E, fastmath=True)
        inverse = 1.0 / denominator
        acc = [cutlass.select_(some, a * inverse, Float32(0.0)) for a in acc]
        if stores:
            address = out.iterator.toint() + (Int64(row) * out.stride[0] + column) * (self.out.width // 8)
            self._store(address, acc)
            if column == 0 and chunk == 0 and lane == 0:
                value = top + cute.math.log2(total, fastmath=True) * LN2
                lse[row] = cutlass.select_(some, value, Float32(-cutlass.Float32.inf))

    def _lse(self, part_lse, split, row, n_split):
        """(lse of a part, whether it has keys); past the last part: none. `row` is in range."""
        inside = split < n_split
        offset = Int64(cutlass.select_(inside, split, Int32(0))) * part_lse.stride[0] + Int64(row) * part_lse.stride[1]
        x = (part_lse.iterator + offset).load()
        infinite = Boolean(x == Float32.inf) | Boolean(x == -Float32.inf)
        return x, inside & ~infinite

    def _piece(self, dtype, address):
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=self.vec * dtype.width // 8)
        return cute.make_tensor(pointer, cute.make_layout(self.vec))

    def _load(self, address):
        """vec elements at a byte address, as Float32."""
        piece = self._piece(self.part, address).load().to(Float32)
        return [piece[i] for i in range(self.vec)]

    def _store(self, address, values):
        staged = cute.make_rmem_tensor((self.vec,), Float32)
        for i in range(self.vec):
            staged[i] = values[i]
        self._piece(self.out, address).store(staged.load().to(self.out))
