"""Blackwell sparse prefill."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_kernels.kernels.sm100 import sparse_device as dev
from cute_kernels.kernels.sm100.sparse_layout import (
    EPILOGUE_WARP,
    GATHER_WARP,
    HEADS,
    KEYS_WARP,
    MMA_WARP,
    N_GATHER,
    RECORDS,
    SLOTS,
    THREADS,
    TMEM_COLUMNS,
    Layout,
)
from cute_kernels.kernels.sm100.sparse_mma import Mma
from cute_kernels.kernels.sm100.sparse_producer import Producer
from cute_kernels.kernels.sm100.sparse_softmax import Softmax


class SparsePrefillSm100(Producer, Mma, Softmax):
    """Compile-time configuration. Every flag enters the compile key.

    d_qk: 576 or 512.  has_length, has_sink, has_mask: the optional tensors.
    general_scale: sm_scale may be zero or negative; otherwise the maximum is taken before scaling.
    """

    def __init__(
        self,
        d_qk: int,
        has_length: bool = False,
        has_sink: bool = False,
        has_mask: bool = False,
        general_scale: bool = False,
    ):
        self.at = Layout(d_qk)
        self.d_qk = d_qk
        self.has_length = has_length
        self.has_sink = has_sink
        self.has_mask = has_mask
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
        max_pairs: Int32,
        stream,
    ):
        s_q, h_q = mQ.shape[0], mQ.shape[1]
        q = cute.make_tensor(
            mQ.iterator, cute.make_layout((self.d_qk, h_q, s_q), stride=(1, mQ.stride[1], mQ.stride[0]))
        )
        kv = cute.make_tensor(mKV.iterator, cute.make_layout((self.d_qk, mKV.shape[0]), stride=(1, mKV.stride[0])))
        q_atom = self.map_of(q, (64, HEADS, 1), 3)
        kv_atom = self.map_of(kv, (64, 1), 3)
        q_rope_atom = self.map_of(q, (16, HEADS, 1), 1) if const_expr(self.at.rope) else None
        kv_rope_atom = self.map_of(kv, (32, 1), 2) if const_expr(self.at.rope) else None
        pairs = cutlass.min(Int32(s_q), max_pairs)
        self.kernel(
            mQ, mKV, mIdx, mOut, mMax, mLse, mSink, mLen, mMask, sm_scale, group_shift, pairs,
            q_atom, q_rope_atom, kv_atom, kv_rope_atom,
        ).launch(grid=[2 * pairs, 1, 1], block=[THREADS, 1, 1], cluster=[2, 1, 1], stream=stream, min_blocks_per_mp=1)  # fmt: skip

    def map_of(self, tensor, box: tuple[int, ...], swizzle_bits: int):
        """A tensor map with this box; the inner box row is 16 * 2**swizzle_bits bytes, one span of its swizzle."""
        strides = [1]
        for extent in box[:-1]:
            strides.append(strides[-1] * extent)
        smem = cute.make_composed_layout(
            cute.make_swizzle(swizzle_bits, 4, 3), 0, cute.make_layout(box, stride=tuple(strides))
        )
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, smem, box)[0]

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
        pairs: Int32,
        q_atom: cute.CopyAtom,
        q_rope_atom: cute.CopyAtom | None,
        kv_atom: cute.CopyAtom,
        kv_rope_atom: cute.CopyAtom | None,
    ):
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(thread // 32)
        cta = cute.arch.block_idx()[0] & 1  # ptxas does not know %cluster_ctarank to be uniform
        pair = cute.arch.cluster_idx()[0]
        s_q, h_q = mQ.shape[0], mQ.shape[1]
        at = self.at
        smem = SmemAllocator().allocate_array(Uint8, at.bytes, byte_alignment=1024).toint()

        if warp == MMA_WARP:
            dev.tmem_alloc(smem + at.tmem_address, TMEM_COLUMNS)
            with cute.arch.elect_one():
                consumers = N_GATHER + 4  # gather threads and softmax warps; in CTA 0 also the tensor-core thread
                for i in cutlass.range_constexpr(SLOTS):
                    dev.barrier_init(smem + at.kv_full + 8 * i, 1)
                    dev.barrier_init(smem + at.kv_empty + 8 * i, 1)
                for i in cutlass.range_constexpr(2):
                    dev.barrier_init(smem + at.s_full + 8 * i, 8)
                    dev.barrier_init(smem + at.s_empty + 8 * i, 1)
                dev.barrier_init(smem + at.p_full, 1)
                dev.barrier_init(smem + at.p_empty, 8)
                dev.barrier_init(smem + at.o_full, 1)
                dev.barrier_init(smem + at.o_empty, 8)
                dev.barrier_init(smem + at.stats_full, 4)
                dev.barrier_init(smem + at.stats_empty, 4)
                for i in cutlass.range_constexpr(RECORDS):
                    dev.barrier_init(smem + at.rec_full + 8 * i, 1)
                    if cta == 0:
                        dev.barrier_init(smem + at.rec_empty + 8 * i, consumers + 1)
                    else:
                        dev.barrier_init(smem + at.rec_empty + 8 * i, consumers)
            cute.arch.mbarrier_init_fence()
        dev.fence_before()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        dev.fence_after()
        tmem = cute.arch.make_warp_uniform(dev.load_shared(smem + at.tmem_address))

        if warp < EPILOGUE_WARP:
            self.softmax(smem, tmem, sm_scale, group_shift, s_q, pair, pairs, cta, thread)
        elif warp < MMA_WARP:
            self.epilogue(smem, tmem, mOut, mMax, mLse, mSink, sm_scale, s_q, h_q, pair, pairs, cta, thread - 128)
        elif warp == MMA_WARP:
            if cta == 0:
                self.issue(smem, tmem, s_q, pair, pairs)
        elif warp == KEYS_WARP:
            self.list_keys(smem, mKV, mIdx, mLen, mMask, group_shift, s_q, h_q, pair, pairs)
        else:
            kv_map = dev.tensor_map(kv_atom)
            q_map = dev.tensor_map(q_atom)
            q_rope_map = dev.tensor_map(q_rope_atom) if const_expr(at.rope) else q_map
            kv_rope_map = dev.tensor_map(kv_rope_atom) if const_expr(at.rope) else kv_map
            self.gather(smem, q_map, q_rope_map, kv_map, kv_rope_map, s_q, pair, pairs, cta, warp - GATHER_WARP)
        cute.arch.sync_warp()

        # remote arrivals and commits must not meet a CTA that has left
        dev.fence_before()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        dev.fence_after()
        if warp == MMA_WARP:
            dev.tmem_free(tmem, TMEM_COLUMNS)
