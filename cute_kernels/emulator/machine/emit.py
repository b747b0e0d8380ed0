"""Turns register-only PTX instructions into Python source lines that call NumPy on 32-lane rows.

A register row is reached through lists of views, one letter per type, so that no cast happens at run time:
    U S F G   32-bit registers as uint32, int32, float32, float16[64]
    X Y D E   64-bit registers as uint64, int64, float64, float32[64] (f32x2); LO / HI are their strided uint32 halves
    H I R     16-bit registers as uint16, int16, float16;  P predicates (bool);  Q 128-bit, two uint64 rows each
Each handler writes its result to the name `dst()` gives it. Where lanes are masked that is a temporary which is then copied
under the mask, so one handler serves the full-warp and the masked path.
"""

from __future__ import annotations

import numpy as np

from ..ptx.ir import TYPE_BITS, Imm, Instr, Mem, Not, Pair, Reg, Sink, Special, Sym, UnsupportedInstruction, Vec
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


_MANY_TYPES = {"cvt", "set", "setp", "slct", "dp4a", "dp2a", "fma", "mad", "add", "sub"}


def _type(em: Emitter, ins: Instr, which: int = -1) -> str:
    types = [m for m in ins.mods if m in TYPE_BITS]
    if not types:
        raise em.unsupported("no type")
    if len(types) > 1 and ins.base not in _MANY_TYPES:
        raise em.unsupported("a second type")
    return types[which]


def _mixed(em: Emitter, ins: Instr) -> bool:
    """add, sub and fma of f16 or bf16 operands into float32 (PTX ISA 8.6): one rounding, in float32."""
    types = [m for m in ins.mods if m in TYPE_BITS]
    if len(types) == 1:
        return False
    if len(types) != 2 or types[0] != "f32" or types[1] not in ("f16", "bf16"):
        raise em.unsupported("types")
    mods = _check_mods(em, ins, _ROUND | {"sat"})
    rnd = next((m for m in mods if m in _ROUND), "rn")

    def wide(o):
        if types[1] == "bf16":
            return f"V.bf16_to_f32({em.src(o, 'H')})"
        return f"{em.src(o, 'R')}.astype(float32)"

    d, *srcs = ins.operands
    if ins.base in ("fma", "mad"):
        a, b, c = srcs
        x = f"V.fma_dir({wide(a)}, {wide(b)}, {em.src(c, 'F')}, {rnd!r})"
    else:
        a, c = srcs
        sign = "" if ins.base == "add" else "-"
        x = f"V.add_dir({wide(a)}, {sign}{em.src(c, 'F')}, {rnd!r})"
    em.put(d, "F", f"V.saturate({x})" if "sat" in mods else x)
    return True


def _check_mods(em: Emitter, ins: Instr, allowed: set[str]) -> set[str]:
    mods = {m for m in ins.mods if m not in TYPE_BITS}
    bad = mods - allowed
    if bad:
        raise em.unsupported("qualifier " + ", ".join("." + m for m in sorted(bad)))
    return mods


_ROUND = {"rn", "rz", "rm", "rp"}
_FLOATS = {"f32", "f64", "f16", "f16x2", "bf16", "bf16x2", "f32x2"}


@handles("add", "sub", "mul", "min", "max")
def _arith(em: Emitter, ins: Instr) -> None:
    if ins.base in ("add", "sub") and _mixed(em, ins):
        return None
    t = _type(em, ins)
    if t in _FLOATS:
        return _float_arith(em, ins, t)
    mods = _check_mods(em, ins, {"lo", "hi", "wide", "sat", "cc", "relu"})
    view = VIEW[t]
    d, a, b = ins.operands
    base = ins.base
    if base == "mul":
        if "wide" in mods:
            wide = {"H": "U", "I": "S", "U": "X", "S": "Y"}[view]
            return em.line(f"multiply({em.src(a, view)}, {em.src(b, view)}, {em.dst(d, wide)}, dtype={DTYPE[wide]().dtype.name})")
        if "hi" in mods:
            return em.put(d, view, f"V.mulhi({em.src(a, view)}, {em.src(b, view)})")
        return em.line(f"multiply({em.src(a, view)}, {em.src(b, view)}, {em.dst(d, view)})")
    if t in ("u16x2", "s16x2"):
        n = {"add": "add", "sub": "subtract", "min": "minimum", "max": "maximum"}[base]
        kind = "int16" if t[0] == "s" else "uint16"
        x, y = em.src(a, "U"), em.src(b, "U")
        return em.put(d, "U", f"{n}({x}.view({kind}), {y}.view({kind})).view(uint32)")
    if base in ("min", "max"):
        out = em.dst(d, view)
        em.line(f"{base}imum({em.src(a, view)}, {em.src(b, view)}, out={out})")
        if "relu" in mods:
            em.line(f"maximum({out}, {em.const(view, 0)}, out={out})")
        return None
    if "sat" in mods:
        return em.put(d, "S", f"V.add_sat({em.src(a, 'S')}, {em.src(b, 'S')}, {base == 'sub'})")
    view = {"S": "U", "Y": "X", "I": "H"}.get(view, view)
    if "cc" in mods:
        return _carry(em, ins, d, a, b, view, sub=base == "sub", use=False, make=True)
    fn = "add" if base == "add" else "subtract"
    return em.line(f"{fn}({em.src(a, view)}, {em.src(b, view)}, {em.dst(d, view)})")


