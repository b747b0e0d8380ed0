"""The group_topk kernel bit for bit against the reference: in the emulator (both architectures, every schedule), and on a GPU."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import oracles
import pytest
import torch

import cute_kernels as ck
from cute_kernels import reference
from cute_kernels.kernels import group_topk as host
from cute_kernels.ops import _common
from cute_kernels.ops.group_topk import _sizes

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
from cute_kernels.emulator import emulate  # noqa: E402
from cute_kernels.jit import cubin as cubins  # noqa: E402

ARCHS = ("sm_90a", "sm_100a")
SCHEDULES = ("eager", "lazy", "random")
INT_MAX = 2**31 - 1
CONFIGS = [host.Config(*map(bool, flags)) for flags in ((1, 0, 0, 0, 0), (1, 1, 1, 1, 1), (0, 1, 1, 0, 1), (1, 1, 1, 1, 0))]


def inputs(s_q, topk, s_kv, group_size, *, low=-20, length=False, cu=None, max_union=None, seed=0, cut=False, device="cpu"):
    """Arguments of `launch`: a fifth of the indices outside [0, s_kv), duplicates, lengths outside [0, topk]."""
    g = torch.Generator().manual_seed(seed)
    high = max(min(s_kv + 20, INT_MAX), low + 1)
    indices = torch.randint(low, high, (s_q, 1, topk + 3 * cut), dtype=torch.int64, generator=g)[:, :, 3 * cut :].int()
    if topk > 3 and s_q > 2:
        indices[0, 0, :4] = torch.tensor([INT_MAX, -(2**31), min(s_kv, INT_MAX), s_kv - 1])
        indices[1, 0, topk // 2 :] = indices[1, 0, : topk - topk // 2].clone()
        indices[2] = -1
    limits = torch.randint(-2, topk + 3, (s_q,), dtype=torch.int32, generator=g).to(device) if length else None
    bounds = None if cu is None else torch.tensor(cu, dtype=torch.int32, device=device)
    indices = indices.to(device)
    n, u = _sizes(indices, s_kv, group_size, bounds, max_union)
    return dict(indices=indices, s_kv=s_kv, group_size=group_size, topk_length=limits, cu_seqlens_q=bounds, n=n, u=u)


def agree(args, got, padded):
    """Every bit of the four results; unpadded: of what is specified."""
    want = reference.group_topk(**args)
    got, want = list(got), list(want)
    if not padded:
        written = (want[1].clamp(max=args["u"]) + 127) // 128 * 128
        kept = torch.arange(args["u"], device=written.device) < written[:, None]
        got[0], want[0] = (torch.where(kept[:, None], t, 0) for t in (got[0], want[0]))
        got[2], want[2] = (torch.where(kept[:, ::128, None], t, 0) for t in (got[2], want[2]))
    return all(torch.equal(a, b) for a, b in zip(got, want))


# ---------------------------------------------------------------------------------------------------- compiled code
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "config", [pytest.param(c, marks=[] if c in CONFIGS[:2] else [pytest.mark.full]) for c in CONFIGS], ids=str
)
def test_compiled_code(config, arch):
    artifact = host.group_topk_kernel.artifact(config, arch)
    (r,) = cubins.resources(artifact.cubin)
    assert (r.stack, r.spill_loads, r.spill_stores, r.threads) == (0, 0, 0, 1024 if config.large else 512)
    assert r.registers <= 32, "2,048 threads on an SM"
    assert artifact.dynamic_smem == [114_960 if config.large else 49_424]
    opcodes = cubins.ptx_opcodes(artifact.ptx)
    assert opcodes["ld.global.v4.b32"] == (2 if config.wide else 0), opcodes


# ---------------------------------------------------------------------------------------------------- emulated
CASES = {
    "ragged last group, duplicates": (dict(s_q=19, topk=32, s_kv=100, group_size=8), True),
    "lengths": (dict(s_q=19, topk=30, s_kv=100, group_size=5, length=True), True),
    "requests": (dict(s_q=19, topk=32, s_kv=3000, group_size=4, length=True, cu=[0, 0, 5, 6, 19]), True),
    "requests that cover a part": (dict(s_q=19, topk=12, s_kv=60, group_size=4, cu=[3, 7, 7, 12]), True),
    "more requests than lanes": (dict(s_q=36, topk=6, s_kv=50, group_size=8, cu=[*range(37)]), True),
    "malformed bounds": (dict(s_q=10, topk=6, s_kv=50, group_size=4, cu=[7, -3, 9, 5, 2**31 - 1]), True),
    "no request": (dict(s_q=10, topk=6, s_kv=50, group_size=4, cu=[0]), True),
    "three ranges": (dict(s_q=10, topk=32, s_kv=300_000, group_size=8), True),
    "small ranges": (dict(s_q=2, topk=8192, s_kv=140_000, group_size=8), True),
    "keys up to the last int32": (dict(s_q=11, topk=20, s_kv=INT_MAX, group_size=8, low=INT_MAX - 40), True),
    "keys far apart": (dict(s_q=3, topk=2, s_kv=INT_MAX, group_size=3), True),
    "capacity exceeded": (dict(s_q=16, topk=100, s_kv=1000, group_size=8, max_union=128), True),
    "capacity 0": (dict(s_q=16, topk=100, s_kv=1000, group_size=8, max_union=0), True),
    "padding left alone": (dict(s_q=16, topk=100, s_kv=1000, group_size=8), False),
    "unaligned rows": (dict(s_q=9, topk=40, s_kv=1000, group_size=2, cut=True), False),
    "one token": (dict(s_q=1, topk=1, s_kv=1, group_size=1), True),
    "no keys": (dict(s_q=5, topk=4, s_kv=0, group_size=8), True),
    "no positions": (dict(s_q=5, topk=0, s_kv=9, group_size=8), True),
    "no rows": (dict(s_q=0, topk=5, s_kv=9, group_size=8, cu=[0, 0, 0]), True),
}
QUICK = {"ragged last group, duplicates": "sm_100a", "requests": "sm_90a", "three ranges": "sm_90a"}


def marks(name, arch):
    """One source for both architectures: by day the second one runs a few cases."""
    if QUICK.get(name) == arch:
        return []
    return [pytest.mark.full if arch == "sm_90a" or name in ("requests", "three ranges", "lengths") else pytest.mark.nightly]


@pytest.mark.parametrize(
    "name, arch",
    [
        pytest.param(name, arch, marks=marks(name, arch), id=f"{name}-{arch}")
        for name in CASES
        for arch in ARCHS
    ],
)
def test_emulated(name, arch, request):
    options, padded = CASES[name]
    args = inputs(**options)
    # one source for both: the order of execution is varied on one of them, on both at night
    everything = arch == "sm_90a" or request.config.getoption("--nightly")
    for schedule in SCHEDULES if everything else ("random",):
        with emulate(arch, schedule=schedule, seed=3, checks="strict") as emulation:
            got = host.launch(**args, padded=padded)
        assert agree(args, got, padded), schedule
        assert not emulation.hazards, (schedule, emulation.hazards[0])


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(8, 6000, 400_000, 8), (8, 2300, 20_000, 8)], ids=["three mask windows", "a full bitmap"])
def test_emulated_large(sizes):
    args = inputs(*sizes)
    with emulate("sm_90a", schedule="random", checks="strict") as emulation:
        got = host.launch(**args)
    assert agree(args, got, True) and not emulation.hazards


@pytest.mark.full
@pytest.mark.parametrize("examples", [8, pytest.param(100, marks=pytest.mark.nightly)])
def test_emulated_fuzz(examples):
    """Any sizes, bounds and capacities, three schedules, both architectures."""
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies

    @hypothesis.settings(max_examples=examples, deadline=None, derandomize=True)
    @hypothesis.given(st.data())
    def fuzz(data):
        draw = data.draw
        s_q, topk = draw(st.integers(0, 20)), draw(st.integers(0, 40))
        s_kv = draw(st.sampled_from([0, 1, 31, 32, 33, 128, 500, 4095, 131_073, INT_MAX]))
        cu = draw(st.none() | st.lists(st.integers(-3, 25), min_size=1, max_size=6))
        if cu is not None and draw(st.booleans()):
            cu = sorted(cu)
        low = draw(st.sampled_from([-20, max(0, s_kv - 60)]))
        args = inputs(
            s_q, topk, s_kv, draw(st.integers(1, 8)), low=min(low, INT_MAX - 80), length=draw(st.booleans()), cu=cu,
            max_union=draw(st.none() | st.integers(0, 300)), seed=draw(st.integers(0, 99)), cut=draw(st.booleans()),
        )  # fmt: skip
        padded = draw(st.booleans())
        arch, schedule = draw(st.sampled_from(ARCHS)), draw(st.sampled_from(SCHEDULES))
        with emulate(arch, schedule=schedule, seed=draw(st.integers(0, 9)), checks="strict") as emulation:
            got = host.launch(**args, padded=padded)
        assert agree(args, got, padded) and not emulation.hazards

    fuzz()


@pytest.mark.full
def test_emulated_race_is_found(tmp_path):
    """Without the barrier between setting bits and counting them the emulator reports a race."""
    from cute_kernels.jit import current_target, kernel_builder
    from cute_kernels.kernels import group_topk_kernel

    text = Path(group_topk_kernel.__file__).read_text()
    barrier = "                (nexts + warp).store(smallest)\n            cute.arch.sync_threads()\n"
    assert text.count(barrier) == 1
    file = tmp_path / "group_topk_no_barrier.py"
    file.write_text(text.replace(barrier, barrier.splitlines(True)[0]))
    spec = importlib.util.spec_from_file_location("group_topk_no_barrier", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)

    @kernel_builder("group_topk_no_barrier", archs=("sm_90a",), sources=(str(file),))
    def build(config, arch):
        _, arguments = host.group_topk_kernel.build(config, arch)
        return module.GroupTopk(**config._asdict()), arguments

    args = inputs(8, 32, 3000, 8)
    with emulate("sm_90a", schedule="random") as emulation:
        results = host.launch(**args)
        clean = len(emulation.hazards)
        run = build(host.Config(True, False, False, True, False), current_target(args["indices"].device))
        run(args["indices"], None, None, *results, args["s_kv"])
    assert clean == 0 and any("race" in str(hazard) for hazard in emulation.hazards)


# ---------------------------------------------------------------------------------------------------- the operators, emulated
@pytest.mark.full
@pytest.mark.parametrize("cu", [None, [0, 2, 2, 5]])
def test_grouped_prefill_emulated(cu):
    """Both kernels, one after the other, as a caller runs them."""
    i = oracles.sparse_inputs(7, 6, 60, 16, 512, sink=True)
    bounds = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    with emulate("sm_90a", schedule="random", seed=1, sm_count=2) as emulation:
        got = ck.grouped_sparse_prefill(
            i["q"], i["kv"], i["indices"], 0.5, group_size=4, attn_sink=i["attn_sink"], cu_seqlens_q=bounds
        )
        assert ck.last_backend() == "sm_90a:sparse_prefill"
    assert len(emulation.launches) == 2 and not emulation.hazards
    out, max_logits, lse = oracles.sparse_prefill(i["q"], i["kv"], i["indices"], 0.5, attn_sink=i["attn_sink"])
    if cu is not None:
        out[cu[-1] :], max_logits[cu[-1] :], lse[cu[-1] :] = 0, -math.inf, math.inf
    oracles.assert_flashmla(got, (out, max_logits, lse))


def test_a_capacity_that_is_exceeded_is_an_error_under_check(monkeypatch):
    indices = torch.randint(0, 1000, (8, 1, 40), dtype=torch.int32)
    with emulate("sm_100a"):
        _, length, _, _ = ck.group_topk(indices, 1000, 8, max_union=128)
        assert length[0] > 128, "the needed length"
        monkeypatch.setattr(_common, "_checking", True)
        with pytest.raises(ValueError, match="max_union must hold the longest union"):
            ck.group_topk(indices, 1000, 8, max_union=128)


# ---------------------------------------------------------------------------------------------------- on a GPU
GPU_CASES = {
    **CASES,
    "21,000 keys": (dict(s_q=1001, topk=2048, s_kv=21_000, group_size=8), False),
    "131,072 keys, groups of 4": (dict(s_q=803, topk=2048, s_kv=131_072, group_size=4, length=True), True),
    "a million keys": (dict(s_q=100, topk=2048, s_kv=1 << 20, group_size=8, cu=[0, 7, 9, 64, 99]), True),
    "two mask windows": (dict(s_q=16, topk=5000, s_kv=400_000, group_size=8), True),
    "a thousand requests": (dict(s_q=5000, topk=64, s_kv=9000, group_size=8, cu=[*range(0, 5001, 5)]), True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_gpu(name):
    options, padded = GPU_CASES[name]
    args = inputs(**options, device="cuda")
    assert agree(args, host.launch(**args, padded=padded), padded)
    assert agree(args, host.launch(**args, padded=True), True)


@pytest.mark.gpu
def test_gpu_graph_replays_with_new_indices_and_never_syncs():
    args = inputs(300, 256, 9000, 8, length=True, device="cuda")
    call = lambda: ck.group_topk(args["indices"], 9000, 8, topk_length=args["topk_length"])  # noqa: E731
    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    for seed in (1, 2):
        args["indices"].copy_(inputs(300, 256, 9000, 8, seed=seed)["indices"])
        graph.replay()
        assert agree(args, got, True)


@pytest.mark.gpu
def test_gpu_capacity_under_check():
    """CUTE_KERNELS_CHECK is read at import: another process."""
    code = (
        "import torch, cute_kernels as ck\n"
        "i = torch.randint(0, 1000, (16, 1, 100), dtype=torch.int32, device='cuda')\n"
        "try:\n    ck.group_topk(i, 1000, 8, max_union=128)\n"
        "except ValueError as error:\n    print(ck.last_backend(), error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"CUTE_KERNELS_CHECK": "1"}, capture_output=True, text=True, timeout=120
    )
    assert "max_union must hold the longest union" in done.stdout, done.stdout + done.stderr
