"""Launcher of the Hopper (sm_90a) sparse prefill kernel: which cases it takes, how it is compiled, how it is called.

The kernel itself is in sparse_kernel.py. Its compile key holds no sizes: one compiled kernel serves every s_q, h_q, s_kv, topk,
stride and head_group_size; only d_qk, which optional tensors are given, whether groups are smaller than 16 heads, and whether
sm_scale is positive select another one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from cute_kernels.jit import current_target, kernel_builder
from cute_kernels.kernels.launching import layout_block, raw_stream, ready, stream_pointer
from cute_kernels.kernels.scales import PLAIN_SCALE
from cute_kernels.kernels.sparse_arguments import D_QK, D_V, build, unsupported

ARCH = "sm_90a"
MAX_GRID = 2**31 - 1


class Config(NamedTuple):
    """Everything that selects a compiled kernel."""

    d_qk: int
    has_length: bool
    has_sink: bool
    has_mask: bool
    small_groups: bool
    general_scale: bool


def can_implement(
    *,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = D_V,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    head_group_mask: Tensor | None = None,
    head_group_size: int = 16,
) -> str | None:
    """None if the kernel takes these arguments (already checked by the operator), else the reason why not."""
    reason = unsupported(q, d_v, 2**30)
    if reason is not None:
        return reason
    for name, t in (("q", q), ("kv", kv)):
        # of their addresses too, which the operator checks: what is said here holds for all tensors of these layouts
        if any(t.stride(i) % 8 for i in range(2) if t.shape[i] > 1):
            return f"{name} rows must start at multiples of 16 bytes"
    return None


def config_of(
    q: Tensor,
    sm_scale: float,
    attn_sink: Tensor | None,
    topk_length: Tensor | None,
    head_group_mask: Tensor | None,
    head_group_size: int,
) -> Config:
    has_mask = head_group_mask is not None
    return Config(
        q.shape[2],
        topk_length is not None,
        attn_sink is not None,
        has_mask,
        has_mask and head_group_size < 16,
        not 0 < sm_scale <= PLAIN_SCALE,
    )


def _variants(arch: str) -> tuple[Config, ...]:
    """What warm-up compiles, for both d_qk: plain, with a length, with length and sink, with a mask of large or small groups."""
    optional = ((False, False, False, False), (True, False, False, False), (True, True, False, False))
    masked = ((True, False, True, False), (True, False, True, True))
    return tuple(Config(d_qk, *flags, False) for d_qk in D_QK for flags in optional + masked)


@kernel_builder("sparse_prefill_sm90", archs=(ARCH,), variants=_variants)
def sparse_prefill_kernel(config: Config, arch: str) -> tuple[Any, tuple]:
    from cute_kernels.kernels.by_address import by_address
    from cute_kernels.kernels.sm90.sparse_kernel import SparsePrefillSm90

    return by_address(*build(config, SparsePrefillSm90, tensor_maps=False))


def prepare(
    *,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    attn_sink: Tensor | None,
    topk_length: Tensor | None,
    head_group_mask: Tensor | None,
    head_group_size: int,
    outputs: tuple,
    target: Any,
    **_: Any,
) -> Callable[..., None]:
    """run(q, kv, indices, out, max_logits, lse, attn_sink, topk_length, head_group_mask) launches the kernel on the current stream,
    for all arguments of these layouts and numbers. q has at least one row and head. outputs: of out, max_logits and lse, each the
    tensor or its (sizes, strides).
    """
    config = config_of(q, sm_scale, attn_sink, topk_length, head_group_mask, head_group_size)
    function = sparse_prefill_kernel(config, target)
    # A persistent grid saves 2.3 us per row of a CTA (4 % at topk 2048), but deals rows out without a look at their lengths: with
    # lengths uniform in [0, 2048], one CTA per row was 7 to 10 % faster on an H200. Grouped lists have nearly equal lengths.
    max_ctas = MAX_GRID if config.has_length and not config.has_mask else target.num_sms
    scale, shift = float(sm_scale), head_group_size.bit_length() - 1
    block = layout_block(q, kv, indices, *outputs, attn_sink, topk_length, head_group_mask)
    layouts, raw, index = ctypes.addressof(block), raw_stream(target), q.device.index
    plain = attn_sink is None and topk_length is None and head_group_mask is None

    def run(q, kv, indices, out, max_logits, lse, attn_sink, topk_length, head_group_mask, *, _block=block) -> None:
        if plain:
            function(
                layouts, q.data_ptr(), kv.data_ptr(), indices.data_ptr(), out.data_ptr(), max_logits.data_ptr(), lse.data_ptr(),
                scale, shift, max_ctas, stream_pointer(raw(index)),
            )  # fmt: skip
        else:
            optional = [t.data_ptr() for t in (attn_sink, topk_length, head_group_mask) if t is not None]
            function(
                layouts, q.data_ptr(), kv.data_ptr(), indices.data_ptr(), out.data_ptr(), max_logits.data_ptr(), lse.data_ptr(),
                *optional, scale, shift, max_ctas, stream_pointer(raw(index)),
            )  # fmt: skip

    return ready(run, q.device, target)


def launch(
    *,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = D_V,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    head_group_mask: Tensor | None = None,
    head_group_size: int = 16,
    out: Tensor,
    max_logits: Tensor,
    lse: Tensor,
) -> None:
    """Write out, max_logits and lse on the current stream of q's device. Arguments as in cute_kernels.sparse_prefill, checked."""
    if q.shape[0] == 0 or q.shape[1] == 0:
        return
    run = prepare(
        q=q, kv=kv, indices=indices, sm_scale=sm_scale, attn_sink=attn_sink, topk_length=topk_length,
        head_group_mask=head_group_mask, head_group_size=head_group_size, outputs=(out, max_logits, lse),
        target=current_target(q.device),
    )  # fmt: skip
    run(q, kv, indices, out, max_logits, lse, attn_sink, topk_length, head_group_mask)
