"""The state of one launch: residency, the scheduler, the three schedules of asynchronous work, and the findings."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict, deque

import numpy as np

from . import ops_async, ops_control, ops_mem, ops_mma, ops_sync, ops_tensor, ops_warp  # noqa: F401  (they register their instructions)
from .hazards import Deadlock, EmulationError, Hazard
from .memory import GlobalMemory
from .program import BLOCKING, BRANCH, CODE, INDIRECT, Program
from .state import POISON32, SMEM_BYTES, Cluster, RegisterFile, Split, Warp, bits_mask, mask_bits

QUANTUM = 400  # items a warp runs before others get a turn; bounds spinning on memory
IDLE_ROUNDS = 3000  # rounds in which nothing observable happened before a livelock is reported, where its state does not repeat
MAX_HAZARDS = 200


class Machine:
    """State of one launch."""

    def __init__(self, program: Program, grid, block, cluster, cluster_given, dynamic_smem, params, memory, schedule, seed, checks):
        self.program = program
        self.grid, self.block, self.cluster_dim, self.cluster_given = grid, block, cluster, cluster_given
        self.dynamic_smem = dynamic_smem
        self.static_smem = program.flat.static_shared
        self.memory: GlobalMemory = memory.copy()
        self.schedule, self.checks = schedule, checks
        self.rng = np.random.default_rng(seed)
        self.checking = checks != "off"
        self.strict = checks == "strict"
        self.nwarps = (block[0] * block[1] * block[2] + 31) // 32
        self.initial_regs = self._initial_regs()
        self.events = 0
        self.rounds = 0
        self.ticks = 0
        self.bytes: Counter = Counter()
        self.hazards: list[Hazard] = []
        self._seen_hazards: set = set()
        self.printed: list[str] = []
        self.pending: list = []
        self.sync_vars: dict = {}
        self.tensor_maps: dict = {}
        self.granule_cache: dict = {}
        self.unwritten: deque = deque()  # stores that have read their shared memory only
        self.swizzles: dict[int, str] = {}  # PTX line of a tensor load -> its swizzle, if it has one
        self.cta_group = None
        self.tensor_cycles = 0.0
        self.tensor_flops = 0
        self.started_ctas = 0
        self.warp_counts: dict[int, list[int]] = {}
        self.warp_waits: Counter = Counter()
        self.warp_tensor: defaultdict = defaultdict(float)
        self._regs: list[RegisterFile] = []
        self._smems: list[np.ndarray] = []
        self.const_ranges: list[tuple[int, int]] = []
        self._symbols: dict = {}
        self._load_module(params)
        for a in self.memory.allocations:
            a.shadow = None
        gx, gy, gz = (grid[k] // cluster[k] for k in range(3))
        self.waiting = [(x, y, z) for z in range(gz) for y in range(gy) for x in range(gx)]
        self.waiting.reverse()
        self.next_uid = 0
        self.clusters: list[Cluster] = []

    def _initial_regs(self) -> int:
        """Registers per thread at launch: .maxnreg, else the most that ptxas can give, which it does where setmaxnreg is used:
        a quarter of the file, shared by a quarter of the warps."""
        d = self.program.flat.directives
        if d.get("maxnreg"):
            return d["maxnreg"][0]
        return min(255, 16384 // (32 * (self.nwarps + 3 >> 2))) // 8 * 8

    # -- module memory
    def _load_module(self, params: bytes) -> None:
        self.param_size = max(self.program.flat.param_bytes, len(params))
        self._param_store = np.zeros(self.param_size + 256, np.uint8)
        start = -self._param_store.ctypes.data % 128
        self.param_bytes = self._param_store[start : start + max(self.param_size, 1)]
        self.param_bytes[: len(params)] = np.frombuffer(params, np.uint8)
        self.param_address = self.param_bytes.ctypes.data
        if len(params) < self.program.flat.param_bytes:
            raise EmulationError(
                f"{len(params)} parameter bytes; {self.program.flat.name} declares {self.program.flat.param_bytes}"
            )
        self.memory.add(
            self.param_address, max(self.param_size, 1), writable=False, name="kernel parameters", keep=self._param_store
        )
        stores = []
        for var in self.program.module.variables:
            if var.space not in ("global", "const"):
                continue
            size = max(var.size, 1)
            raw = np.zeros(size + 512, np.uint8)
            at = -raw.ctypes.data % max(var.align, 256)
            view = raw[at : at + size]
            self._symbols[var] = view.ctypes.data
            stores.append((var, view))
            self.memory.add(view.ctypes.data, size, writable=var.space == "global", name=f"variable {var.name}", keep=raw)
            if var.space == "const":
                self.const_ranges.append((view.ctypes.data, size))
        by_name = {v.name: a for v, a in self._symbols.items()}
        for var, view in stores:
            _initialise(var, view, by_name)

    def symbol_address(self, var) -> int:
        if var not in self._symbols:
            raise EmulationError(f"the address of {var.name} ({var.space}) is not known")
        return self._symbols[var]

    # -- pools
    def take_registers(self) -> RegisterFile:
        if self._regs:
            regs = self._regs.pop()
            regs.poison()
            return regs
        return RegisterFile(self.program.flat.reg_counts)

    def take_smem(self) -> np.ndarray:
        smem = self._smems.pop() if self._smems else np.empty(SMEM_BYTES, np.uint8)
        smem.view(np.uint32).fill(POISON32)
        return smem

    # -- findings
    def where(self, ins) -> str:
        source = self.program.source_of(ins)
        return f" ({source})" if source else ""

    def report(self, kind, w, ins, message, *, other_line: int = 0, default: bool = True) -> None:
        """Record a hazard once per (kind, line, other line). `default=False`: only at the strict level."""
        if not self.checking or (not default and not self.strict):
            return
        key = (kind, ins.line, other_line)
        if key in self._seen_hazards or len(self.hazards) >= MAX_HAZARDS:
            return
        self._seen_hazards.add(key)
        self.hazards.append(
            Hazard(
                kind,
                message,
                ins.line,
                self.program.source_of(ins),
                other_line,
                self._source_of_line(other_line),
                w.cta.ctaid,
                w.index,
            )
        )

    def _source_of_line(self, line: int) -> str:
        if not line:
            return ""
        table = getattr(self.program, "line_sources", None)
        if table is None:
            table = self.program.line_sources = {i.line: self.program.source_of(i) for i in self.program.flat.instrs}
        return table.get(line, "")

    def conflict(self, hit, w, ins, space: str, cta, granule: int) -> None:
        """Report a shadow's finding (kind, index of `granule`, PTX line of the other access)."""
        kind, _, other = hit
        place = {
            "shared": lambda: f"shared memory byte {granule * 4} of CTA rank {cta.rank}",
            "tmem": lambda: f"tensor memory lanes {granule // 512 * 16}..{granule // 512 * 16 + 15}, column {granule % 512}",
            "global": lambda: "global memory",
        }[space]()
        text = {
            "race-read-after-write": "reads, without being ordered after the write,",
            "race-write-after-write": "writes, without being ordered after an earlier write,",
            "race-write-after-read": "writes, without being ordered after an earlier read,",
            "proxy": "reads through the async proxy, with no fence.proxy.async after the generic write,",
            "proxy-write": "writes through the async proxy, with no fence.proxy.async after the generic access,",
            "tcgen05-fence": "accesses, without tcgen05.fence on both sides,",
            "tcgen05-order": "accesses, with no commit and wait after an operation that the ISA does not pipeline with it,",
            "tmem-dealloc-race": "frees, without being ordered after an access,",
        }[kind]
        name = f"{kind}-{space}" if kind.startswith("race") else ("proxy-fence" if kind.startswith("proxy") else kind)
        self.report(name, w, ins, f"{text} {place}", other_line=other)

    def fatal(self, kind, w, ins, message):
        self.report(kind, w, ins, message)
        source = self.where(ins)
        raise EmulationError(f"{kind}: {message} at PTX line {ins.line}{source}, CTA {w.cta.ctaid}, warp {w.index}")

    def peer(self, w, rank: int, ins):
        ctas = w.cta.cluster.ctas
        if rank >= len(ctas):
            self.fatal("cluster-rank", w, ins, f"CTA rank {rank} of a cluster of {len(ctas)}")
        cta = ctas[rank]
        if self.checking and all(x.exited for x in cta.warps):
            self.report("dsmem-after-exit", w, ins, f"touches shared memory of CTA rank {rank}, which has exited")
        return cta

    # -- clocks of asynchronous agents
    def tick_agent(self, cluster, actor: int) -> int:
        cluster.ticks[actor] += 1
        return int(cluster.ticks[actor])

    def agent_tick(self, cluster, actor: int) -> int:
        return int(cluster.ticks[actor])

    def tick_of(self, cluster, key) -> tuple[int, int]:
        actor = cluster.actor_of(key)
        return actor, int(cluster.ticks[actor])

    # -- tcgen05.ld completed by use (see ops_tensor)
    def note_load(self, w: Warp, ins, tick: int) -> None:
        readers = self.program.load_readers(ins)
        w.tld.append((ins, tick, [(k, w.counts[k]) for k, _ in readers], readers))
        if len(w.tld) > 64:
            del w.tld[0]

    def release_tmem(self, w: Warp, ins) -> None:
        """Before a release: loads one of whose registers has been read count as complete (not at the strict level)."""
        if not w.tld or w.clock is None or self.strict:
            return
        items = self.program.item_of
        here = items[ins.index]
        keep = []
        for entry in w.tld:
            load, tick, snapshot, readers = entry
            home = items[load.index]
            used = False
            for (k, before), (_, reader) in zip(snapshot, readers):
                if k == home == here:
                    used = load.index < reader < ins.index or (reader < ins.index and w.counts[k] > before)
                elif k == home:
                    used = reader > load.index or w.counts[k] > before
                elif k == here:
                    used = w.counts[k] > before and (reader < ins.index or w.counts[k] > before + 1)
                else:
                    used = w.counts[k] > before
                if used:
                    break
            if used:
                w.clock[0, w.lpipe] = max(w.clock[0, w.lpipe], tick)
            else:
                keep.append(entry)
        w.tld = keep

    # -- mbarrier.try_wait and test_wait, which may return false
    def holds_on(self, again: bool) -> bool:
        """Whether a try_wait whose phase is not complete blocks rather than returns false."""
        return self.rng.random() < 0.5 if self.schedule == "random" else again

    def not_seen_yet(self, w: Warp, s: Split, ins, bar) -> bool:
        """Whether a wait for a phase that is complete returns false all the same.

        It may as long as nothing the warp has synchronised with orders it after the completion: the warp could have come here
        earlier. Lazy schedules take that choice at the first attempt, random ones sometimes.
        """
        if self.schedule == "eager" or bar.done is None:
            return False
        key = (ins.index, bar, bar.phase - 1)
        if s.failed == key or (self.schedule == "random" and self.rng.random() < 0.75):
            return False
        if not (bar.done[0] > w.clock[0]).any():
            return False
        s.failed = key
        return True

    # -- asynchronous work
    def submit(self, o) -> None:
        if self.schedule == "eager" and not self.pending:
            o.run()
            return
        self.pending.append(o)

    def complete(self, o) -> None:
        """Run a pending operation, after those before it in its pipe."""
        if o.done:
            return
        if o.pipe is not None:
            for p in [p for p in self.pending if p.pipe == o.pipe]:
                if p is o:
                    break
                self.pending.remove(p)
                p.run()
        self.pending.remove(o)
        o.run()

    def read_only(self, o) -> None:
        """A store that a wait_group.read waits for: lazy schedules, and random ones at times, leave its write for later."""
        if self.schedule == "eager" or (self.schedule == "random" and self.rng.random() < 0.5):
            self.complete(o)
            return
        o.read_source()
        self.unwritten.append(o)
        if len(self.unwritten) > 64:  # each holds a copy of the shared memory
            self.complete(self.unwritten.popleft())

    def cached_plan(self, planner, *args, **kwargs):
        """A datapath plan; illegal operands become errors that name the PTX line (raised by the caller's wrapper)."""
        return planner(*args, **kwargs)

    def cancel_cluster(self):
        """A cluster that has not started, taken by clusterlaunchcontrol; None when all have."""
        return self.waiting.pop() if self.waiting else None

    # -- running
    def start_cluster(self) -> bool:
        if not self.waiting:
            return False
        cluster = Cluster(self, self.next_uid, self.waiting.pop())
        self.next_uid += 1
        self.started_ctas += len(cluster.ctas)
        self.clusters.append(cluster)
        return True

    def run(self) -> None:
        random = self.schedule == "random"
        initial = 1 if not random else int(self.rng.integers(1, 4))
        for _ in range(initial):
            self.start_cluster()
        idle = 0
        timeouts = 0
        seen, keep = b"", 0  # the state after `keep` idle rounds
        while self.clusters or self.waiting:
            if not self.clusters:
                self.start_cluster()
            self.rounds += 1
            before = self.events
            ran = self._round_random() if random else self._round()
            self._retire()
            if self.events != before:
                idle = timeouts = keep = 0
                continue
            if ran:
                idle += 1
                if idle % 8 == 0 and self._force():
                    continue
                if idle % 16 == 0 and self.start_cluster():  # a spinning warp may wait for a CTA that is not resident
                    continue
                if idle > IDLE_ROUNDS:
                    self._deadlock(f"no progress: warps have been spinning for {IDLE_ROUNDS} rounds without any observable effect")
                if not (random or timeouts or self.pending or self.waiting):
                    state = self._state()
                    if keep and state == seen:
                        self._deadlock("no progress: warps spin, and what they do repeats without any effect")
                    if idle > 2 * keep:
                        seen, keep = state, idle
                continue
            if self._force() or self.start_cluster():
                continue
            if timeouts < 3 and self._time_out():
                timeouts += 1
                continue
            self._deadlock("deadlock: no warp can run and nothing asynchronous is pending")

    def _round(self) -> bool:
        ran = False
        for cluster in self.clusters:
            for w in cluster.warps:
                if not w.exited:
                    for s in list(w.leaves):
                        if s.wait is not None:
                            if not s.wait.ready():
                                continue
                            s.wait = None
                        if s in w.leaves:
                            ran = True
                            self.step(w, s, QUANTUM)
        return ran

    def _round_random(self) -> bool:
        """One random choice: complete some pending operation, or run one random split for a random stretch."""
        ready = []
        for cluster in self.clusters:
            for w in cluster.warps:
                if not w.exited:
                    for s in w.leaves:
                        if s.wait is None or s.wait.ready():
                            ready.append((w, s))
        if self.waiting and self.rng.random() < 0.002:
            self.start_cluster()
        if self.pending and (not ready or self.rng.random() < 0.25):
            self.complete(self.pending[int(self.rng.integers(len(self.pending)))])
            return True
        if not ready:
            return False
        w, s = ready[int(self.rng.integers(len(ready)))]
        s.wait = None
        self.step(w, s, int(self.rng.integers(1, 60)))
        return True

    def _force(self) -> bool:
        """Lazy schedule: complete what a blocked warp waits for; failing that, the oldest operation."""
        if not self.pending:
            return False
        if self.schedule == "random":
            self.complete(self.pending[int(self.rng.integers(len(self.pending)))])
            return True
        signalled = {id(bar) for o in self.pending for bar in o.bars}
        for cluster in self.clusters:
            for w in cluster.warps:
                for s in w.leaves:
                    if s.wait is not None and s.wait.wants is not None:
                        if s.wait.bar is not None and id(s.wait.bar) not in signalled:
                            continue
                        for o in self.pending:
                            if s.wait.wants(o):
                                self.complete(o)
                                return True
        self.complete(self.pending[0])
        return True

    def _state(self) -> bytes:
        """A digest of all that decides what runs next while memory does not change."""
        digest = hashlib.blake2b(str(self.ticks).encode())
        for cluster in self.clusters:
            for w in (w for w in cluster.warps if not w.exited):
                for s in w.leaves:
                    failed = s.failed and (s.failed[0], s.failed[1].offset, s.failed[2])
                    digest.update(str((w.index, w.rank, s.pc, s.bits, s.wait is None, failed)).encode())
                for part in (w.regs.w, w.regs.d, w.regs.h, w.regs.p, w.regs.q) + (() if w.local is None else (w.local,)):
                    digest.update(part)
            for cta in cluster.ctas:
                digest.update(str([(bar.phase, bar.pending, bar.tx) for bar in cta.mbarriers.values()]).encode())
        return digest.digest()

    def _time_out(self) -> bool:
        """Let try_wait give up: a program may poll once and go on."""
        any_ = False
        for cluster in self.clusters:
            for w in cluster.warps:
                for s in w.leaves:
                    if s.wait is not None and s.wait.timeout:
                        s.wait = None
                        s.state = "timeout"
                        any_ = True
        return any_

    def _deadlock(self, head: str) -> None:
        lines = [head]
        program = self.program
        waits = []
        for cluster in self.clusters:
            for w in cluster.warps:
                for s in w.leaves:
                    if w.exited:
                        continue
                    item = program.items[s.pc]
                    ins = item.ins
                    why = s.wait.text() if s.wait is not None else "spinning: it runs, and changes nothing"
                    if s.state == "timeout":
                        why = "try_wait that timed out"
                    waits.append((_distance(s, ins), ins.line, w, ins, why))
                    lanes = "" if s.full else f", lanes {s.bits:#010x}"
                    lines.append(f"  CTA {w.cta.ctaid} warp {w.index}{lanes}: PTX line {ins.line}{self.where(ins)} {ins.op}: {why}")
        for _, _, w, ins, why in sorted(waits, key=lambda x: x[:2]):
            self.report("deadlock", w, ins, why)  # one for every line: those who wait for the others come last
        if len(lines) > 60:
            lines[60:] = [f"  ... and {len(lines) - 60} more"]
        raise Deadlock("\n".join(lines))

    def _retire(self) -> None:
        for cluster in [c for c in self.clusters if c.alive == 0]:
            self.clusters.remove(cluster)
            for o in [p for p in self.pending if p.warp.cta.cluster is cluster]:
                if not o.done:
                    self.complete(o)
            self._end_of_cluster(cluster)
            for cta in cluster.ctas:
                self._smems.append(cta.smem)

    def _end_of_cluster(self, cluster: Cluster) -> None:
        for cta in cluster.ctas:
            if not self.checking:
                break
            w = cta.warps[0]
            last = self.program.flat.instrs[-1]
            for bar in cta.mbarriers.values():
                if bar.tx != 0:
                    # Bytes expected and never sent are strict only: the tail of NVIDIA's TMA pipelines expects once more.
                    self.report("mbarrier-tx-at-exit", w, _At(bar.line, last), f"at exit, {bar.describe()}", default=bar.tx < 0)
                elif bar.pending != bar.expected:
                    self.report("mbarrier-arrivals-at-exit", w, _At(bar.line, last), f"at exit, {bar.describe()}", default=False)
            for k in range(0, len(cta.warps), 4):
                group = [[n for n, _ in w.asked] for w in cta.warps[k : k + 4]]
                if any(asked != group[0] for asked in group):
                    line = min(line for w in cta.warps[k : k + 4] for _, line in w.asked)
                    text = f"the warps {k}..{k + len(group) - 1} of one warpgroup ask for {group} registers: all must, for the same"
                    self.report("setmaxnreg", cta.warps[k], _At(line, last), text, default=False)
            state = cta.tmem_state
            if state is not None:
                for first, (count, line) in state.blocks.items():
                    self.report("tmem-leak", w, _At(line, last), f"{count} columns at {first} were never freed")

    def step(self, w: Warp, s: Split, quantum: int) -> None:
        """Run a split until it blocks, ends, splits or has used its quantum."""
        items = self.program.items
        counts = w.counts
        live = w.live
        compile_ = self.program.compile
        while quantum > 0:
            quantum -= 1
            if s.pc == s.rpc:
                s = self._join(w, s)
                if s is None:
                    return
                continue
            item = items[s.pc]
            kind = item.kind
            if kind == CODE:
                counts[item.index] += 1
                if s.full:
                    (item.run_full or compile_(item, False))(w, live)
                else:
                    (item.run_masked or compile_(item, True))(w, s.mask)
                s.pc += 1
            elif kind == BRANCH:
                counts[item.index] += 1
                if item.pred is None:
                    s.pc = item.target
                    continue
                if item.suspects:
                    w.check_written(item.suspects, s.mask, item.ins)
                p = w.P[item.pred]
                bits = mask_bits(p)
                if item.neg:
                    bits = ~bits
                taken = bits & s.bits
                if taken == s.bits:
                    s.pc = item.target
                elif not taken:
                    s.pc += 1
                else:
                    self._diverge(w, s, [(item.target, taken), (s.pc + 1, s.bits & ~taken)], item.rpc)
                    return
            elif kind == BLOCKING:
                m = live if s.full else s.mask
                if item.pred is not None:
                    p = w.P[item.pred]
                    m = m & ~p if item.neg else m & p
                    if not m.any():
                        s.pc += 1
                        continue
                if item.suspects:
                    w.check_written(item.suspects, m, item.ins)
                wait = item.fn(w, s, m, item.ins)
                if wait is not None:
                    s.wait = wait
                    return
                if item.marks:
                    w.mark_written(item.marks, m)
                counts[item.index] += 1
                s.pc += 1
            elif kind == INDIRECT:
                counts[item.index] += 1
                self._brx(w, s, item)
                return
            else:
                counts[item.index] += 1
                if not self._exit(w, s, item):
                    return

    def _diverge(self, w: Warp, s: Split, ways, rpc: int) -> None:
        w.leaves.remove(s)
        s.pc = rpc
        s.children = 0
        for pc, bits in ways:
            if pc == rpc or not bits:
                continue
            child = Split(pc, bits_mask(bits), bits, bits == w.live_bits, s, rpc)
            s.children += 1
            w.leaves.append(child)
        if s.children == 0:
            w.leaves.append(s)

    def _join(self, w: Warp, s: Split) -> Split | None:
        """A split reached its reconvergence point: its lanes go back to the parent, which resumes with its last child."""
        w.leaves.remove(s)
        return self._child_done(w, s.parent)

    def _child_done(self, w: Warp, parent: Split | None) -> Split | None:
        while parent is not None:
            parent.children -= 1
            if parent.children > 0:
                return None
            parent.bits &= w.live_bits
            if parent.bits and parent.pc >= 0:
                parent.mask = bits_mask(parent.bits)
                parent.full = parent.bits == w.live_bits
                w.leaves.append(parent)
                return parent
            parent = parent.parent
        return None

    def _brx(self, w: Warp, s: Split, item) -> None:
        ins = item.ins
        live = s.mask
        if item.pred is not None:
            p = w.P[item.pred]
            live = live & (~p if item.neg else p)
        index = w.U[ins.operands[0].index]
        ways: dict[int, int] = {}
        for lane in np.flatnonzero(s.mask).tolist():
            if live[lane]:
                k = int(index[lane])
                if k >= len(item.targets):
                    raise EmulationError(f"PTX line {ins.line}: brx.idx index {k} of {len(item.targets)} targets")
                pc = item.targets[k]
            else:
                pc = s.pc + 1
            ways[pc] = ways.get(pc, 0) | 1 << lane
        if len(ways) == 1:
            s.pc = next(iter(ways))
            return
        self._diverge(w, s, list(ways.items()), item.rpc)

    def _exit(self, w: Warp, s: Split, item) -> bool:
        """Lanes leave the kernel. Returns whether the split goes on (a predicated exit)."""
        ins = item.ins
        if item.fn in ("trap", "brkpt"):
            raise EmulationError(f"{item.fn} executed at PTX line {ins.line}{self.where(ins)}, CTA {w.cta.ctaid}, warp {w.index}")
        bits = s.bits
        if item.pred is not None:
            p = mask_bits(w.P[item.pred])
            bits &= ~p if item.neg else p
        w.live_bits &= ~bits
        w.live = bits_mask(w.live_bits)
        w.nlive = w.live_bits.bit_count()
        self.events += 1
        s.bits &= ~bits
        s.mask = bits_mask(s.bits)
        for o in w.leaves:
            o.full = o.bits == w.live_bits
        if s.bits:
            s.pc += 1
            # `live` is cached by step(): leave it, so that the next round sees the new one
            return False
        w.leaves.remove(s)
        if s.parent is not None:
            self._child_done(w, s.parent)
        if not w.live_bits:
            self._warp_end(w)
        return False

    def _warp_end(self, w: Warp) -> None:
        w.exited = True
        for o in [o for o, _ in w.bulk_open] + w.bulk_unread:
            self.report("bulk-store-at-exit", w, o.ins, "the thread exits without waiting until the copy has read shared memory")
        w.cta.cluster.alive -= 1
        total = self.warp_counts.get(w.index)
        if total is None:
            self.warp_counts[w.index] = list(w.counts)
        else:
            self.warp_counts[w.index] = [a + b for a, b in zip(total, w.counts)]
        self.warp_waits[w.index] += w.waits
        if w.maxreg and w.cta.reg_pool is not None:
            w.cta.reg_pool += w.maxreg * 32
            w.maxreg = 0
        self._regs.append(w.regs)
        if self.checking and all(x.exited for x in w.cta.warps):
            self._end_of_cta(w, w.cta)

    def _end_of_cta(self, w: Warp, cta) -> None:
        """Every access to a CTA's shared memory is to be ordered before its exit: copies and products under way, other CTAs."""
        cluster = cta.cluster
        if len(cluster.ctas) == 1 and cluster.next_actor == 4 * cluster.nwarps and cta.tmem_state is None:
            return  # nothing but its own warps
        exits = np.maximum.reduce([x.clock[0] for x in cta.warps])
        sh, n = cta.shadow, cta.smem_limit + 3 >> 2
        ours = range(cta.warp_base, cta.warp_base + len(cta.warps))
        last = self.program.flat.instrs[-1]
        bulk_stores = range(3 * cluster.nwarps, 4 * cluster.nwarps)  # bulk-store-at-exit tells of their reads
        for actors, ticks, lines, what in ((sh.wa, sh.wc, sh.wl, "write"), (sh.ra, sh.rc, sh.rl, "read")):
            a = actors[:n]
            late = np.flatnonzero(ticks[:n] > exits[a])
            for g in late[np.unique(lines[late], return_index=True)[1]].tolist():
                actor = int(actors[g])
                if actor in ours or actor in bulk_stores:
                    continue
                kind = "dsmem-after-exit" if actor < cluster.nwarps else "shared-at-exit"
                text = f"a {what} of shared byte {4 * g} of CTA rank {cta.rank} is not ordered before that CTA's exit"
                self.report(kind, w, _At(int(lines[g]), last), text)
        for bar in cta.mbarriers.values():
            for actor, (tick, line) in bar.remote.items():
                if tick > exits[actor]:
                    text = f"an arrival at the {bar.name()} is not ordered before that CTA's exit"
                    self.report("dsmem-after-exit", w, _At(line, last), text)


