"""Producer warpgroup of the sparse prefill kernel: finds blocks with counted keys, publishes their masks, gathers their rows."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from cute_kernels.kernels.sm90 import sparse_device as dev
from cute_kernels.kernels.sm90.sparse_layout import (
    A_LEFT,
    A_RIGHT,
    B_LEFT,
    B_RIGHT,
    BLOCK,
    FLAG_HAS_B,
    FLAG_LAST,
    INFO_BLOCK,
    INFO_EMPTY,
    INFO_FLAGS,
    INFO_FULL,
    INFO_STAGE,
    K_EMPTY,
    K_FULL,
    LEFT_TILES,
    Q_EMPTY,
    Q_FULL,
    TILE_BYTES,
)


class RowList:
    """One query row's key list, as this thread sees it (plain attributes; the values live in registers)."""

    def __init__(self, lane, sub, s_kv, length, n_blocks, idx_row, mask_row, mask_stride, lane_has_group):
        self.lane = lane
        self.sub = sub  # this thread gathers rows sub + 16 * i of a block
        self.s_kv = s_kv
        self.length = length  # keys of the list that may count
        self.n_blocks = n_blocks
        self.idx_row = idx_row  # address of the row's first index
        self.mask_row = mask_row  # address of the mask bytes of group (first group + lane) in block 0
        self.mask_stride = mask_stride  # bytes from one 128-key block of the mask to the next
        self.lane_has_group = lane_has_group


