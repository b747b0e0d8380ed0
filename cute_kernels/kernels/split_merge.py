"""Merging softmax partials, in a fixed order: on the device, in fp32, base 2."""

from __future__ import annotations

from typing import Any

from cute_kernels.kernels import ptx


def merge(parts: list[Any]) -> tuple[Any, Any, Any]:
    """Partials ((maximum, sum), [[4 floats] per chunk of O]) merged in list order: (maximum, sum, O)."""
    top = parts[0][0][0]
    for (m, _), _ in parts[1:]:
        top = ptx.fmax(top, m)
    l = o = None
    for (m, part_l), part_o in parts:
        w = ptx.exp2(m - top)
        if l is None:
            l, o = part_l * w, [[x * w for x in chunk] for chunk in part_o]
        else:
            l = l + part_l * w
            o = [[x * w + y for x, y in zip(chunk, acc, strict=True)] for chunk, acc in zip(part_o, o, strict=True)]
    return top, l, o
