"""Errors and hazards: what the emulator reports, and in which words."""

from __future__ import annotations

from dataclasses import asdict, dataclass


class EmulationError(RuntimeError):
    """The launch cannot go on: deadlock, illegal operand, access outside every allocation, unknown instruction."""


class Deadlock(EmulationError):
    """No warp can run and nothing asynchronous is pending. The message lists who waits on what."""


@dataclass(frozen=True)
class Hazard:
    """One finding. `kind` is a stable identifier (see docs); `ptx_line` is 1-based; `source` is "file:line" or "".

    `other_line` and `other_source` name the second of two conflicting accesses, 0 and "" where there is none.
    """

    kind: str
    message: str
    ptx_line: int
    source: str = ""
    other_line: int = 0
    other_source: str = ""
    cta: tuple[int, int, int] = (0, 0, 0)
    warp: int = -1

    def __str__(self) -> str:
        where = f"PTX line {self.ptx_line}" + (f" ({self.source})" if self.source else "")
        text = f"{self.kind}: {self.message} at {where}, CTA {self.cta}, warp {self.warp}"
        if self.other_line:
            text += f"; conflicts with PTX line {self.other_line}" + (f" ({self.other_source})" if self.other_source else "")
        return text

    def as_dict(self) -> dict:
        return asdict(self)