def _carry(em, ins, d, a, b, view, *, sub: bool, use: bool, make: bool) -> None:
    """Extended-precision add and subtract; the carry flag is the bool row w.cc (borrow for subtractions)."""
    x, y = em.src(a, view), em.src(b, view)
    cin = "w.cc" if use else "False"
    em.line(f"xr, xc = w.carry({x}, {y}, {cin}, {sub})")
    em.put(d, view, "xr")
    if make:
        em.line(f"copyto(w.cc, xc{', where=' + em.mask if em.mask else ''})")


@handles("addc", "subc")
def _addc(em: Emitter, ins: Instr) -> None:
    mods = _check_mods(em, ins, {"cc"})
    view = {"S": "U", "Y": "X"}.get(VIEW[_type(em, ins)], VIEW[_type(em, ins)])
    d, a, b = ins.operands
    _carry(em, ins, d, a, b, view, sub=ins.base == "subc", use=True, make="cc" in mods)


def _float_arith(em: Emitter, ins: Instr, t: str) -> None:
    mods = _check_mods(em, ins, _ROUND | {"ftz", "sat", "NaN", "xorsign", "abs"})
    base = ins.base
    d, *srcs = ins.operands
    rnd = next((m for m in mods if m in _ROUND), "rn")
    minmax = base in ("min", "max")
    if t in ("bf16", "bf16x2"):
        return _bf16_op(em, ins, t, d, srcs, mods)
    view = VIEW[t]
    f = {"add": "add", "sub": "subtract", "mul": "multiply"}.get(base)
    if minmax:
        f = f"{base}imum" if "NaN" in mods else f"f{base}"
    a, *rest = [em.src(s, view) for s in srcs]
    if "ftz" in mods and t in ("f32", "f32x2"):
        a, rest = f"V.ftz({a})", [f"V.ftz({r})" for r in rest]
    if "xorsign" in mods:
        return em.put(d, view, f"V.xorsign_abs({a}, {rest[0]}, {f})")
    if "abs" in mods:
        a, rest = f"absolute({a})", [f"absolute({r})" for r in rest]
    if rnd != "rn" and t in ("f32", "f32x2"):
        x = (
            f"V.mul_dir({a}, {rest[0]}, {rnd!r})"
            if base == "mul"
            else f"V.add_dir({a}, {rest[0] if base == 'add' else f'-{rest[0]}'}, {rnd!r})"
        )
        if "sat" in mods:
            x = f"V.saturate({x})"
        return em.put(d, view, x if "ftz" not in mods else f"V.ftz({x})")
    if rnd != "rn":
        raise em.unsupported(f"rounding .{rnd} of .{t}")
    if len(rest) == 2:  # three-input min/max
        a = f"{f}({a}, {rest[0]})"
        rest = rest[1:]
    if ("ftz" in mods and not minmax and t in ("f32", "f32x2")) or "sat" in mods:
        x = f"{f}({a}, {rest[0]})"
        if "sat" in mods:
            x = f"V.saturate({x})"
        return em.put(d, view, f"V.ftz({x})" if "ftz" in mods else x)
    return em.line(f"{f}({a}, {rest[0]}, out={em.dst(d, view)})")


def _bf16_op(em, ins, t, d, srcs, mods) -> None:
    """bf16 arithmetic: float32 (float64 for fma) and one rounding. Scalars use the same code on a one-row array."""
    two = t == "bf16x2"
    conv = "V.bf16x2_split" if two else "V.bf16_to_f32"
    back = "V.bf16x2_join" if two else "V.f32_to_bf16"
    view = "U" if two else "H"
    xs = []
    for s in srcs:
        if isinstance(s, Imm) and s.kind != "int":
            xs.append(em.const("F", float(s.value)))
        else:
            xs.append(f"{conv}({em.src(s, view)})")
    base = ins.base
    if base in ("fma", "mad"):
        x = f"V.fma32({xs[0]}, {xs[1]}, {xs[2]})"
    elif base in ("min", "max"):
        f = f"{base}imum" if "NaN" in mods else f"f{base}"
        x = f"{f}({xs[0]}, {xs[1]})"
        if len(xs) == 3:
            x = f"{f}({x}, {xs[2]})"
    elif base in ("neg", "abs"):
        x = f"negative({xs[0]})" if base == "neg" else f"absolute({xs[0]})"
    elif base in ("ex2", "tanh"):
        x = f"V.{base}({xs[0]})"
    else:
        x = f"{dict(add='add', sub='subtract', mul='multiply')[base]}({xs[0]}, {xs[1]})"
    if "relu" in mods:
        x = f"np.maximum({x}, float32(0))"
    if "sat" in mods:
        x = f"V.saturate({x})"
    em.put(d, view, f"{back}({x})")


