#!/usr/bin/env python3
"""Check and time the Hopper sparse prefill kernel beside FlashMLA, in one process on the same inputs. Needs an H100 or H200.

    python tools/bench_sparse_prefill.py --check                           small cases against a float64 reference
    python tools/bench_sparse_prefill.py --time --csv FILE --plot FILE.png interleaved rounds, medians, ratio to FlashMLA
    python tools/bench_sparse_prefill.py --from FILE --plot FILE.png       the plot of an earlier CSV file, with no GPU

FlashMLA is the PyPI package sgl-flash-mla (its SM90 kernel, use_legacy=True); without it only ours is timed.
TFLOP/s counts 2 * heads * keys * (d_qk + 512) over the keys that the rows list (up to their lengths), masked or not.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass, field

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

from cute_kernels.kernels.sm90 import sparse_prefill as ours  # noqa: E402

D_V = 512


# ---------------------------------------------------------------------------------------------------- inputs, reference
@dataclass
class Case:
    s_q: int
    h_q: int
    s_kv: int
    topk: int
    d_qk: int = 576
    length: str = ""  # "", "random", "zero"
    sink: bool = False
    group: int = 0  # head_group_size, 0 for no mask
    density: float = 0.5  # of mask bits
    bad: float = 0.0  # share of indices outside [0, s_kv)
    empty_rows: bool = False  # some rows list nothing
    empty_blocks: bool = False  # some blocks of 64 keys list nothing
    nan: bool = False  # rows of kv that no head of any query row counts are NaN
    scale: float = 0.5
    gain: float = 1.0  # factor on q: large logits move the running maximum
    strided: bool = False
    seed: int = 0
    extra: dict = field(default_factory=dict)

    def name(self) -> str:
        flags = [f for f in ("length", "bad", "nan") if getattr(self, f)]
        flags += [f for f in ("sink", "empty_rows", "empty_blocks", "strided") if getattr(self, f)]
        flags += [f"group{self.group}"] if self.group else []
        flags += [f"scale{self.scale}"] if self.scale != 0.5 else []
        flags += [f"gain{self.gain}"] if self.gain != 1.0 else []
        return f"s{self.s_q} h{self.h_q} d{self.d_qk} topk{self.topk} kv{self.s_kv} {' '.join(flags)}"


GARBAGE = (-(2**31), -123456, -1, 0, 114514, 1919810, 2147480000, 2**31 - 1)  # 0 stands for s_kv


def make(case: Case, device: str = "cuda") -> dict:
    g = torch.Generator(device=device).manual_seed(case.seed + 17 * case.h_q + case.topk)

    def rand(*shape):
        return torch.rand(shape, device=device, generator=g)

    def values(s, h):
        pad = (1, 128) if case.strided else (0, 0)
        x = torch.randn((s, h + pad[0], case.d_qk + pad[1]), device=device, generator=g) / 10
        x = (x + (rand(*x.shape) - 0.5) / 10).clamp(-10, 10)
        return x.to(torch.bfloat16)[:, :h, : case.d_qk]

    q = values(case.s_q, case.h_q)
    q = (q.float() * case.gain).to(torch.bfloat16) if case.gain != 1.0 else q
    kv = values(case.s_kv, 1)
    # distinct keys in random order where the list fits, else repeated
    idx = torch.argsort(rand(case.s_q, max(case.s_kv, case.topk)), dim=1)[:, : case.topk] % case.s_kv
    idx = idx.to(torch.int32)
    garbage = torch.tensor([x if x else case.s_kv for x in GARBAGE], device=device, dtype=torch.int32)
    if case.bad:
        wrong = garbage[torch.randint(0, 8, idx.shape, device=device, generator=g)]
        idx = torch.where(rand(*idx.shape) < case.bad, wrong, idx)
    if case.empty_rows:
        rows = torch.arange(case.s_q, device=device) % 3 == 1
        idx[rows] = garbage[torch.arange(case.s_q, device=device)[rows] % 8][:, None]
    if case.empty_blocks:
        for b in range(0, case.topk, 64):
            rows = rand(case.s_q) < 0.5
            idx[rows, b : b + 64] = -1
    args = dict(q=q, kv=kv, indices=idx[:, None, :], sm_scale=case.scale)
    if case.length == "random":
        args["topk_length"] = torch.randint(
            -1, case.topk + 2, (case.s_q,), device=device, generator=g, dtype=torch.int32
        )
    elif case.length == "zero":
        args["topk_length"] = torch.zeros(case.s_q, device=device, dtype=torch.int32)
    if case.sink:
        sink = torch.randn(case.h_q, device=device, generator=g)
        sink[rand(case.h_q) < 0.3] = float("inf")
        sink[rand(case.h_q) < 0.3] = -float("inf")
        args["attn_sink"] = sink
    if case.group:
        bits = (rand(case.s_q, case.topk // 128, 128, 8) < case.density).to(torch.uint8)
        if case.empty_blocks:
            bits *= (rand(case.s_q, case.topk // 128, 128, 1) < 0.5).to(torch.uint8)
        weights = torch.tensor([1 << i for i in range(8)], device=device, dtype=torch.uint8)
        args["head_group_mask"] = (bits * weights).sum(-1, dtype=torch.uint8)
        args["head_group_size"] = case.group
    if case.nan:
        counted = counted_keys(args).any(1)
        used = torch.zeros(case.s_kv, dtype=torch.bool, device=device)
        used[idx[counted].long()] = True
        kv[~used] = float("nan")
    return args


def counted_keys(args: dict) -> torch.Tensor:
    """bool [s_q, h_q, topk]."""
    q, idx = args["q"], args["indices"][:, 0]
    s_q, h_q, _ = q.shape
    topk = idx.shape[1]
    keep = (idx >= 0) & (idx < args["kv"].shape[0])
    if args.get("topk_length") is not None:
        keep &= torch.arange(topk, device=q.device) < args["topk_length"][:, None]
    keep = keep[:, None, :].expand(s_q, h_q, topk)
    mask = args.get("head_group_mask")
    if mask is not None:
        shifts = torch.arange(8, device=q.device, dtype=torch.uint8)
        bits = ((mask[..., None] >> shifts) & 1).bool().view(s_q, topk // 128, 8, 128)  # row, block, group, key
        bits = bits.permute(0, 2, 1, 3).reshape(s_q, 8, topk)
        group = torch.arange(h_q, device=q.device) // args["head_group_size"]
        keep = keep & bits[:, group]
    return keep


def reference(args: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float64, one query row at a time."""
    q, kv, idx = args["q"], args["kv"][:, 0], args["indices"][:, 0]
    keep = counted_keys(args)
    sink = args.get("attn_sink")
    outs, tops, lses = [], [], []
    for s in range(q.shape[0]):
        any_head = keep[s].any(0)
        keys = torch.zeros((idx.shape[1], q.shape[2]), dtype=torch.float64, device=q.device)
        keys[any_head] = kv[idx[s][any_head].long()].double()
        x = (q[s].double() @ keys.T) * args["sm_scale"]
        x = torch.where(keep[s], x, -math.inf)
        top = x.amax(-1) if x.shape[1] else torch.full((q.shape[1],), -math.inf, dtype=torch.float64, device=q.device)
        lse = torch.logsumexp(x, -1)
        total = lse if sink is None else torch.logaddexp(lse, sink.double())
        weights = torch.exp(x - torch.where(torch.isinf(lse), 0.0, total)[:, None])
        weights = torch.where(torch.isinf(lse)[:, None], 0.0, weights)
        outs.append(weights @ keys[:, :D_V])
        tops.append(top)
        lses.append(torch.where(torch.isinf(lse), math.inf, lse))
    return torch.stack(outs), torch.stack(tops), torch.stack(lses)


