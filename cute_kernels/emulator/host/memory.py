"""The table of memory that a launch may touch, from the tensors that were passed to it.

Storages of tensors seen on their way into the launch have exact bounds. A pointer that reached the kernel some other
way (``make_ptr`` on a ``data_ptr()``, a tensor wrapped before `emulate()` was entered) is looked up among the live torch
tensors, and failing that gets the rest of its memory mapping: then reads past its end are not noticed.
"""

from __future__ import annotations

import bisect
import gc
import struct
import sys
from typing import Any

from .context import Capture, Emulation
from .redirect import mapped_ranges

_UNKNOWN_BYTES = 1 << 30  # of a mapping, when nothing better than the mapping is known about a pointer


def build_memory(emulation: Emulation, capture: Capture) -> Any:
    """A `machine.GlobalMemory` for one launch."""
    from ..machine.memory import GlobalMemory

    memory = GlobalMemory()
    for address, size in emulation.memory_seen:
        memory.add(address, size)
    unknown = [a for a in _candidates(capture.params) if memory.find(a) is None]
    if unknown:
        _add_unknown(memory, unknown)
    return memory


def _candidates(params: bytes) -> list[int]:
    """8-byte words of the parameters (also inside tensor maps) that could be user-space addresses."""
    words = struct.unpack(f"<{len(params) // 8}Q", params[: len(params) // 8 * 8])
    return sorted({word for word in words if 0x10000 <= word < 1 << 56})


def _add_unknown(memory: Any, addresses: list[int]) -> None:
    ranges = [(start, end) for start, end, permissions in mapped_ranges() if permissions.startswith("rw")]
    starts = [start for start, _ in ranges]
    inside = []
    for address in addresses:
        index = bisect.bisect_right(starts, address) - 1
        if index >= 0 and address < ranges[index][1]:
            inside.append((address, ranges[index][1]))
    if not inside:
        return
    for start, size, storage in _live_storages():
        if any(start <= address < start + size for address, _ in inside):
            memory.add(start, size, name="tensor", keep=storage)
    for address, end in inside:
        if memory.find(address) is None:
            memory.add(address, min(end - address, _UNKNOWN_BYTES), name="memory of unknown extent")


def _live_storages() -> list[tuple[int, int, object]]:
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    found = []
    with torch._C.DisableTorchFunction():
        for thing in gc.get_objects():
            if type(thing) is torch.Tensor or type(thing) is torch.nn.Parameter:
                if thing.device.type == "cpu" and thing.layout is torch.strided:
                    storage = thing.untyped_storage()
                    if storage.nbytes():
                        found.append((storage.data_ptr(), storage.nbytes(), storage))
    return found
