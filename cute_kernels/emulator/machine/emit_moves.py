"""Moves, addresses and conversions (handlers of emit.Emitter)."""

from __future__ import annotations

import numpy as np

from ..ptx.ir import TYPE_BITS, Imm, Instr, Reg, Sink, Vec
from .emit import BASE_VIEW, CLASS, DTYPE, ROUND, VIEW, Emitter, check_mods, handles, select_source, type_of


@handles("mov")
def _mov(em: Emitter, ins: Instr) -> None:
    t = type_of(em, ins)
    check_mods(em, ins, set())
    d, a = ins.operands
    if isinstance(d, Vec) or isinstance(a, Vec):
        return _mov_vec(em, t, d, a)
    if t == "b128":
        where = f", where={em.mask}[:, None]" if em.mask else ""
        return em.line(f"copyto(Q[{d.index}], Q[{a.index}]{where})")
    view = {"F": "U", "S": "U", "D": "X", "Y": "X", "I": "H", "R": "H"}.get(VIEW[t], VIEW[t])
    if isinstance(a, Imm) and VIEW[t] != view:
        x = select_source(em, a, view, VIEW[t])
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
    size = type_of(em, ins)
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
    t = type_of(em, ins)
    view = VIEW[t]
    keep = 0xFFFFFF | (0 if view == "U" else 0xFFFFFFFF << 32)
    rank = f"{em.src(b, 'U')}" if view == "U" else f"{em.src(b, 'U')}.astype(uint64)"
    dt = DTYPE[view]().dtype.name
    em.put(d, view, f"(({em.src(a, view)} & {dt}({keep})) | ({rank} << {dt}(24)))")


@handles("getctarank")
def _getctarank(em: Emitter, ins: Instr) -> None:
    d, a = ins.operands
    view = VIEW[type_of(em, ins)]
    dt = DTYPE[view]().dtype.name
    em.put(d, "U", f"(({em.src(a, view)} >> {dt}(24)) & {dt}(255)).astype(uint32)")


@handles("createpolicy")
def _createpolicy(em: Emitter, ins: Instr) -> None:
    em.put(ins.operands[0], "X", em.const("X", 0))


@handles("vote")
def _never(em: Emitter, ins: Instr) -> None:  # votes are warp-synchronous: see ops_warp
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
    mods = check_mods(em, ins, ROUND | _RI | {"ftz", "sat", "satfinite", "relu", "rna", "rs", "pack"})
    d, *srcs = ins.operands
    rnd = next((m for m in mods if m in ROUND | {"rna"}), "rn")
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
