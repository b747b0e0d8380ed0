"""Asynchronous copies: cp.async, cp.async.bulk, tensor copies, st.async, red.async, tensormap.*, and cluster launch control.

Each becomes an AsyncOp. Its accesses are checked at issue (what is ordered before an operation is known then, whatever the
schedule); its data moves when the schedule completes it.
"""

from __future__ import annotations

import numpy as np

from ..ptx.ir import TYPE_BITS, Imm, Instr, Mem, Vec
from .barriers import MBarrier
from .hazards import EmulationError
from .ops_mem import check_global, release_var
from .ops_sync import add_tx, arrive_on, check_init_fence, mbarrier_at
from .optable import CACHE_MODS, Wait, address, getter, op, unsupported

_FOUR = np.arange(4)


class AsyncOp:
    """One asynchronous operation. `pipe`: operations with equal pipes complete in issue order; None: in any order."""

    __slots__ = ("what", "ins", "warp", "pipe", "effect", "bars", "done", "marks", "source")

    def __init__(self, what: str, ins: Instr, warp, pipe, effect, bars=()) -> None:
        self.what, self.ins, self.warp, self.pipe, self.effect, self.bars = what, ins, warp, pipe, effect, bars
        self.done = False
        self.marks: list[tuple[int, int]] = []  # (actor, tick) that waiting for the operation observes (wgmma)
        self.source = None  # of a store: fn(shared memory) that writes, as long as the shared memory is not read

    def signals(self, bar: MBarrier) -> bool:
        return bar in self.bars

    def read_source(self) -> None:
        """A store reads its shared memory now; its write is still to come."""
        write, data = self.source, self.warp.cta.smem.copy()
        self.effect, self.source = lambda: write(data), None
        self.warp.machine.events += 1

    def run(self) -> None:
        self.effect()
        self.done = True
        self.warp.machine.events += 1


def fine_granules(granules16: np.ndarray, cache: dict) -> np.ndarray:
    """4-byte granules of 16-byte granule numbers. Kept by the identity of the array, which plans share and never change."""
    key = id(granules16)
    hit = cache.get(key)
    if hit is None or hit[0] is not granules16:
        hit = (granules16, (granules16.reshape(-1)[:, None] * 4 + _FOUR).reshape(-1))
        cache[key] = hit
    return hit[1]


def agent(w, key, *, visible: bool = True):
    """(actor, clock) of a new operation on the pipe `key`, issued now by warp w. `visible`: its writes need no proxy fence."""
    cluster = w.cta.cluster
    actor = key if isinstance(key, int) else cluster.actor_of(key)
    clock = w.clock.copy()
    tick = cluster.machine.tick_agent(cluster, actor)
    if visible:
        clock[:, actor] = tick
    else:
        clock[0, actor] = tick
    w.clock[0, w.actor] += 1
    return actor, clock


def shared_read(w, cta, g, actor, clock, ins, *, proxy: bool) -> None:
    sh = cta.shadow
    k = sh.unwritten(g)
    if k >= 0:
        w.machine.report(
            "uninitialised-shared", w, ins, f"reads shared memory at byte {int(g[k]) * 4} of CTA {cta.rank} that nothing wrote"
        )
    hit = sh.read(g, actor, clock, ins.line, proxy=proxy)
    if hit:
        w.machine.conflict(hit, w, ins, "shared", cta, int(g[hit[1]]))


def check_swizzle(w, cta, plan, ins) -> None:
    """Bytes that a tensor copy swizzled in one way and a matrix descriptor reads in another."""
    known = w.machine.swizzles
    for mode, granules in plan.swizzled if known else ():
        lines = cta.shadow.wl[granules * 4]
        for line in [int(lines[0])] if (lines == lines[0]).all() else np.unique(lines).tolist():
            loaded = known.get(line, mode)
            if loaded != mode:
                text = f"the descriptor says swizzle {mode}, the tensor copy that wrote the tile {loaded}"
                w.machine.report("descriptor-swizzle", w, ins, text, other_line=line)


