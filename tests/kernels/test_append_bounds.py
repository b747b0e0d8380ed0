"""Appended rows that do not fit: kv_len beyond the capacity, negative, shorter than the new rows. Rows outside [0, C) are not
written, every other byte stays, and attention sees the rows there are. Both architectures in the emulator; native on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from test_sm90_decode import check, hopper, make, same  # noqa: E402

import cute_kernels as ck  # noqa: E402
from cute_kernels import reference  # noqa: E402

CAPACITY = 70


def appended(s, h_q, device, append):
    lengths = [CAPACITY + 2, 2**31 - 1, -5, 50, CAPACITY, s - 2]
    seen = [min(max(n, 0), CAPACITY) for n in lengths]
    q, k, v = make(len(lengths), h_q, 1, s, 64, CAPACITY, seen, seed=1, device=device)
    k_new, v_new = (torch.randn(len(lengths), 1, s, 64, device=device).bfloat16() for _ in range(2))
    want = [k.clone(), v.clone()]
    for i, n in enumerate(lengths):
        for t in range(s):
            row = max(n, 0) - s + t
            if 0 <= row < CAPACITY:
                want[0][i, :, row], want[1][i, :, row] = k_new[i, :, t], v_new[i, :, t]
    result = append(q, k_new, v_new, k, v, torch.tensor(lengths, dtype=torch.int32, device=device))
    assert same([k, v], want), "cache bytes"
    check(result, q, *want, seen)


@pytest.mark.parametrize(
    "arch,s,h_q",
    [
        ("sm_100a", 3, 4), pytest.param("sm_100a", 40, 4, marks=pytest.mark.full),
        pytest.param("sm_90a", 3, 4, marks=pytest.mark.full), pytest.param("sm_90a", 3, 20, marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_emulated(arch, s, h_q):
    from cute_kernels.emulator import emulate

    with emulate(arch, checks="strict") as emulation:
        appended(s, h_q, "cpu", ck.active_attention_append)
    assert not emulation.hazards, emulation.report()


@pytest.mark.parametrize("arch,schedule", [("sm_90a", "lazy"), pytest.param("sm_100a", "random", marks=pytest.mark.full)])
def test_one_writer_per_token(arch, schedule):
    """3 heads per KV head: tokens lie across row tiles, and each is still appended by one CTA (two would race)."""
    from cute_kernels.emulator import emulate

    q, k, v = make(1, 6, 2, 22, 16, 200, [60], seed=1, device="cpu")
    k_new, v_new = (torch.randn(1, 2, 22, 16).bfloat16() for _ in range(2))
    want = [torch.cat((c[:, :, :38], new, c[:, :, 60:]), 2) for c, new in ((k, k_new), (v, v_new))]
    with emulate(arch, schedule=schedule, seed=507, checks="strict") as emulation:
        result = ck.active_attention_append(q, k_new, v_new, k, v, torch.tensor([60], dtype=torch.int32))
    assert not emulation.hazards, emulation.report()
    assert same([k, v], want), "cache bytes"
    check(result, q, *want, [60])


def test_reference():
    appended(3, 4, "cpu", reference.active_attention_append)


@hopper
@pytest.mark.parametrize("s,h_q", [(3, 4), (3, 20), (64, 64)])
def test_gpu(s, h_q):
    appended(s, h_q, "cuda", ck.active_attention_append)
    appended(s, h_q, "cuda", reference.active_attention_append)
