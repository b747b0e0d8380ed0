"""Blackwell active-length attention, decode and prefill, over the grid of its contract and at random: nightly, in the emulator at
its strict level, through the operators. Oracle and tolerance of test_sm90_decode, their reason there."""

from __future__ import annotations

import math
import random

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from test_sm90_decode import LENGTHS, check, make, same  # noqa: E402

import cute_kernels as ck  # noqa: E402

ARCH = "sm_100a"
SCHEDULES = (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2))
DIMS = [(d, dtype) for dtype in (torch.bfloat16, torch.float16) for d in (64, 80, 96, 112, 128, 256)]
GROUPS, TOKENS = (1, 4, 8, 16), (1, 2, 5, 17, 200)
SINK = (math.inf, -math.inf, 0.5, -1.0, 40.0, -2.0, 0.0, 3.0)


def sinks(heads):
    return torch.tensor([SINK[h % 8] for h in range(heads)])


def attend(q, k, v, kv_len, schedule, new=(), **options):
    """One launch, no hazard."""
    from cute_kernels.emulator import emulate

    if not isinstance(kv_len, int):
        kv_len = torch.tensor(kv_len, dtype=torch.int32)
    with emulate(ARCH, schedule=schedule[0], seed=schedule[1], checks="strict") as emulated:
        if new:
            result = ck.active_attention_append(q, *new, k, v, kv_len, **options)
        else:
            result = ck.active_attention(q, k, v, kv_len, **options)
    assert not emulated.hazards, emulated.report()
    assert len(emulated.launches) == 1
    return result


def appended(caches, new, lengths):
    """Copies of the caches with the new rows at the end of each length; rows before position 0 are not written."""
    want = [x.clone(memory_format=torch.contiguous_format) for x in caches]
    for i, n in enumerate(lengths):
        s = new[0].shape[2]
        first = max(0, s - n)
        for cache, rows in zip(want, new, strict=True):
            cache[i, :, n - s + first : n] = rows[i, :, first:]
    return want


OPTIONS = (
    {}, dict(window_left=70), dict(softcap=4.0), dict(sink=True), dict(causal=False), dict(sm_scale=-0.15),
    dict(window_left=3, softcap=20.0, sink=True), dict(append=True), dict(append=True, window_left=100, softcap=8.0, sink=True),
)  # fmt: skip


