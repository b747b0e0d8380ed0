"""The data paths against a real Hopper GPU: the same bytes, the same descriptors, equal results. Skips elsewhere.

Each case runs a small PTX kernel through the driver API and the corresponding plan, on random data. Descriptors are
random too (any strides, starts inside a swizzle atom, non-zero base offsets), because the question is what the hardware
does with them, not whether CUTLASS would build them. Values are small integers where arithmetic is involved, so that
results do not depend on the order of summation. ``python tests/emulator/test_datapath_gpu.py DIR`` writes the PTX.
"""

import ctypes
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

from cute_kernels.emulator.datapath import formats, mma_sync, wgmma
from cute_kernels.emulator.datapath.descriptors import encode_smem_desc
from cute_kernels.emulator.datapath.errors import IllegalOperand
from cute_kernels.emulator.datapath.tensormap import DTYPES, TensorMap
from cute_kernels.emulator.datapath.tma import plan_tile

HEAD = ".version 8.4\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
IMAGE = 40960  # bytes of shared memory compared, starting 1024 above the (1024-aligned) dynamic base

_FILL = """
  mov.u32 %r1, %tid.x;
  shl.b32 %r2, %r1, 2;
  mov.u32 %r3, smem;
  add.u32 %r3, %r3, 1024;
FILL:
  setp.ge.u32 %p1, %r2, {bytes};
  @%p1 bra FILLED;
  {get}
  add.u32 %r5, %r3, %r2;
  st.shared.u32 [%r5], %r4;
  add.u32 %r2, %r2, 512;
  bra FILL;
FILLED:
  fence.proxy.async;
  bar.sync 0;
"""
_FROM_GLOBAL = "cvt.u64.u32 %rd2, %r2; add.u64 %rd2, %rd1, %rd2; ld.global.u32 %r4, [%rd2];"
_DUMP = """
  bar.sync 0;
  shl.b32 %r2, %r1, 2;
DUMP:
  setp.ge.u32 %p1, %r2, {bytes};
  @%p1 bra DUMPED;
  add.u32 %r5, %r3, %r2;
  ld.shared.u32 %r4, [%r5];
  cvt.u64.u32 %rd3, %r2; add.u64 %rd3, %rd4, %rd3; st.global.u32 [%rd3], %r4;
  add.u32 %r2, %r2, 512;
  bra DUMP;
DUMPED:
  ret;
}}
"""
_REGS = ("  .reg .pred %p<4>;\n  .reg .b32 %r<40>;\n  .reg .b64 %rd<16>;\n  .reg .b32 %a<8>;\n  .reg .b32 %d<132>;\n"
         "  .reg .b64 %x<32>;\n  .reg .b16 %h<8>;\n  .reg .f32 %f<4>;\n")


def coordinates(rank: int) -> tuple[str, str]:
    loads = "\n".join(f"  ld.param.u32 %r{20 + i}, [c{i}];" for i in range(rank))
    return loads, "{" + ", ".join(f"%r{20 + i}" for i in range(rank)) + "}"


def tma_load_ptx(rank: int) -> str:
    loads, coords = coordinates(rank)
    params = ", ".join(f".param .u32 c{i}" for i in range(5))
    return (HEAD + f".visible .entry k(.param .align 64 .b8 tmap[128], .param .u64 out, {params}, .param .u32 off, "
            ".param .u32 tx)\n{\n" + _REGS + loads + _FILL.format(bytes=IMAGE, get="mov.u32 %r4, 0xEEEEEEEE;") + f"""
  ld.param.u64 %rd4, [out];
  mov.u64 %rd5, tmap;
  mov.u32 %r6, smem;
  setp.ne.u32 %p2, %r1, 0;
  @%p2 bra WAIT;
  mbarrier.init.shared.b64 [%r6], 1;
  fence.mbarrier_init.release.cluster;
  fence.proxy.async;
  ld.param.u32 %r7, [tx];
  mbarrier.arrive.expect_tx.shared.b64 %rd6, [%r6], %r7;
  ld.param.u32 %r8, [off];
  add.u32 %r8, %r8, %r3;
  cvta.param.u64 %rd5, %rd5;
  cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r8], [%rd5, {coords}], [%r6];
WAIT:
  bar.sync 0;
  mov.u32 %r9, 0;
POLL:
  mbarrier.try_wait.parity.shared.b64 %p3, [%r6], 0;
  @%p3 bra DONE;
  add.u32 %r9, %r9, 1;
  setp.lt.u32 %p1, %r9, 1000;
  @%p1 bra POLL;
DONE:
""" + _DUMP.format(bytes=IMAGE))


