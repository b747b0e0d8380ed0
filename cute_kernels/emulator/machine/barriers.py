"""mbarrier objects, named CTA barriers and the cluster barrier."""

from __future__ import annotations

import numpy as np

TX_LIMIT = (1 << 20) - 1


class MBarrier:
    """State of one mbarrier: `phase` counts completed phases, so its parity is that of the current one."""

    __slots__ = (
        "cta", "offset", "expected", "pending", "tx", "phase", "clock", "done", "line", "seen", "fenced", "generation", "passed",
        "remote",
    )  # fmt: skip

    def __init__(self, cta, offset: int, expected: int, line: int) -> None:
        self.cta, self.offset = cta, offset
        self.expected = self.pending = expected
        self.tx = 0
        self.phase = 0
        self.line = line
        self.clock = None  # released so far in the current phase
        self.done = None  # released by all completed phases
        self.passed: dict = {}  # actor -> (tick, instruction) of its wait for the phase that ended last
        self.remote: dict = {}  # actor of another CTA -> (tick, PTX line) of its last arrival
        self.seen = (0, 0)  # (actor, tick) of the init
        self.fenced = False  # its initialiser executed fence.mbarrier_init
        self.generation = -1  # the cluster barrier's generation that published the fenced init; -1: none

    def name(self) -> str:
        rank = f" of CTA rank {self.cta.rank}" if len(self.cta.cluster.ctas) > 1 else ""
        return f"mbarrier at shared byte {self.offset}{rank}"

    def describe(self) -> str:
        return (
            f"{self.name()} (init at PTX line {self.line}): phase {self.phase} (parity {self.phase & 1}), "
            f"{self.pending} of {self.expected} arrivals pending, {self.tx} bytes of tx-count pending"
        )

    def join(self, clock) -> None:
        if clock is not None:
            if self.clock is None:
                self.clock = clock.copy()
            else:
                np.maximum(self.clock, clock, out=self.clock)

    def settle(self, w=None, ins=None) -> bool:
        """Complete the phase if nothing is pending. `ins` of warp w, which completes it, is what a finding names."""
        if self.pending != 0 or self.tx != 0:
            return False
        if self.passed:
            self._check_waits(w, ins)
        self.phase += 1
        self.pending = self.expected
        if self.clock is not None:
            if self.done is None:
                self.done = self.clock
            else:
                np.maximum(self.done, self.clock, out=self.done)
            self.clock = None
        self.cta.machine.events += 1
        return True


    def _check_waits(self, w, ins) -> None:
        """Waits for the phase before this one must be ordered before this one ends: a waiter that comes later finds its parity
        on the barrier again and takes the finished phase for one that is still to come."""
        known, done = self.clock, self.done
        for actor, (tick, wait) in self.passed.items():
            if (known is None or tick > known[0][actor]) and (done is None or tick > done[0][actor]):
                w.machine.report(
                    "mbarrier-phase-overrun", w, ins,
                    f"completes phase {self.phase} of {self.name()}, though warp {w.cta.cluster.warps[actor].index} may still wait "
                    f"for phase {self.phase - 1}", other_line=wait.line,
                )  # fmt: skip
        self.passed.clear()


def join_known(into: dict, known: dict | None) -> None:
    """Clocks of other clusters, cluster -> clock row."""
    for cluster, row in (known or {}).items():
        old = into.get(cluster)
        into[cluster] = row if old is None else np.maximum(old, row)


class NamedBarrier:
    """bar/barrier resource 0-15: threads arrived in the current generation."""

    __slots__ = ("arrived", "generation", "clock", "done", "known", "done_known", "expected", "votes", "result", "waiting")

    def __init__(self) -> None:
        self.arrived = 0
        self.generation = 0
        self.clock = None
        self.done = None
        self.known: dict = {}  # of other clusters (see ops_mem.acquire_var): clocks that arriving warps have acquired
        self.done_known: dict = {}
        self.expected = 0
        self.votes = [0, True, False]  # popc, and, or
        self.result = (0, True, False)
        self.waiting: list[str] = []

    def arrive(self, warp, threads: int, expected: int, pred: np.ndarray | None, sync: bool) -> None:
        if pred is not None:
            n = int(pred.sum())
            self.votes[0] += n
            self.votes[1] &= n == len(pred)
            self.votes[2] |= n > 0
        if warp.clock is not None:
            if self.clock is None:
                self.clock = warp.clock.copy()
            else:
                np.maximum(self.clock, warp.clock, out=self.clock)
            join_known(self.known, warp.cache.get("known"))
            warp.tick()
        self.arrived += threads
        self.expected = expected

    def settle(self) -> bool:
        if self.arrived < self.expected:
            return False
        self.arrived -= self.expected
        self.generation += 1
        self.done, self.clock = self.clock, None
        self.done_known, self.known = self.known, {}
        self.result = tuple(self.votes)
        self.votes = [0, True, False]
        return True


class ClusterBarrier:
    """barrier.cluster: arrivals of all threads of the cluster that have not exited."""

    __slots__ = ("arrived", "generation", "clock", "done")

    def __init__(self) -> None:
        self.arrived = 0
        self.generation = 0
        self.clock = None
        self.done = None
