"""`launch`: one kernel launch from PTX text to its record."""

from __future__ import annotations

import math
import operator
import sys
import threading
import time
from dataclasses import dataclass, field

import numpy as np

from ..datapath.errors import IllegalOperand
from ..ptx.ir import Module
from ..ptx.parser import parse
from .counters import Counters, tally
from .engine import Machine
from .hazards import Deadlock, EmulationError, Hazard
from .memory import GlobalMemory
from .program import Program
from .state import SMEM_BYTES, Warp


@dataclass
class LaunchRecord:
    """What one launch did. `hazards` is empty for a clean kernel; `printed` holds the device's printf output."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_smem: int
    schedule: str
    seed: int
    checks: str
    counters: Counters = field(default_factory=Counters)
    hazards: list[Hazard] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)
    wall_seconds: float = 0.0
    error: str = ""

    def as_dict(self) -> dict:
        return {
            "entry": self.entry, "grid": self.grid, "block": self.block, "cluster": self.cluster, "dynamic_smem": self.dynamic_smem,
            "schedule": self.schedule, "seed": self.seed, "checks": self.checks, "counters": self.counters.as_dict(),
            "hazards": [h.as_dict() for h in self.hazards], "printed": self.printed, "wall_seconds": self.wall_seconds,
            "error": self.error,
        }  # fmt: skip


_LOCAL = threading.local()  # compiled programs: their scratch rows must not be shared between threads
_FAULTS = ("out-of-bounds shared", "out-of-bounds global", "out-of-bounds local", "misaligned", "device assertion")


def read_module(ptx: str | Module) -> Module:
    """The parsed module of a PTX text. Raises PtxError, and TypeError for anything else."""
    if isinstance(ptx, Module):
        return ptx
    if not isinstance(ptx, str):
        raise TypeError(f"ptx must be a str or a parsed Module, not {type(ptx).__name__}")
    return parse(ptx)


def load_program(module: Module, entry: str, *, fine: bool, checks: str) -> Program:
    """Decode an entry, or find it decoded: programs are kept by text, entry, mode and level for the life of the thread."""
    key = (hash(module.text), len(module.text), entry, fine, checks)
    programs = _LOCAL.__dict__.setdefault("programs", {})
    program = programs.get(key)
    if program is None:
        if len(programs) > 64:
            programs.clear()
        program = programs[key] = Program(
            module, entry, fine=fine, checking=checks != "off", strict=checks == "strict"
        )
    return program


def launch(
    ptx: str | Module,
    entry: str,
    grid,
    block,
    cluster=(1, 1, 1),
    dynamic_smem: int = 0,
    params: bytes = b"",
    *,
    arch: str | None = None,
    memory: GlobalMemory,
    schedule: str = "eager",
    seed: int = 0,
    checks: str = "default",
) -> LaunchRecord:
    """Run one launch to its end.

    Args:
        ptx: PTX text or a parsed module.
        entry: kernel name.
        grid, block, cluster: (x, y, z); the grid must be a multiple of the cluster.
        dynamic_smem: bytes of dynamic shared memory.
        params: the parameter block, laid out as the .param declarations say.
        arch: expected target ("sm_100a"); None accepts the file's own.
        memory: the allocations the kernel may touch.
        schedule: "eager", "lazy" or "random"; `seed` feeds the last.
        checks: "off", "default" or "strict".

    Raises:
        PtxError, UnsupportedInstruction: before anything runs.
        EmulationError: a fault or deadlock; its `record` attribute holds the LaunchRecord so far.
    """
    began = time.perf_counter()
    machine, record = prepare(
        ptx, entry, grid, block, cluster, dynamic_smem, params, arch=arch, memory=memory, schedule=schedule, seed=seed,
        checks=checks,
    )  # fmt: skip
    return run(machine, record, began)


def prepare(
    ptx, entry, grid, block, cluster=(1, 1, 1), dynamic_smem=0, params=b"", *, arch, memory, schedule, seed, checks
) -> tuple[Machine, LaunchRecord]:
    """Everything of `launch` that can be wrong before an instruction has run. Raises ValueError and TypeError, too."""
    if schedule not in ("eager", "lazy", "random"):
        raise ValueError(f"schedule must be eager, lazy or random, not {schedule!r}")
    if checks not in ("off", "default", "strict"):
        raise ValueError(f"checks must be off, default or strict, not {checks!r}")
    module = read_module(ptx)
    if arch is not None and module.target.rstrip("af") != arch.rstrip("af"):
        raise EmulationError(f"the PTX is for {module.target}, not {arch}")
    program = load_program(module, entry, fine=schedule == "random", checks=checks)
    grid, block = _triple(grid, "grid"), _triple(block, "block")
    given = program.flat.directives.get("reqnctapercluster")
    cluster = _triple(cluster, "cluster")
    explicit = cluster != (1, 1, 1)
    if given and explicit and cluster != _triple(given, ".reqnctapercluster"):
        raise ValueError(f"cluster {cluster} differs from .reqnctapercluster {given}")
    if given:
        cluster = _triple(given, ".reqnctapercluster")
    rank = program.flat.directives.get("maxclusterrank")
    if rank and math.prod(cluster) > rank[0]:
        raise ValueError(f"cluster {cluster} has {math.prod(cluster)} CTAs; .maxclusterrank allows {rank[0]}")
    if any(g % c for g, c in zip(grid, cluster)):
        raise ValueError(f"grid {grid} is not a multiple of cluster {cluster}")
    threads = block[0] * block[1] * block[2]
    if not 1 <= threads <= 1024:
        raise ValueError(f"block {block} has {threads} threads (1..1024)")
    required = program.flat.directives.get("reqntid")
    if required and tuple(required) + (1,) * (3 - len(required)) != block:
        raise ValueError(f"block {block} differs from .reqntid {required}")
    most = program.flat.directives.get("maxntid")
    if most and threads > math.prod(most):
        raise ValueError(f"block {block} has {threads} threads; .maxntid {most} allows {math.prod(most)}")
    dynamic_smem = operator.index(dynamic_smem)
    if dynamic_smem < 0:
        raise ValueError(f"dynamic_smem must be at least 0, not {dynamic_smem}")
    if not hasattr(seed, "__index__") or seed < 0:
        raise ValueError(f"seed must be an integer of at least 0, not {seed!r}")
    if program.flat.static_shared + dynamic_smem + 1024 > SMEM_BYTES:
        raise ValueError(f"{program.flat.static_shared + dynamic_smem} bytes of shared memory; a CTA has {SMEM_BYTES - 1024}")
    record = LaunchRecord(entry, grid, block, cluster, dynamic_smem, schedule, seed, checks)
    machine = Machine(program, grid, block, cluster, explicit or bool(given), dynamic_smem, params, memory, schedule, seed, checks)
    return machine, record


def run(machine: Machine, record: LaunchRecord, began: float) -> LaunchRecord:
    """Run what `prepare` made; `began` is when the launch did, by time.perf_counter()."""
    try:
        with np.errstate(all="ignore"):
            machine.run()
    except EmulationError as e:
        record.error = str(e)
        w, ins = machine_position(machine)
        if ins is not None and not any(h.ptx_line == ins.line and str(e).startswith(h.kind) for h in machine.hazards):
            head = str(e).split(" at ")[0]
            kind = next((k.replace(" ", "-") for k in _FAULTS if head.startswith(k)), "fault")
            if not isinstance(e, Deadlock):
                machine.report(kind, w, ins, str(e))
        e.record = record
        raise
    except IllegalOperand as e:
        w, ins = machine_position(machine)
        if ins is not None:
            machine.report("illegal-operand", w, ins, str(e))
        record.error = f"illegal operand{'' if ins is None else f' at PTX line {ins.line}{machine.where(ins)}'}: {e}"
        error = EmulationError(record.error)
        error.record = record
        raise error from e
    finally:
        record.hazards = machine.hazards
        record.printed = machine.printed
        record.counters = tally(machine)
        record.wall_seconds = time.perf_counter() - began
    return record


def machine_position(machine: Machine):
    """(warp, instruction) that was executing when an exception left the machine: found from the traceback."""
    tb = sys.exc_info()[2]
    found = (None, None)
    while tb is not None:
        names = tb.tb_frame.f_locals
        ins, w = names.get("ins"), names.get("w")
        if ins is not None and isinstance(w, Warp) and hasattr(ins, "line"):
            found = (w, ins)
        tb = tb.tb_next
    return found


def _triple(value, name: str) -> tuple[int, int, int]:
    try:
        t = tuple(operator.index(x) for x in (value if hasattr(value, "__iter__") else (value,)))
    except TypeError:
        raise TypeError(f"{name} must be an integer or up to three of them, not {value!r}") from None
    t = t + (1,) * (3 - len(t))
    if len(t) != 3 or min(t) < 1:
        raise ValueError(f"{name} must be three positive integers, not {value!r}")
    return t
