#!/usr/bin/env python3
"""Device and host time of active-length attention beside its peers, on the GPU at hand.

    python tools/bench_active_attention.py --csv out.csv --plot out.png
    python tools/bench_active_attention.py --shapes 1x400,32x4096,1x2048x2048 --peers sdpa,fa3 --host
    python tools/bench_active_attention.py --read out.csv --plot out.png

Method. Cold L2: one CUDA graph calls the operator on n distinct caches in turn, n * active bytes at least 4 x the L2 cache (at
most --max-caches, so short lengths stay warmer; the column `cold` says which), each as often as it takes for --min-calls calls,
because starting the graph, 5 us on an H200, is timed too. Median over rounds x replays, all implementations interleaved within a
round; no programmatic launch overlap. `host` is the time of one eager call without a graph, measured while the GPU keeps up.

Peers (those that are installed): SDPA on the sliced cache with enable_gqa; SDPA over the full capacity with a mask and repeated
heads (`sdpa_full`, only on request: its time grows with the capacity); FlashAttention-3's flash_attn_with_kvcache (package
fa3-fwd); FlashInfer's single_decode_with_kv_cache (batch 1).
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
import time

import torch
from requirements_check import need_file, need_gpu, need_module

SHAPES = [(1, 10), (1, 64), (1, 234), (1, 400), (1, 1024), (1, 4096), (1, 32768), (8, 400), (8, 1024), (32, 4096), (64, 4096)]


class Case:
    """n caches [B, Hkv, C, D] of one shape, filled with random rows up to `length`."""

    def __init__(self, a, batch, length, q_len):
        self.batch, self.length, self.q_len, self.a = batch, length, q_len, a
        row = 2 * batch * a.kv_heads * a.dim * 2
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        self.active = row * length
        self.n = min(a.max_caches, max(2, -(-4 * l2 // self.active)))
        self.calls = self.n * -(-a.min_calls // self.n)
        self.cold = self.n * self.active >= 4 * l2
        self.capacity = max(length, a.capacity)
        dtype = torch.bfloat16 if a.dtype == "bf16" else torch.float16
        shape = (self.n, batch, a.kv_heads, self.capacity, a.dim)
        # Lists of views: indexing a tensor costs microseconds of host time.
        self.k, self.v = (list(torch.empty(shape, dtype=dtype, device="cuda").normal_()) for _ in range(2))
        self.q = list(torch.randn(self.n, batch, q_len, a.heads, a.dim, device="cuda").to(dtype).transpose(2, 3))
        self.lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")


def ours(case, device_length=False, **changes):
    """The operator; with changes, the decode kernel's variant with these fields."""
    import cute_kernels
    from cute_kernels.jit import current_target
    from cute_kernels.kernels.sm90 import decode

    kv_len = case.lengths if device_length else case.length
    if not changes:
        return lambda i: cute_kernels.active_attention(case.q[i], case.k[i], case.v[i], kv_len)[0]
    q, k, v = case.q[0], case.k[0], case.v[0]
    options = dict(causal=True, window_left=-1, softcap=0.0, attn_sink=None, k_new=None, v_new=None)
    variant = decode.choose(q, k, v, kv_len, *options.values())._replace(**changes)
    run = decode.prepare(
        target=current_target(q.device), variant=variant, q=q, k_cache=k, v_cache=v, kv_len=kv_len, sm_scale=case.a.dim**-0.5,
        **options,
    )  # fmt: skip

    def call(i):
        out = torch.empty(case.batch, case.q_len, case.a.heads, case.a.dim, dtype=q.dtype, device=q.device).transpose(1, 2)
        lse = torch.empty(case.batch, case.a.heads, case.q_len, device=q.device)
        run(case.q[i], case.k[i], case.v[i], kv_len, None, None, None, out, lse)
        return out

    return call


def sdpa(case):
    n = case.length
    causal = case.q_len > 1
    mask = None
    if causal and case.q_len != n:
        mask = torch.ones(case.q_len, n, dtype=torch.bool, device="cuda").tril(n - case.q_len)

    def call(i):
        return torch.nn.functional.scaled_dot_product_attention(
            case.q[i], case.k[i][:, :, :n], case.v[i][:, :, :n], attn_mask=mask, is_causal=causal and mask is None, enable_gqa=True
        )

    return call


