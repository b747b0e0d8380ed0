"""Helpers of the fault suite: small kernels of our own with their inputs and checks, and one-line edits of PTX text.

A mutant changes exactly one line and keeps the number of lines, so that a line of the mutant is a line of the original.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

PTX = Path(__file__).with_name("ptx")


@dataclass(frozen=True)
class Edit:
    """Replace what `pattern` matches on one line. `index` picks among the matching lines (0 the first, -1 the last).

    Without an index exactly one line must match. `replacement` is a re.sub template; "" with a pattern of a whole
    statement deletes the instruction.
    """

    pattern: str
    replacement: str = ""
    index: int | None = None

    def __call__(self, ptx: str) -> tuple[str, int]:
        """The edited text and the 1-based line that changed. AssertionError when not exactly the intended line changes."""
        lines = ptx.split("\n")
        matching = [i for i, line in enumerate(lines) if re.search(self.pattern, line.split("//")[0])]
        assert matching, f"{self.pattern!r} matches no line"
        if self.index is None:
            assert len(matching) == 1, f"{self.pattern!r} matches lines {[i + 1 for i in matching]}"
        at = matching[self.index or 0]
        before = lines[at]
        lines[at] = re.sub(self.pattern, self.replacement, before, count=1)
        assert lines[at] != before and "\n" not in lines[at]
        edited = "\n".join(lines)
        changed = [i for i, (x, y) in enumerate(zip(ptx.split("\n"), edited.split("\n"), strict=True)) if x != y]
        assert changed == [at]
        return edited, at + 1


def line_of(ptx: str, pattern: str, index: int | None = None) -> int:
    """The 1-based line that `pattern` matches (comments aside); exactly one unless `index` picks among them."""
    matching = [i + 1 for i, line in enumerate(ptx.split("\n")) if re.search(pattern, line.split("//")[0])]
    assert matching, f"{pattern!r} matches no line"
    if index is None:
        assert len(matching) == 1, f"{pattern!r} matches lines {matching}"
    return matching[index or 0]


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """float32 values that bf16 holds exactly, as their 16-bit patterns."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype(np.uint16)


@dataclass
class Outcome:
    """What a run gave: the record (None when the error came without one), the error, and whether the numbers were right."""

    record: Any
    error: Exception | None
    right: bool | None
    hazards: list = field(default_factory=list)


@dataclass(frozen=True)
class Kernel:
    """One of our own kernels. `prepare()` gives (arguments, check); check() tells whether the results are right."""

    name: str
    grid: int
    block: int
    prepare: Callable[[], tuple[list, Callable[[], bool]]]
    cluster: int = 1
    dynamic_smem: int = 0

    def text(self) -> str:
        return (PTX / f"{self.name}.ptx").read_text()

    def run(self, ptx: str, **how: Any) -> Outcome:
        """Runs `ptx` (the kernel's own text or a mutant's) with `how` = schedule, seed, checks of run_ptx."""
        from cute_kernels.emulator import EmulationError, run_ptx

        args, check = self.prepare()
        try:
            record = run_ptx(
                ptx, self.grid, self.block, args, cluster=(self.cluster, 1, 1), dynamic_smem=self.dynamic_smem, **how
            )
        except EmulationError as error:
            record = getattr(error, "record", None)
            return Outcome(record, error, None, list(record.hazards) if record is not None else [])
        return Outcome(record, None, check(), list(record.hazards))


def _small(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Integers -2..2 as float32: products of hundreds of them are exact in any order of summation."""
    return rng.integers(-2, 3, shape).astype(np.float32)


def _gemm_tma():
    from cute_kernels.emulator import TensorMap

    blocks = 5
    rng = np.random.default_rng(0)
    a, b = _small(rng, 128, 64 * blocks), _small(rng, 64, 64 * blocks)
    bits_a, bits_b, d = bf16_bits(a), bf16_bits(b), np.zeros((128, 64), np.float32)
    maps = [
        TensorMap.tiled(bits_a, box=(128, 64), swizzle="128B", dtype="bf16"),
        TensorMap.tiled(bits_b, box=(64, 64), swizzle="128B", dtype="bf16"),
        TensorMap.tiled(d, box=(128, 64)),
    ]
    # The arrays must outlive the launch: the maps hold addresses only.
    return [*maps, blocks], lambda keep=(bits_a, bits_b): bool(keep) and np.array_equal(d, a @ b.T)


def _mma_ts():
    rng = np.random.default_rng(1)
    a, b, d = _small(rng, 128, 64), _small(rng, 64, 64), np.zeros((128, 64), np.float32)
    return [bf16_bits(a), bf16_bits(b), d], lambda: np.array_equal(d, a @ b.T)


def _cp_a():
    rng = np.random.default_rng(6)
    a, b, d = _small(rng, 128, 32), _small(rng, 64, 32), np.zeros((128, 64), np.float32)
    return [bf16_bits(a), bf16_bits(b), d], lambda: np.array_equal(d, a @ b.T)


def _wgmma_rs():
    rng = np.random.default_rng(5)
    a, b, d = _small(rng, 64, 32), _small(rng, 8, 32), np.zeros((64, 8), np.float32)
    return [bf16_bits(a), bf16_bits(b), d], lambda: np.array_equal(d, a @ b.T)


def _cp_async_ring():
    x, out = _small(np.random.default_rng(2), 7, 64, 4), np.zeros((64, 4), np.float32)
    return [x, out, 7], lambda: np.array_equal(out, x.sum(0)[::-1])


def _bulk_scale():
    x, y = _small(np.random.default_rng(3), 4, 128), np.zeros((4, 128), np.float32)
    return [x, y, 4], lambda: np.array_equal(y, 2 * x)


def _cluster_swap():
    x, y = _small(np.random.default_rng(4), 2, 64), np.zeros((2, 64), np.float32)
    return [x, y], lambda: np.array_equal(y, np.stack([x.sum(0)] * 2))


def _roles():
    x, y = np.arange(1024, dtype=np.uint32), np.zeros(1024, np.uint32)
    return [x, y], lambda: np.array_equal(y, (x ^ 1) + 1)


KERNELS = {
    k.name: k
    for k in (
        Kernel("gemm_tma", 1, 128, _gemm_tma, dynamic_smem=82048),
        Kernel("mma_ts", 1, 128, _mma_ts),
        Kernel("cp_a", 1, 128, _cp_a),
        Kernel("wgmma_rs", 1, 128, _wgmma_rs),
        Kernel("cp_async_ring", 1, 64, _cp_async_ring),
        Kernel("bulk_scale", 1, 128, _bulk_scale),
        Kernel("cluster_swap", 2, 64, _cluster_swap, cluster=2),
        Kernel("roles", 1, 384, _roles),
    )
}
