"""What every operator of this package shares: its library, its error wording, its checks of memory.

Nothing here touches data, allocates or synchronises. The same checks serve the real and the fake implementations; what needs an
address (`check_base`, `check_written`) is called by the real ones alone, since a fake tensor has none.

An eager call on a GPU has 12 us of host time in all, and checking every shape and stride in Python takes 5 of them. So a call's
layouts are its key into a table of plans (`Plans`): a layout seen before was checked then, and its kernel chosen. What a plan
cannot hold (addresses, gradients, a length) is checked on every call. Making that key takes 5 us again, so the plan of the latest
call with the same numbers and options is tried first, by a comparison in C++ (`same_layouts`): 1 us.
"""

from __future__ import annotations

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


def _fast_empty(name: str):
    # What Inductor's generated code allocates with: no argument parser, no dispatcher, 0.6 against 1.3 us (torch.empty: 2.4).
    try:
        from torch._C._dynamo import guards

        return getattr(guards, name, None)
    except ImportError:
        return None


def allocator(device: torch.device, emulated: bool) -> Callable[[tuple, tuple, torch.dtype], Tensor]:
    """allocate(sizes, strides, dtype) on `device`: for code below the dispatcher, where no mode has to see it."""
    fast = None if emulated or device.type not in ("cpu", "cuda") else _fast_empty(f"_empty_strided_{device.type}")

    def slow(sizes, strides, dtype):
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device)

    if fast is None:
        return slow
    if device.type == "cpu" or torch.cuda.device_count() == 1:
        return fast
    current, index = torch._C._cuda_getDevice, device.index  # torch.cuda.current_device() takes four times as long
    return lambda sizes, strides, dtype: (fast if current() == index else slow)(sizes, strides, dtype)


# What may see a call that goes through torch's dispatcher, beside what `same_layouts` sees. Tracing by torch.export or make_fx is
# a dispatch mode; of `is_dynamo_compiling` Dynamo makes a constant.
OBSERVERS = (
    torch.compiler.is_dynamo_compiling, torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack,
    torch.autograd._profiler_enabled,
)  # fmt: skip
_is_compiling, _dispatch_modes, _function_modes, _profiling = OBSERVERS
_transforms, _tracing = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state


def unobserved() -> bool:
    """Whether a call with `plain` tensors would reach its kernel through torch's dispatcher unchanged and unseen: no compilation,
    mode or profiler. Then a Python function may call the implementation itself: 5 us less."""
    return not (_is_compiling() or _dispatch_modes() or _function_modes() or _profiling())


_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def plain(*tensors: Tensor | None) -> bool:
    """Whether the dispatcher would hand these on as they are: dense, on a CPU or a CUDA device, no subclass, nothing lazy, and
    neither a transform nor a tracer at work (what `same_layouts` sees too)."""
    if _transforms() is not None or _tracing() is not None:
        return False
    for t in tensors:
        if t is not None and (
            type(t) not in _PLAIN_TYPES or not (t.is_cuda or t.is_cpu) or t.layout is not torch.strided or t.is_neg()
            or t._is_zerotensor()
        ):  # fmt: skip
            return False
    return True


def check_writable(op: str, *tensors: Tensor) -> None:
    """Refuse to write inference tensors outside that mode, as torch's own in-place operations do. The other thing they do, and
    kernels do not, is `torch.autograd.graph.increment_version`: then a backward pass that saved a tensor which was written since
    fails, instead of using the new contents."""
    if not torch.is_inference_mode_enabled() and any(t.is_inference() for t in tensors):
        raise RuntimeError(f"{op}: Inplace update to inference tensor outside InferenceMode is not allowed")


class Plans(dict):
    """Layouts of a call -> what was decided for them. Bounded: shapes of a server recur, those of a fuzzer do not."""

    def __setitem__(self, key, plan) -> None:
        if len(self) >= 4096:
            self.clear()
        super().__setitem__(key, plan)


def _tensor_guards() -> Callable | None:
    try:
        from torch._C._dynamo.guards import TensorGuards

        t = torch.empty((2, 2), device="cpu")
        check = TensorGuards(t, dynamic_dims_sizes=[[2, 2]], dynamic_dims_strides=[[2, 1]]).check
        return TensorGuards if check(t) and not check(t.t()) and not check(t[:1]) else None
    except (ImportError, AttributeError, TypeError):  # another torch: every call makes its key
        return None


_TensorGuards = _tensor_guards()


def same_layouts(*tensors: Tensor, known: Callable[..., bool] | None = None) -> Callable[..., bool] | None:
    """f(*others): whether they equal these in type, dtype, device, sizes, strides and dispatch keys, no two of them being one, and
    whether the same dispatch modes, transforms and tracers are active as now, inference mode too: what torch.compile's guards
    ask, in C++. (Of gradients it sees `requires_grad`, not whether they are enabled.) None where they cannot say.

    known: one made for such tensors before, taken if it still agrees: making one costs 5 to 8 us, asking it 1."""
    if _TensorGuards is None:
        return None
    if known is not None and known(*tensors):
        return known
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    return _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def fail(op: str, name: str, must: str, got: object, error: type[Exception] = ValueError) -> None:
    raise error(f"{op}: {name} must {must}, got {got}")


