"""The machine: warps, CTAs, clusters, memories, barriers, asynchronous agents, the scheduler and the checkers.

`launch` runs one launch, `GlobalMemory` is the table of memory it may touch; both are imported on first use.
"""

from __future__ import annotations

_NAMES = {"launch": ".launcher", "LaunchRecord": ".launcher", "GlobalMemory": ".memory", "run_ptx": ".run"}
__all__ = sorted(_NAMES)


def __getattr__(name: str):
    if name in _NAMES:
        from importlib import import_module

        return getattr(import_module(_NAMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
