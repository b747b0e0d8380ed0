"""Active-length attention for few query rows (decode) on Hopper: the device side.

Work. One CTA owns (batch row b, KV head h, row tile, split): up to 8 or 16 packed query rows (token-major, the G heads that share
KV head h inside) against `split_size` consecutive keys. Its warps are independent until the end: each takes 16 keys of every
`tile` = 16 * warps keys, so the loop has no barrier.

K and V in fragment order. 16-byte loads bring exactly what the lane's mma.sync fragments need, because a sum over head dimensions
may be taken in any order and output dimensions may be numbered in any order: no transposing loads. They go by cp.async through the
warp's own rings of `stages` slots for K and for V. Lane = 4 * g + t:
  S[rows, keys]  = Q (A, 16 rows) x K^T (B, 8 keys): lane loads dims [8t, 8t + 8) of each 32-dim block of keys g and g + 8, and of
                   query row g (and g + 8); the two k-steps of a block take words 0, 1 and words 2, 3.
  O^T[dims, rows] = V^T (A, 16 dims) x P^T (B, 8 rows): lane takes dims [8g, 8g + 8) of each 64-dim block of keys 2t, 2t+1,
                   2t+8, 2t+9; prmt pairs two keys into a word; the S accumulator, rounded to 16 bits, already is the B fragment.
                   m-tile j of a block holds dims 8g + 2j (rows g) and 8g + 2j + 1 (rows g + 8), so that in the result a lane has 8
                   consecutive dims of rows 2t and 2t + 1.
Up to 8 rows cost half of the 16-row accumulators: 32 registers at D 128. In flight per warp: 8 KiB per stage at D 128; a slot is
refilled as soon as it has been read, K right after Q K^T, V after P V.

Numbers. Logits in base 2: x = scale * log2(e) * q.k, fp32. The running maximum starts at -1e30, masked logits are -inf, so a row
without keys ends with maximum -1e30 and sum 0, never NaN. Rows at or past kv_len are never used: a load past the end goes to the
last row instead, whose weight for that key is 0. P is rounded to 16 bits for P V, the sum takes the unrounded values.

Reduction. Warps merge through shared memory in warp order. With one split the result is final; otherwise each row's partial
(O, maximum, sum) goes to the workspace, one lane counts, and the warp that counts last merges all splits of that row in split
order. The counter wraps to 0 by itself, so a CUDA graph replays.

Append. Keys [kv_len - S, kv_len) come from k_new and v_new, never from the cache; the CTA of split 0 copies its tokens' rows into
the cache, which no CTA of this launch reads.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64

from cute_kernels.kernels import ptx
from cute_kernels.kernels.splits import split_size

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
        row_tile: packed rows per CTA, 8 or 16; one_tile: there are no more rows than that.
        warps: warps per CTA.
        split_cap: largest number of splits (see splits.split_size).
        wide: all row addresses are multiples of 16 bytes; else no ring, and 2-byte loads.
        min_blocks: CTAs per SM that registers must allow, 0 for any; stages: ring slots of 16 keys per warp.
        chunked: a CTA takes several consecutive splits, one after the other.
        cluster: splits that may merge through their CTAs' shared memory, 0: none (8 is what every GPU allows).
        causal, window, softcap, sink, append, device_length: options; absent ones leave no code.
    """

    def __init__(
        self,
        bf16: bool,
        head_dim: int,
        group: int,
        single_token: bool,
        row_tile: int,
        one_tile: bool,
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
        chunked: bool,
        cluster: int,
    ) -> None:
        if head_dim % 8 or not 16 <= head_dim <= 256 or row_tile not in (8, 16):
            raise ValueError(f"head_dim {head_dim}, row_tile {row_tile}")
        self.bf16, self.d, self.group = bf16, head_dim, group
        self.single, self.rt, self.warps, self.cap, self.wide = single_token, row_tile, warps, split_cap, wide
        self.causal, self.window, self.softcap, self.sink = causal, window, softcap, sink
        self.append, self.device_length, self.min_blocks = append, device_length, min_blocks
        self.tile = 16 * warps
        self.one_tile = one_tile
        self.nt = row_tile // 8
        self.k_blocks = -(-head_dim // 32)
        self.v_blocks = -(-head_dim // 64)
        self.stages = stages if wide else 0
        self.chunked, self.cluster = chunked, 0 if chunked else cluster
        self.lines = head_dim % 64 == 0  # rows consist of whole 128-byte lines
        self.k_slot = 32 * head_dim if self.lines else 1024 * self.k_blocks
        self.v_slot = 32 * head_dim if self.lines else 2048 * self.v_blocks
        self.pitch = head_dim + 4  # floats per row in shared memory and in the workspace: O, maximum, sum, 2 unused
        # Shared memory: the warps' rings, the warps' partial results of a split, the running result of a CTA. With one split per
        # CTA the partial results overlay the rings and there is no running result.
        self.part_rows = min(group, row_tile) if single_token else row_tile
        part_bytes = 4 * self.part_rows * self.pitch
        self.ring_bytes = self.stages * (self.k_slot + self.v_slot)
        if chunked:
            self.part_stride, self.parts_at = part_bytes, warps * self.ring_bytes
            self.running_at = self.parts_at + warps * part_bytes
            self.smem_bytes = self.running_at + part_bytes
        else:
            self.ring_bytes = max(self.ring_bytes, part_bytes)
            self.part_stride, self.parts_at, self.running_at = self.ring_bytes, 0, None
            self.merged_at = warps * self.ring_bytes  # with clusters: the CTA's result, read by its peers
            self.smem_bytes = self.merged_at + (part_bytes if self.cluster else 0)

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
        split_slots: Int32,  # workspace slots per row tile: no fewer than its splits
        chunks: Int32,  # CTAs per row tile
        per_chunk: Int32,  # splits per CTA, 0: as many as the length asks for
        row_tiles: Int32,
        stream,
    ):
        self.kernel(
            q, k, v, out, lse, lengths, length, workspace, counters, sink, k_new, v_new,
            scale, cap_log2, window_left, split_slots, chunks, per_chunk, row_tiles,
        ).launch(
            grid=[chunks * row_tiles, k.shape[1], k.shape[0]],
            block=[32 * self.warps, 1, 1],
            cluster=[self.cluster, 1, 1] if self.cluster else None,
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
        scale: Float32, cap_log2: Float32, window_left: Int32, split_slots: Int32, chunks: Int32,
        per_chunk: Int32, row_tiles: Int32,
    ):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        x, h, b = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        s_base = smem.allocate_tensor(Float32, cute.make_layout(self.smem_bytes // 4), 16).iterator.toint()
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        g, t = lane // 4, lane % 4

        q_len, capacity = Int32(q.shape[2]), Int32(k.shape[2])
        n_rows = Int32(self.group) if cutlass.const_expr(self.single) else q_len * self.group
        chunk, row_tile = x, Int32(0)
        if cutlass.const_expr(not self.one_tile):
            chunk, row_tile = x % chunks, x // chunks
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
        if cutlass.const_expr(self.causal and not self.one_tile):
            last_token = self._token(cutlass.min(row0 + self.rt, n_rows) - 1)
            high = cutlass.max(0, kv_len - q_len + last_token + 1)
        keys = cutlass.max(0, high - low)
        size = split_size(keys, self.tile, self.cap, cutlass.select_)
        per = Int32(1)
        if cutlass.const_expr(self.chunked):
            per = per_chunk
            if per == 0:
                per = (self._count(keys, size) + (chunks - 1)) // chunks
        begin = low + chunk * per * size
        end = cutlass.min(begin + per * size, high)

        if begin < high or chunk == 0:
            self._work(
                q, k, v, out, lse, workspace, counters, sink, k_new, v_new, scale, cap_log2, window_left, split_slots, chunks, per,
                row_tiles, s_base, warp, lane, g, t, h, b, chunk, row_tile, row0, n_rows, q_len, kv_len, keys, size, begin, end,
            )  # fmt: skip

    def _count(self, keys, size):
        """Splits of a row tile."""
        return cutlass.max(1, (keys + size - 1) // cutlass.max(size, 1))

    def smem_percent(self) -> int:
        """Share of an SM's 228 KiB for the CTAs that registers let run together (each also pays 1 KiB that the driver keeps)."""
        ctas = self.min_blocks or max(1, (16 if self.nt == 1 and self.d <= 128 else 8) // self.warps)
        return min(100, -(-100 * ctas * (self.smem_bytes + 2048) // (228 * 1024)))

    @cute.jit
    def _work(
        self, q, k, v, out, lse, workspace, counters, sink, k_new, v_new, scale, cap_log2, window_left, split_slots, chunks, per,
        row_tiles, s_base, warp, lane, g, t, h, b, chunk, row_tile, row0, n_rows, q_len, kv_len, keys, size, begin, end,
    ):  # fmt: skip
        nt = self.nt
        # Row strides fit 32 bits (the host checks), so that a row address is one multiply-add; offsets are 64 bits.
        k_stride, v_stride = Int32(k.stride[2]) * 2, Int32(v.stride[2]) * 2
        k_base = _address(k) + (Int64(b) * k.stride[0] + Int64(h) * k.stride[1]) * 2
        v_base = _address(v) + (Int64(b) * v.stride[0] + Int64(h) * v.stride[1]) * 2
        new_start = kv_len - q_len
        kn_base = vn_base = kn_stride = vn_stride = None
        if cutlass.const_expr(self.append):
            kn_stride, vn_stride = Int32(k_new.stride[2]) * 2, Int32(v_new.stride[2]) * 2
            kn_base = _address(k_new) + (Int64(b) * k_new.stride[0] + Int64(h) * k_new.stride[1]) * 2
            vn_base = _address(v_new) + (Int64(b) * v_new.stride[0] + Int64(h) * v_new.stride[1]) * 2
        kv = (k_base, k_stride, kn_base, kn_stride), (v_base, v_stride, vn_base, vn_stride)

        first = begin + 16 * warp
        last = cutlass.max(end - 1, 0)  # keys past the end read this row instead: logit -inf, weight 0; without any key, row 0
        n = self.stages
        k_ring = s_base + warp * self.ring_bytes
        v_ring = k_ring + n * self.k_slot
        # Copies are grouped one K or V of a step each, in the order of their use: K0, V0, K1, V1, ... of which 2 * n are under way.
        # Each use commits one (perhaps empty) group, so that waiting for all but 2 * n - 1 always means "the next one is here".
        if first < end:  # else there is no step, hence no wait
            for j in cutlass.range_constexpr(n):
                start = first + j * self.tile
                if cutlass.const_expr(j == 0):
                    self._fetch_k(k_ring, kv[0], start, last, new_start, g, t, lane)
                elif start < end:
                    self._fetch_k(k_ring + j * self.k_slot, kv[0], start, last, new_start, g, t, lane)
                ptx.cp_async_commit()
                if cutlass.const_expr(j == 0):
                    self._fetch_v(v_ring, kv[1], start, last, new_start, g, t, lane)
                elif start < end:
                    self._fetch_v(v_ring + j * self.v_slot, kv[1], start, last, new_start, g, t, lane)
                ptx.cp_async_commit()
        q_regs = self._load_q(q, b, h, row0, n_rows, g, t)
        # Position of this lane's query rows g and g + 8.
        pos = [kv_len - q_len + self._token(row0 + g + 8 * i) for i in range(nt)]
        k_at, v_at = Int32(0), Int32(0)  # the slots in turn
        split_begin = begin
        if cutlass.const_expr(self.chunked):
            alone = Int32(per * size >= keys)  # this CTA has all splits
            split = chunk * per
            while split_begin < end or split_begin == begin:
                o, m, l, k_at, v_at = self._split(
                    kv, k_ring, v_ring, k_at, v_at, q_regs, pos, split_begin, split_begin + size, end, last, new_start, scale,
                    cap_log2, window_left, g, t, lane, warp,
                )  # fmt: skip
                self._store_parts(s_base + self.parts_at, o, m, l, g, t, warp, row0, n_rows)
                cute.arch.sync_threads()
                self._collect(
                    workspace, split_slots, row_tiles, s_base, warp, lane, h, b, split, row_tile, row0, n_rows, out,
                    Int32(split_begin == begin), alone,
                )  # fmt: skip
                cute.arch.sync_threads()  # the parts have been read
                split = split + 1
                split_begin = split_begin + size
            if cutlass.const_expr(self.append):
                if chunk == 0:
                    self._append_rows(k_new, v_new, k, v, kv, new_start, q_len, row0, n_rows, warp, lane)
            if alone != 0:
                self._finish_rows(out, lse, sink, s_base, warp, lane, h, b, row0, n_rows)
            else:
                count = self._count(keys, size)
                self._arrive(
                    out, lse, workspace, counters, sink, split_slots, row_tiles, warp, lane, h, b, row_tile, row0, n_rows,
                    count, (count + (per - 1)) // per,
                )  # fmt: skip
        else:
            o, m, l, k_at, v_at = self._split(
                kv, k_ring, v_ring, k_at, v_at, q_regs, pos, begin, end, end, last, new_start, scale, cap_log2, window_left, g, t,
                lane, warp,
            )  # fmt: skip
            # Other lanes' slots are overwritten below.
            cute.arch.sync_warp()
            # The loop needs every register: what follows reads its coordinates again instead of keeping them (see ptx.special).
            tid, h, b = ptx.special("tid.x"), ptx.special("ctaid.y"), ptx.special("ctaid.z")
            warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
            g, t = lane // 4, lane % 4
            if cutlass.const_expr(self.one_tile):
                chunk = ptx.special("ctaid.x")
            self._store_parts(s_base, o, m, l, g, t, warp, row0, n_rows)
            if cutlass.const_expr(self.append):
                if chunk == 0:
                    self._append_rows(k_new, v_new, k, v, kv, new_start, q_len, row0, n_rows, warp, lane)
            cute.arch.sync_threads()
            if cutlass.const_expr(self.one_tile and not self.device_length):
                count = split_slots  # the host computed it with the same rule
            else:
                count = self._count(keys, size)
            self._merge_rows(
                out, lse, workspace, counters, sink, split_slots, row_tiles, s_base, warp, lane, h, b, chunk, row_tile, row0,
                n_rows, count,
            )  # fmt: skip

    @cute.jit
    def _split(
        self, kv, k_ring, v_ring, k_at, v_at, q_regs, pos, begin, split_end, end, last, new_start, scale, cap_log2,
        window_left, g, t, lane, warp,
    ):  # fmt: skip
        """This warp's keys of [begin, split_end), none past `end`; the ring is kept filled up to `end`.

        Returns O, maxima, sums (of this lane's keys) and the slots in turn.
        """
        nt, n = self.nt, self.stages
        first = begin + 16 * warp
        steps = cutlass.max(0, (cutlass.min(split_end, end) - first + (self.tile - 1)) // self.tile)
        o = [[Float32(0.0) for _ in range(4)] for _ in range(self.v_blocks * 4 * nt)]
        m = [Float32(M_START) for _ in range(nt)]
        l = [Float32(0.0) for _ in range(nt)]
        for i in cutlass.range(steps, unroll=1):
            base = first + i * self.tile
            ahead = base + n * self.tile
            if cutlass.const_expr(n > 0):
                self._await()
                k_step = self._read_k(k_ring + k_at * self.k_slot, g, t, lane)
            else:
                k_step = self._load_k(kv[0], base, last, new_start, g, t)
            s = self._scores(q_regs, k_step)
            if cutlass.const_expr(n > 0):
                if cutlass.const_expr(self.lines):
                    cute.arch.sync_warp()
                if ahead < end:
                    self._fetch_k(k_ring + k_at * self.k_slot, kv[0], ahead, last, new_start, g, t, lane)
                ptx.cp_async_commit()
                k_at = self._next_slot(k_at)
            p, m, l, alpha = self._softmax(s, m, l, base, end, pos, scale, cap_log2, window_left, t)
            if cutlass.const_expr(n > 0):
                self._await()
                v_step = self._read_v(v_ring + v_at * self.v_slot, g, t, lane)
            else:
                v_step = self._load_v(kv[1], base, last, new_start, g, t)
            o = self._accumulate(o, p, v_step, alpha, t)
            if cutlass.const_expr(n > 0):
                if cutlass.const_expr(self.lines):
                    cute.arch.sync_warp()
                if ahead < end:
                    self._fetch_v(v_ring + v_at * self.v_slot, kv[1], ahead, last, new_start, g, t, lane)
                ptx.cp_async_commit()
                v_at = self._next_slot(v_at)
        return o, m, l, k_at, v_at

    def _await(self):
        """The next K or V of the ring is here."""
        ptx.cp_async_wait(2 * self.stages - 1)
        if self.lines:
            cute.arch.sync_warp()  # other lanes' copies

    @cute.jit
    def _store_parts(self, parts, o, m, l, g, t, warp, row0, n_rows):
        """A warp's O, maxima and sums to its place in shared memory. Each row's sum lies in the four lanes of its quad."""
        nt, d = self.nt, self.d
        l = [_quad_sum(x) for x in l]
        pitch = 4 * self.pitch  # bytes
        to = parts + warp * self.part_stride
        for i in cutlass.range_constexpr(nt):
            if t == 0 and g + 8 * i < self.part_rows:
                ptx.st_shared_f2(to + (g + 8 * i) * pitch + 4 * d, m[i], l[i])
            for e in cutlass.range_constexpr(2):
                row = 2 * t + e + 8 * i
                for c in cutlass.range_constexpr(self.v_blocks):
                    col = 64 * c + 8 * g
                    if row + row0 < n_rows and row < self.part_rows and col < d:
                        at = to + row * pitch + 4 * col
                        a = [o[(c * 4 + j) * nt + i] for j in range(4)]
                        ptx.st_shared_f4(at, a[0][e], a[0][2 + e], a[1][e], a[1][2 + e])
                        ptx.st_shared_f4(at + 16, a[2][e], a[2][2 + e], a[3][e], a[3][2 + e])

    # ---- loads ----------------------------------------------------------------------------------------------------
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
                ptx.cp_async_16(to + 128 * c, addr + 128 * c)

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
            ptx.cp_async_16(to, addr)
        else:
            ptx.cp_async_16_zfill(to, addr, 16 * Int32(col_ok))

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
        """[key half][row tile][2]: row g (+ 8), keys 2t, 2t + 1. Two chains per half, as an mma waits ~33 clocks for the last.

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
        """o[(block * 4 + j) * nt + row tile] = old * alpha + V^T P^T. alpha of row r lies in lane 4r, columns are rows 2t, 2t+1."""
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
                    words = self._ld(new_base + Int64(token) * Int64(new_stride) + 16 * lane, Int32(1))
                    to = base + Int64(row) * Int64(stride) + 16 * lane
                    if cutlass.const_expr(self.wide):
                        ptx.st_global_2(to, words[0], words[1])
                        ptx.st_global_2(to + 8, words[2], words[3])
                    else:
                        for i in cutlass.range_constexpr(4):
                            ptx.st_global_halves(to + 4 * i, words[i])

    # ---- merging --------------------------------------------------------------------------------------------------
    def _my_rows(self):
        """Rows that a warp merges, at most."""
        return -(-self.part_rows // self.warps)

    def _slot0(self, out, split_slots, row_tiles, h, b, row_tile):
        """(the row tile's number, its first record in the workspace)."""
        tile_index = (Int64(b) * (out.shape[1] // self.group) + h) * row_tiles + row_tile
        return tile_index, tile_index * split_slots

    @cute.jit
    def _merge_rows(
        self, out, lse, workspace, counters, sink, split_slots, row_tiles, s_base, warp, lane, h, b, split, row_tile, row0, n_rows,
        count,
    ):  # fmt: skip
        """One split per CTA: a warp's rows. Merge the CTA's warps, then, where this split arrives last, all splits. A lane has 4
        dims of every 128."""
        last_row = cutlass.min(n_rows - row0, self.rt)  # rows of this tile
        _, slot0 = self._slot0(out, split_slots, row_tiles, h, b, row_tile)
        for i in cutlass.range_constexpr(self._my_rows()):
            row = warp + i * self.warps
            if row < last_row:
                m, l, o = _merge(self._warp_parts(s_base, row, lane))
                if count == 1:
                    self._finish(out, lse, sink, lane, b, self._head(h, row0 + row), self._token(row0 + row), m, l, o)
                elif self.cluster and count <= self.cluster:
                    self._store_state(s_base + self.merged_at, row, lane, (m, l, o))
                else:
                    self._store_record(workspace, (slot0 + split) * self.rt + row, lane, m, l, o)
        together = False
        if cutlass.const_expr(self.cluster):
            together = count <= self.cluster
        if together:
            if count > 1:
                self._merge_cluster(out, lse, sink, s_base, warp, lane, h, b, split, row0, last_row, count)
        elif count > 1:
            self._arrive(
                out, lse, workspace, counters, sink, split_slots, row_tiles, warp, lane, h, b, row_tile, row0, n_rows, count, count,
            )  # fmt: skip

    @cute.jit
    def _merge_cluster(self, out, lse, sink, s_base, warp, lane, h, b, split, row0, last_row, count):
        """All splits are in this cluster: rank = split; ranks from `count` on have exited, which both barriers allow for. The rows
        are dealt out to all warps of all ranks."""
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        for row in cutlass.range(split + count * warp, last_row, count * self.warps, unroll=1):
            state = self._no_state()
            at = s_base + self.merged_at + row * 4 * self.pitch
            parts = []
            for rank in cutlass.range_constexpr(self.cluster):
                there, ok = ptx.map_shared_rank(at, Int32(rank)), Int32(rank < count)
                m, l = ptx.ld_cluster_f2(there + 4 * self.d, ok)
                chunks = [ptx.ld_cluster_f4(there + 16 * self._column(c, lane), ok) for c in range(-(-self.d // 128))]
                parts.append((ptx.select_f(ok, m, Float32(M_START)), l, chunks))
            for part in parts:
                state = _fold(state, part)
            self._finish(out, lse, sink, lane, b, self._head(h, row0 + row), self._token(row0 + row), *state)
        # No CTA may exit while its peers read from it.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def _store_record(self, workspace, record, lane, m, l, o):
        d = self.d
        to = _address(workspace) + record * (4 * self.pitch)
        for c in cutlass.range_constexpr(-(-d // 128)):
            if 128 * c + 4 * lane < d:
                ptx.st_global_f4(to + 4 * (128 * c + 4 * lane), o[c][0], o[c][1], o[c][2], o[c][3])
        if lane == 0:
            ptx.st_global_f2(to + 4 * d, m, l)

    @cute.jit
    def _arrive(
        self, out, lse, workspace, counters, sink, split_slots, row_tiles, warp, lane, h, b, row_tile, row0, n_rows, count,
        arrivals,
    ):  # fmt: skip
        """A warp's rows are in the workspace: count, and merge those of which all `arrivals` CTAs' splits are there."""
        last_row = cutlass.min(n_rows - row0, self.rt)
        tile_index, slot0 = self._slot0(out, split_slots, row_tiles, h, b, row_tile)
        per_warp = self._my_rows()
        # Lane i counts for the warp's i-th row, all rows at once: the release covers the warp's stores above.
        cute.arch.sync_warp()
        arrived = Int32(0)
        mine = warp + lane * self.warps
        if lane < per_warp and mine < last_row:
            arrived = ptx.atom_inc_acq_rel(_address(counters) + (tile_index * self.rt + mine) * 4, arrivals - 1)
        # Two rows at a time, so that their loads are in flight together.
        for i in cutlass.range_constexpr(0, per_warp, 2):
            rows = [warp + j * self.warps for j in range(i, min(i + 2, per_warp))]
            seen = [ptx.shuffle_i(arrived, Int32(j)) for j in range(i, min(i + 2, per_warp))]
            wanted = [Int32(old == arrivals - 1) & Int32(row < last_row) for old, row in zip(seen, rows, strict=True)]
            if (wanted[0] | wanted[-1]) != 0:
                cute.arch.sync_warp()
                self._merge_splits(out, lse, workspace, sink, lane, b, h, row0, slot0, rows, wanted, count)

    @cute.jit
    def _merge_splits(self, out, lse, workspace, sink, lane, b, h, row0, slot0, rows, wanted, count):
        """One or two rows: fold all splits in split order, `batch` splits at a time, whose loads are in flight together. Lane j
        holds maximum and sum of the batch's split j, every lane its dims of all of them."""
        batch = (16 if self.d <= 128 else 8) // len(rows)
        states = [self._no_state() for _ in rows]
        for i in cutlass.range((count + batch - 1) // batch, unroll=1):
            parts = [self._split_parts(workspace, slot0, row, lane, i * batch, batch, count) for row in rows]
            for j in cutlass.range_constexpr(len(rows)):
                part_m, part_l, part_o = parts[j]
                for e in cutlass.range_constexpr(batch):
                    part = ptx.shuffle_f(part_m, Int32(e)), ptx.shuffle_f(part_l, Int32(e)), part_o[e]
                    states[j] = _fold(states[j], part)
        for j in cutlass.range_constexpr(len(rows)):
            if wanted[j] != 0:
                row = row0 + rows[j]
                m, l, o = states[j]
                self._finish(out, lse, sink, lane, b, self._head(h, row), self._token(row), m, l, o)

    def _no_state(self):
        return Float32(M_START), Float32(0.0), [[Float32(0.0) for _ in range(4)] for _ in range(-(-self.d // 128))]

    @cute.jit
    def _collect(
        self, workspace, split_slots, row_tiles, s_base, warp, lane, h, b, split, row_tile, row0, n_rows, out, is_first, alone,
    ):  # fmt: skip
        """Several splits per CTA: a warp's rows of one split. Merge the warps; fold into the running result when this CTA has all
        splits, else write a record. The running result of a row belongs to one warp, each lane to its own part of it."""
        last_row = cutlass.min(n_rows - row0, self.rt)
        _, slot0 = self._slot0(out, split_slots, row_tiles, h, b, row_tile)
        for i in cutlass.range_constexpr(self._my_rows()):
            row = warp + i * self.warps
            if row < last_row:
                part = _merge(self._warp_parts(s_base + self.parts_at, row, lane))
                if alone == 0:
                    self._store_record(workspace, (slot0 + split) * self.rt + row, lane, *part)
                else:
                    state = self._no_state()
                    if is_first == 0:
                        state = self._load_running(s_base, row, lane)
                    cute.arch.sync_warp()  # all lanes have read maximum and sum
                    self._store_state(s_base + self.running_at, row, lane, _fold(state, part))
                    cute.arch.sync_warp()

    def _load_running(self, s_base, row, lane):
        at = s_base + self.running_at + row * 4 * self.pitch
        chunks = [ptx.ld_shared_f4(at + 16 * self._column(c, lane)) for c in range(-(-self.d // 128))]
        m, l = ptx.ld_shared_f2(at + 4 * self.d)
        return m, l, chunks

    @cute.jit
    def _store_state(self, to, row, lane, state):
        """A row's maximum, sum and O to shared memory."""
        m, l, o = state
        at = to + row * 4 * self.pitch
        for c in cutlass.range_constexpr(-(-self.d // 128)):
            if 128 * c + 4 * lane < self.d:
                ptx.st_shared_f4(at + 16 * (32 * c + lane), *o[c])
        if lane == 0:
            ptx.st_shared_f2(at + 4 * self.d, m, l)

    @cute.jit
    def _finish_rows(self, out, lse, sink, s_base, warp, lane, h, b, row0, n_rows):
        last_row = cutlass.min(n_rows - row0, self.rt)
        for i in cutlass.range_constexpr(self._my_rows()):
            row = warp + i * self.warps
            if row < last_row:
                m, l, o = self._load_running(s_base, row, lane)
                self._finish(out, lse, sink, lane, b, self._head(h, row0 + row), self._token(row0 + row), m, l, o)

    def _column(self, c, lane):
        """In units of 4 dims; lanes past D take column 0, and what they compute is not stored."""
        return cutlass.select_(128 * c + 4 * lane < self.d, 32 * c + lane, Int32(0)) if self.d % 128 else 32 * c + lane

    def _warp_parts(self, s_base, row, lane):
        parts = []
        for w in range(self.warps):
            at = s_base + w * self.part_stride + row * 4 * self.pitch
            chunks = [ptx.ld_shared_f4(at + 16 * self._column(c, lane)) for c in range(-(-self.d // 128))]
            parts.append((ptx.ld_shared_f2(at + 4 * self.d), chunks))
        return parts

    def _split_parts(self, workspace, slot0, row, lane, first, n, count):
        """(maximum, sum) of split first + lane % n, and [split][chunk][4 floats] of O; an absent split weighs nothing."""
        base = _address(workspace) + (slot0 * self.rt + row) * 4 * self.pitch
        step = self.rt * 4 * self.pitch  # bytes from split to split
        mine = first + lane % n
        m, l = ptx.ld_relaxed_2(base + Int64(mine) * step + 4 * self.d, Int32(mine < count))
        chunks = []
        for j in range(n):
            record = base + Int64(first + j) * step
            chunks.append([])
            for c in range(-(-self.d // 128)):
                col = 128 * c + 4 * lane
                chunks[j].append(
                    ptx.ld_relaxed_4(record + 4 * col, _pred(first + j < count, col < self.d if self.d % 128 else None))
                )
        return ptx.select_f(Int32(mine < count), m, Float32(M_START)), l, chunks

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
