"""The Python functions call an implementation past torch's dispatcher where nothing observes them: nothing may differ for that."""

import pytest
import torch

import cute_kernels as ck
from cute_kernels.emulator import emulate

OPS = torch.ops.cute_kernels


def sparse_inputs():
    g = torch.Generator().manual_seed(0)
    q, kv = torch.randn(2, 4, 576, generator=g).bfloat16(), torch.randn(50, 1, 576, generator=g).bfloat16()
    return q, kv, torch.randint(0, 50, (2, 1, 20), generator=g, dtype=torch.int32)


def active_inputs():
    g = torch.Generator().manual_seed(0)
    q, new = torch.randn(2, 4, 3, 64, generator=g).bfloat16(), torch.randn(2, 2, 2, 3, 64, generator=g).bfloat16()
    k, v = (torch.randn(2, 2, 30, 64, generator=g).bfloat16() for _ in range(2))
    return q, *new, k, v, torch.tensor([9, 4], dtype=torch.int32)


def test_lazy_negation_is_resolved():
    q, kv, indices = sparse_inputs()
    lazy = torch._neg_view(kv)
    with emulate("sm_90a"):
        got = ck.sparse_prefill(q, lazy, indices, 0.05)
        want = OPS.sparse_prefill_fwd(q, lazy, indices, 0.05)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    q, _, _, k, v, kv_len = active_inputs()
    lazy = torch._neg_view(q)
    with emulate("sm_90a"):
        got, want = ck.active_attention(lazy, k, v, kv_len), OPS.active_attention.seq_lens(lazy, k, v, kv_len)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_meta_tensors():
    q, kv, indices = (t.to("meta") for t in sparse_inputs())
    assert [tuple(t.shape) for t in ck.sparse_prefill(q, kv, indices, 0.1)] == [(2, 4, 512), (2, 4), (2, 4)]
    assert ck.group_topk(indices, 50, 2)[0].shape == (1, 1, 128)
    assert ck.grouped_sparse_prefill(q, kv, indices, 0.1)[0].shape == (2, 4, 512)
    q, k_new, v_new, k, v, kv_len = (t.to("meta") for t in active_inputs())
    for out, lse in (
        ck.active_attention(q, k, v, 9), ck.active_attention(q, k, v, kv_len),
        ck.active_attention_append(q, k_new, v_new, k, v, kv_len),
    ):  # fmt: skip
        assert out.is_meta and out.shape == (2, 4, 3, 64) and lse.shape == (2, 4, 3)


def test_trace_records_the_operator():
    args = sparse_inputs()
    traced = torch.jit.trace(lambda *a: ck.sparse_prefill(*a, 0.07)[0], args, check_trace=False)
    other = torch.randn_like(args[0])
    assert torch.equal(traced(other, *args[1:]), ck.sparse_prefill(other, *args[1:], 0.07)[0])


@pytest.mark.parametrize("call", [ck.active_attention_append, OPS.active_attention_append], ids=["python", "ops"])
@pytest.mark.parametrize("missing", [(1,), (2,), (1, 2)])
def test_append_needs_both_tensors(call, missing):
    args = list(active_inputs())
    before = [args[3].clone(), args[4].clone()]
    for i in missing:
        args[i] = None
    with pytest.raises(TypeError, match="k_new must be a torch" if 1 in missing else "v_new must be a torch"):
        call(*args)
    assert torch.equal(args[3], before[0]) and torch.equal(args[4], before[1])


@pytest.mark.parametrize("call", [ck.active_attention_append, OPS.active_attention_append], ids=["python", "ops"])
@pytest.mark.parametrize("emulated", [False, True])
def test_append_counts_as_a_write(call, emulated):
    """Backward through a tensor saved before the append fails, as after torch's own in-place operations."""
    q, k_new, v_new, k, v, kv_len = active_inputs()
    weight = torch.randn_like(k).requires_grad_()
    y = (weight * k).sum()

    def append(*caches):
        with torch.no_grad():
            if not emulated:
                return call(q, k_new, v_new, *caches, kv_len)
            with emulate("sm_90a"):
                return call(q, k_new, v_new, *caches, kv_len)

    append(k, v)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with torch.inference_mode():
        caches = k.clone(), v.clone()
        append(*caches)
    with pytest.raises(RuntimeError, match="inference tensor outside InferenceMode"):
        append(*caches)


def test_boundaries_are_checked(monkeypatch):
    monkeypatch.setattr("cute_kernels.ops._common._checking", True)  # CUTE_KERNELS_CHECK=1
    indices = sparse_inputs()[2]
    for ends in ([2, 0], [0, 99], [-3, 2]):
        with pytest.raises(ValueError, match="cu_seqlens_q must ascend within"):
            ck.group_topk(indices, 50, 2, cu_seqlens_q=torch.tensor(ends, dtype=torch.int32))
    assert ck.group_topk(indices, 50, 2, cu_seqlens_q=torch.tensor([0, 1, 1, 2], dtype=torch.int32))[1].shape == (4,)
