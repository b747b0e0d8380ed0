"""Number formats and swizzles against torch's own conversions, brute force, and the ISA's printed swizzle tables."""

import numpy as np
import pytest

from cute_kernels.emulator.datapath import IllegalOperand, formats, swizzle

torch = pytest.importorskip("torch")

TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def interesting_floats() -> np.ndarray:
    rng = np.random.default_rng(7)
    bits = rng.integers(0, 1 << 32, 20000, dtype=np.uint64).astype(np.uint32)
    exps = (rng.integers(90, 150, 20000, dtype=np.uint64) << 23 | rng.integers(0, 1 << 23, 20000, dtype=np.uint64))
    coarse = exps.astype(np.uint32) & np.uint32(0xFFF00000)  # exact ties in small formats
    special = np.array([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x80000001, 0x7F7FFFFF], np.uint32)
    return np.concatenate([bits, exps.astype(np.uint32), coarse, coarse | np.uint32(1 << 31), special]).view(np.float32)


def same_values(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.array_equal(a, b, equal_nan=True) and np.array_equal(np.signbit(a)[~np.isnan(a)],
                                                                        np.signbit(b)[~np.isnan(b)]))


@pytest.mark.parametrize("fmt", list(TORCH))
def test_decode_and_encode_agree_with_torch(fmt):
    width = torch.tensor([], dtype=TORCH[fmt]).element_size()
    raw = np.arange(1 << (8 * width), dtype=np.uint8 if width == 1 else np.uint16)
    want = torch.from_numpy(raw).view(TORCH[fmt]).float().numpy()
    assert same_values(formats.decode(fmt, raw), want)
    x = interesting_floats()
    if fmt == "e4m3":  # torch releases differ beyond the largest finite value (NaN or saturation)
        x = x[np.abs(x) <= 448]
    got = formats.encode(fmt, x)
    ref = torch.from_numpy(x).to(TORCH[fmt]).float().numpy()
    assert same_values(formats.decode(fmt, got), ref)
    back = formats.encode(fmt, want)
    finite = ~np.isnan(want)
    assert np.array_equal(back[finite], raw[finite])
    assert np.all(back[~finite] == formats.FLOATS[fmt].nan)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "f16", "bf16"])
@pytest.mark.parametrize("rounding", ["rn", "rz", "rp", "rm", "rna"])
def test_encode_brute_force(fmt, rounding):
    """Nearest or neighbouring representable value, found by search among all of the format's finite values."""
    f = formats.FLOATS[fmt]
    codes = np.arange(1 << f.bits, dtype=np.uint32)
    values = formats.decode(fmt, codes.astype(f.dtype)).astype(np.float64)
    keep = np.isfinite(values)
    order = np.argsort(values[keep], kind="stable")
    grid, grid_codes = values[keep][order], codes[keep][order]
    x = interesting_floats()
    x = x[np.isfinite(x)]
    x = x[np.abs(x) <= grid[-1]].astype(np.float32)
    got = formats.decode(fmt, formats.encode(fmt, x, rounding, satfinite=True)).astype(np.float64)
    x64 = x.astype(np.float64)
    low = grid[np.maximum(np.searchsorted(grid, x64, "right") - 1, 0)]
    high = grid[np.minimum(np.searchsorted(grid, x64, "left"), len(grid) - 1)]
    if rounding == "rz":
        want = np.where(x64 < 0, high, low)
    elif rounding == "rp":
        want = high
    elif rounding == "rm":
        want = low
    else:
        down, up = x64 - low, high - x64
        code_low = grid_codes[np.maximum(np.searchsorted(grid, x64, "right") - 1, 0)]
        tie_low = (code_low & 1) == 0 if rounding == "rn" else x64 < 0
        want = np.where(down < up, low, np.where(up < down, high, np.where(tie_low, low, high)))
    assert np.array_equal(got, want)


