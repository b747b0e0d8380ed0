"""Runs the PTX of Blackwell (sm_100a) and Hopper (sm_90a) kernels on a CPU, and finds their hazards.

    run_ptx(ptx, grid, block, args)      any PTX, on NumPy arrays
    emulate(arch)                        a `with` block in which CuTe DSL launches on CPU tensors run here
    python -m cute_kernels.emulator F    the same from a shell, or a list of the opcodes and which are supported

What is modelled, what each check means and what is not simulated (timing, above all) is told in docs/emulator.md.
Nothing is imported until a name is used.
"""

from __future__ import annotations

_NAMES = {
    "run_ptx": ".machine.run", "launch": ".machine.launcher", "LaunchRecord": ".machine.launcher",
    "GlobalMemory": ".machine.memory", "EmulationError": ".machine.hazards", "Deadlock": ".machine.hazards",
    "Hazard": ".machine.hazards", "PtxError": ".ptx.ir", "UnsupportedInstruction": ".ptx.ir",
    "TensorMap": ".datapath.tensormap", "IllegalOperand": ".datapath.errors", "emulate": ".host",
}  # fmt: skip
__all__ = sorted(_NAMES)


def __getattr__(name: str):
    if name in _NAMES:
        from importlib import import_module

        return getattr(import_module(_NAMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
