"""Every kind of bad input gives the stated error and writes nothing."""

import math

import oracles
import pytest
import torch

import cute_kernels as ck


def sparse(**changes):
    inputs = oracles.sparse_inputs(4, 32, 50, 128, 576, sink=True, length=True)
    inputs |= dict(head_group_mask=torch.full((4, 1, 128), 255, dtype=torch.uint8), head_group_size=16, sm_scale=0.5)
    inputs["out"] = torch.full((4, 32, 512), 7.0, dtype=torch.bfloat16)
    return inputs | {k: v(inputs) if callable(v) else v for k, v in changes.items()}


def active(**changes):
    inputs = dict(
        q=torch.randn(2, 4, 1, 8), k_cache=torch.full((2, 2, 16, 8), 7.0), v_cache=torch.full((2, 2, 16, 8), 7.0), kv_len=5
    )
    return inputs | {k: v(inputs) if callable(v) else v for k, v in changes.items()}


def appended(**changes):
    inputs = active(kv_len=torch.tensor([5, 6], dtype=torch.int32))
    inputs |= dict(k_new=torch.randn(2, 2, 1, 8), v_new=torch.randn(2, 2, 1, 8))
    return inputs | {k: v(inputs) if callable(v) else v for k, v in changes.items()}


def group(**changes):
    inputs = dict(indices=torch.randint(0, 50, (9, 1, 12), dtype=torch.int32), s_kv=50, group_size=4)
    return inputs | {k: v(inputs) if callable(v) else v for k, v in changes.items()}


def grouped(**changes):
    inputs = {k: v for k, v in oracles.sparse_inputs(9, 16, 50, 12, 576).items() if v is not None} | dict(sm_scale=0.5)
    return inputs | {k: v(inputs) if callable(v) else v for k, v in changes.items()}


def misaligned(shape, dtype=torch.bfloat16):
    """The right shape and row strides, one element off a 16-byte address."""
    flat = torch.zeros(math.prod(shape) + 1, dtype=dtype)
    return flat[1:].view(shape)


def wide(t, extra=1):
    """t with its row stride one element longer."""
    buffer = torch.zeros(*t.shape[:-1], t.shape[-1] + extra, dtype=t.dtype)
    buffer[..., :-extra] = t
    return buffer[..., :-extra]


def every_other(t):
    return torch.stack([t, t], dim=-1).flatten(-2)[..., ::2]


