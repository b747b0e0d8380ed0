"""What is inside a compiled kernel: registers, stack, shared memory, spills, opcodes. Read from the cubin itself, with no GPU.

A cubin is an ELF file. ptxas leaves notes in the section .nv.info (per kernel: register count, stack frame) and
.nv.info.<kernel> (block size, parameter bytes); static shared memory is the size of .nv.shared.<kernel>; a local-memory access is
an LDL or STL instruction, found by its opcode in .text.<kernel>. Only the disassembly needs a tool, nvdisasm.
"""

from __future__ import annotations

import math
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

# Attribute numbers of .nv.info records, checked against cuobjdump -res-usage and nvdisasm in tests/jit/test_inspect.py.
_REGISTERS, _FRAME, _THREADS, _PARAMETERS = 0x2F, 0x11, 0x10, 0x19
_SIZED = 4  # record format: two bytes of length, then that much; the other formats hold two bytes
# Low 12 bits of an instruction: a load from and a store to local memory.
_LDL, _STL = 0x983, 0x387
_INSTRUCTION = 16  # bytes


class MissingTool(RuntimeError):
    """A program of the CUDA toolkit was not found."""


@dataclass(frozen=True)
class Resources:
    """What one kernel of a cubin takes.

    registers: a thread. stack: bytes a thread, spills included. spill_loads, spill_stores: LDL and STL instructions in the code
    (they also serve arrays that the code indexes at run time). static_smem: bytes a block. threads: the block size it was compiled
    for, or None. parameter_bytes, code_bytes.
    """

    kernel: str
    registers: int
    stack: int
    spill_loads: int
    spill_stores: int
    static_smem: int
    threads: int | None
    parameter_bytes: int
    code_bytes: int


def _sections(cubin: bytes) -> tuple[dict[str, tuple[int, int, int]], list[str]]:
    """({section: (offset, size, type)}, names of the symbols in order)."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError(f"a cubin must be a 64-bit ELF file, got one that starts with {cubin[:5]!r}")
    table, (entry_size, count, names_at) = struct.unpack_from("<Q", cubin, 40)[0], struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry_size) for i in range(count)]

    def text(section: int, offset: int) -> str:
        start = headers[section][4] + offset
        return cubin[start : cubin.index(b"\0", start)].decode()

    found = {text(names_at, h[0]): (h[4], h[5], h[1]) for h in headers}
    symbols: list[str] = []
    for h in headers:
        if h[1] == 2:  # SHT_SYMTAB
            symbols = [text(h[6], struct.unpack_from("<I", cubin, h[4] + at)[0]) for at in range(0, h[5], 24)]
            break
    return found, symbols


def _records(cubin: bytes, section: tuple[int, int, int]) -> list[tuple[int, bytes]]:
    """(attribute, value) of an .nv.info section."""
    at, size, _ = section
    end, result = at + size, []
    while at + 4 <= end:
        form, attribute, length = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if form == _SIZED:
            result.append((attribute, cubin[at : at + length]))
            at += length
        else:
            result.append((attribute, struct.pack("<H", length)))
    return result


def resources(cubin: bytes) -> list[Resources]:
    """One entry per kernel of the cubin. ValueError if it is not a cubin."""
    sections, symbols = _sections(cubin)
    registers: dict[str, int] = {}
    frames: dict[str, int] = {}
    for attribute, value in _records(cubin, sections[".nv.info"]) if ".nv.info" in sections else ():
        if attribute in (_REGISTERS, _FRAME):
            symbol, number = struct.unpack("<II", value)
            (registers if attribute == _REGISTERS else frames)[symbols[symbol]] = number
    result = []
    for name, (offset, size, _) in sections.items():
        if not name.startswith(".text."):
            continue
        kernel = name.removeprefix(".text.")
        info = dict(_records(cubin, sections[f".nv.info.{kernel}"])) if f".nv.info.{kernel}" in sections else {}
        code = cubin[offset : offset + size]
        opcodes = Counter(struct.unpack_from("<H", code, at)[0] & 0xFFF for at in range(0, size, _INSTRUCTION))
        block = struct.unpack("<III", info[_THREADS]) if _THREADS in info else None
        result.append(
            Resources(
                kernel,
                registers.get(kernel, 0),
                frames.get(kernel, 0),
                opcodes[_LDL],
                opcodes[_STL],
                sections.get(f".nv.shared.{kernel}", (0, 0, 0))[1],
                math.prod(block) if block else None,
                struct.unpack("<H", info[_PARAMETERS][:2])[0] if _PARAMETERS in info else 0,
                size,
            )
        )
    return result


def dynamic_smem(host_code: str) -> list[int | None]:
    """Bytes of dynamic shared memory of each launch in the DSL's host code (`compiled.ir_module` as text): what the launch
    configuration stores; None where it is computed at run time."""
    sizes: list[int | None] = []
    for function in re.split(r"^\s*llvm\.func ", host_code, flags=re.M):
        constants = dict(re.findall(r"(%\w+) = llvm\.mlir\.constant\((\d+) : i64\)", function))
        # The launch configuration is (grid, block, shared memory, stream, attributes, their number).
        pointer = r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : .*struct<\(array<3 x i32>, array<3 x i32>, i64, ptr"
        fields = re.findall(pointer, function)
        for field in fields:
            stored = re.search(rf"llvm\.store (%\w+), {re.escape(field)} : i64", function)
            if stored is not None:
                sizes.append(int(constants[stored[1]]) if stored[1] in constants else None)
    return sizes


def find_tool(name: str) -> Path | None:
    """A program of the CUDA toolkit: from the wheels nvidia-cuda-nvdisasm and nvidia-cuda-cuobjdump, else from PATH."""
    for folder in sys.path:
        for path in sorted(Path(folder or ".").glob(f"nvidia/*/bin/{name}"), reverse=True):
            return path
    found = shutil.which(name)
    return Path(found) if found else None


def disassemble(cubin: bytes) -> str:
    """The SASS text. Raises MissingTool without nvdisasm, RuntimeError with its message if it fails."""
    tool = find_tool("nvdisasm")
    if tool is None:
        raise MissingTool("nvdisasm was not found: pip install nvidia-cuda-nvdisasm, or put a CUDA toolkit (13.0 or newer) on PATH")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool} failed: {done.stderr.strip()}")
    return done.stdout


def sass_opcodes(text: str) -> Counter[str]:
    """Instructions of nvdisasm's output by full opcode, for example "LDG.E.128"."""
    return Counter(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", text, re.M))


def ptx_opcodes(text: str) -> Counter[str]:
    """Instructions of a PTX text by full opcode, for example "ld.global.v4.b32"."""
    body = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    # Inside function bodies an instruction starts a line or follows { or ; (inline assembly), and begins with a lower-case word.
    found = re.findall(r"(?:^|[{;])[ \t]*(?:@!?%?\w+[ \t]+)?([a-z][a-z0-9]*(?:[.:]+[A-Za-z0-9_]+)*)(?=[ \t;])", body, re.M)
    return Counter(opcode for opcode in found if opcode not in ("call_seq", "param0"))
