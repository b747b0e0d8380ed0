"""Hypothesis: shapes, strides, garbage indices, poisoned memory."""

import math

import hypothesis.strategies as st
import oracles
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import cute_kernels as ck

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
LONG = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))


def quick_and_long(strategies, case):
    """Two tests over one case: a repeatable short one, and a long random one for --nightly."""

    def quick(**drawn):
        case(**drawn)

    def long(**drawn):
        case(**drawn)

    return strategies(QUICK(quick)), pytest.mark.nightly(strategies(LONG(long)))


def garbage(generator, shape, s_kv):
    """Valid indices and every kind of invalid one."""
    valid = torch.randint(0, max(s_kv, 1), shape, generator=generator)
    bad = torch.tensor(oracles.INVALID + (s_kv,))[torch.randint(0, len(oracles.INVALID) + 1, shape, generator=generator)]
    return torch.where(torch.rand(shape, generator=generator) < 0.2, bad, valid).int()


def strided(t, generator, unit):
    """The same values behind larger strides, the gaps poisoned."""
    pads = [int(torch.randint(0, 2, (), generator=generator)) for _ in t.shape]
    pads[-1] *= unit
    buffer = torch.full([n + p for n, p in zip(t.shape, pads)], math.nan, dtype=t.dtype)
    view = buffer[tuple(slice(0, n) for n in t.shape)]
    view.copy_(t)
    return view


SPARSE = given(
    seed=st.integers(0, 2**31), s_q=st.integers(0, 5), h_q=st.integers(1, 40), s_kv=st.integers(0, 60),
    topk=st.integers(0, 150), d=st.sampled_from([512, 576]), sink=st.booleans(), length=st.booleans(), masked=st.booleans(),
    scale=st.sampled_from([0.5, 0.0, -1.0, 192**-0.5]),
)  # fmt: skip


def sparse_case(seed, s_q, h_q, s_kv, topk, d, sink, length, masked, scale):
    g = torch.Generator().manual_seed(seed)
    group = 16
    if masked:
        topk = 128 * (topk // 100 + 1)
        group = 1 << int(torch.randint(0, 5, (), generator=g))
        h_q = group * min(8, max(1, h_q // group))
    q = strided((torch.randn(s_q, h_q, d, generator=g) / 10).bfloat16(), g, 8)
    clean = (torch.randn(s_kv, 1, d, generator=g) / 10).bfloat16()
    indices = garbage(g, (s_q, 1, topk), s_kv)
    attn_sink = torch.randn(h_q, generator=g) if sink else None
    topk_length = torch.randint(0, topk + 1, (s_q,), generator=g).int() if length else None
    mask = torch.randint(0, 256, (s_q, topk // 128, 128), generator=g, dtype=torch.uint8) if masked else None
    used = torch.zeros(s_kv, dtype=torch.bool)
    listed = indices[:, 0].long()
    used[listed[(listed >= 0) & (listed < s_kv)]] = True
    kv = clean.clone()
    kv[~used] = math.nan  # a row that nobody lists may hold anything
    extra = dict(attn_sink=attn_sink, topk_length=topk_length)
    got = ck.sparse_prefill(q, strided(kv, g, 8), indices, scale, head_group_mask=mask, head_group_size=group, **extra)
    oracles.assert_flashmla(got, oracles.sparse_prefill(q, clean, indices, scale, mask=mask, group_size=group, **extra))


test_sparse_prefill, test_sparse_prefill_long = quick_and_long(SPARSE, sparse_case)

ACTIVE = given(
    seed=st.integers(0, 2**31), b=st.integers(0, 3), h_kv=st.integers(1, 3), group=st.integers(1, 5), s=st.integers(0, 9),
    d=st.sampled_from([1, 8, 20, 64]), capacity=st.integers(0, 140), causal=st.booleans(), window=st.integers(-1, 30),
    softcap=st.sampled_from([0.0, 3.0]), sink=st.booleans(), append=st.booleans(),
)  # fmt: skip


def active_case(seed, b, h_kv, group, s, d, capacity, causal, window, softcap, sink, append):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, capacity + 1, (b,), generator=g).int()
    q = strided(torch.randn(b, h_kv * group, s, d, generator=g), g, 3)
    k, v = (torch.randn(b, h_kv, capacity, d, generator=g) for _ in range(2))
    options = dict(causal=causal, window_left=window, softcap=softcap)
    options["attn_sink"] = torch.randn(h_kv * group, generator=g) if sink else None
    full_k, full_v = k.clone(), v.clone()
    k, v = strided(k, g, 3), strided(v, g, 3)
    for i in range(b):
        k[i, :, lengths[i] :] = math.nan
        v[i, :, lengths[i] :] = math.nan
    if append:
        k_new, v_new = (strided(torch.randn(b, h_kv, s, d, generator=g), g, 3) for _ in range(2))
        for i in range(b):
            for row in range(s):
                at = int(lengths[i]) - s + row
                if at >= 0:
                    full_k[i, :, at], full_v[i, :, at] = k_new[i, :, row], v_new[i, :, row]
        out, lse = ck.active_attention_append(q, k_new, v_new, k, v, lengths, **options)
        for i in range(b):
            n = int(lengths[i])
            assert torch.equal(k[i, :, :n], full_k[i, :, :n]) and torch.isnan(k[i, :, n:]).all()
    else:
        out, lse = ck.active_attention(q, k, v, lengths, **options)
    want, want_lse = oracles.active_attention(q, full_k, full_v, lengths.tolist(), **options)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


test_active_attention, test_active_attention_long = quick_and_long(ACTIVE, active_case)

GROUPED = given(
    seed=st.integers(0, 2**31), s=st.integers(0, 20), h=st.integers(1, 20), s_kv=st.integers(0, 70), topk=st.integers(0, 50),
    requests=st.one_of(st.none(), st.integers(0, 4)), length=st.booleans(), size=st.integers(1, 4),
)  # fmt: skip


def grouped_case(seed, s, h, s_kv, topk, requests, length, size):
    g = torch.Generator().manual_seed(seed)
    q = (torch.randn(s, h, 512, generator=g) / 10).bfloat16()
    kv = (torch.randn(s_kv, 1, 512, generator=g) / 10).bfloat16()
    # Distinct valid entries per list: the per-token operator counts a repeated key twice, the grouped one once.
    indices = torch.full((s, 1, topk), -1, dtype=torch.int32)
    for i in range(s):
        n = min(topk, s_kv)
        indices[i, 0, :n] = torch.randperm(s_kv, generator=g)[:n].int()
    bad = garbage(g, (s, 1, topk), 0)
    indices = torch.where(torch.rand(s, 1, topk, generator=g) < 0.2, bad.clamp(max=-1), indices)
    topk_length = torch.randint(0, topk + 1, (s,), generator=g).int() if length else None
    cu = None
    if requests is not None:
        cu = torch.randint(0, s + 1, (requests + 1,), generator=g).sort().values.int()
    got = ck.grouped_sparse_prefill(q, kv, indices, 0.5, group_size=size, topk_length=topk_length, cu_seqlens_q=cu)
    out, max_logits, lse = oracles.sparse_prefill(q, kv, indices, 0.5, topk_length=topk_length)
    if cu is not None:
        inside = torch.zeros(s, dtype=torch.bool)
        inside[int(cu[0]) : int(cu[-1])] = True
        out[~inside], max_logits[~inside], lse[~inside] = 0, -math.inf, math.inf
    oracles.assert_flashmla(got, (out, max_logits, lse))


test_grouped_sparse_prefill, test_grouped_sparse_prefill_long = quick_and_long(GROUPED, grouped_case)
