"""ld, st, atom, red, prefetch and fences, with bounds, initialisation and race checks."""

from __future__ import annotations

import numpy as np

from ..ptx.ir import TYPE_BITS, Imm, Instr, Mem, Reg, Sink, Sym, Vec
from .clocks import FULL, GlobalShadow
from .hazards import EmulationError
from .optable import CACHE_MODS, SCOPES, SEMS, address, getter, only, op, typed, unsupported

_CODE = {
    "b8": "u1", "u8": "u1", "s8": "i1", "b16": "u2", "u16": "u2", "s16": "i2", "f16": "u2", "bf16": "u2", "b32": "u4", "u32": "u4",
    "s32": "i4", "f32": "u4", "b64": "u8", "u64": "u8", "s64": "i8", "f64": "u8", "b128": "u8", "f16x2": "u4", "bf16x2": "u4",
}  # fmt: skip
_VECS = {"v2": 2, "v4": 4, "v8": 8}
_TYPES = set(TYPE_BITS)
_SPACES = {"param", "param::entry", "param::func", "global", "shared", "shared::cta", "shared::cluster", "local", "const"}
_BYTE_PATTERN = {1: np.array([1, 2, 4, 8], np.uint8), 2: np.array([3, 6, 12, 8], np.uint8)}


def space_of(ins: Instr) -> str:
    for m in ins.mods:
        if m in _SPACES:
            return m.split("::")[0] if m.startswith("param") else m
    return "generic"


