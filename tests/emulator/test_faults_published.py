"""Mutants of published kernels (FlashAttention-4, cudnn's sparse attention, quack's GEMMs): see fault_cases_published.py.

A kernel is compiled once by its own package; the unmutated PTX and then each mutant run on that launch's arguments under the
eager schedule. Skipped, with the reason, where the package is not installed.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

from cute_kernels.emulator import EmulationError  # noqa: E402
from cute_kernels.emulator.host import emulate  # noqa: E402
from cute_kernels.emulator.host.backend import run_on_machine  # noqa: E402

sys.path.insert(0, __file__.rsplit("/", 1)[0])
import published  # noqa: E402
from fault_cases_published import MUTANTS, SILENT  # noqa: E402

SINGLE = {"tile_M": 128, "tile_N": 128, "cluster_M": 1, "cluster_N": 1}
KERNELS = {
    "fa4": (published.FA4, lambda: published.flash_attention(256, 1, 1, 128, causal=False)),
    "cudnn64": (published.CUDNN, lambda: published.cudnn_sparse(64, 512)),
    "quack2": (published.QUACK, lambda: published.quack_gemm(**published.PAIR)),
    "quack1": (published.QUACK, lambda: published.quack_gemm(**SINGLE)),
}


@functools.cache
def outcomes(kernel: str) -> dict:
    """{mutant name or "": (PTX text, hazards)}; a mutant whose pattern does not match gives its AssertionError instead."""
    packages, call = KERNELS[kernel]
    reason = published.require(*packages)
    if reason:
        return {"skip": reason}
    results = {}

    def backend(emulation, capture):
        for mutant in [None, *(m for m in MUTANTS + SILENT if m.kernel == kernel)]:
            name = mutant.name if mutant else ""
            try:
                text = mutant.edit(capture.ptx)[0] if mutant else capture.ptx
            except AssertionError as error:
                results[name] = error
                continue
            try:
                record = run_on_machine(emulation, dataclasses.replace(capture, ptx=text))
            except EmulationError as error:
                record = error.record
            results[name] = text, list(record.hazards)
        return record

    published.forget_device()
    torch.manual_seed(1234)
    with emulate("sm_100a", pretend_cuda=True, backend=backend):
        call()
    published.forget_device()
    return results


def outcome(kernel: str, name: str):
    results = outcomes(kernel)
    if "skip" in results:
        pytest.skip(results["skip"])
    if isinstance(results[name], AssertionError):
        raise results[name]
    return results[name]


FULL = [pytest.param(m, id=f"{m.kernel}-{m.name}", marks=() if m.kernel == "quack1" else pytest.mark.full) for m in MUTANTS]
QUIET = [pytest.param(m, id=f"{m.kernel}-{m.name}", marks=() if m.kernel == "quack1" else pytest.mark.full) for m in SILENT]


@pytest.mark.parametrize("kernel", ["quack1", *(pytest.param(k, marks=pytest.mark.full) for k in ("fa4", "cudnn64", "quack2"))])
def test_unmutated(kernel):
    assert outcome(kernel, "")[1] == []


@pytest.mark.parametrize("mutant", FULL)
def test_reported(mutant):
    text, hazards = outcome(mutant.kernel, mutant.name)
    lines = text.split("\n")
    found = [h for h in hazards if h.kind == mutant.expect and re.search(mutant.line, lines[h.ptx_line - 1])]
    assert found, [str(h) for h in hazards]


@pytest.mark.parametrize("mutant", QUIET)
def test_silent(mutant):
    if not outcome(mutant.kernel, mutant.name)[1]:
        pytest.xfail("not reported; the reason is beside SILENT in fault_cases_published.py")
    pytest.fail("reported now: give this mutant its kind and line in MUTANTS")
