"""The Blackwell decode kernel: its PTX and its host code run by the emulator on a CPU, against a float64 oracle.

Oracle, tolerance and its reason as in test_sm90_decode: this kernel rounds at the same two places (P and the output, to 16 bits),
everything else is fp32. The order in which a tensor core adds is unknown; the emulator's is one of many within the tolerance.

Where not stated otherwise the emulator runs with strict checks, and no hazard may be reported.
"""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from test_sm90_decode import _cuobjdump, check, make, same  # noqa: E402

from cute_kernels.kernels.sm100 import decode  # noqa: E402

ARCH = "sm_100a"
LENGTHS = (0, 1, 7, 63, 64, 65, 127, 128, 129, 234, 400, 1000)
SCHEDULES = (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2))


def run(q, k, v, kv_len, schedule="eager", seed=0, variant=None, record=None, **options):
    """(out, lse) of the kernel. `record`: a list that receives the emulator's launch record."""
    from cute_kernels.emulator import emulate

    b, h_q, s, d = q.shape
    if not isinstance(kv_len, int):
        kv_len = torch.tensor(kv_len, dtype=torch.int32)
    arguments = dict(
        sm_scale=d**-0.5, causal=True, window_left=-1, softcap=0.0, attn_sink=None, k_new=None, v_new=None, variant=variant
    )
    out = torch.empty_strided((b, h_q, s, d), (s * h_q * d, d, h_q * d, 1), dtype=q.dtype)
    lse = torch.empty(b, h_q, s)
    with emulate(ARCH, schedule=schedule, seed=seed, checks="strict") as emulated:
        decode.launch(q, k, v, kv_len, **{**arguments, **options}, out=out, lse=lse)
    assert not emulated.hazards, emulated.report()
    assert len(emulated.launches) == 1
    if record is not None:
        record.append(emulated.launches[0])
    return out, lse


def case(lengths, *, h_q=4, h_kv=1, s=1, d=128, dtype=torch.bfloat16, spare=9, **options):
    """Run with device lengths and check; returns (result, q, k, v)."""
    q, k, v = make(len(lengths), h_q, h_kv, s, d, max(lengths) + spare, lengths, dtype, seed=sum(lengths) + d + s, device="cpu")
    schedule, order = SCHEDULES[(sum(lengths) + h_q + s + d) % 4]  # results do not depend on it: see the tests of schedules
    result = run(q, k, v, lengths, schedule, order, **options)
    check(result, q, k, v, lengths, **options)
    return result, q, k, v


def one_split(q, k, v, kv_len, **changes):
    """The variant of a call that gives all of up to 1024 keys to one CTA."""
    return decode.choose(q, k, v, kv_len, True, -1, 0.0, None, None, None)._replace(split_cap=1, **changes)


def test_batch_and_capacity_do_not_change_bits():
    lengths = [0, 1, 65, 200]
    result, q, k, v = case(lengths, h_q=8, h_kv=2)
    for i in (1, 3):
        n = lengths[i]
        assert same([x[i : i + 1] for x in result], run(q[i : i + 1], k[i : i + 1], v[i : i + 1], n)), f"row {i} alone, int length"
        wide = [torch.nn.functional.pad(x[i : i + 1], (0, 0, 0, 177), value=math.nan) for x in (k, v)]
        assert same([x[i : i + 1] for x in result], run(q[i : i + 1], *wide, [n])), f"row {i}, larger capacity"


@pytest.mark.full
def test_every_option_at_once():
    sink = torch.tensor([math.inf, -math.inf, *torch.randn(6)])
    case([5, 200], h_q=8, h_kv=2, s=2, window_left=30, softcap=5.0, attn_sink=sink, sm_scale=-0.2)


@pytest.mark.full
def test_lengths():
    case(LENGTHS)


@pytest.mark.full
def test_schedules_give_the_same_bits():
    """Two groups of tiles, the last tile cut: every barrier turns more than once."""
    q, k, v = make(1, 4, 1, 1, 128, 703, [700], seed=3, device="cpu")
    variant = one_split(q, k, v, 700)
    results = [run(q, k, v, 700, schedule, seed, variant=variant) for schedule, seed in SCHEDULES]
    check(results[0], q, k, v, [700])
    assert all(same(results[0], r) for r in results[1:])


@pytest.mark.full
def test_schedules_of_several_splits():
    q, k, v = make(1, 2, 1, 2, 64, 303, [300], seed=3, device="cpu")
    results = [run(q, k, v, [300], schedule, seed) for schedule, seed in SCHEDULES]
    check(results[0], q, k, v, [300])
    assert all(same(results[0], r) for r in results[1:])


@pytest.mark.full
def test_long():
    """8 splits of 5 tiles each."""
    n = 5000
    q, k, v = make(1, 1, 1, 1, 64, n + 3, [n], seed=2, device="cpu")
    variant = one_split(q, k, v, n)._replace(split_cap=4)
    check(run(q, k, v, n, variant=variant), q, k, v, [n])


