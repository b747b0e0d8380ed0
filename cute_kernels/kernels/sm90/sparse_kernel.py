"""Hopper (sm_90a) sparse prefill kernel: one CTA holds 64 heads of one query row, two consumer warpgroups share its output.

Work item = (query row, half of 64 heads). Keys are taken 64 at a time, two blocks a and b per iteration ("seesaw"):

    warpgroup 0 (left)                                  warpgroup 1 (right)
    S_a = Q K_a^T                                       S_b = Q K_b^T
    m_a = lazy(m, max S_a), published                   waits m_a; m_b = lazy(m_a, max S_b), published
    P_a = 2^(S_a - m_a)                                 P_b = 2^(S_b - m_b), stored to shared memory
    O_left  += P_a V_a[:, :256]   (A from registers)    O_right += P_b V_b[:, 256:]   (A from registers)
    waits m_b, rescales if it moved, stores P_a         waits P_a
    O_left  += P_b V_b[:, :256]   (A from shared)       O_right += P_a V_a[:, 256:]   (A from shared)

lazy(m, x) moves a row's reference maximum only when x exceeds it by more than 2**6, so that the accumulators (64 x 256 float32
in 128 registers of each consumer thread) are rarely rescaled; the sums stay exact because every term uses the same reference.
V is the first 512 columns of K: the same shared tile, read through an MN-major descriptor.

Warpgroup 2 gathers: 16-byte cp.async with L2 hints, 8 lanes per row, source size 0 (zero fill) for every key that no head of
this CTA counts, so that a NaN in such a row never enters. Each of its warps reads the indices itself and skips blocks of 64 keys
without a counted key. The bit mask of each (head group, block) goes to the consumers through a two-stage ring.

Shared memory, d_qk 576: Q 73,728 + K 2 x 73,728 + P_b 8,192 (P_a overlays the last column tile of K_a, which only Q K_a^T reads)
+ masks and barriers = 231 KB of 232,448 bytes. Column tiles of 64 x 64 bf16 (8 KiB) in the 128-byte swizzle throughout.

mbarriers, one phase per iteration: k_full[block][half] (128 cp.async arrivals), k_empty[block][half] (4 warps of the one
warpgroup that reads the half last: left halves warpgroup 0, right halves warpgroup 1), info_full/info_empty (mask ring), q_full,
q_empty (one phase per item). The output is staged in K_b's halves, each of which its own warpgroup releases.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import SmemAllocator
from cutlass.utils import hopper_helpers as hopper

from cute_kernels.kernels.sm90 import sparse_device as dev

BLOCK = 64  # keys per block, and heads per CTA
TILE_BYTES = BLOCK * 64 * 2  # one 64 x 64 bf16 column tile
D_V = 512
LEFT_TILES = 4  # column tiles 0..3 are V's left half
THREADS = 384
CONSUMER_REGISTERS = 216
PRODUCER_REGISTERS = 72
LAZY_THRESHOLD = 6.0  # log2 units: P reaches at most 2**6, far inside bf16

# named barriers (0 is left to the compiler)
BAR_QK, BAR_A, BAR_B, BAR_RS, BAR_FINAL = 1, 2, 3, 4, 5

# mbarrier slots, 8 bytes each
K_FULL, K_EMPTY, INFO_FULL, INFO_EMPTY, Q_FULL, Q_EMPTY, N_BARRIERS = 0, 4, 8, 10, 12, 13, 14

# mask ring: per stage 2 blocks x 8 groups x 8 bytes, then one word of flags
INFO_BLOCK = 64
INFO_FLAGS = 128
INFO_STAGE = 144
FLAG_LAST, FLAG_HAS_B = 1, 2

# float32 exchange area: m_a, m_b, then l and max of each warpgroup; 64 rows each
EX_MAX_A, EX_MAX_B, EX_L0, EX_L1, EX_T0, EX_T1 = (256 * i for i in range(6))


class SparsePrefillSm90:
    """Compile-time configuration. Every flag enters the compile key.

    d_qk: 576 or 512.  has_length, has_sink, has_mask: the optional tensors.
    small_groups: head_group_size < 16, so that the two accumulator rows of a thread belong to different groups.
    general_scale: sm_scale may be zero or negative; otherwise the maximum is taken before scaling.
    """

    ORDER_QK = True  # Q K_b^T starts when Q K_a^T has been issued, so that the two softmaxes never coincide
    QK_TAIL = 0
    ORDER_RS = False
    RS_TAIL = 0
    EARLY_PV = True
    EARLY_WAIT = False
    DEFER = True  # warpgroup 0 starts the next Q K_a^T before P_b V_b has ended

    def __init__(
        self,
        d_qk: int,
        has_length: bool = False,
        has_sink: bool = False,
        has_mask: bool = False,
        small_groups: bool = False,
        general_scale: bool = False,
    ):
        assert d_qk in (512, 576)
        self.d_qk = d_qk
        self.tiles = d_qk // 64
        self.k_bytes = self.tiles * TILE_BYTES
        self.has_length = has_length
        self.has_sink = has_sink
        self.has_mask = has_mask
        self.word_pairs = 2 if has_mask and small_groups else 1
        self.general_scale = general_scale

    # ==================================================================================================== host side
    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [s_q, h_q, d_qk] bf16
        mKV: cute.Tensor,  # [s_kv, 1, d_qk] bf16
        mIdx: cute.Tensor,  # [s_q, 1, topk] int32
        mOut: cute.Tensor,  # [s_q, h_q, 512] bf16
        mMax: cute.Tensor,  # [s_q, h_q] f32
        mLse: cute.Tensor,  # [s_q, h_q] f32
        mSink: cute.Tensor | None,  # [h_q] f32
        mLen: cute.Tensor | None,  # [s_q] int32
        mMask: cute.Tensor | None,  # [s_q, topk/128, 128] uint8
        sm_scale: Float32,
        group_shift: Int32,  # log2(head_group_size)
        max_ctas: Int32,
        stream,
    ):
        halves = (mQ.shape[1] + 63) // 64
        items = mQ.shape[0] * halves
        grid = cutlass.min(items, max_ctas)
        self.kernel(
            mQ, mKV, mIdx, mOut, mMax, mLse, mSink, mLen, mMask, sm_scale, group_shift, Int32(items), Int32(halves)
        ).launch(grid=[grid, 1, 1], block=[THREADS, 1, 1], stream=stream, min_blocks_per_mp=1)

    # ==================================================================================================== kernel
    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mKV: cute.Tensor,
        mIdx: cute.Tensor,
        mOut: cute.Tensor,
        mMax: cute.Tensor,
        mLse: cute.Tensor,
        mSink: cute.Tensor | None,
        mLen: cute.Tensor | None,
        mMask: cute.Tensor | None,
        sm_scale: Float32,
        group_shift: Int32,
        items: Int32,
        halves: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tidx // 32)
        group = cute.arch.make_warp_uniform(tidx // 128)

        smem = SmemAllocator()
        q_ptr = smem.allocate_array(BFloat16, self.tiles * 4096, byte_alignment=1024)
        k_ptr = smem.allocate_array(BFloat16, 2 * self.tiles * 4096, byte_alignment=1024)
        pb_ptr = smem.allocate_array(BFloat16, 4096, byte_alignment=1024)
        # P_a: its own tile at d_qk 512, the last column tile of K_a at 576
        pa_ptr = (
            smem.allocate_array(BFloat16, 4096, byte_alignment=1024)
            if const_expr(self.d_qk == 512)
            else k_ptr + 8 * 4096
        )
        info = smem.allocate_array(Int32, 2 * INFO_STAGE // 4, byte_alignment=16).toint()
        exchange = smem.allocate_array(Float32, 6 * 64, byte_alignment=16).toint()
        bars = smem.allocate_array(Int64, N_BARRIERS, byte_alignment=8)

        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(4):
                    cute.arch.mbarrier_init(bars + K_FULL + i, 128)
                    cute.arch.mbarrier_init(bars + K_EMPTY + i, 4)
                for i in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(bars + INFO_FULL + i, 1)
                    cute.arch.mbarrier_init(bars + INFO_EMPTY + i, 8)
                cute.arch.mbarrier_init(bars + Q_FULL, 128)
                cute.arch.mbarrier_init(bars + Q_EMPTY, 8)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if group == 2:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            self.producer(
                mQ, mKV, mIdx, mLen, mMask, group_shift, items, halves, q_ptr.toint(), k_ptr.toint(), info, bars
            )
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            if group == 0:
                self.consumer(
                    0,
                    mQ,
                    mOut,
                    mMax,
                    mLse,
                    mSink,
                    sm_scale,
                    group_shift,
                    items,
                    halves,
                    q_ptr,
                    k_ptr,
                    pa_ptr,
                    pb_ptr,
                    info,
                    exchange,
                    bars,
                )
            else:
                self.consumer(
                    1,
                    mQ,
                    mOut,
                    mMax,
                    mLse,
                    mSink,
                    sm_scale,
                    group_shift,
                    items,
                    halves,
                    q_ptr,
                    k_ptr,
                    pa_ptr,
                    pb_ptr,
                    info,
                    exchange,
                    bars,
                )

    # ==================================================================================================== producer
    @cute.jit
    def load_raw(
        self,
        raw: cute.Tensor,
        at: cutlass.Constexpr[int],
        block,
        n_blocks,
        length,
        idx_row,
        mask_row,
        lane,
        lane_has_group,
    ):
        """Issue the loads of one block: this lane's indices lane and lane + 32, and lane g's mask words of group g."""
        pos = block * BLOCK + lane
        raw[at] = Int32(-1)
        raw[at + 1] = Int32(-1)
        raw[at + 2] = Int32(0)
        raw[at + 3] = Int32(0)
        if pos < length:
            raw[at] = dev.load_global_u32(idx_row + Int64(pos) * 4)
        if pos + 32 < length:
            raw[at + 1] = dev.load_global_u32(idx_row + Int64(pos) * 4 + 128)
        if const_expr(self.has_mask):
            if lane_has_group and block < n_blocks:
                w0, w1 = dev.load_global_v2(mask_row + Int64(block >> 1) * 128 + Int64((block & 1) * 8))
                raw[at + 2] = w0
                raw[at + 3] = w1

    @cute.jit
    def next_block(
        self,
        raw: cute.Tensor,
        out: cute.Tensor,
        rows: cute.Tensor,
        cursor,
        n_blocks,
        length,
        s_kv,
        idx_row,
        mask_row,
        lane,
        lane_has_group,
        sub,
    ):
        """Find the next block with a counted key.

        raw: the indices of blocks cursor and cursor + 1, already loading. Writes out = (found, words of this lane's group lo, hi,
        counted bits of this thread's four rows) and rows = their four indices (0 where not counted); returns the new cursor.
        """
        out[0] = Int32(0)
        out[1] = Int32(0)
        out[2] = Int32(0)
        out[3] = Int32(0)
        for i in cutlass.range_constexpr(4):
            rows[i] = Int32(0)
        while out[0] == 0 and cursor < n_blocks:
            i0 = raw[0]
            i1 = raw[1]
            m0 = raw[2]
            m1 = raw[3]
            for i in cutlass.range_constexpr(4):
                raw[i] = raw[i + 4]
            self.load_raw(raw, 4, cursor + 2, n_blocks, length, idx_row, mask_row, lane, lane_has_group)
            cursor = cursor + 1
            w0 = cute.arch.vote_ballot_sync(i0 >= 0 and i0 < s_kv)
            w1 = cute.arch.vote_ballot_sync(i1 >= 0 and i1 < s_kv)
            c0 = w0
            c1 = w1
            if const_expr(self.has_mask):
                w0 = w0 & m0
                w1 = w1 & m1
                c0 = cute.arch.warp_redux_sync(w0, "or")
                c1 = cute.arch.warp_redux_sync(w1, "or")
            if (c0 | c1) != 0:
                out[0] = Int32(1)
                out[1] = w0
                out[2] = w1
                bits = Int32(0)
                for i in cutlass.range_constexpr(4):
                    source = i0 if const_expr(i < 2) else i1
                    counted = c0 if const_expr(i < 2) else c1
                    row = sub + 16 * (i % 2)
                    index = cute.arch.shuffle_sync(source, row)
                    bit = (counted >> row) & 1
                    rows[i] = index if bit != 0 else Int32(0)
                    bits = bits | (bit << i)
                out[3] = bits
        return cursor

    @cute.jit
    def gather(
        self,
        dst: Int32,
        base: cutlass.Constexpr[int],
        first: cutlass.Constexpr[int],
        last: cutlass.Constexpr[int],
        src: cute.Tensor,
        sizes: cute.Tensor,
        policy,
    ):
        """This thread's 16-byte chunk of column tiles first..last-1 of its four rows."""
        for t in cutlass.range_constexpr(first, last):
            for i in cutlass.range_constexpr(4):
                dev.cp_async_16(dst, base + t * TILE_BYTES + i * 2048, src[i], t * 128, sizes[i], policy)

    @cute.jit
    def producer(self, mQ, mKV, mIdx, mLen, mMask, group_shift, items, halves, q_addr, k_addr, info, bars):
        tidx = cute.arch.thread_idx()[0] - 256
        lane = tidx % 32
        warp = cute.arch.make_warp_uniform(tidx // 32)
        sub = tidx // 8  # this thread's rows are sub + 16*i
        chunk = tidx % 8  # and its 16 bytes of each 128-byte column tile
        offset = sub * 128 + ((chunk ^ (sub & 7)) << 4)
        q_dst = q_addr + offset
        k_dst = k_addr + offset
        h_q = mQ.shape[1]
        s_kv = mKV.shape[0]
        topk = mIdx.shape[2]
        kv_base = mKV.iterator.toint() + Int64(chunk * 16)
        kv_stride = Int64(mKV.stride[0]) * 2
        policy = dev.evict_last_policy()

        raw = cute.make_rmem_tensor(8, Int32)
        out_a = cute.make_rmem_tensor(4, Int32)
        out_b = cute.make_rmem_tensor(4, Int32)
        next_a = cute.make_rmem_tensor(4, Int32)
        next_b = cute.make_rmem_tensor(4, Int32)
        rows_a = cute.make_rmem_tensor(4, Int32)
        rows_b = cute.make_rmem_tensor(4, Int32)
        next_rows_a = cute.make_rmem_tensor(4, Int32)
        next_rows_b = cute.make_rmem_tensor(4, Int32)
        src_a = cute.make_rmem_tensor(4, Int64)
        src_b = cute.make_rmem_tensor(4, Int64)
        size_a = cute.make_rmem_tensor(4, Int32)
        size_b = cute.make_rmem_tensor(4, Int32)

        it = Int32(0)
        q_phase = Int32(1)
        item = Int32(cute.arch.block_idx()[0])
        while item < items:
            token = item // halves
            first_head = (item - token * halves) * 64
            length = Int32(topk)
            if const_expr(mLen is not None):
                given = dev.load_global_u32(mLen.iterator.toint() + Int64(token) * 4)
                length = cutlass.min(cutlass.max(given, Int32(0)), length)
            n_blocks = (length + (BLOCK - 1)) // BLOCK
            idx_row = mIdx.iterator.toint() + Int64(token) * (Int64(mIdx.stride[0]) * 4)
            mask_row = Int64(0)
            lane_has_group = Boolean(False)
            if const_expr(self.has_mask):
                first_group = first_head >> group_shift
                n_groups = cutlass.min((h_q >> group_shift) - first_group, cutlass.max(64 >> group_shift, Int32(1)))
                n_groups = cutlass.min(n_groups, Int32(8))
                lane_has_group = lane < n_groups
                mask_row = (
                    mMask.iterator.toint() + Int64(token) * Int64(mMask.stride[0]) + Int64((first_group + lane) * 16)
                )
            cursor = Int32(0)
            self.load_raw(raw, 0, Int32(0), n_blocks, length, idx_row, mask_row, lane, lane_has_group)
            self.load_raw(raw, 4, Int32(1), n_blocks, length, idx_row, mask_row, lane, lane_has_group)

            # ---- Q: rows are heads, absent heads are zero
            cute.arch.mbarrier_wait(bars + Q_EMPTY, q_phase)
            q_phase = q_phase ^ 1
            q_row = mQ.iterator.toint() + Int64(token) * (Int64(mQ.stride[0]) * 2) + Int64(chunk * 16)
            for i in cutlass.range_constexpr(4):
                head = first_head + sub + 16 * i
                inside = head < h_q
                size_a[i] = Int32(16) if inside else Int32(0)
                src_a[i] = q_row + Int64(head if inside else Int32(0)) * (Int64(mQ.stride[1]) * 2)
            self.gather(q_dst, 0, 0, self.tiles, src_a, size_a, policy)
            cute.arch.cp_async_mbarrier_arrive_noinc(bars + Q_FULL)

            cursor = self.next_block(
                raw, out_a, rows_a, cursor, n_blocks, length, s_kv, idx_row, mask_row, lane, lane_has_group, sub
            )
            cursor = self.next_block(
                raw, out_b, rows_b, cursor, n_blocks, length, s_kv, idx_row, mask_row, lane, lane_has_group, sub
            )
            more = Int32(1)
            while more != 0:
                cursor = self.next_block(
                    raw,
                    next_a,
                    next_rows_a,
                    cursor,
                    n_blocks,
                    length,
                    s_kv,
                    idx_row,
                    mask_row,
                    lane,
                    lane_has_group,
                    sub,
                )
                cursor = self.next_block(
                    raw,
                    next_b,
                    next_rows_b,
                    cursor,
                    n_blocks,
                    length,
                    s_kv,
                    idx_row,
                    mask_row,
                    lane,
                    lane_has_group,
                    sub,
                )
                more = next_a[0]
                has_b = out_b[0]
                phase = it & 1

                # ---- masks and flags
                if warp == 0:
                    stage = it & 1
                    cute.arch.mbarrier_wait(bars + INFO_EMPTY + stage, ((it >> 1) & 1) ^ 1)
                    here = info + stage * INFO_STAGE
                    if lane < (8 if const_expr(self.has_mask) else 1):
                        dev.store_shared_v2(here + lane * 8, 0, out_a[1], out_a[2])
                        dev.store_shared_v2(here + lane * 8, INFO_BLOCK, out_b[1], out_b[2])
                    if lane == 0:
                        flags = (Int32(0) if more != 0 else Int32(FLAG_LAST)) | (has_b * FLAG_HAS_B)
                        dev.store_shared_u32(here, INFO_FLAGS, flags)
                    cute.arch.sync_warp()
                    if lane == 0:
                        cute.arch.mbarrier_arrive(bars + INFO_FULL + stage)

                for i in cutlass.range_constexpr(4):
                    size_a[i] = ((out_a[3] >> i) & 1) << 4
                    size_b[i] = ((out_b[3] >> i) & 1) << 4
                    src_a[i] = kv_base + Int64(rows_a[i]) * kv_stride
                    src_b[i] = kv_base + Int64(rows_b[i]) * kv_stride

                # ---- column tiles, in the order in which the consumers release them
                cute.arch.mbarrier_wait(bars + K_EMPTY + 0, phase ^ 1)
                self.gather(k_dst, 0, 0, LEFT_TILES, src_a, size_a, policy)
                cute.arch.cp_async_mbarrier_arrive_noinc(bars + K_FULL + 0)
                cute.arch.mbarrier_wait(bars + K_EMPTY + 1, phase ^ 1)
                self.gather(k_dst, 0, LEFT_TILES, self.tiles, src_a, size_a, policy)
                cute.arch.cp_async_mbarrier_arrive_noinc(bars + K_FULL + 1)
                cute.arch.mbarrier_wait(bars + K_EMPTY + 3, phase ^ 1)
                if has_b != 0:
                    self.gather(k_dst, self.k_bytes, LEFT_TILES, self.tiles, src_b, size_b, policy)
                cute.arch.cp_async_mbarrier_arrive_noinc(bars + K_FULL + 3)
                cute.arch.mbarrier_wait(bars + K_EMPTY + 2, phase ^ 1)
                if has_b != 0:
                    self.gather(k_dst, self.k_bytes, 0, LEFT_TILES, src_b, size_b, policy)
                cute.arch.cp_async_mbarrier_arrive_noinc(bars + K_FULL + 2)

                for i in cutlass.range_constexpr(4):
                    out_a[i] = next_a[i]
                    out_b[i] = next_b[i]
                    rows_a[i] = next_rows_a[i]
                    rows_b[i] = next_rows_b[i]
                it = it + 1
            item = item + cute.arch.grid_dim()[0]

    # ==================================================================================================== consumers
    @cute.jit
    def gemm(
        self,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,
        a: cute.Tensor,
        b: cute.Tensor,
        first: cutlass.Constexpr[int],
        last: cutlass.Constexpr[int],
        clear: cutlass.Constexpr[bool],
    ):
        """Issue the k-steps first..last-1 (16 columns each); the caller fences, commits and waits."""
        atom = cute.make_mma_atom(tiled_mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, not clear)
        for k in cutlass.range_constexpr(first, last):
            cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)

    @cute.jit
    def tiles_ready(self, bars, which: cutlass.Constexpr[int], phase):
        """Wait for gathered column tiles. cp.async writes through the generic proxy, wgmma reads through the async proxy."""
        cute.arch.mbarrier_wait(bars + K_FULL + which, phase)
        cute.arch.fence_view_async_shared()

    @cute.jit
    def rescale(self, acc: cute.Tensor, f0: Float32, f1: Float32):
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = acc[i] * (f0 if const_expr((i // 2) % 2 == 0) else f1)

    @cute.jit
    def store_p(self, p: cute.Tensor, address: Int32, swizzle: Int32, half: Int32):
        """Store this warp's 16 rows of a 64 x 64 bf16 fragment into a swizzled tile.

        address: of the 128-byte row that this lane addresses; swizzle = row & 7; half = lane // 16 picks the 8-column matrix.
        """
        words = cute.recast_tensor(p, Int32)
        for k in cutlass.range_constexpr(4):
            dev.stmatrix_x4(
                address + (((2 * k + half) ^ swizzle) << 4),
                words[4 * k],
                words[4 * k + 1],
                words[4 * k + 2],
                words[4 * k + 3],
            )

    @cute.jit
    def exponentials(self, scores: cute.Tensor, p: cute.Tensor, m: cute.Tensor, scale: Float32):
        """scores = 2**(scores * scale - m), p = its bf16 rounding."""
        for i in cutlass.range_constexpr(32):
            x = scores[i] if const_expr(self.general_scale) else scores[i] * scale
            scores[i] = dev.exp2(x - m[(i // 2) % 2])
        p.store(scores.load().to(BFloat16))

    @cute.jit
    def add_sums(self, scores: cute.Tensor, sums: cute.Tensor):
        """sums[r] += the unrounded terms of row r."""
        s0 = scores[0]
        s1 = scores[2]
        for i in cutlass.range_constexpr(1, 32):
            if const_expr(i != 2):
                if const_expr((i // 2) % 2 == 0):
                    s0 = s0 + scores[i]
                else:
                    s1 = s1 + scores[i]
        sums[0] = sums[0] + s0
        sums[1] = sums[1] + s1

    @cute.jit
    def consumer(
        self,
        right: cutlass.Constexpr[int],
        mQ,
        mOut,
        mMax,
        mLse,
        mSink,
        sm_scale,
        group_shift,
        items,
        halves,
        q_ptr,
        k_ptr,
        pa_ptr,
        pb_ptr,
        info,
        exchange,
        bars,
    ):
        """Warpgroup 0 (right = 0) owns block a and output columns 0..255, warpgroup 1 (right = 1) block b and columns 256..511."""
        tidx = cute.arch.thread_idx()[0] - 128 * right
        lane = tidx % 32
        warp = cute.arch.make_warp_uniform(tidx // 32)
        quad = lane % 4
        row = warp * 16 + lane // 4  # and row + 8
        h_q = mQ.shape[1]

        # ---- MMA views
        k_major = cute.nvgpu.OperandMajorMode.K
        mn_major = cute.nvgpu.OperandMajorMode.MN
        qk = hopper.make_trivial_tiled_mma(BFloat16, BFloat16, k_major, k_major, Float32, (1, 1, 1), (64, 64))
        pv_rs = hopper.make_trivial_tiled_mma(
            BFloat16, BFloat16, k_major, mn_major, Float32, (1, 1, 1), (64, 256), warpgroup.OperandSource.RMEM
        )
        pv_ss = hopper.make_trivial_tiled_mma(BFloat16, BFloat16, k_major, mn_major, Float32, (1, 1, 1), (64, 256))
        k_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        v_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, BFloat16)
        k_layout = cute.tile_to_shape(k_atom, (64, self.d_qk), (0, 1))
        p_layout = cute.tile_to_shape(k_atom, (64, 64), (0, 1))
        v_layout = cute.tile_to_shape(v_atom, (256, 64), (1, 0))

        def tensor(ptr, layout):
            return cute.make_tensor(cute.recast_ptr(ptr, layout.inner, dtype=BFloat16), layout.outer)

        qk_thr = qk.get_slice(0)
        rs_thr = pv_rs.get_slice(0)
        ss_thr = pv_ss.get_slice(0)
        own = right * self.tiles * 4096  # element offset of this warpgroup's block in k_ptr
        other = (1 - right) * self.tiles * 4096
        half = right * LEFT_TILES * 4096
        frag_q = qk_thr.make_fragment_A(qk_thr.partition_A(tensor(q_ptr, k_layout)))
        frag_k = qk_thr.make_fragment_B(qk_thr.partition_B(tensor(k_ptr + own, k_layout)))
        frag_v_own = rs_thr.make_fragment_B(rs_thr.partition_B(tensor(k_ptr + own + half, v_layout)))
        frag_v_other = ss_thr.make_fragment_B(ss_thr.partition_B(tensor(k_ptr + other + half, v_layout)))
        p_other = pb_ptr if const_expr(right == 0) else pa_ptr
        frag_p_other = ss_thr.make_fragment_A(ss_thr.partition_A(tensor(p_other, p_layout)))
        scores = cute.make_rmem_tensor(qk_thr.partition_shape_C((64, 64)), Float32)
        acc = cute.make_rmem_tensor(rs_thr.partition_shape_C((64, 256)), Float32)
        p = rs_thr.make_fragment_A(rs_thr.partition_shape_A((64, 64)))

        # ---- addresses: stmatrix rows of P and of the staged output, exchange rows, masks
        st_row = warp * 16 + lane % 16
        st_swizzle = lane & 7
        st_half = lane // 16
        p_own = (pb_ptr if const_expr(right == 1) else pa_ptr).toint() + st_row * 128
        ex_row = exchange + row * 4
        group0 = Int32(0)
        group1 = Int32(0)
        if const_expr(self.has_mask):
            group0 = cutlass.min(row >> group_shift, Int32(7)) * 8
            group1 = cutlass.min((row + 8) >> group_shift, Int32(7)) * 8
        scale = sm_scale * dev.LOG2_E

        words = cute.make_rmem_tensor(2 * self.word_pairs, Uint32)
        m = cute.make_rmem_tensor(2, Float32)  # reference maximum of rows row, row + 8, log2 units
        top = cute.make_rmem_tensor(2, Float32)  # true maximum over this warpgroup's blocks
        sums = cute.make_rmem_tensor(2, Float32)

        it = Int32(0)
        q_phase = Int32(0)
        item = Int32(cute.arch.block_idx()[0])
        while item < items:
            token = item // halves
            first_head = (item - token * halves) * 64
            acc.fill(0.0)
            for r in cutlass.range_constexpr(2):
                m[r] = Float32(dev.LOWEST)
                top[r] = Float32(dev.NEG_INF)
                sums[r] = Float32(0.0)
            cute.arch.mbarrier_wait(bars + Q_FULL, q_phase)
            q_phase = q_phase ^ 1
            if const_expr(right == 0):
                flags = self.read_info(right, it, info, group0, group1, lane, quad, bars, words)
                self.left_scores(False, it & 1, flags & FLAG_LAST, lane, bars, qk, frag_q, frag_k, scores)
                while (flags & FLAG_LAST) == 0:
                    self.left_own(
                        lane,
                        quad,
                        bars,
                        scale,
                        pv_rs,
                        frag_v_own,
                        scores,
                        acc,
                        p,
                        words,
                        m,
                        top,
                        sums,
                        ex_row,
                        p_own,
                        st_swizzle,
                        st_half,
                    )
                    self.left_other(pv_ss, frag_p_other, frag_v_other, acc, m, sums, ex_row)
                    if const_expr(not self.DEFER):
                        warpgroup.wait_group(0)
                        if lane == 0:
                            cute.arch.mbarrier_arrive(bars + K_EMPTY + 2)
                    it = it + 1
                    flags = self.read_info(right, it, info, group0, group1, lane, quad, bars, words)
                    self.left_scores(True, it & 1, flags & FLAG_LAST, lane, bars, qk, frag_q, frag_k, scores)
                self.left_own(
                    lane,
                    quad,
                    bars,
                    scale,
                    pv_rs,
                    frag_v_own,
                    scores,
                    acc,
                    p,
                    words,
                    m,
                    top,
                    sums,
                    ex_row,
                    p_own,
                    st_swizzle,
                    st_half,
                )
                if (flags & FLAG_HAS_B) != 0:
                    self.left_other(pv_ss, frag_p_other, frag_v_other, acc, m, sums, ex_row)
                    warpgroup.wait_group(0)
                if lane == 0:
                    cute.arch.mbarrier_arrive(bars + K_EMPTY + 2)
                it = it + 1
            else:
                last = Int32(0)
                while last == 0:
                    flags = self.read_info(right, it, info, group0, group1, lane, quad, bars, words)
                    last = flags & FLAG_LAST
                    self.right_iteration(
                        it & 1,
                        last,
                        flags & FLAG_HAS_B,
                        lane,
                        quad,
                        bars,
                        scale,
                        qk,
                        pv_rs,
                        pv_ss,
                        frag_q,
                        frag_k,
                        frag_v_own,
                        frag_v_other,
                        frag_p_other,
                        scores,
                        acc,
                        p,
                        words,
                        m,
                        top,
                        sums,
                        ex_row,
                        p_own,
                        st_swizzle,
                        st_half,
                    )
                    it = it + 1
            self.epilogue(
                right,
                token,
                first_head,
                h_q,
                lane,
                quad,
                warp,
                row,
                mOut,
                mMax,
                mLse,
                mSink,
                acc,
                m,
                top,
                sums,
                ex_row,
            )
            item = item + cute.arch.grid_dim()[0]

    @cute.jit
    def read_info(self, right: cutlass.Constexpr[int], it, info, group0, group1, lane, quad, bars, words: cute.Tensor):
        """This iteration's flags; words = the key masks of this thread's rows, shifted for `apply_mask`."""
        stage = it & 1
        cute.arch.mbarrier_wait(bars + INFO_FULL + stage, (it >> 1) & 1)
        here = info + stage * INFO_STAGE
        flags = dev.load_shared_u32(here, INFO_FLAGS)
        w0, w1 = dev.load_shared_v2(here + group0, INFO_BLOCK * right)
        words[0] = Uint32(w0) >> (2 * quad)
        words[1] = Uint32(w1) >> (2 * quad)
        if const_expr(self.word_pairs == 2):
            w2, w3 = dev.load_shared_v2(here + group1, INFO_BLOCK * right)
            words[2] = Uint32(w2) >> (2 * quad)
            words[3] = Uint32(w3) >> (2 * quad)
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(bars + INFO_EMPTY + stage)
        return flags

    @cute.jit
    def row_max(self, scores: cute.Tensor, words: cute.Tensor, top: cute.Tensor, current: cute.Tensor, scale: Float32):
        """Mask, then current[r] = the maximum logit of each row in log2 units."""
        if const_expr(self.general_scale):
            for i in cutlass.range_constexpr(32):
                scores[i] = scores[i] * scale
        dev.apply_mask(scores, words, self.word_pairs)
        for r in cutlass.range_constexpr(2):
            x = scores[2 * r]
            x = cute.arch.fmax(x, scores[2 * r + 1])
            for j in cutlass.range_constexpr(1, 8):
                x = cute.arch.fmax(x, cute.arch.fmax(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]))
            x = dev.quad_max(x)
            if const_expr(not self.general_scale):
                x = x * scale
            current[r] = x
            top[r] = cute.arch.fmax(top[r], x)

    @cute.jit
    def move_reference(self, acc: cute.Tensor, m: cute.Tensor, sums: cute.Tensor, new: cute.Tensor):
        """Set the rows' reference maximum to new; rescale the sums and, if any row of the warp moved, the accumulator."""
        f0 = dev.exp2(m[0] - new[0])
        f1 = dev.exp2(m[1] - new[1])
        if cute.arch.vote_any_sync(m[0] != new[0] or m[1] != new[1]):
            sums[0] = sums[0] * f0
            sums[1] = sums[1] * f1
            self.rescale(acc, f0, f1)
        m[0] = new[0]
        m[1] = new[1]

    @cute.jit
    def left_scores(self, pending: cutlass.Constexpr[bool], phase, last, lane, bars, qk, frag_q, frag_k, scores):
        """S_a. pending: the previous iteration's P_b V_b is still in flight; it ends under the first half of this product."""
        self.tiles_ready(bars, 0, phase)
        warpgroup.fence()
        self.gemm(qk, scores, frag_q, frag_k, 0, 16, True)
        if const_expr(pending and self.DEFER):
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            if lane == 0:
                cute.arch.mbarrier_arrive(bars + K_EMPTY + 2)
        self.tiles_ready(bars, 1, phase)
        steps = self.d_qk // 16
        self.gemm(qk, scores, frag_q, frag_k, 16, steps - self.QK_TAIL, False)
        if const_expr(self.ORDER_QK):
            cute.arch.barrier_arrive(barrier_id=BAR_QK, number_of_threads=256)
        self.gemm(qk, scores, frag_q, frag_k, steps - self.QK_TAIL, steps, False)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        if last != 0 and lane == 0:
            cute.arch.mbarrier_arrive(bars + Q_EMPTY)

    @cute.jit
    def left_own(
        self,
        lane,
        quad,
        bars,
        scale,
        pv_rs,
        frag_v_own,
        scores,
        acc,
        p,
        words,
        m,
        top,
        sums,
        ex_row,
        p_own,
        st_swizzle,
        st_half,
    ):
        """m_a and P_a, published; O_left += P_a V_a."""
        new = cute.make_rmem_tensor(2, Float32)
        self.row_max(scores, words, top, new, scale)
        for r in cutlass.range_constexpr(2):
            new[r] = new[r] if new[r] - m[r] > LAZY_THRESHOLD else m[r]
        self.move_reference(acc, m, sums, new)
        self.exponentials(scores, p, m, scale)
        self.store_p(p, p_own, st_swizzle, st_half)
        if quad == 0:
            dev.store_shared_f32(ex_row, EX_MAX_A, m[0])
            dev.store_shared_f32(ex_row, EX_MAX_A + 32, m[1])
        cute.arch.fence_view_async_shared()
        cute.arch.barrier_arrive(barrier_id=BAR_A, number_of_threads=256)
        if const_expr(self.ORDER_RS):
            cute.arch.barrier(barrier_id=BAR_RS, number_of_threads=256)
        warpgroup.fence()
        self.gemm(pv_rs, acc, p, frag_v_own, 0, 4, False)
        warpgroup.commit_group()
        self.add_sums(scores, sums)
        warpgroup.wait_group(0)
        if lane == 0:
            cute.arch.mbarrier_arrive(bars + K_EMPTY + 0)

    @cute.jit
    def left_other(self, pv_ss, frag_p_other, frag_v_other, acc, m, sums, ex_row):
        """Issue O_left += P_b V_b; the caller waits."""
        new = cute.make_rmem_tensor(2, Float32)
        cute.arch.barrier(barrier_id=BAR_B, number_of_threads=256)
        new[0] = dev.load_shared_f32(ex_row, EX_MAX_B)
        new[1] = dev.load_shared_f32(ex_row, EX_MAX_B + 32)
        self.move_reference(acc, m, sums, new)
        warpgroup.fence()
        self.gemm(pv_ss, acc, frag_p_other, frag_v_other, 0, 4, False)
        warpgroup.commit_group()

    @cute.jit
    def right_iteration(
        self,
        phase,
        last,
        has_b,
        lane,
        quad,
        bars,
        scale,
        qk,
        pv_rs,
        pv_ss,
        frag_q,
        frag_k,
        frag_v_own,
        frag_v_other,
        frag_p_other,
        scores,
        acc,
        p,
        words,
        m,
        top,
        sums,
        ex_row,
        p_own,
        st_swizzle,
        st_half,
    ):
        new = cute.make_rmem_tensor(2, Float32)
        shared = cute.make_rmem_tensor(2, Float32)
        # ---- S_b, right column tiles first: they arrive first
        self.tiles_ready(bars, 3, phase)
        if const_expr(self.ORDER_QK):
            cute.arch.barrier(barrier_id=BAR_QK, number_of_threads=256)
        if has_b != 0:
            warpgroup.fence()
            self.gemm(qk, scores, frag_q, frag_k, 16, self.d_qk // 16, True)
            self.tiles_ready(bars, 2, phase)
            self.gemm(qk, scores, frag_q, frag_k, 0, 16 - self.RS_TAIL, False)
            if const_expr(self.ORDER_RS):
                cute.arch.barrier_arrive(barrier_id=BAR_RS, number_of_threads=256)
            self.gemm(qk, scores, frag_q, frag_k, 16 - self.RS_TAIL, 16, False)
            warpgroup.commit_group()
            # ---- O_right += P_a V_a, while the softmax of S_b runs
            if const_expr(self.EARLY_PV):
                cute.arch.barrier(barrier_id=BAR_A, number_of_threads=256)
                shared[0] = dev.load_shared_f32(ex_row, EX_MAX_A)
                shared[1] = dev.load_shared_f32(ex_row, EX_MAX_A + 32)
                if const_expr(self.EARLY_WAIT):
                    warpgroup.wait_group(0)
                self.move_reference(acc, m, sums, shared)
                warpgroup.fence()
                self.gemm(pv_ss, acc, frag_p_other, frag_v_other, 0, 4, False)
                warpgroup.commit_group()
                if const_expr(not self.EARLY_WAIT):
                    warpgroup.wait_group(1)
            else:
                warpgroup.wait_group(0)
            if last != 0 and lane == 0:
                cute.arch.mbarrier_arrive(bars + Q_EMPTY)
            # ---- m_b, P_b
            self.row_max(scores, words, top, new, scale)
            if const_expr(not self.EARLY_PV):
                cute.arch.barrier(barrier_id=BAR_A, number_of_threads=256)
                shared[0] = dev.load_shared_f32(ex_row, EX_MAX_A)
                shared[1] = dev.load_shared_f32(ex_row, EX_MAX_A + 32)
                self.move_reference(acc, m, sums, shared)
                warpgroup.fence()
                self.gemm(pv_ss, acc, frag_p_other, frag_v_other, 0, 4, False)
                warpgroup.commit_group()
            for r in cutlass.range_constexpr(2):
                new[r] = new[r] if new[r] - m[r] > LAZY_THRESHOLD else m[r]
            self.exponentials(scores, p, new, scale)
            self.store_p(p, p_own, st_swizzle, st_half)
            if quad == 0:
                dev.store_shared_f32(ex_row, EX_MAX_B, new[0])
                dev.store_shared_f32(ex_row, EX_MAX_B + 32, new[1])
            cute.arch.fence_view_async_shared()
            cute.arch.barrier_arrive(barrier_id=BAR_B, number_of_threads=256)
            warpgroup.wait_group(0)
            if lane == 0:
                cute.arch.mbarrier_arrive(bars + K_EMPTY + 1)
            # ---- O_right += P_b V_b
            self.move_reference(acc, m, sums, new)
            self.add_sums(scores, sums)
            warpgroup.fence()
            self.gemm(pv_rs, acc, p, frag_v_own, 0, 4, False)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            if lane == 0:
                cute.arch.mbarrier_arrive(bars + K_EMPTY + 3)
        else:
            cute.arch.mbarrier_wait(bars + K_FULL + 2, phase)  # nothing was loaded; keeps the phases in step
            if const_expr(self.ORDER_RS):
                cute.arch.barrier_arrive(barrier_id=BAR_RS, number_of_threads=256)
            cute.arch.barrier(barrier_id=BAR_A, number_of_threads=256)
            shared[0] = dev.load_shared_f32(ex_row, EX_MAX_A)
            shared[1] = dev.load_shared_f32(ex_row, EX_MAX_A + 32)
            self.move_reference(acc, m, sums, shared)
            warpgroup.fence()
            self.gemm(pv_ss, acc, frag_p_other, frag_v_other, 0, 4, False)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            if lane == 0:
                cute.arch.mbarrier_arrive(bars + K_EMPTY + 1)
                cute.arch.mbarrier_arrive(bars + K_EMPTY + 3)
                cute.arch.mbarrier_arrive(bars + Q_EMPTY)

    # ==================================================================================================== epilogue
    @cute.jit
    def epilogue(
        self,
        right: cutlass.Constexpr[int],
        token,
        first_head,
        h_q,
        lane,
        quad,
        warp,
        row,
        mOut,
        mMax,
        mLse,
        mSink,
        acc,
        m,
        top,
        sums,
        ex_row,
    ):
        """Join the two warpgroups' sums, write the statistics, normalise and store this warpgroup's 256 columns."""
        inverse = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            sums[r] = dev.quad_sum(sums[r])
            if quad == 0:
                dev.store_shared_f32(ex_row, (EX_L1 if right else EX_L0) + 32 * r, sums[r])
                dev.store_shared_f32(ex_row, (EX_T1 if right else EX_T0) + 32 * r, top[r])
        cute.arch.barrier(barrier_id=BAR_FINAL, number_of_threads=256)
        for r in cutlass.range_constexpr(2):
            total = sums[r] + dev.load_shared_f32(ex_row, (EX_L0 if right else EX_L1) + 32 * r)
            highest = cute.arch.fmax(top[r], dev.load_shared_f32(ex_row, (EX_T0 if right else EX_T1) + 32 * r))
            head = first_head + row + 8 * r
            denominator = total
            if const_expr(mSink is not None):
                if head < h_q:
                    sink = dev.load_global_f32(mSink.iterator.toint() + Int64(head) * 4)
                    denominator = total + dev.exp2(sink * dev.LOG2_E - m[r])
            inverse[r] = Float32(0.0) if total == 0.0 else Float32(1.0) / denominator
            if const_expr(right == 0):
                if quad == 0 and head < h_q:
                    lse = cute.math.log(total) + m[r] * dev.LN_2
                    lse = Float32(float("inf")) if total == 0.0 else lse
                    dev.store_global_f32(
                        mMax.iterator.toint() + (Int64(token) * Int64(mMax.stride[0]) + Int64(head)) * 4,
                        highest * dev.LN_2,
                    )
                    dev.store_global_f32(
                        mLse.iterator.toint() + (Int64(token) * Int64(mLse.stride[0]) + Int64(head)) * 4, lse
                    )
        self.rescale(acc, inverse[0], inverse[1])
        packed = cute.make_rmem_tensor(128, BFloat16)
        packed.store(cute.make_tensor(acc.iterator, cute.make_layout(128)).load().to(BFloat16))
        words = cute.recast_tensor(packed, Int32)
        # lanes t and t^1 swap halves of two neighbouring 8-column groups, so that a quad stores full 32-byte sectors
        even = quad % 2 == 0
        out = (
            mOut.iterator.toint()
            + (Int64(token) * Int64(mOut.stride[0]) + Int64(first_head + row) * Int64(mOut.stride[1])) * 2
            + Int64(right * 512 + 8 * (quad // 2) + 16 * (quad % 2))
        )
        for r in cutlass.range_constexpr(2):
            inside = first_head + row + 8 * r < h_q
            for k in cutlass.range_constexpr(16):
                low = words[4 * k + r]
                high = words[4 * k + 2 + r]
                got = cute.arch.shuffle_sync_bfly(high if even else low, offset=1)
                if inside:
                    dev.store_global_v2(out, 32 * k, low if even else got, got if even else high)
            out = out + 8 * Int64(mOut.stride[1]) * 2