def differences(got: torch.Tensor, want: torch.Tensor, abs_tol: float, rel_tol: float, cos_tol: float) -> str:
    """FlashMLA's criterion: infinities at the same places; |d| < abs or |d| < rel * |want|; cosine difference. '' if it holds."""
    got = got.double()
    if not torch.equal(torch.isinf(got), torch.isinf(want)) or not torch.equal(
        got[torch.isinf(got)], want[torch.isinf(want)]
    ):
        return "infinities differ"
    if torch.isnan(got).any():
        return f"{int(torch.isnan(got).sum())} NaN"
    finite = ~torch.isinf(want)
    a, b = got[finite], want[finite]
    bad = ~(((a - b).abs() < abs_tol) | ((a - b).abs() < rel_tol * b.abs()))
    if bad.any():
        return f"{int(bad.sum())} of {bad.numel()} beyond tolerance, worst {float((a - b).abs().max()):.3e}"
    norm = float((a * a + b * b).sum())
    cos = 1 - 2 * float((a * b).sum()) / norm if norm else 0.0
    return f"cosine difference {cos:.2e}" if cos > cos_tol else ""


def outputs(args: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = args["q"]
    out = torch.full((q.shape[0], q.shape[1], D_V), float("nan"), dtype=torch.bfloat16, device=q.device)
    stats = [torch.full(q.shape[:2], float("nan"), device=q.device) for _ in range(2)]
    return out, *stats


def run_ours(args: dict, results=None):
    results = results or outputs(args)
    ours.launch(**args, out=results[0], max_logits=results[1], lse=results[2])
    return results


def check_grid(full: bool = False) -> list[Case]:
    cases = []
    for d in (576, 512):
        for h, topk in (
            (64, 128),
            (64, 512),
            (128, 512),
            (16, 200),
            (128, 64),
            (1, 100),
            (65, 192),
            (64, 2048),
            (128, 63),
            (40, 1),
        ):
            cases.append(Case(5, h, 700, topk, d))
        cases += [
            Case(7, 64, 300, 512, d, length="random", sink=True, bad=0.2),
            Case(7, 128, 2000, 640, d, length="random", sink=True, bad=0.2, nan=True),
            Case(3, 64, 100, 256, d, length="zero", sink=True),
            Case(9, 128, 300, 320, d, bad=0.1, empty_rows=True, sink=True),
            Case(9, 64, 300, 1024, d, bad=0.1, empty_blocks=True, length="random"),
            Case(6, 64, 2000, 2048, d, gain=30.0, sink=True),
            Case(6, 64, 2000, 2048, d, gain=30.0, scale=-0.5),
            Case(6, 64, 2000, 1024, d, scale=0.0, bad=0.3, sink=True),
            Case(4, 128, 1000, 512, d, strided=True),
            Case(300, 64, 1000, 256, d, length="random"),
            Case(200, 128, 1000, 300, d, bad=0.5),
        ]
        for h, size in (
            (128, 16),
            (64, 16),
            (64, 8),
            (128, 32),
            (128, 64),
            (128, 128),
            (64, 64),
            (32, 4),
            (16, 2),
            (8, 1),
            (3, 1),
        ):
            cases.append(Case(5, h, 2000, 640, d, group=size, length="random", sink=True, nan=True, gain=4.0))
        cases.append(Case(150, 64, 2000, 1024, d, group=16, empty_blocks=True, density=0.3, nan=True, bad=0.2))
    return cases


def check(part: int = 0, parts: int = 1) -> int:
    """Run every parts-th case, from `part` on; returns the number of failures."""
    failed = 0
    cases = check_grid()[part::parts]
    for case in cases:
        args = make(case)
        got = run_ours(args)
        torch.cuda.synchronize()
        want = reference(args)
        problems = [
            f"{label}: {text}"
            for label, g, w, tol in (
                ("out", got[0], want[0], (8e-4, 3.01 / 128, 7e-6)),
                ("max_logits", got[1], want[1], (1e-6, 2.01 / 65536, 1e-7)),
                ("lse", got[2], want[2], (1e-6, 2.01 / 65536, 1e-7)),
            )
            if (text := differences(g, w, *tol))
        ]
        again = run_ours(args)
        if not all(torch.equal(a, b) for a, b in zip(got, again, strict=True)):
            problems.append("a second launch gives other bits")
        failed += bool(problems)
        if problems:
            print(f"FAIL {case.name()}: {'; '.join(problems)}", flush=True)
    print(f"check: {len(cases)} cases, {failed} failed", flush=True)
    return failed


# ---------------------------------------------------------------------------------------------------- timing
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


def grouped_inputs(tokens: int, heads: int, group: int, topk: int, s_kv: int, d_qk: int) -> dict:
    """`group` neighbouring tokens as one row over the union of their lists; each token swaps 2.45 % of its neighbour's keys."""
    g = torch.Generator(device="cuda").manual_seed(1)
    swapped = round(topk * 0.0245)
    union = topk + (group - 1) * swapped
    rows = tokens // group
    padded = (union + 127) // 128 * 128
    args = timing_inputs(rows, heads * group, padded, s_kv, d_qk)
    order = args["indices"][:, 0, :union].sort(dim=1).values
    args["indices"][:, 0, :union] = order
    args["indices"][:, 0, union:] = -1
    # token t holds all but union - topk of the union's keys
    keep = torch.zeros((rows, 8, padded), dtype=torch.bool, device="cuda")
    for t in range(group):
        chosen = torch.rand((rows, union), device="cuda", generator=g).argsort(1)[:, :topk]
        keep[:, t].scatter_(1, chosen, True)
    weights = torch.tensor([1 << i for i in range(8)], device="cuda", dtype=torch.uint8)
    packed = (keep.view(rows, 8, padded // 128, 16, 8).to(torch.uint8) * weights).sum(-1, dtype=torch.uint8)
    args["head_group_mask"] = packed.permute(0, 2, 1, 3).reshape(rows, padded // 128, 128).contiguous()
    args["head_group_size"] = heads
    args["topk_length"] = torch.full((rows,), union, dtype=torch.int32, device="cuda")
    return args


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


SHAPES = (
    (4096, 128, 2048, 32768, 576),
    (4096, 128, 2048, 8192, 576),
    (4096, 64, 2048, 32768, 576),
    (4096, 64, 2048, 32768, 512),
    (21000, 64, 2048, 21000, 576),
    (8192, 64, 256, 32768, 576),
    (8192, 64, 512, 32768, 576),
)


def time_case(writer, peer, args: dict, title: str, flops: float, extra: dict | None) -> None:
    """Time ours, `extra` and FlashMLA on one input; before that compare ours with FlashMLA's results."""
    results = outputs(args)
    functions = {"ours": lambda: run_ours(args, results)}
    for name, f in (extra or {}).items():
        functions[name] = lambda f=f: f(args, results)
    if peer:
        functions["FlashMLA"] = lambda: peer(args)
        theirs = peer(args)
        run_ours(args, results)
        tolerances = ((8e-4, 3.01 / 128, 7e-6), (1e-5, 1e-5, 1e-7), (1e-5, 1e-5, 1e-7))
        texts = [differences(a, b.double(), *t) for a, b, t in zip(results, theirs[:3], tolerances)]
        print("agreement with FlashMLA:", *(text or "yes" for text in texts))
    report(writer, title, functions, flops)


def timing(writer, extra: dict | None = None) -> None:
    """extra: name -> function(args, results), further variants to interleave."""
    peer = flash_mla()
    for s_q, h_q, topk, s_kv, d in SHAPES:
        args = timing_inputs(s_q, h_q, topk, s_kv, d)
        title = f"s_q {s_q} h {h_q} topk {topk} s_kv {s_kv} d {d}"
        time_case(writer, peer, args, title, 2 * s_q * h_q * topk * (d + 512), extra)
    for h_q in (64, 128):
        args = timing_inputs(4096, h_q, 2048, 32768, 576)
        g = torch.Generator(device="cuda").manual_seed(3)
        args["topk_length"] = torch.randint(0, 2049, (4096,), device="cuda", dtype=torch.int32, generator=g)
        title = f"s_q 4096 h {h_q} topk 2048 s_kv 32768 d 576, lengths uniform in [0, 2048]"
        time_case(writer, peer, args, title, 2 * h_q * int(args["topk_length"].sum()) * 1088, extra)
    for heads, group in ((16, 4), (8, 8), (16, 8)):
        args = grouped_inputs(21000, heads, group, 2048, 21000, 576)
        results = outputs(args)
        # without a mask; ours skips the padding's empty blocks by itself, FlashMLA is given the length
        plain = {k: v for k, v in args.items() if k in ("q", "kv", "indices", "sm_scale")}
        lengths = plain | {"topk_length": args["topk_length"]}
        functions = {
            "ours, masked": lambda a=args, r=results: run_ours(a, r),
            "ours, no mask": lambda a=plain, r=results: run_ours(a, r),
        }
        for name, f in (extra or {}).items():
            functions[name] = lambda a=args, r=results, f=f: f(a, r)
        if peer and heads * group in (64, 128):
            functions["FlashMLA"] = lambda a=lengths: peer(a)
        keys = int(args["topk_length"][0])
        flops = 2 * args["q"].shape[0] * heads * group * keys * 1088
        report(writer, f"21000 tokens x {heads} heads in groups of {group}: union {keys}", functions, flops)
        del args, results, plain, lengths, functions
        torch.cuda.empty_cache()


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


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--check", action="store_true")
    p.add_argument("--part", default="0/1", help="i/n: only every n-th case of --check, from the i-th")
    p.add_argument("--time", action="store_true")
    p.add_argument("--csv", default=os.devnull)
    p.add_argument("--plot", help="PNG file of the timings")
    p.add_argument("--from", dest="source", help="plot this CSV file instead of timing")
    a = p.parse_args()
    failed = check(*map(int, a.part.split("/"))) if a.check else 0
    rows: list[list[str]] = []
    if a.time:
        with open(a.csv, "w", newline="") as f:
            timing(Writer(csv.writer(f), rows))
    if a.source:
        with open(a.source, newline="") as f:
            rows = list(csv.reader(f))
    if a.plot and rows:
        plot(rows, a.plot)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
