"""Active-length attention for many query rows (prefill) on Hopper: the device side.

Tile. A CTA takes 128 packed query rows of one KV head (token-major, the G heads that share the KV head inside) and walks the keys
in blocks of `block` (128, for D > 128: 64), from the last one that any row sees down to the first. CTAs are persistent, one per SM;
tiles are dealt out longest first, every second round in reverse order.

Warpgroups (384 threads). 0: producer, of which one thread issues TMA copies of K and V into two rings of two stages, running ahead
into the next tile while the consumers still store. 1 and 2: consumers, 64 rows each. A consumer keeps S (64 x block) and O (64 x D)
in registers and P as wgmma's register operand. Per block j:

    issue S_j = Q K_j^T            (K_j waited for)
    issue O  += P_(j+1) V_(j+1)    (the block before, blocks count down)
    S_j done: K_j released; mask, maximum, P_j = 2^(S_j - m), sums        while P V runs
    P V done: V_(j+1) released; O *= 2^(m_old - m)

The consumers take turns at issuing (named barriers TURN and TURN + 1): the softmax of one runs under the products of the other.

Numbers. As in decode: logits in base 2, running maximum from -1e30, masked logits -inf, P rounded to 16 bits for P V, sums from the
unrounded values. K rows at or past kv_len are masked by selection; V rows are zeroed in shared memory, since 0 * NaN is NaN.

Barriers, phase = use / 2 of a slot modulo 2:
    K_FULL, V_FULL    producer's expect + the copy's bytes  -> both consumers
    K_EMPTY, V_EMPTY  one lane of each of 8 consumer warps  -> producer
    TURN + w          the other consumer                    -> consumer w may issue
    ROWS + w          consumer w alone: Q written to or O's staging read from its half of the Q tile
    TAIL              both consumers: rows past kv_len are zero

Shared memory, D 128: Q 32 KiB + 2 stages of K and V 128 KiB. O is staged over Q.
"""

from __future__ import annotations

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils import hopper_helpers as hopper

from cute_kernels.kernels import ptx
from cute_kernels.kernels.scales import LN2, LOG2E
from cute_kernels.kernels.softcap import capped

M_START = -1.0e30
ROWS_PER_TILE = 128
STAGES = 2
THREADS = 384
CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24  # (2 * 240 + 24) * 128 = 64,512 of 65,536

# mbarriers
K_FULL, K_EMPTY, V_FULL, V_EMPTY, N_BARRIERS = 0, STAGES, 2 * STAGES, 3 * STAGES, 4 * STAGES
# named barriers (0 is left to the compiler)
TURN, ROWS, TAIL = 1, 3, 5


