"""Hopper (sm_90a) sparse prefill kernel: one CTA holds 64 heads of one query row, two consumer warpgroups share its output.

Work item = (query row, half of 64 heads), dealt out round robin to the CTAs of the grid (persistent, or one CTA per item). Keys are
taken 64 at a time, two blocks a and b per iteration ("seesaw"). Lines on the same level run at the same time:

    warpgroup 0 (left)                                  warpgroup 1 (right)
    S_a = Q K_a^T, over the previous P_b V_b            O_right += P_b V_b[:, 256:] of the previous iteration
    m_a = lazy(m, max S_a), P_a = 2^(S_a - m_a)         S_b = Q K_b^T, issued when Q K_a^T has been (BAR_QK)
    publishes P_a, m_a (BAR_A)
    O_left  += P_a V_a[:, :256]  (P_a from registers)   O_right += P_a V_a[:, 256:]  (P_a from shared memory), under it:
                                                        m_b = lazy(m_a, max S_b), P_b, both published (BAR_B)
    O_left  += P_b V_b[:, :256]  (from shared memory)   O_right += P_b V_b[:, 256:]  (from registers)

So each softmax runs under the other warpgroup's products. On an H200 (docs/measurements_sparse_prefill.md) this order is 1.10 to
1.12 x the plain seesaw with every product waited for; without BAR_QK it keeps 0.95 to 0.98 of its speed, without the overlap of
P_b V_b and the next Q K_a^T 0.94 to 0.96.

lazy(m, x) moves a row's reference maximum only when x exceeds it by more than 4 (log2 units), so that the accumulators (64 x 256
float32 in 128 registers of each consumer thread) are rarely rescaled; the sums stay exact because every term of a row uses the
same reference. V is the first 512 columns of K: the same shared tile, read through an MN-major descriptor.

Warpgroup 2 gathers (sparse_producer.py): 16-byte cp.async with L2 hints, 8 lanes per row, source size 0 (zero fill) for every key
that no head of this CTA counts, so that a NaN in such a row never enters. Each of its warps reads the indices itself and skips
blocks of 64 keys without a counted key. The bit masks of each block's head groups go to the consumers through a two-stage ring.

Shared memory, d_qk 576: Q 73,728 + K 2 x 73,728 + P_b 8,192 (P_a overlays the last column tile of K_a, which only Q K_a^T reads)
+ masks, exchange rows and barriers = 231,312 of 232,448 bytes. Column tiles of 64 x 64 bf16 (8 KiB) in the 128-byte swizzle.

mbarriers: k_full[tile group] (128 cp.async arrivals) and k_empty[tile group] (4 warps of the warpgroup that reads it last), one
phase per iteration; info_full, info_empty (mask ring, two stages); q_full, q_empty (one phase per item). 168 registers at launch,
216 / 72 after setmaxnreg, no spills; every wgmma group is asynchronous (a product in flight across a branch makes ptxas serialise
all of them: tests/kernels/test_sm90_sparse.py counts the waits).

Evidence. On an H200, 2026-11-29 (docs/measurements_sparse_prefill.md): FlashMLA's grid, fuzz, offsets past 2**31, graphs, streams;
memcheck; racecheck 2026.4 without a report, and with one for a race planted here (older versions report hand-overs that are in
order: tools/sanitize.py); timings beside FlashMLA. In the emulator: right, and no hazard, under three schedules.
"""

from __future__ import annotations

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.kernels.sm90.sparse_consumer import Consumer
from cute_kernels.kernels.sm90.sparse_layout import (
    CONSUMER_REGISTERS,
    EX_BYTES,
    INFO_EMPTY,
    INFO_FULL,
    INFO_STAGE,
    K_EMPTY,
    K_FULL,
    N_BARRIERS,
    PRODUCER_REGISTERS,
    Q_EMPTY,
    Q_FULL,
    THREADS,
    TILE_BYTES,
    TILE_ELEMENTS,
)
from cute_kernels.kernels.sm90.sparse_producer import Producer


class SparsePrefillSm90(Producer, Consumer):
    """Compile-time configuration. Every flag enters the compile key.

    d_qk: 576 or 512.  has_length, has_sink, has_mask: the optional tensors.
    small_groups: head_group_size < 16, so that the two accumulator rows of a thread belong to different groups.
    general_scale: sm_scale may be zero or negative; otherwise the maximum is taken before scaling.
    """

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
        self.info_lanes = 8 if has_mask else 1  # of the producer's first warp, which write the mask ring
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

        allocator = SmemAllocator()
        smem = SimpleNamespace()
        smem.q = allocator.allocate_array(BFloat16, self.tiles * TILE_ELEMENTS, byte_alignment=1024)
        smem.k = allocator.allocate_array(BFloat16, 2 * self.tiles * TILE_ELEMENTS, byte_alignment=1024)
        smem.p_b = allocator.allocate_array(BFloat16, TILE_ELEMENTS, byte_alignment=1024)
        if const_expr(self.d_qk == 512):
            smem.p_a = allocator.allocate_array(BFloat16, TILE_ELEMENTS, byte_alignment=1024)
        else:
            smem.p_a = smem.k + 8 * TILE_ELEMENTS  # the last column tile of K_a
        smem.info = allocator.allocate_array(Int32, 2 * INFO_STAGE // 4, byte_alignment=16).toint()
        smem.exchange = allocator.allocate_array(Float32, EX_BYTES // 4, byte_alignment=16).toint()
        smem.bars = allocator.allocate_array(Int64, N_BARRIERS, byte_alignment=8)
        bars = smem.bars

        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(4):
                    cute.arch.mbarrier_init(bars + K_FULL + i, 128)
                    cute.arch.mbarrier_init(bars + K_EMPTY + i, 4)
                for i in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(bars + INFO_FULL + i, self.info_lanes)
                    cute.arch.mbarrier_init(bars + INFO_EMPTY + i, 8)
                cute.arch.mbarrier_init(bars + Q_FULL, 128)
                cute.arch.mbarrier_init(bars + Q_EMPTY, 8)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if group == 2:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            self.producer(
                mQ, mKV, mIdx, mLen, mMask, group_shift, items, halves, smem.q.toint(), smem.k.toint(), smem.info, bars
            )
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            if group == 0:
                self.consumer(0, mQ, mOut, mMax, mLse, mSink, sm_scale, group_shift, items, halves, smem)
            else:
                self.consumer(1, mQ, mOut, mMax, mLse, mSink, sm_scale, group_shift, items, halves, smem)
