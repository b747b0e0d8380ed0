"""One entry with its calls inlined, numbered registers, memory layout, basic blocks and reconvergence points."""

from __future__ import annotations

from dataclasses import dataclass, field

from .ir import (
    Function,
    Imm,
    Instr,
    Label,
    LabelRef,
    Mem,
    Module,
    Not,
    Pair,
    Paren,
    PtxError,
    Reg,
    Sym,
    UnsupportedInstruction,
    Var,
    Vec,
)

# Functions the CUDA runtime provides; the machine implements them.
BUILTINS = {"vprintf", "__assertfail"}
SHARED_BASE = 1024  # the first 1 KiB of shared memory is reserved on hardware since sm_90


@dataclass
class Block:
    """Instructions [start, end) of the flat list; `succ` are block numbers, -1 is leaving the kernel."""

    start: int
    end: int
    succ: list[int] = field(default_factory=list)
    ipdom: int = -1


@dataclass
class Flat:
    """An entry ready for decoding."""

    name: str
    instrs: list[Instr]
    blocks: list[Block]
    block_of: dict[int, int]
    reg_counts: dict[str, int]
    params: list[Var]
    param_bytes: int
    static_shared: int
    shared_align: int
    local_bytes: int
    directives: dict


class _Inliner:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.out: list[Instr | Label] = []
        self.targets: dict[str, list] = {}
        self.variables: list[Var] = []
        self.stack: list[str] = []

    def run(self, fn: Function, regs: dict, variables: dict, end: Label | None, inline: tuple) -> None:
        labels: dict[Label, Label] = {}
        copying = end is not None

        def reg(r: Reg) -> Reg:
            if not copying:
                return r
            if r not in regs:
                regs[r] = Reg(r.name, r.type)
            return regs[r]

        def var(v: Var) -> Var:
            if v in variables:
                return variables[v]
            if v in self.module.variables or not copying:
                return v
            if v in fn.variables and v.space != "shared":
                variables[v] = Var(v.name, v.space, v.size, v.align, v.type, init=v.init, array=v.array)
                self.variables.append(variables[v])
                return variables[v]
            return v

        def label(x: Label) -> Label:
            if not copying:
                return x
            if x not in labels:
                labels[x] = Label(x.name, x.line)
            return labels[x]

        def operand(o):
            if isinstance(o, Reg):
                return reg(o)
            if isinstance(o, Sym):
                v = variables.get(o.var, o.var) if isinstance(variables.get(o.var), Imm | Reg) else var(o.var)
                return v if isinstance(v, Imm | Reg) else Sym(v, o.offset)
            if isinstance(o, Vec):
                return Vec([operand(x) for x in o.items])
            if isinstance(o, Paren):
                return Paren([operand(x) for x in o.items])
            if isinstance(o, Mem):
                return Mem(operand(o.base), o.offset, None if o.extra is None else operand(o.extra))
            if isinstance(o, Pair):
                return Pair(operand(o.first), operand(o.second))
            if isinstance(o, Not):
                return Not(reg(o.reg))
            if isinstance(o, LabelRef):
                ref = LabelRef(o.name, o.scope)
                ref.target = None if o.target is None else label(o.target)
                return ref
            return o

        self.variables += [v for v in fn.variables if not copying or v.space == "shared"]
        for name, refs in fn.targets.items():
            self.targets[f"{name}@{id(labels)}"] = [operand(r) for r in refs]
        for x in fn.body:
            if isinstance(x, Label):
                self.out.append(label(x))
                continue
            ins = Instr.__new__(Instr)
            for slot in Instr.__slots__:
                setattr(ins, slot, getattr(x, slot))
            ins.operands = [operand(o) for o in x.operands]
            ins.pred = None if x.pred is None else reg(x.pred)
            ins.inline = inline
            if ins.base == "brx":
                ins.data = self.targets[f"{x.operands[1].name}@{id(labels)}"]
            if ins.base == "ret" and copying:
                jump = LabelRef("<return>", None)
                jump.target = end
                ins.op, ins.base, ins.mods, ins.operands = "bra", "bra", (), [jump]
                self.out.append(ins)
                continue
            if ins.base == "call" and self.call(ins, inline):
                continue
            self.out.append(ins)

    def call(self, ins: Instr, inline: tuple) -> bool:
        """Splice the callee in. Returns False for builtins, which stay as instructions."""
        ops = list(ins.operands)
        returns = ops.pop(0).items if isinstance(ops[0], Paren) else []
        callee = ops.pop(0)
        args = ops.pop(0).items if ops and isinstance(ops[0], Paren) else []
        name = callee.name
        fn = self.module.functions.get(name)
        if isinstance(callee, Reg) or fn is None:
            raise UnsupportedInstruction("unsupported instruction call: indirect call", ins.line)
        if fn.body is None:
            if name not in BUILTINS:
                raise UnsupportedInstruction(f"unsupported instruction call: {name} has no body in this file", ins.line)
            ins.callee = name
            ins.data = (returns, args)
            return False
        if name in self.stack:
            raise UnsupportedInstruction(f"unsupported instruction call: {name} is recursive", ins.line)
        if ins.pred is not None:
            raise UnsupportedInstruction("unsupported instruction call: under a predicate", ins.line)
        variables: dict = {}
        for formal, actual in list(zip(fn.params, args)) + list(zip(fn.returns, returns)):
            variables[formal] = actual.var if isinstance(actual, Sym) else actual
        self.stack.append(name)
        end = Label(f"<end of {name}>", ins.line)
        self.run(fn, {}, variables, end, inline + (name,))
        self.out.append(end)
        self.stack.pop()
        return True


