"""Exact implementations in plain torch: the meaning of every operator, its CPU backend, and what the kernels are tested against.

The functions take any float dtype and run on any device. Arithmetic is float32; `compute_dtype=torch.float64` gives the statistics
(and, for float64 inputs, the output) in float64.
"""

from cute_kernels.reference.active_attention import active_attention, active_attention_append, active_attention_into
from cute_kernels.reference.group_topk import group_topk
from cute_kernels.reference.sparse_prefill import sparse_prefill, sparse_prefill_into

__all__ = [
    "active_attention",
    "active_attention_append",
    "active_attention_into",
    "group_topk",
    "sparse_prefill",
    "sparse_prefill_into",
]
