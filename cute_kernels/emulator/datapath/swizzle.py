"""Shared-memory swizzles: the XOR patterns applied to absolute shared-memory byte offsets.

TMA (PTX ISA 5.5.7) and the matrix descriptors of wgmma and tcgen05 use the same functions, so a tile that TMA wrote
with a mode is read back by a descriptor of that mode. Each mode XORs a few address bits with higher ones; every
function is its own inverse. `base_offset` is the "matrix base offset" of a descriptor (or, for TMA, implied by the
address): the pattern's row counter is ``(address >> 7) - base_offset``.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from .errors import IllegalOperand

IntOrArray = TypeVar("IntOrArray", int, np.ndarray)

# mode -> (number of row bits, lowest row bit's shift down to the chunk bits it flips).
# 128B: bits 4-6 ^= bits 7-9; 64B: 4-5 ^= 7-8; 32B: 4 ^= 7; 32-byte atoms: 5-6 ^= 7-8; 64-byte atoms: 6 ^= 7.
_PATTERN: dict[str, tuple[int, int]] = {
    "none": (0, 4),
    "32B": (1, 4),
    "64B": (2, 4),
    "128B": (3, 4),
    "128B_32B-atom": (2, 5),
    "128B_64B-atom": (1, 6),
}

MODES = tuple(_PATTERN)

#: Bytes of one row of the pattern: the widest inner extent a tile of that mode may have.
SPAN: dict[str, int] = {"none": 16, "32B": 32, "64B": 64, "128B": 128, "128B_32B-atom": 128, "128B_64B-atom": 128}

#: Bytes after which the pattern repeats; a tile that starts on such a boundary has base offset 0.
REPEAT: dict[str, int] = {
    "none": 16, "32B": 256, "64B": 512, "128B": 1024, "128B_32B-atom": 512, "128B_64B-atom": 256,
}


def swizzle_offset(addr: IntOrArray, mode: str, base_offset: int = 0) -> IntOrArray:
    """Swizzled byte offset(s) of `addr`.

    Args:
        addr: absolute shared-memory byte offset within the CTA's window, a Python int or an integer array.
        mode: one of `MODES`.
        base_offset: 0..7, the descriptor's matrix base offset.

    Returns:
        The same type (and dtype) as `addr`.

    Raises:
        IllegalOperand: for an unknown mode.
    """
    try:
        bits, chunk = _PATTERN[mode]
    except KeyError:
        raise IllegalOperand("swizzle mode", mode, f"must be one of {', '.join(MODES)}") from None
    if bits == 0:
        return addr
    row = addr >> 7
    if base_offset:
        row = row - base_offset
    return addr ^ ((row & ((1 << bits) - 1)) << chunk)
