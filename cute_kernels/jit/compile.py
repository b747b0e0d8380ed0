"""The compiler call: from a builder and a config to a loaded function, through the disk cache.

What is launched is always the exported object, loaded back: a raw `tvm_ffi.Function`, the same for the process that compiled it
and for every later one (an in-process function goes through a wrapper that maps keyword arguments, and differs in what it accepts).
Only where the export fails is the in-process function used.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import enum
import hashlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cute_kernels.jit import cache, sources
from cute_kernels.jit.cubin import dynamic_smem

if TYPE_CHECKING:
    from cute_kernels.jit.builder import KernelBuilder

SYMBOL = "cute_kernels_entry"  # name of the host function in every exported object
MESSAGE_AFTER = 1.0  # seconds of compiling after which a terminal is told

# The DSL's compiler keeps process-wide state: one compile at a time.
_compiler = threading.RLock()
os.register_at_fork(after_in_child=lambda: globals().update(_compiler=threading.RLock()))
_private: list[str] = []  # folder of objects that are not in the cache, made when needed

# CUTE_DSL_* settings that change no code; any other one that is set is part of the key.
_HARMLESS = {
    "ARCH", "KEEP", "KEEP_PTX", "KEEP_CUBIN", "KEEP_SASS", "KEEP_IR", "DUMP_DIR", "CACHE_DIR", "NO_CACHE", "DISABLE_FILE_CACHING",
    "JIT_CACHE_MAX_ELEMS", "SHOW_STACKTRACE", "FILTER_STACKTRACE", "PRINT_IR", "PRINT_AFTER_PREPROCESSOR", "JIT_TIME_PROFILING",
    "LOG_TO_CONSOLE", "LOG_TO_FILE", "LOG_LEVEL", "LOG_AUTOTUNE", "WARNINGS_AS_ERRORS", "WARNINGS_IGNORE", "ENABLE_TVM_FFI",
}  # fmt: skip


class CompileError(RuntimeError):
    """A kernel could not be compiled. The compiler's own exception is the cause."""


@dataclasses.dataclass
class Artifact:
    """A compiled kernel.

    ptx: text; cubin: ELF bytes; dynamic_smem: bytes of each launch in the host code, None where computed at run time; object_path:
    the exported object, or None where the export failed; origin: "disk" or "compiled"; seconds: what getting it took here.
    """

    name: str
    arch: str
    config: Any
    key: str
    ptx: str
    cubin: bytes
    dynamic_smem: list[int | None]
    object_path: Path | None
    origin: str
    seconds: float
    in_process: Any = None

    def load(self, backend: Any = None) -> Any:
        """The function to call, a `tvm_ffi.Function`. Needs no GPU, calling it does. `backend`: a target's, told about the
        object."""
        if self.object_path is None:
            # Behind the wrapper for keyword arguments, where there is one. The DSL makes it only for the arch that it detects.
            unwrap = getattr(self.in_process, "__tvm_ffi_object__", None)
            function = unwrap() if unwrap is not None else self.in_process
            if function is None:
                raise CompileError(f"{self.name} for {self.arch} could not be exported, and this machine runs another arch")
            if backend is not None:
                path = private_folder() / f"{self.key[:16]}.cubin"
                path.write_bytes(self.cubin)
                backend.note_object(str(path), self.ptx)
            return function
        import cutlass.cute as cute

        if hasattr(backend, "note_object"):
            backend.note_object(str(self.object_path), self.ptx)
        return cute.runtime.load_module(str(self.object_path), enable_tvm_ffi=True)[SYMBOL]


def canonical(value: Any) -> Any:
    """`value` as JSON can hold it, the same in every process, different for different values. TypeError for what has no such
    form."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, enum.Enum):
        return {"enum": f"{type(value).__qualname__}.{value.name}"}
    if hasattr(value, "_asdict"):
        return {k: canonical(v) for k, v in value._asdict().items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: canonical(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [canonical(v) for v in value]
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return {"dtype": str(value)}
    raise TypeError(f"a config may hold numbers, strings, enums, dtypes and tuples of them, not {type(value).__name__}: {value!r}")


def options_for(builder: KernelBuilder, config: Any, arch: str, line_info: bool) -> str:
    """The compiler's option string, folders left out."""
    extra = builder.options(config, arch) if callable(builder.options) else builder.options
    parts = ["--enable-tvm-ffi", f"--gpu-arch {arch}"]
    if line_info:
        parts.append("--generate-line-info")
    if extra:
        parts.append(extra)
    return " ".join(parts)


def make_key(builder: KernelBuilder, config: Any, arch: str, options: str, source_digest: str) -> tuple[str, dict[str, Any]]:
    """(SHA-256 of everything that decides the object, and that material)."""
    prefix = "CUTE_DSL_"
    settings = {k: v for k, v in os.environ.items() if v and k.startswith(prefix) and k.removeprefix(prefix) not in _HARMLESS}
    material = {
        "format": cache.FORMAT, "name": builder.name, "arch": arch, "config": canonical(config), "options": options,
        "sources": source_digest, "toolchain": sources.toolchain(), "settings": settings,
    }  # fmt: skip
    return hashlib.sha256(json.dumps(material, sort_keys=True).encode()).hexdigest(), material


