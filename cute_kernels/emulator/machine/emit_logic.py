"""Bits, comparisons and selections (handlers of emit.Emitter)."""

from __future__ import annotations

from ..ptx.ir import TYPE_BITS, Imm, Instr, Pair
from .emit import DTYPE, FLOATS, HANDLERS, VIEW, Emitter, handles, select_source, type_of


@handles("and", "or", "xor")
def _logic(em: Emitter, ins: Instr) -> None:
    view = VIEW[type_of(em, ins)]
    d, a, b = ins.operands
    em.line(f"bitwise_{ins.base}({em.src(a, view)}, {em.src(b, view)}, {em.dst(d, view)})")


@handles("not")
def _not(em: Emitter, ins: Instr) -> None:
    view = VIEW[type_of(em, ins)]
    em.line(f"invert({em.src(ins.operands[1], view)}, {em.dst(ins.operands[0], view)})")


@handles("cnot")
def _cnot(em: Emitter, ins: Instr) -> None:
    view = VIEW[type_of(em, ins)]
    em.put(ins.operands[0], view, f"({em.src(ins.operands[1], view)} == 0).astype({DTYPE[view]().dtype.name})")


@handles("shl", "shr")
def _shift(em: Emitter, ins: Instr) -> None:
    view = VIEW[type_of(em, ins)]
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
        view = VIEW[type_of(em, ins)]
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
    em.put(ins.operands[0], "U", f"V.bfind({em.src(ins.operands[1], VIEW[type_of(em, ins)])}, {'shiftamt' in ins.mods})")


@handles("bmsk")
def _bmsk(em: Emitter, ins: Instr) -> None:
    d, a, b = ins.operands
    em.put(d, "U", f"V.bmsk({em.src(a, 'U')}, {em.src(b, 'U')}, {'wrap' in ins.mods})")


@handles("szext")
def _szext(em: Emitter, ins: Instr) -> None:
    d, a, b = ins.operands
    em.put(d, "U", f"V.szext({em.src(a, 'U')}, {em.src(b, 'U')}, {type_of(em, ins) == 's32'}, {'wrap' in ins.mods})")


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
    fl = t in FLOATS
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
    t = type_of(em, ins)
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
    view = VIEW[type_of(em, ins)]
    view = {"F": "U", "S": "U", "D": "X", "Y": "X", "I": "H", "R": "H"}.get(view, view)
    d, a, b, p = ins.operands
    av, bv = (VIEW[type_of(em, ins)] if isinstance(o, Imm) else view for o in (a, b))
    if isinstance(p, Imm):
        return em.line(f"copyto({em.dst(d, view)}, {em.src(a if p.value else b, view)})")
    x, y = select_source(em, a, view, av), select_source(em, b, view, bv)
    return em.put(d, view, f"where({em.src(p, 'P')}, {x}, {y})")


@handles("slct")
def _slct(em: Emitter, ins: Instr) -> None:
    types = [m for m in ins.mods if m in TYPE_BITS]
    view = VIEW[types[0]]
    d, a, b, c = ins.operands
    cv = "S" if types[1] == "s32" else "F"
    em.put(d, view, f"where({em.src(c, cv)} >= 0, {em.src(a, view)}, {em.src(b, view)})")
