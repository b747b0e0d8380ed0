#!/usr/bin/env python3
"""The kernels of tools/hopper in the emulator and on a Hopper GPU: are the outputs equal, to rounding?

    tools/compare_with_gpu.py                 all cases, emulator against GPU against NumPy
    tools/compare_with_gpu.py --quick         one of each kind
    tools/compare_with_gpu.py --emulator      without a GPU: emulator against NumPy
    tools/compare_with_gpu.py --only gemm --schedule random --seed 3

For every case: how many of the output's elements differ in any bit between emulator and GPU, and the largest distance of GPU and
emulator from each other and of each from the float64 answer, as a fraction of the case's tolerance (at most 1 passes; a case whose
tolerance is 0 must agree in every bit). Exit status 0 if every case passes, 1 if one does not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import copy
import csv
import ctypes
import dataclasses
import sys
import time
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
import hopper  # noqa: E402

from cute_kernels.emulator import run_ptx  # noqa: E402
from cute_kernels.emulator.datapath.tensormap import TensorMap  # noqa: E402


class NoGpu(RuntimeError):
    pass


class Gpu:
    """The driver API through ctypes: the PTX is assembled by the driver, and every code it returns is looked at."""

    def __init__(self) -> None:
        try:
            self.cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NoGpu(f"no CUDA driver: {error}") from None
        count, device, context, major = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
        if self.cuda.cuInit(0) or self.cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
            raise NoGpu("no CUDA device")
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDeviceGetAttribute", ctypes.byref(major), 75, device)
        if major.value != 9:
            raise NoGpu(f"needs a Hopper GPU (compute capability 9.0), this is {major.value}.x")
        name = ctypes.create_string_buffer(100)
        self.call("cuDeviceGetName", name, 100, device)
        self.name = name.value.decode()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *args) -> None:
        code = getattr(self.cuda, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'?').decode()} ({code})")

    def module(self, ptx: str) -> ctypes.c_void_p:
        log = ctypes.create_string_buffer(8192)
        options = (ctypes.c_int * 2)(5, 6)  # CU_JIT_ERROR_LOG_BUFFER, its size
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), 8192)
        module = ctypes.c_void_p()
        text = ctypes.c_char_p(ptx.encode())
        if self.cuda.cuModuleLoadDataEx(ctypes.byref(module), text, 2, options, values):
            raise RuntimeError(f"the driver does not take the PTX: {log.value.decode()}")
        return module

    def encode(self, t: TensorMap) -> bytes:
        """cuTensorMapEncodeTiled. TensorMap.encode() leaves the map's second half empty; from such a map an H200 stores zeros, not
        the tile, in what is left of a row's last 16 bytes."""
        kinds = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32_ftz", "tf32", "tf32_ftz")
        raw = (ctypes.c_uint8 * 192)()
        start = (-ctypes.addressof(raw)) % 64
        u64, u32 = ctypes.c_uint64 * 5, ctypes.c_uint32 * 5
        self.call(
            "cuTensorMapEncodeTiled", ctypes.byref(raw, start), kinds.index(t.dtype), t.rank, ctypes.c_void_p(t.address),
            u64(*t.dims), u64(*t.strides), u32(*t.box), u32(*t.element_strides), 0, ("none", "32B", "64B", "128B").index(t.swizzle),
            (0, 64, 128, 256).index(t.l2_promotion), int(t.oob_fill == "nan"),
        )  # fmt: skip
        return bytes(raw)[start : start + 128]

    def run(self, case: hopper.Case) -> None:
        """Execute `case` on copies of its arrays in device memory; its outputs are written back in place."""
        arrays = [a for a in [*case.args, *case.keep] if isinstance(a, np.ndarray)]
        device = []
        for a in arrays:
            pointer = ctypes.c_uint64()
            self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(a.nbytes))
            self.call("cuMemcpyHtoD_v2", pointer, ctypes.c_void_p(a.ctypes.data), ctypes.c_size_t(a.nbytes))
            device.append(pointer)

        def argument(value):
            if isinstance(value, np.ndarray):
                return next(p for a, p in zip(arrays, device) if a is value)
            if isinstance(value, int):
                return ctypes.c_uint32(value)
            for a, pointer in zip(arrays, device):
                if 0 <= value.address - a.ctypes.data < a.nbytes:
                    moved = dataclasses.replace(value, address=pointer.value + value.address - a.ctypes.data)
                    return ctypes.create_string_buffer(self.encode(moved), 128)
            raise ValueError("a tensor map on an array that the case does not keep")

        holders = [argument(a) for a in case.args]
        pointers = (ctypes.c_void_p * len(holders))(*[ctypes.addressof(h) for h in holders])
        module, function = self.module(case.ptx), ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"k")
        self.call("cuFuncSetAttribute", function, 8, case.smem)  # the most dynamic shared memory
        self.call("cuLaunchKernel", function, *case.grid, case.block, 1, 1, case.smem, None, pointers, None)
        self.call("cuCtxSynchronize")
        for a, pointer in zip(arrays, device):
            if any(a is out for out, _, _ in case.want):
                self.call("cuMemcpyDtoH_v2", ctypes.c_void_p(a.ctypes.data), pointer, ctypes.c_size_t(a.nbytes))
            self.call("cuMemFree_v2", pointer)
        self.call("cuModuleUnload", module)


