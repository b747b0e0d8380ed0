"""Softmax and epilogue roles of the Blackwell sparse prefill kernel, 128 threads each: thread t owns lane t of tensor memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.kernels.scales import LN2, LOG2E
from cute_kernels.kernels.sm100 import sparse_device as dev
from cute_kernels.kernels.sm100.sparse_layout import (
    FLAG_EMPTY,
    FLAG_LAST,
    HALF_V,
    HEADS,
    KEYS,
    LAZY_THRESHOLD,
    O_COLUMN,
    OUT_BYTES,
    P_COLUMN,
    REC_BYTES,
    REC_MASK,
    RECORDS,
)


class Softmax:
    """Methods of `SparsePrefillSm100` that warps 0..3 (softmax) and 4..7 (epilogue) run.

    Thread t of the softmax handles head t % 64 and keys 32 * (t // 64) .. + 31 of each sub-block. Its lane of P holds one half's
    partial logits of all 64 keys: it hands 32 of them to thread t ^ 64 through shared memory and adds the 32 it gets.
    """

    @cute.jit
    def rescale(self, tmem_lane, factor: Float32):
        """Multiply this thread's lane of O."""
        for i in cutlass.range_constexpr(HALF_V // 32):
            (values,) = dev.tmem_load(tmem_lane + (O_COLUMN + 32 * i))
            dev.tmem_store(tmem_lane + (O_COLUMN + 32 * i), dev.scale_all(values, factor))
        dev.tmem_store_wait()

    @cute.jit
    def softmax(self, smem, tmem, sm_scale: Float32, group_shift, s_q, pair, pairs, cta, thread):
        warp = cute.arch.make_warp_uniform(thread >> 5)
        half = warp >> 1  # keys 32 * half .. + 31 of a sub-block are this thread's
        head = thread & (HEADS - 1)
        tmem_lane = tmem + (warp << 21)
        own = tmem_lane + P_COLUMN + 32 * half
        other = tmem_lane + P_COLUMN + 32 * (1 - half)
        pair_name = 1 + (warp & 1)
        mine = smem + self.at.exchange + 16 * thread
        partner = smem + self.at.exchange + 16 * (thread ^ 64)
        max_mine = smem + self.at.row_max + 4 * thread
        max_partner = smem + self.at.row_max + 4 * (thread ^ 64)
        s_row = smem + self.at.s + half * (4 * HEADS * 16) + head * 16
        word_at = 4 * half
        if const_expr(self.has_mask):
            word_at = word_at + 8 * cutlass.min((cta * HEADS + head) >> group_shift, Int32(7))
        scale = sm_scale * Float32(LOG2E)

        count = Int32(0)
        issued = Int32(0)  # sub-blocks so far
        rows = Int32(0)
        row = Int32(pair)
        while row < s_q:
            reference = Float32(dev.LOWEST)  # log2 units; exponents are relative to it
            largest = Float32(dev.NEG_INF)  # the true maximum
            total = Float32(0.0)
            in_row = Int32(0)
            last = Int32(0)
            flags = Int32(0)
            while last == 0:
                stage = count & (RECORDS - 1)
                dev.wait(smem + self.at.rec_full + 8 * stage, (count >> 3) & 1)
                record = smem + self.at.records + stage * REC_BYTES
                flags = self.flags(smem, stage)
                word = dev.load_shared(record + word_at, REC_MASK)
                cute.arch.sync_warp()
                dev.arrive(smem + self.at.rec_empty + 8 * stage)
                count = count + 1
                last = flags & FLAG_LAST
                if (flags & FLAG_EMPTY) == 0:
                    buffer = issued & 1
                    # ---- logits: partial sums over this lane's half of the columns, and the other half's from the partner
                    dev.wait(smem + self.at.p_full, issued & 1)
                    dev.fence_after()
                    send, x = dev.tmem_load(other, own)
                    dev.fence_before()
                    cute.arch.sync_warp()
                    dev.arrive_even(smem + self.at.p_empty)
                    for i in cutlass.range_constexpr(8):
                        dev.store_shared_4(mine, 2048 * i, send[4 * i : 4 * i + 4])
                    dev.pair_barrier(pair_name)
                    received = []
                    for i in cutlass.range_constexpr(8):
                        received += dev.load_shared_4(partner, 2048 * i, Float32)
                    x = dev.add_all(x, received)
                    factor = scale
                    if const_expr(self.general_scale):
                        x = dev.scale_all(x, scale)
                        factor = Float32(1.0)
                    x = dev.keep_where(word, x)

                    # ---- maximum over the head's 64 keys
                    top = dev.maximum(x)
                    dev.store_shared_float(max_mine, top)
                    dev.pair_barrier(pair_name)
                    top = cute.arch.fmax(top, dev.load_shared_float(max_partner))
                    largest = cute.arch.fmax(largest, top)
                    top = top * factor
                    # both threads of a head see the same maxima, and so do the two warps of the same heads: one decision
                    moved = cute.arch.vote_any_sync(top > reference + Float32(LAZY_THRESHOLD))
                    before = reference
                    reference = cutlass.select_(moved, cute.arch.fmax(reference, top), reference)
                    shrink = dev.exp2(before - reference)

                    # ---- probabilities
                    p = []
                    for i in cutlass.range_constexpr(16):
                        pair_x = (x[2 * i], x[2 * i + 1])
                        y = cute.arch.fma_packed_f32x2(pair_x, (factor, factor), (-reference, -reference))
                        p += [dev.exp2(y[0]), dev.exp2(y[1])]
                    total = total * shrink + dev.total(p)
                    words = [dev.pack_bf16(p[2 * i], p[2 * i + 1]) for i in range(16)]
                    dev.wait(smem + self.at.s_empty + 8 * buffer, ((issued >> 1) & 1) ^ 1)
                    for i in cutlass.range_constexpr(4):
                        dev.store_shared_4(s_row + buffer * (HEADS * KEYS * 2), 1024 * i, words[4 * i : 4 * i + 4])
                    dev.fence_async()
                    if moved and in_row != 0:
                        previous = issued - 1
                        dev.wait(smem + self.at.s_empty + 8 * (previous & 1), (previous >> 1) & 1)
                        dev.fence_after()
                        self.rescale(tmem_lane, shrink)
                    dev.fence_before()
                    cute.arch.sync_warp()
                    dev.arrive_even(smem + self.at.s_full + 8 * buffer)
                    issued = issued + 1
                    in_row = in_row + 1
            # ---- statistics of the row to the epilogue
            dev.wait(smem + self.at.stats_empty, (rows & 1) ^ 1)
            dev.store_shared_float(smem + self.at.sums + 4 * thread, total)
            if half == 0:
                dev.store_shared_float(smem + self.at.maxima + 4 * head, largest)
                dev.store_shared_float(smem + self.at.references + 4 * head, reference)
            if thread == 0:
                dev.store_shared(smem + self.at.row_empty, flags & FLAG_EMPTY)
            cute.arch.sync_warp()
            dev.arrive(smem + self.at.stats_full)
            rows = rows + 1
            row = row + pairs

    def store_lane(self, own_row, turn, words, out_map, first_column, first_head, row, staging, policy):
        """This thread's 256 output columns (bf16 pairs): 32 heads x 32 columns at a time through the warp's staging tile."""
        for i in range(HALF_V // 32):
            dev.stores_have_read()
            cute.arch.sync_warp()
            for c in range(4):
                dev.store_shared_4(own_row + ((turn ^ c) << 4), 0, words[16 * i + 4 * c : 16 * i + 4 * c + 4])
            dev.fence_async()
            cute.arch.sync_warp()
            dev.store_box(out_map, first_column + 32 * i, first_head, row, staging, policy)

    @cute.jit
    def epilogue(self, smem, tmem, out_map, mMax, mLse, mSink, sm_scale: Float32, s_q, h_q, pair, pairs, cta, thread):
        warp = cute.arch.make_warp_uniform(thread >> 5)
        half = warp >> 1
        local = thread & (HEADS - 1)
        head = cta * HEADS + local
        present = head < h_q
        tmem_lane = tmem + (warp << 21)
        sink = Float32(dev.NEG_INF)
        if const_expr(mSink is not None):
            if present:
                sink = dev.load_global_float(mSink.iterator.toint() + Int64(head) * (Int64(mSink.stride[0]) * 4))
            sink = sink * Float32(LOG2E)
        # staging of this warp: head t % 32 at 64 bytes, its 16-byte chunk c at place c ^ (t >> 1) % 4 (the 64-byte swizzle)
        staging = smem + self.at.out + warp * OUT_BYTES
        own_row = staging + 64 * (thread & 31)
        turn = (thread >> 1) & 3
        once = dev.policy("evict_first")
        first_column = half * HALF_V
        first_head = cta * HEADS + 32 * (warp & 1)
        rows = Int32(0)
        filled = Int32(0)  # rows with a counted key
        row = Int32(pair)
        while row < s_q:
            dev.wait(smem + self.at.stats_full, rows & 1)
            total = dev.load_shared_float(smem + self.at.sums + 4 * local)
            total = total + dev.load_shared_float(smem + self.at.sums + 4 * (local + HEADS))
            largest = dev.load_shared_float(smem + self.at.maxima + 4 * local)
            reference = dev.load_shared_float(smem + self.at.references + 4 * local)
            row_empty = dev.load_shared(smem + self.at.row_empty)
            cute.arch.sync_warp()
            dev.arrive(smem + self.at.stats_empty)
            counted = largest != Float32(dev.NEG_INF)
            natural = largest * Float32(LN2) if const_expr(self.general_scale) else largest * sm_scale
            lse = (dev.log2(total) + reference) * Float32(LN2)
            if half == 0 and present:
                at = Int64(row) * Int64(mMax.stride[0]) + Int64(head) * Int64(mMax.stride[1])
                natural = cutlass.select_(counted, natural, Float32(dev.NEG_INF))
                dev.store_global_float(mMax.iterator.toint() + at * 4, natural)
                at = Int64(row) * Int64(mLse.stride[0]) + Int64(head) * Int64(mLse.stride[1])
                lse = cutlass.select_(counted, lse, Float32(float("inf")))
                dev.store_global_float(mLse.iterator.toint() + at * 4, lse)
            if const_expr(mSink is not None):
                total = total + dev.exp2(sink - reference)
            scale = cutlass.select_(counted, Float32(1.0) / total, Float32(0.0))
            if row_empty == 0:
                # ---- all of O to bf16 registers, so that the tensor core may begin the next row's, then to memory
                dev.wait(smem + self.at.o_full, filled & 1)
                dev.fence_after()
                words = []
                for i in cutlass.range_constexpr(HALF_V // 32):
                    (values,) = dev.tmem_load(tmem_lane + (O_COLUMN + 32 * i))
                    values = dev.scale_all(values, scale)
                    words += [dev.pack_bf16(values[2 * j], values[2 * j + 1]) for j in range(16)]
                dev.fence_before()
                cute.arch.sync_warp()
                dev.arrive_even(smem + self.at.o_empty)
                # a head that counts no key gives zeros, even where another head's key has put a NaN into this row
                words = [cutlass.select_(counted, word, Int32(0)) for word in words]
                self.store_lane(own_row, turn, words, out_map, first_column, first_head, row, staging, once)
                filled = filled + 1
            else:
                zeros = [Int32(0) for _ in range(HALF_V // 2)]
                self.store_lane(own_row, turn, zeros, out_map, first_column, first_head, row, staging, once)
            rows = rows + 1
            row = row + pairs
        dev.stores_have_read()