def _registers(o):
    if isinstance(o, Reg):
        yield o
    elif isinstance(o, Vec | Paren):
        for x in o.items:
            yield from _registers(x)
    elif isinstance(o, Mem):
        yield from _registers(o.base)
        if o.extra is not None:
            yield from _registers(o.extra)
    elif isinstance(o, Pair):
        yield from _registers(o.first)
        yield from _registers(o.second)
    elif isinstance(o, Not):
        yield o.reg


def registers(o) -> list[Reg]:
    """Every register an operand mentions."""
    return list(_registers(o))


def _layout(variables: list[Var], start: int) -> tuple[int, int]:
    offset, align = start, 1
    for v in variables:
        a = max(v.align, 1)
        offset = (offset + a - 1) // a * a
        v.offset = offset
        offset += v.size
        align = max(align, a)
    return offset, align


def flatten(module: Module, entry: str) -> Flat:
    """Inline, number and block an entry. Raises PtxError, UnsupportedInstruction."""
    fn = module.functions.get(entry)
    if fn is None or not fn.is_entry or fn.body is None:
        raise PtxError(f"no entry {entry!r}; the file has {', '.join(module.entries) or 'none'}")
    inliner = _Inliner(module)
    inliner.run(fn, {}, {}, None, ())
    instrs: list[Instr] = []
    for x in inliner.out:
        if isinstance(x, Label):
            x.index = len(instrs)
        else:
            x.index = len(instrs)
            instrs.append(x)
    if not instrs or instrs[-1].base not in ("ret", "exit", "bra", "trap"):
        tail = Instr("exit", [], None, False, instrs[-1].line if instrs else fn.line, (0, 0))
        tail.index = len(instrs)
        instrs.append(tail)
    elif any(isinstance(x, Label) and x.index == len(instrs) for x in inliner.out) or instrs[-1].pred is not None:
        tail = Instr("exit", [], None, False, instrs[-1].line, (0, 0))
        tail.index = len(instrs)
        instrs.append(tail)

    counts = dict.fromkeys("phwdq", 0)
    seen: set[Reg] = set()
    for ins in instrs:
        regs = [r for o in ins.operands for r in registers(o)] + ([ins.pred] if ins.pred is not None else [])
        for r in regs:
            if r not in seen:
                seen.add(r)
                r.index = counts[r.cls]
                counts[r.cls] += 1

    # Memory layout. A function's own .param variables (call sequences) are per-thread memory, like .local.
    shared = [v for v in module.variables if v.space == "shared"] + [v for v in inliner.variables if v.space == "shared"]
    unique: list[Var] = []
    for v in shared:
        if v not in unique:
            unique.append(v)
    static = [v for v in unique if not (v.extern and v.size == 0)]
    end, align = _layout(static, SHARED_BASE)
    dynamic = [v for v in unique if v.extern and v.size == 0]
    for v in dynamic:
        a = max(v.align, 16)
        align = max(align, a)
        end = (end + a - 1) // a * a
    for v in dynamic:
        v.offset = end
    local_vars = [v for v in inliner.variables if v.space in ("local", "param")]
    for v in local_vars:
        v.space = "local"
    local_end, _ = _layout(local_vars, 0)
    param_end, _ = _layout(fn.params, 0)

    blocks, block_of = _blocks(instrs)
    _post_dominators(blocks)
    return Flat(entry, instrs, blocks, block_of, counts, fn.params, param_end, end - SHARED_BASE, align, local_end, fn.directives)


