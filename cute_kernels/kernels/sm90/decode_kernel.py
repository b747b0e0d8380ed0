"""Active-length attention for few query rows (decode) on Hopper: the device side.

Work. One CTA owns (batch row b, KV head h, row tile, split): up to 8 or 16 packed query rows (token-major, the G heads that share
KV head h inside) against `split_size` consecutive keys. Its warps are independent until the end: each takes 16 keys of every
`tile` = 16 * warps keys, so the loop has no barrier.

K and V in fragment order. 16-byte loads bring exactly what the lane's mma.sync fragments need, because a sum over head dimensions
may be taken in any order and output dimensions may be numbered in any order: no transposing loads, no exchange between lanes. A
warp's first 16 keys go straight to registers (a split of one step is all latency: no shared-memory hop); later ones go by cp.async
through a ring of `stages` slots, in which each lane reads back only what it wrote itself, so that a warp never waits for another
one, or even for its own lanes, and bank conflicts cannot occur. Lane = 4 * g + t:
  S[rows, keys]  = Q (A, 16 rows) x K^T (B, 8 keys): lane loads dims [8t, 8t + 8) of each 32-dim block of keys g and g + 8, and of
                   query row g (and g + 8); the two k-steps of a block take words 0, 1 and words 2, 3.
  O^T[dims, rows] = V^T (A, 16 dims) x P^T (B, 8 rows): lane loads dims [8g, 8g + 8) of each 64-dim block of keys 2t, 2t+1,
                   2t+8, 2t+9; prmt pairs two keys into a word; the S accumulator, rounded to 16 bits, already is the B fragment.
                   m-tile j of a block holds dims 8g + 2j (rows g) and 8g + 2j + 1 (rows g + 8), so that in the result a lane has 8
                   consecutive dims of rows 2t and 2t + 1.
Up to 8 rows cost half of the 16-row accumulators: 32 registers at D 128. In flight per warp: 8 KiB per stage at D 128, and 8 KiB in
registers at the start; a slot is refilled as soon as it has been read, K right after Q K^T, V after P V.

Numbers. Logits in base 2: x = scale * log2(e) * q.k, fp32. The running maximum starts at -1e30, masked logits are -inf, so a row
without keys ends with maximum -1e30 and sum 0, never NaN. Rows at or past kv_len are never used: a load past the end goes to the
last row instead, whose weight for that key is 0. P is rounded to 16 bits for P V, the sum takes the unrounded values.

Reduction. Warps merge through shared memory in warp order. With one split the result is final; otherwise each row's partial
(O, maximum, sum) goes to the workspace, one lane counts, and the warp that counts last merges all splits of that row in split
order. The counter wraps to 0 by itself, so a CUDA graph replays.

Append. Keys [kv_len - S, kv_len) come from k_new and v_new, never from the cache; the CTA of split 0 copies its tokens' rows into the
cache, which no CTA of this launch reads.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64

from cute_kernels.kernels.sm90 import ptx
from cute_kernels.kernels.sm90.splits import split_size

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
M_START = -1.0e30


class DecodeKernel:
    """One compiled variant. Every argument is a compile-time constant.

    Args:
        bf16: bfloat16, else float16.
        head_dim: D, a multiple of 8, 16..256.
        group: G = Hq / Hkv.
        single_token: q_len is 1, so no per-row mask is needed.
        row_tile: packed rows per CTA, 8 or 16.
        warps: warps per CTA.
        split_cap: largest number of splits (see splits.split_size).
        wide: all row addresses are multiples of 16 bytes; else no ring, and 2-byte loads.
        min_blocks: CTAs per SM that registers must allow, 0 for any; stages: ring slots of 16 keys per warp.
        causal, window, softcap, sink, append, device_length: options; absent ones leave no code.
    """

    def __init__(
        self,
        bf16: bool,
        head_dim: int,
        group: int,
        single_token: bool,
        row_tile: int,
        warps: int,
        split_cap: int,
        wide: bool,
        causal: bool,
        window: bool,
        softcap: bool,
        sink: bool,
        append: bool,
        device_length: bool,
        min_blocks: int,
        stages: int,
    ) -> None:
        if head_dim % 8 or not 16 <= head_dim <= 256 or row_tile not in (8, 16):
            raise ValueError(f"head_dim {head_dim}, row_tile {row_tile}")
        self.bf16, self.d, self.group = bf16, head_dim, group
        self.single, self.rt, self.warps, self.cap, self.wide = single_token, row_tile, warps, split_cap, wide
        self.causal, self.window, self.softcap, self.sink = causal, window, softcap, sink
        self.append, self.device_length, self.min_blocks = append, device_length, min_blocks
        self.tile = 16 * warps
        self.nt = row_tile // 8
        self.k_blocks = -(-head_dim // 32)
        self.v_blocks = -(-head_dim // 64)
        self.stages = stages if wide else 0
        # K and V of 16 keys take 64 registers at D 128; at D 256 they would take 128, so there the first step uses the ring too.
        self.direct = wide and head_dim <= 128
        self.words_per_step = 2 * self.k_blocks + 4 * self.v_blocks  # 16-byte pieces per lane
        self.stage_bytes = 512 * self.words_per_step
        self.pitch = head_dim + 4  # floats per row in shared memory and in the workspace: O, maximum, sum, 2 unused
        # A warp's ring, which at the end holds the warp's partial result instead.
        self.warp_bytes = max(self.stages * self.stage_bytes, 4 * row_tile * self.pitch)

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
        self.kernel(
            q, k, v, out, lse, lengths, length, workspace, counters, sink, k_new, v_new,
            scale, cap_log2, window_left, split_slots, row_tiles,
        ).launch(
            grid=[split_slots * row_tiles, k.shape[1], k.shape[0]],
            block=[32 * self.warps, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.min_blocks,
            # Without a number here the DSL asks the driver for the SM's shared memory, which needs a GPU at compile time.
            preferred_smem_carveout=self.smem_percent(),
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, lse: cute.Tensor,
        lengths: cute.Tensor | None, length: Int32, workspace: cute.Tensor, counters: cute.Tensor,
        sink: cute.Tensor | None, k_new: cute.Tensor | None, v_new: cute.Tensor | None,
        scale: Float32, cap_log2: Float32, window_left: Int32, split_slots: Int32, row_tiles: Int32,
    ):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        x, h, b = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        s_o = smem.allocate_tensor(Float32, cute.make_layout(self.warps * self.warp_bytes // 4), 16)
        s_base = s_o.iterator.toint()
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        g, t = lane // 4, lane % 4

        q_len, capacity = Int32(q.shape[2]), Int32(k.shape[2])
        n_rows = Int32(self.group) if cutlass.const_expr(self.single) else q_len * self.group
        split, row_tile = x, Int32(0)
        if cutlass.const_expr(not self._one_tile()):
            split, row_tile = x % split_slots, x // split_slots
        row0 = row_tile * self.rt

        kv_len = length
        if cutlass.const_expr(self.device_length):
            kv_len = ptx.ld_global_1(_address(lengths) + Int64(b) * 4)
            kv_len = cutlass.max(0, cutlass.min(kv_len, capacity))
        # Keys that any row of this tile may see: [low, high).
        low, high = Int32(0), kv_len
        first_pos = kv_len - q_len + self._token(row0)  # of the tile's first token
        if cutlass.const_expr(self.window):
            low = cutlass.max(0, first_pos - window_left)
        if cutlass.const_expr(self.causal and not self._one_tile()):
            last_token = self._token(cutlass.min(row0 + self.rt, n_rows) - 1)
            high = cutlass.max(0, kv_len - q_len + last_token + 1)
        keys = cutlass.max(0, high - low)
        size = split_size(keys, self.tile, self.cap, cutlass.select_)
        begin = low + split * size
        end = cutlass.min(begin + size, high)

        if begin < high or split == 0:
            self._work(
                q, k, v, out, lse, workspace, counters, sink, k_new, v_new, scale, cap_log2, window_left, split_slots, row_tiles,
                s_base, warp, lane, g, t, h, b, split, row_tile, row0, n_rows, q_len, kv_len, keys, size, begin, end,
            )  # fmt: skip

    def smem_percent(self) -> int:
        """Share of an SM's 228 KiB that max(1, min_blocks) CTAs need (each also pays 1 KiB that the driver keeps)."""
        per_cta = self.warps * self.warp_bytes + 2048
        return min(100, -(-100 * max(1, self.min_blocks) * per_cta // (228 * 1024)))

    def _one_tile(self) -> bool:
        """All rows of a (b, h) surely fit one row tile."""
        return self.single and self.group <= self.rt

    @cute.jit
    def _work(
        self, q, k, v, out, lse, workspace, counters, sink, k_new, v_new, scale, cap_log2, window_left, split_slots, row_tiles,
        s_base, warp, lane, g, t, h, b, split, row_tile, row0, n_rows, q_len, kv_len, keys, size, begin, end,
    ):  # fmt: skip
        d, nt = self.d, self.nt
        k_stride, v_stride = Int64(k.stride[2]) * 2, Int64(v.stride[2]) * 2
        k_base = _address(k) + (Int64(b) * k.stride[0] + Int64(h) * k.stride[1]) * 2
        v_base = _address(v) + (Int64(b) * v.stride[0] + Int64(h) * v.stride[1]) * 2
        new_start = kv_len - q_len
        kn_base = vn_base = kn_stride = vn_stride = None
        if cutlass.const_expr(self.append):
            kn_stride, vn_stride = Int64(k_new.stride[2]) * 2, Int64(v_new.stride[2]) * 2
            kn_base = _address(k_new) + (Int64(b) * k_new.stride[0] + Int64(h) * k_new.stride[1]) * 2
            vn_base = _address(v_new) + (Int64(b) * v_new.stride[0] + Int64(h) * v_new.stride[1]) * 2
        kv = (k_base, k_stride, kn_base, kn_stride), (v_base, v_stride, vn_base, vn_stride)

        first = begin + 16 * warp
        steps = cutlass.max(0, (end - first + (self.tile - 1)) // self.tile)
        ring = s_base + warp * self.warp_bytes + 16 * lane
        k_regs, v_regs = self._no_words(self.k_blocks, 2), self._no_words(self.v_blocks, 4)
        if cutlass.const_expr(self.direct):
            k_regs = self._load_k(kv[0], first, end, new_start, g, t)
        q_regs = self._load_q(q, b, h, row0, n_rows, g, t)
        if cutlass.const_expr(self.direct):
            v_regs = self._load_v(kv[1], first, end, new_start, g, t)
        at_step = 1 if self.direct else 0  # the first step that uses the ring
        if cutlass.const_expr(self.stages > 0):
            if steps > at_step:
                for j in cutlass.range_constexpr(self.stages):
                    base = first + (at_step + j) * self.tile
                    if base < end:
                        self._fetch_k(ring + j * self.stage_bytes, kv[0], base, end, new_start, g, t)
                        self._fetch_v(ring + j * self.stage_bytes, kv[1], base, end, new_start, g, t)
                    ptx.cp_async_commit()

        o = [[Float32(0.0) for _ in range(4)] for _ in range(self.v_blocks * 4 * nt)]
        m = [Float32(M_START) for _ in range(nt)]
        l = [Float32(0.0) for _ in range(nt)]
        # Position of this lane's query rows g and g + 8.
        pos = [kv_len - q_len + self._token(row0 + g + 8 * i) for i in range(nt)]
        if cutlass.const_expr(self.direct):
            if steps > 0:
                s = self._scores(q_regs, k_regs)
                p, m, l, alpha = self._softmax(s, m, l, first, end, pos, scale, cap_log2, window_left, t)
                o = self._accumulate(o, p, v_regs, alpha, t)
        slot = ring
        for i in cutlass.range(at_step, steps, unroll=1):
            base = first + i * self.tile
            ahead = base + self.stages * self.tile
            if cutlass.const_expr(self.stages > 0):
                ptx.cp_async_wait(self.stages - 1)
                k_step = self._read_k(slot)
            else:
                k_step = self._load_k(kv[0], base, end, new_start, g, t)
            s = self._scores(q_regs, k_step)
            if cutlass.const_expr(self.stages > 0):
                if ahead < end:
                    self._fetch_k(slot, kv[0], ahead, end, new_start, g, t)
            p, m, l, alpha = self._softmax(s, m, l, base, end, pos, scale, cap_log2, window_left, t)
            if cutlass.const_expr(self.stages > 0):
                v_step = self._read_v(slot)
            else:
                v_step = self._load_v(kv[1], base, end, new_start, g, t)
            o = self._accumulate(o, p, v_step, alpha, t)
            if cutlass.const_expr(self.stages > 0):
                if ahead < end:
                    self._fetch_v(slot, kv[1], ahead, end, new_start, g, t)
                ptx.cp_async_commit()
                slot = slot + self.stage_bytes
                slot = cutlass.select_(slot == ring + self.stages * self.stage_bytes, ring, slot)
        # Other lanes' slots are overwritten below.
        cute.arch.sync_warp()

        # The loop needs every register: what follows reads its coordinates again instead of keeping them (see ptx.special).
        tid, h, b = ptx.special("tid.x"), ptx.special("ctaid.y"), ptx.special("ctaid.z")
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        g, t = lane // 4, lane % 4
        if cutlass.const_expr(self._one_tile()):
            split = ptx.special("ctaid.x")

        # Each row's sum lies in the four lanes of its quad.
        l = [_quad_sum(x) for x in l]
        pitch = 4 * self.pitch  # bytes
        for i in cutlass.range_constexpr(nt):
            if t == 0:
                at = s_base + warp * self.warp_bytes + (g + 8 * i) * pitch + 4 * d
                ptx.st_shared_f2(at, m[i], l[i])
            for e in cutlass.range_constexpr(2):
                row = 2 * t + e + 8 * i
                for c in cutlass.range_constexpr(self.v_blocks):
                    col = 64 * c + 8 * g
                    if row + row0 < n_rows and col < d:
                        at = s_base + warp * self.warp_bytes + row * pitch + 4 * col
                        a = [o[(c * 4 + j) * nt + i] for j in range(4)]
                        ptx.st_shared_f4(at, a[0][e], a[0][2 + e], a[1][e], a[1][2 + e])
                        ptx.st_shared_f4(at + 16, a[2][e], a[2][2 + e], a[3][e], a[3][2 + e])
        if cutlass.const_expr(self.append):
            if split == 0:
                self._append_rows(k_new, v_new, k, v, kv, new_start, q_len, row0, n_rows, warp, lane)
        cute.arch.sync_threads()
        if cutlass.const_expr(self._one_tile() and not self.device_length):
            count = split_slots  # the host computed it with the same rule
        else:
            count = cutlass.max(1, (keys + size - 1) // cutlass.max(size, 1))
        most = min(self.rt, self.group) if self._one_tile() else self.rt
        for i in cutlass.range_constexpr(-(-most // self.warps)):
            row = warp + i * self.warps
            if row < self.rt and row0 + row < n_rows:
                self._merge_row(
                    out, lse, workspace, counters, sink, split_slots, row_tiles, s_base, lane, h, b, split, row_tile, row0, row, count
                )

    # ---- loads ----------------------------------------------------------------------------------------------------
    def _ld(self, addr, pred):
        """Zeros where pred is 0."""
        return ptx.ld_global_nc_4(addr, pred) if self.wide else ptx.ld_global_nc_4_halves(addr, pred)

    def _ld_row(self, addr, col_ok):
        """A piece of a cache row; in a block that D cuts, columns past D are zeros."""
        if col_ok is None and self.wide:
            return ptx.ld_global_nc_4_always(addr)
        return self._ld(addr, Int32(1) if col_ok is None else Int32(col_ok))

    def _clamp(self, key, end):
        """Keys past the end read the last row instead: their logits become -inf and their weight 0. Without any key, row 0."""
        return cutlass.max(cutlass.min(key, end - 1), 0)

    def _row_address(self, source, key, new_start):
        base, stride, new_base, new_stride = source
        addr = base + Int64(key) * stride
        if self.append:
            is_new = key >= new_start
            new_addr = new_base + Int64(key - new_start) * new_stride
            addr = cutlass.select_(is_new, new_addr, addr)
        return addr

    def _no_words(self, blocks, rows):
        return [[[Int32(0) for _ in range(4)] for _ in range(rows)] for _ in range(blocks)]

    def _load_k(self, source, base, end, new_start, g, t):
        """[block][key half][4 words]."""
        rows = []
        for half in range(2):
            key = self._clamp(base + g + 8 * half, end)
            rows.append(self._row_address(source, key, new_start) + 16 * t)
        return [[self._ld_row(a + 64 * c, self._col_ok(32 * c, 8 * t, 32)) for a in rows] for c in range(self.k_blocks)]

    def _load_v(self, source, base, end, new_start, g, t):
        """[block][key 2t, 2t + 1, 2t + 8, 2t + 9][4 words]."""
        rows = []
        for e in (0, 1, 8, 9):
            key = self._clamp(base + 2 * t + e, end)
            rows.append(self._row_address(source, key, new_start) + 16 * g)
        return [[self._ld_row(a + 128 * c, self._col_ok(64 * c, 8 * g, 64)) for a in rows] for c in range(self.v_blocks)]

    def _fetch_k(self, slot, source, base, end, new_start, g, t):
        """_load_k into a ring slot: piece [block][key half] of this lane at slot + 512 * (2 * block + half)."""
        for half in range(2):
            key = self._clamp(base + g + 8 * half, end)
            addr = self._row_address(source, key, new_start) + 16 * t
            for c in range(self.k_blocks):
                self._fetch(slot + 512 * (2 * c + half), addr + 64 * c, self._col_ok(32 * c, 8 * t, 32))

    def _fetch_v(self, slot, source, base, end, new_start, g, t):
        """_load_v into a ring slot, after K's pieces."""
        for n, e in enumerate((0, 1, 8, 9)):
            key = self._clamp(base + 2 * t + e, end)
            addr = self._row_address(source, key, new_start) + 16 * g
            for c in range(self.v_blocks):
                to = slot + 512 * (2 * self.k_blocks + 4 * c + n)
                self._fetch(to, addr + 128 * c, self._col_ok(64 * c, 8 * g, 64))

    def _fetch(self, to, addr, col_ok):
        if col_ok is None:
            ptx.cp_async_16(to, addr)
        else:
            ptx.cp_async_16_zfill(to, addr, 16 * Int32(col_ok))

    def _read_k(self, slot):
        return [[ptx.ld_shared_4(slot + 512 * (2 * c + half)) for half in range(2)] for c in range(self.k_blocks)]

    def _read_v(self, slot):
        first = 2 * self.k_blocks
        return [[ptx.ld_shared_4(slot + 512 * (first + 4 * c + n)) for n in range(4)] for c in range(self.v_blocks)]

    def _token(self, row):
        """Query token of a packed row, its head below _head."""
        return Int32(0) if self.single else row // self.group

    def _head(self, h, row):
        return h * self.group + (row if self.single else row % self.group)

    def _load_q(self, q, b, h, row0, n_rows, g, t):
        """[block][row tile][4 words]; rows past the last are zeros."""
        rows = []
        for i in range(self.nt):
            row = row0 + g + 8 * i
            head, token = self._head(h, row), self._token(row)
            offset = Int64(b) * q.stride[0] + Int64(head) * q.stride[1] + Int64(token) * q.stride[2]
            rows.append((_address(q) + offset * 2 + 16 * t, row < n_rows))
        cols = [self._col_ok(32 * c, 8 * t, 32) for c in range(self.k_blocks)]
        return [[self._ld(a + 64 * c, _pred(ok, col)) for a, ok in rows] for c, col in enumerate(cols)]

    def _col_ok(self, first, offset, width):
        """None when the whole block lies inside D."""
        return None if first + width <= self.d else first + offset < self.d

    # ---- arithmetic -----------------------------------------------------------------------------------------------
    def _scores(self, q_regs, k_regs):
        """[key half][row tile][2]: row g (+ 8), keys 2t, 2t + 1. Two chains per half, as an mma waits ~33 clocks for the one before.

        With one row tile, rows 8-15 of A would be zeros. They hold Q at the dims of the other k-step instead: one A fragment serves
        both k-steps, chain 0's valid rows are 0-7 and chain 1's 8-15 (the others are products of unlike dims, never looked at).
        """
        halves = []
        for half in range(2):
            chains = [[Float32(0.0) for _ in range(4)] for _ in range(2)]
            for c in range(self.k_blocks):
                k0, k1, k2, k3 = k_regs[c][half]
                lo = q_regs[c][0]
                if self.nt == 1:
                    a = [[lo[0], lo[2], lo[1], lo[3]]] * 2
                else:
                    hi = q_regs[c][1]
                    a = [[lo[2 * i], hi[2 * i], lo[2 * i + 1], hi[2 * i + 1]] for i in range(2)]
                chains[0] = ptx.mma_16816(chains[0], a[0], [k0, k1], self.bf16)
                chains[1] = ptx.mma_16816(chains[1], a[1], [k2, k3], self.bf16)
            x, y = chains
            if self.nt == 1:
                halves.append([[x[0] + y[2], x[1] + y[3]]])
            else:
                halves.append([[x[0] + y[0], x[1] + y[1]], [x[2] + y[2], x[3] + y[3]]])
        return halves

    def _softmax(self, s, m, l, base, end, pos, scale, cap_log2, window_left, t):
        """P as B fragments [row tile][2 words], new maxima, sums, and the factors of the old ones."""
        p_words, m_out, l_out, alphas = [], [], [], []
        for i in range(self.nt):
            logits = []
            for half in range(2):
                for e in range(2):
                    x = s[half][i][e] * scale
                    if self.softcap:
                        # tanh x = 1 - 2 / (exp 2x + 1): tanh.approx errs by 2^-11, which a cap of 50 makes 0.02.
                        e2x = ptx.exp2(x * (2 * LOG2E))
                        x = (1.0 - 2.0 * ptx.rcp(e2x + 1.0)) * cap_log2
                    key = base + 8 * half + 2 * t + e
                    ok = key < end
                    if not self.single and self.causal:
                        ok = ok & (key <= pos[i])
                    if not self.single and self.window:
                        ok = ok & (key >= pos[i] - window_left)
                    logits.append(ptx.select_f(Int32(ok), x, Float32(-float("inf"))))
            top = ptx.fmax(ptx.fmax(logits[0], logits[1]), ptx.fmax(logits[2], logits[3]))
            top = ptx.fmax(top, ptx.shuffle_xor_f(top, 1))
            top = ptx.fmax(top, ptx.shuffle_xor_f(top, 2))
            m_new = ptx.fmax(m[i], top)
            p = [ptx.exp2(x - m_new) for x in logits]
            alpha = ptx.exp2(m[i] - m_new)
            l_out.append(l[i] * alpha + ((p[0] + p[1]) + (p[2] + p[3])))
            m_out.append(m_new)
            alphas.append(alpha)
            p_words.append([ptx.pack_16(p[0], p[1], self.bf16), ptx.pack_16(p[2], p[3], self.bf16)])
        return p_words, m_out, l_out, alphas

    def _accumulate(self, o, p, v_regs, alpha, t):
        """o[(block * 4 + j) * nt + row tile] = old * alpha + V^T P^T. alpha of row r lies in lane 4r, columns are rows 2t, 2t + 1."""
        nt = self.nt
        factors = []
        for i in range(nt):
            factors.append([ptx.shuffle_f(alpha[i], 8 * t), ptx.shuffle_f(alpha[i], 8 * t + 4)])
        result = []
        for c in range(self.v_blocks):
            keys = v_regs[c]
            for j in range(4):
                a = [
                    ptx.prmt(keys[0][j], keys[1][j], 0x5410),
                    ptx.prmt(keys[0][j], keys[1][j], 0x7632),
                    ptx.prmt(keys[2][j], keys[3][j], 0x5410),
                    ptx.prmt(keys[2][j], keys[3][j], 0x7632),
                ]
                for i in range(nt):
                    old = o[(c * 4 + j) * nt + i]
                    f0, f1 = factors[i]
                    scaled = [old[0] * f0, old[1] * f1, old[2] * f0, old[3] * f1]
                    result.append(ptx.mma_16816(scaled, a, p[i], self.bf16))
        return result

    # ---- append ---------------------------------------------------------------------------------------------------
    @cute.jit
    def _append_rows(self, k_new, v_new, k, v, kv, new_start, q_len, row0, n_rows, warp, lane):
        """Copy the new rows of this tile's tokens into the cache: a warp per token, 16 bytes per lane."""
        first = self._token(row0)
        last = self._token(cutlass.min(row0 + self.rt, n_rows) - 1)
        for token in cutlass.range(first + warp, last + 1, self.warps, unroll=1):
            row = new_start + token
            if row >= 0 and 8 * lane < self.d:
                for source in kv:
                    base, stride, new_base, new_stride = source
                    words = self._ld(new_base + Int64(token) * new_stride + 16 * lane, Int32(1))
                    to = base + Int64(row) * stride + 16 * lane
                    if cutlass.const_expr(self.wide):
                        ptx.st_global_2(to, words[0], words[1])
                        ptx.st_global_2(to + 8, words[2], words[3])
                    else:
                        for i in cutlass.range_constexpr(4):
                            ptx.st_global_halves(to + 4 * i, words[i])

    # ---- merging --------------------------------------------------------------------------------------------------
    @cute.jit
    def _merge_row(
        self, out, lse, workspace, counters, sink, split_slots, row_tiles, s_base, lane, h, b, split, row_tile, row0, row, count
    ):
        """One warp, one row: the warps' parts, then, if this split arrives last, all splits' parts. A lane has 4 dims of 128."""
        d = self.d
        pitch = 4 * self.pitch
        m, l, o = _merge(self._warp_parts(s_base, row, lane))

        token, head = self._token(row0 + row), self._head(h, row0 + row)
        if count == 1:
            self._finish(out, lse, sink, lane, b, head, token, m, l, o)
        else:
            tile_index = (Int64(b) * k_heads(out, self.group) + h) * row_tiles + row_tile
            slot0 = tile_index * split_slots
            record = _address(workspace) + ((slot0 + split) * self.rt + row) * pitch
            for c in cutlass.range_constexpr(-(-d // 128)):
                if 128 * c + 4 * lane < d:
                    ptx.st_global_f4(record + 4 * (128 * c + 4 * lane), o[c][0], o[c][1], o[c][2], o[c][3])
            if lane == 0:
                ptx.st_global_f2(record + 4 * d, m, l)
            cute.arch.sync_warp()
            arrived = Int32(0)
            if lane == 0:
                arrived = ptx.atom_inc_acq_rel(_address(counters) + (tile_index * self.rt + row) * 4, count - 1)
            arrived = ptx.shuffle_i(arrived, Int32(0))
            if arrived == count - 1:
                cute.arch.sync_warp()
                self._merge_splits(out, lse, workspace, sink, lane, b, head, token, slot0, row, count)

    @cute.jit
    def _merge_splits(self, out, lse, workspace, sink, lane, b, head, token, slot0, row, count):
        d = self.d
        batch = 8 if d <= 128 else 4  # splits whose loads are in flight together
        m, l = Float32(M_START), Float32(0.0)
        o = [[Float32(0.0) for _ in range(4)] for _ in range(-(-d // 128))]
        for i in cutlass.range((count + batch - 1) // batch, unroll=1):
            parts = self._split_parts(workspace, slot0, row, lane, i * batch, batch, count)
            m, l, o = _merge([((m, l), o), *parts])
        self._finish(out, lse, sink, lane, b, head, token, m, l, o)

    def _warp_parts(self, s_base, row, lane):
        parts = []
        for w in range(self.warps):
            at = s_base + w * self.warp_bytes + row * 4 * self.pitch
            chunks = []
            for c in range(-(-self.d // 128)):
                # Lanes past D read column 0; what they compute is not stored.
                col = 128 * c + 4 * lane
                chunks.append(ptx.ld_shared_f4(at + 4 * (cutlass.select_(col < self.d, col, Int32(0)) if self.d % 128 else col)))
            parts.append((ptx.ld_shared_f2(at + 4 * self.d), chunks))
        return parts

    def _split_parts(self, workspace, slot0, row, lane, first, n, count):
        parts = []
        for j in range(n):
            ok = first + j < count
            record = _address(workspace) + ((slot0 + first + j) * self.rt + row) * 4 * self.pitch
            m, l = ptx.ld_relaxed_2(record + 4 * self.d, Int32(ok))
            chunks = []
            for c in range(-(-self.d // 128)):
                col = 128 * c + 4 * lane
                chunks.append(ptx.ld_relaxed_4(record + 4 * col, _pred(ok, col < self.d if self.d % 128 else None)))
            # An absent split weighs nothing: maximum M_START, sum and O zero.
            parts.append(((ptx.select_f(Int32(ok), m, Float32(M_START)), l), chunks))
        return parts

    @cute.jit
    def _finish(self, out, lse, sink, lane, b, head, token, m, l, o):
        d = self.d
        total = l
        if cutlass.const_expr(self.sink):
            bits = ptx.ld_global_1(_address(sink) + Int64(head) * 4)
            total = l + ptx.exp2(ptx.as_float(bits) * LOG2E - m)
        inverse = ptx.select_f(Int32(total > 0.0), ptx.rcp(total), Float32(0.0))
        to = _address(out) + (Int64(b) * out.stride[0] + Int64(head) * out.stride[1] + Int64(token) * out.stride[2]) * 2
        for c in cutlass.range_constexpr(len(o)):
            col = 128 * c + 4 * lane
            if col < d:
                words = [
                    ptx.pack_16(o[c][2 * i] * inverse, o[c][2 * i + 1] * inverse, self.bf16) for i in range(2)
                ]
                ptx.st_global_2(to + 2 * col, words[0], words[1])
        if lane == 0:
            value = (m + ptx.log2(l)) * LN2  # l = 0: -inf
            at = (Int64(b) * lse.stride[0] + Int64(head) * lse.stride[1] + Int64(token) * lse.stride[2]) * 4
            ptx.st_global_f1(_address(lse) + at, value)


def k_heads(out, group: int):
    return out.shape[1] // group


def _address(tensor):
    return Int64(tensor.iterator.toint())


def _pred(a, b):
    """Int32 predicate of one or two conditions."""
    return Int32(a) if b is None else Int32(a & b)


def _quad_sum(x):
    x = x + ptx.shuffle_xor_f(x, 1)
    return x + ptx.shuffle_xor_f(x, 2)


def _merge(parts):
    """Softmax partials ((maximum, sum), [[4 floats] per chunk]) merged in list order."""
    top = parts[0][0][0]
    for (m, _), _ in parts[1:]:
        top = ptx.fmax(top, m)
    l = o = None
    for (m, part_l), part_o in parts:
        w = ptx.exp2(m - top)
        if l is None:
            l, o = part_l * w, [[x * w for x in chunk] for chunk in part_o]
        else:
            l = l + part_l * w
            o = [[x * w + y for x, y in zip(chunk, acc, strict=True)] for chunk, acc in zip(part_o, o, strict=True)]
    return top, l, o
