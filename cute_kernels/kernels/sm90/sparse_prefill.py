"""Launcher of the Hopper (sm_90a) sparse prefill kernel: which cases it takes, how it is compiled, how it is called.

The kernel itself is in sparse_kernel.py. Its compile key holds no sizes: one compiled kernel serves every s_q, h_q, s_kv, topk,
stride and head_group_size; only d_qk, which optional tensors are given, whether groups are smaller than 16 heads, and whether
sm_scale is positive select another one.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

ARCH = "sm_90a"
D_QK = (512, 576)
D_V = 512


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
    s_q, h_q, d_qk = q.shape
    if d_qk not in D_QK or d_v != D_V:
        return f"d_qk must be 576 or 512 and d_v 512, got {d_qk} and {d_v}"
    if h_q > 128:
        return f"at most 128 heads, got {h_q}"
    if s_q * 2 >= 2**31:
        return f"s_q must be below 2**30, got {s_q}"
    for name, t in (("q", q), ("kv", kv)):
        if t.data_ptr() % 16 or any(t.stride(i) % 8 for i in range(2) if t.shape[i] > 1):
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
        not sm_scale > 0,
    )


def compile_kernel(config: Config, kernel_class: type | None = None) -> Any:
    """Compile without a tensor and without a GPU; the result is called positionally (see `call`)."""
    import cutlass.cute as cute
    from cutlass import BFloat16, Float32, Int32, Uint8

    from cute_kernels.kernels.sm90.sparse_kernel import SparsePrefillSm90

    kernel = (kernel_class or SparsePrefillSm90)(**config._asdict())

    def tensor(dtype, shape, align, unit_last=True):
        strides = tuple(cute.sym_int64() for _ in shape[:-1]) + (1,)
        return cute.runtime.make_fake_tensor(dtype, shape, strides, assumed_align=align)

    s_q, h_q, topk = cute.sym_int(), cute.sym_int(), cute.sym_int()
    return cute.compile(
        kernel,
        tensor(BFloat16, (s_q, h_q, config.d_qk), 16),
        tensor(BFloat16, (cute.sym_int(), 1, config.d_qk), 16),
        tensor(Int32, (s_q, 1, topk), 4),
        tensor(BFloat16, (s_q, h_q, D_V), 16),
        tensor(Float32, (s_q, h_q), 4),
        tensor(Float32, (s_q, h_q), 4),
        tensor(Float32, (h_q,), 4) if config.has_sink else None,
        tensor(Int32, (s_q,), 4) if config.has_length else None,
        tensor(Uint8, (s_q, cute.sym_int(), 128), 16) if config.has_mask else None,
        Float32(1.0),
        Int32(0),
        Int32(0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--gpu-arch {ARCH} --enable-tvm-ffi",
    )


@functools.cache
def _compiled(config: Config) -> Any:
    return compile_kernel(config)


@functools.cache
def _sm_count(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


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
    config = config_of(q, sm_scale, attn_sink, topk_length, head_group_mask, head_group_size)
    max_ctas = _sm_count(q.device.index or 0) if q.is_cuda else 4
    _compiled(config)(
        q,
        kv,
        indices,
        out,
        max_logits,
        lse,
        attn_sink,
        topk_length,
        head_group_mask,
        float(sm_scale),
        head_group_size.bit_length() - 1,
        max_ctas,
    )
