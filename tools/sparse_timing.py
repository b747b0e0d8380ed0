"""What the sparse prefill benchmarks share: index lists, interleaved timing, peers, CSV, the table of ratios and the plot."""

from __future__ import annotations

import csv
import importlib.util
import statistics
import time
from typing import TextIO

import torch
from requirements_check import stop

ROUNDS = 12  # of interleaved calls, whose median counts; bench_sparse_prefill.py --rounds


def lists(s_q: int, s_kv: int, topk: int, generator) -> torch.Tensor:
    """Distinct random keys per row: windows of one random permutation."""
    order = torch.randperm(s_kv, device="cuda", generator=generator)
    start = torch.randint(0, s_kv, (s_q, 1), device="cuda", generator=generator)
    return order[(start + torch.arange(topk, device="cuda")) % s_kv].to(torch.int32)


def timing_inputs(s_q: int, h_q: int, topk: int, s_kv: int, d_qk: int) -> dict:
    g = torch.Generator(device="cuda").manual_seed(1)
    q = (torch.randn((s_q, h_q, d_qk), device="cuda", generator=g) / 10).to(torch.bfloat16)
    kv = (torch.randn((s_kv, 1, d_qk), device="cuda", generator=g) / 10).to(torch.bfloat16)
    return dict(q=q, kv=kv, indices=lists(s_q, s_kv, topk, g)[:, None], sm_scale=0.5)


def neighbouring_lists(tokens: int, topk: int, s_kv: int, swapped: int) -> torch.Tensor:
    """[tokens, 1, topk] distinct keys in random order; a token's set is its neighbour's with `swapped` keys exchanged."""
    g = torch.Generator(device="cuda").manual_seed(0)
    order = torch.randperm(s_kv, device="cuda", generator=g)
    indices = torch.empty((tokens, 1, topk), dtype=torch.int32, device="cuda")
    for a in range(0, tokens, 2000):
        b = min(a + 2000, tokens)
        start = torch.arange(a, b, device="cuda")[:, None] * swapped
        keys = order[(start + torch.arange(topk, device="cuda")) % s_kv]
        indices[a:b, 0] = keys.gather(1, torch.rand(keys.shape, device="cuda", generator=g).argsort(1)).int()
    return indices


def time_interleaved(functions: dict, calls: int = 4) -> dict[str, float]:
    """Median milliseconds per call; every round runs each function `calls` times between two events."""
    for f in functions.values():
        for _ in range(3):
            f()
    torch.cuda.synchronize()
    names = list(functions)
    events = {name: [] for name in names}
    for r in range(ROUNDS):
        # rotated: the power limit makes the first kernel after a pause faster than the ones that follow it
        for name in names[r % len(names) :] + names[: r % len(names)]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(calls):
                functions[name]()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    samples = {name: [start.elapsed_time(end) / calls for start, end in pairs] for name, pairs in events.items()}
    return {name: statistics.median(x) for name, x in samples.items()}


def flash_mla():
    try:
        from flash_mla import flash_mla_sparse_fwd
    except ImportError as error:
        print(f"FlashMLA is not timed: {error}")
        return None
    return lambda a: flash_mla_sparse_fwd(
        a["q"], a["kv"], a["indices"], a["sm_scale"], topk_length=a.get("topk_length"), use_legacy=True
    )


