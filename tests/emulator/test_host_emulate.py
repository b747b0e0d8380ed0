"""The hook: what reaches a launch on each host path, and that leaving restores everything."""

from __future__ import annotations

import ctypes
import gc
import importlib
import math
import struct
import sys
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from cute_kernels.emulator.host import (  # noqa: E402
    MissingPtx,
    current,
    emulate,
    is_installed,
    params,
    ptx_store,
    record_only,
    redirect,
    register_ptx,
    tensors,
)

emulate_module = importlib.import_module("cute_kernels.emulator.host.emulate")  # the package's name is the function
sys.path.insert(0, __file__.rsplit("/", 1)[0])
import host_kernels as kernels  # noqa: E402


def operands(n: int = 300):
    return torch.arange(n, dtype=torch.float32), torch.full((n,), 0.5), torch.zeros(n)


def numpy_add(emulation, capture):
    """A backend for `add` alone: does with NumPy what the kernel does, through the captured parameters."""
    n = 300
    arrays = []
    for index in range(3):
        address = struct.unpack("<Q", capture.param(index)[:8])[0]
        arrays.append(np.ctypeslib.as_array((ctypes.c_float * n).from_address(address)))
    assert capture.grid == (-(-n // capture.block[0]), 1, 1)
    arrays[2][:] = arrays[0] + arrays[1]
    return capture


def check_capture(capture, a, b, c, length_in_parameter: bool):
    assert capture.grid == (3, 1, 1) and capture.block == (128, 1, 1) and capture.cluster == (1, 1, 1)
    assert capture.dynamic_smem == 0 and capture.stream == 0
    for index, tensor in enumerate((a, b, c)):
        data = capture.param(index)
        assert struct.unpack("<Q", data[:8])[0] == tensor.data_ptr()
        if length_in_parameter:
            assert struct.unpack("<i", data[8:12])[0] == tensor.numel()
    assert capture.entry in params.entries(capture.ptx) and params.target(capture.ptx) == "sm_100a"


def snapshot():
    """Everything that emulate() touches, in a comparable form."""
    import tvm_ffi.core
    from cuda.bindings import driver, runtime
    from cutlass.base_dsl import compiler, env_manager, jit_executor
    from cutlass.base_dsl.export import external_binary_module
    from cutlass.cutlass_dsl import cuda_jit_executor
    from cutlass.utils import hardware_info

    owners = [
        torch.Tensor, torch.cuda, torch.cuda.nvtx, driver, runtime, compiler.CompileOptions,
        env_manager.EnvironmentVarManager, jit_executor.JitExecutor, cuda_jit_executor.CudaDialectJitCompiledFunction,
        external_binary_module.ExternalBinaryModule, hardware_info.HardwareInfo,
    ]  # fmt: skip
    state = [dict(vars(owner)) for owner in owners]
    table = tensors.exchange_table(torch)
    state.append(ctypes.string_at(ctypes.addressof(table._table), ctypes.sizeof(table._table)))
    state.append(dict(tvm_ffi.core.ERROR_NAME_TO_TYPE))
    return state


def redirected() -> bool:
    redirections = emulate_module._installation.redirections.values()
    return any(redirection.installed() for redirection in redirections)


def test_plain_compile_with_dlpack_tensors():
    import cuda.bindings.driver as cuda
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack

    a, b, c = operands()
    with emulate(backend=numpy_add) as emulation:
        wrapped = [from_dlpack(t) for t in (a, b, c)]
        assert all(t.memspace == cute.AddressSpace.gmem for t in wrapped)
        function = cute.compile(kernels.add, *wrapped, cuda.CUstream(0))
        function(*wrapped, cuda.CUstream(0))
    assert torch.equal(c, a + b)
    check_capture(emulation.captures[0], a, b, c, length_in_parameter=False)
    assert emulation.launches == emulation.captures


def test_plain_compile_with_torch_tensors():
    from cutlass import cute

    a, b, c = operands()
    with emulate(backend=numpy_add) as emulation:
        function = cute.compile(kernels.add_default_stream, a, b, c)
        function(a, b, c)
        function(a, b, c)
    assert torch.equal(c, a + b) and len(emulation.captures) == 2


def test_implicit_compile_by_calling_the_jit_function():
    a, b, c = operands()
    with emulate(backend=numpy_add) as emulation:
        kernels.add_default_stream(a, b, c)
    assert torch.equal(c, a + b) and len(emulation.captures) == 1


def test_tvm_ffi_function():
    a, b, c = operands()
    with emulate(backend=numpy_add) as emulation:
        function = kernels.compile_tvm_ffi()
        function(a, b, c)
    assert torch.equal(c, a + b)
    check_capture(emulation.captures[0], a, b, c, length_in_parameter=True)
    assert dict(emulation.memory_seen)[a.untyped_storage().data_ptr()] == a.untyped_storage().nbytes()


def test_the_callers_own_kept_files_stay_and_options_do_not_leak(tmp_path):
    a, b, c = operands()
    with emulate(backend=numpy_add):
        for folder in ("one", "two"):
            (tmp_path / folder).mkdir()
            function = kernels.compile_tvm_ffi(f"--keep-ptx --dump-dir {tmp_path / folder}")
            function(a, b, c)
        kernels.compile_tvm_ffi()(a, b, c)
    for folder in ("one", "two"):
        assert [path.suffix for path in sorted((tmp_path / folder).iterdir())] == [".cubin", ".ptx"]
    function = kernels.compile_tvm_ffi("--gpu-arch sm_100a")
    assert function.__ptx__ is None and function.__cubin__ is None


def test_one_function_serves_several_emulations():
    a, b, c = operands()
    with emulate(backend=record_only):
        function = kernels.compile_tvm_ffi()
        function(a, b, c)
    for _ in range(2):
        c.zero_()
        with emulate(backend=numpy_add) as emulation:
            function(a, b, c)
            function(a, b, c)
        assert torch.equal(c, a + b) and len(emulation.captures) == 2


def test_reloaded_object_finds_the_ptx_beside_it(tmp_path, monkeypatch):
    from cutlass import cute

    monkeypatch.setattr(ptx_store, "_by_hash", {})  # other tests compile the same kernel
    options = f"--gpu-arch sm_100a --keep-ptx --dump-dir {tmp_path}"
    function = kernels.compile_tvm_ffi(options)  # outside any emulation
    path = str(tmp_path / "add.o")
    function.export_to_c(path, function_name="add_fn")
    a, b, c = operands()
    early = cute.runtime.load_module(path, enable_tvm_ffi=True)["add_fn"]
    with emulate(backend=numpy_add) as emulation:
        with pytest.raises(MissingPtx, match="no PTX is known"):
            early(a, b, c)
        (tmp_path / "add.ptx").write_text(function.__ptx__)
        loaded = cute.runtime.load_module(path, enable_tvm_ffi=True)["add_fn"]
        loaded(a, b, c)
        assert torch.equal(c, a + b)
        c.zero_()
        early(a, b, c)  # the same machine code, now known
    assert torch.equal(c, a + b)
    assert [capture.ptx for capture in emulation.captures] == [function.__ptx__] * 2


def test_function_compiled_before_needs_its_ptx(tmp_path, monkeypatch):
    monkeypatch.setattr(ptx_store, "_by_hash", {})
    monkeypatch.setattr(ptx_store, "_objects", [])
    # Beside a GPU the DSL gives no callable for another architecture, so this one is compiled for the GPU (Hopper here).
    arch = "sm_90a" if torch.cuda.is_available() else "sm_100a"
    options = f"--gpu-arch {arch} --keep-ptx --dump-dir {tmp_path}"
    function = kernels.compile_tvm_ffi(options)
    a, b, c = operands()
    with emulate(arch, backend=numpy_add) as emulation:
        # The name is shared with other compilations of this file, so the text is registered under the machine code.
        with pytest.raises(MissingPtx) as error:
            function(a, b, c)
        digest = str(error.value).split("SHA-256 ")[1][:64]
        register_ptx(digest, function.__ptx__)
        function(a, b, c)
    assert torch.equal(c, a + b) and len(emulation.captures) == 1


def test_modules_that_outlive_their_function_keep_no_emulated_library():
    from cutlass import cute

    a, b, c = operands()
    with emulate(backend=numpy_add):
        function = cute.compile(kernels.add_default_stream, a, b, c)
        function(a, b, c)
        module = function.jit_module
        assert module.cuda_library
        del function
        gc.collect()
    assert module.cuda_library == []  # its __del__ would hand the emulator's handles to the CUDA runtime


def test_leaving_restores_everything():
    with emulate(backend=record_only):
        pass
    before = snapshot()
    assert not redirected() and not is_installed() and current() is None
    with emulate(backend=record_only, pretend_cuda=True) as outer:
        assert redirected() and is_installed() and current() is outer
        assert snapshot() != before
    assert snapshot() == before and not redirected() and not is_installed() and current() is None
    assert not torch.cuda.is_available() or torch.version.cuda
    assert torch.zeros(1).is_cuda is False and torch.zeros(1).__dlpack_device__()[0] == 1


def test_leaving_by_an_exception_restores_everything():
    with emulate(backend=record_only):
        pass
    before = snapshot()
    with pytest.raises(ZeroDivisionError):
        with emulate(backend=record_only, pretend_cuda=True):
            kernels.compile_tvm_ffi()(*operands())
            raise ZeroDivisionError
    assert snapshot() == before and not redirected() and current() is None


def test_functions_go_back_to_the_real_runtime():
    a, b, c = operands()
    with emulate(backend=record_only):
        function = kernels.compile_tvm_ffi()
        function(a, b, c)
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        function(a, b, c)


@pytest.mark.skipif(torch.version.cuda is not None and torch.cuda.is_available(), reason="a GPU is present")
def test_plain_functions_go_back_to_the_real_runtime():
    from cutlass import cute

    a, b, c = operands()
    with emulate(backend=record_only):
        function = cute.compile(kernels.add_default_stream, a, b, c)
        function(a, b, c)
    with pytest.raises(Exception, match="cudaError"):
        function(a, b, c)


def test_errors_of_a_launch_surface_as_themselves():
    class Broken(Exception):
        pass

    def backend(emulation, capture):
        raise Broken("deadlock")

    from cutlass import cute

    a, b, c = operands()
    with emulate(backend=backend) as emulation:
        with pytest.raises(Broken, match="deadlock"):
            kernels.compile_tvm_ffi()(a, b, c)
        plain = cute.compile(kernels.add_default_stream, a, b, c)
        with pytest.raises(Broken, match="deadlock"):
            plain(a, b, c)
        assert emulation.pending is None and len(emulation.captures) == 2 and emulation.launches == []
        assert "did not finish" in emulation.report()


def test_nesting_gives_launches_to_the_innermost():
    a, b, c = operands()
    with emulate(backend=record_only) as outer:
        function = kernels.compile_tvm_ffi()
        function(a, b, c)
        with emulate(backend=record_only) as inner:
            function(a, b, c)
            function(a, b, c)
        function(a, b, c)
        assert current() is outer
    assert len(outer.captures) == 2 and len(inner.captures) == 2


def test_other_threads_are_not_emulated():
    seen = {}

    def work():
        seen["current"] = current()
        seen["device"] = torch.zeros(1).__dlpack_device__()[0]
        seen["cuda"] = torch.zeros(1).is_cuda
        seen["available"] = torch.cuda.is_available()
        try:
            function(*operands())
        except Exception as error:
            seen["error"] = error

    available = torch.cuda.is_available()
    with emulate(backend=record_only, pretend_cuda=True) as emulation:
        function = kernels.compile_tvm_ffi()
        assert torch.cuda.is_available()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen["current"] is None and seen["device"] == 1 and seen["cuda"] is False
    assert seen["available"] == available
    assert "expected device_type=cuda" in str(seen["error"]) and emulation.captures == []


def test_two_threads_emulate_at_once():
    results = {}
    barrier = threading.Barrier(2, timeout=60)
    with emulate(backend=record_only):
        function = kernels.compile_tvm_ffi()  # cute.compile is not thread-safe; calling is

    def work(name):
        a, b, c = operands()
        with emulate(backend=numpy_add, sm_count=10 + name) as emulation:
            barrier.wait()
            count = torch.cuda.get_device_properties(0).multi_processor_count
            for _ in range(20):
                function(a, b, c)
            barrier.wait()
        results[name] = count, emulation, torch.equal(c, a + b)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(2):
        count, emulation, equal = results[n]
        assert count == 10 + n and equal and len(emulation.captures) == 20
    assert not redirected() and not is_installed()


def test_queries_answer_for_the_emulated_gpu():
    from cuda.bindings import driver, runtime
    from cutlass.utils import HardwareInfo

    for arch, capability, sms in (("sm_100a", (10, 0), 148), ("sm_90a", (9, 0), 132)):
        with emulate(arch, backend=record_only) as emulation:
            assert torch.cuda.get_device_capability() == capability and torch.cuda.device_count() == 1
            assert torch.cuda.get_device_properties(0).multi_processor_count == sms
            info = HardwareInfo()
            assert info.get_device_multiprocessor_count() == sms
            assert info.get_max_active_clusters(2) == sms // 2
            error, device = driver.cuDeviceGet(0)
            attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
            assert driver.cuDeviceGetAttribute(attribute, device) == (driver.CUresult.CUDA_SUCCESS, capability[0])
            assert runtime.cudaGetDeviceCount() == (runtime.cudaError_t.cudaSuccess, 1)
            assert emulation.device.sm_count == sms


def test_wrong_arch_is_refused():
    a, b, c = operands()
    with emulate("sm_100a", backend=record_only):
        function = kernels.compile_tvm_ffi()
    with emulate("sm_90a", backend=record_only):
        with pytest.raises(RuntimeError, match="compiled for sm_100a and cannot run on the emulated sm_90a"):
            function(a, b, c)
        kernels.compile_tvm_ffi()(a, b, c)  # the emulated arch is the default when compiling


@pytest.mark.parametrize(
    "arguments",
    [{"arch": "sm_80"}, {"schedule": "fast"}, {"checks": "all"}, {"sm_count": 0}, {"seed": "x"}, {"seed": -1}],
    ids=str,
)
def test_bad_arguments(arguments):
    with pytest.raises(ValueError, match=f"{next(iter(arguments))} must be "):
        with emulate(**arguments):
            pass
    assert not is_installed()


def test_pretence_answers_as_cuda_and_allocates_on_the_cpu():
    with emulate(backend=record_only, pretend_cuda=True):
        x = torch.empty(4, device="cuda")
        assert x.is_cuda and x.device == torch.device("cuda", 0) and x.get_device() == 0
        y = torch.zeros(4, device=x.device) + x.new_ones(4, device="cuda:0")
        assert y.to("cuda").cuda().device.type == "cuda"
        y.record_stream(torch.cuda.current_stream())
    assert x.device.type == "cpu" and not y.is_cuda and torch.equal(y, torch.ones(4))


def test_pretended_allocations_have_cuda_alignment():
    with emulate(backend=record_only, pretend_cuda=True):
        x = torch.arange(1001, dtype=torch.float32, device="cuda")
        y = torch.ones(3, 5).to(torch.bfloat16).t().to("cuda")
        z = torch.zeros(7).cuda()
        assert all(t.data_ptr() % 512 == 0 for t in (x, y, z))
    assert torch.equal(x, torch.arange(1001.0)) and y.stride() == (1, 5) and torch.equal(y, torch.ones(5, 3).bfloat16())
    assert x.untyped_storage().nbytes() == 4004


def test_streams_and_events_stand_in():
    plain = torch.cuda.Stream
    with emulate(backend=record_only):
        stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        assert stream.cuda_stream == 0 and isinstance(stream, torch.cuda.Stream)
        with torch.cuda.stream(stream):
            event.record(stream)
        assert event.query() and math.isnan(event.elapsed_time(event))
    assert torch.cuda.Stream is plain


def test_tensors_that_cannot_be_exported_raise_torchs_error():
    a, b, c = operands()
    sparse = a.to_sparse()
    with emulate(backend=record_only) as emulation:
        function = kernels.compile_tvm_ffi()
        for _ in range(3):
            with pytest.raises(Exception, match="doesn't have storage"):
                function(sparse, b, c)
        function(a.requires_grad_(), b, c)
    assert len(emulation.captures) == 1


@pytest.mark.parametrize("code", [0, -1])
def test_call_then_calls_the_second_only_where_the_first_succeeds(code):
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    calls = []
    first = prototype(lambda a, b: calls.append((1, a, b)) or code)
    then = prototype(lambda a, b: calls.append((2, a, b)) or 7)
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in (first, then)]
    stub = prototype(redirect.executable(redirect.call_then(*addresses)))
    assert stub(3 << 40, 5) == (code or 7)
    assert calls == [(1, 3 << 40, 5), (2, 3 << 40, 5)][: 1 if code else 2]