def sdpa_full(case):
    mask = torch.arange(case.capacity, device="cuda")[None, None, None] < case.length
    group = case.a.heads // case.a.kv_heads

    def call(i):
        k, v = (x[i].repeat_interleave(group, 1) for x in (case.k, case.v))
        return torch.nn.functional.scaled_dot_product_attention(case.q[i], k, v, attn_mask=mask)

    return call


def fa3(case):
    from fa3_fwd_interface import flash_attn_with_kvcache

    def call(i):
        out = flash_attn_with_kvcache(
            case.q[i].transpose(1, 2), case.k[i].transpose(1, 2), case.v[i].transpose(1, 2), cache_seqlens=case.lengths, causal=True
        )
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


def flashinfer(case):
    if case.batch != 1 or case.q_len != 1:
        return None
    from flashinfer import single_decode_with_kv_cache

    n = case.length

    def call(i):
        out = single_decode_with_kv_cache(
            case.q[i][0, :, 0], case.k[i][0, :, :n], case.v[i][0, :, :n], kv_layout="HND", use_tensor_cores=True
        )
        return out[None, :, None]

    return call


def exact(case, i, rows):
    """The last `rows` query rows in float64."""
    n, s = case.length, rows
    group = case.a.heads // case.a.kv_heads
    q = case.q[i][:, :, -s:].double()
    k, v = (x[i][:, :, :n].double().repeat_interleave(group, 1) for x in (case.k, case.v))
    x = q @ k.transpose(2, 3) * case.a.dim**-0.5
    hidden = torch.arange(n, device="cuda")[None] > n - s + torch.arange(s, device="cuda")[:, None]
    return torch.softmax(x.masked_fill(hidden, float("-inf")), -1) @ v


PEERS = {
    "ours": ours,
    "ours_dev": lambda c: ours(c, True),
    "sdpa": sdpa,
    "sdpa_full": sdpa_full,
    "fa3": fa3,
    "flashinfer": flashinfer,
}


