"""wgmma, mma.sync and matrix moves against CuTe's thread-value layouts and the formulas printed in the ISA.

Operands are small integers, exact in every format, so results must be equal and any misplaced element shows.
"""

import zlib

import datapath_cute
import numpy as np
import pytest
from datapath_cute import ATOMS, Tile, offsets, parse, raw_bits

from cute_kernels.emulator.datapath import IllegalOperand, formats, mma_sync, wgmma

SMEM = 228 * 1024


@pytest.fixture(scope="module")
def facts():
    return datapath_cute.cute_facts("sm90")


def tv(text: str, threads: int, values: int) -> np.ndarray:
    """int64[threads, values]: index of a TV layout."""
    _, shape, stride = parse(text)
    return offsets(shape[0], stride[0], threads)[:, None] + offsets(shape[1], stride[1], values)[None, :]


# ------------------------------------------------------------------ wgmma

@pytest.mark.parametrize("n", [8, 64, 96, 256])
def test_wgmma_fragments_are_cutes(facts, n):
    for fmt, size in (("bf16", 2), ("e4m3", 1)):
        row, col = wgmma.a_fragment(size)
        assert np.array_equal(row + 64 * col, tv(facts["wgmma", "A", fmt, n], 128, row.shape[1]))
        row, col = wgmma.d_fragment(n)
        assert np.array_equal(row + 64 * col, tv(facts["wgmma", "C", fmt, n], 128, row.shape[1]))
    matrix = np.arange(64 * n).reshape(64, n)
    regs = wgmma.registers_from_matrix(matrix)
    assert np.array_equal(regs.T, matrix[row, col])
    assert np.array_equal(wgmma.matrix_from_registers(regs), matrix)