def fresh(case: hopper.Case) -> hopper.Case:
    """A copy with arrays of its own; the maps follow them."""
    memo: dict[int, np.ndarray] = {}
    arrays = [a for a in [*case.args, *case.keep] if isinstance(a, np.ndarray)]
    for a in arrays:
        memo.setdefault(id(a), a.copy())

    def moved(value):
        if isinstance(value, np.ndarray):
            return memo[id(value)]
        if isinstance(value, int):
            return value
        a = next(a for a in arrays if 0 <= value.address - a.ctypes.data < a.nbytes)
        return dataclasses.replace(value, address=memo[id(a)].ctypes.data + value.address - a.ctypes.data)

    made = copy.copy(case)
    made.args, made.keep = [moved(a) for a in case.args], [moved(a) for a in case.keep]
    made.want = [(memo[id(a)], want, tolerance) for a, want, tolerance in case.want]
    return made


def emulate(case: hopper.Case, schedule: str = "eager", seed: int = 0, checks: str = "default"):
    """Run `case` in the emulator, outputs in place; the launch's record."""
    cluster = (case.cluster, 1, 1)
    return run_ptx(
        case.ptx, case.grid, case.block, case.args, cluster=cluster, dynamic_smem=case.smem,
        schedule=schedule, seed=seed, checks=checks,
    )  # fmt: skip


def distance(got: np.ndarray, want: np.ndarray, tolerance) -> float:
    """The largest |got - want| as a fraction of the tolerance; with tolerance 0: 0 or infinity, by the bits."""
    if np.isscalar(tolerance) and tolerance == 0:
        return 0.0 if np.array_equal(got.view(np.uint8), want.view(np.uint8)) else np.inf
    difference = np.abs(got.astype(np.float64) - want.astype(np.float64))
    if not np.isfinite(difference).all():
        return np.inf
    return float((difference / np.maximum(tolerance, 1e-300)).max())


def unequal(a: np.ndarray, b: np.ndarray) -> int:
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32}[a.itemsize]
    return int((a.view(bits) != b.view(bits)).sum())


def first_difference(got: np.ndarray, want: np.ndarray) -> str:
    """Where two arrays of one dtype first differ in a bit, and in what."""
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32}[got.itemsize]
    a, b = np.ascontiguousarray(got).view(bits).ravel(), np.ascontiguousarray(want.astype(got.dtype)).view(bits).ravel()
    at = np.flatnonzero(a != b)
    shown = ", ".join(f"[{i}] {a[i]:#x} for {b[i]:#x}" for i in at[:4])
    return f"{len(at)} of {a.size} differ: {shown}"


