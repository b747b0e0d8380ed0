"""Active-length attention for many query rows (prefill, long q) on Blackwell: the device side.

Work. One CTA owns (batch row b, KV head h) and two tiles of 128 packed query rows (token-major, the G heads that share KV head
h inside); one tile where D > 128. It walks the key tiles of 128 that any of its rows sees:
  S[128 rows, 128 keys] = Q (A, K-major) x K^T (B, K-major)                          one thread per row in the softmax
  O[128 rows, D]       += P (A, in tensor memory) x V (B, MN-major: the V tile as it lies)
The two tiles share each K and V tile, and take turns: while one's softmax runs, the tensor core works for the other. CTAs with the
most key tiles (the last tokens) start first.

Warps (two tiles; with one, warps 4-7 are missing): 0-3 and 4-7 load Q, softmax and epilogue of tile 0 and 1; 8 issues the tensor
core's work (one thread) and owns the tensor memory; 9 TMA; 10, 11 load what TMA does not (see attention_base) and write appended
rows.

Tensor memory, columns: S of tile t at 128 t, P over its first half (16-bit); O of tile t behind, 64 per block of 64 dims.

Ring: slots of one K or V tile in the order K0, K1, V0, K2, V1, ..., its barriers full and empty as in attention_base. The tensor
core's order, for each key tile j: P V of tile 0, then Q K^T of its next key tile; the same for tile 1. MMAs of one thread run in
order: S(j + 1) overwrites P(j) after it has been read, and s_full of j + 1 says that P V of j is done. The ISA promises that order
only for products of one shape and accumulator; FlashAttention 4 relies on it here too, and a wait would idle the tensor core.

Barriers (count; who arrives; who waits). All start in phase 0; key tile j is phase j of s_full and p_full.
  q_full[t]   4   the tile's softmax warps, Q written                                                       MMA thread
  s_full[t]   1   commit after S of a key tile                                                             the tile's softmax warps
  p_full[t]   4   the tile's softmax warps: S read, P written, O rescaled                                   MMA thread
  o_full[t]   1   commit after the last P V                                                                the tile's softmax warps

Numbers. Logits in base 2: x = |scale| log2(e) * (+-q).k, fp32, masked ones -inf. Weights are 2^(x - m) with a reference m that
starts at -1e30 and follows the running maximum lazily: only where some row of the warp exceeds its m by more than 6 do its rows
take the maximum, and O is rescaled in tensor memory. Weights are thus below 2^6, and the sum takes them before they are rounded to
16 bits. A key tile that no mask can touch takes the maximum of S itself, and its logits by one packed multiply-add each pair,
unless the scale is huge.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32

from cute_kernels.kernels import ptx
from cute_kernels.kernels.scales import LN2, LOG2E, PLAIN_SCALE
from cute_kernels.kernels.sm100 import tcgen05 as tc
from cute_kernels.kernels.sm100.attention_base import (
    BLOCK_BYTES,
    M_START,
    SMEM_CTA,
    TILE,
    AttentionBase,
    _row_address,
    _stat_address,
    barrier_names,
    init_barriers,
)

ROWS = 128
MAX_SLOTS = 8
LAZY = 6.0  # log2 of how far a weight may exceed 1
CHUNK = 32  # columns of S or O in registers at a time


class PrefillKernel(AttentionBase):
    """One compiled variant. Every argument is a compile-time constant, as in AttentionBase."""

    def __init__(
        self,
        bf16: bool,
        head_dim: int,
        group: int,
        wide: bool,
        causal: bool,
        window: bool,
        softcap: bool,
        sink: bool,
        append: bool,
        device_length: bool,
    ) -> None:
        super().__init__(bf16, head_dim, group, False, ROWS, wide, causal, window, softcap, sink, append, device_length)
        self.tiles = 2 if self.blocks <= 2 else 1
        # Shared memory, bytes from a 1024-byte boundary: the ring, Q, barriers, the address of the tensor memory.
        q_bytes = self.blocks * ROWS * 128
        self.slots = min(MAX_SLOTS, (SMEM_CTA - 1024 - 256 - self.tiles * q_bytes) // self.slot_bytes)
        assert self.slots >= 2
        self.q = [self.slots * self.slot_bytes + t * q_bytes for t in range(self.tiles)]
        self.bars = self.q[-1] + q_bytes
        others = [f"{name}{t}" for name in ("q_full", "s_full", "p_full", "o_full") for t in range(self.tiles)]
        names = barrier_names(self.slots, *others)
        self.bar = {name: self.bars + 8 * i for i, name in enumerate(names)}
        self.counts = [4 if name[:6] in ("q_full", "p_full") else 2 if name[:4] == "full" else 1 for name in names]
        self.tmem_word = self.bars + 8 * len(names)
        self.total = self.bars + 256
        assert self.tmem_word + 4 <= self.total and self.total + 1024 <= SMEM_CTA
        # Tensor memory, columns.
        self.s = [TILE * t for t in range(self.tiles)]
        self.o = [TILE * self.tiles + 64 * self.blocks * t for t in range(self.tiles)]
        assert self.o[-1] + 64 * self.blocks <= 512
        self.mma_warp = 4 * self.tiles
        self.threads = 128 * self.tiles + 128

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
        sink: cute.Tensor | None,  # [Hq] fp32
        k_new: cute.Tensor | None,  # [B, Hkv, S, D]
        v_new: cute.Tensor | None,
        scale: Float32,  # sm_scale * log2(e); with softcap, sm_scale / softcap
        cap_log2: Float32,  # softcap * log2(e)
        window_left: Int32,
        stream,
    ):
        (tma_k, tma_k_coords), (tma_v, tma_v_coords) = self._tensor_maps(k, v)
        rows = self.tiles * self.rt
        self.kernel(
            q, k, v, tma_k, tma_k_coords, tma_v, tma_v_coords, out, lse, lengths, length, sink, k_new, v_new, scale, cap_log2,
            window_left,
        ).launch(
            grid=[(q.shape[2] * self.group + (rows - 1)) // rows, k.shape[1], k.shape[0]],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            # Without a number here the DSL asks the driver for the SM's shared memory, which needs a GPU at compile time.
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, tma_k: cute.CopyAtom | None, tma_k_coords: cute.Tensor | None,
        tma_v: cute.CopyAtom | None, tma_v_coords: cute.Tensor | None, out: cute.Tensor, lse: cute.Tensor,
        lengths: cute.Tensor | None, length: Int32, sink: cute.Tensor | None, k_new: cute.Tensor | None,
        v_new: cute.Tensor | None, scale: Float32, cap_log2: Float32, window_left: Int32,
    ):  # fmt: skip
        x, h, b = cute.arch.block_idx()
        blocks_x, _, _ = cute.arch.grid_dim()
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        smem = cutlass.memory.SmemAllocator()
        base = smem.allocate_tensor(Int32, cute.make_layout(self.total // 4), 1024).iterator.toint()
        bar = {name: base + offset for name, offset in self.bar.items()}

        q_len = Int32(q.shape[2])
        n_rows = q_len * self.group
        kv_len, new_end = self._kv_len(lengths, length, b, Int32(k.shape[2]))
        start = kv_len - q_len  # position of token 0
        new_start = new_end - q_len
        row0 = [((blocks_x - 1 - x) * self.tiles + t) * self.rt for t in range(self.tiles)]
        # Keys from `low` on, in `n[t]` tiles for row tile t.
        low = Int32(0)
        if cutlass.const_expr(self.window):
            low = cutlass.max(0, start + row0[0] // self.group - window_left)
        n = [self._key_tiles(r, n_rows, start, kv_len, low) for r in row0]
        most = n[0] if self.tiles == 1 else cutlass.max(n[0], n[1])
        # Softmax knows scales from 0 up only: with a negative one the tensor core negates Q.
        sign = cutlass.select_(scale < 0.0, Int32(tc.NEGATE_A), Int32(0))
        scale = ptx.fmax(scale, 0.0 - scale)
        # Rows below `old` are in the cache already.
        old = cutlass.min(kv_len, new_start) if self.append else kv_len

        if warp == self.mma_warp:
            tc.alloc(base + self.tmem_word, 512)
        if warp == self.mma_warp + 1 and lane == 0:
            init_barriers(base + self.bars, self.counts)
        tc.fence_before()
        cute.arch.sync_threads()
        tc.fence_after()
        tmem = tc.ld_shared_1(base + self.tmem_word)

        if warp < self.mma_warp:
            for t in cutlass.range_constexpr(self.tiles):
                if warp // 4 == t:
                    self._softmax_warps(
                        t, q, out, lse, sink, scale, cap_log2, window_left, base, bar, tmem, tid - 128 * t, warp - 4 * t, lane,
                        h, b, row0[t], n_rows, start, kv_len, low, n[t],
                    )  # fmt: skip
        elif warp == self.mma_warp:
            if lane == 0:
                if most > 0:
                    self._mma_thread(base, bar, tmem, n, most, sign)
        elif warp == self.mma_warp + 1:
            self._tma_warp((tma_k, tma_k_coords), (tma_v, tma_v_coords), base, bar, lane, h, b, low, old, most)
        else:
            loader = tid - 32 * (self.mma_warp + 2)
            sources = self._sources(k, v, k_new, v_new, h, b)
            self._loader_warps(sources[0], sources[1], base, bar, loader, low, kv_len, old, new_start, most)
            if cutlass.const_expr(self.append):
                last_row = row0[-1] + self.rt - 1
                self._append_rows(k, v, k_new, v_new, loader, h, b, row0[0], last_row, q_len, new_start)
        tc.fence_before()
        cute.arch.sync_threads()
        tc.fence_after()
        if warp == self.mma_warp:
            tc.dealloc(tmem, 512)

    def _key_tiles(self, row0, n_rows, start, kv_len, low):
        """Key tiles of a row tile: none for rows that do not exist."""
        high = kv_len
        if self.causal:
            last = cutlass.min(row0 + self.rt, n_rows) - 1
            high = cutlass.min(kv_len, start + last // self.group + 1)
        tiles = cutlass.max(0, (high - low + (TILE - 1)) // TILE)
        return cutlass.select_(row0 < n_rows, tiles, Int32(0))

    # ---- loads: K0, K1, V0, K2, V1, ... ---------------------------------------------------------------------------
    @cute.jit
    def _tma_warp(self, map_k, map_v, base, bar, lane, h, b, low, old, n):
        slot, phase = Int32(0), Int32(0)
        for j in cutlass.range(n + 1, unroll=1):
            if j < n:
                self._tma_slot(map_k, base, bar, slot, phase, low + j * TILE, old, lane, h, b)
                slot, phase = self._next(slot, phase)
            if j > 0:
                self._tma_slot(map_v, base, bar, slot, phase, low + (j - 1) * TILE, old, lane, h, b)
                slot, phase = self._next(slot, phase)

    @cute.jit
    def _loader_warps(self, source_k, source_v, base, bar, t, low, kv_len, old, start, n):
        slot, phase = Int32(0), Int32(0)
        for j in cutlass.range(n + 1, unroll=1):
            if j < n:
                self._loader_slot(source_k, base, bar, slot, phase, low + j * TILE, kv_len, old, start, t)
                slot, phase = self._next(slot, phase)
            if j > 0:
                self._loader_slot(source_v, base, bar, slot, phase, low + (j - 1) * TILE, kv_len, old, start, t)
                slot, phase = self._next(slot, phase)

    # ---- tensor core ----------------------------------------------------------------------------------------------
    @cute.jit
    def _mma_thread(self, base, bar, tmem, n, most, sign):
        slot, phase = Int32(0), Int32(0)
        ptx.mbar_wait(bar["full0"], Int32(0))
        for t in cutlass.range_constexpr(self.tiles):
            if n[t] > 0:
                ptx.mbar_wait(bar[f"q_full{t}"], Int32(0))
                self._issue_s(t, base, bar, tmem, slot, sign)
        tc.commit(bar["empty0"])
        slot, phase = self._next(slot, phase)
        for j in cutlass.range(most, unroll=1):
            k_slot, k_phase = slot, phase
            if j + 1 < most:
                slot, phase = self._next(slot, phase)
            ptx.mbar_wait(bar["full0"] + 8 * slot, phase)
            for t in cutlass.range_constexpr(self.tiles):
                if j < n[t]:
                    ptx.mbar_wait(bar[f"p_full{t}"], j & 1)
                    tc.fence_after()
                    self._issue_o(t, base, tmem, slot, j > 0)
                    if j + 1 < n[t]:
                        ptx.mbar_wait(bar["full0"] + 8 * k_slot, k_phase)
                        self._issue_s(t, base, bar, tmem, k_slot, sign)
                    else:
                        tc.commit(bar[f"o_full{t}"])
            tc.commit(bar["empty0"] + 8 * slot)
            if j + 1 < most:
                tc.commit(bar["empty0"] + 8 * k_slot)
            slot, phase = self._next(slot, phase)

    def _issue_s(self, t, base, bar, tmem, slot, sign):
        """S of row tile t against the K tile in a slot."""
        desc = tc.smem_descriptor(tc.SWIZZLE_128B, 16, 1024)
        idesc = tc.instruction_descriptor(ROWS, TILE, self.bf16, False, False)
        k_tile = base + slot * self.slot_bytes
        for step in range(4 * self.blocks):
            at = (step // 4) * BLOCK_BYTES + 32 * (step % 4)
            tc.mma(tmem + self.s[t], base + self.q[t] + at, desc, k_tile + at, desc, idesc, step > 0, sign)
        tc.commit(bar[f"s_full{t}"])

    def _issue_o(self, t, base, tmem, slot, accumulate):
        """O of row tile t, with the V tile in a slot."""
        desc = tc.smem_descriptor(tc.SWIZZLE_128B, BLOCK_BYTES, 1024)
        idesc = tc.instruction_descriptor(ROWS, 64 * self.blocks, self.bf16, False, True)
        v_tile = base + slot * self.slot_bytes
        for step in range(TILE // 16):
            tc.mma_ts(
                tmem + self.o[t], tmem + self.s[t] + 8 * step, v_tile + 2048 * step, desc, idesc,
                True if step > 0 else accumulate,
            )  # fmt: skip

    # ---- softmax --------------------------------------------------------------------------------------------------
    @cute.jit
    def _softmax_warps(
        self, t: cutlass.Constexpr, q, out, lse, sink, scale, cap_log2, window_left, base, bar, tmem, row, warp, lane, h, b, row0,
        n_rows, start, kv_len, low, n,
    ):  # fmt: skip
        if n > 0:
            self._load_q(q, base + self.q[t], row, h, b, row0, n_rows)
            cute.arch.sync_warp()
            if lane == 0:
                tc.mbar_arrive(bar[f"q_full{t}"])
        # This thread's row, as the last one where it does not exist; it sees keys [first, limit).
        exists = (row < self.rt) & (row0 + row < n_rows)
        packed = cutlass.min(row0 + cutlass.min(row, self.rt - 1), n_rows - 1)
        token = packed // self.group
        limit, first = kv_len, Int32(0)
        # Key tiles within [clear_from, clear_to) need no mask for any row of the tile.
        clear_from, clear_to = Int32(0), kv_len
        if cutlass.const_expr(self.causal):
            limit = cutlass.min(kv_len, start + token + 1)
            clear_to = cutlass.min(kv_len, start + row0 // self.group + 1)
        if cutlass.const_expr(self.window):
            first = start + token - window_left
            last_row = cutlass.min(row0 + self.rt, n_rows) - 1
            clear_from = start + last_row // self.group - window_left

        lanes = tmem + ((warp * 32) << 16)
        s_at, o_at = lanes + self.s[t], lanes + self.o[t]
        m, l = Float32(M_START), Float32(0.0)
        for j in cutlass.range(n, unroll=1):
            key0 = low + j * TILE
            masked = (key0 < clear_from) | (key0 + TILE > clear_to) | (scale > PLAIN_SCALE * LOG2E)
            ptx.mbar_wait(bar[f"s_full{t}"], j & 1)
            tc.fence_after()
            top = Float32(M_START)
            if masked:
                top = self._maximum(s_at, scale, cap_log2, first - key0, limit - key0, True)
            else:
                top = self._maximum(s_at, scale, cap_log2, first - key0, limit - key0, False)
            if cute.arch.vote_any_sync(top > m + LAZY):
                m_new = ptx.fmax(m, top)
                alpha = ptx.exp2(m - m_new)
                m, l = m_new, l * alpha
                if j > 0:
                    self._rescale(o_at, alpha)
            part = Float32(0.0)
            if masked:
                part = self._weights(s_at, m, scale, cap_log2, first - key0, limit - key0, True)
            else:
                part = self._weights(s_at, m, scale, cap_log2, first - key0, limit - key0, False)
            l = l + part
            tc.wait_st()
            tc.fence_before()
            cute.arch.sync_warp()
            if lane == 0:
                tc.mbar_arrive(bar[f"p_full{t}"])
        head = h * self.group + packed % self.group
        total = l + self._sink_weight(sink, head, m, exists)
        inverse = ptx.select_f(Int32(total > 0.0), ptx.rcp(total), Float32(0.0))
        to = _row_address(out, b, head, token)
        if n > 0:
            ptx.mbar_wait(bar[f"o_full{t}"], Int32(0))
            tc.fence_after()
        for c in cutlass.range_constexpr(-(-self.d // CHUNK)):
            o = [Float32(0.0) for _ in range(CHUNK)]
            if n > 0:
                o = tc.ld(o_at + CHUNK * c, CHUNK)
            if exists:
                for i in cutlass.range_constexpr(min(CHUNK, self.d - CHUNK * c) // 8):
                    words = [
                        ptx.pack_16(o[8 * i + 2 * e] * inverse, o[8 * i + 2 * e + 1] * inverse, self.bf16) for e in range(4)
                    ]
                    tc.st_global_4(to + 2 * (CHUNK * c + 8 * i), *words)
        if exists:
            ptx.st_global_f1(_stat_address(lse, b, head, token), (m + ptx.log2(l)) * LN2)  # l = 0: -inf

    def _logits(self, s_at, c, scale, cap_log2, first, limit, masked: bool):
        """Columns [32 c, 32 c + 32) of this thread's row: base-2 logits; with `masked`, -inf outside [first, limit)."""
        x = [self._capped(raw * scale, cap_log2) for raw in tc.ld(s_at + CHUNK * c, CHUNK)]
        if masked:
            for i in range(CHUNK):
                ok = CHUNK * c + i < limit
                if self.window:
                    ok = ok & (CHUNK * c + i >= first)
                x[i] = ptx.select_f(Int32(ok), x[i], Float32(-float("inf")))
        return x

    def _maximum(self, s_at, scale, cap_log2, first, limit, masked: bool):
        """Of this row's base-2 logits. Without a mask and a cap that of S suffices, as scale >= 0."""
        plain = not masked and not self.softcap
        top = None
        for c in range(TILE // CHUNK):
            if plain:
                x = tc.ld(s_at + CHUNK * c, CHUNK)
            else:
                x = self._logits(s_at, c, scale, cap_log2, first, limit, masked)
            for a, b in zip(x[::2], x[1::2], strict=True):
                top = ptx.fmax(a, b) if top is None else tc.fmax3(top, a, b)
        return top * scale if plain else top

    def _weights(self, s_at, m, scale, cap_log2, first, limit, masked: bool):
        """Writes P over S, 16-bit pairs: chunk c ends where chunk c of S began or before. Returns the row's sum."""
        even = odd = None
        for c in range(TILE // CHUNK):
            if masked or self.softcap:
                x = [x - m for x in self._logits(s_at, c, scale, cap_log2, first, limit, masked)]
            else:
                raw = tc.ld(s_at + CHUNK * c, CHUNK)
                x = [y for a, b in zip(raw[::2], raw[1::2], strict=True) for y in tc.fma_pair(a, b, scale, 0.0 - m)]
            p = [ptx.exp2(y) for y in x]
            tc.st(s_at + (CHUNK // 2) * c, [ptx.pack_16(a, b, self.bf16) for a, b in zip(p[::2], p[1::2], strict=True)])
            for a, b in zip(p[::2], p[1::2], strict=True):
                even, odd = (a, b) if even is None else tc.add_pair(even, odd, a, b)
        return even + odd

    def _rescale(self, o_at, alpha):
        """O of the rows of this warp, which no MMA uses now: P V of the last key tile is done, the next waits for p_full."""
        for c in range(2 * self.blocks):
            tc.st(o_at + CHUNK * c, [x * alpha for x in tc.ld(o_at + CHUNK * c, CHUNK)])

