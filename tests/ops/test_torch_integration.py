"""opcheck, torch.compile, and what importing does."""

import importlib
import subprocess
import sys
from pathlib import Path

import oracles
import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._inductor.utils import fresh_inductor_cache, run_and_get_code

import cute_kernels as ck

OPS = torch.ops.cute_kernels
ops_active = importlib.import_module("cute_kernels.ops.active_attention")  # the package exports a function of that name
ROOT = Path(__file__).resolve().parents[2]


def sparse_args(mask=False, **kwargs):
    i = oracles.sparse_inputs(5, 32, 70, 128, 576, **kwargs)
    m = torch.randint(0, 256, (5, 1, 128), dtype=torch.uint8) if mask else None
    return i["q"], i["kv"], i["indices"], 0.5, 512, i["attn_sink"], i["topk_length"], m, 16


def caches(b=2, capacity=16):
    return torch.randn(b, 3, 4, 8).transpose(1, 2), torch.randn(b, 2, capacity, 8), torch.randn(b, 2, capacity, 8)


INDICES = torch.randint(0, 90, (13, 1, 20), dtype=torch.int32)
LENGTHS = torch.tensor([5, 16], dtype=torch.int32)
NEW = torch.randn(2, 2, 2, 3, 8)
CASES = {
    "sparse_prefill_fwd": (OPS.sparse_prefill_fwd.default, lambda: (sparse_args(), {})),
    "sparse_prefill_fwd-all": (OPS.sparse_prefill_fwd.default, lambda: (sparse_args(True, sink=True, length=True), {})),
    "sparse_prefill_fwd.out": (
        OPS.sparse_prefill_fwd.out,
        lambda: (sparse_args(sink=True), dict(out=torch.empty(5, 32, 512, dtype=torch.bfloat16))),
    ),
    "group_topk": (OPS.group_topk.default, lambda: ((INDICES, 90), {})),
    "group_topk-all": (
        OPS.group_topk.default,
        lambda: ((INDICES, 90, 4, torch.full((13,), 9, dtype=torch.int32), torch.tensor([0, 4, 13]).int(), 80), {}),
    ),
    "group_topk.unpadded": (OPS.group_topk.unpadded, lambda: ((INDICES, 90), {})),
    "active_attention": (OPS.active_attention.default, lambda: ((*caches(), 7), {})),
    "active_attention.seq_lens": (OPS.active_attention.seq_lens, lambda: ((*caches(), LENGTHS), {})),
    "active_attention-options": (
        OPS.active_attention.seq_lens,
        lambda: ((*caches(), LENGTHS), dict(sm_scale=0.2, causal=False, window_left=3, softcap=4.0, attn_sink=torch.zeros(4))),
    ),
    "active_attention_append": (
        OPS.active_attention_append.default,
        lambda: ((caches()[0], NEW[0], NEW[1], *caches()[1:], LENGTHS), {}),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case):
    op, make = CASES[case]
    args, kwargs = make()
    torch.library.opcheck(op, args, kwargs)


def test_every_operator_is_opchecked():
    checked = {str(op) for op, _ in CASES.values()}
    defined = {
        f"cute_kernels.{name}.{overload}"
        for name in ("sparse_prefill_fwd", "group_topk", "active_attention", "active_attention_append")
        for overload in getattr(OPS, name).overloads()
    }
    assert checked == defined


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_forty_lengths_make_at_most_two_graphs(batch, as_tensor):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    q, k, v = torch.randn(batch, 4, 1, 8), torch.randn(batch, 2, 64, 8), torch.randn(batch, 2, 64, 8)

    @torch.compile(fullgraph=True, backend=counter)
    def step(q, k, v, kv_len):
        return ck.active_attention(q * 2, k, v, kv_len)[0] + 1

    for length in range(3, 43):
        kv_len = torch.full((batch,), length, dtype=torch.int32) if as_tensor else length
        got = step(q, k, v, kv_len)
        torch.testing.assert_close(got, ck.active_attention(q * 2, k, v, kv_len)[0] + 1)
    assert counter.frame_count <= (1 if as_tensor else 2)


def test_dynamic_lengths_make_one_graph():
    # fish-speech's own acceptance case: dynamic=True, fullgraph=True, exactly one graph over a decode.
    torch._dynamo.reset()
    counter = CompileCounter()
    q, k, v = torch.randn(1, 2, 1, 4), torch.randn(1, 1, 8, 4), torch.randn(1, 1, 8, 4)
    step = torch.compile(lambda n: ck.active_attention(q, k, v, n)[0], fullgraph=True, dynamic=True, backend=counter)
    for length in (3, 4, 5, 6, 7, 8):
        step(length)
    assert counter.frame_count == 1


@pytest.fixture
def fresh_graphs():
    """A graph cached for caches of one kind was seen to be reused for the other (torch 2.11)."""
    torch._dynamo.reset()
    with fresh_inductor_cache():
        yield


def test_a_compiled_append_copies_no_cache(fresh_graphs):
    k, v, q, new = (torch.zeros(1, h, n, 64) for h, n in ((2, 512), (2, 512), (4, 1), (2, 1)))
    step = torch.compile(lambda q, new, k, v, n: ck.active_attention_append(q, new, new, k, v, n), fullgraph=True)
    _, code = run_and_get_code(step, q, new, k, v, torch.ones(1, dtype=torch.int32))
    assert "active_attention_append" in code[0] and "clone" not in code[0] and "copy_" not in code[0]


@pytest.mark.parametrize("slab", [False, True])
def test_a_compiled_decode_loop_appends_in_place(slab, fresh_graphs):
    if slab and ops_active._SLAB_MISCOMPILES:
        pytest.skip(f"torch {torch.__version__} miscompiles two mutated views of one tensor; the refusal is tested instead")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    k, v = torch.zeros(2, 1, 2, 16, 8) if slab else (torch.zeros(1, 2, 16, 8), torch.zeros(1, 2, 16, 8))
    reference = [k.clone(), v.clone()]

    @torch.compile(fullgraph=True, backend=counter)
    def step(q, k_new, v_new, k, v, n):
        n.add_(1)
        return ck.active_attention_append(q, k_new, v_new, k, v, n)[0]

    n, m = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for _ in range(12):
        q, k_new, v_new = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8)
        m += 1
        got = step(q, k_new, v_new, k, v, n)
        torch.testing.assert_close(got, ck.active_attention_append(q, k_new, v_new, *reference, m)[0])
    assert counter.frame_count == 1 and int(n) == 12
    assert torch.equal(k, reference[0]) and torch.equal(v, reference[1])


