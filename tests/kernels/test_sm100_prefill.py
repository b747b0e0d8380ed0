"""The Blackwell prefill kernel (many query rows), tested as test_sm100_decode tests decode: oracle, tolerance, checks."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from test_sm90_decode import check, exact, make, same  # noqa: E402
from test_sm100_decode import ARCH, SCHEDULES, append_case, assert_no_spills, case, run  # noqa: E402

from cute_kernels.kernels.sm100 import prefill  # noqa: E402


def test_what_comes_here():
    assert prefill.suits(200, 1) and prefill.suits(17, 4)
    assert not prefill.suits(1, 128) and not prefill.suits(64, 1)


@pytest.mark.full
def test_schedules_give_the_same_bits():
    """Two row tiles with unlike numbers of key tiles, the last key tile cut."""
    q, k, v = make(1, 2, 1, 130, 128, 403, [400], seed=3, device="cpu")
    results = [run(q, k, v, 400, schedule, seed) for schedule, seed in SCHEDULES]
    check(results[0], q, k, v, [400])
    assert all(same(results[0], r) for r in results[1:])


@pytest.mark.full
def test_batch_and_capacity_do_not_change_bits():
    lengths = [0, 40, 300]
    result, q, k, v = case(lengths, s=80)
    for i in (1, 2):
        n = lengths[i]
        assert same([x[i : i + 1] for x in result], run(q[i : i + 1], k[i : i + 1], v[i : i + 1], n)), f"row {i} alone, int length"
        wide = [torch.nn.functional.pad(x[i : i + 1], (0, 0, 0, 177), value=math.nan) for x in (k, v)]
        assert same([x[i : i + 1] for x in result], run(q[i : i + 1], *wide, [n])), f"row {i}, larger capacity"


@pytest.mark.full
@pytest.mark.parametrize("d,dtype", [(64, torch.float16), (80, torch.bfloat16), (256, torch.bfloat16)])
def test_head_dims(d, dtype):
    case([300], s=40, d=d, dtype=dtype)


@pytest.mark.full
@pytest.mark.parametrize(
    "group,s,causal", [(1, 200, True), (5, 60, False), (16, 17, True), pytest.param(160, 16, True, marks=pytest.mark.nightly)]
)
def test_query_rows(group, s, causal):
    case([190], h_q=group, s=s, causal=causal)


@pytest.mark.full
def test_large_logits():
    """The reference of the weights moves, and O is rescaled, at most key tiles."""
    q, k, v = make(1, 2, 1, 64, 64, 603, [600], seed=7, device="cpu")
    k *= (1 + torch.arange(603)[:, None] / 50).bfloat16()
    check(run(q, k, v, [600]), q, k, v, [600])


@pytest.mark.full
def test_options():
    sink = torch.tensor([math.inf, -math.inf, 0.3, 2.0])
    case([50, 290], s=100, window_left=60, softcap=5.0, attn_sink=sink, sm_scale=-0.2)


@pytest.mark.full
@pytest.mark.parametrize("sm_scale", [-0.3, 0.0])
def test_scales_that_are_not_positive(sm_scale):
    case([300], s=40, sm_scale=sm_scale)


@pytest.mark.full
def test_huge_scale():
    """Logits of 1e10, one of which takes all: scale * x - maximum in one rounding would be far above 0."""
    q, k, v = make(1, 4, 1, 40, 128, 309, [300], seed=1, device="cpu")
    out, lse = run(q, k, v, [300], sm_scale=1e9)
    want, want_lse, _ = exact(q, k, v, [300], sm_scale=1e9)
    assert torch.equal(out.double(), want) and torch.allclose(lse.double(), want_lse, rtol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("h_q", [4, pytest.param(160, marks=pytest.mark.nightly)])
def test_append(h_q):
    append_case([0, 20, 150] if h_q == 4 else [140], h_q=h_q, h_kv=1, s=100 if h_q == 4 else 17)


@pytest.mark.nightly
def test_rows_at_odd_addresses():
    q, k, v = make(1, 4, 1, 20, 64, 140, [133], seed=1, device="cpu")
    odd = []
    for x in (q, k, v):
        wide = torch.full((*x.shape[:3], 69), math.nan, dtype=x.dtype)
        wide[..., 3:67] = x
        odd.append(wide[..., 3:67])
    assert same(run(q, k, v, 133), run(*odd, 133))


EVERYTHING = dict(window=True, softcap=True, sink=True, append=True, device_length=True)


@pytest.mark.full
@pytest.mark.parametrize("arch", [ARCH, pytest.param("sm_103a", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("change", [{}, {"wide": False, **EVERYTHING}, {"head_dim": 192, "group": 5, **EVERYTHING}], ids=str)
def test_variants_compile_without_spills(change, arch):
    base = dict(
        bf16=True, head_dim=128, group=4, wide=True, causal=True, window=False, softcap=False, sink=False, append=False,
        device_length=False,
    )  # fmt: skip
    if not change:
        assert (prefill.Variant(**base),) == prefill._common_variants(arch)
    assert_no_spills(prefill.prefill_kernel.artifact(prefill.Variant(**{**base, **change}), arch).cubin)
