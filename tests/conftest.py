"""Options --full and --nightly, and skips that say why."""

import os

import pytest

# Two threads, or one in each of two processes: more threads than cores make OpenMP's spinning waits 40 times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1" if os.environ.get("PYTEST_XDIST_WORKER") else "2")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also run the cases marked full (CI)")
    parser.addoption("--nightly", action="store_true", help="also run the cases marked full and nightly")


def pytest_collection_modifyitems(config, items):
    nightly = config.getoption("--nightly")
    full = nightly or config.getoption("--full")
    has_gpu = None
    deselected, kept = [], []
    for item in items:
        if (item.get_closest_marker("nightly") and not nightly) or (item.get_closest_marker("full") and not full):
            deselected.append(item)
            continue
        kept.append(item)
        if item.get_closest_marker("gpu"):
            if has_gpu is None:
                import torch

                has_gpu = torch.cuda.is_available()
            if not has_gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = kept
