"""Turns register-only PTX instructions into Python source lines that call NumPy on 32-lane rows.

A register row is reached through lists of views, one letter per type, so that no cast happens at run time:
    U S F G   32-bit registers as uint32, int32, float32, float16[64]
    X Y D E   64-bit registers as uint64, int64, float64, float32[64] (f32x2); LO / HI are their strided uint32 halves
    H I R     16-bit registers as uint16, int16, float16;  P predicates (bool);  Q 128-bit, two uint64 rows each
The handlers stand in emit_arithmetic, emit_logic and emit_moves. Each writes its result to the name `dst()` gives it. Where lanes
are masked that is a temporary which is then copied under the mask, so one handler serves the full-warp and the masked path.
"""

from __future__ import annotations

import numpy as np

from ..ptx.ir import TYPE_BITS, Imm, Instr, Not, Pair, Reg, Sink, Special, Sym, UnsupportedInstruction
from . import values

VIEW = {
    "b32": "U", "u32": "U", "s32": "S", "f32": "F", "f16x2": "G", "bf16x2": "U", "tf32": "U", "b64": "X", "u64": "X",
    "s64": "Y", "f64": "D", "f32x2": "E", "b16": "H", "u16": "H", "s16": "I", "f16": "R", "bf16": "H", "pred": "P",
    "b8": "H", "u8": "H", "s8": "I", "e4m3x2": "H", "e5m2x2": "H", "u16x2": "U", "s16x2": "U", "e2m1x2": "H",
    "e4m3x4": "U", "e5m2x4": "U", "b8x4": "U",
}  # fmt: skip
DTYPE = {
    "U": np.uint32, "S": np.int32, "F": np.float32, "G": np.float16, "X": np.uint64, "Y": np.int64, "D": np.float64,
    "E": np.float32, "H": np.uint16, "I": np.int16, "R": np.float16, "P": np.bool_,
}  # fmt: skip
CLASS = {"U": "w", "S": "w", "F": "w", "G": "w", "X": "d", "Y": "d", "D": "d", "E": "d", "H": "h", "I": "h", "R": "h", "P": "p"}
BASE_VIEW = {"w": "U", "d": "X", "h": "H", "p": "P", "q": "Q"}
LANES = {"G": 64, "E": 64}
_NUM_BITS = {"U": 32, "S": 32, "F": 32, "X": 64, "Y": 64, "D": 64, "H": 16, "I": 16, "R": 16}


def _make_temps() -> dict[str, np.ndarray]:
    """Three sets of temporaries; views of one set alias, as one instruction uses one type per set."""
    out: dict[str, np.ndarray] = {}
    for k in range(3):
        w, d, h = np.empty(32, np.uint32), np.empty(32, np.uint64), np.empty(32, np.uint16)
        out |= {f"tU{k}": w, f"tS{k}": w.view(np.int32), f"tF{k}": w.view(np.float32), f"tG{k}": w.view(np.float16)}
        out |= {f"tX{k}": d, f"tY{k}": d.view(np.int64), f"tD{k}": d.view(np.float64), f"tE{k}": d.view(np.float32)}
        out |= {f"tLO{k}": d.view(np.uint32)[0::2], f"tHI{k}": d.view(np.uint32)[1::2]}
        out |= {f"tH{k}": h, f"tI{k}": h.view(np.int16), f"tR{k}": h.view(np.float16), f"tP{k}": np.empty(32, np.bool_)}
    return out


