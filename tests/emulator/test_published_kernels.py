"""Kernels that nobody here wrote, unmodified, from their packages' own interfaces: right numbers, no hazards.

The cases are in published.py. By default each runs under one schedule (the fast ones only); `--full` runs all under the
eager, lazy and random schedules. A case is skipped, with the reason, when its package is not installed.
"""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

from cute_kernels.emulator.host import emulate  # noqa: E402

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
    assert emulation.hazards == [], emulation.report()


@pytest.mark.parametrize("name", FAST)
def test_eager(name):
    check(name, "eager")


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_every_schedule(name, schedule):
    check(name, schedule, seed=7)
