"""`kernel_builder`: a kernel's name, architectures, default configs and recipe, as an object that hands out compiled functions."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from cute_kernels.jit import compile as _compile_module
from cute_kernels.jit import sources as _sources
from cute_kernels.jit.compile import Artifact
from cute_kernels.jit.target import Target, UnsupportedGPUError, check_arch

_registry: dict[str, KernelBuilder] = {}


def _after_fork() -> None:
    # A thread that held one of these when the process forked does not exist in the child.
    for builder in _registry.values():
        builder._lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class KernelBuilder:
    """What `kernel_builder` makes of a function. Call it with a config and a target to get the compiled function."""

    def __init__(
        self,
        build: Callable[[Any, str], tuple[Any, Sequence[Any]]],
        name: str,
        archs: tuple[str, ...],
        variants: Any,
        options: Any,
        extra_sources: tuple[Path, ...],
    ) -> None:
        self.build, self.name, self.archs, self.options = build, name, archs, options
        self._variants = variants
        self._extra = extra_sources
        self.__doc__, self.__name__, self.__module__ = build.__doc__, build.__name__, build.__module__
        self.file = Path(inspect.getsourcefile(build)).resolve()
        self._functions: dict[tuple[Any, str], Any] = {}
        self._lock = threading.Lock()
        # What was on disk when this process imported the kernel's modules (those it has not imported yet may still change).
        self._stamp = {entry[0]: entry for entry in _sources.stamp(_sources.closure(self.file, self._extra))}

    def __repr__(self) -> str:
        return f"<kernel builder {self.name} for {', '.join(self.archs)}>"

    def __call__(self, config: Any, target: Target | str) -> Any:
        """The compiled function of `config` for `target` (a Target, or an arch to load for): from memory, from disk, or compiled
        now.

        Raises UnsupportedGPUError for an architecture that this kernel is not for, compile.CompileError.
        """
        key = (config, target if isinstance(target, str) else target.key)
        function = self._functions.get(key)
        return function if function is not None else self._load(key, target)

    def _load(self, key: tuple[Any, str], target: Target | str) -> Any:
        arch, backend = (target, None) if isinstance(target, str) else (target.arch, target.backend)
        with self._lock:
            function = self._functions.get(key)
            if function is None:
                line_info = True if backend is not None else None  # the emulator names source lines in its reports
                made = self.artifact(key[0], arch, line_info)
                try:
                    function = made.load(backend)
                except Exception as error:
                    if made.origin != "disk" and (made.object_path is None or made.object_path.exists()):
                        raise
                    # Whole, but it does not link here, or another process has just pruned it: compile instead.
                    warnings.warn(
                        f"cute_kernels: {self.name} for {arch} from {made.object_path} does not load, compiling anew: {error}",
                        RuntimeWarning,
                        stacklevel=3,
                    )
                    function = self.artifact(key[0], arch, line_info, fresh=True).load(backend)
                self._functions[key] = function
        return function

    def artifact(self, config: Any, arch: str, line_info: bool | None = None, *, fresh: bool = False) -> Artifact:
        """PTX, cubin and object of `config` for `arch`, from disk or compiled now; nothing is loaded and no GPU is needed.

        line_info: line numbers in PTX and SASS; None takes CUTE_KERNELS_LINEINFO. fresh: compile even if it is on disk.
        """
        if arch not in self.archs:
            check_arch(arch)
            raise UnsupportedGPUError(f"kernel {self.name} is for {', '.join(self.archs)}, not for {arch}")
        if line_info is None:
            line_info = os.environ.get("CUTE_KERNELS_LINEINFO", "0") not in ("", "0")
        return _compile_module.obtain(self, config, arch, line_info, fresh)

    def variants(self, arch: str) -> tuple[Any, ...]:
        """The configs that warm-up compiles for `arch`."""
        return tuple(self._variants(arch) if callable(self._variants) else self._variants)

    def source_files(self) -> tuple[tuple[Path, ...], list[Path]]:
        """(all files of this kernel, those of them that changed after this process had imported them)."""
        files = _sources.closure(self.file, self._extra)
        edited = []
        for entry in _sources.stamp(files):
            if self._stamp.get(entry[0], entry) != entry:
                if _sources.loaded(Path(entry[0])):
                    edited.append(Path(entry[0]))
                else:
                    self._stamp[entry[0]] = entry
        return files, edited

    def forget(self) -> None:
        """Drop the loaded functions: the next call goes to the disk cache."""
        with self._lock:
            self._functions.clear()


def kernel_builder(
    name: str,
    *,
    archs: Iterable[str],
    variants: Iterable[Any] | Callable[[str], Iterable[Any]] = (),
    options: str | Callable[[Any, str], str] = "",
    sources: Iterable[str | Path] = (),
) -> Callable[[Callable[[Any, str], tuple[Any, Sequence[Any]]]], KernelBuilder]:
    """Decorate `build(config, arch) -> (jit function, arguments of cute.compile)`; the result is a `KernelBuilder`.

    name: unique, shown by the tools and used in the cache's paths. archs: what the kernel is for. variants: the configs that
    warm-up compiles. options: compiler flags in addition. sources: modules (dotted) or files that the import statements do not
    show. A config is hashable and holds whatever changes code (NamedTuple or frozen dataclass of numbers, strings, enums,
    dtypes), never a length.
    """
    archs = tuple(check_arch(arch) for arch in archs)
    extra = tuple(_source_path(s) for s in sources)

    def decorate(build: Callable[[Any, str], tuple[Any, Sequence[Any]]]) -> KernelBuilder:
        made = KernelBuilder(build, name, archs, variants if callable(variants) else tuple(variants), options, extra)
        other = _registry.get(name)
        if other is not None and other.file != made.file:
            raise ValueError(f"two kernels are named {name!r}: {other.file.name} and {made.file.name}")
        _registry[name] = made
        return made

    return decorate


def _source_path(source: str | Path) -> Path:
    """A file as given, or the file of a dotted module name (which must exist)."""
    if isinstance(source, Path) or source.endswith(".py"):
        return Path(source)
    spec = importlib.util.find_spec(source)
    if spec is None or spec.origin is None:
        raise ValueError(f"sources must name modules or .py files, got {source!r}")
    return Path(spec.origin)


def registered() -> dict[str, KernelBuilder]:
    """The builders of the modules imported so far, by name."""
    return dict(_registry)


def discover() -> dict[str, KernelBuilder]:
    """Import every module of cute_kernels.kernels that declares a builder (found by its text); all builders by name."""
    base = _sources.PACKAGE / "kernels"
    for path in sorted(base.rglob("*.py")):
        if re.search(r"^@(?:jit\.)?kernel_builder\(", path.read_text(encoding="utf-8"), re.M):
            parts = path.relative_to(_sources.PACKAGE.parent).with_suffix("").parts
            importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return registered()
