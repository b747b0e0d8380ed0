"""Copies new rows into the KV caches, before the Hopper prefill kernel reads them there. (The decode kernel appends by itself.)

A warp copies one row of K and of V, 16 bytes a lane: k_new[b, h, s] goes to row kv_len[b] - S + s of the cache, if there is one.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.kernels import ptx

WARPS = 4


class AppendKernel:
    """head_dim: D, a multiple of 8 up to 256."""

    def __init__(self, head_dim: int) -> None:
        assert head_dim % 8 == 0 and head_dim <= 256
        self.d = head_dim

    @cute.jit
    def __call__(
        self,
        k: cute.Tensor,  # [B, Hkv, C, D], rows at multiples of 16 bytes, as the others
        v: cute.Tensor,  # [B, Hkv, C, D]
        k_new: cute.Tensor,  # [B, Hkv, S, D]
        v_new: cute.Tensor,  # [B, Hkv, S, D]
        lengths: cute.Tensor,  # [B] int32, after the append
        stream,
    ):
        self.kernel(k, v, k_new, v_new, lengths).launch(
            grid=[(k_new.shape[2] + (WARPS - 1)) // WARPS, k.shape[1], k.shape[0]], block=[32 * WARPS, 1, 1], stream=stream,
            preferred_smem_carveout=0,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, k: cute.Tensor, v: cute.Tensor, k_new: cute.Tensor, v_new: cute.Tensor, lengths: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        x, h, b = cute.arch.block_idx()
        lane = tid % 32
        token, q_len, capacity = x * WARPS + tid // 32, Int32(k_new.shape[2]), Int32(k.shape[2])
        kv_len = ptx.ld_global_1(lengths.iterator.toint() + Int64(b) * 4)
        row = cutlass.max(kv_len, 0) - q_len + token
        if token < q_len and row >= 0 and row < capacity and 8 * lane < self.d:
            for cache, new in ((k, k_new), (v, v_new)):
                source = Int64(b) * new.stride[0] + Int64(h) * new.stride[1] + Int64(token) * new.stride[2]
                to = Int64(b) * cache.stride[0] + Int64(h) * cache.stride[1] + Int64(row) * cache.stride[2]
                words = ptx.ld_global_nc_4_always(new.iterator.toint() + source * 2 + 16 * lane)
                at = cache.iterator.toint() + to * 2 + 16 * lane
                ptx.st_global_2(at, words[0], words[1])
                ptx.st_global_2(at + 8, words[2], words[3])
