"""The Python-level patches of an emulation: DSL compilation and loading, cuda-python, torch.cuda, error surfaces.

A `PatchSet` replaces attributes and puts every one back in reverse order, also when installing half of them failed.
All replacements ask `current()` first, so a thread that is not emulating sees the original behaviour; the attributes
themselves are process-wide while any emulation is active. What is replaced:

| where | what | why |
|---|---|---|
| DSL compile options | keep PTX and cubin in a temporary folder | the emulator runs PTX; a compiled function carries none |
| DSL settings `no_cache`, `arch` | on; the emulated one | the implicit cache returns modules whose PTX was never kept |
| DSL `load_module` | notes the object's path | its PTX lies beside it |
| DSL executor | errors, reload after exit | an emulation error is raised as itself |
| `HardwareInfo`, cuda.bindings | counts and attributes of the emulated GPU | grids depend on the number of SMs |
| torch.cuda | availability, capability, properties, current stream, ... | published interfaces ask |
| `tvm_ffi` errors | kind CUDADialectError | as above, for TVM-FFI functions |
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import tempfile
import types
import weakref
from collections.abc import Callable
from typing import Any

from . import ptx_store, runtime_api
from .context import current

_MISSING = object()


class PatchSet:
    """Attribute replacements that can be undone together."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replaces ``owner.name``; for a class, the raw attribute (descriptor) is what is restored."""
        saved = vars(owner).get(name, _MISSING) if hasattr(owner, "__dict__") else getattr(owner, name, _MISSING)
        setattr(owner, name, value)
        self._undo.append((owner, name, saved))

    def set_item(self, owner: dict, key: Any, value: Any) -> None:
        """Replaces ``owner[key]``."""
        self._undo.append((owner, key, owner.get(key, _MISSING)))
        owner[key] = value

    def restore(self) -> None:
        """Undoes everything, last first."""
        while self._undo:
            owner, name, saved = self._undo.pop()
            if isinstance(owner, dict):
                if saved is _MISSING:
                    owner.pop(name, None)
                else:
                    owner[name] = saved
            elif saved is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, saved)


def when_active(original: Callable, replacement: Callable) -> Callable:
    """A function that calls `replacement(emulation, *args)` on emulating threads and `original` on others."""

    @functools.wraps(original)
    def function(*args, **kwargs):
        emulation = current()
        if emulation is None:
            return original(*args, **kwargs)
        return replacement(emulation, *args, **kwargs)

    return function


def take_pending(emulation) -> BaseException | None:
    """The exception that a callback left behind, if any; it is cleared."""
    error, emulation.pending = emulation.pending, None
    return error


