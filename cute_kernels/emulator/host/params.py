"""Kernel parameters: where they lie in the parameter block, and what a host call's pointers point at.

The runtime hands a launch an array of pointers, one per kernel parameter; sizes and offsets come from the PTX entry's
.param declarations, which this module reads by itself so that a launch can be recorded without the emulator's parser.
"""

from __future__ import annotations

import ctypes
import re

_TYPE_BYTES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4, "u32": 4, "s32": 4}
_TYPE_BYTES |= {"f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16}
_ENTRY = re.compile(r"\.entry\s+([\w$.]+)\s*(?:\(([^)]*)\))?", re.S)
_PARAM = re.compile(
    r"\.param\s+((?:\.align\s+\d+\s+)?)\.(\w+)\s+((?:\.ptr\s*(?:\.\w+\s*)*(?:\.align\s+\d+\s*)?)?)([\w$]+)\s*(?:\[(\d+)\])?"
)


def entries(ptx: str) -> list[str]:
    """Names of the kernels of a PTX module, in order."""
    return [match.group(1) for match in _ENTRY.finditer(ptx)]


def target(ptx: str) -> str:
    """The first word of the module's .target directive, for example sm_100a."""
    match = re.search(r"^\s*\.target\s+([\w]+)", ptx, re.M)
    if match is None:
        raise ValueError("the PTX has no .target directive")
    return match.group(1)


def layout(ptx: str, entry: str) -> list[tuple[str, int, int]]:
    """(name, offset, bytes) of every parameter of `entry` in its parameter block.

    Raises KeyError when the module has no such kernel, ValueError for a declaration that is not understood.
    """
    for match in _ENTRY.finditer(ptx):
        if match.group(1) == entry:
            break
    else:
        raise KeyError(f"the PTX has no kernel {entry}; it has {entries(ptx)}")
    slots: list[tuple[str, int, int]] = []
    offset = 0
    text = re.sub(r"//[^\n]*", "", match.group(2) or "")
    for declaration in filter(None, (part.strip() for part in text.split(","))):
        found = _PARAM.fullmatch(declaration)
        if found is None or found.group(2) not in _TYPE_BYTES:
            raise ValueError(f"parameter declaration not understood: {declaration!r}")
        align_text, kind, _, name, count = found.groups()
        size = _TYPE_BYTES[kind]
        align = int(align_text.split()[1]) if align_text else size
        total = size * (int(count) if count else 1)
        offset = -(-offset // align) * align
        slots.append((name, offset, total))
        offset += total
    return slots


def gather(slots: list[tuple[str, int, int]], pointers: int) -> bytes:
    """The parameter block: every slot's bytes read through `pointers`, the address of the host's pointer array."""
    if not slots:
        return b""
    block = bytearray(slots[-1][1] + slots[-1][2])
    addresses = (ctypes.c_void_p * len(slots)).from_address(pointers)
    for (_, offset, size), address in zip(slots, addresses):
        if not address:
            raise ValueError(f"the launch passes a null pointer for the parameter at offset {offset}")
        block[offset : offset + size] = ctypes.string_at(address, size)
    return bytes(block)