@handles("fma", "mad")
def _fma(em: Emitter, ins: Instr) -> None:
    if _mixed(em, ins):
        return None
    t = _type(em, ins)
    d, a, b, c = ins.operands
    if t not in _FLOATS:
        mods = _check_mods(em, ins, {"lo", "hi", "wide", "sat", "cc"})
        view = VIEW[t]
        if "wide" in mods:
            wide = {"H": "U", "I": "S", "U": "X", "S": "Y"}[view]
            n = DTYPE[wide]().dtype.name
            x = f"multiply({em.src(a, view)}, {em.src(b, view)}, dtype={n})"
            return em.line(f"add({x}, {em.src(c, wide)}, {em.dst(d, wide)})")
        prod = (
            f"V.mulhi({em.src(a, view)}, {em.src(b, view)})" if "hi" in mods else f"multiply({em.src(a, view)}, {em.src(b, view)})"
        )
        if "cc" in mods:
            return _mad_carry(em, ins, use=False)
        if "sat" in mods:
            return em.put(d, view, f"V.add_sat({prod}, {em.src(c, view)})")
        return em.line(f"add({prod}, {em.src(c, view)}, {em.dst(d, view)})")
    mods = _check_mods(em, ins, _ROUND | {"ftz", "sat", "relu", "oob"})
    rnd = next((m for m in mods if m in _ROUND), "rn")
    if t in ("bf16", "bf16x2"):
        return _bf16_op(em, ins, t, d, [a, b, c], mods)
    view = VIEW[t]
    x, y, z = (em.src(s, view) for s in (a, b, c))
    if t in ("f16", "f16x2"):
        r = f"V.f16_fma({x}, {y}, {z})"
        if "relu" in mods:
            r = f"np.maximum({r}, float16(0))"
        return em.put(d, view, f"V.saturate({r})" if "sat" in mods else r)
    if t == "f64":
        return em.put(d, "D", f"V.fma64({x}, {y}, {z})")
    if "ftz" in mods:
        x, y, z = f"V.ftz({x})", f"V.ftz({y})", f"V.ftz({z})"
    if rnd != "rn":
        r = f"V.fma_dir({x}, {y}, {z}, {rnd!r})"
    elif "ftz" not in mods and "sat" not in mods:
        scratch = "f64t64" if view == "E" else "f64t"
        em.line(f"multiply({x}, {y}, {scratch}, dtype=float64)")
        return em.line(f"add({scratch}, {z}, {em.dst(d, view)}, casting='same_kind')")
    else:
        r = f"V.fma32({x}, {y}, {z})"
    if "sat" in mods:
        r = f"V.saturate({r})"
    return em.put(d, view, f"V.ftz({r})" if "ftz" in mods else r)


def _mad_carry(em, ins, use: bool) -> None:
    d, a, b, c = ins.operands
    view = {"S": "U", "Y": "X"}.get(VIEW[_type(em, ins)], VIEW[_type(em, ins)])
    signed = VIEW[_type(em, ins)]
    prod = (
        f"V.mulhi({em.src(a, signed)}, {em.src(b, signed)})"
        if "hi" in ins.mods
        else f"multiply({em.src(a, view)}, {em.src(b, view)})"
    )
    em.line(f"xr, xc = w.carry({prod}.view({DTYPE[view]().dtype.name}), {em.src(c, view)}, {'w.cc' if use else 'False'}, False)")
    em.put(d, view, "xr")
    if "cc" in ins.mods:
        em.line(f"copyto(w.cc, xc{', where=' + em.mask if em.mask else ''})")


@handles("madc")
def _madc(em: Emitter, ins: Instr) -> None:
    _mad_carry(em, ins, use=True)


@handles("mul24", "mad24")
def _mul24(em: Emitter, ins: Instr) -> None:
    t = _type(em, ins)
    d, a, b, *c = ins.operands
    view, wide = VIEW[t], "int64" if t == "s32" else "uint64"

    def low24(e):
        return f"(({e} << 8) >> 8).astype({wide})"

    x = f"({low24(em.src(a, view))} * {low24(em.src(b, view))}" + (" >> 16)" if "hi" in ins.mods else ")")
    x = f"{x}.astype({DTYPE[view]().dtype.name})"
    em.put(d, view, f"{x} + {em.src(c[0], view)}" if c else x)


@handles("div", "rem")
def _div(em: Emitter, ins: Instr) -> None:
    t = _type(em, ins)
    d, a, b = ins.operands
    view = VIEW[t]
    x, y = em.src(a, view), em.src(b, view)
    if t not in _FLOATS:
        _check_mods(em, ins, set())
        return em.put(d, view, f"V.i{ins.base}({x}, {y})")
    mods = _check_mods(em, ins, _ROUND | {"ftz", "approx", "full"})
    if t == "f64":
        return em.line(f"divide({x}, {y}, {em.dst(d, view)})")
    rnd = next((m for m in mods if m in _ROUND), "rn")
    if "ftz" in mods:
        x, y = f"V.ftz({x})", f"V.ftz({y})"
    r = f"V.div_dir({x}, {y}, {rnd!r})"
    return em.put(d, view, f"V.ftz({r})" if "ftz" in mods else r)