def shared_write(w, cta, g, actor, clock, ins, *, generic: bool) -> None:
    sh = cta.shadow
    if not generic:
        crossing = sh.crosses_proxy(g, clock, cta.cluster.nwarps, w.machine.strict)
        if crossing:
            w.machine.conflict(crossing, w, ins, "shared", cta, int(g[crossing[1]]))
    hit = sh.write(g, actor, clock, ins.line, generic=generic)
    if hit:
        w.machine.conflict(hit, w, ins, "shared", cta, int(g[hit[1]]))
    if sh.bars[g].any():
        w.machine.report("mbarrier-overwritten", w, ins, "an asynchronous copy writes over a live mbarrier object")


def _check_range(w, cta, off: int, n: int, ins) -> None:
    if off < 1024 or off + n > cta.smem_limit:
        w.machine.fatal(
            "out-of-bounds-shared", w, ins, f"bytes [{off}, {off + n}) of CTA rank {cta.rank}, which has [1024, {cta.smem_limit})"
        )


def locate(w, addr: int, ins):
    """(CTA, offset) of a shared::cluster address."""
    rank, off = addr >> 24, addr & 0xFFFFFF
    if rank == w.rank or (rank == 0 and len(w.cta.cluster.ctas) == 1):
        return w.cta, off
    return w.machine.peer(w, rank, ins), off


def complete_bytes(w, bar: MBarrier, n: int, ins, clock) -> None:
    bar.join(clock)
    add_tx(w, bar, -n, ins)
    bar.settle(w, ins)


# ---- cp.async family: dispatch
@op("cp")
def _cp(ins: Instr):
    mods = ins.mods
    if mods[0] == "reduce":
        return _bulk_tensor(ins) if "tensor" in mods else _bulk(ins)
    if mods[0] != "async":
        raise unsupported(ins)
    if len(mods) > 1 and mods[1] == "bulk":
        if "commit_group" in mods:
            return False, _bulk_commit
        if "wait_group" in mods:
            return _bulk_wait(ins)
        if "prefetch" in mods:
            return False, lambda w, m, ins: None
        return _bulk_tensor(ins) if "tensor" in mods else _bulk(ins)
    if "commit_group" in mods:
        return False, _cp_commit
    if "wait_group" in mods or "wait_all" in mods:
        return _cp_wait(ins)
    if "mbarrier" in mods:
        return _cp_arrive(ins)
    return _cp_async(ins)