def tma_store_ptx(rank: int, reduce: str | None) -> str:
    loads, coords = coordinates(rank)
    params = ", ".join(f".param .u32 c{i}" for i in range(5))
    name = f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.{reduce}" if reduce else \
        f"cp.async.bulk.tensor.{rank}d.global.shared::cta"
    return (HEAD + f".visible .entry k(.param .align 64 .b8 tmap[128], .param .u64 image, {params}, .param .u32 off)\n{{\n"
            + _REGS + loads + "  ld.param.u64 %rd1, [image];\n" + _FILL.format(bytes=IMAGE, get=_FROM_GLOBAL) + f"""
  mov.u64 %rd5, tmap;
  setp.ne.u32 %p2, %r1, 0;
  @%p2 bra END;
  cvta.param.u64 %rd5, %rd5;
  ld.param.u32 %r8, [off];
  add.u32 %r8, %r8, %r3;
  {name}.tile.bulk_group [%rd5, {coords}], [%r8];
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
END:
  ret;
}}
""")


def wgmma_ptx(n: int, dtype: str, fmt: str, regs_a: bool, ta: int, tb: int) -> str:
    nd = n // 4 if dtype == "f16" else n // 2
    k = {"tf32": 8, "bf16": 16, "f16": 16}.get(fmt, 32)
    d = ", ".join(f"%d{i}" for i in range(nd))
    a = "{%a0, %a1, %a2, %a3}" if regs_a else "%rd7"
    if fmt in ("s8", "u8"):
        tail = ""
    elif fmt in ("f16", "bf16"):
        tail = f", 1, 1, {tb}" if regs_a else f", 1, 1, {ta}, {tb}"
    else:
        tail = ", 1, 1"
    load_d = "\n".join(f"  ld.global.u32 %d{i}, [%rd9+{512 * i}];" for i in range(nd))
    load_a = "\n".join(f"  ld.global.u32 %a{i}, [%rd10+{512 * i}];" for i in range(4))
    save_d = "\n".join(f"  st.global.u32 [%rd9+{512 * i}], %d{i};" for i in range(nd))
    return (HEAD + ".visible .entry k(.param .u64 image, .param .u64 da, .param .u64 db, .param .u64 dregs, "
            ".param .u64 aregs)\n{\n" + _REGS + "  ld.param.u64 %rd1, [image];\n"
            + _FILL.format(bytes=IMAGE, get=_FROM_GLOBAL) + f"""
  mov.u32 %r6, smem;
  shr.u32 %r6, %r6, 4;
  cvt.u64.u32 %rd6, %r6;
  ld.param.u64 %rd7, [da];
  ld.param.u64 %rd8, [db];
  add.u64 %rd7, %rd7, %rd6;
  add.u64 %rd8, %rd8, %rd6;
  mul.wide.u32 %rd11, %r1, 4;
  ld.param.u64 %rd9, [dregs];
  add.u64 %rd9, %rd9, %rd11;
  ld.param.u64 %rd10, [aregs];
  add.u64 %rd10, %rd10, %rd11;
  setp.eq.u32 %p2, %r1, %r1;
{load_d}
{load_a}
  wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.m64n{n}k{k}.{dtype}.{fmt}.{fmt} {{{d}}}, {a}, %rd8, %p2{tail};
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned 0;
{save_d}
  ret;
}}
""")


def mma_ptx(shape: str, dtype: str, fmt: str, na: int, nb: int, nd: int) -> str:
    wide = fmt == "f64"
    size, reg, kind = (8, "%x", "b64") if wide else (4, "%r", "b32")

    def vec(first, count):
        return "{" + ", ".join(f"{reg}{first + i}" for i in range(count)) + "}"

    first = 0 if wide else 8
    names = [(first, na, "a"), (first + na, nb, "b"), (first + na + nb, nd, "c")]
    code = "\n".join(
        f"  ld.param.u64 %rd1, [{name}];\n  add.u64 %rd1, %rd1, %rd11;\n" + "\n".join(
            f"  ld.global.{kind} {reg}{start + i}, [%rd1+{32 * size * i}];" for i in range(count))
        for start, count, name in names)
    d = first + na + nb + nd
    out = "\n".join(f"  st.global.{kind} [%rd1+{32 * size * i}], {reg}{d + i};" for i in range(nd))
    operands = ", ".join([vec(d, nd), *(vec(start, count) for start, count, _ in names)])
    return (HEAD + ".visible .entry k(.param .u64 a, .param .u64 b, .param .u64 c)\n{\n" + _REGS + f"""
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd11, %r1, {size};
{code}
  mma.sync.aligned.{shape}.row.col.{dtype}.{fmt}.{fmt}.{dtype} {operands};
{out}
  ret;
}}
""")


