"""torch.ops.cute_kernels.group_topk: schema, checks, fake, dispatch."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels import reference
from cute_kernels.ops import _common as c
from cute_kernels.ops import dispatch
from cute_kernels.ops.sparse_prefill import check_topk_length

_OP = "group_topk"
MAX_GROUP = 8  # slots of head_group_mask
BLOCK = 128

_ARGS = "Tensor indices, SymInt s_kv, int group_size=8, Tensor? topk_length=None, Tensor? cu_seqlens_q=None"
c.define(f"{_OP}({_ARGS}, SymInt? max_union=None) -> (Tensor, Tensor, Tensor, Tensor)")
# The same, with the list and the mask of a group unspecified behind the last block of 128 that its union reaches. Their capacity is
# what no data can exceed, so in a grouped prefill of 21,000 tokens padding would be 190 of 215 MB written.
c.define(f"{_OP}.unpadded({_ARGS}) -> (Tensor, Tensor, Tensor, Tensor)")


def _check(indices, s_kv, group_size, topk_length, cu_seqlens_q, max_union) -> None:
    device = indices.device
    c.check_tensor(_OP, "indices", indices, (torch.int32,), (None, 1, None), device, "[s_q, 1, topk]")
    c.check_unit_last_stride(_OP, "indices", indices)
    if s_kv < 0 or s_kv > 2**31 - 1:
        c.fail(_OP, "s_kv", "lie in [0, 2**31 - 1]", s_kv)
    if not 1 <= group_size <= MAX_GROUP:
        c.fail(_OP, "group_size", f"lie in [1, {MAX_GROUP}]", group_size)
    if max_union is not None and max_union < 0:
        c.fail(_OP, "max_union", "be at least 0", max_union)
    if topk_length is not None:
        c.check_tensor(_OP, "topk_length", topk_length, (torch.int32,), (indices.shape[0],), device, "[s_q]")
        c.check_unit_last_stride(_OP, "topk_length", topk_length)
    if cu_seqlens_q is not None:
        c.check_tensor(_OP, "cu_seqlens_q", cu_seqlens_q, (torch.int32,), (None,), device, "[requests + 1]")
        c.check_unit_last_stride(_OP, "cu_seqlens_q", cu_seqlens_q)
        if cu_seqlens_q.shape[0] < 1:
            c.fail(_OP, "cu_seqlens_q", "have at least one entry", "none")


def _sizes(indices, s_kv, group_size, cu_seqlens_q, max_union):
    """(number of groups n, union capacity U), from sizes alone."""
    s_q, _, topk = indices.shape
    n = (s_q + group_size - 1) // group_size
    if cu_seqlens_q is not None:
        n = n + cu_seqlens_q.shape[0] - 1
    # torch.sym_min: a plain min() would turn a symbolic s_kv into a guard, one graph for each side.
    u = torch.sym_min(group_size * topk, s_kv)
    if max_union is not None:
        u = torch.sym_min(u, max_union)
    return n, BLOCK * ((u + BLOCK - 1) // BLOCK)


def _check_boundaries(cu_seqlens_q: Tensor, s_q: int) -> None:
    ends = cu_seqlens_q.tolist()
    if ends[0] < 0 or ends[-1] > s_q or any(a > b for a, b in zip(ends, ends[1:])):
        c.fail(_OP, "cu_seqlens_q", f"ascend within [0, s_q = {s_q}]", ends if len(ends) < 20 else f"{ends[:8]} ... {ends[-8:]}")


_plans = c.Plans()


def _plan(arguments, padded, device, target):
    """What layouts and numbers decide, kept for the calls that repeat them: (function or None for the reference, allocator, sizes
    and strides of the results, backend). function(indices, topk_length, cu_seqlens_q, *results, s_kv)"""
    kernel, backend = dispatch.select(_OP, device, target, arguments)
    n, u, size = arguments["n"], arguments["u"], arguments["group_size"]
    function = None if kernel is None else kernel.prepare(**arguments, padded=padded, target=target)
    allocate = c.allocator(device, target is not None and target.backend is not None)
    row, mask_row = max(u, 1), max(u, BLOCK)  # strides as torch gives them to empty tensors too
    shapes = ((n, 1, u), (row, row, 1)), ((n,), (1,)), ((n, u // BLOCK, BLOCK), (mask_row, BLOCK, 1)), ((n, size), (size, 1))
    return function, allocate, shapes, backend


def _run(indices, s_kv, group_size, topk_length, cu_seqlens_q, max_union, padded):
    layout = c.layout
    device = indices.device
    target = dispatch.current_target(device)
    key = (
        device, indices.dtype, indices.shape, indices.stride(), indices.data_ptr() & 15, s_kv, group_size, max_union, padded,
        target, None if topk_length is None else layout(topk_length), None if cu_seqlens_q is None else layout(cu_seqlens_q),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        _check(indices, s_kv, group_size, topk_length, cu_seqlens_q, max_union)
    strict = c.checking() or (target is None and device.type == "cpu")
    if strict and topk_length is not None:
        check_topk_length(_OP, topk_length, indices.shape[2])
    if c.checking() and cu_seqlens_q is not None:
        _check_boundaries(cu_seqlens_q, indices.shape[0])
    if plan is None:
        n, u = _sizes(indices, s_kv, group_size, cu_seqlens_q, max_union)
        arguments = dict(
            indices=indices, s_kv=s_kv, group_size=group_size, topk_length=topk_length, cu_seqlens_q=cu_seqlens_q, n=n, u=u
        )
        plan = _plans[key] = _plan(arguments, padded, device, target)
    function, allocate, shapes, backend = plan
    (union, rows), lengths, (mask, mask_rows), (token_map, slots) = shapes
    n, _, u = union
    if function is None:
        result = reference.group_topk(indices, s_kv, group_size, topk_length, cu_seqlens_q, n, u)
    else:
        i32 = torch.int32
        result = (
            allocate(union, rows, i32), allocate(*lengths, i32), allocate(mask, mask_rows, torch.uint8),
            allocate(token_map, slots, i32),
        )  # fmt: skip
        if n:
            function(indices, topk_length, cu_seqlens_q, *result, s_kv)
    if strict and n and max_union is not None:
        need = int(result[1].max())
        if need > u:
            c.fail(_OP, "max_union", f"hold the longest union, {need} keys", f"{max_union} (capacity {u})")
    dispatch.record(backend)
    return result


def _real(indices, s_kv, group_size=8, topk_length=None, cu_seqlens_q=None, max_union=None):
    return _run(indices, s_kv, group_size, topk_length, cu_seqlens_q, max_union, True)


def _real_unpadded(indices, s_kv, group_size=8, topk_length=None, cu_seqlens_q=None):
    return _run(indices, s_kv, group_size, topk_length, cu_seqlens_q, None, False)


def _fake(indices, s_kv, group_size=8, topk_length=None, cu_seqlens_q=None, max_union=None):
    _check(indices, s_kv, group_size, topk_length, cu_seqlens_q, max_union)
    n, u = _sizes(indices, s_kv, group_size, cu_seqlens_q, max_union)
    i32 = dict(dtype=torch.int32, device=indices.device)
    mask = torch.empty((n, u // BLOCK, BLOCK), dtype=torch.uint8, device=indices.device)
    return torch.empty((n, 1, u), **i32), torch.empty((n,), **i32), mask, torch.empty((n, group_size), **i32)


c.implement(_OP, _real, _fake)
c.implement(f"{_OP}.unpadded", _real_unpadded, _fake)
_default = torch.ops.cute_kernels.group_topk.default
_unpadded = torch.ops.cute_kernels.group_topk.unpadded


def _direct(indices, s_kv, group_size, topk_length, cu_seqlens_q) -> bool:
    """Whether the dispatcher may be left out (see `unobserved`): it has neither a type to convert nor a tensor to hand on."""
    return (
        indices is not None and c.unobserved() and c.plain(indices, topk_length, cu_seqlens_q) and type(s_kv) is int
        and type(group_size) is int
    )  # fmt: skip


def unpadded(indices, s_kv, group_size, topk_length, cu_seqlens_q) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`group_topk` for a caller that reads no further than the union's last block of 128."""
    if _direct(indices, s_kv, group_size, topk_length, cu_seqlens_q):
        return _run(indices, s_kv, group_size, topk_length, cu_seqlens_q, None, False)
    return _unpadded(indices, s_kv, group_size, topk_length, cu_seqlens_q)


