"""python -m cute_kernels.emulator FILE.ptx: list a PTX file's kernels and opcodes, or run one of them.

Arguments of the kernel are given in order with --arg:
    f32:1024, u8:64x64 ...      an array of that dtype and shape, zeros          (f16 bf16 are 16-bit patterns)
    f32:1024=randn              filled with standard normal numbers (also: ones, arange, randint)
    x.npy                       an array from a file; written back to --out DIR
    int:5, float:0.5            scalars
Exit status: 0 clean, 1 hazards found, 2 the launch failed, 3 something is not supported.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

_DTYPES = {
    "f16": np.float16, "f32": np.float32, "f64": np.float64, "bf16": np.uint16, "u8": np.uint8, "s8": np.int8, "u16": np.uint16,
    "s16": np.int16, "u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64,
}  # fmt: skip


def parse_argument(text: str, rng: np.random.Generator):
    """One --arg value: see the module's text. Raises ValueError naming the bad part."""
    if text.endswith(".npy"):
        return np.load(text)
    kind, _, rest = text.partition(":")
    if kind == "int":
        return int(rest, 0)
    if kind == "float":
        return float(rest)
    if kind not in _DTYPES:
        raise ValueError(f"--arg {text}: {kind!r} is not one of int, float, {', '.join(_DTYPES)} or a .npy file")
    shape_text, _, fill = rest.partition("=")
    shape = tuple(int(x) for x in shape_text.split("x"))
    dtype = _DTYPES[kind]
    if fill in ("", "zeros"):
        return np.zeros(shape, dtype)
    if fill == "ones":
        values = np.ones(shape)
    elif fill == "arange":
        values = np.arange(np.prod(shape)).reshape(shape)
    elif fill == "randn":
        values = rng.standard_normal(shape)
    elif fill == "randint":
        values = rng.integers(0, 100, shape)
    else:
        raise ValueError(f"--arg {text}: fill {fill!r} is not zeros, ones, arange, randn or randint")
    if kind == "bf16":
        bits = values.astype(np.float32).view(np.uint32)
        return (bits >> 16).astype(np.uint16)
    return values.astype(dtype)


def _triple(text: str) -> tuple[int, int, int]:
    parts = [int(x) for x in text.replace("x", ",").split(",")]
    return tuple(parts + [1] * (3 - len(parts)))


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    p = argparse.ArgumentParser(
        prog="python -m cute_kernels.emulator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("file", type=Path, help="PTX file")
    p.add_argument("--list", action="store_true", help="list entries and opcodes, and which are supported (default without --grid)")
    p.add_argument("--json", action="store_true", help="machine-readable output")
    p.add_argument("--entry", help="kernel to run; needed when the file has several")
    p.add_argument("--grid", type=_triple, help="x,y,z: run the kernel")
    p.add_argument("--block", type=_triple, default=(32, 1, 1))
    p.add_argument("--cluster", type=_triple, default=(1, 1, 1))
    p.add_argument("--dynamic-smem", type=int, default=0, help="bytes")
    p.add_argument("--arg", action="append", default=[], help="a kernel argument, in order")
    p.add_argument("--schedule", choices=("eager", "lazy", "random"), default="eager")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--checks", choices=("default", "strict", "off"), default="default")
    p.add_argument("--out", type=Path, help="folder to save the arrays to after the run, as argN.npy")
    a = p.parse_args(argv)

    from .machine.hazards import EmulationError
    from .machine.report import format_record, format_survey
    from .machine.run import run_ptx
    from .ptx.ir import PtxError, UnsupportedInstruction
    from .ptx.parser import parse

    try:
        module = parse(a.file.read_text())
    except PtxError as e:
        print(f"{a.file}: {e}", file=sys.stderr)
        return 3
    if a.list or a.grid is None:
        from .machine import engine  # noqa: F401  (registers every instruction)
        from .machine.program import survey

        table = survey(module)
        if a.json:
            print(json.dumps({"version": module.version, "target": module.target, "entries": table}, indent=1))
        else:
            print(format_survey(table, module.version, module.target))
        bad = any("error" in t or any(not r["supported"] for r in t.values()) for t in table.values())
        return 3 if bad else 0
    rng = np.random.default_rng(a.seed)
    args = [parse_argument(t, rng) for t in a.arg]
    failed = False
    try:
        record = run_ptx(
            module, a.grid, a.block, args, entry=a.entry, cluster=a.cluster, dynamic_smem=a.dynamic_smem,
            schedule=a.schedule, seed=a.seed, checks=a.checks,
        )  # fmt: skip
    except UnsupportedInstruction as e:
        print(f"{a.file}: {e}", file=sys.stderr)
        return 3
    except EmulationError as e:
        record = getattr(e, "record", None)
        failed = True
        if record is None:
            print(f"{a.file}: {e}", file=sys.stderr)
            return 2
    print(json.dumps(record.as_dict(), indent=1) if a.json else format_record(record))
    if a.out:
        a.out.mkdir(parents=True, exist_ok=True)
        for k, x in enumerate(args):
            if isinstance(x, np.ndarray):
                np.save(a.out / f"arg{k}.npy", x)
    return 2 if failed else 1 if record.hazards else 0


if __name__ == "__main__":
    sys.exit(main())