META = torch.device("meta")
T, V, R = TypeError, ValueError, RuntimeError
SPARSE = [
    ("q dtype", dict(q=lambda i: i["q"].half()), T, "q must have dtype bfloat16, got float16"),
    ("kv dtype", dict(kv=lambda i: i["kv"].float()), T, "kv must have dtype bfloat16, got float32"),
    ("indices dtype", dict(indices=lambda i: i["indices"].long()), T, "indices must have dtype int32, got int64"),
    ("sink dtype", dict(attn_sink=torch.zeros(32, dtype=torch.float64)), T, "attn_sink must have dtype float32"),
    ("length dtype", dict(topk_length=torch.zeros(4)), T, "topk_length must have dtype int32"),
    ("mask dtype", dict(head_group_mask=torch.ones(4, 1, 128, dtype=torch.bool)), T, "head_group_mask must have dtype uint8"),
    ("out dtype", dict(out=torch.zeros(4, 32, 512)), T, "out must have dtype bfloat16"),
    ("q rank", dict(q=lambda i: i["q"][0]), V, r"q must have shape \[s_q, h_q, d_qk\], got a tensor of rank 2"),
    ("kv rank", dict(kv=lambda i: i["kv"][:, 0]), V, r"kv must have shape \[s_kv, 1, d_qk\]"),
    ("d_qk", dict(q=lambda i: i["q"][..., :560], kv=lambda i: i["kv"][..., :560]), V, "d_qk 576 or 512, got 560"),
    ("kv width", dict(kv=lambda i: i["kv"][..., :512]), V, r"kv must have shape \[s_kv, 1, d_qk\]"),
    ("h_kv", dict(kv=lambda i: i["kv"].expand(50, 2, 576)), V, r"h_kv = 1 \(one latent KV head\), got 2"),
    ("heads", dict(q=torch.zeros(4, 256, 576, dtype=torch.bfloat16)), V, "at most 128 heads, got 256"),
    ("indices rows", dict(indices=lambda i: i["indices"][:3]), V, r"indices must have shape \[s_q, 1, topk\]"),
    ("indices heads", dict(indices=lambda i: i["indices"].expand(4, 2, 128)), V, r"indices must have shape"),
    ("sink size", dict(attn_sink=torch.zeros(16)), V, r"attn_sink must have shape \[h_q\] = \(32,\), got \(16,\)"),
    ("length size", dict(topk_length=torch.zeros(5, dtype=torch.int32)), V, r"topk_length must have shape \[s_q\]"),
    ("length range", dict(topk_length=torch.tensor([0, 1, 129, 3]).int()), V, r"topk_length must lie in \[0, topk = 128\]"),
    ("length negative", dict(topk_length=torch.tensor([0, 1, -1, 3], dtype=torch.int32)), V, "topk_length must lie in"),
    ("d_v", dict(d_v=256), V, "d_v must be 512, got 256"),
    ("scale nan", dict(sm_scale=math.nan), V, "sm_scale must be finite in float32, got nan"),
    ("scale beyond float32", dict(sm_scale=1e39), V, "sm_scale must be finite in float32"),
    ("scale inf", dict(sm_scale=math.inf), V, "sm_scale must be finite in float32, got inf"),
    ("mask shape", dict(head_group_mask=torch.ones(4, 2, 128, dtype=torch.uint8)), V, "head_group_mask must have shape"),
    ("mask bytes", dict(head_group_mask=torch.ones(4, 1, 16, dtype=torch.uint8)), V, "head_group_mask must have shape"),
    ("mask topk", dict(indices=lambda i: i["indices"][..., :100].contiguous()), V, "multiple of 128 when head_group_mask is"),
    ("group power", dict(head_group_size=12), V, "head_group_size must be a power of two from 1 to 128, got 12"),
    ("group zero", dict(head_group_size=0), V, "head_group_size must be a power of two"),
    ("group 256", dict(head_group_size=256), V, "head_group_size must be a power of two"),
    ("group divides", dict(head_group_size=64), V, "head_group_size must divide h_q = 32, got 64"),
    ("too many groups", dict(head_group_size=2), V, "at most 8 groups for h_q = 32, got 2: 16 groups"),
    ("q last stride", dict(q=lambda i: every_other(i["q"])), V, "q must have a last dimension of stride 1"),
    ("kv last stride", dict(kv=lambda i: every_other(i["kv"])), V, "kv must have a last dimension of stride 1"),
    ("indices last stride", dict(indices=lambda i: every_other(i["indices"])), V, "indices must have a last dimension"),
    ("q row stride", dict(q=lambda i: wide(i["q"])), V, "q must have row strides that are multiples of 16 bytes"),
    ("kv row stride", dict(kv=lambda i: wide(i["kv"])), V, "kv must have row strides that are multiples of 16 bytes"),
    ("out row stride", dict(out=lambda i: wide(i["out"])), V, "out must have row strides that are multiples of 16 bytes"),
    ("q base", dict(q=misaligned((4, 32, 576))), V, "q must start at an address that is a multiple of 16 bytes"),
    ("mask base", dict(head_group_mask=misaligned((4, 1, 128), torch.uint8)), V, "head_group_mask must start at an address"),
    ("out shape", dict(out=torch.zeros(4, 32, 576, dtype=torch.bfloat16)), V, r"out must have shape \[s_q, h_q, d_v\]"),
    ("out over q", dict(out=lambda i: i["q"][..., :512]), V, "out must not overlap q"),
    ("out over kv", dict(out=lambda i: i["kv"].expand(50, 32, 576)[:4, :, :512]), V, "out must not overlap itself"),
    ("out itself", dict(out=torch.zeros(1, 32, 512, dtype=torch.bfloat16).expand(4, 32, 512)), V, "out must not overlap itself"),
    ("device", dict(indices=lambda i: i["indices"].to(META)), V, "indices must be on cpu like q, got meta"),
    ("grad", dict(q=lambda i: i["q"].clone().requires_grad_()), R, r"no backward; call under torch.no_grad\(\)"),
    ("grad sink", dict(attn_sink=torch.zeros(32, requires_grad=True)), R, "no backward"),
]  # fmt: skip
ACTIVE = [
    ("dtype", dict(q=lambda i: i["q"].double()), T, "q must have dtype bfloat16 or float16 or float32, got float64"),
    ("cache dtype", dict(k_cache=lambda i: i["k_cache"].half()), T, "k_cache must have dtype float32, got float16"),
    ("rank", dict(q=lambda i: i["q"][0]), V, r"q must have shape \[B, Hq, S, D\]"),
    ("batch", dict(k_cache=lambda i: i["k_cache"][:1]), V, r"k_cache must have shape \[B, Hkv, C, D\]"),
    ("head dim", dict(k_cache=lambda i: i["k_cache"][..., :4]), V, "k_cache must have shape"),
    ("caches differ", dict(v_cache=lambda i: i["v_cache"][:, :, :8]), V, "v_cache must have shape"),
    ("ratio", dict(q=torch.randn(2, 3, 1, 8)), V, "number of heads that is a multiple of Hkv = 2, got 3"),
    ("kv_len 0", dict(kv_len=0), V, r"kv_len must lie in \[1, C = 16\], got 0"),
    ("kv_len past", dict(kv_len=17), V, r"kv_len must lie in \[1, C = 16\], got 17"),
    ("kv_len tensor dtype", dict(kv_len=torch.tensor([3, 4])), T, "kv_len must have dtype int32, got int64"),
    ("kv_len tensor size", dict(kv_len=torch.tensor([3], dtype=torch.int32)), V, r"kv_len must have shape \[B\]"),
    ("kv_len tensor range", dict(kv_len=torch.tensor([3, 17], dtype=torch.int32)), V, r"kv_len must lie in \[0, C = 16\]"),
    ("kv_len tensor negative", dict(kv_len=torch.tensor([3, -1], dtype=torch.int32)), V, "kv_len must lie in"),
    ("kv_len device", dict(kv_len=torch.tensor([3, 3], dtype=torch.int32, device=META)), V, "kv_len must be on cpu"),
    ("last stride", dict(q=lambda i: every_other(i["q"])), V, "q must have a last dimension of stride 1"),
    ("scale", dict(sm_scale=math.nan), V, "sm_scale must be finite"),
    ("window", dict(window_left=-2), V, "window_left must be -1"),
    ("softcap", dict(softcap=-1.0), V, "softcap must be 0"),
    ("softcap beyond float32", dict(softcap=1e300), V, "softcap must be 0"),
    ("sink dtype", dict(attn_sink=torch.zeros(4).half()), T, "attn_sink must have dtype float32"),
    ("sink size", dict(attn_sink=torch.zeros(2)), V, r"attn_sink must have shape \[Hq\] = \(4,\)"),
    ("grad", dict(v_cache=lambda i: i["v_cache"].clone().requires_grad_()), R, "no backward"),
]  # fmt: skip
APPEND = [
    ("new dtype", dict(k_new=lambda i: i["k_new"].half()), T, "k_new must have dtype float32"),
    ("new shape", dict(v_new=lambda i: i["v_new"][:, :1]), V, r"v_new must have shape \[B, Hkv, S, D\]"),
    ("caches overlap", dict(v_cache=lambda i: i["k_cache"]), V, "k_cache must not overlap v_cache"),
    ("cache itself", dict(k_cache=torch.zeros(1, 2, 16, 8).expand(2, 2, 16, 8)), V, "k_cache must not overlap itself"),
    ("new over cache", dict(k_new=lambda i: i["k_cache"][:, :, :1]), V, "k_cache must not overlap k_new"),
    ("q over cache", dict(q=lambda i: i["v_cache"][:, :, :1]), V, "v_cache must not overlap q"),
    ("range", dict(kv_len=torch.tensor([5, 17], dtype=torch.int32)), V, r"kv_len must lie in \[0, C = 16\]"),
    ("grad", dict(k_new=lambda i: i["k_new"].clone().requires_grad_()), R, "no backward"),
]  # fmt: skip
GROUP = [
    ("dtype", dict(indices=lambda i: i["indices"].long()), T, "indices must have dtype int32"),
    ("rank", dict(indices=lambda i: i["indices"][:, 0]), V, r"indices must have shape \[s_q, 1, topk\]"),
    ("s_kv", dict(s_kv=2**31), V, r"s_kv must lie in \[0, 2\*\*31 - 1\]"),
    ("s_kv negative", dict(s_kv=-1), V, "s_kv must lie in"),
    ("size 9", dict(group_size=9), V, r"group_size must lie in \[1, 8\], got 9"),
    ("size 0", dict(group_size=0), V, "group_size must lie in"),
    ("max_union negative", dict(max_union=-1), V, "max_union must be at least 0"),
    ("cu dtype", dict(cu_seqlens_q=torch.tensor([0, 9])), T, "cu_seqlens_q must have dtype int32"),
    ("cu empty", dict(cu_seqlens_q=torch.empty(0, dtype=torch.int32)), V, "cu_seqlens_q must have at least one entry"),
    ("length range", dict(topk_length=torch.full((9,), 13, dtype=torch.int32)), V, r"topk_length must lie in \[0, topk = 12\]"),
    ("length size", dict(topk_length=torch.full((8,), 1, dtype=torch.int32)), V, r"topk_length must have shape \[s_q\]"),
]  # fmt: skip
GROUPED = [
    ("dtype", dict(q=lambda i: i["q"].float()), T, "grouped_sparse_prefill: q must have dtype bfloat16"),
    ("heads", dict(q=torch.zeros(9, 129, 576, dtype=torch.bfloat16)), V, "at most 128 heads"),
    ("group", dict(group_size=9), V, r"group_size must lie in \[1, 8\] for 16 heads"),
    ("rows", dict(indices=lambda i: i["indices"][:8]), V, r"indices must have shape \[s, 1, topk\]"),
    ("sink", dict(attn_sink=torch.zeros(8)), V, r"attn_sink must have shape \[h\]"),
    ("grad", dict(q=lambda i: i["q"].clone().requires_grad_()), R, "no backward"),
]  # fmt: skip
CALLS = [
    (ck.sparse_prefill, sparse, SPARSE),
    (ck.active_attention, active, ACTIVE),
    (ck.active_attention_append, appended, APPEND),
    (ck.group_topk, group, GROUP),
    (ck.grouped_sparse_prefill, grouped, GROUPED),
]
ROWS = [pytest.param(call, make, *row[1:], id=f"{call.__name__}-{row[0]}") for call, make, rows in CALLS for row in rows]


