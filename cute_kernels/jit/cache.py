"""Compiled kernels on disk.

    <root>/v1/<name>/<arch>-<key>/kernel.o  kernel.ptx  kernel.cubin  meta.json
    <root>/v1/locks/<key>.lock

The key is a hash of everything that decides the object (compile.py makes it). An entry is written under another name and renamed
into place, so it is there whole or not at all; meta.json holds the size and SHA-256 of the files and repeats arch and key, and an
entry that does not agree with it is a miss and is replaced. Whoever wants to compile takes the key's lock first: of N processes
that need a kernel one compiles and the others wait and load. The lock is the system's (flock), so one of a process that died is
free.

A folder that cannot be written (read-only, full, no space) is survived: entries in it are still used, one warning says that
nothing new is kept. The newest entries up to CUTE_KERNELS_CACHE_MAX_MB stay (last use counts).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = "v1"
FILES = ("kernel.o", "kernel.ptx", "kernel.cubin")
LOCK_TIMEOUT = 600.0  # seconds: longer than any compile; a holder that is stopped, not dead, must not block others for ever
DEFAULT_MAX_MB = 1024

_warned: set[str] = set()
_thread_locks: dict[str, threading.Lock] = {}
_guard = threading.Lock()


def _after_fork() -> None:
    # Another thread may have held these when the process forked; nobody would release them in the child.
    global _guard
    _guard = threading.Lock()
    _thread_locks.clear()


os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True)
class Entry:
    """One kernel on disk. `folder` holds FILES and meta.json; `meta` is the latter."""

    folder: Path
    meta: dict[str, Any]

    @property
    def object_path(self) -> Path:
        """The object file that `cute.runtime.load_module` takes."""
        return self.folder / "kernel.o"

    def ptx(self) -> str:
        """The PTX text of the kernels in the object."""
        return (self.folder / "kernel.ptx").read_text(encoding="utf-8")

    def cubin(self) -> bytes:
        """The machine code in the object, an ELF file."""
        return (self.folder / "kernel.cubin").read_bytes()


def enabled() -> bool:
    """False under CUTE_KERNELS_CACHE=0."""
    return os.environ.get("CUTE_KERNELS_CACHE", "1") != "0"


def root() -> Path:
    """The cache folder, from the environment at each call."""
    explicit = os.environ.get("CUTE_KERNELS_CACHE_DIR")
    if explicit:
        return Path(explicit).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):
        return Path(base) / "cute_kernels"
    home = os.path.expanduser("~")
    if os.path.isabs(home):
        return Path(home) / ".cache" / "cute_kernels"
    return Path(tempfile.gettempdir()) / f"cute_kernels-{os.getuid()}"


def _warn_once(kind: str, text: str) -> None:
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(f"cute_kernels: {text}", RuntimeWarning, stacklevel=2)


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:80]


def _folder(name: str, arch: str, key: str) -> Path:
    return root() / FORMAT / _safe(name) / f"{arch}-{key[:40]}"


def _trusted(path: Path) -> bool:
    """Whether only this user or root could have put files there."""
    status = path.stat()
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & 0o002


def lookup(name: str, arch: str, key: str) -> Entry | None:
    """The entry of this key if it is there and whole."""
    if not enabled():
        return None
    folder = _folder(name, arch, key)
    try:
        text = (folder / "meta.json").read_bytes()
        if not _trusted(folder):
            _warn_once("trust", f"{folder} can be written by other users, so compiled kernels in it are not loaded")
            return None
        meta = json.loads(text)
        if (meta["format"], meta["arch"], meta["key"]) != (FORMAT, arch, key):
            return None
        for file in FILES:
            data = (folder / file).read_bytes()
            stated = meta["files"][file]
            if len(data) != stated["size"] or hashlib.sha256(data).hexdigest() != stated["sha256"]:
                return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # absent, truncated or not ours: a miss, and the next compile replaces it
    with contextlib.suppress(OSError):  # a read-only cache has no last use
        os.utime(folder / "meta.json")
    return Entry(folder, meta)


def publish(
    name: str, arch: str, key: str, files: dict[str, bytes], meta: dict[str, Any], *, replace: bool = False
) -> Entry | None:
    """Write an entry in the place of a damaged one, with `replace` of any; None, after one warning, if that cannot be done.

    A whole entry that is there already is returned instead: without the lock (on file systems that have none) several processes may
    compile one kernel, and those that have loaded the first one's files must not lose them.
    """
    if not enabled():
        return None
    folder = _folder(name, arch, key)
    temporary = None
    try:
        folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
        meta = {
            **meta, "format": FORMAT, "name": name, "arch": arch, "key": key, "created": time.time(),
            "files": {n: {"size": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in files.items()},
        }  # fmt: skip
        for file, data in files.items():
            (temporary / file).write_bytes(data)
        (temporary / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
        # Others may read (an image made by root and run by a user), nobody else may write: this is code that processes load.
        temporary.chmod(0o755)
        if not _put(temporary, folder, replace):
            found = lookup(name, arch, key)
            if found is not None:
                return found
            _put(temporary, folder, True)
        temporary = None
    except OSError as error:
        _warn_once("write", f"compiled kernels cannot be kept in {root()} ({error}); this process compiles without. Set "
                            "CUTE_KERNELS_CACHE_DIR to a folder that can be written, or CUTE_KERNELS_CACHE=0")  # fmt: skip
        return None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    prune(keep=folder)
    return Entry(folder, meta)


def _put(new: Path, folder: Path, replace: bool) -> bool:
    """Rename the folder `new` to `folder`. What is there moves away first if `replace` (a folder can replace only an empty one),
    else the answer is False."""
    for attempt in range(5):
        try:
            os.rename(new, folder)
            return True
        except OSError:
            if not folder.exists():
                raise
            if not replace:
                return False
            if attempt == 4:
                raise
            old = Path(tempfile.mkdtemp(prefix=".old-", dir=folder.parent))
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                os.rename(folder, old / "entry")
            shutil.rmtree(old, ignore_errors=True)
    return False


@contextlib.contextmanager
def lock(key: str) -> Iterator[None]:
    """Hold the lock of `key` among the threads of this process and, where the cache folder allows, among processes."""
    with _guard:
        mine = _thread_locks.setdefault(key, threading.Lock())
    with mine:
        descriptor = _lock_file(key) if enabled() else None
        try:
            yield
        finally:
            if descriptor is not None:
                # Unlocked before closing: a child that another thread forked meanwhile shares the lock with this descriptor.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)


def _lock_file(key: str) -> int | None:
    """A descriptor that holds the key's lock; None if there cannot be one, or after LOCK_TIMEOUT."""
    folder = root() / FORMAT / "locks"
    path = folder / f"{key[:40]}.lock"
    deadline = time.monotonic() + LOCK_TIMEOUT
    pause = 0.005
    while True:
        try:
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return None  # read-only or full: `publish` says so
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        _warn_once("lock", f"another process has held {path} for {LOCK_TIMEOUT:.0f} s; compiling without the lock")
                        os.close(descriptor)
                        return None
                    time.sleep(pause)
                    pause = min(2 * pause, 0.1)
            # `clear_cache` may have removed the file between opening and locking: then others lock another file of that name.
            if os.path.exists(path) and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except OSError:  # a file system without locks
            os.close(descriptor)
            return None
        os.close(descriptor)


