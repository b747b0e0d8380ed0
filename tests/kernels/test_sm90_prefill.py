"""The Hopper prefill kernel against float64: in the emulator on a CPU, and on an H100/H200. Tolerances as in test_sm90_decode."""

from __future__ import annotations

import math
import re

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from test_sm90_decode import _cuobjdump, check, hopper, make, same  # noqa: E402

from cute_kernels.jit import current_target  # noqa: E402
from cute_kernels.kernels.sm90 import prefill  # noqa: E402

SINK = torch.tensor([math.inf, -math.inf, 0.5, -1.0, 2.0, 3.0, -0.25, 1.0])


def run(q, k, v, kv_len, *, sm_scale=None, causal=True, window_left=-1, softcap=0.0, attn_sink=None, k_new=None, v_new=None):
    b, h_q, s, d = q.shape
    out = torch.full((b, s, h_q, d), math.nan, dtype=q.dtype, device=q.device).transpose(1, 2)
    lse = torch.full((b, h_q, s), math.nan, device=q.device)
    if not isinstance(kv_len, int):
        kv_len = torch.tensor(kv_len, dtype=torch.int32, device=q.device)
    arguments = dict(
        q=q, k_cache=k, v_cache=v, kv_len=kv_len, sm_scale=d**-0.5 if sm_scale is None else sm_scale, causal=causal,
        window_left=window_left, softcap=softcap, attn_sink=attn_sink, k_new=k_new, v_new=v_new,
    )  # fmt: skip
    call = prefill.prepare(target=current_target(q.device), otherwise=_never, **arguments)
    call(q, k, v, kv_len, attn_sink, k_new, v_new, out, lse)
    return out, lse


def _never(*_):
    raise AssertionError("the prefill kernel did not take this call")


def emulated(*args, schedule="eager", seed=0, **options):
    from cute_kernels.emulator import emulate

    with emulate("sm_90a", schedule=schedule, seed=seed, checks="strict") as emulation:
        result = run(*args, **options)
    assert not emulation.hazards, emulation.report()
    return result


def case(lengths, s, *, h_q=4, h_kv=1, d=128, dtype=torch.bfloat16, schedule="eager", seed=0, **options):
    """Device lengths, NaN past them; returns what a comparison needs."""
    q, k, v = make(len(lengths), h_q, h_kv, s, d, max(lengths) + 9, lengths, dtype, seed=sum(lengths) + s + d, device="cpu")
    result = emulated(q, k, v, lengths, schedule=schedule, seed=seed, **options)
    check(result, q, k, v, lengths, **options)
    return result, q, k, v


def test_suits_ignores_batch_and_length():
    assert prefill.suits(2048, 32, 8) and prefill.suits(128, 32, 8)
    assert not prefill.suits(1, 32, 8) and not prefill.suits(8, 32, 8) and not prefill.suits(32, 32, 8)


def test_lengths_alone_and_in_a_batch():
    lengths = [129, 0, 40]  # a tail, no key at all, rows at negative positions
    result, q, k, v = case(lengths, 50)
    alone = emulated(q[:1], k[:1], v[:1], 129)
    assert same([x[:1] for x in result], alone), "an int length alone gives other bits"


@pytest.mark.full
def test_the_operator_takes_it_and_falls_back():
    """From so many rows on; rows at odd addresses go to the decode kernel."""
    import cute_kernels as ck
    from cute_kernels.emulator import emulate

    n, d = 20, 64
    q, k, v = make(1, 64, 1, 64, d, n + 2, [n], seed=1, device="cpu")
    with emulate("sm_90a") as emulation:
        result = ck.active_attention(q, k, v, n)
        assert not emulation.hazards and ["PrefillKernel" in launch.entry for launch in emulation.launches] == [True]
        check(result, q, k, v, [n])
        wide = torch.zeros(1, 1, n + 2, d + 3, dtype=k.dtype)[..., 1 : 1 + d]
        with pytest.raises(AssertionError, match="did not take this call"):
            run(q, wide, v, n)


@pytest.mark.full
@pytest.mark.parametrize("schedule,seed", [("eager", 0), ("lazy", 0), ("random", 1), ("random", 2)])
def test_schedules(schedule, seed):
    case([300], 70, schedule=schedule, seed=seed)


@pytest.mark.full
@pytest.mark.parametrize(
    "s,options",
    [
        (40, dict(h_q=6, h_kv=2, d=64, window_left=50, softcap=5.0, sm_scale=-0.2, attn_sink=SINK[:6])),
        (33, dict(h_q=7, d=64, causal=False, sm_scale=0.0)),
        (140, dict(h_q=1, d=96, dtype=torch.float16, window_left=20)),
        (130, dict(h_q=1, d=256)),
        (20, dict(h_q=8, d=80, attn_sink=SINK)),
    ],
)
def test_options(s, options):
    case([200, 130], s, **options)


