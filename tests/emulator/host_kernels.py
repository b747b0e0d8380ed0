"""Small CuTe DSL kernels for the host tests. Import only where the DSL is installed."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream


@cute.kernel
def add_kernel(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    if i < cute.size(a):
        c[i] = a[i] + b[i]


@cute.jit
def add(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream):
    add_kernel(a, b, c).launch(
        grid=[cute.ceil_div(cute.size(a), 128), 1, 1], block=[128, 1, 1], cluster=[1, 1, 1], stream=stream
    )


@cute.jit
def add_default_stream(a, b, c):  # without annotations the DSL takes torch tensors
    add_kernel(a, b, c).launch(grid=[cute.ceil_div(cute.size(a), 128), 1, 1], block=[128, 1, 1])


def compile_tvm_ffi(options: str = ""):
    """`add` for float32 tensors of one symbolic length, as a TVM-FFI function of three tensors."""
    n = cute.sym_int()
    fakes = [make_fake_compact_tensor(cutlass.Float32, (n,), assumed_align=16) for _ in range(3)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(add, *fakes, stream, options=f"--enable-tvm-ffi {options}")


@cute.kernel
def increment_kernel(pointer: cute.Pointer, n: cutlass.Int32):
    tensor = cute.make_tensor(pointer, cute.make_layout(1024))
    thread, _, _ = cute.arch.thread_idx()
    if thread < n:
        tensor[thread] = tensor[thread] + 1.0


@cute.jit
def increment(pointer: cute.Pointer, n: cutlass.Int32):
    increment_kernel(pointer, n).launch(grid=[1, 1, 1], block=[128, 1, 1])