def ldmatrix_ptx(num: int, trans: bool) -> str:
    regs = "{" + ", ".join(f"%r{10 + i}" for i in range(num)) + "}"
    t = ".trans" if trans else ""
    save = "\n".join(f"  st.global.u32 [%rd5+{128 * i}], %r{10 + i};" for i in range(num))
    return (HEAD + ".visible .entry k(.param .u64 image, .param .u64 addr, .param .u64 regs, .param .u64 out)\n{\n"
            + _REGS + "  ld.param.u64 %rd1, [image];\n"
            + _FILL.format(bytes=8192, get=_FROM_GLOBAL).replace("%r2, 512", "%r2, 128") + f"""
  mul.wide.u32 %rd11, %r1, 4;
  ld.param.u64 %rd5, [addr];
  add.u64 %rd5, %rd5, %rd11;
  ld.global.u32 %r6, [%rd5];
  add.u32 %r6, %r6, %r3;
  ldmatrix.sync.aligned.m8n8.x{num}{t}.shared.b16 {regs}, [%r6];
  ld.param.u64 %rd5, [regs];
  add.u64 %rd5, %rd5, %rd11;
{save}
  bar.sync 0;
  stmatrix.sync.aligned.m8n8.x{num}{"" if trans else ".trans"}.shared.b16 [%r6], {regs};
  ld.param.u64 %rd4, [out];
""" + _DUMP.format(bytes=8192).replace("%r2, 512", "%r2, 128"))


CVT = {  # name -> (instructions from %f0 to %r4, decoder arguments)
    "f16.rn": ("cvt.rn.f16.f32 %h0, %f0; cvt.u32.u16 %r4, %h0;", ("f16", {})),
    "f16.rz": ("cvt.rz.f16.f32 %h0, %f0; cvt.u32.u16 %r4, %h0;", ("f16", {"rounding": "rz"})),
    "bf16.rn": ("cvt.rn.bf16.f32 %h0, %f0; cvt.u32.u16 %r4, %h0;", ("bf16", {})),
    "bf16.rz.relu": ("cvt.rz.relu.bf16.f32 %h0, %f0; cvt.u32.u16 %r4, %h0;",
                     ("bf16", {"rounding": "rz", "relu": True})),
    "f16.rn.relu": ("cvt.rn.relu.f16.f32 %h0, %f0; cvt.u32.u16 %r4, %h0;", ("f16", {"relu": True})),
    "f16.rn.sat": ("cvt.rn.satfinite.f16.f32 %h0, %f0; cvt.u32.u16 %r4, %h0;", ("f16", {"satfinite": True})),
    "tf32.rna": ("cvt.rna.tf32.f32 %r4, %f0;", ("tf32", {"rounding": "rna"})),
    "tf32.rn": ("cvt.rn.tf32.f32 %r4, %f0;", ("tf32", {})),
    "e4m3": ("cvt.rn.satfinite.e4m3x2.f32 %h0, %f1, %f0; cvt.u32.u16 %r4, %h0;", ("e4m3", {"satfinite": True})),
    "e4m3.relu": ("cvt.rn.satfinite.relu.e4m3x2.f32 %h0, %f1, %f0; cvt.u32.u16 %r4, %h0;",
                  ("e4m3", {"satfinite": True, "relu": True})),
    "e5m2": ("cvt.rn.satfinite.e5m2x2.f32 %h0, %f1, %f0; cvt.u32.u16 %r4, %h0;", ("e5m2", {"satfinite": True})),
}


