"""Arithmetic on 32-lane rows that is more than one NumPy call.

Rounding model, stated once. Every float32 operation is rounded once from an exact or float64 value, except fma, which adds
an exact float64 product to a float64 addend (double rounding: differs from a true fma in about one case in 2**29).
The approximate functions (ex2, lg2, rcp, rsqrt, sin, cos, tanh) are the float64 function rounded to float32; hardware's
are within 2 ulp of that, so results agree to rounding, not to the bit.
"""

from __future__ import annotations

import numpy as np

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
I32, I64, F16, F32, F64 = np.int32, np.int64, np.float16, np.float32, np.float64
_EXP = U32(0x7F800000)
_SIGN = U32(0x80000000)
_INF64 = np.inf


def ftz(x: np.ndarray) -> np.ndarray:
    """float32 row with denormals replaced by zeros of their sign; the row itself when it has none."""
    u = np.ascontiguousarray(x).view(U32)
    zero_exp = (u & _EXP) == 0
    if not zero_exp.any():
        return x
    return np.where(zero_exp, u & _SIGN, u).view(F32)


def saturate(x: np.ndarray) -> np.ndarray:
    """Clamp to [0, 1], NaN to 0."""
    return np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0)).astype(x.dtype)


def directed(hi: np.ndarray, lo: np.ndarray, mode: str) -> np.ndarray:
    """Round the exact value hi + lo (float64, |lo| <= ulp(hi)/2) to float32 by mode rn, rz, rm or rp."""
    r = hi.astype(F32)
    with np.errstate(invalid="ignore"):
        d = (hi - r.astype(F64)) + lo
    finite = np.isfinite(hi)
    if mode == "rn":
        return r
    down = np.nextafter(r, F32(-np.inf))
    up = np.nextafter(r, F32(np.inf))
    if mode == "rm":
        return np.where(finite & (d < 0), down, r)
    if mode == "rp":
        return np.where(finite & (d > 0), up, r)
    shrink = np.where(r > 0, d < 0, d > 0)  # rz: step towards zero when the magnitude was rounded up
    return np.where(finite & shrink & (d != 0), np.where(r > 0, down, up), r)


def add_dir(a, b, mode):
    a, b = a.astype(F64), b.astype(F64)
    s = a + b
    with np.errstate(invalid="ignore"):
        bb = s - a
        e = (a - (s - bb)) + (b - bb)
    return directed(s, np.where(np.isfinite(e), e, 0.0), mode)


def mul_dir(a, b, mode):
    return directed(a.astype(F64) * b.astype(F64), F64(0), mode)


def fma_dir(a, b, c, mode):
    p, c = a.astype(F64) * b.astype(F64), c.astype(F64)
    s = p + c
    with np.errstate(invalid="ignore"):
        bb = s - p
        e = (p - (s - bb)) + (c - bb)
    return directed(s, np.where(np.isfinite(e), e, 0.0), mode)


def fma32(a, b, c):
    return (np.multiply(a, b, dtype=F64) + c).astype(F32)


def fma64(a, b, c):
    """float64 fma: product and sum as an error-free pair, added in extended precision (exact to one rounding in most cases)."""
    return (a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)).astype(F64)


def div_dir(a, b, mode):
    q = a.astype(F64) / b.astype(F64)
    if mode == "rn":
        return q.astype(F32)
    r = q.astype(F32)
    rem = a.astype(np.longdouble) - r.astype(np.longdouble) * b.astype(np.longdouble)
    sign = np.sign(rem) * np.sign(b)
    return directed(r.astype(F64), np.where(np.isfinite(q), sign * 1e-300, 0).astype(F64), mode)


def ex2(x):
    return np.exp2(x.astype(F64)).astype(F32)


def lg2(x):
    return np.log2(x.astype(F64)).astype(F32)


def rcp(x):
    return (1.0 / x.astype(F64)).astype(F32)


def rsqrt(x):
    return (1.0 / np.sqrt(x.astype(F64))).astype(F32)


def sin(x):
    return np.sin(x.astype(F64)).astype(F32)


def cos(x):
    return np.cos(x.astype(F64)).astype(F32)


def tanh(x):
    return np.tanh(x.astype(F64)).astype(F32)