def wgmma_case(facts, fmt, name_a, name_b, n, dtype="f32", accumulate_from=None, **kwargs):
    rng = np.random.default_rng(zlib.crc32(repr((fmt, name_a, name_b, n)).encode()))
    b = Tile(facts, rng, fmt, name_b, n)
    smem = np.full(SMEM, 0x5A, np.uint8)
    b.write(smem, 65536 + 3072)
    k = 32 // formats.STORAGE_BYTES[fmt]
    if name_a is None:
        a_values = rng.integers(0 if fmt == "u8" else -3, 4, (64, b.values.shape[1])).astype(np.float64)
    else:
        a = Tile(facts, rng, fmt, name_a, 64)
        a.write(smem, 2048)
        a_values = a.values
    per = 2 if dtype == "f16" else 1
    d = np.zeros((n // 2 // per, 128), np.uint32)
    for k0 in range(0, a_values.shape[1], k):
        regs = None
        if name_a is None:
            index = tv(facts["wgmma", "A", "bf16" if k == 16 else "e4m3", 64], 128, k // 2)
            elements = a_values[:, k0 : k0 + k][index % 64, index // 64]
            regs = np.ascontiguousarray(raw_bits(fmt, elements).reshape(128, -1)).view(np.uint32).T.copy()
        plan = wgmma.plan_wgmma(n, dtype, fmt, fmt, None if name_a is None else a.desc(2048, k0, wgmma=True),
                                b.desc(65536 + 3072, k0, wgmma=True), trans_a=bool(name_a) and name_a[0] == "M",
                                trans_b=name_b[0] == "M", **kwargs)
        d = plan.apply(smem, d, k0 > 0, regs)
        assert d.shape[0] == plan.d_registers and not plan.lints
    index = tv(facts["wgmma", "C", "bf16", n], 128, n // 2) if ("wgmma", "C", "bf16", n) in facts else None
    row, col = (index % 64, index // 64) if index is not None else wgmma.d_fragment(n)
    want = (a_values @ b.values.T)[row, col] * kwargs.get("scale_a", 1) * kwargs.get("scale_b", 1)
    words = np.ascontiguousarray(d.T)
    got = words.view(np.int32) if dtype == "s32" else words.view(np.float16 if dtype == "f16" else np.float32)
    assert np.array_equal(got, want)
    return plan


NAMES = [a for a in ATOMS if a != "MN_SW128_32B"]


@pytest.mark.parametrize("name_a", [None, *NAMES])
@pytest.mark.parametrize("name_b", NAMES)
def test_wgmma_every_layout(facts, name_a, name_b):
    wgmma_case(facts, "bf16", name_a, name_b, 128)


@pytest.mark.parametrize("fmt,dtype", [("f16", "f32"), ("f16", "f16"), ("e4m3", "f32"), ("e5m2", "f16"),
                                       ("s8", "s32"), ("u8", "s32"), ("tf32", "f32")])
@pytest.mark.parametrize("name", ["K_SW128", "K_SW32", "K_INTER"])
def test_wgmma_types(facts, fmt, dtype, name):
    wgmma_case(facts, fmt, name, name, 64, dtype)
    if fmt != "tf32":
        wgmma_case(facts, fmt, None, name, 96, dtype)


def test_wgmma_shapes_and_signs(facts):
    for n in (8, 16, 24, 64, 200, 256):
        plan = wgmma_case(facts, "bf16", "K_SW128", "K_SW64", n)
        assert plan.flops == 2 * 64 * n * 16 and plan.smem_reads[1].sum() == 32 * (64 + n)
    wgmma_case(facts, "bf16", "K_SW128", "MN_SW32", 16)
    wgmma_case(facts, "bf16", "K_SW128", "K_SW64", 64, scale_a=-1)
    wgmma_case(facts, "bf16", None, "K_SW64", 64, scale_a=-1, scale_b=-1)


def test_wgmma_tf32_registers():
    """No DSL layout for tf32 A in registers: PTX figure for m64nNk8, a0..a3 as in mma.m16n8k8."""
    row, col = wgmma.a_fragment(4)
    for t, i in np.ndindex(128, 4):
        g, q = t % 32 // 4, t % 4
        assert (row[t, i], col[t, i]) == (16 * (t // 32) + g + (8 if i in (1, 3) else 0), q + (4 if i >= 2 else 0))


def test_wgmma_illegal():
    d = wgmma.decode_wgmma_desc(1 << 62)
    assert d.swizzle == "128B" and "swizzle=128B" in d.explain()
    for args, kwargs, match in [
        ((12, "f32", "bf16", "bf16", 0, 0), {}, "N"), ((40, "s32", "s8", "s8", 0, 0), {}, "N"),
        ((64, "f16", "bf16", "bf16", 0, 0), {}, "dtype"), ((64, "f32", "bf16", "f16", 0, 0), {}, "btype"),
        ((64, "f32", "e4m3", "e4m3", 0, 0), dict(trans_b=True), "imm-trans-b"),
        ((64, "f32", "bf16", "bf16", None, 0), dict(trans_a=True), "registers"),
        ((64, "s32", "s8", "s8", 0, 0), dict(scale_a=-1), "imm-scale-a"),
        ((64, "f32", "bf16", "bf16", 0x3FF0, 0), {}, "past the end"),
    ]:
        with pytest.raises(IllegalOperand, match=match):
            wgmma.plan_wgmma(*args, **kwargs)


# ------------------------------------------------------------------ mma.sync

def isa_index(operand: str, shape: str, fmt: str, t: int, i: int) -> tuple[int, int]:
    """(row, column) by the case lists printed in PTX ISA 9.7.14.5, one branch per printed formula."""
    g, q = t >> 2, t % 4
    eight = fmt in ("s8", "u8", "e4m3", "e5m2")
    if operand == "C":
        return (g if i < 2 else g + 8), q * 2 + (i & 1)
    if shape == "m8n8k4":
        return (g, q) if operand == "A" else (q, g)
    if shape == "m8n8k16":
        return (g, q * 4 + (i & 3)) if operand == "A" else (q * 4 + (i & 3), g)
    if shape == "m16n8k4":
        return (g if i == 0 else g + 8, q) if operand == "A" else (q, g)
    if shape == "m16n8k8" and fmt in ("f16", "bf16"):
        return (g if i < 2 else g + 8, q * 2 + (i & 1)) if operand == "A" else (q * 2 + i, g)
    if shape == "m16n8k8":  # tf32, f64
        return (g if i in (0, 2) else g + 8, q if i < 2 else q + 4) if operand == "A" else (q if i == 0 else q + 4, g)
    if shape == "m16n8k16" and eight:
        return (g if i < 4 else g + 8, q * 4 + (i & 3)) if operand == "A" else (q * 4 + (i & 3), g)
    if shape == "m16n8k16" and fmt == "f64":
        if operand == "B":
            return q + i * 4, g
        return (g, i * 2 + q) if i % 2 == 0 else (g + 8, i * 2 - 2 + q)
    if shape == "m16n8k16":
        if operand == "B":
            return q * 2 + (i & 1) + (0 if i < 2 else 8), g
        return (g if i < 2 or 4 <= i < 6 else g + 8), q * 2 + (i & 1) + (0 if i < 4 else 8)
    assert shape == "m16n8k32" and eight
    if operand == "B":
        return q * 4 + (i & 3) + (0 if i < 4 else 16), g
    return (g if i < 4 or 8 <= i < 12 else g + 8), q * 4 + (i & 3) + (0 if i < 8 else 16)


COMBOS = [(shape, fmt, dtype) for shape, fmts in {
    "m16n8k8": ("f16", "bf16", "tf32", "f64"), "m16n8k16": ("f16", "bf16", "s8", "u8", "e4m3", "e5m2", "f64"),
    "m16n8k32": ("s8", "u8", "e4m3", "e5m2"), "m16n8k4": ("tf32", "f64"), "m8n8k4": ("f64",), "m8n8k16": ("s8", "u8"),
}.items() for fmt in fmts for dtype in {"f16": ("f16", "f32"), "e4m3": ("f16", "f32"), "e5m2": ("f32",),
                                        "f64": ("f64",), "s8": ("s32",), "u8": ("s32",)}.get(fmt, ("f32",))]


@pytest.mark.parametrize("shape,fmt,dtype", COMBOS)
def test_mma_sync(shape, fmt, dtype):
    rng = np.random.default_rng(5)
    plan = mma_sync.plan_mma_sync(shape, dtype, fmt, fmt, dtype)
    m, n, k = plan.m, plan.n, plan.k
    low = 0 if fmt == "u8" else -3
    a, b = rng.integers(low, 4, (m, k)).astype(float), rng.integers(low, 4, (k, n)).astype(float)
    c = rng.integers(-8, 9, (m, n)).astype(float)

    def pack(matrix, operand, f):
        count = matrix.size // 32
        elements = np.array([[matrix[isa_index(operand, shape, fmt, t, i)] for i in range(count)] for t in range(32)])
        if f == "f64":
            return elements.view(np.uint64).T.copy()
        if f in ("f32", "s32"):
            return elements.astype(np.float32 if f == "f32" else np.int32).view(np.uint32).T.copy()
        return np.ascontiguousarray(raw_bits(f, elements)).reshape(32, -1).view(np.uint32).T.copy()

    ra, rb, rc = pack(a, "A", fmt), pack(b, "B", fmt), pack(c, "C", dtype)
    assert (len(ra), len(rb), len(rc)) == (plan.a_registers, plan.b_registers, plan.d_registers)
    assert np.array_equal(plan.apply(ra, rb, rc), pack(a @ b + c, "C", dtype))


def test_mma_fragments_are_cutes(facts):
    for k in (8, 16):
        for operand, rows in (("A", 16), ("C", 16)):
            row, col = mma_sync.fragment(operand, f"m16n8k{k}", 2)
            assert np.array_equal(row + rows * col, tv(facts["mma", operand, k], 32, row.shape[1]))
        row, col = mma_sync.fragment("B", f"m16n8k{k}", 2)
        assert np.array_equal(col + 8 * row, tv(facts["mma", "B", k], 32, row.shape[1]))


def test_mma_sync_illegal_and_saturate():
    for args in [("m16n8k64", "s32", "s8", "s8", "s32"), ("m16n8k16", "f16", "bf16", "bf16", "f16"),
                 ("m16n8k16", "f32", "f16", "bf16", "f32"), ("m16n8k16", "f32", "f16", "f16", "f16")]:
        with pytest.raises(IllegalOperand):
            mma_sync.plan_mma_sync(*args)
    plan = mma_sync.plan_mma_sync("m8n8k16", "s32", "u8", "u8", "s32", satfinite=True)
    ones = np.full((1, 32), 0xFFFFFFFF, np.uint32)
    got = plan.apply(ones, ones, np.full((2, 32), 2**31 - 5, np.uint32))
    assert np.all(got == 2**31 - 1)


# ------------------------------------------------------------------ ldmatrix, stmatrix, movmatrix

@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("num", [1, 2, 4])
def test_ldmatrix_is_cutes(facts, trans, num):
    """The DSL: which source element (thread = row address, value = element in the row) each destination gets."""
    rng = np.random.default_rng(num)
    smem = rng.integers(0, 256, 8192).astype(np.uint8)
    addresses = rng.permutation(512)[:32] * 16
    got = mma_sync.ldmatrix(smem, addresses, num, trans)
    source, target = facts["ldmatrix", trans, num]
    # index -> element: rows named by threads 0..8*num-1, eight 16-bit elements each
    src = tv(source, 8 * num, 8).ravel()
    elements = smem[addresses[: 8 * num, None] + np.arange(16)].view(np.uint16).ravel()
    by_index = np.zeros(src.max() + 1, np.uint16)
    by_index[src] = elements
    want = by_index[tv(target, 32, 2 * num)]  # [thread, element]
    assert np.array_equal(np.ascontiguousarray(got.T).view(np.uint16), want)
    back = np.zeros_like(smem)
    mma_sync.stmatrix(back, addresses, got, trans)
    rows = addresses[: 8 * num, None] + np.arange(16)
    assert np.array_equal(back[rows], smem[rows])
    assert np.count_nonzero(back) <= 128 * num


def test_movmatrix_and_illegal():
    matrix = np.arange(64, dtype=np.uint16).reshape(8, 8)
    fragment = matrix.reshape(32, 2).view(np.uint32)[:, 0].copy()  # thread t: row t/4, columns 2*(t%4), +1
    assert np.array_equal(mma_sync.movmatrix(fragment).view(np.uint16).reshape(8, 8), matrix.T)
    with pytest.raises(IllegalOperand, match="16-byte"):
        mma_sync.ldmatrix(np.zeros(1024, np.uint8), np.full(32, 8), 1)
    with pytest.raises(IllegalOperand, match="only m8n8"):
        mma_sync.ldmatrix(np.zeros(1024, np.uint8), np.zeros(32, int), 1, shape="m16n16", dtype="b8")
    with pytest.raises(IllegalOperand, match="x1, x2"):
        mma_sync.ldmatrix(np.zeros(1024, np.uint8), np.zeros(32, int), 3)
