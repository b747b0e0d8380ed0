"""Cases of the sparse prefill kernel: inputs, a float64 reference one query row at a time, FlashMLA's comparison. For the benchmark
and the tests."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from cute_kernels.kernels.sm90 import sparse_prefill as ours

D_V = 512


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
    unique: bool = False  # slots that s_kv distinct keys cannot fill list something outside [0, s_kv)
    invalid_rows: float = 0.0  # share of rows that list one invalid value alone
    seed: int = 0
    extra: dict = field(default_factory=dict)

    def name(self) -> str:
        flags = [f for f in ("length", "bad", "nan") if getattr(self, f)]
        flags += [f for f in ("sink", "empty_rows", "empty_blocks", "strided", "unique", "invalid_rows") if getattr(self, f)]
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
    if case.unique and case.topk > case.s_kv:
        order = torch.argsort(rand(case.s_q, case.topk), dim=1)
        filled = garbage[torch.randint(0, 8, idx.shape, device=device, generator=g)]
        idx = torch.where(order < case.s_kv, order.to(torch.int32), filled)
    if case.invalid_rows:
        one = garbage[torch.randint(0, 8, (case.s_q, 1), device=device, generator=g)]
        idx = torch.where(rand(case.s_q, 1) < case.invalid_rows, one, idx)
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
