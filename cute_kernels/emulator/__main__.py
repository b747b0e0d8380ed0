"""python -m cute_kernels.emulator FILE.ptx: list a PTX file's kernels and opcodes, or run one of them.

Arguments of the kernel are given in order with --arg:
    f32:1024, u8:64x64 ...      an array of that dtype and shape, zeros          (f16 bf16 are 16-bit patterns)
    f32:1024=randn              filled with standard normal numbers (also: ones, arange, randint)
    x.npy                       an array from a file
    map:bf16:128x256=randn,box=128x64,swizzle=128B      a tensor map over an array of either form; other options:
                                element_strides=1x2, oob=nan, dtype=tf32 (names as in TensorMap.tiled; axes in the array's order)
    int:5, float:0.5            scalars
    hex:00ff, bin:FILE          bytes as they are
Arrays, those of maps too, are saved to --out DIR after the run. Exit status: 0 clean, 1 hazards found, 2 the launch failed or the
command is wrong, 3 something is not supported. With --json one JSON value is printed whatever happens; an error before the launch
is {"error": text, "status": exit status}.
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
    """One --arg value: see the module's text. Raises ValueError naming the bad part, OSError for a file that cannot be read."""
    kind, _, rest = text.partition(":")
    try:
        if kind == "int":
            return int(rest, 0)
        if kind == "float":
            return float(rest)
        if kind == "hex":
            return bytes.fromhex(rest)
        if kind == "bin":
            return Path(rest).read_bytes()
        if kind == "map":
            return _tensor_map(rest, rng)
        return _array(text, rng)
    except ValueError as e:
        raise ValueError(f"--arg {text}: {e}") from e


def _array(text: str, rng: np.random.Generator) -> np.ndarray:
    if text.endswith(".npy"):
        return np.load(text)
    kind, _, rest = text.partition(":")
    if kind not in _DTYPES:
        raise ValueError(f"{kind!r} is not one of int, float, hex, bin, map, {', '.join(_DTYPES)} or a .npy file")
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
        raise ValueError(f"fill {fill!r} is not zeros, ones, arange, randn or randint")
    if kind == "bf16":
        bits = values.astype(np.float32).view(np.uint32)
        return (bits >> 16).astype(np.uint16)
    return values.astype(dtype)


def _tensor_map(text: str, rng: np.random.Generator):
    from .datapath.tensormap import TensorMap

    source, *options = text.split(",")
    array = _array(source, rng)
    given: dict = {"dtype": "bf16"} if source.startswith("bf16:") else {}
    for option in options:
        name, _, value = option.partition("=")
        if name in ("box", "element_strides"):
            given[name] = [int(x) for x in value.split("x")]
        elif name in ("swizzle", "oob", "dtype"):
            given[name] = value
        else:
            raise ValueError(f"{name!r} is not one of box, element_strides, swizzle, oob, dtype")
    if "box" not in given:
        raise ValueError("a map needs box=, one extent per axis")
    return TensorMap.tiled(array, **given)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with a command in one line of the asked form, and exits with 2."""

    json = False

    def error(self, message: str):
        _complain(self.json, 2, message)
        sys.exit(2)


def _complain(as_json: bool, status: int, error: str) -> None:
    if as_json:
        print(json.dumps({"error": error, "status": status}))
    else:
        print(f"cute_kernels.emulator: error: {error}", file=sys.stderr)


def _triple(text: str) -> tuple[int, int, int]:
    parts = [int(x) for x in text.replace("x", ",").split(",")]
    if len(parts) > 3 or min(parts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not up to three positive integers")
    return tuple(parts + [1] * (3 - len(parts)))


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    p = _Parser(
        prog="python -m cute_kernels.emulator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.json = "--json" in argv
    p.add_argument("file", type=Path, help="PTX file")
    p.add_argument("--list", action="store_true", help="list entries and opcodes, and which are supported (default without --grid)")
    p.add_argument("--json", action="store_true", help="machine-readable output, of errors too")
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
    from .machine.run import Run
    from .ptx.ir import PtxError
    from .ptx.parser import parse

    def stop(status: int, error: object) -> int:
        _complain(a.json, status, f"{a.file}: {error}")
        return status

    try:
        module = parse(a.file.read_text())
    except PtxError as e:
        return stop(3, e)
    except (OSError, UnicodeDecodeError) as e:
        p.error(f"{a.file}: {getattr(e, 'strerror', None) or e}")
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
    rng = np.random.default_rng(abs(a.seed))
    try:
        args = [parse_argument(t, rng) for t in a.arg]
        if a.out:
            a.out.mkdir(parents=True, exist_ok=True)
        launch = Run(
            module, a.grid, a.block, args, a.entry, a.cluster, a.dynamic_smem, None, a.schedule, a.seed, a.checks
        )  # fmt: skip
    except PtxError as e:
        return stop(3, e)
    except EmulationError as e:
        return stop(2, e)
    except (ValueError, TypeError, OSError) as e:
        p.error(str(e))
    failed = False
    try:
        record = launch.run()
    except EmulationError as e:
        record, failed = e.record, True
    print(json.dumps(record.as_dict(), indent=1) if a.json else format_record(record))
    for k, x in enumerate(args if a.out else ()):
        x = getattr(x, "array", x)
        if isinstance(x, np.ndarray):
            np.save(a.out / f"arg{k}.npy", x)
    return 2 if failed else 1 if record.hazards else 0


if __name__ == "__main__":
    sys.exit(main())
