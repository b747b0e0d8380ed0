"""Which backend an operator runs on, without a GPU."""

import warnings

import oracles
import pytest
import torch

import cute_kernels as ck
from cute_kernels.jit import Target, push_target
from cute_kernels.ops import dispatch


def calls():
    i = oracles.sparse_inputs(2, 16, 40, 128, 576)
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 4, 8)
    return {
        "sparse_prefill": lambda: ck.sparse_prefill(i["q"], i["kv"], i["indices"], 0.5),
        "group_topk": lambda: ck.group_topk(i["indices"], 40),
        "active_attention": lambda: ck.active_attention(q, k, k, 3),
    }


@pytest.mark.parametrize("family", calls())
def test_a_pushed_target_without_a_kernel_raises_instead_of_falling_back(family, monkeypatch):
    monkeypatch.setattr(dispatch, "KERNELS", {})
    call = calls()[family]
    call()
    with push_target(Target("sm_100a", 148)):
        with pytest.raises(ck.NoKernelError, match=f"{family} has no kernel for sm_100a"):
            call()
    call()
    assert ck.last_backend() == "reference[cpu]"


def test_a_case_that_a_kernel_refuses_raises_with_its_reason(monkeypatch):
    monkeypatch.setattr(dispatch, "KERNELS", {("active_attention", "sm_90a"): "cute_kernels.kernels.sm90.decode"})
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 4, 8)
    with push_target(Target("sm_90a", 132)), pytest.raises(ck.NoKernelError, match="bfloat16 or float16, not torch.float32"):
        ck.active_attention(q, k, k, 3)


def test_a_gpu_without_a_kernel_is_told_once_which_have_one(monkeypatch):
    monkeypatch.setattr(dispatch, "KERNELS", {("active_attention", "sm_90a"): "nowhere"})
    monkeypatch.setattr(dispatch, "_warned", set())
    gpu = torch.device("cuda", 0)
    text = r"no kernel for this GPU \(kernels: sm_90a Hopper \(H100, H200\)\); running the exact reference"
    with pytest.warns(UserWarning, match=text):
        assert dispatch.select("active_attention", gpu, None, {}) == (None, "reference[cuda]")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch.select("active_attention", gpu, None, {})


def test_every_registered_kernel_module_offers_what_dispatch_calls():
    import importlib

    for path in dispatch.KERNELS.values():
        module = importlib.import_module(path)
        assert callable(module.can_implement) and callable(module.launch)


def test_last_backend_belongs_to_the_thread():
    import threading

    calls()["active_attention"]()
    seen = []
    thread = threading.Thread(target=lambda: seen.append(ck.last_backend()))
    thread.start()
    thread.join()
    assert seen == [None] and ck.last_backend() == "reference[cpu]"


def test_values_are_checked_before_a_kernel_runs_too(monkeypatch):
    # CUTE_KERNELS_CHECK=1 on a backend other than the CPU's: the errors come before any kernel is compiled or launched.
    monkeypatch.setattr(ck.ops._common, "_checking", True)
    i = oracles.sparse_inputs(2, 16, 40, 128, 576)
    q, k = torch.randn(2, 2, 1, 16).bfloat16(), torch.randn(2, 2, 4, 16).bfloat16()
    with push_target(Target("sm_90a", 132)):
        with pytest.raises(ValueError, match=r"topk_length must lie in \[0, topk = 128\]"):
            ck.sparse_prefill(i["q"], i["kv"], i["indices"], 0.5, topk_length=torch.tensor([0, 129]).int())
        with pytest.raises(ValueError, match=r"kv_len must lie in \[0, C = 4\]"):
            ck.active_attention(q, k, k, torch.tensor([1, 5]).int())


def test_a_python_call_passes_the_dispatcher_wherever_something_watches():
    from torch.utils._python_dispatch import TorchDispatchMode

    i = oracles.sparse_inputs(2, 16, 40, 128, 576)
    call = lambda: ck.sparse_prefill(i["q"], i["kv"], i["indices"], 0.5)  # noqa: E731
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    want = call()
    with Watch():
        got = call()
    assert seen[0] == "cute_kernels.sparse_prefill_fwd.default"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    assert "cute_kernels::sparse_prefill_fwd" in {event.key for event in profile.key_averages()}
    with torch._subclasses.FakeTensorMode() as mode:
        fake = ck.sparse_prefill(*(mode.from_tensor(i[name]) for name in ("q", "kv", "indices")), 0.5)
    assert all(isinstance(t, torch._subclasses.FakeTensor) for t in fake)
    assert all(torch.equal(a, b) for a, b in zip(want, got))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_kernel_that_runs_is_named(arch):
    for q_len, name in ((1, "decode"), (4096, "prefill")):
        q = torch.empty(1, 4, q_len, 64, dtype=torch.bfloat16)
        k = torch.empty(1, 1, 5000, 64, dtype=torch.bfloat16)
        _, backend = dispatch.select("active_attention", q.device, Target(arch, 132), dict(q=q, k_cache=k, v_cache=k, kv_len=5000))
        assert backend == f"{arch}:{name}"
