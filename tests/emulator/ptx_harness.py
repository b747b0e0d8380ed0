"""Builds small PTX kernels for the emulator's tests."""

from __future__ import annotations

import numpy as np

from cute_kernels.emulator import run_ptx

BITS = {"h": 16, "w": 32, "d": 64}
DTYPE = {"h": np.uint16, "w": np.uint32, "d": np.uint64}
HEAD = ".version 8.8\n.target {target}\n.address_size 64\n"


def kernel(body: str, *, regs: str = "", params: int = 1, target: str = "sm_100a", shared: str = "", name: str = "k") -> str:
    """A kernel with `params` 64-bit parameters already in %a0, %a1, ... and %tid.x in %tx."""
    names = ", ".join(f".param .u64 p{k}" for k in range(params))
    loads = "".join(f"ld.param.u64 %a{k}, [p{k}];\n" for k in range(params))
    return (
        HEAD.format(target=target)
        + f".visible .entry {name}({names})\n{{\n.reg .pred %p<8>;\n.reg .b16 %h<16>;\n.reg .b32 %r<64>;\n.reg .b32 %tx;\n"
        + f".reg .b64 %d<32>;\n.reg .b64 %a<8>;\n{shared}\n{regs}\n{loads}mov.u32 %tx, %tid.x;\n{body}\nret;\n}}\n"
    )


def lane_op(text: str, dst: str, sources: list[str], inputs: list[np.ndarray], **run) -> np.ndarray:
    """Runs `text`, which uses %x0.. (sources, by register class letter) and writes %y, on one warp; returns 32 raw values."""
    loads = []
    for k, cls in enumerate(sources):
        size = BITS[cls] // 8
        loads.append(f"mul.wide.u32 %d31, %tx, {size};\nadd.u64 %d30, %a{k}, %d31;\nld.global.b{BITS[cls]} %x{k}, [%d30];")
    size = BITS[dst] // 8
    store = f"mul.wide.u32 %d31, %tx, {size};\nadd.u64 %d30, %a{len(sources)}, %d31;\nst.global.b{BITS[dst]} [%d30], %y;"
    regs = "".join(f".reg .b{BITS[c]} %x{k};\n" for k, c in enumerate(sources)) + f".reg .b{BITS[dst]} %y;"
    ptx = kernel("\n".join(loads) + "\n" + text + "\n" + store, regs=regs, params=len(sources) + 1)
    out = np.zeros(32, DTYPE[dst])
    record = run_ptx(ptx, 1, 32, [x.view(DTYPE[c]) for x, c in zip(inputs, sources)] + [out], **run)
    assert record.hazards == []
    return out