@pytest.mark.parametrize("call,make,changes,error,text", ROWS)
def test_the_stated_error_and_nothing_written(call, make, changes, error, text):
    inputs = make(**changes)
    written = {n: inputs[n] for n in ("out", "k_cache", "v_cache") if isinstance(inputs.get(n), torch.Tensor)}
    before = {n: t.detach().clone() for n, t in written.items()}
    with pytest.raises(error, match=text) as caught:
        call(**inputs)
    assert type(caught.value) is error  # TypeError, ValueError and RuntimeError themselves, not relatives
    for n, t in written.items():
        assert torch.equal(t.detach(), before[n]), n


@pytest.mark.parametrize("call,make,_", CALLS, ids=lambda x: getattr(x, "__name__", None))
def test_the_unchanged_inputs_of_this_table_are_good(call, make, _):
    call(**make())


def test_parameters_under_no_grad_are_accepted():
    with torch.no_grad():
        ck.sparse_prefill(**sparse(q=lambda i: torch.nn.Parameter(i["q"])))
        ck.active_attention(**active(q=lambda i: torch.nn.Parameter(i["q"])))
    with torch.inference_mode():
        ck.active_attention_append(**appended())


def test_misaligned_singleton_dimensions_do_not_matter():
    inputs = oracles.sparse_inputs(1, 1, 20, 8, 576)
    q = inputs["q"].as_strided((1, 1, 576), (577, 577, 1))
    ck.sparse_prefill(q, inputs["kv"], inputs["indices"], 0.5)


