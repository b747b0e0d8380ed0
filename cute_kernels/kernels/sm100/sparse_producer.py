"""Producer roles of the Blackwell sparse prefill kernel: the key-list warp (which keys count, for whom) and the gather warps."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_kernels.kernels.sm100 import sparse_device as dev
from cute_kernels.kernels.sm100.sparse_layout import (
    FLAG_EMPTY,
    FLAG_FIRST,
    FLAG_LAST,
    GATHER_KEYS,
    HALF_V,
    HEADS,
    KEYS,
    REC_BYTES,
    REC_FLAGS,
    REC_MASK,
    RECORDS,
    ROPE,
    ROPE_AT,
    SLOTS,
    TILE,
    TILES,
)


class KeyList:
    """One query row's key list, as a lane of the key-list warp sees it (plain attributes; the values live in registers)."""

    def __init__(self, lane, s_kv, length, n_sub, idx_row, mask_row, mask_stride, lane_has_group):
        self.lane = lane
        self.s_kv = s_kv
        self.length = length  # keys of the list that may count
        self.n_sub = n_sub  # sub-blocks of 64 keys
        self.idx_row = idx_row  # address of the row's first index
        self.mask_row = mask_row  # address of this lane's 32-bit mask word in sub-block 0
        self.mask_stride = mask_stride  # bytes from one 128-key block of the mask to the next
        self.lane_has_group = lane_has_group


def next_slot(slot, phase):
    """The ring position after (slot, phase)."""
    wrapped = slot == SLOTS - 1
    return (
        cutlass.select_(wrapped, Int32(0), slot + 1),
        cutlass.select_(wrapped, phase ^ 1, phase),
    )