@handles("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
def _unary_math(em: Emitter, ins: Instr) -> None:
    t = _type(em, ins)
    mods = _check_mods(em, ins, _ROUND | {"approx", "ftz", "full"})
    d, a = ins.operands
    if t in ("bf16", "bf16x2"):
        return _bf16_op(em, ins, t, d, [a], mods)
    view = VIEW[t]
    x = em.src(a, view)
    if t in ("f16", "f16x2"):
        return em.put(d, view, f"V.{ins.base}({x}.astype(float32)).astype(float16)")
    if t == "f64":
        fn = {"rcp": "1.0 / {}", "sqrt": "sqrt({})", "rsqrt": "1.0 / sqrt({})"}.get(ins.base)
        if fn is None:
            raise em.unsupported()
        return em.put(d, view, fn.format(x))
    if "ftz" in mods:
        x = f"V.ftz({x})"
    if ins.base == "ex2":
        # Hot in attention: two NumPy calls, no denormal input matters (2**denormal rounds to 1).
        em.line(f"exp2({em.src(a, view)}, f64t, dtype=float64)")
        if "ftz" in mods:
            return em.put(d, view, "V.ftz(f64t.astype(float32))")
        return em.line(f"copyto({em.dst(d, view)}, f64t, casting='same_kind')")
    rnd = next((m for m in mods if m in _ROUND), "rn")
    if ins.base == "sqrt":
        r = f"sqrt({x})" if rnd == "rn" else f"V.directed_sqrt({x}, {rnd!r})"
    elif ins.base == "rcp" and rnd != "rn":
        r = f"V.div_dir({em.const('F', 1.0)}, {x}, {rnd!r})"
    else:
        r = f"V.{ins.base}({x})"
    return em.put(d, view, f"V.ftz({r})" if "ftz" in mods else r)


@handles("abs", "neg")
def _absneg(em: Emitter, ins: Instr) -> None:
    t = _type(em, ins)
    mods = _check_mods(em, ins, {"ftz"})
    d, a = ins.operands
    if t in ("bf16", "bf16x2"):
        bits = {"bf16": ("H", 0x7FFF, 0x8000), "bf16x2": ("U", 0x7FFF7FFF, 0x80008000)}[t]
        fn, k = ("bitwise_and", bits[1]) if ins.base == "abs" else ("bitwise_xor", bits[2])
        return em.line(f"{fn}({em.src(a, bits[0])}, {em.const(bits[0], k)}, {em.dst(d, bits[0])})")
    view = VIEW[t]
    fn = "absolute" if ins.base == "abs" else "negative"
    x = em.src(a, view)
    if "ftz" in mods:
        x = f"V.ftz({x})"
    return em.line(f"{fn}({x}, {em.dst(d, view)})")


@handles("copysign")
def _copysign(em: Emitter, ins: Instr) -> None:
    view = VIEW[_type(em, ins)]
    d, a, b = ins.operands
    em.put(d, view, f"np.copysign({em.src(b, view)}, {em.src(a, view)})")


@handles("testp")
def _testp(em: Emitter, ins: Instr) -> None:
    view = VIEW[_type(em, ins)]
    em.put(ins.operands[0], "P", f"V.testp({em.src(ins.operands[1], view)}, {ins.mods[0]!r})")


@handles("and", "or", "xor")
def _logic(em: Emitter, ins: Instr) -> None:
    view = VIEW[_type(em, ins)]
    d, a, b = ins.operands
    em.line(f"bitwise_{ins.base}({em.src(a, view)}, {em.src(b, view)}, {em.dst(d, view)})")


@handles("not")
def _not(em: Emitter, ins: Instr) -> None:
    view = VIEW[_type(em, ins)]
    em.line(f"invert({em.src(ins.operands[1], view)}, {em.dst(ins.operands[0], view)})")


@handles("cnot")
def _cnot(em: Emitter, ins: Instr) -> None:
    view = VIEW[_type(em, ins)]
    em.put(ins.operands[0], view, f"({em.src(ins.operands[1], view)} == 0).astype({DTYPE[view]().dtype.name})")


@handles("shl", "shr")
def _shift(em: Emitter, ins: Instr) -> None:
    view = VIEW[_type(em, ins)]
    d, a, b = ins.operands
    fn = "left_shift" if ins.base == "shl" else "right_shift"
    if isinstance(b, Imm):
        n = em.const(view, b.value)
    else:
        n = em.src(b, "S" if view in ("S", "I", "Y") else "U")
        if view not in ("U", "S"):
            n += f".view(uint32).astype({DTYPE[view]().dtype.name})"
    em.line(f"{fn}({em.src(a, view)}, {n}, {em.dst(d, view)})")


@handles("shf")
def _shf(em: Emitter, ins: Instr) -> None:
    d, a, b, c = ins.operands
    x = f"V.shf({em.src(a, 'U')}, {em.src(b, 'U')}, {em.src(c, 'U')}, {'l' in ins.mods}, {'wrap' in ins.mods})"
    em.put(d, "U", x)


@handles("lop3")
def _lop3(em: Emitter, ins: Instr) -> None:
    d, a, b, c, lut, *rest = ins.operands
    x = f"V.lop3({em.src(a, 'U')}, {em.src(b, 'U')}, {em.src(c, 'U')}, {int(lut.value)})"
    if isinstance(d, Pair):
        q = em.src(rest[0], "P")
        boolop = next(m for m in ins.mods if m in ("and", "or"))
        em.line(f"xr = {x}")
        em.line(f"xq = {q}")
        em.put(d.first, "U", "xr")
        return em.put(d.second, "P", f"(xr != 0) {'&' if boolop == 'and' else '|'} xq")
    return em.put(d, "U", x)


def _simple(name: str, fmt: str, views: str, out: str | None = None):
    """Handlers of the form d = f(a, b, ...); '*' in views means the instruction's own type."""

    def handler(em: Emitter, ins: Instr) -> None:
        view = VIEW[_type(em, ins)]
        args = [em.src(o, view if v == "*" else v) for o, v in zip(ins.operands[1:], views)]
        em.put(ins.operands[0], out or view, fmt.format(*args, ins=ins))

    HANDLERS[name] = handler


_simple("popc", "V.popc({0})", "*", "U")
_simple("clz", "V.clz({0})", "*", "U")
_simple("brev", "V.brev({0})", "*")
_simple("bfe", "V.bfe({0}, {1}, {2})", "*UU")
_simple("bfi", "V.bfi({0}, {1}, {2}, {3})", "**UU")
_simple("fns", "V.fns({0}, {1}, {2})", "UUU", "U")
_simple("sad", "(np.where({0} > {1}, {0} - {1}, {1} - {0}) + {2})", "***")


@handles("bfind")
def _bfind(em: Emitter, ins: Instr) -> None:
    em.put(ins.operands[0], "U", f"V.bfind({em.src(ins.operands[1], VIEW[_type(em, ins)])}, {'shiftamt' in ins.mods})")


@handles("bmsk")
def _bmsk(em: Emitter, ins: Instr) -> None:
    d, a, b = ins.operands
    em.put(d, "U", f"V.bmsk({em.src(a, 'U')}, {em.src(b, 'U')}, {'wrap' in ins.mods})")


@handles("szext")
def _szext(em: Emitter, ins: Instr) -> None:
    d, a, b = ins.operands
    em.put(d, "U", f"V.szext({em.src(a, 'U')}, {em.src(b, 'U')}, {_type(em, ins) == 's32'}, {'wrap' in ins.mods})")


@handles("prmt")
def _prmt(em: Emitter, ins: Instr) -> None:
    d, a, b, c = ins.operands
    mode = next((m for m in ins.mods if m not in TYPE_BITS), None)
    em.put(d, "U", f"V.prmt({em.src(a, 'U')}, {em.src(b, 'U')}, {em.src(c, 'U')}, {mode!r})")


@handles("dp4a", "dp2a")
def _dp(em: Emitter, ins: Instr) -> None:
    types = [m for m in ins.mods if m in TYPE_BITS]
    d, a, b, c = ins.operands
    cv = "S" if "s32" in types else "U"
    tail = f", {'hi' in ins.mods}" if ins.base == "dp2a" else ""
    em.put(
        d, "U", f"V.{ins.base}({em.src(a, 'U')}, {em.src(b, 'U')}, {em.src(c, cv)}, {types[0] == 's32'}, {types[1] == 's32'}{tail})"
    )


_CMP = {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
    "lo": "less", "ls": "less_equal", "hi": "greater", "hs": "greater_equal",
}  # fmt: skip
_UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}
_INVERSE = {"eq": "not_equal", "lt": "greater_equal", "le": "greater", "gt": "less_equal", "ge": "less"}


