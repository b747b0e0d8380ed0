"""CuTe's layouts as an independent truth for the data-path tests: what the DSL prints, evaluated with numpy.

The DSL is asked in a subprocess, because the architecture it accepts is fixed when it is imported. Run as a program
with "tcgen05" or "sm90" this file prints a Python dict of the strings it collected.
"""

import ast
import functools
import importlib.util
import itertools
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from cute_kernels.emulator.datapath import formats

# ------------------------------------------------------------------ a tiny reader of CuTe layout strings

def parse(text: str):
    """'((8,16),(64,1)):((64,512),(1,0))' -> nested (shape, stride) tuples; a leading 'S<b,m,s> o 0 o' is split off."""
    swizzle = None
    match = re.match(r"S<(\d+),(\d+),(\d+)> o 0 o (.*)", text)
    if match:
        swizzle, text = tuple(map(int, match.groups()[:3])), match.group(4)
    shape, stride = text.split(":")
    tidy = {"shape": shape, "stride": stride}
    return swizzle, eval(tidy["shape"], {}), eval(tidy["stride"], {})  # digits, commas and parentheses only


def flat(x):
    return [x] if isinstance(x, int) else [z for y in x for z in flat(y)]


def offsets(shape, stride, count: int) -> np.ndarray:
    """Offset of coordinates 0..count-1 of one mode (colexicographic, as CuTe enumerates)."""
    index = np.arange(count)
    out = np.zeros(count, np.int64)
    for n, d in zip(flat(shape), flat(stride)):
        out += index % n * d
        index = index // n
    return out


ATOMS = ["MN_INTER", "MN_SW32", "MN_SW64", "MN_SW128", "MN_SW128_32B", "K_INTER", "K_SW32", "K_SW64", "K_SW128"]
SWIZZLE_NAME = {"INTER": "none", "SW32": "32B", "SW64": "64B", "SW128": "128B", "SW128_32B": "128B_32B-atom"}
TYPES = {"bf16": "BFloat16", "f16": "Float16", "tf32": "TFloat32", "e4m3": "Float8E4M3FN", "e5m2": "Float8E5M2",
         "s8": "Int8", "u8": "Uint8"}