def _blocks(instrs: list[Instr]) -> tuple[list[Block], dict[int, int]]:
    leaders = {0}
    n = len(instrs)
    for i, ins in enumerate(instrs):
        if ins.base in ("bra", "brx", "ret", "exit", "trap"):
            leaders.add(i + 1)
            for o in targets_of(ins):
                leaders.add(o)
    starts = sorted(x for x in leaders if x < n)
    block_of = {s: k for k, s in enumerate(starts)}
    blocks = [Block(s, e) for s, e in zip(starts, starts[1:] + [n])]
    for k, b in enumerate(blocks):
        last = instrs[b.end - 1]
        falls = k + 1 if k + 1 < len(blocks) else -1
        if last.base == "bra":
            b.succ = [block_of[t] for t in targets_of(last)]
            if last.pred is not None:
                b.succ.append(falls)
        elif last.base == "brx":
            b.succ = sorted({block_of[t] for t in targets_of(last)}) + ([falls] if last.pred is not None else [])
        elif last.base in ("ret", "exit", "trap"):
            b.succ = [-1] + ([falls] if last.pred is not None else [])
        else:
            b.succ = [falls]
    return blocks, block_of


def targets_of(ins: Instr) -> list[int]:
    """Flat indices a branch may go to."""
    refs = ins.data if ins.base == "brx" else [o for o in ins.operands if isinstance(o, LabelRef)] if ins.base == "bra" else []
    out = []
    for ref in refs:
        if ref.target is None:
            raise PtxError(f"unknown label {ref.name}", ins.line)
        out.append(ref.target.index)
    return out


def _post_dominators(blocks: list[Block]) -> None:
    """Immediate post-dominators (Cooper, Harvey and Kennedy's iteration on the reverse graph). -1 is the exit."""
    n = len(blocks)
    exit_node = n
    succ = [[s if s >= 0 else exit_node for s in b.succ] for b in blocks]
    preds: list[list[int]] = [[] for _ in range(n + 1)]
    for k, ss in enumerate(succ):
        for s in ss:
            preds[s].append(k)
    order: list[int] = []
    seen = [False] * (n + 1)

    def visit(root: int) -> None:
        stack = [(root, iter(preds[root]))]
        seen[root] = True
        while stack:
            node, it = stack[-1]
            for p in it:
                if not seen[p]:
                    seen[p] = True
                    stack.append((p, iter(preds[p])))
                    break
            else:
                order.append(node)
                stack.pop()

    visit(exit_node)
    for k in range(n - 1, -1, -1):  # blocks of an infinite loop do not reach the exit: hang them below it
        if not seen[k]:
            succ[k].append(exit_node)
            preds[exit_node].append(k)
            visit(k)
    number = {node: i for i, node in enumerate(order)}
    rpo = order[::-1]
    if rpo[0] != exit_node:
        rpo.remove(exit_node)
        rpo.insert(0, exit_node)
        number[exit_node] = len(order)
    idom: dict[int, int] = {exit_node: exit_node}
    changed = True
    while changed:
        changed = False
        for node in rpo[1:]:
            new = -1
            for s in succ[node]:
                if s in idom:
                    if new < 0:
                        new = s
                    else:
                        a, b = s, new
                        while a != b:
                            while number[a] < number[b]:
                                a = idom[a]
                            while number[b] < number[a]:
                                b = idom[b]
                        new = a
            if new >= 0 and idom.get(node) != new:
                idom[node] = new
                changed = True
    for k, b in enumerate(blocks):
        d = idom.get(k, exit_node)
        b.ipdom = -1 if d == exit_node else d
