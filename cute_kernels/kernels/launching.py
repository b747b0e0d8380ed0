"""How a launcher hands an operator's tensors to a compiled function by address (see by_address.py): `layout_block` once per layout,
`data_ptr()`s, `raw_stream` and `stream_pointer` on every call, `ready` around the function that makes the call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def layout_block(*layouts: Tensor | tuple[tuple, tuple] | None, single: int = 0) -> ctypes.Array:
    """The words that the function's `layouts` points to: sizes and strides of each tensor, or pair of both, that there is, in the
    order of the builder's arguments. Keep it as long as the function may be called. A dimension of one entry gets the stride
    `single`: what it had means nothing, and need not be the multiple that the kernel was promised."""
    words = []
    for x in layouts:
        if x is not None:
            sizes, strides = (x.shape, x.stride()) if isinstance(x, Tensor) else x
            words += [*sizes, *(stride if size > 1 else single for size, stride in zip(sizes, strides))]
    return (ctypes.c_int64 * len(words))(*words)


stream_pointer = functools.lru_cache(maxsize=1024)(ctypes.c_void_p)  # as TVM-FFI takes it; 0.1 us, 0.3 without the cache


def raw_stream(target: Any) -> Callable[[int], int]:
    """f(device.index): the current stream of the device; an emulator has one stream."""
    return torch._C._cuda_getCurrentRawStream if target.backend is None else lambda index: 0


def ready(run: Callable[..., None], device: torch.device, target: Any) -> Callable[..., None]:
    """`run(*tensors and others)` with `device` current, as launches by address need it; an emulator told of the tensors' memory."""
    if target.backend is not None:
        note = target.backend.note_memory

        def emulated(*arguments: Any) -> None:
            for x in arguments:
                if isinstance(x, Tensor):
                    note(x)
            run(*arguments)

        return emulated
    if torch.cuda.device_count() <= 1:
        return run
    current, index = torch._C._cuda_getDevice, device.index

    def on_device(*arguments: Any) -> None:
        if current() == index:
            run(*arguments)
        else:
            with torch.cuda.device(index):
                run(*arguments)

    return on_device
