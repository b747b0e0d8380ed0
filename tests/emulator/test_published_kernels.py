"""Kernels that nobody here wrote, unmodified, from their packages' own interfaces: right numbers, no hazards.

The cases are in published.py. By default each runs under one schedule (the fast ones only); `--full` runs all under the
eager, lazy and random schedules. A case is skipped, with the reason, when its package is not installed.
"""

from __future__ import annotations

import re
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

from cute_kernels.emulator import Deadlock  # noqa: E402
from cute_kernels.emulator.host import emulate  # noqa: E402
from cute_kernels.emulator.host.backend import run_on_machine  # noqa: E402
from cute_kernels.emulator.machine.engine import Machine  # noqa: E402

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from published import CASES, forget_device, require  # noqa: E402

FAST = ("fa4-dense", "fa4-sparse-mla-kb64", "cudnn-sparse-head64-d576", "quack-gemm-2cta", "quack-softmax")


@pytest.fixture(autouse=True)
def clean_slate():
    forget_device()
    yield
    forget_device()


def check(name: str, schedule: str, seed: int = 0):
    case = CASES[name]
    reason = require(*case.packages)
    if reason:
        pytest.skip(reason)
    torch.manual_seed(1234)
    with emulate(case.arch, schedule=schedule, seed=seed, pretend_cuda=True) as emulation:
        results = case.run()
    assert len(emulation.launches) == case.launches
    for result, reference, tolerance in results:
        error = (result.double() - reference).abs().max().item()  # NaN fails the comparison below
        assert error <= tolerance, f"error {error} above {tolerance} (largest reference {reference.abs().max().item()})"
    assert [h for h in emulation.hazards if h.kind not in case.explained] == [], emulation.report()


@pytest.mark.parametrize("name", FAST)
def test_eager(name):
    check(name, "eager")


def every_schedule():
    """All kernels under all schedules at night; in CI not twice under the eager one, and every second one under the lazy."""
    for i, name in enumerate(sorted(CASES)):
        for schedule in ("eager", "lazy", "random"):
            night = (schedule == "eager" and name in FAST) or (schedule == "lazy" and i % 2)
            yield pytest.param(name, schedule, marks=pytest.mark.nightly if night else pytest.mark.full)


@pytest.mark.parametrize("name, schedule", every_schedule())
def test_every_schedule(name, schedule):
    check(name, schedule, seed=7)


@pytest.mark.full
def test_a_schedule_that_shows_the_overrun_of_cudnn_head128(monkeypatch):
    """The one hazard of a published kernel: a phase of "Q is in tensor memory" may end while a warp still waits for the phase
    before. The warp is held at that wait until it has: its parity has come round, and the kernel hangs."""
    case = CASES["cudnn-sparse-head128"]
    reason = require(*case.packages)
    if reason:
        pytest.skip(reason)
    torch.manual_seed(1234)
    step, seen = Machine.step, []

    def backend(emulation, capture):
        record = run_on_machine(emulation, capture)
        (hazard,) = record.hazards
        offset, warp = (int(x) for x in re.search(r"shared byte (\d+).*though warp (\d+)", hazard.message).groups())
        seen.append(hazard.kind)

        def held(self, w, s, quantum):
            bar = w.cta.mbarriers.get(offset)
            waits = self.program.items[s.pc].ins.line == hazard.other_line and s.failed is not None
            if not (waits and w.cta.ctaid == hazard.cta and w.index == warp and bar.phase < 2):
                step(self, w, s, quantum)

        monkeypatch.setattr(Machine, "step", held)
        with pytest.raises(Deadlock, match=f"PTX line {hazard.other_line} .* phase parity 0 .*phase 2"):
            run_on_machine(emulation, capture)
        return record

    with emulate(case.arch, pretend_cuda=True, backend=backend):
        case.run()
    assert tuple(seen) == case.explained
