"""Warp-synchronous instructions: shuffles, votes, match, redux, elect."""

from __future__ import annotations

import numpy as np

from ..ptx.ir import Imm, Instr, Pair, Sink
from .optable import Wait, getter, only, op, scalar, setter
from .state import bits_mask, mask_bits

_LANE = np.arange(32)


def warp_sync(name: str, body, same_pc: bool = True, member=None):
    """Wraps body(w, m, ins, members) so that it runs once all live lanes of the member mask have arrived."""

    def run(w, s, m, ins):
        members = member(w, m) & 0xFFFFFFFF
        need = members & w.live_bits
        if need & ~s.bits == 0 and (ins.pred is None or need & ~mask_bits(m) == 0):
            body(w, m, ins, members)
            s.state = None
            return None
        have = mask_bits(m)
        s.state = ("warp", members, s.pc if same_pc else name, have)
        parked = [o for o in w.leaves if o.state and o.state[0] == "warp" and o.state[1:3] == s.state[1:3]]
        union = 0
        for o in parked:
            union |= o.state[3]
        if need & ~union == 0:
            body(w, bits_mask(union), ins, members)
            for o in parked:
                o.state = None
                if o is not s:
                    o.wait = None
                    o.pc += 1
            return None
        key = s.state[1:3]

        def text():
            return f"{name} with member mask {members:#010x}: lanes {members & w.live_bits & ~union:#010x} have not arrived"

        def ready():
            got = 0
            for o in w.leaves:
                if o.state and o.state[0] == "warp" and o.state[1:3] == key:
                    got |= o.state[3]
            return members & w.live_bits & ~got == 0

        return Wait(ready, text, ins.line)

    return run


def member_mask(o):
    """fn(w, m) -> the member mask that operand `o` gives."""
    return scalar(o, "U")


# ---- shfl, vote, match, redux, elect
@op("shfl")
def _shfl(ins: Instr):
    only(ins, {"sync", "up", "down", "bfly", "idx", "b32", "b64"})
    mode = next(m for m in ins.mods if m in ("up", "down", "bfly", "idx"))
    ops = ins.operands
    d, p = (ops[0].first, ops[0].second) if isinstance(ops[0], Pair) else (ops[0], Sink())
    put, putp = setter(d, "U"), setter(p, "P")
    get, getb, getc = getter(ops[1], "U"), getter(ops[2], "U"), getter(ops[3], "U")
    cached = []

    def pattern(b, c):
        seg, cl = (c >> 8) & 31, c & 31
        b = b & 31
        top, low = (_LANE & seg) | (cl & ~seg), _LANE & seg
        j = {"up": _LANE - b, "down": _LANE + b, "bfly": _LANE ^ b, "idx": low | (b & ~seg)}[mode]
        ok = j >= top if mode == "up" else j <= top
        return np.where(ok, j, _LANE), ok

    constant = isinstance(ops[2], Imm) and isinstance(ops[3], Imm)

    def body(w, m, ins, members):
        if cached:
            j, ok = cached[0]
        else:
            j, ok = pattern(getb(w).astype(np.int64), getc(w).astype(np.int64))
            if constant:
                cached.append((j, ok))
        row = get(w)
        if w.clock is not None and not m.all() and not m[j[m]].all():
            w.machine.report("shuffle-inactive-lane", w, ins, "reads the register of a lane that does not take part", default=False)
        if ins.data is not None:  # unwritten registers (see Program.track_item): the flag travels with the value
            source, dests = ins.data
            good = np.ones(32, np.bool_) if source is None else w._flags(source)[j]
            for key in dests:
                np.copyto(w._flags(key), good, where=m)
        putp(w, m, ok)
        put(w, m, row[j])

    return True, warp_sync("shfl.sync", body, member=member_mask(ops[4]))


@op("vote")
def _vote(ins: Instr):
    only(ins, {"sync", "all", "any", "uni", "ballot", "pred", "b32"})
    mode = next(m for m in ins.mods if m in ("all", "any", "uni", "ballot"))
    d, a, mask = ins.operands
    get = getter(a, "P")
    put = setter(d, "U" if mode == "ballot" else "P")

    def body(w, m, ins, members):
        votes = mask_bits(get(w) & m)
        active = mask_bits(m)
        if mode == "ballot":
            put(w, m, np.uint32(votes))
        elif mode == "all":
            put(w, m, votes == active)
        elif mode == "any":
            put(w, m, votes != 0)
        else:
            put(w, m, votes == active or votes == 0)

    return True, warp_sync("vote.sync", body, member=member_mask(mask))


@op("match")
def _match(ins: Instr):
    view = "X" if "b64" in ins.mods else "U"
    ops = ins.operands
    d, p = (ops[0].first, ops[0].second) if isinstance(ops[0], Pair) else (ops[0], Sink())
    get, put, putp = getter(ops[1], view), setter(d, "U"), setter(p, "P")

    def body(w, m, ins, members):
        row = get(w)
        same = row[:, None] == row[None, :]
        same &= m[None, :]
        bits = (same * (np.uint64(1) << np.arange(32, dtype=np.uint64))).sum(axis=1).astype(np.uint32)
        if "all" in ins.mods:
            ok = bool((bits[m] == mask_bits(m)).all())
            put(w, m, np.uint32(mask_bits(m) if ok else 0))
            putp(w, m, ok)
        else:
            put(w, m, bits)

    return True, warp_sync("match.sync", body, member=member_mask(ops[2]))


@op("redux")
def _redux(ins: Instr):
    only(ins, {"sync", "add", "min", "max", "and", "or", "xor", "u32", "s32", "b32", "f32", "abs", "NaN"})
    mode = next(m for m in ins.mods if m in ("add", "min", "max", "and", "or", "xor"))
    view = "S" if "s32" in ins.mods else "F" if "f32" in ins.mods else "U"
    d, a, mask = ins.operands
    get, put = getter(a, view), setter(d, view)

    def body(w, m, ins, members):
        row = get(w)[m]
        if "abs" in ins.mods:
            row = np.abs(row)
        if view == "F":
            nan = "NaN" in ins.mods
            f = (np.maximum if nan else np.fmax) if mode == "max" else (np.minimum if nan else np.fmin)
        else:
            f = {
                "add": np.add,
                "min": np.minimum,
                "max": np.maximum,
                "and": np.bitwise_and,
                "or": np.bitwise_or,
                "xor": np.bitwise_xor,
            }[mode]
        put(w, m, f.reduce(row, dtype=row.dtype))

    return True, warp_sync("redux.sync", body, member=member_mask(mask))


@op("elect")
def _elect(ins: Instr):
    only(ins, {"sync"})
    d, mask = ins.operands
    first, second = (d.first, d.second) if isinstance(d, Pair) else (d, Sink())
    put, putp = setter(first, "U"), setter(second, "P")

    def body(w, m, ins, members):
        leader = int(m.argmax())
        putp(w, m, _LANE == leader)
        put(w, m, np.uint32(leader))

    return True, warp_sync("elect.sync", body, member=member_mask(mask))


@op("activemask")
def _activemask(ins: Instr):
    put = setter(ins.operands[0], "U")
    return False, lambda w, m, ins: put(w, m, np.uint32(mask_bits(m)))
