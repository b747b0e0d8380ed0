"""sparse_prefill against an independent float64 oracle: FlashMLA's own grid in shape, and what that grid leaves out."""

import math
import sys
from pathlib import Path

import oracles
import pytest
import torch

import cute_kernels
from cute_kernels.integrations.flash_mla import flash_mla_sparse_fwd

PAIRS = [(128, 128), (256, 256), (512, 512), (592, 128), (1840, 256), (1592, 384), (1521, 512), (95, 128), (153, 256), (114, 384)]
IRREGULAR = PAIRS[3:]


def check(sm_scale=0.5, call=cute_kernels.sparse_prefill, mask=None, group_size=16, **inputs):
    extra = {} if mask is None else dict(head_group_mask=mask, head_group_size=group_size)
    q, kv, indices = inputs["q"], inputs["kv"], inputs["indices"]
    options = {k: v for k, v in inputs.items() if k in ("attn_sink", "topk_length")}
    got = call(q, kv, indices, sm_scale, **options, **extra)
    oracles.assert_flashmla(got, oracles.sparse_prefill(q, kv, indices, sm_scale, mask=mask, group_size=group_size, **options))
    return got


@pytest.mark.parametrize("s_q", [0, 1, 62])
@pytest.mark.parametrize("s_kv,topk", [(128, 128), (1592, 384), (114, 384)])
@pytest.mark.parametrize("d_qk,h_q", [(576, 64), (512, 128)])
def test_flashmla_grid_small(d_qk, h_q, s_kv, topk, s_q):
    check(**oracles.sparse_inputs(s_q, h_q, s_kv, topk, d_qk, seed=s_q, strided=True, sink=s_q == 1, length=s_q == 62))


@pytest.mark.full
@pytest.mark.parametrize("s_q", [0, 1, 62, 213])
@pytest.mark.parametrize("s_kv,topk", PAIRS)
@pytest.mark.parametrize("h_q", [64, 128])
@pytest.mark.parametrize("d_qk", [512, 576])
def test_flashmla_grid(d_qk, h_q, s_kv, topk, s_q):
    check(**oracles.sparse_inputs(s_q, h_q, s_kv, topk, d_qk, seed=s_q, strided=True))


