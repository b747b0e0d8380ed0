"""active_attention and active_attention_append against an independent float64 oracle."""

import math

import oracles
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import cute_kernels

# float32 arithmetic on float32 inputs: sums of up to 1000 products of unit-variance values, 2**-24 each, with room for ordering.
F32 = dict(rtol=2e-5, atol=2e-6)
# One rounding of the result to a 16-bit type: 2**-9 (bf16) or 2**-12 (fp16) relative.
ROUNDING = {torch.bfloat16: dict(rtol=2**-8, atol=2**-13), torch.float16: dict(rtol=2**-11, atol=2**-15), torch.float32: F32}


def make(b, h_q, h_kv, s, d, capacity, lengths, dtype=torch.float32, seed=0, tail=math.nan):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(b, s, h_q, d, generator=g).to(dtype).transpose(1, 2)
    k, v = (torch.randn(b, h_kv, capacity, d, generator=g).to(dtype) for _ in range(2))
    for i, n in enumerate(lengths):
        k[i, :, n:] = tail
        v[i, :, n:] = tail
    return q, k, v


def check(q, k, v, lengths, as_tensor=True, **options):
    kv_len = torch.tensor(lengths, dtype=torch.int32) if as_tensor else lengths[0]
    out, lse = cute_kernels.active_attention(q, k, v, kv_len, **options)
    want, want_lse = oracles.active_attention(q, k, v, lengths, **options)
    torch.testing.assert_close(out.double(), want, **ROUNDING[q.dtype])
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    b, h_q, s, d = q.shape
    assert out.shape == q.shape and out.dtype == q.dtype and lse.dtype == torch.float32
    assert out.transpose(1, 2).is_contiguous() and lse.shape == (b, h_q, s)
    return out, lse


@pytest.mark.parametrize("length", [1, 7, 63, 64, 65, 127, 128, 129, 234, 400, 1000])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_lengths_with_a_poisoned_tail(length, as_tensor):
    q, k, v = make(1, 8, 2, 1, 64, 1024, [length], torch.bfloat16)
    check(q, k, v, [length], as_tensor)


@pytest.mark.parametrize("s", [1, 2, 5, 17, 200])
@pytest.mark.parametrize("causal", [True, False])
def test_query_lengths(s, causal):
    q, k, v = make(2, 4, 2, s, 32, 256, [230, 100])
    check(q, k, v, [230, 100], causal=causal)


@pytest.mark.parametrize("h_q,h_kv", [(1, 1), (4, 4), (8, 2), (8, 1), (16, 1), (40, 2)])
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_grouped_heads_and_dtypes(h_q, h_kv, dtype):
    q, k, v = make(3, h_q, h_kv, 2, 64, 96, [0, 33, 96], dtype)
    check(q, k, v, [0, 33, 96])


@pytest.mark.parametrize("d", [1, 4, 64, 80, 96, 112, 128, 256])
def test_head_dimensions(d):
    q, k, v = make(1, 4, 2, 3, d, 70, [66])
    check(q, k, v, [66], False)


def test_rows_before_position_zero_and_idle_slots():
    q, k, v = make(3, 2, 1, 5, 16, 8, [0, 2, 8])
    out, lse = check(q, k, v, [0, 2, 8])
    assert (out[0] == 0).all() and torch.isneginf(lse[0]).all()
    assert (out[1, :, :3] == 0).all() and torch.isneginf(lse[1, :, :3]).all() and torch.isfinite(lse[1, :, 3:]).all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 1, 16, 1000, 2**63 - 1])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("sink", [False, True])
def test_options(causal, window, softcap, sink):
    q, k, v = make(2, 4, 2, 6, 32, 64, [50, 3])
    attn_sink = torch.tensor([0.3, -math.inf, math.inf, -2.0]) if sink else None
    check(q, k, v, [50, 3], causal=causal, window_left=window, softcap=softcap, attn_sink=attn_sink, sm_scale=0.3)


def test_strided_views_are_read_in_place():
    b, h_q, h_kv, s, d = 2, 8, 2, 3, 16
    fused = torch.randn(b, s, (h_q + 2 * h_kv) * d)
    q = fused[..., : h_q * d].view(b, s, h_q, d).transpose(1, 2)
    slab = torch.randn(2, 40, b, h_kv, d + 4)[..., :d]  # [k/v, C, B, Hkv, D]
    k, v = slab.permute(0, 2, 3, 1, 4)
    check(q, k, v, [17, 40])
    check(q, k[:, :1].expand(b, h_kv, 40, d), v, [17, 40])


