"""Barriers of every kind: bar, barrier, barrier.cluster and mbarrier."""

from __future__ import annotations

import numpy as np

from ..ptx.ir import Instr, Mem
from .barriers import TX_LIMIT, ClusterBarrier, MBarrier, NamedBarrier, join_known
from .hazards import EmulationError
from .ops_warp import member_mask, warp_sync
from .optable import SCOPES, SEMS, Wait, address, getter, op, scalar, setter, unsupported
from .state import mask_bits


# ---- bar / barrier
@op("bar", "barrier")
def _bar(ins: Instr):
    mods = [m for m in ins.mods if m not in ("cta", "aligned", "all")]
    if mods and mods[0] == "cluster":
        return _cluster_barrier(ins)
    if mods and mods[0] == "warp":

        def nothing(w, m, ins, members):
            return None

        return True, warp_sync("bar.warp.sync", nothing, same_pc=False, member=member_mask(ins.operands[0]))
    kind = mods[0] if mods else "sync"
    aligned = ins.base == "bar" or "aligned" in ins.mods
    ops = list(ins.operands)
    if kind == "sync":
        get_id, get_n = scalar(ops[0]), scalar(ops[1]) if len(ops) > 1 else None
        return True, _barrier_body(get_id, get_n, None, None, "sync", aligned)
    if kind == "arrive":
        return True, _barrier_body(scalar(ops[0]), scalar(ops[1]), None, None, "arrive", aligned)
    if kind == "red":
        d = ops.pop(0)
        pred = ops.pop(-1)
        get_n = scalar(ops[1]) if len(ops) > 1 else None
        which = 0 if "popc" in ins.mods else 1 if "and" in ins.mods else 2
        put = setter(d, "U" if which == 0 else "P")
        return True, _barrier_body(scalar(ops[0]), get_n, getter(pred, "P"), (which, put), "sync", aligned)
    raise unsupported(ins)


def _barrier_body(get_id, get_n, get_pred, result, kind, aligned):
    def run(w, s, m, ins):
        cta = w.cta
        if s.state is None:
            ident = get_id(w, m)
            if not 0 <= ident < 16:
                raise EmulationError(f"PTX line {ins.line}: barrier {ident} (0..15 exist)")
            bar = cta.bars.get(ident)
            if bar is None:
                bar = cta.bars[ident] = NamedBarrier()
            if aligned and not s.full:
                w.machine.report("divergent-barrier", w, ins, "an aligned barrier is executed by part of the warp")
            alive = sum(1 for x in cta.warps if not x.exited)
            expected = get_n(w, m) if get_n else alive * 32
            if get_n and (expected % 32 or expected <= 0):
                raise EmulationError(f"PTX line {ins.line}: barrier thread count {expected} is not a positive multiple of 32")
            threads = 32 if s.full else int(m.sum())
            w.machine.release_tmem(w, ins)
            bar.arrive(w, threads, expected, None if get_pred is None else get_pred(w)[m], kind == "sync")
            w.machine.events += 1
            w.waits += 1
            generation = bar.generation
            bar.settle()
            if kind == "arrive":
                return None
            s.state = ("bar", bar, generation, ident)
        _, bar, generation, ident = s.state
        if bar.generation == generation:
            if get_n is None:  # warps that exit reduce what barrier without a count waits for
                bar.expected = sum(1 for x in cta.warps if not x.exited) * 32
                bar.settle()
        if bar.generation == generation:

            def ready():
                if get_n is None:
                    bar.expected = sum(1 for x in cta.warps if not x.exited) * 32
                    if bar.arrived >= bar.expected:
                        return True
                return bar.generation != generation

            return Wait(
                ready,
                lambda: f"barrier {ident}: {bar.arrived} of {bar.expected} threads arrived, generation {generation}",
                ins.line,
            )
        if w.clock is not None and bar.done is not None:
            np.maximum(w.clock[:4], bar.done[:4], out=w.clock[:4])
            if bar.done_known:
                join_known(w.cache.setdefault("known", {}), bar.done_known)
        if result:
            result[1](w, m, np.uint32(bar.result[0]) if result[0] == 0 else bar.result[result[0]])
        s.state = None
        return None

    return run


def _settle_cluster(cluster) -> None:
    """Complete generations. A warp that has exited counts as arrived at every generation it did not arrive at."""
    bar = cluster.barrier
    while True:
        missing = sum(int(x.lanes.sum()) for x in cluster.warps if x.exited and x.cluster_arrivals <= bar.generation)
        expected = cluster.threads - missing
        if expected <= 0 or bar.arrived < expected:
            return
        bar.arrived -= expected
        bar.generation += 1
        bar.done, bar.clock = bar.clock, None
        cluster.machine.events += 1


