"""What the Blackwell decode and prefill kernels of active-length attention share: loading Q, K, V and writing appended rows.

K and V come in tiles of 128 keys, cut into blocks of 64 dims, each block 128 rows of 128 bytes, swizzled; dims past D are zeros,
never read from global memory. Two producers fill a ring of slots of one tile each. A TMA warp loads the tiles that lie wholly in
the cache's active rows, through the cache's own strides. Two loader warps write the others by cp.async: the one that the end cuts
(rows past the end become zeros, as 0 x NaN is NaN), those with appended rows, and all tiles of caches whose rows do not start at
multiples of 16 bytes.

Barriers of a slot (count; who arrives; who waits):
  full   2 + bytes   the TMA warp, with the bytes of its copies if the tile is its own; a thread of the loader warps    MMA thread
  empty  1           commit after the MMAs that read the slot                                                            producers
Both producers pass every slot, whoever fills it: one that waited only for its own tiles could miss a phase, or two.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu import tcgen05 as cute_tcgen05

from cute_kernels.kernels import ptx
from cute_kernels.kernels.scales import LOG2E
from cute_kernels.kernels.sm100 import tcgen05 as tc
from cute_kernels.kernels.softcap import capped

M_START = -1.0e30
TILE = 128  # keys
BLOCK_BYTES = TILE * 128  # one 64-dim block of a tile
SMEM_CTA = 227 * 1024  # most of one CTA


class AttentionBase:
    """Compile-time constants of both kernels, and the methods of their loading warps.

    Args:
        bf16: bfloat16, else float16.
        head_dim: D, a multiple of 8, 16..256.
        group: G = Hq / Hkv.
        single_token: q_len is 1, so no per-row mask is needed.
        rows: packed query rows (token-major, the G heads of a KV head inside) of a row tile, of which a whole number of tokens is
            used where a token fits.
        wide: all row addresses are multiples of 16 bytes; else no TMA, and 2-byte loads.
        causal, window, softcap, sink, append, device_length: options; absent ones leave no code.
    """

    def __init__(
        self,
        bf16: bool,
        head_dim: int,
        group: int,
        single_token: bool,
        rows: int,
        wide: bool,
        causal: bool,
        window: bool,
        softcap: bool,
        sink: bool,
        append: bool,
        device_length: bool,
    ) -> None:
        if head_dim % 8 or not 16 <= head_dim <= 256:
            raise ValueError(f"head_dim {head_dim}")
        self.bf16, self.d, self.group, self.single = bf16, head_dim, group, single_token
        self.wide, self.causal, self.window, self.softcap, self.sink = wide, causal, window, softcap, sink
        self.append, self.device_length = append, device_length
        self.dtype = cutlass.BFloat16 if bf16 else cutlass.Float16
        self.rows, self.rt = rows, rows_per_tile(rows, group)
        self.blocks = -(-head_dim // 64)
        self.slot_bytes = self.blocks * BLOCK_BYTES
        self.slots = 0  # of the ring; set by the kernel

    # ---- rows -----------------------------------------------------------------------------------------------------
    def _token(self, row_tile, row: int):
        """Query token of a row of a tile."""
        if self.single:
            return Int32(0)
        if self.group <= self.rows:
            return row_tile * (self.rt // self.group) + row // self.group
        return (row_tile * self.rt + row) // self.group

    def _head(self, h, row_tile, row: int):
        if self.single:
            return h * self.group + row_tile * self.rt + row
        if self.group <= self.rows:
            return h * self.group + row % self.group
        return h * self.group + (row_tile * self.rt + row) % self.group

    def _kv_len(self, lengths, length, b, capacity):
        """(keys there are, where the appended rows end: past `capacity` none is written)"""
        if not self.device_length:
            return length, length
        # One lane of each warp asks: idle CTAs do nothing else, and there may be many.
        word = tc.ld_global_1_if(_address(lengths) + Int64(b) * 4, Int32(cute.arch.lane_idx() == 0))
        given = cutlass.max(0, ptx.shuffle_i(word, Int32(0)))
        return cutlass.min(given, capacity), given

    def _capped(self, y, cap_log2):
        """The base-2 logit of a scaled product."""
        return capped(y, cap_log2) if self.softcap else y

    def _sink_weight(self, sink, head, m, ok):
        if not self.sink:
            return Float32(0.0)
        bits = ptx.ld_global_1(_address(sink) + Int64(cutlass.select_(ok, head, Int32(0))) * 4)
        return ptx.exp2(ptx.as_float(bits) * LOG2E - m)

    # ---- tensor maps ----------------------------------------------------------------------------------------------
    def _box(self):
        """One 64-dim block of a tile in shared memory."""
        atom = cute_tcgen05.make_smem_layout_atom(cute_tcgen05.SmemLayoutAtomKind.K_SW128, self.dtype)
        return cute.tile_to_shape(atom, (TILE, 64), order=(0, 1))

    def _tensor_map(self, x):
        """(atom, coordinates) of a cache seen as (row, dim, head, batch), through its own strides."""
        # That of a dimension of size 1 may be anything.
        strides = [cutlass.select_(x.shape[i] == 1, Int64(8), x.stride[i]) for i in range(3)]
        s0, s1, s2 = [cute.assume(s, divby=8) for s in strides]
        view = cute.make_tensor(
            x.iterator, cute.make_layout((x.shape[2], self.d, x.shape[1], x.shape[0]), stride=(s2, 1, s1, s0))
        )
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, self._box(), (TILE, 64))

    def _tensor_maps(self, k, v):
        return [self._tensor_map(x) for x in (k, v)] if self.wide else [(None, None)] * 2

    # ---- the ring -------------------------------------------------------------------------------------------------
    def _next(self, slot, phase):
        """The ring's next slot, and the parity of its pass."""
        wrap = slot == self.slots - 1
        return cutlass.select_(wrap, Int32(0), slot + 1), phase ^ Int32(wrap)

    @cute.jit
    def _tma_slot(self, tensor_map, ring, bar, slot, phase, row, old, lane, h, b):
        """The TMA warp at one slot: the tile that starts at `row`; rows below `old` lie in the cache."""
        atom, coords = tensor_map
        ptx.mbar_wait(bar["empty0"] + 8 * slot, phase ^ 1)
        full = bar["full0"] + 8 * slot
        mine = self.wide and row + TILE <= old
        if lane == 0:
            if mine:
                ptx.mbar_expect(full, self.slot_bytes)
            else:
                tc.mbar_arrive(full)
        if cutlass.const_expr(self.wide):
            if mine:
                self._tma_tile(atom, coords, ring + slot * self.slot_bytes, full, row, h, b)

    def _tma_tile(self, atom, coords, to, full, row, h, b):
        rows = cute.domain_offset((row, 0), coords[None, None, h, b])
        bar_ptr = cute.make_ptr(Int64, full, cute.AddressSpace.smem, assumed_align=8)
        for c in range(self.blocks):
            at = cute.make_ptr(self.dtype, to + c * BLOCK_BYTES, cute.AddressSpace.smem, assumed_align=1024)
            box = cute.make_tensor(at, self._box())
            source = cute.local_tile(rows, (TILE, 64), (0, c))
            s, g = cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(box, 0, 2), cute.group_modes(source, 0, 2))
            cute.copy(atom, g, s, tma_bar_ptr=bar_ptr)

    def _sources(self, k, v, k_new, v_new, h, b):
        """For K and for V: (address of row 0, bytes from row to row) of the cache and of the appended rows, or None."""
        cache = [(_head_address(x, b, h), Int64(x.stride[2]) * 2) for x in (k, v)]
        if not self.append:
            return [(c, None) for c in cache]
        return list(zip(cache, [(_head_address(x, b, h), Int64(x.stride[2]) * 2) for x in (k_new, v_new)], strict=True))

    @cute.jit
    def _loader_slot(self, source, ring, bar, slot, phase, row, end, old, new_start, t):
        """The loader warps (t is 0..63) at one slot: the tile that starts at `row`, rows below `end` are wanted."""
        ptx.mbar_wait(bar["empty0"] + 8 * slot, phase ^ 1)
        mine = not self.wide or row + TILE > old
        if mine:
            self._copy_tile(source, ring + slot * self.slot_bytes, t, row, end, new_start)
            tc.fence_proxy_async()
        cute.arch.barrier(barrier_id=2, number_of_threads=64)
        if t == 0:
            tc.mbar_arrive(bar["full0"] + 8 * slot)

    @cute.jit
    def _copy_tile(self, source, to, t, row, end, new_start):
        """128 rows by 64 threads, 8 neighbouring threads to a 128-byte line; rows at or past `end` and dims past D become zeros."""
        piece = t % 8
        (address, stride), new_source = source
        for i in cutlass.range(TILE // 8, unroll=2):
            r = t // 8 + 8 * i
            key = row + r
            inside = key < end
            at = address + Int64(cutlass.select_(inside, key, Int32(0))) * stride
            if cutlass.const_expr(self.append):
                new_address, new_stride = new_source
                at = cutlass.select_(inside & (key >= new_start), new_address + Int64(key - new_start) * new_stride, at)
            swizzled = to + r * 128 + 16 * (piece ^ (r % 8))
            for c in cutlass.range_constexpr(self.blocks):
                ok = inside if 64 * (c + 1) <= self.d else inside & (64 * c + 8 * piece < self.d)
                self._copy_16(swizzled + c * BLOCK_BYTES, at + 2 * (64 * c + 8 * piece), ok, at)
        if cutlass.const_expr(self.wide):
            ptx.cp_async_commit()
            ptx.cp_async_wait(0)

    def _copy_16(self, to, source, ok, valid):
        """16 bytes of global to shared memory, or zeros; `valid` is an address that exists."""
        if self.wide:
            ptx.cp_async_16_zfill(to, cutlass.select_(ok, source, valid), 16 * Int32(ok))
        else:
            tc.st_shared_4(to, *ptx.ld_global_nc_4_halves(source, Int32(ok)))

    # ---- append ---------------------------------------------------------------------------------------------------
    @cute.jit
    def _append_rows(self, k, v, k_new, v_new, t, h, b, first_row, last_row, q_len, new_start):
        """The loader warps copy the new rows of the tokens whose first packed row is one of these into the cache: a warp per token,
        16 bytes per lane. Nothing in this launch reads them there."""
        lane = t % 32
        first = (first_row + self.group - 1) // self.group
        last = cutlass.min(last_row // self.group, q_len - 1)
        for token in cutlass.range(first + t // 32, last + 1, 2, unroll=1):
            row = new_start + token
            if row >= 0 and row < Int32(k.shape[2]) and 8 * lane < self.d:
                for cache, new in ((k, k_new), (v, v_new)):
                    source = _head_address(new, b, h) + Int64(token) * Int64(new.stride[2]) * 2 + 16 * lane
                    to = _head_address(cache, b, h) + Int64(row) * Int64(cache.stride[2]) * 2 + 16 * lane
                    if cutlass.const_expr(self.wide):
                        words = ptx.ld_global_nc_4(source, Int32(1))
                        ptx.st_global_2(to, words[0], words[1])
                        ptx.st_global_2(to + 8, words[2], words[3])
                    else:
                        words = ptx.ld_global_nc_4_halves(source, Int32(1))
                        for i in cutlass.range_constexpr(4):
                            ptx.st_global_halves(to + 4 * i, words[i])

    # ---- Q --------------------------------------------------------------------------------------------------------
    @cute.jit
    def _load_q(self, q, to, t, h, b, row0, n_rows):
        """128 threads write Q as a K-major operand: [block][row][64 dims]; rows without a query are zeros."""
        per_row = 8 * self.blocks
        for i in cutlass.range_constexpr(-(-self.rows * per_row // 128)):
            index = t + 128 * i
            row, piece = index // per_row, index % per_row
            packed = row0 + row
            ok = (row < self.rt) & (packed < n_rows) & (8 * piece < self.d)
            source = _row_address(q, b, h * self.group + packed % self.group, packed // self.group) + 16 * piece
            words = ptx.ld_global_nc_4(source, Int32(ok)) if self.wide else ptx.ld_global_nc_4_halves(source, Int32(ok))
            at = to + (piece // 8) * (self.rows * 128) + row * 128 + 16 * ((piece % 8) ^ (row % 8))
            if row < self.rows:
                tc.st_shared_4(at, *words)
        tc.fence_proxy_async()


def rows_per_tile(rows: int, group: int) -> int:
    """Packed rows that a tile uses: whole tokens, where one fits."""
    return rows - rows % group if group <= rows else rows


def barrier_names(slots: int, *others: str) -> list[str]:
    return [f"full{i}" for i in range(slots)] + [f"empty{i}" for i in range(slots)] + list(others)


def init_barriers(at: Any, counts: list[int]) -> None:
    """One thread; publish with a CTA barrier."""
    for i, count in enumerate(counts):
        tc.mbar_init(at + 8 * i, count)
    tc.fence_mbar_init()


def _address(tensor):
    return Int64(tensor.iterator.toint())


def _head_address(x, b, h):
    """Of row 0 of a (b, h) in a 16-bit tensor [B, H, ., D]."""
    return _address(x) + (Int64(b) * x.stride[0] + Int64(h) * x.stride[1]) * 2


def _row_address(x, b, head, token):
    return _head_address(x, b, head) + Int64(token) * x.stride[2] * 2


def _stat_address(lse, b, head, token):
    return _address(lse) + (Int64(b) * lse.stride[0] + Int64(head) * lse.stride[1] + Int64(token) * lse.stride[2]) * 4
