"""Which backend runs an operator: a native kernel of the device's architecture, or the exact reference.

CPU tensors run the reference, except inside `cute_kernels.emulator.emulate(arch)`, which pushes a target for its `with` block: then
the kernel of that architecture runs, and a case without one raises, so that no test passes on the reference by mistake. CUDA
tensors run the native kernel where there is one, else the same reference on that GPU, with one warning.
"""

from __future__ import annotations

import importlib
import threading
import warnings
from typing import Any

import torch

from cute_kernels.jit.target import current_target

# (operator family, architecture) -> module that holds the kernel, imported when first needed (it imports the DSL). It offers
#   can_implement(**arguments) -> str | None      None, or why this case is not supported: a function of shapes, strides, dtypes and
#                                                 options alone, since its answer is kept; not of addresses or of a length
#   kernel_name(**arguments)                       optional: which of its kernels runs; else the module's name
#   launch(**arguments, **outputs)                 writes the outputs on the current stream
#   prepare(**arguments, target=)                  optional (group_topk: always): a function for all calls of these layouts and
#                                                  options, on the current stream; what it takes is told at each _plan
KERNELS: dict[tuple[str, str], str] = {
    ("active_attention", "sm_90a"): "cute_kernels.kernels.sm90.decode",
    ("active_attention", "sm_100a"): "cute_kernels.kernels.sm100.decode",
    ("active_attention", "sm_103a"): "cute_kernels.kernels.sm100.decode",
    ("group_topk", "sm_90a"): "cute_kernels.kernels.group_topk",
    ("group_topk", "sm_100a"): "cute_kernels.kernels.group_topk",
    ("group_topk", "sm_103a"): "cute_kernels.kernels.group_topk",
    ("sparse_prefill", "sm_90a"): "cute_kernels.kernels.sm90.sparse_prefill",
    ("sparse_prefill", "sm_100a"): "cute_kernels.kernels.sm100.sparse_prefill",
    ("sparse_prefill", "sm_103a"): "cute_kernels.kernels.sm100.sparse_prefill",
}

_ARCH_NAMES = {"sm_90a": "Hopper (H100, H200)", "sm_100a": "Blackwell (B200)", "sm_103a": "Blackwell (B300)"}
__all__ = ["KERNELS", "NoKernelError", "current_target", "last_backend", "record", "select", "supported_text"]

state = threading.local()  # .backend: what `record` was told
_warned: set[tuple[str, str]] = set()


class NoKernelError(RuntimeError):
    """Inside `emulate(arch)`: this operator, or this case of it, has no kernel for that architecture."""


def last_backend() -> str | None:
    """The backend that ran the last operator of this thread: "reference[cpu]", "reference[cuda]" or "<arch>:<kernel module>";
    None before the first call."""
    return getattr(state, "backend", None)


def supported_text(family: str) -> str:
    archs = sorted(arch for f, arch in KERNELS if f == family)
    return ", ".join(f"{a} {_ARCH_NAMES.get(a, '')}".strip() for a in archs) or "no architecture yet"


def select(family: str, device: torch.device, target: Any | None, arguments: dict[str, Any]) -> tuple[Any | None, str]:
    """(the kernel module that is to run `family`, or None for the reference; the name `last_backend` gives it)."""
    kind = device.type
    if target is not None:
        path = KERNELS.get((family, target.arch))
        reason = f"{family} has no kernel for {target.arch} (kernels: {supported_text(family)})"
        if path is not None:
            module = importlib.import_module(path)
            unsupported = module.can_implement(**arguments)
            if unsupported is None:
                name = module.kernel_name(**arguments) if hasattr(module, "kernel_name") else path.rsplit(".", 1)[-1]
                return module, f"{target.arch}:{name}"
            reason = f"{family} on {target.arch}: {unsupported}"
        if kind == "cpu":
            raise NoKernelError(reason)
    else:
        reason = f"{family} has no kernel for this GPU (kernels: {supported_text(family)})"
    if kind != "cpu" and (family, reason) not in _warned:
        _warned.add((family, reason))
        warnings.warn(f"cute_kernels: {reason}; running the exact reference on {device}, which is slow", stacklevel=4)
    return None, f"reference[{kind}]"


def record(backend: str) -> None:
    state.backend = backend
