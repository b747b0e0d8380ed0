"""Union of the top-k lists of neighbouring tokens, without a loop over tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BLOCK = 128
MAX_GROUP = 8
# Keys sorted at once. 256 Ki int32 keys and each temporary (1 MiB) stay in a CPU's L2 cache and in the allocator's reach: 16 times
# larger chunks took five times as long, most of it page faults.
_CHUNK_KEYS = 256 << 10


def token_groups(s_q: int, group_size: int, n: int, cu_seqlens_q: Tensor | None, device: torch.device) -> Tensor:
    """token_map [n, group_size] int64: the query row of each slot, -1 for none. No host sync."""
    slot = torch.arange(group_size, device=device)
    group = torch.arange(n, device=device)
    if cu_seqlens_q is None:
        rows = group[:, None] * group_size + slot
        return torch.where(rows < s_q, rows, -1)
    # Malformed bounds are data: clamped and made ascending, so that no row is in two groups and none is out of range.
    cu = cu_seqlens_q.long().clamp(0, s_q).cummax(0).values
    begin, end = cu[:-1], cu[1:]
    if begin.numel() == 0:
        return torch.full((n, group_size), -1, device=device)
    last = ((end - begin + group_size - 1) // group_size).cumsum(0)  # groups up to and including each request
    request = torch.searchsorted(last, group, right=True)
    unused = request >= begin.numel()
    request = request.clamp(max=begin.numel() - 1)
    index_in_request = group - torch.where(request > 0, last[request - 1], 0)
    rows = (begin[request] + index_in_request * group_size)[:, None] + slot
    return torch.where((rows < end[request][:, None]) & ~unused[:, None], rows, -1)


def _sort(keys: Tensor) -> Tensor:
    if keys.is_cuda:
        return keys.sort(dim=1).values
    keys.numpy().sort(axis=1)  # in place, vectorised: 43 M keys in 0.3 s on one core
    return keys


def _pack_bits(member: Tensor) -> Tensor:
    """bool [..., 8 * n] -> uint8 [..., n], little-endian bits."""
    if not member.is_cuda:
        return torch.from_numpy(np.packbits(member.numpy(), axis=-1, bitorder="little"))
    bits = member.view(*member.shape[:-1], -1, 8).to(torch.uint8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=member.device)).sum(-1, dtype=torch.uint8)


def group_topk(
    indices: Tensor,
    s_kv: int,
    group_size: int,
    topk_length: Tensor | None,
    cu_seqlens_q: Tensor | None,
    n: int,
    u: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`cute_kernels.group_topk` for the sizes n (groups) and u (union capacity, a multiple of 128)."""
    s_q, _, topk = indices.shape
    device = indices.device
    union = torch.full((n, 1, u), -1, dtype=torch.int32, device=device)
    length = torch.zeros(n, dtype=torch.int32, device=device)
    mask = torch.zeros((n, u // BLOCK, BLOCK), dtype=torch.uint8, device=device)
    token_map = token_groups(s_q, group_size, n, cu_seqlens_q, device)
    keys_per_group = group_size * topk
    if n and keys_per_group and s_q:
        step = max(1, _CHUNK_KEYS // keys_per_group)
        for a in range(0, n, step):
            part = slice(a, min(a + step, n))
            _chunk(
                union[part, 0], length[part], mask[part], indices[:, 0], token_map[part], s_kv, topk_length, group_size
            )
    return union, length, mask, token_map.int()


def _chunk(union, length, mask, indices, token_map, s_kv, topk_length, group_size) -> None:
    g, u = union.shape
    topk = indices.shape[1]
    device = indices.device
    rows = token_map.clamp(min=0)
    lists = indices[rows]  # [g, G, topk]
    counted = (lists >= 0) & (lists < s_kv) & (token_map >= 0)[..., None]
    if topk_length is not None:
        counted &= torch.arange(topk, dtype=torch.int32, device=device) < topk_length[rows][..., None]
    # One sort orders by key, then by slot (the low three bits); what does not count goes to the end.
    narrow = s_kv < 2**28
    if not narrow:
        lists = lists.long()
    slot = torch.arange(group_size, dtype=lists.dtype, device=device)[:, None]
    end = s_kv * MAX_GROUP
    keys = _sort(((lists << 3) | slot).masked_fill_(~counted, end).view(g, -1))
    live = keys < end
    key = keys >> 3
    first = live.clone()
    first[:, 1:] &= key[:, 1:] != key[:, :-1]
    rank = first.cumsum(1, dtype=torch.int32).sub_(1)
    length.copy_(rank[:, -1] + 1)
    if u == 0:
        return
    # Scatter what fits; everything else lands in one extra column that is dropped.
    column = torch.where(live & (rank < u), rank, u).long()
    wide = torch.full((g, u + 1), -1, dtype=torch.int32, device=device)
    wide.scatter_(1, column, key.int())
    union.copy_(wide[:, :u])
    member = torch.zeros((g, group_size, u + 1), dtype=torch.bool, device=device)
    member.view(g, -1).scatter_(1, (keys & 7) * (u + 1) + column, True)
    packed = _pack_bits(member[:, :, :u].reshape(g, group_size, u // BLOCK, BLOCK))  # [g, G, U/128, 16]
    mask[:, :, : 16 * group_size] = packed.permute(0, 2, 1, 3).reshape(g, u // BLOCK, group_size * 16)
