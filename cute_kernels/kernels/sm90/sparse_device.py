"""Device helpers of the Hopper sparse prefill kernel: gathers, loads and stores with 64-bit addresses, stmatrix, softmax pieces.

Everything here runs inside a kernel. Global addresses are Int64 byte addresses (rows may lie past 2**31 elements), shared
addresses are Int32 byte offsets of the shared window. Constant displacements are part of the PTX text, so that they become
immediates of the instruction and cost no register.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

NEG_INF = float("-inf")
LOWEST = (
    -3.4028234663852886e38
)  # below every finite logit; exp2(-inf - LOWEST) is 0, so masked rows need no special case


def cp_async_16(dst: Int32, dst_offset: int, src: Int64, src_offset: int, size: Int32, policy: Int64) -> None:
    """Copy 16 bytes global -> shared; with size 0 nothing is read and 16 zero bytes are written."""
    cute.arch.inline_ptx(
        f"cp.async.cg.shared.global.L2::cache_hint.L2::256B [{{$r0}}+{dst_offset}], [{{$r1}}+{src_offset}], 16, {{$r2}}, {{$r3}};",
        read_only_args=[dst, src, size, policy],
    )


def evict_last_policy() -> Int64:
    """L2 policy for rows that other query rows will read again."""
    return cute.arch.inline_ptx("createpolicy.fractional.L2::evict_last.b64 {$w0}, 1.0;", write_only_types=[Int64])


def load_global_u32(address: Int64) -> Int32:
    return cute.arch.inline_ptx("ld.global.nc.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def load_global_f32(address: Int64) -> Float32:
    return cute.arch.inline_ptx(
        "ld.global.nc.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address]
    )


def load_global_v2(address: Int64):
    return cute.arch.inline_ptx(
        "ld.global.nc.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Int32, Int32], read_only_args=[address]
    )


def store_global_v2(address: Int64, offset: int, a: Int32, b: Int32) -> None:
    cute.arch.inline_ptx(f"st.global.v2.b32 [{{$r0}}+{offset}], {{{{$r1}}, {{$r2}}}};", read_only_args=[address, a, b])


def store_global_f32(address: Int64, value: Float32) -> None:
    cute.arch.inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[address, value])


def load_shared_v2(address: Int32, offset: int):
    return cute.arch.inline_ptx(
        f"ld.shared.v2.b32 {{{{$w0}}, {{$w1}}}}, [{{$r0}}+{offset}];",
        write_only_types=[Int32, Int32],
        read_only_args=[address],
    )


def load_shared_u32(address: Int32, offset: int) -> Int32:
    return cute.arch.inline_ptx(
        f"ld.shared.b32 {{$w0}}, [{{$r0}}+{offset}];", write_only_types=[Int32], read_only_args=[address]
    )


def load_shared_f32(address: Int32, offset: int) -> Float32:
    return cute.arch.inline_ptx(
        f"ld.shared.f32 {{$w0}}, [{{$r0}}+{offset}];", write_only_types=[Float32], read_only_args=[address]
    )


def store_shared_v2(address: Int32, offset: int, a: Int32, b: Int32) -> None:
    cute.arch.inline_ptx(f"st.shared.v2.b32 [{{$r0}}+{offset}], {{{{$r1}}, {{$r2}}}};", read_only_args=[address, a, b])


def store_shared_u32(address: Int32, offset: int, a: Int32) -> None:
    cute.arch.inline_ptx(f"st.shared.b32 [{{$r0}}+{offset}], {{$r1}};", read_only_args=[address, a])


def store_shared_f32(address: Int32, offset: int, a: Float32) -> None:
    cute.arch.inline_ptx(f"st.shared.f32 [{{$r0}}+{offset}], {{$r1}};", read_only_args=[address, a])


def stmatrix_x4(address: Int32, a: Int32, b: Int32, c: Int32, d: Int32) -> None:
    """Store four 8x8 bf16 matrices; lane l gives the address of row l % 8 of matrix l // 8."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, a, b, c, d],
    )


def quad_max(x: Float32) -> Float32:
    """Maximum over the four lanes that share an accumulator row."""
    x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=1))
    return cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=2))


def quad_sum(x: Float32) -> Float32:
    x = x + cute.arch.shuffle_sync_bfly(x, offset=1)
    return x + cute.arch.shuffle_sync_bfly(x, offset=2)


def exp2(x: Float32) -> Float32:
    return cute.math.exp2(x, fastmath=True)


@cute.jit
def apply_mask(scores: cute.Tensor, words: cute.Tensor, word_pairs: cutlass.Constexpr[int]):
    """Set the uncounted logits of a 64 x 64 accumulator fragment to -inf.

    scores: this thread's 32 values, index c + 2*r + 4*j = row g + 8*r, key 8*j + 2*t + c (g = lane // 4, t = lane % 4).
    words: Uint32, the 64-bit key mask of row g (entries 0, 1) and, with word_pairs 2, of row g + 8 (entries 2, 3), already
    shifted right by 2*t so that the bit numbers below are constants.
    """
    for i in cutlass.range_constexpr(32):
        j = i // 4
        r = (i // 2) % 2 if word_pairs == 2 else 0
        bit = 8 * (j % 4) + i % 2
        keep = (words[2 * r + j // 4] & Uint32(1 << bit)) != Uint32(0)
        scores[i] = cutlass.select_(keep, scores[i], Float32(NEG_INF))
