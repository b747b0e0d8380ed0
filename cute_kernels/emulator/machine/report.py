"""Readable text of a launch record and of an opcode survey."""

from __future__ import annotations

from .launcher import LaunchRecord


def count(n: int, noun: str) -> str:
    """ "1 hazard", "2 hazards"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def format_record(record: LaunchRecord) -> str:
    """What a launch did: totals, bytes by path, a table by warp role, hazards, device printf output."""
    c = record.counters
    lines = [
        f"{record.entry}",
        f"  grid {record.grid}, block {record.block}, cluster {record.cluster}, "
        f"{record.dynamic_smem} bytes of dynamic shared memory",
        f"  schedule {record.schedule}"
        + (f" (seed {record.seed})" if record.schedule == "random" else "")
        + f", checks {record.checks}: "
        f"{count(c.total, 'warp-instruction')} of {count(c.ctas, 'CTA')} in {record.wall_seconds:.2f} s",
    ]
    if c.tensor_cycles:
        lines.append(f"  tensor core: {c.tensor_cycles:.0f} cycles by the published B200 table, {c.tensor_flops / 1e6:.1f} MFLOP")
    if c.exp2:
        lines.append(f"  ex2: {c.exp2} lanes")
    if c.bytes:
        lines.append("  bytes: " + ", ".join(f"{k} {v}" for k, v in sorted(c.bytes.items()) if v))
    for name, role in c.roles.items():
        total = sum(role.instructions.values())
        top = ", ".join(f"{k} {v}" for k, v in role.instructions.most_common(6))
        extra = (f", ex2 {role.exp2}" if role.exp2 else "") + (
            f", {count(role.barrier_waits, 'barrier wait')}" if role.barrier_waits else ""
        )
        extra += f", {role.tensor_cycles:.0f} tensor cycles" if role.tensor_cycles else ""
        lines.append(f"  {name}: {count(total, 'instruction')} ({top}){extra}")
    for text in record.printed:
        lines.append("  printf: " + text.rstrip("\n"))
    if record.error:
        lines.append("  ERROR " + record.error.replace("\n", "\n  "))
    lines.append(f"  hazards: {len(record.hazards)}")
    lines += ["    " + str(h) for h in record.hazards]
    return "\n".join(lines)


def format_survey(survey: dict[str, dict], version: tuple[int, int], target: str) -> str:
    """The opcodes of every entry, unsupported ones first."""
    lines = [f".version {version[0]}.{version[1]}, .target {target}, {len(survey)} {'entry' if len(survey) == 1 else 'entries'}"]
    for entry, table in survey.items():
        lines.append(entry)
        if "error" in table:
            lines.append(f"  ERROR {table['error']}")
            continue
        bad = {op: row for op, row in table.items() if not row["supported"]}
        total = sum(r["count"] for r in table.values())
        lines.append(f"  {count(total, 'instruction')}, {count(len(table), 'opcode')}, {len(bad)} not supported")
        for op, row in sorted(table.items(), key=lambda kv: (kv[1]["supported"], -kv[1]["count"])):
            lines.append(
                f"  {'' if row['supported'] else 'NO '}{row['count']:6d}  {op}" + (f"    {row['why']}" if row["why"] else "")
            )
    return "\n".join(lines)
