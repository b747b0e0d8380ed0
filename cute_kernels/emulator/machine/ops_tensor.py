"""tcgen05: allocation, MMA, copies, loads and stores of tensor memory, commit, wait and fences.

Ordering. One issuing warp has one tensor pipe: its mma, cp and shift complete in issue order, and commit follows them; the
strict level reports pairs for which the ISA does not promise that (`pipelined`). Loads are an actor of their own; at the
default level a load counts as complete once an instruction has read one of its registers (hardware keeps that dependence and
NVIDIA's own epilogues release the accumulator on the strength of it), at the strict level only after tcgen05.wait::ld.
tcgen05.fence is checked at the strict level only, because NVIDIA's kernels omit it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ..ptx.ir import Imm, Instr, Mem, Vec
from .hazards import EmulationError
from .ops_async import AsyncOp, agent, check_swizzle, fine_granules, shared_read
from .ops_sync import arrive_on, check_init_fence, mbarrier_at
from .optable import Wait, address, getter, op, scalar, setter, unsupported


class TmemState:
    """Columns of one CTA's tensor memory in use, and the permit to allocate."""

    __slots__ = ("columns", "blocks", "relinquished", "group")

    def __init__(self) -> None:
        self.columns = np.zeros(512, np.bool_)
        self.blocks: dict[int, tuple[int, int]] = {}  # first column -> (columns, PTX line of the alloc)
        self.relinquished = False
        self.group = 0


def tmem_state(cta) -> TmemState:
    if cta.tmem_state is None:
        cta.tmem_state = TmemState()
        _ = cta.tensor_memory
    return cta.tmem_state