class Producer:
    """Methods of `SparsePrefillSm100` that the key-list warp and the gather warps run. Both CTAs run them on the same lists."""

    @cute.jit
    def flags(self, smem, stage):
        """Flags of a record, known to be the same in all lanes."""
        return cute.arch.warp_redux_sync(dev.load_shared(smem + self.at.records + stage * REC_BYTES, REC_FLAGS), "or")

    # ================================================================================================ key-list warp
    @cute.jit
    def load_keys(self, raw: cute.Tensor, at: cutlass.Constexpr[int], sub, keys: KeyList):
        """Start loading sub-block `sub`: this lane's indices lane and lane + 32, and mask word lane % 2 of group lane // 2."""
        position = sub * KEYS + keys.lane
        raw[at] = Int32(-1)
        raw[at + 1] = Int32(-1)
        raw[at + 2] = Int32(0)
        if position < keys.length:
            raw[at] = dev.load_global(keys.idx_row + Int64(position) * 4)
        if position + 32 < keys.length:
            raw[at + 1] = dev.load_global(keys.idx_row + Int64(position) * 4 + 128)
        if const_expr(self.has_mask):
            if keys.lane_has_group and sub < keys.n_sub:
                # 16 bytes per group and 128-key block: two sub-blocks
                raw[at + 2] = dev.load_global(keys.mask_row + Int64(sub >> 1) * keys.mask_stride + Int64((sub & 1) * 8))

    @cute.jit
    def publish(self, smem, count, lane, first_index, second_index, word, flags):
        """Write one record and hand it to the other roles."""
        stage = count & (RECORDS - 1)
        dev.wait(smem + self.at.rec_empty + 8 * stage, ((count >> 3) & 1) ^ 1)
        record = smem + self.at.records + stage * REC_BYTES
        dev.store_shared(record + 4 * lane, first_index)
        dev.store_shared(record + 4 * lane, second_index, 128)
        if lane < (16 if const_expr(self.has_mask) else 2):
            dev.store_shared(record + 4 * lane, word, REC_MASK)
        if lane == 0:
            dev.store_shared(record, flags, REC_FLAGS)
        cute.arch.sync_warp()
        dev.arrive(smem + self.at.rec_full + 8 * stage)

    @cute.jit
    def list_keys(self, smem, mKV, mIdx, mLen, mMask, group_shift, s_q, h_q, pair, pairs):
        """For every row of this pair: a record per sub-block in which some head counts some key, marked FIRST and LAST."""
        lane = cute.arch.lane_idx()
        depth = const_expr(3)  # sub-blocks on their way from global memory
        raw = cute.make_rmem_tensor(3 * depth, Int32)
        held = cute.make_rmem_tensor(3, Int32)  # the newest record, kept until it is known whether it is the row's last
        for i in cutlass.range_constexpr(3):
            held[i] = Int32(0)
        n_groups = cutlass.min(h_q >> group_shift, Int32(8))
        lane_has_group = lane < 2 * n_groups
        odd = (lane & 1) != 0
        count = Int32(0)
        row = Int32(pair)
        while row < s_q:
            length = Int32(mIdx.shape[2])
            if const_expr(mLen is not None):
                given = dev.load_global(mLen.iterator.toint() + Int64(row) * (Int64(mLen.stride[0]) * 4))
                length = cutlass.min(cutlass.max(given, Int32(0)), length)
            n_sub = (length >> 6) + cutlass.select_((length & 63) != 0, Int32(1), Int32(0))
            idx_row = mIdx.iterator.toint() + Int64(row) * (Int64(mIdx.stride[0]) * 4)
            mask_row = Int64(0)
            mask_stride = Int64(0)
            if const_expr(self.has_mask):
                mask_stride = Int64(mMask.stride[1])
                mask_row = (
                    mMask.iterator.toint() + Int64(row) * Int64(mMask.stride[0]) + Int64((lane >> 1) * 16 + (lane & 1) * 4)
                )
            keys = KeyList(lane, mKV.shape[0], length, n_sub, idx_row, mask_row, mask_stride, lane_has_group)
            for i in cutlass.range_constexpr(depth):
                self.load_keys(raw, 3 * i, Int32(i), keys)
            first = Int32(FLAG_FIRST)
            holding = Int32(0)
            sub = Int32(0)
            while sub < n_sub:
                i0 = raw[0]
                i1 = raw[1]
                word = raw[2]
                for i in cutlass.range_constexpr(3 * (depth - 1)):
                    raw[i] = raw[i + 3]
                self.load_keys(raw, 3 * (depth - 1), sub + depth, keys)
                valid0 = cute.arch.vote_ballot_sync(i0 >= 0 and i0 < keys.s_kv)
                valid1 = cute.arch.vote_ballot_sync(i1 >= 0 and i1 < keys.s_kv)
                counted0 = valid0
                counted1 = valid1
                valid = cutlass.select_(odd, valid1, valid0)
                if const_expr(self.has_mask):
                    word = word & valid
                    counted0 = cute.arch.warp_redux_sync(cutlass.select_(odd, Int32(0), word), "or")
                    counted1 = cute.arch.warp_redux_sync(cutlass.select_(odd, word, Int32(0)), "or")
                else:
                    word = valid
                if (counted0 | counted1) != 0:
                    if holding != 0:
                        self.publish(smem, count, lane, held[0], held[1], held[2], first)
                        count = count + 1
                        first = Int32(0)
                    holding = Int32(1)
                    # what no head counts is not read: distinct rows outside the tensor are zero-filled
                    outside = -1 - (sub * KEYS + lane)
                    held[0] = cutlass.select_(((counted0 >> lane) & 1) != 0, i0, outside)
                    held[1] = cutlass.select_(((counted1 >> lane) & 1) != 0, i1, outside - 32)
                    held[2] = word
                sub = sub + 1
            last = cutlass.select_(holding != 0, first | FLAG_LAST, Int32(FLAG_FIRST | FLAG_LAST | FLAG_EMPTY))
            self.publish(smem, count, lane, held[0], held[1], held[2], last)
            count = count + 1
            row = row + pairs

    # ================================================================================================ gather warps
    @cute.jit
    def load_q(self, bar, slot_at, part: cutlass.Constexpr[int], q_map, q_rope_map, row, cta, half, policy):
        """Q of this CTA's 64 heads: column tiles 2 * part and 2 * part + 1 of one half, and rope step `part`."""
        head = cta * HEADS
        for i in cutlass.range_constexpr(2):
            column = half * HALF_V + (2 * part + i) * 64
            dev.load_box(slot_at + (2 * i + half) * TILE, q_map, column, head, row, bar, policy)
        if const_expr(self.at.rope):
            column = 2 * HALF_V + half * (ROPE // 2) + part * 16
            dev.load_box(slot_at + ROPE_AT + half * (HEADS * 32), q_rope_map, column, head, row, bar, policy)

    @cute.jit
    def gather(self, smem, q_map, q_rope_map, kv_map, kv_rope_map, s_q, pair, pairs, cta, which):
        """One warp: a half of every row's Q, then 32 of the 64 listed rows of its sub-blocks, four at a time."""
        lane = cute.arch.lane_idx()
        keep = dev.policy("evict_last")
        once = dev.policy("evict_first")
        announces = which == 0 and cta == 0
        column = cta * HALF_V
        rope_column = cta * (ROPE // 2) + 2 * HALF_V
        count = Int32(0)
        slot = Int32(0)
        phase = Int32(0)
        row = Int32(pair)
        while row < s_q:
            last = Int32(0)
            while last == 0:
                stage = count & (RECORDS - 1)
                dev.wait(smem + self.at.rec_full + 8 * stage, (count >> 3) & 1)
                record = smem + self.at.records + stage * REC_BYTES
                flags = self.flags(smem, stage)
                last = flags & FLAG_LAST
                if (flags & FLAG_EMPTY) == 0:
                    if (flags & FLAG_FIRST) != 0:
                        # both warps load, so that no slot can be filled and released while one of them has yet to look at it
                        for part in cutlass.range_constexpr(2):
                            bar = smem + self.at.kv_full + 8 * slot
                            dev.wait(smem + self.at.kv_empty + 8 * slot, phase ^ 1)
                            if announces:
                                dev.expect(bar, 2 * self.at.slot)
                            slot_at = smem + self.at.ring + slot * self.at.slot
                            self.load_q(bar & dev.EVEN_CTA, slot_at, part, q_map, q_rope_map, row, cta, which, once)
                            slot, phase = next_slot(slot, phase)
                    bar = smem + self.at.kv_full + 8 * slot
                    dev.wait(smem + self.at.kv_empty + 8 * slot, phase ^ 1)
                    if announces:
                        dev.expect(bar, 2 * self.at.slot)
                    slot_at = smem + self.at.ring + slot * self.at.slot
                    listed = dev.load_shared(record + 4 * (which * GATHER_KEYS + lane))
                    for i in cutlass.range_constexpr(GATHER_KEYS // 4):
                        rows = [cute.arch.shuffle_sync(listed, 4 * i + j) for j in range(4)]
                        quad = which * (GATHER_KEYS // 4) + i
                        dev.gather_rows(slot_at + quad * 512, kv_map, column, rows, bar & dev.EVEN_CTA, keep, TILES)
                        if const_expr(self.at.rope):
                            dst = slot_at + ROPE_AT + quad * 256
                            dev.gather_rows(dst, kv_rope_map, rope_column, rows, bar & dev.EVEN_CTA, keep, 1)
                    slot, phase = next_slot(slot, phase)
                dev.arrive(smem + self.at.rec_empty + 8 * stage)
                count = count + 1
            row = row + pairs
