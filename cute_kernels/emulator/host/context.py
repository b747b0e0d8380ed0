"""Which emulation is active on this thread, and what it has recorded.

`emulate()` pushes an `Emulation` on the calling thread's stack and pops it on exit; nesting therefore works, and the
innermost one receives the launches. Everything that the host layer patches asks `current()` first and behaves as
before on threads where it is None.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

_stack = threading.local()


def current() -> Emulation | None:
    """The innermost active emulation of this thread, or None."""
    stack = getattr(_stack, "items", None)
    return stack[-1] if stack else None


def push(emulation: Emulation) -> None:
    """Makes `emulation` the current one of this thread."""
    if not hasattr(_stack, "items"):
        _stack.items = []
    _stack.items.append(emulation)


def pop(emulation: Emulation) -> None:
    """Undoes `push`; the emulation must be the innermost one."""
    if current() is not emulation:
        raise RuntimeError("emulate() blocks of one thread must be left in the reverse order of entering")
    _stack.items.pop()


@dataclass(frozen=True)
class Device:
    """What the emulated GPU answers when it is asked for its properties."""

    arch: str
    name: str
    capability: tuple[int, int]
    sm_count: int
    smem_per_block_optin: int
    smem_per_sm: int
    l2_bytes: int
    memory_bytes: int
    clock_khz: int

    def max_active_clusters(self, cluster_size: int) -> int:
        """Clusters of this size resident at one CTA an SM, as if every GPC had an even number of usable SMs."""
        return max(1, self.sm_count // cluster_size)


DEVICES = {
    "sm_100a": Device(
        "sm_100a", "Emulated B200", (10, 0), 148, 227 * 1024, 228 * 1024, 126 << 20, 180 << 30, 1_965_000
    ),
    "sm_103a": Device(
        "sm_103a", "Emulated B300", (10, 3), 148, 227 * 1024, 228 * 1024, 126 << 20, 270 << 30, 1_920_000
    ),
    "sm_90a": Device("sm_90a", "Emulated H200", (9, 0), 132, 227 * 1024, 228 * 1024, 50 << 20, 141 << 30, 1_980_000),
}


@dataclass
class Capture:
    """One kernel launch as the host code made it, before the emulator ran it.

    `params` is the parameter block laid out as the PTX's .param declarations say; `slots` are (name, offset, size)
    into it. `cluster` is (1, 1, 1) when the launch has no cluster attribute. `stream` is the raw stream handle. `launch` is what
    the backend made of it, and `error` why it ended early; a launch that failed before it ran has no `launch`.
    """

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_smem: int
    params: bytes
    slots: list[tuple[str, int, int]]
    stream: int
    cooperative: bool
    programmatic: bool
    ptx: str = field(repr=False)
    launch: Any = field(default=None, repr=False, compare=False)
    error: str = field(default="", repr=False, compare=False)

    def param(self, index: int) -> bytes:
        """The bytes of the index-th kernel parameter."""
        _, offset, size = self.slots[index]
        return self.params[offset : offset + size]

    def tensor_maps(self) -> dict[int, Any]:
        """The decoded `TensorMap` of every 128-byte parameter, by parameter index.

        Raises IllegalOperand for a 128-byte parameter that is not a tensor map.
        """
        from ..datapath.tensormap import TensorMap

        return {i: TensorMap.decode(self.param(i)) for i, (_, _, size) in enumerate(self.slots) if size == 128}


@dataclass
class Emulation:
    """What `emulate()` yields.

    `launches` holds the emulator's own record of each launch, in order, of those that ended in an error too (a recording
    backend's return values when one was given); `captures` the launches as they arrived. `device` answers property queries.
    """

    arch: str
    schedule: str = "eager"
    seed: int = 0
    checks: str = "default"
    pretend_cuda: bool = False
    device: Device = None
    backend: Any = None
    launches: list[Any] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)
    memory_seen: Any = None  # tensors.MemorySeen: storages that were passed to kernels
    keeper: Any = None  # patches.PtxKeeper: what the DSL compiled
    pending: BaseException | None = None  # raised inside a callback; surfaces from the call that launched

    def __post_init__(self) -> None:
        if self.device is None:
            if self.arch not in DEVICES:
                raise ValueError(f"arch must be one of {sorted(DEVICES)}, got {self.arch!r}")
            self.device = DEVICES[self.arch]

    def set_sm_count(self, sm_count: int) -> None:
        """Overrides the number of SMs of the emulated GPU."""
        if sm_count < 1:
            raise ValueError(f"sm_count must be at least 1, got {sm_count}")
        self.device = replace(self.device, sm_count=int(sm_count))

    def run(self, capture: Capture) -> None:
        """Runs a launch and records it, whether it ends or raises."""
        self.captures.append(capture)
        try:
            if 0 in capture.grid:
                raise ValueError(f"kernel {capture.entry} is launched with an empty grid {capture.grid}")
            capture.launch = self.backend(self, capture)
        except BaseException as error:
            capture.error = str(error) or type(error).__name__
            capture.launch = getattr(error, "record", None)
            if capture.launch is not None:
                self.launches.append(capture.launch)
            raise
        self.launches.append(capture.launch)

    @property
    def hazards(self) -> list[Any]:
        """Every hazard of every launch, in order."""
        return [hazard for launch in self.launches for hazard in getattr(launch, "hazards", ())]

    @property
    def counters(self) -> dict[str, Any]:
        """Counters of all launches added up, by the names the launches use (numbers only; nested ones by role)."""
        total: dict[str, Any] = {}
        for launch in self.launches:
            _add(total, _as_dict(getattr(launch, "counters", {})))
        return total

    def report(self) -> str:
        """A readable summary: one line a launch, and its error and hazards below it."""
        from ..machine.report import count

        lines = [f"{self.arch}, schedule {self.schedule}, seed {self.seed}, checks {self.checks}"]
        for index, capture in enumerate(self.captures):
            launch = capture.launch
            hazards = getattr(launch, "hazards", ())
            seconds = getattr(launch, "wall_seconds", None)
            outcome = [] if not capture.error else ["did not finish"]
            if launch is not None:
                outcome.append(count(len(hazards), "hazard"))
            if seconds is not None:
                outcome.append(f"{seconds:.2f} s")
            lines.append(
                f"launch {index}: {capture.entry} grid {capture.grid} block {capture.block} cluster {capture.cluster}"
                f" smem {capture.dynamic_smem}: " + ", ".join(outcome)
            )
            if capture.error:
                lines.append("  ERROR " + capture.error.replace("\n", "\n  "))
            lines += [f"  {hazard}" for hazard in hazards]
        return "\n".join(lines)


def _as_dict(counters: Any) -> dict[str, Any]:
    for name in ("as_dict", "to_dict"):
        if hasattr(counters, name):
            return getattr(counters, name)()
    return dict(counters) if isinstance(counters, dict) else dict(vars(counters))


def _add(total: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict):
            _add(total.setdefault(key, {}), value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            total[key] = total.get(key, 0) + value
