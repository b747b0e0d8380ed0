"""group_topk against Python sets; grouped_sparse_prefill against per-token attention in float64."""

import math
import time

import oracles
import pytest
import torch

import cute_kernels


def check_lists(indices, s_kv, group_size, topk_length=None, cu=None, max_union=None):
    """Every property of the contract, with sets."""
    s_q, _, topk = indices.shape
    cu_tensor = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    union, length, mask, token_map = cute_kernels.group_topk(
        indices, s_kv, group_size, topk_length=topk_length, cu_seqlens_q=cu_tensor, max_union=max_union
    )
    groups = []
    for a, b in zip(cu[:-1], cu[1:]) if cu is not None else [(0, s_q)]:
        groups += [list(range(i, min(i + group_size, b))) for i in range(a, b, group_size)]
    n = -(-s_q // group_size) + (0 if cu is None else len(cu) - 1)
    capacity = min(group_size * topk, s_kv) if max_union is None else min(group_size * topk, s_kv, max_union)
    u = 128 * -(-capacity // 128)
    assert union.shape == (n, 1, u) and length.shape == (n,) and mask.shape == (n, u // 128, 128)
    assert token_map.shape == (n, group_size)
    assert all(t.dtype == torch.int32 for t in (union, length, token_map)) and mask.dtype == torch.uint8
    for i in range(n):
        tokens = groups[i] if i < len(groups) else []
        assert token_map[i].tolist() == tokens + [-1] * (group_size - len(tokens))
        lists = []
        for t in tokens:
            limit = topk if topk_length is None else int(topk_length[t])
            lists.append({int(v) for v in indices[t, 0, :limit] if 0 <= int(v) < s_kv})
        want = sorted(set().union(*lists)) if lists else []
        assert int(length[i]) == len(want)
        kept = want[:u]
        assert union[i, 0].tolist() == kept + [-1] * (u - len(kept))
        for slot in range(8):
            has = {kept[p] for p in range(len(kept)) if oracles.mask_bit(mask[i], slot, p)}
            assert has == (lists[slot] & set(kept) if slot < len(lists) else set())
            assert not any(oracles.mask_bit(mask[i], slot, p) for p in range(len(kept), u))
    return union, length, mask, token_map


@pytest.mark.parametrize("group_size", range(1, 9))
def test_every_group_size_with_a_ragged_last_group(group_size):
    indices = torch.randint(-20, 120, (19, 1, 30), dtype=torch.int32)
    indices[5] = -1  # an empty list
    indices[6, 0, 10:] = indices[6, 0, :20].clone()  # duplicates
    indices[7, 0, :8] = torch.tensor(oracles.INVALID + (100,), dtype=torch.int64).int()
    check_lists(indices, 100, group_size, torch.randint(0, 31, (19,), dtype=torch.int32))


@pytest.mark.parametrize("cu", [[0, 19], [0, 0, 5, 6, 19], [0, 8, 16], [3, 7, 7, 12], [0], [0, 0], [0, 19, 19, 19]])
def test_requests_are_never_straddled(cu):
    check_lists(torch.randint(0, 60, (19, 1, 12), dtype=torch.int32), 60, 4, cu=cu)


@pytest.mark.parametrize("s_q,topk,s_kv", [(0, 5, 9), (5, 0, 9), (5, 4, 0), (1, 1, 1), (9, 300, 10_000)])
def test_sizes(s_q, topk, s_kv):
    check_lists(torch.randint(-2, s_kv + 2, (s_q, 1, topk), dtype=torch.int32), s_kv, 8)


def test_indices_near_two_to_the_31():
    s_kv = 2**31 - 1
    indices = torch.randint(2**31 - 40, 2**31 - 1, (11, 1, 20), dtype=torch.int32)
    indices[:, :, 0] = 2**31 - 1  # the first invalid one
    indices[:, :, 1] = 2**31 - 2  # the last valid one
    indices[:, :, 2] = -(2**31)
    check_lists(indices, s_kv, 8)


def test_max_union():
    indices = torch.randint(0, 1000, (16, 1, 100), dtype=torch.int32)
    check_lists(indices, 1000, 8, max_union=800)
    with pytest.raises(ValueError, match="max_union must hold the longest union"):
        cute_kernels.group_topk(indices, 1000, 8, max_union=128)


def test_malformed_request_bounds_stay_in_range():
    indices = torch.randint(0, 50, (10, 1, 6), dtype=torch.int32)
    for cu in ([5, 2, 9], [-3, 4, 100], [0, 2**31 - 1], [7, 7, 3]):
        _, _, _, token_map = cute_kernels.group_topk(indices, 50, 4, cu_seqlens_q=torch.tensor(cu, dtype=torch.int32))
        rows = token_map[token_map >= 0].tolist()
        assert len(set(rows)) == len(rows) and all(0 <= r < 10 for r in rows)


def test_21000_tokens_in_time():
    lists = torch.stack([torch.randperm(21000)[:2048] for _ in range(32)]).int()
    indices = lists[torch.arange(21000) % 32][:, None].contiguous()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second one only spins while other tests take its core
    try:
        start = time.process_time()
        cute_kernels.group_topk(indices, 21000, 8)
        assert time.process_time() - start < 10  # 2 s; 0.4 s by the clock with two idle cores
    finally:
        torch.set_num_threads(threads)


# ---- grouped prefill ----


def per_token(q, kv, indices, sm_scale, topk_length=None, attn_sink=None):
    return oracles.sparse_prefill(q, kv, indices, sm_scale, topk_length=topk_length, attn_sink=attn_sink)


def test_the_published_case_and_what_the_mask_is_worth():
    torch.manual_seed(0)
    indices = oracles.overlapping_lists(64, 2048, 8192, 0.0245)
    q = (torch.randn(64, 16, 576) / 10).bfloat16()
    kv = (torch.randn(8192, 1, 576) / 10).bfloat16()
    _, length, _, _ = cute_kernels.group_topk(indices, 8192, 8)
    assert 2300 < int(length.float().mean()) < 2500  # about 2395 of 8 x 2048
    want = per_token(q, kv, indices, 0.5)
    got = cute_kernels.grouped_sparse_prefill(q, kv, indices, 0.5, group_size=8)
    assert oracles.relative_error(got[0], want[0]) <= 3e-3
    assert oracles.relative_error(got[1], want[1]) < 1e-5 and oracles.relative_error(got[2], want[2]) < 1e-5
    union, length, _, _ = cute_kernels.group_topk(indices, 8192, 8)
    without = cute_kernels.sparse_prefill(q.reshape(8, 128, 576), kv, union, 0.5, topk_length=length)[0]
    assert oracles.relative_error(without.view(64, 16, 512), want[0]) > 0.1


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12, 16, 32, 64, 100, 128])
def test_any_head_count_that_fits(heads):
    inputs = oracles.sparse_inputs(11, heads, 150, 60, 576, seed=heads, sink=True, length=True)
    q, kv, indices = inputs["q"], inputs["kv"], inputs["indices"]
    rest = {k: inputs[k] for k in ("attn_sink", "topk_length")}
    got = cute_kernels.grouped_sparse_prefill(q, kv, indices, 0.5, **rest)
    oracles.assert_flashmla(got, per_token(q, kv, indices, 0.5, **rest))


@pytest.mark.parametrize("group_size", range(1, 9))
@pytest.mark.parametrize("cu", [None, [0, 3, 3, 14, 20], [2, 9], [0], [0, 5]])
def test_group_sizes_and_requests(group_size, cu):
    inputs = oracles.sparse_inputs(21, 6, 90, 40, 512, seed=group_size, sink=True)
    q, kv, indices, sink = inputs["q"], inputs["kv"], inputs["indices"], inputs["attn_sink"]
    bounds = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    got = cute_kernels.grouped_sparse_prefill(q, kv, indices, 0.5, group_size=group_size, attn_sink=sink, cu_seqlens_q=bounds)
    out, max_logits, lse = per_token(q, kv, indices, 0.5, attn_sink=sink)
    if cu is not None:
        outside = torch.ones(21, dtype=torch.bool)
        outside[cu[0] : cu[-1]] = False
        out[outside], max_logits[outside], lse[outside] = 0, -math.inf, math.inf
    oracles.assert_flashmla(got, (out, max_logits, lse))


def test_duplicates_of_one_token_merge():
    inputs = oracles.sparse_inputs(8, 16, 60, 40, 576)
    once = inputs["indices"][:, :, :20].contiguous()
    twice = torch.cat([once, once], dim=2)
    args = inputs["q"], inputs["kv"]
    a = cute_kernels.grouped_sparse_prefill(*args, once, 0.5)
    b = cute_kernels.grouped_sparse_prefill(*args, twice, 0.5)
    torch.testing.assert_close(a[2], b[2], rtol=1e-6, atol=1e-6)


def test_a_nan_row_never_reaches_another_group():
    inputs = oracles.sparse_inputs(16, 16, 400, 20, 576)
    indices = inputs["indices"]
    kv = inputs["kv"].clone()
    indices[3, 0, 0] = 399
    others = [i for i in range(16) if i != 3]
    indices[others] = indices[others].masked_fill(indices[others] == 399, 398)
    kv[399] = math.nan
    out, _, _ = cute_kernels.grouped_sparse_prefill(inputs["q"], kv, indices, 0.5)
    assert torch.isnan(out[3]).all() and torch.isfinite(out[8:]).all()


@pytest.mark.parametrize("heads,group_size,largest", [(16, 9, 8), (17, 5, 4), (64, 3, 2), (128, 2, 1), (16, 0, 8)])
def test_a_group_that_does_not_fit_names_the_largest(heads, group_size, largest):
    inputs = oracles.sparse_inputs(2, heads, 20, 8, 576)
    with pytest.raises(ValueError, match=rf"group_size must lie in \[1, {largest}\]"):
        cute_kernels.grouped_sparse_prefill(inputs["q"], inputs["kv"], inputs["indices"], 0.5, group_size=group_size)


@pytest.mark.parametrize("cu", [None, [0, 1]])
@pytest.mark.parametrize("tokens", [0, 1])
def test_none_or_one_token(tokens, cu):
    inputs = oracles.sparse_inputs(tokens, 16, 30, 10, 576)
    bounds = None if cu is None else torch.tensor([0, tokens], dtype=torch.int32)
    got = cute_kernels.grouped_sparse_prefill(inputs["q"], inputs["kv"], inputs["indices"], 0.5, cu_seqlens_q=bounds)
    oracles.assert_flashmla(got, per_token(inputs["q"], inputs["kv"], inputs["indices"], 0.5))


def test_kv_of_two_to_the_31_rows():
    kv = (torch.randn(1, 1, 512) / 10).bfloat16().expand(2**31 - 1, 1, 512)
    q = (torch.randn(9, 4, 512) / 10).bfloat16()
    indices = torch.randint(2**31 - 300, 2**31 - 1, (9, 1, 50), dtype=torch.int32)
    indices[:, :, :2] = torch.tensor([2**31 - 1, -(2**31)]).int()
    out, _, lse = cute_kernels.grouped_sparse_prefill(q, kv, indices, 0.5)
    distinct = torch.tensor([len({int(v) for v in row[0] if 0 <= v < 2**31 - 1}) for row in indices])
    x = 0.5 * (q.double() @ kv[0, 0].double())
    torch.testing.assert_close(lse.double(), x + distinct.double().log()[:, None], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, kv[0, 0].expand(9, 4, 512), rtol=2**-7, atol=1e-5)


def test_the_default_group_fills_the_rows_that_ran_fastest():
    from cute_kernels import grouping
    from cute_kernels.jit import Target, push_target

    assert grouping._rows(torch.device("cpu")) == 128
    with push_target(Target("sm_90a", 132)):
        assert grouping._rows(torch.device("cpu")) == 64
    with push_target(Target("sm_100a", 148)):
        assert grouping._rows(torch.device("cpu")) == 128