def _distance(s: Split, ins) -> int:
    """How far from the cause of a deadlock a blocked warp is likely to be, by what it waits for.

    0: registers or columns, which no warp that waits here gives back. Then mbarriers: 1, all arrivals are there and bytes are
    missing; 2, some arrivals are missing; 3, all of them, which the next in line may owe. 4: memory. 5: other warps of the CTA.
    """
    if ins.base == "setmaxnreg" or ins.op.startswith("tcgen05.alloc"):
        return 0
    bar = s.wait.bar if s.wait is not None else s.failed[1] if s.failed else None
    if bar is not None:
        return 1 if bar.pending == 0 else 2 if bar.pending < bar.expected else 3
    return 4 if s.wait is None else 5


class _At:
    """Stands in for an instruction in findings that belong to an earlier line."""

    def __init__(self, line: int, like) -> None:
        self.line, self.loc, self.op = line, (0, 0), like.op


def _initialise(var, view: np.ndarray, addresses: dict) -> None:
    from ..ptx.ir import TYPE_BITS, Imm

    if var.init is None:
        return
    n = TYPE_BITS[var.type] // 8
    for k, x in enumerate(var.init):
        if isinstance(x, tuple):
            kind, name, extra = x
            if name not in addresses:
                raise EmulationError(f"initialiser of {var.name} names {name}, which has no address")
            value = addresses[name] >> (8 * extra) & 255 if kind == "byte" else addresses[name] + extra
        elif isinstance(x, Imm):
            if var.type == "f32":
                value = int(np.float32(x.value).view(np.uint32)) if x.kind != "f32" else x.bits
            else:
                value = int(np.float64(x.value).view(np.uint64))
        else:
            value = int(x)
        view[k * n : (k + 1) * n] = np.frombuffer((value & (2 ** (8 * n) - 1)).to_bytes(n, "little"), np.uint8)
