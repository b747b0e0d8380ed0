"""Number formats of the tensor cores and of cvt: raw bits <-> float32, bit exact.

`decode` turns raw unsigned integers into float32 (every format here is exactly representable in float32, `f32`
itself included). `encode` rounds float32 into a format as PTX's cvt does, including subnormals, infinities, NaN
(canonical NaN of each format), `.relu` and `.satfinite`. Fast paths cover bf16 and f16 round-to-nearest, which the
softmax of an attention kernel executes most; all others share one exact routine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from .errors import IllegalOperand


@dataclass(frozen=True)
class FloatFormat:
    """Layout of a floating-point format.

    Attributes:
        bits: storage bits the format occupies inside its container.
        exp: exponent bits.
        man: mantissa bits.
        bias: exponent bias.
        inf: raw bits of +infinity, or None where the format has none.
        nan: raw bits of the canonical NaN, or None where the format has none.
        max: raw bits of the largest finite magnitude.
        dtype: numpy dtype of the raw values.
    """

    bits: int
    exp: int
    man: int
    bias: int
    inf: int | None
    nan: int | None
    max: int
    dtype: type


FLOATS: dict[str, FloatFormat] = {
    "f16": FloatFormat(16, 5, 10, 15, 0x7C00, 0x7FFF, 0x7BFF, np.uint16),
    "bf16": FloatFormat(16, 8, 7, 127, 0x7F80, 0x7FFF, 0x7F7F, np.uint16),
    "e4m3": FloatFormat(8, 4, 3, 7, None, 0x7F, 0x7E, np.uint8),
    "e5m2": FloatFormat(8, 5, 2, 15, 0x7C, 0x7F, 0x7B, np.uint8),
    "e2m3": FloatFormat(6, 2, 3, 1, None, None, 0x1F, np.uint8),
    "e3m2": FloatFormat(6, 3, 2, 3, None, None, 0x1F, np.uint8),
    "e2m1": FloatFormat(4, 2, 1, 1, None, None, 0x07, np.uint8),
    "ue4m3": FloatFormat(7, 4, 3, 7, None, 0x7F, 0x7E, np.uint8),
}

#: Bytes of one element as it lies in memory (sub-byte formats in their 8-bit container).
STORAGE_BYTES: dict[str, int] = {
    "f16": 2, "bf16": 2, "tf32": 4, "f32": 4, "s32": 4, "u32": 4, "f64": 8,
    "e4m3": 1, "e5m2": 1, "e2m3": 1, "e3m2": 1, "e2m1": 1, "ue8m0": 1, "ue4m3": 1, "s8": 1, "u8": 1,
}

FORMATS = ("f16", "bf16", "tf32", "f32", "e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "ue8m0", "ue4m3", "s8", "u8")

_TF32_MASK = np.uint32(0xFFFFE000)
_NEAREST = ("rn", "rna")
_ROUNDINGS = ("rn", "rna", "rz", "rp", "rm")


@cache
def decode_table(fmt: str) -> np.ndarray:
    """float32[256]: the value of every raw pattern of an 8-bit-or-smaller format.

    Bits above a format's width are ignored (a 6-bit value in an 8-bit container).
    """
    raw = np.arange(256, dtype=np.int64)
    if fmt == "s8":
        table = raw.astype(np.uint8).view(np.int8).astype(np.float32)
    elif fmt == "u8":
        table = raw.astype(np.float32)
    elif fmt == "ue8m0":
        table = np.ldexp(np.ones(256), np.minimum(raw, 254) - 127).astype(np.float32)
        table[255] = np.nan
    else:
        f = FLOATS[fmt]
        signed = fmt != "ue4m3"
        mag = raw & ((1 << (f.exp + f.man)) - 1)
        exp, man = mag >> f.man, mag & ((1 << f.man) - 1)
        frac = np.where(exp == 0, man, man + (1 << f.man))
        value = np.ldexp(frac.astype(np.float64), np.maximum(exp, 1) - f.bias - f.man)
        if f.inf is not None:
            value[mag == f.inf] = np.inf
            value[mag > f.inf] = np.nan
        elif f.nan is not None:
            value[mag == f.nan] = np.nan
        if signed:
            value = np.where((raw >> (f.exp + f.man)) & 1, -value, value)
        table = value.astype(np.float32)
    table.setflags(write=False)
    return table


def decode(fmt: str, raw: np.ndarray) -> np.ndarray:
    """float32 values of raw bit patterns.

    Args:
        fmt: one of `FORMATS`. tf32 ignores the low 13 bits, as the tensor core does.
        raw: unsigned integers of the format's width or wider (any shape); s8/u8 as raw bytes.

    Returns:
        float32 array of the same shape.
    """
    raw = np.asarray(raw)
    if fmt == "bf16":
        out = np.zeros(raw.shape + (2,), np.uint16)
        out[..., 1] = raw
        return out.view(np.float32)[..., 0]
    if fmt == "f16":
        return raw.astype(np.uint16, copy=False).view(np.float16).astype(np.float32)
    if fmt == "tf32":
        return (raw.astype(np.uint32, copy=False) & _TF32_MASK).view(np.float32)
    if fmt == "f32":
        return raw.astype(np.uint32, copy=False).view(np.float32)
    if fmt not in FORMATS:
        raise IllegalOperand("format", fmt, f"must be one of {', '.join(FORMATS)}")
    return decode_table(fmt)[raw.astype(np.uint8, copy=False)]


def _round_magnitude(scaled: np.ndarray, negative: np.ndarray, rounding: str) -> np.ndarray:
    """Round non-negative float64 `scaled` to integers; `negative` is the sign of the value it belongs to."""
    if rounding == "rn":
        return np.rint(scaled)
    if rounding == "rna":
        return np.floor(scaled + 0.5)
    if rounding == "rz":
        return np.floor(scaled)
    up = negative if rounding == "rm" else ~negative
    return np.where(up, np.ceil(scaled), np.floor(scaled))


def _encode_float(f: FloatFormat, x: np.ndarray, rounding: str, satfinite: bool, signed: bool) -> np.ndarray:
    """Exact float32 -> format conversion; see `encode`."""
    bits = x.view(np.uint32)
    negative = (bits >> np.uint32(31)).astype(bool)
    nan = np.isnan(x)
    finite = np.isfinite(x)
    mag = np.abs(np.where(finite, x, np.float32(0)).astype(np.float64))
    emin = 1 - f.bias
    exponent = np.maximum(np.frexp(mag)[1] - 1, emin)  # frexp of 0 gives exponent 0; n below is 0 all the same
    exponent = np.where(mag == 0, emin, exponent)
    n = _round_magnitude(np.ldexp(mag, f.man - exponent), negative, rounding).astype(np.int64)
    code = ((exponent + f.bias).astype(np.int64) << f.man) + n - (1 << f.man)
    over = code > f.max
    # Overflow: to infinity when rounding goes away from zero (or to NaN where there is no infinity), else to max.
    away = np.ones_like(negative) if rounding in _NEAREST else (
        np.zeros_like(negative) if rounding == "rz" else (negative if rounding == "rm" else ~negative))
    top = f.inf if f.inf is not None else (f.nan if f.nan is not None else f.max)
    code = np.where(over, np.where(away & (not satfinite), top, f.max), code)
    code = np.where(~finite, f.max if satfinite else top, code)
    if signed:
        code = code | (negative.astype(np.int64) << (f.exp + f.man))
    else:
        code = np.where(negative, 0, code)
    # NaN: canonical, positive; formats without NaN give +max (PTX cvt, .satfinite).
    code = np.where(nan, f.nan if f.nan is not None else f.max, code)
    return code.astype(f.dtype)


def encode(fmt: str, x: np.ndarray, rounding: str = "rn", relu: bool = False, satfinite: bool = False) -> np.ndarray:
    """Round float32 to a format, as PTX's cvt does.

    Args:
        fmt: one of `FORMATS`.
        x: float32 array.
        rounding: "rn" nearest even, "rna" nearest away, "rz" to zero, "rp" up, "rm" down.
        relu: clamp negative results (and NaN stays NaN) to +0.
        satfinite: overflow and infinity give the largest finite magnitude. Formats without infinity and NaN (e2m3,
            e3m2, e2m1) always saturate, as cvt requires it of them; e4m3 without satfinite overflows to NaN.

    Returns:
        Raw bits: uint8 for 8-bit and smaller formats, uint16 for f16 and bf16, uint32 for tf32 and f32.
    """
    if rounding not in _ROUNDINGS:
        raise IllegalOperand("rounding", rounding, f"must be one of {', '.join(_ROUNDINGS)}")
    x = np.asarray(x, np.float32)
    if relu:
        x = np.where(x > 0, x, np.where(np.isnan(x), x, np.float32(0)))  # -0 and negatives become +0
    if fmt == "bf16" and not satfinite and rounding in ("rn", "rz"):
        bits = np.ascontiguousarray(x).view(np.uint32)
        if rounding == "rn":
            out = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
        else:
            out = bits >> np.uint32(16)
        out = out.astype(np.uint16)
        nan = np.isnan(x)
        if nan.any():
            out = np.where(nan, np.uint16(0x7FFF), out)
        return out
    if fmt == "f16" and not satfinite and rounding == "rn":
        with np.errstate(over="ignore"):
            out = x.astype(np.float16).view(np.uint16)
        nan = np.isnan(x)
        if nan.any():
            out = np.where(nan, np.uint16(0x7FFF), out)
        return out
    if fmt == "f32":
        return np.ascontiguousarray(x).view(np.uint32).copy()
    x = np.ascontiguousarray(x)
    if fmt == "tf32":
        return _encode_tf32(x, rounding, satfinite)
    if fmt in ("s8", "u8"):
        low, high = (-128, 127) if fmt == "s8" else (0, 255)
        wide = np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=1e9, neginf=-1e9)
        n = _round_magnitude(np.abs(wide), wide < 0, rounding)
        return np.clip(np.where(wide < 0, -n, n), low, high).astype(np.int16).astype(np.uint8)
    if fmt == "ue8m0":
        return _encode_ue8m0(x, rounding)
    if fmt not in FLOATS:
        raise IllegalOperand("format", fmt, f"must be one of {', '.join(FORMATS)}")
    f = FLOATS[fmt]
    if f.nan is None:
        satfinite = True
    return _encode_float(f, x, rounding, satfinite, signed=fmt != "ue4m3")


def _encode_tf32(x: np.ndarray, rounding: str, satfinite: bool) -> np.ndarray:
    """tf32 keeps f32's exponent range and 10 mantissa bits, stored in the top 19 bits of a word."""
    bits = x.view(np.uint32)
    step = np.uint32(1 << 13)
    low = bits & np.uint32(0x1FFF)
    base = bits & _TF32_MASK
    negative = (bits >> np.uint32(31)).astype(bool)
    if rounding == "rn":
        up = (low > 0x1000) | ((low == 0x1000) & ((bits >> np.uint32(13)) & np.uint32(1)).astype(bool))
    elif rounding == "rna":
        up = low >= 0x1000
    elif rounding == "rz":
        up = np.zeros(bits.shape, bool)
    else:
        up = (low != 0) & (negative if rounding == "rm" else ~negative)
    finite = np.isfinite(x)
    out = np.where(up & finite, base + step, np.where(finite, base, bits))
    if satfinite:
        infinite = (out & np.uint32(0x7FFFFFFF)) == np.uint32(0x7F800000)
        out = np.where(infinite, (out & np.uint32(0x80000000)) | np.uint32(0x7F7FE000), out)
    # An H200 keeps the top of a NaN's payload under .rna and gives one NaN otherwise (test_datapath_gpu.py).
    return np.where(np.isnan(x), base if rounding == "rna" else np.uint32(0x7FFFE000), out).astype(np.uint32)


def _encode_ue8m0(x: np.ndarray, rounding: str) -> np.ndarray:
    """ue8m0 is 2**(code - 127), no sign and no zero; 0xff is NaN. Negative input takes the magnitude's clamp 0."""
    mag = x.astype(np.float64)
    nan = np.isnan(mag)
    safe = np.where(nan | (mag <= 0), 1.0, np.where(np.isinf(mag), 2.0**127, mag))
    fraction, exponent = np.frexp(safe)  # safe = fraction * 2**exponent, fraction in [0.5, 1)
    code = exponent - 1 + 127
    if rounding == "rp":
        code = code + (fraction > 0.5)
    elif rounding in _NEAREST:
        code = code + (fraction >= 0.75)
    code = np.clip(code, 0, 254)
    code = np.where(mag <= 0, 0, np.where(np.isinf(mag) & (mag > 0), 254, code))
    return np.where(nan, 255, code).astype(np.uint8)