def cvt_ptx(name: str) -> str:
    return (HEAD + ".visible .entry k(.param .u64 x, .param .u64 y)\n{\n" + _REGS + f"""
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, %ctaid.x;
  mad.lo.u32 %r1, %r2, 128, %r1;
  mul.wide.u32 %rd3, %r1, 4;
  ld.param.u64 %rd1, [x];
  add.u64 %rd1, %rd1, %rd3;
  ld.global.f32 %f0, [%rd1];
  mov.f32 %f1, 0f00000000;
  {CVT[name][0]}
  ld.param.u64 %rd2, [y];
  add.u64 %rd2, %rd2, %rd3;
  st.global.u32 [%rd2], %r4;
  ret;
}}
""")


# ------------------------------------------------------------------ driver API

class Gpu:
    """A Hopper device through ctypes; every call's error code is checked."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self.device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(self.device), 0)
        major = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(major), 75, self.device)
        self.major = major.value
        self.open()

    def open(self):
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        self.call("cuCtxSetCurrent", context)
        self.kernels = {}

    def call(self, name, *args):
        code = getattr(self.cuda, name)(*args)
        assert code == 0, f"{name} returned {code}"

    def kernel(self, ptx: str):
        if ptx not in self.kernels:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(ptx.encode()))
            self.call("cuModuleGetFunction", ctypes.byref(function), module, b"k")
            self.kernels[ptx] = function
        return self.kernels[ptx]

    def upload(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array)
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(array.nbytes))
        self.call("cuMemcpyHtoD_v2", pointer, ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes))
        return pointer.value

    def download(self, pointer: int, like: np.ndarray) -> np.ndarray:
        out = np.empty_like(np.ascontiguousarray(like))
        self.call("cuMemcpyDtoH_v2", ctypes.c_void_p(out.ctypes.data), ctypes.c_uint64(pointer),
                  ctypes.c_size_t(out.nbytes))
        self.call("cuMemFree_v2", ctypes.c_uint64(pointer))
        return out

    def launch(self, ptx: str, *args, block: int = 128, grid: int = 1, shared: int = IMAGE + 1024):
        holders = []
        for a in args:
            if isinstance(a, bytes):
                holders.append(ctypes.create_string_buffer(a, len(a)))
            else:
                holders.append(a)
        pointers = (ctypes.c_void_p * len(holders))(*[ctypes.cast(ctypes.byref(h), ctypes.c_void_p) for h in holders])
        self.call("cuLaunchKernel", self.kernel(ptx), grid, 1, 1, block, 1, 1, shared, None, pointers, None)
        self.call("cuCtxSynchronize")

    def encode(self, t: TensorMap) -> bytes:
        """cuTensorMapEncodeTiled."""
        kinds = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32_ftz", "tf32", "tf32_ftz")
        swizzles = ("none", "32B", "64B", "128B")
        raw = (ctypes.c_uint8 * 192)()
        start = (-ctypes.addressof(raw)) % 64
        u64, u32 = ctypes.c_uint64 * 5, ctypes.c_uint32 * 5
        self.call("cuTensorMapEncodeTiled", ctypes.byref(raw, start), kinds.index(t.dtype), t.rank,
                  ctypes.c_void_p(t.address), u64(*t.dims), u64(*t.strides), u32(*t.box), u32(*t.element_strides), 0,
                  swizzles.index(t.swizzle), (0, 64, 128, 256).index(t.l2_promotion), int(t.oob_fill == "nan"))
        return bytes(raw)[start : start + 128]


@pytest.fixture(scope="module")
def gpu():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pytest.skip("no CUDA driver on this machine")
    count = ctypes.c_int()
    cuda = ctypes.CDLL("libcuda.so.1")
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        pytest.skip("no CUDA device")
    g = Gpu()
    if g.major != 9:
        pytest.skip(f"needs a Hopper GPU (compute capability 9.0), this is {g.major}.x")
    return g


pytestmark = pytest.mark.gpu
SIZES = {name: bits // 8 for name, (_, _, bits) in DTYPES.items() if bits >= 8}


def random_map(
    rng, dtype: str, swizzle: str, rank: int, oob: str = "zero", store: bool = False
) -> tuple[np.ndarray, TensorMap, list[int]]:
    """A random buffer, a legal random map on it (address filled in later) and random, often out-of-range coordinates."""
    size = SIZES[dtype]
    span = {"none": 256, "32B": 32, "64B": 64, "128B": 128}[swizzle]
    inner = int(rng.choice([b for b in (16, 32, 64, 128, 256) if b <= span])) // size
    inner = max(inner, 16 // size)
    box, steps, dims = [inner], [1], [int(rng.integers(1, 3 * inner + 2))]
    room = 16384 // (inner * size if swizzle == "none" else span)  # rows stand a swizzle's width apart
    for _ in range(rank - 1):
        b = int(rng.integers(1, min(room, 24 if rank < 4 else 5) + 1))
        room = max(room // b, 1)
        box.append(b)
        steps.append(int(rng.choice([1, 1, 1, 2, 3])))
        dims.append(int(rng.integers(1, 2 * b + 3)))
    strides, total = [], dims[0] * size
    for d in dims[1:]:
        stride = -(-total // 16) * 16 + 16 * int(rng.integers(0, 3))
        strides.append(stride)
        total = stride * d
    coords = [int(rng.integers(0 if store else -b, d + 1)) for b, d in zip(box, dims)]
    coords[0] -= coords[0] % (16 // size)  # elsewhere, and below 0 in a store, the hardware reports an illegal instruction
    data = rng.integers(0, 256, -(-total // 16) * 16, dtype=np.uint8)
    return data, TensorMap(0, dtype, tuple(dims), tuple(strides), tuple(box), tuple(steps), "none", swizzle, oob), coords


def host_memory(data: np.ndarray, base: int):
    def read(addresses, n):
        return data[(np.asarray(addresses) - base)[:, None] + np.arange(n)]

    def write(addresses, values):
        data[(np.asarray(addresses) - base)[:, None] + np.arange(values.shape[1])] = values

    def update(addresses, n, fn):
        write(addresses, fn(read(addresses, n)))

    return read, write, update


def with_address(t: TensorMap, address: int) -> TensorMap:
    return t.replace_field("global_address", address)


CASES = [(dtype, swizzle, rank) for dtype, swizzle, rank in itertools.product(
    ("u8", "bf16", "f32", "u64"), ("none", "32B", "64B", "128B"), (1, 2, 3, 4, 5))]


@pytest.mark.parametrize("dtype,swizzle,rank", CASES)
def test_tensor_map_bits(gpu, dtype, swizzle, rank):
    """encode() equals the driver's bytes in the words the hardware uses, and decode() reads the driver's."""
    for seed in range(6):
        rng = np.random.default_rng([rank, seed])
        _, t, _ = random_map(rng, dtype, swizzle, rank)
        t = with_address(t, int(rng.integers(1, 1 << 40)) * 16)
        t = TensorMap(t.address, dtype, t.dims, t.strides, t.box, t.element_strides, "none", swizzle,
                      "nan" if dtype in ("bf16", "f32") and seed % 2 else "zero", (0, 64, 128, 256)[seed % 4])
        theirs, ours = gpu.encode(t), t.encode()
        a, b = np.frombuffer(theirs, np.uint64)[:8].copy(), np.frombuffer(ours, np.uint64)[:8].copy()
        mask = np.uint64(~(1 << 21) & (2**64 - 1))  # the footprint hint
        a[1] &= mask
        b[1] &= mask
        assert a.tolist() == b.tolist(), (t, [hex(int(x)) for x in a ^ b])
        assert TensorMap.decode(theirs) == t


@pytest.mark.parametrize("dtype,swizzle,rank", CASES)
def test_tma_load(gpu, dtype, swizzle, rank):
    ptx = tma_load_ptx(rank)
    for seed in range(8):
        rng = np.random.default_rng([len(dtype), rank, seed])
        data, t, coords = random_map(rng, dtype, swizzle, rank, "nan" if dtype in ("bf16", "f32") and seed % 2 else "zero")
        pointer, out = gpu.upload(data), gpu.upload(np.zeros(IMAGE, np.uint8))
        t = with_address(t, pointer)
        off = 128 * int(rng.integers(0, 24))
        plan = plan_tile(t, coords, 1024 + off)
        args = [ctypes.c_int32(c) for c in coords + [0] * (5 - rank)]
        gpu.launch(ptx, gpu.encode(t), ctypes.c_uint64(out), *args, ctypes.c_uint32(off), ctypes.c_uint32(plan.tx_bytes))
        got = gpu.download(out, np.zeros(IMAGE, np.uint8))
        gpu.download(pointer, data)
        smem = np.full(228 * 1024, 0xEE, np.uint8)
        plan.load(host_memory(data, pointer)[0], smem)
        assert np.array_equal(got, smem[1024 : 1024 + IMAGE]), (t.explain(), coords, off)


FAULTS = {"load between 16 bytes": ((-1, 0), False), "store between 16 bytes": ((3, 0), True), "store left of 0": ((-8, 0), True),
          "store above 0": ((0, -3), True)}


@pytest.mark.parametrize("name", list(FAULTS))
def test_boxes_that_fault(gpu, name):
    """What plan_tile refuses ends a kernel with CUDA error 715. In a process of its own, since that loses the context."""
    coords, store = FAULTS[name]
    code = f"""
