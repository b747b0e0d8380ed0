"""Which instructions may read a register of a tcgen05.ld before any tcgen05.wait::ld: a forward analysis of the control-flow graph.

The value is right all the same (PTX ISA 9.7.16.6.4.5: a true register dependence on tcgen05.ld is respected), but it orders no
memory: what a later release publishes does not include the load. The strict level reports such reads; whether a candidate's
load is really in flight is asked when it executes.
"""

from __future__ import annotations

from .dataflow import forward
from .defined import uses_and_defs
from .flatten import Flat, registers
from .ir import Instr, Reg


def _is(ins: Instr, kind: str) -> bool:
    return ins.base == "tcgen05" and ins.mods[0] == kind


def analyse(flat: Flat) -> dict[int, list[Reg]]:
    """{instruction index: registers it reads that a tcgen05.ld loads, with a path to it on which no wait::ld lies}"""
    number: dict[Reg, int] = {}
    for ins in flat.instrs:
        if _is(ins, "ld"):
            for r in registers(ins.operands[0]):
                number.setdefault(r, len(number))
    if not number:
        return {}
    table: list[tuple[int, int]] = []  # registers read, registers written
    for ins in flat.instrs:
        uses, defs = uses_and_defs(ins)
        table.append(tuple(sum(1 << number[r] for r in set(regs) if r in number) for regs in (uses, defs)))

    def transfer(state: int, ins: Instr) -> int:
        if _is(ins, "wait::ld"):
            return 0
        written = table[ins.index][1]
        if _is(ins, "ld"):
            return state | written
        return state if ins.pred is not None else state & ~written

    entry = forward(flat, 0, transfer, lambda x, y: x | y)
    names = {n: r for r, n in number.items()}
    found: dict[int, list[Reg]] = {}
    for k, block in enumerate(flat.blocks):
        state = entry[k]
        if state is None:
            continue
        for i in range(block.start, block.end):
            hit = state & table[i][0]
            if hit:
                found[i] = [names[n] for n in range(hit.bit_length()) if hit >> n & 1]
            state = transfer(state, flat.instrs[i])
    return found