def _cluster_barrier(ins: Instr):
    """barrier.cluster. Arriving twice before waiting is undefined by the ISA, yet published kernels do it and run: arrivals
    are counted as hardware counts them, and the n-th wait of a warp waits for the n-th generation."""

    relaxed = "relaxed" in ins.mods

    def arrive(w, m, ins):
        cluster = w.cta.cluster
        if cluster.barrier is None:
            cluster.barrier = ClusterBarrier()
        bar = cluster.barrier
        w.machine.release_tmem(w, ins)
        if w.clock is not None:
            released = w.fence_clock if relaxed else w.clock
            if released is not None:
                bar.clock = released.copy() if bar.clock is None else np.maximum(bar.clock, released)
            w.tick()
            for fenced in w.fenced:  # fence.mbarrier_init publishes them, even where the arrive is relaxed
                fenced.generation = w.cluster_arrivals
            w.fenced = []
        lanes = int(m.sum())
        w.cluster_lanes += lanes
        if w.cluster_lanes >= w.nlive:
            w.cluster_lanes = 0
            w.cluster_arrivals += 1
            if w.cluster_arrivals > w.cluster_waits + 1:
                w.machine.report("cluster-barrier", w, ins, "arrives twice without a wait", default=False)
        bar.arrived += lanes
        w.machine.events += 1
        _settle_cluster(cluster)

    def wait(w, s, m, ins):
        cluster = w.cta.cluster
        bar = cluster.barrier
        if bar is None or (w.cluster_waits >= w.cluster_arrivals and not w.cluster_lanes):
            w.machine.fatal("cluster-barrier", w, ins, "waits without an arrive")
        _settle_cluster(cluster)
        want = w.cluster_waits + 1
        if bar.generation < want:

            def ready():
                _settle_cluster(cluster)
                return bar.generation >= want

            return Wait(ready, lambda: f"cluster barrier: {bar.arrived} of {cluster.threads} threads arrived", ins.line)
        if s.full or mask_bits(m) == w.live_bits:
            w.cluster_waits += 1
        else:  # part of the warp: the wait counts once all its lanes have passed
            w.cluster_waited += int(m.sum())
            if w.cluster_waited >= w.nlive:
                w.cluster_waited = 0
                w.cluster_waits += 1
        w.waits += 1
        if w.clock is not None and bar.done is not None:
            np.maximum(w.clock[:4], bar.done[:4], out=w.clock[:4])
        return None

    if "arrive" in ins.mods:
        return False, arrive
    if "wait" in ins.mods:
        return True, wait
    raise unsupported(ins)


# ---- mbarrier
def mbarrier_at(w, addr: int, ins, *, cluster: bool = True) -> MBarrier:
    """The object at a shared::cluster address; an error when nothing was initialised there."""
    rank, off = addr >> 24, addr & 0xFFFFFF
    cta = w.cta
    if rank != w.rank and len(cta.cluster.ctas) > 1 and cluster:
        cta = w.machine.peer(w, rank, ins)
    bar = cta.mbarriers.get(off)
    if bar is None:
        if off % 8:
            w.machine.fatal("misaligned", w, ins, f"mbarrier at shared byte {off}, which is no multiple of 8")
        w.machine.fatal(
            "mbarrier-uninitialised", w, ins, f"no mbarrier was initialised at shared byte {off} of CTA rank {cta.rank}"
        )
    if w.clock is not None:
        seen = w.clock[0]
        actor, tick = bar.seen
        passed = w.cluster_waits + (w.cluster_waited > 0)
        if tick > seen[actor] and not 0 <= bar.generation < passed:
            w.machine.report(
                "mbarrier-init-race", w, ins, f"uses {bar.name()} without synchronising with its init", other_line=bar.line
            )
    return bar


def check_init_fence(w, bar: MBarrier, ins) -> None:
    """An asynchronous unit that signals `bar` must see its init: fence.mbarrier_init by the initialiser, or a proxy fence."""
    if w.clock is None or bar.fenced:
        return
    actor, tick = bar.seen
    if tick > w.clock[1][actor]:
        w.machine.report(
            "mbarrier-init-fence", w, ins,
            f"signals {bar.name()}, with no fence.mbarrier_init or fence.proxy.async after its init", other_line=bar.line,
        )  # fmt: skip


def _state_dest(ops):
    """(destination or None, rest) of an arrive."""
    if isinstance(ops[0], Mem):
        return None, ops
    return ops[0], ops[1:]


_MB_MODS = (
    SCOPES
    | SEMS
    | {"shared", "shared::cta", "shared::cluster", "b64", "noComplete", "noinc", "expect_tx", "parity", "suspendTimeHint"}
)