def test_a_row_does_not_depend_on_capacity_or_on_its_neighbours():
    q, k, v = make(3, 8, 2, 2, 64, 300, [130, 7, 300])
    lengths = torch.tensor([130, 7, 300], dtype=torch.int32)
    out, lse = cute_kernels.active_attention(q, k, v, lengths)
    for i in range(3):
        alone = cute_kernels.active_attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], lengths[i : i + 1])
        assert torch.equal(alone[0][0], out[i]) and torch.equal(alone[1][0], lse[i])
    short = cute_kernels.active_attention(q[:1], k[:1, :, :130], v[:1, :, :130], 130)
    assert torch.equal(short[0][0], out[0]) and torch.equal(short[1][0], lse[0])


def test_empty_sizes():
    for b, h_q, h_kv, s in [(0, 4, 2, 3), (2, 0, 2, 3), (2, 4, 2, 0), (2, 0, 0, 1)]:
        q, k, v = make(b, h_q, h_kv, s, 8, 5, [4] * b)
        out, lse = cute_kernels.active_attention(q, k, v, 4)
        assert out.shape == (b, h_q, s, 8) and lse.shape == (b, h_q, s)
    q, k, v = make(2, 4, 2, 1, 8, 0, [0, 0])
    out, lse = cute_kernels.active_attention(q, k, v, torch.zeros(2, dtype=torch.int32))
    assert (out == 0).all() and torch.isneginf(lse).all()


def test_offsets_past_two_to_the_31_elements():
    storage = torch.empty(0, dtype=torch.bfloat16)
    # A small active region at a huge head and batch stride: storage is only reserved, and touched at the active rows.
    stride_b, stride_h = 2**31 + 8192, 2**30 + 4096
    storage = torch.empty(stride_b + stride_h + 64 * 16 + 16, dtype=torch.bfloat16)
    k = storage.as_strided((2, 2, 64, 16), (stride_b, stride_h, 16, 1))
    g = torch.Generator().manual_seed(0)
    k[:, :, :9] = torch.randn(2, 2, 9, 16, generator=g).bfloat16()
    q = torch.randn(2, 4, 1, 16, generator=g).bfloat16()
    check(q, k, k, [9, 5])


# ---- which overload runs ----


class _Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_one_element_tensor_reaches_seq_lens_and_an_int_the_default():
    q, k, v = make(1, 2, 1, 1, 8, 16, [5])
    for call in (cute_kernels.active_attention, torch.ops.cute_kernels.active_attention):
        for kv_len, name in ((torch.tensor([5], dtype=torch.int32), "seq_lens"), (5, "default")):
            with _Seen() as seen:
                call(q, k, v, kv_len)
            assert f"cute_kernels.active_attention.{name}" in seen.names


# ---- append ----


@pytest.mark.parametrize("s,lengths", [(1, [5, 1, 16, 0]), (3, [3, 10, 2, 0]), (16, [16, 7, 20, 1]), (4, [24, 4, 3, 24])])
@pytest.mark.parametrize("strided", [False, True])
def test_append(s, lengths, strided):
    b, h_q, h_kv, d, capacity = 4, 4, 2, 8, 24
    g = torch.Generator().manual_seed(s)
    q = torch.randn(b, h_q, s, d, generator=g)
    if strided:
        fused = torch.randn(b, s, 2 * h_kv * d, generator=g)
        k_new, v_new = (fused[..., i * h_kv * d : (i + 1) * h_kv * d].view(b, s, h_kv, d).transpose(1, 2) for i in range(2))
    else:
        k_new, v_new = (torch.randn(b, h_kv, s, d, generator=g) for _ in range(2))
    caches = [torch.randn(b, h_kv, capacity, d, generator=g) for _ in range(2)]
    want = [t.clone() for t in caches]
    for i, n in enumerate(lengths):
        for row in range(s):
            if 0 <= n - s + row < capacity:
                want[0][i, :, n - s + row] = k_new[i, :, row]
                want[1][i, :, n - s + row] = v_new[i, :, row]
    kv_len = torch.tensor(lengths, dtype=torch.int32)
    out, lse = cute_kernels.active_attention_append(q, k_new, v_new, *caches, kv_len)
    assert torch.equal(caches[0], want[0]) and torch.equal(caches[1], want[1])
    plain = cute_kernels.active_attention(q, *want, kv_len)
    assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])