@pytest.mark.full
@pytest.mark.parametrize("d", [64, 80, *(pytest.param(d, marks=pytest.mark.nightly) for d in (96, 112, 192)), 256])
def test_head_dims(d):
    case([7, 129], d=d)


@pytest.mark.full
@pytest.mark.parametrize("d", [64, 256])
def test_float16(d):
    case([7, 129], d=d, dtype=torch.float16)


@pytest.mark.full
@pytest.mark.parametrize(
    "group,s,causal", [(1, 1, True), (16, 1, True), (40, 1, True), (5, 2, True), (4, 5, False), (8, 8, True)]
)
def test_query_rows(group, s, causal):
    case([3, 150], h_q=group, s=s, causal=causal)


@pytest.mark.full
@pytest.mark.parametrize("option", [dict(window_left=100), dict(attn_sink=torch.tensor([0.5, 3.0, -2.0, 0.0]))])
def test_options_one_by_one(option):
    case([70, 260], **option)


@pytest.mark.full
@pytest.mark.parametrize("softcap", [0.5, 1e5])
def test_softcap(softcap):
    """Of 1e5, tanh is its argument, which 1 - 2 / (exp 2y + 1) would round to 2**-24."""
    case([70, 260], softcap=softcap)


def append_case(lengths, *, h_q, h_kv, s, **options):
    """Run and check active_attention_append; every byte of the caches counts."""
    b, c = len(lengths), max(lengths) + 9
    q, k, v = make(b, h_q, h_kv, s, 128, c, [max(0, n - s) for n in lengths], seed=s, device="cpu")
    k_new, v_new = (torch.randn(b, h_kv, s, 128).bfloat16() for _ in range(2))
    want = [k.clone(), v.clone()]
    for i, n in enumerate(lengths):
        first = max(0, s - n)  # rows before position 0 are not written
        for cache, new in zip(want, (k_new, v_new), strict=True):
            cache[i, :, n - s + first : n] = new[i, :, first:]
    result = run(q, k, v, lengths, k_new=k_new, v_new=v_new, **options)
    assert same([k, v], want), "cache bytes"
    check(result, q, *want, lengths, **options)


@pytest.mark.full
@pytest.mark.parametrize("h_q,s", [(8, 1), (8, 3), pytest.param(80, 1, marks=pytest.mark.nightly)])
def test_append(h_q, s):
    append_case([0, 2, 70, 200], h_q=h_q, h_kv=2, s=s)


@pytest.mark.full
def test_views_without_copies():
    """q as a transposed [B, S, Hq, D] inside a fused QKV row, caches inside wider rows: the same bits as contiguous ones."""
    q, k, v = make(2, 4, 2, 3, 128, 150, [20, 140], seed=1, device="cpu")
    qkv = torch.full((2, 3, (4 + 2 + 2) * 128), math.nan, dtype=q.dtype)
    qkv[..., : 4 * 128] = q.transpose(1, 2).reshape(2, 3, -1)
    view = qkv[..., : 4 * 128].unflatten(-1, (4, 128)).transpose(1, 2)
    slab = torch.full((2, 150, 2, 2, 136), math.nan, dtype=q.dtype)  # k and v of a row side by side
    slab[..., 0, :128], slab[..., 1, :128] = k.transpose(1, 2), v.transpose(1, 2)
    k_view, v_view = (slab[..., i, :128].transpose(1, 2) for i in range(2))
    assert same(run(q, k, v, [20, 140]), run(view, k_view, v_view, [20, 140]))


@pytest.mark.full
def test_rows_at_odd_addresses():
    q, k, v = make(1, 4, 1, 1, 64, 140, [133], seed=1, device="cpu")
    odd = []
    for x in (q, k, v):
        wide = torch.full((*x.shape[:3], 69), math.nan, dtype=x.dtype)
        wide[..., 3:67] = x
        odd.append(wide[..., 3:67])
    assert same(run(q, k, v, 133), run(*odd, 133))


@pytest.mark.full
@pytest.mark.parametrize("lengths", [[140], 140])
def test_offsets_beyond_2_31_elements(lengths):
    """The second head lies 2^31 elements after the first (4 GiB of address space, of which little is touched)."""
    d, n = 64, 140
    far = 1 << 31
    store = torch.empty(far + 2 * 200 * d, dtype=torch.bfloat16)
    k, v = (store.as_strided((1, 2, 200, d), (2 * far, far, d, 1), i * 200 * d) for i in range(2))
    gen = torch.Generator().manual_seed(0)
    for x in (k, v):
        x[:, :, :n] = torch.randn(1, 2, n, d, generator=gen).bfloat16()
        x[:, :, n:] = math.nan
    q = torch.randn(1, 4, 1, d, generator=gen).bfloat16()
    check(run(q, k, v, lengths), q, k, v, [n])