@op("mbarrier")
def _mbarrier(ins: Instr):
    kind = ins.mods[0]
    fns = {
        "init": _mb_init, "inval": _mb_inval, "arrive": _mb_arrive, "arrive_drop": _mb_arrive, "expect_tx": _mb_tx,
        "complete_tx": _mb_tx, "test_wait": _mb_wait, "try_wait": _mb_wait, "pending_count": _mb_pending,
    }  # fmt: skip
    if kind not in fns:
        raise unsupported(ins)
    bad = [m for m in ins.mods[1:] if m not in _MB_MODS]
    if bad:
        raise unsupported(ins, "qualifier " + ", ".join("." + b for b in bad))
    return fns[kind](ins)


def _mb_address(ins: Instr, mem: Mem):
    """shared forms use 32-bit addresses, generic ones 64-bit addresses whose low half is the same."""
    generic = not any(x.startswith("shared") for x in ins.mods)
    if not generic:
        return address(mem, "U")
    get = address(mem, "X")
    return lambda w: get(w).astype(np.uint32)


def _mb_init(ins: Instr):
    addr, get_n = _mb_address(ins, ins.operands[0]), getter(ins.operands[1], "U")

    def init(w, m, ins):
        a, counts = addr(w), get_n(w)
        # Lanes of one instruction that write the same object alike count once.
        for where, n in dict.fromkeys(zip(a[m].tolist(), counts[m].tolist())):
            off = where & 0xFFFFFF
            if off % 8:
                w.machine.fatal("misaligned", w, ins, f"mbarrier at shared byte {off}, which is no multiple of 8")
            if off + 8 > w.cta.smem_limit or off < 1024:
                w.machine.fatal("out-of-bounds-shared", w, ins, f"mbarrier at shared byte {off}")
            if not 1 <= n <= TX_LIMIT:
                w.machine.report("mbarrier-count", w, ins, f"expected arrival count {n} (1..{TX_LIMIT})")
            if off in w.cta.mbarriers:
                w.machine.report("mbarrier-reinit", w, ins, f"{w.cta.mbarriers[off].describe()} is initialised again without inval")
            bar = w.cta.mbarriers[off] = MBarrier(w.cta, off, n, ins.line)
            w.cta.v["u8"][off >> 3] = 0x0BA0_0000_0000_0000 | n
            if w.clock is not None:
                sh = w.cta.shadow
                g = np.array([off >> 2, (off >> 2) + 1])
                hit = sh.write(g, w.actor, w.clock, ins.line)
                if hit:
                    w.machine.conflict(hit, w, ins, "shared", w.cta, int(g[hit[1]]))
                sh.bars[g] = True
                bar.seen = (w.actor, int(w.clock[0][w.actor]))
                w.inits.append(bar)
        w.machine.events += 1

    return False, init


def _mb_inval(ins: Instr):
    addr = _mb_address(ins, ins.operands[0])

    def inval(w, m, ins):
        for a in set(addr(w)[m].tolist()):
            bar = mbarrier_at(w, a, ins, cluster=False)
            del w.cta.mbarriers[bar.offset]
            if w.cta.shadow is not None:
                g = [bar.offset >> 2, (bar.offset >> 2) + 1]
                w.cta.shadow.vb[g] = 0
                w.cta.shadow.bars[g] = False

    return False, inval


def arrive_on(w, bar: MBarrier, n: int, ins, *, drop: bool = False, clock=None) -> None:
    """n arrivals; `clock` is what they release."""
    if n > bar.pending:
        w.machine.report("mbarrier-underflow", w, ins, f"{n} arrivals on {bar.describe()}")
        n = bar.pending
    bar.join(clock)
    if clock is not None and w.cta is not bar.cta:
        actor = w.tpipe if ins.base == "tcgen05" else w.actor
        bar.remote[actor] = (int(clock[0, actor]), ins.line)
    bar.pending -= n
    if drop:
        bar.expected -= n
    bar.settle(w, ins)


def add_tx(w, bar: MBarrier, n: int, ins) -> None:
    """tx-count += n (negative for complete_tx)."""
    bar.tx += n
    if not -TX_LIMIT <= bar.tx <= TX_LIMIT:
        w.machine.report("mbarrier-tx-overflow", w, ins, f"tx-count of {bar.describe()} leaves +-{TX_LIMIT}")