class PrefillKernel:
    """One compiled variant. Every argument is a compile-time constant.

    Args:
        bf16: bfloat16, else float16.
        head_dim: D, a multiple of 8, up to 256; padded to a multiple of 64 by what TMA fills in.
        group: G = Hq / Hkv.
        positive: sm_scale is above 0 and there is no softcap, so that maxima can be taken before scaling.
        causal, window, softcap, sink, device_length: options; absent ones leave no code.
    """

    def __init__(
        self,
        bf16: bool,
        head_dim: int,
        group: int,
        positive: bool,
        causal: bool,
        window: bool,
        softcap: bool,
        sink: bool,
        device_length: bool,
    ) -> None:
        assert head_dim % 8 == 0 and 16 <= head_dim <= 256
        assert not (positive and softcap)
        self.dtype = BFloat16 if bf16 else Float16
        self.bf16, self.d, self.group = bf16, head_dim, group
        self.positive, self.causal, self.window, self.softcap, self.sink = positive, causal, window, softcap, sink
        self.device_length = device_length
        self.width = -(-head_dim // 64) * 64  # columns in shared memory
        self.block = 128 if self.width <= 128 else 64
        self.k_steps = -(-head_dim // 16)
        self.tile_elements = self.block * self.width
        self.half_bytes = 64 * self.width * 2  # Q rows of one consumer
        assert 2 * self.half_bytes + 4 * STAGES * self.tile_elements + 1024 <= 227 * 1024

    # ---- host side -------------------------------------------------------------------------------------------------
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
        scale: Float32,  # sm_scale * log2(e); with softcap, sm_scale / softcap
        cap_log2: Float32,  # softcap * log2(e)
        window_left: Int32,
        max_ctas: Int32,
        stream,
    ):
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        layout = cute.tile_to_shape(atom, (self.block, self.width), (0, 1))
        copy = cpasync.CopyBulkTensorTileG2SOp()
        tma = []
        for x in (k, v):
            rows = cute.make_tensor(x.iterator, cute.select(x.layout, mode=[2, 3, 1, 0]))  # [C, D, Hkv, B]
            tma.append(cpasync.make_tiled_tma_atom(copy, rows, layout, (self.block, self.width)))
        tiles = (q.shape[2] * self.group + (ROWS_PER_TILE - 1)) // ROWS_PER_TILE
        pairs = k.shape[0] * k.shape[1]
        items = tiles * pairs
        self.kernel(
            tma[0][0], tma[0][1], tma[1][0], tma[1][1], q, out, lse, lengths, length, sink, scale, cap_log2, window_left,
            Int32(k.shape[2]), Int32(tiles), Int32(pairs), Int32(k.shape[1]), layout,
        ).launch(
            grid=[cutlass.min(Int32(items), max_ctas), 1, 1], block=[THREADS, 1, 1], stream=stream, min_blocks_per_mp=1,
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, k_atom: cute.CopyAtom, k: cute.Tensor, v_atom: cute.CopyAtom, v: cute.Tensor, q: cute.Tensor, out: cute.Tensor,
        lse: cute.Tensor, lengths: cute.Tensor | None, length: Int32, sink: cute.Tensor | None, scale: Float32,
        cap_log2: Float32, window_left: Int32, capacity: Int32, tiles: Int32, pairs: Int32, kv_heads: Int32,
        layout: cute.ComposedLayout,
    ):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        group = cute.arch.make_warp_uniform(tid // 128)
        allocator = SmemAllocator()
        smem = SimpleNamespace()
        smem.q = allocator.allocate_array(self.dtype, ROWS_PER_TILE * self.width, byte_alignment=1024)
        smem.k = allocator.allocate_array(self.dtype, STAGES * self.tile_elements, byte_alignment=1024)
        smem.v = allocator.allocate_array(self.dtype, STAGES * self.tile_elements, byte_alignment=1024)
        smem.bars = allocator.allocate_array(Int64, N_BARRIERS, byte_alignment=8)
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(STAGES):
                    cute.arch.mbarrier_init(smem.bars + K_FULL + i, 1)
                    cute.arch.mbarrier_init(smem.bars + V_FULL + i, 1)
                    cute.arch.mbarrier_init(smem.bars + K_EMPTY + i, 8)
                    cute.arch.mbarrier_init(smem.bars + V_EMPTY + i, 8)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        p = SimpleNamespace(
            q=q, out=out, lse=lse, lengths=lengths, length=length, sink=sink, scale=scale, cap_log2=cap_log2,
            window_left=window_left, capacity=capacity, tiles=tiles, pairs=pairs, kv_heads=kv_heads,
            q_len=Int32(q.shape[2]), rows=Int32(q.shape[2]) * self.group,
        )  # fmt: skip
        if group == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.producer(p, k_atom, k, v_atom, v, layout, smem)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consumer(p, group - 1, smem)

    # ---- what every role knows about a tile ---------------------------------------------------------------------------
    def item(self, p, turn):
        """The CTA's tile of this turn: an index into tiles sorted by length; at or past `tiles * pairs` there is none."""
        ctas, cta = ptx.special("nctaid.x"), ptx.special("ctaid.x")
        return turn * ctas + cutlass.select_((turn & 1) == 0, cta, ctas - 1 - cta)

    def tile(self, p, item):
        """Its rows and keys. Blocks first, first - 1, ..., last; those below `plain` and from `plain_low` on need no mask."""
        t = SimpleNamespace()
        order = item // p.pairs
        pair = item - order * p.pairs
        t.row0 = (p.tiles - 1 - order) * ROWS_PER_TILE
        t.b = pair // p.kv_heads
        t.h = pair - t.b * p.kv_heads
        kv_len = p.length
        if const_expr(self.device_length):
            kv_len = ptx.ld_global_1(p.lengths.iterator.toint() + Int64(t.b) * 4)
            kv_len = cutlass.max(0, cutlass.min(kv_len, p.capacity))
        t.kv_len = kv_len
        t.start = kv_len - p.q_len  # position of token 0
        first_pos = t.start + t.row0 // self.group
        last_pos = t.start + (cutlass.min(t.row0 + ROWS_PER_TILE, p.rows) - 1) // self.group
        high, high_all, low, low_all = kv_len, kv_len, Int32(0), Int32(0)
        if const_expr(self.causal):
            high = cutlass.min(high, last_pos + 1)
            high_all = cutlass.min(high_all, first_pos + 1)
        if const_expr(self.window):
            low = first_pos - p.window_left
            low_all = last_pos - p.window_left
        shift = self.block.bit_length() - 1
        t.first = cutlass.max((high + (self.block - 1)) >> shift, 1) - 1
        t.last = cutlass.min(cutlass.max(low, 0) >> shift, t.first)
        t.plain = cutlass.max(high_all, 0) >> shift
        t.plain_low = (cutlass.max(low_all, 0) + (self.block - 1)) >> shift
        return t

    # ---- producer ---------------------------------------------------------------------------------------------------
    @cute.jit
    def producer(self, p, k_atom, k, v_atom, v, layout, smem):
        """One thread: K of block j, then V of the block before it, in the order of their use."""
        staged = cute.tile_to_shape(layout, (self.block, self.width, STAGES), (0, 1, 2))
        s_k = cute.make_tensor(cute.recast_ptr(smem.k, staged.inner, dtype=self.dtype), staged.outer)
        s_v = cute.make_tensor(cute.recast_ptr(smem.v, staged.inner, dtype=self.dtype), staged.outer)
        ring = Int32(0)
        turn = Int32(0)
        item = self.item(p, turn)
        while item < p.tiles * p.pairs:
            t = self.tile(p, item)
            k_to, k_from = self.partition(k_atom, k, s_k, t)
            v_to, v_from = self.partition(v_atom, v, s_v, t)
            block = t.first
            self.load(k_atom, k_from, k_to, block, smem.bars, K_FULL, K_EMPTY, ring)
            while block > t.last:
                self.load(k_atom, k_from, k_to, block - 1, smem.bars, K_FULL, K_EMPTY, ring + 1)
                self.load(v_atom, v_from, v_to, block, smem.bars, V_FULL, V_EMPTY, ring)
                ring = ring + 1
                block = block - 1
            self.load(v_atom, v_from, v_to, block, smem.bars, V_FULL, V_EMPTY, ring)
            ring = ring + 1
            turn = turn + 1
            item = self.item(p, turn)

    def partition(self, atom, tensor, staged, t):
        blocks = cute.local_tile(tensor[None, None, t.h, t.b], (self.block, self.width), (None, 0))
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(staged, 0, 2), cute.group_modes(blocks, 0, 2)
        )

    @cute.jit
    def load(self, atom, source, to, block, bars, full: cutlass.Constexpr[int], empty: cutlass.Constexpr[int], use):
        """Use number `use` of a ring: wait until the slot's last readers are gone, then copy a block into it."""
        slot = use % STAGES
        cute.arch.mbarrier_wait(bars + empty + slot, ((use // STAGES) & 1) ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bars + full + slot, 2 * self.tile_elements)
        cute.copy(atom, source[None, block], to[None, slot], tma_bar_ptr=bars + full + slot)

    # ---- consumers --------------------------------------------------------------------------------------------------
    def context(self, p, which, smem):
        """What stays the same over the kernel: MMA views, register tensors (changed in place), addresses."""
        c = SimpleNamespace(p=p, bars=smem.bars, which=which)
        tid = Int32(cute.arch.thread_idx()[0]) % 128
        c.tid, c.lane = tid, tid % 32
        c.warp = cute.arch.make_warp_uniform(tid // 32)
        c.quad = c.lane % 4
        c.row = which * 64 + c.warp * 16 + c.lane // 4  # of the tile; this thread's accumulator rows are row and row + 8
        k_major, mn_major = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.OperandMajorMode.MN

        def make(b_major, n, *source):
            return hopper.make_trivial_tiled_mma(self.dtype, self.dtype, k_major, b_major, Float32, (1, 1, 1), (64, n), *source)

        c.qk, c.pv = make(k_major, self.block), make(mn_major, self.width, warpgroup.OperandSource.RMEM)
        k_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        v_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, self.dtype)
        q_layout = cute.tile_to_shape(k_atom, (64, self.width), (0, 1))
        k_layout = cute.tile_to_shape(k_atom, (self.block, self.width, STAGES), (0, 1, 2))
        v_layout = cute.tile_to_shape(v_atom, (self.width, self.block, STAGES), (1, 0, 2))  # the bytes of a K tile, transposed

        def tensor(ptr, layout):
            return cute.make_tensor(cute.recast_ptr(ptr, layout.inner, dtype=self.dtype), layout.outer)

        qk, pv = c.qk.get_slice(0), c.pv.get_slice(0)
        c.frag_q = qk.make_fragment_A(qk.partition_A(tensor(smem.q + which * (64 * self.width), q_layout)))
        c.frag_k = qk.make_fragment_B(qk.partition_B(tensor(smem.k, k_layout)))
        c.frag_v = pv.make_fragment_B(pv.partition_B(tensor(smem.v, v_layout)))
        c.s = cute.make_rmem_tensor(qk.partition_shape_C((64, self.block)), Float32)
        c.o = cute.make_rmem_tensor(pv.partition_shape_C((64, self.width)), Float32)
        c.prob = pv.make_fragment_A(pv.partition_shape_A((64, self.block)))
        c.m, c.l, c.alpha = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
        c.high, c.low = (cute.make_rmem_tensor(2, Int32) for _ in range(2))
        c.q_base = smem.q.toint() + which * self.half_bytes
        c.v_base = smem.v.toint()
        return c

    @cute.jit
    def consumer(self, p, which, smem):
        c = self.context(p, which, smem)
        if which == 1:
            cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=256)  # consumer 0 has the first turn
        ring = Int32(0)
        turn = Int32(0)
        item = self.item(p, turn)
        while item < p.tiles * p.pairs:
            t = self.tile(p, item)
            self.load_q(t, c)
            self.start(t, c)
            block = t.first
            self.first_block(block, t, ring, c)
            ring = ring + 1
            block = block - 1
            # Loops instead of a branch inside one: a product in flight across a branch makes ptxas serialise all of them.
            while block >= cutlass.max(t.last, t.plain):
                self.step(True, block, ring, c)
                ring = ring + 1
                block = block - 1
            low = t.last
            if const_expr(self.window):
                low = cutlass.max(low, t.plain_low)
            while block >= low:
                self.step(False, block, ring, c)
                ring = ring + 1
                block = block - 1
            if const_expr(self.window):
                while block >= t.last:
                    self.step(True, block, ring, c)
                    ring = ring + 1
                    block = block - 1
            self.last_product(ring - 1, c)
            # The tile worked out again, instead of kept over loops that need every register.
            self.finish(self.tile(p, self.item(p, turn)), c)
            turn = turn + 1
            item = self.item(p, turn)
        if which == 0:
            cute.arch.barrier(barrier_id=TURN, number_of_threads=256)  # the turn that consumer 1 gave last

    def piece(self, row, piece):
        """Byte offset of 16-byte piece `piece` of `row` in a consumer's half of the Q tile: 64-column tiles, 128-byte swizzle."""
        return (piece // 8) * 8192 + row * 128 + (((piece % 8) ^ (row % 8)) << 4)

    def row_offset(self, t, c, tensor, row):
        """(element offset of a packed row in q or out, whether there is such a row, head, token)."""
        packed = t.row0 + row
        token = packed // self.group
        head = t.h * self.group + packed - token * self.group
        offset = Int64(t.b) * tensor.stride[0] + Int64(head) * tensor.stride[1] + Int64(token) * tensor.stride[2]
        return offset, packed < c.p.rows, head, token

    @cute.jit
    def load_q(self, t, c):
        """Q rows of this consumer to shared memory, zeros past the last row and column; 8 lanes a 128-byte line."""
        base = c.p.q.iterator.toint()
        loaded = []
        for i in cutlass.range_constexpr(4):
            row = 16 * i + c.tid // 8
            offset, inside, _, _ = self.row_offset(t, c, c.p.q, c.which * 64 + row)
            for j in cutlass.range_constexpr(self.width // 64):
                piece = 8 * j + c.tid % 8
                ok = Int32(inside) if const_expr(64 * j + 64 <= self.d) else Int32(inside & (8 * piece < self.d))
                loaded.append((row, piece, ptx.ld_global_nc_4(base + offset * 2 + 16 * piece, ok)))
        for row, piece, words in loaded:
            ptx.st_shared_4(c.q_base + self.piece(row, piece), *words)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=ROWS + c.which, number_of_threads=128)

    def start(self, t, c):
        """Softmax state, and the keys [low, high) that this thread's rows see."""
        for r in range(2):
            c.m[r], c.l[r] = Float32(M_START), Float32(0.0)
            pos = t.start + (t.row0 + c.row + 8 * r) // self.group
            c.high[r], c.low[r] = t.kv_len, Int32(0)
            if self.causal:
                c.high[r] = cutlass.min(t.kv_len, pos + 1)
            if self.window:
                c.low[r] = pos - c.p.window_left

    def clear_scores(self, c):
        """Before the fence of Q K^T. The zeros are never added (and cost no instruction in the loops), but without them S is an
        operand that has to be kept from loop to loop: ptxas then runs out of registers and serialises every product."""
        for i in range(0, cute.size(c.s), 16):
            for j, zero in enumerate(ptx.zeros(16)):
                c.s[i + j] = zero

    def issue_scores(self, ring, c):
        """S = Q K^T of the block in slot ring % STAGES."""
        slot = ring % STAGES
        self.gemm(c.qk, c.s, c.frag_q, c.frag_k[None, None, None, slot], self.k_steps, True)

    def issue_values(self, ring, clear, c):
        """O += P V, or O = P V."""
        slot = ring % STAGES
        self.gemm(c.pv, c.o, c.prob, c.frag_v[None, None, None, slot], self.block // 16, clear)

    def gemm(self, tiled_mma, acc, a, b, steps, clear):
        atom = cute.make_mma_atom(tiled_mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, not clear)
        for k in range(steps):
            cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    def wait_full(self, full, ring, c):
        cute.arch.mbarrier_wait(c.bars + full + ring % STAGES, (ring // STAGES) & 1)

    @cute.jit
    def release(self, empty: cutlass.Constexpr[int], ring, c):
        if c.lane == 0:
            cute.arch.mbarrier_arrive(c.bars + empty + ring % STAGES)

    @cute.jit
    def first_block(self, block, t, ring, c):
        self.wait_full(K_FULL, ring, c)
        self.clear_scores(c)
        warpgroup.fence()
        self.issue_scores(ring, c)
        warpgroup.wait_group(0)
        self.release(K_EMPTY, ring, c)
        self.softmax(True, block, c)
        c.prob.store(c.s.load().to(self.dtype))
        for i in cutlass.range_constexpr(cute.size(c.o)):
            c.o[i] = Float32(0.0)
        if (block + 1) * self.block > t.kv_len:
            self.wait_full(V_FULL, ring, c)
            self.zero_tail(cutlass.max(t.kv_len - block * self.block, 0), ring, c)

    @cute.jit
    def zero_tail(self, first_row, ring, c):
        """Both consumers: V rows from first_row on become zeros."""
        base = c.v_base + (ring % STAGES) * (2 * self.tile_elements)
        pieces = (self.block - first_row) * 8
        for i in cutlass.range(c.which * 128 + c.tid, pieces, 256, unroll=1):
            for j in cutlass.range_constexpr(self.width // 64):
                zero = Int32(0)
                ptx.st_shared_4(base + j * (self.block * 128) + first_row * 128 + 16 * i, zero, zero, zero, zero)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=TAIL, number_of_threads=256)

    @cute.jit
    def step(self, masked: cutlass.Constexpr[bool], block, ring, c):
        """Scores and softmax of `block` (use `ring`), under it P V of the block before (use ring - 1)."""
        self.wait_full(K_FULL, ring, c)
        cute.arch.barrier(barrier_id=TURN + c.which, number_of_threads=256)
        self.clear_scores(c)
        warpgroup.fence()
        self.issue_scores(ring, c)
        self.wait_full(V_FULL, ring - 1, c)
        self.issue_values(ring - 1, False, c)
        cute.arch.barrier_arrive(barrier_id=TURN + 1 - c.which, number_of_threads=256)
        warpgroup.wait_group(1)
        self.release(K_EMPTY, ring, c)
        self.softmax(masked, block, c)
        warpgroup.wait_group(0)
        self.release(V_EMPTY, ring - 1, c)
        c.prob.store(c.s.load().to(self.dtype))
        self.rescale(c.alpha[0], c.alpha[1], c)

    @cute.jit
    def last_product(self, ring, c):
        self.wait_full(V_FULL, ring, c)
        warpgroup.fence()
        self.issue_values(ring, False, c)
        warpgroup.wait_group(0)
        self.release(V_EMPTY, ring, c)

    def rescale(self, f0, f1, c):
        for i in range(cute.size(c.o)):
            c.o[i] = c.o[i] * (f0 if (i // 2) % 2 == 0 else f1)

    def softmax(self, masked, block, c):
        """s becomes P (fp32); m, l and alpha, the factor of what was summed before. Element i: row (i / 2) % 2, key
        8 * (i / 4) + 2 * quad + i % 2 of the block."""
        s, n = c.s, cute.size(c.s)
        if not self.positive:
            for i in range(n):
                x = s[i] * c.p.scale
                if self.softcap:
                    x = capped(x, c.p.cap_log2)
                s[i] = x
        if masked:
            first = block * self.block + 2 * c.quad
            high, low = [c.high[r] - first for r in range(2)], [c.low[r] - first for r in range(2)]
            for i in range(n):
                r, key = (i // 2) % 2, 8 * (i // 4) + i % 2
                keep = Int32(key) < high[r]
                if self.window:
                    keep = keep & (Int32(key) >= low[r])
                s[i] = cutlass.select_(keep, s[i], Float32(-float("inf")))
        for r in range(2):
            top = ptx.fmax(s[2 * r], s[2 * r + 1])
            for j in range(1, n // 4):
                top = ptx.fmax(top, ptx.fmax(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]))
            top = ptx.fmax(top, ptx.shuffle_xor_f(top, 1))
            top = ptx.fmax(top, ptx.shuffle_xor_f(top, 2))
            m_old, m_new = c.m[r], ptx.fmax(c.m[r], top)
            c.m[r] = m_new
            if self.positive:
                shift = -(m_new * c.p.scale)
                c.alpha[r] = ptx.exp2((m_old - m_new) * c.p.scale)  # exactly 1 if nothing changed, also at M_START
            else:
                c.alpha[r] = ptx.exp2(m_old - m_new)
            total = c.l[r] * c.alpha[r]
            for j in range(n // 4):
                for e in range(2):
                    i = 4 * j + 2 * r + e
                    s[i] = ptx.exp2(ptx.fma(s[i], c.p.scale, shift) if self.positive else s[i] - m_new)
                    total = total + s[i]
            c.l[r] = total

    @cute.jit
    def finish(self, t, c):
        """Divide, write lse, stage O over this consumer's half of the Q tile, store whole lines."""
        for r in cutlass.range_constexpr(2):
            total = c.l[r] + ptx.shuffle_xor_f(c.l[r], 1)
            total = total + ptx.shuffle_xor_f(total, 2)
            m = c.m[r] * c.p.scale if const_expr(self.positive) else c.m[r]
            _, inside, head, token = self.row_offset(t, c, c.p.out, c.row + 8 * r)
            if c.quad == 0 and inside:
                at = Int64(t.b) * c.p.lse.stride[0] + Int64(head) * c.p.lse.stride[1] + Int64(token) * c.p.lse.stride[2]
                ptx.st_global_f1(c.p.lse.iterator.toint() + at * 4, (m + ptx.log2(total)) * LN2)
            if const_expr(self.sink):
                bits = Int32(0)
                if inside:
                    bits = ptx.ld_global_1(c.p.sink.iterator.toint() + Int64(head) * 4)
                total = ptx.select_f(Int32(total > 0.0), total + ptx.exp2(ptx.as_float(bits) * LOG2E - m), total)
            c.alpha[r] = ptx.select_f(Int32(total > 0.0), ptx.rcp(total), Float32(0.0))
        self.rescale(c.alpha[0], c.alpha[1], c)
        packed = cute.make_rmem_tensor(cute.size(c.o), self.dtype)
        packed.store(cute.make_tensor(c.o.iterator, cute.make_layout(cute.size(c.o))).load().to(self.dtype))
        words = cute.recast_tensor(packed, Int32)
        # All four warps have read Q before one of them writes over it.
        cute.arch.barrier(barrier_id=ROWS + c.which, number_of_threads=128)
        lane = ptx.special("laneid")  # again, or the addresses made from it are kept over all loops, one of them in local memory
        for k in cutlass.range_constexpr(self.width // 16):
            to = c.q_base + self.piece(c.warp * 16 + lane % 16, 2 * k + lane // 16)
            ptx.stmatrix_4(to, words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3])
        cute.arch.barrier(barrier_id=ROWS + c.which, number_of_threads=128)
        base = c.p.out.iterator.toint()
        for i in cutlass.range_constexpr(4):
            row = 16 * i + c.tid // 8
            offset, inside, _, _ = self.row_offset(t, c, c.p.out, c.which * 64 + row)
            for j in cutlass.range_constexpr(self.width // 64):
                piece = 8 * j + c.tid % 8
                values = ptx.ld_shared_f4(c.q_base + self.piece(row, piece))
                if inside and 8 * piece < self.d:
                    ptx.st_global_f4(base + offset * 2 + 16 * piece, *values)
        # The next tile's Q may be written only when these rows have been read.
        cute.arch.barrier(barrier_id=ROWS + c.which, number_of_threads=128)