@pytest.mark.full
def test_bytes_of_a_decode_step():
    """B 1, Hq 32, Hkv 8, D 128, 400 keys in a capacity of 32768: at most 1.05 x the bytes that this work needs, in one launch."""
    n, h_q, h_kv, d = 400, 32, 8, 128
    q, k, v = make(1, h_q, h_kv, 1, d, n, [n], seed=1, device="cpu")
    big = [torch.nn.functional.pad(x, (0, 0, 0, 32768 - n), value=math.nan) for x in (k, v)]
    record: list = []
    result = run(q, *big, [n], record=record)
    check(result, q, k, v, [n])
    splits = decode.split_count(n, decode.TILE, decode.split_cap(h_kv))
    needed = 2 * n * h_kv * d * 2 + 2 * h_q * d * 2 + 2 * splits * h_q * (d + 1) * 4
    counted = record[0].counters.bytes
    cache = counted["tma-load"] + counted["cp.async"]
    assert cache == 2 * n * h_kv * d * 2, "the active rows, each once"
    touched = cache + sum(counted[x] for x in ("global-load", "global-store", "atomic"))
    assert touched <= 1.05 * needed, f"{touched} bytes, {touched / needed:.3f} x"


@pytest.mark.full
def test_counters_return_to_zero(monkeypatch):
    """Two launches on one workspace, as a replayed graph does."""
    kept: list = []

    def workspace(device, floats, counters):
        if not kept:
            kept.append(decode_workspace(device, floats, counters))
        return kept[0]

    decode_workspace = decode.workspace
    monkeypatch.setattr(decode, "workspace", workspace)
    q, k, v = make(2, 4, 1, 1, 128, 300, [300, 150], seed=4, device="cpu")
    first = run(q, k, v, [300, 150])
    assert not kept[0].counters.any()
    assert same(first, run(q, k, v, [300, 150]))
    # Another length is another number of splits.
    check(run(q, k[:, :, :150], v[:, :, :150], [100, 150]), q, k, v, [100, 150])


BASE = dict(
    bf16=True, head_dim=128, group=4, single_token=True, n=16, split_cap=8, wide=True, causal=True, window=False, softcap=False,
    sink=False, append=False, device_length=False,
)  # fmt: skip
EVERYTHING = dict(window=True, softcap=True, sink=True, append=True, device_length=True)
CHANGES = [
    {}, {"wide": False, **EVERYTHING}, {"single_token": False, **EVERYTHING}, {"n": 32, "group": 40, **EVERYTHING},
    {"single_token": False, "n": 32, "group": 5, "wide": False, **EVERYTHING}, {"device_length": True},
    {"single_token": False, "group": 40, **EVERYTHING}, {"bf16": False, **EVERYTHING},
    {"head_dim": 256, "single_token": False, "group": 40, **EVERYTHING},
]  # fmt: skip


def test_what_is_compiled_ahead():
    """Warm-up's variants are among those whose spills are looked at."""
    seen = [decode.Variant(**{**BASE, **change}) for change in CHANGES]
    assert all(variant in seen for variant in decode._common_variants(ARCH))


@pytest.mark.full
@pytest.mark.parametrize("arch", [ARCH, pytest.param("sm_103a", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_variants_compile_without_spills(change, arch):
    assert_no_spills(decode.decode_kernel.artifact(decode.Variant(**{**BASE, **change}), arch).cubin)


def assert_no_spills(cubin):
    import subprocess
    import tempfile

    tool = _cuobjdump()
    if tool is None:
        pytest.skip("needs cuobjdump")
    with tempfile.NamedTemporaryFile() as f:
        f.write(cubin)
        f.flush()
        usage = subprocess.run([tool, "-res-usage", f.name], capture_output=True, text=True, check=True).stdout
    assert "STACK:0" in usage and "LOCAL:0" in usage, usage


@pytest.mark.parametrize("arch", [ARCH, pytest.param("sm_103a", marks=pytest.mark.full)])
def test_operators_reach_the_kernel(arch):
    import cute_kernels
    from cute_kernels.emulator import emulate

    q, k, v = make(2, 8, 2, 1, 128, 40, [33, 33], seed=5, device="cpu")
    lengths = torch.tensor([33, 7], dtype=torch.int32)
    with emulate(arch) as emulated:
        by_int = cute_kernels.active_attention(q, k, v, 33)
        assert cute_kernels.last_backend() == f"{arch}:decode"
        by_tensor = cute_kernels.active_attention(q, k, v, lengths)
    assert not emulated.hazards, emulated.report()
    check(by_int, q, k, v, [33, 33])
    check(by_tensor, q, k, v, [33, 7])
    assert same([x[:1] for x in by_int], [x[:1] for x in by_tensor])


@pytest.mark.nightly
@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_mechanical_faults_are_caught(kernel, monkeypatch):
    """20 faults spread over all that tools/kernel_mutants.py makes of the kernel's PTX: at least 95 % of those that matter."""
    import importlib.util
    import sys
    from pathlib import Path

    spec = importlib.util.spec_from_file_location("kernel_mutants", Path(__file__).parents[2] / "tools" / "kernel_mutants.py")
    tool = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, tool)
    spec.loader.exec_module(tool)
    assert tool.main([kernel, "--limit", "20"]) == 0
