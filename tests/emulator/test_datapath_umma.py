"""tcgen05.mma, ld/st, cp and shift against CuTe's own layouts.

The truth here is not this package's index arithmetic: operand tiles are written to shared memory through the swizzled
layouts that CuTe DSL reports for its layout atoms, descriptors are built from those layouts' strides as CUTLASS's
make_umma_desc documents, and results are looked for at the tensor-memory addresses that CuTe's MMA fragments name.
Operands are small integers, so that every format and any summation order gives the exact product.
"""

import zlib

import datapath_cute
import numpy as np
import pytest
from datapath_cute import ATOMS, Tile, cute_swizzle, offsets, parse, raw_bits

from cute_kernels.emulator.datapath import IllegalOperand, formats, tmem, umma

SMEM = 228 * 1024
SENTINEL = 0xDEADBEEF


@pytest.fixture(scope="module")
def cute_facts():
    return datapath_cute.cute_facts("tcgen05")


def expected_cells(facts, cg, m, n, column, lane=0):
    """(lane [rows, n], column [rows, n]) of one CTA's accumulator, from CuTe's fragment layout."""
    _, shape, stride = parse(facts["C", cg, m, n])
    local = m // cg
    address = offsets(shape[0][0], stride[0][0], local)[:, None] + offsets(shape[0][1], stride[0][1], n)[None, :]
    return (address >> 16) + lane, (address & 0xFFFF) + column


KINDS = {"bf16": "f16", "f16": "f16", "tf32": "tf32", "e4m3": "f8f6f4", "e5m2": "f8f6f4", "s8": "i8", "u8": "i8"}


