"""How the keys of one (batch row, KV head, row tile) are divided among CTAs: one rule, for the host and for the kernel.

The split size depends on the number of visible keys and on compile-time constants alone, never on the batch size, the capacity or
the number of SMs. Hence a row's partial sums and the order in which they are merged, and with them its result bit for bit, are the
same alone and inside any batch, and for an int and a device length.

At most `cap` splits up to 1024 keys, 2 * cap up to 8192, `top` * cap beyond. With 8 KV heads and cap 8, one sequence on an H200
gets 64 CTAs for 1024 keys (more splits gained nothing there, 5.6 us either way, and cost a batch of 8 a quarter of its time: 19.4
against 14.9 us), 128 for 4096 (9.8 us, with 64 CTAs 12.0) and for 32768 (35.6 us, with 256 CTAs 39.2: the splits' merge, which
nothing overlaps, takes as long as there are splits).
"""

from __future__ import annotations

from typing import Any

TIERS = (1024, 8192)  # up to the first: cap splits, up to the second: twice, beyond: `top` times as many


def split_cap(kv_heads: int) -> int:
    """Most splits of one sequence: enough CTAs for one sequence to use the GPU. Depends on the head count alone."""
    return max(2, min(32, 64 // max(1, kv_heads)))


def _ceil_div(n: Any, divisor: int) -> Any:
    """For n >= 0; a power of two becomes a shift (a DSL Int32 // rounds down, which costs several instructions)."""
    if divisor & (divisor - 1) == 0:
        return (n + (divisor - 1)) >> (divisor.bit_length() - 1)
    return (n + (divisor - 1)) // divisor


def top(tile: int, cap: int) -> int:
    """Times `cap`, the most splits of long sequences: two for Hopper's tile of one token (128 CTAs with 4 to 32 KV heads); else,
    and for one or two KV heads, four."""
    return 2 if tile == 64 and cap < 32 else 4


def split_size(keys: Any, tile: int, cap: int, select: Any = None) -> Any:
    """Keys per split: the smallest multiple of `tile` that needs no more splits than allowed.

    `keys` is an int, or a DSL Int32 with `select(condition, a, b)` to choose between two.
    """
    one = _ceil_div(keys, tile * cap)
    two = (one + 1) >> 1
    long = two if top(tile, cap) == 2 else (one + 3) >> 2
    if select is None:
        units = one if keys <= TIERS[0] else two if keys <= TIERS[1] else long
    else:
        units = select(keys <= TIERS[0], one, select(keys <= TIERS[1], two, long))
    return tile * units


def split_count(keys: int, tile: int, cap: int) -> int:
    """Number of splits (at least 1: a sequence without keys still has to write its zeros)."""
    return -(-keys // split_size(keys, tile, cap)) if keys > 0 else 1


def split_bound(keys: int, tile: int, cap: int) -> int:
    """Largest split_count over all lengths from 0 to `keys`."""
    most = cap if keys <= TIERS[0] else 2 * cap if keys <= TIERS[1] else top(tile, cap) * cap
    return max(1, min(most, -(-keys // tile)))
