"""The split kernels' workspaces, with the CUDA calls replaced: what is kept, for whom, and who allocates it."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from cute_kernels.kernels import workspace as module

DEVICE = SimpleNamespace(type="cuda", index=0)


@pytest.fixture
def gpu(monkeypatch):
    """Its stream, whether that captures, and what was allocated: (thread, floats, counters)."""
    state = SimpleNamespace(stream=7, capturing=False, made=[], synchronised=0)

    def allocate(device, floats, counters):
        state.made.append((threading.get_ident(), floats, counters))
        return module.Workspace(torch.empty(1), torch.zeros(1), floats, counters, (0, 0))

    def synchronize():
        state.synchronised += 1

    monkeypatch.setattr(module, "_allocate", allocate)
    monkeypatch.setattr(module, "_workspaces", {})
    monkeypatch.setattr(module, "_retired", [])
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: state.capturing, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: state.stream, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=synchronize))
    return state


def test_kept_per_stream_and_one_for_captures(gpu):
    first = module.workspace(DEVICE, 100, 10)
    assert module.workspace(DEVICE, 50, 5) is first and len(gpu.made) == 2
    # Whoever redirects this thread's allocations must not catch what is kept; its zeros are there before anyone uses them.
    assert all(thread != threading.get_ident() for thread, _, _ in gpu.made) and gpu.synchronised == 2
    gpu.stream = 8
    assert module.workspace(DEVICE, 100, 10) is not first and len(gpu.made) == 3
    gpu.capturing = True
    for_graphs = module.workspace(DEVICE, 100, 10)
    assert for_graphs is not first and len(gpu.made) == 3
    # Larger than any eager call before: the capture's own, kept by nobody.
    assert module.workspace(DEVICE, 1 << 30, 10) is not for_graphs and gpu.made[-1][0] == threading.get_ident()
    assert module.workspace(DEVICE, 100, 10) is for_graphs


def test_what_is_replaced_stays_alive(gpu):
    old = module.workspace(DEVICE, 100, 10)
    new = module.workspace(DEVICE, 1 << 20, 10)
    assert new is not old and new.floats == 1 << 20
    assert any(kept is old for kept in module._retired) and len(module._retired) == 2  # the stream's and the graphs'
