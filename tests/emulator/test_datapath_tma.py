"""TMA plans against element-by-element numpy indexing; swizzles placed by the ISA's printed tables, not by XOR."""

import itertools
import json

import numpy as np
import pytest
import tensor_copies

from cute_kernels.emulator.datapath import IllegalOperand
from cute_kernels.emulator.datapath.swizzle import swizzle_offset
from cute_kernels.emulator.datapath.tensormap import TensorMap
from cute_kernels.emulator.datapath.tma import merge_ranges, plan_tile, reduce_bytes

# PTX ISA 5.5.7: row r of a mode's table lists the source chunk (16 bytes) found in each slot of a 128-byte line.
TABLES = {
    "none": ["01234567"],
    "32B": ["01234567", "10325476"],
    "64B": ["01234567", "10325476", "23016745", "32107654"],
    "128B": ["01234567", "10325476", "23016745", "32107654", "45670123", "54761032", "67452301", "76543210"],
    "128B_32B-atom": ["01234567", "23016745", "45670123", "67452301"],
    "128B_64B-atom": ["01234567", "45670123"],
}


class Global:
    """Global memory as one numpy buffer at a made-up address; refuses any access outside it."""

    def __init__(self, data: np.ndarray):
        self.raw = data.reshape(-1).view(np.uint8)
        self.base = data.__array_interface__["data"][0]

    def _index(self, addresses, nbytes):
        first = np.asarray(addresses) - self.base
        assert first.min() >= 0 and first.max() + nbytes <= self.raw.size
        return first[:, None] + np.arange(nbytes)

    def read(self, addresses, nbytes):
        return self.raw[self._index(addresses, nbytes)]

    def write(self, addresses, values):
        self.raw[self._index(addresses, values.shape[1])] = values

    def update(self, addresses, nbytes, fn):
        self.write(addresses, fn(self.read(addresses, nbytes)))