def run_ss(facts, fmt_a, fmt_b, name_a, name_b, cg, m, n, *, lane=0, dtype=None, order=(0, 1)):
    rng = np.random.default_rng(zlib.crc32(repr((fmt_a, name_a, name_b, cg, m, n)).encode()))
    kind = KINDS[fmt_a]
    dtype = dtype or ("s32" if kind == "i8" else "f32")
    tiles_a = [Tile(facts, rng, fmt_a, name_a, m // cg, order) for _ in range(cg)]
    tiles_b = [Tile(facts, rng, fmt_b, name_b, n // cg) for _ in range(cg)]
    smems = [np.full(SMEM, 0x5A, np.uint8) for _ in range(cg)]
    start_a, start_b = 2048, 65536 + 3072
    for smem, ta, tb in zip(smems, tiles_a, tiles_b):
        ta.write(smem, start_a)
        tb.write(smem, start_b)
    tmems = [np.full((128, 512), SENTINEL, np.uint32) for _ in range(cg)]
    column = 512 - n if cg == 1 or m == 256 else 100
    idesc = umma.encode_idesc(kind, m, n, atype=fmt_a, btype=fmt_b, dtype=dtype,
                              a_major=name_a.split("_")[0], b_major=name_b.split("_")[0])
    k = umma.decode_idesc(kind, idesc).k
    total_k = tiles_a[0].values.shape[1]
    for k0 in range(0, total_k, k):
        plan = umma.plan_mma(kind, cg, idesc, tiles_a[0].desc(start_a, k0), tiles_b[0].desc(start_b, k0),
                             lane << 16 | column)
        assert not plan.lints, (name_a, name_b, plan.lints)
        plan.apply(smems, tmems, accumulate=k0 > 0)
    b = np.concatenate([t.values for t in tiles_b])
    for cta, (ta, got) in enumerate(zip(tiles_a, tmems)):
        want = ta.values @ b.T
        lanes, columns = expected_cells(facts, cg, m, n, column, lane)
        cells = got[lanes, columns]
        if dtype == "s32":
            assert np.array_equal(cells.view(np.int32), want)
        elif dtype == "f16":
            assert np.array_equal((cells & 0xFFFF).astype(np.uint16).view(np.float16), want.astype(np.float16))
            assert not (cells >> 16).any()
        else:
            assert np.array_equal(cells.view(np.float32), want), (cta, fmt_a, name_a, name_b)
        touched = np.zeros((128, 512), bool)
        touched[lanes, columns] = True
        assert np.all(got[~touched] == SENTINEL)
        written = np.zeros((128, 512), bool)
        for peer, l0, nl, c0, nc in plan.tmem_writes:
            if peer == cta:
                written[l0 : l0 + nl, c0 : c0 + nc] = True
        assert np.array_equal(written, touched)
    return plan


MAJORS_16BIT = [a for a in ATOMS if a != "MN_SW128_32B"]


@pytest.mark.parametrize("name_a", MAJORS_16BIT)
@pytest.mark.parametrize("name_b", MAJORS_16BIT)
def test_every_swizzle_and_major_bf16(cute_facts, name_a, name_b):
    run_ss(cute_facts, "bf16", "bf16", name_a, name_b, 1, 128, 128)


@pytest.mark.parametrize("fmt", ["f16", "e4m3", "e5m2", "s8", "u8"])
@pytest.mark.parametrize("name", MAJORS_16BIT)
def test_every_swizzle_other_types(cute_facts, fmt, name):
    run_ss(cute_facts, fmt, fmt, name, name, 1, 128, 64)


@pytest.mark.parametrize("name", ["K_INTER", "K_SW32", "K_SW64", "K_SW128", "MN_SW128_32B"])
def test_tf32(cute_facts, name):
    run_ss(cute_facts, "tf32", "tf32", name, name, 1, 128, 64)
    run_ss(cute_facts, "tf32", "tf32", name, "K_SW128", 2, 256, 64)


@pytest.mark.parametrize("cg,m,n", [
    (1, 64, 32), (1, 64, 256), (1, 128, 32), (1, 128, 256), (2, 128, 32), (2, 128, 128), (2, 128, 256), (2, 256, 32),
    (2, 256, 256),
])
@pytest.mark.parametrize("name_b", ["K_SW128", "MN_SW64", "MN_SW32"])
def test_shapes_and_pairs(cute_facts, cg, m, n, name_b):
    for lane in (0, 16) if m == 64 else (0,):
        run_ss(cute_facts, "bf16", "bf16", "K_SW128", name_b, cg, m, n, lane=lane)


def test_tile_order_row_major_and_mixed_types(cute_facts):
    run_ss(cute_facts, "bf16", "bf16", "MN_SW64", "K_SW64", 1, 128, 128, order=(1, 0))
    run_ss(cute_facts, "bf16", "bf16", "K_SW32", "K_SW64", 1, 128, 128, order=(1, 0))
    run_ss(cute_facts, "e4m3", "e5m2", "K_SW128", "K_SW128", 1, 128, 128)
    run_ss(cute_facts, "f16", "f16", "K_SW128", "MN_SW128", 1, 128, 128, dtype="f16")
    run_ss(cute_facts, "s8", "u8", "K_SW128", "K_SW64", 2, 256, 256)


@pytest.mark.parametrize("n", [8, 16, 24])
def test_narrow_n(cute_facts, n):
    """N below the swizzle atom's width, MN-major included (N = 16 with SW32 is one atom wide)."""
    rng = np.random.default_rng(n)
    a = Tile(cute_facts, rng, "bf16", "K_SW128", 64)
    for name in ("K_SW128", "K_INTER", "MN_INTER", *(("MN_SW32",) if n == 16 else ())):
        b = Tile(cute_facts, rng, "bf16", name, n)
        smem, tm = np.zeros(SMEM, np.uint8), np.zeros((128, 512), np.uint32)
        a.write(smem, 1024)
        b.write(smem, 32768)
        idesc = umma.encode_idesc("f16", 64, n, atype="bf16", b_major=name.split("_")[0])
        for k0 in range(0, 64, 16):
            umma.plan_mma("f16", 1, idesc, a.desc(1024, k0), b.desc(32768, k0), 7).apply([smem], [tm], k0 > 0)
        rows = np.arange(64)
        got = tm[32 * (rows // 16) + rows % 16, 7 : 7 + n].view(np.float32)
        assert np.array_equal(got, a.values @ b.values.T)


# CUTLASS's weight-stationary fragments (mma_traits_sm100_frag.hpp, tmem_frg_ws), lanes in units of 1, columns of 128.
WS_LAYOUT = {32: lambda n: ((32, (n // 4, 4)), (1, (128, 32))), 64: lambda n: ((64, (n // 2, 2)), (1, (128, 64))),
             128: lambda n: ((128, n), (1, 128))}


@pytest.mark.parametrize("m", [32, 64, 128])
@pytest.mark.parametrize("n", [64, 128, 256])
@pytest.mark.parametrize("name_b", ["K_SW128", "MN_SW128"])
def test_weight_stationary(cute_facts, m, n, name_b):
    rng = np.random.default_rng(m * n)
    a = Tile(cute_facts, rng, "bf16", "K_SW64", m)
    b = Tile(cute_facts, rng, "bf16", name_b, n)
    smem, tm = np.zeros(SMEM, np.uint8), np.full((128, 512), SENTINEL, np.uint32)
    a.write(smem, 1024)
    b.write(smem, 65536)
    idesc = umma.encode_idesc("f16", m, n, atype="bf16", b_major=name_b.split("_")[0])
    for k0 in range(0, 64, 16):
        umma.plan_mma("f16", 1, idesc, a.desc(1024, k0), b.desc(65536, k0), 32, ws=True).apply([smem], [tm], k0 > 0)
    shape, stride = WS_LAYOUT[m](n)
    address = offsets(shape[0], stride[0], m)[:, None] + offsets(shape[1], stride[1], n)[None, :]
    got = tm[address % 128, address // 128 + 32].view(np.float32)
    assert np.array_equal(got, a.values @ b.values.T)
    assert np.count_nonzero(tm != SENTINEL) == m * n


def put_a_in_tmem(facts, tm, cg, m, values, column, fmt, lane=0):
    """A's rows through CuTe's TMEM fragment (stated for 16-bit elements; 8-bit ones pack four to a column)."""
    _, shape, stride = parse(facts["A", cg, m])
    size = formats.STORAGE_BYTES[fmt]
    rows = values.shape[0]
    lanes = (offsets(shape[0][0], stride[0][0], rows) >> 17) + lane
    raw = raw_bits(fmt, values)
    words = raw.reshape(rows, -1).copy().view(np.uint32)
    assert words.shape[1] == values.shape[1] * size // 4
    tm[lanes[:, None], column + np.arange(words.shape[1])[None, :]] = words


@pytest.mark.parametrize("fmt", ["bf16", "f16", "e4m3", "tf32", "s8"])
@pytest.mark.parametrize("cg,m", [(1, 64), (1, 128), (2, 128), (2, 256)])
def test_a_in_tensor_memory(cute_facts, fmt, cg, m):
    rng = np.random.default_rng(m + cg)
    kind, n = KINDS[fmt], 128
    k = umma.decode_idesc(kind, umma.encode_idesc(kind, m, n, atype=fmt)).k
    local = m // cg
    a = [rng.integers(-3, 4, (local, 2 * k)).astype(np.float64) for _ in range(cg)]
    b = [Tile(cute_facts, rng, fmt, "K_SW128", n // cg) for _ in range(cg)]
    smems, tmems = [], []
    for cta in range(cg):
        smem, tm = np.zeros(SMEM, np.uint8), np.zeros((128, 512), np.uint32)
        b[cta].write(smem, 4096)
        rows = a[cta]
        if cg == 2 and m == 128:  # CuTe's fragment has 128 rows: the 64 rows, duplicated
            assert parse(cute_facts["A", 2, 128])[1][0][0] == 128
            rows = np.concatenate([rows, rows])
        put_a_in_tmem(cute_facts, tm, cg, m, rows, 300, fmt)
        smems.append(smem)
        tmems.append(tm)
    idesc = umma.encode_idesc(kind, m, n, atype=fmt)
    for step in range(2):
        plan = umma.plan_mma(kind, cg, idesc, 300 + 8 * step, b[0].desc(4096, step * k), 0)
        plan.apply(smems, tmems, step > 0)
        assert {r[3:] for r in plan.tmem_reads} == {(300 + 8 * step, 8)}
    full_b = np.concatenate([t.values[:, : 2 * k] for t in b])
    for cta in range(cg):
        lanes, columns = expected_cells(cute_facts, cg, m, n, 0)
        cells = tmems[cta][lanes, columns]
        got = cells.view(np.int32) if kind == "i8" else cells.view(np.float32)
        assert np.array_equal(got, a[cta] @ full_b.T)


@pytest.mark.parametrize("ws", [True, False])
def test_two_gemms_in_one(cute_facts, ws):
    """Different A rows in lanes 0-63 and 64-127 meet N's two halves: .ws M=64, and cta_group::2 M=128."""
    rng = np.random.default_rng(3)
    cg, m, n = (1, 64, 128) if ws else (2, 128, 128)
    a = [rng.integers(-3, 4, (128, 16)).astype(np.float64) for _ in range(cg)]
    b = [Tile(cute_facts, rng, "bf16", "K_SW128", n // cg) for _ in range(cg)]
    smems, tmems = [np.zeros(SMEM, np.uint8) for _ in range(cg)], [np.zeros((128, 512), np.uint32) for _ in range(cg)]
    for cta in range(cg):
        b[cta].write(smems[cta], 1024)
        tmems[cta][:, 200:208] = raw_bits("bf16", a[cta]).reshape(128, -1).copy().view(np.uint32)
    idesc = umma.encode_idesc("f16", m, n, atype="bf16")
    umma.plan_mma("f16", cg, idesc, 200, b[0].desc(1024, 0), 0, ws=ws).apply(smems, tmems, False)
    full_b = np.concatenate([t.values[:, :16] for t in b])
    for cta in range(cg):
        d = tmems[cta][:, : n // 2].view(np.float32)
        assert np.array_equal(d[:64], a[cta][:64] @ full_b[: n // 2].T)
        assert np.array_equal(d[64:], a[cta][64:] @ full_b[n // 2 :].T)


def test_negate_scale_disable_saturate(cute_facts):
    rng = np.random.default_rng(11)
    a, b = Tile(cute_facts, rng, "bf16", "K_SW128", 128), Tile(cute_facts, rng, "bf16", "K_SW128", 64)
    smem = np.zeros(SMEM, np.uint8)
    a.write(smem, 1024)
    b.write(smem, 65536)
    ab = a.values[:, :16] @ b.values[:, :16].T
    start = rng.integers(-8, 9, (128, 64)).astype(np.float32)

    def run(idesc, kind="f16", **kwargs):
        tm = np.zeros((128, 512), np.uint32)
        tm[:, :64] = start.view(np.uint32)
        plan = umma.plan_mma(kind, 1, idesc, a.desc(1024, 0), b.desc(65536, 0), 0, **kwargs)
        plan.apply([smem], [tm], True)
        return tm[:, :64].view(np.float32), plan

    def desc(**kwargs):
        return umma.encode_idesc("f16", 128, 64, atype="bf16", **kwargs)

    assert np.array_equal(run(desc(negate_a=True))[0], start - ab)
    assert np.array_equal(run(desc(negate_a=True, negate_b=True))[0], start + ab)
    assert np.array_equal(run(desc(), scale_input_d=3)[0], start / 8 + ab)
    mask = (1 << 5) | (1 << 127)
    got, plan = run(desc(), disable_lanes=mask)
    want = start + ab
    want[[5, 127]] = start[[5, 127]]
    assert np.array_equal(got, want)
    assert [(w[1], w[2]) for w in plan.tmem_writes] == [(0, 5), (6, 121)]

    ints = Tile(cute_facts, rng, "s8", "K_SW128", 128)
    ints.values[:] = 3
    ints.write(smem, 1024)
    ints.write(smem, 65536)
    for saturate, want in ((True, 2**31 - 1), (False, -(2**31) + 31)):
        tm = np.full((128, 512), 2**31 - 257, np.uint32)
        i = umma.encode_idesc("i8", 128, 64, atype="s8", saturate=saturate)
        umma.plan_mma("i8", 1, i, ints.desc(1024, 0), ints.desc(65536, 0), 0).apply([smem], [tm], True)
        assert tm[3, 3].view(np.int32) == want


@pytest.mark.parametrize("cg,m", [(1, 128), (2, 256)])
def test_ashift(cute_facts, cg, m):
    """The product of A as it is; then row r holds row r+1 within 32 lanes, the last row stays (observed on a B200)."""
    rng = np.random.default_rng(8)
    b = [Tile(cute_facts, rng, "bf16", "K_SW128", 64 // cg) for _ in range(cg)]
    a = [rng.integers(-3, 4, (128, 16)).astype(np.float64) for _ in range(cg)]
    smems, tmems = [np.zeros(SMEM, np.uint8) for _ in range(cg)], [np.zeros((128, 512), np.uint32) for _ in range(cg)]
    for cta in range(cg):
        b[cta].write(smems[cta], 1024)
        tmems[cta][:, 200:208] = raw_bits("bf16", a[cta]).reshape(128, -1).copy().view(np.uint32)
    idesc = umma.encode_idesc("f16", m, 64, atype="bf16")
    plan = umma.plan_mma("f16", cg, idesc, 200, b[0].desc(1024, 0), 0, ashift=True)
    plan.apply(smems, tmems, False)
    full_b = np.concatenate([t.values[:, :16] for t in b])
    for cta in range(cg):
        assert np.array_equal(tmems[cta][:, :64].view(np.float32), a[cta] @ full_b.T)
        shifted = a[cta].copy()
        shifted[:-1] = a[cta][1:]
        shifted[31::32] = a[cta][31::32]
        words = raw_bits("bf16", shifted).reshape(128, -1).copy().view(np.uint32)
        assert np.array_equal(tmems[cta][:, 200:208], words)
    assert (cg - 1, 96, 31, 200, 8) in plan.tmem_writes
    for kwargs in (dict(a=umma.encode_smem_desc(1024, 16, 1024, "128B")), dict(idesc=umma.encode_idesc("f16", 64, 64))):
        with pytest.raises(IllegalOperand, match="ashift"):
            umma.plan_mma("f16", 1, kwargs.get("idesc", umma.encode_idesc("f16", 128, 64)), kwargs.get("a", 200),
                          b[0].desc(1024, 0), 0, ashift=True)


def test_random_values_accuracy(cute_facts):
    rng = np.random.default_rng(1)
    for fmt in ("bf16", "f16", "e4m3", "tf32"):
        kind = KINDS[fmt]
        a, b = Tile(cute_facts, rng, fmt, "K_SW128", 128), Tile(cute_facts, rng, fmt, "K_SW128", 256)
        for t in (a, b):
            raw = formats.encode(fmt, rng.standard_normal(t.values.shape).astype(np.float32))
            t.values = formats.decode(fmt, raw).astype(np.float64)
        smem, tm = np.zeros(SMEM, np.uint8), np.zeros((128, 512), np.uint32)
        a.write(smem, 1024)
        b.write(smem, 65536)
        i = umma.encode_idesc(kind, 128, 256, atype=fmt)
        k = umma.decode_idesc(kind, i).k
        for k0 in range(0, a.values.shape[1], k):
            umma.plan_mma(kind, 1, i, a.desc(1024, k0), b.desc(65536, k0), 0).apply([smem], [tm], k0 > 0)
        want = a.values @ b.values.T
        bound = np.abs(a.values) @ np.abs(b.values).T * 2.0**-22
        assert np.all(np.abs(tm[:, :256].view(np.float32) - want) <= bound)


def test_smem_reads_cover_exactly_the_tile(cute_facts):
    rng = np.random.default_rng(2)
    a, b = Tile(cute_facts, rng, "bf16", "K_SW128", 128), Tile(cute_facts, rng, "bf16", "MN_SW64", 64)
    i = umma.encode_idesc("f16", 128, 64, atype="bf16", b_major="MN")
    plan = umma.plan_mma("f16", 1, i, a.desc(1024, 16), b.desc(65536, 16), 0)
    want = np.zeros(SMEM, bool)
    want[cute_swizzle(1024 + a.relative[:, 16:32], a.swizzle)[..., None] + np.arange(2)] = True
    want[cute_swizzle(65536 + b.relative[:, 16:32], b.swizzle)[..., None] + np.arange(2)] = True
    got = np.zeros(SMEM, bool)
    ((peer, starts, lengths),) = plan.smem_reads
    assert peer == 0
    for s, n in zip(starts, lengths):
        got[s : s + n] = True
    assert np.array_equal(got, want)
    assert np.array_equal(plan.smem_granules[0][1] * 16, np.flatnonzero(want)[::16])


def test_lints_catch_fields_off_by_one():
    """CuTe's descriptors have none (see run_ss); each of these differs from a good one in one field."""
    def lints(start=2048 + 32, lbo=16, sbo=1024, swizzle="128B", b_major="K", base=0):
        b = umma.encode_smem_desc(start, lbo, sbo, swizzle, base_offset=base)
        i = umma.encode_idesc("f16", 64, 128, atype="bf16", b_major=b_major)
        return " | ".join(umma.plan_mma("f16", 1, i, 200, b, 0).lints)

    assert not lints() and not lints(swizzle="64B", sbo=512) and not lints(2048, 8192, 1024, b_major="MN")
    assert not lints(2048, 2048, 128, "none") and not lints(2048 + 384, base=3)
    assert "SBO 1040" in lints(sbo=1040) and "share" in lints(sbo=0) and "SBO 512" in lints(sbo=512)
    assert "LBO 8208" in lints(2048, 8208, 1024, b_major="MN") and "SBO 1152" in lints(2048, 8192, 1152, b_major="MN")
    assert "crosses its end" in lints(2048 + 112) and "multiple of its size" in lints(2048 + 48)
    assert "base offset 2" in lints(base=2) and not lints(2048 + 384)
    assert "share" in lints(2048, 64, 128, "none")
    assert "A: " not in lints(sbo=0)


def test_cycles_follow_the_published_table():
    """B200 issue intervals (public micro-benchmark): (cta_group, m, n, A in TMEM) -> clocks, rule within 10 %."""
    d = umma.encode_smem_desc(1024, 16, 1024, "128B")
    table = {(1, 128, 64, 0): 48.6, (1, 128, 128, 0): 64.6, (1, 128, 256, 0): 128.6, (1, 64, 128, 0): 64.6,
             (1, 128, 64, 1): 32.5, (1, 128, 128, 1): 64.5, (2, 128, 128, 0): 32.7, (2, 128, 256, 0): 64.7,
             (2, 256, 64, 0): 43.7, (2, 256, 256, 0): 128.8}
    for (cg, m, n, ts), clocks in table.items():
        plan = umma.plan_mma("f16", cg, umma.encode_idesc("f16", m, n, atype="bf16"), 256 if ts else d, d, 0)
        assert plan.cycles == pytest.approx(clocks, rel=0.1)
        assert plan.flops == 2 * m * n * 16


def test_illegal_operands():
    d = umma.encode_smem_desc(1024, 16, 1024, "128B")
    good = umma.encode_idesc("f16", 128, 64, atype="bf16")

    def plan(idesc=good, a=d, b=d, dt=0, kind="f16", cg=1, **kw):
        return umma.plan_mma(kind, cg, idesc, a, b, dt, **kw)

    enc = umma.encode_idesc
    atom32 = umma.encode_smem_desc(1024, 16, 1024, "128B_32B-atom")
    cases = [
        (dict(idesc=enc("f16", 256, 64)), "idesc.M"), (dict(idesc=enc("f16", 64, 64), cg=2), "idesc.M"),
        (dict(idesc=enc("f16", 128, 24), cg=2), "idesc.N"), (dict(idesc=enc("i8", 128, 40), kind="i8"), "idesc.N"),
        (dict(idesc=enc("f16", 64, 32), ws=True), "idesc.N"), (dict(cg=2, ws=True), "cta_group"),
        (dict(idesc=good | 1 << 2), "sparsity"), (dict(idesc=good | 1 << 6), "bit 6"), (dict(kind="mxf4"), "kind"),
        (dict(idesc=good | 2 << 7), "atype"), (dict(idesc=enc("f16", 128, 64, atype="bf16", dtype="f16")), "dtype"),
        (dict(a=d ^ 1 << 46), "46-48"), (dict(b=d | 1 << 52), "bit 52"), (dict(b=d | 1 << 55), "53-60"),
        (dict(b=(d & ~(7 << 61)) | 3 << 61), "swizzle"), (dict(dt=16 << 16), "d-tmem lane"), (dict(dt=480), "column"),
        (dict(a=32 << 16), "a-tmem lane"), (dict(a=508), "a-tmem column"), (dict(a=atom32), "Table 55"),
        (dict(idesc=enc("f16", 128, 64, atype="bf16", b_major="MN"), b=atom32), "Table 54"),
        (dict(idesc=enc("tf32", 128, 64, b_major="MN"), kind="tf32"), "Table 54"),
        (dict(idesc=enc("f8f6f4", 64, 24, b_major="MN"), kind="f8f6f4"), "Table 52"),
        (dict(idesc=enc("f16", 128, 24, atype="bf16")), "multiples of 16"),
        (dict(idesc=enc("f8f6f4", 128, 64, atype="e2m1"), kind="f8f6f4"), "not supported"),
        (dict(scale_input_d=16), "scale-input-d"), (dict(disable_lanes=1, idesc=enc("f16", 64, 64), ws=True), "disable"),
        (dict(a=umma.encode_smem_desc(228 * 1024 - 1024, 16, 1024, "128B")), "past the end"),
        (dict(idesc=good | 1 << 15, a=0), "transpose"),
    ]
    for kwargs, match in cases:
        with pytest.raises(IllegalOperand, match=match):
            plan(**kwargs)
    text = plan().explain()
    assert "M=128 N=64" in text and "SBO=1024B" in text and "swizzle=128B" in text
    assert "illegal" in umma.explain("f16", good, d ^ 1 << 46, d)


# ------------------------------------------------------------------ ld / st / cp / shift

@pytest.mark.parametrize("shape", list(tmem.LD_SHAPES))
def test_ld_maps_are_cutes(cute_facts, shape):
    """The DSL's (thread, register) -> word index, the words of a shape being numbered row by row."""
    num = 1
    while ("ld", shape, num) in cute_facts:
        _, sh, st = parse(cute_facts["ld", shape, num])
        lane, col = tmem.ld_map(shape, num, imm=num)
        rows = 32 if shape == "32x32b" else 16
        words = lane.size
        thread = offsets(sh[0], st[0], 32)
        register = offsets(sh[1], st[1], lane.shape[1])
        want = thread[:, None] + register[None, :]
        assert np.array_equal(lane * (words // rows) + col, want), num
        num *= 2
    assert num > tmem.LD_SHAPES[shape][1]


@pytest.mark.parametrize("shape,num,pack,imm", [
    ("32x32b", 4, False, 0), ("32x32b", 8, True, 0), ("16x64b", 8, False, 0), ("16x128b", 4, True, 0),
    ("16x256b", 4, False, 0), ("16x32bx2", 4, False, 64), ("16x32bx2", 4, True, 8),
])
def test_ld_st_round_trip(shape, num, pack, imm):
    rng = np.random.default_rng(0)
    tm = rng.integers(0, 2**32, (128, 512), dtype=np.uint64).astype(np.uint32)
    for warp in range(8):
        plan = tmem.plan_ldst(shape, num, (32 * (warp % 4)) << 16 | 10, warp, pack=pack, imm=imm)
        regs = plan.load(tm)
        assert regs.shape == (plan.registers, 32)
        blank = np.full((128, 512), SENTINEL, np.uint32)
        plan.store(blank, regs)
        touched = np.zeros((128, 512), bool)
        for lane0, lanes, c0, nc in plan.ranges:
            touched[lane0 : lane0 + lanes, c0 : c0 + nc] = True
        want = tm & 0xFFFF if pack else tm
        assert np.array_equal(blank[touched], want[touched])
        assert np.all(blank[~touched] == SENTINEL)
        assert touched.sum() == regs.size * (2 if pack else 1)
    if pack:
        regs = tmem.plan_ldst("32x32b", 2, 10, 0, pack=True).load(tm)
        assert regs[1, 5] == (tm[5, 12] & 0xFFFF) | (tm[5, 13] & 0xFFFF) << 16


def test_ldst_illegal():
    for args, match in [
        (("32x32b", 4, 64 << 16, 1), "taddr lane"), (("32x32b", 4, 16 << 16, 0), "taddr lane"),
        (("32x32b", 4, 16 << 16, 2), "taddr lane"), (("32x32b", 4, 32 << 16, 0), "taddr lane"),
        (("32x32b", 3, 0, 0), "num"), (("16x256b", 64, 0, 0), "num"), (("8x8b", 1, 0, 0), "shape"),
        (("32x32b", 32, 500, 0), "column"), (("16x64b", 8, 48 << 16, 0), "taddr lane"),
    ]:
        with pytest.raises(IllegalOperand, match=match):
            tmem.plan_ldst(*args)
    assert tmem.plan_ldst("16x64b", 8, 48 << 16, 5).ranges == [(48, 16, 0, 16)]
    assert not tmem.plan_ldst("16x64b", 8, 48 << 16, 5).lane_implied
    implied = tmem.plan_ldst("32x32b", 4, 7, 6)  # quarter 0 from warp 6: its own quarter, and the plan says so
    assert implied.lane_implied and implied.ranges == [(64, 32, 7, 4)]


@pytest.mark.parametrize("name", ["K_INTER", "K_SW32", "K_SW64", "K_SW128"])
@pytest.mark.parametrize("shape,multicast,quarters", [
    ("128x256b", None, (0, 1, 2, 3)), ("128x128b", None, (0, 1, 2, 3)), ("64x128b", "warpx2::02_13", (0, 1, 0, 1)),
    ("64x128b", "warpx2::01_23", (0, 0, 1, 1)), ("32x128b", "warpx4", (0, 0, 0, 0)),
])
def test_cp(cute_facts, name, shape, multicast, quarters):
    """Rows written through CuTe's K-major layouts arrive in the lanes that CUTLASS's UTCCP traits give them."""
    rng = np.random.default_rng(4)
    t = Tile(cute_facts, rng, "bf16", name, 128)
    smem, tm = np.zeros(SMEM, np.uint8), np.full((128, 512), SENTINEL, np.uint32)
    t.write(smem, 2048)
    width = 16 if shape.endswith("256b") else 8  # bf16 elements
    for k0 in (0, 32):
        plan = tmem.plan_cp(shape, multicast, None, t.desc(2048, k0), 50)
        plan.apply(smem, tm)
        assert not plan.lints
        words = np.ascontiguousarray(raw_bits("bf16", t.values[:, k0 : k0 + width])).reshape(128, -1).view(np.uint32)
        for quarter, source in enumerate(quarters):
            got = tm[32 * quarter : 32 * quarter + 32, 50 : 50 + width // 2]
            assert np.array_equal(got, words[32 * source : 32 * source + 32])
    assert np.count_nonzero(tm != SENTINEL) <= 128 * width // 2
    assert sum(lanes for _, lanes, _, _ in plan.tmem_writes) == 128
    assert plan.bytes == int(shape.split("x")[0]) * width * 2 == plan.smem_reads[1].sum()


def test_cp_and_shift_illegal_and_shift():
    d = umma.encode_smem_desc(1024, 16, 1024, "128B")
    for args, match in [
        (("128x64b", None, None, d, 0), "shape"), (("64x128b", None, None, d, 0), "multicast"),
        (("128x256b", "warpx4", None, d, 0), "multicast"), (("128x256b", None, "b6x16_p32", d, 0), "decompress"),
        (("128x256b", None, None, d, 32 << 16), "lane"), (("128x256b", None, None, d, 508), "column"),
    ]:
        with pytest.raises(IllegalOperand, match=match):
            tmem.plan_cp(*args)
    tm = np.arange(128 * 512, dtype=np.uint32).reshape(128, 512)
    before = tm.copy()
    plan = tmem.plan_shift(32 << 16 | 4)
    plan.apply(tm)
    assert np.array_equal(tm[32:63, 4:12], before[33:64, 4:12])
    before[32:63, 4:12] = before[33:64, 4:12]
    assert np.array_equal(tm, before)
    with pytest.raises(IllegalOperand, match="multiple of 32"):
        tmem.plan_shift(16 << 16)
