"""Tensor-map copies of boxes that leave the tensor, in every swizzle mode."""

from __future__ import annotations

import numpy as np

from cute_kernels.emulator import TensorMap

from .case import SPAN, Case, kernel, tma_load, wait


def _box(array: np.ndarray, corner, box, fill) -> np.ndarray:
    """array[corner : corner + box], `fill` outside."""
    out = np.full(box, fill, array.dtype)
    low = [max(0, c) for c in corner]
    high = [min(n, c + b) for n, c, b in zip(array.shape, corner, box)]
    if all(a < b for a, b in zip(low, high)):
        to = tuple(slice(a - c, b - c) for a, b, c in zip(low, high, corner))
        out[to] = array[tuple(slice(a, b) for a, b in zip(low, high))]
    return out


def swizzled(rows: np.ndarray, mode: str) -> np.ndarray:
    """The bytes of a box as TMA puts them at an offset that is a multiple of 1024: 16-byte chunk c of 128-byte line l goes to chunk
    c xor the low bits of l."""
    flat = np.ascontiguousarray(rows).view(np.uint8).ravel()
    bits = {"none": 0, "32B": 1, "64B": 2, "128B": 3}[mode]
    chunk = np.arange(flat.size // 16)
    return flat.reshape(-1, 16)[chunk ^ ((chunk >> 3) & ((1 << bits) - 1))].ravel()  # an involution: gather is scatter


def tma_window(swizzle: str, dtype: str = "u16", rank: int = 2, add: bool = False, seed: int = 0) -> Case:
    """CTA (x, y, z) loads the box at x, y, z * box - shift (so the first and the last boxes leave the tensor), writes out the bytes
    it finds in shared memory, and stores (or adds) the box to another tensor at other coordinates, most of them inside."""
    rng = np.random.default_rng([seed, rank, SPAN[swizzle]])
    size = {"u16": 2, "bf16": 2, "f32": 4, "u8": 1}[dtype]
    inner = {"none": 48, "32B": 32, "64B": 64, "128B": 128}[swizzle] // size
    box = ((3,) if rank == 3 else ()) + (24, inner)
    pitch = 16 // size
    half = inner // 2 // pitch * pitch  # a column off a multiple of 16 bytes ends the kernel, as does a store from below 0
    shift, back = ((1,) if rank == 3 else ()) + (5, half), ((2,) if rank == 3 else ()) + (8, half + pitch)
    grid = [2 if k == 0 and rank == 3 else 3 for k in range(rank)]
    shape = tuple(int(2.3 * b) for b in box[:-1]) + (-(-int(2.4 * inner) // pitch) * pitch,)
    kind = {1: np.uint8, 2: np.uint16, 4: np.float32}[size]
    width = shape[-1] - 3  # the last columns belong to the rows' pitch, not to the tensor
    if dtype == "f32":
        source, target = (rng.integers(-99, 99, shape).astype(np.float32) for _ in range(2))
    else:
        source, target = (rng.integers(0, 1 << 8 * size, shape).astype(kind) for _ in range(2))
    nan = dtype == "bf16"  # TMA's other fill
    fill = 0x7FF7 if nan else 0
    count = int(np.prod(grid))
    nbytes = int(np.prod(box)) * size
    image = np.zeros((count, nbytes), np.uint8)
    maps = []
    for array in (source, target):
        view = array[..., :width]
        t = TensorMap.tiled(view, box=box, swizzle=swizzle, dtype=dtype, oob="nan" if nan and array is source else "zero")
        maps.append(t)
    want_image, want_target = np.zeros_like(image), target.copy()
    for i in range(count):
        at, index = [], i
        for n in reversed(grid):  # x is the last axis
            at.insert(0, index % n)
            index //= n
        corner = [a * b - s for a, b, s in zip(at, box, shift)]
        tile = _box(source[..., :width], corner, box, fill)
        want_image[i] = swizzled(tile, swizzle)
        to = [c + b for c, b in zip(corner, back)]
        cut_low = [max(0, c) for c in to]
        # The hardware writes whole 16 bytes: the three columns of pitch as well.
        cut_high = [min(n, c + b) for n, c, b in zip(target.shape, to, box)]
        if all(a < b for a, b in zip(cut_low, cut_high)) and cut_low[-1] < width:
            here = tuple(slice(a, b) for a, b in zip(cut_low, cut_high))
            part = tile[tuple(slice(a - c, b - c) for a, b, c in zip(cut_low, cut_high, to))]
            want_target[here] = part + want_target[here] if add else part
    names = ["x", "y", "z"][:rank]
    coords = []
    for k, name in enumerate(names):
        b, s, t = box[-1 - k], shift[-1 - k], back[-1 - k]
        coords.append(f"    mov.u32 %c{k}, %ctaid.{name};\n    mad.lo.s32 %c{k}, %c{k}, {b}, {-s};\n    add.s32 %e{k}, %c{k}, {t};")
    load_at, store_at = (", ".join(f"%{r}{k}" for k in range(rank)) for r in "ce")
    flat = "%ctaid.x" if rank == 2 else "%ctaid.z"
    op = "cp.reduce.async.bulk.tensor" if add else "cp.async.bulk.tensor"
    how = ".add.tile.bulk_group" if add else ".tile.bulk_group"
    body = f"""
    mov.u32 %me, %tid.x;
    mov.u32 %base, smem;
    add.u32 %bar, %base, {-(-nbytes // 1024) * 1024};
    mov.u64 %from, map_from;
    cvta.param.u64 %from, %from;
    mov.u64 %to, map_to;
    cvta.param.u64 %to, %to;
{chr(10).join(coords)}
    setp.ne.u32 %p, %me, 0;
    @%p bra ASKED;
    mbarrier.init.shared::cta.b64 [%bar], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {nbytes};
{tma_load(rank, "%base", "%from", load_at, "%bar")}
ASKED:
    bar.sync 0;
{wait("LANDED", "%bar", "0")}
    // The raw bytes of shared memory, 16 to a thread and turn.
    mov.u32 %cta, {"%ctaid.y" if rank == 2 else flat};
    mov.u32 %t, {grid[-2] if rank == 3 else grid[-1]};
    {"mov.u32 %u, %ctaid.y; mad.lo.u32 %cta, %cta, %t, %u;" if rank == 3 else ""}
    mov.u32 %t, {grid[-1]};
    mov.u32 %u, %ctaid.x;
    mad.lo.u32 %cta, %cta, %t, %u;
    ld.param.u64 %out, [image];
    mul.wide.u32 %wide, %cta, {nbytes};
    add.u64 %out, %out, %wide;
    shl.b32 %t, %me, 4;
DUMP:
    setp.ge.u32 %p, %t, {nbytes};
    @%p bra DUMPED;
    add.u32 %u, %base, %t;
    ld.shared.v4.b32 {{%v0, %v1, %v2, %v3}}, [%u];
    cvt.u64.u32 %wide, %t;
    add.u64 %wide, %out, %wide;
    st.global.v4.b32 [%wide], {{%v0, %v1, %v2, %v3}};
    add.u32 %t, %t, 1024;
    bra DUMP;
DUMPED:
    setp.ne.u32 %p, %me, 0;
    @%p bra END;
    {op}.{rank}d.global.shared::cta{how} [%to, {{{store_at}}}], [%base];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
END:"""
    registers = """    .reg .pred %p, %ok;
    .reg .b32 %me, %base, %bar, %t, %u, %cta, %c<3>, %e<3>, %v<4>;
    .reg .b64 %from, %to, %out, %wide;"""
    # Not read: it tells the emulator how far the target's memory goes.
    params = ".param .align 64 .b8 map_from[128], .param .align 64 .b8 map_to[128], .param .u64 image, .param .u64 memory"
    xyz = tuple(reversed(grid)) + (1,) * (3 - rank)
    return Case(
        f"{'tma_add' if add else 'tma_window'} {rank}-D {swizzle} {dtype}", kernel(params, registers, body, 64), xyz, 64,
        [*maps, image, target], [(image, want_image, 0.0), (target, want_target, 0.0)], -(-nbytes // 1024) * 1024 + 64,
        features="TMA, out-of-range boxes", keep=[source],
    )  # fmt: skip
