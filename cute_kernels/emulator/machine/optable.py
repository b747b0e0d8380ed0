"""Registry of the instructions that touch memory, barriers or asynchronous units.

A decoder takes the instruction, checks its qualifiers, and returns (blocking, fn). A non-blocking fn(w, m, ins) acts at once
for the lanes of bool mask m. A blocking fn(w, s, m, ins) returns None when done, or a `Wait` to be retried after.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..ptx.ir import Imm, Instr, Mem, Not, Reg, Sink, Special, Sym, UnsupportedInstruction
from .emit import VIEW
from .hazards import EmulationError

OPS: dict[str, Callable] = {}


def op(*names: str):
    """Register a decoder for base mnemonics."""

    def register(fn):
        for name in names:
            OPS[name] = fn
        return fn

    return register


class Wait:
    """Why a split is blocked. `ready` says whether a retry can succeed, `wants` whether completing an async op may help."""

    __slots__ = ("ready", "text", "line", "wants", "timeout", "bar")

    def __init__(
        self, ready: Callable[[], bool], text: Callable[[], str], line: int, wants=None, timeout: bool = False, bar=None
    ) -> None:
        self.ready, self.text, self.line = ready, text, line
        self.wants = wants
        self.bar = bar  # the mbarrier, if that is what is waited for: only operations that signal it can help
        self.timeout = timeout  # the instruction may legally give up (try_wait)


def unsupported(ins: Instr, why: str = "") -> UnsupportedInstruction:
    return UnsupportedInstruction(f"unsupported instruction {ins.op}" + (f": {why}" if why else ""), ins.line)


def only(ins: Instr, allowed: set[str]) -> None:
    """Reject qualifiers outside `allowed` (types and cache hints are listed by the caller)."""
    bad = [m for m in ins.mods if m not in allowed]
    if bad:
        raise unsupported(ins, "qualifier " + ", ".join("." + b for b in bad))


CACHE_MODS = {
    "ca", "cg", "cs", "lu", "cv", "wb", "wt", "L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last",
    "L1::no_allocate", "L2::evict_normal", "L2::evict_first", "L2::evict_last", "L2::64B", "L2::128B", "L2::256B", "L2::cache_hint",
    "nc", "unified", "level::eviction_priority", "level::prefetch_size",
}  # fmt: skip
SCOPES = {"cta", "cluster", "gpu", "sys"}
SEMS = {"relaxed", "acquire", "release", "acq_rel", "sc", "weak", "volatile", "mmio"}


def getter(o, view: str) -> Callable:
    """fn(w) -> row of a source operand in the given view; wider and narrower registers convert by value."""
    if isinstance(o, Reg):
        k = o.index  # numbered before decoding
        natural = {"w": "USFG", "d": "XYDE", "h": "HIR", "p": "P"}.get(o.cls, "")
        if view in natural:
            return lambda w: getattr(w, view)[k]
        base = {"w": "U", "d": "X", "h": "H", "p": "P"}[o.cls]
        dtype = {"U": np.uint32, "S": np.int32, "X": np.uint64, "Y": np.int64, "H": np.uint16, "F": np.float32}[view]
        return lambda w: getattr(w, base)[k].astype(dtype)
    if isinstance(o, Imm):
        dtype = {
            "U": np.uint32,
            "S": np.int32,
            "X": np.uint64,
            "Y": np.int64,
            "H": np.uint16,
            "P": np.bool_,
            "F": np.float32,
            "D": np.float64,
        }[view]
        if np.dtype(dtype).kind == "u":
            bits = o.bits if o.kind != "int" else int(o.value)
            row = np.full(32, bits & (2 ** (8 * np.dtype(dtype).itemsize) - 1), dtype)
        else:
            row = np.full(32, o.value, dtype)
        row.flags.writeable = False
        return lambda w: row
    if isinstance(o, Special):
        return lambda w: w.special(o.name, view)
    if isinstance(o, Sym):
        return lambda w: w.symbol(o.var, o.offset, view)
    if isinstance(o, Not):
        k = o.reg.index
        return lambda w: ~w.P[k]
    raise EmulationError(f"operand {o!r}")


def setter(o, view: str) -> Callable:
    """fn(w, m, row): write a destination under mask m."""
    if isinstance(o, Sink):
        return lambda w, m, row: None
    if not isinstance(o, Reg):
        raise EmulationError(f"destination {o!r}")
    k = o.index
    natural = {"w": "USFG", "d": "XYDE", "h": "HIR", "p": "P"}.get(o.cls, "")
    target = view if view in natural else {"w": "U", "d": "X", "h": "H", "p": "P"}[o.cls]
    return lambda w, m, row: np.copyto(getattr(w, target)[k], row, where=m, casting="unsafe")


def address(mem: Mem, view: str = "U") -> Callable:
    """fn(w) -> row of addresses of a memory operand: uint32 for view U, uint64 for view X."""
    if not isinstance(mem, Mem):
        raise EmulationError(f"address operand {mem!r}")
    base, off = mem.base, mem.offset
    if isinstance(base, Sym):
        return lambda w: w.symbol(base.var, off, view)
    get = getter(base, view)
    if off == 0:
        return get
    t = np.uint32 if view == "U" else np.uint64
    delta = t(off & (0xFFFFFFFF if view == "U" else 2**64 - 1))
    return lambda w: get(w) + delta


def scalar(o, view: str = "U") -> Callable:
    """fn(w, m) -> Python int of the first active lane (operands that must be uniform, or single-thread instructions)."""
    get = getter(o, view) if not isinstance(o, Mem) else address(o, view)

    def first(w, m):
        row = get(w)
        return int(row[0]) if m[0] else int(row[m.argmax()])

    return first


def typed(ins: Instr) -> str:
    """The last type qualifier."""
    for m in reversed(ins.mods):
        if m in VIEW or m == "b128":
            return m
    raise unsupported(ins, "no type")


_CLASSES = {
    "ld": "load", "ldu": "load", "st": "store", "atom": "atomic", "red": "atomic", "cp": "async-copy", "mbarrier": "mbarrier",
    "tcgen05": "tensor", "wgmma": "tensor", "mma": "tensor", "ldmatrix": "load", "stmatrix": "store", "bar": "barrier",
    "barrier": "barrier", "shfl": "shuffle", "vote": "vote", "redux": "vote", "match": "vote", "elect": "vote", "fence": "fence",
    "membar": "fence", "bra": "control", "brx": "control", "ret": "control", "exit": "control", "call": "control", "cvt": "convert",
    "mov": "move", "selp": "select", "setp": "compare", "set": "compare", "cvta": "address", "mapa": "address", "ex2": "special",
    "lg2": "special", "rcp": "special", "sqrt": "special", "rsqrt": "special", "sin": "special", "cos": "special",
    "tanh": "special",
    "setmaxnreg": "control", "griddepcontrol": "control", "nanosleep": "control", "clusterlaunchcontrol": "control",
    "prefetch": "load", "activemask": "vote",
}  # fmt: skip
_FLOAT_TYPES = {"f32", "f64", "f16", "f16x2", "bf16", "bf16x2", "f32x2"}


def classify(ins: Instr) -> str:
    """Instruction class, as the counters name it."""
    c = _CLASSES.get(ins.base)
    if c:
        return c
    return "float" if any(m in _FLOAT_TYPES for m in ins.mods) else "integer"
