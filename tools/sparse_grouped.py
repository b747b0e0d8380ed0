"""Grouped prefill end to end (few heads per GPU, group_topk included) beside its peers, group_topk alone, and host time per call.

Called by bench_sparse_prefill.py. Effective TFLOP/s count 2 * tokens * heads * topk * (576 + 512): the work that the model asks
for, whatever a kernel adds to it by padding heads or masking keys.
"""

from __future__ import annotations

import statistics
import time

import torch
from sparse_cases import differences, reference
from sparse_timing import flash_mla, lists, neighbouring_lists, report, sglang

import cute_kernels as ck

TOKENS, TOPK, D_QK, SCALE = 21000, 2048, 576, 0.5
SWAPPED = round(TOPK * 0.0245)  # keys a token does not share with its neighbour, as published for real prompts
LISTS = ("neighbouring", "random")
# heads -> group sizes that are timed: all that fit
GROUPS = {64: (1, 2), 32: (1, 2, 4), 16: (1, 2, 4, 8), 8: (4, 8), 4: (8,)}
DEFAULT = {heads: min(8, max(1, 64 // heads)) for heads in GROUPS}  # what group_size None takes on Hopper


def index_lists(kind: str, s_kv: int) -> torch.Tensor:
    if kind == "neighbouring":
        return neighbouring_lists(TOKENS, TOPK, s_kv, SWAPPED)
    return lists(TOKENS, s_kv, TOPK, torch.Generator(device="cuda").manual_seed(2))[:, None]


def inputs(heads: int, kind: str, s_kv: int) -> dict:
    g = torch.Generator(device="cuda").manual_seed(1)
    q = (torch.randn((TOKENS, heads, D_QK), device="cuda", generator=g) / 10).bfloat16()  # FlashMLA's test distribution
    kv = (torch.randn((s_kv, 1, D_QK), device="cuda", generator=g) / 10).bfloat16()
    return dict(q=q, kv=kv, indices=index_lists(kind, s_kv), sm_scale=SCALE)


def wrong(results: tuple, args: dict, rows: torch.Tensor) -> str:
    """'' if these rows agree with float64 within FlashMLA's tolerances."""
    part = args | {"q": args["q"][rows], "indices": args["indices"][rows]}
    tolerances = ((8e-4, 3.01 / 128, 7e-6), (1e-6, 2.01 / 65536, 1e-7), (1e-6, 2.01 / 65536, 1e-7))
    return "; ".join(t for r, w, tol in zip(results, reference(part), tolerances) if (t := differences(r[rows], w, *tol)))


def group_topk_times(writer) -> None:
    for s_kv in (TOKENS, 131072, 1 << 20):
        for kind in LISTS:
            indices = index_lists(kind, s_kv)
            functions = {
                "ours, padding unwritten, by 4": lambda i=indices, n=s_kv: torch.ops.cute_kernels.group_topk.unpadded(i, n, 4),
                "ours, padding unwritten, by 8": lambda i=indices, n=s_kv: torch.ops.cute_kernels.group_topk.unpadded(i, n, 8),
                "ours, padded, by 8": lambda i=indices, n=s_kv: ck.group_topk(i, n, 8),
            }
            union = ck.group_topk(indices, s_kv, 8)[1].float().mean()
            report(writer, f"group_topk {TOKENS} x {TOPK}, s_kv {s_kv}, {kind} lists (union of 8: {union:.0f})", functions)


def end_to_end(writer, sglang_file: str | None, heads: int, kind: str) -> None:
    peer, triton = flash_mla(), sglang(sglang_file)
    args = inputs(heads, kind, TOKENS)
    functions = {
        f"ours, groups of {n}": lambda n=n: ck.grouped_sparse_prefill(**args, group_size=n if n != DEFAULT[heads] else None)
        for n in GROUPS[heads]
    }
    functions["ours, per token"] = lambda: ck.sparse_prefill(**args)
    if peer is not None:
        padded = args | {"q": torch.nn.functional.pad(args["q"], (0, 0, 0, 64 - heads)).contiguous()}
        functions["FlashMLA"] = lambda: tuple(t[:, :heads] for t in peer(padded)[:3])
    if triton is not None:
        for union in (0, 2, 4):
            functions[f"SGLang, union {union}"] = lambda u=union: (triton(**args, union=u),)
    rows = torch.linspace(0, TOKENS - 1, 24, device="cuda").long()
    for name, f in list(functions.items()):
        text = wrong(f(), args, rows)
        if text:
            print(f"    {name}, against float64: {text}", flush=True)
    title = f"{TOKENS} tokens x {heads} heads, topk {TOPK}, {kind} lists, end to end"
    report(writer, title, functions, 2 * TOKENS * heads * TOPK * 1088)


def timing(writer, sglang_file: str | None) -> None:
    group_topk_times(writer)
    for kind in LISTS:
        for heads in GROUPS:
            if kind == "neighbouring" or heads == 16:
                end_to_end(writer, sglang_file, heads, kind)
                torch.cuda.empty_cache()


def host_times() -> None:
    """Microseconds of the calling thread for one eager call: 1,000 calls on a small shape, the queue drained every 20."""
    q = torch.randn(2, 16, D_QK, device="cuda").bfloat16()
    kv = torch.randn(64, 1, D_QK, device="cuda").bfloat16()
    indices = torch.randint(0, 64, (2, 1, 128), device="cuda", dtype=torch.int32)
    op = torch.ops.cute_kernels.sparse_prefill_fwd.default
    counter = torch.zeros(4, device="cuda")
    functions = {
        "sparse_prefill, torch.ops": lambda: op(q, kv, indices, SCALE),
        "sparse_prefill, Python": lambda: ck.sparse_prefill(q, kv, indices, SCALE),
        "group_topk, Python": lambda: ck.group_topk(indices, 64),
        "grouped_sparse_prefill": lambda: ck.grouped_sparse_prefill(q, kv, indices, SCALE),
        "for scale: tensor.add_(1)": lambda: counter.add_(1),
    }
    peer = flash_mla()
    if peer is not None:
        wide = dict(q=torch.nn.functional.pad(q, (0, 0, 0, 48)), kv=kv, indices=indices, sm_scale=SCALE)
        functions["FlashMLA"] = lambda: peer(wide)
    with torch.no_grad():
        for name, f in functions.items():
            samples = []
            for _ in range(50):
                f()
            for _ in range(50):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(20):
                    f()
                samples.append((time.perf_counter() - start) / 20 * 1e6)
            torch.cuda.synchronize()
            print(f"host time: {name:28s} median {statistics.median(samples):6.2f} us, least {min(samples):6.2f}", flush=True)
