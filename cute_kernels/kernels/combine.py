"""Merging split attention results (split-KV, split top-k): the host side. The kernel is in combine_kernel.py.

One kernel source for sm_90a, sm_100a and sm_103a. The compiled kernel depends on dtypes, d, whether a sink is given and whether
rows are 16-byte aligned; numbers of parts and rows and all strides are run-time values. The exact reference is
reference/combine.py.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.jit import Target, current_target, kernel_builder

ARCHS = ("sm_90a", "sm_100a", "sm_103a")
_NAMES = {torch.float32: "Float32", torch.bfloat16: "BFloat16", torch.float16: "Float16"}


class Config(NamedTuple):
    """What is compiled separately; dtypes by their names in cutlass."""

    part: str
    out: str
    d: int
    has_sink: bool
    wide: bool


_VARIANTS = tuple(
    Config("Float32", "BFloat16", d, has_sink, True) for d in (128, 512) for has_sink in (False, True)
)  # the heads of dense models and of latent attention


@kernel_builder("combine", archs=ARCHS, variants=_VARIANTS)
def combine_kernel(config: Config, arch: str) -> tuple[Any, tuple[Any, ...]]:
    """(parts [n_split, rows, d], part_lse [n_split, rows], out [rows, d], lse [rows], sink [h] or None)."""
    import cutlass
    import cutlass.cute as cute

    from cute_kernels.kernels.combine_kernel import Combine

    part, out = getattr(cutlass, config.part), getattr(cutlass, config.out)
    n_split, rows = cute.sym_int(), cute.sym_int()

    def tensor(dtype: Any, shape: tuple[Any, ...], unit_last: bool, align: int) -> Any:
        strides = tuple(cute.sym_int64() for _ in shape[:-1]) + (1 if unit_last else cute.sym_int64(),)
        return cute.runtime.make_fake_tensor(dtype, shape, strides, assumed_align=align)

    kernel = Combine(part, out, config.d, config.has_sink, config.wide)
    return kernel, (
        tensor(part, (n_split, rows, config.d), True, kernel.vec * part.width // 8),
        tensor(cutlass.Float32, (n_split, rows), False, 4),
        tensor(out, (rows, config.d), True, kernel.vec * out.width // 8),
        tensor(cutlass.Float32, (rows,), False, 4),
        tensor(cutlass.Float32, (cute.sym_int(),), False, 4) if config.has_sink else None,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def _wide(partial_out: Tensor, out: Tensor) -> bool:
    """Whether 16-byte loads of partial_out, and stores of as many elements, are aligned in every row."""
    vec = 16 // partial_out.element_size()
    if partial_out.shape[2] % vec or partial_out.data_ptr() % 16 or out.data_ptr() % (vec * out.element_size()):
        return False
    strides = [*zip(partial_out.shape[:2], partial_out.stride()[:2]), (out.shape[0], out.stride(0))]
    return all(n <= 1 or stride % vec == 0 for n, stride in strides)


def launch(
    partial_out: Tensor, partial_lse: Tensor, out: Tensor, lse: Tensor, attn_sink: Tensor | None, target: Target, wide: bool |
    None = None
) -> None:
    """Write out [rows, d] and lse [rows] on the current stream; arguments as `combine`, unchecked. wide: None looks at the
    addresses."""
    if out.shape[0] == 0:
        return
    if partial_out.shape[0] == 0 or partial_out.shape[2] == 0:
        out.zero_()
        lse.fill_(-math.inf)
        return
    config = Config(
        _NAMES[partial_out.dtype], _NAMES[out.dtype], partial_out.shape[2], attn_sink is not None,
        _wide(partial_out, out) if wide is None else wide,
    )  # fmt: skip
    combine_kernel(config, target)(partial_out, partial_lse, out, lse, attn_sink)


def combine(
    partial_out: Tensor, partial_lse: Tensor, *, attn_sink: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merge partial attention results over disjoint key ranges into the result over all keys.

    partial_out [n_split, rows, d] float32, bfloat16 or float16, last stride 1: each part's normalised output. partial_lse
    [n_split, rows] float32: natural log of each part's sum of exponentials; +inf and -inf both mark a part without keys, whose
    output may hold anything. attn_sink [h] float32, rows a multiple of h: row r has sink r % h, in the denominator only.
    out_dtype: one of the three, default partial_out's.

    Returns out [rows, d] and lse [rows] float32 (sink left out). A row whose parts are all empty: 0 and -inf. Raises ValueError or
    TypeError naming the argument, RuntimeError on a device without kernels (there: reference.combine.combine).
    """
    out_dtype = out_dtype or partial_out.dtype
    for name, dtype in (("partial_out", partial_out.dtype), ("out_dtype", out_dtype)):
        if dtype not in _NAMES:
            raise TypeError(f"{name} must be float32, bfloat16 or float16, got {dtype}")
    if partial_out.dim() != 3 or (partial_out.stride(2) != 1 and partial_out.shape[2] > 1):
        got = f"shape {tuple(partial_out.shape)} and strides {partial_out.stride()}"
        raise ValueError(f"partial_out must be [n_split, rows, d] with last stride 1, got {got}")
    n_split, rows, d = partial_out.shape
    if max(n_split, rows) >= 2**31 - 128:
        raise ValueError(f"partial_out must have fewer than 2**31 - 128 parts and rows, got {n_split} and {rows}")
    for name, tensor, shape in (("partial_lse", partial_lse, (n_split, rows)), ("attn_sink", attn_sink, None)):
        if tensor is None:
            continue
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {tensor.dtype}")
        if tensor.device != partial_out.device:
            raise ValueError(f"{name} must be on partial_out's device {partial_out.device}, got {tensor.device}")
        if shape is not None and tensor.shape != shape:
            raise ValueError(f"{name} must have the shape {shape} of partial_out, got {tuple(tensor.shape)}")
    if attn_sink is not None and (attn_sink.dim() != 1 or attn_sink.shape[0] == 0 or rows % attn_sink.shape[0]):
        raise ValueError(f"attn_sink must be [h] with rows ({rows}) a multiple of h, got shape {tuple(attn_sink.shape)}")
    target = current_target(partial_out.device)
    if target is None or target.arch not in ARCHS:
        raise RuntimeError(f"combine has kernels for {', '.join(ARCHS)}, not for {partial_out.device}: see reference.combine")
    out = partial_out.new_empty((rows, d), dtype=out_dtype)
    lse = partial_lse.new_empty((rows,))
    launch(partial_out, partial_lse, out, lse, attn_sink, target)
    return out, lse