class PtxKeeper:
    """Keeps what the DSL compiles: a temporary folder of PTX and cubin files, read into the store when needed."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="cute_kernels_emulator_")
        self._serial = 0
        self._watched: list[tuple[str, str]] = []
        self._changed: dict[int, tuple[Any, dict[str, Any]]] = {}

    def keep(self, option: Any, suffix: str, stem: str, arch: str) -> None:
        """Makes a compile option (KeepPTX or KeepCUBIN) write `stem`.`arch`.`suffix`, until `restore_option`."""
        self._changed[id(option)] = option, dict(vars(option))
        option.value = True
        option.dump_path = stem
        setattr(option, f"full_{suffix}_path", f"{stem}.{arch}.{suffix}")

    def restore_option(self, option: Any) -> None:
        """Gives an option back what it had before `keep`: the DSL shares default options between compilations."""
        changed = self._changed.pop(id(option), None)
        if changed is not None:
            vars(option).clear()
            vars(option).update(changed[1])

    def next_stem(self, arch: str) -> str:
        """A new file name without suffix, for a compilation whose files are then watched."""
        self._serial += 1
        stem = os.path.join(self.folder, f"k{self._serial}")
        self.watch(f"{stem}.{arch}.ptx", f"{stem}.{arch}.cubin")
        return stem

    def watch(self, ptx_path: str, cubin_path: str) -> None:
        """Adds a pair of files that the next compilation writes; they are read, not removed."""
        self._watched.append((ptx_path, cubin_path))

    def collect(self) -> None:
        """Registers the PTX of every pair of files written since the last call under the hash of its cubin."""
        pairs, self._watched = self._watched, []
        for ptx_path, cubin_path in pairs:
            if not (os.path.exists(ptx_path) and os.path.exists(cubin_path)):
                self._watched.append((ptx_path, cubin_path))  # not compiled yet, or compilation failed
                continue
            with open(cubin_path, "rb") as file:
                key = ptx_store.cubin_hash(file.read())
            with open(ptx_path, encoding="utf-8") as file:
                ptx_store.register_ptx(key, file.read())
            if ptx_path.startswith(self.folder):
                os.unlink(ptx_path)
                os.unlink(cubin_path)

    def close(self) -> None:
        """Reads what is left, restores the compile options and removes the folder."""
        self.collect()
        for option, _ in list(self._changed.values()):
            self.restore_option(option)
        shutil.rmtree(self.folder, ignore_errors=True)


class Loaded:
    """What an emulation loaded: plain compiled functions, and the lists of library handles that their modules hold."""

    def __init__(self):
        self.functions = weakref.WeakSet()
        self.libraries = []


def patch_dsl(patches: PatchSet, keeper: PtxKeeper, loaded: Loaded) -> None:
    """Compilation, loading and execution of the CuTe DSL."""
    import cutlass  # noqa: F401  (completes the DSL's own import order)
    from cutlass.base_dsl import compiler, env_manager, jit_executor
    from cutlass.base_dsl.export import external_binary_module
    from cutlass.cutlass_dsl import cuda_jit_executor

    apply = compiler.CompileOptions.apply_envar_settings

    def apply_envar_settings(emulation, self, envar, function_name):
        kept = [self.options[option] for option in (compiler.KeepPTX, compiler.KeepCUBIN)]
        for option in kept:
            keeper.restore_option(option)
        apply(self, envar, function_name)
        if any(option.value for option in kept):
            # The caller wants files. They go where the caller said, and copies are taken from there.
            for option in kept:
                option.value = True
            apply(self, envar, function_name)
            keeper.watch(kept[0].full_ptx_path, kept[1].full_cubin_path)
            return
        arch = self.options[compiler.GPUArch].value or envar.arch  # the compiler appends it to the names
        stem = keeper.next_stem(arch)
        for option, suffix in zip(kept, ("ptx", "cubin")):
            keeper.keep(option, suffix, stem, arch)

    patches.set(compiler.CompileOptions, "apply_envar_settings", when_active(apply, apply_envar_settings))

    run = jit_executor.JitExecutor.run_compiled_program

    def run_compiled_program(emulation, self, exe_args):
        try:
            result = run(self, exe_args)
        except Exception as error:
            pending = take_pending(emulation)
            if pending is None:
                raise
            raise pending from error
        pending = take_pending(emulation)  # host code that asserts success returns nothing to look at
        if pending is not None:
            raise pending
        return result

    patches.set(jit_executor.JitExecutor, "run_compiled_program", when_active(run, run_compiled_program))

    function = cuda_jit_executor.CudaDialectJitCompiledFunction
    load = function._load_cuda_library

    def load_cuda_library(emulation, self):
        self.__dict__.pop("num_devices", None)  # cached from another world
        try:
            libraries = load(self)
        except Exception as error:
            pending = take_pending(emulation)
            if pending is None:
                raise
            raise pending from error
        loaded.functions.add(self)
        loaded.libraries.append(libraries)
        return libraries

    patches.set(function, "_load_cuda_library", when_active(load, load_cuda_library))

    module = external_binary_module.ExternalBinaryModule
    init = module.__init__

    def module_init(emulation, self, file_path, *args, **kwargs):
        ptx_store.note_object(str(file_path))
        return init(self, file_path, *args, **kwargs)

    patches.set(module, "__init__", when_active(init, module_init))
    settings = env_manager.EnvironmentVarManager
    patches.set(settings, "no_cache", _NoCache())
    arch = vars(settings)["arch"]

    def get_arch(self):
        emulation = current()
        if emulation is not None and "CUTE_DSL_ARCH" not in os.environ:
            return emulation.arch  # not stored: the DSL detects its real device after the emulation
        return arch.fget(self)

    patches.set(settings, "arch", property(get_arch, arch.fset, arch.fdel))


class _NoCache:
    """Data descriptor over the DSL's `no_cache` setting, which lives in the instance: on while the thread emulates."""

    def __get__(self, instance, owner=None):
        return True if current() is not None else instance.__dict__["no_cache"]

    def __set__(self, instance, value):
        instance.__dict__["no_cache"] = value