def row(case: hopper.Case, gpu: Gpu | None, schedule: str, seed: int) -> dict:
    """Everything the table shows about one case."""
    ours = fresh(case)
    began = time.perf_counter()
    record = emulate(ours, schedule, seed)
    seconds = time.perf_counter() - began
    made: dict = {"case": case.name, "seconds": round(seconds, 2), "hazards": len(record.hazards)}
    outputs = [(a, want, tolerance) for a, want, tolerance in ours.want]
    made["emulator-numpy"] = max(distance(*o) for o in outputs)
    if gpu is not None:
        theirs = fresh(case)
        gpu.run(theirs)
        pairs = [(b, a, t) for (a, _, t), (b, _, _) in zip(ours.want, theirs.want)]
        made["elements"] = sum(a.size for a, _, _ in pairs)
        made["unequal"] = sum(unequal(b, a) for b, a, _ in pairs)
        made["gpu-emulator"] = max(distance(*p) for p in pairs)
        made["gpu-numpy"] = max(distance(*o) for o in theirs.want)
        made["first"] = "; ".join(first_difference(a, want) for a, want, t in theirs.want if distance(a, want, t) > 1)
    worst = max(v for k, v in made.items() if k in ("emulator-numpy", "gpu-emulator", "gpu-numpy"))
    made["ok"] = worst <= 1 and not record.hazards
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one case of each kind")
    parser.add_argument("--emulator", action="store_true", help="no GPU: emulator against NumPy")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--schedule", default="eager", choices=("eager", "lazy", "random"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", help="also write the table there")
    parser.add_argument("--ptx", help="only write the PTX of the cases into this folder")
    args = parser.parse_args()
    cases = [c for c in (hopper.quick_cases() if args.quick else hopper.all_cases()) if args.only in c.name]
    if not cases:
        parser.error(f"no case's name contains {args.only!r}")
    if args.ptx:
        Path(args.ptx).mkdir(parents=True, exist_ok=True)
        for i, case in enumerate(cases):
            (Path(args.ptx) / f"{i:03d}.ptx").write_text(f"// {case.name}\n{case.ptx}")
        return 0
    gpu = None
    if not args.emulator:
        try:
            gpu = Gpu()
        except NoGpu as reason:
            print(f"{reason}; --emulator compares with NumPy alone", file=sys.stderr)
            return 2
    print(f"{len(cases)} cases, schedule {args.schedule}, GPU: {gpu.name if gpu else 'none'}")
    print("distances as fractions of the tolerance; 'differ': elements of the output that differ in any bit, emulator and GPU")
    print(f"{'case':52s} {'differ':>14s} {'gpu-emul':>9s} {'gpu-numpy':>9s} {'emul-numpy':>10s} {'hazards':>7s}")
    rows = []
    for case in cases:
        made = row(case, gpu, args.schedule, args.seed)
        rows.append(made)
        show = lambda key, made=made: f"{made[key]:.3f}" if key in made else "-"  # noqa: E731
        differ = f"{made['unequal']}/{made['elements']}" if gpu else "-"
        flag = "" if made["ok"] else "   FAILS"
        print(
            f"{made['case']:52s} {differ:>14s} {show('gpu-emulator'):>9s} {show('gpu-numpy'):>9s} {show('emulator-numpy'):>10s} "
            f"{made['hazards']:7d}{flag}",
            flush=True,
        )
        if made.get("first"):
            print(f"    GPU against NumPy: {made['first']}")
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    bad = [r["case"] for r in rows if not r["ok"]]
    print(f"{len(rows) - len(bad)} of {len(rows)} cases agree" + (f"; not: {', '.join(bad)}" if bad else ""))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