def check_given(op: str, **tensors: object) -> None:
    """Arguments that must be tensors: the dispatcher's error is a RuntimeError, and without it there would be an AttributeError."""
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            fail(op, name, "be a torch.Tensor", type(t).__name__, TypeError)


def check_kinds(op: str, reals: dict[str, object], integers: dict[str, object]) -> None:
    """What must be a number, or a thing that converts to one. The dispatcher would name it in a RuntimeError."""
    for numbers, method, text in ((reals, "__float__", "be a number"), (integers, "__index__", "be an integer")):
        for name, x in numbers.items():
            if not hasattr(type(x), method):
                fail(op, name, text, type(x).__name__, TypeError)


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
    if t.shape[-1] > 1 and t.stride(-1) != 1 and t.numel():  # an empty tensor's strides mean nothing (Inductor makes them 0)
        fail(op, name, "have a last dimension of stride 1", f"strides {tuple(t.stride())}")


def check_row_strides(op: str, name: str, t: Tensor, multiple_bytes: int = 16) -> None:
    """Every stride but the last a multiple of 16 bytes: what TMA and 16-byte cp.async need. Size-1 dimensions are free."""
    for size, stride in zip(t.shape[:-1], t.stride()[:-1]):
        if size > 1 and (stride * t.element_size()) % multiple_bytes and t.numel():
            fail(op, name, f"have row strides that are multiples of {multiple_bytes} bytes", f"strides {tuple(t.stride())}")


def check_base(op: str, name: str, t: Tensor, multiple_bytes: int = 16) -> None:
    if t.numel() and t.data_ptr() % multiple_bytes:
        fail(op, name, f"start at an address that is a multiple of {multiple_bytes} bytes", f"{t.data_ptr():#x}")


_FLOAT32_MAX = 3.4028234663852886e38


def check_number(op: str, name: str, x: float, must: str = "be finite in float32", low: float = -_FLOAT32_MAX) -> None:
    """Numbers enter the arithmetic as float32: beyond its range they would be infinite."""
    if not low <= x <= _FLOAT32_MAX:
        fail(op, name, must, x)


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


def ranges_disjoint(addresses: Sequence[int], extents: Sequence[int]) -> bool:
    """Whether no two of the address ranges meet: the common case, after which nothing can overlap."""
    end = 0
    for start, extent in sorted([(address, n) for address, n in zip(addresses, extents) if n]):
        if start < end:
            return False
        end = start + extent
    return True


def _layers(t: Tensor) -> tuple[list[tuple[int, int]], int]:
    """([(stride, size) in bytes, outermost first], bytes of the contiguous run inside), contiguous dimensions merged."""
    size = t.element_size()
    run, layers = size, []
    for stride, n in sorted((s * size, n) for s, n in zip(t.stride(), t.shape) if n > 1):
        if not layers and stride == run:
            run *= n
        elif layers and stride == layers[-1][0] * layers[-1][1]:
            layers[-1] = (layers[-1][0], layers[-1][1] * n)
        else:
            layers.append((stride, n))
    return layers[::-1], run


def _reach(layers: list[tuple[int, int]], run: int) -> int:
    return sum(s * (n - 1) for s, n in layers) + run


def _meet(a: list[tuple[int, int]], run_a: int, b: list[tuple[int, int]], run_b: int, delta: int) -> bool:
    """Whether a laid out at 0 and b at `delta` share a byte; True where it would take more than a few steps to know."""
    reach_a, reach_b = _reach(a, run_a), _reach(b, run_b)
    if delta >= reach_a or delta + reach_b <= 0:
        return False
    if not a and not b:
        return True
    outer_a, outer_b = (a[0][0] if a else 0), (b[0][0] if b else 0)
    if outer_a == outer_b:
        # The same pitch: what matters is where b begins within a's pitch, and that b may run over into the next one.
        pitch = outer_a
        if max(_reach(a[1:], run_a), _reach(b[1:], run_b)) > pitch:
            return True
        at = delta % pitch
        return _meet(a[1:], run_a, b[1:], run_b, at) or _meet(a[1:], run_a, b[1:], run_b, at - pitch)
    if outer_a < outer_b:
        return _meet(b, run_b, a, run_a, -delta)
    # Only a has this pitch: look at its slices that b's range touches.
    inner = _reach(a[1:], run_a)
    first = max(0, -((inner - 1 - delta) // outer_a))
    last = min(a[0][1] - 1, (delta + reach_b - 1) // outer_a)
    if last - first > 64:
        return True
    return any(_meet(a[1:], run_a, b, run_b, delta - i * outer_a) for i in range(first, last + 1))


def may_overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two strided tensors can share a byte. Exact for slices of a common buffer along any of its dimensions; says True
    when the address ranges meet and the strides of the two have little in common."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    return _meet(*_layers(a), *_layers(b), b.data_ptr() - a.data_ptr())


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
