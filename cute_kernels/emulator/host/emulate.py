"""`emulate()`: the context manager that sends this process's CuTe DSL launches to the emulator.

Entering it redirects the DSL's runtime library (redirect.py, runtime_api.py), installs the Python patches (patches.py)
and makes an `Emulation` current on the calling thread; leaving it undoes all three, after exceptions too. The patches
and the redirection are process-wide and counted: the first active emulation of the process installs them, the last
one removes them. What they do depends on the thread: only threads with a current emulation see emulated answers, others
go to the real functions (at the cost of one Python call per runtime call while any emulation is active).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from . import bridge, patches, redirect, runtime_api, tensors
from .backend import run_on_machine
from .context import Capture, Emulation, current, pop, push

SCHEDULES = ("eager", "lazy", "random")
CHECKS = ("default", "strict", "off")


class _Installation:
    """The process-wide part: installed while at least one emulation is active."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.users = 0
        self.redirections: dict[str, redirect.Redirection] = {}
        self.undo: contextlib.ExitStack | None = None
        self.keeper: patches.PtxKeeper | None = None

    def enter(self) -> None:
        with self.lock:
            if self.users == 0:
                with contextlib.ExitStack() as stack:
                    self._install(stack)
                    self.undo = stack.pop_all()
            self.users += 1

    def leave(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                undo, self.undo = self.undo, None
                undo.close()
                self.keeper = None

    def _install(self, stack: contextlib.ExitStack) -> None:
        import torch

        loaded = patches.Loaded()
        self.keeper = patches.PtxKeeper()
        stack.callback(self.keeper.close)
        changes = patches.PatchSet()
        stack.callback(changes.restore)
        stack.callback(runtime_api.release)
        stack.callback(patches.reset_functions, loaded)
        patches.patch_dsl(changes, self.keeper, loaded)
        patches.patch_tvm_ffi(changes)
        patches.patch_cuda_python(changes)
        patches.patch_torch(changes, torch)
        table = tensors.exchange_table(torch)
        if table is not None:
            stack.callback(table.restore)
            table.install()
        for path in self._runtime_libraries():
            redirection = self.redirections.get(path)
            if redirection is None:
                redirection = self.redirections[path] = redirect.Redirection(path, runtime_api.CALLBACKS)
            for name, function in redirection.functions.items():
                if function.original is not None:
                    runtime_api.ORIGINALS[name] = function.original
            stack.callback(redirection.restore)
            redirection.install()

    @staticmethod
    def _runtime_libraries() -> list[str]:
        import ctypes

        from cutlass.cute import runtime

        for path in runtime.find_runtime_libraries(enable_tvm_ffi=False):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        paths = redirect.loaded_libraries()
        if not paths:
            raise redirect.RedirectError(f"{redirect.RUNTIME_LIBRARY} was not found: is nvidia-cutlass-dsl installed?")
        return paths


_installation = _Installation()


def is_installed() -> bool:
    """Whether any emulation is active in this process (then the runtime library is redirected)."""
    return _installation.users > 0


@contextlib.contextmanager
def emulate(
    arch: str = "sm_100a",
    schedule: str = "eager",
    seed: int = 0,
    checks: str = "default",
    *,
    pretend_cuda: bool = False,
    sm_count: int | None = None,
    backend: Callable[[Emulation, Capture], Any] | None = None,
) -> Iterator[Emulation]:
    """Runs every CuTe DSL launch of this thread on CPU torch tensors in the emulator, until the block is left.

    arch: the emulated GPU, "sm_100a", "sm_103a" or "sm_90a". Kernels compiled inside without an explicit arch are
        compiled for it; a launch of a kernel for another arch raises.
    schedule: "eager" (asynchronous work completes at once), "lazy" (only when something waits for it), "random" (any
        order the ISA allows, by `seed`).
    checks: "default", "strict" or "off", see the emulator's documentation.
    pretend_cuda: CPU tensors also *look* like CUDA tensors to Python (``is_cuda``, ``device``), and ``device="cuda"``
        allocates on the CPU. For published host code that insists; off for code that branches on it.
    sm_count: overrides the number of SMs (148 for sm_100a, 132 for sm_90a) that grids are computed from.
    backend: called as ``backend(emulation, capture)`` for each launch instead of the emulator; its value is recorded.

    Yields an `Emulation` with ``.launches``, ``.captures``, ``.hazards``, ``.counters``, ``.report()``. An error inside
    a launch (deadlock, illegal operand, missing PTX) is raised by the call that launched. Raises ValueError for an
    unknown arch, schedule or level, `redirect.RedirectError` when the DSL's runtime library cannot be redirected.

    Per thread: which emulation is current, the pretence. Process-wide while any emulation is active: the redirection
    and the patches, which pass other threads through. A module that was initialised inside loads itself anew after the
    last emulation of the process ends; do not call one compiled function from an emulating and a real thread at once.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {SCHEDULES}, got {schedule!r}")
    if checks not in CHECKS:
        raise ValueError(f"checks must be one of {CHECKS}, got {checks!r}")
    if not hasattr(seed, "__index__") or seed < 0:
        raise ValueError(f"seed must be an integer of at least 0, got {seed!r}")
    emulation = Emulation(arch, schedule, int(seed), checks, pretend_cuda)
    if sm_count is not None:
        emulation.set_sm_count(sm_count)
    emulation.backend = backend if backend is not None else run_on_machine
    emulation.memory_seen = tensors.MemorySeen()
    with contextlib.ExitStack() as stack:
        _installation.enter()
        stack.callback(_installation.leave)
        emulation.keeper = _installation.keeper
        push(emulation)
        stack.callback(pop, emulation)
        stack.enter_context(bridge.target(emulation))
        if pretend_cuda:
            import torch

            stack.enter_context(tensors.device_pretence(torch))
        yield emulation
        if emulation.pending is not None:
            raise emulation.pending  # of host code that looks at no return value


__all__ = ["CHECKS", "SCHEDULES", "current", "emulate", "is_installed"]
