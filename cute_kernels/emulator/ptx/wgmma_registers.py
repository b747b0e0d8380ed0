"""Which instructions may touch registers that a wgmma.mma_async still uses, and which wgmma may lack a wgmma.fence.

From wgmma.mma_async until a wgmma.wait_group covers it, its accumulators may not be read or written and its A registers may not
be written. And after other instructions have computed accumulators, a wgmma.fence must come before the wgmma that uses
them. (The ISA asks for it after reads, copies and writes of A registers too, but compilers move the cvt and mov that fill
registers past the fence, and ptxas copes.) ptxas refuses neither.

A forward analysis over the control-flow graph finds the few candidates, so that nothing is tracked elsewhere; whether a
candidate's wgmma is really in flight is asked when it executes.
"""

from __future__ import annotations

from .dataflow import forward
from .defined import uses_and_defs
from .flatten import Flat, registers
from .ir import Instr, Reg, Vec

_AGES = 8  # committed groups told apart; older ones count as one


def operand_registers(ins: Instr) -> tuple[list[Reg], list[Reg]]:
    """(accumulators, A registers) of a wgmma.mma_async."""
    a = ins.operands[1]
    return registers(ins.operands[0]), registers(a) if isinstance(a, Vec) else []


def is_mma(ins: Instr) -> bool:
    return ins.base == "wgmma" and ins.mods[0] == "mma_async"


def analyse(flat: Flat) -> tuple[dict[int, tuple[list[Reg], list[Reg]]], set[int]]:
    """({instruction index: (registers read, registers written) that may be in flight}, {index of a wgmma without a fence})."""
    number: dict[Reg, int] = {}
    mmas: dict[int, tuple[int, int]] = {}
    for ins in flat.instrs:
        if is_mma(ins):
            masks = []
            for regs in operand_registers(ins):
                for r in regs:
                    number.setdefault(r, len(number))
                masks.append(sum(1 << number[r] for r in set(regs)))
            mmas[ins.index] = (masks[0], masks[1])
    if not mmas:
        return {}, set()
    touched: dict[int, tuple[int, int]] = {}
    for ins in flat.instrs:
        if ins.index not in mmas:
            uses, defs = uses_and_defs(ins)
            read, written = (sum(1 << number[r] for r in set(regs) if r in number) for regs in (uses, defs))
            if read or written:
                touched[ins.index] = (read, written)

    first = 1 << len(number)  # no fence since the kernel began

    def transfer(state, ins, found=None, unfenced=None):
        """state: (accumulators, A registers) in flight by age, the open group first; then the registers computed since a fence."""
        if ins.base == "wgmma":
            *groups, dirty = state
            kind = ins.mods[0]
            if kind == "fence":
                return (*groups, 0)
            if kind == "mma_async":
                d, a = mmas[ins.index]
                if unfenced is not None and dirty & (d | first):
                    unfenced.add(ins.index)
                groups[0] = (groups[0][0] | d, groups[0][1] | a)
            elif kind == "commit_group":
                last = (groups[-1][0] | groups[-2][0], groups[-1][1] | groups[-2][1])
                groups = [(0, 0), *groups[:-2], last]
            elif kind == "wait_group":
                keep = int(ins.operands[0].value)
                groups = [g if k <= keep else (0, 0) for k, g in enumerate(groups)]
            return (*groups, dirty)
        access = touched.get(ins.index)
        if access is None:
            return state
        read, written = access
        if found is not None:
            d = a = 0
            for group in state[:-1]:
                d, a = d | group[0], a | group[1]
            if read & d or written & (d | a):
                found[ins.index] = (read & d, written & (d | a))
        return (*state[:-1], state[-1] | (0 if ins.base == "mov" else written))

    empty = ((0, 0),) * (_AGES + 1) + (0,)

    def join(x, y):
        return tuple((g[0] | h[0], g[1] | h[1]) for g, h in zip(x[:-1], y[:-1])) + (x[-1] | y[-1],)

    entry = forward(flat, (*empty[:-1], first), transfer, join)
    found: dict[int, tuple[int, int]] = {}
    unfenced: set[int] = set()
    for k, block in enumerate(flat.blocks):
        state = entry[k]
        if state is None:
            continue
        for i in range(block.start, block.end):
            state = transfer(state, flat.instrs[i], found, unfenced)
    names = {1 << n: r for r, n in number.items()}

    def unpack(mask: int) -> list[Reg]:
        return [r for bit, r in names.items() if mask & bit]

    return {i: (unpack(read), unpack(written)) for i, (read, written) in found.items()}, unfenced
