"""Room for the partial results of split kernels, and their counters: kept per device and stream, so that a call allocates nothing.

Calls on one stream run in order, so they share it safely. All captured graphs of a device share one: two of them must not replay at
the same time on different streams.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor


class Workspace(NamedTuple):
    partials: Tensor
    counters: Tensor
    floats: int
    n_counters: int
    addresses: tuple[int, int]  # of both


_workspaces: dict[tuple[int, int], Workspace] = {}  # (device, stream), or (device, -1) for graph captures
_retired: list[Workspace] = []


def _allocate_to_keep(device: torch.device, floats: int, counters: int) -> Workspace:
    """In a thread of its own, done when it returns. Before it captures, torch.compile's reduce-overhead mode runs everything once
    with this thread's allocations sent to the graph's memory pool, where nothing may stay that is no output of the graph."""

    def make() -> Workspace:
        made = _allocate(device, floats, counters)
        torch.cuda.current_stream(device).synchronize()  # the zeros must be there before any stream's launch
        return made

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def _allocate(device: torch.device, floats: int, counters: int) -> Workspace:
    partials = torch.empty(floats, dtype=torch.float32, device=device)
    zeros = torch.zeros(counters, dtype=torch.int32, device=device)
    return Workspace(partials, zeros, floats, counters, (partials.data_ptr(), zeros.data_ptr()))


def workspace(device: torch.device, floats: int, counters: int) -> Workspace:
    """Room for partial results and zeroed counters, kept per stream, and one per device for what CUDA graphs capture.

    A capture cannot zero memory once and for all (what it records runs at each replay), so its workspace is made by the eager calls
    before it, of which every warm-up has one. Without any, the capture gets its own, zeroed by a node of the graph.
    """
    if device.type != "cuda":
        return _allocate(device, floats, counters)
    return stream_workspace(device.index, torch._C._cuda_getCurrentRawStream(device.index), floats, counters)


def stream_workspace(index: int, stream: int, floats: int, counters: int) -> Workspace:
    """`workspace` for CUDA device `index` and its current stream, as a number."""
    capturing = torch._C._cuda_isCurrentStreamCapturing()
    key = (index, -1 if capturing else stream)
    found = _workspaces.get(key)
    if found is not None and found[2] >= floats and found[3] >= counters:
        return found
    return _make(torch.device("cuda", index), key, found, capturing, floats, counters)


def _make(
    device: torch.device, key: tuple[int, int], found: Workspace | None, capturing: bool, floats: int, counters: int
) -> Workspace:
    if capturing:
        return _allocate(device, floats, counters)
    # Grown in powers of two, so rarely. Counters return to zero after every launch; new ones start there. What is replaced is kept:
    # launches under way, and graphs, may still use it.
    floats, counters = (1 << (n - 1).bit_length() for n in (max(floats, 1 << 18), max(counters, 1 << 12)))
    if found is not None:
        _retired.append(found)
    found = _workspaces[key] = _allocate_to_keep(device, floats, counters)
    captures = (device.index, -1)
    old = _workspaces.get(captures)
    if old is None or old.floats < floats or old.n_counters < counters:
        if old is not None:
            _retired.append(old)
        _workspaces[captures] = _allocate_to_keep(device, floats, counters)
    return found
