"""Consumer warpgroups of the sparse prefill kernel: scores, lazy online softmax, output halves, statistics."""

from __future__ import annotations

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import hopper_helpers as hopper

from cute_kernels.kernels.scales import LN2, LOG2E
from cute_kernels.kernels.sm90 import sparse_device as dev
from cute_kernels.kernels.sm90.sparse_layout import (
    A_LEFT,
    A_RIGHT,
    B_LEFT,
    B_RIGHT,
    BAR_A,
    BAR_B,
    BAR_FINAL,
    BAR_LEFT,
    BAR_QK,
    EX_L0,
    EX_L1,
    EX_MAX_A,
    EX_MAX_B,
    EX_T0,
    EX_T1,
    FLAG_HAS_B,
    FLAG_LAST,
    INFO_BLOCK,
    INFO_EMPTY,
    INFO_FLAGS,
    INFO_FULL,
    INFO_STAGE,
    K_EMPTY,
    K_FULL,
    LAZY_THRESHOLD,
    LEFT_TILES,
    Q_EMPTY,
    Q_FULL,
    TILE_ELEMENTS,
)


@cute.jit
def gemm(
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
def rescale(acc: cute.Tensor, f0: Float32, f1: Float32):
    """Multiply the accumulator's rows (this thread's two) by f0 and f1."""
    for j in cutlass.range_constexpr(cute.size(acc) // 32):
        for k in cutlass.range_constexpr(32):
            i = 32 * j + k
            acc[i] = acc[i] * (f0 if const_expr((i // 2) % 2 == 0) else f1)


class Consumer:
    """Methods of `SparsePrefillSm90` that warpgroups 0 ("left") and 1 ("right") run.

    c is the thread's context, made by `context`: MMA views, register tensors (scores, acc, p, words, m, top, sums, new) and
    addresses. Register tensors are changed in place.
    """

    def context(self, right: int, mQ, sm_scale, group_shift, smem: SimpleNamespace) -> SimpleNamespace:
        """Everything that stays the same over the kernel. Warpgroup `right` owns block a (0) or b (1) and that output half."""
        c = SimpleNamespace(bars=smem.bars, info=smem.info)
        tidx = cute.arch.thread_idx()[0] - 128 * right
        c.lane = tidx % 32
        c.warp = cute.arch.make_warp_uniform(tidx // 32)
        c.quad = c.lane % 4
        c.row = c.warp * 16 + c.lane // 4  # this thread's accumulator rows are row and row + 8
        c.h_q = mQ.shape[1]
        c.scale = sm_scale * LOG2E

        # ---- MMA views
        k_major, mn_major = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.OperandMajorMode.MN
        register_a = warpgroup.OperandSource.RMEM

        def make(b_major, n, *source):
            return hopper.make_trivial_tiled_mma(
                BFloat16, BFloat16, k_major, b_major, Float32, (1, 1, 1), (64, n), *source
            )

        c.qk, c.pv_rs, c.pv_ss = make(k_major, 64), make(mn_major, 256, register_a), make(mn_major, 256)
        k_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        v_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, BFloat16)
        k_layout = cute.tile_to_shape(k_atom, (64, self.d_qk), (0, 1))
        p_layout = cute.tile_to_shape(k_atom, (64, 64), (0, 1))
        v_layout = cute.tile_to_shape(v_atom, (256, 64), (1, 0))  # the same bytes as four column tiles of K

        def tensor(ptr, layout):
            return cute.make_tensor(cute.recast_ptr(ptr, layout.inner, dtype=BFloat16), layout.outer)

        qk, rs, ss = c.qk.get_slice(0), c.pv_rs.get_slice(0), c.pv_ss.get_slice(0)
        own = right * self.tiles * TILE_ELEMENTS
        other = (1 - right) * self.tiles * TILE_ELEMENTS
        half = right * LEFT_TILES * TILE_ELEMENTS
        c.frag_q = qk.make_fragment_A(qk.partition_A(tensor(smem.q, k_layout)))
        c.frag_k = qk.make_fragment_B(qk.partition_B(tensor(smem.k + own, k_layout)))
        c.frag_v_own = rs.make_fragment_B(rs.partition_B(tensor(smem.k + own + half, v_layout)))
        c.frag_v_other = ss.make_fragment_B(ss.partition_B(tensor(smem.k + other + half, v_layout)))
        p_own, p_other = (smem.p_b, smem.p_a) if right else (smem.p_a, smem.p_b)
        c.frag_p_other = ss.make_fragment_A(ss.partition_A(tensor(p_other, p_layout)))
        c.scores = cute.make_rmem_tensor(qk.partition_shape_C((64, 64)), Float32)
        c.acc = cute.make_rmem_tensor(rs.partition_shape_C((64, 256)), Float32)
        c.p = rs.make_fragment_A(rs.partition_shape_A((64, 64)))

        # ---- addresses: the row of P that this lane gives to stmatrix, exchange rows, mask words of rows row and row + 8
        st_row = c.warp * 16 + c.lane % 16
        c.st_swizzle = c.lane & 7
        c.st_half = c.lane // 16
        c.p_address = p_own.toint() + st_row * 128
        c.ex_row = smem.exchange + c.row * 4
        c.group0 = Int32(0)
        c.group1 = Int32(0)
        if self.has_mask:
            c.group0 = cutlass.min(c.row >> group_shift, Int32(7)) * 8
            c.group1 = cutlass.min((c.row + 8) >> group_shift, Int32(7)) * 8

        # ---- softmax state of the two rows, in log2 units
        c.words = cute.make_rmem_tensor(2 * self.word_pairs, Uint32)
        c.m = cute.make_rmem_tensor(2, Float32)  # reference maximum
        c.top = cute.make_rmem_tensor(2, Float32)  # true maximum over this warpgroup's blocks
        c.sums = cute.make_rmem_tensor(2, Float32)
        c.new = cute.make_rmem_tensor(2, Float32)
        return c

    # ------------------------------------------------------------------------------------------------ pieces
    @cute.jit
    def tiles_ready(self, bars, which: cutlass.Constexpr[int], phase):
        """Wait for gathered tiles. cp.async writes through the generic proxy, wgmma reads through the async proxy."""
        cute.arch.mbarrier_wait(bars + K_FULL + which, phase)
        cute.arch.fence_view_async_shared()

    @cute.jit
    def read_info(self, right: cutlass.Constexpr[int], it, c: SimpleNamespace):
        """This iteration's flags; c.words = the key masks of this thread's rows, shifted for `apply_mask`."""
        stage = it & 1
        cute.arch.mbarrier_wait(c.bars + INFO_FULL + stage, (it >> 1) & 1)
        here = c.info + stage * INFO_STAGE
        flags = dev.load_shared_u32(here, INFO_FLAGS)
        w0, w1 = dev.load_shared_v2(here + c.group0, INFO_BLOCK * right)
        c.words[0] = Uint32(w0) >> (2 * c.quad)
        c.words[1] = Uint32(w1) >> (2 * c.quad)
        if const_expr(self.word_pairs == 2):
            w2, w3 = dev.load_shared_v2(here + c.group1, INFO_BLOCK * right)
            c.words[2] = Uint32(w2) >> (2 * c.quad)
            c.words[3] = Uint32(w3) >> (2 * c.quad)
        cute.arch.sync_warp()
        if c.lane == 0:
            cute.arch.mbarrier_arrive(c.bars + INFO_EMPTY + stage)
        return flags

    @cute.jit
    def lazy_max(self, c: SimpleNamespace):
        """Mask the scores; c.new = the rows' next reference maximum: c.m unless a logit exceeds it by more than the threshold."""
        if const_expr(self.general_scale):
            for i in cutlass.range_constexpr(32):
                c.scores[i] = c.scores[i] * c.scale
        dev.apply_mask(c.scores, c.words, self.word_pairs)
        for r in cutlass.range_constexpr(2):
            x = cute.arch.fmax(c.scores[2 * r], c.scores[2 * r + 1])
            for j in cutlass.range_constexpr(1, 8):
                x = cute.arch.fmax(x, cute.arch.fmax(c.scores[4 * j + 2 * r], c.scores[4 * j + 2 * r + 1]))
            x = dev.quad_max(x)
            if const_expr(not self.general_scale):
                x = x * c.scale
            c.top[r] = cute.arch.fmax(c.top[r], x)
            c.new[r] = x if x - c.m[r] > LAZY_THRESHOLD else c.m[r]

    @cute.jit
    def move_reference(self, c: SimpleNamespace):
        """c.m = c.new; if that moves any row of the warp, rescale its sums and accumulators. No product may be in flight on acc."""
        m, new, sums, acc = c.m, c.new, c.sums, c.acc  # plain names: what a branch changes must be one
        f0 = dev.exp2(m[0] - new[0])
        f1 = dev.exp2(m[1] - new[1])
        if cute.arch.vote_any_sync(m[0] != new[0] or m[1] != new[1]):
            sums[0] = sums[0] * f0
            sums[1] = sums[1] * f1
            rescale(acc, f0, f1)
        m[0] = new[0]
        m[1] = new[1]

    @cute.jit
    def take_reference(self, offset: cutlass.Constexpr[int], c: SimpleNamespace):
        """Adopt the other warpgroup's published reference maximum."""
        c.new[0] = dev.load_shared_f32(c.ex_row, offset)
        c.new[1] = dev.load_shared_f32(c.ex_row, offset + 32)
        self.move_reference(c)

    @cute.jit
    def publish_p(
        self,
        offset: cutlass.Constexpr[int],
        barrier: cutlass.Constexpr[int],
        c: SimpleNamespace,
        over_k: cutlass.Constexpr[bool],
    ):
        """scores = 2**(scores * scale - new), p = their bf16 rounding; p and new to shared memory for the other warpgroup.

        over_k: p overlays a tile of K_a. Each of the four warps reads all of it in its part of Q K_a^T, and wait_group is per
        warp, so that they must meet before the first of them stores.
        """
        for i in cutlass.range_constexpr(32):
            x = c.scores[i] if const_expr(self.general_scale) else c.scores[i] * c.scale
            c.scores[i] = dev.exp2(x - c.new[(i // 2) % 2])
        c.p.store(c.scores.load().to(BFloat16))
        if const_expr(over_k):
            cute.arch.barrier(barrier_id=BAR_LEFT, number_of_threads=128)
        words = cute.recast_tensor(c.p, Int32)
        for k in cutlass.range_constexpr(4):
            dev.stmatrix_x4(
                c.p_address + (((2 * k + c.st_half) ^ c.st_swizzle) << 4),
                words[4 * k],
                words[4 * k + 1],
                words[4 * k + 2],
                words[4 * k + 3],
            )
        if c.quad == 0:
            dev.store_shared_f32(c.ex_row, offset, c.new[0])
            dev.store_shared_f32(c.ex_row, offset + 32, c.new[1])
        cute.arch.fence_view_async_shared()
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=256)

    @cute.jit
    def add_sums(self, c: SimpleNamespace):
        """sums[r] += the unrounded terms of row r."""
        s0 = c.scores[0]
        s1 = c.scores[2]
        for i in cutlass.range_constexpr(1, 32):
            if const_expr(i != 2):
                if const_expr((i // 2) % 2 == 0):
                    s0 = s0 + c.scores[i]
                else:
                    s1 = s1 + c.scores[i]
        c.sums[0] = c.sums[0] + s0
        c.sums[1] = c.sums[1] + s1

    @cute.jit
    def release(self, which: cutlass.Constexpr[int], c: SimpleNamespace):
        """Hand column tiles back to the producer."""
        if c.lane == 0:
            cute.arch.mbarrier_arrive(c.bars + K_EMPTY + which)

    @cute.jit
    def issue_other(self, c: SimpleNamespace):
        """acc += (the other warpgroup's P) V; the caller waits."""
        warpgroup.fence()
        gemm(c.pv_ss, c.acc, c.frag_p_other, c.frag_v_other, 0, 4, False)
        warpgroup.commit_group()

    @cute.jit
    def issue_own(self, c: SimpleNamespace):
        """acc += P V of the own block, P from registers; the caller waits."""
        warpgroup.fence()
        gemm(c.pv_rs, c.acc, c.p, c.frag_v_own, 0, 4, False)
        warpgroup.commit_group()

    # ------------------------------------------------------------------------------------------------ left
    @cute.jit
    def left_scores(self, pending: cutlass.Constexpr[bool], phase, last, c: SimpleNamespace):
        """S_a. pending: the previous iteration's P_b V_b is in flight; it ends under the first half of this product."""
        self.tiles_ready(c.bars, A_LEFT, phase)
        warpgroup.fence()
        gemm(c.qk, c.scores, c.frag_q, c.frag_k, 0, 16, True)
        if const_expr(pending):
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            self.release(B_LEFT, c)
        self.tiles_ready(c.bars, A_RIGHT, phase)
        gemm(c.qk, c.scores, c.frag_q, c.frag_k, 16, self.d_qk // 16, False)
        warpgroup.commit_group()
        cute.arch.barrier_arrive(barrier_id=BAR_QK, number_of_threads=256)
        warpgroup.wait_group(0)
        if last != 0 and c.lane == 0:
            cute.arch.mbarrier_arrive(c.bars + Q_EMPTY)

    @cute.jit
    def left_own(self, c: SimpleNamespace):
        """m_a and P_a, published; O_left += P_a V_a."""
        self.lazy_max(c)
        self.move_reference(c)
        self.publish_p(EX_MAX_A, BAR_A, c, self.d_qk == 576)
        self.issue_own(c)
        self.add_sums(c)
        warpgroup.wait_group(0)
        self.release(A_LEFT, c)

    @cute.jit
    def left_other(self, c: SimpleNamespace):
        """Issue O_left += P_b V_b."""
        cute.arch.barrier(barrier_id=BAR_B, number_of_threads=256)
        self.take_reference(EX_MAX_B, c)
        self.issue_other(c)

    @cute.jit
    def left_row(self, it, c: SimpleNamespace):
        """All blocks of one query row. Written so that no product is in flight across a branch: ptxas would serialise them all."""
        flags = self.read_info(0, it, c)
        self.left_scores(False, it & 1, flags & FLAG_LAST, c)
        while (flags & FLAG_LAST) == 0:  # only the last iteration may lack block b
            self.left_own(c)
            self.left_other(c)
            it = it + 1
            flags = self.read_info(0, it, c)
            self.left_scores(True, it & 1, flags & FLAG_LAST, c)
        self.left_own(c)
        if (flags & FLAG_HAS_B) != 0:
            self.left_other(c)
            warpgroup.wait_group(0)
        else:
            # Warpgroup 1 has nothing to hand over, but it must have read the previous row's sums before this row's replace them.
            cute.arch.barrier(barrier_id=BAR_B, number_of_threads=256)
        self.release(B_LEFT, c)
        return it + 1

    # ------------------------------------------------------------------------------------------------ right
    @cute.jit
    def right_iteration(self, phase, last, has_b, c: SimpleNamespace):
        self.tiles_ready(c.bars, B_RIGHT, phase)
        cute.arch.barrier(barrier_id=BAR_QK, number_of_threads=256)
        if has_b != 0:
            # ---- S_b, right column tiles first: they arrive first
            warpgroup.fence()
            gemm(c.qk, c.scores, c.frag_q, c.frag_k, 16, self.d_qk // 16, True)
            self.tiles_ready(c.bars, B_LEFT, phase)
            gemm(c.qk, c.scores, c.frag_q, c.frag_k, 0, 16, False)
            warpgroup.commit_group()
            # ---- O_right += P_a V_a, while the softmax of S_b runs
            cute.arch.barrier(barrier_id=BAR_A, number_of_threads=256)
            self.take_reference(EX_MAX_A, c)
            self.issue_other(c)
            warpgroup.wait_group(1)
            if last != 0 and c.lane == 0:
                cute.arch.mbarrier_arrive(c.bars + Q_EMPTY)
            # ---- m_b, P_b
            self.lazy_max(c)
            self.publish_p(EX_MAX_B, BAR_B, c, False)
            warpgroup.wait_group(0)
            self.release(A_RIGHT, c)
            # ---- O_right += P_b V_b
            self.move_reference(c)
            self.add_sums(c)
            self.issue_own(c)
            warpgroup.wait_group(0)
            self.release(B_RIGHT, c)
        else:
            # Nothing was loaded, but the left warpgroup, which BAR_B lets go on, releases these tiles too: not before every
            # producer warp has waited for their release before: its phase's parity would come round, and the warp wait for ever.
            cute.arch.mbarrier_wait(c.bars + K_FULL + B_LEFT, phase)
            cute.arch.barrier_arrive(barrier_id=BAR_B, number_of_threads=256)
            cute.arch.barrier(barrier_id=BAR_A, number_of_threads=256)
            self.take_reference(EX_MAX_A, c)
            self.issue_other(c)
            warpgroup.wait_group(0)
            self.release(A_RIGHT, c)
            self.release(B_RIGHT, c)
            if c.lane == 0:
                cute.arch.mbarrier_arrive(c.bars + Q_EMPTY)

    @cute.jit
    def right_row(self, it, c: SimpleNamespace):
        """All blocks of one query row."""
        last = Int32(0)
        while last == 0:
            flags = self.read_info(1, it, c)
            last = flags & FLAG_LAST
            self.right_iteration(it & 1, last, flags & FLAG_HAS_B, c)
            it = it + 1
        return it

    # ------------------------------------------------------------------------------------------------ rows
    @cute.jit
    def start_row(self, c: SimpleNamespace):
        c.acc.fill(0.0)
        for r in cutlass.range_constexpr(2):
            c.m[r] = Float32(dev.LOWEST)
            c.top[r] = Float32(dev.NEG_INF)
            c.sums[r] = Float32(0.0)

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
        smem: SimpleNamespace,
    ):
        c = self.context(right, mQ, sm_scale, group_shift, smem)
        it = Int32(0)
        q_phase = Int32(0)
        item = Int32(cute.arch.block_idx()[0])
        while item < items:
            token = item // halves
            first_head = (item - token * halves) * 64
            self.start_row(c)
            cute.arch.mbarrier_wait(c.bars + Q_FULL, q_phase)
            q_phase = q_phase ^ 1
            if const_expr(right == 0):
                it = self.left_row(it, c)
            else:
                it = self.right_row(it, c)
            self.epilogue(right, token, first_head, mOut, mMax, mLse, mSink, c)
            item = item + cute.arch.grid_dim()[0]

    @cute.jit
    def epilogue(
        self,
        right: cutlass.Constexpr[int],
        token,
        first_head,
        mOut,
        mMax,
        mLse,
        mSink,
        c: SimpleNamespace,
    ):
        """Join the two warpgroups' sums, write the statistics, normalise and store this warpgroup's 256 columns."""
        inverse = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            c.sums[r] = dev.quad_sum(c.sums[r])
            if c.quad == 0:
                dev.store_shared_f32(c.ex_row, (EX_L1 if right else EX_L0) + 32 * r, c.sums[r])
                dev.store_shared_f32(c.ex_row, (EX_T1 if right else EX_T0) + 32 * r, c.top[r])
        cute.arch.barrier(barrier_id=BAR_FINAL, number_of_threads=256)
        for r in cutlass.range_constexpr(2):
            total = c.sums[r] + dev.load_shared_f32(c.ex_row, (EX_L0 if right else EX_L1) + 32 * r)
            highest = cute.arch.fmax(c.top[r], dev.load_shared_f32(c.ex_row, (EX_T0 if right else EX_T1) + 32 * r))
            head = first_head + c.row + 8 * r
            denominator = total
            if const_expr(mSink is not None):
                if head < c.h_q:
                    sink = dev.load_global_f32(mSink.iterator.toint() + Int64(head) * 4)
                    denominator = total + dev.exp2(sink * LOG2E - c.m[r])
            inverse[r] = Float32(0.0) if total == 0.0 else Float32(1.0) / denominator
            if const_expr(right == 0):
                if c.quad == 0 and head < c.h_q:
                    lse = cute.math.log(total) + c.m[r] * LN2
                    lse = Float32(float("inf")) if total == 0.0 else lse
                    at = (Int64(token) * Int64(mMax.stride[0]) + Int64(head)) * 4
                    dev.store_global_f32(mMax.iterator.toint() + at, highest * LN2)
                    at = (Int64(token) * Int64(mLse.stride[0]) + Int64(head)) * 4
                    dev.store_global_f32(mLse.iterator.toint() + at, lse)
        rescale(c.acc, inverse[0], inverse[1])
        packed = cute.make_rmem_tensor(128, BFloat16)
        packed.store(cute.make_tensor(c.acc.iterator, cute.make_layout(128)).load().to(BFloat16))
        words = cute.recast_tensor(packed, Int32)
        # lanes t and t^1 swap halves of two neighbouring 8-column groups, so that a quad stores full 32-byte sectors
        even = c.quad % 2 == 0
        out = (
            mOut.iterator.toint()
            + (Int64(token) * Int64(mOut.stride[0]) + Int64(first_head + c.row) * Int64(mOut.stride[1])) * 2
            + Int64(right * 512 + 8 * (c.quad // 2) + 16 * (c.quad % 2))
        )
        for r in cutlass.range_constexpr(2):
            inside = first_head + c.row + 8 * r < c.h_q
            for k in cutlass.range_constexpr(16):
                low = words[4 * k + r]
                high = words[4 * k + 2 + r]
                got = cute.arch.shuffle_sync_bfly(high if even else low, offset=1)
                if inside:
                    dev.store_global_v2(out, 32 * k, low if even else got, got if even else high)
            out = out + 8 * Int64(mOut.stride[1]) * 2