import ctypes, sys
sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r})
import numpy as np, test_datapath_gpu as t
g = t.Gpu()
data, image = g.upload(np.zeros(8192, np.uint8)), g.upload(np.zeros(t.IMAGE, np.uint8))
tmap = t.TensorMap(data, "bf16", (64, 64), (128,), (64, 8), (1, 1))
args = [ctypes.c_int32(c) for c in ({coords[0]}, {coords[1]}, 0, 0, 0)]
ptx, tail = (t.tma_store_ptx(2, None), []) if {store} else (t.tma_load_ptx(2), [ctypes.c_uint32(1024)])
try:
    g.launch(ptx, g.encode(tmap), ctypes.c_uint64(image), *args, ctypes.c_uint32(0), *tail)
except AssertionError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "returned 715" in ran.stdout, ran.stdout + ran.stderr
    with pytest.raises(IllegalOperand, match="coordinates"):
        tmap = TensorMap(1 << 20, "bf16", (64, 64), (128,), (64, 8), (1, 1))
        plan_tile(tmap, coords, 1024, direction="store" if store else "load")


@pytest.mark.parametrize("dtype,swizzle,rank", CASES)
@pytest.mark.parametrize("reduce", [None, "add"])
def test_tma_store_and_reduce(gpu, dtype, swizzle, rank, reduce):
    if reduce and dtype == "u8":
        pytest.skip("no 8-bit reduction")
    ptx = tma_store_ptx(rank, reduce)
    for seed in range(4):
        rng = np.random.default_rng([len(dtype), rank, seed, 7])
        data, t, coords = random_map(rng, dtype, swizzle, rank, store=True)
        image = rng.integers(0, 256, IMAGE, dtype=np.uint8)
        if reduce and dtype in ("bf16", "f32"):  # finite values whose sums round
            for x in (data, image):
                n = x.size // SIZES[dtype]
                values = formats.encode(dtype, rng.standard_normal(n).astype(np.float32))
                x[: n * SIZES[dtype]] = values.view(np.uint8)
        pointer, source = gpu.upload(data), gpu.upload(image)
        t = with_address(t, pointer)
        off = 128 * int(rng.integers(0, 24))
        plan = plan_tile(t, coords, 1024 + off, direction="reduce" if reduce else "store")
        args = [ctypes.c_int32(c) for c in coords + [0] * (5 - rank)]
        gpu.launch(ptx, gpu.encode(t), ctypes.c_uint64(source), *args, ctypes.c_uint32(off))
        got = gpu.download(pointer, data)
        gpu.download(source, image)
        smem = np.zeros(228 * 1024, np.uint8)
        smem[1024 : 1024 + IMAGE] = image
        want = data.copy()
        _, write, update = host_memory(want, pointer)
        if reduce:
            plan.reduce(smem, update, reduce, update)
        else:
            plan.store(smem, write, write)
        assert np.array_equal(got, want), (t.explain(), coords, off)