def tile_addresses(facts, name: str, fmt: str, extent: int, order=(0, 1)):
    """Byte addresses [extent, k] relative to the tile (before the swizzle), the swizzle, and its (k) extent."""
    base = {"f16": "bf16", "e5m2": "e4m3", "s8": "e4m3", "u8": "e4m3"}.get(fmt, fmt)
    key = ("tile", name, base, extent, order)
    size = formats.STORAGE_BYTES[fmt]
    if key in facts:
        swizzle, shape, stride = parse(facts[key])
        k = 128 // size
        linear = offsets(shape[0], stride[0], extent)[:, None] + offsets(shape[1], stride[1], k)[None, :]
        return linear * size, swizzle
    # Extents the DSL was not asked for: repeat its atom along MN first, then K (tile_to_shape's order (0, 1)).
    swizzle, shape, stride = parse(facts["atom", name, base])
    k = 128 // size
    rows, cols = -(-extent // shape[0]), k // shape[1]
    atom = shape[0] * shape[1]
    i, j = np.arange(extent), np.arange(k)
    linear = (i % shape[0] * stride[0] + i // shape[0] * atom)[:, None] + \
             (j % shape[1] * stride[1] + j // shape[1] * atom * rows)[None, :]
    assert cols >= 1
    return linear * size, swizzle


def cute_swizzle(addr, swizzle):
    bits, base, shift = swizzle
    return addr ^ ((addr >> shift) & (((1 << bits) - 1) << base))


def descriptor(relative: np.ndarray, name: str, fmt: str, start: int, wgmma: bool = False) -> int:
    """Strides read off the CuTe layout, as documented for make_umma_desc, packed as PTX Table 40 says."""
    size = formats.STORAGE_BYTES[fmt]
    major, kind = name.split("_", 1)
    t = 16 // size
    extent, k = relative.shape

    def at(i, j):
        return int(relative[i, j]) if i < extent and j < k else 0

    if major == "K":
        sbo, lbo = at(8, 0), at(0, t) if kind == "INTER" else 16
    elif kind == "INTER":
        sbo, lbo = at(t, 0), at(0, 8)
    else:
        width = {"SW32": 2, "SW64": 4, "SW128": 8, "SW128_32B": 8}[kind] * t
        lbo, sbo = at(width, 0), at(0, 4 if kind == "SW128_32B" else 8)
    if wgmma:  # PTX 9.7.15.5.1.2.2: swizzle in bits 62-63, no constant bits
        code = {"INTER": 0, "SW128": 1, "SW64": 2, "SW32": 3}[kind]
        return (start >> 4) | (lbo >> 4) << 16 | (sbo >> 4) << 32 | code << 62
    code = {"INTER": 0, "SW128_32B": 1, "SW128": 2, "SW64": 4, "SW32": 6}[kind]
    return (start >> 4) | (lbo >> 4) << 16 | (sbo >> 4) << 32 | 1 << 46 | code << 61


def raw_bits(fmt: str, values: np.ndarray) -> np.ndarray:
    """uint8 [..., size] of small integers in a format, by numpy/torch-free conversions where one exists."""
    size = formats.STORAGE_BYTES[fmt]
    if fmt in ("s8", "u8"):
        raw = values.astype(np.int8)
    elif fmt == "f16":
        raw = values.astype(np.float16)
    elif fmt == "tf32":
        raw = values.astype(np.float32).view(np.uint32) | np.uint32(0x1FFF)  # the low bits must not count
    else:
        raw = formats.encode(fmt, values.astype(np.float32))
    return np.ascontiguousarray(raw).view(np.uint8).reshape(*values.shape, size)


class Tile:
    """A logical [extent, k] operand written to shared memory through CuTe's layout."""

    def __init__(self, facts, rng, fmt, name, extent, order=(0, 1)):
        low, high = (0, 4) if fmt == "u8" else (-3, 4)
        self.fmt, self.name = fmt, name
        self.relative, self.swizzle = tile_addresses(facts, name, fmt, extent, order)
        self.values = rng.integers(low, high, self.relative.shape).astype(np.float64)

    def write(self, smem, start, values=None):
        values = self.values if values is None else values
        size = formats.STORAGE_BYTES[self.fmt]
        addr = cute_swizzle(start + self.relative, self.swizzle)
        smem[addr[..., None] + np.arange(size)] = raw_bits(self.fmt, values)

    def desc(self, start, k0, wgmma=False):
        return descriptor(self.relative, self.name, self.fmt, start + int(self.relative[0, k0]), wgmma)


# ------------------------------------------------------------------ asking the DSL

def collect_atoms(facts, namespace, kinds, names, extents) -> None:
    """('atom', name, type) and ('tile', name, type, extent, order): shared-memory layouts as the DSL prints them."""
    import cutlass
    import cutlass.cute as cute

    for name in names:
        for fmt in ("bf16", "tf32", "e4m3"):
            atom = namespace.make_smem_layout_atom(getattr(kinds, name), getattr(cutlass, TYPES[fmt]))
            facts["atom", name, fmt] = str(atom)
            for extent, order in itertools.product(extents, ((0, 1), (1, 0))):
                k = 128 // (4 if fmt == "tf32" else 2 if fmt == "bf16" else 1)
                if parse(str(atom))[1][0] <= extent:  # an atom may be wider than the tile
                    facts["tile", name, fmt, extent, order] = str(cute.tile_to_shape(atom, (extent, k), order))


def collect_tcgen05(facts) -> None:
    """Also ('C', cta_group, m, n), ('A', cta_group, m) and ('ld', shape, num)."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

    collect_atoms(facts, tcgen05, tcgen05.SmemLayoutAtomKind, ATOMS, (64, 128, 256))
    for cg, group, sizes in ((1, tcgen05.CtaGroup.ONE, (64, 128)), (2, tcgen05.CtaGroup.TWO, (128, 256))):
        for m, n in itertools.product(sizes, (32, 64, 128, 256)):
            op = tcgen05.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (m, n, 16), group,
                                      tcgen05.OperandSource.TMEM, OperandMajorMode.K, OperandMajorMode.K)
            mma = cute.make_tiled_mma(op)
            facts["C", cg, m, n] = str(mma.make_fragment_C(mma.partition_shape_C((m, n))).layout)
            facts["A", cg, m] = str(mma.make_fragment_A(mma.partition_shape_A((m, 16))).layout)
    shapes = {"32x32b": ("Ld32x32bOp", 128), "16x64b": ("Ld16x64bOp", 128), "16x128b": ("Ld16x128bOp", 64),
              "16x256b": ("Ld16x256bOp", 32), "16x32bx2": ("Ld16x32bx2Op", 128)}
    for shape, (name, most) in shapes.items():
        for num in (1 << i for i in range(8)):
            if num <= most:
                op = getattr(tcgen05, name)(getattr(tcgen05.Repetition, f"x{num}"))
                facts["ld", shape, num] = str(cute.make_copy_atom(op, cutlass.Float32).layout_dst_tv)


def collect_sm90(facts) -> None:
    """Atoms of wgmma; ('wgmma', operand, type, n), ('mma', operand, type, k), ('ldmatrix', trans, num) TV layouts."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

    names = [a for a in ATOMS if a != "MN_SW128_32B"]
    collect_atoms(facts, warpgroup, warpgroup.SmemLayoutAtomKind, names, (64, 128, 256))
    major, source = OperandMajorMode.K, warpgroup.OperandSource.RMEM
    for n in (8, 64, 96, 256):
        ops = {
            "bf16": warpgroup.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (64, n, 16), source, major, major),
            "e4m3": warpgroup.MmaF8Op(cutlass.Float8E4M3FN, cutlass.Float8E4M3FN, cutlass.Float32, (64, n, 32), source,
                                      major, major),
        }
        for fmt, op in ops.items():
            facts["wgmma", "A", fmt, n], _, facts["wgmma", "C", fmt, n] = tv_layouts(cute.make_tiled_mma(op))
    for k in (8, 16):
        op = warp.MmaF16BF16Op(cutlass.Float16, cutlass.Float32, (16, 8, k))
        facts["mma", "A", k], facts["mma", "B", k], facts["mma", "C", k] = tv_layouts(cute.make_tiled_mma(op))
    for trans, num in itertools.product((False, True), (1, 2, 4)):
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(trans, num), cutlass.Float16)
        facts["ldmatrix", trans, num] = (str(atom.layout_src_tv), str(atom.layout_dst_tv))


def tv_layouts(tiled_mma) -> list[str]:
    """The TV layouts of A, B and C, from the DSL's printed description of the atom."""
    return re.findall(r"TV Layout [ABC]: +(\S+)", str(tiled_mma))[-3:]


@functools.lru_cache
def cute_facts(which: str) -> dict:
    """Everything one of the collectors gathers; skips the calling test where the DSL is absent."""
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("CuTe DSL absent")
    arch = {"tcgen05": "sm_100a", "sm90": "sm_90a"}[which]
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    env = dict(os.environ, CUTE_DSL_ARCH=arch, PYTHONPATH=root)
    done = subprocess.run([sys.executable, "-W", "ignore", os.path.abspath(__file__), which], env=env,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return ast.literal_eval(done.stdout[done.stdout.index("{") :])


if __name__ == "__main__":
    import cutlass.cute

    found: dict = {}

    @cutlass.cute.jit
    def trace():
        (collect_tcgen05 if sys.argv[1] == "tcgen05" else collect_sm90)(found)

    trace()
    print(found)
