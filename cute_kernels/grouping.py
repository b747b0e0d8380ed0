"""Grouped sparse prefill: pack consecutive tokens of a model with few heads per GPU into one row of up to 128 pseudo-heads.

A model served with 16 heads a GPU fills an eighth of a 128-head tile. Neighbouring tokens list nearly the same keys (the union of
eight lists of 2048 is about 2.4k keys on real prompts), so eight tokens x 16 heads attend to the union, each token masked to
its own list: every KV row is read once per group and no head is padding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cute_kernels.jit.target import current_target
from cute_kernels.ops import _common as c
from cute_kernels.ops.group_topk import MAX_GROUP, unpadded
from cute_kernels.ops.sparse_prefill import D_V, MAX_HEADS, sparse_prefill

_NAME = "grouped_sparse_prefill"
# Rows (tokens x padded heads) of a group that ran fastest, by architecture; elsewhere as many as fit. On an H200, 21,000 tokens
# with 16 heads took 8.17, 4.61, 2.59 and 2.77 ms in groups of 1, 2, 4 and 8: a CTA of that kernel has 64 rows.
_ROWS = {"sm_90a": 64}


def _rows(device: torch.device) -> int:
    target = current_target(device)
    return MAX_HEADS if target is None else _ROWS.get(target.arch, MAX_HEADS)


# torch.compiler.assume_constant_result does this, after importing dynamo (a second). Tracing asks once: a device does not change.
_rows._dynamo_marked_constant = True


def grouped_sparse_prefill(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    *,
    group_size: int | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`sparse_prefill` for few heads: the same per-token result, computed for groups of consecutive tokens at once.

    Args:
        q: [s, h, d_qk] bfloat16, d_qk 576 or 512. h is padded to p = the next power of two.
        kv, indices, sm_scale, topk_length, attn_sink: as `sparse_prefill` takes them, per token.
        group_size: tokens per group, 1 to 8, with group_size * p <= 128; None takes what was measured to be fastest, at most 8:
            64 // p on Hopper, else 128 // p.
        cu_seqlens_q: [requests + 1] int32 on the device; groups never straddle requests. Rows outside
            [cu_seqlens_q[0], cu_seqlens_q[-1]) give out 0, max_logits -inf, lse +inf.

    Returns (out [s, h, 512] bfloat16, max_logits [s, h] float32, lse [s, h] float32) in the caller's order, natural logarithm.

    Unlike `sparse_prefill`, a key that one token lists twice counts once. A NaN KV row that one token lists may reach the other
    tokens of its group, never another group. No host sync.

    Raises ValueError for a group_size that does not fit (naming the largest legal one), and what `sparse_prefill` raises.
    """
    c.check_given(_NAME, q=q, kv=kv, indices=indices)
    c.check_tensor(_NAME, "q", q, (torch.bfloat16,), (None, None, None), q.device, "[s, h, d_qk]")
    s, h, d = q.shape
    if h > MAX_HEADS:
        c.fail(_NAME, "q", f"have at most {MAX_HEADS} heads", h)
    p = 1 << max(0, h - 1).bit_length()
    largest = min(MAX_GROUP, MAX_HEADS // p)
    if group_size is None:
        group_size = max(1, min(MAX_GROUP, _rows(q.device) // p))
    elif not 1 <= group_size <= largest:
        c.fail(_NAME, "group_size", f"lie in [1, {largest}] for {h} heads (group_size * {p} <= 128)", group_size)
    c.check_tensor(_NAME, "kv", kv, (torch.bfloat16,), (None, 1, d), q.device, "[s_kv, 1, d_qk]")
    c.check_tensor(_NAME, "indices", indices, (torch.int32,), (s, 1, None), q.device, "[s, 1, topk]")
    if attn_sink is not None:
        c.check_tensor(_NAME, "attn_sink", attn_sink, (torch.float32,), (h,), q.device, "[h]")
    c.check_grad(_NAME, q, kv, attn_sink)

    union, length, mask, token_map = unpadded(indices, kv.shape[0], group_size, topk_length, cu_seqlens_q)
    n = token_map.shape[0]
    sink = None
    if attn_sink is not None:
        sink = torch.nn.functional.pad(attn_sink, (0, p - h)).repeat(group_size)

    def attend(packed: Tensor, groups: slice | None = None, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        some = (union, length, mask) if groups is None else (union[groups], length[groups], mask[groups])
        return sparse_prefill(
            packed.view(-1, group_size * p, d), kv, some[0], sm_scale, attn_sink=sink, topk_length=some[1],
            head_group_mask=some[2], head_group_size=p, out=out,
        )  # fmt: skip

    if cu_seqlens_q is None:
        return _in_order(q, p, group_size, n, attend)
    return _by_map(q, p, group_size, n, token_map, attend)


def _in_order(q: Tensor, p: int, group_size: int, n: int, attend: Callable) -> tuple[Tensor, Tensor, Tensor]:
    """Token i is slot i % G of group i // G: where heads need no padding, whole groups are a view of q."""
    s, h, d = q.shape
    whole = s // group_size if h == p else 0
    if whole == n:
        return tuple(t.view(s, h, *t.shape[2:]) for t in attend(q.reshape(n, group_size * p, d)))
    if whole == 0 or torch.compiler.is_compiling():
        packed = q.new_zeros((n * group_size, p, d))
        packed[:s, :h] = q
        results = attend(packed)
    else:
        # The last group has fewer tokens than slots. A launch of its own takes less time than a copy of q.
        last = q.new_zeros((group_size, p, d))
        last[: s - whole * group_size] = q[whole * group_size :]
        out = q.new_empty((n, group_size * p, D_V))
        _, *stats = attend(q[: whole * group_size].reshape(-1, p, d), slice(0, whole), out[:whole])
        _, *last_stats = attend(last, slice(whole, n), out[whole:])
        results = out, *(torch.cat(pair) for pair in zip(stats, last_stats))
    return tuple(t.view(n * group_size, p, *t.shape[2:])[:s, :h].contiguous() for t in results)


def _by_map(
    q: Tensor, p: int, group_size: int, n: int, token_map: Tensor, attend: Callable
) -> tuple[Tensor, Tensor, Tensor]:
    """Groups as token_map names them. An empty slot attends to nothing, so it may hold any row of q."""
    s, h, d = q.shape
    slots = token_map.view(-1)
    if n == 0 or s == 0:
        stats = [q.new_full((s, h), value, dtype=torch.float32) for value in (-torch.inf, torch.inf)]
        return q.new_zeros((s, h, D_V)), *stats
    packed = q.index_select(0, slots.clamp(min=0))
    if h != p:
        packed = torch.nn.functional.pad(packed, (0, 0, 0, p - h))
    out = q.new_empty((n + 1, group_size * p, D_V))
    out[n] = 0  # what rows in no group read
    _, max_logits, lse = attend(packed, out=out[:n])
    # Where each query row went.
    nowhere = n * group_size
    where = torch.full((s + 1,), nowhere, dtype=torch.long, device=q.device)
    where.scatter_(0, torch.where(slots >= 0, slots, s).long(), torch.arange(nowhere, device=q.device))
    where = where[:s]
    results = [out.view(nowhere + group_size, p, D_V)[:, :h][where]]
    for t, value in ((max_logits, -torch.inf), (lse, torch.inf)):
        picked = t.view(nowhere, p)[:, :h][where.clamp(max=nowhere - 1)]
        results.append(picked.masked_fill_((where == nowhere)[:, None], value))
    return tuple(results)
