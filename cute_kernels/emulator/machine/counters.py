"""What a launch did, by warp role: instructions by class, tensor cycles, bytes by path, exponentials, barrier waits."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from .optable import classify


@dataclass
class RoleCounters:
    """Totals over the warps of one role. Instructions are warp-instructions; exp2 counts lanes."""

    warps: list[int] = field(default_factory=list)
    instructions: Counter = field(default_factory=Counter)
    exp2: int = 0
    barrier_waits: int = 0
    tensor_cycles: float = 0.0

    def as_dict(self) -> dict:
        return {
            "warps": self.warps, "instructions": dict(self.instructions), "total": sum(self.instructions.values()),
            "exp2": self.exp2, "barrier_waits": self.barrier_waits, "tensor_cycles": self.tensor_cycles,
        }  # fmt: skip


@dataclass
class Counters:
    """Totals of a launch. `bytes` by path: global-load, global-store, shared-*, tma-load, gather4, cp.async, tmem-*, dsmem-*."""

    instructions: Counter = field(default_factory=Counter)
    opcodes: Counter = field(default_factory=Counter)
    bytes: Counter = field(default_factory=Counter)
    lines: Counter = field(default_factory=Counter)  # PTX line -> warp-instructions, for coverage
    exp2: int = 0
    barrier_waits: int = 0
    tensor_cycles: float = 0.0
    tensor_flops: int = 0
    ctas: int = 0
    roles: dict[str, RoleCounters] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Warp-instructions executed."""
        return sum(self.instructions.values())

    def as_dict(self) -> dict:
        return {
            "warp_instructions": self.total, "instructions": dict(self.instructions), "opcodes": dict(self.opcodes),
            "bytes": dict(self.bytes), "exp2": self.exp2, "barrier_waits": self.barrier_waits,
            "tensor_cycles": self.tensor_cycles, "tensor_flops": self.tensor_flops, "ctas": self.ctas,
            "roles": {k: v.as_dict() for k, v in self.roles.items()},
        }  # fmt: skip


def _ranges(numbers: list[int]) -> str:
    out, start = [], None
    for k, n in enumerate(numbers):
        if start is None:
            start = n
        if k + 1 == len(numbers) or numbers[k + 1] != n + 1:
            out.append(f"{start}" if start == n else f"{start}-{n}")
            start = None
    return ",".join(out)


def tally(machine) -> Counters:
    """Counters of a launch, of warps that an error stopped too. A role is the set of warp indices that executed the same items."""
    program = machine.program
    c = Counters(
        bytes=Counter(machine.bytes),
        tensor_cycles=machine.tensor_cycles,
        tensor_flops=machine.tensor_flops,
        ctas=machine.started_ctas,
    )
    warp_counts, warp_waits = dict(machine.warp_counts), Counter(machine.warp_waits)
    for w in (w for cluster in machine.clusters for w in cluster.warps if not w.exited):
        before = warp_counts.get(w.index, [0] * len(w.counts))
        warp_counts[w.index] = [a + b for a, b in zip(before, w.counts)]
        warp_waits[w.index] += w.waits
    per_item = []
    for item in program.items:
        classes: Counter = Counter(classify(i) for i in item.instrs)
        ops = Counter(i.op for i in item.instrs)
        exps = sum(2 if i.mods[-1].endswith("x2") else 1 for i in item.instrs if i.base == "ex2")
        per_item.append((classes, ops, exps * 32))
    signatures: dict[frozenset, list[int]] = defaultdict(list)
    for index, counts in warp_counts.items():
        signatures[frozenset(k for k, n in enumerate(counts) if n)].append(index)
    for indices in signatures.values():
        indices.sort()
        role = RoleCounters(warps=indices)
        for index in indices:
            for k, n in enumerate(warp_counts[index]):
                if n:
                    classes, ops, exps = per_item[k]
                    for ins in program.items[k].instrs:
                        c.lines[ins.line] += n
                    for name, per in classes.items():
                        role.instructions[name] += per * n
                    for name, per in ops.items():
                        c.opcodes[name] += per * n
                    role.exp2 += exps * n
            role.barrier_waits += warp_waits[index]
            role.tensor_cycles += machine.warp_tensor[index]
        c.roles[f"warps {_ranges(indices)}"] = role
        c.instructions += role.instructions
        c.exp2 += role.exp2
        c.barrier_waits += role.barrier_waits
    return c
