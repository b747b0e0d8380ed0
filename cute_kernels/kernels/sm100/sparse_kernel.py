"""Blackwell (sm_100a, sm_103a) sparse prefill kernel: a pair of CTAs holds the 128 heads of one query row.

CTA c of the pair has heads 64c .. 64c+63 and, of every listed key, columns 256c .. 256c+255 and rope columns 512+32c .. +31. Each
latent row is thus gathered once per pair (144 KiB per 128 keys at d_qk 576), and the same bytes serve as K and as V. The unit of
work is a sub-block of 64 keys with a counted key; others are never seen by the gather, the tensor core or the softmax.

    scores   P = Q K^T, 18 tcgen05.mma of N 128 (16 at d_qk 512), A = Q in tensor memory. Rows of B 0..63 are CTA 0's columns of
             the 64 keys, rows 64..127 CTA 1's; A holds Q's first half in lanes 0..63 and its second half in lanes 64..127, so
             lane q gets head q's partial logits over the first half of d_qk, lane 64+q over the second, in each CTA for its heads
    softmax  the two lanes of a head exchange partial logits through shared memory and share its 64 keys, 32 each
    values   O (+)= S V, 8 tcgen05.mma of N 256: S [64 heads, 64 keys] bf16 from shared memory, V the key tiles read MN-major;
             lane q gets value columns 0..255 of head q (CTA 0's tiles), lane 64+q columns 256..511 (CTA 1's)

One persistent pair per two SMs takes rows pair, pair + pairs, ... The tensor core runs, per sub-block i, scores(i), values(i - 2):
the softmax of i has the time of two products. A new row's Q comes through the key ring (two slots, copied to tensor memory when the
old row's last scores are done), so that its loads, copy and first scores run under the old row's last values and epilogue.

Cycles of the tensor core per sub-block, both CTAs (published B200 intervals): 18 x 32 + 8 x 64 = 1,088 at d_qk 576, which is what
its FLOPs take at 16,384 per cycle. Nothing here has run on a Blackwell GPU.

Warps (384 threads, 168 registers at launch; setmaxnreg deals out 168 / 232 / 96)
    0-3   softmax: thread t = lane t of tensor memory, head t % 64, keys 32 * (t // 64) .. + 31
    4-7   epilogue: O to bf16 registers, at once, then through 2 KiB per warp to `out` by TMA; max_logits, lse
    8     tensor core (CTA 0 only): copies of Q, scores, values, commits
    9-10  gather: 32 of a sub-block's 64 keys each, 4 rows an instruction; and one half of Q each
    11    key lists: finds the sub-blocks with a counted key; one record each: row numbers, 8 groups x 64 mask bits, flags

Masked, invalid and late keys are one thing: a cleared bit of the group's 64. The key-list warp ANDs validity (0 <= index < s_kv,
position < topk_length) with the head group mask, so that the softmax, which turns one 32-bit word into 32 selects, does the same
work with and without a mask. A key that no group counts is replaced by a row number outside the tensor, which TMA fills with
zeros: a NaN in it never enters.

Numerics: base 2, c = sm_scale * log2(e). The reference m of a row moves only when a head of the warp exceeds it by more than 6, so
that O (in tensor memory) is rarely rescaled; sums take the unrounded probabilities. max_logits is the true maximum.

Tensor memory, 512 columns: O 0-255, P 256-319, Q 320-463 (8 per step of 16). Shared memory, d_qk 576, bytes: ring 5 x 36,864,
S 2 x 8,192, output staging 8,192, exchange of logits 16,384, records 8 x 336, row statistics 1,552, barriers 288 (sparse_layout.py
adds up and asserts): 229,808 of 232,448.

mbarriers. "pair": the copy of CTA 0 counts for both CTAs; "both": one in each CTA, reached by multicast commits; "own": each CTA's.
A role keeps its own position (count, slot) and waits with the parity that follows from it; producers start on the opposite parity.
    barrier         copy  arrivals  who arrives, after what                                   who waits, before what
    kv_full[5]      pair  1 + bytes warp 9 of CTA 0 announces 2 slots of bytes, TMA of both   tensor core: scores, copy of Q
                                    CTAs counts them
    kv_empty[5]     both  1         commit after values(i), or after the copy of Q            gather warps: next load into the slot
    p_full          both  1         commit after scores(i)                                    softmax; tensor core: overwriting Q
    p_empty         pair  8         each softmax warp of both CTAs, P(i) in registers         tensor core: scores(i+1)
    s_full[2]       pair  8         each softmax warp of both CTAs, S(i) stored, O rescaled   tensor core: values(i)
    s_empty[2]      both  1         commit after values(i)                                    softmax: S(i+2), rescaling O for i+1
    o_full          both  1         commit after a row's last values                          epilogue: reading O
    o_empty         pair  8         each epilogue warp of both CTAs, O in registers           tensor core: a row's first values
    stats_full      own   4         each softmax warp, sums and maxima of a row stored        epilogue
    stats_empty     own   4         each epilogue warp, read                                  softmax: end of the next row
    rec_full[8]     own   1         key-list warp, record written                             gather, softmax, tensor core
    rec_empty[8]    own   6 (CTA 0: 7)  2 gather and 4 softmax warps, tensor core: record read    key-list warp
Named barriers 1, 2: the two softmax warps of the same 32 heads (64 threads), once for the logits, once for their maxima.
No cycle: values(i) needs S(i), whose rescaling may wait for values(i-1), which follows scores(i+1), which needs only that P(i) has
been read. A row's pending values are issued before the next row's scores, or when an empty row's record comes.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_kernels.kernels.sm100 import sparse_device as dev
from cute_kernels.kernels.sm100.sparse_layout import (
    D_V,
    EPILOGUE_REGISTERS,
    EPILOGUE_WARP,
    GATHER_WARP,
    HEADS,
    KEYS_WARP,
    MMA_WARP,
    N_GATHER,
    OTHER_REGISTERS,
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
        out = cute.make_tensor(mOut.iterator, cute.make_layout((D_V, h_q, s_q), stride=(1, mOut.stride[1], mOut.stride[0])))
        out_atom = self.map_of(out, (32, 32, 1), 2, cpasync.CopyBulkTensorTileS2GOp())
        pairs = cutlass.min(Int32(s_q), max_pairs)
        self.kernel(
            mQ, mKV, mIdx, mMax, mLse, mSink, mLen, mMask, sm_scale, group_shift, pairs,
            q_atom, q_rope_atom, kv_atom, kv_rope_atom, out_atom,
        ).launch(grid=[2 * pairs, 1, 1], block=[THREADS, 1, 1], cluster=[2, 1, 1], stream=stream, min_blocks_per_mp=1)  # fmt: skip

    def map_of(self, tensor, box: tuple[int, ...], swizzle_bits: int, op=None):
        """A tensor map with this box; the inner box row is 16 * 2**swizzle_bits bytes, one span of its swizzle."""
        strides = [1]
        for extent in box[:-1]:
            strides.append(strides[-1] * extent)
        smem = cute.make_composed_layout(
            cute.make_swizzle(swizzle_bits, 4, 3), 0, cute.make_layout(box, stride=tuple(strides))
        )
        return cpasync.make_tiled_tma_atom(op or cpasync.CopyBulkTensorTileG2SOp(), tensor, smem, box)[0]

    # ==================================================================================================== kernel
    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mKV: cute.Tensor,
        mIdx: cute.Tensor,
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
        out_atom: cute.CopyAtom,
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
            cute.arch.setmaxregister_increase(EPILOGUE_REGISTERS)
            out_map = dev.tensor_map(out_atom)
            self.epilogue(smem, tmem, out_map, mMax, mLse, mSink, sm_scale, s_q, h_q, pair, pairs, cta, thread - 128)
        else:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp == MMA_WARP:
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
