"""What the sparse prefill kernels of all architectures share: which cases they take, what a compile is told of the arguments."""

from __future__ import annotations

from typing import Any

from torch import Tensor

D_QK = (512, 576)
D_V = 512


def unsupported(q: Tensor, d_v: int, max_rows: int) -> str | None:
    """Why no kernel takes these sizes, or None. `max_rows` of s_q fit the kernel's grid and counters."""
    s_q, h_q, d_qk = q.shape
    if d_qk not in D_QK or d_v != D_V:
        return f"d_qk must be 576 or 512 and d_v 512, got {d_qk} and {d_v}"
    if h_q > 128:
        return f"at most 128 heads, got {h_q}"
    if s_q >= max_rows:
        return f"s_q must be below 2**{max_rows.bit_length() - 1}, got {s_q}"
    return None


def build(config: Any, kernel_class: type, *, tensor_maps: bool) -> tuple[Any, tuple]:
    """The jit function and its fake arguments: every size and stride is a run-time value.

    tensor_maps: the kernel makes some, which want to know at compile time that rows are multiples of 16 bytes.
    """
    import cutlass.cute as cute
    from cutlass import BFloat16, Float32, Int32, Uint8

    def tensor(dtype, shape, align):
        known = {"divisibility": 16 * 8 // dtype.width if align == 16 else 1} if tensor_maps else {}
        strides = tuple(cute.sym_int64(**known) for _ in shape[:-1]) + (1,)
        return cute.runtime.make_fake_tensor(dtype, shape, strides, assumed_align=align)

    s_q, h_q, topk = cute.sym_int(), cute.sym_int(), cute.sym_int()
    return kernel_class(**config._asdict()), (
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
    )
