"""What is read from a cubin, against NVIDIA's own tools; the command-line program."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cute_kernels.jit import UnsupportedGPUError
from cute_kernels.jit import builder as builders
from cute_kernels.jit import cubin as cubins
from cute_kernels.jit.builder import kernel_builder

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import inspect_kernel  # noqa: E402

needs_nvdisasm = pytest.mark.skipif(cubins.find_tool("nvdisasm") is None, reason="needs nvdisasm")
needs_cuobjdump = pytest.mark.skipif(cubins.find_tool("cuobjdump") is None, reason="needs cuobjdump")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A kernel with static and dynamic shared memory that spills: 200 live values a thread in 64 registers."""
    folder = tmp_path_factory.mktemp("spilling")
    (folder / "spilling_kernel.py").write_text(SPILLING)
    sys.path.insert(0, str(folder))
    patch = pytest.MonkeyPatch()
    patch.setenv("CUTE_KERNELS_CACHE_DIR", str(folder / "cache"))
    try:
        from spilling_kernel import spilling

        yield {arch: spilling.artifact(None, arch) for arch in spilling.archs}
    finally:
        patch.undo()
        builders._registry.pop("spilling", None)
        sys.path.remove(str(folder))


SPILLING = '''
from cute_kernels.jit import kernel_builder
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32


class Spilling:
    @cute.jit
    def __call__(self, a: cute.Tensor, n: Int32, stream):
        self.kernel(a, n).launch(grid=[n, 1, 1], block=[1024, 1, 1], stream=stream, smem=4096)

    @cute.kernel
    def kernel(self, a: cute.Tensor, n: Int32):
        tid = cute.arch.thread_idx()[0]
        x = [a[tid + 1024 * i] for i in range(200)]
        for j in cutlass.range(n, unroll=1):
            x = [x[i] * x[(i + 7) % 200] + a[j] for i in range(200)]
        for i in cutlass.range_constexpr(200):
            a[tid + 1024 * i] = x[i]


@kernel_builder("spilling", archs=("sm_90a", "sm_100a"))
def spilling(config, arch):
    tensor = cute.runtime.make_fake_tensor(Float32, (cute.sym_int(),), (1,), assumed_align=4)
    return Spilling(), (tensor, Int32(1), cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True))
'''


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_resources(made, arch):
    (r,) = cubins.resources(made[arch].cubin)
    assert r.registers == 64 and r.threads == 1024 and r.stack > 400 and r.spill_loads > 100 and r.spill_stores > 100, r
    assert r.code_bytes % 16 == 0 and r.parameter_bytes > 0
    assert made[arch].dynamic_smem == [4096]


@needs_cuobjdump
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_resources_agree_with_cuobjdump(made, arch, tmp_path):
    path = tmp_path / "k.cubin"
    path.write_bytes(made[arch].cubin)
    text = subprocess.run([cubins.find_tool("cuobjdump"), "-res-usage", path], capture_output=True, text=True, check=True).stdout
    (r,) = cubins.resources(made[arch].cubin)
    assert r.kernel in text
    assert f"REG:{r.registers} STACK:{r.stack} SHARED:{r.static_smem} " in text, (r, text)


@needs_nvdisasm
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_spills_agree_with_the_disassembly(made, arch):
    (r,) = cubins.resources(made[arch].cubin)
    opcodes = cubins.sass_opcodes(cubins.disassemble(made[arch].cubin))
    by_family = {f: sum(n for op, n in opcodes.items() if op.split(".")[0] == f) for f in ("LDL", "STL", "LDG", "EXIT")}
    assert (by_family["LDL"], by_family["STL"]) == (r.spill_loads, r.spill_stores) and by_family["EXIT"] >= 1
    assert sum(opcodes.values()) * 16 == r.code_bytes, "every instruction was counted"


def test_ptx_opcodes():
    text = """
// ld.global.f32 in a comment
.visible .entry k(
\t.param .u64 p
)
{
\t.reg .b32 \t%r<3>;
\tld.param.b64 \t%rd1, [p];
\t@%p1 bra \t$L__BB0_2;
$L__BB0_1:
\t{
\t.reg .pred P1; mbarrier.try_wait.parity.shared::cta.b64 P1, [%r1], %r2;
\t@!P1 bra $L__BB0_1;
\t}
\ttcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, p;
\tret;
}
"""
    assert cubins.ptx_opcodes(text) == {
        "ld.param.b64": 1, "bra": 2, "mbarrier.try_wait.parity.shared::cta.b64": 1,
        "tcgen05.mma.cta_group::1.kind::f16": 1, "ret": 1,
    }  # fmt: skip


