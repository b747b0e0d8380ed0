"""The operators of torch.ops.cute_kernels: schema, checks, fake implementations, dispatch by device. No kernel code."""

from cute_kernels.ops.active_attention import active_attention, active_attention_append
from cute_kernels.ops.dispatch import NoKernelError, last_backend
from cute_kernels.ops.group_topk import group_topk
from cute_kernels.ops.sparse_prefill import sparse_prefill

__all__ = [
    "NoKernelError",
    "active_attention",
    "active_attention_append",
    "group_topk",
    "last_backend",
    "sparse_prefill",
]