def _compare(em: Emitter, cmp: str, t: str, a, b, out: str | None, ftz: bool = False):
    """Returns an expression, or writes to `out` when one ufunc does it (then returns None)."""
    view = VIEW[t]
    x, y = em.src(a, view), em.src(b, view)
    if t in ("bf16", "bf16x2"):
        x, y = (f"V.bf16_to_f32({x})", f"V.bf16_to_f32({y})") if t == "bf16" else (f"V.bf16x2_split({x})", f"V.bf16x2_split({y})")
    if ftz and t == "f32":
        x, y = f"V.ftz({x})", f"V.ftz({y})"
    fl = t in _FLOATS
    if cmp in _CMP and not (fl and cmp == "ne"):
        if out:
            em.line(f"{_CMP[cmp]}({x}, {y}, {out})")
            return None
        return f"{_CMP[cmp]}({x}, {y})"
    if cmp == "ne":
        return f"(({x} < {y}) | ({x} > {y}))"
    if cmp == "neu":
        if out:
            em.line(f"not_equal({x}, {y}, {out})")
            return None
        return f"not_equal({x}, {y})"
    if cmp in _UNORDERED:
        return f"~{_INVERSE[_UNORDERED[cmp]]}({x}, {y})" if cmp != "equ" else f"~(({x} < {y}) | ({x} > {y}))"
    if cmp == "num":
        return f"(({x} == {x}) & ({y} == {y}))"
    if cmp == "nan":
        return f"(({x} != {x}) | ({y} != {y}))"
    raise em.unsupported(f"comparison .{cmp}")


@handles("setp")
def _setp(em: Emitter, ins: Instr) -> None:
    mods = [m for m in ins.mods if m not in TYPE_BITS]
    t = _type(em, ins)
    cmp = mods[0]
    boolop = next((m for m in mods[1:] if m in ("and", "or", "xor")), None)
    d, a, b, *rest = ins.operands
    if t in ("f16x2", "bf16x2"):
        x = _compare(em, cmp, t, a, b, None)
        em.line(f"xr = {x}")
        lo, hi = ("xr[0::2]", "xr[1::2]") if t == "f16x2" else ("xr[0]", "xr[1]")
        em.put(d.first, "P", lo)
        return em.put(d.second, "P", hi)
    if boolop is None and not isinstance(d, Pair):
        k = len(em.copies)
        out = em.dst(d, "P")
        x = _compare(em, cmp, t, a, b, out, "ftz" in mods)
        if x is not None:
            del em.copies[k:]
            em.put(d, "P", x)
        return None
    x = _compare(em, cmp, t, a, b, None, "ftz" in mods)
    em.line(f"xr = {x}")
    first, second = (d.first, d.second) if isinstance(d, Pair) else (d, None)
    if boolop:
        em.line(f"xc = {em.src(rest[0], 'P')}")
        sym = {"and": "&", "or": "|", "xor": "^"}[boolop]
        if second is not None:
            em.line(f"xn = (~xr) {sym} xc")
        em.put(first, "P", f"xr {sym} xc")
    else:
        if second is not None:
            em.line("xn = ~xr")
        em.put(first, "P", "xr")
    if second is not None:
        em.put(second, "P", "xn")
    return None


