#!/usr/bin/env python3
"""Check and time the Hopper sparse prefill kernel beside FlashMLA, in one process on the same inputs. Needs an H100 or H200.

    python tools/bench_sparse_prefill.py --check                           small cases against a float64 reference
    python tools/bench_sparse_prefill.py --time --csv FILE --plot FILE.png interleaved rounds, medians, ratio to FlashMLA
    python tools/bench_sparse_prefill.py --all --sglang FILE --csv FILE --plot FILE.png    every figure of README in one run
    python tools/bench_sparse_prefill.py --grouped [--sglang FILE]         few heads per GPU, end to end with group_topk
    python tools/bench_sparse_prefill.py --host                            host time of one eager call
    python tools/bench_sparse_prefill.py --from FILE [--plot FILE.png]     table and plot of an earlier CSV file, with no GPU

FlashMLA is the PyPI package sgl-flash-mla (its SM90 kernel, use_legacy=True); without it only ours is timed. --sglang names
triton_sparse_mla_prefill.py out of the PyPI package sglang (sglang/kernels/ops/attention/dsa), which imports alone.
TFLOP/s counts 2 * heads * keys * (d_qk + 512) over the keys that the rows list (up to their lengths), masked or not.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, ".."), HERE]

import requirements_check  # noqa: E402
import sparse_grouped  # noqa: E402
import sparse_timing  # noqa: E402
from sparse_cases import Case, check_grid, counted_keys, differences, make, outputs, reference, run_ours  # noqa: E402, F401
from sparse_timing import Writer, flash_mla, plot, report, summary, timing_inputs  # noqa: E402


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
        uneven = torch.randint(0, 2049, (4096,), device="cuda", dtype=torch.int32, generator=g)
        for what, lengths in (("uniform in [0, 2048]", uneven), ("all 2048", torch.full_like(uneven, 2048))):
            args["topk_length"] = lengths
            title = f"s_q 4096 h {h_q} topk 2048 s_kv 32768 d 576, lengths {what}"
            time_case(writer, peer, args, title, 2 * h_q * int(lengths.sum()) * 1088, extra)
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
            functions["no mask: FlashMLA"] = lambda a=lengths: peer(a)
        keys = int(args["topk_length"][0])
        rows = args["q"].shape[0]
        flops = 2 * rows * heads * group * keys * 1088
        times = report(writer, f"{rows} rows of {group} tokens x {heads} heads, kernel alone, union {keys}", functions, flops)
        print(f"    the mask costs {100 * (times['ours, masked'] / times['ours, no mask'] - 1):.1f} %")
        del args, results, plain, lengths, functions
        torch.cuda.empty_cache()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--check", action="store_true")
    p.add_argument("--part", default="0/1", help="i/n: only every n-th case of --check, from the i-th")
    p.add_argument("--time", action="store_true")
    p.add_argument("--grouped", action="store_true")
    p.add_argument("--sglang", metavar="FILE", help="SGLang's triton_sparse_mla_prefill.py, for --grouped")
    p.add_argument("--host", action="store_true")
    p.add_argument("--all", action="store_true", help="--time --grouped --host")
    p.add_argument("--rounds", type=int, default=sparse_timing.ROUNDS, help="interleaved rounds, whose median counts")
    p.add_argument("--csv", default=os.devnull)
    p.add_argument("--plot", help="PNG file of the timings")
    p.add_argument("--from", dest="source", help="read this CSV file instead of timing")
    a = p.parse_args()
    measured = [name for name in ("check", "time", "grouped", "host", "all") if getattr(a, name)]
    if not measured and not a.source:
        p.error("nothing to do: give --check, --time, --grouped, --host, --all or --from FILE")
    if measured and a.source:
        p.error(f"--from measures nothing: leave out --{measured[0]}")
    if a.plot:
        requirements_check.need_module("matplotlib", "--plot", "pip install matplotlib")
    for path in (a.source, a.sglang):
        if path is not None:
            requirements_check.need_file(path)
    failed = 0
    if a.source:
        rows = sparse_timing.read(a.source)
    else:
        requirements_check.need_gpu(9, "a Hopper GPU (H100, H200)")
        sparse_timing.ROUNDS = a.rounds
        failed = check(*map(int, a.part.split("/"))) if a.check else 0
        with open(a.csv, "w", newline="") as f:
            writer = Writer(f)
            if a.time or a.all:
                timing(writer)
            if a.grouped or a.all:
                sparse_grouped.timing(writer, a.sglang)
            if a.host or a.all:
                sparse_grouped.host_times()
        rows = writer.rows
    if rows:
        print(summary(rows))
    if a.plot and rows:
        plot(rows, a.plot)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
