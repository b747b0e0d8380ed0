"""Launcher of the group_topk kernel (one source for every architecture). The kernel itself is in group_topk_kernel.py.

Its compile key holds no sizes: group_size, s_kv, topk, strides and the capacity are run-time values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.jit import current_target, kernel_builder

ARCHS = ("sm_90a", "sm_100a", "sm_103a")


class Config(NamedTuple):
    """What is compiled separately; field names as in group_topk_kernel.GroupTopk."""

    wide: bool
    has_length: bool
    has_requests: bool
    padded: bool
    large: bool


def can_implement(
    *,
    indices: Tensor,
    s_kv: int,
    group_size: int,
    topk_length: Tensor | None,
    cu_seqlens_q: Tensor | None,
    n: int,
    u: int,
    padded: bool = True,
) -> str | None:
    """None if the kernel takes these arguments (already checked by the operator), else the reason why not."""
    if group_size * indices.shape[2] >= 2**30:
        return f"group_size * topk must be below 2**30, got {group_size * indices.shape[2]}"
    if n >= 2**31 - 1 or indices.shape[0] >= 2**30:
        return f"s_q must be below 2**30, got {indices.shape[0]} in {n} groups"
    return None


_COMMON = tuple(Config(True, False, *(bool(i >> bit & 1) for bit in range(3))) for i in range(8))


@kernel_builder("group_topk", archs=ARCHS, variants=_COMMON)
def group_topk_kernel(config: Config, arch: str) -> tuple[Any, tuple]:
    import cutlass.cute as cute
    from cutlass import Int32, Uint8

    from cute_kernels.kernels.group_topk_kernel import GroupTopk

    def tensor(dtype, shape, align):
        strides = tuple(cute.sym_int64() for _ in shape[:-1]) + (1,)
        return cute.runtime.make_fake_tensor(dtype, shape, strides, assumed_align=align)

    s_q, n = cute.sym_int(), cute.sym_int()
    return GroupTopk(**config._asdict()), (
        tensor(Int32, (s_q, 1, cute.sym_int()), 16 if config.wide else 4),
        tensor(Int32, (s_q,), 4) if config.has_length else None,
        tensor(Int32, (cute.sym_int(),), 4) if config.has_requests else None,
        tensor(Int32, (n, 1, cute.sym_int()), 16),
        tensor(Int32, (n,), 4),
        tensor(Uint8, (n, cute.sym_int(), 128), 16),
        tensor(Int32, (n, cute.sym_int()), 4),
        Int32(0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def prepare(
    *,
    indices: Tensor,
    s_kv: int,
    group_size: int,
    topk_length: Tensor | None,
    cu_seqlens_q: Tensor | None,
    padded: bool,
    target: Any,
    **_: Any,
) -> Any:
    """function(indices, topk_length, cu_seqlens_q, union, length, mask, token_map, s_kv) runs the kernel on the current stream, for
    all indices of this layout whose address is as aligned and numbers that are the same."""
    wide = indices.shape[2] % 4 == 0 and indices.data_ptr() % 16 == 0
    wide = wide and (indices.shape[0] <= 1 or indices.stride(0) % 4 == 0)
    large = s_kv > 131_072 and group_size * indices.shape[2] < 65_536
    return group_topk_kernel(Config(wide, topk_length is not None, cu_seqlens_q is not None, padded, large), target)


def launch(
    *,
    indices: Tensor,
    s_kv: int,
    group_size: int,
    topk_length: Tensor | None,
    cu_seqlens_q: Tensor | None,
    n: int,
    u: int,
    padded: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of `cute_kernels.group_topk` for n groups and capacity u, on the current stream of indices' device.

    padded False: union_indices and head_group_mask end, for each group, with the last block of 128 that its union reaches; what
    lies behind is not written. No kernel that is given union_length reads it.
    """
    device = indices.device
    union = torch.empty((n, 1, u), dtype=torch.int32, device=device)
    length = torch.empty((n,), dtype=torch.int32, device=device)
    mask = torch.empty((n, u // 128, 128), dtype=torch.uint8, device=device)
    token_map = torch.empty((n, group_size), dtype=torch.int32, device=device)
    if n:
        function = prepare(
            indices=indices, s_kv=s_kv, group_size=group_size, topk_length=topk_length, cu_seqlens_q=cu_seqlens_q, padded=padded,
            target=current_target(device),
        )  # fmt: skip
        function(indices, topk_length, cu_seqlens_q, union, length, mask, token_map, s_kv)
    return union, length, mask, token_map
