"""How the keys of one (batch row, KV head, row tile) are divided among CTAs: one rule, for the host and for the kernel.

The split size depends on the number of visible keys and on compile-time constants alone, never on the batch size, the capacity or
the number of SMs. Hence a row's partial sums and the order in which they are merged, and with them its result bit for bit, are the
same alone and inside any batch, and for an int and a device length.
"""

from __future__ import annotations

from typing import Any


def split_size(keys: Any, tile: int, cap: int) -> Any:
    """Keys per split: the smallest multiple of `tile` that needs at most `cap` splits. `keys` may be an int or a DSL Int32."""
    units = (keys + (tile * cap - 1)) // (tile * cap)
    return tile * units


def split_count(keys: int, tile: int, cap: int) -> int:
    """Number of splits (at least 1: a sequence without keys still has to write its zeros)."""
    return -(-keys // split_size(keys, tile, cap)) if keys > 0 else 1


def split_bound(keys: int, tile: int, cap: int) -> int:
    """Largest split_count over all lengths from 0 to `keys`."""
    return max(1, min(cap, -(-keys // tile)))