def test_a_layout_seen_before_is_still_checked_for_overlap_and_gradients():
    good = appended()
    ck.active_attention_append(**good)
    with pytest.raises(ValueError, match="k_cache must not overlap v_cache"):
        ck.active_attention_append(**good | dict(v_cache=good["k_cache"]))
    with pytest.raises(RuntimeError, match="no backward"):
        ck.active_attention_append(**good | dict(q=good["q"].clone().requires_grad_()))
    sized = sparse()
    ck.sparse_prefill(**sized)
    with pytest.raises(ValueError, match="q must start at an address"):
        ck.sparse_prefill(**sized | dict(q=misaligned((4, 32, 576)).copy_(sized["q"])))
    ck.active_attention(**active())
    with pytest.raises(ValueError, match="kv_len must lie in"):
        ck.active_attention(**active(kv_len=99))


SLABS = {
    "[2, B, H, C, D]": lambda: torch.zeros(2, 2, 2, 16, 8).unbind(0),
    "[B, 2, H, C, D]": lambda: torch.zeros(2, 2, 2, 16, 8).unbind(1),
    "[B, H, 2, C, D]": lambda: torch.zeros(2, 2, 2, 16, 8).unbind(2),
    "[B, 2H, C, D]": lambda: torch.zeros(2, 4, 16, 8).chunk(2, 1),
    "[B, C, 2, H, D]": lambda: (t.transpose(1, 2) for t in torch.zeros(2, 16, 2, 2, 8).unbind(2)),
    "[B, C, H, 2D]": lambda: (t.transpose(1, 2) for t in torch.zeros(2, 16, 2, 16).chunk(2, 3)),
    "[B, H, 2C, D] halves": lambda: torch.zeros(2, 2, 32, 8).chunk(2, 2),
    "[B, H, 2C, D] even and odd": lambda: (torch.zeros(2, 2, 32, 8)[:, :, i::2] for i in range(2)),
    "[B, L, 2, H, C, D]": lambda: torch.zeros(2, 3, 2, 2, 16, 8)[:, 1].unbind(1),
}