def obtain(builder: KernelBuilder, config: Any, arch: str, line_info: bool = False, fresh: bool = False) -> Artifact:
    """The compiled kernel from the disk cache (not if `fresh`), else compiled and kept there. Raises CompileError."""
    start = time.perf_counter()
    files, edited = builder.source_files()
    before = sources.stamp(files)
    options = options_for(builder, config, arch, line_info)
    key, material = make_key(builder, config, arch, options, sources.digest(files))
    if edited:
        # This process compiles the text it imported, which is no longer the text on disk: keep it away from processes that start
        # later.
        warnings.warn(
            f"cute_kernels: {edited[0].name} changed after this process had imported it, so {builder.name} is "
            "compiled for this process alone and not kept. Restart to use the new text",
            RuntimeWarning,
            stacklevel=3,
        )
        with announced(f"{builder.name} for {arch}"):
            return _compile(builder, config, arch, options, key, material, start, None, fresh)

    def from_disk() -> Artifact | None:
        entry = cache.lookup(builder.name, arch, key)
        if entry is None:
            return None
        took = time.perf_counter() - start
        smem = entry.meta.get("dynamic_smem", [])
        return Artifact(builder.name, arch, config, key, entry.ptx(), entry.cubin(), smem, entry.object_path, "disk", took)

    found = None if fresh else from_disk()
    if found is not None:
        return found
    with announced(f"{builder.name} for {arch}"), cache.lock(key):
        found = None if fresh else from_disk()  # another process or thread may have compiled it while this one waited
        if found is not None:
            return found
        unchanged = lambda: sources.stamp(files) == before  # noqa: E731
        return _compile(builder, config, arch, options, key, material, start, unchanged, fresh)


def _compile(
    builder: KernelBuilder, config: Any, arch: str, options: str, key: str, material: dict[str, Any], start: float,
    unchanged: Callable[[], bool] | None, fresh: bool,
) -> Artifact:  # fmt: skip
    """Compile now. `unchanged`: asked at the end whether the sources are still those of the key; None: do not keep."""
    with _compiler, tempfile.TemporaryDirectory(prefix="cute_kernels-") as scratch:
        try:
            import cutlass.cute as cute

            kernel, arguments = builder.build(config, arch)
            compiled = cute.compile(kernel, *arguments, options=f"{options} --keep-ptx --keep-cubin --dump-dir {scratch}")
            ptx, cubin = compiled.__ptx__, compiled.__cubin__
            smem = dynamic_smem(str(compiled.ir_module))
        except Exception as error:
            raise CompileError(f"{builder.name} {canonical(config)} does not compile for {arch}: {error}") from error
        if f".target {arch}" not in ptx:
            raise CompileError(f"{builder.name} was compiled for another architecture than {arch}: {ptx[:400]!r}")
        exported = Path(scratch, "kernel.o")
        try:
            compiled.export_to_c(str(exported), function_name=SYMBOL)
            data = exported.read_bytes()
        except Exception as error:  # the kernel is good: run it as it is, and say that it is not kept
            warnings.warn(f"cute_kernels: {builder.name} for {arch} cannot be exported, so it is not kept: {error}", RuntimeWarning,
                          stacklevel=2)  # fmt: skip
            took = time.perf_counter() - start
            return Artifact(builder.name, arch, config, key, ptx, cubin, smem, None, "compiled", took, compiled)
        took = time.perf_counter() - start
        entry = None
        if unchanged is not None and unchanged():
            files = {"kernel.o": data, "kernel.ptx": ptx.encode(), "kernel.cubin": cubin}
            meta = {**material, "seconds": took, "dynamic_smem": smem}
            entry = cache.publish(builder.name, arch, key, files, meta, replace=fresh)
        if entry is not None:
            path = entry.object_path
        else:
            path = _keep_privately(f"{builder.name}-{arch}-{key[:16]}", data, ptx)
        in_process = None if path is not None else compiled
        return Artifact(builder.name, arch, config, key, ptx, cubin, smem, path, "compiled", took, in_process)


def private_folder() -> Path:
    """A folder of this process, removed at its end, for objects that the cache does not take."""
    if not _private:
        folder = tempfile.mkdtemp(prefix="cute_kernels-")
        _private.append(folder)
        owner = os.getpid()
        atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return Path(_private[0])


def _keep_privately(stem: str, data: bytes, ptx: str) -> Path | None:
    try:
        path = private_folder() / f"{stem}.o"
        path.write_bytes(data)
        path.with_suffix(".ptx").write_text(ptx, encoding="utf-8")
        return path
    except OSError:  # no room in the temporary folder either: the in-process function is still there
        return None


@contextlib.contextmanager
def announced(what: str) -> Iterator[None]:
    """Tell a terminal (stderr) that a compile takes its time, once it has taken MESSAGE_AFTER seconds. CUTE_KERNELS_QUIET=1:
    never."""
    stream = sys.stderr
    quiet = os.environ.get("CUTE_KERNELS_QUIET", "0") not in ("", "0")
    if quiet or stream is None or not stream.isatty():
        yield
        return
    start = time.perf_counter()
    said = threading.Event()

    def say() -> None:
        kept = f"kept in {cache.root()}" if cache.enabled() else "not kept: CUTE_KERNELS_CACHE=0"
        stream.write(f"cute_kernels: compiling {what} ({kept}) ...\n")
        stream.flush()
        said.set()

    timer = threading.Timer(MESSAGE_AFTER, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if said.is_set():
            stream.write(f"cute_kernels: {what}: {time.perf_counter() - start:.1f} s\n")
            stream.flush()