# ---- shadow checks shared by every generic access
def granules(off: np.ndarray, total: int):
    """Granule numbers, and the byte masks where an access is narrower than a granule."""
    if total == 4:
        return off >> 2, FULL
    if total > 4:
        return ((off >> 2)[:, None] + np.arange(total // 4)).reshape(-1), FULL
    return off >> 2, _BYTE_PATTERN[total][off & 3]


def check_shared_read(w, cta, off, total, ins) -> None:
    sh = cta.shadow
    g, bm = granules(off, total)
    k = sh.unwritten(g, bm)
    if k >= 0:
        w.machine.report(
            "uninitialised-shared", w, ins, f"reads shared memory at byte {int(g[k]) * 4} of CTA {cta.rank} that nothing wrote"
        )
    hit = sh.read(g, w.actor, w.clock, ins.line, bm)
    if hit:
        w.machine.conflict(hit, w, ins, "shared", cta, int(g[hit[1]]))


def check_shared_write(w, cta, off, total, ins) -> None:
    sh = cta.shadow
    g, bm = granules(off, total)
    hit = sh.write(g, w.actor, w.clock, ins.line, bm)
    if hit:
        w.machine.conflict(hit, w, ins, "shared", cta, int(g[hit[1]]))
    if sh.bars[g].any():
        w.machine.report("mbarrier-overwritten", w, ins, "writes over a live mbarrier object")


def check_global(
    w, alloc, addr: np.ndarray, total: int, ins, write: bool, *, actor=None, clock=None, proxy=False, strong=False
) -> None:
    """Races of an access to global memory. `strong`: a volatile, relaxed or acquire read, which races with asynchronous writes."""
    sh = alloc.shadow
    if sh is None:
        if not write:
            return
        sh = alloc.shadow = GlobalShadow(alloc.size)
    actor = w.actor if actor is None else actor
    clock = w.clock if clock is None else clock
    g = (addr - np.uint64(alloc.origin)).astype(np.int64) >> 2
    if total > 4:
        g = (g[:, None] + np.arange(total // 4)).reshape(-1)
    uid = w.cta.cluster.uid
    me = uid << 12 | actor

    def unordered(a, c):
        same = (a >> 12) == uid
        bad = (c > clock[0][a & 4095]) & same
        other = (c > 0) & ~same
        if other.any():
            known = w.cache.get("known", {})
            for u in np.unique(a[other] >> 12).tolist():
                sel = other & ((a >> 12) == u)
                row = known.get(u)
                bad |= sel & (True if row is None else c > row[a & 4095])
        return bad

    narrow = total < 4  # sub-word accesses of different actors to one granule are not told apart: no report
    wa, wc = sh.wa[g], sh.wc[g]
    bad = unordered(wa, wc)
    if strong:
        bad &= (wa & 4095) >= w.cta.cluster.nwarps
    if bad.any() and not narrow:
        k = int(bad.argmax())
        kind = "race-write-after-write" if write else "race-read-after-write"
        w.machine.conflict((kind, k, int(sh.wl[g[k]])), w, ins, "global", None, int(g[k]))
    if strong:
        return
    if proxy and not bad.any():  # of the same cluster: what is known of another's does not tell generic writes that are fenced
        other = wa & 4095
        bad = (wa >> 12 == uid) & (other < w.cta.cluster.nwarps) & (wc > clock[2][other])
        if bad.any():
            k = int(bad.argmax())
            w.machine.conflict(("proxy", k, int(sh.wl[g[k]])), w, ins, "global", None, int(g[k]))
    if write:
        bad = unordered(sh.ra[g], sh.rc[g])
        if bad.any() and not narrow:
            k = int(bad.argmax())
            w.machine.conflict(("race-write-after-read", k, int(sh.rl[g[k]])), w, ins, "global", None, int(g[k]))
        sh.wa[g], sh.wc[g], sh.wl[g] = me, int(clock[0][actor]), ins.line
        sh.rc[g] = 0
    else:
        sh.ra[g], sh.rc[g], sh.rl[g] = me, int(clock[0][actor]), ins.line


# ---- acquire and release through memory
def release_var(w, table: dict, key) -> None:
    if w.clock is None:
        return
    var = table.setdefault(key, {})
    uid = w.cta.cluster.uid
    known = dict(w.cache.get("known", ()))
    known[uid] = w.clock[0]
    for u, row in known.items():
        old = var.get(u)
        var[u] = row.copy() if old is None else np.maximum(old, row)
    old = var.get(("p", uid))
    var[("p", uid)] = w.clock.copy() if old is None else np.maximum(old, w.clock)
    w.tick()


def acquire_var(w, table: dict, key) -> None:
    if w.clock is None:
        return
    var = table.get(key)
    if not var:
        return
    uid = w.cta.cluster.uid
    full = var.get(("p", uid))
    if full is not None:
        np.maximum(w.clock[:3], full[:3], out=w.clock[:3])
    known = w.cache.setdefault("known", {})
    for u, row in var.items():
        if isinstance(u, tuple):
            continue
        if u == uid:
            np.maximum(w.clock[0], row, out=w.clock[0])
        else:
            old = known.get(u)
            known[u] = row.copy() if old is None else np.maximum(old, row)


# ---- address checks
def shared_targets(w, m, full, a, total, ins, cluster: bool):
    """Yields (cta, lane selector or None for all 32, offsets). Checks rank, bounds and alignment."""
    sel = None if full else m
    if sel is not None:
        a = a[sel]
    if not len(a):
        return
    off = (a & np.uint32(0xFFFFFF)).astype(np.int64)
    rank = a >> np.uint32(24)
    hi, lo = int(off.max()), int(off.min())
    cta = w.cta
    if hi + total > cta.smem_limit or lo < 1024:
        raise EmulationError(
            f"out-of-bounds shared access at PTX line {ins.line}{w.machine.where(ins)}: "
            f"byte {hi if hi + total > cta.smem_limit else lo} "
            f"(+{total}); the CTA has [1024, {cta.smem_limit})"
        )
    if total > 1 and (off & (total - 1)).any():
        raise EmulationError(
            f"misaligned shared access at PTX line {ins.line}{w.machine.where(ins)}: "
            f"{total} bytes at byte {int(off[((off & (total - 1)) != 0).argmax()])}"
        )
    r0 = int(rank[0])
    if (rank == r0).all():
        if r0 == w.rank:
            yield cta, sel, off
            return
        if not cluster:
            if r0 == 0:  # below 1<<24: the executing CTA, whatever its rank
                yield cta, sel, off
                return
            raise EmulationError(
                f"PTX line {ins.line}: a shared::cta access to CTA {r0} of the cluster (shared::cluster is needed)"
            )
        yield w.machine.peer(w, r0, ins), sel, off
        return
    lanes = np.flatnonzero(m)
    for r in np.unique(rank).tolist():
        pick = rank == r
        sub = np.zeros(32, np.bool_)
        sub[lanes[pick]] = True
        yield (w.machine.peer(w, r, ins) if cluster else cta), sub, off[pick]


def global_targets(w, m, full, a, total, ins, write: bool):
    """Yields (allocation, lane selector or None, addresses)."""
    sel = None if full else m
    if sel is not None:
        a = a[sel]
    lo, hi = int(a.min()), int(a.max())
    if total > 1 and (a & np.uint64(total - 1)).any():
        bad = int(a[((a & np.uint64(total - 1)) != 0).argmax()])
        raise EmulationError(f"misaligned global access at PTX line {ins.line}{w.machine.where(ins)}: {total} bytes at {bad:#x}")
    alloc = w.machine.memory.find(lo, hi + total - lo)
    if alloc is not None:
        if write and not alloc.writable:
            w.machine.report("write-to-readonly", w, ins, f"writes {alloc.name or 'a read-only allocation'}")
        yield alloc, sel, a
        return
    lanes = np.flatnonzero(m)
    groups: dict = {}
    for k, x in enumerate(a.tolist()):
        alloc = w.machine.memory.find(x, total)
        if alloc is None:
            raise EmulationError(
                f"out-of-bounds global {'store' if write else 'load'} at PTX line {ins.line}{w.machine.where(ins)}, "
                f"lane {int(lanes[k])}: "
                + w.machine.memory.describe(x, total)
            )
        groups.setdefault(alloc, []).append(k)
    for alloc, ks in groups.items():
        sub = np.zeros(32, np.bool_)
        sub[lanes[ks]] = True
        yield alloc, sub, a[ks]


def _is_full(w, m) -> bool:
    return w.nlive == 32 and m is w.live


# ---- ld
_LD_MODS = _TYPES | _SPACES | CACHE_MODS | SCOPES | SEMS | set(_VECS)


def _dest_rows(ins: Instr, d, t: str, vec: int):
    """[(view letter, register, 128-bit half or None)] of a load's destinations."""
    items = d.items if isinstance(d, Vec) else [d]
    if len(items) != vec:
        raise unsupported(ins, f"{len(items)} destinations for a vector of {vec}")
    rows = []
    signed = t[0] == "s"
    for o in items:
        if t == "b128":
            rows += [("Q", o.index, 0), ("Q", o.index, 1)]
        elif isinstance(o, Sink):
            rows.append(None)
        elif isinstance(o, Reg):
            if TYPE_BITS[t] > {"h": 16, "w": 32, "d": 64, "p": 1, "q": 128}[o.cls]:
                raise unsupported(ins, f"destination {o.name} is narrower than .{t}")
            rows.append(
                ({"h": "I" if signed else "H", "w": "S" if signed else "U", "d": "Y" if signed else "X"}[o.cls], o.index, None)
            )
        else:
            raise unsupported(ins, f"destination {o!r}")
    return rows


def _scatter(w, rows, sel, idx, v) -> None:
    for k, r in enumerate(rows):
        if r is None:
            continue
        row = getattr(w, r[0])[r[1]]
        if r[2] is not None:
            row = row[:, r[2]]
        values = v[idx + k] if k else v[idx]
        if sel is None:
            row[:] = values
        else:
            row[sel] = values


@op("ld", "ldu")
def _ld(ins: Instr):
    only(ins, _LD_MODS)
    t = typed(ins)
    vec = next((_VECS[m] for m in ins.mods if m in _VECS), 1)
    code = _CODE[t]
    elt = TYPE_BITS[t] // 8
    total = elt * vec
    space = space_of(ins)
    d, mem = ins.operands[:2]
    rows = _dest_rows(ins, d, t, vec)
    if t == "b128":
        elt = 8
    shift = {1: 0, 2: 1, 4: 2, 8: 3}[elt]
    strong = any(m in ("acquire", "relaxed", "volatile", "mmio") for m in ins.mods)
    base = mem.base
    if space == "param" and isinstance(base, Sym) and base.var.owner is not None and base.var.space == "param":
        return False, _ld_entry_param(rows, base.var, mem.offset, code, total, elt)
    if space == "param" and isinstance(base, Sym):
        space = "local"

    if space in ("shared", "shared::cta", "shared::cluster"):
        addr = address(mem, "U")
        cluster = space == "shared::cluster"

        def ld_shared(w, m, ins):
            full = _is_full(w, m)
            for cta, sel, off in shared_targets(w, m, full, addr(w), total, ins, cluster):
                if strong:
                    for o in set(off.tolist()):
                        acquire_var(w, cta.sync_vars, o)
                if cta.shadow is not None and not strong:
                    check_shared_read(w, cta, off, total, ins)
                _scatter(w, rows, sel, off >> shift, cta.v[code])
            w.machine.bytes["shared-load" if not cluster else "dsmem-load"] += total * (32 if full else int(m.sum()))

        return False, ld_shared
    if space == "local":
        addr = address(mem, "U")

        def ld_local(w, m, ins):
            buf, idx = _local_elements(w, m, addr(w), total, shift, ins, False)
            sel = None if _is_full(w, m) else m
            _scatter(w, rows, sel, idx if sel is None else idx[sel], buf.view(code))

        return False, ld_local

    addr = address(mem, "X")

    def ld_global(w, m, ins):
        full = _is_full(w, m)
        for alloc, sel, a in global_targets(w, m, full, addr(w), total, ins, False):
            if strong:
                for x in set(a.tolist()):
                    acquire_var(w, w.machine.sync_vars, x)
                if alloc.shadow is not None and w.clock is not None:
                    check_global(w, alloc, a, total, ins, False, strong=True)
            elif alloc.shadow is not None and w.clock is not None:
                check_global(w, alloc, a, total, ins, False)
            _scatter(w, rows, sel, (a - np.uint64(alloc.origin)).astype(np.int64) >> shift, alloc.v[code])
        w.machine.bytes["global-load"] += total * (32 if full else int(m.sum()))

    if space != "generic":
        return False, ld_global

    low = addr

    def ld_generic(w, m, ins):
        for kind, mm, a in _generic_parts(w, m, low(w)):
            if kind == 0:
                for alloc, sel, x in global_targets(w, mm, False, a, total, ins, False):
                    if strong:
                        for y in set(x.tolist()):
                            acquire_var(w, w.machine.sync_vars, y)
                    elif alloc.shadow is not None and w.clock is not None:
                        check_global(w, alloc, x, total, ins, False)
                    _scatter(w, rows, sel, (x - np.uint64(alloc.origin)).astype(np.int64) >> shift, alloc.v[code])
                w.machine.bytes["global-load"] += total * int(mm.sum())
            elif kind == 1:
                for cta, sel, off in shared_targets(w, mm, False, a.astype(np.uint32), total, ins, True):
                    if cta.shadow is not None and not strong:
                        check_shared_read(w, cta, off, total, ins)
                    _scatter(w, rows, sel, off >> shift, cta.v[code])
                w.machine.bytes["shared-load"] += total * int(mm.sum())
            else:
                buf, idx = _local_elements(w, mm, a, total, shift, ins, False)
                _scatter(w, rows, mm, idx[mm], buf.view(code))

    return False, ld_generic


def _generic_parts(w, m, a):
    """Splits generic addresses by window: 0 global, 1 shared, 2 local."""
    top = (a >> np.uint64(56)).astype(np.int64)
    for kind in np.unique(top[m]).tolist():
        if kind > 2:
            raise EmulationError(f"generic address {int(a[m][0]):#x} lies in no window")
        yield kind, m & (top == kind), a


def _local_elements(w, m, a, total: int, shift: int, ins, write: bool):
    """(all lanes' local memory as bytes, the index of every lane's element of 1 << shift bytes at address `a`)

    A read of which some lane has written no byte is reported; of a part, it may be a structure's padding.
    """
    buf = w.local_bytes()
    off = (a & a.dtype.type(0xFFFFFF)).astype(np.int64)
    if m.any() and int(off[m].max()) + total > buf.shape[1]:
        text = f"out-of-bounds local access at PTX line {ins.line}{w.machine.where(ins)}: byte {int(off[m].max())}"
        raise EmulationError(text)
    if w.clock is not None:
        where = np.flatnonzero(m)[:, None], off[m][:, None] + np.arange(total)
        if write:
            w.local_written[where] = True
        elif not (touched := w.local_written[where].any(axis=1)).all():
            at = int(off[m][int((~touched).argmax())])
            w.machine.report("uninitialised-local", w, ins, f"reads local byte {at} that nothing wrote")
    return buf.reshape(-1), (np.arange(32) * buf.shape[1] + off) >> shift


def _ld_entry_param(rows, var, offset, code, total, elt):
    def ld_param(w, m, ins):
        start = var.offset + offset
        if start + total > w.machine.param_size:
            raise EmulationError(f"PTX line {ins.line}: parameter read past the end of the parameter block")
        values = w.machine.param_bytes[start : start + total].view(code)
        for k, r in enumerate(rows):
            if r is not None:
                row = getattr(w, r[0])[r[1]]
                row = row if r[2] is None else row[:, r[2]]
                np.copyto(row, values[k], where=m, casting="unsafe")

    return ld_param


# ---- st
@op("st")
def _st(ins: Instr):
    if "async" in ins.mods:
        from .ops_async import decode_st_async

        return decode_st_async(ins)
    if "bulk" in ins.mods:
        raise unsupported(ins, "st.bulk")
    only(ins, _LD_MODS)
    t = typed(ins)
    vec = next((_VECS[m] for m in ins.mods if m in _VECS), 1)
    code = _CODE[t].replace("i", "u")
    elt = TYPE_BITS[t] // 8
    total = elt * vec
    space = space_of(ins)
    mem, s = ins.operands[:2]
    items = s.items if isinstance(s, Vec) else [s]
    if len(items) != vec:
        raise unsupported(ins, f"{len(items)} sources for a vector of {vec}")
    if t == "b128":
        elt = 8
        q = [o.index for o in items]
        gets = [lambda w, k=k, h=h: w.Q[k][:, h] for k in q for h in (0, 1)]
    else:
        gets = []
        for o in items:
            if isinstance(o, Imm) and t in ("f32", "f64") and o.kind == "f64" and t == "f32":
                o = Imm(o.value, "f32", int(np.float32(o.value).view(np.uint32)))
            view = {1: "H", 2: "H", 4: "U", 8: "X"}[elt]
            if isinstance(o, Reg):
                view = {"h": "H", "w": "U", "d": "X"}.get(o.cls)
                if view is None:
                    raise unsupported(ins, f"source {o!r}")
            gets.append(getter(o, view))
    shift = {1: 0, 2: 1, 4: 2, 8: 3}[elt]
    strong = any(m in ("release", "relaxed", "volatile", "mmio") for m in ins.mods)
    if space == "param" and isinstance(mem.base, Sym):
        space = "local"

    def put(w, v, idx, sel) -> None:
        for k, get in enumerate(gets):
            row = get(w)
            v[idx + k] = row if sel is None else row[sel]

    if space in ("shared", "shared::cta", "shared::cluster"):
        addr = address(mem, "U")
        cluster = space == "shared::cluster"

        def st_shared(w, m, ins):
            full = _is_full(w, m)
            for cta, sel, off in shared_targets(w, m, full, addr(w), total, ins, cluster):
                if cta.shadow is not None:
                    if strong:
                        g, bm = granules(off, total)
                        cta.shadow.vb[g] |= bm
                        for o in set(off.tolist()):
                            release_var(w, cta.sync_vars, o)
                    else:
                        check_shared_write(w, cta, off, total, ins)
                put(w, cta.v[code], off >> shift, sel)
            w.machine.events += 1
            w.machine.bytes["shared-store" if not cluster else "dsmem-store"] += total * (32 if full else int(m.sum()))

        return False, st_shared
    if space == "local":
        addr = address(mem, "U")

        def st_local(w, m, ins):
            buf, idx = _local_elements(w, m, addr(w), total, shift, ins, True)
            put(w, buf.view(code), idx[m], m)

        return False, st_local
    addr = address(mem, "X")

    def store_global(w, m, full, a, ins):
        for alloc, sel, x in global_targets(w, m, full, a, total, ins, True):
            if w.clock is not None:
                if strong:
                    for y in set(x.tolist()):
                        release_var(w, w.machine.sync_vars, y)
                else:
                    check_global(w, alloc, x, total, ins, True)
            put(w, alloc.v[code], (x - np.uint64(alloc.origin)).astype(np.int64) >> shift, sel)
        w.machine.events += 1
        w.machine.bytes["global-store"] += total * int(m.sum())

    if space == "global":
        return False, lambda w, m, ins: store_global(w, m, _is_full(w, m), addr(w), ins)
    if space != "generic":
        raise unsupported(ins, f"store to .{space}")

    def st_generic(w, m, ins):
        for kind, mm, a in _generic_parts(w, m, addr(w)):
            if kind == 0:
                store_global(w, mm, False, a, ins)
            elif kind == 1:
                for cta, sel, off in shared_targets(w, mm, False, a.astype(np.uint32), total, ins, True):
                    if cta.shadow is not None:
                        check_shared_write(w, cta, off, total, ins)
                    put(w, cta.v[code], off >> shift, sel)
                w.machine.events += 1
            else:
                buf, idx = _local_elements(w, mm, a, total, shift, ins, True)
                put(w, buf.view(code), idx[mm], mm)

    return False, st_generic


# ---- atomics
def _atomic_fn(ins: Instr, name: str, t: str):
    """fn(old scalar, operand scalars) -> new scalar, in the element type."""
    if name == "inc":
        return lambda o, b, c=None: o.dtype.type(0) if o >= b else o + o.dtype.type(1)
    if name == "dec":
        return lambda o, b, c=None: b if (o == 0 or o > b) else o - o.dtype.type(1)
    table = {
        "add": lambda o, b, c=None: o + b, "min": lambda o, b, c=None: min(o, b), "max": lambda o, b, c=None: max(o, b),
        "and": lambda o, b, c=None: o & b, "or": lambda o, b, c=None: o | b, "xor": lambda o, b, c=None: o ^ b,
        "exch": lambda o, b, c=None: b, "cas": lambda o, b, c=None: c if o == b else o,
    }  # fmt: skip
    if name not in table:
        raise unsupported(ins)
    return table[name]


_ATOM_OPS = {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"}


@op("atom", "red")
def _atom(ins: Instr):
    if "async" in ins.mods:
        from .ops_async import decode_red_async

        return decode_red_async(ins)
    only(ins, _TYPES | _SPACES | CACHE_MODS | SCOPES | SEMS | set(_VECS) | _ATOM_OPS | {"noftz"})
    name = next(m for m in ins.mods if m in _ATOM_OPS)
    t = typed(ins)
    vec = next((_VECS[m] for m in ins.mods if m in _VECS), 1)
    ops = list(ins.operands)
    d = ops.pop(0) if ins.base == "atom" else Sink()
    mem = ops.pop(0)
    packed = {"f16x2": ("f2", 2), "bf16x2": ("bf", 2), "f16": ("f2", 1), "bf16": ("bf", 1)}.get(t)
    code = {
        "f32": "f4",
        "f64": "f8",
        "s32": "i4",
        "s64": "i8",
        "b32": "u4",
        "u32": "u4",
        "b64": "u8",
        "u64": "u8",
        "b16": "u2",
        "u16": "u2",
    }.get(t)
    if packed is None and code is None and t != "b128":
        raise unsupported(ins, f"type .{t}")
    elt = TYPE_BITS[t] // 8
    total = elt * vec
    fn = _atomic_fn(ins, name, t) if t != "b128" else None
    space = space_of(ins)
    srcs = [o.items if isinstance(o, Vec) else [o] for o in ops if not isinstance(o, Mem)]
    nsrc = 2 if name == "cas" else 1
    srcs = srcs[:nsrc]
    dests = d.items if isinstance(d, Vec) else [d]
    raw = {2: "H", 4: "U", 8: "X"}.get(elt)
    if t == "b128":

        def gets_q(w):
            return [w.Q[s[0].index] for s in srcs]
    else:
        gets = [[getter(o, raw if not isinstance(o, Imm) else {"f4": "F", "f8": "D"}.get(code, raw)) for o in s] for s in srcs]
    shared = space.startswith("shared")
    addr = address(mem, "U" if shared else "X")

    def apply_bytes(w, m, lane, view: np.ndarray):
        """view: uint8[total] in memory. An atomic that leaves it as it was is no event: many fail until another warp acts."""
        before = view.tobytes()
        change(w, m, lane, view)
        if view.tobytes() != before:
            w.machine.events += 1

    def change(w, m, lane, view: np.ndarray):
        if t == "b128":
            old = view.view(np.uint64).copy()
            new = gets_q(w)
            if name == "exch":
                view.view(np.uint64)[:] = new[0][lane]
            elif (old == new[0][lane]).all():
                view.view(np.uint64)[:] = new[1][lane]
            if isinstance(d, Reg):
                w.Q[d.index][lane] = old
            return
        for e in range(vec):
            cell = view[e * elt : (e + 1) * elt]
            args = [np.ascontiguousarray(g[e](w)[lane : lane + 1]) for g in gets]
            rawold = cell.copy()
            if packed is not None:
                kind, n = packed
                if kind == "f2":
                    old = cell.view(np.float16).astype(np.float32)
                    arg = args[0].view(np.uint8)[:elt].view(np.float16).astype(np.float32)
                else:
                    old = (cell.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
                    arg = (args[0].view(np.uint8)[:elt].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
                new = {"add": np.add, "min": np.fmin, "max": np.fmax}[name](old, arg)
                if kind == "f2":
                    cell.view(np.float16)[:] = new.astype(np.float16)
                else:
                    from .values import f32_to_bf16

                    cell.view(np.uint16)[:] = f32_to_bf16(new.astype(np.float32))
            else:
                o = cell.view(code)
                vals = [x.view(np.uint8)[:elt].view(code)[0] for x in args]
                with np.errstate(over="ignore"):
                    o[0] = fn(o[0], *vals)
            dd = dests[e] if e < len(dests) else dests[0]
            if isinstance(dd, Reg):
                target = {"w": w.U, "d": w.X, "h": w.H}[dd.cls][dd.index]
                target[lane] = int.from_bytes(rawold.tobytes(), "little")

    def one_space(w, m, a, kind, ins):
        lanes = np.flatnonzero(m).tolist()
        if kind == 1:
            for cta, sel, off in shared_targets(
                w, m, False, a.astype(np.uint32), total, ins, space != "shared" and space != "shared::cta"
            ):
                ls = np.flatnonzero(sel).tolist()
                for o in dict.fromkeys(off.tolist()):
                    acquire_var(w, cta.sync_vars, o)
                if cta.shadow is not None:
                    g, bm = granules(off, total)
                    k = cta.shadow.unwritten(g, bm)
                    if k >= 0 and name != "exch":
                        w.machine.report(
                            "uninitialised-shared", w, ins, f"atomic on shared byte {int(g[k]) * 4} that nothing wrote"
                        )
                    cta.shadow.vb[g] |= bm
                for lane, o in zip(ls, off.tolist()):
                    apply_bytes(w, m, lane, cta.smem[o : o + total])
                for o in dict.fromkeys(off.tolist()):
                    release_var(w, cta.sync_vars, o)
        else:
            for alloc, sel, x in global_targets(w, m, False, a, total, ins, True):
                ls = np.flatnonzero(sel).tolist()
                for y in dict.fromkeys(x.tolist()):
                    acquire_var(w, w.machine.sync_vars, y)
                for lane, y in zip(ls, x.tolist()):
                    start = y - alloc.origin
                    apply_bytes(w, m, lane, alloc.v["u1"][start : start + total])
                for y in dict.fromkeys(x.tolist()):
                    release_var(w, w.machine.sync_vars, y)
        w.machine.bytes["atomic"] += total * len(lanes)

    def atom(w, m, ins):
        a = addr(w)
        if shared:
            one_space(w, m, a, 1, ins)
        elif space == "global":
            one_space(w, m, a, 0, ins)
        else:
            for kind, mm, x in _generic_parts(w, m, a):
                if kind == 2:
                    raise EmulationError(f"PTX line {ins.line}: atomic on local memory")
                one_space(w, mm, x, kind, ins)

    return False, atom


# ---- hints and fences
@op("prefetch", "prefetchu", "applypriority", "discard", "isspacep_none")
def _hint(ins: Instr):
    return False, lambda w, m, ins: None


@op("fence", "membar")
def _fence(ins: Instr):
    mods = set(ins.mods)
    if "proxy" in mods:
        kinds = {
            "async",
            "async::generic",
            "tensormap::generic",
            "alias",
            "generic",
            "async::global",
            "async::shared::cta",
            "async::shared::cluster",
        }
        if not mods & kinds:
            raise unsupported(ins)
        is_async = bool(mods & {"async", "async::global", "async::shared::cta", "async::shared::cluster", "async::generic"})
        spaces = [m.removeprefix("async::") for m in ins.mods]
        # clock rows: 1 for shared memory, 2 for global memory; a fence that names no space is for both
        rows = [1 + (x == "global") for x in spaces if x in ("global", "shared::cta", "shared::cluster")] or [1, 2]

        def fence_proxy(w, m, ins):
            if is_async and w.clock is not None:
                for k in rows:
                    np.maximum(w.clock[k], w.clock[0], out=w.clock[k])
                w.tick()  # what the warp writes from here on is not fenced

        return False, fence_proxy
    if "mbarrier_init" in mods:

        def fence_init(w, m, ins):
            for bar in w.inits:
                bar.fenced = True
            w.fenced += w.inits
            w.inits = []

        return False, fence_init
    only(ins, SCOPES | SEMS | {"gl", "sync_restrict::shared::cta", "sync_restrict::shared::cluster", "cta", "sys"})

    def fence(w, m, ins):
        if w.clock is None:
            return
        if w.unfenced is not None:
            np.maximum(w.clock[:4], w.unfenced[:4], out=w.clock[:4])
            w.unfenced = None
        w.fence_clock = w.clock.copy()
        w.tick()

    return False, fence