def append_case(run, lengths, s, h_q, h_kv, d, device):
    """New rows from a fused projection; NaN in the cache where they belong."""
    b, capacity = len(lengths), max(lengths) + 9
    q, k, v = make(b, h_q, h_kv, s, d, capacity, [max(0, n - s) for n in lengths], seed=s, device=device)
    new = torch.randn(b, s, 2 * h_kv, d, device=device).bfloat16().transpose(1, 2)
    want = [k.clone(), v.clone()]
    for i, n in enumerate(lengths):
        skip = max(0, s - n)  # rows at negative positions
        for cache, rows in zip(want, new.split(h_kv, 1), strict=True):
            cache[i, :, n - s + skip : n] = rows[i, :, skip:]
    result = run(q, k, v, lengths, k_new=new[:, :h_kv], v_new=new[:, h_kv:])
    assert same([k, v], want), "cache bytes"
    check(result, q, *want, lengths)


@pytest.mark.full
def test_append():
    append_case(emulated, [0, 33, 70], 40, 4, 2, 64, "cpu")


@pytest.mark.full
def test_products_run_asynchronously():
    """ptxas may serialise every product, at half the speed, when it runs out of registers: then each has a wait of its own."""
    import shutil
    import subprocess
    import tempfile

    tool = _cuobjdump()
    disassembler = tool and shutil.which("nvdisasm", path=tool.rsplit("/", 1)[0])
    if not disassembler:
        pytest.skip("needs cuobjdump and nvdisasm")
    base = prefill.Variant(True, 128, 4, True, True, False, False, False, False)
    changes = [{}, {"device_length": True}, {"head_dim": 64}, {"head_dim": 256}, {"window": True, "sink": True}, {"bf16": False}]
    for change in changes:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
            f.write(prefill.prefill_kernel.artifact(base._replace(**change), prefill.ARCH).cubin)
            f.flush()
            sass = subprocess.run([disassembler, "-c", f.name], capture_output=True, text=True, check=True).stdout
            usage = subprocess.run([tool, "-res-usage", f.name], capture_output=True, text=True, check=True).stdout
        stack = int(re.search(r"STACK:(\d+)", usage).group(1))
        assert sass.count("WARPGROUP.DEPBAR") <= 8 and stack == 0, (change, sass.count("WARPGROUP.DEPBAR"), stack)


# ---- on a GPU ----------------------------------------------------------------------------------------------------
@hopper
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_gpu_head_dims(d):
    for dtype in (torch.bfloat16, torch.float16):
        for group, s in ((1, 129), (4, 300), (7, 64)):
            lengths = [0, 40, 513, 1000]
            q, k, v = make(4, 2 * group, 2, s, d, 1024, lengths, dtype, seed=d + s)
            check(run(q, k, v, lengths), q, k, v, lengths)


@hopper
def test_gpu_options():
    lengths = [7, 129, 1000]
    for s in (64, 333):
        q, k, v = make(3, 8, 2, s, 128, 1024, lengths, seed=s)
        for options in (
            {"causal": False}, {"window_left": 0}, {"window_left": 100}, {"window_left": 5000},
            {"window_left": 30, "causal": False},
            {"softcap": 5.0}, {"attn_sink": SINK.cuda()}, {"sm_scale": -0.3}, {"sm_scale": 0.0},
            {"window_left": 77, "softcap": 30.0, "attn_sink": SINK.cuda(), "sm_scale": 0.2},
        ):  # fmt: skip
            check(run(q, k, v, lengths, **options), q, k, v, lengths, **options)


@hopper
def test_gpu_append():
    append_case(run, [0, 300, 2000, 333], 333, 16, 4, 128, "cuda")


@hopper
def test_gpu_batch_capacity_and_repetition():
    lengths = [100, 2048, 777, 1, 3000]
    q, k, v = make(5, 32, 8, 700, 128, 3001, lengths, seed=3)
    result = run(q, k, v, lengths)
    check(result, q, k, v, lengths)
    for i, n in enumerate(lengths):
        wide = [torch.nn.functional.pad(x[i : i + 1], (0, 0, 0, 777), value=math.nan) for x in (k, v)]
        assert same([x[i : i + 1] for x in result], run(q[i : i + 1], *wide, n)), f"row {i}: batch, capacity or int length"
    for _ in range(3):
        assert same(result, run(q, k, v, lengths)), "two runs differ"


@hopper
def test_gpu_strides_and_offsets_past_2_to_31():
    b, h_kv, capacity, d = 65, 8, 32768, 128  # 2.2e9 elements, 4.4 GB each
    k, v = (torch.empty(b, h_kv, capacity, d, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    q, ks, vs = make(1, 32, h_kv, 130, d, 400, [390], seed=3)
    k[-1:, :, :400], v[-1:, :, :400] = ks, vs
    result = run(q.expand(b, -1, -1, -1), k, v, [0] * (b - 1) + [390])
    check([x[-1:] for x in result], q, ks, vs, [390])
    bshd = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, ks, vs)]
    assert same([x[-1:] for x in result], run(*bshd, 390)), "strides"