def reset_functions(loaded: Loaded) -> None:
    """Makes plain compiled functions that were loaded by an emulation load their library anew when next called, and keeps their
    modules, which may outlive them, from handing the emulation's handles to the real runtime."""
    for function in list(loaded.functions):
        if function.jit_module is not None:
            function.jit_module._unloaded = True
        function.jit_module = None
        function._default_executor = None
        function.__dict__.pop("num_devices", None)
    for libraries in loaded.libraries:
        libraries.clear()


def patch_tvm_ffi(patches: PatchSet) -> None:
    """Makes a failed emulated launch of a TVM-FFI function raise the emulator's own exception."""
    if "tvm_ffi" not in sys.modules:
        try:
            import tvm_ffi  # noqa: F401
        except ImportError:
            return
    core = sys.modules["tvm_ffi.core"]
    table = core.ERROR_NAME_TO_TYPE
    if "cutlass.cutlass_dsl.tvm_ffi_provider" not in sys.modules:
        import cutlass.cutlass_dsl.tvm_ffi_provider  # noqa: F401  (registers the kind that is wrapped below)
    plain = table.get("CUDADialectError", RuntimeError)

    class DialectError(plain):  # the table must hold types
        def __new__(cls, message):
            emulation = current()
            pending = take_pending(emulation) if emulation is not None else None
            return pending if pending is not None else plain(message)

    patches.set_item(table, "CUDADialectError", DialectError)


