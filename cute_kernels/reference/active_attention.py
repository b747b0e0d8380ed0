"""Attention over the filled prefix of a KV cache, exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.reference._exact import exact

# Bytes of scores alive at once; long prompts go in chunks of query rows.
_CHUNK_BYTES = 128 << 20


def active_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_len: int | Tensor,
    *,
    sm_scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    softcap: float = 0.0,
    attn_sink: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """`cute_kernels.active_attention` for any float dtype; lse in `compute_dtype`."""
    b, h_q, s, d = q.shape
    out = q.new_empty((b, s, h_q, d)).transpose(1, 2)
    lse = q.new_empty((b, h_q, s), dtype=compute_dtype)
    scale = d**-0.5 if sm_scale is None else sm_scale
    active_attention_into(
        out, lse, q, k_cache, v_cache, kv_len, scale, causal, window_left, softcap, attn_sink
    )
    return out, lse


def active_attention_append(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_len: Tensor,
    *,
    compute_dtype: torch.dtype = torch.float32,
    **options,
) -> tuple[Tensor, Tensor]:
    """`cute_kernels.active_attention_append`: writes k_new and v_new into the caches, then attends."""
    append(k_new, v_new, k_cache, v_cache, kv_len)
    return active_attention(q, k_cache, v_cache, kv_len, compute_dtype=compute_dtype, **options)


def append(k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, kv_len: Tensor) -> None:
    """k_new[b, :, s] -> row kv_len[b] - S + s of the cache; rows outside [0, C) are dropped. No host sync."""
    b, _, s, _ = k_new.shape
    capacity = k_cache.shape[2]
    if b == 0 or s == 0 or capacity == 0 or k_new.shape[1] == 0:
        return
    lengths = kv_len.clamp(min=0).long()
    row = lengths[:, None] - s + torch.arange(s, device=k_new.device)
    keep = (row >= 0) & (row < capacity)
    batch = torch.arange(b, device=k_new.device)[:, None].expand_as(row)
    if k_new.is_cuda:
        # Without a sync the number of kept rows is unknown: dropped ones rewrite what their row 0 will hold at the end, which is
        # the new row that lands there, or else what it holds now.
        lands = (s - lengths)[:, None].expand_as(row)
        row0 = torch.where((lands >= 0) & (lands < s), lands, 0)
        for new, cache in ((k_new, k_cache), (v_new, v_cache)):
            rows = new.transpose(1, 2)  # [B, S, Hkv, D]
            at0 = torch.where(((lands >= 0) & (lands < s))[..., None, None], rows[batch, row0], cache[:, None, :, 0])
            cache.transpose(1, 2)[batch, torch.where(keep, row, 0)] = torch.where(keep[..., None, None], rows, at0)
        return
    for new, cache in ((k_new, k_cache), (v_new, v_cache)):
        cache.transpose(1, 2)[batch[keep], row[keep]] = new.transpose(1, 2)[keep]


@exact
def active_attention_into(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_len: int | Tensor,
    sm_scale: float,
    causal: bool,
    window_left: int,
    softcap: float,
    attn_sink: Tensor | None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
) -> None:
    """Write out and lse (arithmetic in lse's dtype), after appending k_new and v_new where given."""
    if k_new is not None:
        append(k_new, v_new, k_cache, v_cache, kv_len)
    b, h_q, s, _ = q.shape
    if b == 0 or h_q == 0 or s == 0:
        return
    capacity = k_cache.shape[2]
    for i in range(b):
        if isinstance(kv_len, int):
            length, end = kv_len, kv_len
        elif kv_len.is_cuda:
            # No sync: all rows of the cache take part, those past the device's length masked.
            length, end = kv_len[i].clamp(0, capacity), capacity
        else:
            length = end = min(max(int(kv_len[i]), 0), capacity)
        _sequence(
            out[i], lse[i], q[i], k_cache[i, :, :end], v_cache[i, :, :end], length, sm_scale, causal, window_left, softcap,
            attn_sink,
        )  # fmt: skip


def _sequence(out, lse, q, k, v, length, sm_scale, causal, window_left, softcap, attn_sink) -> None:
    """One batch row: q [Hq, S, D], k and v [Hkv, end, D], of which the first `length` rows count."""
    dtype = lse.dtype
    h_q, s, d = q.shape
    h_kv, end, _ = k.shape
    if end == 0:
        out.zero_()
        lse.fill_(-float("inf"))
        return
    begin = max(0, length - s - window_left) if window_left >= 0 and isinstance(length, int) else 0
    key = torch.arange(begin, end, device=q.device)
    k, v = k[:, begin:].to(dtype), v[:, begin:].to(dtype)
    if isinstance(length, Tensor):
        tail = (key >= length)[None, :, None]
        k, v = k.masked_fill(tail, 0), v.masked_fill(tail, 0)  # 0 * NaN of a stale row would be NaN
    group = h_q // h_kv
    step = max(1, _CHUNK_BYTES // (h_q * key.numel() * dtype.itemsize))
    for first in range(0, s, step):
        rows = min(step, s - first)
        # Heads of one KV head side by side: [Hkv, G * rows, D] against [Hkv, keys, D], nothing expanded.
        qs = q[:, first : first + rows].to(dtype).reshape(h_kv, group * rows, d)
        x = torch.bmm(qs, k.transpose(1, 2)).mul_(sm_scale).view(h_q, rows, key.numel())
        if softcap > 0:
            x = x.div_(softcap).tanh_().mul_(softcap)
        position = length - s + first + torch.arange(rows, device=q.device)[:, None]
        hidden = (key >= length).expand(rows, -1)
        if causal:
            hidden = hidden | (key > position)
        if window_left >= 0:
            hidden = hidden | (key < position - window_left)
        x.masked_fill_(hidden, -float("inf"))
        m = x.amax(-1, keepdim=True)
        p = x.sub_(torch.where(m == -float("inf"), 0.0, m)).exp_()
        l = p.sum(-1, keepdim=True)
        empty = l == 0
        log_l = torch.where(empty, 0.0, m) + l.log()  # -inf where no key
        acc = torch.bmm(p.view(h_kv, group * rows, -1), v).view(h_q, rows, d)
        acc /= torch.where(empty, 1.0, l)
        if attn_sink is not None:
            acc *= torch.sigmoid(log_l - attn_sink.to(dtype)[:, None, None]).masked_fill(empty, 0)
        out[:, first : first + rows] = acc.masked_fill_(empty, 0).to(out.dtype)
        lse[:, first : first + rows] = log_l[..., 0]