def build(case, names, a):
    """name -> call(i), for what is installed and applies; each checked against float64 on one cache."""
    calls = {}
    for name in names:
        try:
            call = PEERS[name](case)
        except ImportError as error:
            print(f"  {name}: not installed ({error})", file=sys.stderr)
            continue
        if call is not None:
            calls[name] = call
    if a.sweep:
        for text in a.sweep.split(";"):
            changes = {k: int(v) for k, v in (x.split("=") for x in text.split(","))}
            device_length = bool(changes.pop("device", 0))
            calls[f"ours[{text}]"] = ours(case, device_length, **changes)
    if case.batch * case.length <= 1 << 17:
        rows = min(case.q_len, max(1, (1 << 28) // (case.batch * a.heads * case.length)))
        want = exact(case, 0, rows)
        for name in list(calls):
            try:
                error = float((calls[name](0)[:, :, -rows:].double() - want).norm() / want.norm())
            except Exception as problem:  # a peer that cannot run here must not end the table
                if name.startswith("ours"):
                    raise
                print(f"  {name}: {type(problem).__name__}: {str(problem)[:200]}", file=sys.stderr)
                del calls[name]
                continue
            if not error < 0.02:
                print(f"  {name}: WRONG, relative error {error:.3g}", file=sys.stderr)
                if not name.startswith("ours"):
                    del calls[name]
    return calls


def capture(call, n, calls):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(min(3, n)):
            call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            call(i % n)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def device_times(calls, case, a):
    """name -> microseconds per call: median over rounds and replays, interleaved."""
    graphs = {name: capture(call, case.n, case.calls) for name, call in calls.items()}
    samples = {name: [] for name in calls}
    for _ in range(a.rounds):
        for name, graph in graphs.items():
            graph.replay()
            for _ in range(a.replays):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                samples[name].append(begin.elapsed_time(end) * 1e3 / case.calls)
    return {name: statistics.median(x) for name, x in samples.items()}


def host_time(call, n, batches=20, each=50):
    """Median microseconds of one eager call while the queue is short."""
    for i in range(20):
        call(i % n)
    out = []
    for _ in range(batches):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for i in range(each):
            call(i % n)
        out.append((time.perf_counter() - begin) / each * 1e6)
    return statistics.median(out)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shapes", help="BxL or BxLxQ (q_len), comma separated; default: the README's table")
    p.add_argument("--peers", default="ours,ours_dev,sdpa,fa3,flashinfer")
    p.add_argument("--heads", type=int, default=32)
    p.add_argument("--kv-heads", type=int, default=8)
    p.add_argument("--dim", type=int, default=128)
    p.add_argument("--dtype", choices=["bf16", "fp16"], default="bf16")
    p.add_argument("--capacity", type=int, default=0, help="allocate at least this many rows per cache")
    p.add_argument("--max-caches", type=int, default=512)
    p.add_argument("--min-calls", type=int, default=64, help="calls in a timed graph")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--replays", type=int, default=10)
    p.add_argument("--sweep", help="variants of ours: FIELD=N,FIELD=N;... (fields of decode.Variant, and device=1)")
    p.add_argument("--host", action="store_true", help="also measure the host time of one eager call")
    p.add_argument("--csv")
    p.add_argument("--plot")
    p.add_argument("--read", help="plot this CSV file and measure nothing (needs no GPU)")
    a = p.parse_args()
    if a.plot:
        need_module("matplotlib", "--plot", "pip install matplotlib")
    if a.read:
        if not a.plot:
            p.error("--read plots: give --plot FILE.png too")
        need_file(a.read)
        with open(a.read, newline="") as f:
            plot(list(csv.DictReader(f)), a.plot)
        return
    shapes = SHAPES
    if a.shapes:
        if not re.fullmatch(r"\d+x\d+(x\d+)?(,\d+x\d+(x\d+)?)*", a.shapes):
            p.error(f"--shapes takes BxL or BxLxQ, by commas; not {a.shapes!r}")
        shapes = [tuple(int(x) for x in s.split("x")) for s in a.shapes.split(",")]
    if unknown := [name for name in a.peers.split(",") if name not in PEERS]:
        p.error(f"--peers takes {', '.join(PEERS)}, by commas; not {unknown[0]!r}")
    need_gpu()
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, Hq {a.heads} Hkv {a.kv_heads} D {a.dim} {a.dtype}")
    rows = []
    for batch, length, *rest in shapes:
        q_len = rest[0] if rest else 1
        case = Case(a, batch, length, q_len)
        calls = build(case, a.peers.split(","), a)
        times = device_times(calls, case, a)
        floor = case.active / 4.28e6
        text = "  ".join(f"{name} {t:.2f}" for name, t in times.items())
        shape = f"B {batch} L {length} q {q_len} n {case.n}{'' if case.cold else ' (warm)'}"
        print(f"{shape}: bytes/4.28TB/s {floor:.2f} | {text}", flush=True)
        common = dict(batch=batch, length=length, q_len=q_len, n=case.n, cold=case.cold)
        for name, t in times.items():
            rows.append(dict(common, name=name, device_us=round(t, 3), host_us=""))
        if a.host:
            hosts = {name: host_time(call, case.n) for name, call in calls.items() if "[" not in name}
            print("    host: " + "  ".join(f"{name} {t:.1f}" for name, t in hosts.items()), flush=True)
            for row in rows[-len(times) :]:
                row["host_us"] = round(hosts[row["name"]], 2) if row["name"] in hosts else ""
        del case, calls
        torch.cuda.empty_cache()
    if a.csv:
        with open(a.csv, "w", newline="") as f:
            writer = csv.DictWriter(f, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
    if a.plot:
        plot(rows, a.plot)


def plot(rows, path):
    """Device times as bars, one group per shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys((r["batch"], r["length"], r["q_len"]) for r in rows))
    names = list(dict.fromkeys(r["name"] for r in rows))
    times = {(r["name"], r["batch"], r["length"], r["q_len"]): float(r["device_us"]) for r in rows}
    figure, axes = pyplot.subplots(figsize=(max(6, len(shapes)), 4))
    for i, name in enumerate(names):
        at = [j for j, shape in enumerate(shapes) if (name, *shape) in times]
        axes.bar([j + i * 0.8 / len(names) for j in at], [times[(name, *shapes[j])] for j in at], 0.8 / len(names), label=name)
    axes.set_yscale("log")
    axes.set_ylabel("device time, us")
    labels = [f"B {b} L {n}" + ("" if int(s) == 1 else " prefill" if s == n else f" q {s}") for b, n, s in shapes]
    axes.set_xticks([j + 0.4 for j in range(len(shapes))], labels, rotation=60, ha="right")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
