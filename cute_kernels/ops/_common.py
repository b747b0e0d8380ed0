"""What every operator of this package shares: its library, its error wording, its checks of memory.

Nothing here touches data, allocates or synchronises. The same checks serve the real and the fake implementations; what needs an
address (`check_base`, `check_written`) is called by the real ones alone, since a fake tensor has none.

An eager call on a GPU has 12 us of host time in all, and checking every shape and stride in Python takes 5 of them. So a call's
layouts are its key into a table of plans (`Plans`): a layout seen before was checked then, and its kernel chosen. What a plan
cannot hold (addresses, gradients, a length) is checked on every call.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# The Library object owns the registrations: they vanish when it is collected, so it lives here as long as the module does.
LIB = torch.library.Library("cute_kernels", "DEF")

_TAGS = tuple(
    getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "needs_fixed_stride_order") if hasattr(torch.Tag, name)
)


def define(schema: str) -> None:
    """Define one overload. Inductor keeps the callers' stride order (the kernels need a unit last stride)."""
    LIB.define(schema, tags=_TAGS)


def implement(name: str, real: Callable, fake: Callable) -> None:
    """Register `real` for CPU and CUDA tensors and `fake` for tracing. Other devices get the dispatcher's own error."""
    LIB.impl(name, real, "CPU")
    LIB.impl(name, real, "CUDA")
    torch.library.register_fake(f"cute_kernels::{name}", fake, lib=LIB)


_checking = os.environ.get("CUTE_KERNELS_CHECK", "0") not in ("", "0")


def checking() -> bool:
    """CUTE_KERNELS_CHECK=1 (read at import): validate values inside tensors too, on every backend (synchronises on a GPU)."""
    return _checking


def layout(t: Tensor | None):
    """All of a tensor that a plan may depend on."""
    return None if t is None else (t.dtype, t.device, t.shape, t.stride())


class Plans(dict):
    """Layouts of a call -> what was decided for them. Bounded: shapes of a server recur, those of a fuzzer do not."""

    def __setitem__(self, key, plan) -> None:
        if len(self) >= 4096:
            self.clear()
        super().__setitem__(key, plan)


def fail(op: str, name: str, must: str, got: object, error: type[Exception] = ValueError) -> None:
    raise error(f"{op}: {name} must {must}, got {got}")


def check_tensor(
    op: str,
    name: str,
    t: Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: Sequence[object],
    device: torch.device,
    shape_text: str,
) -> None:
    """dtype, rank, shape and device. An entry of `shape` that is None is free; `shape_text` names the dimensions."""
    if t.dtype not in dtypes:
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        fail(op, name, f"have dtype {names}", str(t.dtype).removeprefix("torch."), TypeError)
    if t.dim() != len(shape):
        fail(op, name, f"have shape {shape_text}", f"a tensor of rank {t.dim()}: {tuple(t.shape)}")
    for have, want in zip(t.shape, shape):
        if want is not None and have != want:
            wanted = tuple("any" if w is None else w for w in shape)
            fail(op, name, f"have shape {shape_text} = {wanted}", tuple(t.shape))
    if t.device != device:
        fail(op, name, f"be on {device} like q", t.device)


def check_unit_last_stride(op: str, name: str, t: Tensor) -> None:
    if t.shape[-1] > 1 and t.stride(-1) != 1:
        fail(op, name, "have a last dimension of stride 1", f"strides {tuple(t.stride())}")


def check_row_strides(op: str, name: str, t: Tensor, multiple_bytes: int = 16) -> None:
    """Every stride but the last a multiple of 16 bytes: what TMA and 16-byte cp.async need. Size-1 dimensions are free."""
    for size, stride in zip(t.shape[:-1], t.stride()[:-1]):
        if size > 1 and (stride * t.element_size()) % multiple_bytes:
            fail(op, name, f"have row strides that are multiples of {multiple_bytes} bytes", f"strides {tuple(t.stride())}")


def check_base(op: str, name: str, t: Tensor, multiple_bytes: int = 16) -> None:
    if t.numel() and t.data_ptr() % multiple_bytes:
        fail(op, name, f"start at an address that is a multiple of {multiple_bytes} bytes", f"{t.data_ptr():#x}")


def check_grad(op: str, *tensors: Tensor | None) -> None:
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                raise RuntimeError(f"{op} has no backward; call under torch.no_grad()")


def extent_bytes(t: Tensor | None) -> int:
    """Bytes from t's first element to the end of its last."""
    if t is None or t.numel() == 0:
        return 0
    return (sum((n - 1) * s for n, s in zip(t.shape, t.stride())) + 1) * t.element_size()


def ranges_disjoint(tensors: Sequence[Tensor | None], extents: Sequence[int]) -> bool:
    """Whether no two of the address ranges meet: the common case, 2 us for seven tensors, after which nothing can overlap."""
    end = 0
    for start, extent in sorted([(t.data_ptr(), n) for t, n in zip(tensors, extents) if n]):
        if start < end:
            return False
        end = start + extent
    return True


def may_overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two strided tensors can share a byte. Exact for disjoint ranges and for slices of a common row pitch (a fused
    buffer cut along its last dimension); otherwise says True when the address ranges intersect."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    a0, b0 = a.data_ptr(), b.data_ptr()
    a1, b1 = a0 + extent_bytes(a), b0 + extent_bytes(b)
    if a1 <= b0 or b1 <= a0:
        return False
    pitches, rows = [], []
    for t in (a, b):
        size = t.element_size()
        unit = t.dim() > 0 and (t.stride(-1) == 1 or t.shape[-1] == 1)
        rows.append((t.shape[-1] if unit and t.dim() else 1) * size)
        outer = list(zip(t.shape, t.stride()))[: -1 if unit else None]
        pitches += [s * size for n, s in outer if n > 1]
    pitch = math.gcd(*pitches) if pitches else 0
    if pitch == 0:
        return True
    at = (b0 - a0) % pitch  # where b's rows begin inside a's pitch
    return not (rows[0] <= at and at + rows[1] <= pitch)


def has_internal_overlap(t: Tensor) -> bool:
    """Whether two elements of t share an address (stride 0, or rows that run into each other)."""
    dims = sorted((s, n) for n, s in zip(t.shape, t.stride()) if n > 1)
    reach = 0
    for stride, n in dims:
        if stride <= reach:
            return True
        reach += stride * (n - 1)
    return False


def check_written(op: str, written: dict[str, Tensor], inputs: dict[str, Tensor | None]) -> None:
    """Written tensors overlap neither themselves, nor one another, nor an input."""
    names = list(written)
    for i, name in enumerate(names):
        t = written[name]
        if has_internal_overlap(t):
            fail(op, name, "not overlap itself", f"shape {tuple(t.shape)}, strides {tuple(t.stride())}")
        others = {n: written[n] for n in names[i + 1 :]} | inputs
        for other, u in others.items():
            if u is not None and may_overlap(t, u):
                fail(op, name, f"not overlap {other}", "tensors that share memory")