def patch_cuda_python(patches: PatchSet) -> None:
    """Device queries through cuda.bindings, and the DSL's HardwareInfo."""
    from cuda.bindings import driver, runtime

    ok, okr = driver.CUresult.CUDA_SUCCESS, runtime.cudaError_t.cudaSuccess

    def put(module, name, replacement):
        original = getattr(module, name, None)
        if original is not None:
            patches.set(module, name, when_active(original, replacement))

    def attribute(success, invalid):
        def query(emulation, attribute, device):
            try:
                return success, runtime_api.device_attribute(emulation, int(attribute))
            except KeyError:
                return invalid, None

        return query

    put(driver, "cuInit", lambda e, flags: (ok,))
    put(driver, "cuDeviceGetCount", lambda e: (ok, 1))
    put(driver, "cuDeviceGet", lambda e, ordinal: (ok, driver.CUdevice(ordinal)))
    put(driver, "cuDriverGetVersion", lambda e: (ok, 13000))
    put(driver, "cuDeviceGetName", lambda e, length, device: (ok, e.device.name.encode()[: length - 1]))
    put(driver, "cuDeviceTotalMem", lambda e, device: (ok, e.device.memory_bytes))
    put(driver, "cuDeviceGetAttribute", attribute(ok, driver.CUresult.CUDA_ERROR_NOT_SUPPORTED))
    put(driver, "cuCtxGetCurrent", lambda e: (ok, driver.CUcontext(1)))
    put(driver, "cuCtxGetDevice", lambda e, *a: (ok, driver.CUdevice(0)))
    put(driver, "cuCtxSetCurrent", lambda e, context: (ok,))
    put(driver, "cuCtxSynchronize", lambda e, *a: (ok,))
    put(driver, "cuDevicePrimaryCtxRetain", lambda e, device: (ok, driver.CUcontext(1)))
    put(driver, "cuDevicePrimaryCtxRelease", lambda e, device: (ok,))
    put(driver, "cuStreamSynchronize", lambda e, stream: (ok,))
    put(driver, "cuStreamGetDevice", lambda e, stream: (ok, driver.CUdevice(0)))
    put(driver, "cuStreamGetCtx", lambda e, stream: (ok, driver.CUcontext(1)))
    put(runtime, "cudaGetDeviceCount", lambda e: (okr, 1))
    put(runtime, "cudaGetDevice", lambda e: (okr, 0))
    put(runtime, "cudaSetDevice", lambda e, device: (okr,))
    put(runtime, "cudaDriverGetVersion", lambda e: (okr, 13000))
    put(runtime, "cudaDeviceGetAttribute", attribute(okr, runtime.cudaError_t.cudaErrorNotSupported))
    put(runtime, "cudaDeviceSynchronize", lambda e: (okr,))
    put(runtime, "cudaStreamSynchronize", lambda e, stream: (okr,))
    put(runtime, "cudaLibraryUnload", lambda e, library: (runtime_api.library_unload(None, int(library)) or okr,))

    # Streams are one queue and events say nothing: the time between two is NaN, which no benchmark can mistake.
    put(driver, "cuStreamCreate", lambda e, flags: (ok, driver.CUstream(0)))
    put(driver, "cuStreamDestroy", lambda e, stream: (ok,))
    put(driver, "cuStreamWaitEvent", lambda e, *a: (ok,))
    put(driver, "cuEventCreate", lambda e, flags: (ok, driver.CUevent(0)))
    put(driver, "cuEventRecord", lambda e, *a: (ok,))
    put(driver, "cuEventSynchronize", lambda e, event: (ok,))
    put(driver, "cuEventElapsedTime", lambda e, start, end: (ok, float("nan")))
    put(driver, "cuEventDestroy", lambda e, event: (ok,))
    put(runtime, "cudaStreamCreate", lambda e: (okr, runtime.cudaStream_t(0)))
    put(runtime, "cudaStreamDestroy", lambda e, stream: (okr,))
    put(runtime, "cudaEventCreate", lambda e: (okr, runtime.cudaEvent_t(0)))
    put(runtime, "cudaEventRecord", lambda e, *a: (okr,))
    put(runtime, "cudaEventSynchronize", lambda e, event: (okr,))
    put(runtime, "cudaEventElapsedTime", lambda e, start, end: (okr, float("nan")))
    put(runtime, "cudaEventDestroy", lambda e, event: (okr,))

    def properties(emulation, device):
        value = runtime.cudaDeviceProp()
        value.name = emulation.device.name.encode()
        value.major, value.minor = emulation.device.capability
        value.multiProcessorCount = emulation.device.sm_count
        value.sharedMemPerBlockOptin = emulation.device.smem_per_block_optin
        value.sharedMemPerMultiprocessor = emulation.device.smem_per_sm
        value.totalGlobalMem = emulation.device.memory_bytes
        value.l2CacheSize = emulation.device.l2_bytes
        value.warpSize, value.maxThreadsPerBlock, value.regsPerMultiprocessor = 32, 1024, 65536
        return okr, value

    put(runtime, "cudaGetDeviceProperties", properties)

    from cutlass.utils import hardware_info

    info = hardware_info.HardwareInfo

    def method(name, replacement):
        patches.set(info, name, when_active(vars(info)[name], replacement))

    def active_clusters(emulation, self, cluster_size, stream=None):
        if not 1 <= cluster_size <= 32:
            raise ValueError(f"Cluster size must be between 1 and 32, {cluster_size} is not supported")
        return emulation.device.max_active_clusters(cluster_size)

    method("get_max_active_clusters", active_clusters)
    method("get_l2_cache_size_in_bytes", lambda e, self: e.device.l2_bytes)
    method("get_device_multiprocessor_count", lambda e, self: e.device.sm_count)


class _Stream:
    """Stands for every stream: launches run in the order of the calls."""

    def __init__(self, *args, **kwargs):
        pass

    cuda_stream = 0
    stream_id = 0
    device_index = 0
    device_type = 2

    @property
    def device(self):
        import torch

        return torch.device("cuda", 0)

    def __cuda_stream__(self):
        return (0, 0)

    def synchronize(self) -> None:
        """All emulated work has finished when a call returns."""

    def query(self) -> bool:
        """Always done."""
        return True

    def wait_stream(self, other) -> None:
        """Streams are one queue here."""

    def wait_event(self, event) -> None:
        """Streams are one queue here."""

    def record_event(self, event=None):
        """Events are not modelled."""
        return event

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