@lru_cache(maxsize=16384)
def cells(lane0: int, lanes: int, col0: int, ncols: int) -> np.ndarray:
    """Shadow cells (16 lanes x 1 column) of a rectangle."""
    rows = np.arange(lane0 // 16, (lane0 + lanes - 1) // 16 + 1)
    return (rows[:, None] * 512 + np.arange(col0, col0 + ncols)).reshape(-1)


def tmem_access(w, cta, ranges, actor, clock, ins, *, read: bool, write: bool, own: tuple = (), order=None) -> None:
    """Allocation, initialisation, race and (strict) fence checks of rectangles [(lane0, lanes, col0, ncols)].

    `order`: what `pipe_order` returned, of an operation of the tensor pipe.
    """
    machine = w.machine
    state = tmem_state(cta)
    for lane0, lanes, col0, ncols in ranges:
        if not state.columns[col0 : col0 + ncols].all():
            machine.report(
                "tmem-unallocated", w, ins, f"columns {col0}..{col0 + ncols - 1} of CTA rank {cta.rank} are not all allocated"
            )
        if read and clock is not None and not cta.tmem_valid[lane0 : lane0 + lanes, col0 : col0 + ncols].all():
            bad = np.argwhere(~cta.tmem_valid[lane0 : lane0 + lanes, col0 : col0 + ncols])[0]
            machine.report(
                "uninitialised-tmem", w, ins, f"reads lane {lane0 + int(bad[0])}, column {col0 + int(bad[1])} that nothing wrote"
            )
        if clock is None:
            continue
        g = cells(lane0, lanes, col0, ncols)
        sh = cta.tshadow
        if machine.strict:
            check_tcgen05_fence(w, cta, g, clock, ins, own, write)
            if order is not None:
                check_pipe_order(w, cta, g, order, ins, write)
        if read:
            hit = sh.read(g, actor, clock, ins.line)
            if hit:
                machine.conflict(hit, w, ins, "tmem", cta, int(g[hit[1]]))
        if write:
            hit = sh.write(g, actor, clock, ins.line, generic=False)
            if hit:
                machine.conflict(hit, w, ins, "tmem", cta, int(g[hit[1]]))
            cta.tmem_valid[lane0 : lane0 + lanes, col0 : col0 + ncols] = True


def check_tcgen05_fence(w, cta, g, clock, ins, own: tuple, write: bool) -> None:
    """Strict: accesses of other threads that are ordered before this one, but by synchronisation without tcgen05.fence."""
    sh = cta.tshadow
    kinds = ((sh.wa, sh.wc, sh.wl), (sh.ra, sh.rc, sh.rl)) if write else ((sh.wa, sh.wc, sh.wl),)
    for actors, ticks, lines in kinds:
        a, c = actors[g], ticks[g]
        bad = (c > clock[4][a]) & (c <= clock[0][a]) & ~np.isin(a, own)
        if bad.any():
            k = int(bad.argmax())
            w.machine.conflict(("tcgen05-fence", k, int(lines[g[k]])), w, ins, "tmem", cta, int(g[k]))


def pipelined(earlier: tuple, later: tuple) -> bool:
    """Whether two operations of one tensor pipe execute in order (PTX ISA 9.7.16.6.2). Each is (kind, cta_group, shape): that of
    an mma holds M, N and the accumulator, that of a cp is its qualifier."""
    if earlier[1] != later[1]:
        return False
    if later[0] == "mma":
        return earlier[0] != "mma" or earlier == later
    if later[0] == "shift":
        return earlier[0] == "mma"
    return earlier[0] == "shift" and later[2] == "4x256b"


def pipe_order(w, clock, what: tuple):
    """Strict: notes an operation of the tensor pipe. (first tick that is not known to be complete, own tick, what)"""
    if clock is None or not w.machine.strict:
        return None
    first, tick = int(w.clock[0, w.tpipe]) + 1, int(clock[0, w.tpipe])
    w.in_pipe[tick] = what
    if len(w.in_pipe) > 1024:
        w.in_pipe = {t: x for t, x in w.in_pipe.items() if t >= first}
    return first, tick, what


def check_pipe_order(w, cta, g, order, ins, write: bool) -> None:
    """Strict: accesses of this warp's tensor pipe that may be incomplete and are not pipelined with this one.

    A product may overwrite what an earlier one of the thread reads as A in tensor memory. The ISA does not promise that order, but
    FlashAttention 4 lives on it: the next logits go over the weights of the product before, with no wait.
    """
    first, own, what = order
    sh = cta.tshadow
    reads = write and what[0] != "mma"
    for actors, ticks, lines in ((sh.wa, sh.wc, sh.wl), (sh.ra, sh.rc, sh.rl))[: 1 + reads]:
        c = ticks[g]
        open_ = (actors[g] == w.tpipe) & (c >= first) & (c != own)
        if not open_.any():
            continue
        for tick in np.unique(c[open_]).tolist():
            if not pipelined(w.in_pipe[tick], what):
                k = int((open_ & (c == tick)).argmax())
                w.machine.conflict(("tcgen05-order", k, int(lines[g[k]])), w, ins, "tmem", cta, int(g[k]))


@op("tcgen05")
def _tcgen05(ins: Instr):
    kind = ins.mods[0]
    table = {
        "alloc": _alloc, "dealloc": _dealloc, "relinquish_alloc_permit": _relinquish, "mma": _mma, "cp": _cp, "shift": _shift,
        "ld": _ld, "st": _st, "wait::ld": _wait, "wait::st": _wait, "commit": _commit, "fence::before_thread_sync": _fence,
        "fence::after_thread_sync": _fence,
    }  # fmt: skip
    if kind not in table:
        raise unsupported(ins)
    return table[kind](ins)


def _group(ins: Instr) -> int:
    return 2 if "cta_group::2" in ins.mods else 1


def _one_group(w, n: int, ins) -> None:
    seen = w.machine.cta_group
    if seen and seen[0] != n:
        w.machine.report(
            "cta-group-mixed", w, ins, f"cta_group::{n} in a kernel that uses cta_group::{seen[0]}", other_line=seen[1]
        )
    elif not seen:
        w.machine.cta_group = (n, ins.line)


def _pair(w, n: int, ins):
    """The CTAs an operation works on: even one first."""
    if n == 1:
        return [w.cta]
    ctas = w.cta.cluster.ctas
    even = w.rank & ~1
    if even + 1 >= len(ctas):
        w.machine.fatal("cta-group", w, ins, "cta_group::2 needs a CTA pair in the cluster")
    return [ctas[even], ctas[even + 1]]


# ---- allocation
def _alloc(ins: Instr):
    n = _group(ins)
    dst, cols = ins.operands
    generic = not any(m.startswith("shared") for m in ins.mods)
    get_dst, get_cols = address(dst, "X" if generic else "U"), scalar(cols)

    def alloc(w, s, m, ins):
        _one_group(w, n, ins)
        count = get_cols(w, m)
        if count not in (32, 64, 128, 256, 512):
            w.machine.fatal("tmem-alloc", w, ins, f"allocates {count} columns (a power of two, 32..512)")
        state = tmem_state(w.cta)
        if state.relinquished:
            w.machine.report("tmem-alloc", w, ins, "allocates after relinquish_alloc_permit")
        if not s.full:
            w.machine.report("divergent-aligned", w, ins, "executed by part of the warp")

        def place():
            for first in range(0, 512 - count + 1, count):
                if not state.columns[first : first + count].any():
                    return first
            return -1

        first = place()
        if first < 0:
            return Wait(
                lambda: place() >= 0,
                lambda: f"tcgen05.alloc of {count} columns: {int((~state.columns).sum())} of 512 are free",
                ins.line,
            )
        if state.blocks and count > list(state.blocks.values())[-1][0]:
            w.machine.report("tmem-alloc", w, ins, f"allocates {count} columns after a smaller allocation", default=False)
        state.columns[first : first + count] = True
        state.blocks[first] = (count, ins.line)
        w.cta.tmem_valid[:, first : first + count] = False
        lane = int(m.argmax())
        off = int(get_dst(w)[lane]) & 0xFFFFFF
        if off < 1024 or off + 4 > w.cta.smem_limit or off % 4:
            w.machine.fatal("out-of-bounds-shared", w, ins, f"tcgen05.alloc writes shared byte {off}")
        if w.clock is not None:
            from .ops_mem import check_shared_write

            check_shared_write(w, w.cta, np.array([off]), 4, ins)
        w.cta.v["u4"][off >> 2] = first
        w.machine.events += 1
        return None

    return True, alloc


def _dealloc(ins: Instr):
    n = _group(ins)
    get, get_cols = scalar(ins.operands[0]), scalar(ins.operands[1])

    def dealloc(w, m, ins):
        _one_group(w, n, ins)
        state = tmem_state(w.cta)
        first, count = get(w, m) & 0xFFFF, get_cols(w, m)
        block = state.blocks.get(first)
        if block is None or block[0] != count:
            w.machine.report(
                "tmem-dealloc",
                w,
                ins,
                f"frees {count} columns at {first}; allocated are {[(k, v[0]) for k, v in state.blocks.items()]}",
            )
            if block is None:
                return
        if w.clock is not None:
            w.machine.release_tmem(w, ins)
            # Freeing needs every access to the columns to be complete, as a write would.
            hit_clock = w.clock.copy()
            g = cells(0, 128, first, block[0])
            sh = w.cta.tshadow
            if w.machine.strict:
                own = (w.tpipe, w.lpipe, w.actor, w.cta.cluster.actor_of(("tst", w.actor)))
                check_tcgen05_fence(w, w.cta, g, hit_clock, ins, own, True)
            sh_hit = sh.write(g, w.actor, hit_clock, ins.line, generic=False)
            if sh_hit:
                w.machine.conflict(("tmem-dealloc-race", *sh_hit[1:]), w, ins, "tmem", w.cta, int(g[sh_hit[1]]))
        state.columns[first : first + block[0]] = False
        del state.blocks[first]
        w.machine.events += 1

    return False, dealloc


def _relinquish(ins: Instr):
    def run(w, m, ins):
        tmem_state(w.cta).relinquished = True

    return False, run


# ---- mma
_KINDS = {"kind::f16": "f16", "kind::tf32": "tf32", "kind::f8f6f4": "f8f6f4", "kind::i8": "i8"}


def _mma(ins: Instr):
    mods = ins.mods
    if "sp" in mods or "block_scale" in mods or any("scale_vec" in m for m in mods):
        raise unsupported(ins, "block-scaled and sparse kinds")
    kind = next((_KINDS[m] for m in mods if m in _KINDS), None)
    if kind is None:
        raise unsupported(ins, "kind " + str([m for m in mods if m.startswith("kind")]))
    allowed = {"mma", "ws", "cta_group::1", "cta_group::2", "ashift"} | set(_KINDS)
    bad = [m for m in mods if m not in allowed and not m.startswith("collector::")]
    if bad:
        raise unsupported(ins, "qualifier ." + bad[0])
    ws, ashift = "ws" in mods, "ashift" in mods
    group = _group(ins)
    d, a, b, idesc, *rest = ins.operands
    get_d, get_idesc, get_b = scalar(d), scalar(idesc), scalar(b, "X")
    from_tmem = isinstance(a, Mem)
    get_a = scalar(a) if from_tmem else scalar(a, "X")
    lanes_mask = [getter(o, "U") for o in rest.pop(0).items] if rest and isinstance(rest[0], Vec) else []
    enable = getter(rest.pop(0), "P")
    scale = int(rest[0].value) if rest and not ws and isinstance(rest[0], Imm) else 0
    # .ws: a zero-column-mask descriptor may follow; only the value 0 (no mask) is implemented.
    zero_mask = scalar(rest[0], "X") if rest and ws else None

    def mma(w, m, ins):
        from ..datapath.umma import plan_mma

        machine = w.machine
        _one_group(w, group, ins)
        lane = int(m.argmax())
        if m.sum() != 1:
            machine.report("mma-many-threads", w, ins, f"issued by {int(m.sum())} threads of the warp (one must)")
        w.issued[lane] = ins.line
        if zero_mask is not None and zero_mask(w, m):
            raise EmulationError(f"PTX line {ins.line}: zero-column-mask of tcgen05.mma.ws is not supported")
        disable = 0
        for k, g in enumerate(lanes_mask):
            disable |= int(g(w)[lane]) << (32 * k)
        idesc_value, d_address = get_idesc(w, m), get_d(w, m)
        plan = machine.cached_plan(
            plan_mma, kind, group, idesc_value, get_a(w, m), get_b(w, m), d_address,
            ws=ws, disable_lanes=disable, scale_input_d=scale, a_is_tmem=from_tmem, ashift=ashift,
        )  # fmt: skip
        for text in plan.lints:
            machine.report("descriptor-layout", w, ins, text)
        accumulate = bool(enable(w)[lane])
        ctas = _pair(w, group, ins)
        actor = clock = None
        if w.clock is not None:
            machine.release_tmem(w, ins)
            actor, clock = agent(w, w.tpipe)
            for peer, granules in plan.smem_granules:
                check_swizzle(w, ctas[peer], plan, ins)
                shared_read(w, ctas[peer], fine_granules(granules, machine.granule_cache), actor, clock, ins, proxy=True)
        shape = (idesc_value >> 17 & 0x3F, idesc_value >> 24 & 0x1F, d_address)
        know = dict(own=(w.tpipe, w.lpipe, w.actor), order=pipe_order(w, clock, ("mma", group, shape)))
        for peer, lane0, lanes, col0, ncols in plan.tmem_reads:
            tmem_access(w, ctas[peer], [(lane0, lanes, col0, ncols)], actor, clock, ins, read=True, write=False, **know)
        for peer, lane0, lanes, col0, ncols in plan.tmem_writes:
            tmem_access(w, ctas[peer], [(lane0, lanes, col0, ncols)], actor, clock, ins, read=accumulate, write=True, **know)
        smems = [c.smem for c in ctas]
        tmems = [c.tensor_memory for c in ctas]
        machine.tensor_cycles += plan.cycles
        machine.tensor_flops += plan.flops
        w.role_tensor(plan.cycles)
        machine.submit(
            AsyncOp("tcgen05.mma", ins, w, ("tensor", w.tpipe, w.cta.cluster.uid), lambda: plan.apply(smems, tmems, accumulate))
        )

    return False, mma


def _cp(ins: Instr):
    mods = ins.mods
    shape = next((m for m in mods if m.endswith("b") and "x" in m and m[0].isdigit()), None)
    multicast = next((m for m in mods if m.startswith("warpx")), None)
    decompress = next((m for m in mods if m in ("b6x16_p32", "b4x16_p64")), None)
    group = _group(ins)
    get_t, get_desc = scalar(ins.operands[0]), scalar(ins.operands[1], "X")

    def copy(w, m, ins):
        from ..datapath.tmem import plan_cp

        machine = w.machine
        _one_group(w, group, ins)
        w.issued[int(m.argmax())] = ins.line
        plan = machine.cached_plan(plan_cp, shape, multicast, decompress, get_desc(w, m), get_t(w, m))
        for text in plan.lints:
            machine.report("descriptor-layout", w, ins, text)
        actor = clock = None
        if w.clock is not None:
            machine.release_tmem(w, ins)
            actor, clock = agent(w, w.tpipe)
        know = dict(own=(w.tpipe, w.lpipe, w.actor), order=pipe_order(w, clock, ("cp", group, shape)))
        for cta in _pair(w, group, ins):
            if clock is not None:
                check_swizzle(w, cta, plan, ins)
                shared_read(w, cta, fine_granules(plan.smem_granules, machine.granule_cache), actor, clock, ins, proxy=True)
            tmem_access(w, cta, plan.tmem_writes, actor, clock, ins, read=False, write=True, **know)
            tmem = cta.tensor_memory
            machine.submit(
                AsyncOp("tcgen05.cp", ins, w, ("tensor", w.tpipe, w.cta.cluster.uid), lambda c=cta, t=tmem: plan.apply(c.smem, t))
            )
            machine.bytes["tcgen05.cp"] += plan.bytes

    return False, copy


def _shift(ins: Instr):
    group = _group(ins)
    get_t = scalar(ins.operands[0])

    def shift(w, m, ins):
        from ..datapath.tmem import plan_shift

        w.issued[int(m.argmax())] = ins.line
        plan = w.machine.cached_plan(plan_shift, get_t(w, m))
        actor = clock = None
        if w.clock is not None:
            actor, clock = agent(w, w.tpipe)
        know = dict(own=(w.tpipe, w.lpipe, w.actor), order=pipe_order(w, clock, ("shift", group, None)))
        for cta in _pair(w, group, ins):
            tmem_access(w, cta, plan.tmem_reads, actor, clock, ins, read=True, write=False, **know)
            tmem_access(w, cta, plan.tmem_writes, actor, clock, ins, read=False, write=True, **know)
            tmem = cta.tensor_memory
            w.machine.submit(AsyncOp("tcgen05.shift", ins, w, ("tensor", w.tpipe, w.cta.cluster.uid), lambda t=tmem: plan.apply(t)))

    return False, shift


def _commit(ins: Instr):
    group = _group(ins)
    get_bar = scalar(ins.operands[0])
    multicast = "multicast::cluster" in ins.mods
    get_mask = scalar(ins.operands[1], "H") if multicast else None

    def commit(w, m, ins):
        machine = w.machine
        _one_group(w, group, ins)
        addr = get_bar(w, m)
        lane = int(m.argmax())
        if w.issued and lane not in w.issued:
            other, line = next(iter(w.issued.items()))
            text = f"by lane {lane}, which issued nothing: a commit tracks its own thread's operations, not those of lane {other}"
            machine.report("tcgen05-commit", w, ins, text, other_line=line)
        w.issued.pop(lane, None)
        if multicast:
            mask = get_mask(w, m)
            bars = [mbarrier_at(w, r << 24 | (addr & 0xFFFFFF), ins) for r in range(len(w.cta.cluster.ctas)) if mask >> r & 1]
        else:
            bars = [mbarrier_at(w, addr, ins)]
        for bar in bars:
            check_init_fence(w, bar, ins)
        clock = None
        if w.clock is not None:
            clock = w.clock.copy()
            tick = machine.agent_tick(w.cta.cluster, w.tpipe)
            clock[:, w.tpipe] = tick
            np.maximum(clock[3], clock[0], out=clock[3])
            w.tick()

        def effect():
            for bar in bars:
                arrive_on(w, bar, 1, ins, clock=clock)

        machine.submit(AsyncOp("tcgen05.commit", ins, w, ("tensor", w.tpipe, w.cta.cluster.uid), effect, tuple(bars)))

    return False, commit


# ---- ld / st
def _shape(ins: Instr):
    shape = next((m for m in ins.mods if m in ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")), None)
    num = next((int(m[1:]) for m in ins.mods if m[0] == "x" and m[1:].isdigit()), None)
    if shape is None or num is None or "red" in ins.mods:
        raise unsupported(ins)
    return shape, num


def _plan_ldst(ins: Instr, mem: Mem, registers: int, imm: int):
    """fn(w, m) -> the checked plan of a tcgen05.ld or st with that many registers."""
    shape, num = _shape(ins)
    pack = any(x.endswith("pack::16b") for x in ins.mods)  # pack of a load, unpack of a store
    get, kind = address(mem, "U"), f"tcgen05-{ins.mods[0]}"

    def plan(w, m):
        from ..datapath.tmem import plan_ldst

        machine = w.machine
        plan = machine.cached_plan(plan_ldst, shape, num, _uniform(w, m, get, ins), w.index, pack=pack, imm=imm)
        if plan.registers != registers:
            machine.fatal(kind, w, ins, f"{registers} registers; {shape}.x{num} has {plan.registers}")
        if not m.all() and w.nlive == 32:
            machine.report("divergent-aligned", w, ins, "executed by part of the warp")
        if plan.lane_implied:
            machine.report("tmem-lane", w, ins, "names lane quarter 0 and means the warp's own", default=False)
        return plan

    return plan


def _ld(ins: Instr):
    dst, mem = ins.operands[:2]
    imm = int(ins.operands[2].value) if len(ins.operands) > 2 else 0
    regs = np.array([o.index for o in (dst.items if isinstance(dst, Vec) else [dst])])
    get_plan = _plan_ldst(ins, mem, len(regs), imm)

    def load(w, m, ins):
        machine = w.machine
        plan = get_plan(w, m)
        actor = clock = None
        if w.clock is not None:
            actor, clock = agent(w, w.lpipe)
        own = (w.tpipe, w.lpipe, w.actor, w.cta.cluster.actor_of(("tst", w.actor)))
        tmem_access(w, w.cta, plan.ranges, actor, clock, ins, read=True, write=False, own=own)
        rows = plan.load(w.cta.tensor_memory)
        if m.all():
            w.regs.w[regs] = rows
        else:
            for k, r in enumerate(regs):
                np.copyto(w.U[r], rows[k], where=m)
        if clock is not None:
            machine.note_load(w, ins, int(clock[0, actor]))
        machine.bytes["tmem-load"] += 128 * plan.registers

    return False, load


def _st(ins: Instr):
    mem, *rest = ins.operands
    imm = int(rest.pop(0).value) if len(rest) > 1 else 0
    items = rest[0].items if isinstance(rest[0], Vec) else [rest[0]]
    gets = [getter(o, "U") for o in items]
    regs = np.array([o.index for o in items]) if all(getattr(o, "cls", "") == "w" for o in items) else None
    get_plan = _plan_ldst(ins, mem, len(gets), imm)

    def store(w, m, ins):
        machine = w.machine
        plan = get_plan(w, m)
        actor = clock = None
        if w.clock is not None:
            machine.release_tmem(w, ins)
            actor, clock = agent(w, ("tst", w.actor))
        tmem_access(w, w.cta, plan.ranges, actor, clock, ins, read=False, write=True, own=(w.tpipe, w.lpipe, w.actor, actor))
        data = w.regs.w[regs] if regs is not None else np.stack([g(w) for g in gets])
        tmem = w.cta.tensor_memory
        o = AsyncOp("tcgen05.st", ins, w, ("tst", w.actor, w.cta.cluster.uid), lambda: plan.store(tmem, data))
        w.tst.append(o)
        machine.submit(o)
        machine.bytes["tmem-store"] += 128 * plan.registers

    return False, store


def _uniform(w, m, get, ins) -> int:
    row = get(w)
    first = int(row[m.argmax()])
    if not (row[m] == first).all():
        w.machine.report("tmem-address", w, ins, "the tensor-memory address differs between lanes of the warp")
    return first


def _wait(ins: Instr):
    loads = ins.mods[0] == "wait::ld"

    def wait(w, s, m, ins):
        if loads:
            w.tld.clear()
            if w.clock is not None:
                w.clock[0, w.lpipe] = max(w.clock[0, w.lpipe], w.machine.agent_tick(w.cta.cluster, w.lpipe))
            return None
        pending = [o for o in w.tst if not o.done]
        if pending:
            return Wait(
                lambda: all(o.done for o in pending),
                lambda: f"tcgen05.wait::st: {len(pending)} stores pending",
                ins.line,
                wants=lambda o: o in pending,
            )
        w.tst.clear()
        if w.clock is not None:
            actor = w.cta.cluster.actor_of(("tst", w.actor))
            w.clock[0, actor] = max(w.clock[0, actor], w.machine.agent_tick(w.cta.cluster, actor))
        return None

    return True, wait


def _fence(ins: Instr):
    before = ins.mods[0].endswith("before_thread_sync")

    def fence(w, m, ins):
        if w.clock is None:
            return
        if before:
            np.maximum(w.clock[3], w.clock[0], out=w.clock[3])
        else:
            np.maximum(w.clock[4], w.clock[3], out=w.clock[4])

    return False, fence


__all__ = ["setter", "tmem_state"]