class Emitter:
    """Collects the constants and writes the lines; one per program, so equal constants are stored once."""

    def __init__(self) -> None:
        self.globals: dict[str, object] = {
            "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "bitwise_and": np.bitwise_and,
            "bitwise_or": np.bitwise_or, "bitwise_xor": np.bitwise_xor, "invert": np.invert, "copyto": np.copyto,
            "left_shift": np.left_shift, "right_shift": np.right_shift, "minimum": np.minimum, "maximum": np.maximum,
            "fmin": np.fmin, "fmax": np.fmax, "less": np.less, "less_equal": np.less_equal, "greater": np.greater,
            "greater_equal": np.greater_equal, "equal": np.equal, "not_equal": np.not_equal, "where": np.where,
            "logical_not": np.logical_not, "absolute": np.absolute, "negative": np.negative, "divide": np.divide,
            "sqrt": np.sqrt, "V": values, "uint32": np.uint32, "uint64": np.uint64, "int64": np.int64, "int32": np.int32,
            "float64": np.float64, "float32": np.float32, "float16": np.float16, "uint16": np.uint16, "int16": np.int16,
            "exp2": np.exp2, "z32": np.zeros(32, np.uint32), "f64t": np.empty(32, np.float64), "f64t64": np.empty(64, np.float64),
            "np": np, "bool_": np.bool_,
        }  # fmt: skip
        self.globals |= _make_temps()
        self.const_names: dict[tuple, str] = {}
        self.lines: list[str] = []
        self.mask: str | None = None
        self.copies: list[str] = []
        self.temps = 0
        self.ins: Instr | None = None

    # -- constants
    def const(self, view: str, value) -> str:
        key = (view, value if value == value else "nan", str(value))
        name = self.const_names.get(key)
        if name is None:
            name = f"c{len(self.const_names)}"
            self.const_names[key] = name
            dtype = DTYPE[view]
            n = LANES.get(view, 32)
            if np.dtype(dtype).kind in "ui":
                bits = np.dtype(dtype).itemsize * 8
                value = int(value) & ((1 << bits) - 1)
                row = np.full(n, value, f"u{bits // 8}").view(dtype)
            else:
                row = np.full(n, value, dtype)
            row.flags.writeable = False
            self.globals[name] = row
        return name

    def obj(self, value: object, prefix: str = "k") -> str:
        key = (prefix, id(value))
        name = self.const_names.get(key)
        if name is None:
            name = f"{prefix}{len(self.const_names)}"
            self.const_names[key] = name
            self.globals[name] = value
        return name

    def unsupported(self, why: str = "") -> UnsupportedInstruction:
        return UnsupportedInstruction(f"unsupported instruction {self.ins.op}" + (f": {why}" if why else ""), self.ins.line)

    # -- operands
    def src(self, op, view: str) -> str:
        """Expression of a source operand as a row of the given view."""
        if isinstance(op, Reg):
            if CLASS.get(view) == op.cls:
                return f"{view}[{op.index}]"
            if op.cls == "p":
                raise self.unsupported(f"{op.name} is a predicate")
            # A narrower or wider register where the ISA relaxes operand widths: value semantics on the low bits.
            base = BASE_VIEW[op.cls]
            return f"{base}[{op.index}].astype({DTYPE[view]().dtype.name})"
        if isinstance(op, Imm):
            return self.const(view, self.literal(op, view))
        if isinstance(op, Special):
            if view in ("U", "S"):
                return f"w.special({op.name!r}, 'U')" + (".view(int32)" if view == "S" else "")
            return f"w.special({op.name!r}, {view!r})"
        if isinstance(op, Sym):
            return f"w.symbol({self.obj(op.var, 'v')}, {op.offset}, {view!r})"
        if isinstance(op, Not) and view == "P":
            return f"~P[{op.reg.index}]"
        raise self.unsupported(f"operand {op!r}")

    def literal(self, op: Imm, view: str):
        if view == "P":
            return bool(op.value)
        if view in ("F", "E"):
            if op.kind == "f32":
                return float(np.uint32(op.bits).view(np.float32))
            if op.kind == "f64":
                return op.value
            return float(np.array(op.value & 0xFFFFFFFF, np.uint32).view(np.float32)) if op.value else 0.0
        if view == "D":
            if op.kind == "f32":
                return float(op.value)
            return op.value if op.kind == "f64" else float(np.array(op.value & (2**64 - 1), np.uint64).view(np.float64))
        if view in ("R", "G"):
            if op.kind == "int":
                return float(np.array(op.value & 0xFFFF, np.uint16).view(np.float16))
            return float(op.value)
        return op.bits if op.kind == "f32" or (op.kind == "f64" and _NUM_BITS[view] == 64) else int(op.value)

    def dst(self, op, view: str) -> str:
        """Name of the row to write. Under a mask this is a temporary and the masked copy is queued."""
        if isinstance(op, Sink):
            k = self.temps
            self.temps += 1
            return f"t{view}{k}"
        if not isinstance(op, Reg):
            raise self.unsupported(f"destination {op!r}")
        if op.cls != CLASS.get(view):
            k = self.temps  # result widens (or narrows) into the register
            self.temps += 1
            self.copies.append(self._assign(op, f"t{view}{k}", view))
            return f"t{view}{k}"
        if self.mask is None:
            return f"{view}[{op.index}]"
        k = self.temps
        self.temps += 1
        base = BASE_VIEW[op.cls]
        self.copies.append(f"copyto({base}[{op.index}], t{base}{k}, where={self.mask})")
        return f"t{view}{k}"

    def _assign(self, op: Reg, temp: str, view: str) -> str:
        signed = DTYPE[view]().dtype.kind == "i"
        target = {"w": "S" if signed else "U", "d": "Y" if signed else "X", "h": "I" if signed else "H"}[op.cls]
        where = f", where={self.mask}" if self.mask else ""
        return f"copyto({target}[{op.index}], {temp}, casting='unsafe'{where})"

    def put(self, op, view: str, expr: str) -> None:
        """dst = expr, for helpers that return a new row."""
        if isinstance(op, Reg) and op.cls == CLASS.get(view):
            pairs = ".repeat(2)" if LANES.get(view) == 64 else ""  # two values a lane
            where = f", where={self.mask}{pairs}" if self.mask else ""
            self.lines.append(f"copyto({view}[{op.index}], {expr}{where})")
        elif isinstance(op, Reg):
            self.lines.append(f"copyto({self.dst(op, view)}, {expr}, casting='unsafe')")
        elif not isinstance(op, Sink):
            raise self.unsupported(f"destination {op!r}")

    def line(self, text: str) -> None:
        self.lines.append(text)

    # -- driver
    def emit(self, ins: Instr, masked: bool) -> list[str]:
        """Source lines of one register-only instruction. Raises UnsupportedInstruction."""
        self.ins = ins
        self.lines, self.copies, self.temps, self.mask = [], [], 0, None
        if ins.pred is not None:
            p = f"~P[{ins.pred.index}]" if ins.pred_neg else f"P[{ins.pred.index}]"
            if masked:
                p = f"m & {p}"
                self.lines.append(f"mp = {p}")
                self.mask = "mp"
            elif ins.pred_neg:
                self.lines.append(f"mp = {p}")
                self.mask = "mp"
            else:
                self.mask = p
                dests = [o for o in ins.operands[:1] for o in ((o.first, o.second) if isinstance(o, Pair) else (o,))]
                if ins.pred in dests:  # the guard would be overwritten before the masked copy reads it
                    self.lines.append(f"mp = {p}.copy()")
                    self.mask = "mp"
        elif masked:
            self.mask = "m"
        handler = HANDLERS.get(ins.base)
        if handler is None:
            raise self.unsupported()
        handler(self, ins)
        return self.lines + self.copies


