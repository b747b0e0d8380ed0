"""Merging of the Hopper decode kernel's partial results: warps of a CTA, splits of a row tile, and the final division.

A partial result of a row is (maximum, sum, O): logits' maximum in base 2, sum of exponentials, O not yet divided. Whoever merges,
a lane holds 4 dims of every 128 of O. p: the call's arguments; w: this warp's place (b, h, row_tile, row0, n_rows, warp, lane,
s_base). A row of a tile belongs to warp row % warps.

Splits are folded one after the other in split order (`_fold`), so that the bits are the same in all three places: in the running
result of a CTA that has all splits, through the shared memory of a cluster, or from the workspace by the CTA that arrives last.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.kernels import ptx
from cute_kernels.kernels.scales import LN2, LOG2E
from cute_kernels.kernels.sm90.decode_loads import _address, _offset, _pred

M_START = -1.0e30


class Merging:
    """Methods of DecodeKernel."""

    def _my_rows(self):
        """Rows that a warp merges, at most."""
        return -(-self.part_rows // self.warps)

    def _slot0(self, p, w):
        """(the row tile's number, its first record in the workspace)."""
        tile_index = (Int64(w.b) * (p.out.shape[1] // self.group) + w.h) * p.row_tiles + w.row_tile
        return tile_index, tile_index * p.split_slots

    def _last_row(self, w):
        """Rows of this row tile."""
        return cutlass.min(w.n_rows - w.row0, self.rt)

    @cute.jit
    def _merge_rows(self, p, w, split, count):
        """One split per CTA: a warp's rows. Merge the CTA's warps, then, where this split arrives last, all splits. A lane has 4
        dims of every 128."""
        last_row = self._last_row(w)
        _, slot0 = self._slot0(p, w)
        for i in cutlass.range_constexpr(self._my_rows()):
            row = w.warp + i * self.warps
            if row < last_row:
                part = _merge(self._warp_parts(w, row))
                if count == 1:
                    self._finish(p, w, row, part)
                elif self.cluster and count <= self.cluster:
                    self._store_state(w.s_base + self.merged_at, row, w.lane, part)
                else:
                    self._store_record(p, w, (slot0 + split) * self.rt + row, part)
        together = False
        if cutlass.const_expr(self.cluster):
            together = count <= self.cluster
        if together:
            if count > 1:
                self._merge_cluster(p, w, split, count)
        elif count > 1:
            self._arrive(p, w, count, count)

    @cute.jit
    def _merge_cluster(self, p, w, split, count):
        """All splits are in this cluster: rank = split; ranks from `count` on have exited, which both barriers allow for. The rows
        are dealt out to all warps of all ranks."""
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        for row in cutlass.range(split + count * w.warp, self._last_row(w), count * self.warps, unroll=1):
            state = self._no_state()
            at = w.s_base + self.merged_at + row * 4 * self.pitch
            parts = []
            for rank in cutlass.range_constexpr(self.cluster):
                there, ok = ptx.map_shared_rank(at, Int32(rank)), Int32(rank < count)
                m, l = ptx.ld_cluster_f2(there + 4 * self.d, ok)
                chunks = [ptx.ld_cluster_f4(there + 16 * self._column(c, w.lane), ok) for c in range(self.o_chunks)]
                parts.append((ptx.select_f(ok, m, Float32(M_START)), l, chunks))
            for part in parts:
                state = _fold(state, part)
            self._finish(p, w, row, state)
        # No CTA may exit while its peers read from it.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def _store_record(self, p, w, record, state):
        """A row's maximum, sum and O to the workspace."""
        m, l, o = state
        to = _address(p.workspace) + record * (4 * self.pitch)
        for c in cutlass.range_constexpr(self.o_chunks):
            if 128 * c + 4 * w.lane < self.d:
                ptx.st_global_f4(to + 4 * (128 * c + 4 * w.lane), *o[c])
        if w.lane == 0:
            ptx.st_global_f2(to + 4 * self.d, m, l)

    @cute.jit
    def _arrive(self, p, w, count, arrivals):
        """A warp's rows are in the workspace: count, and merge those of which all `arrivals` CTAs' splits are there."""
        last_row = self._last_row(w)
        tile_index, slot0 = self._slot0(p, w)
        per_warp = self._my_rows()
        # Lane i counts for the warp's i-th row, all rows at once: the release covers the warp's stores above.
        cute.arch.sync_warp()
        arrived = Int32(0)
        mine = w.warp + w.lane * self.warps
        if w.lane < per_warp and mine < last_row:
            arrived = ptx.atom_inc_acq_rel(_address(p.counters) + (tile_index * self.rt + mine) * 4, arrivals - 1)
        # Two rows at a time, so that their loads are in flight together.
        for i in cutlass.range_constexpr(0, per_warp, 2):
            rows = [w.warp + j * self.warps for j in range(i, min(i + 2, per_warp))]
            seen = [ptx.shuffle_i(arrived, Int32(j)) for j in range(i, min(i + 2, per_warp))]
            wanted = [Int32(old == arrivals - 1) & Int32(row < last_row) for old, row in zip(seen, rows, strict=True)]
            if (wanted[0] | wanted[-1]) != 0:
                cute.arch.sync_warp()
                self._merge_splits(p, w, slot0, rows, wanted, count)

    @cute.jit
    def _merge_splits(self, p, w, slot0, rows, wanted, count):
        """One or two rows: fold all splits in split order, `batch` splits at a time, whose loads are in flight together. Lane j
        holds maximum and sum of the batch's split j, every lane its dims of all of them."""
        batch = (16 if self.d <= 128 else 8) // len(rows)
        states = [self._no_state() for _ in rows]
        for i in cutlass.range((count + batch - 1) // batch, unroll=1):
            parts = [self._split_parts(p, w, slot0, row, i * batch, batch, count) for row in rows]
            for j in cutlass.range_constexpr(len(rows)):
                part_m, part_l, part_o = parts[j]
                for e in cutlass.range_constexpr(batch):
                    part = ptx.shuffle_f(part_m, Int32(e)), ptx.shuffle_f(part_l, Int32(e)), part_o[e]
                    states[j] = _fold(states[j], part)
        for j in cutlass.range_constexpr(len(rows)):
            if wanted[j] != 0:
                self._finish(p, w, rows[j], states[j])

    def _no_state(self):
        return Float32(M_START), Float32(0.0), [[Float32(0.0) for _ in range(4)] for _ in range(self.o_chunks)]

    @cute.jit
    def _collect(self, p, w, split, is_first, alone):
        """Several splits per CTA: a warp's rows of one split. Merge the warps; fold into the running result when this CTA has all
        splits, else write a record. The running result of a row belongs to one warp, each lane to its own part of it."""
        last_row = self._last_row(w)
        _, slot0 = self._slot0(p, w)
        for i in cutlass.range_constexpr(self._my_rows()):
            row = w.warp + i * self.warps
            if row < last_row:
                part = _merge(self._warp_parts(w, row))
                if alone == 0:
                    self._store_record(p, w, (slot0 + split) * self.rt + row, part)
                else:
                    state = self._no_state()
                    if is_first == 0:
                        state = self._load_running(w, row)
                    cute.arch.sync_warp()  # all lanes have read maximum and sum
                    self._store_state(w.s_base + self.running_at, row, w.lane, _fold(state, part))
                    cute.arch.sync_warp()

    def _load_running(self, w, row):
        at = w.s_base + self.running_at + row * 4 * self.pitch
        chunks = [ptx.ld_shared_f4(at + 16 * self._column(c, w.lane)) for c in range(self.o_chunks)]
        m, l = ptx.ld_shared_f2(at + 4 * self.d)
        return m, l, chunks

    @cute.jit
    def _store_state(self, to, row, lane, state):
        """A row's maximum, sum and O to shared memory."""
        m, l, o = state
        at = to + row * 4 * self.pitch
        for c in cutlass.range_constexpr(self.o_chunks):
            if 128 * c + 4 * lane < self.d:
                ptx.st_shared_f4(at + 16 * (32 * c + lane), *o[c])
        if lane == 0:
            ptx.st_shared_f2(at + 4 * self.d, m, l)

    @cute.jit
    def _finish_rows(self, p, w):
        """The running results are final."""
        for i in cutlass.range_constexpr(self._my_rows()):
            row = w.warp + i * self.warps
            if row < self._last_row(w):
                self._finish(p, w, row, self._load_running(w, row))

    def _column(self, c, lane):
        """In units of 4 dims; lanes past D take column 0, and what they compute is not stored."""
        return cutlass.select_(128 * c + 4 * lane < self.d, 32 * c + lane, Int32(0)) if self.d % 128 else 32 * c + lane

    def _warp_parts(self, w, row):
        parts = []
        for i in range(self.warps):
            at = w.s_base + self.parts_at + i * self.part_stride + row * 4 * self.pitch
            chunks = [ptx.ld_shared_f4(at + 16 * self._column(c, w.lane)) for c in range(self.o_chunks)]
            parts.append((*ptx.ld_shared_f2(at + 4 * self.d), chunks))
        return parts

    def _split_parts(self, p, w, slot0, row, first, n, count):
        """(maximum, sum) of split first + lane % n, and [split][chunk][4 floats] of O; an absent split weighs nothing."""
        base = _address(p.workspace) + (slot0 * self.rt + row) * 4 * self.pitch
        step = self.rt * 4 * self.pitch  # bytes from split to split
        mine = first + w.lane % n
        m, l = ptx.ld_relaxed_2(base + Int64(mine) * step + 4 * self.d, Int32(mine < count))
        chunks = []
        for j in range(n):
            record = base + Int64(first + j) * step
            chunks.append([])
            for c in range(self.o_chunks):
                col = 128 * c + 4 * w.lane
                ok = _pred(first + j < count, col < self.d if self.d % 128 else None)
                chunks[j].append(ptx.ld_relaxed_4(record + 4 * col, ok))
        return ptx.select_f(Int32(mine < count), m, Float32(M_START)), l, chunks

    @cute.jit
    def _finish(self, p, w, row, state):
        """Row `row` of the row tile: O divided, and lse."""
        m, l, o = state
        head, token = self._head(w.h, w.row0 + row), self._token(w.row0 + row)
        total = l
        if cutlass.const_expr(self.sink):
            bits = ptx.ld_global_1(_address(p.sink) + Int64(head) * 4)
            total = l + ptx.exp2(ptx.as_float(bits) * LOG2E - m)
        inverse = ptx.select_f(Int32(total > 0.0), ptx.rcp(total), Float32(0.0))
        to = _address(p.out) + _offset(p.out, w.b, head, token) * 2
        for c in cutlass.range_constexpr(self.o_chunks):
            col = 128 * c + 4 * w.lane
            if col < self.d:
                words = [ptx.pack_16(o[c][2 * i] * inverse, o[c][2 * i + 1] * inverse, self.bf16) for i in range(2)]
                ptx.st_global_2(to + 2 * col, words[0], words[1])
        if w.lane == 0:
            value = (m + ptx.log2(l)) * LN2  # l = 0: -inf
            ptx.st_global_f1(_address(p.lse) + _offset(p.lse, w.b, head, token) * 4, value)


def _fold(state, part):
    """Softmax partials (maximum, sum, [4 floats] per chunk): the next split into the running result. Written with explicit fused
    multiply-adds: every place where splits are folded has to give the same bits."""
    m, l, o = state
    part_m, part_l, part_o = part
    top = ptx.fmax(m, part_m)
    old, new = ptx.exp2(m - top), ptx.exp2(part_m - top)
    folded = [[ptx.fma(x, old, y * new) for x, y in zip(a, c, strict=True)] for a, c in zip(o, part_o, strict=True)]
    return top, ptx.fma(l, old, part_l * new), folded


def _merge(parts):
    """Warps' partial results merged in list order."""
    top = parts[0][0]
    for m, _, _ in parts[1:]:
        top = ptx.fmax(top, m)
    l = o = None
    for m, part_l, part_o in parts:
        w = ptx.exp2(m - top)
        if l is None:
            l, o = part_l * w, [[x * w for x in chunk] for chunk in part_o]
        else:
            l = l + part_l * w
            o = [[x * w + y for x, y in zip(chunk, acc, strict=True)] for chunk, acc in zip(part_o, o, strict=True)]
    return top, l, o
