"""Attention kernels for LLM serving, written in NVIDIA's CuTe Python DSL and called as torch custom operators.

Importing registers torch.ops.cute_kernels.*; it compiles nothing, imports no CUDA library and initialises no device (set
CUTE_KERNELS_JIT=import to compile the default kernels at import). Kernels are compiled when first needed and kept on disk.
"""

import os as _os

from cute_kernels import ops, reference
from cute_kernels.grouping import grouped_sparse_prefill
from cute_kernels.ops import (
    NoKernelError,
    active_attention,
    active_attention_append,
    group_topk,
    last_backend,
    sparse_prefill,
)

__version__ = "0.1.0"
__all__ = [
    "NoKernelError",
    "active_attention",
    "active_attention_append",
    "clear_cache",
    "emulator",
    "group_topk",
    "grouped_sparse_prefill",
    "last_backend",
    "ops",
    "reference",
    "sparse_prefill",
    "warmup",
]


def __getattr__(name: str):
    # Rooms that an ordinary call never enters are imported when named.
    if name in ("warmup", "clear_cache"):
        from cute_kernels import jit

        return getattr(jit, name)
    if name in ("emulator", "integrations", "jit"):
        import importlib

        return importlib.import_module(f"cute_kernels.{name}")
    raise AttributeError(f"module 'cute_kernels' has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__, "integrations", "jit"})


if _os.environ.get("CUTE_KERNELS_JIT") == "import":
    from cute_kernels.jit import on_import as _on_import

    _on_import()
