"""Which register reads may see a register that nothing wrote: definite assignment over the control-flow graph.

Almost every read in compiled PTX is provably after a write on every path, so the machine tracks at run time only the few
registers for which this analysis cannot tell.
"""

from __future__ import annotations

from .flatten import Flat, registers
from .ir import Instr, Mem, Reg

_NO_DEST = (
    "st", "red", "bar", "barrier", "bra", "brx", "cp", "prefetch", "prefetchu", "fence", "membar", "stmatrix", "setmaxnreg",
    "nanosleep", "ret", "exit", "trap", "griddepcontrol", "wgmma_none", "call", "discard", "applypriority", "tensormap",
)  # fmt: skip


def uses_and_defs(ins: Instr) -> tuple[list[Reg], list[Reg]]:
    """Registers an instruction reads (guard included) and writes. wgmma's accumulators are both."""
    uses: list[Reg] = [] if ins.pred is None else [ins.pred]
    ops = ins.operands
    has_dest = bool(ops) and ins.base not in _NO_DEST and not isinstance(ops[0], Mem)
    if ins.base in ("bar", "barrier") and "red" in ins.mods:
        has_dest = True
    if ins.base == "tcgen05":
        has_dest = bool(ops) and ins.mods[0] == "ld"
    if ins.base == "wgmma" and ins.mods[0] == "mma_async":
        for o in ops[1:]:
            uses += registers(o)
        return uses, registers(ops[0])
    defs = registers(ops[0]) if has_dest else []
    for o in ops[1:] if has_dest else ops:
        uses += registers(o)
    return uses, defs


def maybe_unwritten(flat: Flat, pure: frozenset[str]) -> dict[int, list[Reg]]:
    """Instruction index -> registers it reads that may be unwritten there.

    An instruction that only computes (`pure` mnemonics) with such a register does not make its destination written:
    kernels compute with the garbage of masked-off columns and then select it away. A use that stores, branches, addresses
    or feeds another unit is the fault.
    """
    moves: set[int] = set()
    while True:
        found = _analyse(flat, moves)
        new = {i for i in found if flat.instrs[i].base in pure}
        if new <= moves:
            return found
        moves |= new


def _analyse(flat: Flat, moves: set[int]) -> dict[int, list[Reg]]:
    number: dict[Reg, int] = {}
    info = []
    for ins in flat.instrs:
        uses, defs = uses_and_defs(ins)
        if ins.index in moves:
            defs = []
        for r in uses + defs:
            number.setdefault(r, len(number))
        info.append((uses, defs))
    everything = (1 << len(number)) - 1
    n = len(flat.blocks)
    gen = [0] * n
    for k, b in enumerate(flat.blocks):
        for i in range(b.start, b.end):
            if flat.instrs[i].pred is None:
                for r in info[i][1]:
                    gen[k] |= 1 << number[r]
    entry = [everything] * n
    entry[0] = 0
    preds: list[list[int]] = [[] for _ in range(n)]
    for k, b in enumerate(flat.blocks):
        for s in b.succ:
            if s >= 0:
                preds[s].append(k)
    changed = True
    while changed:
        changed = False
        for k in range(n):
            value = 0 if k == 0 else everything
            for p in preds[k]:
                value &= entry[p] | gen[p]
            if k and not preds[k]:
                value = everything  # unreachable
            if value != entry[k]:
                entry[k] = value
                changed = True
    out: dict[int, list[Reg]] = {}
    for k, b in enumerate(flat.blocks):
        have = entry[k]
        under: dict = {}  # (guard, polarity) -> registers written under it in this block
        for i in range(b.start, b.end):
            ins = flat.instrs[i]
            uses, defs = info[i]
            guard = (ins.pred, ins.pred_neg)
            bad = [r for r in uses if not have >> number[r] & 1 and not (ins.pred is not None and r in under.get(guard, ()))]
            if bad:
                out[i] = bad
            for r in defs:
                if r.cls == "p":
                    for key in [g for g in under if g[0] is r]:
                        del under[key]
            if ins.pred is None:
                for r in defs:
                    have |= 1 << number[r]
            else:
                under.setdefault(guard, set()).update(defs)
                for r in defs:
                    if r in under.get((ins.pred, not ins.pred_neg), ()):
                        have |= 1 << number[r]
    return out
