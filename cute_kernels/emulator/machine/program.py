"""An entry decoded into items, the units the scheduler steps through.

An item is one of: a run of instructions that never block (compiled to one Python function, once for the full warp and once
for a masked one, on first use), one blocking instruction, or one control transfer.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..datapath.errors import IllegalOperand
from ..ptx import tmem_loads, wgmma_registers
from ..ptx.defined import maybe_unwritten, uses_and_defs
from ..ptx.flatten import Flat, flatten, registers, targets_of
from ..ptx.ir import FunctionRef, Instr, Mem, Module, PtxError, Reg, Sym, UnsupportedInstruction, Vec
from . import emit_arithmetic, emit_logic, emit_moves  # noqa: F401  (they register their instructions)
from .emit import HANDLERS, Emitter
from .optable import OPS, classify

CODE, BLOCKING, BRANCH, INDIRECT, EXIT = range(5)
REGISTER_ONLY = frozenset(HANDLERS) - {"vote"}
_PURE = REGISTER_ONLY | {"shfl"}  # pass a register's "never written" on to their result
CONTROL = ("bra", "brx", "ret", "exit", "trap", "brkpt")


_NO_DEST = ("st", "red", "bar", "barrier", "bra", "brx", "cp", "prefetch", "fence", "membar", "stmatrix", "setmaxnreg")


def function_addresses(operands) -> Iterator[str]:
    """Functions whose addresses the operands are, or name a variable that holds."""
    for o in operands:
        if isinstance(o, FunctionRef):
            yield o.name
        elif isinstance(o, Sym) and o.var.code:
            yield o.var.code
        elif isinstance(o, Vec):
            yield from function_addresses(o.items)
        elif isinstance(o, Mem):
            yield from function_addresses((o.base,))


def source_registers(ins: Instr) -> list:
    """Registers an instruction reads."""
    regs = [] if ins.pred is None else [ins.pred]
    writes_first = bool(ins.operands) and ins.base not in _NO_DEST and not isinstance(ins.operands[0], Mem)
    for k, o in enumerate(ins.operands):
        if k == 0 and writes_first:
            continue
        regs += registers(o)
    return regs


def _half_move(ins: Instr, suspects: list, tracked: set) -> str | None:
    """The call, up to its mask, that moves flags by halves for mov.b64 between a register and a pair."""
    if ins.base != "mov" or "b64" not in ins.mods:
        return None
    d, a = ins.operands

    def key(r, known):
        return (r.cls, r.index) if isinstance(r, Reg) and r in known else None

    if isinstance(a, Vec) and len(a.items) == 2 and isinstance(d, Reg):
        return f"pack_written({key(d, tracked)}, {tuple(key(r, suspects) for r in a.items)}"
    if isinstance(d, Vec) and len(d.items) == 2 and isinstance(a, Reg):
        return f"unpack_written({tuple(key(r, tracked) for r in d.items)}, {key(a, suspects)}"
    return None


class Item:
    __slots__ = (
        "kind",
        "index",
        "instrs",
        "run_full",
        "run_masked",
        "fn",
        "ins",
        "target",
        "pred",
        "neg",
        "rpc",
        "targets",
        "line",
        "suspects",
        "marks",
    )

    def __init__(self, kind: int, index: int, instrs: list[Instr]) -> None:
        self.kind, self.index, self.instrs = kind, index, instrs
        self.run_full = self.run_masked = None
        self.fn = None
        self.ins = instrs[0]
        self.line = self.ins.line
        self.target = -1
        self.pred = None
        self.neg = False
        self.rpc = -1
        self.targets = ()
        self.suspects = self.marks = ()


class Program:
    """A compiled entry. `fine` makes every memory and synchronisation instruction an item of its own (random schedules);
    `strict` adds what only that level reports."""

    def __init__(
        self, module: Module, entry: str, *, fine: bool = False, checking: bool = True, strict: bool = False
    ) -> None:
        self.module = module
        self.flat: Flat = flatten(module, entry)
        self.fine, self.checking = fine, checking
        self.emitter = Emitter()
        self.suspects = maybe_unwritten(self.flat, _PURE) if checking else {}
        self.tracked = {r for regs in self.suspects.values() for r in regs}
        for i in self.suspects:
            if self.flat.instrs[i].base in _PURE:
                self.tracked.update(registers(self.flat.instrs[i].operands[0]))
        self.in_flight, self.unfenced = wgmma_registers.analyse(self.flat) if checking else ({}, set())
        self.unwaited = tmem_loads.analyse(self.flat) if strict else {}
        self.items: list[Item] = []
        self._decode()
        self.nitems = len(self.items)

    def _decode(self) -> None:
        flat = self.flat
        first_item: dict[int, int] = {}
        errors: list[UnsupportedInstruction] = []
        for k, block in enumerate(flat.blocks):
            first_item[k] = len(self.items)
            run: list[Instr] = []

            def flush(run=run):
                if run:
                    self.items.append(Item(CODE, len(self.items), list(run)))
                    run.clear()

            for ins in flat.instrs[block.start : block.end]:
                try:
                    kind, fn = self.decode(ins)
                except UnsupportedInstruction as e:
                    errors.append(e)
                    continue
                if kind == CODE:
                    if self.fine and fn is not None:
                        flush()
                        run.append(ins)
                        flush()
                    else:
                        run.append(ins)
                    continue
                flush()
                item = Item(kind, len(self.items), [ins])
                item.fn = fn
                item.rpc = block.ipdom
                self.items.append(item)
            flush()
            if first_item[k] == len(self.items):  # nothing decoded: keep a place for the branch targets
                first_item[k] = len(self.items)
        if errors:
            raise (
                errors[0] if len(errors) == 1 else UnsupportedInstruction("; ".join(dict.fromkeys(str(e) for e in errors[:20])), 0)
            )
        for item in self.items:
            if item.kind in (BRANCH, INDIRECT):
                item.rpc = first_item[item.rpc] if item.rpc >= 0 else -1
                goes = [first_item[flat.block_of[t]] for t in targets_of(item.ins)]
                item.target, item.targets = goes[0], tuple(goes)
            else:
                item.rpc = -1
            if item.ins.pred is not None and item.kind != CODE:
                item.pred, item.neg = item.ins.pred.index, item.ins.pred_neg
            if self.tracked and item.kind != CODE:
                item.suspects, item.marks = self.track_item(item)
            if item.kind == BLOCKING and (item.ins.index in self.in_flight or item.ins.index in self.unfenced):
                item.fn = self._check_registers(item)
            if item.kind == BLOCKING and item.ins.index in self.unwaited:
                item.fn = self._check_loaded(item)

    def decode(self, ins: Instr):
        """(item kind, implementation or None). Raises UnsupportedInstruction."""
        base = ins.base
        for name in function_addresses(ins.operands):
            raise UnsupportedInstruction(f"unsupported instruction {ins.op}: the address of function {name}", ins.line)
        if base in CONTROL:
            if base == "bra":
                return BRANCH, None
            if base == "brx":
                return INDIRECT, None
            return EXIT, base
        op = OPS.get(base)
        if op is None and base not in REGISTER_ONLY:
            raise UnsupportedInstruction(f"unsupported instruction {ins.op}", ins.line)
        try:
            if op is not None:
                blocking, fn = op(ins)
                return (BLOCKING, fn) if blocking else (CODE, self._bind(ins, fn))
            self.emitter.emit(ins, False)
            return CODE, None
        except (PtxError, IllegalOperand):
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as e:
            number = isinstance(e, IndexError) or "to unpack" in str(e)
            why = "the number of its operands or qualifiers" if number else f"{type(e).__name__}: {e}"
            raise UnsupportedInstruction(f"unsupported instruction {ins!r}: {why}", ins.line) from e

    def _check_registers(self, item: Item):
        """A blocking instruction that may touch registers of a wgmma in flight, or a wgmma with no fence before it."""
        fn, access = item.fn, self.in_flight.get(item.ins.index)

        def checked(w, s, m, ins):
            if access is not None:
                w.check_in_flight(*access, ins)
            else:
                text = "is the first, or uses accumulators that other instructions computed, with no wgmma.fence before"
                w.machine.report("wgmma-fence", w, ins, text)
            return fn(w, s, m, ins)

        return checked

    def _check_loaded(self, item: Item):
        """A blocking instruction that reads a register of a tcgen05.ld not waited for."""
        fn, regs = item.fn, self.unwaited[item.ins.index]

        def checked(w, s, m, ins):
            w.check_loaded(regs, ins)
            return fn(w, s, m, ins)

        return checked

    def _bind(self, ins: Instr, fn):
        self.emitter.globals[f"f{ins.index}"] = fn
        self.emitter.globals[f"i{ins.index}"] = ins
        return fn

    def compile(self, item: Item, masked: bool):
        """Python function f(w, m) of a CODE item."""
        em = self.emitter
        body: list[str] = []
        for ins in item.instrs:
            after: list[str] = []
            if self.tracked:
                before, after = self._track(ins)
                body += before
            access = self.in_flight.get(ins.index)
            if access is not None:
                em.globals[f"i{ins.index}"] = ins
                em.globals[f"g{ins.index}"] = access
                body.append(f"w.check_in_flight(*g{ins.index}, i{ins.index})")
            if ins.index in self.unwaited:
                em.globals[f"i{ins.index}"] = ins
                em.globals[f"l{ins.index}"] = self.unwaited[ins.index]
                guard = ""
                if ins.pred is not None:
                    guard = f"if (m & {'~' if ins.pred_neg else ''}P[{ins.pred.index}]).any(): "
                body.append(f"{guard}w.check_loaded(l{ins.index}, i{ins.index})")
            if ins.base in OPS:
                call = f"f{ins.index}(w, {{}}, i{ins.index})"
                if ins.pred is not None:
                    p = f"~P[{ins.pred.index}]" if ins.pred_neg else f"P[{ins.pred.index}]"
                    body.append(f"mq = m & {p}")
                    body.append(f"if mq.any(): {call.format('mq')}")
                else:
                    body.append(call.format("m"))
            else:
                body += em.emit(ins, masked)
            body += after
        text = "\n".join(body)
        head = [
            f"{v}=w.{v}" for v in ("U", "S", "F", "G", "X", "Y", "D", "E", "LO", "HI", "H", "I", "R", "P", "Q") if f"{v}[" in text
        ]
        source = "def segment(w, m):\n " + ";".join(head or ["pass"]) + "\n " + text.replace("\n", "\n ") + "\n"
        scope: dict = {}
        exec(compile(source, f"<ptx line {item.line}>", "exec"), em.globals, scope)
        fn = scope["segment"]
        if masked:
            item.run_masked = fn
        else:
            item.run_full = fn
        return fn

    def _track(self, ins: Instr) -> tuple[list[str], list[str]]:
        """Lines that check suspect reads before an instruction, and that mark tracked registers written after it."""
        uses, defs = uses_and_defs(ins)
        suspects = self.suspects.get(ins.index, [])
        marks = [r for r in defs if r in self.tracked]
        if not suspects and not marks:
            return [], []
        before, name = [], "m"
        if ins.pred is not None:
            p = f"~P[{ins.pred.index}]" if ins.pred_neg else f"P[{ins.pred.index}]"
            before.append(f"mt = m & {p}")
            name = "mt"
        self.emitter.globals[f"i{ins.index}"] = ins
        keys = tuple((r.cls, r.index) for r in suspects)
        if ins.base == "selp" and isinstance(ins.operands[3], Reg):
            d, a, b, p = ins.operands
            ka, kb, kp = (tuple((r.cls, r.index) for r in suspects if r in registers(o)) for o in (a, b, p))
            dests = tuple((r.cls, r.index) for r in marks)
            return before, [f"w.select_written({dests}, {ka}, {kb}, {kp}, {p.index}, {name})"]
        if ins.base in REGISTER_ONLY:
            half = _half_move(ins, suspects, self.tracked)
            if half is not None:
                return before, [f"w.{half}, {name})"]
            # Packing 16-bit halves of which one is never written: compilers do it and then use the other half only.
            packed = ins.base == "mov" and isinstance(ins.operands[1], Vec)
            some = packed and len(suspects) < len(registers(ins.operands[1]))
            after = [f"w.move_written({tuple((r.cls, r.index) for r in marks)}, {() if some else keys}, {name})"]
            return before, after
        if suspects:
            before.append(f"w.check_written({keys}, {name}, i{ins.index})")
        return before, [f"w.mark_written({tuple((r.cls, r.index) for r in marks)}, {name})"] if marks else []

    def track_item(self, item: Item):
        """(suspect register keys, marked register keys) of a blocking or control item."""
        uses, defs = uses_and_defs(item.ins)
        if item.ins.base == "shfl":
            source = item.ins.operands[1]
            keys = [(r.cls, r.index) for r in self.suspects.get(item.ins.index, []) if r is source]
            item.ins.data = (keys[0] if keys else None, [(r.cls, r.index) for r in defs if r in self.tracked])
            return (), ()
        return (
            tuple((r.cls, r.index) for r in self.suspects.get(item.ins.index, [])),
            tuple((r.cls, r.index) for r in defs if r in self.tracked),
        )

    @property
    def item_of(self) -> dict[int, int]:
        """Flat instruction index -> item index."""
        table = self.__dict__.get("_item_of")
        if table is None:
            table = self._item_of = {ins.index: item.index for item in self.items for ins in item.instrs}
        return table

    def load_readers(self, ins: Instr) -> list[tuple[int, int]]:
        """(item, instruction index) of every instruction that reads a register `ins` loads."""
        cache = self.__dict__.setdefault("_readers", {})
        if not cache:
            users: dict = {}
            for x in self.flat.instrs:
                for r in source_registers(x):
                    users.setdefault(r, []).append((self.item_of.get(x.index, -1), x.index))
            cache["users"] = users
        hit = cache.get(ins.index)
        if hit is None:
            regs = registers(ins.operands[0])
            hit = cache[ins.index] = sorted({u for r in regs for u in cache["users"].get(r, ())})
        return hit

    def source_of(self, ins: Instr) -> str:
        """ "file:line" from .loc, or ""."""
        file_number, line = ins.loc
        name = self.module.files.get(file_number)
        return f"{name}:{line}" if name and line else ""


def survey(module: Module) -> dict[str, dict]:
    """For every entry: opcode -> {count, supported, class, lines of the first unsupported use}."""
    out: dict[str, dict] = {}
    for entry in module.entries:
        table: dict[str, dict] = {}
        try:
            flat = flatten(module, entry)
        except PtxError as e:
            out[entry] = {"error": str(e)}
            continue
        shell = Program.__new__(Program)
        shell.emitter = Emitter()
        for ins in flat.instrs:
            row = table.setdefault(ins.op, {"count": 0, "supported": True, "class": classify(ins), "line": ins.line, "why": ""})
            row["count"] += 1
            try:
                shell.decode(ins)
            except UnsupportedInstruction as e:
                row.update(supported=False, why=str(e), line=ins.line)
        out[entry] = table
    return out
