"""Grouped sparse prefill: pack consecutive tokens of a model with few heads per GPU into one row of up to 128 pseudo-heads.

A model served with 16 heads a GPU fills an eighth of a 128-head tile. Neighbouring tokens list nearly the same keys (the union of
eight lists of 2048 is about 2.4k keys on real prompts), so eight tokens x 16 heads attend to the union, each token masked to
its own list: every KV row is read once per group and no head is padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.ops import _common as c
from cute_kernels.ops.group_topk import MAX_GROUP, unpadded
from cute_kernels.ops.sparse_prefill import MAX_HEADS, sparse_prefill

_NAME = "grouped_sparse_prefill"


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
        group_size: tokens per group, 1 to 8, with group_size * p <= 128; None takes min(8, 128 // p).
        cu_seqlens_q: [requests + 1] int32 on the device; groups never straddle requests. Rows outside
            [cu_seqlens_q[0], cu_seqlens_q[-1]) give out 0, max_logits -inf, lse +inf.

    Returns (out [s, h, 512] bfloat16, max_logits [s, h] float32, lse [s, h] float32) in the caller's order, natural logarithm.

    Unlike `sparse_prefill`, a key that one token lists twice counts once. A NaN KV row that one token lists may reach the other
    tokens of its group, never another group. No host sync.

    Raises ValueError for a group_size that does not fit (naming the largest legal one), and what `sparse_prefill` raises.
    """
    c.check_tensor(_NAME, "q", q, (torch.bfloat16,), (None, None, None), q.device, "[s, h, d_qk]")
    s, h, d = q.shape
    if h > MAX_HEADS:
        c.fail(_NAME, "q", f"have at most {MAX_HEADS} heads", h)
    p = 1 << max(0, h - 1).bit_length()
    largest = min(MAX_GROUP, MAX_HEADS // p)
    if group_size is None:
        group_size = largest
    elif not 1 <= group_size <= largest:
        c.fail(_NAME, "group_size", f"lie in [1, {largest}] for {h} heads (group_size * {p} <= 128)", group_size)
    c.check_tensor(_NAME, "kv", kv, (torch.bfloat16,), (None, 1, d), q.device, "[s_kv, 1, d_qk]")
    c.check_tensor(_NAME, "indices", indices, (torch.int32,), (s, 1, None), q.device, "[s, 1, topk]")
    if attn_sink is not None:
        c.check_tensor(_NAME, "attn_sink", attn_sink, (torch.float32,), (h,), q.device, "[h]")
    c.check_grad(_NAME, q, kv, attn_sink)

    union, length, mask, token_map = unpadded(indices, kv.shape[0], group_size, topk_length, cu_seqlens_q)
    n = token_map.shape[0]
    # Whole groups in order need no gather: token i is slot i % G of group i // G.
    in_order = cu_seqlens_q is None
    if in_order and s % group_size == 0 and h == p:
        packed = q.reshape(n, group_size * p, d)
    else:
        packed = q.new_zeros((n * group_size, p, d))
        if in_order:
            packed[:s, :h] = q
        elif s:
            slots = token_map.view(-1)
            packed[:, :h] = torch.where((slots >= 0)[:, None, None], q[slots.clamp(min=0).long()], 0)
        packed = packed.view(n, group_size * p, d)
    sink = None
    if attn_sink is not None:
        sink = torch.nn.functional.pad(attn_sink, (0, p - h)).repeat(group_size)
    out, max_logits, lse = sparse_prefill(
        packed, kv, union, sm_scale, attn_sink=sink, topk_length=length, head_group_mask=mask, head_group_size=p
    )
    results = [t.view(n * group_size, p, *t.shape[2:])[:, :h] for t in (out, max_logits, lse)]
    if in_order:
        return tuple(t[:s].contiguous() for t in results)
    # Where each query row went; rows in no group read one extra row that holds the empty result.
    slots = token_map.view(-1).long()
    where = torch.full((s + 1,), n * group_size, dtype=torch.long, device=q.device)
    where.scatter_(0, torch.where(slots >= 0, slots, s), torch.arange(n * group_size, device=q.device))
    where = where[:s]
    ungrouped = where == n * group_size
    if n == 0:
        empty = (q.new_zeros((s, h, out.shape[-1])), max_logits.new_full((s, h), -torch.inf), lse.new_full((s, h), torch.inf))
        return empty
    picked = [t[where.clamp(max=n * group_size - 1)] for t in results]
    for t, value in zip(picked, (0.0, -torch.inf, torch.inf)):
        t.masked_fill_(ungrouped.view(-1, *[1] * (t.dim() - 1)), value)
    return tuple(picked)
