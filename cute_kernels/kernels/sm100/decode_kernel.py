"""Active-length attention for few query rows (decode) on Blackwell: the device side.

Work. One CTA owns (batch row b, KV head h, row tile, split): up to N = 16 or 32 packed query rows (token-major, the G heads that
share KV head h inside) against `split_size` consecutive keys, in tiles of 128 keys. Keys take the tensor core's 128-row side, so
4 heads x 1 token do not waste it:
  S^T[128 keys, N]  = K (A, K-major) x Q^T (B, K-major)             one thread per key in the softmax
  O^T[D, N]         = V^T (A, MN-major: the V tile as it lies) x P (B, MN-major)     one thread per dim at the end
D is cut into blocks of 64 dims; a V block pair is one M = 128 product, an odd block M = 64. Dims past D are zeros in shared memory,
never read from global memory.

Groups. Up to 4 tiles form a group. All of its S stay in tensor memory, so one maximum serves the group: O accumulates in tensor
memory without rescaling, and is added to the thread's registers, with the usual factor, once a group.

Warps: 0-3 load Q, softmax, epilogue; 4 issues the tensor core's work (one thread) and owns the tensor memory; 5 loads full tiles by
TMA (the DSL's copy elects a thread); 6, 7 load the other tiles: the one that `kv_len` cuts (rows past the end become zeros, as
0 x NaN is NaN), tiles with appended rows, and all tiles of caches whose rows do not start at multiples of 16 bytes. They also write
appended rows.

Ring: slots of one K or V tile, in the order of use: the K tiles of a group, then its V tiles; its barriers full and empty as in
attention_base.

Barriers (count; who arrives; who waits). All start in phase 0; a role waits for "full" with parity 0 first, for "empty" with 1.
  q_full       4           warps 0-3, Q written                                                               warp 4
  s_full[j]    1           commit after S of the group's tile j                                               warps 0-3
  p_full[2]    4           warps 0-3: P written, S of that tile read                                          warp 4
  p_empty[2]   1           commit after P V                                                                   warps 0-3
  o_full       1           commit after the group's last P V                                                  warps 0-3
S of the next group may overwrite tile j's S because warp 4 has passed p_full of every tile of this group; O likewise, because
warps 0-3 read O before they arrive at p_full of the next group. Named barrier 1: warps 0-3; 2: warps 6-7.

Numbers. Logits in base 2: x = scale * log2(e) * q.k, fp32. The running maximum starts at -1e30, masked logits are -inf, so a row
without keys ends with maximum -1e30 and sum 0, never NaN. P is rounded to 16 bits for P V, the sum takes the unrounded values.

Reduction. With one split the result is final. Otherwise each split's (O, maximum, sum) goes to the workspace, one thread counts,
and the CTA that counts last merges all splits in split order. The counter wraps to 0 by itself, so a CUDA graph replays. The split
size depends on the number of keys alone (cute_kernels.kernels.splits).

Append. Keys [kv_len - S, kv_len) come from k_new and v_new, never from the cache; the CTA of split 0 copies its tokens' rows into
the cache, which no CTA of this launch reads.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64

from cute_kernels.kernels import ptx
from cute_kernels.kernels.scales import LN2
from cute_kernels.kernels.sm100 import tcgen05 as tc
from cute_kernels.kernels.sm100.attention_base import (
    BLOCK_BYTES,
    M_START,
    SMEM_CTA,
    TILE,
    AttentionBase,
    _address,
    _row_address,
    _stat_address,
    barrier_names,
    init_barriers,
)
from cute_kernels.kernels.split_merge import merge
from cute_kernels.kernels.splits import split_size

GROUP_TILES = 4
SMEM_HALF = 113 * 1024  # ... when two share an SM (1 KiB each is the driver's)
IN_FLIGHT = 96 * 1024  # bytes of K and V on the way that an SM needs at least (HBM rate x latency / SMs, with a margin)


class Budget:
    """Shared and tensor memory of a variant. Offsets in bytes from a 1024-byte boundary."""

    def __init__(self, blocks: int, n: int) -> None:
        self.slot = blocks * BLOCK_BYTES
        self.q_bytes = blocks * n * 128
        self.p_bytes = TILE * n * 2
        self.stats = 2 * 4 * n * 4  # maxima, sums: [4 warps][n]
        rest = self.q_bytes + 2 * self.p_bytes + self.stats + 256 + 1024
        slots = (SMEM_HALF - rest) // self.slot
        if slots * self.slot < IN_FLIGHT:  # alone on the SM
            slots = (SMEM_CTA - rest) // self.slot
        self.slots = min(slots, 2 * GROUP_TILES)
        self.q = self.slots * self.slot
        self.p = self.q + self.q_bytes
        self.max = self.p + 2 * self.p_bytes
        self.sum = self.max + self.stats // 2
        self.bars = self.max + self.stats
        self.total = self.bars + 256
        assert self.slots >= 2 and self.total + 1024 <= SMEM_CTA
        # Barriers, 8 bytes each, then the word that receives the address of the tensor memory, then the arrival flag.
        s_full = [f"s_full{i}" for i in range(GROUP_TILES)]
        names = barrier_names(self.slots, "q_full", *s_full, "p_full0", "p_full1", "p_empty0", "p_empty1", "o_full")
        self.bar = {name: self.bars + 8 * i for i, name in enumerate(names)}
        self.counts = [4 if name[:6] in ("q_full", "p_full") else 2 if name[:4] == "full" else 1 for name in names]
        self.tmem_word = self.bars + 8 * len(names)
        self.last_word = self.tmem_word + 4
        assert self.last_word + 4 <= self.total
        # Tensor memory: S of a group, then O.
        self.o_column = GROUP_TILES * n
        columns = self.o_column + -(-blocks // 2) * n
        self.columns = 1 << max(5, (columns - 1).bit_length())
        assert self.columns <= 512


class DecodeKernel(AttentionBase):
    """One compiled variant. Every argument is a compile-time constant: those of AttentionBase, and

    Args:
        n: packed rows per CTA, 16 or 32.
        split_cap: largest number of splits (see splits.split_size).
    """

    def __init__(
        self,
        bf16: bool,
        head_dim: int,
        group: int,
        single_token: bool,
        n: int,
        split_cap: int,
        wide: bool,
        causal: bool,
        window: bool,
        softcap: bool,
        sink: bool,
        append: bool,
        device_length: bool,
    ) -> None:
        if n not in (16, 32):
            raise ValueError(f"n {n}")
        super().__init__(
            bf16, head_dim, group, single_token, n, wide, causal, window, softcap, sink, append, device_length
        )
        self.n, self.cap = n, split_cap
        self.one_tile = single_token and group <= n  # all rows of a (b, h)
        self.blocks = -(-head_dim // 64)
        # (first block, blocks) of each product of V^T and P.
        self.products = [(i, min(2, self.blocks - i)) for i in range(0, self.blocks, 2)]
        self.budget = Budget(self.blocks, n)
        self.slots = self.budget.slots
        # Two CTAs an SM, where shared memory allows them, leave 128 registers a thread.
        self.ctas = 2 if self.budget.total + 1024 <= SMEM_HALF and n == 16 and wide else 1
        self.pitch = head_dim + 4  # floats per row in the workspace: O, maximum, sum, 2 unused

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # [B, Hq, S, D]
        k: cute.Tensor,  # [B, Hkv, C, D]
        v: cute.Tensor,  # [B, Hkv, C, D]
        out: cute.Tensor,  # [B, Hq, S, D]
        lse: cute.Tensor,  # [B, Hq, S] fp32
        lengths: cute.Tensor | None,  # [B] int32
        length: Int32,  # used when lengths is None
        workspace: cute.Tensor,  # fp32
        counters: cute.Tensor,  # int32, zeros
        sink: cute.Tensor | None,  # [Hq] fp32
        k_new: cute.Tensor | None,  # [B, Hkv, S, D]
        v_new: cute.Tensor | None,
        scale: Float32,  # sm_scale * log2(e); with softcap, sm_scale / softcap
        cap_log2: Float32,  # softcap * log2(e)
        window_left: Int32,
        split_slots: Int32,  # workspace slots per row tile = grid.x / row tiles
        row_tiles: Int32,
        stream,
    ):
        (tma_k, tma_k_coords), (tma_v, tma_v_coords) = self._tensor_maps(k, v)
        self.kernel(
            q, k, v, tma_k, tma_k_coords, tma_v, tma_v_coords, out, lse, lengths, length, workspace, counters, sink, k_new, v_new,
            scale, cap_log2, window_left, split_slots, row_tiles,
        ).launch(
            grid=[split_slots * row_tiles, k.shape[1], k.shape[0]],
            block=[256, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.ctas,
            # Without a number here the DSL asks the driver for the SM's shared memory, which needs a GPU at compile time.
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, tma_k: cute.CopyAtom | None, tma_k_coords: cute.Tensor | None,
        tma_v: cute.CopyAtom | None, tma_v_coords: cute.Tensor | None, out: cute.Tensor, lse: cute.Tensor,
        lengths: cute.Tensor | None, length: Int32, workspace: cute.Tensor, counters: cute.Tensor,
        sink: cute.Tensor | None, k_new: cute.Tensor | None, v_new: cute.Tensor | None,
        scale: Float32, cap_log2: Float32, window_left: Int32, split_slots: Int32, row_tiles: Int32,
    ):  # fmt: skip
        x, h, b = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        base = smem.allocate_tensor(Int32, cute.make_layout(self.budget.total // 4), 1024).iterator.toint()

        q_len, capacity = Int32(q.shape[2]), Int32(k.shape[2])
        n_rows = q_len * self.group
        split, row_tile = x, Int32(0)
        if cutlass.const_expr(not self.one_tile):
            split, row_tile = x % split_slots, x // split_slots
        row0 = row_tile * self.rt

        kv_len, new_end = self._kv_len(lengths, length, b, capacity)
        # Keys that any row of this tile may see: [low, high).
        low, high = Int32(0), kv_len
        if cutlass.const_expr(self.window):
            low = cutlass.max(0, kv_len - q_len + self._token(row_tile, 0) - window_left)
        if cutlass.const_expr(self.causal and not self.single):
            last_token = cutlass.min(self._token(row_tile, self.rt - 1), q_len - 1)
            high = cutlass.max(0, kv_len - q_len + last_token + 1)
        keys = cutlass.max(0, high - low)
        size = split_size(keys, TILE, self.cap, cutlass.select_)
        begin = low + split * size
        end = cutlass.min(begin + size, high)

        if begin < high or split == 0:
            self._work(
                q, k, v, tma_k, tma_k_coords, tma_v, tma_v_coords, out, lse, workspace, counters, sink, k_new, v_new, scale,
                cap_log2, window_left, split_slots, row_tiles, base, h, b, split, row_tile, row0, n_rows, q_len, kv_len,
                new_end - q_len, keys, size, begin, end,
            )  # fmt: skip

    @cute.jit
    def _work(
        self, q, k, v, tma_k, tma_k_coords, tma_v, tma_v_coords, out, lse, workspace, counters, sink, k_new, v_new, scale, cap_log2,
        window_left, split_slots, row_tiles, base, h, b, split, row_tile, row0, n_rows, q_len, kv_len, new_start, keys, size, begin,
        end,
    ):  # fmt: skip
        bar = {name: base + offset for name, offset in self.budget.bar.items()}
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        if warp == 4:
            tc.alloc(base + self.budget.tmem_word, self.budget.columns)
        if warp == 5 and lane == 0:
            init_barriers(base + self.budget.bars, self.budget.counts)
        tc.fence_before()
        cute.arch.sync_threads()
        tc.fence_after()
        tmem = tc.ld_shared_1(base + self.budget.tmem_word)
        n_tiles = cutlass.max(0, (end - begin + (TILE - 1)) // TILE)
        # Rows below `old` are in the cache already.
        old = end
        if cutlass.const_expr(self.append):
            old = cutlass.min(end, new_start)

        if warp < 4:
            self._softmax_warps(
                q, out, lse, workspace, counters, sink, scale, cap_log2, window_left, split_slots, row_tiles,
                base, bar, tmem, tid, warp, lane, h, b, split, row_tile, row0, n_rows, q_len, kv_len, keys, size, begin, end,
                n_tiles,
            )  # fmt: skip
        elif warp == 4:
            if lane == 0:
                self._mma_thread(base, bar, tmem, n_tiles)
        elif warp == 5:
            maps = (tma_k, tma_k_coords), (tma_v, tma_v_coords)
            self._tma_warp(maps, base, bar, lane, h, b, begin, old, n_tiles)
        else:
            sources = self._sources(k, v, k_new, v_new, h, b)
            self._loader_warps(sources, base, bar, tid - 192, begin, end, old, new_start, n_tiles)
            if cutlass.const_expr(self.append):
                if split == 0:
                    self._append_rows(k, v, k_new, v_new, tid - 192, h, b, row0, row0 + self.rt - 1, q_len, new_start)
        tc.fence_before()
        cute.arch.sync_threads()
        tc.fence_after()
        if warp == 4:
            tc.dealloc(tmem, self.budget.columns)

    # ---- loads: the K tiles of a group, then its V tiles -----------------------------------------------------------
    @cute.jit
    def _tma_warp(self, maps, base, bar, lane, h, b, begin, old, n_tiles):
        slot, phase = Int32(0), Int32(0)
        for g in cutlass.range(0, n_tiles, GROUP_TILES, unroll=1):
            tiles = cutlass.min(n_tiles - g, GROUP_TILES)
            for tensor_map in maps:
                for j in cutlass.range(tiles, unroll=1):
                    self._tma_slot(tensor_map, base, bar, slot, phase, begin + (g + j) * TILE, old, lane, h, b)
                    slot, phase = self._next(slot, phase)

    @cute.jit
    def _loader_warps(self, sources, base, bar, t, begin, end, old, new_start, n_tiles):
        slot, phase = Int32(0), Int32(0)
        for g in cutlass.range(0, n_tiles, GROUP_TILES, unroll=1):
            tiles = cutlass.min(n_tiles - g, GROUP_TILES)
            for source in sources:
                for j in cutlass.range(tiles, unroll=1):
                    self._loader_slot(source, base, bar, slot, phase, begin + (g + j) * TILE, end, old, new_start, t)
                    slot, phase = self._next(slot, phase)

    # ---- tensor core ----------------------------------------------------------------------------------------------
    @cute.jit
    def _mma_thread(self, base, bar, tmem, n_tiles):
        n, budget = self.n, self.budget
        k_desc = tc.smem_descriptor(tc.SWIZZLE_128B, 16, 1024)
        s_idesc = tc.instruction_descriptor(TILE, n, self.bf16, False, False)
        v_desc = tc.smem_descriptor(tc.SWIZZLE_128B, BLOCK_BYTES, 1024)
        p_desc = tc.smem_descriptor(tc.SWIZZLE_32B, TILE * 32, 256)
        slot, phase = Int32(0), Int32(0)
        if n_tiles > 0:
            ptx.mbar_wait(bar["q_full"], Int32(0))
        for g in cutlass.range(0, n_tiles, GROUP_TILES, unroll=1):
            tiles = cutlass.min(n_tiles - g, GROUP_TILES)
            for j in cutlass.range(tiles, unroll=1):
                ptx.mbar_wait(bar["full0"] + 8 * slot, phase)
                k_tile = base + slot * budget.slot
                for step in cutlass.range_constexpr(4 * self.blocks):
                    block, inner = step // 4, 32 * (step % 4)
                    tc.mma(
                        tmem + j * n,
                        k_tile + block * BLOCK_BYTES + inner, k_desc,
                        base + budget.q + block * (n * 128) + inner, k_desc,
                        s_idesc, step > 0,
                    )  # fmt: skip
                tc.commit(bar["empty0"] + 8 * slot)
                tc.commit(bar["s_full0"] + 8 * j)
                slot, phase = self._next(slot, phase)
            for j in cutlass.range(tiles, unroll=1):
                tile = g + j
                ptx.mbar_wait(bar["full0"] + 8 * slot, phase)
                ptx.mbar_wait(bar["p_full0"] + 8 * (tile % 2), (tile // 2) & 1)
                tc.fence_after()
                v_tile = base + slot * budget.slot
                p_tile = base + budget.p + (tile % 2) * budget.p_bytes
                for i, (first, count) in enumerate(self.products):
                    idesc = tc.instruction_descriptor(64 * count, n, self.bf16, True, True)
                    for step in cutlass.range_constexpr(TILE // 16):
                        accumulate = True if step > 0 else Int32(j > 0)
                        tc.mma(
                            tmem + budget.o_column + i * n,
                            v_tile + first * BLOCK_BYTES + step * 2048, v_desc,
                            p_tile + step * 512, p_desc,
                            idesc, accumulate,
                        )  # fmt: skip
                tc.commit(bar["empty0"] + 8 * slot)
                tc.commit(bar["p_empty0"] + 8 * (tile % 2))
                slot, phase = self._next(slot, phase)
            tc.commit(bar["o_full"])

    # ---- softmax --------------------------------------------------------------------------------------------------
    @cute.jit
    def _softmax_warps(
        self, q, out, lse, workspace, counters, sink, scale, cap_log2, window_left, split_slots, row_tiles,
        base, bar, tmem, tid, warp, lane, h, b, split, row_tile, row0, n_rows, q_len, kv_len, keys, size, begin, end, n_tiles,
    ):  # fmt: skip
        n = self.n
        if n_tiles > 0:
            self._load_q(q, base + self.budget.q, tid, h, b, row0, n_rows)
            cute.arch.sync_warp()
            if lane == 0:
                tc.mbar_arrive(bar["q_full"])

        m = [Float32(M_START) for _ in range(n)]
        l = [Float32(0.0) for _ in range(n)]
        o = [[Float32(0.0) for _ in range(n if count == 2 else n // 2)] for _, count in self.products]
        lanes = tmem + ((warp * 32) << 16)
        pos0 = kv_len - q_len
        for g in cutlass.range(0, n_tiles, GROUP_TILES, unroll=1):
            tiles = cutlass.min(n_tiles - g, GROUP_TILES)
            parity = (g // GROUP_TILES) & 1
            top = [Float32(M_START) for _ in range(n)]
            for j in cutlass.range(tiles, unroll=1):
                ptx.mbar_wait(bar["s_full0"] + 8 * j, parity)
                tc.fence_after()
                key = begin + (g + j) * TILE + tid
                x = self._logits(lanes + j * n, key, end, pos0, row_tile, scale, cap_log2, window_left)
                top = [ptx.fmax(a, b) for a, b in zip(top, x, strict=True)]
            m_new = self._maxima(top, m, base, warp, lane)
            alpha = [ptx.exp2(a - b) for a, b in zip(m, m_new, strict=True)]
            l = [a * b for a, b in zip(l, alpha, strict=True)]
            m = m_new
            for j in cutlass.range(tiles, unroll=1):
                tile = g + j
                key = begin + tile * TILE + tid
                x = self._logits(lanes + j * n, key, end, pos0, row_tile, scale, cap_log2, window_left)
                p = [ptx.exp2(a - b) for a, b in zip(x, m, strict=True)]
                l = [a + b for a, b in zip(l, p, strict=True)]
                ptx.mbar_wait(bar["p_empty0"] + 8 * (tile % 2), ((tile // 2) & 1) ^ 1)
                self._store_p(base + self.budget.p + (tile % 2) * self.budget.p_bytes, p, tid)
                tc.fence_proxy_async()
                tc.fence_before()
                cute.arch.sync_warp()
                if lane == 0:
                    tc.mbar_arrive(bar["p_full0"] + 8 * (tile % 2))
            ptx.mbar_wait(bar["o_full"], parity)
            tc.fence_after()
            o = self._add_o(o, lanes + self.budget.o_column, alpha, lane)
        l = self._sums(l, base, warp, lane)
        self._epilogue(
            out, lse, workspace, counters, sink, split_slots, row_tiles, base, tid, warp, lane, h, b, split, row_tile, row0,
            n_rows, keys, size, m, l, o,
        )  # fmt: skip

    def _logits(self, address, key, end, pos0, row_tile, scale, cap_log2, window_left):
        """This thread's key against every row: base-2 logits, -inf where the row does not see the key."""
        x = []
        inside = key < end
        for row, raw in enumerate(tc.ld(address, self.n)):
            y = self._capped(raw * scale, cap_log2)
            ok = inside
            if not self.single and (self.causal or self.window):
                pos = pos0 + self._token(row_tile, row)
                if self.causal:
                    ok = ok & (key <= pos)
                if self.window:
                    ok = ok & (key >= pos - window_left)
            x.append(ptx.select_f(Int32(ok), y, Float32(-float("inf"))))
        return x

    def _over_lanes(self, values, lane, op):
        """One value per row of all 32 lanes: halves are exchanged, so that lane i ends with row i (N = 32) or i // 2 (N = 16)."""
        mask = 16
        while len(values) > 1:
            half = len(values) // 2
            upper = Int32((lane & mask) != 0)
            kept = [ptx.select_f(upper, b, a) for a, b in zip(values[:half], values[half:], strict=True)]
            sent = [ptx.select_f(upper, a, b) for a, b in zip(values[:half], values[half:], strict=True)]
            values = [op(a, ptx.shuffle_xor_f(b, mask)) for a, b in zip(kept, sent, strict=True)]
            mask //= 2
        if mask:
            values = [op(values[0], ptx.shuffle_xor_f(values[0], mask))]
        return values[0]

    def _over_warps(self, values, to, warp, lane, op):
        """Every thread: [4 warps' values] of each row, through shared memory at `to`."""
        mine = self._over_lanes(values, lane, op)
        row = lane if self.n == 32 else lane // 2
        tc.st_shared_1(to + 4 * (warp * self.n + row), mine)
        cute.arch.barrier(barrier_id=1, number_of_threads=128)
        per_warp = []
        for w in range(4):
            at = to + 4 * w * self.n
            per_warp.append([x for i in range(self.n // 4) for x in ptx.ld_shared_f4(at + 16 * i)])
        return list(zip(*per_warp, strict=True))

    def _maxima(self, top, m, base, warp, lane):
        # The next group's stores to the same place come after o_full, hence after all warps have read.
        rows = self._over_warps(top, base + self.budget.max, warp, lane, ptx.fmax)
        return [
            ptx.fmax(old, ptx.fmax(ptx.fmax(a, b), ptx.fmax(c, d))) for old, (a, b, c, d) in zip(m, rows, strict=True)
        ]

    def _sums(self, l, base, warp, lane):
        rows = self._over_warps(l, base + self.budget.sum, warp, lane, lambda a, b: a + b)
        return [(a + b) + (c + d) for a, b, c, d in rows]

    def _store_p(self, to, p, tid):
        """Key `tid`'s row of P: [16 rows of the product][key][16], swizzled within 32 bytes."""
        for c in range(self.n // 16):
            words = [ptx.pack_16(p[16 * c + 2 * i], p[16 * c + 2 * i + 1], self.bf16) for i in range(8)]
            at = to + c * (TILE * 32) + tid * 32
            flip = 16 * ((tid // 4) % 2)
            tc.st_shared_4(at + flip, *words[:4])
            tc.st_shared_4(at + (16 - flip), *words[4:])

    def _rows_of(self, count, lane, values):
        """Of per-row values, those of the rows whose O this thread holds in a product of `count` blocks."""
        if count == 2:
            return values
        half = self.n // 2
        lower = Int32(lane < 16)
        return [ptx.select_f(lower, a, b) for a, b in zip(values[:half], values[half:], strict=True)]

    def _add_o(self, o, address, alpha, lane):
        """o * alpha + the group's O. A product of two blocks gives lane `tid` all rows of dim `tid`, one block as tc.ld_half."""
        result = []
        for i, (_, count) in enumerate(self.products):
            at = address + i * self.n
            new = tc.ld(at, self.n) if count == 2 else tc.ld_half(at, self.n // 2)
            factors = self._rows_of(count, lane, alpha)
            result.append([a * f + x for a, f, x in zip(o[i], factors, new, strict=True)])
        return result  # the next group's p_full hands O back

    # ---- results --------------------------------------------------------------------------------------------------
    def _places(self, warp, lane):
        """For each product: (this thread's dim, its first row: an offset that is 0 or N / 2)."""
        places = []
        for first, count in self.products:
            if count == 2:
                places.append((64 * first + 32 * warp + lane, Int32(0)))
            else:
                places.append((64 * first + 16 * warp + lane % 16, (lane // 16) * (self.n // 2)))
        return places

    @cute.jit
    def _epilogue(
        self, out, lse, workspace, counters, sink, split_slots, row_tiles, base, tid, warp, lane, h, b, split, row_tile, row0,
        n_rows, keys, size, m, l, o,
    ):  # fmt: skip
        n, d, pitch = self.n, self.d, self.pitch
        rows_here = cutlass.min(n_rows - row0, self.rt)
        count = cutlass.max(1, (keys + size - 1) // cutlass.max(size, 1))
        if count == 1:
            inverse = []
            for row in cutlass.range_constexpr(n):
                total = l[row] + self._sink_weight(sink, self._head(h, row_tile, row), m[row], row < rows_here)
                inverse.append(ptx.select_f(Int32(total > 0.0), ptx.rcp(total), Float32(0.0)))
            for (_, blocks), (dim, first), values in zip(self.products, self._places(warp, lane), o, strict=True):
                for r, (x, factor) in enumerate(zip(values, self._rows_of(blocks, lane, inverse), strict=True)):
                    packed = row0 + first + r
                    to = _row_address(out, b, h * self.group + packed % self.group, packed // self.group)
                    ok = (first + r < rows_here) & (dim < d)
                    tc.st_global_16(to + 2 * dim, x * factor, self.bf16, Int32(ok))
            for row in cutlass.range_constexpr(n):
                value = (m[row] + ptx.log2(l[row])) * LN2  # l = 0: -inf
                to = _stat_address(lse, b, self._head(h, row_tile, row), self._token(row_tile, row))
                tc.st_global_f1_if(to, value, Int32((tid == row) & (row < rows_here)))
        else:
            tile_index = (Int64(b) * (out.shape[1] // self.group) + h) * row_tiles + row_tile
            slot0 = tile_index * split_slots
            record = _address(workspace) + (slot0 + split) * self.rt * (4 * pitch)
            for (_, _), (dim, first), values in zip(self.products, self._places(warp, lane), o, strict=True):
                for r, x in enumerate(values):
                    ok = (first + r < rows_here) & (dim < d)
                    tc.st_global_f1_if(record + Int64(first + r) * (4 * pitch) + 4 * dim, x, Int32(ok))
            for row in cutlass.range_constexpr(n):
                ok = Int32((tid == row) & (row < rows_here))
                tc.st_global_f1_if(record + row * (4 * pitch) + 4 * d, m[row], ok)
                tc.st_global_f1_if(record + row * (4 * pitch) + 4 * d + 4, l[row], ok)
            # All 128 threads' stores come before one thread's count, whose release covers them.
            cute.arch.barrier(barrier_id=1, number_of_threads=128)
            if tid == 0:
                arrived = ptx.atom_inc_acq_rel(_address(counters) + tile_index * 4, count - 1)
                tc.st_shared_1(base + self.budget.last_word, arrived)
            cute.arch.barrier(barrier_id=1, number_of_threads=128)
            if tc.ld_shared_1(base + self.budget.last_word) == count - 1:
                self._merge_splits(out, lse, workspace, sink, warp, lane, h, b, row_tile, row0, rows_here, slot0, count)

    @cute.jit
    def _merge_splits(self, out, lse, workspace, sink, warp, lane, h, b, row_tile, row0, rows_here, slot0, count):
        """A warp per row, 4 dims of every 128 per lane; a batch of splits' loads in flight together."""
        d, pitch = self.d, self.pitch
        batch = 8 if d <= 128 else 4
        for row in cutlass.range(warp, rows_here, 4, unroll=1):
            m, l = Float32(M_START), Float32(0.0)
            o = [[Float32(0.0) for _ in range(4)] for _ in range(-(-d // 128))]
            for first in cutlass.range(0, count, batch, unroll=1):
                parts = [((m, l), o)]
                for j in cutlass.range_constexpr(batch):
                    ok = first + j < count
                    record = _address(workspace) + ((slot0 + first + j) * self.rt + row) * (4 * pitch)
                    part_m, part_l = tc.ld_global_f2_if(record + 4 * d, Int32(ok))
                    chunks = []
                    for c in cutlass.range_constexpr(-(-d // 128)):
                        col = 128 * c + 4 * lane
                        chunks.append(tc.ld_global_f4_if(record + 4 * col, Int32(ok & (col < d))))
                    # An absent split weighs nothing: maximum M_START, sum and O zero.
                    parts.append(((ptx.select_f(Int32(ok), part_m, Float32(M_START)), part_l), chunks))
                m, l, o = merge(parts)
            packed = row0 + row
            head, token = h * self.group + packed % self.group, packed // self.group
            total = l + self._sink_weight(sink, head, m, row < rows_here)
            inverse = ptx.select_f(Int32(total > 0.0), ptx.rcp(total), Float32(0.0))
            to = _row_address(out, b, head, token)
            for c in cutlass.range_constexpr(len(o)):
                col = 128 * c + 4 * lane
                if col < d:
                    words = [ptx.pack_16(o[c][2 * i] * inverse, o[c][2 * i + 1] * inverse, self.bf16) for i in range(2)]
                    ptx.st_global_2(to + 2 * col, words[0], words[1])
            if lane == 0:
                ptx.st_global_f1(_stat_address(lse, b, head, token), (m + ptx.log2(l)) * LN2)
