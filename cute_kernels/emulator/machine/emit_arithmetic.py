"""Integer and floating-point arithmetic and elementary functions (handlers of emit.Emitter)."""

from __future__ import annotations

from ..ptx.ir import TYPE_BITS, Imm, Instr
from .emit import DTYPE, FLOATS, ROUND, VIEW, Emitter, check_mods, handles, type_of


def _mixed(em: Emitter, ins: Instr) -> bool:
    """add, sub and fma of f16 or bf16 operands into float32 (PTX ISA 8.6): one rounding, in float32."""
    types = [m for m in ins.mods if m in TYPE_BITS]
    if len(types) == 1:
        return False
    if len(types) != 2 or types[0] != "f32" or types[1] not in ("f16", "bf16"):
        raise em.unsupported("types")
    mods = check_mods(em, ins, ROUND | {"sat"})
    rnd = next((m for m in mods if m in ROUND), "rn")

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


@handles("add", "sub", "mul", "min", "max")
def _arith(em: Emitter, ins: Instr) -> None:
    if ins.base in ("add", "sub") and _mixed(em, ins):
        return None
    t = type_of(em, ins)
    if t in FLOATS:
        return _float_arith(em, ins, t)
    mods = check_mods(em, ins, {"lo", "hi", "wide", "sat", "cc", "relu"})
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
    mods = check_mods(em, ins, {"cc"})
    view = {"S": "U", "Y": "X"}.get(VIEW[type_of(em, ins)], VIEW[type_of(em, ins)])
    d, a, b = ins.operands
    _carry(em, ins, d, a, b, view, sub=ins.base == "subc", use=True, make="cc" in mods)


def _float_arith(em: Emitter, ins: Instr, t: str) -> None:
    mods = check_mods(em, ins, ROUND | {"ftz", "sat", "NaN", "xorsign", "abs"})
    base = ins.base
    d, *srcs = ins.operands
    rnd = next((m for m in mods if m in ROUND), "rn")
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
    t = type_of(em, ins)
    d, a, b, c = ins.operands
    if t not in FLOATS:
        mods = check_mods(em, ins, {"lo", "hi", "wide", "sat", "cc"})
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
    mods = check_mods(em, ins, ROUND | {"ftz", "sat", "relu", "oob"})
    rnd = next((m for m in mods if m in ROUND), "rn")
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
    view = {"S": "U", "Y": "X"}.get(VIEW[type_of(em, ins)], VIEW[type_of(em, ins)])
    signed = VIEW[type_of(em, ins)]
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
    t = type_of(em, ins)
    d, a, b, *c = ins.operands
    view, wide = VIEW[t], "int64" if t == "s32" else "uint64"

    def low24(e):
        return f"(({e} << 8) >> 8).astype({wide})"

    x = f"({low24(em.src(a, view))} * {low24(em.src(b, view))}" + (" >> 16)" if "hi" in ins.mods else ")")
    x = f"{x}.astype({DTYPE[view]().dtype.name})"
    em.put(d, view, f"{x} + {em.src(c[0], view)}" if c else x)


@handles("div", "rem")
def _div(em: Emitter, ins: Instr) -> None:
    t = type_of(em, ins)
    d, a, b = ins.operands
    view = VIEW[t]
    x, y = em.src(a, view), em.src(b, view)
    if t not in FLOATS:
        check_mods(em, ins, set())
        return em.put(d, view, f"V.i{ins.base}({x}, {y})")
    mods = check_mods(em, ins, ROUND | {"ftz", "approx", "full"})
    if t == "f64":
        return em.line(f"divide({x}, {y}, {em.dst(d, view)})")
    rnd = next((m for m in mods if m in ROUND), "rn")
    if "ftz" in mods:
        x, y = f"V.ftz({x})", f"V.ftz({y})"
    r = f"V.div_dir({x}, {y}, {rnd!r})"
    return em.put(d, view, f"V.ftz({r})" if "ftz" in mods else r)


@handles("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
def _unary_math(em: Emitter, ins: Instr) -> None:
    t = type_of(em, ins)
    mods = check_mods(em, ins, ROUND | {"approx", "ftz", "full"})
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
    rnd = next((m for m in mods if m in ROUND), "rn")
    if ins.base == "sqrt":
        r = f"sqrt({x})" if rnd == "rn" else f"V.directed_sqrt({x}, {rnd!r})"
    elif ins.base == "rcp" and rnd != "rn":
        r = f"V.div_dir({em.const('F', 1.0)}, {x}, {rnd!r})"
    else:
        r = f"V.{ins.base}({x})"
    return em.put(d, view, f"V.ftz({r})" if "ftz" in mods else r)


@handles("abs", "neg")
def _absneg(em: Emitter, ins: Instr) -> None:
    t = type_of(em, ins)
    mods = check_mods(em, ins, {"ftz"})
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
    view = VIEW[type_of(em, ins)]
    d, a, b = ins.operands
    em.put(d, view, f"np.copysign({em.src(b, view)}, {em.src(a, view)})")


@handles("testp")
def _testp(em: Emitter, ins: Instr) -> None:
    view = VIEW[type_of(em, ins)]
    em.put(ins.operands[0], "P", f"V.testp({em.src(ins.operands[1], view)}, {ins.mods[0]!r})")
