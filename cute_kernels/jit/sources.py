"""What a kernel consists of: its source files and the versions of the compiler, as one fingerprint each.

The files of a kernel are the builder's own, and every module of this package that one of them imports, anywhere in the file,
found by reading the import statements (not by importing: the device code is imported on a miss only). Rooms that no kernel's code
depends on are left out (`_NOT_DEVICE`), so that editing an operator's checks recompiles nothing.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import sys
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent  # .../cute_kernels
_NOT_DEVICE = {"jit", "ops", "reference", "emulator", "integrations", "grouping"}
# `from X import (a, b)` may span lines; names can be submodules, so they matter too.
_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]*)|import[ \t]+([^\n#]+))", re.M)

Stamp = tuple[tuple[str, int, int], ...]


def _module_file(base: Path, dotted: str) -> Path | None:
    """The file of a module given relative to the folder `base`, or None."""
    path = base.joinpath(*dotted.split(".")) if dotted else base
    for candidate in (path.with_suffix(".py") if dotted else None, path / "__init__.py"):
        if candidate is not None and candidate.is_file():
            return candidate
    return None


def _imported(path: Path) -> set[Path]:
    """The files of our own package that `path` imports, packages' __init__ on the way left out."""
    found: set[Path] = set()
    root = PACKAGE.parent
    # Comments go first: one may hold a parenthesis. (A string cut by this is no import.)
    text = re.sub(r"#[^\n]*", "", path.read_text(encoding="utf-8")).replace("\\\n", " ")
    for match in _IMPORT.finditer(text):
        module, names, plain = match.groups()
        if plain is not None:
            targets = [(root, name.strip().split(" ")[0], "") for name in plain.split(",")]
            targets = [t for t in targets if t[1].split(".")[0] == PACKAGE.name]
        else:
            level = len(module) - len(module.lstrip("."))
            base, dotted = root, module
            if level:
                base, dotted = path.parents[level - 1], module[level:]
            elif module.split(".")[0] != PACKAGE.name:
                continue
            targets = [(base, dotted, name.strip().split(" ")[0]) for name in names.strip("()").split(",")]
        for base, dotted, name in targets:
            for candidate in (_module_file(base, f"{dotted}.{name}".strip(".")) if name else None, _module_file(base, dotted)):
                if candidate is not None:
                    found.add(candidate)
                    break
    return found


def closure(start: Path, extra: Iterable[Path] = ()) -> tuple[Path, ...]:
    """All source files of a kernel whose builder stands in `start`, sorted."""
    start = Path(start).resolve()
    todo, seen = [start, *(Path(p).resolve() for p in extra)], set()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for other in _imported(path):
            if other.is_relative_to(PACKAGE):
                # The package's own __init__ and rooms that hold no device code change nothing in a kernel.
                inside = other.relative_to(PACKAGE).parts
                if inside == ("__init__.py",) or inside[0].removesuffix(".py") in _NOT_DEVICE:
                    continue
            todo.append(other)
    return tuple(sorted(seen))


def stamp(files: Iterable[Path]) -> Stamp:
    """(path, mtime, size) of each file: cheap to compare."""
    result = []
    for path in files:
        status = path.stat()
        result.append((str(path), status.st_mtime_ns, status.st_size))
    return tuple(result)


def digest(files: Iterable[Path]) -> str:
    """SHA-256 over the names (inside the package) and texts of the files."""
    total = hashlib.sha256()
    for path in files:
        name = path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else path.name
        data = path.read_bytes()
        total.update(f"{name}\0{len(data)}\0".encode())
        total.update(data)
    return total.hexdigest()


def loaded(path: Path) -> bool:
    """Whether a module of this file has been imported, so that this process compiles the text it had then."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return any(file.endswith(path.name) and os.path.realpath(file) == str(path) for file in files if isinstance(file, str))


@functools.cache
def toolchain() -> dict[str, str]:
    """Everything outside our sources that decides the compiled object: name -> version.

    All distributions named nvidia-cutlass-dsl* (the compiler is in the -libs- ones; a file list's hash tells rebuilds of one
    version apart), the TVM-FFI runtime, the Python minor version (the DSL reads Python's syntax trees) and the host's instruction
    set.
    """
    from importlib import metadata  # 10 ms, on a miss of the in-memory table only

    found: dict[str, str] = {}
    for folder in dict.fromkeys(sys.path):
        try:
            entries = list(Path(folder or ".").glob("nvidia_cutlass_dsl*.dist-info"))
        except OSError:
            continue
        for entry in entries:
            name, _, version = entry.name.removesuffix(".dist-info").partition("-")
            record = entry / "RECORD"
            mark = hashlib.sha256(record.read_bytes()).hexdigest()[:12] if record.is_file() else "no file list"
            found.setdefault(name.replace("_", "-"), f"{version} {mark}")
    for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        if name not in found:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                found[name] = "absent"
    found["python"] = f"{sys.version_info[0]}.{sys.version_info[1]}"
    found["host"] = f"{platform.system()} {platform.machine()}"
    return dict(sorted(found.items()))