def test_one_tensor_for_both_caches_is_refused_where_torch_miscompiles_it(monkeypatch):
    monkeypatch.setattr(ops_active, "_SLAB_MISCOMPILES", True)
    torch._dynamo.reset()
    k, v = torch.zeros(2, 1, 2, 16, 8)
    q, new, n = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 1, 8), torch.ones(1, dtype=torch.int32)
    step = torch.compile(lambda: ck.active_attention_append(q, new, new, k, v, n)[0], fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="allocate k_cache and v_cache separately"):
        step()


def test_compiled_sparse_and_grouped_prefill_with_growing_sizes():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def prefill(q, kv, indices):
        a = ck.sparse_prefill(q, kv, indices, 0.5)
        b = ck.grouped_sparse_prefill(q, kv, indices, 0.5)
        return a[0] + b[0], a[2], b[2]

    for s_q, s_kv in [(16, 64), (24, 80), (40, 100), (64, 333)]:
        i = oracles.sparse_inputs(s_q, 16, s_kv, 64, 576, seed=s_q)
        got = prefill(i["q"], i["kv"], i["indices"])
        want = ck.sparse_prefill(i["q"], i["kv"], i["indices"], 0.5)
        torch.testing.assert_close(got[0], 2 * want[0], rtol=2**-6, atol=2e-3)
        torch.testing.assert_close(got[2], want[2], rtol=1e-5, atol=1e-5)
    assert counter.frame_count <= 3