# ---- cp.async (not bulk): generic proxy, per-thread groups kept per warp
def _cp_async(ins: Instr):
    bad = [m for m in ins.mods[1:] if m not in CACHE_MODS | {"shared", "shared::cta", "global", "ca", "cg"}]
    if bad:
        raise unsupported(ins, "qualifier ." + bad[0])
    dst, src, size = ins.operands[:3]
    n = int(size.value)
    if n not in (4, 8, 16) or ("cg" in ins.mods and n != 16):
        raise unsupported(ins, f"size {n}")
    ignore = None
    get_src_size = None
    if len(ins.operands) > 3:
        x = ins.operands[3]
        if getattr(x, "cls", "") == "p":
            ignore = getter(x, "P")
        elif "L2::cache_hint" not in ins.mods or len(ins.operands) > 4:
            get_src_size = getter(x, "U")
    get_dst, get_gsrc = address(dst, "U"), address(src, "X")

    def copy(w, m, ins):
        offs = (get_dst(w)[m] & np.uint32(0xFFFFFF)).astype(np.int64)
        srcs = get_gsrc(w)[m]
        sizes = np.full(len(offs), n) if get_src_size is None else get_src_size(w)[m].astype(np.int64)
        if ignore is not None:
            sizes = np.where(ignore(w)[m], 0, sizes)
        if (sizes > n).any():
            w.machine.fatal("cp-async-size", w, ins, f"source size {int(sizes.max())} of a copy of {n} bytes")
        cta, machine = w.cta, w.machine
        lo, hi = int(offs.min()), int(offs.max()) + n
        _check_range(w, cta, lo, hi - lo, ins)
        if (offs & (n - 1)).any() or (srcs[sizes > 0] & np.uint64(n - 1)).any():
            raise EmulationError(f"misaligned cp.async at PTX line {ins.line}{machine.where(ins)}")
        read = sizes > 0
        for a, s in zip(srcs[read].tolist(), sizes[read].tolist()):
            if machine.memory.find(a, s) is None:
                w.machine.fatal("out-of-bounds-global", w, ins, machine.memory.describe(a, s))
        if w.clock is not None:
            actor, clock = agent(w, ("cp", w.actor), visible=False)
            g = ((offs >> 2)[:, None] + np.arange(n // 4)).reshape(-1)
            shared_write(w, cta, g, actor, clock, ins, generic=True)
            _global_access(w, srcs[read], n, ins, False, actor, clock, proxy=False)

        def effect():
            data = np.zeros((len(offs), n), np.uint8)
            whole = sizes == n
            if whole.any():
                data[whole] = machine.memory.read(srcs[whole].astype(np.int64), n)
            for k in np.flatnonzero(read & ~whole).tolist():
                s = int(sizes[k])
                data[k, :s] = machine.memory.bytes_at(int(srcs[k]), s)
            cta.smem[offs[:, None] + np.arange(n)] = data

        machine.bytes["cp.async"] += int(sizes.sum())
        o = AsyncOp("cp.async", ins, w, None, effect)
        w.cp_open.append(o)
        machine.submit(o)

    return False, copy


def _global_access(w, addrs: np.ndarray, n: int, ins, write: bool, actor, clock, proxy: bool = True) -> None:
    """Race check of whole chunks of global memory, by allocation. `proxy`: the access goes through the async proxy."""
    if not len(addrs):
        return
    lo, hi = int(addrs.min()), int(addrs.max()) + n
    alloc = w.machine.memory.find(lo, hi - lo)
    if alloc is not None:
        if write and not alloc.writable:
            w.machine.report("write-to-readonly", w, ins, f"writes {alloc.name or 'a read-only allocation'}")
        if alloc.shadow is not None or write:
            check_global(w, alloc, addrs.astype(np.uint64), n, ins, write, actor=actor, clock=clock, proxy=proxy)
        return
    for a in addrs.tolist():
        alloc = w.machine.memory.find(int(a), n)
        if alloc is not None and (alloc.shadow is not None or write):
            check_global(w, alloc, np.array([a], np.uint64), n, ins, write, actor=actor, clock=clock, proxy=proxy)


def _cp_commit(w, m, ins) -> None:
    mark = None
    if w.clock is not None:
        mark = w.machine.tick_of(w.cta.cluster, ("cp", w.actor))
    w.cp_groups.append((w.cp_open, mark))
    w.cp_open = []


def _groups_wait(w, groups, keep: int, ins, what: str, key, read: bool = False):
    """Wait for all but the newest `keep` groups; joins their actor's clock."""
    late = list(groups)[: max(0, len(groups) - keep)]
    ops = [o for g, _ in late for o in g]
    if any(not o.done for o in ops):
        return Wait(
            lambda: all(o.done for o in ops),
            lambda: f"{what}: {sum(not o.done for o in ops)} copies pending",
            ins.line,
            wants=lambda o: o in ops,
        )
    for _ in late:
        _, mark = groups.popleft()
        if w.clock is not None and mark is not None:
            for actor, tick in mark if isinstance(mark, list) else [mark]:
                if not (read and actor < 0):
                    a = abs(actor)
                    w.clock[0, a] = max(w.clock[0, a], tick)
    return None


def _cp_wait(ins: Instr):
    everything = "wait_all" in ins.mods
    keep = 0 if everything else int(ins.operands[0].value)

    def wait(w, s, m, ins):
        if everything and w.cp_open:
            _cp_commit(w, m, ins)
        return _groups_wait(w, w.cp_groups, keep, ins, "cp.async", "cp")

    return True, wait


def _cp_arrive(ins: Instr):
    noinc = "noinc" in ins.mods
    get = address(ins.operands[0], "U")

    def arrive(w, m, ins):
        machine = w.machine
        clock = None
        if w.clock is not None:
            # Completion of the copies of this thread is released: what the thread itself did is too (it issued the arrive).
            clock = w.clock.copy()
            mark = machine.tick_of(w.cta.cluster, ("cp", w.actor))
            # Default level: copies signalled this way are visible to the async proxy of whoever waits on the barrier.
            # Published MLA kernels feed UMMA so, with no fence.proxy.async anywhere between.
            rows = clock[:1] if machine.strict else clock[:3]
            rows[:, mark[0]] = np.maximum(rows[:, mark[0]], mark[1])
            w.tick()
        earlier = [o for g, _ in w.cp_groups for o in g] + list(w.cp_open)
        addrs = get(w)[m]
        for a in dict.fromkeys(addrs.tolist()):
            n = int((addrs == a).sum())
            bar = mbarrier_at(w, a, ins)
            if not noinc:
                bar.pending += n

            def effect(bar=bar, n=n):
                for o in earlier:
                    machine.complete(o)
                arrive_on(w, bar, n, ins, clock=clock)

            # Triggered by all earlier copies of the thread, so the arrives of one thread happen in order.
            pipe = ("cp-arrive", w.actor, w.cta.cluster.uid)
            machine.submit(AsyncOp("cp.async.mbarrier.arrive", ins, w, pipe, effect, (bar,)))

    return False, arrive


# ---- cp.async.bulk (no tensor)
_BULK_TYPES = set(TYPE_BITS)


def _spaces(ins: Instr):
    return [m for m in ins.mods if m in ("global", "shared::cta", "shared::cluster")]


def _bulk(ins: Instr):
    mods = ins.mods
    spaces = _spaces(ins)
    reduce_op = None
    if mods[0] == "reduce":
        reduce_op = next((m for m in mods if m in ("add", "min", "max", "inc", "dec", "and", "or", "xor")), None)
    multicast = "multicast::cluster" in mods
    masked = "cp_mask" in mods
    if masked:
        raise unsupported(ins, "qualifier .cp_mask")
    ops = list(ins.operands)
    dst, src = ops[0], ops[1]
    size = getter(ops[2], "U")
    dtype = next((m for m in reversed(mods) if m in _BULK_TYPES), None)
    noftz = reduce_op is not None
    del noftz
    if spaces == ["shared::cluster", "global"] or spaces == ["shared::cta", "global"]:
        get_dst, get_src, get_bar = address(dst, "U"), address(src, "X"), address(ops[3], "U")
        get_mask = getter(ops[4], "H") if multicast else None

        def load(w, m, ins):
            for lane in np.flatnonzero(m).tolist():
                n, src_a = int(size(w)[lane]), int(get_src(w)[lane])
                _bulk_legal(w, ins, n, int(get_dst(w)[lane]) & 0xFFFFFF, src_a)
                if w.machine.memory.find(src_a, n) is None:
                    w.machine.fatal("out-of-bounds-global", w, ins, w.machine.memory.describe(src_a, n))
                targets = _destinations(
                    w, int(get_dst(w)[lane]), int(get_bar(w)[lane]), None if get_mask is None else int(get_mask(w)[lane]), ins
                )
                _issue_load(
                    w,
                    ins,
                    targets,
                    n,
                    lambda cta, off, n=n, a=src_a: cta.smem.__setitem__(slice(off, off + n), w.machine.memory.bytes_at(a, n)),
                    np.array([src_a], np.int64),
                    n,
                )
                w.machine.bytes["bulk-load"] += n

        return False, load
    if spaces == ["global", "shared::cta"]:
        get_dst, get_src = address(dst, "X"), address(src, "U")

        def store(w, m, ins):
            from ..datapath.tma import reduce_bytes

            for lane in np.flatnonzero(m).tolist():
                n, d = int(size(w)[lane]), int(get_dst(w)[lane])
                off = int(get_src(w)[lane]) & 0xFFFFFF
                _bulk_legal(w, ins, n, off, d)
                if n == 0:
                    continue
                _check_range(w, w.cta, off, n, ins)
                memory = w.machine.memory
                if memory.find(d, n) is None:
                    w.machine.fatal("out-of-bounds-global", w, ins, memory.describe(d, n))

                def effect(smem, n=n, d=d, off=off):
                    target = memory.bytes_at(d, n)
                    if reduce_op:
                        target[:] = reduce_bytes(dtype, reduce_op, target.copy(), smem[off : off + n].copy())
                    else:
                        target[:] = smem[off : off + n]

                _issue_store(
                    w,
                    ins,
                    np.arange(off >> 2, off + n >> 2),
                    np.array([d], np.int64),
                    n,
                    effect,
                    "bulk-store",
                    reduce_op is not None,
                )
                w.machine.bytes["bulk-store"] += n

        return False, store
    if spaces == ["shared::cluster", "shared::cta"]:
        get_dst, get_src, get_bar = address(dst, "U"), address(src, "U"), address(ops[3], "U")

        def to_peer(w, m, ins):
            from ..datapath.tma import reduce_bytes

            for lane in np.flatnonzero(m).tolist():
                n = int(size(w)[lane])
                cta, off = locate(w, int(get_dst(w)[lane]), ins)
                soff = int(get_src(w)[lane]) & 0xFFFFFF
                _bulk_legal(w, ins, n, off, soff)
                _check_range(w, w.cta, soff, n, ins)
                _check_range(w, cta, off, n, ins)
                bar = mbarrier_at(w, int(get_bar(w)[lane]), ins)
                check_init_fence(w, bar, ins)
                clock = None
                if w.clock is not None:
                    actor, clock = agent(w, ("mbar", bar.cta.rank, bar.offset))
                    shared_read(w, w.cta, np.arange(soff >> 2, soff + n >> 2), actor, clock, ins, proxy=True)
                    shared_write(w, cta, np.arange(off >> 2, off + n >> 2), actor, clock, ins, generic=False)

                def effect(n=n, cta=cta, off=off, soff=soff, bar=bar, clock=clock):
                    data = w.cta.smem[soff : soff + n]
                    target = cta.smem[off : off + n]
                    target[:] = reduce_bytes(dtype, reduce_op, target.copy(), data.copy()) if reduce_op else data
                    complete_bytes(w, bar, n, ins, clock)

                w.machine.bytes["dsmem-copy"] += n
                w.machine.submit(AsyncOp("cp.async.bulk", ins, w, None, effect, (bar,)))

        return False, to_peer
    raise unsupported(ins, f"direction {' <- '.join(spaces)}")


def _bulk_legal(w, ins, n: int, off: int, other: int) -> None:
    if n % 16 or off % 16 or other % 16:
        w.machine.fatal(
            "bulk-alignment", w, ins, f"size {n}, shared byte {off}, other address {other:#x}: all must be multiples of 16"
        )


def _destinations(w, dst: int, bar: int, mask: int | None, ins, pair: bool = False):
    """[(cta, offset, mbarrier)] of a load, with multicast and the pair rule of cta_group::2 applied."""
    cta, off = locate(w, dst, ins)
    if mask is None:
        return [(cta, off, mbarrier_at(w, bar, ins))]
    out = []
    bar_rank, bar_off = bar >> 24, bar & 0xFFFFFF
    for rank, peer in enumerate(w.cta.cluster.ctas):
        if mask >> rank & 1:
            target = (rank & ~1) | (bar_rank & 1) if pair else rank
            out.append((peer, off, mbarrier_at(w, target << 24 | bar_off, ins)))
    if mask >> len(w.cta.cluster.ctas):
        w.machine.fatal("multicast-mask", w, ins, f"CTA mask {mask:#x} names CTAs outside the cluster")
    return out


def _issue_load(w, ins, targets, tx: int, put, addresses, nbytes: int, plan=None) -> None:
    """Issue a load into each target: checks now, data and complete_tx when the schedule says so."""
    machine = w.machine
    if plan is not None and plan.tensor.swizzle != "none":  # without one, a tile may be laid out chunk by chunk
        machine.swizzles.setdefault(ins.line, plan.tensor.swizzle)
    for cta, off, bar in targets:
        _check_range(w, cta, off, tx if plan is None else plan.smem_span, ins)
        check_init_fence(w, bar, ins)
        clock = None
        if w.clock is not None:
            actor, clock = agent(w, ("mbar", bar.cta.rank, bar.offset, cta.rank))
            g = np.arange(off >> 2, off + tx >> 2) if plan is None else fine_granules(plan.smem_granules, machine.granule_cache)
            shared_write(w, cta, g, actor, clock, ins, generic=False)
            _global_access(w, addresses, nbytes, ins, False, actor, clock)

        def effect(cta=cta, off=off, bar=bar, clock=clock):
            put(cta, off)
            complete_bytes(w, bar, tx, ins, clock)

        machine.submit(AsyncOp(ins.op.split(".shared")[0], ins, w, None, effect, (bar,)))


def _issue_store(w, ins, g, addresses, nbytes: int, effect, what: str, atomic: bool) -> None:
    mark = None
    if w.clock is not None:
        cluster = w.cta.cluster
        reader, clock = agent(w, 3 * cluster.nwarps + w.actor)
        shared_read(w, w.cta, g, reader, clock, ins, proxy=True)
        writer, wclock = agent(w, ("bulk", w.actor))
        if not atomic:
            _global_access(w, addresses, nbytes, ins, True, writer, wclock)
        mark = [(reader, int(clock[0, reader])), (-writer, int(wclock[0, writer]))]
    o = AsyncOp(what, ins, w, None, lambda: effect(w.cta.smem))
    o.source = effect
    w.bulk_open.append((o, mark))
    w.machine.submit(o)


def _bulk_commit(w, m, ins) -> None:
    ops = [o for o, _ in w.bulk_open]
    marks = [x for _, mark in w.bulk_open if mark for x in mark]
    w.bulk_groups.append((ops, marks))
    w.bulk_unread += ops
    w.bulk_open = []


def _bulk_wait(ins: Instr):
    keep = int(ins.operands[0].value)
    read = "read" in ins.mods

    def wait(w, s, m, ins):
        if not read:
            left = _groups_wait(w, w.bulk_groups, keep, ins, "cp.async.bulk group", "bulk")
            if left is None:
                w.bulk_unread = [o for g, _ in w.bulk_groups for o in g]
            return left
        # .read: the sources may be reused; the groups stay, as a later wait may ask for the writes.
        late = list(w.bulk_groups)[: max(0, len(w.bulk_groups) - keep)]
        ops = [o for g, _ in late for o in g]
        unread = [o for o in ops if not o.done and o.source is not None]
        if unread:
            for o in unread:
                w.machine.read_only(o)
            return Wait(lambda: True, lambda: "cp.async.bulk group (reads)", ins.line)  # other warps come first
        w.bulk_unread = [o for o in w.bulk_unread if o not in ops]
        if w.clock is not None:
            for _, marks in late:
                for actor, tick in marks:
                    if actor >= 0:
                        w.clock[0, actor] = max(w.clock[0, actor], tick)
        return None

    return True, wait


# ---- tensor copies
def tensor_map(w, addr: int, ins):
    """The decoded map at a generic address, cached by its 128 bytes."""
    from ..datapath.tensormap import TensorMap

    raw = w.machine.memory.bytes_at(addr, 128, "tensor map read").tobytes()
    cache = w.machine.tensor_maps
    tmap = cache.get(raw)
    if tmap is None:
        tmap = cache[raw] = TensorMap.decode(raw)
    return tmap


def _bulk_tensor(ins: Instr):
    mods = ins.mods
    spaces = _spaces(ins)
    mode = next((m for m in mods if m.startswith("tile::") or m == "tile" or m.startswith("im2col")), "tile")
    if mode.startswith("im2col"):
        raise unsupported(ins, "im2col")
    mode = mode.split("::")[1] if "::" in mode else "tile"
    multicast = "multicast::cluster" in mods
    pair = "cta_group::2" in mods
    reduce_op = None
    if mods[0] == "reduce":
        reduce_op = next((m for m in mods if m in ("add", "min", "max", "inc", "dec", "and", "or", "xor")), None)
    ops = list(ins.operands)
    if spaces in (["shared::cluster", "global"], ["shared::cta", "global"]):
        dst, src, bar = ops[0], ops[1], ops[2]
        get_dst, get_map, get_bar = address(dst, "U"), address(Mem(src.base, src.offset), "X"), address(bar, "U")
        coords = [getter(o, "S") for o in src.extra.items]
        get_mask = getter(ops[3], "H") if multicast else None

        def load(w, m, ins):
            from ..datapath.tma import plan_tile

            memory = w.machine.memory
            for lane in np.flatnonzero(m).tolist():
                tmap = tensor_map(w, int(get_map(w)[lane]), ins)
                dst_a = int(get_dst(w)[lane])
                at = tuple(int(c(w)[lane]) for c in coords)
                plan = w.machine.cached_plan(plan_tile, tmap, at, dst_a & 0xFFFFFF, mode=mode, direction="load")
                mask = None if get_mask is None else int(get_mask(w)[lane])
                targets = _destinations(w, dst_a, int(get_bar(w)[lane]), mask, ins, pair)
                live = plan.gmem_chunks[plan.gmem_chunks >= 0]
                if len(live) and plan.chunk_bytes:
                    lo, hi = int(live.min()), int(live.max()) + plan.chunk_bytes
                    if memory.find(lo, hi - lo) is None:
                        for a in (lo, hi - plan.chunk_bytes):
                            if memory.find(a, plan.chunk_bytes) is None:
                                w.machine.fatal(
                                    "out-of-bounds-global", w, ins, "tensor map: " + memory.describe(a, plan.chunk_bytes)
                                )
                _issue_load(
                    w,
                    ins,
                    targets,
                    plan.tx_bytes,
                    lambda cta, off, plan=plan: plan.load(memory.read, cta.smem),
                    live,
                    max(plan.chunk_bytes, 1),
                    plan,
                )
                w.machine.bytes["gather4" if mode == "gather4" else "tma-load"] += plan.gmem_bytes

        return False, load
    if spaces == ["global", "shared::cta"]:
        dst, src = ops[0], ops[1]
        get_map, get_src = address(Mem(dst.base, dst.offset), "X"), address(src, "U")
        coords = [getter(o, "S") for o in dst.extra.items]

        def store(w, m, ins):
            from ..datapath.tma import plan_tile

            memory, cta = w.machine.memory, w.cta
            for lane in np.flatnonzero(m).tolist():
                tmap = tensor_map(w, int(get_map(w)[lane]), ins)
                at = tuple(int(c(w)[lane]) for c in coords)
                off = int(get_src(w)[lane]) & 0xFFFFFF
                plan = w.machine.cached_plan(plan_tile, tmap, at, off, mode=mode, direction="reduce" if reduce_op else "store")
                _check_range(w, cta, off, plan.smem_span, ins)
                live = plan.gmem_chunks[plan.gmem_chunks >= 0]
                for a in (int(live.min()), int(live.max())) if len(live) and plan.chunk_bytes else ():
                    if memory.find(a, plan.chunk_bytes) is None:
                        w.machine.fatal("out-of-bounds-global", w, ins, "tensor map: " + memory.describe(a, plan.chunk_bytes))
                g = fine_granules(plan.smem_granules, w.machine.granule_cache) if w.clock is not None else None

                def effect(smem, plan=plan):
                    # The last 16 bytes of a row pass the tensor's edge. Past its allocation too, that is no one's memory.
                    if reduce_op:
                        plan.reduce(smem, memory.update, reduce_op, memory.update_allocated)
                    else:
                        plan.store(smem, memory.write, memory.write_allocated)

                _issue_store(w, ins, g, live, max(plan.chunk_bytes, 1), effect, "cp.async.bulk.tensor store", reduce_op is not None)
                w.machine.bytes["tma-store"] += plan.gmem_bytes

        return False, store
    raise unsupported(ins, f"direction {' <- '.join(spaces)}")


@op("tensormap")
def _tensormap(ins: Instr):
    if ins.mods[0] == "cp_fenceproxy":
        dst, src, size = ins.operands
        get_dst, get_src = address(dst, "X"), address(src, "U")

        def copy(w, m, ins):
            lane = int(m.argmax())
            off = int(get_src(w)[lane]) & 0xFFFFFF
            w.machine.memory.bytes_at(int(get_dst(w)[lane]), 128)[:] = w.cta.smem[off : off + 128]
            w.machine.events += 1

        return False, copy
    if ins.mods[0] != "replace":
        raise unsupported(ins)
    field = ins.mods[2]
    shared = any(m.startswith("shared") for m in ins.mods)
    get = address(ins.operands[0], "U" if shared else "X")
    rest = ins.operands[1:]
    ordinal = int(rest[0].value) if len(rest) == 2 else None
    value = rest[-1]
    wide = field in ("global_address", "global_stride")
    get_value = getter(value, "X" if wide else "U")

    def replace(w, m, ins):
        from ..datapath.tensormap import TensorMap

        lane = int(m.argmax())
        a = int(get(w)[lane])
        raw = w.cta.smem[a & 0xFFFFFF : (a & 0xFFFFFF) + 128] if shared else w.machine.memory.bytes_at(a, 128)
        raw[:] = np.frombuffer(
            TensorMap.decode(raw.tobytes()).replace_field(field, int(get_value(w)[lane]), ordinal).encode(), np.uint8
        )
        w.machine.events += 1

    return False, replace


# ---- st.async, red.async
def decode_st_async(ins: Instr):
    mods = ins.mods
    t = next(m for m in reversed(mods) if m in TYPE_BITS)
    vec = next((int(m[1:]) for m in mods if m in ("v2", "v4")), 1)
    dst, src, bar = ins.operands[:3]
    if not isinstance(bar, Mem):
        raise unsupported(ins, "the form without an mbarrier")
    items = src.items if isinstance(src, Vec) else [src]
    view = "X" if TYPE_BITS[t] == 64 else "U"
    gets = [getter(o, view) for o in items]
    get_dst, get_bar = address(dst, "U"), address(bar, "U")
    n = TYPE_BITS[t] // 8 * vec

    def store(w, m, ins):
        for lane in np.flatnonzero(m).tolist():
            cta, off = locate(w, int(get_dst(w)[lane]), ins)
            b = mbarrier_at(w, int(get_bar(w)[lane]), ins)
            if b.cta is not cta:
                w.machine.report("st-async-barrier", w, ins, "the mbarrier is not in the destination CTA")
            _check_range(w, cta, off, n, ins)
            data = np.array([int(g(w)[lane]) for g in gets], np.uint64 if view == "X" else np.uint32).view(np.uint8)
            clock = None
            if w.clock is not None:
                actor, clock = agent(w, ("mbar", b.cta.rank, b.offset, w.actor), visible=False)
                shared_write(w, cta, np.arange(off >> 2, off + n >> 2), actor, clock, ins, generic=True)

            def effect(cta=cta, off=off, data=data, b=b, clock=clock):
                cta.smem[off : off + n] = data
                complete_bytes(w, b, n, ins, clock)

            w.machine.bytes["dsmem-store"] += n
            w.machine.submit(AsyncOp("st.async", ins, w, None, effect, (b,)))

    return False, store


def decode_red_async(ins: Instr):
    mods = ins.mods
    t = next(m for m in reversed(mods) if m in TYPE_BITS)
    name = next(m for m in mods if m in ("add", "min", "max", "inc", "dec", "and", "or", "xor"))
    dst, src, bar = ins.operands[:3]
    if not isinstance(bar, Mem):
        raise unsupported(ins, "the form without an mbarrier")
    n = TYPE_BITS[t] // 8
    get = getter(src, "X" if n == 8 else "U")
    get_dst, get_bar = address(dst, "U"), address(bar, "U")
    dtype = {"b32": "u32", "b64": "u64"}.get(t, t)

    def reduce(w, m, ins):
        from ..datapath.tma import reduce_bytes

        for lane in np.flatnonzero(m).tolist():
            cta, off = locate(w, int(get_dst(w)[lane]), ins)
            b = mbarrier_at(w, int(get_bar(w)[lane]), ins)
            _check_range(w, cta, off, n, ins)
            data = np.array([get(w)[lane]]).view(np.uint8)
            clock = None
            if w.clock is not None:
                _, clock = agent(w, ("mbar", b.cta.rank, b.offset, w.actor), visible=False)
                k = cta.shadow.unwritten(np.arange(off >> 2, off + n >> 2))
                if k >= 0:
                    w.machine.report(
                        "uninitialised-shared", w, ins, f"reduction on shared byte {off} of CTA {cta.rank} that nothing wrote"
                    )

            def effect(cta=cta, off=off, data=data, b=b, clock=clock):
                target = cta.smem[off : off + n]
                target[:] = reduce_bytes(dtype, name, target.copy(), data)
                complete_bytes(w, b, n, ins, clock)

            w.machine.submit(AsyncOp("red.async", ins, w, None, effect, (b,)))

    return False, reduce


# ---- clusterlaunchcontrol.try_cancel
def try_cancel(w, dst: int, bar_addr: int, everyone: bool, ins) -> None:
    """Take a cluster that has not started, or fail; the 16-byte answer is {x, y, z, taken}."""
    machine = w.machine
    taken = machine.cancel_cluster()
    ctaid = (0, 0, 0) if taken is None else tuple(taken[k] * machine.cluster_dim[k] for k in range(3))
    answer = np.array([*ctaid, int(taken is not None)], np.uint32).view(np.uint8)
    off = dst & 0xFFFFFF
    ctas = w.cta.cluster.ctas if everyone else [w.cta]
    targets = [(c, off, mbarrier_at(w, c.rank << 24 | (bar_addr & 0xFFFFFF), ins)) for c in ctas]
    _issue_load(w, ins, targets, 16, lambda cta, o: cta.smem.__setitem__(slice(o, o + 16), answer), np.empty(0, np.int64), 1)


__all__ = ["AsyncOp", "Imm", "release_var"]
