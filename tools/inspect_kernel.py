#!/usr/bin/env python3
"""What the compiler made of a kernel: registers, spills, stack, shared memory, opcodes, PTX and SASS. Needs no GPU.

    tools/inspect_kernel.py --list
    tools/inspect_kernel.py combine --arch sm_100a
    tools/inspect_kernel.py combine --arch sm_90a sm_100a --variant d=512,has_sink=true --opcodes 20
    tools/inspect_kernel.py combine --arch sm_100a --sass - | less
    tools/inspect_kernel.py --json > all.json

Without a kernel name: all of them. Without --arch: all that the kernel is for. Without --variant: the variants that warm-up
compiles; with it, the first of them with these fields changed. Everything but SASS and its opcodes is read from the cubin without
a tool; those two need nvdisasm (pip install nvidia-cuda-nvdisasm). Exit status: 0, 1 for an error, 3 if a kernel has a stack
frame or spills and --strict was given.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import signal
import sys
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cute_kernels import jit  # noqa: E402
from cute_kernels.jit import cubin as cubins  # noqa: E402
from cute_kernels.jit.compile import canonical  # noqa: E402

# Opcode families worth a glance at every kernel; the counts are over the whole opcode, for example "LDG.E.128".
HIGHLIGHTS = {
    "tensor cores": r"^(HGMMA|UTC\w*MMA|HMMA|QGMMA|IGMMA|IMMA)\b",
    "global loads": r"^(LDG|LD)\b",
    "global stores": r"^(STG|ST)\b",
    "async copies": r"^(LDGSTS|UBLKCP|UTMALDG|UTMASTG|UTMAREDG|UTMACMDFLUSH)\b",
    "shared memory": r"^(LDS|STS|LDSM|STSM|ATOMS)\b",
    "tensor memory": r"^(LDTM|STTM|UTCCP|UTCBAR|UTCATOMSWS)\b",
    "exponentials": r"^MUFU\.EX2\b",
    "barriers": r"^(BAR|SYNCS|MEMBAR|FENCE)\b",
    "local memory": r"^(LDL|STL)\b",
}


def changed(config: Any, text: str) -> Any:
    """`config` with the fields of "name=value,name=value" changed; values as Python literals, else as they stand."""
    names = config._fields if hasattr(config, "_fields") else [f.name for f in fields(config)]
    values = {}
    for part in filter(None, re.split(r",\s*(?=\w+=)", text)):
        name, equals, value = part.partition("=")
        if not equals or name not in names:
            raise ValueError(f"--variant must be name=value with a name of {', '.join(names)}, got {part!r}")
        value = {"true": "True", "false": "False"}.get(value, value)
        try:
            values[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            values[name] = value
    return replace(config, **values) if is_dataclass(config) else config._replace(**values)


def inspect(builder: jit.KernelBuilder, config: Any, arch: str, line_info: bool) -> tuple[dict[str, Any], jit.Artifact]:
    """(everything known about one compiled variant, the artifact)."""
    made = builder.artifact(config, arch, line_info)
    report: dict[str, Any] = {
        "kernel": builder.name, "arch": arch, "config": canonical(config), "origin": made.origin, "seconds": round(made.seconds, 3),
        "dynamic_smem": made.dynamic_smem, "functions": [asdict(r) for r in cubins.resources(made.cubin)],
        "ptx_opcodes": dict(cubins.ptx_opcodes(made.ptx).most_common()),
    }  # fmt: skip
    try:
        report["sass_opcodes"] = dict(cubins.sass_opcodes(cubins.disassemble(made.cubin)).most_common())
    except cubins.MissingTool as error:
        report["sass_opcodes"], report["missing"] = None, str(error)
    return report, made


def table(reports: list[dict[str, Any]]) -> str:
    """Resources of all variants, one line a function."""
    head = ("kernel", "arch", "config", "regs", "stack", "spill ld/st", "static smem", "dynamic smem", "threads", "code")
    rows = [head]
    for r in reports:
        config = " ".join(f"{k}={v}" for k, v in r["config"].items()) if isinstance(r["config"], dict) else str(r["config"])
        dynamic = "+".join("run time" if d is None else str(d) for d in r["dynamic_smem"]) or "?"
        for f in r["functions"]:
            spills = f"{f['spill_loads']}/{f['spill_stores']}"
            rows.append(
                (r["kernel"], r["arch"], config, f["registers"], f["stack"], spills, f["static_smem"], dynamic, f["threads"] or "?",
                 f["code_bytes"])
            )  # fmt: skip
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(str(cell).ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)


def opcode_lines(report: dict[str, Any], count: int) -> list[str]:
    """Highlights and the most frequent opcodes, as text."""
    lines = []
    sass = report["sass_opcodes"]
    if sass is not None:
        for title, pattern in HIGHLIGHTS.items():
            found = {op: n for op, n in sass.items() if re.match(pattern, op)}
            if found:
                lines.append(f"  {title:14s} {sum(found.values()):5d}  " + ", ".join(f"{n} {op}" for op, n in found.items()))
        if count:
            lines.append("  SASS: " + ", ".join(f"{n} {op}" for op, n in list(sass.items())[:count]))
    if count:
        lines.append("  PTX: " + ", ".join(f"{n} {op}" for op, n in list(report["ptx_opcodes"].items())[:count]))
    return lines


def write(where: str, text: str) -> None:
    if where == "-":
        sys.stdout.write(text)
    else:
        Path(where).write_text(text, encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help="names as --list shows them; none: all")
    parser.add_argument("--list", action="store_true", help="list kernels, architectures and variants, compile nothing")
    parser.add_argument("--arch", nargs="+", help="sm_90a, sm_100a, sm_103a")
    parser.add_argument("--variant", help="change fields of the first default variant: name=value,name=value")
    parser.add_argument("--opcodes", type=int, default=0, metavar="N", help="also the N most frequent opcodes of SASS and PTX")
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    parser.add_argument("--ptx", metavar="FILE", help="write the PTX (one variant only); - for the terminal")
    parser.add_argument("--sass", metavar="FILE", help="write the SASS (one variant only); - for the terminal")
    parser.add_argument("--cubin", metavar="FILE", help="write the cubin (one variant only)")
    parser.add_argument("--line-info", action="store_true", help="source lines in PTX and SASS")
    parser.add_argument("--strict", action="store_true", help="exit with 3 if anything has a stack frame or spills")
    options = parser.parse_args(argv)
    try:
        return run(options)
    except (ValueError, RuntimeError) as error:
        print(f"inspect_kernel: {error}", file=sys.stderr)
        return 1


def run(options: argparse.Namespace) -> int:
    builders = jit.discover()
    unknown = [name for name in options.kernels if name not in builders]
    if unknown:
        raise ValueError(f"no kernel is named {unknown[0]!r}. Kernels: {', '.join(sorted(builders))}")
    chosen = [builders[name] for name in options.kernels or sorted(builders)]
    if options.list:
        listing = {b.name: {arch: [canonical(c) for c in b.variants(arch)] for arch in b.archs} for b in chosen}
        if options.json:
            print(json.dumps(listing, indent=1))
        for b in () if options.json else chosen:
            print(f"{b.name}: {', '.join(b.archs)}")
            first, *others = b.archs
            for config in b.variants(first):
                print(f"  {config}")
            for arch in others:
                if b.variants(arch) != b.variants(first):
                    print(f"  {arch}: {b.variants(arch)}")
        return 0
    jobs = []
    for b in chosen:
        for arch in options.arch or b.archs:
            if arch not in b.archs and not options.kernels:
                continue
            configs = b.variants(arch if arch in b.archs else b.archs[0])
            jobs += [(b, changed(configs[0], options.variant), arch)] if options.variant else [(b, c, arch) for c in configs]
    if (options.ptx or options.sass or options.cubin) and len(jobs) != 1:
        raise ValueError(f"--ptx, --sass and --cubin take one variant, these are {len(jobs)}: name a kernel, --arch and --variant")
    reports = []
    for i, (b, config, arch) in enumerate(jobs, 1):
        report, made = inspect(b, config, arch, options.line_info)
        if len(jobs) > 1:  # a compile takes seconds
            done = f"{report['origin']}, {report['seconds']:.1f} s"
            print(f"{i}/{len(jobs)} {b.name} {arch} {config}: {done}", file=sys.stderr, flush=True)
        reports.append(report)
        if options.ptx:
            write(options.ptx, made.ptx)
        if options.cubin:
            Path(options.cubin).write_bytes(made.cubin)
        if options.sass:
            write(options.sass, cubins.disassemble(made.cubin))
    if options.json:
        print(json.dumps(reports, indent=1))
    elif "-" not in (options.ptx, options.sass):
        print(table(reports))
        for report in reports:
            lines = opcode_lines(report, options.opcodes)
            if lines:
                print(f"\n{report['kernel']} {report['arch']} {report['config']}")
                print("\n".join(lines))
        missing = {r["missing"] for r in reports if "missing" in r}
        for text in missing:
            print(f"\nno SASS: {text}", file=sys.stderr)
    dirty = [f for r in reports for f in r["functions"] if f["stack"] or f["spill_loads"] or f["spill_stores"]]
    return 3 if options.strict and dirty else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # into `head`
    sys.exit(main())