# ---- integers
def idiv(a, b):
    """C division (towards zero); division by zero gives all ones, as the hardware's integer routines do."""
    zero = b == 0
    safe = np.where(zero, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        return np.where(zero, ~a.dtype.type(0), a // safe)
    q = a // safe
    q = q + ((a % safe != 0) & ((a < 0) != (safe < 0)))
    return np.where(zero, a.dtype.type(-1), q).astype(a.dtype)


def irem(a, b):
    zero = b == 0
    safe = np.where(zero, b.dtype.type(1), b)
    return np.where(zero, a, np.fmod(a, safe)).astype(a.dtype)


def mulhi(a, b):
    if a.dtype.itemsize == 4:
        wide = I64 if a.dtype.kind == "i" else U64
        return (a.astype(wide) * b.astype(wide) >> wide(32)).astype(a.dtype)
    if a.dtype.itemsize == 2:
        wide = I32 if a.dtype.kind == "i" else U32
        return (a.astype(wide) * b.astype(wide) >> wide(16)).astype(a.dtype)
    ua, ub = a.view(U64), b.view(U64)
    m = U64(0xFFFFFFFF)
    a0, a1, b0, b1 = ua & m, ua >> U64(32), ub & m, ub >> U64(32)
    mid = (a0 * b0 >> U64(32)) + (a1 * b0 & m) + (a0 * b1 & m)
    hi = a1 * b1 + (a1 * b0 >> U64(32)) + (a0 * b1 >> U64(32)) + (mid >> U64(32))
    if a.dtype.kind == "i":
        hi = hi - np.where(a < 0, ub, U64(0)) - np.where(b < 0, ua, U64(0))
    return hi.view(a.dtype)


def add_sat(a, b, sub=False):
    r = a.astype(I64) - b if sub else a.astype(I64) + b
    return np.clip(r, -(2**31), 2**31 - 1).astype(I32)


def popc(a):
    b = np.ascontiguousarray(a).view(U8).reshape(a.size, -1)
    return np.unpackbits(b, axis=1).sum(axis=1, dtype=U32)


def _bits(a):
    """[lanes, width] bits, least significant first."""
    b = np.ascontiguousarray(a).view(U8).reshape(a.size, -1)
    return np.unpackbits(b, axis=1, bitorder="little")


def clz(a):
    bits = _bits(a)[:, ::-1]
    return np.where(bits.any(axis=1), bits.argmax(axis=1), bits.shape[1]).astype(U32)


def bfind(a, shiftamt=False):
    if a.dtype.kind == "i":
        a = np.where(a < 0, ~a, a)
    n = clz(a)
    width = a.dtype.itemsize * 8
    none = n == width
    pos = n if shiftamt else U32(width - 1) - n
    return np.where(none, U32(0xFFFFFFFF), pos).astype(U32)


def brev(a):
    return np.packbits(_bits(a)[:, ::-1], axis=1, bitorder="little").view(a.dtype).reshape(-1)


def bfe(a, pos, length):
    width = a.dtype.itemsize * 8
    pos, length = pos & U32(255), length & U32(255)
    signed = a.dtype.kind == "i"
    wide = a.astype(object) if width == 64 else a.astype(I64)
    if width == 64:
        return np.array([_bfe1(int(x), int(p), int(n), 64, signed) for x, p, n in zip(a, pos, length)]).astype(a.dtype)
    p, n = pos.astype(I64), length.astype(I64)
    u = wide & 0xFFFFFFFF
    sign_at = np.minimum(p + n - 1, 31)
    field = np.where(p < 32, u >> np.minimum(p, 31), 0) & np.where(n >= 32, 0xFFFFFFFF, (1 << np.minimum(n, 32)) - 1)
    if signed:
        # Bits past the sign position of the field, or past bit 31, are copies of it.
        sbit = np.where(n == 0, 0, (u >> sign_at) & 1)
        avail = np.clip(32 - p, 0, 32)
        used = np.minimum(n, avail)
        field = (field & ((1 << used) - 1)) | np.where(sbit == 1, -1 << used, 0)
    return field.astype(I64).astype(a.dtype)


def _bfe1(x, p, n, width, signed):
    x &= (1 << width) - 1
    sbit = (x >> min(p + n - 1, width - 1)) & 1 if (signed and n) else 0
    used = min(n, max(0, width - p))
    field = (x >> p) & ((1 << used) - 1) if p < width else 0
    if sbit:
        field |= -1 << used
    field &= (1 << width) - 1
    return field - (1 << width) if signed and field >> (width - 1) else field


def bfi(a, b, pos, length):
    t = a.dtype.type
    width = a.dtype.itemsize * 8
    pos, length = pos & U32(255), length & U32(255)
    n = np.minimum(length, width).astype(a.dtype)
    p = pos.astype(a.dtype)
    mask = np.where(n >= width, ~t(0), (t(1) << np.minimum(n, t(width - 1))) - t(1))
    mask = np.where(p < width, mask << np.minimum(p, t(width - 1)), t(0))
    shifted = np.where(p < width, a << np.minimum(p, t(width - 1)), t(0))
    return ((shifted & mask) | (b & ~mask)).astype(a.dtype)


def bmsk(a, b, wrap):
    if wrap:
        a, b = a & U32(31), b & U32(31)
    a, b = np.minimum(a, 32).astype(U64), np.minimum(b, 64).astype(U64)
    return ((((U64(1) << np.minimum(b, 32)) - U64(1)) << a) & U64(0xFFFFFFFF)).astype(U32)


def szext(a, pos, signed, wrap):
    pos = pos & U32(31) if wrap else np.minimum(pos, 32)
    sh = (U32(32) - pos).astype(U32)
    r = np.where(sh >= 32, U32(0), a << np.minimum(sh, 31))
    if signed:
        r = (r.view(I32) >> np.minimum(sh, 31).astype(I32)).view(U32)
        return np.where(pos == 0, U32(0), r)
    return np.where(pos == 0, U32(0), r >> np.minimum(sh, 31))


def prmt(a, b, sel, mode=None):
    src = np.stack([a, b], axis=1).astype("<u4").view(U8).reshape(-1, 8)
    if mode is not None:
        s = (sel & U32(3)).astype(np.int64)[:, None]
        k = np.arange(4)[None]
        idx = {
            "f4e": s + k, "b4e": (s - k) % 8, "rc8": s + 0 * k, "ecl": np.maximum(s, k), "ecr": np.minimum(s, k),
            "rc16": np.where(s & 1, 2 + (k & 1), k & 1),
        }[mode]  # fmt: skip
        return np.take_along_axis(src, idx, 1).view("<u4").reshape(-1)
    nib = (sel[:, None] >> np.array([0, 4, 8, 12], U32)) & U32(15)
    out = np.take_along_axis(src, (nib & U32(7)).astype(np.int64), 1)
    msb = (nib & U32(8)) != 0
    if msb.any():
        out = np.where(msb, np.where(out & 0x80, 0xFF, 0), out).astype(U8)
    return np.ascontiguousarray(out).view("<u4").reshape(-1)


def lop3(a, b, c, lut: int):
    r = np.zeros_like(a)
    na, nb, nc = ~a, ~b, ~c
    for k in range(8):
        if lut >> k & 1:
            r |= (a if k & 4 else na) & (b if k & 2 else nb) & (c if k & 1 else nc)
    return r


def shf(a, b, c, left: bool, wrap: bool):
    """Funnel shift of b:a."""
    n = (c & U32(31)) if wrap else np.minimum(c, 32)
    wide = (b.astype(U64) << U64(32)) | a
    n = n.astype(U64)
    return ((wide << n >> U64(32)) if left else (wide >> n)).astype(U32)


def dp4a(a, b, c, sa: bool, sb: bool):
    x = a.view(np.int8 if sa else U8).reshape(-1, 4).astype(I64)
    y = b.view(np.int8 if sb else U8).reshape(-1, 4).astype(I64)
    return ((x * y).sum(axis=1) + c.astype(I64)).astype(np.int64).astype(I32).view(U32)


def dp2a(a, b, c, sa: bool, sb: bool, hi: bool):
    x = a.view(np.int16 if sa else U16).reshape(-1, 2).astype(I64)
    y = (
        b.view(np.int8 if sb else U8).reshape(-1, 4).astype(I64)[:, 2:4]
        if hi
        else b.view(np.int8 if sb else U8).reshape(-1, 4).astype(I64)[:, 0:2]
    )
    return ((x * y).sum(axis=1) + c.astype(I64)).astype(I32).view(U32)


def fns(mask, base, offset):
    out = np.full(mask.shape, 0xFFFFFFFF, U32)
    for i, (m, b, o) in enumerate(zip(mask.tolist(), base.tolist(), offset.view(I32).tolist())):
        if o == 0:
            if m >> b & 1:
                out[i] = b
            continue
        order = range(b, 32) if o > 0 else range(b, -1, -1)
        count = 0
        for k in order:
            if m >> k & 1:
                count += 1
                if count == abs(o):
                    out[i] = k
                    break
    return out


# ---- 16-bit floats
def bf16_to_f32(h):
    return (h.astype(U32) << U32(16)).view(F32)


def f32_to_bf16(x, mode="rn"):
    u = np.ascontiguousarray(x).view(U32)
    if mode == "rz":
        r = u >> U32(16)
    elif mode == "rna":
        r = (u + U32(0x8000)) >> U32(16)
    else:
        r = (u + (((u >> U32(16)) & U32(1)) + U32(0x7FFF))) >> U32(16)
    nan = x != x
    if nan.any():
        r = np.where(nan, U32(0x7FFF), r)
    return r.astype(U16)


def pack_bf16x2(hi, lo, mode="rn", relu=False):
    """cvt.{rn,rz}{.relu}.bf16x2.f32 d, hi, lo"""
    x = np.empty((2, hi.size), F32)
    x[0] = lo
    x[1] = hi
    if relu:
        x = np.where(x > 0, x, np.where(x != x, x, F32(0)))
    u = x.view(U32)
    if mode == "rz":
        r = u.copy()
    else:
        r = u >> U32(16)
        r &= U32(1)
        r += u
        r += U32(0x7FFF)
    nan = x != x
    if nan.any():
        r[nan] = 0x7FFF0000
    r[0] >>= U32(16)
    r[1] &= U32(0xFFFF0000)
    r[0] |= r[1]
    return r[0]


def bf16x2_split(u):
    """uint32 row -> float32 [2, lanes] (low half first)."""
    out = np.empty((2, u.size), U32)
    out[0] = u << U32(16)
    out[1] = u & U32(0xFFFF0000)
    return out.view(F32)


def bf16x2_join(x):
    return pack_bf16x2(x[1], x[0])


def f16_fma(a, b, c):
    return (a.astype(F64) * b.astype(F64) + c.astype(F64)).astype(F16)


def pack_f16x2(hi, lo, mode="rn", relu=False):
    out = np.empty((hi.size, 2), F16)
    h, l = f32_to_f16(hi, mode), f32_to_f16(lo, mode)
    out[:, 0], out[:, 1] = l, h
    if relu:
        out = np.where(out > 0, out, np.where(out != out, out, F16(0)))
    return out.view(U32).reshape(-1)


def f32_to_f16(x, mode="rn"):
    r = x.astype(F16)
    if mode == "rn":
        return r
    back = r.astype(F32)
    over = np.isfinite(x) & (np.abs(back) > np.abs(x))
    return np.where(over, np.nextafter(r, F16(0)), r)


def tf32(x, mode="rna"):
    u = np.ascontiguousarray(x).view(U32)
    if mode == "rz":
        r = u
    elif mode == "rna":
        r = u + U32(0x1000)
    else:
        r = u + (((u >> U32(13)) & U32(1)) + U32(0xFFF))
    r = np.where(np.isfinite(x), r, u) & U32(0xFFFFE000)
    return r


# ---- float to integer
def float_to_int(x, dtype, mode):
    x = x.astype(F64)
    f = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
    y = f(x)
    info = np.iinfo(dtype)
    nan = np.isnan(x)
    top = float(info.max)
    big, small = y >= top, y <= float(info.min)
    safe = np.where(nan | big | small, 0.0, y)
    r = safe.astype(np.int64).astype(dtype) if info.max < 2**63 else _f64_to_u64(safe)
    r = np.where(big, dtype(info.max), np.where(small, dtype(info.min), r))
    # PTX: NaN converts to 0 for 32-bit results of f32, to 0x80000000_00000000 for 64-bit ones.
    return np.where(nan, dtype(0), r).astype(dtype)


def _f64_to_u64(y):
    half = 2.0**63
    return np.where(y >= half, (np.where(y >= half, y - half, 0)).astype(U64) + U64(1 << 63), y.astype(U64))


def int_to_float(x, dtype, mode):
    r = x.astype(dtype)
    if mode == "rn":
        return r
    wide = x.astype(np.longdouble)
    d = wide - r.astype(np.longdouble)
    down, up = np.nextafter(r, dtype(-np.inf)), np.nextafter(r, dtype(np.inf))
    if mode == "rm":
        return np.where(d < 0, down, r)
    if mode == "rp":
        return np.where(d > 0, up, r)
    return np.where((r > 0) & (d < 0), down, np.where((r < 0) & (d > 0), up, r))


def round_to_integral(x, mode):
    return {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](x)


def int_sat(x, dtype):
    info = np.iinfo(dtype)
    lo, hi = info.min, info.max
    src = np.iinfo(x.dtype)
    return np.clip(x, max(lo, src.min), min(hi, src.max)).astype(dtype)


def xorsign_abs(a, b, f):
    r = f(np.abs(a), np.abs(b))
    sign = (np.ascontiguousarray(a).view(U32) ^ np.ascontiguousarray(b).view(U32)) & _SIGN
    return ((np.ascontiguousarray(r).view(U32) & U32(0x7FFFFFFF)) | sign).view(F32)


def testp(x, kind):
    a = np.abs(x)
    tiny = np.finfo(x.dtype).tiny
    return {
        "finite": np.isfinite(x), "infinite": np.isinf(x), "number": x == x, "notanumber": x != x,
        "normal": np.isfinite(x) & (a >= tiny), "subnormal": (a < tiny) & (a > 0),
    }[kind]  # fmt: skip


def directed_sqrt(x, mode):
    """float32 square root by rz, rm or rp: the float64 root and its remainder in extended precision."""
    hi = np.sqrt(x.astype(F64))
    lo = (np.sqrt(x.astype(np.longdouble)) - hi).astype(F64)
    return directed(hi, np.where(np.isfinite(lo), lo, 0.0), mode)
