"""What the active-length attention kernels of all architectures ask of their arguments."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16)


def unsupported(q: Tensor, k_cache: Tensor) -> str | None:
    """Why no kernel takes this dtype or these sizes, or None."""
    if q.dtype not in DTYPES:
        return f"dtype must be bfloat16 or float16, not {q.dtype}"
    d = q.shape[3]
    if d % 8 or not 16 <= d <= 256:
        return f"the head dimension must be a multiple of 8 from 16 to 256, not {d}"
    if k_cache.shape[2] >= 1 << 31:
        return f"the capacity must be below 2**31 rows, not {k_cache.shape[2]}"
    if max(k_cache.shape[0], k_cache.shape[1]) > 65535:
        return f"batch size and KV heads must be at most 65535, not {k_cache.shape[0]} and {k_cache.shape[1]}"
    return None


def output_layouts(q: Tensor) -> tuple[tuple[tuple, tuple], tuple[tuple, tuple]]:
    """(sizes, strides) of what the operator allocates: out, a contiguous [B, S, Hq, D] seen as [B, Hq, S, D], and lse."""
    b, h_q, s, d = q.shape
    return ((b, h_q, s, d), (s * h_q * d, d, h_q * d, 1)), ((b, h_q, s), (h_q * s, s, 1))


def aligned(*tensors: Tensor | None) -> bool:
    """Every row starts at a multiple of 16 bytes (strides of dimensions of size 1 do not matter)."""
    for x in tensors:
        if x is not None:
            s0, s1, s2, _ = x.stride()
            if x.data_ptr() & 15:
                return False
            if (s0 | s1 | s2) & 7 and any(st & 7 and n > 1 for st, n in zip((s0, s1, s2), x.shape)):
                return False
    return True
