"""Sizes, barrier numbers and shared-memory offsets that the producer and the consumers of the sparse prefill kernel share."""

from __future__ import annotations

BLOCK = 64  # keys per block, and heads per CTA
TILE_BYTES = BLOCK * 64 * 2  # one 64 x 64 bf16 column tile
TILE_ELEMENTS = BLOCK * 64
D_V = 512
LEFT_TILES = 4  # column tiles 0..3 are V's left half
THREADS = 384
CONSUMER_REGISTERS = 216
PRODUCER_REGISTERS = 72  # (216 + 216 + 72) * 128 = 64,512 of 65,536
# log2 units: P reaches at most 2**4. Measured on an H200: on FlashMLA's inputs 1 to 6 take the same time, with the same errors. On
# unit-variance ones 4 takes 0 to 4 % more than 6 (1.06 to 1.12 x FlashMLA) and leaves 5 instead of 13 of a million elements beyond
# FlashMLA's tolerance; 3 takes 4 to 7 % more and leaves 2; 0 leaves none, and no lead over FlashMLA.
LAZY_THRESHOLD = 4.0

# named barriers of 256 threads, both consumer warpgroups (0 is left to the compiler)
BAR_QK = 1  # Q K_a^T has been issued
BAR_A = 2  # P_a and m_a are in shared memory
BAR_B = 3  # P_b and m_b are in shared memory
BAR_FINAL = 4  # both warpgroups' sums are in shared memory
BAR_LEFT = 5  # warpgroup 0 alone, 128 threads: its four warps have finished Q K_a^T

# mbarrier slots, 8 bytes each; k_full and k_empty in the order a left, a right, b left, b right
A_LEFT, A_RIGHT, B_LEFT, B_RIGHT = 0, 1, 2, 3
K_FULL, K_EMPTY, INFO_FULL, INFO_EMPTY, Q_FULL, Q_EMPTY, N_BARRIERS = 0, 4, 8, 10, 12, 13, 14

# mask ring: per stage 2 blocks x 8 groups x 8 bytes, then one word of flags
INFO_BLOCK = 64
INFO_FLAGS = 128
INFO_STAGE = 144
FLAG_LAST, FLAG_HAS_B = 1, 2

# float32 exchange area: m_a, m_b, then the sums and maxima of each warpgroup; 64 rows each
EX_MAX_A, EX_MAX_B, EX_L0, EX_L1, EX_T0, EX_T1 = (256 * i for i in range(6))
EX_BYTES = 6 * 256