def _entries() -> Iterator[tuple[float, int, Path]]:
    """(last use, bytes, folder) of every entry; remains of interrupted writes too, as soon as they are a day old."""
    base = root() / FORMAT
    for folder in base.glob("*/*"):
        if folder.parent.name == "locks" or not folder.is_dir():
            continue
        with contextlib.suppress(OSError):
            size = sum(f.stat().st_size for f in folder.iterdir() if f.is_file())
            meta = folder / "meta.json"
            used = (meta if meta.exists() else folder).stat().st_mtime
            if folder.name.startswith("."):
                if used > time.time() - 86400:
                    continue
                used = 0.0
            yield used, size, folder


def prune(max_bytes: int | None = None, keep: Path | None = None) -> int:
    """Remove the entries used longest ago until the cache has at most `max_bytes` (default CUTE_KERNELS_CACHE_MAX_MB); how many.
    `keep`, the entry just written, stays whatever its size: its caller is about to load it."""
    if max_bytes is None:
        try:
            max_bytes = int(float(os.environ.get("CUTE_KERNELS_CACHE_MAX_MB", DEFAULT_MAX_MB)) * 2**20)
        except ValueError:
            _warn_once("size", f"CUTE_KERNELS_CACHE_MAX_MB must be a number, got {os.environ['CUTE_KERNELS_CACHE_MAX_MB']!r}")
            return 0
        if max_bytes <= 0:
            return 0
    entries = sorted(_entries(), reverse=True)
    total, removed = 0, 0
    for used, size, folder in entries:
        total += size
        if folder != keep and (used == 0.0 or total > max_bytes):
            shutil.rmtree(folder, ignore_errors=True)
            removed += 1
    return removed


def clear_cache() -> int:
    """Remove every compiled kernel from the disk cache; returns how many there were.

    Kernels that this process has loaded keep working. Processes that are compiling meanwhile may add theirs.
    """
    count = 0
    base = root() / FORMAT
    for _, _, folder in list(_entries()):
        shutil.rmtree(folder, ignore_errors=True)
        count += not folder.exists()
    with contextlib.suppress(OSError):
        for path in (base / "locks").glob("*.lock"):
            path.unlink()
    return count
