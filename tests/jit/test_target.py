"""Targets: which GPU a tensor's kernels are for."""

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cute_kernels import jit
from cute_kernels.jit import target as targets

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def device(monkeypatch, *capabilities):
    """Pretend that these GPUs are visible."""

    def properties(index):
        major, minor = capabilities[index]
        return SimpleNamespace(
            name=f"GPU {index}", major=major, minor=minor, multi_processor_count=100 + index, shared_memory_per_block_optin=232448
        )

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    targets.forget_devices()


@pytest.fixture(autouse=True)
def forget():
    yield
    targets.forget_devices()


def test_a_cpu_has_none():
    assert jit.current_target(CPU) is None


def test_each_device_has_its_own(monkeypatch):
    device(monkeypatch, (9, 0), (10, 0), (10, 3), (8, 0), (12, 0))
    found = [jit.current_target(torch.device("cuda", i)) for i in range(5)]
    assert [t and (t.arch, t.num_sms) for t in found] == [("sm_90a", 100), ("sm_100a", 101), ("sm_103a", 102), None, None]
    assert jit.current_target(torch.device("cuda")) is found[0], "an index of None is the current device"
    assert found[0].max_smem == 232448 and found[0].backend is None
    assert targets.visible_archs() == ["sm_100a", "sm_103a", "sm_90a"]


def test_an_unsupported_gpu_is_named_with_those_supported(monkeypatch):
    device(monkeypatch, (8, 9))
    with pytest.raises(jit.UnsupportedGPUError, match=r"GPU 0 \(compute capability 8\.9\).*sm_90a.*H200.*sm_100a.*B200"):
        jit.detect()
    with pytest.raises(jit.UnsupportedGPUError, match="8.9"):
        jit.warmup()


def test_the_override(monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_ARCH", "sm_100a")
    assert jit.detect().arch == "sm_100a" and targets.visible_archs() == ["sm_100a"]
    assert jit.current_target(CPU) is None, "CPU tensors keep the reference"
    device(monkeypatch, (9, 0))
    with pytest.raises(RuntimeError, match="CUTE_KERNELS_ARCH=sm_100a, but device 0 is GPU 0, compute capability 9.0"):
        jit.current_target(torch.device("cuda", 0))
    monkeypatch.setenv("CUTE_KERNELS_ARCH", "sm_90")
    with pytest.raises(jit.UnsupportedGPUError, match="CUTE_KERNELS_ARCH must be one of.*got 'sm_90'"):
        jit.detect()


def test_detect_without_anything():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert jit.detect() is None
    with pytest.raises(RuntimeError, match="no GPU is visible: give arch= or set CUTE_KERNELS_ARCH"):
        jit.warmup()


def test_pushed_targets_nest_and_belong_to_a_thread():
    one, two = jit.Target("sm_90a", 132, backend=object()), jit.Target("sm_100a", 148, backend=object())
    with jit.push_target(one):
        with jit.push_target(two) as inner:
            assert inner is two and jit.current_target(CPU) is two
            seen = []
            thread = threading.Thread(target=lambda: seen.append(jit.current_target(CPU)))
            thread.start()
            thread.join()
            assert seen == [None]
        assert jit.current_target(CPU) is one
        with pytest.raises(RuntimeError, match="inside emulate.*CPU tensors, got one on cuda:0"):
            jit.current_target(torch.device("cuda", 0))
    assert jit.current_target(CPU) is None


def test_pop_in_the_wrong_order():
    outer = jit.push_target(jit.Target("sm_90a", 132))
    inner = jit.push_target(jit.Target("sm_90a", 132))
    with pytest.raises(RuntimeError, match="reverse order"):
        jit.pop_target(outer)
    jit.pop_target(inner)
    jit.pop_target(outer)
    with pytest.raises(RuntimeError, match="reverse order"):
        jit.pop_target(outer)


def test_a_foreign_object_becomes_the_backend_of_a_target():
    backend = SimpleNamespace(arch="sm_100a", sm_count=12)
    with jit.push_target(backend) as target:
        assert (target.arch, target.num_sms, target.sm_count, target.backend) == ("sm_100a", 12, 12, backend)
        assert target.key != jit.Target("sm_100a", 148).key


def test_an_unknown_arch():
    with pytest.raises(jit.UnsupportedGPUError, match="sm_80"):
        jit.Target("sm_80", 108)


def test_importing_touches_neither_compiler_nor_gpu():
    code = """
import sys, torch
before = set(sys.modules)
import cute_kernels, cute_kernels.jit, cute_kernels.kernels.combine
new = {m.split(".")[0] for m in set(sys.modules) - before}
assert not new & {"cutlass", "cuda", "tvm_ffi"}, new
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)
