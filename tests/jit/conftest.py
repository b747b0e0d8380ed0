"""A toy kernel in a folder of its own, a cache in another one, and programs that use both."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

DEVICE = '''
import cutlass.cute as cute
from cutlass import Float32, Int32

ADDEND = {addend}


class Toy:
    def __init__(self, scale):
        self.scale = scale

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, n: Int32, stream):
        self.kernel(a, b, n).launch(grid=[(n + 127) // 128, 1, 1], block=[128, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, n: Int32):
        i = cute.arch.block_idx()[0] * 128 + cute.arch.thread_idx()[0]
        if i < n:
            b[i] = a[i] * Float32(self.scale) + Float32(ADDEND)
'''

BUILDER = '''
import os, time
from typing import NamedTuple
from cute_kernels.jit import kernel_builder


class Config(NamedTuple):
    scale: float


@kernel_builder("{name}", archs=("sm_90a", "sm_100a"), variants=(Config(2.0),))
def toy(config, arch):
    import cutlass.cute as cute
    from cutlass import Float32, Int32
    from .device import Toy

    with open(os.environ["TOY_COMPILES"], "a") as file:
        file.write(arch + "\\n")
    time.sleep(float(os.environ.get("TOY_SLEEP", "0")))
    if config.scale < 0:
        raise ValueError("no negative scale")
    fake = lambda: cute.runtime.make_fake_tensor(Float32, (cute.sym_int(),), (1,), assumed_align=4)
    return Toy(config.scale), (fake(), fake(), Int32(1), cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True))
'''


class ToyKernel:
    """`folder`/`package`: __init__.py with the builder, device.py with the kernel. Counts the compiles of all processes."""

    def __init__(self, folder: Path, package: str) -> None:
        self.folder, self.package = folder, package
        self.path = folder / package
        self.path.mkdir()
        (self.path / "__init__.py").write_text(BUILDER.format(name=package))
        self.write_device(3.0)
        self.counter = folder / "compiles"
        self.counter.touch()

    def write_device(self, addend: float) -> None:
        (self.path / "device.py").write_text(DEVICE.format(addend=addend))

    @property
    def compiles(self) -> int:
        return len(self.counter.read_text().split())

    def load(self):
        """(builder, Config) imported into this process."""
        module = importlib.import_module(self.package)
        return module.toy, module.Config

    def start(self, code: str, **environment: str) -> subprocess.Popen:
        """Another process that runs `code` with `toy` and `Config` imported."""
        head = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(self.folder)!r}]\nfrom {self.package} import toy, Config\n"
        env = {**os.environ, "TOY_COMPILES": str(self.counter), **environment}
        command = [sys.executable, "-c", head + code]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, code: str, **environment: str) -> str:
        """As `start`, to the end; its output."""
        process = self.start(code, **environment)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        return out


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """Every test has an empty disk cache of its own, and no warning counts as given."""
    from cute_kernels.jit import cache

    for name in list(os.environ):
        if name.startswith("CUTE_KERNELS_"):
            monkeypatch.delenv(name)
    folder = tmp_path / "cache"
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(folder))
    cache._warned.clear()
    return folder


@pytest.fixture
def toy_kernel(tmp_path, monkeypatch):
    package = "toy_" + "".join(c if c.isalnum() else "_" for c in tmp_path.name)
    kernel = ToyKernel(tmp_path, package)
    monkeypatch.setenv("TOY_COMPILES", str(kernel.counter))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield kernel
    from cute_kernels.jit import builder

    builder._registry.pop(package, None)
    for name in [m for m in sys.modules if m.split(".")[0] == package]:
        del sys.modules[name]