def sglang(path: str | None):
    """sparse_mla_prefill out of SGLang's file, or None."""
    if path is None:
        return None
    spec = importlib.util.spec_from_file_location("triton_sparse_mla_prefill", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.sparse_mla_prefill


def report(writer: Writer, title: str, functions: dict, flops: float = 0.0) -> dict[str, float]:
    """Time the functions, print and write a line each; flops: of one call, 0 if they are not what bounds it. Returns the times."""
    times = time_interleaved(functions)
    peer = times.get("FlashMLA")
    print(title)
    for name, ms in times.items():
        rate = f"{flops / ms / 1e9:.1f}" if flops else ""
        ratio = f"  {peer / ms:.3f} x FlashMLA" if peer else ""
        print(f"    {name:28s} {ms:8.3f} ms" + (f"  {rate:>7s} TFLOP/s" if flops else "") + ratio, flush=True)
        writer.writerow([time.strftime("%Y-%m-%d"), torch.cuda.get_device_name(), title, name, f"{ms:.4f}", rate])
    return times


COLUMNS = ["date", "device", "case", "kernel", "milliseconds", "TFLOP/s"]


class Writer:
    """Writes the CSV file's rows as they come, and keeps them."""

    def __init__(self, file: TextIO):
        self.writer, self.rows = csv.writer(file), []
        self.writer.writerow(COLUMNS)

    def writerow(self, row: list[str]) -> None:
        self.writer.writerow(row)
        self.rows.append(row)


def read(path: str) -> list[list[str]]:
    with open(path, newline="") as f:
        head, *rows = list(csv.reader(f)) or [[]]
    if head != COLUMNS or any(len(row) != len(COLUMNS) for row in rows):
        stop(f"{path} is no CSV file of this tool: its columns must be {', '.join(COLUMNS)}")
    return rows


def summary(rows: list[list[str]]) -> str:
    """A Markdown table: for each case the fastest of ours, each peer's fastest, and the ratios of their times to ours.

    Kernels are called "ours...", "FlashMLA..." or "SGLang..."; ours without a mask, on a case that has one, is no result."""
    lines = ["| case | ours | ms | TFLOP/s | FlashMLA ms | ratio | SGLang ms | ratio |", "|" + "---|" * 8]
    for title in dict.fromkeys(row[2] for row in rows):
        best = {}
        for _, _, _, name, ms, rate in (row for row in rows if row[2] == title):
            kind = next((k for k in ("FlashMLA", "SGLang") if name.startswith(k)), "ours")
            if "no mask" not in name and (kind not in best or float(ms) < float(best[kind][1])):
                best[kind] = (name, ms, rate)
        if "ours" not in best:
            continue
        name, ours, rate = best["ours"]
        cells = [title, name.removeprefix("ours").strip(", ") or "-", f"{float(ours):.3f}", rate or "-"]
        for kind in ("FlashMLA", "SGLang"):
            ms = float(best[kind][1]) if kind in best else None
            cells += ["-", "-"] if ms is None else [f"{ms:.3f}", f"{ms / float(ours):.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(rows: list[list[str]], path: str) -> None:
    """Bars of TFLOP/s, one group per case. rows: as in the CSV file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row[5]]  # TFLOP/s
    if not rows:
        stop("nothing to plot: no case with TFLOP/s")
    titles = list(dict.fromkeys(row[2] for row in rows))
    names = list(dict.fromkeys(row[3] for row in rows))
    colours = pyplot.get_cmap("tab20").colors
    counts = [sum(row[2] == title for row in rows) for title in titles]
    figure, axes = pyplot.subplots(figsize=(10, 1 + 0.16 * sum(counts) + 0.13 * len(titles)), layout="constrained")
    y, ticks, seen = 0.0, [], set()
    for title, count in zip(titles, counts):
        ticks.append(y + (count - 1) / 2)
        for row in (row for row in rows if row[2] == title):
            label = row[3] if row[3] not in seen else None
            seen.add(row[3])
            bar = axes.barh(y, float(row[5]), 0.9, label=label, color=colours[names.index(row[3]) % len(colours)])
            axes.bar_label(bar, fmt="%.0f", fontsize=7)
            y += 1
        y += 0.8
    axes.set_yticks(ticks, titles, fontsize=7)
    axes.margins(y=0.005)
    axes.invert_yaxis()
    axes.set_xlabel(f"TFLOP/s, {rows[0][1]}, {rows[0][0]}")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7)
    figure.savefig(path, dpi=150)
