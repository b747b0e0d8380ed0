"""Mutants of published kernels (FlashAttention-4, cudnn's sparse attention, quack's GEMMs): see fault_cases_published.py.

A kernel is compiled once by its own package; the unmutated PTX and then each mutant run on that launch's arguments: under one
schedule each, taken in turn from those that report it, at night under all of them. The PTX lines must be those that the cases name
where the packages are those that they were found with. Skipped, with the reason, where a package is not installed.
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


def turn(mutant) -> str:
    """The schedule of a mutant by day."""
    same = [m for m in MUTANTS + SILENT if m.kernel == mutant.kernel]
    return mutant.schedules[same.index(mutant) % len(mutant.schedules)]


def by_day(mutant, schedule: str):
    """The mark of one case: by default the smallest kernel under the eager schedule, in CI also every mutant's turn."""
    if mutant.kernel == "quack1" and schedule == "eager":
        return None
    return pytest.mark.full if turn(mutant) == schedule else pytest.mark.nightly


@functools.cache
def outcomes(kernel: str, which: str) -> dict:
    """{(mutant name or "", schedule): (PTX text, line edited, hazards)}; where a mutant's pattern does not match, its
    AssertionError. The kernel is compiled once."""
    packages, call = KERNELS[kernel]
    reason = published.require(*packages)
    if reason:
        return {"skip": reason}
    results = {}

    def backend(emulation, capture):
        for schedule in SCHEDULES if which != "eager" else SCHEDULES[:1]:
            emulation.schedule = schedule
            mutants = [m for m in MUTANTS + SILENT if m.kernel == kernel and schedule in m.schedules]
            if which == "in turn":
                mutants = [m for m in mutants if by_day(m, schedule) is not pytest.mark.nightly]
            for mutant in [None, *mutants]:
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
    which = "all" if request.config.getoption("--nightly") else "in turn" if request.config.getoption("--full") else "eager"

    def get(kernel: str, name: str, schedule: str = "eager"):
        results = outcomes(kernel, which)
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
    """One case per mutant and schedule."""
    for schedule in SCHEDULES:
        for m in mutants:
            if schedule in m.schedules:
                mark = by_day(m, schedule)
                yield pytest.param(m, schedule, id=f"{m.kernel}-{m.name}-{schedule}", marks=[mark] if mark else [])


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
