"""Which GPU a kernel is compiled for and launched on.

A `Target` is looked up per device: a CUDA device has its own, a CPU has none, except inside `push_target(target)`, a per-thread
stack with which the emulator makes CPU tensors run kernels. Nothing here touches CUDA before the first question about a CUDA
device.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import Any

import torch

# Architecture-specific targets ("a"): each runs on exactly this compute capability.
ARCHS: dict[str, tuple[tuple[int, int], int, str]] = {  # arch -> compute capability, SMs of the usual part, name
    "sm_90a": ((9, 0), 132, "Hopper: H100, H200"),
    "sm_100a": ((10, 0), 148, "Blackwell: B200, GB200"),
    "sm_103a": ((10, 3), 148, "Blackwell Ultra: B300, GB300"),
}
_BY_CAPABILITY = {capability: arch for arch, (capability, _, _) in ARCHS.items()}
# Shared memory that one block may use after opting in, the same on all three: 228 KiB an SM, 1 KiB of which the system keeps.
MAX_SMEM = 227 * 1024


class UnsupportedGPUError(RuntimeError):
    """The GPU, or the arch that was asked for, has no kernels here."""


@dataclass(frozen=True, eq=False)
class Target:
    """A GPU to compile for and launch on.

    arch: "sm_90a", "sm_100a" or "sm_103a". num_sms: streaming multiprocessors. max_smem: bytes of shared memory one block may use.
    backend: what launches instead of a GPU (the emulator), or None; it may offer `note_object(path, ptx)`.
    key: a short string to keep compiled functions under: equal for targets that can share them.
    """

    arch: str
    num_sms: int
    max_smem: int = MAX_SMEM
    backend: Any = field(default=None, repr=False)
    key: str = field(init=False)

    def __post_init__(self) -> None:
        check_arch(self.arch)
        object.__setattr__(self, "key", self.arch if self.backend is None else f"{self.arch} emulated")

    @property
    def sm_count(self) -> int:
        """The same as num_sms."""
        return self.num_sms


def supported_text() -> str:
    """The supported GPUs, for messages."""
    return "; ".join(f"{arch} ({name})" for arch, (_, _, name) in ARCHS.items())


def check_arch(arch: str, what: str = "arch") -> str:
    """`arch` itself if it is supported, else UnsupportedGPUError with the list of those that are."""
    if arch not in ARCHS:
        raise UnsupportedGPUError(f"{what} must be one of the supported architectures, got {arch!r}. Supported: {supported_text()}")
    return arch


def arch_override() -> str | None:
    """CUTE_KERNELS_ARCH, checked, or None."""
    arch = os.environ.get("CUTE_KERNELS_ARCH")
    return check_arch(arch, "the environment variable CUTE_KERNELS_ARCH") if arch else None


def target_for_arch(arch: str) -> Target:
    """A target to compile for, with the usual part's number of SMs. Raises UnsupportedGPUError."""
    return Target(check_arch(arch), ARCHS[arch][1])


class _Stack(threading.local):
    items: list[_Pushed] | None = None  # a class attribute: asking a thread without one for it takes 0.1 us, not 0.5


pushed_targets = _Stack()
_devices: dict[torch.device, Target | None] = {}  # CUDA devices with an index
_missing = object()


class _Pushed:
    """What `push_target` returns: a context manager, and the handle that `pop_target` takes."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def __enter__(self) -> Target:
        return self.target

    def __exit__(self, *error: object) -> None:
        pop_target(self)


def push_target(target: Any) -> _Pushed:
    """Make `target` the one of CPU tensors on this thread until popped: `with push_target(t):`, or `pop_target(handle)`.

    target: a `Target`, or an object with `arch` and `sm_count` that becomes the backend of one.
    """
    if not isinstance(target, Target):
        target = Target(target.arch, target.sm_count, getattr(target, "max_smem", MAX_SMEM), target)
    pushed = _Pushed(target)
    items = pushed_targets.items
    if items is None:
        items = pushed_targets.items = []
    items.append(pushed)
    return pushed


def pop_target(handle: _Pushed) -> None:
    """Undo a `push_target` of this thread. RuntimeError unless it is the innermost one."""
    items = pushed_targets.items
    if not items or items[-1] is not handle:
        raise RuntimeError("targets of one thread must be popped in the reverse order of pushing")
    items.pop()


def current_target(device: torch.device) -> Target | None:
    """The target that kernels on tensors of `device` are for, or None if that device has no kernels.

    A CPU has the innermost pushed target of this thread. A CUDA device has its own, found once: None for an unsupported GPU (see
    `detect` for an error instead), CUTE_KERNELS_ARCH where that is set. RuntimeError for a CUDA device inside a pushed target.
    """
    items = pushed_targets.items
    if items:
        target = items[-1].target
        if device.type == "cpu" or getattr(getattr(target.backend, "emulation", None), "pretend_cuda", False):
            return target
        raise RuntimeError(f"inside emulate({target.arch!r}) operators take CPU tensors, got one on {device}")
    target = _devices.get(device, _missing)
    if target is _missing:
        if device.type != "cuda":
            return None
        index = device.index
        if index is None:
            index = torch.cuda.current_device()
        device = torch.device("cuda", index)
        target = _devices.get(device, _missing)
        if target is _missing:
            target = _devices[device] = device_target(index)
    return target


def device_target(index: int) -> Target | None:
    """The target of CUDA device `index`, read from the driver; None if unsupported. RuntimeError if CUTE_KERNELS_ARCH is another
    architecture than the device's: its kernels could not be loaded."""
    properties = torch.cuda.get_device_properties(index)
    arch = _BY_CAPABILITY.get((properties.major, properties.minor))
    override = arch_override()
    if override is not None and override != arch:
        raise RuntimeError(
            f"CUTE_KERNELS_ARCH={override}, but device {index} is {properties.name}, compute capability {properties.major}."
            f"{properties.minor}: kernels for {override} cannot run on it. Unset the variable, or run on the CPU"
        )
    if arch is None:
        return None
    return Target(arch, properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", MAX_SMEM))


def forget_devices() -> None:
    """Ask the driver anew at the next question (tests)."""
    _devices.clear()


def detect(device: torch.device | int | None = None) -> Target | None:
    """The target to compile for on this machine: CUTE_KERNELS_ARCH if set, else that of `device` (default: the current CUDA
    device).

    None when there is neither. Raises UnsupportedGPUError, which lists the supported GPUs, when the GPU is none of them.
    """
    override = arch_override()
    if override is not None:
        return target_for_arch(override)
    if not torch.cuda.is_available():
        return None
    index = device if isinstance(device, int) else (None if device is None else device.index)
    if index is None:
        index = torch.cuda.current_device()
    target = current_target(torch.device("cuda", index))
    if target is None:
        properties = torch.cuda.get_device_properties(index)
        gpu = f"{properties.name} (compute capability {properties.major}.{properties.minor})"
        raise UnsupportedGPUError(f"no kernels for {gpu}. Supported: {supported_text()}")
    return target


def visible_archs() -> list[str]:
    """The architectures to compile for ahead of time: CUTE_KERNELS_ARCH, else those of all visible CUDA devices that have
    kernels."""
    override = arch_override()
    if override is not None:
        return [override]
    if not torch.cuda.is_available():
        return []
    targets = [current_target(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]
    return sorted({t.arch for t in targets if t is not None})
