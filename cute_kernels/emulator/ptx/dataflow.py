"""Forward analysis of a control-flow graph."""

from __future__ import annotations

from collections.abc import Callable

from .flatten import Flat


def forward(flat: Flat, first, transfer: Callable, join: Callable) -> list:
    """State at the entry of every block; None: unreachable.

    Args:
        first: the state at the kernel's entry.
        transfer: (state, instruction) -> the state after it.
        join: (state, state) -> the state where two paths meet. It must only grow, so that the loop ends.
    """
    entry: list = [None] * len(flat.blocks)
    entry[0] = first
    work = [0]
    while work:
        k = work.pop()
        state = entry[k]
        block = flat.blocks[k]
        for i in range(block.start, block.end):
            state = transfer(state, flat.instrs[i])
        for s in block.succ:
            if s < 0:
                continue
            new = state if entry[s] is None else join(entry[s], state)
            if new != entry[s]:
                entry[s] = new
                work.append(s)
    return entry