class Producer:
    """Methods of `SparsePrefillSm90` that warpgroup 2 runs."""

    @cute.jit
    def load_raw(self, raw: cute.Tensor, at: cutlass.Constexpr[int], block, keys: RowList):
        """Issue the loads of one block: this lane's indices lane and lane + 32, and lane g's mask words of group g."""
        pos = block * BLOCK + keys.lane
        raw[at] = Int32(-1)
        raw[at + 1] = Int32(-1)
        raw[at + 2] = Int32(0)
        raw[at + 3] = Int32(0)
        if pos < keys.length:
            raw[at] = dev.load_global_u32(keys.idx_row + Int64(pos) * 4)
        if pos + 32 < keys.length:
            raw[at + 1] = dev.load_global_u32(keys.idx_row + Int64(pos) * 4 + 128)
        if const_expr(self.has_mask):
            if keys.lane_has_group and block < keys.n_blocks:
                # 16 bytes per group and 128-key block of the mask: two blocks of 64 keys
                w0, w1 = dev.load_global_v2(keys.mask_row + Int64(block >> 1) * keys.mask_stride + Int64((block & 1) * 8))
                raw[at + 2] = w0
                raw[at + 3] = w1

    @cute.jit
    def next_block(self, raw: cute.Tensor, out: cute.Tensor, rows: cute.Tensor, cursor, keys: RowList):
        """Find the next block with a counted key.

        raw: the indices of blocks cursor and cursor + 1, already loading. Writes out = (found, words of this lane's group lo, hi,
        counted bits of this thread's four rows) and rows = their four indices (0 where not counted); returns the new cursor.
        """
        for i in cutlass.range_constexpr(4):
            out[i] = Int32(0)
            rows[i] = Int32(0)
        while out[0] == 0 and cursor < keys.n_blocks:
            i0 = raw[0]
            i1 = raw[1]
            m0 = raw[2]
            m1 = raw[3]
            for i in cutlass.range_constexpr(4):
                raw[i] = raw[i + 4]
            self.load_raw(raw, 4, cursor + 2, keys)
            cursor = cursor + 1
            w0 = cute.arch.vote_ballot_sync(i0 >= 0 and i0 < keys.s_kv)
            w1 = cute.arch.vote_ballot_sync(i1 >= 0 and i1 < keys.s_kv)
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
                    row = keys.sub + 16 * (i % 2)
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
    def publish(self, it, info, bars, lane, a: cute.Tensor, b: cute.Tensor, more):
        """Masks and flags of this iteration into the ring (one warp). Every lane that stores arrives for itself."""
        stage = it & 1
        cute.arch.mbarrier_wait(bars + INFO_EMPTY + stage, ((it >> 1) & 1) ^ 1)
        here = info + stage * INFO_STAGE
        if lane < self.info_lanes:
            dev.store_shared_v2(here + lane * 8, 0, a[1], a[2])
            dev.store_shared_v2(here + lane * 8, INFO_BLOCK, b[1], b[2])
            if lane == 0:
                flags = (Int32(0) if more != 0 else Int32(FLAG_LAST)) | (b[0] * FLAG_HAS_B)
                dev.store_shared_u32(here, INFO_FLAGS, flags)
            cute.arch.mbarrier_arrive(bars + INFO_FULL + stage)

    @cute.jit
    def producer(self, mQ, mKV, mIdx, mLen, mMask, group_shift, items, halves, q_addr, k_addr, info, bars):
        tidx = cute.arch.thread_idx()[0] - 256
        lane = tidx % 32
        warp = cute.arch.make_warp_uniform(tidx // 32)
        sub = tidx // 8  # this thread's rows are sub + 16 * i
        chunk = tidx % 8  # and its 16 bytes of each 128-byte column tile
        offset = sub * 128 + ((chunk ^ (sub & 7)) << 4)
        q_dst = q_addr + offset
        k_dst = k_addr + offset
        h_q = mQ.shape[1]
        kv_base = mKV.iterator.toint() + Int64(chunk * 16)
        kv_stride = Int64(mKV.stride[0]) * 2
        policy = dev.evict_last_policy()

        raw = cute.make_rmem_tensor(8, Int32)
        # (found, words lo, hi, counted bits) and the four indices of blocks a and b, of this iteration and of the next
        a = cute.make_rmem_tensor(4, Int32)
        b = cute.make_rmem_tensor(4, Int32)
        next_a = cute.make_rmem_tensor(4, Int32)
        next_b = cute.make_rmem_tensor(4, Int32)
        rows_a = cute.make_rmem_tensor(4, Int32)
        rows_b = cute.make_rmem_tensor(4, Int32)
        next_rows_a = cute.make_rmem_tensor(4, Int32)
        next_rows_b = cute.make_rmem_tensor(4, Int32)
        # of the rows being gathered: a's, then b's, so that one set of registers serves both
        src = cute.make_rmem_tensor(4, Int64)
        size = cute.make_rmem_tensor(4, Int32)

        it = Int32(0)
        q_phase = Int32(1)
        item = Int32(cute.arch.block_idx()[0])
        while item < items:
            token = item // halves
            first_head = (item - token * halves) * 64
            length = Int32(mIdx.shape[2])
            if const_expr(mLen is not None):
                given = dev.load_global_u32(mLen.iterator.toint() + Int64(token) * 4)
                length = cutlass.min(cutlass.max(given, Int32(0)), length)
            n_blocks = (length + (BLOCK - 1)) // BLOCK
            idx_row = mIdx.iterator.toint() + Int64(token) * (Int64(mIdx.stride[0]) * 4)
            mask_row = Int64(0)
            mask_stride = Int64(0)
            lane_has_group = Boolean(False)
            if const_expr(self.has_mask):
                # the groups of this CTA's heads; the mask bytes of absent groups are not read
                first_group = first_head >> group_shift
                n_groups = cutlass.min((h_q >> group_shift) - first_group, cutlass.max(64 >> group_shift, Int32(1)))
                lane_has_group = lane < cutlass.min(n_groups, Int32(8))
                mask_stride = Int64(mMask.stride[1])
                mask_row = (
                    mMask.iterator.toint() + Int64(token) * Int64(mMask.stride[0]) + Int64((first_group + lane) * 16)
                )
            keys = RowList(lane, sub, mKV.shape[0], length, n_blocks, idx_row, mask_row, mask_stride, lane_has_group)
            cursor = Int32(0)
            self.load_raw(raw, 0, Int32(0), keys)
            self.load_raw(raw, 4, Int32(1), keys)

            # ---- Q: rows are heads, absent heads are zero
            cute.arch.mbarrier_wait(bars + Q_EMPTY, q_phase)
            q_phase = q_phase ^ 1
            q_row = mQ.iterator.toint() + Int64(token) * (Int64(mQ.stride[0]) * 2) + Int64(chunk * 16)
            for i in cutlass.range_constexpr(4):
                head = first_head + sub + 16 * i
                inside = head < h_q
                size[i] = Int32(16) if inside else Int32(0)
                src[i] = q_row + Int64(head if inside else Int32(0)) * (Int64(mQ.stride[1]) * 2)
            self.gather(q_dst, 0, 0, self.tiles, src, size, policy)
            cute.arch.cp_async_mbarrier_arrive_noinc(bars + Q_FULL)

            # a row without counted keys still runs one iteration, of zero rows under an empty mask
            cursor = self.next_block(raw, a, rows_a, cursor, keys)
            cursor = self.next_block(raw, b, rows_b, cursor, keys)
            more = Int32(1)
            while more != 0:
                # one iteration ahead, so that the last one is known as such
                cursor = self.next_block(raw, next_a, next_rows_a, cursor, keys)
                cursor = self.next_block(raw, next_b, next_rows_b, cursor, keys)
                more = next_a[0]
                has_b = b[0]
                phase = it & 1
                if warp == 0:
                    self.publish(it, info, bars, lane, a, b, more)

                # ---- column tiles, in the order in which the consumers release them
                for i in cutlass.range_constexpr(4):
                    size[i] = ((a[3] >> i) & 1) << 4
                    src[i] = kv_base + Int64(rows_a[i]) * kv_stride
                cute.arch.mbarrier_wait(bars + K_EMPTY + A_LEFT, phase ^ 1)
                self.gather(k_dst, 0, 0, LEFT_TILES, src, size, policy)
                cute.arch.cp_async_mbarrier_arrive_noinc(bars + K_FULL + A_LEFT)
                cute.arch.mbarrier_wait(bars + K_EMPTY + A_RIGHT, phase ^ 1)
                self.gather(k_dst, 0, LEFT_TILES, self.tiles, src, size, policy)
                cute.arch.cp_async_mbarrier_arrive_noinc(bars + K_FULL + A_RIGHT)
                for i in cutlass.range_constexpr(4):
                    size[i] = ((b[3] >> i) & 1) << 4
                    src[i] = kv_base + Int64(rows_b[i]) * kv_stride
                cute.arch.mbarrier_wait(bars + K_EMPTY + B_RIGHT, phase ^ 1)
                if has_b != 0:
                    self.gather(k_dst, self.k_bytes, LEFT_TILES, self.tiles, src, size, policy)
                cute.arch.cp_async_mbarrier_arrive_noinc(bars + K_FULL + B_RIGHT)
                cute.arch.mbarrier_wait(bars + K_EMPTY + B_LEFT, phase ^ 1)
                if has_b != 0:
                    self.gather(k_dst, self.k_bytes, 0, LEFT_TILES, src, size, policy)
                cute.arch.cp_async_mbarrier_arrive_noinc(bars + K_FULL + B_LEFT)

                for i in cutlass.range_constexpr(4):
                    a[i] = next_a[i]
                    b[i] = next_b[i]
                    rows_a[i] = next_rows_a[i]
                    rows_b[i] = next_rows_b[i]
                it = it + 1
            item = item + cute.arch.grid_dim()[0]
