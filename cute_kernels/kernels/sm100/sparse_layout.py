"""Budgets of the Blackwell sparse prefill kernel: shared memory, tensor memory, barriers, records, descriptors.

Every role takes its offsets from here, so that a number is stated once. Offsets are bytes from the 1024-byte aligned start of the
dynamic shared memory, which is the same in both CTAs of a pair, as the tensor core and multicast commits require.
"""

from __future__ import annotations

HEADS = 64  # heads per CTA of the pair
KEYS = 64  # keys per sub-block, the unit of work
D_V = 512
HALF_V = 256  # value columns held by one CTA
ROPE = 64  # d_qk - D_V, 32 of them per CTA
THREADS = 384
WARPS = THREADS // 32
REGISTERS = 168  # per thread at launch: 384 * 168 = 64,512 of 65,536
EPILOGUE_REGISTERS, OTHER_REGISTERS = 232, 96  # after setmaxnreg; the softmax keeps 168. An epilogue thread holds 256 bf16 columns
assert 128 * (REGISTERS + EPILOGUE_REGISTERS + OTHER_REGISTERS) <= THREADS * REGISTERS
MAX_SMEM = 232448

# warp roles
SOFTMAX_WARP, EPILOGUE_WARP, MMA_WARP, GATHER_WARP, KEYS_WARP = 0, 4, 8, 9, 11
N_GATHER = 2
GATHER_KEYS = KEYS // N_GATHER  # of a sub-block, per gather warp: one per lane

# ---- key/value ring: slots of [64 keys, this CTA's columns]: 4 tiles of 64 x 64 bf16 (128-byte swizzle), with d_qk 576 one of
# 64 x 32 (64-byte swizzle). A row's Q passes through two slots: 2 x [half 0, half 1] column tiles, rope step p (32-byte swizzle)
SLOTS = 5
TILE = KEYS * 128
TILES = HALF_V // 64
ROPE_AT = TILES * TILE
ROPE_BYTES = KEYS * ROPE // 2 * 2

OUT_BYTES = 32 * 32 * 2

# ---- tensor memory columns. O: lane q = value columns 0..255 of head q, lane 64 + q = 256..511. P: lane q = half-0 partial logits
# of head q, lane 64 + q = half-1 partials. Q: 8 columns per step of 16 columns, half 0 in lanes 0..63, half 1 in 64..127
TMEM_COLUMNS = 512
O_COLUMN, P_COLUMN, Q_COLUMN = 0, 256, 320
Q_STEPS = HALF_V // 16
assert Q_COLUMN + 8 * (Q_STEPS + 2) <= TMEM_COLUMNS

# ---- records: one per sub-block with a counted key, from the key-list warp to the other roles
RECORDS = 8
REC_MASK = 4 * KEYS  # after 64 indices: 8 groups x 64 bits
REC_FLAGS = REC_MASK + 64
REC_BYTES = REC_FLAGS + 16
FLAG_FIRST, FLAG_LAST, FLAG_EMPTY = 1, 2, 4

LAZY_THRESHOLD = 6.0  # log2 units: P reaches at most 2**6, far inside bf16


class Layout:
    """Shared-memory offsets for one d_qk."""

    def __init__(self, d_qk: int):
        assert d_qk in (512, 576)
        self.rope = d_qk == 576
        self.slot = TILES * TILE + (ROPE_BYTES if self.rope else 0)
        self.ring = 0
        self.s = self.ring + SLOTS * self.slot  # 2 x [64 heads, 64 keys] bf16, core matrices of 8 heads x 16 bytes
        self.out = self.s + 2 * HEADS * KEYS * 2  # 4 epilogue warps x [32 heads, 32 columns] bf16 (64-byte swizzle)
        self.exchange = self.out + 4 * OUT_BYTES  # 128 threads x 32 fp32 partial logits
        self.records = self.exchange + 128 * 32 * 4
        self.row_max = self.records + RECORDS * REC_BYTES  # 128 fp32
        self.sums = self.row_max + 128 * 4  # end of a row: 128 partial sums, 64 maxima, 64 references, 1 word "row is empty"
        self.maxima = self.sums + 128 * 4
        self.references = self.maxima + HEADS * 4
        self.row_empty = self.references + HEADS * 4
        self.tmem_address = self.row_empty + 8
        self.bars = self.tmem_address + 8
        # mbarriers, 8 bytes each
        at = self.bars
        for name, count in (
            ("kv_full", SLOTS), ("kv_empty", SLOTS), ("p_full", 1), ("p_empty", 1), ("s_full", 2), ("s_empty", 2), ("o_full", 1),
            ("o_empty", 1), ("stats_full", 1), ("stats_empty", 1), ("rec_full", RECORDS), ("rec_empty", RECORDS),
        ):  # fmt: skip
            setattr(self, name, at)
            at += 8 * count
        self.bytes = at
        assert self.slot % 1024 == self.s % 1024 == self.out % 512 == OUT_BYTES % 512 == self.records % 16 == self.bars % 8 == 0
        assert self.bytes <= MAX_SMEM, self.bytes


# ---- matrix descriptors (PTX ISA, shared memory descriptor): the upper word is constant, the lower word is the start address / 16
# plus the leading offset / 16 in bits 16..29. Swizzle codes 0 none, 2 128 bytes, 4 64 bytes, 6 32 bytes
def descriptor_high(stride_bytes: int, swizzle: int) -> int:
    return (stride_bytes >> 4) | 1 << 14 | swizzle << 29


def descriptor_low(leading_bytes: int) -> int:
    return (leading_bytes >> 4) << 16


K_HIGH = descriptor_high(1024, 2)  # keys x columns, K-major: groups of 8 rows 1,024 bytes apart
K_ROPE_HIGH = descriptor_high(512, 4)
V_HIGH = descriptor_high(1024, 2)  # the same bytes MN-major: groups of 8 keys 1,024 apart, column tiles TILE apart
V_LOW = descriptor_low(TILE)
S_HIGH = descriptor_high(128, 0)  # core matrices: head groups 128 apart, key chunks 1,024 apart
S_LOW = descriptor_low(1024)
Q_ROPE_HIGH = descriptor_high(256, 6)


# ---- instruction descriptors: fp32 += bf16 x bf16, M = 128 over the pair
def instruction(n: int, b_mn_major: bool) -> int:
    return 1 << 4 | 1 << 7 | 1 << 10 | int(b_mn_major) << 16 | (n >> 3) << 17 | (128 >> 4) << 24


QK_INSTRUCTION = instruction(128, False)
PV_INSTRUCTION = instruction(256, True)
