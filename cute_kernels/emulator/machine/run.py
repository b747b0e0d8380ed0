"""run_ptx: a launch from NumPy arrays, scalars, bytes and tensor maps."""

from __future__ import annotations

import time

import numpy as np

from ..ptx.ir import Module
from . import launcher
from .launcher import LaunchRecord, read_module
from .memory import GlobalMemory

_ALIGN = 256  # cudaMalloc's alignment: kernels rely on it for 256-bit accesses and tensor maps


def _bounds(a: np.ndarray) -> tuple[int, int]:
    bounds = getattr(getattr(np, "lib", None), "array_utils", np)
    return bounds.byte_bounds(a)


class _Placement:
    """Device storage of the arrays: aligned copies where the host storage is not aligned, written back after the launch."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        spans: list[list] = []
        for a in sorted((a for a in arrays if a.size), key=lambda a: _bounds(a)[0]):
            lo, hi = _bounds(a)
            if spans and lo < spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], hi)
                spans[-1][3] |= a.flags.writeable
            else:
                spans.append([lo, hi, a, a.flags.writeable])
        self.spans = []
        for lo, hi, owner, writable in spans:
            if lo % _ALIGN == 0:
                self.spans.append((lo, hi, lo, None, owner, writable))
                continue
            raw = np.empty(hi - lo + _ALIGN, np.uint8)
            start = -raw.ctypes.data % _ALIGN
            copy = raw[start : start + hi - lo]
            copy[:] = _raw(lo, hi - lo)
            self.spans.append((lo, hi, copy.ctypes.data, copy, (owner, raw), writable))

    def address(self, a: np.ndarray) -> int:
        if a.size == 0:
            return 0
        at = a.ctypes.data
        for lo, hi, base, _, _, _ in self.spans:
            if lo <= at < hi:
                return base + at - lo
        raise KeyError("array was not placed")

    def register(self, memory: GlobalMemory, names: dict[int, str]) -> None:
        for lo, hi, base, _, keep, writable in self.spans:
            memory.add(base, hi - lo, writable=writable, name=names.get(lo, ""), keep=keep)

    def write_back(self) -> None:
        for lo, hi, _, copy, _, writable in self.spans:
            if copy is not None and writable:
                _raw(lo, hi - lo)[:] = copy


def _raw(address: int, size: int) -> np.ndarray:
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def run_ptx(
    ptx: str | Module,
    grid,
    block,
    args=(),
    *,
    entry: str | None = None,
    cluster=(1, 1, 1),
    dynamic_smem: int = 0,
    arch: str | None = None,
    schedule: str = "eager",
    seed: int = 0,
    checks: str = "default",
) -> LaunchRecord:
    """Run one kernel of a PTX text on the CPU.

    Args:
        ptx: PTX text (or a module from `emulator.ptx.parser.parse`).
        grid, block, cluster: ints or (x, y, z).
        args: one per kernel parameter: a NumPy array (its address is passed; written in place), a Python or NumPy scalar
            (converted to the parameter's type), bytes (copied as they are), or a TensorMap (its 128 bytes; made with
            TensorMap.tiled(array, ...), which keeps the array alive). A kernel sees an address and no strides: an array must
            fill its storage without gaps, in any order of its axes.
        entry: kernel name; may be left out when the file has one kernel.
        dynamic_smem: bytes of dynamic shared memory.
        schedule, seed, checks: see `launch`.

    Returns:
        LaunchRecord with counters and hazards.

    Raises:
        ValueError, TypeError: arguments that do not fit the kernel's parameters.
        PtxError, UnsupportedInstruction, EmulationError: see `launch`.
    """
    return Run(ptx, grid, block, args, entry, cluster, dynamic_smem, arch, schedule, seed, checks).run()


class Run:
    """One call of `run_ptx`. What is wrong with its arguments is found before `run`, and raised by the constructor."""

    def __init__(self, ptx, grid, block, args, entry, cluster, dynamic_smem, arch, schedule, seed, checks) -> None:
        self.began = time.perf_counter()
        module = read_module(ptx)
        if entry is None:
            if len(module.entries) != 1:
                names = ", ".join(module.entries)
                raise ValueError(f"entry must be given: the file has {names}" if names else "the file has no kernel")
            entry = module.entries[0]
        if entry not in module.functions:
            raise ValueError(f"no entry {entry!r}; the file has {', '.join(module.entries)}")
        formal = module.functions[entry].params
        if len(args) != len(formal):
            raise ValueError(f"{entry} takes {len(formal)} arguments, {len(args)} given")
        arrays = [a for a in args if isinstance(a, np.ndarray) and a.ndim > 0]
        for k, a in enumerate(args):
            if isinstance(a, np.ndarray):
                _check_array(k, a)
        placement = _Placement(arrays)
        memory = GlobalMemory()
        names = {_bounds(a)[0]: f"argument {k}" for k, a in enumerate(args) if isinstance(a, np.ndarray) and a.size}
        placement.register(memory, names)
        params = bytearray()
        for var, a in zip(formal, args):
            params += b"\0" * (-len(params) % max(var.align, 1))
            params += _encode(var, a, placement, memory)
        self.machine, self.record = launcher.prepare(
            module, entry, grid, block, cluster, dynamic_smem, bytes(params), arch=arch, memory=memory, schedule=schedule,
            seed=seed, checks=checks,
        )  # fmt: skip
        self.placement, self.args = placement, args

    def run(self) -> LaunchRecord:
        """Run the launch, and write the arrays back whatever comes of it."""
        try:
            return launcher.run(self.machine, self.record, self.began)
        finally:
            self.placement.write_back()


def _check_array(k: int, a: np.ndarray) -> None:
    """Refuse what has no meaning as an address: Python objects, and elements with gaps between them."""
    if a.dtype.hasobject:
        raise TypeError(f"argument {k} holds Python objects")
    step = a.itemsize
    for stride, extent in sorted((s, n) for s, n in zip(a.strides, a.shape) if n > 1):
        if a.size and stride != step:
            raise ValueError(
                f"argument {k}, shape {a.shape} and byte strides {a.strides}, does not fill its storage: a kernel gets the address"
                " alone. Pass numpy.ascontiguousarray(a), or all of the storage"
            )
        step *= extent


def _encode(var, a, placement: _Placement, memory: GlobalMemory) -> bytes:
    if isinstance(a, np.ndarray) and a.ndim > 0:
        if var.size != 8:
            raise TypeError(f"parameter {var.name} is .{var.type} ({var.size} bytes), not a pointer")
        return placement.address(a).to_bytes(8, "little")
    if isinstance(a, bytes | bytearray | memoryview):
        if len(a) != var.size:
            raise ValueError(f"parameter {var.name} has {var.size} bytes, {len(a)} given")
        return bytes(a)
    if hasattr(a, "encode") and hasattr(a, "box"):
        if var.size != 128:
            raise TypeError(f"parameter {var.name} has {var.size} bytes; a tensor map has 128")
        return _encode_map(a, placement, memory)
    kind = var.type[0]
    if kind == "f" or (kind == "b" and isinstance(a, float | np.floating)):
        code = {2: np.float16, 4: np.float32, 8: np.float64}[var.size]
        return np.array(a, code).tobytes()
    if not isinstance(a, int | np.integer | np.bool_):
        raise TypeError(f"parameter {var.name} (.{var.type}) cannot take {type(a).__name__}")
    limit = 1 << 8 * var.size
    if not -limit // 2 <= int(a) < limit:
        raise ValueError(f"parameter {var.name} (.{var.type}) cannot hold {int(a)}")
    return (int(a) % limit).to_bytes(var.size, "little")


def _encode_map(tmap, placement: _Placement, memory: GlobalMemory) -> bytes:
    import dataclasses

    for lo, hi, base, _, _, _ in placement.spans:
        if lo <= tmap.address < hi:
            return dataclasses.replace(tmap, address=base + tmap.address - lo).encode()
    size = sum((d - 1) * t for d, t in zip(tmap.dims[1:], tmap.strides)) + tmap.dims[0] * tmap.element_bits // 8
    writable = tmap.array is None or tmap.array.flags.writeable
    memory.add(tmap.address, size, writable=writable, name="tensor map's array", keep=tmap.array)
    return tmap.encode()
