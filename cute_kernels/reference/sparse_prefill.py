"""Sparse prefill, exactly: gather, scores, softmax, weighted sum, in chunks of query rows and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.reference._exact import exact

# Bytes of gathered keys alive at once. At 64 MiB all temporaries of a chunk (gathered bf16 and float rows, scores, weights) stay
# near 200 MiB at topk 2048, d 576, 128 heads, and the matrix products are long enough to run at full rate.
_CHUNK_BYTES = 64 << 20


def sparse_prefill(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    *,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    head_group_mask: Tensor | None = None,
    head_group_size: int = 16,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """`cute_kernels.sparse_prefill` for any float dtype, head count and d_qk >= d_v; statistics in `compute_dtype`."""
    s_q, h_q, _ = q.shape
    out = q.new_empty((s_q, h_q, d_v))
    max_logits = q.new_empty((s_q, h_q), dtype=compute_dtype)
    lse = torch.empty_like(max_logits)
    sparse_prefill_into(
        out, max_logits, lse, q, kv, indices, sm_scale, d_v, attn_sink, topk_length, head_group_mask, head_group_size
    )
    return out, max_logits, lse


@exact
def sparse_prefill_into(
    out: Tensor,
    max_logits: Tensor,
    lse: Tensor,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int,
    attn_sink: Tensor | None,
    topk_length: Tensor | None,
    head_group_mask: Tensor | None,
    head_group_size: int,
) -> None:
    """Write the three results; the arithmetic runs in lse's dtype."""
    dtype = lse.dtype
    s_q, h_q, d_qk = q.shape
    s_kv, topk = kv.shape[0], indices.shape[2]
    keys_per_chunk = max(1, _CHUNK_BYTES // (d_qk * dtype.itemsize))
    # A length past every row's cut is work for nothing; reading it would synchronise a GPU, so only the CPU does.
    host_lengths = topk_length.clamp(0, topk) if topk_length is not None and not topk_length.is_cuda else None
    first = 0
    while first < s_q:
        rows = max(1, keys_per_chunk // max(1, topk))
        if host_lengths is not None:
            rows = min(s_q - first, 64)
            used = int(host_lengths[first : first + rows].max())
            rows = min(rows, max(1, keys_per_chunk // max(1, used)))
            used = int(host_lengths[first : first + rows].max())
        else:
            rows, used = min(rows, s_q - first), topk
        part = slice(first, first + rows)
        keep = _counted(
            indices[part, 0, :used], s_kv, used,
            None if topk_length is None else topk_length[part],
            None if head_group_mask is None else head_group_mask[part],
            h_q, head_group_size,
        )  # fmt: skip
        _rows(
            out[part], max_logits[part], lse[part], q[part].to(dtype), kv, indices[part, 0, :used], keep, sm_scale, d_v,
            attn_sink, keys_per_chunk,
        )  # fmt: skip
        first += rows


def _counted(idx, s_kv, used, topk_length, mask, h_q, group_size) -> Tensor:
    """bool [rows, groups, used]: whether a head group counts a key."""
    valid = (idx >= 0) & (idx < s_kv)
    if topk_length is not None:
        valid &= torch.arange(used, device=idx.device) < topk_length[:, None]
    if mask is None:
        return valid[:, None]
    return valid[:, None] & unpack_mask(mask[:, : (used + 127) // 128], h_q // group_size)[:, :, :used]


def unpack_mask(mask: Tensor, groups: int) -> Tensor:
    """head_group_mask [rows, blocks, 128] uint8 -> bool [rows, groups, blocks * 128]."""
    rows, blocks, _ = mask.shape
    words = mask[:, :, : 16 * groups].reshape(rows, blocks, groups, 16, 1)
    bits = (words >> torch.arange(8, dtype=torch.uint8, device=mask.device)) & 1
    return bits.to(torch.bool).reshape(rows, blocks, groups, 128).transpose(1, 2).reshape(rows, groups, blocks * 128)


def _rows(out, max_logits, lse, q, kv, idx, keep, sm_scale, d_v, attn_sink, keys_per_chunk) -> None:
    rows, h_q, d_qk = q.shape
    used, groups = idx.shape[1], keep.shape[1]
    dtype = q.dtype
    step = max(1, keys_per_chunk // max(1, rows))
    chunks = [slice(a, min(a + step, used)) for a in range(0, used, step)]
    any_group = keep.any(1)

    def gather(chunk):
        live = any_group[:, chunk]
        if kv.shape[0] == 0:
            return q.new_zeros((*live.shape, d_qk))
        rows_of_kv = kv[:, 0][torch.where(live, idx[:, chunk], 0).long()].to(dtype)
        # Keys that no head counts become zeros, so whatever their rows hold stays out of the products.
        return rows_of_kv.masked_fill_(~live[..., None], 0)

    def by_head(t):  # [rows, groups, n] -> broadcastable over [rows, h_q, n]
        return t if groups == 1 else t.repeat_interleave(h_q // groups, dim=1)

    x = q.new_empty((rows, h_q, used))
    gathered = None
    for chunk in chunks:
        gathered = gather(chunk)
        torch.bmm(q, gathered.transpose(1, 2), out=x[:, :, chunk]) if len(chunks) == 1 else x[:, :, chunk].copy_(
            torch.bmm(q, gathered.transpose(1, 2))
        )
    x.mul_(sm_scale).masked_fill_(~by_head(keep), -float("inf"))
    m = x.amax(-1) if used else q.new_full((rows, h_q), -float("inf"))
    # exp(-inf - -inf) would be NaN: rows without a key subtract 0 instead, and exp(-inf) is 0.
    p = x.sub_(torch.where(m == -float("inf"), 0.0, m)[..., None]).exp_()
    l = p.sum(-1)
    empty = l == 0
    log_l = torch.where(empty, 0.0, m) + l.log()
    acc = q.new_zeros((rows, h_q, d_v))
    for chunk in chunks:
        values = gathered if len(chunks) == 1 else gather(chunk)
        _add_values(acc, p[:, :, chunk], values[..., :d_v], keep[:, :, chunk])
    acc /= torch.where(empty, 1.0, l)[..., None]
    if attn_sink is not None:
        # 1 / (1 + e^(sink - lse)) cannot overflow into NaN: a sink of +inf gives 0, -inf gives 1.
        acc *= torch.where(empty, 0.0, torch.sigmoid(log_l - attn_sink.to(dtype)))[..., None]
    out.copy_(acc.masked_fill_(empty[..., None], 0))
    max_logits.copy_(m)
    lse.copy_(log_l.masked_fill_(empty, float("inf")))


def _add_values(acc, p, values, keep) -> None:
    """acc += p @ values. A NaN or Inf in a key that only some head groups count must not reach the others (0 * NaN is NaN), so
    such chunks, which are rare, go group by group with the uncounted rows zeroed."""
    rows, groups, _ = keep.shape
    if groups == 1 or (not values.is_cuda and bool(torch.isfinite(values.sum()))):
        acc.baddbmm_(p, values)
        return
    per = acc.shape[1] // groups
    for g in range(groups):
        heads = slice(g * per, (g + 1) * per)
        clean = values.masked_fill(~keep[:, g, :, None], 0)
        acc[:, heads] += torch.bmm(p[:, heads], clean)
