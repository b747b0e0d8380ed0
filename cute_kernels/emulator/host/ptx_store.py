"""Finds the PTX text of a kernel that the host code is about to launch.

A compiled function carries machine code only. While an emulation is active the DSL is made to keep the PTX and the
machine code of everything it compiles; both go in here, keyed by the SHA-256 of the cubin, which is exact. For objects
exported earlier and loaded back, the text is looked for in this order:
1. `register_ptx(...)` under the cubin's hash, 2. the object's own neighbours (``x.o`` -> ``x.ptx``) noted when
``cute.runtime.load_module`` is called inside an emulation, or in a folder given to `add_ptx_folder`, 3.
`register_ptx(...)` under the kernel's name. A name that several different texts share is refused, not guessed.
"""

from __future__ import annotations

import hashlib
import os
import threading

from . import params

_lock = threading.RLock()
_by_hash: dict[str, str] = {}
_by_name: dict[str, dict[str, str]] = {}  # kernel name -> {hash of the text: text}
_folders: list[str] = []
_objects: list[str] = []
_object_texts: dict[str, str] = {}
_text_cache: dict[tuple[str, int, int], str] = {}


class MissingPtx(RuntimeError):
    """No PTX text is known for a kernel, or more than one."""


def cubin_hash(cubin: bytes) -> str:
    """The key under which `register_ptx` stores the text of this machine code."""
    return hashlib.sha256(cubin).hexdigest()


def register_ptx(key: str, text: str) -> None:
    """Tells the emulator the PTX of a kernel.

    key: the kernel's name (as in its .entry), or `cubin_hash(...)` of the machine code it was assembled to.
    """
    names = params.entries(text)
    if not names:
        raise ValueError("the PTX text has no .entry")
    with _lock:
        if len(key) == 64 and all(c in "0123456789abcdef" for c in key):
            _by_hash[key] = text
        elif key in names:
            _by_name.setdefault(key, {})[hashlib.sha256(text.encode()).hexdigest()] = text
        else:
            raise ValueError(f"key must be a cubin's SHA-256 or one of the text's kernels {names}, got {key!r}")


def add_ptx_folder(path: str) -> None:
    """Adds a folder whose ``*.ptx`` files are searched for kernels loaded from exported objects."""
    with _lock:
        if path not in _folders:
            _folders.append(path)


def note_object(path: str) -> None:
    """Notes that an exported object was loaded; its neighbour with the suffix .ptx is a candidate for its kernels."""
    with _lock:
        path = os.path.abspath(path)
        if path in _objects:
            _objects.remove(path)
        _objects.append(path)


def register_object(path: str, text: str) -> None:
    """Gives the PTX text of the kernels in one exported object file, instead of a neighbouring .ptx file."""
    with _lock:
        _object_texts[os.path.abspath(path)] = text


def forget_objects() -> None:
    """Forgets the noted objects (the registered texts stay)."""
    with _lock:
        _objects.clear()


def _read(path: str) -> str | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    key = (path, status.st_mtime_ns, status.st_size)
    if key not in _text_cache:
        with open(path, encoding="utf-8", errors="replace") as file:
            _text_cache[key] = file.read()
    return _text_cache[key]


def _object_contains(path: str, cubin: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            return cubin in file.read()
    except OSError:
        return False


def find(cubin: bytes, entry: str) -> str:
    """The PTX text of kernel `entry` of this machine code. Raises MissingPtx."""
    key = cubin_hash(cubin)
    with _lock:
        if key in _by_hash:
            return _by_hash[key]
        for path in reversed(_objects):
            text = _object_texts.get(path) or _read(os.path.splitext(path)[0] + ".ptx")
            if text is not None and entry in params.entries(text) and _object_contains(path, cubin):
                _by_hash[key] = text
                return text
        candidates = dict(_by_name.get(entry, {}))
        for folder in _folders:
            for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
                if not name.endswith(".ptx"):
                    continue
                path = os.path.join(folder, name)
                text = _read(path)
                if text is None or entry not in params.entries(text):
                    continue
                stem = os.path.splitext(path)[0]
                if any(_object_contains(stem + suffix, cubin) for suffix in (".o", ".so", ".cubin")):
                    _by_hash[key] = text
                    return text
                candidates[hashlib.sha256(text.encode()).hexdigest()] = text
    if len(candidates) == 1:
        return next(iter(candidates.values()))
    if candidates:
        raise MissingPtx(
            f"{len(candidates)} different PTX texts have a kernel {entry} and none is tied to this machine code"
            f" (SHA-256 {key}): register the right one under that hash"
        )
    raise MissingPtx(
        f"no PTX is known for kernel {entry} (cubin SHA-256 {key}). Compile it inside emulate(), or keep the PTX of an"
        " exported object beside it (x.o -> x.ptx) and load it inside emulate(), or call register_ptx()"
    )
