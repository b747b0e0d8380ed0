"""Loads of the Hopper decode kernel: cache rows through the warps' rings or straight into registers, Q, and appended rows.

For K and for V: `_fetch_` starts the copies of 16 keys into a ring slot, `_read_` takes a slot's fragments, `_load_` goes without a
ring. `source` is (base, row stride, base and stride of the appended rows), in bytes; a key past `last` reads row `last` instead.
The fragments' layout is in decode_kernel.py.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.kernels import ptx


class Loads:
    """Methods of DecodeKernel."""

    def _ld(self, addr, pred):
        """Zeros where pred is 0."""
        return ptx.ld_global_nc_4(addr, pred) if self.wide else ptx.ld_global_nc_4_halves(addr, pred)

    def _ld_row(self, addr, col_ok):
        """A piece of a cache row; in a block that D cuts, columns past D are zeros."""
        if col_ok is None and self.wide:
            return ptx.ld_global_nc_4_always(addr)
        return self._ld(addr, Int32(1) if col_ok is None else Int32(col_ok))

    def _row_address(self, source, key, new_start):
        base, stride, new_base, new_stride = source
        addr = base + Int64(key) * Int64(stride)
        if self.append:
            is_new = key >= new_start
            new_addr = new_base + Int64(key - new_start) * Int64(new_stride)
            addr = cutlass.select_(is_new, new_addr, addr)
        return addr

    def _load_k(self, source, base, last, new_start, g, t):
        """[block][key half][4 words]."""
        rows = []
        for half in range(2):
            key = cutlass.min(base + g + 8 * half, last)
            rows.append(self._row_address(source, key, new_start) + 16 * t)
        return [[self._ld_row(a + 64 * c, self._col_ok(32 * c, 8 * t, 32)) for a in rows] for c in range(self.k_blocks)]

    def _load_v(self, source, base, last, new_start, g, t):
        """[block][key 2t, 2t + 1, 2t + 8, 2t + 9][4 words]."""
        rows = []
        for e in (0, 1, 8, 9):
            key = cutlass.min(base + 2 * t + e, last)
            rows.append(self._row_address(source, key, new_start) + 16 * g)
        return [[self._ld_row(a + 128 * c, self._col_ok(64 * c, 8 * g, 64)) for a in rows] for c in range(self.v_blocks)]

    def _fetch_lines(self, slot, source, base, last, new_start, lane, swizzle):
        """16 rows of whole 128-byte lines into a ring slot [row][line][8 pieces], 8 neighbouring lanes to a line.

        The L2 counts requests: with the pieces of a line spread over the warp (as the fragments have them) it was the limit, at
        1.46 times the sectors and 3.3 TB/s. Piece i of a line of row r goes to i ^ swizzle(r), so that fragments, which other lanes
        read, come without bank conflicts.
        """
        base_addr, stride, new_base, new_stride = source
        piece = lane % 8
        shifted = base_addr + 16 * piece, stride, None if new_base is None else new_base + 16 * piece, new_stride
        for r in range(4):
            row = 4 * r + lane // 8
            addr = self._row_address(shifted, cutlass.min(base + row, last), new_start)
            to = slot + row * (2 * self.d) + 16 * (piece ^ swizzle(row))
            for c in range(self.d // 64):
                ptx.cp_async_16(to + 128 * c, addr + 128 * c, self.one_tile)

    def _fetch_k(self, slot, source, base, last, new_start, g, t, lane):
        """K of 16 keys into a ring slot; without whole lines a lane copies what it will read itself."""
        if self.lines:
            self._fetch_lines(slot, source, base, last, new_start, lane, lambda row: 4 * (row % 2))
            return
        for half in range(2):
            addr = self._row_address(source, cutlass.min(base + g + 8 * half, last), new_start) + 16 * t
            for c in range(self.k_blocks):
                self._fetch(slot + 16 * lane + 512 * (2 * c + half), addr + 64 * c, self._col_ok(32 * c, 8 * t, 32))

    def _read_k(self, slot, g, t, lane):
        """What _load_k returns, from a slot."""
        if self.lines:
            # Block c is pieces 4 * (c % 2) + t of line c // 2; rows g and g + 8 have the parity of g.
            at = slot + g * (2 * self.d) + 16 * t
            halves = [at + 64 * (g % 2), at + 64 * (1 - g % 2)]
            rows = 16 * self.d  # bytes of 8 rows
            return [
                [ptx.ld_shared_4(halves[c % 2] + 128 * (c // 2) + rows * half) for half in range(2)] for c in range(self.k_blocks)
            ]
        return [[ptx.ld_shared_4(slot + 16 * lane + 512 * (2 * c + half)) for half in range(2)] for c in range(self.k_blocks)]

    def _fetch_v(self, slot, source, base, last, new_start, g, t, lane):
        """V of 16 keys into a ring slot; without whole lines a lane copies what it will read itself."""
        if self.lines:
            self._fetch_lines(slot, source, base, last, new_start, lane, lambda row: 2 * ((row // 2) % 4))
            return
        for n, e in enumerate((0, 1, 8, 9)):
            addr = self._row_address(source, cutlass.min(base + 2 * t + e, last), new_start) + 16 * g
            for c in range(self.v_blocks):
                self._fetch(slot + 16 * lane + 512 * (4 * c + n), addr + 128 * c, self._col_ok(64 * c, 8 * g, 64))

    def _read_v(self, slot, g, t, lane):
        """What _load_v returns, from a slot."""
        if self.lines:
            # Block c is line c, piece g; rows 2t, 2t + 1, 2t + 8, 2t + 9 all have swizzle 2t.
            at = slot + 2 * t * (2 * self.d) + 16 * (g ^ (2 * t))
            return [[ptx.ld_shared_4(at + e * (2 * self.d) + 128 * c) for e in (0, 1, 8, 9)] for c in range(self.v_blocks)]
        return [[ptx.ld_shared_4(slot + 16 * lane + 512 * (4 * c + n)) for n in range(4)] for c in range(self.v_blocks)]

    def _next_slot(self, at):
        return at if self.stages == 1 else cutlass.select_(at == self.stages - 1, Int32(0), at + 1)

    def _fetch(self, to, addr, col_ok):
        if col_ok is None:
            ptx.cp_async_16(to, addr, self.one_tile)
        else:
            ptx.cp_async_16_zfill(to, addr, 16 * Int32(col_ok))

    def _token(self, row):
        """Query token of a packed row, its head below _head."""
        return Int32(0) if self.single else row // self.group

    def _head(self, h, row):
        return h * self.group + (row if self.single else row % self.group)

    def _load_q(self, p, w):
        """[block][row tile][4 words]; rows past the last are zeros."""
        rows = []
        for i in range(self.nt):
            row = w.row0 + w.g + 8 * i
            at = _address(p.q) + _offset(p.q, w.b, self._head(w.h, row), self._token(row)) * 2 + 16 * w.t
            rows.append((at, row < w.n_rows))
        cols = [self._col_ok(32 * c, 8 * w.t, 32) for c in range(self.k_blocks)]
        return [[self._ld(a + 64 * c, _pred(ok, col)) for a, ok in rows] for c, col in enumerate(cols)]

    def _col_ok(self, first, offset, width):
        """None when the whole block lies inside D."""
        return None if first + width <= self.d else first + offset < self.d

    @cute.jit
    def _append_rows(self, w, kv, new_start, capacity):
        """Copy the new rows of the tokens whose first row lies in this tile into the cache: a warp per token, 16 bytes per lane."""
        first = (w.row0 + (self.group - 1)) // self.group
        last = self._token(cutlass.min(w.row0 + self.rt, w.n_rows) - 1)
        for token in cutlass.range(first + w.warp, last + 1, self.warps, unroll=1):
            row = new_start + token
            if row >= 0 and row < capacity and 8 * w.lane < self.d:
                for source in kv:
                    base, stride, new_base, new_stride = source
                    words = self._ld(new_base + Int64(token) * Int64(new_stride) + 16 * w.lane, Int32(1))
                    to = base + Int64(row) * Int64(stride) + 16 * w.lane
                    if cutlass.const_expr(self.wide):
                        ptx.st_global_2(to, words[0], words[1])
                        ptx.st_global_2(to + 8, words[2], words[3])
                    else:
                        for i in cutlass.range_constexpr(4):
                            ptx.st_global_halves(to + 4 * i, words[i])


def _address(tensor):
    return Int64(tensor.iterator.toint())


def _offset(tensor, b, head, token):
    """Elements, of a [B, H, S, ...]."""
    return Int64(b) * tensor.stride[0] + Int64(head) * tensor.stride[1] + Int64(token) * tensor.stride[2]


def _pred(a, b):
    """Int32 predicate of one or two conditions."""
    return Int32(a) if b is None else Int32(a & b)
