"""Sends the exported functions of the DSL's runtime library to Python, and back again.

Every launch of the CuTe DSL, whichever way it was compiled, linked or reloaded, ends in functions that
``libcute_dsl_runtime.so`` exports (``_cudaLibraryLoadData``, ``_cudaLaunchKernelEx`` ...). JIT engines resolve those
names to absolute addresses when they link, so supplying another library with the same names would reach only engines
made later. Instead the first instruction of each function is replaced, in this process's private copy of the page,
by a jump to a stub that jumps to a ctypes callback; ``restore()`` puts the eight bytes back. That needs no compiler,
no environment variable and no restart, and it reaches functions compiled before it was installed.

How a function is patched (x86-64): the exported symbols are 16-byte aligned, so ``jmp rel32`` and the three bytes
behind it go in as one aligned 8-byte store, which other threads see whole. The stub sits in a page allocated within
+-2 GiB (``jmp [rip+0]`` and a 64-bit address). On aarch64 it is one ``b`` within +-128 MiB and a ``ldr/br`` stub,
written through /proc/self/mem, where the kernel flushes the instruction cache; that half has not been run.

``Function.original`` is the real function: most exports are a single jump to their body, whose address is decoded;
for the others it is None and the caller says what to do for threads that are not emulating.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
from collections.abc import Callable
from dataclasses import dataclass

RUNTIME_LIBRARY = "libcute_dsl_runtime.so"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_PAGE = mmap.PAGESIZE
_MAP_PRIVATE, _MAP_ANONYMOUS, _MAP_FIXED_NOREPLACE = 0x02, 0x20, 0x100000


class RedirectError(RuntimeError):
    """The runtime library could not be found or patched."""


def loaded_libraries(name: str = RUNTIME_LIBRARY) -> list[str]:
    """Paths of the loaded shared objects of this file name, in address order."""
    paths: list[str] = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split(None, 5)
            if len(fields) == 6:
                path = fields[5].rstrip("\n")
                if os.path.basename(path) == name and path not in paths:
                    paths.append(path)
    return paths


def mapped_ranges() -> list[tuple[int, int, str]]:
    """(start, end, permissions) of every mapping of this process, in address order."""
    ranges = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, permissions = line.split(None, 2)[:2]
            start, end = (int(x, 16) for x in span.split("-"))
            ranges.append((start, end, permissions))
    return ranges


def _write(address: int, data: bytes) -> None:
    """Writes data to a page of code, leaving its protection as it was."""
    page = address & ~(_PAGE - 1)
    length = (address + len(data) - page + _PAGE - 1) & ~(_PAGE - 1)
    native = platform.machine() in ("x86_64", "AMD64")
    if native and len(data) == 8 and address % 8 == 0 and _libc.mprotect(page, length, 7) == 0:
        ctypes.c_uint64.from_address(address).value = struct.unpack("<Q", data)[0]
        _libc.mprotect(page, length, 5)
        return
    # A kernel that forbids writable code still lets a process write its own memory the way a debugger does.
    try:
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(address)
            written = memory.write(data)
    except OSError as error:
        raise RedirectError(f"cannot patch the code of {RUNTIME_LIBRARY} at {address:#x}: {error}") from error
    if written != len(data):
        raise RedirectError(f"cannot patch the code of {RUNTIME_LIBRARY} at {address:#x}: short write")


def _allocate_near(address: int, reach: int) -> int:
    """One page whose distance from `address` is below `reach` bytes, readable and writable."""
    ranges = mapped_ranges()
    gaps: list[int] = []
    for (_, end, _), (start, _, _) in zip(ranges, ranges[1:]):
        if start - end >= 3 * _PAGE:
            gaps += [end + _PAGE, start - 2 * _PAGE]
    for candidate in sorted(gaps, key=lambda gap: abs(gap - address)):
        if abs(candidate - address) >= reach:
            break
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
        page = _libc.mmap(candidate, _PAGE, 3, flags, -1, 0)
        if page not in (None, ctypes.c_void_p(-1).value):
            if page == candidate:
                return page
            _libc.munmap(ctypes.c_void_p(page), _PAGE)
    raise RedirectError(f"no free page within {reach} bytes of {address:#x}")


def executable(code: bytes) -> int:
    """Address of a new page that holds `code`. It is never unmapped: a thread may be inside."""
    page = _libc.mmap(None, _PAGE, 3, _MAP_PRIVATE | _MAP_ANONYMOUS, -1, 0)
    if page in (None, ctypes.c_void_p(-1).value) or len(code) > _PAGE:
        raise RedirectError("no memory for a stub")
    if platform.machine() in ("x86_64", "AMD64"):
        ctypes.memmove(page, code, len(code))
    else:
        _write(page, code)  # which flushes the instruction cache
    if _libc.mprotect(page, _PAGE, 5) != 0:
        raise RedirectError("mprotect refused executable stubs")
    return page


def call_then(first: int, then: int) -> bytes:
    """Machine code of an `int f(a, b)` that returns what `first(a, b)` returns, or `then(a, b)` where that is 0.

    A failing `first` may have set a Python exception. It reaches the caller untouched, which no ctypes callback around it could do.
    """
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        raise RedirectError(f"emulate() knows x86-64 and aarch64 hosts, not {platform.machine()}")
    return machine.call_then(first, then)


class _X86:
    reach, stub_bytes = 0x7FF00000, 16

    @staticmethod
    def call_then(first: int, then: int) -> bytes:
        code = b"\x57\x56\x48\x83\xec\x08"  # push rdi; push rsi; sub rsp, 8
        code += b"\xff\x15" + struct.pack("<i", 32 - 12)  # call [first]
        code += b"\x48\x83\xc4\x08\x5e\x5f\x85\xc0\x75\x06"  # add rsp, 8; pop rsi; pop rdi; test eax, eax; jne to the ret
        code += b"\xff\x25" + struct.pack("<i", 40 - 28) + b"\xc3"  # jmp [then]; ret
        return code.ljust(32, b"\xcc") + struct.pack("<QQ", first, then)

    @staticmethod
    def stub(target: int) -> bytes:
        return b"\xff\x25\x00\x00\x00\x00" + struct.pack("<Q", target) + b"\xcc\xcc"

    @staticmethod
    def jump(source: int, target: int, old: bytes) -> bytes:
        return b"\xe9" + struct.pack("<i", target - (source + 5)) + old[5:8]

    @staticmethod
    def decode_jump(source: int, code: bytes) -> int | None:
        if code[0] == 0xE9:
            return source + 5 + struct.unpack("<i", code[1:5])[0]
        return None


class _Arm64:
    reach, stub_bytes = 0x7F00000, 16

    @staticmethod
    def call_then(first: int, then: int) -> bytes:
        words = (
            0xA9BE7BFD, 0xA90107E0,  # stp x29, x30, [sp, -32]!; stp x0, x1, [sp, 16]
            0x58000150, 0xD63F0200,  # ldr x16, first; blr x16
            0x350000A0,  # cbnz w0, to the last two
            0xA94107E0, 0xA8C27BFD,  # ldp x0, x1, [sp, 16]; ldp x29, x30, [sp], 32
            0x580000F0, 0xD61F0200,  # ldr x16, then; br x16
            0xA8C27BFD, 0xD65F03C0, 0xD503201F,  # ldp x29, x30, [sp], 32; ret; nop
        )  # fmt: skip
        return struct.pack("<12I", *words) + struct.pack("<QQ", first, then)

    @staticmethod
    def stub(target: int) -> bytes:
        return struct.pack("<IIQ", 0x58000050, 0xD61F0200, target)  # ldr x16, #8; br x16; .quad target

    @staticmethod
    def jump(source: int, target: int, old: bytes) -> bytes:
        return struct.pack("<I", 0x14000000 | (((target - source) >> 2) & 0x3FFFFFF)) + old[4:8]

    @staticmethod
    def decode_jump(source: int, code: bytes) -> int | None:
        word = struct.unpack("<I", code[:4])[0]
        if word >> 26 == 0b000101:
            offset = word & 0x3FFFFFF
            return source + 4 * (offset - (1 << 26) if offset >> 25 else offset)
        return None


_MACHINES = {"x86_64": _X86, "AMD64": _X86, "aarch64": _Arm64, "arm64": _Arm64}


@dataclass
class Function:
    """One exported function while it is redirected."""

    name: str
    address: int
    saved: bytes
    original: Callable | None  # a ctypes function of the same prototype, or None when the body was not found


class Redirection:
    """The redirectable functions of one loaded library; made once per process, installed and restored many times.

    `callbacks` maps an export to (ctypes prototype, python function). The Python function is called as
    ``fn(original, *args)`` and returns what the prototype returns; it must not raise.
    """

    def __init__(self, path: str, callbacks: dict[str, tuple[type, Callable]]):
        machine = _MACHINES.get(platform.machine())
        if machine is None:
            raise RedirectError(f"emulate() knows x86-64 and aarch64 hosts, not {platform.machine()}")
        self.path = path
        self._machine = machine
        self._library = ctypes.CDLL(path)
        self._keep: list[object] = []
        self.functions: dict[str, Function] = {}
        found = {}
        for name in callbacks:
            try:
                symbol = getattr(self._library, name)
            except AttributeError:
                continue  # another version of the runtime may lack a function that no host code then calls
            address = ctypes.cast(symbol, ctypes.c_void_p).value
            if address % 8:
                raise RedirectError(f"{name} of {path} is not 8-byte aligned")
            found[name] = address
        if "_cudaLaunchKernelEx" not in found:
            raise RedirectError(f"{path} exports no _cudaLaunchKernelEx")
        middle = sorted(found.values())[len(found) // 2]
        self._page = _allocate_near(middle, machine.reach)
        if len(found) * machine.stub_bytes > _PAGE:
            raise RedirectError("too many functions for one page of stubs")
        stubs = {}
        blob = b""
        for name, address in found.items():
            prototype, function = callbacks[name]
            code = ctypes.string_at(address, 8)
            body = machine.decode_jump(address, code)
            original = prototype(body) if body is not None else None
            callback = prototype(_bind(function, original))
            self._keep.append(callback)
            stubs[name] = self._page + len(blob)
            blob += machine.stub(ctypes.cast(callback, ctypes.c_void_p).value)
            self.functions[name] = Function(name, address, code, original)
        ctypes.memmove(self._page, blob, len(blob))
        if machine is _Arm64:
            _write(self._page, blob)
        if _libc.mprotect(self._page, _PAGE, 5) != 0:
            raise RedirectError("mprotect refused executable stubs")
        self._stubs = stubs

    def install(self) -> None:
        """Makes the exported functions jump to the callbacks."""
        for name, function in self.functions.items():
            jump = self._machine.jump(function.address, self._stubs[name], function.saved)
            _write(function.address, jump)

    def restore(self) -> None:
        """Puts the original instructions back. The stubs stay mapped: a thread may still be inside one."""
        for function in self.functions.values():
            _write(function.address, function.saved)

    def installed(self) -> bool:
        """Whether any function of the library differs from the library's file."""
        return any(ctypes.string_at(f.address, 8) != f.saved for f in self.functions.values())


def _bind(function: Callable, original: Callable | None) -> Callable:
    return lambda *args: function(original, *args)