@handles("set")
def _set(em: Emitter, ins: Instr) -> None:
    types = [m for m in ins.mods if m in TYPE_BITS]
    mods = [m for m in ins.mods if m not in TYPE_BITS]
    d, a, b, *rest = ins.operands
    x = _compare(em, mods[0], types[1], a, b, None, "ftz" in mods)
    boolop = next((m for m in mods[1:] if m in ("and", "or", "xor")), None)
    if boolop:
        x = f"({x}) {dict(zip(('and', 'or', 'xor'), '&|^'))[boolop]} {em.src(rest[0], 'P')}"
    if types[1] in ("f16x2", "bf16x2"):
        raise em.unsupported("packed operands of set")
    if types[0] == "f32":
        return em.put(d, "F", f"({x}).astype(float32)")
    return em.put(d, VIEW[types[0]], f"(-({x}).astype(int32)).astype({DTYPE[VIEW[types[0]]]().dtype.name})")


@handles("selp")
def _selp(em: Emitter, ins: Instr) -> None:
    view = VIEW[_type(em, ins)]
    view = {"F": "U", "S": "U", "D": "X", "Y": "X", "I": "H", "R": "H"}.get(view, view)
    d, a, b, p = ins.operands
    av, bv = (VIEW[_type(em, ins)] if isinstance(o, Imm) else view for o in (a, b))
    if isinstance(p, Imm):
        return em.line(f"copyto({em.dst(d, view)}, {em.src(a if p.value else b, view)})")
    x, y = _select_source(em, a, view, av), _select_source(em, b, view, bv)
    return em.put(d, view, f"where({em.src(p, 'P')}, {x}, {y})")


def _select_source(em, op, view: str, lit_view: str) -> str:
    """A source as raw bits; a literal is first a value of the instruction's type."""
    if isinstance(op, Imm) and lit_view != view:
        row = np.array([em.literal(op, lit_view)], DTYPE[lit_view] if DTYPE[lit_view]().dtype.kind == "f" else None)
        if row.dtype.kind == "f":
            return em.const(view, int(row.view(DTYPE[view])[0]))
    return em.src(op, view)


@handles("slct")
def _slct(em: Emitter, ins: Instr) -> None:
    types = [m for m in ins.mods if m in TYPE_BITS]
    view = VIEW[types[0]]
    d, a, b, c = ins.operands
    cv = "S" if types[1] == "s32" else "F"
    em.put(d, view, f"where({em.src(c, cv)} >= 0, {em.src(a, view)}, {em.src(b, view)})")


@handles("mov")
def _mov(em: Emitter, ins: Instr) -> None:
    t = _type(em, ins)
    _check_mods(em, ins, set())
    d, a = ins.operands
    if isinstance(d, Vec) or isinstance(a, Vec):
        return _mov_vec(em, t, d, a)
    if t == "b128":
        where = f", where={em.mask}[:, None]" if em.mask else ""
        return em.line(f"copyto(Q[{d.index}], Q[{a.index}]{where})")
    view = {"F": "U", "S": "U", "D": "X", "Y": "X", "I": "H", "R": "H"}.get(VIEW[t], VIEW[t])
    if isinstance(a, Imm) and VIEW[t] != view:
        x = _select_source(em, a, view, VIEW[t])
    else:
        x = em.src(a, view)
    return em.put(d, view, x)


def _mov_vec(em: Emitter, t: str, d, a) -> None:
    total = TYPE_BITS[t]
    where = f", where={em.mask}" if em.mask else ""
    if isinstance(a, Vec):
        n = len(a.items)
        part = total // n
        if total == 128:
            w2 = f", where={em.mask}" if em.mask else ""
            if part == 64:
                for k, o in enumerate(a.items):
                    em.line(f"copyto(Q[{d.index}][:, {k}], {em.src(o, 'X')}{w2})")
                return
            for k, o in enumerate(a.items):
                em.line(f"copyto(Q[{d.index}].view(uint32)[:, {k}], {em.src(o, 'U')}{w2})")
            return
        if total == 64 and part == 32:
            lo, hi = em.src(a.items[0], "U"), em.src(a.items[1], "U")
            em.line(f"copyto(LO[{d.index}], {lo}{where})")
            em.line(f"copyto(HI[{d.index}], {hi}{where})")
            return
        sub = {64: "X", 32: "U", 16: "H"}[total]
        dt = DTYPE[sub]().dtype.name
        pieces = []
        for k, o in enumerate(a.items):
            src = em.src(o, "H") if isinstance(o, Imm) or o.cls == "h" else em.src(o, "U")
            e = f"{src}.astype({dt})"
            if part == 8:
                e = f"({e} & {dt}(255))"
            pieces.append(f"({e} << {dt}({k * part}))" if k else e)
        return em.put(d, sub, " | ".join(pieces))
    n = len(d.items)
    part = total // n
    if total == 128:
        if isinstance(a, Reg):
            src = f"Q[{a.index}]"
        else:
            raise em.unsupported("operand of a 128-bit move")
        for k, o in enumerate(d.items):
            if isinstance(o, Sink):
                continue
            if part == 64:
                em.line(f"copyto(X[{o.index}], {src}[:, {k}]{where})")
            else:
                em.line(f"copyto(U[{o.index}], {src}.view(uint32)[:, {k}]{where})")
        return
    if total == 64 and part == 32 and isinstance(a, Reg):
        for half, o in zip(("LO", "HI"), d.items):
            if not isinstance(o, Sink):
                em.line(f"copyto(U[{o.index}], {half}[{a.index}]{where})")
        return
    sub = {64: "X", 32: "U", 16: "H"}[total]
    dt = DTYPE[sub]().dtype.name
    em.line(f"xv = {em.src(a, sub)}")
    for k, o in enumerate(d.items):
        if isinstance(o, Sink):
            continue
        e = f"(xv >> {dt}({k * part}))" if k else "xv"
        if part == 8:
            e = f"({e} & {dt}(255))"
        if o.cls == "w":
            em.line(f"copyto(U[{o.index}], {e}, casting='unsafe'{where})")
        else:
            em.line(f"copyto(H[{o.index}], {e}, casting='unsafe'{where})")


