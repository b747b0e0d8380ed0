"""What the sparse prefill benchmarks share: index lists, interleaved timing, peers, CSV and plot."""

from __future__ import annotations

import importlib.util
import statistics
import time

import torch


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


def time_interleaved(functions: dict, rounds: int = 12, calls: int = 4) -> dict[str, float]:
    """Median milliseconds per call; every round runs each function `calls` times between two events."""
    for f in functions.values():
        for _ in range(3):
            f()
    torch.cuda.synchronize()
    names = list(functions)
    events = {name: [] for name in names}
    for r in range(rounds):
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


def report(writer, title: str, functions: dict, flops: float) -> None:
    times = time_interleaved(functions)
    peer = times.get("FlashMLA")
    print(title)
    for name, ms in times.items():
        ratio = f"  {peer / ms:.3f} x FlashMLA" if peer else ""
        print(f"    {name:24s} {ms:8.3f} ms  {flops / ms / 1e9:7.1f} TFLOP/s{ratio}", flush=True)
        writer.writerow(
            [
                time.strftime("%Y-%m-%d"),
                torch.cuda.get_device_name(),
                title,
                name,
                f"{ms:.4f}",
                f"{flops / ms / 1e9:.1f}",
            ]
        )


class Writer:
    """Writes CSV rows and keeps them."""

    def __init__(self, writer, rows: list[list[str]]):
        self.writer, self.rows = writer, rows

    def writerow(self, row: list[str]) -> None:
        self.writer.writerow(row)
        self.rows.append(row)


def plot(rows: list[list[str]], path: str) -> None:
    """Bars of TFLOP/s, one group per input. rows: as in the CSV file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row[5]]  # TFLOP/s
    titles = list(dict.fromkeys(row[2] for row in rows))
    names = list(dict.fromkeys(row[3] for row in rows))
    figure, axes = pyplot.subplots(figsize=(10, 1 + 0.6 * len(titles)), layout="constrained")
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        values = {row[2]: float(row[5]) for row in rows if row[3] == name}
        places = [t + i * height for t, title in enumerate(titles) if title in values]
        bars = axes.barh(places, [values[t] for t in titles if t in values], height, label=name)
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    axes.set_yticks([t + 0.4 - height / 2 for t in range(len(titles))], titles, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(f"TFLOP/s, {rows[0][1]}, {rows[0][0]}")
    axes.legend(loc="lower right", fontsize=7)
    figure.savefig(path, dpi=150)