@pytest.mark.parametrize("name", SLABS)
def test_caches_cut_from_one_buffer_do_not_overlap(name):
    k, v = SLABS[name]()
    if name.endswith("odd"):
        both = torch.zeros(2, 2, 32, 8)
        k, v = both[:, :, 0::2], both[:, :, 1::2]
    inputs = appended(k_cache=k, v_cache=v)
    ck.active_attention_append(**inputs)
    ck.active_attention_append(**inputs)  # the layout is known now
    assert torch.equal(k[0, :, 4], inputs["k_new"][0, :, 0]) and torch.equal(v[1, :, 5], inputs["v_new"][1, :, 0])


def test_overlap_is_decided_as_enumeration_decides():
    g = torch.Generator().manual_seed(0)

    def pick(n):
        return int(torch.randint(0, n, (), generator=g))

    wrong, met = 0, 0
    buffer = torch.zeros(4000, dtype=torch.int32)
    for _ in range(3000):
        views = []
        for _ in range(2):
            shape = [1 + pick(4) for _ in range(3)]
            strides = [(0, 1, 2, 3, 4, 8, 12, 24, 48)[pick(9)] for _ in range(2)] + [1 + pick(2)]
            views.append(buffer.as_strided(shape, strides, pick(60)))
        cells = [set(torch.arange(4000).as_strided(v.shape, v.stride(), v.storage_offset()).flatten().tolist()) for v in views]
        truly, said = bool(cells[0] & cells[1]), ck.ops._common.may_overlap(*views)
        met += truly
        assert said or not truly  # never misses one
        wrong += said and not truly
    assert met > 500 and wrong < 300


