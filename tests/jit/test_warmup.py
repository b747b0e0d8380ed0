"""Compiling ahead: warmup() and CUTE_KERNELS_JIT=import."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import cute_kernels
from cute_kernels import jit
from cute_kernels.jit import warmup as warmup_function
from cute_kernels.jit.builder import discover

ROOT = Path(__file__).resolve().parents[2]
warming = sys.modules["cute_kernels.jit.warmup"]


@pytest.fixture
def only_toy(toy_kernel, monkeypatch):
    """Warm-up knows the toy kernel alone: the product's kernels take minutes."""
    toy, config = toy_kernel.load()
    monkeypatch.setattr(warming, "discover", lambda: {toy.name: toy})
    return toy_kernel, toy, config


def test_it_is_public():
    assert cute_kernels.warmup is warmup_function and cute_kernels.clear_cache is jit.clear_cache


def test_the_default_variants_for_an_arch_and_no_gpu(only_toy):
    kernel, toy, config = only_toy
    (first,) = jit.warmup(arch="sm_100a")
    assert (first.kernel, first.config, first.arch, first.origin) == (toy.name, config(2.0), "sm_100a", "compiled")
    assert first.seconds > 0
    both = jit.warmup(toy.name, arch=("sm_90a", "sm_100a"))
    assert [(r.arch, r.origin) for r in both] == [("sm_90a", "compiled"), ("sm_100a", "disk")]
    assert kernel.compiles == 2
    toy(config(2.0), "sm_90a")
    assert kernel.compiles == 2, "what was warmed up is what a call needs"


def test_given_configs(only_toy):
    _, toy, config = only_toy
    assert [r.config for r in jit.warmup(toy.name, arch="sm_90a", configs=[config(7.0), config(8.0)])] == [config(7.0), config(8.0)]


def test_the_environment_names_the_arch(only_toy, monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_ARCH", "sm_90a")
    assert [r.arch for r in jit.warmup()] == ["sm_90a"]


def test_what_it_refuses(only_toy):
    _, toy, config = only_toy
    with pytest.raises(ValueError, match="kernels must be names of .*got 'nothing'"):
        jit.warmup("nothing", arch="sm_90a")
    with pytest.raises(ValueError, match="exactly one kernel"):
        jit.warmup(arch="sm_90a", configs=[config(1.0)])
    with pytest.raises(jit.UnsupportedGPUError, match="sm_80"):
        jit.warmup(arch="sm_80")
    with pytest.raises(jit.UnsupportedGPUError, match="not for sm_103a"):
        jit.warmup(toy.name, arch="sm_103a")
    assert jit.warmup(arch="sm_103a") == [], "none of the kernels is for it"


def test_the_kernels_are_found():
    found = discover()
    assert "combine" in found
    for builder in found.values():
        if not builder.__module__.startswith("cute_kernels."):
            continue  # another test's
        for arch in builder.archs:
            assert builder.variants(arch), f"{builder.name} has nothing to warm up for {arch}"
            assert len(set(builder.variants(arch))) == len(builder.variants(arch))


def test_on_import(only_toy, monkeypatch):
    kernel, _, _ = only_toy
    monkeypatch.setattr(warming._target, "visible_archs", lambda: [])
    with pytest.warns(RuntimeWarning, match="compiled nothing"):
        jit.on_import()
    monkeypatch.setattr(warming._target, "visible_archs", lambda: ["sm_90a", "sm_100a"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jit.on_import()
    assert kernel.compiles == 2


def test_import_with_the_variable_set(cache_folder):
    # All kernels would take too long here, so the search for them finds the small one alone.
    code = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
rglob = pathlib.Path.rglob
pathlib.Path.rglob = lambda self, pattern: [p for p in rglob(self, pattern) if p.name == "combine.py"]
import cute_kernels
from cute_kernels.jit import cache
print("cutlass" in sys.modules, sorted(p.name.split("-")[0] for p in (cache.root() / cache.FORMAT / "combine").iterdir()))
"""
    env = {**os.environ, "CUTE_KERNELS_JIT": "import", "CUTE_KERNELS_ARCH": "sm_90a"}
    done = subprocess.run([sys.executable, "-c", code, str(ROOT)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True ['sm_90a', 'sm_90a', 'sm_90a', 'sm_90a']\n"
