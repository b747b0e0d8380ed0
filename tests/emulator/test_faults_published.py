"""Mutants of published kernels (FlashAttention-4, cudnn's sparse attention, quack's GEMMs): see fault_cases_published.py.

A kernel is compiled once by its own package; the unmutated PTX and then each mutant run on that launch's arguments under the
eager, lazy and random schedules. The PTX lines must be those that the cases name where the packages are those that they were
found with. Skipped, with the reason, where a package is not installed.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

from cute_kernels.emulator import EmulationError  # noqa: E402
from cute_kernels.emulator.host import emulate  # noqa: E402
from cute_kernels.emulator.host.backend import run_on_machine  # noqa: E402

sys.path.insert(0, __file__.rsplit("/", 1)[0])
import published  # noqa: E402
from fault_cases_published import MUTANTS, PINNED, SILENT  # noqa: E402

SINGLE = {"tile_M": 128, "tile_N": 128, "cluster_M": 1, "cluster_N": 1}
SCHEDULES = ("eager", "lazy", "random")
KERNELS = {
    "fa4": (published.FA4, lambda: published.flash_attention(256, 1, 1, 128, causal=False)),
    "cudnn64": (published.CUDNN, lambda: published.cudnn_sparse(64, 512)),
    "quack2": (published.QUACK, lambda: published.quack_gemm(**published.PAIR)),
    "quack1": (published.QUACK, lambda: published.quack_gemm(**SINGLE)),
}


@functools.cache
def outcomes(kernel: str, schedules: tuple[str, ...]) -> dict:
    """{(mutant name or "", schedule): (PTX text, line edited, hazards)}; where a mutant's pattern does not match, its
    AssertionError. The kernel is compiled once."""
    packages, call = KERNELS[kernel]
    reason = published.require(*packages)
    if reason:
        return {"skip": reason}
    results = {}

    def backend(emulation, capture):
        for schedule in schedules:
            emulation.schedule = schedule
            for mutant in [None, *(m for m in MUTANTS + SILENT if m.kernel == kernel and schedule in m.schedules)]:
                name = mutant.name if mutant else ""
                try:
                    text, edited = mutant.edit(capture.ptx) if mutant else (capture.ptx, 0)
                except AssertionError as error:
                    results[name, schedule] = error
                    continue
                try:
                    record = run_on_machine(emulation, dataclasses.replace(capture, ptx=text))
                except EmulationError as error:
                    record = error.record
                results[name, schedule] = text, edited, list(record.hazards)
        return record

    published.forget_device()
    torch.manual_seed(1234)
    with emulate("sm_100a", seed=7, pretend_cuda=True, backend=backend):
        call()
    published.forget_device()
    return results


@pytest.fixture
def outcome(request):
    """outcome(kernel, name, schedule). Without --full only the eager schedule is run."""
    full = request.config.getoption("--full") or request.config.getoption("--nightly")

    def get(kernel: str, name: str, schedule: str = "eager"):
        results = outcomes(kernel, SCHEDULES if full else SCHEDULES[:1])
        if "skip" in results:
            pytest.skip(results["skip"])
        result = results[name, schedule]
        if isinstance(result, AssertionError):
            raise result
        return result

    return get


@functools.cache
def as_pinned() -> bool:
    try:
        return all(version(package) == pinned for package, pinned in PINNED.items())
    except PackageNotFoundError:
        return False


def cases(mutants):
    """One case per mutant and schedule. By default the smallest kernel under the eager schedule."""
    for schedule in SCHEDULES:
        for m in mutants:
            if schedule in m.schedules:
                marks = () if m.kernel == "quack1" and schedule == "eager" else pytest.mark.full
                yield pytest.param(m, schedule, id=f"{m.kernel}-{m.name}-{schedule}", marks=marks)


@pytest.mark.parametrize("kernel", ["quack1", *(pytest.param(k, marks=pytest.mark.full) for k in ("fa4", "cudnn64", "quack2"))])
def test_unmutated(kernel, outcome):
    assert outcome(kernel, "")[2] == []


@pytest.mark.parametrize("mutant, schedule", cases(MUTANTS))
def test_reported(mutant, schedule, outcome):
    text, edited, hazards = outcome(mutant.kernel, mutant.name, schedule)
    lines = text.split("\n")
    found = {h.ptx_line for h in hazards if h.kind == mutant.expect and re.search(mutant.line, lines[h.ptx_line - 1])}
    assert found, [str(h) for h in hazards]
    if as_pinned() and "\t.loc" not in text:
        assert edited == mutant.at[0]
        assert schedule in mutant.elsewhere or mutant.at[1] in found, found


@pytest.mark.parametrize("mutant, schedule", cases(SILENT))
def test_silent(mutant, schedule, outcome):
    if not outcome(mutant.kernel, mutant.name, schedule)[2]:
        pytest.xfail("not reported; the reason is beside SILENT in fault_cases_published.py")
    pytest.fail("reported now: give this mutant its kind and line in MUTANTS")