def _mb_arrive(ins: Instr):
    dest, ops = _state_dest(ins.operands)
    addr = _mb_address(ins, ops[0])
    expect = "expect_tx" in ins.mods
    drop = ins.mods[0] == "arrive_drop"
    get = getter(ops[1], "U") if len(ops) > 1 else None
    put = setter(dest, "X") if dest is not None else None
    relaxed = "relaxed" in ins.mods

    def arrive(w, m, ins):
        w.machine.release_tmem(w, ins)
        a = addr(w)
        counts = get(w) if get else None
        lanes = np.flatnonzero(m)
        uniform = (a[lanes] == a[lanes[0]]).all()
        groups = {int(a[lanes[0]]): lanes} if uniform else {}
        if not uniform:
            for lane in lanes:
                groups.setdefault(int(a[lane]), []).append(lane)
        for where, ls in groups.items():
            bar = mbarrier_at(w, where, ins)
            if put is not None:
                w_phase = np.uint64(bar.phase << 32 | bar.pending)
                mm = np.zeros(32, np.bool_)
                mm[ls] = True
                put(w, mm, w_phase)
            if expect:
                add_tx(w, bar, int(counts[ls].sum(dtype=np.int64)), ins)
                n = len(ls)
            else:
                n = len(ls) if counts is None else int(counts[ls].sum(dtype=np.int64))
            arrive_on(w, bar, n, ins, drop=drop, clock=w.fence_clock if relaxed else w.clock)
        if w.clock is not None:
            w.tick()
        w.machine.events += 1

    return False, arrive


def _mb_tx(ins: Instr):
    addr, get = _mb_address(ins, ins.operands[0]), getter(ins.operands[1], "U")
    sign = 1 if ins.mods[0] == "expect_tx" else -1

    def tx(w, m, ins):
        a, n = addr(w), get(w)
        for lane in np.flatnonzero(m).tolist():
            bar = mbarrier_at(w, int(a[lane]), ins)
            add_tx(w, bar, sign * int(n[lane]), ins)
            bar.settle(w, ins)
        w.machine.events += 1

    return False, tx


def _mb_pending(ins: Instr):
    put, get = setter(ins.operands[0], "U"), getter(ins.operands[1], "X")
    return False, lambda w, m, ins: put(w, m, (get(w) & np.uint64(0xFFFFFFFF)).astype(np.uint32))


def _mb_wait(ins: Instr):
    d, mem, state = ins.operands[:3]
    addr = _mb_address(ins, mem)
    parity = "parity" in ins.mods
    get = getter(state, "U" if parity else "X")
    put = setter(d, "P")
    potentially_blocking = ins.mods[0] == "try_wait"
    relaxed = "relaxed" in ins.mods

    def wait(w, s, m, ins):
        a, st = addr(w), get(w)
        lanes = np.flatnonzero(m)
        if not len(lanes):
            return None
        first = int(lanes[0])
        uniform = bool((a[lanes] == a[first]).all() and (st[lanes] == st[first]).all())
        results = []
        pending = []
        for lane in [first] if uniform else lanes.tolist():
            where = int(a[lane])
            if where >> 24 not in (w.rank, 0):
                w.machine.fatal("mbarrier-remote-wait", w, ins, "waits on an mbarrier of another CTA")
            bar = mbarrier_at(w, where, ins, cluster=False)
            if parity:
                want = int(st[lane])
                if want > 1:
                    w.machine.report("mbarrier-parity", w, ins, f"phase parity {want} (0 or 1)")
                done = (bar.phase & 1) != (want & 1)
            else:
                want = int(st[lane]) >> 32
                done = bar.phase != want
            if done and uniform and w.clock is not None and not relaxed and w.machine.not_seen_yet(w, s, ins, bar):
                done = False
            elif not done:
                pending.append((bar, want))
            elif w.clock is not None and bar.done is not None:
                bar.passed[w.actor] = (int(w.clock[0, w.actor]), ins)
                if not relaxed:
                    np.maximum(w.clock[:4], bar.done[:4], out=w.clock[:4])
                else:  # a fence after the wait acquires it
                    w.unfenced = bar.done.copy() if w.unfenced is None else np.maximum(w.unfenced, bar.done)
            results.append(done)
        if pending and s.state != "timeout":
            bar, want = pending[0]
            phase = bar.phase
            key = (ins.index, bar, phase)
            again = s.failed == key
            if not again:
                w.waits += 1
            # A try that fails returns false, as hardware may; one that comes back is a loop, and blocks until the phase ends.
            if potentially_blocking and w.machine.holds_on(again):
                return Wait(
                    lambda: bar.phase != phase,
                    lambda: f"phase {'parity ' if parity else ''}{want & 1 if parity else want} of {bar.describe()}",
                    ins.line,
                    wants=lambda o: o.signals(bar),
                    timeout=True,
                    bar=bar,
                )
            s.failed = key
        s.state = None
        if uniform:
            put(w, m, results[0])
        else:
            row = np.zeros(32, np.bool_)
            row[lanes] = results
            put(w, m, row)
        return None

    return True, wait
