"""Vector clocks and the shadow state of shared, tensor and global memory.

An *actor* is a warp or an asynchronous pipe (the copies signalled through one mbarrier, the tensor pipe of an issuing warp,
the tcgen05.ld/st traffic of a warp, the cp.async and bulk groups of a warp). Lanes of one warp are one actor: races between
lanes of one warp are not looked for.

A clock is int32[5, actors]:
    row 0  happens-before: what the owner has observed of every actor
    row 1  the part of it whose generic writes to shared memory are visible to the asynchronous proxy (fence.proxy.async)
    row 2  the same of global memory
    row 3  the part published to other threads' tcgen05 operations (tcgen05.fence::before_thread_sync, commit, wait)
    row 4  the part acquired for the owner's own tcgen05 operations (tcgen05.fence::after_thread_sync)
Releasing joins the owner's clock into the synchronisation object; acquiring joins the object's into the owner's.

Shadow granule: 4 bytes. Coarser granules give false reports, because kernels pack per-warp words of a reduction into
16 bytes; finer ones quadruple the state, and sub-word accesses carry byte masks instead. Reads follow FastTrack: the last
reader inline, and a matrix row only for granules that concurrent actors read.
"""

from __future__ import annotations

import numpy as np

_I32 = np.int32


class Shadow:
    """Last writer and readers per granule of one memory. Methods return None or (kind, index into g, PTX line of
    the other access) of the first conflict."""

    def __init__(self, granules: int, actors: int) -> None:
        self.wa = np.zeros(granules, np.int16)  # last writer's actor
        self.wc = np.zeros(granules, _I32)  # its clock at the write; 0: never written
        self.wl = np.zeros(granules, _I32)  # its PTX line
        self.wp = np.zeros(granules, np.bool_)  # written through the generic proxy
        self.wb = np.zeros(granules, np.uint8)  # bytes the last writer wrote
        self.vb = np.zeros(granules, np.uint8)  # bytes ever written
        self.ra = np.zeros(granules, np.int16)
        self.rc = np.zeros(granules, _I32)
        self.rl = np.zeros(granules, _I32)
        self.rb = np.zeros(granules, np.uint8)
        self.multi = np.zeros(granules, np.bool_)
        self.bars = np.zeros(granules, np.bool_)  # the granule is part of a live mbarrier object
        self.many = np.zeros((granules, actors), _I32)

    @staticmethod
    def _hit(kind: str, bad: np.ndarray, g: np.ndarray, lines: np.ndarray):
        k = int(bad.argmax())
        return kind, k, int(lines[g[k]])

    def unwritten(self, g: np.ndarray, bytes_=15) -> int:
        """Index of the first granule with a byte of `bytes_` never written, or -1."""
        bad = (self.vb[g] & bytes_) != bytes_
        return int(bad.argmax()) if bad.any() else -1

    def read(self, g, actor: int, clock: np.ndarray, line: int, bytes_=15, proxy: bool = False):
        """Record a read. `proxy`: through the asynchronous proxy, so generic writes must be fenced (row 1)."""
        wa, wc = self.wa[g], self.wc[g]
        bad = wc > clock[0][wa]
        if bytes_ is not FULL:
            bad &= (self.wb[g] & bytes_) != 0
        hit = None
        if bad.any():
            hit = self._hit("race-read-after-write", bad, g, self.wl)
        elif proxy:
            unfenced = self.wp[g] & (wc > clock[1][wa])
            if unfenced.any():
                hit = self._hit("proxy", unfenced, g, self.wl)
        ra, rc = self.ra[g], self.rc[g]
        other = rc > clock[0][ra]
        if other.any():
            sel = g[other]
            self.many[sel, ra[other]] = rc[other]
            self.multi[sel] = True
        own = int(clock[0][actor])
        if bytes_ is FULL:
            self.rb[g] = 15
        else:
            keep = (ra == actor) & (rc == own)
            self.rb[g] = np.where(keep, self.rb[g], 0)
            np.bitwise_or.at(self.rb, g, bytes_)
        self.ra[g] = actor
        self.rc[g] = own
        self.rl[g] = line
        return hit

    def crosses_proxy(self, g, clock: np.ndarray, warps: int, reads: bool):
        """For an asynchronous write: the hit of a generic access that is ordered before it, but with no fence.proxy.async between.
        Actors below `warps` are warps, which read through the generic proxy."""
        wa, wc = self.wa[g], self.wc[g]
        bad = self.wp[g] & (wc > clock[1][wa]) & (wc <= clock[0][wa])
        if bad.any():
            return self._hit("proxy-write", bad, g, self.wl)
        if reads:
            ra, rc = self.ra[g], self.rc[g]
            bad = (ra < warps) & (rc > clock[1][ra]) & (rc <= clock[0][ra])
            if bad.any():
                return self._hit("proxy-write", bad, g, self.rl)
        return None

    def write(self, g, actor: int, clock: np.ndarray, line: int, bytes_=15, generic: bool = True, atomic: bool = False):
        """Record a write."""
        vc = clock[0]
        hit = None
        wa, wc = self.wa[g], self.wc[g]
        bad = wc > vc[wa]
        if bytes_ is not FULL:
            bad &= (self.wb[g] & bytes_) != 0
        if bad.any():
            hit = self._hit("race-write-after-write", bad, g, self.wl)
        ra, rc = self.ra[g], self.rc[g]
        bad = rc > vc[ra]
        if bytes_ is not FULL:
            bad &= (self.rb[g] & bytes_) != 0
        if bad.any():
            hit = hit or self._hit("race-write-after-read", bad, g, self.rl)
        multi = self.multi[g]
        if multi.any():
            sel = g[multi]
            rows = self.many[sel] > vc
            if rows.any() and hit is None:
                k = int(rows.any(axis=1).argmax())
                at = int(np.flatnonzero(multi)[k])
                hit = ("race-write-after-read", at, int(self.rl[g[at]]))
            self.many[sel] = 0
            self.multi[sel] = False
        own = int(vc[actor])
        if bytes_ is FULL:
            self.wb[g] = 15
            self.vb[g] = 15
        else:
            keep = (wa == actor) & (wc == own)
            self.wb[g] = np.where(keep, self.wb[g], 0)
            np.bitwise_or.at(self.wb, g, bytes_)
            np.bitwise_or.at(self.vb, g, bytes_)
        self.wa[g] = actor
        self.wc[g] = own
        self.wl[g] = line
        self.wp[g] = generic
        self.rc[g] = 0
        return hit


FULL = 15


class GlobalShadow:
    """Shadow of one allocation. Actors are (cluster, actor) pairs packed in int32; reads keep the last reader only.

    Kept only from the first write to the allocation on or for allocations that are written at all: the arrays are zero pages
    until touched.
    """

    def __init__(self, size: int) -> None:
        n = (size + 63) // 4
        self.wa, self.wc, self.wl = np.zeros(n, _I32), np.zeros(n, _I32), np.zeros(n, _I32)
        self.ra, self.rc, self.rl = np.zeros(n, _I32), np.zeros(n, _I32), np.zeros(n, _I32)
