"""How our own operators learn that they run inside an emulation.

`cute_kernels.jit` imports nothing of the emulator. If the process has imported ``cute_kernels.jit.target`` and it
provides ``push_target(target) -> handle`` and ``pop_target(handle)``, a `Target` is pushed for the calling thread while
`emulate()` is active; otherwise nothing happens, and `current()` of this package is the way to ask.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from . import ptx_store
from .context import Emulation


@dataclass(frozen=True)
class Target:
    """What the operators see of an emulation.

    `arch` is the DSL's arch string; `kind` tells an emulator from a device; `sm_count` and `capability` size grids.
    """

    emulation: Emulation
    kind: str = "emulator"

    @property
    def arch(self) -> str:
        """For example "sm_100a"."""
        return self.emulation.arch

    @property
    def sm_count(self) -> int:
        """Streaming multiprocessors of the emulated GPU."""
        return self.emulation.device.sm_count

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability (major, minor)."""
        return self.emulation.device.capability

    def note_object(self, path: str, ptx: str | None = None) -> None:
        """Tells the emulator that a compiled object was loaded, so that it can find the PTX of its kernels.

        path: the object file; its PTX is looked for beside it (suffix .ptx) when `ptx` is not given.
        """
        ptx_store.note_object(path)
        if ptx is not None:
            ptx_store.register_object(path, ptx)

    def note_memory(self, tensor) -> None:
        """Tells the emulator that a kernel is about to be passed the address of this torch tensor."""
        self.emulation.memory_seen.add_tensor(tensor)


@contextlib.contextmanager
def target(emulation: Emulation) -> Iterator[None]:
    """Pushes a `Target` for the block, if the jit package is there to take it."""
    module = sys.modules.get("cute_kernels.jit.target")
    if module is None and "cute_kernels" in sys.modules:
        import importlib
        import importlib.util

        if importlib.util.find_spec("cute_kernels.jit") and importlib.util.find_spec("cute_kernels.jit.target"):
            module = importlib.import_module("cute_kernels.jit.target")
    if module is None or not hasattr(module, "push_target"):
        yield
        return
    handle = module.push_target(Target(emulation))
    try:
        yield
    finally:
        module.pop_target(handle)
