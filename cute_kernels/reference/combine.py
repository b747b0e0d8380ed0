"""The meaning of `combine`: partial attention results over disjoint key ranges become the result over all keys."""

from __future__ import annotations

import torch
from torch import Tensor


def combine(
    partial_out: Tensor,
    partial_lse: Tensor,
    *,
    attn_sink: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Merge split attention results.

    partial_out [n_split, rows, d], any float dtype: each part's normalised output. partial_lse [n_split, rows] float32: natural
    log of each part's sum of exponentials; +inf and -inf both mark a part without keys, whose output may hold anything, NaN
    included. attn_sink [h] float32, rows a multiple of h: row r has sink r % h, in the denominator only. out_dtype: default
    partial_out's.

    Returns out [rows, d] and lse [rows] (compute_dtype, natural log, sink left out). A row whose parts are all empty: 0 and -inf.
    """
    lse = partial_lse.to(compute_dtype)
    empty = torch.isinf(lse)
    lse = lse.masked_fill(empty, -torch.inf)
    rows = partial_out.shape[1]
    top = lse.amax(0) if lse.shape[0] else lse.new_full((rows,), -torch.inf)
    top = top.masked_fill(torch.isneginf(top), 0.0)
    weight = torch.exp(lse - top)
    total = weight.sum(0)
    denominator = total
    if attn_sink is not None:
        denominator = total + torch.exp(attn_sink.to(compute_dtype).repeat(rows // attn_sink.shape[0]) - top)
    none = empty.all(0)
    values = partial_out.to(compute_dtype).masked_fill(empty[..., None], 0.0)
    out = (weight[..., None] * values).sum(0) / denominator.masked_fill(none, 1.0)[:, None]
    out = out.masked_fill(none[:, None], 0.0)
    total_lse = torch.where(none, -torch.inf, top + torch.log(total))
    return out.to(out_dtype or partial_out.dtype), total_lse
