"""Launcher of the Blackwell (sm_100a, sm_103a) sparse prefill kernel: which cases it takes, how it is compiled, how it is called.

The kernel itself is in sparse_kernel.py. Its compile key holds no sizes: one compiled kernel serves every s_q, h_q, s_kv, topk,
stride and head_group_size; only d_qk, which optional tensors are given, and whether sm_scale is positive select another one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from cute_kernels.jit import current_target, kernel_builder
from cute_kernels.kernels.sparse_arguments import D_QK, D_V, build, unsupported

ARCHS = ("sm_100a", "sm_103a")


class Config(NamedTuple):
    """Everything that selects a compiled kernel."""

    d_qk: int
    has_length: bool
    has_sink: bool
    has_mask: bool
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
    return unsupported(q, d_v, 2**31)


def config_of(
    q: Tensor,
    sm_scale: float,
    attn_sink: Tensor | None,
    topk_length: Tensor | None,
    head_group_mask: Tensor | None,
) -> Config:
    return Config(
        q.shape[2], topk_length is not None, attn_sink is not None, head_group_mask is not None, not sm_scale > 0
    )


def _variants(arch: str) -> tuple[Config, ...]:
    """What warm-up compiles, for both d_qk: plain, with a length, with length and sink, with a mask, with mask and length."""
    flags = ((False, False, False), (True, False, False), (True, True, False), (False, False, True), (True, False, True))
    return tuple(Config(d_qk, *some, False) for d_qk in D_QK for some in flags)


@kernel_builder("sparse_prefill_sm100", archs=ARCHS, variants=_variants)
def sparse_prefill_kernel(config: Config, arch: str) -> tuple[Any, tuple]:
    from cute_kernels.kernels.sm100.sparse_kernel import SparsePrefillSm100

    return build(config, SparsePrefillSm100, tensor_maps=True)


_functions: dict[tuple[Config, str], Any] = {}


def _function(config: Config, target: Any) -> Any:
    key = (config, target.key)
    function = _functions.get(key)
    if function is None:
        function = _functions[key] = sparse_prefill_kernel(config, target)
    return function


def _rows_of_16_bytes(t: Tensor | None) -> Tensor | None:
    """`t` with a stride that the tensor maps take where a dimension has one entry, whose stride means nothing."""
    if t is None:
        return None
    per_row = 16 // t.element_size()
    if all(stride % per_row == 0 for stride in t.stride()[:-1]):
        return t
    return t.as_strided(t.shape, [s if s % per_row == 0 else s // per_row * per_row for s in t.stride()[:-1]] + [1])


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
    target = current_target(q.device)
    config = config_of(q, sm_scale, attn_sink, topk_length, head_group_mask)
    _function(config, target)(
        _rows_of_16_bytes(q), _rows_of_16_bytes(kv), indices, _rows_of_16_bytes(out), max_logits, lse, attn_sink, topk_length,
        _rows_of_16_bytes(head_group_mask), float(sm_scale),
        head_group_size.bit_length() - 1, max(target.num_sms // 2, 1),
    )  # fmt: skip
