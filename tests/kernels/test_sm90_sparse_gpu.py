"""The Hopper sparse prefill kernel on a GPU at length: FlashMLA's grid, FlashMLA itself, fuzz, 2**31 elements, graphs, streams,
processes, compute-sanitizer."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import cute_kernels as ck

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
import sparse_cases as cases  # noqa: E402
from sparse_cases import Case  # noqa: E402

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU (H100, H200)")]

# FlashMLA's own tolerances: absolute or relative error of an element, cosine difference of the whole.
TOLERANCES = ((8e-4, 3.01 / 128, 7e-6), (1e-6, 2.01 / 65536, 1e-7), (1e-6, 2.01 / 65536, 1e-7))


def problems(case: Case, rows: int | None = None, repeat: bool = False) -> list[str]:
    """What differs from float64 (in `rows` rows spread over the case), or between two launches."""
    args = cases.make(case)
    got = cases.run_ours(args)
    part, some = args, got
    if rows is not None and rows < case.s_q:
        pick = torch.linspace(0, case.s_q - 1, rows, device="cuda").long()
        part = {k: v[pick] if k in ("q", "indices", "topk_length", "head_group_mask") else v for k, v in args.items()}
        some = [t[pick] for t in got]
    want = cases.reference(part)
    # A statistic near zero is a sum of products that grow with q, and so does the error of a sum that the tensor cores truncate to
    # float32 every 16 columns: alone it passes FlashMLA's 1e-6 at gain 20 (2.5e-6 in a model of it, 5.4e-6 on an H200).
    out, *stats = TOLERANCES
    tolerances = out, *((absolute * max(1.0, case.gain), *rest) for absolute, *rest in stats)
    found = [text for g, w, t in zip(some, want, tolerances) if (text := cases.differences(g, w, *t))]
    if repeat and not all(torch.equal(a, b) for a, b in zip(got, cases.run_ours(args))):
        found.append("a second launch gives other bits")
    return [f"{case.name()}: {text}" for text in found]


SHAPES = ((128, 128), (256, 256), (512, 512), (592, 128), (1840, 256), (1592, 384), (1521, 512), (95, 128), (153, 256), (114, 384))


@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize("h_q", [128, 64])
def test_flashmla_grid(d_qk, h_q):
    """The shapes of its test file: plain, then sinks and lengths, then lists without a valid key and lists longer than s_kv."""
    common = dict(d_qk=d_qk, strided=True, unique=True)
    grid = [Case(s_q, h_q, s_kv, topk, **common) for s_kv, topk in SHAPES for s_q in (1, 62, 213)]
    for s_kv, topk in SHAPES[3:]:
        for s_q in (62, 213):
            for sink in (False, True):
                for length in ("", "random"):
                    grid.append(Case(s_q, h_q, s_kv, topk, sink=sink, length=length, seed=1, **common))
    corner = dict(sink=True, length="random", invalid_rows=0.023, **common)
    for s_q, s_kv, topk in ((1, 128, 128), (1, 256, 256), (1234, 4321, 4096), (4096, 2048, 2048)):
        grid.append(Case(s_q, h_q, s_kv, topk, **corner))
    for s_kv, topk in ((32, 2048), (64, 8192)):
        for s_q in (1, 1024):
            grid.append(Case(s_q, h_q, s_kv, topk, **common))
    found = [text for case in grid for text in problems(case, rows=64)]
    assert not found, (len(grid), len(found), found[:5])


@pytest.mark.parametrize("h_q,topk,d_qk", [(128, 2048, 576), (64, 512, 512), (128, 1024, 512)])
@pytest.mark.parametrize("s_kv", [8192, 49152])
def test_flashmla_performance_shapes(h_q, topk, d_qk, s_kv):
    g = torch.Generator(device="cuda").manual_seed(0)
    args = cases.make(Case(4096, h_q, 16, 16, d_qk, sink=True))  # q and sink; the lists of a case would need 4096 x s_kv floats
    args["kv"] = (torch.randn(s_kv, 1, d_qk, device="cuda", generator=g) / 10).bfloat16()
    args["indices"] = torch.randint(0, s_kv, (4096, 1, topk), device="cuda", generator=g, dtype=torch.int32)
    got = cases.run_ours(args)
    rows = slice(0, 4096, 97)
    want = cases.reference(args | {"q": args["q"][rows], "indices": args["indices"][rows]})
    assert not any(cases.differences(a[rows], b, *t) for a, b, t in zip(got, want, TOLERANCES))


@pytest.mark.parametrize("h_q", [64, 128])
@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize("options", [{}, dict(sink=True, length="random")], ids=["plain", "sink, length"])
def test_agrees_with_flashmla(h_q, d_qk, options):
    flash = pytest.importorskip("flash_mla", reason="the PyPI package sgl-flash-mla is not installed")
    args = cases.make(Case(300, h_q, 1840, 256, d_qk, unique=True, **options))
    theirs = flash.flash_mla_sparse_fwd(
        args["q"], args["kv"], args["indices"], args["sm_scale"], attn_sink=args.get("attn_sink"),
        topk_length=args.get("topk_length", torch.empty(0)).clamp(0, 256) if "topk_length" in args else None, use_legacy=True,
    )[:3]  # fmt: skip
    got = cases.run_ours(args)
    # two kernels, each within its tolerance: statistics in float32 differ by a few rounding errors
    tolerances = ((8e-4, 3.01 / 128, 7e-6), (1e-5, 1e-5, 1e-7), (1e-5, 1e-5, 1e-7))
    texts = [cases.differences(a, b.double(), *t) for a, b, t in zip(got, theirs, tolerances)]
    assert not any(texts), texts


@pytest.mark.parametrize("part", range(4))
def test_fuzz(part):
    """200 cases over everything that the contract allows."""
    found = []
    for seed in range(50 * part, 50 * part + 50):
        r = random.Random(seed)
        group = r.choice([0, 0, 1, 2, 4, 8, 16, 32, 64, 128])
        heads = r.randint(1, 128) if not group else group * r.randint(1, min(8, 128 // group))
        topk = 128 * r.randint(1, 9) if group else r.randint(1, 1100)
        case = Case(
            r.randint(1, 40), heads, r.choice([1, 7, 64, 300, 2000]), topk, r.choice([512, 576]), seed=seed, group=group,
            length=r.choice(["", "random", "random", "zero"]), sink=r.random() < 0.5, density=r.choice([0.02, 0.5, 1.0]),
            bad=r.choice([0.0, 0.2, 0.9]), empty_rows=r.random() < 0.3, empty_blocks=r.random() < 0.3, nan=r.random() < 0.4,
            scale=r.choice([0.5, 0.05, 0.0, -0.5]), gain=r.choice([1.0, 1.0, 20.0]), strided=r.random() < 0.5,
            unique=r.random() < 0.5,
        )  # fmt: skip
        found += [f"seed {seed}: {text}" for text in problems(case, repeat=seed % 5 == 0)]
    assert not found, (len(found), found[:5])


def test_operator_offsets_past_2_31_elements():
    """Through the operator, with a real allocation: KV rows and output rows that lie past 2**31 elements."""
    s_kv = 3_800_000
    kv = torch.zeros((s_kv, 1, 576), dtype=torch.bfloat16, device="cuda")
    kv[-2000:] = (torch.randn((2000, 1, 576), device="cuda") / 10).bfloat16()
    args = cases.make(Case(70_000, 64, 2000, 64, unique=True))
    args["indices"] += (s_kv - 2000) * (args["indices"] >= 0)
    assert 70_000 * 64 * 512 > 2**31 and s_kv * 576 > 2**31
    got = ck.sparse_prefill(args["q"], kv, args["indices"], args["sm_scale"])
    grouped = ck.grouped_sparse_prefill(args["q"][:2000, :16], kv, args["indices"][:2000], args["sm_scale"])
    for rows in (slice(0, 3), slice(69_990, 70_000)):
        want = cases.reference(args | {"kv": kv, "q": args["q"][rows], "indices": args["indices"][rows]})
        assert not any(cases.differences(a[rows], b, *t) for a, b, t in zip(got, want, TOLERANCES))
    want = cases.reference(args | {"kv": kv, "q": args["q"][1995:2000, :16], "indices": args["indices"][1995:2000]})
    assert not any(cases.differences(a[1995:], b, *t) for a, b, t in zip(grouped, want, TOLERANCES))


def grouped_args(tokens=203, heads=16, s_kv=3000, topk=256, seed=0):
    g = torch.Generator(device="cuda").manual_seed(seed)
    q = (torch.randn(tokens, heads, 576, device="cuda", generator=g) / 10).bfloat16()
    kv = (torch.randn(s_kv, 1, 576, device="cuda", generator=g) / 10).bfloat16()
    indices = torch.rand(tokens, s_kv, device="cuda", generator=g).argsort(1)[:, None, :topk].int()
    return q, kv, indices.contiguous(), 0.5


@pytest.mark.parametrize("group_size", [None, 1, 3, 4, 8])
@pytest.mark.parametrize("heads", [5, 16])
def test_grouped_prefill(group_size, heads):
    q, kv, indices, scale = grouped_args(heads=heads)
    bounds = torch.tensor([2, 90, 90, 197], dtype=torch.int32, device="cuda")
    for cu in (None, bounds):
        got = ck.grouped_sparse_prefill(q, kv, indices, scale, group_size=group_size, cu_seqlens_q=cu)
        want = list(cases.reference(dict(q=q, kv=kv, indices=indices, sm_scale=scale)))
        if cu is not None:
            outside = torch.ones(q.shape[0], dtype=torch.bool, device="cuda")
            outside[2:197] = False
            for t, value in zip(want, (0.0, -torch.inf, torch.inf)):
                t[outside] = value
        assert not any(cases.differences(a, b, *t) for a, b, t in zip(got, want, TOLERANCES))
    assert ck.last_backend() == "sm_90a:sparse_prefill"


def test_grouped_prefill_in_a_graph_with_new_indices():
    q, kv, indices, scale = grouped_args(tokens=64)
    ck.grouped_sparse_prefill(q, kv, indices, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ck.grouped_sparse_prefill(q, kv, indices, scale)
    for seed in (5, 6):
        indices.copy_(grouped_args(tokens=64, seed=seed)[2])
        graph.replay()
        want = ck.grouped_sparse_prefill(q, kv, indices, scale)
        assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_two_streams():
    """Both kernels on two streams at once, many times: nothing is shared but code."""
    inputs = [grouped_args(seed=seed) for seed in (1, 2)]
    want = [ck.grouped_sparse_prefill(*args) for args in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    got = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[i].append(ck.grouped_sparse_prefill(*inputs[i]))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for i in range(2) for result in got[i] for a, b in zip(result, want[i]))


def test_two_processes_and_the_disk_cache(tmp_path):
    """Two processes at once compile once between them; a later one takes under a second to have its kernels."""
    code = textwrap.dedent("""
        import sys, time, torch, cute_kernels as ck
        sys.path[:0] = [%r, %r]
        import cutlass.cute  # the DSL's own import, 1 to 3 s, is not compile time
        from test_sm90_sparse_gpu import grouped_args
        args = grouped_args()
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = ck.grouped_sparse_prefill(*args)[0]
        torch.cuda.synchronize()
        print(f"{time.perf_counter() - start:.3f} {out.double().sum().item()!r}")
    """) % (str(TOOLS), str(Path(__file__).parent))
    env = os.environ | {"CUTE_KERNELS_CACHE_DIR": str(tmp_path)}
    start = lambda: subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)  # noqa: E731
    first = [start(), start()]
    lines = [p.communicate(timeout=300)[0].split() for p in first]
    kept = sorted(tmp_path.rglob("*.o"))
    later = start().communicate(timeout=300)[0].split()
    assert len({line[1] for line in [*lines, later]}) == 1, "one result"
    assert sorted(tmp_path.rglob("*.o")) == kept and len(kept) == 2, "two kernels, compiled once"
    print("seconds to the first result:", lines, later)
    assert float(later[0]) < 1.0


@pytest.mark.full
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer on the PATH")
def test_compute_sanitizer():
    done = subprocess.run([sys.executable, str(TOOLS / "sanitize.py")], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
