# ruff: noqa: E501  (assembly reads better unbroken)
"""Register-only instructions against scalar oracles in Python integers, fractions and struct-packed floats."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from ptx_harness import lane_op

M32, M64 = 2**32 - 1, 2**64 - 1
EDGE32 = [0, 1, 2, 31, 32, 33, 255, 0x7FFFFFFF, 0x80000000, 0x80000001, M32, M32 - 1, 0xDEADBEEF, 0x00FF00FF, 0x12345678, 0xFFFF]


def words(seed: int, n: int = 32, bits: int = 32) -> np.ndarray:
    rng = np.random.default_rng(seed)
    out = rng.integers(0, 2**bits, n, dtype=np.uint64)
    edge = EDGE32 if bits == 32 else EDGE32[:8] + [2**63, M64, 2**63 - 1, 2**32, 0x0123456789ABCDEF]
    out[: len(edge)] = np.array(edge, np.uint64)
    return rng.permutation(out).astype({16: np.uint16, 32: np.uint32, 64: np.uint64}[bits])


def s32(x):
    return x - 2**32 if x >> 31 else x


def s64(x):
    return x - 2**64 if x >> 63 else x


def cdiv(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def lop(a, b, c, lut):
    r = 0
    for k in range(32):
        r |= (lut >> ((a >> k & 1) * 4 + (b >> k & 1) * 2 + (c >> k & 1)) & 1) << k
    return r


def prmt(a, b, c):
    source = [(b << 32 | a) >> 8 * k & 255 for k in range(8)]
    r = 0
    for k in range(4):
        sel = c >> 4 * k & 15
        byte = source[sel & 7]
        r |= (255 * (byte >> 7) if sel & 8 else byte) << 8 * k
    return r


def bfe_s32(a, pos, n):
    pos, n = pos & 255, n & 255
    bit = a >> min(pos + n - 1, 31) & 1 if n else 0
    out = 0
    for k in range(32):
        inside = k < n and pos + k <= 31
        out |= (a >> (pos + k) & 1 if inside else bit) << k
    return out


def bfe_u32(a, pos, n):
    pos, n = pos & 255, n & 255
    return sum((a >> (pos + k) & 1) << k for k in range(min(n, 32)) if pos + k <= 31)


def bfi(a, b, pos, n):
    pos, n = pos & 255, n & 255
    for k in range(n):
        if pos + k < 32:
            b = b & ~(1 << pos + k) | (a >> k & 1) << pos + k if k < 32 else b & ~(1 << pos + k)
    return b


INTEGER = {
    "add.u32 %y, %x0, %x1;": lambda a, b: a + b,
    "sub.s32 %y, %x0, %x1;": lambda a, b: a - b,
    "add.sat.s32 %y, %x0, %x1;": lambda a, b: max(-(2**31), min(2**31 - 1, s32(a) + s32(b))),
    "mul.lo.s32 %y, %x0, %x1;": lambda a, b: a * b,
    "mul.hi.s32 %y, %x0, %x1;": lambda a, b: s32(a) * s32(b) >> 32,
    "mul.hi.u32 %y, %x0, %x1;": lambda a, b: a * b >> 32,
    "mul24.lo.u32 %y, %x0, %x1;": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "min.s32 %y, %x0, %x1;": lambda a, b: min(s32(a), s32(b)),
    "max.u32 %y, %x0, %x1;": max,
    "min.relu.s32 %y, %x0, %x1;": lambda a, b: max(0, min(s32(a), s32(b))),
    "div.u32 %y, %x0, %x1;": lambda a, b: a // b if b else M32,
    "div.s32 %y, %x0, %x1;": lambda a, b: cdiv(s32(a), s32(b)) if b else -1,
    "rem.s32 %y, %x0, %x1;": lambda a, b: s32(a) - cdiv(s32(a), s32(b)) * s32(b) if b else a,
    "and.b32 %y, %x0, %x1;": lambda a, b: a & b,
    "xor.b32 %y, %x0, %x1;": lambda a, b: a ^ b,
    "shl.b32 %y, %x0, %x1;": lambda a, b: a << b if b < 32 else 0,
    "shr.u32 %y, %x0, %x1;": lambda a, b: a >> b if b < 32 else 0,
    "shr.s32 %y, %x0, %x1;": lambda a, b: s32(a) >> min(b, 31),
    "sad.s32 %y, %x0, %x1, %x0;": lambda a, b: abs(s32(a) - s32(b)) + a,
    "mad.lo.u32 %y, %x0, %x1, %x1;": lambda a, b: a * b + b,
    "mad.hi.s32 %y, %x0, %x1, 7;": lambda a, b: (s32(a) * s32(b) >> 32) + 7,
    "lop3.b32 %y, %x0, %x1, 0xF0F0AA55, 0x96;": lambda a, b: lop(a, b, 0xF0F0AA55, 0x96),
    "lop3.b32 %y, %x0, %x1, %x0, 0xCA;": lambda a, b: lop(a, b, a, 0xCA),
    "prmt.b32 %y, %x0, %x1, 0x7531;": lambda a, b: prmt(a, b, 0x7531),
    "prmt.b32 %y, %x0, 0, %x1;": lambda a, b: prmt(a, 0, b),
    "shf.l.wrap.b32 %y, %x0, %x1, 11;": lambda a, b: ((b << 32 | a) << 11) >> 32,
    "shf.r.clamp.b32 %y, %x0, 77, %x1;": lambda a, b: (77 << 32 | a) >> min(b, 32),
    "bfe.u32 %y, %x0, 3, %x1;": lambda a, b: bfe_u32(a, 3, b),
    "bfe.s32 %y, %x0, %x1, 9;": lambda a, b: bfe_s32(a, b, 9),
    "bfi.b32 %y, %x0, %x1, 5, 12;": lambda a, b: bfi(a, b, 5, 12),
    "popc.b32 %y, %x0;": lambda a, b: a.bit_count(),
    "clz.b32 %y, %x0;": lambda a, b: 32 - a.bit_length(),
    "bfind.u32 %y, %x0;": lambda a, b: a.bit_length() - 1,
    "bfind.s32 %y, %x0;": lambda a, b: (a if a < 2**31 else a ^ M32).bit_length() - 1,
    "brev.b32 %y, %x0;": lambda a, b: int(f"{a:032b}"[::-1], 2),
    "not.b32 %y, %x0;": lambda a, b: ~a,
    "cnot.b32 %y, %x0;": lambda a, b: int(a == 0),
    "neg.s32 %y, %x0;": lambda a, b: -a,
    "abs.s32 %y, %x0;": lambda a, b: abs(s32(a)),
    "dp4a.s32.s32 %y, %x0, %x1, 5;": lambda a, b: (
        5 + sum(struct.unpack("<4b", struct.pack("<I", a))[k] * struct.unpack("<4b", struct.pack("<I", b))[k] for k in range(4))
    ),
    "dp4a.u32.s32 %y, %x0, %x1, %x1;": lambda a, b: (
        s32(b) + sum((a >> 8 * k & 255) * struct.unpack("<4b", struct.pack("<I", b))[k] for k in range(4))
    ),
    "add.u16x2 %y, %x0, %x1;": lambda a, b: (a + b & 0xFFFF) | ((a >> 16) + (b >> 16) & 0xFFFF) << 16,
    "{.reg .pred q; setp.lt.s32 q, %x0, %x1; selp.b32 %y, %x0, %x1, q;}": lambda a, b: a if s32(a) < s32(b) else b,
    "{.reg .pred q, r; setp.ge.u32 q|r, %x0, %x1; and.pred q, q, r; selp.u32 %y, 1, 2, q;}": lambda a, b: 2,
    "set.lo.u32.u32 %y, %x0, %x1;": lambda a, b: M32 if a < b else 0,
    "slct.s32.s32 %y, %x0, %x1, %x0;": lambda a, b: a if s32(a) >= 0 else b,
    "{add.cc.u32 %y, %x0, %x1; addc.u32 %y, 0, 0;}": lambda a, b: a + b >> 32,
    "{sub.cc.u32 %y, %x0, %x1; subc.u32 %y, 5, 1;}": lambda a, b: 4 - (a < b),
    "{mad.lo.cc.u32 %y, %x0, %x1, %x0; madc.hi.u32 %y, %x0, %x1, 0;}": lambda a, b: a * b + a >> 32,
    "cvt.s32.s8 %y, %x0;": lambda a, b: (a & 255) - 256 * (a >> 7 & 1),
    "cvt.u32.u16 %y, %x0;": lambda a, b: a & 0xFFFF,
    "cvt.sat.u8.s32 %y, %x0;": lambda a, b: max(0, min(255, s32(a))),
    "{.reg .b16 l, h; mov.b32 {l, h}, %x0; mov.b32 %y, {h, l};}": lambda a, b: a >> 16 | (a & 0xFFFF) << 16,
}


@pytest.mark.parametrize("text", INTEGER, ids=lambda t: t[:34])
def test_integer(text):
    a, b = words(1), words(2)
    b[:8] = [0, 1, 5, 31, 32, 40, 255, 12]
    got = lane_op(text, "w", ["w", "w"], [a, b])
    assert got.tolist() == [INTEGER[text](int(x), int(y)) & M32 for x, y in zip(a, b)]


WIDE = {
    "add.u64 %y, %x0, %x1;": lambda a, b: a + b,
    "mul.hi.u64 %y, %x0, %x1;": lambda a, b: a * b >> 64,
    "mul.hi.s64 %y, %x0, %x1;": lambda a, b: s64(a) * s64(b) >> 64,
    "mul.lo.s64 %y, %x0, %x1;": lambda a, b: a * b,
    "div.s64 %y, %x0, %x1;": lambda a, b: cdiv(s64(a), s64(b)) if b else -1,
    "rem.u64 %y, %x0, %x1;": lambda a, b: a % b if b else a,
    "shl.b64 %y, %x0, 37;": lambda a, b: a << 37,
    "shr.s64 %y, %x0, 5;": lambda a, b: s64(a) >> 5,
    "{.reg .b32 n; mov.u32 n, 70; shr.u64 %y, %x0, n;}": lambda a, b: 0,
    "min.s64 %y, %x0, %x1;": lambda a, b: min(s64(a), s64(b)),
    "bfe.u64 %y, %x0, 20, 30;": lambda a, b: a >> 20 & (2**30 - 1),
    "{.reg .b32 l, h; mov.b64 {l, h}, %x0; mad.wide.u32 %y, l, h, %x1;}": lambda a, b: (a & M32) * (a >> 32) + b,
    "{.reg .b32 l, h; mov.b64 {l, h}, %x0; mul.wide.s32 %y, l, h;}": lambda a, b: s32(a & M32) * s32(a >> 32),
    "{.reg .b32 l, h; mov.b64 {l, h}, %x0; mov.b64 %y, {h, l};}": lambda a, b: a >> 32 | (a & M32) << 32,
    "{.reg .b32 n; clz.b64 n, %x0; cvt.u64.u32 %y, n;}": lambda a, b: 64 - a.bit_length(),
    "{.reg .b128 q; mov.b128 q, {%x0, %x1}; mov.b128 {_, %y}, q;}": lambda a, b: b,
    "cvt.s64.s32 %y, %x0;": lambda a, b: s32(a & M32),
}


@pytest.mark.parametrize("text", WIDE, ids=lambda t: t[:34])
def test_integer_64(text):
    a, b = words(3, bits=64), words(4, bits=64)
    got = lane_op(text, "d", ["d", "d"], [a, b])
    assert got.tolist() == [WIDE[text](int(x), int(y)) & M64 for x, y in zip(a, b)]


def floats(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(32) * 2.0 ** rng.integers(-20, 20, 32)).astype(np.float32)
    x[:6] = [0.0, -0.0, 1.0, -1.5, np.inf, np.nan]
    return rng.permutation(x)


def round_fraction(x: Fraction, mode: str) -> float:
    """Exact rational to float32 by rn, rz, rm, rp; normal range only."""
    if x == 0:
        return 0.0
    e = math.floor(math.log2(abs(x)))
    while abs(x) >= Fraction(2) ** (e + 1):
        e += 1
    while abs(x) < Fraction(2) ** e:
        e -= 1
    q = x / Fraction(2) ** (e - 23)
    n = math.floor(q)
    r = q - n
    if mode == "rn":
        n += r > Fraction(1, 2) or (r == Fraction(1, 2) and n % 2 == 1)
    elif mode == "rp":
        n += r > 0
    elif mode == "rz" and x < 0:
        n += r > 0
    return float(n * Fraction(2) ** (e - 23))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
def test_directed_rounding(op, mode):
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal(32).astype(np.float32) for _ in range(2))
    args = "%x0, %x1" + (", %x0" if op == "fma" else "")
    got = lane_op(f"{op}.{mode}.f32 %y, {args};", "w", ["w", "w"], [a, b]).view(np.float32)
    exact = {"add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y, "fma": lambda x, y: x * y + x}[op]
    want = [round_fraction(exact(Fraction(float(x)), Fraction(float(y))), mode) for x, y in zip(a, b)]
    assert got.tolist() == want


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_directed_root_and_quotient(mode):
    """Bracketed by neighbours: r*r (or r*b) lies on the right side of x, and one step further would pass it."""
    rng = np.random.default_rng(6)
    x, b = (rng.uniform(0.1, 9, 32).astype(np.float32) for _ in range(2))
    root = lane_op(f"sqrt.{mode}.f32 %y, %x0;", "w", ["w"], [x]).view(np.float32)
    quotient = lane_op(f"div.{mode}.f32 %y, %x0, %x1;", "w", ["w", "w"], [x, b]).view(np.float32)
    for r, q, v, d in zip(root, quotient, x, b):
        other = np.nextafter(r, np.float32(-np.inf if mode == "rp" else np.inf))
        low, high = sorted((Fraction(float(r)), Fraction(float(other))))
        assert low**2 <= Fraction(float(v)) <= high**2
        other = np.nextafter(q, np.float32(-np.inf if mode == "rp" else np.inf))
        low, high = sorted((Fraction(float(q)), Fraction(float(other))))
        assert low * Fraction(float(d)) <= Fraction(float(v)) <= high * Fraction(float(d))


def test_packed_f32x2_equals_two_scalars():
    rng = np.random.default_rng(6)
    a, b = (rng.standard_normal(64).astype(np.float32) for _ in range(2))
    got = lane_op("fma.rn.f32x2 %y, %x0, %x1, %x0;", "d", ["d", "d"], [a.view(np.uint64), b.view(np.uint64)]).view(np.float32)
    want = (a.astype(np.float64) * b + a).astype(np.float32)
    assert (got == want).all()
    got = lane_op("add.rm.f32x2 %y, %x0, %x1;", "d", ["d", "d"], [a.view(np.uint64), b.view(np.uint64)]).view(np.float32)
    assert got.tolist() == [round_fraction(Fraction(float(x)) + Fraction(float(y)), "rm") for x, y in zip(a, b)]


UNARY = {
    "ex2.approx.ftz.f32": lambda x: 2.0**x, "lg2.approx.f32": lambda x: math.log2(abs(x)), "rcp.approx.f32": lambda x: 1 / x,
    "rsqrt.approx.f32": lambda x: 1 / math.sqrt(abs(x)), "sqrt.rn.f32": lambda x: math.sqrt(abs(x)), "sin.approx.f32": math.sin,
    "cos.approx.f32": math.cos, "tanh.approx.f32": math.tanh,
}  # fmt: skip


@pytest.mark.parametrize("op", UNARY)
def test_special_functions(op):
    x = np.random.default_rng(7).uniform(0.01, 8, 32).astype(np.float32)
    if op.startswith(("ex2", "sin", "cos", "tanh")):
        x[::2] *= -1
    got = lane_op(f"{op} %y, %x0;", "w", ["w"], [x]).view(np.float32)
    np.testing.assert_allclose(got, [UNARY[op](float(v)) for v in x], rtol=1.2e-7)


def test_special_function_edges():
    x = np.zeros(32, np.float32)
    x[:5] = [np.inf, -np.inf, np.nan, -200, 200]
    got = lane_op("ex2.approx.ftz.f32 %y, %x0;", "w", ["w"], [x]).view(np.float32)
    assert got[0] == np.inf and got[1] == 0 and np.isnan(got[2]) and got[3] == 0 and got[4] == np.inf and got[5] == 1


def test_min_max_and_nan():
    a, b = floats(8), floats(9)
    got = lane_op("max.f32 %y, %x0, %x1;", "w", ["w", "w"], [a, b]).view(np.float32)
    want = [y if math.isnan(x) else x if math.isnan(y) else max(x, y) for x, y in zip(a.tolist(), b.tolist())]
    np.testing.assert_array_equal(got, np.array(want, np.float32))
    got = lane_op("max.NaN.f32 %y, %x0, %x1, %x0;", "w", ["w", "w"], [a, b]).view(np.float32)
    assert (np.isnan(got) == (np.isnan(a) | np.isnan(b))).all()


@pytest.mark.parametrize(
    "cmp,fn",
    [
        ("lt", lambda a, b: a < b), ("ne", lambda a, b: a < b or a > b), ("neu", lambda a, b: not a == b), ("equ", lambda a, b: not (a < b or a > b)),
        ("leu", lambda a, b: not a > b), ("num", lambda a, b: a == a and b == b), ("nan", lambda a, b: a != a or b != b),
    ],
)  # fmt: skip
def test_float_compare(cmp, fn):
    a, b = floats(10), floats(11)
    b[::3] = a[::3]
    got = lane_op(f"{{.reg .pred q; setp.{cmp}.f32 q, %x0, %x1; selp.b32 %y, 1, 0, q;}}", "w", ["w", "w"], [a, b])
    assert got.tolist() == [int(fn(x, y)) for x, y in zip(a.tolist(), b.tolist())]


def bf16(x: float) -> int:
    u = struct.unpack("<I", struct.pack("<f", x))[0]
    return 0x7FFF if x != x else (u + 0x7FFF + (u >> 16 & 1)) >> 16


def test_narrow_conversions():
    a, b = floats(12), floats(13)
    got = lane_op("cvt.rn.bf16x2.f32 %y, %x0, %x1;", "w", ["w", "w"], [a, b])
    assert got.tolist() == [bf16(float(x)) << 16 | bf16(float(y)) for x, y in zip(a, b)]
    with np.errstate(over="ignore"):
        want = a.astype(np.float16).view(np.uint16)
    got = lane_op("{.reg .b16 h; cvt.rn.f16.f32 h, %x0; mov.b32 %y, {h, h};}", "w", ["w"], [a])
    assert ((got & 0xFFFF) == want)[~np.isnan(a)].all()
    x = np.tile(np.array([0.5, 448, 1000, -3.3], np.float32), 8)
    got = lane_op("{.reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, %x0, %x0; mov.b32 %y, {h, h};}", "w", ["w"], [x])
    assert got[:4].tolist() == [0x30303030, 0x7E7E7E7E, 0x7E7E7E7E, 0xC5C5C5C5]


def test_float_to_integer():
    x = np.zeros(32, np.float32)
    x[:8] = [1.5, 2.5, -1.5, 3e9, -3e9, np.nan, np.inf, -0.4]
    got = lane_op("cvt.rni.s32.f32 %y, %x0;", "w", ["w"], [x]).view(np.int32)
    assert got[:8].tolist() == [2, 2, -2, 2**31 - 1, -(2**31), 0, 2**31 - 1, 0]
    got = lane_op("cvt.rzi.u32.f32 %y, %x0;", "w", ["w"], [x])
    assert got[:8].tolist() == [1, 2, 0, 3000000000, 0, 0, M32, 0]
    got = lane_op("cvt.rmi.f32.f32 %y, %x0;", "w", ["w"], [x]).view(np.float32)
    assert got[:3].tolist() == [1, 2, -2]


def test_mixed_precision_fma():
    """fma.rn.f32.bf16 (PTX ISA 8.6): bf16 factors, float32 addend and result."""
    x = np.random.default_rng(14).standard_normal(32).astype(np.float32)
    h = (x.view(np.uint32) >> 16).astype(np.uint16)
    back = (h.astype(np.uint32) << 16).view(np.float32)
    got = lane_op("fma.rn.f32.bf16 %y, %x0, %x0, %x1;", "w", ["h", "w"], [h, x]).view(np.float32)
    want = [round_fraction(Fraction(float(b)) ** 2 + Fraction(float(v)), "rn") for b, v in zip(back, x)]
    assert got.tolist() == want


@pytest.mark.parametrize("op", ["add", "mul", "fma"])
@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
def test_packed_halves(op, kind):
    rng = np.random.default_rng(15)
    x, y = (rng.standard_normal(64).astype(np.float32) for _ in range(2))
    if kind == "f16x2":
        a, b = x.astype(np.float16), y.astype(np.float16)
        wide = [v.astype(np.float64) for v in (a, b)]
        raw = [v.view(np.uint32) for v in (a, b)]
    else:
        u = [(v.view(np.uint32) >> 16).astype(np.uint16) for v in (x, y)]
        raw = [v.view(np.uint32) for v in u]
        wide = [(v.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for v in u]
    exact = {"add": wide[0] + wide[1], "mul": wide[0] * wide[1], "fma": wide[0] * wide[1] + wide[0]}[op]
    args = "%x0, %x1" + (", %x0" if op == "fma" else "")
    got = lane_op(f"{op}.rn.{kind} %y, {args};", "w", ["w", "w"], raw)
    if kind == "f16x2":
        assert (got.view(np.float16) == exact.astype(np.float16)).all()
    else:
        assert got.view(np.uint16).tolist() == [bf16(float(np.float32(v))) for v in exact]


def test_predicated_and_divergent_lanes_keep_their_values():
    """The masked paths: a guarded instruction, and the same instruction in half a warp."""
    a = words(16)
    text = (
        "mov.u32 %y, 7;\n{.reg .pred q; and.b32 %r1, %tx, 1; setp.eq.u32 q, %r1, 0;\n@q add.u32 %y, %x0, 1;\n"
        "setp.lt.u32 q, %tx, 10;\n@q bra L;\nxor.b32 %y, %y, 3;\nL:\n}"
    )
    got = lane_op(text, "w", ["w"], [a])
    want = []
    for k, x in enumerate(a.tolist()):
        v = (x + 1) & M32 if k % 2 == 0 else 7
        want.append(v if k < 10 else v ^ 3)
    assert got.tolist() == want


def test_packed_half_conversion_in_some_lanes_only():
    ptx = """.version 8.8
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p) {
  .reg .b64 %rd<3>; .reg .b32 %r<5>; .reg .f32 %f<3>; .reg .pred %q;
  ld.param.u64 %rd1, [p];
  mov.u32 %r1, %tid.x;
  cvt.rn.f32.u32 %f1, %r1;
  neg.f32 %f2, %f1;
  and.b32 %r2, %r1, 1;
  setp.eq.u32 %q, %r2, 1;
  mov.b32 %r3, 7;
  @!%q bra SKIP;
  cvt.rn.f16x2.f32 %r3, %f2, %f1;
SKIP:
  @!%q cvt.rn.f16x2.f32 %r3, %f1, %f1;
  mul.wide.u32 %rd2, %r1, 4;
  add.u64 %rd1, %rd1, %rd2;
  st.global.b32 [%rd1], %r3;
  ret;
}"""
    from cute_kernels.emulator import run_ptx

    out = np.zeros(32, np.uint32)
    run_ptx(ptx, (1, 1, 1), (32, 1, 1), [out])
    lanes = np.arange(32, dtype=np.float16)
    want = np.stack([lanes, np.where(np.arange(32) % 2, -lanes, lanes)], axis=1).view(np.uint32)[:, 0]
    assert out.tolist() == want.tolist()
