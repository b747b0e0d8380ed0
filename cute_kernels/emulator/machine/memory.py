"""Global memory: a table of host allocations that device addresses (real host addresses) are checked against."""

from __future__ import annotations

import bisect
import ctypes

import numpy as np

from .hazards import EmulationError

_DTYPES = {
    "u1": np.uint8, "i1": np.int8, "u2": np.uint16, "i2": np.int16, "u4": np.uint32, "i4": np.int32, "u8": np.uint64,
    "i8": np.int64, "f4": np.float32, "f8": np.float64, "f2": np.float16,
}  # fmt: skip


_NEAR = 1 << 32  # bytes between an address and an allocation that may have something to do with each other


class Allocation:
    """[base, base+size) of the host. `v[dtype code]` are views that begin at `origin`, 32-byte aligned, at or before base.

    The views are an addressing device only: every access is checked against [base, end) first.
    """

    __slots__ = ("base", "size", "end", "writable", "name", "origin", "v", "keep", "shadow")

    def __init__(self, base: int, size: int, writable: bool, name: str, keep=None) -> None:
        self.base, self.size, self.end = base, size, base + size
        self.writable, self.name, self.keep = writable, name, keep
        self.origin = base & ~31
        span = (self.end - self.origin + 31) & ~31
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * max(span, 32)).from_address(self.origin))
        self.v = {code: raw.view(dt) for code, dt in _DTYPES.items()}
        self.shadow = None


class GlobalMemory:
    """The allocations a launch may touch."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._allocs: list[Allocation] = []

    def add(self, base: int, size: int, *, writable: bool = True, name: str = "", keep=None) -> Allocation | None:
        """Register [base, base+size); overlapping or touching the same storage merges to the union. Size 0 is ignored."""
        if size <= 0:
            return None
        hits = [a for a in self._allocs if a.base < base + size and base < a.end]
        if len(hits) == 1 and hits[0].base <= base and base + size <= hits[0].end:
            hits[0].writable |= writable
            return hits[0]
        lo = min([base] + [a.base for a in hits])
        hi = max([base + size] + [a.end for a in hits])
        for a in hits:
            self._allocs.remove(a)
        alloc = Allocation(lo, hi - lo, writable or any(a.writable for a in hits), name, [keep] + [a.keep for a in hits])
        self._allocs.append(alloc)
        self._allocs.sort(key=lambda a: a.base)
        self._bases = [a.base for a in self._allocs]
        return alloc

    def add_array(self, array: np.ndarray, *, writable: bool = True, name: str = "") -> Allocation | None:
        """Register a NumPy array's storage."""
        lo, hi = np.lib.array_utils.byte_bounds(array) if hasattr(np.lib, "array_utils") else np.byte_bounds(array)
        return self.add(lo, hi - lo, writable=writable, name=name, keep=array)

    def copy(self) -> GlobalMemory:
        """A table with the same allocations, to which a launch adds its own (parameters, constants)."""
        other = GlobalMemory()
        other._bases, other._allocs = list(self._bases), list(self._allocs)
        return other

    @property
    def allocations(self) -> list[Allocation]:
        return list(self._allocs)

    def find(self, address: int, size: int = 1) -> Allocation | None:
        """The allocation that holds all of [address, address+size), or None."""
        k = bisect.bisect_right(self._bases, address) - 1
        if k >= 0:
            alloc = self._allocs[k]
            if address + size <= alloc.end:
                return alloc
        return None

    def bytes_at(self, address: int, size: int, what: str = "access") -> np.ndarray:
        """uint8 view of [address, address+size). Raises EmulationError when it is not inside one allocation."""
        alloc = self.find(address, size)
        if alloc is None:
            raise EmulationError(f"out-of-bounds global {what}: {self.describe(address, size)}")
        start = address - alloc.origin
        return alloc.v["u1"][start : start + size]

    def describe(self, address: int, size: int) -> str:
        """Where an address lies relative to the nearest allocation."""
        text = f"[{address:#x}, +{size}) is in no allocation"
        if address < 1 << 16:
            return text + "; that is a null pointer" + (f" and {address} bytes" if address else "")
        if self._allocs:
            near = min(self._allocs, key=lambda a: min(abs(address - a.base), abs(address - a.end)))
            if min(abs(address - near.base), abs(address - near.end)) > _NEAR:
                return text + ", nor near one"
            if address >= near.end or near.base <= address:
                text += f"; {address + size - near.end} bytes past the end of {near.name or hex(near.base)} ({near.size} bytes)"
            else:
                text += f"; {near.base - address} bytes before {near.name or hex(near.base)} ({near.size} bytes)"
        return text

    # -- gathers for the datapath's plans
    def read(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        """uint8[n, nbytes]; every address must be valid."""
        n = len(addresses)
        if n == 0:
            return np.empty((0, nbytes), np.uint8)
        lo, hi = int(addresses.min()), int(addresses.max()) + nbytes
        alloc = self.find(lo, hi - lo)
        if alloc is None:
            return np.stack([self.bytes_at(int(a), nbytes, "read") for a in addresses])
        code = "u8" if nbytes % 8 == 0 and not (addresses & 7).any() else "u1"
        step = 8 if code == "u8" else 1
        start = (addresses - alloc.origin) // step
        return alloc.v[code][start[:, None] + np.arange(nbytes // step)].view(np.uint8)

    def write(self, addresses: np.ndarray, data: np.ndarray) -> None:
        """Write uint8[n, nbytes]."""
        n = len(addresses)
        if n == 0:
            return
        nbytes = data.shape[1]
        lo, hi = int(addresses.min()), int(addresses.max()) + nbytes
        alloc = self.find(lo, hi - lo)
        if alloc is None:
            for a, row in zip(addresses, data):
                self.bytes_at(int(a), nbytes, "write")[:] = row
            return
        code = "u8" if nbytes % 8 == 0 and not (addresses & 7).any() else "u1"
        step = 8 if code == "u8" else 1
        start = (addresses - alloc.origin) // step
        values = np.ascontiguousarray(data).view(np.uint64) if step == 8 else data
        alloc.v[code][start[:, None] + np.arange(nbytes // step)] = values

    def update(self, addresses: np.ndarray, nbytes: int, fn) -> None:
        """Read-modify-write: fn(old uint8[n, nbytes]) -> new."""
        self.write(addresses, fn(self.read(addresses, nbytes)))

    def _allocated(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        return np.array([self.find(int(a), nbytes) is not None for a in addresses], bool)

    def write_allocated(self, addresses: np.ndarray, data: np.ndarray) -> None:
        """`write`, of the rows that lie inside an allocation."""
        inside = self._allocated(addresses, data.shape[1])
        self.write(addresses[inside], data[inside])

    def update_allocated(self, addresses: np.ndarray, nbytes: int, fn) -> None:
        """`update`, of the rows that lie inside an allocation (fn sees all rows, zeros for the others)."""
        inside = self._allocated(addresses, nbytes)
        old = np.zeros((len(addresses), nbytes), np.uint8)
        old[inside] = self.read(addresses[inside], nbytes)
        self.write(addresses[inside], fn(old)[inside])
