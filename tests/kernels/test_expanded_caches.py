"""Caches with stride 0 (`k.expand(...)`: one cache for all batch rows, or for all heads): legal views, and the same bits as copies
of them. Both architectures in the emulator; Hopper on a GPU, where the prefill kernel's tensor maps get these strides too."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import test_sm90_decode as decode90  # noqa: E402
import test_sm90_decode_emulated as decode90_emulated  # noqa: E402
import test_sm90_prefill as prefill90  # noqa: E402
import test_sm100_decode as sm100  # noqa: E402

VIEWS = {
    "batch": lambda x: x[:1].expand_as(x),
    "heads": lambda x: x[:, :1].expand_as(x),
    "batch and heads": lambda x: x[:1, :1].expand_as(x),
    "rows": lambda x: x[:, :, :1].expand_as(x),
}
KERNELS = {  # function, query rows
    "sm_100a decode": (sm100.run, 1), "sm_100a prefill": (sm100.run, 50),
    "sm_90a decode": (decode90_emulated.run, 1), "sm_90a prefill": (prefill90.emulated, 50),
}  # fmt: skip


def compare(run, s, n, device):
    """k and v expanded unlike each other; the lengths of both batch rows equal, so that no row counts another's NaN."""
    lengths = [n, n]
    q, k, v = decode90.make(2, 8, 2, s, 128, n + 9, lengths, seed=s, device=device)
    for names in (("batch", "heads"), ("rows", "batch and heads")):
        views = [VIEWS[name](x) for name, x in zip(names if s == 1 else names[::-1], (k, v), strict=True)]
        copies = [x.clone(memory_format=torch.contiguous_format) for x in views]
        result = run(q, *views, lengths)
        decode90.check(result, q, *copies, lengths)
        assert decode90.same(result, run(q, *copies, lengths)), names


@pytest.mark.parametrize(
    "kernel", [k if k == "sm_100a decode" else pytest.param(k, marks=pytest.mark.full) for k in KERNELS]
)  # fmt: skip
def test_emulated(kernel):
    compare(*KERNELS[kernel], 150, "cpu")


@decode90.hopper
@pytest.mark.parametrize("s", [1, 5, 300])
def test_gpu(s):
    compare(lambda q, k, v, n: decode90.run(q, k, v, decode90.device_lengths(n)), s, 700, "cuda")
    if s > 5:
        compare(prefill90.run, s, 700, "cuda")
