"""Warps, CTAs and clusters of a running launch."""

from __future__ import annotations

from collections import deque

import numpy as np

from ..ptx.flatten import registers
from ..ptx.ir import Var
from ..ptx.wgmma_registers import operand_registers
from .clocks import Shadow
from .hazards import EmulationError

SMEM_BYTES = 228 * 1024
POISON32 = 0x7FF7_DEAD  # a quiet NaN as float32; two NaNs as f16x2 and as bf16x2
POISON64 = 0x7FFF_DEAD_7FF7_DEAD
_FULL_MASK = 0xFFFFFFFF
_LANES = np.arange(32, dtype=np.uint32)
_LANE_BITS = (np.uint64(1) << np.arange(32, dtype=np.uint64)).astype(np.uint32)


def mask_bits(mask: np.ndarray) -> int:
    """bool[32] -> 32-bit integer."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def bits_mask(bits: int) -> np.ndarray:
    """32-bit integer -> bool[32]."""
    return (np.uint32(bits & _FULL_MASK) & _LANE_BITS) != 0


class RegisterFile:
    """The registers of one warp and the typed views of their rows that compiled code indexes."""

    __slots__ = ("w", "d", "h", "p", "q", "U", "S", "F", "G", "X", "Y", "D", "E", "LO", "HI", "H", "I", "R", "P", "Q", "valid")

    def __init__(self, counts: dict[str, int]) -> None:
        self.w = np.empty((counts["w"], 32), np.uint32)
        self.d = np.empty((counts["d"], 32), np.uint64)
        self.h = np.empty((counts["h"], 32), np.uint16)
        self.p = np.empty((counts["p"], 32), np.bool_)
        self.q = np.empty((counts["q"], 32, 2), np.uint64)
        self.U, self.S, self.F, self.G = (list(self.w.view(t)) for t in (np.uint32, np.int32, np.float32, np.float16))
        self.X, self.Y, self.D, self.E = (list(self.d.view(t)) for t in (np.uint64, np.int64, np.float64, np.float32))
        halves = self.d.view(np.uint32)
        self.LO, self.HI = list(halves[:, 0::2]), list(halves[:, 1::2])
        self.H, self.I, self.R = (list(self.h.view(t)) for t in (np.uint16, np.int16, np.float16))
        self.P, self.Q = list(self.p), list(self.q)
        self.valid: dict = {}
        self.poison()

    def poison(self) -> None:
        self.w.fill(POISON32)
        self.d.fill(POISON64)
        self.h.fill(0x7FF7)
        self.p.fill(False)
        self.q.fill(POISON64)
        self.valid.clear()


class Split:
    """A set of lanes of one warp that run together: one schedulable context.

    A divergent branch turns a split into a parent that waits at the reconvergence point and up to two children.
    """

    __slots__ = ("pc", "mask", "bits", "full", "parent", "rpc", "children", "wait", "state", "failed")

    def __init__(self, pc: int, mask: np.ndarray, bits: int, full: bool, parent: Split | None, rpc: int) -> None:
        self.pc, self.mask, self.bits, self.full = pc, mask, bits, full
        self.parent, self.rpc, self.children = parent, rpc, 0
        self.wait = None
        self.state = None  # scratch of a blocking instruction between retries
        self.failed = None  # (instruction, mbarrier, phase) of the last mbarrier wait that returned false


class Warp:
    """One warp: registers, clock, splits and per-item execution counts."""

    __slots__ = (
        "U", "S", "F", "G", "X", "Y", "D", "E", "LO", "HI", "H", "I", "R", "P", "Q", "cc", "regs", "cta", "machine", "index",
        "rank",
        "live", "nlive", "live_bits", "leaves", "counts", "masked_counts", "cache", "clock", "actor", "local", "tpipe", "lpipe",
        "cp_open", "cp_groups", "bulk_open", "bulk_groups", "bulk_unread", "tld", "tst", "maxreg", "role", "syncs", "lanes",
        "exited", "waits",
        "wg_open", "wg_groups", "cluster_arrivals", "cluster_waits", "cluster_lanes", "cluster_waited", "inits", "fenced",
        "fence_clock", "unfenced", "in_pipe", "asked", "local_written", "issued",
    )  # fmt: skip

    def __init__(self, machine, cta: CTA, index: int, nlanes: int) -> None:
        self.machine, self.cta, self.index, self.rank = machine, cta, index, cta.rank
        regs = machine.take_registers()
        self.regs = regs
        for name in ("U", "S", "F", "G", "X", "Y", "D", "E", "LO", "HI", "H", "I", "R", "P", "Q"):
            setattr(self, name, getattr(regs, name))
        self.cc = np.zeros(32, np.bool_)
        self.live = np.arange(32) < nlanes
        self.lanes = self.live.copy()
        self.nlive = nlanes
        self.live_bits = mask_bits(self.live)
        self.leaves = [Split(0, self.live, self.live_bits, True, None, -1)]
        self.counts = [0] * machine.program.nitems
        self.cache: dict = {}
        self.clock = None
        self.actor = cta.warp_base + index
        self.local = self.local_written = None
        self.cp_open: list = []
        self.cp_groups: deque = deque()
        self.bulk_open: list = []
        self.bulk_groups: deque = deque()
        self.bulk_unread: list = []  # committed stores whose reads of shared memory nothing has waited for
        self.wg_open: list = []
        self.wg_groups: deque = deque()
        self.tld: list = []
        self.tst: list = []
        self.maxreg = 0
        self.asked: list[tuple[int, int]] = []  # (registers, PTX line) of every setmaxnreg
        self.role = None
        self.syncs = 0
        self.waits = 0
        self.exited = False
        self.fence_clock = None  # what the last fence.acq_rel or fence.sc lets relaxed operations after it release
        self.unfenced = None  # what relaxed waits observed and a fence has yet to acquire
        self.inits: list = []  # mbarriers this warp initialised and has not fenced
        self.fenced: list = []  # those fenced and not yet published by a cluster barrier
        self.cluster_arrivals = self.cluster_waits = self.cluster_lanes = self.cluster_waited = 0
        if machine.checking:
            self.clock = np.zeros((5, cta.cluster.nactors), np.int32)
            self.clock[0, self.actor] = 1
        self.issued: dict[int, int] = {}  # lane -> PTX line of its last tcgen05.mma, cp or shift since its last commit
        self.in_pipe: dict = {}  # tick -> (kind, cta_group, shape) of the operations of its tensor pipe (strict only)
        self.tpipe = cta.cluster.nwarps + self.actor  # actor of the tensor pipe this warp issues to
        self.lpipe = 2 * cta.cluster.nwarps + self.actor  # actor of its tcgen05.ld/st

    # -- values compiled code asks for
    def special(self, name: str, view: str) -> np.ndarray:
        key = (name, view)
        row = self.cache.get(key)
        if row is not None:
            return row
        value = self._special(name)
        dynamic = name in ("%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi")
        dtype = np.uint64 if view == "X" else np.uint16 if view == "H" else np.uint32
        row = (
            value.astype(dtype) if isinstance(value, np.ndarray) else np.full(32, value & (2 ** (8 * dtype().itemsize) - 1), dtype)
        )
        if not dynamic:
            self.cache[key] = row
        return row

    def _special(self, name: str):
        m, cta = self.machine, self.cta
        head, _, tail = name.rpartition(".") if name[-2:] in (".x", ".y", ".z", ".w") else (name, "", "")
        k = "xyzw".index(tail) if tail else 0
        if k == 3:
            return 0
        bx, by, _ = m.block
        if head == "%tid":
            t = self.index * 32 + _LANES
            return (t % bx, t // bx % by, t // (bx * by))[k]
        cx, cy, cz = m.cluster_dim
        table = {
            "%ntid": m.block, "%ctaid": cta.ctaid, "%nctaid": m.grid, "%clusterid": cta.cluster.clusterid,
            "%nclusterid": (m.grid[0] // cx, m.grid[1] // cy, m.grid[2] // cz), "%cluster_ctaid": cta.cluster_ctaid,
            "%cluster_nctaid": m.cluster_dim,
        }  # fmt: skip
        if head in table:
            return table[head][k]
        lane = _LANES
        one = _LANE_BITS
        if name.startswith("%lanemask"):
            kind = name[-2:]
            below = one - np.uint32(1)
            return {"eq": one, "lt": below, "le": below | one, "ge": ~below, "gt": ~(below | one)}[kind]
        fixed = {
            "%laneid": lane, "%warpid": self.index, "%nwarpid": len(cta.warps) or 1, "%smid": cta.cluster.uid % 148, "%nsmid": 148,
            "%gridid": 0, "%cluster_ctarank": cta.rank, "%cluster_nctarank": cx * cy * cz,
            "%is_explicit_cluster": int(m.cluster_given),
            "%dynamic_smem_size": m.dynamic_smem, "%total_smem_size": m.static_smem + m.dynamic_smem,
            "%aggr_smem_size": m.static_smem + m.dynamic_smem, "%reserved_smem_offset_begin": 0, "%reserved_smem_offset_end": 1024,
            "%reserved_smem_offset_cap": 1024, "%current_graph_exec": 0,
        }  # fmt: skip
        if name in fixed:
            return fixed[name]
        if name in ("%clock", "%clock64", "%globaltimer", "%globaltimer_lo"):
            m.ticks += 32  # no time, but no standstill either: a loop that waits for a moment comes to its end
            return m.ticks
        if name in ("%clock_hi", "%globaltimer_hi"):
            return m.ticks >> 32
        if name.startswith("%envreg"):
            return 0
        raise EmulationError(f"special register {name} is not modelled")

    def symbol(self, var: Var, offset: int, view: str) -> np.ndarray:
        key = (id(var), offset, view)
        row = self.cache.get(key)
        if row is None:
            if var.space == "shared":
                value = (self.rank << 24) | (var.offset + offset)
            elif var.space == "local":
                value = var.offset + offset
            elif var.owner is not None:
                value = self.machine.param_address + var.offset + offset
            else:
                value = self.machine.symbol_address(var) + offset
            row = np.full(
                32, value & (0xFFFFFFFF if view in ("U", "S") else 2**64 - 1), np.uint32 if view in ("U", "S") else np.uint64
            )
            self.cache[key] = row
        return row

    def is_global(self, address):
        top = address >> np.uint64(56)
        return (top == 0) & ~self.is_const(address) & ~self.is_param(address)

    def is_param(self, address):
        lo = np.uint64(self.machine.param_address)
        return (address >= lo) & (address < lo + np.uint64(self.machine.param_size))

    def is_const(self, address):
        r = np.zeros(32, np.bool_)
        for base, size in self.machine.const_ranges:
            r |= (address >= np.uint64(base)) & (address < np.uint64(base + size))
        return r

    @staticmethod
    def carry(x, y, cin, sub: bool):
        """(result, carry or borrow out) of x +- (y + cin) on unsigned rows."""
        c = np.asarray(cin).astype(x.dtype)
        if sub:
            r = x - y - c
            out = (x < y) | ((x == y) & (c != 0))
            return r, out
        r = x + y + c
        return r, (r < x) | ((c != 0) & (r == x))

    @staticmethod
    def encode_pair(fmt: str, hi, lo, relu: bool):
        from ..datapath import formats

        h = formats.encode(fmt, np.ascontiguousarray(hi), satfinite=True, relu=relu).astype(np.uint16)
        l = formats.encode(fmt, np.ascontiguousarray(lo), satfinite=True, relu=relu).astype(np.uint16)
        return (h << 4 | l) if fmt == "e2m1" else (h << 8 | l)

    @staticmethod
    def decode_pair(fmt: str, raw, relu: bool):
        from ..datapath import formats

        bits, m = (4, 15) if fmt == "e2m1" else (8, 255)
        out = np.empty((32, 2), np.float16)
        out[:, 0] = formats.decode(fmt, (raw & m).astype(np.uint8))
        out[:, 1] = formats.decode(fmt, (raw >> bits & m).astype(np.uint8))
        if relu:
            out = np.maximum(out, np.float16(0))
        return out.view(np.uint32).reshape(-1)

    def local_bytes(self) -> np.ndarray:
        if self.local is None:
            n = max(self.machine.program.flat.local_bytes, 8)
            self.local = np.full((32, (n + 15) // 16 * 16), 0xDE, np.uint8)
            self.local_written = np.zeros(self.local.shape, np.bool_)
        return self.local

    # -- registers that may be read unwritten (see ptx.defined). Flags are bool[32], and [2, 32] by halves for 64-bit ones,
    #    because compilers carry two floats in them and leave one unwritten.
    def _flags(self, key) -> np.ndarray:
        row = self.regs.valid.get(key)
        if row is None:
            row = self.regs.valid[key] = np.zeros((2, 32) if key[0] == "d" else 32, np.bool_)
        return row

    def _all_written(self, keys, wide: bool) -> np.ndarray:
        good = np.ones((2, 32) if wide else 32, np.bool_)
        for key in keys:
            row = self._flags(key)
            good &= row if wide or row.ndim == 1 else row.all(axis=0)
        return good

    def check_written(self, keys, m, ins) -> None:
        for key in keys:
            if (m & ~self._flags(key)).any():
                name = {"w": "32-bit", "d": "64-bit", "h": "16-bit", "p": "predicate", "q": "128-bit"}[key[0]]
                self.machine.report("uninitialised-register", self, ins, f"uses a {name} register nothing wrote")

    def check_in_flight(self, reads, writes, ins) -> None:
        """Registers that no wgmma.wait_group has freed for other instructions (candidates: see ptx.wgmma_registers)."""
        for o in [o for group, _ in self.wg_groups for o in group] + self.wg_open:
            d, a = operand_registers(o.ins)
            wrong = next((r for r in reads if r in d), None)
            verb = "reads" if wrong is not None else "writes"
            wrong = wrong or next((r for r in writes if r in d or r in a), None)
            if wrong is not None:
                text = f"{verb} {wrong.name}, which a wgmma.mma_async in flight uses"
                self.machine.report("wgmma-register", self, ins, text, other_line=o.ins.line)
                return

    def check_loaded(self, regs, ins) -> None:
        """Strict: registers of a tcgen05.ld that no tcgen05.wait::ld has followed (candidates: see ptx.tmem_loads)."""
        for load, *_ in self.tld:
            loaded = registers(load.operands[0])
            wrong = next((r for r in regs if r in loaded), None)
            if wrong is not None:
                text = f"reads {wrong.name} of a tcgen05.ld, no tcgen05.wait::ld between: only the register dependence orders it"
                self.machine.report("tcgen05-wait-ld", self, ins, text, other_line=load.line)
                return

    def mark_written(self, keys, m) -> None:
        for key in keys:
            row = self._flags(key)
            np.logical_or(row, m, out=row)

    def move_written(self, dests, sources, m) -> None:
        for key in dests:
            np.copyto(self._flags(key), self._all_written(sources, key[0] == "d"), where=m)

    def select_written(self, dests, a, b, guard, p: int, m) -> None:
        """selp: only the chosen side counts (and the predicate)."""
        for key in dests:
            wide = key[0] == "d"
            value = np.where(self.P[p], self._all_written(a, wide), self._all_written(b, wide)) & self._all_written(guard, wide)
            np.copyto(self._flags(key), value, where=m)

    def pack_written(self, dest, halves, m) -> None:
        """mov.b64 d, {lo, hi}; a half that is certainly written is None."""
        row = self._flags(dest)
        for k, key in enumerate(halves):
            np.copyto(row[k], True if key is None else self._flags(key), where=m)

    def unpack_written(self, dests, source, m) -> None:
        """mov.b64 {lo, hi}, s"""
        row = self._flags(source)
        for k, key in enumerate(dests):
            if key is not None:
                np.copyto(self._flags(key), row[k], where=m)

    # -- clocks
    def tick(self) -> None:
        self.clock[0, self.actor] += 1

    def role_tensor(self, cycles: float) -> None:
        """Charge tensor-core cycles to this warp."""
        self.machine.warp_tensor[self.index] += cycles

    def fire(self) -> None:
        """Count something other warps could observe (deadlock detection looks for its absence)."""
        self.machine.events += 1


class CTA:
    """Shared memory, tensor memory, barriers and warps of one thread block."""

    def __init__(self, machine, cluster: Cluster, rank: int, ctaid: tuple[int, int, int], cluster_ctaid: tuple[int, int, int]):
        self.machine, self.cluster, self.rank, self.ctaid, self.cluster_ctaid = machine, cluster, rank, ctaid, cluster_ctaid
        self.smem = machine.take_smem()
        self.v = {c: self.smem.view(c) for c in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8")}
        self.smem_limit = 1024 + machine.static_smem + machine.dynamic_smem
        self.mbarriers: dict[int, object] = {}
        self.bars: dict[int, object] = {}
        self.warp_base = rank * machine.nwarps
        self.shadow = Shadow(SMEM_BYTES // 4, cluster.nactors) if machine.checking else None
        self.tmem = None
        self.tmem_valid = None
        self.tshadow = None
        self.tmem_state = None
        self.sync_vars: dict[int, np.ndarray] = {}
        self.reg_pool = None
        self.meets: dict = {}  # warps of a warpgroup that wait for the others at a wgmma
        self.warps: list[Warp] = []
        threads = machine.block[0] * machine.block[1] * machine.block[2]
        for k in range(machine.nwarps):
            self.warps.append(Warp(machine, self, k, min(32, threads - 32 * k)))

    @property
    def tensor_memory(self) -> np.ndarray:
        if self.tmem is None:
            self.tmem = np.full((128, 512), POISON32, np.uint32)
            self.tmem_valid = np.zeros((128, 512), np.bool_)
            if self.machine.checking:
                self.tshadow = Shadow(8 * 512, self.cluster.nactors)
        return self.tmem


class Cluster:
    """CTAs that run together. Actors of its clocks: warps, their tensor pipes, their ld/st pipes, then one per mbarrier."""

    def __init__(self, machine, uid: int, clusterid: tuple[int, int, int]) -> None:
        self.machine, self.uid, self.clusterid = machine, uid, clusterid
        cx, cy, cz = machine.cluster_dim
        self.nwarps = machine.nwarps * cx * cy * cz
        self.nactors = 4 * self.nwarps + 96
        self.next_actor = 4 * self.nwarps
        self.barrier = None
        self.ticks = np.ones(self.nactors, np.int32)
        self.mbar_actor: dict[tuple[int, int], int] = {}
        self.ctas: list[CTA] = []
        for rank in range(cx * cy * cz):
            c = (rank % cx, rank // cx % cy, rank // (cx * cy))
            ctaid = tuple(clusterid[k] * machine.cluster_dim[k] + c[k] for k in range(3))
            self.ctas.append(CTA(machine, self, rank, ctaid, c))
        self.warps = [w for cta in self.ctas for w in cta.warps]
        self.alive = len(self.warps)
        self.threads = sum(w.nlive for w in self.warps)

    def actor_of(self, key) -> int:
        """Actor number of an asynchronous pipe, made on first use; once the table is full, pipes share actors."""
        actor = self.mbar_actor.get(key)
        if actor is None:
            if self.next_actor < self.nactors:
                actor = self.next_actor
                self.next_actor += 1
            else:
                base = 4 * self.nwarps
                actor = base + hash(key) % (self.nactors - base)
            self.mbar_actor[key] = actor
        return actor
