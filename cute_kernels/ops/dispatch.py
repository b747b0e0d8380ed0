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

# (operator family, architecture) -> module that holds the kernel. Each module offers
#   can_implement(**arguments) -> str | None      None, or why this case is not supported
#   launch(**arguments) -> results                what the operator returns
# Modules are imported when first needed: they import the DSL.
KERNELS: dict[tuple[str, str], str] = {}

_ARCH_NAMES = {"sm_90a": "Hopper (H100, H200)", "sm_100a": "Blackwell (B200)", "sm_103a": "Blackwell (B300)"}
_state = threading.local()
_warned: set[tuple[str, str]] = set()


class NoKernelError(RuntimeError):
    """Inside `emulate(arch)`: this operator, or this case of it, has no kernel for that architecture."""


def last_backend() -> str | None:
    """The backend that ran the last operator of this thread: "reference[cpu]", "reference[cuda]" or "<arch>:<kernel module>";
    None before the first call."""
    return getattr(_state, "backend", None)


def supported_text(family: str) -> str:
    archs = sorted(arch for f, arch in KERNELS if f == family)
    return ", ".join(f"{a} {_ARCH_NAMES.get(a, '')}".strip() for a in archs) or "no architecture yet"


def select(family: str, device: torch.device, arguments: dict[str, Any]) -> Any | None:
    """The kernel module that is to run `family` on `device`, or None for the reference. Records the choice."""
    from cute_kernels.jit import target as jit_target

    kind = device.type
    target = jit_target.current_target(device)
    if target is not None:
        path = KERNELS.get((family, target.arch))
        reason = f"{family} has no kernel for {target.arch} (kernels: {supported_text(family)})"
        if path is not None:
            module = importlib.import_module(path)
            unsupported = module.can_implement(**arguments)
            if unsupported is None:
                _state.backend = f"{target.arch}:{path.rsplit('.', 1)[-1]}"
                return module
            reason = f"{family} on {target.arch}: {unsupported}"
        if kind == "cpu":
            raise NoKernelError(reason)
    else:
        reason = f"{family} has no kernel for this GPU (kernels: {supported_text(family)})"
    if kind != "cpu" and (family, reason) not in _warned:
        _warned.add((family, reason))
        warnings.warn(f"cute_kernels: {reason}; running the exact reference on {device}, which is slow", stacklevel=4)
    _state.backend = f"reference[{kind}]"
    return None
