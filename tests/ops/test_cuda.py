"""The operators on a CUDA device: the reference there (with its one warning), and whatever native kernel the device has."""

import math
import warnings

import oracles
import pytest
import torch

import cute_kernels as ck
from cute_kernels.ops import dispatch

pytestmark = pytest.mark.gpu
NATIVE = [False, True]


@pytest.fixture(params=NATIVE, ids=["reference", "as dispatched"])
def backend(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(dispatch, "KERNELS", {})
        monkeypatch.setattr(dispatch, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield request.param


def cuda(inputs):
    return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}


def cpu(results):
    return tuple(t.cpu() for t in results)


@pytest.mark.parametrize("d_qk,h_q,s_q,s_kv,topk", [(576, 64, 20, 400, 256), (512, 128, 7, 95, 128), (576, 5, 9, 300, 200)])
@pytest.mark.parametrize("masked", [False, True])
def test_sparse_prefill(backend, d_qk, h_q, s_q, s_kv, topk, masked):
    inputs = oracles.sparse_inputs(s_q, h_q, s_kv, topk, d_qk, sink=True, length=True, invalid_rows=0.2)
    extra = {}
    if masked and topk % 128 == 0 and h_q % 16 == 0:
        extra = dict(head_group_mask=torch.randint(0, 256, (s_q, topk // 128, 128), dtype=torch.uint8))
    got = cpu(ck.sparse_prefill(**cuda(inputs), sm_scale=0.5, **cuda(extra)))
    mask = extra.get("head_group_mask")
    oracles.assert_flashmla(got, oracles.sparse_prefill(**inputs, sm_scale=0.5, mask=mask))


@pytest.mark.parametrize("cu", [None, [0, 3, 3, 14, 20]])
def test_grouping(backend, cu):
    inputs = oracles.sparse_inputs(21, 6, 90, 40, 512, sink=True)
    bounds = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    for a, b in zip(
        ck.group_topk(inputs["indices"].cuda(), 90, 8, cu_seqlens_q=None if bounds is None else bounds.cuda()),
        ck.group_topk(inputs["indices"], 90, 8, cu_seqlens_q=bounds),
    ):
        assert torch.equal(a.cpu(), b)
    got = ck.grouped_sparse_prefill(
        **{k: v for k, v in cuda(inputs).items() if v is not None},
        sm_scale=0.5,
        cu_seqlens_q=None if bounds is None else bounds.cuda(),
    )
    out, max_logits, lse = oracles.sparse_prefill(inputs["q"], inputs["kv"], inputs["indices"], 0.5, attn_sink=inputs["attn_sink"])
    if cu is not None:
        out[20:], max_logits[20:], lse[20:] = 0, -math.inf, math.inf
    oracles.assert_flashmla(cpu(got), (out, max_logits, lse))


@pytest.mark.parametrize("s", [1, 3])
@pytest.mark.parametrize("options", [{}, dict(causal=False, window_left=9, softcap=4.0)])
def test_active_attention(backend, s, options):
    g = torch.Generator().manual_seed(0)
    lengths = [0, 5, 129, 200]
    q = torch.randn(4, s, 8, 64, generator=g).bfloat16().transpose(1, 2)
    k, v = torch.randn(2, 4, 2, 200, 64, generator=g).bfloat16()
    want, want_lse = oracles.active_attention(q, k, v, lengths, **options)
    for i, n in enumerate(lengths):
        k[i, :, n:] = v[i, :, n:] = math.nan
    kv_len = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    out, lse = ck.active_attention(q.cuda(), k.cuda(), v.cuda(), kv_len, **options)
    # P is rounded to bf16 before P V in a kernel: two more roundings than the reference's one.
    torch.testing.assert_close(out.cpu().double(), want, rtol=2**-6, atol=2**-7)
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("s,lengths", [(1, [5, 1, 16, 0]), (4, [24, 4, 3, 0]), (4, [2, 1, 20, 24])])
def test_append(backend, s, lengths):
    g = torch.Generator().manual_seed(1)
    q = torch.randn(4, 8, s, 64, generator=g).half()
    k_new, v_new = torch.randn(2, 4, 2, s, 64, generator=g).half()
    k, v = torch.randn(2, 4, 2, 24, 64, generator=g).half()
    kv_len = torch.tensor(lengths, dtype=torch.int32)
    device = [t.cuda() for t in (q, k_new, v_new, k, v, kv_len)]
    out, lse = ck.active_attention_append(*device)
    want, want_lse = ck.active_attention_append(q, k_new, v_new, k, v, kv_len)
    assert torch.equal(device[3].cpu(), k) and torch.equal(device[4].cpu(), v)
    torch.testing.assert_close(out.cpu(), want, rtol=2**-8, atol=2**-8)
    torch.testing.assert_close(lse.cpu(), want_lse, rtol=1e-4, atol=1e-4)


def test_lengths_cause_no_sync(backend):
    q, k, v = (torch.randn(2, h, n, 64, device="cuda").bfloat16() for h, n in ((8, 1), (2, 64), (2, 64)))
    kv_len = torch.tensor([5, 64], dtype=torch.int32, device="cuda")
    i = cuda(oracles.sparse_inputs(4, 64, 90, 128, 576, length=True))
    ck.active_attention(q, k, v, kv_len), ck.sparse_prefill(**i, sm_scale=0.5)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ck.active_attention(q, k, v, kv_len)
        ck.sparse_prefill(**i, sm_scale=0.5)
        ck.grouped_sparse_prefill(i["q"][:, :16], i["kv"], i["indices"], 0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_reference_warns_once_and_names_the_kernels(monkeypatch):
    monkeypatch.setattr(dispatch, "KERNELS", {})
    monkeypatch.setattr(dispatch, "_warned", set())
    q, k = torch.randn(1, 2, 1, 8, device="cuda"), torch.randn(1, 2, 4, 8, device="cuda")
    with pytest.warns(UserWarning, match="running the exact reference on cuda"):
        ck.active_attention(q, k, k, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ck.active_attention(q, k, k, 3)
    assert ck.last_backend() == "reference[cuda]"
