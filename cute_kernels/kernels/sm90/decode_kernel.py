"""Active-length attention for few query rows (decode) on Hopper: the device side.

Work. One CTA owns (batch row b, KV head h, row tile, one or several splits): up to 8 or 16 packed query rows (token-major, the G
heads that share KV head h inside) against `split_size` consecutive keys each. Its warps are independent until the end of a split:
each takes 16 keys of every `tile` = 16 * warps keys, so the loop has no barrier.

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

Reduction (decode_merge.py). Warps merge through shared memory in warp order. With one split the result is final; otherwise splits
are folded in split order: by the CTA itself if it has all of them (`chunked`), through the shared memory of a cluster, or through
the workspace, where the warp that counts a row's last arrival folds that row. The counter wraps to 0 by itself, so a CUDA graph
replays.

Append. Keys [kv_len - S, kv_len) come from k_new and v_new, never from the cache; the CTA of split 0 copies its tokens' rows into
the cache, which no CTA of this launch reads.
"""

from __future__ import annotations

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64

from cute_kernels.kernels import ptx
from cute_kernels.kernels.sm90.decode_loads import Loads, _address, _offset
from cute_kernels.kernels.sm90.decode_merge import M_START, Merging
from cute_kernels.kernels.softcap import capped
from cute_kernels.kernels.splits import split_size