@handles("cvta")
def _cvta(em: Emitter, ins: Instr) -> None:
    """Generic addresses: global, const and param are host addresses; shared and local have windows of their own."""
    d, a = ins.operands
    space = next(m for m in ins.mods if m not in TYPE_BITS and m != "to").split("::")[0]
    size = _type(em, ins)
    if size == "u32":
        raise em.unsupported("32-bit generic addresses")
    if space in ("global", "const", "param"):
        return em.line(f"copyto({em.dst(d, 'X')}, {em.src(a, 'X')})")
    window = {"shared": 1 << 56, "local": 2 << 56}[space]
    fn = "bitwise_and" if "to" in ins.mods else "bitwise_or"
    k = (1 << 32) - 1 if "to" in ins.mods else window
    return em.line(f"{fn}({em.src(a, 'X')}, {em.const('X', k)}, {em.dst(d, 'X')})")


@handles("isspacep")
def _isspacep(em: Emitter, ins: Instr) -> None:
    d, a = ins.operands
    x = f"({em.src(a, 'X')} >> uint64(56))"
    space = ins.mods[0]
    expr = {
        "shared": f"{x} == 1", "shared::cta": f"({x} == 1) & ((({em.src(a, 'X')} >> uint64(24)) & uint64(255)) == w.rank)",
        "shared::cluster": f"{x} == 1", "local": f"{x} == 2", "global": f"w.is_global({em.src(a, 'X')})",
        "const": f"w.is_const({em.src(a, 'X')})", "param": f"w.is_param({em.src(a, 'X')})",
    }.get(space)  # fmt: skip
    if expr is None:
        raise em.unsupported(f"state space .{space}")
    em.put(d, "P", expr)


@handles("mapa")
def _mapa(em: Emitter, ins: Instr) -> None:
    d, a, b = ins.operands
    t = _type(em, ins)
    view = VIEW[t]
    keep = 0xFFFFFF | (0 if view == "U" else 0xFFFFFFFF << 32)
    rank = f"{em.src(b, 'U')}" if view == "U" else f"{em.src(b, 'U')}.astype(uint64)"
    dt = DTYPE[view]().dtype.name
    em.put(d, view, f"(({em.src(a, view)} & {dt}({keep})) | ({rank} << {dt}(24)))")


@handles("getctarank")
def _getctarank(em: Emitter, ins: Instr) -> None:
    d, a = ins.operands
    view = VIEW[_type(em, ins)]
    dt = DTYPE[view]().dtype.name
    em.put(d, "U", f"(({em.src(a, view)} >> {dt}(24)) & {dt}(255)).astype(uint32)")


@handles("createpolicy")
def _createpolicy(em: Emitter, ins: Instr) -> None:
    em.put(ins.operands[0], "X", em.const("X", 0))


@handles("vote")
def _never(em: Emitter, ins: Instr) -> None:  # votes are warp-synchronous: see ops_sync
    raise em.unsupported()