def test_what_is_no_cubin():
    with pytest.raises(ValueError, match="must be a 64-bit ELF file"):
        cubins.resources(b"PTX")


def test_a_missing_tool_is_named(monkeypatch, made):
    monkeypatch.setattr(cubins, "find_tool", lambda name: None)
    with pytest.raises(cubins.MissingTool, match="pip install nvidia-cuda-nvdisasm"):
        cubins.disassemble(made["sm_90a"].cubin)


# ---- tools/inspect_kernel.py ---------------------------------------------------------------------------------------


def program(capsys, *arguments):
    status = inspect_kernel.main(list(arguments))
    out, err = capsys.readouterr()
    return status, out, err


def test_list(capsys):
    status, out, _ = program(capsys, "combine", "--list")
    assert status == 0 and out.startswith("combine: sm_90a, sm_100a, sm_103a\n") and "d=512" in out
    status, out, _ = program(capsys, "--list", "--json")
    assert status == 0 and json.loads(out)["combine"]["sm_100a"][0]["part"] == "Float32"


def test_table_json_and_dumps(capsys, tmp_path):
    one = ("combine", "--arch", "sm_100a", "--variant", "d=64,has_sink=true,out=Float16")
    status, out, _ = program(capsys, *one, "--strict", "--opcodes", "3")
    assert status == 0
    head, row = out.splitlines()[:2]
    assert head.split()[:4] == ["kernel", "arch", "config", "regs"] and "d=64 has_sink=True" in row and "out=Float16" in row
    status, out, _ = program(capsys, *one, "--json")
    (report,) = json.loads(out)
    assert report["origin"] == "disk" and report["functions"][0]["stack"] == 0 and report["ptx_opcodes"]["ld.global.v4.b32"] >= 4
    files = [str(tmp_path / name) for name in ("a.ptx", "a.cubin")]
    status, out, _ = program(capsys, *one, "--ptx", files[0], "--cubin", files[1])
    assert status == 0 and ".target sm_100a" in Path(files[0]).read_text() and Path(files[1]).read_bytes()[:4] == b"\x7fELF"
    status, out, _ = program(capsys, *one, "--ptx", "-")
    assert out == Path(files[0]).read_text()


def test_progress_of_several_compiles(capsys):
    _, out, err = program(capsys, "combine", "--arch", "sm_90a", "sm_100a", "--variant", "d=64", "--json")
    lines = [line for line in err.splitlines() if "/2 combine sm_" in line]
    assert [line[:3] for line in lines] == ["1/2", "2/2"] and len(json.loads(out)) == 2


@needs_nvdisasm
def test_sass(capsys):
    status, out, _ = program(capsys, "combine", "--arch", "sm_90a", "--variant", "d=64", "--sass", "-")
    assert status == 0 and "LDG.E.128" in out and "EXIT" in out


def test_without_the_disassembler_the_rest_is_still_there(capsys, monkeypatch):
    monkeypatch.setattr(cubins, "find_tool", lambda name: None)
    status, out, err = program(capsys, "combine", "--arch", "sm_90a", "--variant", "d=64")
    assert status == 0 and "combine" in out and "no SASS: nvdisasm was not found" in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing"], "no kernel is named 'nothing'. Kernels: .*combine"),
        (["combine", "--arch", "sm_80"], "must be one of the supported architectures, got 'sm_80'"),
        (["combine", "--arch", "sm_90a", "--variant", "color=red"], "name of part, out, d, has_sink, wide, got 'color=red'"),
        (["combine", "--ptx", "-"], "take one variant, these are 12"),
    ],
)
def test_errors_are_one_line_and_status_1(capsys, arguments, text):
    import re

    status, out, err = program(capsys, *arguments)
    assert status == 1 and not out and err.count("\n") == 1 and re.search(text, err), err


def test_strict_fails_on_spills(capsys, made, monkeypatch):
    from spilling_kernel import spilling

    monkeypatch.setattr(inspect_kernel.jit, "discover", lambda: {"spilling": spilling})
    monkeypatch.setattr(spilling, "_variants", (None,))
    status, out, _ = program(capsys, "spilling", "--arch", "sm_90a", "--strict")
    assert status == 3 and " 64 " in out


def test_builder_names_are_checked():
    with pytest.raises(UnsupportedGPUError, match="sm_80"):
        kernel_builder("x", archs=("sm_80",))