def test_append_leaves_the_poisoned_tail_alone():
    q, k, v = make(2, 2, 1, 1, 8, 16, [4, 9])
    new = torch.randn(2, 2, 1, 1, 8)
    before = k.clone()
    out, _ = cute_kernels.active_attention_append(q, new[0], new[1], k, v, torch.tensor([5, 10], dtype=torch.int32))
    assert torch.isfinite(out).all()
    changed = ~((before == k) | (before.isnan() & k.isnan())).all(-1)
    assert changed.nonzero().tolist() == [[0, 0, 4], [1, 0, 9]]


# ---- the acceptance cases published with fish-speech's active-prefix change: capacity 8, 2 query heads, 1 KV head, D 4, fp32 ----


def fish(kv_len, s, seed=0):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(1, 2, s, 4, generator=g)
    k, v = torch.zeros(1, 1, 8, 4), torch.zeros(1, 1, 8, 4)
    k[:, :, :kv_len] = torch.randn(1, 1, kv_len, 4, generator=g)
    v[:, :, :kv_len] = torch.randn(1, 1, kv_len, 4, generator=g)
    return q, k, v


@pytest.mark.parametrize("kv_len,s", [(3, 3), (4, 1), (8, 1), (8, 8)])
def test_fish_active_prefix_equals_masked_full_capacity(kv_len, s):
    q, k, v = fish(kv_len, s)
    position = torch.arange(kv_len - s, kv_len)
    mask = torch.tril(torch.ones(8, 8, dtype=torch.bool))[position]
    full = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=mask)
    active, _ = cute_kernels.active_attention(q, k, v, kv_len)
    torch.testing.assert_close(active, full, rtol=1e-5, atol=1e-6)
    assert torch.equal(active.argmax(-1), full.argmax(-1))


@pytest.mark.parametrize("kv_len", [0, 9, -1])
def test_fish_length_out_of_range(kv_len):
    q, k, v = fish(3, 1)
    with pytest.raises(ValueError, match=r"kv_len must lie in \[1, C = 8\]"):
        cute_kernels.active_attention(q, k, v, kv_len)


class TinyDecoder(torch.nn.Module):
    """One attention layer and a head, enough for a greedy chain."""

    def __init__(self, capacity=8, vocabulary=11):
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, 8)
        self.wqkv = torch.nn.Linear(8, (2 + 2) * 4, bias=False)
        self.head = torch.nn.Linear(8, vocabulary, bias=False)
        self.capacity = capacity
        self.reset()

    def reset(self):
        self.k = torch.zeros(1, 1, self.capacity, 4)
        self.v = torch.zeros(1, 1, self.capacity, 4)

    def forward(self, tokens, kv_len, active):
        s = tokens.shape[1]
        q, k, v = self.wqkv(self.embed(tokens)).split([8, 4, 4], dim=-1)
        q = q.view(1, s, 2, 4).transpose(1, 2)
        positions = torch.arange(kv_len - s, kv_len)
        self.k[:, :, positions], self.v[:, :, positions] = k.view(1, 1, s, 4), v.view(1, 1, s, 4)
        if active:
            y, _ = cute_kernels.active_attention(q, self.k, self.v, kv_len)
        else:
            mask = (torch.arange(self.capacity) <= positions[:, None])[None, None]
            y = F.scaled_dot_product_attention(q, self.k.expand(1, 2, -1, -1), self.v.expand(1, 2, -1, -1), attn_mask=mask)
        return self.head(y.transpose(1, 2).reshape(1, s, 8))[:, -1]


@torch.no_grad()
def test_fish_greedy_chain_is_identical():
    torch.manual_seed(0)
    model = TinyDecoder()
    chains = []
    for active in (True, False):
        model.reset()
        tokens, chain = torch.tensor([[1, 2, 3]]), []
        for kv_len in (3, 4, 5, 6, 7, 8):
            tokens = model(tokens, kv_len, active).argmax(-1, keepdim=True)
            chain.append(int(tokens))
        chains.append(chain)
    assert chains[0] == chains[1]