HANDLERS: dict = {}


def handles(*names: str):
    def register(fn):
        for name in names:
            HANDLERS[name] = fn
        return fn

    return register


ROUND = {"rn", "rz", "rm", "rp"}
FLOATS = {"f32", "f64", "f16", "f16x2", "bf16", "bf16x2", "f32x2"}
_MANY_TYPES = {"cvt", "set", "setp", "slct", "dp4a", "dp2a", "fma", "mad", "add", "sub"}


def type_of(em: Emitter, ins: Instr, which: int = -1) -> str:
    types = [m for m in ins.mods if m in TYPE_BITS]
    if not types:
        raise em.unsupported("no type")
    if len(types) > 1 and ins.base not in _MANY_TYPES:
        raise em.unsupported("a second type")
    return types[which]


def check_mods(em: Emitter, ins: Instr, allowed: set[str]) -> set[str]:
    mods = {m for m in ins.mods if m not in TYPE_BITS}
    bad = mods - allowed
    if bad:
        raise em.unsupported("qualifier " + ", ".join("." + m for m in sorted(bad)))
    return mods


def select_source(em, op, view: str, lit_view: str) -> str:
    """A source as raw bits; a literal is first a value of the instruction's type."""
    if isinstance(op, Imm) and lit_view != view:
        row = np.array([em.literal(op, lit_view)], DTYPE[lit_view] if DTYPE[lit_view]().dtype.kind == "f" else None)
        if row.dtype.kind == "f":
            return em.const(view, int(row.view(DTYPE[view])[0]))
    return em.src(op, view)


__all__ = [
    "BASE_VIEW", "CLASS", "DTYPE", "FLOATS", "HANDLERS", "ROUND", "VIEW", "Emitter", "check_mods", "handles", "select_source",
    "type_of",
]  # fmt: skip
