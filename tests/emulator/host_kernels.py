"""Small CuTe DSL kernels for the host tests. Import only where the DSL is installed."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
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


TILE_M, TILE_N = 64, 32


@cute.kernel
def tile_copy_kernel(atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, layout: cute.ComposedLayout):
    """One TMA tile into swizzled shared memory, then every thread copies its share of rows to global memory."""
    thread, _, _ = cute.arch.thread_idx()
    block_m, block_n, _ = cute.arch.block_idx()
    memory = cutlass.utils.SmemAllocator()
    barrier = memory.allocate_array(cutlass.Int64, 1)
    tile = memory.allocate_tensor(cutlass.Float16, layout.outer, 1024, swizzle=layout.inner)
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    whole = cute.local_tile(source, (TILE_M, TILE_N), (block_m, block_n))
    to_shared, from_global = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(whole, 0, 2)
    )
    if thread < 32:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, TILE_M * TILE_N * 2)
        cute.copy(atom, from_global, to_shared, tma_bar_ptr=barrier)
    cute.arch.mbarrier_wait(barrier, 0)
    part = cute.local_tile(target, (TILE_M, TILE_N), (block_m, block_n))
    for column in cutlass.range_constexpr(TILE_N):
        part[thread, column] = tile[thread, column]


@cute.jit
def tile_copy(source: cute.Tensor, target: cute.Tensor):
    layout = cute.make_composed_layout(
        cute.make_swizzle(2, 4, 3), 0, cute.make_layout((TILE_M, TILE_N), stride=(TILE_N, 1))
    )
    atom, coordinates = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), source, layout, (TILE_M, TILE_N)
    )
    tile_copy_kernel(atom, coordinates, target, layout).launch(
        grid=[source.shape[0] // TILE_M, source.shape[1] // TILE_N, 1], block=[TILE_M, 1, 1]
    )