def group_topk(
    indices: Tensor,
    s_kv: int,
    group_size: int = 8,
    *,
    topk_length: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_union: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Merge the top-k lists of `group_size` consecutive tokens into one ascending list of distinct keys, with a mask that says
    which token listed which key: what `sparse_prefill` takes to run the group as one row of packed heads.

    Args:
        indices: [s_q, 1, topk] int32. Values outside [0, s_kv) and positions at or past topk_length are ignored; a key listed
            twice by one token is listed once.
        s_kv: number of KV rows, at most 2**31 - 1.
        group_size: tokens in a group, 1 to 8.
        topk_length: [s_q] int32.
        cu_seqlens_q: [requests + 1] int32 on the device, ascending: a group never holds tokens of two requests. Rows outside
            [cu_seqlens_q[0], cu_seqlens_q[-1]) are in no group.
        max_union: an upper bound of the caller's on the length of a union. If a union is longer, union_length holds the needed
            length, the list is cut, and the CPU backend (any backend with CUTE_KERNELS_CHECK=1) raises ValueError.

    Returns, with n = ceil(s_q / group_size) (+ requests with cu_seqlens_q) and
    U = 128 * ceil(min(group_size * topk, s_kv, max_union) / 128), both known from sizes alone (no host sync):
        union_indices [n, 1, U] int32, ascending, padded with -1
        union_length [n] int32
        head_group_mask [n, U/128, 128] uint8, as `sparse_prefill` takes it: group g of the mask is slot g of the group
        token_map [n, group_size] int32, the query row of each slot, -1 for none. Unused groups come last.
    """
    if (max_union is None or type(max_union) is int) and _direct(indices, s_kv, group_size, topk_length, cu_seqlens_q):
        return _run(indices, s_kv, group_size, topk_length, cu_seqlens_q, max_union, True)
    c.check_given(_OP, indices=indices)
    if not torch.compiler.is_compiling():
        c.check_kinds(_OP, {}, dict(s_kv=s_kv, group_size=group_size))
    return _default(indices, s_kv, group_size, topk_length, cu_seqlens_q, max_union)
