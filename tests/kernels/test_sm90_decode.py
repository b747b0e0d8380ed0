"""The Hopper decode kernel against a float64 oracle: on a CPU, that every variant compiles without spills and that the split rule
holds; on an H100/H200, the results.

Tolerance. P and the output are rounded to 16 bits (relative error at most u = 2^-8 for bfloat16, 2^-11 for float16), everything
else is fp32. Hence |out - exact| <= u * sum(p |v|) + u * |exact| for the two roundings; 1e-4 * sum(p |v|) more covers fp32 logits
of size ~10 and the approximate exponential.
"""

from __future__ import annotations

import math

import pytest
import torch

from cute_kernels.kernels.splits import split_bound, split_count, split_size, top

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def hopper(test):
    return pytest.mark.gpu(pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU (H100, H200)")(test))


LENGTHS = (0, 1, 7, 63, 64, 65, 127, 128, 129, 234, 400, 1000, 4096)


def exact(q, k, v, lengths, *, sm_scale=None, causal=True, window_left=-1, softcap=0.0, attn_sink=None):
    """out, lse, and sum(p |v|), all float64, one sequence at a time; only the first `lengths[b]` rows are looked at."""
    b, h_q, s, d = q.shape
    h_kv = k.shape[1]
    scale = d**-0.5 if sm_scale is None else sm_scale
    out = torch.zeros(b, h_q, s, d, dtype=torch.float64, device=q.device)
    size, lse = torch.zeros_like(out), torch.full((b, h_q, s), -math.inf, dtype=torch.float64, device=q.device)
    for i in range(b):
        n = int(lengths[i])
        if n == 0:
            continue
        kk = k[i, :, :n].double().repeat_interleave(h_q // h_kv, 0)
        vv = v[i, :, :n].double().repeat_interleave(h_q // h_kv, 0)
        x = q[i].double() @ kk.transpose(1, 2) * scale
        if softcap > 0:
            x = softcap * torch.tanh(x / softcap)
        pos = n - s + torch.arange(s, device=q.device)[:, None]
        key = torch.arange(n, device=q.device)[None]
        hidden = torch.zeros(s, n, dtype=torch.bool, device=q.device)
        if causal:
            hidden |= key > pos
        if window_left >= 0:
            hidden |= key < pos - window_left
        x = x.masked_fill(hidden, -math.inf)
        top = x.amax(-1, keepdim=True).clamp_min(-1e30)
        e = torch.exp(x - top)
        total = e.sum(-1, keepdim=True)
        lse[i] = (top + total.log())[..., 0]
        if attn_sink is not None:
            total = total + torch.exp(attn_sink.double()[:, None, None] - top)
        p = torch.where(total > 0, e / total, 0.0)
        out[i], size[i] = p @ vv, p @ vv.abs()
    return out, lse, size


def check(result, q, k, v, lengths, **options):
    out, lse = result
    b, h_q, s, d = q.shape
    assert out.shape == q.shape and out.dtype == q.dtype and out.transpose(1, 2).is_contiguous()
    want, want_lse, size = exact(q, k, v, lengths, **options)
    u = 2.0**-8 if q.dtype == torch.bfloat16 else 2.0**-11
    bound = u * (size + want.abs()) + 1e-4 * size + 1e-6
    error = (out.double() - want).abs()
    assert not out.isnan().any(), "NaN in out"
    assert bool((error <= bound).all()), f"out: error {float(error.max()):.3g}, {float((error / bound).max()):.3g} x the bound"
    empty = want_lse == -math.inf
    assert bool((lse[empty] == -math.inf).all())
    lse_error = (lse.double() - want_lse)[~empty].abs()
    assert lse_error.numel() == 0 or float(lse_error.max()) < 1e-4, f"lse: error {float(lse_error.max()):.3g}"


def make(b, h_q, h_kv, s, d, capacity, lengths, dtype=torch.bfloat16, seed=0, device="cuda"):
    """q and caches whose rows at or past each length are NaN."""
    gen = torch.Generator(device).manual_seed(seed)
    q, k, v = (
        torch.randn(shape, generator=gen, device=device).to(dtype)
        for shape in ((b, h_q, s, d), (b, h_kv, capacity, d), (b, h_kv, capacity, d))
    )
    for i in range(b):
        k[i, :, int(lengths[i]) :] = math.nan
        v[i, :, int(lengths[i]) :] = math.nan
    return q, k, v


def run(
    q, k, v, kv_len, *, variant=None, sm_scale=None, causal=True, window_left=-1, softcap=0.0, attn_sink=None, k_new=None,
    v_new=None,
):  # fmt: skip
    """The decode kernel, also where the operator would take the prefill kernel."""
    from cute_kernels.kernels.sm90 import decode

    b, h_q, s, d = q.shape
    out = torch.full((b, s, h_q, d), math.nan, dtype=q.dtype, device=q.device).transpose(1, 2)
    lse = torch.full((b, h_q, s), math.nan, device=q.device)
    variant = variant or decode.choose(q, k, v, kv_len, causal, window_left, softcap, attn_sink, k_new, v_new)
    decode.launch(
        q=q, k_cache=k, v_cache=v, kv_len=kv_len, sm_scale=d**-0.5 if sm_scale is None else sm_scale, causal=causal,
        window_left=window_left, softcap=softcap, attn_sink=attn_sink, k_new=k_new, v_new=v_new, out=out, lse=lse, variant=variant,
    )  # fmt: skip
    return out, lse


def device_lengths(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def same(a, b):
    """Equal bit for bit, NaN included."""
    as_int = {2: torch.int16, 4: torch.int32}
    return all(torch.equal(x.view(as_int[x.element_size()]), y.view(as_int[y.element_size()])) for x, y in zip(a, b, strict=True))


# ---- on a CPU ----------------------------------------------------------------------------------------------------
def test_split_rule():
    for tile, cap in ((64, 8), (64, 5), (128, 64)):
        assert all(split_bound(a, tile, cap) <= split_bound(a + 1, tile, cap) for a in range(9000))
        for keys in [*range(1, 600), 1000, 4095, 4096, 4097, 32768, 1 << 20]:
            size = split_size(keys, tile, cap)
            count = split_count(keys, tile, cap)
            assert size % tile == 0 and (count - 1) * size < keys <= count * size
            assert count <= split_bound(keys, tile, cap) <= cap * (1 if keys <= 1024 else 2 if keys <= 8192 else top(tile, cap))
        assert split_count(0, tile, cap) == 1


def test_every_choice_fits_shared_memory():
    """DecodeKernel asserts it. The sizes are those `choose` and `_Plan.shape_of` make of head dimensions, groups and tokens."""
    pytest.importorskip("cutlass")
    from cute_kernels.kernels.sm90.decode import choose
    from cute_kernels.kernels.sm90.decode_kernel import DecodeKernel

    for d in range(16, 257, 8):
        for group in (1, 4, 7, 16, 64):
            for s, b in ((1, 1), (1, 99), (2, 1), (40, 99)):
                q, k = torch.empty(b, group, s, d, dtype=torch.bfloat16, device="meta"), torch.empty(b, 1, 9, d, device="meta")
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr("cute_kernels.kernels.sm90.decode.aligned", lambda *tensors: True)  # no addresses
                    variant = choose(q, k, k, 9, True, -1, 0.0, None, None, None)._asdict()
                del variant["ctas"]
                more = {"stages": 3} if variant["warps"] == 4 and d <= 128 else {}
                for change in ({}, {"cluster": 8}, {"chunked": True, **more}):
                    DecodeKernel(**{**variant, **change})


@pytest.mark.full
def test_variants_compile_without_spills():
    pytest.importorskip("cutlass")
    import subprocess
    import tempfile

    from cute_kernels.kernels.sm90.decode import ARCH, Variant, decode_kernel

    tool = _cuobjdump()
    if tool is None:
        pytest.skip("needs cuobjdump")
    base = dict(
        bf16=True, head_dim=128, group=4, single_token=True, row_tile=8, one_tile=True, warps=4, split_cap=8, wide=True,
        causal=True, window=False, softcap=False, sink=False, append=False, device_length=False, min_blocks=0, stages=2,
        chunked=False, cluster=0, ctas=0,
    )  # fmt: skip
    everything = dict(window=True, softcap=True, sink=True, append=True, device_length=True)
    tokens = dict(single_token=False, one_tile=False, warps=8)
    changes = [{}, {"device_length": True}, {"bf16": False}, {"wide": False}, everything, tokens | everything]
    changes += [{"chunked": True}, {"cluster": 8}, {"head_dim": 64, "chunked": True, "stages": 1}]
    changes += [{"head_dim": d, "device_length": True} for d in (64, 80, 96, 112, 256)]
    changes += [tokens | {"row_tile": 16, "group": g} for g in (1, 16)] + [tokens | {"row_tile": 16, "chunked": True}]
    for change in changes:
        with tempfile.NamedTemporaryFile() as f:
            f.write(decode_kernel.artifact(Variant(**{**base, **change}), ARCH).cubin)
            f.flush()
            usage = subprocess.run([tool, "-res-usage", f.name], capture_output=True, text=True, check=True).stdout
        assert "STACK:0" in usage, f"{change}: {usage}"


def _cuobjdump():
    import importlib.util
    import os
    import shutil

    spec = importlib.util.find_spec("nvidia")
    for root in list(spec.submodule_search_locations) if spec else []:
        path = os.path.join(root, "cu13", "bin", "cuobjdump")
        if os.path.exists(path):
            return path
    return shutil.which("cuobjdump")


# ---- on a GPU ----------------------------------------------------------------------------------------------------
@hopper
@pytest.mark.parametrize("h_q,h_kv", [(8, 8), (32, 8), (16, 2), (32, 2)])
def test_lengths(h_q, h_kv):
    for n in LENGTHS:
        q, k, v = make(1, h_q, h_kv, 1, 128, n + 70, [n], seed=n)
        result = run(q, k, v, device_lengths([n]))
        check(result, q, k, v, [n])
        if n:
            assert same(result, run(q, k, v, n)), f"int and device length differ at {n}"
        wide = torch.full((1, h_kv, n + 5000, 128), math.nan, dtype=q.dtype, device="cuda")
        k2, v2 = wide.clone(), wide
        k2[:, :, :n], v2[:, :, :n] = k[:, :, :n], v[:, :, :n]
        assert same(result, run(q, k2, v2, device_lengths([n]))), f"capacity changes the result at {n}"


@hopper
@pytest.mark.parametrize("s", [1, 4])
def test_batch_equals_alone(s):
    q, k, v = make(len(LENGTHS), 32, 8, s, 128, 4200, LENGTHS, seed=1)
    lengths = device_lengths(LENGTHS)
    result = run(q, k, v, lengths)
    check(result, q, k, v, LENGTHS)
    for i in range(len(LENGTHS)):
        alone = run(q[i : i + 1], k[i : i + 1], v[i : i + 1], lengths[i : i + 1])
        assert same([x[i : i + 1] for x in result], alone), f"row {i}"
    for _ in range(3):
        assert same(result, run(q, k, v, lengths)), "two runs differ"


@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 80, 96, 112, 128, 256])
def test_head_dims(d, dtype):
    for group, s in ((1, 1), (4, 1), (8, 2), (16, 1)):
        for lengths in ([0, 1, 65], [129, 400, 1000]):
            q, k, v = make(3, 2 * group, 2, s, d, 1100, lengths, dtype, seed=d + group)
            check(run(q, k, v, device_lengths(lengths)), q, k, v, lengths)


@hopper
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("s", [2, 5, 17, 200])
def test_query_lengths(s, causal):
    for group in (1, 4, 16):
        lengths = [3, 64, 234, 1000]
        q, k, v = make(4, 2 * group, 2, s, 128, 1024, lengths, seed=s)
        check(run(q, k, v, device_lengths(lengths), causal=causal), q, k, v, lengths, causal=causal)
        check(run(q[2:], k[2:], v[2:], 234, causal=causal), q[2:], k[2:], v[2:], [234, 234], causal=causal)


@hopper
@pytest.mark.parametrize("s", [1, 3, 40])
def test_options(s):
    lengths = [0, 7, 129, 1000]
    q, k, v = make(4, 16, 4, s, 128, 1024, lengths, seed=s)
    sink = torch.randn(16, device="cuda")
    sink[:2] = torch.tensor([math.inf, -math.inf])
    for options in (
        {"window_left": 0}, {"window_left": 100}, {"window_left": 5000}, {"window_left": 30, "causal": False},
        {"softcap": 5.0}, {"attn_sink": sink}, {"sm_scale": -0.3}, {"sm_scale": 0.0},
        {"window_left": 77, "softcap": 30.0, "attn_sink": sink, "sm_scale": 0.2},
    ):  # fmt: skip
        check(run(q, k, v, device_lengths(lengths), **options), q, k, v, lengths, **options)
        check(run(q[2:3], k[2:3], v[2:3], 129, **options), q[2:3], k[2:3], v[2:3], [129], **options)


@hopper
@pytest.mark.parametrize("s", [1, 4, 37])
def test_append(s):
    lengths = [0, 2, 64, 500, 1024]
    q, k, v = make(5, 16, 4, s, 128, 1024, [max(0, n - s) for n in lengths], seed=s)
    gen = torch.Generator("cuda").manual_seed(9)
    k_new, v_new = (torch.randn(5, 4, s, 128, generator=gen, device="cuda").bfloat16() for _ in range(2))
    want_k, want_v = k.clone(), v.clone()
    for i, n in enumerate(lengths):
        for row in range(s):
            if 0 <= n - s + row < 1024:
                want_k[i, :, n - s + row], want_v[i, :, n - s + row] = k_new[i, :, row], v_new[i, :, row]
    result = run(q, k, v, device_lengths(lengths), k_new=k_new, v_new=v_new)
    assert same([k, v], [want_k, want_v]), "cache bytes"
    check(result, q, want_k, want_v, lengths)


@hopper
def test_strides():
    n, s, h_q, h_kv, d = 300, 3, 8, 2, 128
    q, k, v = make(2, h_q, h_kv, s, d, 400, [n, n], seed=5)
    want = run(q, k, v, n)
    check(want, q, k, v, [n, n])
    fused = torch.randn(2, s, h_q + 2 * h_kv, d, device="cuda").bfloat16()
    fused[:, :, :h_q] = q.transpose(1, 2)
    bshd = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    assert same(want, run(fused[:, :, :h_q].transpose(1, 2), *bshd, n))
    # Rows that start at odd multiples of 2 bytes take the narrow variant.
    odd = []
    for x in (q, k, v):
        wide = torch.full((*x.shape[:3], d + 5), math.nan, dtype=x.dtype, device="cuda")
        wide[..., 3 : 3 + d] = x
        odd.append(wide[..., 3 : 3 + d])
    assert same(want, run(*odd, n))


@hopper
def test_offsets_past_2_to_31():
    b, h_kv, capacity, d = 65, 8, 32768, 128  # 2.2e9 elements, 4.4 GB each
    k, v = (torch.empty(b, h_kv, capacity, d, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    q, ks, vs = make(2, 32, h_kv, 1, d, 400, [400, 400], seed=3)
    k[-2:, :, :400], v[-2:, :, :400] = ks, vs
    lengths = device_lengths([0] * 63 + [234, 400])
    result = run(q.repeat_interleave(torch.tensor([64, 1], device="cuda"), 0), k, v, lengths)
    check([x[-2:] for x in result], q, ks, vs, [234, 400])


@hopper
def test_graph_replays_every_length():
    capacity = 32768
    q, k, v = make(1, 32, 8, 1, 128, capacity, [capacity], seed=4)
    lengths = device_lengths([235])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(q, k, v, lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = run(q, k, v, lengths)
    for n in (1, 64, 65, 235, 400, 1024, 4096, 20000, 32768, 235):
        lengths.fill_(n)
        for x in result:
            x.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert same(result, run(q, k, v, n)), n
        check(result, q, k, v, [n])


@hopper
@pytest.mark.parametrize("change", [{"stages": 1}, {"ctas": 8}, {"ctas": 24, "stages": 1}, {"cluster": 0}])
def test_launch_shapes_do_not_change_bits(change):
    """Ring slots, and how many splits a CTA takes."""
    from cute_kernels.kernels.sm90.decode import choose

    for s, n in [(1, n) for n in LENGTHS[1:]] + [(3, 400), (3, 4096)]:
        q, k, v = make(1, 32, 8, s, 128, n + 5, [n], seed=n)
        variant = choose(q, k, v, n, True, -1, 0.0, None, None, None)._replace(**change)
        result = run(q, k, v, n)
        assert same(result, run(q, k, v, n, variant=variant)), (s, n)
        variant = variant._replace(device_length=True)
        assert same(result, run(q, k, v, device_lengths([n]), variant=variant)), (s, n, "device length")


@hopper
@pytest.mark.full
@pytest.mark.parametrize("kind", range(25))
def test_fuzz(kind):
    """300 cases: 12 of each of 25 kinds (compiling a kind's variants costs more than running them)."""
    import random

    rng = random.Random(kind)
    d, group, s = rng.choice([64, 128, 128]), rng.choice([1, 2, 4, 7, 8, 16]), rng.choice([1, 1, 2, 3, 8])
    h_kv = rng.choice([2, 8])
    options = {}
    if rng.random() < 0.3:
        options["window_left"] = rng.choice([0, 5, 64, 1000])
    if rng.random() < 0.2:
        options["softcap"] = rng.choice([3.0, 50.0])
    if rng.random() < 0.3:
        options["attn_sink"] = torch.randn(group * h_kv, device="cuda")
    for case in range(12):
        b = rng.randint(1, 5)
        lengths = [rng.choice([0, 1, rng.randint(1, 200), rng.randint(1, 3000)]) for _ in range(b)]
        q, k, v = make(b, group * h_kv, h_kv, s, d, max(lengths) + rng.randint(0, 300), lengths, seed=12 * kind + case)
        try:
            check(run(q, k, v, device_lengths(lengths), **options), q, k, v, lengths, **options)
        except AssertionError as error:
            raise AssertionError(f"d {d} group {group} h_kv {h_kv} s {s} {options}, {lengths}: {error}") from error