# i runs over all pairs of a group and a number of tokens, all dimensions with both types, all options
@pytest.mark.nightly
@pytest.mark.parametrize("i", range(40))
def test_grid(i):
    """All of LENGTHS in one batch (those that are cheap, where a row of the batch has many query rows), a batch row alone."""
    group, s = GROUPS[i % 4], TOKENS[i % 5]
    d, dtype = DIMS[(i + i // 20) % 12]
    options = dict(OPTIONS[i % 9])
    lengths = list(LENGTHS[:12]) if group * s <= 100 else [0, 63, 129, 400] if group * s <= 1000 else [65, 234]
    h_kv = 2 if group * s <= 100 else 1
    q, k, v = make(len(lengths), group * h_kv, h_kv, s, d, max(lengths) + 9, lengths, dtype, seed=i, device="cpu")
    new = ()
    if options.pop("append", False):
        gen = torch.Generator().manual_seed(i)
        new = [torch.randn(len(lengths), h_kv, s, d, generator=gen).to(dtype) for _ in range(2)]
    if options.pop("sink", False):
        options["attn_sink"] = sinks(group * h_kv)
    caches = appended((k, v), new, lengths) if new else (k, v)
    result = attend(q, k, v, lengths, SCHEDULES[(i // 3) % 4], new, **options)
    assert same((k, v), caches), "cache bytes"
    check(result, q, *caches, lengths, **options)
    # alone, by an int length, in a larger cache: the same bits
    row, n = len(lengths) - 1, lengths[-1]
    wide = [torch.nn.functional.pad(x[row:], (0, 0, 0, 77), value=math.nan) for x in caches]
    if not new:
        alone = attend(q[row:], *wide, n, SCHEDULES[(i // 3 + 1) % 4], **options)
        assert same([x[row:] for x in result], alone)


@pytest.mark.nightly
@pytest.mark.parametrize("group,s,n", [(4, 1, 20000), (1, 2, 9000), (4, 17, 3000)])
def test_long(group, s, n):
    q, k, v = make(1, group, 1, s, 64, n + 3, [n], seed=n, device="cpu")
    check(attend(q, k, v, [n], ("lazy", 0)), q, k, v, [n])


# ---------------------------------------------------------------------------------------------------- at random
def elsewhere(x, rng):
    """x with other strides: transposed, inside a wider row, with gaps between heads and rows, at odd addresses; NaN around it."""
    b, h, n, d = x.shape
    kind = rng.choice(["plain", "bshd", "fused", "gaps", "rows outermost", "odd"])
    if kind == "bshd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "fused":
        pad = rng.choice([8, 64, 128])
        wide = torch.full((b, n, h * d + 2 * pad), math.nan, dtype=x.dtype)
        wide[..., pad : pad + h * d] = x.transpose(1, 2).reshape(b, n, h * d)
        return wide[..., pad : pad + h * d].unflatten(-1, (h, d)).transpose(1, 2)
    if kind == "gaps":
        wide = torch.full((b, 2 * h, n + 3, d + 8 * rng.randint(0, 2)), math.nan, dtype=x.dtype)
        wide[:, ::2, 1 : n + 1, :d] = x
        return wide[:, ::2, 1 : n + 1, :d]
    if kind == "rows outermost":
        return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    if kind == "odd":
        at = rng.randint(1, 5)
        wide = torch.full((b, h, n, d + rng.choice([5, 7, 8, 16])), math.nan, dtype=x.dtype)
        wide[..., at : at + d] = x
        return wide[..., at : at + d]
    return x


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(60))
def test_fuzz(seed):
    """Any head dimension, group, number of tokens, option and layout; two cases of each choice."""
    rng = random.Random(seed)
    d = rng.choice([16, 24, 40, 64, 72, 96, 120, 128, 128, 136, 192, 200, 256])
    dtype = rng.choice([torch.bfloat16, torch.float16])
    group = rng.choice([1, 2, 3, 4, 5, 7, 8, 16, 17, 32, 33, 40, 128])
    s = rng.choice([1, 1, 1, 2, 3, 5, 8, 15, 16, 17, 33, 64, 100])
    options = dict(causal=rng.random() < 0.75)
    if rng.random() < 0.35:
        options["window_left"] = rng.choice([0, 1, 5, 60, 127, 128, 129, 1000])
    if rng.random() < 0.3:
        options["softcap"] = rng.choice([0.5, 5.0, 50.0])
    if rng.random() < 0.3:
        options["sm_scale"] = rng.choice([0.0, -0.2, 0.01, 1.0])
    sink, append = rng.random() < 0.35, rng.random() < 0.3
    for _ in range(2):
        b, h_kv = rng.randint(1, 3), rng.randint(1, 3)
        if b * h_kv * group * s > 700:
            b = h_kv = 1
        lengths = [rng.choice([0, 1, 2, 63, 64, 127, 128, 129, 255, 257, 384, 513, rng.randint(1, 700)]) for _ in range(b)]
        by_int = not append and rng.random() < 0.35
        if by_int:
            lengths = [max(1, lengths[0])] * b
        capacity = max(1, *lengths) + rng.choice([0, 1, 9, 150])
        q, k, v = make(b, group * h_kv, h_kv, s, d, capacity, lengths, dtype, seed=rng.randint(0, 1 << 30), device="cpu")
        k *= rng.choice([1, 1, 6])
        if sink:
            options["attn_sink"] = sinks(group * h_kv)
        new = [torch.randn(b, h_kv, s, d).to(dtype) for _ in range(2)] if append else ()
        caches = appended((k, v), new, lengths) if append else (k, v)
        views = [elsewhere(x, rng) for x in (q, k, v)]
        new = [elsewhere(x, rng) for x in new]
        schedule = rng.choice([("eager", 0), ("lazy", 0), ("random", rng.randint(0, 99))])
        result = attend(*views, lengths[0] if by_int else lengths, schedule, new, **options)
        assert same([x.contiguous() for x in views[1:]], caches), "cache bytes"
        check(result, q, *caches, lengths, **options)
