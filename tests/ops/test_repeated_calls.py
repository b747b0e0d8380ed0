"""A call like the one before it takes the short way: what that way does, counted, and what must not take it."""

from __future__ import annotations

import ctypes
import gc
import importlib
import weakref

import pytest
import test_bad_input as table
import torch

import cute_kernels as ck
from cute_kernels.ops import _common

OPS = torch.ops.cute_kernels
SPARSE, ACTIVE = (importlib.import_module(f"cute_kernels.ops.{name}") for name in ("sparse_prefill", "active_attention"))


def sparse():
    g = torch.Generator().manual_seed(0)
    q, kv = torch.randn(2, 4, 576, generator=g).bfloat16(), torch.randn(50, 1, 576, generator=g).bfloat16()
    return q, kv, torch.randint(0, 50, (2, 1, 20), generator=g, dtype=torch.int32), 0.05


def active(length=True):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 128, generator=g).bfloat16() for h, n in ((8, 1), (2, 40), (2, 40)))
    return q, k, v, torch.tensor([30, 17], dtype=torch.int32) if length else 30


def appended():
    q, k, v, kv_len = active()
    return q, torch.randn(2, 2, 1, 128).bfloat16(), torch.randn(2, 2, 1, 128).bfloat16(), k, v, kv_len


WAYS = {
    "sparse_prefill": (SPARSE, ck.sparse_prefill, OPS.sparse_prefill_fwd.default, sparse, 3),
    "int length": (ACTIVE, ck.active_attention, OPS.active_attention.default, lambda: active(False), 2),
    "device length": (ACTIVE, ck.active_attention, OPS.active_attention.seq_lens, active, 2),
    "append": (ACTIVE, ck.active_attention_append, OPS.active_attention_append.default, appended, 2),
}


@pytest.fixture
def compiled(monkeypatch):
    """A Hopper GPU is the target of CPU tensors; the arguments of every call of a compiled function."""
    from cute_kernels.jit import Target, push_target
    from cute_kernels.kernels.sm90 import decode, sparse_prefill

    calls = []
    for module, builder in ((decode, "decode_kernel"), (sparse_prefill, "sparse_prefill_kernel")):
        monkeypatch.setattr(module, builder, lambda config, target: lambda *args: calls.append(args))
        monkeypatch.setattr(module, "raw_stream", lambda target: lambda index: 0)
    with push_target(Target("sm_90a", 132)), torch.no_grad():
        yield calls


@pytest.mark.parametrize("through", ["python", "ops"])
@pytest.mark.parametrize("name", WAYS)
def test_one_launch_the_outputs_and_no_check(name, through, compiled, monkeypatch):
    module, function, op, make, outputs = WAYS[name]
    call = function if through == "python" else op
    allocated = []

    def allocate(sizes, strides, dtype):
        allocated.append(torch.empty_strided(sizes, strides, dtype=dtype))
        return allocated[-1]

    def not_again(*args, **kwargs):
        raise AssertionError("a repeated call looks at its layouts, or changes the device, once more")

    monkeypatch.setattr(_common, "allocator", lambda device, emulated: allocate)
    first = make()
    call(*first)
    for place, what in ((module, "_find"), (_common, "layout"), (_common, "plain"), (torch.cuda, "device")):
        monkeypatch.setattr(place, what, not_again)
    for args in (first, make()):  # the same tensors, and others like them
        compiled.clear()
        allocated.clear()
        results = call(*args)
        assert [t.data_ptr() for t in results] == [t.data_ptr() for t in allocated] and len(allocated) == outputs
        (passed,) = compiled
        assert {type(x) for x in passed} == {int, float, ctypes.c_void_p}  # not one goes through DLPack
        tensors = [t for t in (*args, *results) if isinstance(t, torch.Tensor)]
        assert all(t.data_ptr() in passed for t in tensors)


@pytest.mark.parametrize("name", WAYS)
def test_layouts_that_alternate_make_their_comparisons_once(name, compiled, monkeypatch):
    """As the layers of two models in one loop: each call is checked by its key, but no comparison is made again."""
    module, function, _, make, _ = WAYS[name]
    first, second = make(), [t.repeat(2, *[1] * (t.dim() - 1)) if isinstance(t, torch.Tensor) else t for t in make()]
    for plans in (module._plans, module._latest):
        plans.clear()
    made = []
    guards = _common._TensorGuards
    monkeypatch.setattr(_common, "_TensorGuards", lambda *args, **options: made.append(args) or guards(*args, **options))
    for _ in range(3):
        for args in (first, second):
            compiled.clear()
            function(*args)
            assert len(compiled) == 1
    assert len(made) == 2