def test_saturation_relu_and_special_values():
    x = np.array([1e30, -1e30, np.inf, -np.inf, np.nan, -0.0, -3.0], np.float32)
    e4m3 = formats.encode("e4m3", x, satfinite=True)
    assert e4m3.tolist() == [0x7E, 0xFE, 0x7E, 0xFE, 0x7F, 0x80, 0xC4]
    assert formats.encode("e4m3", x).tolist()[:3] == [0x7F, 0xFF, 0x7F]
    assert formats.encode("e5m2", x).tolist()[:4] == [0x7C, 0xFC, 0x7C, 0xFC]
    assert formats.encode("bf16", x, relu=True).tolist()[4:] == [0x7FFF, 0, 0]
    assert formats.encode("f16", x, relu=True, satfinite=True).tolist()[:4] == [0x7BFF, 0, 0x7BFF, 0]
    assert formats.encode("e2m1", x).tolist()[4] == 7
    assert formats.encode("s8", np.array([2.5, 3.5, -2.5, 300, -300, np.nan], np.float32)).view(np.int8).tolist() == \
        [2, 4, -2, 127, -128, 0]
    with pytest.raises(IllegalOperand, match="format"):
        formats.decode("e9m9", np.zeros(1, np.uint8))


def test_tf32_and_ue8m0():
    x = interesting_floats()
    finite = x[np.isfinite(x)]
    with np.errstate(over="ignore"):
        got = formats.encode("tf32", finite, "rz").view(np.float32)
    assert np.all(got.view(np.uint32) & 0x1FFF == 0)
    assert np.all(np.abs(got) <= np.abs(finite))
    near = formats.encode("tf32", np.array([1 + 2**-11, 1 + 3 * 2**-11], np.float32)).view(np.float32)
    assert near.tolist() == [1.0, 1 + 2**-9]
    assert formats.encode("tf32", np.array([1 + 2**-11], np.float32), "rna").view(np.float32)[0] == 1 + 2**-10
    assert formats.decode("tf32", np.array([0x3F801FFF], np.uint32))[0] == 1.0
    raw = np.arange(255, dtype=np.uint8)
    assert np.array_equal(formats.encode("ue8m0", formats.decode("ue8m0", raw), "rp"), raw)
    assert formats.encode("ue8m0", np.array([3.0, 3.0001], np.float32), "rz").tolist() == [128, 128]
    assert formats.encode("ue8m0", np.array([3.0, 2.0], np.float32), "rp").tolist() == [129, 128]
    if hasattr(torch, "float8_e8m0fnu"):
        want = torch.from_numpy(np.arange(256, dtype=np.uint8)).view(torch.float8_e8m0fnu).float().numpy()
        assert np.array_equal(formats.decode("ue8m0", np.arange(256, dtype=np.uint8)), want, equal_nan=True)


# PTX ISA 5.5.7, the printed patterns: row r of the table lists which 16-byte chunk of the source line lands where.
PRINTED = {
    "32B": ["01234567", "10325476"],
    "64B": ["01234567", "10325476", "23016745", "32107654"],
    "128B": ["01234567", "10325476", "23016745", "32107654", "45670123", "54761032", "67452301", "76543210"],
    "128B_32B-atom": ["01234567", "23016745", "45670123", "67452301"],
    "128B_64B-atom": ["01234567", "45670123"],
}


@pytest.mark.parametrize("mode", list(PRINTED))
def test_swizzle_is_the_printed_pattern(mode):
    table = PRINTED[mode]
    addr = np.arange(0, 4096, 16)
    where = swizzle.swizzle_offset(addr, mode)
    for a, w in zip(addr.tolist(), where.tolist()):
        line, chunk = divmod(a, 128)
        assert w // 128 == line
        assert int(table[line % len(table)][w % 128 // 16]) == chunk // 16
    assert np.array_equal(swizzle.swizzle_offset(where, mode), addr)
    assert swizzle.swizzle_offset(0x90, "128B") == 0x80
    # A pattern that starts at line 3 and says so behaves like one that starts at line 0.
    shifted = swizzle.swizzle_offset(addr + 3 * 128, mode, base_offset=3)
    assert np.array_equal(shifted - 3 * 128, where)


def test_swizzle_agrees_with_cute():
    cute = pytest.importorskip("cutlass.cute", reason="CuTe DSL absent")
    pairs = {"32B": (1, 4, 3), "64B": (2, 4, 3), "128B": (3, 4, 3), "128B_32B-atom": (2, 5, 2)}
    found = {}

    @cute.jit
    def evaluate():
        for mode, bms in pairs.items():
            layout = cute.make_composed_layout(cute.make_swizzle(*bms), 0, cute.make_layout(2048))
            found[mode] = [int(layout(i)) for i in range(0, 2048, 48)]

    evaluate()
    assert set(found) == set(pairs)
    for mode, want in found.items():
        assert [swizzle.swizzle_offset(i, mode) for i in range(0, 2048, 48)] == want
