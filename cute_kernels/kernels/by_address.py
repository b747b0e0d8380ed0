"""A kernel's host function that takes addresses instead of tensors: what TVM-FFI passes is then integers.

Passing a torch tensor through TVM-FFI is an exchange through DLPack (0.2 us each), and its host code then asks for the device and
sets it (three calls of the runtime). Here the caller passes `data_ptr()`s, the stream, and the address of a block of 64-bit words
in host memory, written once per layout (`launching.layout_block`): for each tensor in turn its sizes, then its strides. What
TVM-FFI would have checked of tensors is for the operators to check: they do, and keep the answer (cute_kernels.ops._common).
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64


def by_address(kernel: Any, arguments: tuple) -> tuple[Any, tuple]:
    """What a kernel builder returns instead of (kernel, arguments), for functions that are called as

        run(layouts, *arguments, stream)

    with an address (int) in place of every fake tensor among `arguments`, nothing in place of an absent one (None), everything else
    as it is. The last of `arguments` is the fake stream.
    """
    *arguments, _ = arguments
    placed = [Int64(0) if hasattr(a, "memspace") else a for a in arguments if a is not None]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=False)
    return ByAddress(kernel, arguments), (Int64(0), *placed, stream)


class ByAddress:
    def __init__(self, kernel: Any, arguments: list[Any]) -> None:
        self.kernel, self.arguments = kernel, arguments

    @cute.jit
    def __call__(self, layouts: Int64, *given):
        self.kernel(*_placed(self.arguments, layouts, given))


def _placed(arguments: list[Any], layouts: Int64, given: tuple) -> list[Any]:
    """The kernel's own arguments (a function of its own: loops of a jit function are rewritten)."""
    size = sum(2 * len(a.shape) for a in arguments if hasattr(a, "memspace"))
    block = cute.make_ptr(Int64, layouts, cute.AddressSpace.generic, assumed_align=8)
    words = cute.make_tensor(block, cute.make_layout(size))
    at, rest, placed = 0, iter(given), []
    for a in arguments:
        if hasattr(a, "memspace"):
            placed.append(_tensor(a, next(rest), words, at))
            at += 2 * len(a.shape)
        else:
            placed.append(None if a is None else next(rest))
    return [*placed, *rest]  # the stream


def _tensor(fake: Any, address: Int64, words: cute.Tensor, at: int) -> cute.Tensor:
    """The tensor that `fake` describes, at `address`, its dynamic sizes and strides from `words`."""

    def value(known: Any, place: int) -> Any:
        if isinstance(known, int):
            return known
        got = words[place] if known.width == 64 else Int32(words[place])
        return cute.assume(got, divby=known.divisibility) if known.divisibility > 1 else got

    rank = len(fake.shape)
    shape = tuple(value(s, at + i) for i, s in enumerate(fake.shape))
    stride = tuple(value(s, at + rank + i) for i, s in enumerate(fake.stride))
    pointer = cute.make_ptr(fake.element_type, address, fake.memspace, assumed_align=fake._assumed_align)
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))