def place(linear: np.ndarray, start: int, mode: str, size: int) -> np.ndarray:
    """Shared memory image: each 16-byte chunk of the dense tile put where the printed table shows it."""
    out = np.full(size, 0xEE, np.uint8)
    table = TABLES[mode]
    for i in range(0, len(linear), 16):
        line, chunk = divmod((start + i) // 16, 8)
        slot = table[line % len(table)].index(str(chunk))
        where = line * 128 + slot * 16
        out[where : where + 16] = linear[i : i + 16]
    return out


def dense_tile(array: np.ndarray, box, coords, steps, fill) -> np.ndarray:
    """The box's elements by plain indexing; array axes and box in numpy order."""
    counts = [-(-b // s) for b, s in zip(box[:-1], steps[:-1])] + [box[-1]]
    out = np.full(counts, fill, array.dtype)
    for index in itertools.product(*(range(c) for c in counts)):
        at = [c + i * s for c, i, s in zip(coords, index, [*steps[:-1], 1])]
        if all(0 <= a < n for a, n in zip(at, array.shape)):
            out[index] = array[tuple(at)]
    return out


def random_array(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    n = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return rng.integers(1, 255, n, dtype=np.uint8).view(dtype).reshape(shape)


CASES = [
    # shape, dtype, box, coords, element strides, swizzle, smem offset
    ((64,), "uint32", (16,), (8,), (1,), "none", 1024),
    ((64,), "uint32", (16,), (-4,), (1,), "none", 1152),
    ((70, 72), "uint16", (16, 64), (32, 0), (1, 1), "128B", 1024),
    ((70, 72), "uint16", (16, 64), (60, 16), (1, 1), "128B", 2048 + 128),
    ((70, 72), "uint16", (16, 32), (-3, 56), (1, 1), "64B", 1024 + 256),
    ((70, 72), "uint16", (16, 16), (69, -8), (1, 1), "32B", 1024 + 128),
    ((70, 64), "uint32", (9, 32), (63, 40), (1, 1), "128B_32B-atom", 1024),
    ((70, 64), "uint32", (9, 32), (-1, -8), (1, 1), "128B_64B-atom", 1024),
    ((70, 72), "uint16", (16, 64), (200, 0), (1, 1), "128B", 1024),
    ((70, 72), "uint16", (16, 64), (0, 72), (1, 1), "128B", 1024),
    ((40, 64), "uint16", (24, 64), (1, 0), (3, 1), "128B", 1024),
    ((40, 64), "uint16", (25, 8), (-2, 56), (4, 1), "none", 1024),
    ((5, 6, 32), "float32", (2, 3, 16), (4, -1, 24), (1, 1, 1), "64B", 1024),
    ((3, 4, 5, 16), "uint8", (2, 3, 4, 16), (2, 2, 3, 0), (1, 2, 1, 1), "none", 1024),
    ((2, 3, 4, 5, 64), "uint16", (2, 1, 3, 2, 64), (1, 2, -1, 4, 0), (1, 1, 2, 1, 1), "128B", 3072),
    ((2, 3, 4, 5, 32), "uint64", (1, 2, 2, 2, 4), (0, 1, 1, 3, 30), (1, 1, 1, 1, 1), "32B", 1024),
]


@pytest.mark.parametrize("shape,dtype,box,coords,steps,mode,start", CASES)
def test_load_and_store_tile(shape, dtype, box, coords, steps, mode, start):
    array = random_array(shape, dtype)
    gmem = Global(array)
    tmap = TensorMap.decode(TensorMap.tiled(array, box=box, swizzle=mode, element_strides=steps).encode())
    plan = plan_tile(tmap, coords[::-1], start)
    want_tile = dense_tile(array, box, coords, steps, 0)
    linear = want_tile.reshape(-1).view(np.uint8)
    assert plan.tx_bytes == linear.size == tmap.box_bytes
    smem = np.full(8192, 0xEE, np.uint8)
    plan.load(gmem.read, smem)
    assert np.array_equal(smem, place(linear, start, mode, smem.size))
    starts, lengths = plan.smem_ranges
    covered = np.zeros(smem.size, bool)
    for s, n in zip(starts, lengths):
        covered[s : s + n] = True
    assert covered.sum() == linear.size and np.all(smem[~covered] == 0xEE)

    # Store: only in-range elements change, and they take the tile's values. It takes no coordinate below 0.
    coords = [max(c, 0) for c in coords]
    fresh = random_array(want_tile.shape, dtype, seed=5)
    smem = place(fresh.reshape(-1).view(np.uint8), start, mode, 8192)
    target = array.copy()
    out = Global(target)
    moved = plan_tile(TensorMap.tiled(target, box=box, swizzle=mode, element_strides=steps), coords[::-1], start,
                      direction="store")
    moved.store(smem, out.write)
    want = array.copy()
    for index in np.ndindex(*fresh.shape):
        at = [c + i * s for c, i, s in zip(coords, index, [*steps[:-1], 1])]
        if all(0 <= a < n for a, n in zip(at, array.shape)):
            want[tuple(at)] = fresh[index]
    assert np.array_equal(target.view(np.uint8), want.view(np.uint8))
    inside = [all(0 <= c + i * s < n for c, i, s, n in zip(coords, index, [*steps[:-1], 1], array.shape))
              for index in np.ndindex(*fresh.shape)]
    assert moved.gmem_bytes == sum(inside) * array.itemsize


@pytest.mark.parametrize("mode,width", [("128B", 64), ("64B", 32), ("32B", 16), ("none", 64)])
def test_gather4_and_scatter4(mode, width):
    array = random_array((50, 96), "uint16")
    gmem = Global(array)
    tmap = TensorMap.tiled(array, box=(1, width), swizzle=mode)
    rows = [7, -1, 49, 50]
    start = 1024 + 512
    plan = plan_tile(tmap, [48, *rows], start, mode="gather4")
    tile = np.zeros((4, width), np.uint16)
    for i, r in enumerate(rows):
        if 0 <= r < 50:
            n = min(width, 96 - 48)
            tile[i, :n] = array[r, 48 : 48 + n]
    smem = np.full(4096, 0xEE, np.uint8)
    plan.load(gmem.read, smem)
    assert np.array_equal(smem, place(tile.reshape(-1).view(np.uint8), start, mode, 4096))
    assert plan.tx_bytes == 4 * width * 2
    assert plan.gmem_chunks.tolist().count(-1) == 2

    target = np.zeros_like(array)
    out = Global(target)
    fresh = random_array((4, width), "uint16", 9)
    smem = place(fresh.reshape(-1).view(np.uint8), start, mode, 4096)
    plan_tile(TensorMap.tiled(target, box=(1, width), swizzle=mode), [48, *rows], start, mode="scatter4",
              direction="store").store(smem, out.write)
    want = np.zeros_like(array)
    n = min(width, 48)
    want[7, 48 : 48 + n], want[49, 48 : 48 + n] = fresh[0, :n], fresh[2, :n]
    assert np.array_equal(target, want)


def test_nan_fill():
    array = np.ones((4, 16), np.float32)
    plan = plan_tile(TensorMap.tiled(array, box=(2, 8), oob="nan"), [12, 3], 1024)
    smem = np.zeros(2048, np.uint8)
    plan.load(Global(array).read, smem)
    tile = smem[1024:1088].view(np.float32).reshape(2, 8)
    assert np.all(tile[0, :4] == 1) and np.isnan(tile[0, 4:]).all() and np.isnan(tile[1]).all()
    with pytest.raises(IllegalOperand, match="oob_fill"):
        TensorMap.tiled(np.ones((4, 16), np.uint32), box=(2, 8), oob="nan")


def test_reduce_tile_and_ops():
    array = np.arange(64, dtype=np.float32).reshape(4, 16)
    before = array.copy()
    tile = np.full((2, 8), 0.5, np.float32)
    smem = np.zeros(2048, np.uint8)
    smem[1024:1088] = tile.reshape(-1).view(np.uint8)
    plan_tile(TensorMap.tiled(array, box=(2, 8)), [12, 3], 1024, direction="reduce").reduce(
        smem, Global(array).update, "add")
    before[3, 12:] += 0.5
    assert np.array_equal(array, before)

    def run(dtype, np_dtype, op, a, b):
        x, y = np.array(a, np_dtype).view(np.uint8), np.array(b, np_dtype).view(np.uint8)
        return reduce_bytes(dtype, op, x, y).view(np_dtype).tolist()

    assert run("s32", np.int32, "min", [-5, 3], [2, 1]) == [-5, 1]
    assert run("u32", np.uint32, "max", [2**32 - 5, 3], [2, 1]) == [2**32 - 5, 3]
    assert run("u32", np.uint32, "inc", [4, 5, 9], [5, 5, 5]) == [5, 0, 0]
    assert run("u32", np.uint32, "dec", [0, 6, 5], [5, 5, 5]) == [5, 5, 4]
    assert run("u64", np.uint64, "xor", [0xF0F0], [0xFFFF]) == [0x0F0F]
    assert run("f16", np.float16, "add", [1.5, 65504], [0.25, 65504]) == [1.75, float("inf")]
    assert run("f16", np.float16, "max", [1.5, -2], [0.25, -1]) == [1.5, -1]
    assert run("bf16", np.uint16, "add", [0x3F80], [0x3F80]) == [0x4000]
    with pytest.raises(IllegalOperand, match="reduction"):
        run("f32", np.float32, "min", [1], [2])
    with pytest.raises(IllegalOperand, match="inc"):
        run("s32", np.int32, "inc", [1], [2])


def test_merge_ranges():
    starts, lengths = merge_ranges(np.array([9, 3, 4, 5, 11]))
    assert starts.tolist() == [48, 144, 176] and lengths.tolist() == [48, 16, 16]


def test_illegal_maps_and_plans():
    array = np.zeros((8, 64), np.uint16)
    good = TensorMap.tiled(array, box=(8, 64), swizzle="128B")
    for args, match in [
        (dict(box=(8, 72), swizzle="128B"), "swizzle's 128"),
        (dict(box=(8, 4)), "multiple of 16 bytes"),
        (dict(box=(257, 8)), "1..256"),
        (dict(box=(8, 8), swizzle="96B"), "swizzle"),
        (dict(box=(8, 8), element_strides=(9, 1)), "1..8"),
        (dict(box=(8, 8), l2_promotion=7), "l2_promotion"),
    ]:
        with pytest.raises(IllegalOperand, match=match):
            TensorMap.tiled(array, **args)
    with pytest.raises(IllegalOperand, match="multiple of 16"):
        TensorMap.tiled(np.zeros((8, 65), np.uint16), box=(8, 64))
    with pytest.raises(IllegalOperand, match="address"):
        TensorMap.tiled(array.reshape(-1)[1:], box=(8,))
    for call, match in [
        (lambda: plan_tile(good, [0, 0, 0], 1024), "2 dimensions"),
        (lambda: plan_tile(good, [0, 0], 1040), "128-byte"),
        (lambda: plan_tile(good, [0, 0], 228 * 1024 - 512), "pass the end"),
        (lambda: plan_tile(good, [0, 0], 1024, mode="im2col"), "no im2col"),
        (lambda: plan_tile(good, [3, 0], 1024), "multiple of 16 bytes"),
        (lambda: plan_tile(good, [-1, 0], 1024), "multiple of 16 bytes"),
        (lambda: plan_tile(good, [-8, 0], 1024, direction="store"), "none below 0"),
        (lambda: plan_tile(good, [0, -1], 1024, direction="reduce"), "none below 0"),
        (lambda: plan_tile(good, [0, 0, 1, 2, 3], 1024, mode="gather4"), "extent of 1"),
    ]:
        with pytest.raises(IllegalOperand, match=match):
            call()


def test_replace_field_and_explain():
    array = np.zeros((8, 64), np.uint16)
    tmap = TensorMap.tiled(array, box=(8, 64), swizzle="128B")
    assert tmap.replace_field("global_address", 4096).address == 4096
    assert tmap.replace_field("global_dim", 5, 1).dims == (64, 5)
    assert tmap.replace_field("global_stride", 256, 0).strides == (256,)
    assert tmap.replace_field("box_dim", 4, 1).box == (64, 4)
    assert tmap.replace_field("element_stride", 2, 1).element_strides == (1, 2)
    assert tmap.replace_field("rank", 2).rank == 3
    assert tmap.replace_field("elemtype", 10).dtype == "bf16"
    assert tmap.replace_field("swizzle_mode", 2).swizzle == "64B"
    assert tmap.replace_field("swizzle_atomicity", 1).swizzle == "128B_32B-atom"
    assert tmap.replace_field("fill_mode", 1).oob_fill == "nan"
    for field, value, ordinal in [("nonsense", 0, None), ("elemtype", 16, None), ("global_dim", 3, 7), ("rank", 5, 0)]:
        with pytest.raises(IllegalOperand):
            tmap.replace_field(field, value, ordinal)
    text = tmap.explain()
    assert "dims=(64, 8)" in text and "128B" in text
    with pytest.raises(IllegalOperand, match="no tensor map"):
        TensorMap.decode(b"\xff" * 128)


# Words 1-7 of tensor maps that CuTe DSL 4.8.1's host code packed for published kernels (FlashAttention-4, cudnn-frontend,
# NVIDIA's examples): dtype, dims, byte strides, box, swizzle, words. The DSL sets bit 1 of word 1, the driver does not.
PACKED_BY_CUTE = [
    ("bf16", (64, 256, 2, 1), (256, 128, 65536), (64, 128, 1, 1), "128B",
     [0x1000046532, 0x100000000008, 0, 0xFF0000003F, 0x1, 0x3F00000000000000, 0x7F]),
    ("bf16", (64, 2, 256, 2, 1), (128, 512, 256, 131072), (64, 2, 64, 1, 1), "128B",
     [0x800246542, 0x1000000020, 0x2000, 0x10000003F, 0x1000000FF, 0x3F00000000000000, 0x3F01]),
    ("bf16", (512, 512), (1024,), (64, 1), "128B",
     [0x4000246512, 0, 0, 0x1FF000001FF, 0, 0x3F00000000000000, 0]),
    ("bf16", (64, 128, 2, 4, 2), (1024, 512, 128, 131072), (64, 64, 2, 4, 1), "128B",
     [0x4000246542, 0x800000020, 0x2000, 0x7F0000003F, 0x300000001, 0x3F00000000000001, 0x3013F]),
    ("f16", (64, 128), (128,), (16, 128), "32B", [0x800002310, 0, 0, 0x7F0000003F, 0, 0xF00000000000000, 0x7F]),
    ("f16", (64, 128), (128,), (32, 128), "64B", [0x800004310, 0, 0, 0x7F0000003F, 0, 0x1F00000000000000, 0x7F]),
    ("tf32", (256, 128, 1), (1024, 131072), (32, 32, 1), "128B_32B-atom",
     [0x40002D63A2, 0x2000, 0, 0x7F000000FF, 0, 0x1F00000000000000, 0x1F]),
]


@pytest.mark.parametrize("dtype,dims,strides,box,swizzle,words", PACKED_BY_CUTE)
def test_encode_and_decode_are_cutes(dtype, dims, strides, box, swizzle, words):
    address = 0x558D77F1D3C0
    promotion = 128 if (words[0] >> 17) & 3 == 2 else 0
    raw = np.array([address, *words] + [0] * 8, np.uint64).tobytes()
    tmap = TensorMap.decode(raw)
    want = TensorMap(address, dtype, dims, strides, box, (1,) * len(dims), "none", swizzle, "zero", promotion)
    assert tmap == want
    ours = np.frombuffer(want.encode(), np.uint64).tolist()
    assert ours[:8] == [address, words[0] & ~2, *words[1:]] and len(want.encode()) == 128
    assert not any(ours[8:])


def test_replay_of_an_h200():
    """288 random copies give the bytes that an H200 gave (tensor_copies.py recorded them)."""
    want = json.loads(tensor_copies.FILE.read_text())
    cases = list(tensor_copies.cases())
    assert len(cases) == len(want)
    base, start = 1 << 20, 1024
    for i, (c, digest) in enumerate(zip(cases, want)):
        data, image = tensor_copies.random_bytes(c.bytes_of_tensor(), i), tensor_copies.random_bytes(40960, 10000 + i)
        tmap = TensorMap(base, c.dtype, c.dims, c.strides, c.box, c.steps, "none", c.swizzle, c.oob)
        plan = plan_tile(tmap, c.coords, start, direction="reduce" if c.kind == "add" else c.kind)

        def read(at, n, data=data):
            return data[(np.asarray(at) - base)[:, None] + np.arange(n)]

        def write(at, values, data=data):
            data[(np.asarray(at) - base)[:, None] + np.arange(values.shape[1])] = values

        def update(at, n, fn, read=read, write=write):
            write(at, fn(read(at, n)))

        smem = np.full(start + 40960, 0xEE, np.uint8)
        if c.kind == "load":
            plan.load(read, smem)
            got = smem[start : start + tensor_copies.SEEN]
        else:
            smem[start:] = image
            plan.store(smem, write, write) if c.kind == "store" else plan.reduce(smem, update, "add", update)
            got = data
        assert tensor_copies.digest(got) == digest, (i, c)


@pytest.mark.parametrize("swizzle, span", [("32B", 32), ("64B", 64), ("128B", 128)])
def test_rows_narrower_than_the_swizzle_stand_its_width_apart(swizzle, span):
    """Shared memory between the rows keeps what it had; the mbarrier counts the box's bytes alone."""
    array = np.arange(64 * 16, dtype=np.uint8).reshape(64, 16)
    tmap = TensorMap.tiled(array, box=(9, 16), swizzle=swizzle)
    plan = plan_tile(tmap, (0, 5), 2048)
    smem = np.full(228 * 1024, 0xEE, np.uint8)
    plan.load(Global(array).read, smem)
    at = [swizzle_offset(2048 + span * row, swizzle) for row in range(9)]
    for row, offset in enumerate(at):
        assert np.array_equal(smem[offset : offset + 16], array[5 + row])
    assert (smem != 0xEE).sum() <= 9 * 16 == plan.tx_bytes and plan.smem_span == 8 * span + 16
    assert np.array_equal(plan.tile(smem), array[5:14])
