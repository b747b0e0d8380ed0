"""Tensor-core role of the Blackwell sparse prefill kernel: one warp of the pair's even CTA issues everything, for both CTAs."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.kernels.sm100 import sparse_device as dev
from cute_kernels.kernels.sm100 import sparse_layout as lay
from cute_kernels.kernels.sm100.sparse_layout import (
    FLAG_EMPTY,
    FLAG_LAST,
    O_COLUMN,
    P_COLUMN,
    Q_COLUMN,
    RECORDS,
    ROPE_AT,
    TILE,
    TILES,
)
from cute_kernels.kernels.sm100.sparse_producer import next_slot


class Mma:
    """Methods of `SparsePrefillSm100` that the tensor-core warp runs."""

    @cute.jit
    def copy_q(self, smem, tmem, slot, part: cutlass.Constexpr[int]):
        """The Q tiles of one slot to tensor memory: 8 steps of 16 columns, and one of rope."""
        steps = [(8 * (8 * part + i), 2 * (i // 4) * TILE + 32 * (i % 4), lay.K_HIGH) for i in range(8)]
        if const_expr(self.at.rope):
            steps.append((8 * (lay.Q_STEPS + part), ROPE_AT, lay.Q_ROPE_HIGH))
        dev.tmem_copy(tmem + Q_COLUMN, dev.matrix_start(smem + self.at.ring + slot * self.at.slot), steps)

    @cute.jit
    def scores(self, smem, tmem, slot):
        """P = Q K^T of 64 keys: rows 0..63 of the product from CTA 0's columns, rows 64..127 from CTA 1's."""
        steps = [(8 * i, (i // 4) * TILE + 32 * (i % 4), lay.K_HIGH) for i in range(lay.Q_STEPS)]
        if const_expr(self.at.rope):
            steps += [(8 * (lay.Q_STEPS + i), ROPE_AT + 32 * i, lay.K_ROPE_HIGH) for i in range(2)]
        low = dev.matrix_start(smem + self.at.ring + slot * self.at.slot)
        dev.mma_ts(tmem + P_COLUMN, tmem + Q_COLUMN, low, lay.QK_INSTRUCTION, steps)

    @cute.jit
    def values(self, smem, tmem, slot, buffer, accumulate):
        """O (+)= S V of 64 keys: two tiles of 128 value columns per CTA, the keys in four steps of 16."""
        s_low = dev.matrix_start(smem + self.at.s + buffer * (lay.HEADS * lay.KEYS * 2)) + lay.S_LOW
        v_low = dev.matrix_start(smem + self.at.ring + slot * self.at.slot) + lay.V_LOW
        for n in cutlass.range_constexpr(TILES // 2):
            steps = [(2048 * i, 2 * n * TILE + 2048 * i) for i in range(4)]
            d = tmem + (O_COLUMN + 128 * n)
            dev.mma_ss(d, s_low, lay.S_HIGH, v_low, lay.V_HIGH, lay.PV_INSTRUCTION, accumulate, steps)

    @cute.jit
    def finish_one(self, smem, tmem, slot, done, in_row, rows, last):
        """S V of the oldest sub-block whose scores have been issued. `in_row` counts those of its row, `rows` non-empty rows."""
        buffer = done & 1
        dev.wait(smem + self.at.s_full + 8 * buffer, (done >> 1) & 1)
        if in_row == 0:
            dev.wait(smem + self.at.o_empty, (rows & 1) ^ 1)
        dev.fence_after()
        self.values(smem, tmem, slot, buffer, in_row)
        dev.commit(smem + self.at.kv_empty + 8 * slot)
        dev.commit(smem + self.at.s_empty + 8 * buffer)
        if last:
            dev.commit(smem + self.at.o_full)

    @cute.jit
    def issue(self, smem, tmem, s_q, pair, pairs):
        """Scores run two sub-blocks ahead of values, so that the softmax of one is hidden under the products of the next two.

        A new row: its Q follows the last scores of the row before, under which that row's last values are still to come.
        """
        count = Int32(0)
        issued = Int32(0)  # sub-blocks whose scores have been issued
        done = Int32(0)  # sub-blocks whose values have been issued
        slot = Int32(0)
        phase = Int32(0)
        v_slot = Int32(0)  # ring position of the next values
        in_row = Int32(0)
        rows = Int32(0)
        row = Int32(pair)
        more = Int32(1)
        while more != 0:
            more = cutlass.select_(row < s_q, Int32(1), Int32(0))
            stage = count & (RECORDS - 1)
            empty = Int32(1)
            if more != 0:
                dev.wait(smem + self.at.rec_full + 8 * stage, (count >> 3) & 1)
                empty = self.flags(smem, stage) & FLAG_EMPTY
            if empty == 0:
                # Q in tensor memory is free once the scores of the row before are complete
                dev.wait(smem + self.at.p_full, (issued & 1) ^ 1)
                for part in cutlass.range_constexpr(2):
                    dev.wait(smem + self.at.kv_full + 8 * slot, phase)
                    self.copy_q(smem, tmem, slot, part)
                    dev.commit(smem + self.at.kv_empty + 8 * slot)
                    slot, phase = next_slot(slot, phase)
            # ---- the values that the row before still owes
            for _ in cutlass.range(issued - done, unroll=1):
                self.finish_one(smem, tmem, v_slot, done, in_row, rows, done + 1 == issued)
                v_slot = next_slot(v_slot, phase)[0]
                done = done + 1
                in_row = in_row + 1
            rows = rows + cutlass.select_(in_row != 0, Int32(1), Int32(0))
            in_row = Int32(0)
            if empty == 0:
                v_slot = slot
                last = Int32(0)
                while last == 0:
                    stage = count & (RECORDS - 1)
                    dev.wait(smem + self.at.rec_full + 8 * stage, (count >> 3) & 1)
                    last = self.flags(smem, stage) & FLAG_LAST
                    dev.arrive(smem + self.at.rec_empty + 8 * stage)
                    count = count + 1
                    dev.wait(smem + self.at.kv_full + 8 * slot, phase)
                    dev.wait(smem + self.at.p_empty, (issued & 1) ^ 1)
                    dev.fence_after()
                    self.scores(smem, tmem, slot)
                    dev.commit(smem + self.at.p_full)
                    slot, phase = next_slot(slot, phase)
                    issued = issued + 1
                    if issued - done == 3:
                        self.finish_one(smem, tmem, v_slot, done, in_row, rows, False)
                        v_slot = next_slot(v_slot, phase)[0]
                        done = done + 1
                        in_row = in_row + 1
            elif more != 0:
                dev.arrive(smem + self.at.rec_empty + 8 * stage)
                count = count + 1
            row = row + pairs