def test_gradients_are_refused_while_tracing():
    torch._dynamo.reset()
    q, k, v = torch.randn(1, 4, 1, 8, requires_grad=True), torch.randn(1, 2, 8, 8), torch.randn(1, 2, 8, 8)
    with pytest.raises(Exception, match="no backward"):
        torch.compile(lambda q: ck.active_attention(q, k, v, 4)[0], fullgraph=True, backend="aot_eager")(q)


def test_fake_refuses_what_the_operator_refuses():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k = torch.empty(1, 4, 1, 8), torch.empty(1, 3, 8, 8)
        with pytest.raises(ValueError, match="multiple of Hkv = 3"):
            ck.active_attention(q, k, k, 4)


def test_autocast_does_not_touch_the_reference():
    q, k = torch.randn(2, 4, 1, 64), torch.randn(2, 4, 99, 64)
    i = oracles.sparse_inputs(2, 8, 3000, 60, 576)
    i["indices"] = i["indices"].repeat(1, 1, 500)  # several chunks a row
    plain = ck.active_attention(q, k, k, 50), ck.sparse_prefill(i["q"], i["kv"], i["indices"], 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        cast = ck.active_attention(q, k, k, 50), ck.sparse_prefill(i["q"], i["kv"], i["indices"], 0.5)
    for a, b in zip(plain, cast):
        for x, y in zip(a, b):
            assert torch.equal(x, y)


def test_no_tokens_compile(fresh_graphs):
    q, kv = torch.randn(0, 16, 576).bfloat16(), torch.randn(50, 1, 576).bfloat16()
    step = torch.compile(ck.grouped_sparse_prefill, fullgraph=True)
    assert step(q, kv, torch.zeros(0, 1, 9, dtype=torch.int32), 0.3)[0].shape == (0, 16, 512)
    empty = torch.empty_strided((0, 16, 576), (0, 0, 0), dtype=torch.bfloat16)
    assert ck.sparse_prefill(empty, kv, torch.zeros(0, 1, 9, dtype=torch.int32), 0.3)[0].shape == (0, 16, 512)


def test_an_out_with_strides_compiles():
    q, kv = torch.randn(3, 4, 576).bfloat16(), torch.randn(50, 1, 576).bfloat16()
    indices = torch.randint(0, 50, (3, 1, 20), dtype=torch.int32)

    def step(q, kv, indices, wide):
        return ck.sparse_prefill(q, kv, indices, 0.07, out=wide[:, :4])

    want, got = torch.zeros(3, 6, 512).bfloat16(), torch.zeros(3, 6, 512).bfloat16()
    results = step(q, kv, indices, want)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(q, kv, indices, got)
    assert torch.equal(got, want) and all(torch.equal(a, b) for a, b in zip(compiled, results))
    assert compiled[0].untyped_storage().data_ptr() == got.untyped_storage().data_ptr()


def test_last_backend_says_reference():
    q, k, v = caches()
    ck.active_attention(q, k, v, 4)
    assert ck.last_backend() == "reference[cpu]"


def run(code, **env):
    import os

    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=os.environ | env, check=False
    )


def test_import_registers_everything_and_touches_no_gpu():
    done = run(
        "import sys, time, torch\n"
        "before = set(sys.modules)  # torch itself may import cuda.bindings\n"
        "start = time.process_time(); import cute_kernels; took = time.process_time() - start\n"
        "loaded = {m.split('.')[0] for m in set(sys.modules) - before} & {'cutlass', 'cuda', 'tvm_ffi', 'nvidia_cutlass_dsl'}\n"
        "assert not loaded, loaded\n"
        "assert not torch.cuda.is_initialized()\n"
        "for name in ('sparse_prefill_fwd', 'group_topk', 'active_attention', 'active_attention_append'):\n"
        "    assert hasattr(torch.ops.cute_kernels, name)\n"
        "print(took); assert took < 0.3, took\n"
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_values_are_checked_on_request():
    done = run("import cute_kernels as ck; print(ck.ops._common.checking())", CUTE_KERNELS_CHECK="1")
    assert done.stdout == "True\n", done.stderr
    assert run("import cute_kernels as ck; print(ck.ops._common.checking())").stdout == "False\n"