MISSING = [
    (call, make, name)
    for call, make, names in (
        (ck.sparse_prefill, sparse, ("q", "kv", "indices")),
        (ck.active_attention, active, ("q", "k_cache", "v_cache")),
        (ck.active_attention_append, appended, ("q", "k_new", "v_new", "k_cache", "v_cache", "kv_len")),
        (ck.group_topk, group, ("indices",)),
        (ck.grouped_sparse_prefill, grouped, ("q", "kv", "indices")),
    )
    for name in names
]


@pytest.mark.parametrize("value", [None, [1.0]], ids=repr)
@pytest.mark.parametrize("call,make,name", MISSING, ids=lambda x: getattr(x, "__name__", x if isinstance(x, str) else ""))
def test_what_is_no_tensor_is_named(call, make, name, value):
    inputs = make()
    inputs.pop("out", None)
    call(**inputs)  # a call like it came before, and is remembered
    with pytest.raises(TypeError, match=rf"{call.__name__}\w*: {name} must be a torch.Tensor, got {type(value).__name__}"):
        call(**inputs | {name: value})


KINDS = [
    (sparse, ck.sparse_prefill, "sm_scale", None), (sparse, ck.sparse_prefill, "head_group_size", 16.0),
    (active, ck.active_attention, "kv_len", 5.0), (active, ck.active_attention, "kv_len", None),
    (active, ck.active_attention, "sm_scale", "1"), (active, ck.active_attention, "window_left", 1.0),
    (appended, ck.active_attention_append, "softcap", [1.0]), (group, ck.group_topk, "s_kv", None),
    (group, ck.group_topk, "group_size", 4.0),
]  # fmt: skip


@pytest.mark.parametrize("make,call,name,value", KINDS, ids=lambda x: x if isinstance(x, str) else getattr(x, "__name__", repr(x)))
def test_what_is_no_number_is_named(make, call, name, value):
    with pytest.raises(TypeError, match=rf"{name} must be an? (number|integer|int or an int32 tensor), got {type(value).__name__}"):
        call(**make(**{name: value}))


def test_head_group_size_is_checked_without_a_mask_too():
    inputs = oracles.sparse_inputs(2, 5, 20, 8, 576)
    with pytest.raises(ValueError, match="head_group_size must be a power of two from 1 to 128, got 12"):
        ck.sparse_prefill(inputs["q"], inputs["kv"], inputs["indices"], 0.5, head_group_size=12)
    ck.sparse_prefill(inputs["q"], inputs["kv"], inputs["indices"], 0.5, head_group_size=64)  # need not divide 5 heads


def test_a_nan_sink_makes_its_head_nan():
    inputs = oracles.sparse_inputs(2, 3, 20, 8, 576)
    inputs["indices"][1] = -1
    sink = torch.tensor([0.0, math.nan, -math.inf])
    out, _, lse = ck.sparse_prefill(inputs["q"], inputs["kv"], inputs["indices"], 0.5, attn_sink=sink)
    assert out[0, 1].isnan().all() and out[0, [0, 2]].isfinite().all() and (out[1] == 0).all() and not lse.isnan().any()