def typed_image(rng, fmt: str, nbytes: int) -> np.ndarray:
    """Random bytes that are small integers in a format."""
    n = nbytes // formats.STORAGE_BYTES[fmt]
    values = rng.integers(0 if fmt == "u8" else -3, 4, n)
    if fmt in ("s8", "u8"):
        return values.astype(np.int8).view(np.uint8)
    if fmt == "tf32":
        return (values.astype(np.float32).view(np.uint32) | np.uint32(0x1FFF)).view(np.uint8)
    if fmt == "f64":
        return values.astype(np.float64).view(np.uint8)
    return formats.encode(fmt, values.astype(np.float32)).view(np.uint8)


def random_desc(rng, swizzle: str, trans: bool, extent: int, size: int, base: bool) -> int:
    """Any descriptor whose tile stays inside the image, whatever CUTLASS would say of it."""
    for _ in range(1000):
        lbo, sbo = (16 * int(rng.integers(1, 130)) for _ in range(2))
        start = 2048 + 16 * int(rng.integers(0, 400))  # the image is the bytes [2048, 2048 + IMAGE)
        groups = max(extent // 8, 4) + 2
        if start + 2 * 1024 + groups * sbo + (extent * size // 16 + 4) * lbo < 2048 + IMAGE:
            return encode_smem_desc(start, lbo, sbo, swizzle, wgmma=True,
                                    base_offset=int(rng.integers(0, 8)) if base and swizzle != "none" else 0)
    raise AssertionError("no descriptor fits")


WGMMA = [(n, dtype, fmt, regs, ta, tb) for n, dtype, fmt in
         ((64, "f32", "bf16"), (256, "f32", "bf16"), (8, "f32", "f16"), (64, "f16", "f16"), (64, "f32", "tf32"),
          (96, "f32", "e4m3"), (64, "f16", "e5m2"), (64, "s32", "s8"), (32, "s32", "u8"))
         for regs in (False, True) for ta in (0, 1) for tb in (0, 1)
         if (fmt in ("bf16", "f16") or not (ta or tb)) and not (regs and ta)]


@pytest.mark.parametrize("n,dtype,fmt,regs,ta,tb", WGMMA)
@pytest.mark.parametrize("swizzle", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize("base", [False, True])
def test_wgmma(gpu, n, dtype, fmt, regs, ta, tb, swizzle, base):
    ptx = wgmma_ptx(n, dtype, fmt, regs, ta, tb)
    for seed in range(3):
        rng = np.random.default_rng([n, ta, tb, seed])
        size = formats.STORAGE_BYTES[fmt]
        image = typed_image(rng, fmt, IMAGE)
        da = random_desc(rng, swizzle, bool(ta), 64, size, base)
        db = random_desc(rng, swizzle, bool(tb), n, size, base)
        plan = wgmma.plan_wgmma(n, dtype, fmt, fmt, None if regs else da, db, trans_a=bool(ta), trans_b=bool(tb))
        a_regs = typed_image(rng, fmt, 4 * 128 * 4).view(np.uint32).reshape(4, 128)
        d = rng.integers(-8, 9, plan.d_registers * 128 * (2 if dtype == "f16" else 1))
        d = d.astype({"f32": np.float32, "s32": np.int32, "f16": np.float16}[dtype]).view(np.uint32)
        d = d.reshape(plan.d_registers, 128)
        pi, pd, pa = gpu.upload(image), gpu.upload(d), gpu.upload(a_regs)
        # Our descriptors take the dynamic base as byte 1024; the kernel adds the real one, which is 1024-aligned too.
        gpu.launch(ptx, *(ctypes.c_uint64(x) for x in (pi, da - (1024 >> 4), db - (1024 >> 4), pd, pa)))
        got = gpu.download(pd, d)
        gpu.download(pi, image)
        gpu.download(pa, a_regs)
        smem = np.zeros(228 * 1024, np.uint8)
        smem[2048 : 2048 + IMAGE] = image
        want = plan.apply(smem, d, True, a_regs if regs else None)
        assert np.array_equal(got, want), plan.explain()


MMA = [("m16n8k8", "f32", "f16"), ("m16n8k8", "f32", "bf16"), ("m16n8k8", "f32", "tf32"), ("m16n8k4", "f32", "tf32"),
       ("m16n8k16", "f32", "f16"), ("m16n8k16", "f16", "f16"), ("m16n8k16", "f32", "bf16"), ("m16n8k16", "s32", "s8"),
       ("m16n8k32", "s32", "u8"), ("m16n8k32", "f32", "e4m3"), ("m16n8k32", "f32", "e5m2"), ("m8n8k16", "s32", "s8"),
       ("m8n8k4", "f64", "f64"), ("m16n8k4", "f64", "f64"), ("m16n8k8", "f64", "f64"), ("m16n8k16", "f64", "f64")]


@pytest.mark.parametrize("shape,dtype,fmt", MMA)
def test_mma_sync(gpu, shape, dtype, fmt):
    rng = np.random.default_rng(1)
    plan = mma_sync.plan_mma_sync(shape, dtype, fmt, fmt, dtype)
    word = np.uint64 if fmt == "f64" else np.uint32
    width = 8 if fmt == "f64" else 4
    a = typed_image(rng, fmt, plan.a_registers * 32 * width).view(word).reshape(-1, 32)
    b = typed_image(rng, fmt, plan.b_registers * 32 * width).view(word).reshape(-1, 32)
    c = rng.integers(-8, 9, plan.d_registers * 32 * (2 if dtype == "f16" else 1))
    c = c.astype({"f32": np.float32, "s32": np.int32, "f16": np.float16, "f64": np.float64}[dtype]).view(word)
    c = c.reshape(-1, 32)
    pointers = [gpu.upload(x) for x in (a, b, c)]
    gpu.launch(mma_ptx(shape, dtype, fmt, plan.a_registers, plan.b_registers, plan.d_registers),
               *(ctypes.c_uint64(p) for p in pointers), block=32, shared=0)
    assert np.array_equal(gpu.download(pointers[2], c), plan.apply(a, b, c))


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("num", [1, 2, 4])
def test_ldmatrix_stmatrix(gpu, num, trans):
    rng = np.random.default_rng(2)
    image = rng.integers(0, 256, 8192, dtype=np.uint8)
    addr = (rng.permutation(512)[:32] * 16).astype(np.uint32)
    regs = np.zeros((num, 32), np.uint32)
    pi, pa, pr, po = (gpu.upload(x) for x in (image, addr, regs, image))
    gpu.launch(ldmatrix_ptx(num, trans), *(ctypes.c_uint64(p) for p in (pi, pa, pr, po)), block=32, shared=8192 + 1024)
    loaded = mma_sync.ldmatrix(image, addr.astype(np.int64), num, trans)
    assert np.array_equal(gpu.download(pr, regs), loaded)
    after = image.copy()
    mma_sync.stmatrix(after, addr.astype(np.int64), loaded, not trans)
    assert np.array_equal(gpu.download(po, image), after)


@pytest.mark.parametrize("name", list(CVT))
def test_cvt(gpu, name):
    rng = np.random.default_rng(3)
    n = 128 * 4096
    bits = rng.integers(0, 1 << 32, n, dtype=np.uint64).astype(np.uint32)
    near = (rng.integers(90, 150, n, dtype=np.uint64) << 23).astype(np.uint32) | (bits & np.uint32(0x80FFF000))
    bits[::2] = near[::2]  # everyday magnitudes, with ties
    bits[:8] = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 1, 0x7F7FFFFF]
    px, py = gpu.upload(bits), gpu.upload(np.zeros(n, np.uint32))
    gpu.launch(cvt_ptx(name), ctypes.c_uint64(px), ctypes.c_uint64(py), grid=n // 128, shared=0)
    got = gpu.download(py, bits)
    gpu.download(px, bits)
    fmt, kwargs = CVT[name][1]
    want = formats.encode(fmt, bits.view(np.float32), **kwargs).astype(np.uint32)
    if fmt in ("e4m3", "e5m2"):
        got = got & 0xFF
    bad = np.flatnonzero(got != want)
    assert not bad.size, [(hex(bits[i]), hex(got[i]), hex(want[i])) for i in bad[:8]]


def every_source() -> dict[str, str]:
    out = {f"load{r}": tma_load_ptx(r) for r in range(1, 6)}
    out |= {f"store{r}{op}": tma_store_ptx(r, op) for r in range(1, 6) for op in (None, "add")}
    out |= {"wgmma_" + "_".join(map(str, w)): wgmma_ptx(*w) for w in WGMMA}
    for shape, dtype, fmt in MMA:
        p = mma_sync.plan_mma_sync(shape, dtype, fmt, fmt, dtype)
        out[f"mma_{shape}_{dtype}_{fmt}"] = mma_ptx(shape, dtype, fmt, p.a_registers, p.b_registers, p.d_registers)
    out |= {f"ldmatrix{n}{t}": ldmatrix_ptx(n, t) for n in (1, 2, 4) for t in (False, True)}
    return out | {f"cvt_{name}": cvt_ptx(name) for name in CVT}


if __name__ == "__main__":
    for key, text in every_source().items():
        with open(os.path.join(sys.argv[1], f"{key}.ptx"), "w") as f:
            f.write(text)