@pytest.mark.full
@pytest.mark.parametrize("sink,length", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("s_kv,topk", IRREGULAR)
@pytest.mark.parametrize("h_q", [64, 128])
@pytest.mark.parametrize("d_qk", [512, 576])
@pytest.mark.parametrize("s_q", [62, pytest.param(213, marks=pytest.mark.nightly)])
def test_flashmla_features(s_q, d_qk, h_q, s_kv, topk, sink, length):
    check(**oracles.sparse_inputs(s_q, h_q, s_kv, topk, d_qk, seed=topk, sink=sink, length=length, strided=True))


@pytest.mark.parametrize("s_kv,topk", [(128, 128), (32, 2048), pytest.param(64, 8192, marks=pytest.mark.full)])
def test_rows_without_a_valid_key(s_kv, topk):
    inputs = oracles.sparse_inputs(24, 64, s_kv, topk, 576, sink=True, length=True, invalid_rows=0.3)
    out, max_logits, lse = check(**inputs)
    empty = torch.isposinf(lse)
    assert empty.any()
    assert (out[empty] == 0).all() and torch.isneginf(max_logits[empty]).all()


@pytest.mark.parametrize("h_q", [1, 2, 3, 7, 16, 17, 33, 100, 127, 128])
def test_any_head_count(h_q):
    check(**oracles.sparse_inputs(3, h_q, 300, 130, 576, seed=h_q, sink=True))


def test_no_heads_and_no_keys():
    for h_q, s_kv, topk in [(0, 10, 5), (4, 0, 5), (4, 10, 0)]:
        inputs = oracles.sparse_inputs(3, h_q, s_kv, topk, 512)
        out, max_logits, lse = check(**inputs)
        assert out.shape == (3, h_q, 512)
        assert torch.isneginf(max_logits).all() and torch.isposinf(lse).all() and (out == 0).all()


@pytest.mark.parametrize("topk", [1, 5, 63, 127, 129, 200])
def test_topk_not_a_multiple_of_128(topk):
    check(**oracles.sparse_inputs(4, 32, 500, topk, 576, length=True))


@pytest.mark.parametrize("sm_scale", [0.0, -0.7, 192**-0.5, 3.0])
def test_any_scale(sm_scale):
    check(sm_scale, **oracles.sparse_inputs(5, 16, 200, 160, 576, sink=True, length=True))


def test_a_key_listed_twice_counts_twice():
    inputs = oracles.sparse_inputs(2, 16, 50, 40, 576)
    inputs["indices"][:, :, 20:] = inputs["indices"][:, :, :20]
    once = cute_kernels.sparse_prefill(inputs["q"], inputs["kv"], inputs["indices"][:, :, :20], 0.5)
    twice = check(**inputs)
    torch.testing.assert_close(twice[2], once[2] + math.log(2), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(twice[0], once[0], rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("h_q,group_size", [(128, 16), (128, 128), (64, 8), (128, 32), (8, 1), (4, 2), (16, 4), (64, 64)])
def test_head_group_mask(h_q, group_size):
    inputs = oracles.sparse_inputs(6, h_q, 400, 256, 576, seed=h_q, sink=True, length=True)
    g = torch.Generator().manual_seed(1)
    mask = torch.randint(0, 256, (6, 2, 128), generator=g, dtype=torch.uint8)
    mask[0] = 0
    mask[1] = 255
    mask[2, :, :16] = 0  # one group sees nothing
    out, max_logits, lse = check(mask=mask, group_size=group_size, **inputs)
    assert torch.isneginf(max_logits[0]).all()
    plain = cute_kernels.sparse_prefill(inputs["q"], inputs["kv"], inputs["indices"], 0.5, attn_sink=inputs["attn_sink"],
                                        topk_length=inputs["topk_length"])  # fmt: skip
    assert torch.equal(out[1], plain[0][1]) and torch.equal(lse[1], plain[2][1])


def test_bytes_of_absent_groups_are_ignored():
    inputs = oracles.sparse_inputs(3, 32, 200, 128, 512)
    args = (inputs["q"], inputs["kv"], inputs["indices"], 0.5)
    mask = torch.randint(0, 256, (3, 1, 128), dtype=torch.uint8)
    other = mask.clone()
    other[:, :, 32:] ^= 255
    a = cute_kernels.sparse_prefill(*args, head_group_mask=mask)
    b = cute_kernels.sparse_prefill(*args, head_group_mask=other)
    for x, y in zip(a, b):
        assert torch.equal(x, y)


@pytest.mark.parametrize("masked", [False, True])
def test_rows_that_do_not_count_never_bring_a_nan(masked):
    inputs = oracles.sparse_inputs(4, 32, 300, 128, 576, seed=3, length=True)
    inputs["topk_length"][:] = torch.tensor([128, 50, 1, 0])
    mask = torch.randint(0, 256, (4, 1, 128), dtype=torch.uint8) if masked else None
    kv = inputs["kv"].clone()
    want = oracles.sparse_prefill(inputs["q"], kv, inputs["indices"], 0.5, topk_length=inputs["topk_length"], mask=mask)
    for value in (math.nan, math.inf):
        poisoned = kv.clone()
        for row in range(4):
            used = torch.zeros(300, dtype=torch.bool)
            for p in range(int(inputs["topk_length"][row])):
                index = int(inputs["indices"][row, 0, p])
                if 0 <= index < 300 and (mask is None or any(oracles.mask_bit(mask[row], g, p) for g in range(2))):
                    used[index] = True
            poisoned[:] = kv
            poisoned[~used] = value
            part = {k: v[row : row + 1] for k, v in inputs.items() if k in ("q", "indices", "topk_length")}
            extra = {} if mask is None else dict(head_group_mask=mask[row : row + 1])
            got = cute_kernels.sparse_prefill(
                part["q"], poisoned, part["indices"], 0.5, topk_length=part["topk_length"], **extra
            )
            oracles.assert_flashmla(got, tuple(t[row : row + 1] for t in want))


def test_a_nan_key_reaches_only_the_groups_that_count_it():
    # The contract lets it reach the other groups of the row; the reference is exact.
    inputs = oracles.sparse_inputs(1, 32, 128, 128, 576)
    inputs["indices"][0, 0] = torch.arange(128)
    kv = inputs["kv"].clone()
    kv[7] = math.nan
    mask = torch.full((1, 1, 128), 255, dtype=torch.uint8)
    mask[0, 0, 0] = 0x7F  # group 0 leaves key 7 out, group 1 counts it
    out, _, _ = cute_kernels.sparse_prefill(inputs["q"], kv, inputs["indices"], 0.5, head_group_mask=mask)
    assert torch.isfinite(out[0, :16]).all() and torch.isnan(out[0, 16:]).all()


def test_out_is_written_in_place_and_may_be_a_slice_of_a_fused_buffer():
    inputs = oracles.sparse_inputs(5, 16, 100, 64, 576)
    fused = torch.zeros(5, 16, 576 + 512, dtype=torch.bfloat16)
    fused[..., :576] = inputs["q"]
    q, out = fused[..., :576], fused[..., 576:]
    got, max_logits, lse = cute_kernels.sparse_prefill(q, inputs["kv"], inputs["indices"], 0.5, out=out)
    assert got is out
    want = cute_kernels.sparse_prefill(inputs["q"], inputs["kv"], inputs["indices"], 0.5)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[2]) and torch.equal(q, inputs["q"])


def test_s_kv_near_two_to_the_31():
    s_kv = 2**31 - 1
    inputs = oracles.sparse_inputs(2, 8, 16, 16, 512)
    kv = inputs["kv"][:1].expand(s_kv, 1, 512)  # stride 0: every row is the same
    indices = torch.tensor([[[s_kv - 1, 2**31 - 1, -(2**31), s_kv - 2, 0]], [[2**31 - 1, -1, -5, -(2**31), -7]]], dtype=torch.int32)
    out, max_logits, lse = cute_kernels.sparse_prefill(inputs["q"], kv, indices, 0.5)
    same = oracles.sparse_prefill(inputs["q"], inputs["kv"][:1], torch.tensor([[[0, 0, 0]], [[-1, -1, -1]]]).int(), 0.5)
    oracles.assert_flashmla((out, max_logits, lse), same)


def test_flash_mla_signature():
    inputs = oracles.sparse_inputs(4, 64, 200, 128, 576, sink=True, length=True)
    check(call=flash_mla_sparse_fwd, **inputs)
    out = torch.empty(4, 64, 512, dtype=torch.bfloat16)
    args = (inputs["q"], inputs["kv"], inputs["indices"], 0.5, 512, inputs["attn_sink"], inputs["topk_length"])
    got = flash_mla_sparse_fwd(*args, out=out)
    assert got[0] is out
    assert torch.equal(out, flash_mla_sparse_fwd(*args)[0])
    assert torch.equal(out, flash_mla_sparse_fwd(*args, use_legacy=True)[0])
    assert cute_kernels.integrations.flash_mla.flash_mla_sparse_fwd is flash_mla_sparse_fwd


def test_float64_reference_agrees_with_the_oracle():
    inputs = oracles.sparse_inputs(6, 16, 100, 90, 576, sink=True, length=True)
    inputs |= dict(q=inputs["q"].double(), kv=inputs["kv"].double())
    got = cute_kernels.reference.sparse_prefill(**inputs, sm_scale=0.5, compute_dtype=torch.float64)
    want = oracles.sparse_prefill(**inputs, sm_scale=0.5)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


_MEMORY = """
import resource, torch, cute_kernels
torch.manual_seed(0)
q = (torch.randn(ROWS, HEADS, 576) / 10).bfloat16(); kv = (torch.randn(8192, 1, 576) / 10).bfloat16()
idx = torch.randint(0, 8192, (ROWS, 1, 2048), dtype=torch.int32)
cute_kernels.sparse_prefill(q[:2], kv, idx[:2], 0.5)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
out = cute_kernels.sparse_prefill(q, kv, idx, 0.5)
grown = peak() - before - sum(t.numel() * t.element_size() for t in out)
print("grown", grown)
assert grown < 1 << 30, grown
"""


@pytest.mark.parametrize("rows,heads", [(256, 128), pytest.param(4096, 16, marks=pytest.mark.full)])
def test_peak_memory_stays_under_one_gib(rows, heads):
    import subprocess

    script = _MEMORY.replace("ROWS", str(rows)).replace("HEADS", str(heads))
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