def test_a_call_that_differs_takes_the_long_way():
    """Each change alone, after a call without it: the results are those of a process that saw nothing before."""
    q, kv, indices, scale = sparse()
    changes = {
        "rows": (q[:1], kv, indices[:1]), "heads": (q[:, :3], kv, indices), "strides": (wide(q), wide(kv), indices),
        "keys": (q, kv[:7], indices), "topk": (q, kv, indices[..., :3]),
        "width": (q[..., :512].clone(), kv[..., :512].clone(), indices),
    }  # fmt: skip
    for change, args in changes.items():
        want = forgetful(SPARSE, ck.sparse_prefill, *args, scale)
        ck.sparse_prefill(q, kv, indices, scale)
        same(ck.sparse_prefill(*args, scale), want, change)
        ck.sparse_prefill(q, kv, indices, scale)
        same(OPS.sparse_prefill_fwd(*args, scale), want, change)
    q, k, v, length = active(False)
    changes = {
        "length": (q, k, v, 7), "batch": (q[:1], k[:1], v[:1], length), "tokens": (q.repeat(1, 1, 3, 1), k, v, length),
        "capacity": (q, k[:, :, :33], v[:, :, :33], length), "one cache": (q, k, k, length),
        "dtype": (q.half(), k.half(), v.half(), length),
        "device length": (q, k, v, torch.tensor([5, 9], dtype=torch.int32)),
    }  # fmt: skip
    for change, args in changes.items():
        want = forgetful(ACTIVE, ck.active_attention, *args)
        ck.active_attention(q, k, v, length)
        same(ck.active_attention(*args), want, change)
    for options in (dict(softcap=2.0), dict(window_left=3), dict(causal=False), dict(sm_scale=0.3), dict(attn_sink=torch.ones(8))):
        want = forgetful(ACTIVE, ck.active_attention, q, k, v, length, **options)
        ck.active_attention(q, k, v, length)
        same(ck.active_attention(q, k, v, length, **options), want, options)
        same(OPS.active_attention.default(q, k, v, length, **options), want, options)


def wide(t):
    return torch.cat([t, torch.zeros_like(t[..., :8])], dim=-1)[..., :-8]


def forgetful(module, call, *args, **options):
    for plans in (module._plans, module._latest, module._latest_below):
        plans.clear()
    return call(*args, **options)


def same(got, want, what):
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, want, strict=True)), what


SHORT = {function for _, function, *_ in WAYS.values()}


@pytest.mark.parametrize("call,make,changes,error,text", [row for row in table.ROWS if row.values[0] in SHORT])
def test_the_stated_error_after_a_good_call(call, make, changes, error, text):
    """As test_bad_input, where nothing came before."""
    inputs, bad = make(), make(**changes)
    if "out" not in changes:  # a given out never takes the short way
        inputs.pop("out", None), bad.pop("out", None)
    call(**inputs)
    with pytest.raises(error, match=text):
        call(**bad)


def test_gradients_are_refused_after_a_call_without():
    q, kv, indices, scale = sparse()
    sink = torch.nn.Parameter(torch.zeros(4))
    with torch.no_grad():
        for through in (ck.sparse_prefill, OPS.sparse_prefill_fwd):
            through(q, kv, indices, scale, attn_sink=sink)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(SPARSE, "_find", None)
                through(q, kv, indices, scale, attn_sink=sink)  # the short way, for a model's parameter too
    for through in (ck.sparse_prefill, OPS.sparse_prefill_fwd):
        with pytest.raises(RuntimeError, match="no backward"):
            through(q, kv, indices, scale, attn_sink=sink)
    ck.sparse_prefill(q, kv, indices, scale)
    with pytest.raises(RuntimeError, match="no backward"):
        ck.sparse_prefill(q.requires_grad_(), kv, indices, scale)


def test_layouts_are_remembered_without_the_tensors():
    args = sparse()
    ck.sparse_prefill(*args)
    gone = [weakref.ref(t) for t in args[:3]]
    del args
    gc.collect()
    assert all(ref() is None for ref in gone)