class DecodeKernel(Loads, Merging):
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
        if not min_blocks and head_dim <= 64 and row_tile == 8 and warps == 4:
            self.min_blocks = 4  # left to itself, ptxas aims at six and spills
        self.tile = 16 * warps
        self.one_tile = one_tile
        self.nt = row_tile // 8
        self.k_blocks = -(-head_dim // 32)
        self.v_blocks = -(-head_dim // 64)
        self.o_chunks = -(-head_dim // 128)
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
        assert self.smem_bytes <= 227 * 1024, f"{self.smem_bytes} bytes of shared memory"

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

        kv_len = new_end = length  # new_end: of the appended rows, of which none is written past the capacity
        if cutlass.const_expr(self.device_length):
            new_end = cutlass.max(0, ptx.ld_global_1(_address(lengths) + Int64(b) * 4))
            kv_len = cutlass.min(new_end, capacity)
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
            p = SimpleNamespace(
                q=q, k=k, v=v, out=out, lse=lse, workspace=workspace, counters=counters, sink=sink, k_new=k_new, v_new=v_new,
                scale=scale, cap_log2=cap_log2, window_left=window_left, split_slots=split_slots, row_tiles=row_tiles,
            )  # fmt: skip
            w = SimpleNamespace(
                s_base=s_base, warp=warp, lane=lane, g=g, t=t, h=h, b=b, row_tile=row_tile, row0=row0, n_rows=n_rows
            )
            self._work(p, w, chunk, per, q_len, kv_len, new_end - q_len, keys, size, begin, end)

    def _count(self, keys, size):
        """Splits of a row tile."""
        return cutlass.max(1, (keys + size - 1) // cutlass.max(size, 1))

    def smem_percent(self) -> int:
        """Share of an SM's 228 KiB for the CTAs that registers let run together (each also pays 1 KiB that the driver keeps)."""
        ctas = self.min_blocks or max(1, (16 if self.nt == 1 and self.d <= 128 else 8) // self.warps)
        return min(100, -(-100 * ctas * (self.smem_bytes + 2048) // (228 * 1024)))

    @cute.jit
    def _work(self, p, w, chunk, per, q_len, kv_len, new_start, keys, size, begin, end):
        # Row strides fit 32 bits (the host checks), so that a row address is one multiply-add; offsets are 64 bits.
        c = SimpleNamespace(new_start=new_start, end=end)
        c.kv = self._source(p.k, p.k_new, w), self._source(p.v, p.v_new, w)
        c.last = cutlass.max(end - 1, 0)  # keys past the end read this row: logit -inf, weight 0; without any key, row 0
        c.k_ring = w.s_base + w.warp * self.ring_bytes
        c.v_ring = c.k_ring + self.stages * self.k_slot
        self._fill(w, c, begin + 16 * w.warp)
        c.q_regs = self._load_q(p, w)
        # Position of this lane's query rows g and g + 8.
        c.pos = [kv_len - q_len + self._token(w.row0 + w.g + 8 * i) for i in range(self.nt)]
        k_at, v_at = Int32(0), Int32(0)  # the slots in turn
        if cutlass.const_expr(self.chunked):
            alone = Int32(per * size >= keys)  # this CTA has all splits
            split, split_begin = chunk * per, begin
            more = Int32(1)  # without any key (size 0) too there is one split, an empty one
            while more != 0:
                o, m, l, k_at, v_at = self._split(p, w, c, k_at, v_at, split_begin, split_begin + size)
                self._store_parts(w, o, m, l)
                cute.arch.sync_threads()
                self._collect(p, w, split, Int32(split == chunk * per), alone)
                cute.arch.sync_threads()  # the parts have been read
                split = split + 1
                split_begin = split_begin + size
                more = Int32(split_begin < end)
            if cutlass.const_expr(self.append):
                if chunk == 0:
                    self._append_rows(w, c.kv, c.new_start, Int32(p.k.shape[2]))
            if alone != 0:
                self._finish_rows(p, w)
            else:
                count = self._count(keys, size)
                self._arrive(p, w, count, (count + (per - 1)) // per)
        else:
            o, m, l, k_at, v_at = self._split(p, w, c, k_at, v_at, begin, end)
            cute.arch.sync_warp()  # other lanes' slots are overwritten below
            # The loop needs every register: what follows reads its coordinates again instead of keeping them (see ptx.special).
            tid, h, b = ptx.special("tid.x"), ptx.special("ctaid.y"), ptx.special("ctaid.z")
            warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
            w = SimpleNamespace(**{**vars(w), "warp": warp, "lane": lane, "g": lane // 4, "t": lane % 4, "h": h, "b": b})
            if cutlass.const_expr(self.one_tile):
                chunk = ptx.special("ctaid.x")
            self._store_parts(w, o, m, l)
            if cutlass.const_expr(self.append):
                if chunk == 0:
                    self._append_rows(w, c.kv, c.new_start, Int32(p.k.shape[2]))
            cute.arch.sync_threads()
            if cutlass.const_expr(self.one_tile and not self.device_length):
                count = p.split_slots  # the host computed it with the same rule
            else:
                count = self._count(keys, size)
            self._merge_rows(p, w, chunk, count)

    def _source(self, tensor, new, w):
        """(base, row stride, the same of the appended rows), bytes, of this KV head."""
        base = _address(tensor) + _offset(tensor, w.b, w.h, 0) * 2
        stride = Int32(tensor.stride[2]) * 2
        if not self.append:
            return base, stride, None, None
        return base, stride, _address(new) + _offset(new, w.b, w.h, 0) * 2, Int32(new.stride[2]) * 2

    @cute.jit
    def _fill(self, w, c, first):
        """Start the copies of the warp's first steps.

        Copies are grouped one K or V of a step each, in the order of their use: K0, V0, K1, V1, ... of which 2 * stages are under
        way. Each use commits one (perhaps empty) group, so that waiting for all but 2 * stages - 1 means "the next one is here".
        """
        if first < c.end:  # else there is no step, hence no wait
            for j in cutlass.range_constexpr(self.stages):
                start = first + j * self.tile
                if j == 0 or start < c.end:
                    self._fetch_k(c.k_ring + j * self.k_slot, c.kv[0], start, c.last, c.new_start, w.g, w.t, w.lane)
                ptx.cp_async_commit()
                if j == 0 or start < c.end:
                    self._fetch_v(c.v_ring + j * self.v_slot, c.kv[1], start, c.last, c.new_start, w.g, w.t, w.lane)
                ptx.cp_async_commit()

    @cute.jit
    def _split(self, p, w, c, k_at, v_at, begin, split_end):
        """This warp's keys of [begin, split_end), none past c.end; the ring is kept filled up to c.end.

        Returns O, maxima, sums (of this lane's keys) and the slots in turn.
        """
        nt, n, end = self.nt, self.stages, c.end
        first = begin + 16 * w.warp
        steps = cutlass.max(0, (cutlass.min(split_end, end) - first + (self.tile - 1)) // self.tile)
        o = [[Float32(0.0) for _ in range(4)] for _ in range(self.v_blocks * 4 * nt)]
        m = [Float32(M_START) for _ in range(nt)]
        l = [Float32(0.0) for _ in range(nt)]
        for i in cutlass.range(steps, unroll=1):
            base = first + i * self.tile
            ahead = base + n * self.tile
            if cutlass.const_expr(n > 0):
                self._await()
                k_step = self._read_k(c.k_ring + k_at * self.k_slot, w.g, w.t, w.lane)
            else:
                k_step = self._load_k(c.kv[0], base, c.last, c.new_start, w.g, w.t)
            s = self._scores(c.q_regs, k_step)
            if cutlass.const_expr(n > 0):
                if cutlass.const_expr(self.lines):
                    cute.arch.sync_warp()
                if ahead < end:
                    self._fetch_k(c.k_ring + k_at * self.k_slot, c.kv[0], ahead, c.last, c.new_start, w.g, w.t, w.lane)
                ptx.cp_async_commit()
                k_at = self._next_slot(k_at)
            prob, m, l, alpha = self._softmax(s, m, l, base, end, c.pos, p.scale, p.cap_log2, p.window_left, w.t)
            if cutlass.const_expr(n > 0):
                self._await()
                v_step = self._read_v(c.v_ring + v_at * self.v_slot, w.g, w.t, w.lane)
            else:
                v_step = self._load_v(c.kv[1], base, c.last, c.new_start, w.g, w.t)
            o = self._accumulate(o, prob, v_step, alpha, w.t)
            if cutlass.const_expr(n > 0):
                if cutlass.const_expr(self.lines):
                    cute.arch.sync_warp()
                if ahead < end:
                    self._fetch_v(c.v_ring + v_at * self.v_slot, c.kv[1], ahead, c.last, c.new_start, w.g, w.t, w.lane)
                ptx.cp_async_commit()
                v_at = self._next_slot(v_at)
        return o, m, l, k_at, v_at

    def _await(self):
        """The next K or V of the ring is here."""
        ptx.cp_async_wait(2 * self.stages - 1)
        if self.lines:
            cute.arch.sync_warp()  # other lanes' copies

    @cute.jit
    def _store_parts(self, w, o, m, l):
        """A warp's O, maxima and sums to its place in shared memory. Each row's sum lies in the four lanes of its quad."""
        nt, d, g, t = self.nt, self.d, w.g, w.t
        l = [_quad_sum(x) for x in l]
        pitch = 4 * self.pitch  # bytes
        to = w.s_base + self.parts_at + w.warp * self.part_stride
        for i in cutlass.range_constexpr(nt):
            if t == 0 and g + 8 * i < self.part_rows:
                ptx.st_shared_f2(to + (g + 8 * i) * pitch + 4 * d, m[i], l[i])
            for e in cutlass.range_constexpr(2):
                row = 2 * t + e + 8 * i
                for c in cutlass.range_constexpr(self.v_blocks):
                    col = 64 * c + 8 * g
                    if row + w.row0 < w.n_rows and row < self.part_rows and col < d:
                        at = to + row * pitch + 4 * col
                        a = [o[(c * 4 + j) * nt + i] for j in range(4)]
                        ptx.st_shared_f4(at, a[0][e], a[0][2 + e], a[1][e], a[1][2 + e])
                        ptx.st_shared_f4(at + 16, a[2][e], a[2][2 + e], a[3][e], a[3][2 + e])

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
                        x = capped(x, cap_log2)
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


def _quad_sum(x):
    x = x + ptx.shuffle_xor_f(x, 1)
    return x + ptx.shuffle_xor_f(x, 2)
