"""The Hopper decode kernel on a CPU: its PTX and its host code, run by the emulator, against test_sm90_decode's float64 oracle."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from test_sm90_decode import check, make, same  # noqa: E402
from test_sm90_decode import run as run_kernel  # noqa: E402


def run(q, k, v, kv_len, emulation=None, **options):
    """`emulation`: arguments of emulate(). No hazard may be reported."""
    from cute_kernels.emulator import emulate
    if not isinstance(kv_len, int):
        kv_len = torch.tensor(kv_len, dtype=torch.int32)
    with emulate("sm_90a", **(emulation or {})) as emulated:
        result = run_kernel(q, k, v, kv_len, **options)
    assert not emulated.hazards, emulated.report()
    return result


def case(lengths, *, h_q=8, h_kv=2, s=1, d=128, dtype=torch.bfloat16, spare=9, **options):
    """Run with device lengths and check; returns (result, q, k, v)."""
    q, k, v = make(len(lengths), h_q, h_kv, s, d, max(lengths) + spare, lengths, dtype, seed=sum(lengths) + d + s, device="cpu")
    result = run(q, k, v, lengths, **options)
    check(result, q, k, v, lengths, **options)
    return result, q, k, v


def test_batch_and_capacity_do_not_change_bits():
    lengths = [0, 1, 65, 200]
    result, q, k, v = case(lengths)
    for i in (1, 3):
        n = lengths[i]
        assert same([x[i : i + 1] for x in result], run(q[i : i + 1], k[i : i + 1], v[i : i + 1], n)), f"row {i} alone, int length"
        wide = [torch.nn.functional.pad(x[i : i + 1], (0, 0, 0, 77), value=math.nan) for x in (k, v)]
        assert same([x[i : i + 1] for x in result], run(q[i : i + 1], *wide, [n])), f"row {i}, larger capacity"


@pytest.mark.parametrize("s,change", [(1, {}), (3, {}), (1, {"ctas": 1}), (3, {"cluster": 0})])
def test_append(s, change):
    """Also with all splits in one CTA, and without clusters."""
    from cute_kernels.kernels.sm90.decode import choose

    lengths = [0, 2, 140]
    q, k, v = make(3, 8, 2, s, 128, 145, [max(0, n - s) for n in lengths], seed=s, device="cpu")
    k_new, v_new = (torch.randn(3, 2, s, 128).bfloat16() for _ in range(2))
    want = [k.clone(), v.clone()]
    for i, n in enumerate(lengths):
        for row in range(s):
            if n - s + row >= 0:
                want[0][i, :, n - s + row], want[1][i, :, n - s + row] = k_new[i, :, row], v_new[i, :, row]
    kv_len = torch.tensor(lengths, dtype=torch.int32)
    variant = choose(q, k, v, kv_len, True, -1, 0.0, None, k_new, v_new)._replace(**change)
    result = run(q, k, v, lengths, k_new=k_new, v_new=v_new, variant=variant)
    assert same([k, v], want), "cache bytes"
    check(result, q, *want, lengths)


def test_options():
    sink = torch.tensor([math.inf, -math.inf, *torch.randn(6)])
    case([5, 100], s=2, window_left=30, softcap=5.0, attn_sink=sink, sm_scale=-0.2)


def test_rows_at_odd_addresses():
    q, k, v = make(1, 4, 1, 1, 64, 40, [33], seed=1, device="cpu")
    odd = []
    for x in (q, k, v):
        wide = torch.full((*x.shape[:3], 69), math.nan, dtype=x.dtype)
        wide[..., 3:67] = x
        odd.append(wide[..., 3:67])
    assert same(run(q, k, v, 33), run(*odd, 33))


@pytest.mark.full
@pytest.mark.parametrize("d", [64, 80, 96, 112, 256])
def test_head_dims(d):
    case([7, 129], h_q=4, h_kv=1, d=d)


@pytest.mark.full
def test_float16():
    case([7, 129], h_q=4, h_kv=1, d=64, dtype=torch.float16)


@pytest.mark.full
@pytest.mark.parametrize("group,s,causal", [(1, 2, True), (16, 1, True), (4, 5, False), (8, 17, True)])
def test_many_rows(group, s, causal):
    case([3, 64, 150], h_q=2 * group, s=s, causal=causal)


@pytest.mark.full
def test_long_splits_and_stages():
    from cute_kernels.kernels.sm90.decode import choose

    n = 1300  # 16 splits of two steps
    q, k, v = make(1, 8, 8, 1, 64, n + 3, [n], seed=2, device="cpu")
    result = run(q, k, v, n)
    check(result, q, k, v, [n])
    for stages in (1, 3):
        variant = choose(q, k, v, n, True, -1, 0.0, None, None, None)._replace(stages=stages)
        assert same(result, run(q, k, v, n, variant=variant)), stages


@pytest.mark.full
@pytest.mark.parametrize("s,d", [(1, 64), (4, 128), (1, 80)])
def test_splits_per_cta_do_not_change_bits(s, d):
    """A CTA per split, several splits per CTA with and without others, all splits in one CTA."""
    from cute_kernels.kernels.sm90.decode import choose

    n = 560
    q, k, v = make(1, 5, 1, s, d, n + 3, [n], seed=2, device="cpu")
    variant = choose(q, k, v, n, True, -1, 0.0, None, None, None)._replace(split_cap=3 * 4 // (4 if s > 1 else 1))
    result = run(q, k, v, n, variant=variant)
    check(result, q, k, v, [n])
    for ctas, cluster, lengths in ((4, 0, n), (1, 0, n), (8, 0, [n]), (264, 0, n), (264, 0, [n])):
        other = variant._replace(ctas=ctas, cluster=cluster, device_length=lengths != n)
        assert same(result, run(q, k, v, lengths, variant=other)), (ctas, cluster)


@pytest.mark.full
@pytest.mark.parametrize("ctas,stages,cluster", [(264, 1, 0), (264, 2, 8), (1, 2, 0)])
def test_schedules_with_strict_checks(ctas, stages, cluster):
    from cute_kernels.kernels.sm90.decode import choose

    n = 300
    q, k, v = make(1, 4, 1, 1, 128, n + 3, [n], seed=3, device="cpu")
    variant = choose(q, k, v, n, True, -1, 0.0, None, None, None)._replace(split_cap=2, ctas=ctas, stages=stages, cluster=cluster)
    results = [
        run(q, k, v, n, variant=variant, emulation=dict(schedule=schedule, seed=seed, checks="strict"))
        for schedule, seed in (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2))
    ]
    check(results[0], q, k, v, [n])
    assert all(same(results[0], r) for r in results[1:])