_INT_DTYPE = {"u8": np.uint8, "s8": np.int8, "u16": np.uint16, "s16": np.int16, "u32": np.uint32, "s32": np.int32,
              "u64": np.uint64, "s64": np.int64, "b8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64}  # fmt: skip
_RI = {"rni", "rzi", "rmi", "rpi"}


@handles("cvt")
def _cvt(em: Emitter, ins: Instr) -> None:
    types = [m for m in ins.mods if m in TYPE_BITS]
    if len(types) != 2:
        raise em.unsupported("types")
    to, frm = types
    mods = _check_mods(em, ins, _ROUND | _RI | {"ftz", "sat", "satfinite", "relu", "rna", "rs", "pack"})
    d, *srcs = ins.operands
    rnd = next((m for m in mods if m in _ROUND | {"rna"}), "rn")
    ri = next((m for m in mods if m in _RI), None)
    relu, sat = "relu" in mods, "sat" in mods
    if "rs" in mods:
        raise em.unsupported("stochastic rounding")
    narrow = {"e4m3x2": "e4m3", "e5m2x2": "e5m2", "e2m1x2": "e2m1", "e4m3x4": "e4m3", "e5m2x4": "e5m2",
              "e2m3x2": "e2m3", "e3m2x2": "e3m2", "ue8m0x2": "ue8m0"}  # fmt: skip
    if to in narrow or frm in narrow:
        return _cvt_narrow(em, ins, to, frm, d, srcs, narrow, relu)
    if to == "bf16x2" and frm == "f32":
        return em.put(d, "U", f"V.pack_bf16x2({em.src(srcs[0], 'F')}, {em.src(srcs[1], 'F')}, {rnd!r}, {relu})")
    if to == "f16x2" and frm == "f32":
        return em.put(d, "G", f"V.pack_f16x2({em.src(srcs[0], 'F')}, {em.src(srcs[1], 'F')}, {rnd!r}, {relu}).view(float16)")
    if to == "tf32":
        return em.put(d, "U", f"V.tf32({em.src(srcs[0], 'F')}, {rnd!r})")
    a = srcs[0]
    fl = {"f16", "bf16", "f32", "f64"}
    if to in fl and frm in fl:
        return _cvt_float(em, to, frm, d, a, rnd, ri, mods)
    if to in fl:
        dt = _INT_DTYPE[frm]
        x = _int_source(em, a, frm, dt)
        target = "float64" if to == "f64" else "float32"
        x = f"V.int_to_float({x}, {target}, {rnd!r})"
        if to == "f16":
            return em.put(d, "R", f"V.f32_to_f16({x}, {rnd!r})")
        if to == "bf16":
            return em.put(d, "H", f"V.f32_to_bf16({x}, {rnd!r})")
        return em.put(d, VIEW[to], f"V.saturate({x})" if sat else x)
    if frm in fl:
        x = em.src(a, VIEW[frm])
        if frm == "bf16":
            x = f"V.bf16_to_f32({x})"
        if "ftz" in mods and frm == "f32":
            x = f"V.ftz({x})"
        dt = _INT_DTYPE[to]
        x = f"V.float_to_int({x}, np.{np.dtype(dt).name}, {ri or 'rzi'!r})"
        return _int_result(em, d, to, x)
    x = _int_source(em, a, frm, _INT_DTYPE[frm])
    if sat:
        return _int_result(em, d, to, f"V.int_sat({x}, np.{np.dtype(_INT_DTYPE[to]).name})")
    return _int_result(em, d, to, x, cast=True)


def _int_source(em: Emitter, a, t: str, dt) -> str:
    if isinstance(a, Reg):
        if TYPE_BITS[t] < {"h": 16, "w": 32, "d": 64}[a.cls]:
            return f"{BASE_VIEW[a.cls]}[{a.index}].astype(np.{np.dtype(dt).name})"
        return f"{VIEW[t] if CLASS[VIEW[t]] == a.cls else BASE_VIEW[a.cls]}[{a.index}]"
    return em.src(a, VIEW[t])


def _int_result(em: Emitter, d, t: str, x: str, cast: bool = False) -> None:
    """Store an integer row: wrap to the type, then sign- or zero-extend into the (possibly wider) register."""
    signed = t[0] == "s"
    where = f", where={em.mask}" if em.mask else ""
    if isinstance(d, Sink):
        return
    view = {"h": "I" if signed else "H", "w": "S" if signed else "U", "d": "Y" if signed else "X"}[d.cls]
    if cast and TYPE_BITS[t] < TYPE_BITS[{"h": "b16", "w": "b32", "d": "b64"}[d.cls]]:
        x = f"{x}.astype(np.{np.dtype(_INT_DTYPE[t]).name})"
    em.line(f"copyto({view}[{d.index}], {x}, casting='unsafe'{where})")


def _cvt_float(em: Emitter, to, frm, d, a, rnd, ri, mods) -> None:
    x = em.src(a, VIEW[frm])
    if frm == "bf16":
        x = f"V.bf16_to_f32({x})"
    elif frm == "f16" and to != "f16":
        x = f"{x}.astype(float32)"
    elif "ftz" in mods and frm == "f32":
        x = f"V.ftz({x})"
    if ri:
        x = f"V.round_to_integral({x}, {ri!r})"
    if "relu" in mods:
        x = f"np.maximum({x}, 0).astype({x}.dtype)"
    if to == "f16":
        x = x if frm == "f16" else (f"V.f32_to_f16({x}, {rnd!r})" if frm != "f64" else f"{x}.astype(float16)")
    elif to == "bf16":
        x = f"V.f32_to_bf16({x}{'.astype(float32)' if frm == 'f64' else ''}, {rnd!r})"
    elif to == "f64":
        x = x if frm == "f64" else f"{x}.astype(float64)"
    elif frm == "f64":
        x = f"V.directed({x}, float64(0), {rnd!r})"
    if "sat" in mods and to != "bf16":
        x = f"V.saturate({x})"
    if "ftz" in mods and to == "f32":
        x = f"V.ftz({x})"
    em.put(d, VIEW[to], x)


def _cvt_narrow(em: Emitter, ins, to, frm, d, srcs, narrow, relu) -> None:
    """fp8, fp6 and fp4 pairs, through the datapath's number formats."""
    if to in narrow:
        fmt = narrow[to]
        if to.endswith("x4") or frm not in ("f32", "f16x2", "bf16x2"):
            raise em.unsupported()
        if frm == "f32":
            hi, lo = em.src(srcs[0], "F"), em.src(srcs[1], "F")
        else:
            split = (
                f"V.bf16x2_split({em.src(srcs[0], 'U')})"
                if frm == "bf16x2"
                else f"{em.src(srcs[0], 'G')}.astype(float32).reshape(32, 2).T"
            )
            em.line(f"xs = {split}")
            hi, lo = "xs[1]", "xs[0]"
        return em.put(d, "H", f"w.encode_pair({fmt!r}, {hi}, {lo}, {relu})")
    fmt = narrow[frm]
    if to != "f16x2":
        raise em.unsupported()
    return em.put(d, "U", f"w.decode_pair({fmt!r}, {em.src(srcs[0], 'H')}, {relu})")


REGISTER_ONLY = frozenset(HANDLERS) - {"vote"}
__all__ = ["Emitter", "HANDLERS", "REGISTER_ONLY", "VIEW", "DTYPE", "CLASS", "BASE_VIEW", "Mem"]
