"""Independent float64 oracles, written row by row from the operators' definitions, and the tolerances of FlashMLA's own tests.

They share no code with cute_kernels.reference: sets and loops instead of masks and gathers.
"""

from __future__ import annotations

import math

import numpy as np
import torch

INVALID = (-(2**31), -123456, -1, 114514, 1919810, 2147480000, 2**31 - 1)


def mask_bit(mask_row, group: int, position: int) -> bool:
    block, j = divmod(position, 128)
    return bool((int(mask_row[block, 16 * group + j // 8]) >> (j % 8)) & 1)


def sparse_prefill(q, kv, indices, sm_scale, *, attn_sink=None, topk_length=None, mask=None, group_size=16):
    """(out, max_logits, lse) in float64, one row and one head group at a time."""
    s_q, h_q, _ = q.shape
    s_kv, topk = kv.shape[0], indices.shape[2]
    out = np.zeros((s_q, h_q, 512))
    max_logits = np.full((s_q, h_q), -np.inf)
    lse = np.full((s_q, h_q), np.inf)
    ids_all = indices[:, 0].numpy().astype(np.int64)
    rows = kv[:, 0].double().numpy() if s_kv <= 1 << 16 else None
    for i in range(s_q):
        limit = topk if topk_length is None else min(max(int(topk_length[i]), 0), topk)
        groups = [(0, h_q)] if mask is None else [(g * group_size, (g + 1) * group_size) for g in range(h_q // group_size)]
        q_row = q[i].double().numpy()
        for g, (a, b) in enumerate(groups):
            positions = np.arange(limit)
            ids = ids_all[i, :limit]
            keep = (ids >= 0) & (ids < s_kv)
            if mask is not None:
                row_mask = mask[i].numpy()
                keep &= np.array([mask_bit(row_mask, g, int(p)) for p in positions], dtype=bool)
            ids = ids[keep]
            if len(ids) == 0:
                continue
            keys = rows[ids] if rows is not None else kv[torch.from_numpy(ids), 0].double().numpy()
            x = sm_scale * (q_row[a:b] @ keys.T)
            top = x.max(axis=1)
            weights = np.exp(x - top[:, None])
            total = weights.sum(axis=1)
            max_logits[i, a:b] = top
            lse[i, a:b] = top + np.log(total)
            value = weights @ keys[:, :512]
            for h in range(a, b):
                extra = 0.0
                if attn_sink is not None:
                    gap = float(attn_sink[h]) - top[h - a]
                    extra = math.inf if gap > 700 else math.exp(gap)
                out[i, h] = value[h - a] / (total[h - a] + extra)
    return torch.from_numpy(out), torch.from_numpy(max_logits), torch.from_numpy(lse)


def active_attention(
    q, k_cache, v_cache, lengths, *, sm_scale=None, causal=True, window_left=-1, softcap=0.0, attn_sink=None
):
    """(out [B, Hq, S, D], lse [B, Hq, S]) in float64; `lengths` a list of ints. Keys gathered one query row at a time."""
    b, h_q, s, d = q.shape
    group = h_q // k_cache.shape[1] if h_q else 1
    scale = 1 / math.sqrt(d) if sm_scale is None else sm_scale
    out = torch.zeros(b, h_q, s, d, dtype=torch.float64)
    lse = torch.full((b, h_q, s), -math.inf, dtype=torch.float64)
    for i in range(b):
        for row in range(s):
            p = lengths[i] - s + row
            last = min(lengths[i] - 1, p) if causal else lengths[i] - 1
            first = max(0, p - window_left) if window_left >= 0 else 0
            if last < first:
                continue
            for h in range(h_q):
                k = k_cache[i, h // group, first : last + 1].double()
                v = v_cache[i, h // group, first : last + 1].double()
                x = (k @ q[i, h, row].double()) * scale
                if softcap > 0:
                    x = softcap * torch.tanh(x / softcap)
                lse[i, h, row] = torch.logsumexp(x, 0)
                denominator = lse[i, h, row]
                if attn_sink is not None:
                    denominator = torch.logaddexp(denominator, attn_sink[h].double())
                out[i, h, row] = torch.exp(x - denominator) @ v
    return out, lse


def _passes(got, want, abs_tol, rel_tol, name):
    got, want = got.double(), want.double()
    for kind in (torch.isposinf, torch.isneginf, torch.isnan):
        assert torch.equal(kind(got), kind(want)), f"{name}: {kind.__name__} differs"
    finite = torch.isfinite(want)
    a, b = got[finite], want[finite]
    gap = (a - b).abs()
    bad = (gap >= abs_tol) & (gap >= rel_tol * b.abs())
    assert not bad.any(), f"{name}: {int(bad.sum())} of {bad.numel()} off, worst {gap[bad].max()}"
    return a, b


def assert_flashmla(got, want):
    """FlashMLA's tolerances: an element passes if its absolute or its relative error holds; infinities equal; cosine difference
    of out below 7e-6. bf16 rounding of out is 2**-9 relative, an eighth of 3.01/128."""
    a, b = _passes(got[0], want[0], 8e-4, 3.01 / 128, "out")
    if b.numel() and float(b.square().sum()) > 0:
        cos = 1 - 2 * float((a * b).sum()) / float(a.square().sum() + b.square().sum())
        assert cos < 7e-6, f"out: cosine difference {cos}"
    _passes(got[1], want[1], 1e-6, 2.01 / 65536, "max_logits")
    _passes(got[2], want[2], 1e-6, 2.01 / 65536, "lse")


def relative_error(a, b) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def sparse_inputs(s_q, h_q, s_kv, topk, d_qk, *, seed=0, sink=False, length=False, invalid_rows=0.0, strided=False):
    """FlashMLA's test distribution: values near randn/10, unique random lists padded with out-of-range values of every size."""
    g = torch.Generator().manual_seed(seed)

    def values(*shape):
        x = torch.randn(shape, generator=g) / 10 + (torch.rand(shape, generator=g) - 0.5) / 10
        return x.clamp(-10, 10).bfloat16()

    pad = 128 if strided else 0
    q = values(s_q, h_q + (1 if strided else 0), d_qk + pad)[:, :h_q, :d_qk]
    kv = values(s_kv, 1, d_qk + pad)[..., :d_qk]
    indices = torch.empty(s_q, 1, topk, dtype=torch.int32)
    bad = torch.tensor(INVALID + (s_kv,), dtype=torch.int64)
    for i in range(s_q):
        perm = torch.randperm(s_kv, generator=g)[:topk]
        fill = bad[torch.randint(0, len(bad), (topk - perm.numel(),), generator=g)]
        row = torch.cat([perm, fill])
        row = row[torch.randperm(topk, generator=g)]
        if float(torch.rand((), generator=g)) < invalid_rows:
            row = bad[torch.randint(0, len(bad), (1,), generator=g)].expand(topk)
        indices[i, 0] = row.int()
    attn_sink = None
    if sink:
        attn_sink = torch.randn(h_q, generator=g)
        kind = torch.rand(h_q, generator=g)
        attn_sink[kind < 0.3] = -math.inf
        attn_sink[kind > 0.7] = math.inf
    topk_length = torch.randint(0, topk + 1, (s_q,), generator=g).int() if length else None
    return dict(q=q, kv=kv, indices=indices, attn_sink=attn_sink, topk_length=topk_length)


def overlapping_lists(tokens, topk, s_kv, swap, seed=0):
    """int32 [tokens, 1, topk]: list 0 random, each next one swaps the fraction `swap` of its neighbour's keys for unused ones."""
    g = torch.Generator().manual_seed(seed)
    current = torch.randperm(s_kv, generator=g)[:topk]
    rows = [current]
    n = round(swap * topk)
    for _ in range(tokens - 1):
        outside = torch.ones(s_kv, dtype=torch.bool)
        outside[current] = False
        fresh = outside.nonzero()[:, 0]
        fresh = fresh[torch.randperm(len(fresh), generator=g)[:n]]
        current = current.clone()
        current[torch.randperm(topk, generator=g)[:n]] = fresh
        rows.append(current)
    return torch.stack(rows).int()[:, None]
