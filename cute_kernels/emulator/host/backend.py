"""Hands a captured launch to the emulator's machine, with the memory its kernels may touch."""

from __future__ import annotations

from typing import Any

from .context import Capture, Emulation


def run_on_machine(emulation: Emulation, capture: Capture) -> Any:
    """Runs one launch; returns the machine's record. Raises EmulationError."""
    from ..machine import launch
    from .memory import build_memory

    return launch(
        capture.ptx,
        capture.entry,
        capture.grid,
        capture.block,
        capture.cluster,
        capture.dynamic_smem,
        capture.params,
        arch=emulation.arch,
        memory=build_memory(emulation, capture),
        schedule=emulation.schedule,
        seed=emulation.seed,
        checks=emulation.checks,
    )


def record_only(emulation: Emulation, capture: Capture) -> Capture:
    """A backend that runs nothing: the launch is recorded, the outputs stay as they were."""
    return capture
