"""Launch control: register counts, clusterlaunchcontrol, sleeping, and calls into the device runtime."""

from __future__ import annotations

import numpy as np

from ..ptx.ir import Instr, Vec
from .hazards import EmulationError
from .optable import Wait, address, only, op, setter, unsupported


@op("nanosleep")
def _nanosleep(ins: Instr):
    def sleep(w, s, m, ins):
        if s.state == "slept":
            s.state = None
            return None
        s.state = "slept"
        start = w.machine.rounds
        return Wait(lambda: w.machine.rounds > start, lambda: "nanosleep", ins.line)

    return True, sleep


@op("griddepcontrol", "pmevent", "brkpt_none")
def _griddep(ins: Instr):
    return False, lambda w, m, ins: None


@op("setmaxnreg")
def _setmaxnreg(ins: Instr):
    only(ins, {"inc", "dec", "sync", "aligned", "u32"})
    n = int(ins.operands[0].value)
    inc = "inc" in ins.mods
    if n % 8 or not 24 <= n <= 256:
        raise unsupported(ins, f"register count {n} (a multiple of 8 in 24..256)")

    def run(w, s, m, ins):
        cta = w.cta
        machine = w.machine
        # Up to 256 threads the register file does not bound what ptxas gave the kernel: the first request is taken as is.
        known = machine.nwarps > 8 or "maxnreg" in machine.program.flat.directives
        if cta.reg_pool is None:  # what warps have given up: the CTA never has more than it was launched with
            cta.reg_pool = 0 if known else 64 * 1024 - machine.nwarps * 32 * machine.initial_regs
        current = w.maxreg or (machine.initial_regs if known else n)
        need = (n - current) * 32
        if inc and n < current:
            machine.report("setmaxnreg", w, ins, f"inc to {n} registers, below the {current} the warp has")
            return None
        if not inc and n > current:
            machine.report("setmaxnreg", w, ins, f"dec to {n} registers, above the {current} the warp has")
            return None
        if inc and need > cta.reg_pool:
            return Wait(
                lambda: need <= cta.reg_pool,
                lambda: f"setmaxnreg.inc to {n}: needs {need} registers, {cta.reg_pool} are free in the CTA's pool",
                ins.line,
            )
        cta.reg_pool -= need
        w.maxreg = n
        w.asked.append((n, ins.line))
        machine.events += 1
        return None

    return True, run


@op("clusterlaunchcontrol")
def _clc(ins: Instr):
    kind = ins.mods[0]
    if kind == "query_cancel":
        if "is_canceled" in ins.mods:
            put = setter(ins.operands[0], "P")
            q = ins.operands[1].index
            return False, lambda w, m, ins: put(w, m, (w.Q[q][:, 1] >> np.uint64(32)) == 1)
        q = ins.operands[1].index
        which = next(x for x in ins.mods if x.startswith("get_first_ctaid"))

        def word(w, k):
            return ((w.Q[q][:, k >> 1] >> np.uint64(32 * (k & 1))) & np.uint64(0xFFFFFFFF)).astype(np.uint32)

        if "::" in which:
            k = "xyz".index(which[-1])
            put = setter(ins.operands[0], "U")
            return False, lambda w, m, ins: put(w, m, word(w, k))
        if not isinstance(ins.operands[0], Vec):
            raise unsupported(ins)
        puts = [setter(o, "U") for o in ins.operands[0].items]

        def query(w, m, ins):
            for k, put in enumerate(puts):
                put(w, m, word(w, k) if k < 3 else np.uint32(0))

        return False, query
    if kind != "try_cancel":
        raise unsupported(ins)
    from .ops_async import try_cancel

    get_dst, get_bar = address(ins.operands[0], "U"), address(ins.operands[1], "U")
    everyone = any("multicast" in x for x in ins.mods)

    def cancel(w, m, ins):
        for lane in np.flatnonzero(m).tolist():
            try_cancel(w, int(get_dst(w)[lane]), int(get_bar(w)[lane]), everyone, ins)

    return False, cancel


@op("call")
def _call(ins: Instr):
    name = ins.callee
    returns, args = ins.data

    def local_value(w, lane, var, size):
        buf = w.local_bytes()
        return int.from_bytes(buf[lane, var.offset : var.offset + size].tobytes(), "little")

    def generic_bytes(w, lane, addr, size):
        if addr >> 56 == 2:
            start = addr & 0xFFFFFF
            return w.local_bytes()[lane, start : start + size].tobytes()
        return w.machine.memory.bytes_at(addr, size).tobytes()

    def text_at(w, lane, addr):
        out = b""
        while True:
            c = generic_bytes(w, lane, addr + len(out), 1)
            if c == b"\0" or len(out) > 65536:
                return out.decode("utf-8", "replace")
            out += c

    def run(w, m, ins):
        for lane in np.flatnonzero(m).tolist():
            if name == "__assertfail":
                what = text_at(w, lane, local_value(w, lane, args[0].var, 8))
                raise EmulationError(f"device assertion failed at PTX line {ins.line}{w.machine.where(ins)}: {what}")
            fmt = text_at(w, lane, local_value(w, lane, args[0].var, 8))
            pointer = local_value(w, lane, args[1].var, 8)
            w.machine.printed.append(
                _format(fmt, lambda off, n: generic_bytes(w, lane, pointer + off, n), lambda p: text_at(w, lane, p))
            )
        for r in returns:
            w.local_bytes()[:, r.var.offset : r.var.offset + 4] = 0
            w.local_written[:, r.var.offset : r.var.offset + 4] = True

    return False, run


def _format(fmt: str, read, text) -> str:
    """printf with the device's argument buffer: every argument at its own size and alignment, floats as double."""
    import re
    import struct

    offset = 0

    def take(n):
        nonlocal offset
        offset = (offset + n - 1) // n * n
        raw = read(offset, n)
        offset += n
        return raw

    def one(match):
        flags, length, conv = match.group(1), match.group(2), match.group(3)
        if conv == "%":
            return "%"
        if conv in "eEfFgGaA":
            return f"%{flags}{conv}" % struct.unpack("<d", take(8))[0]
        if conv == "s":
            return f"%{flags}s" % text(struct.unpack("<Q", take(8))[0])
        if conv == "p":
            return hex(struct.unpack("<Q", take(8))[0])
        n = 8 if length in ("l", "ll", "z", "j", "t") else 4
        value = int.from_bytes(take(n), "little", signed=conv in "di")
        return chr(value & 255) if conv == "c" else f"%{flags}{'d' if conv in 'diu' else conv}" % value

    return re.sub(r"%([-+ #0-9.]*)(hh|h|ll|l|z|j|t)?([a-zA-Z%])", one, fmt)