class _Event:
    def __init__(self, *args, **kwargs):
        pass

    def record(self, stream=None) -> None:
        """Time is not simulated."""

    def wait(self, stream=None) -> None:
        """Streams are one queue here."""

    def query(self) -> bool:
        """Always done."""
        return True

    def synchronize(self) -> None:
        """Always done."""

    def elapsed_time(self, other) -> float:
        """NaN: time is not simulated."""
        return float("nan")


def _switched_class(original: type, stand_in: type) -> type:
    """A class that makes `stand_in` objects on emulating threads and `original` ones elsewhere, and knows both."""

    class Switch(type):
        def __call__(cls, *args, **kwargs):
            return stand_in(*args, **kwargs) if current() is not None else original(*args, **kwargs)

        def __instancecheck__(cls, thing):
            return isinstance(thing, (original, stand_in))

    return Switch(original.__name__, (), {"__doc__": original.__doc__})


def patch_torch(patches: PatchSet, torch) -> None:
    """torch.cuda's queries, streams and events, and the DLPack methods of torch.Tensor."""
    from . import tensors

    for name, function in tensors.dlpack_methods(torch).items():
        patches.set(torch.Tensor, name, function)
    # torch parses the stream argument before a function mode sees the call, so the method itself is replaced.
    patches.set(torch.Tensor, "record_stream", when_active(torch.Tensor.record_stream, lambda e, tensor, stream: None))

    def put(module, name, replacement):
        original = getattr(module, name, None)
        if original is not None:
            patches.set(module, name, when_active(original, replacement))

    def properties(emulation, device=None):
        d = emulation.device
        return types.SimpleNamespace(
            name=d.name, major=d.capability[0], minor=d.capability[1], multi_processor_count=d.sm_count,
            total_memory=d.memory_bytes, warp_size=32, L2_cache_size=d.l2_bytes, max_threads_per_multi_processor=2048,
            shared_memory_per_block=48 * 1024, shared_memory_per_block_optin=d.smem_per_block_optin,
            shared_memory_per_multiprocessor=d.smem_per_sm, regs_per_multiprocessor=65536, is_integrated=0,
            clock_rate=d.clock_khz, memory_clock_rate=3_996_000, memory_bus_width=8192,
        )  # fmt: skip

    cuda = torch.cuda
    stream = _Stream()
    put(cuda, "is_available", lambda e: True)
    put(cuda, "is_initialized", lambda e: True)
    put(cuda, "init", lambda e: None)
    put(cuda, "_lazy_init", lambda e: None)
    put(cuda, "device_count", lambda e: 1)
    put(cuda, "current_device", lambda e: 0)
    put(cuda, "set_device", lambda e, device: None)
    put(cuda, "get_device_capability", lambda e, device=None: e.device.capability)
    put(cuda, "get_device_name", lambda e, device=None: e.device.name)
    put(cuda, "get_device_properties", properties)
    put(cuda, "current_stream", lambda e, device=None: stream)
    put(cuda, "default_stream", lambda e, device=None: stream)
    put(cuda, "synchronize", lambda e, device=None: None)
    put(cuda, "empty_cache", lambda e: None)
    put(cuda, "is_current_stream_capturing", lambda e: False)
    put(cuda, "device", lambda e, device=None: contextlib.nullcontext())
    put(cuda, "device_of", lambda e, tensor=None: contextlib.nullcontext())
    put(cuda, "stream", lambda e, stream=None: contextlib.nullcontext())
    patches.set(cuda, "Stream", _switched_class(cuda.Stream, _Stream))
    patches.set(cuda, "Event", _switched_class(cuda.Event, _Event))
    put(cuda.nvtx, "range", lambda e, *a, **k: contextlib.nullcontext())
    for name in ("range_push", "range_pop", "mark"):
        put(cuda.nvtx, name, lambda e, *a, **k: None)
