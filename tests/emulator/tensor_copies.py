"""Random tensor copies (TMA loads, stores, additions) whose results an H200 gave, to be replayed on any machine.

    python tests/emulator/tensor_copies.py     records tensor_copies.json anew (needs a Hopper GPU)

Ranks 1 to 4, 1 to 8 byte types, every swizzle, element strides, boxes that leave the tensor on every side the hardware allows,
tensors whose rows are no multiple of 16 bytes, NaN fill. The data are random bytes by seed, so that a result is kept as its hash.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

FILE = Path(__file__).with_suffix(".json")
SEEN = 9216  # bytes of shared memory compared after a load
SIZES = {"u8": 1, "bf16": 2, "f32": 4, "u64": 8}


class Copy(NamedTuple):
    kind: str  # load, store, add
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    coords: tuple[int, ...]
    swizzle: str
    oob: str

    def bytes_of_tensor(self) -> int:
        total = self.dims[0] * SIZES[self.dtype] if not self.strides else self.strides[-1] * self.dims[-1]
        return -(-total // 16) * 16 + 64


def random_bytes(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 255, count, dtype=np.uint8)


def cases() -> Iterator[Copy]:
    rng = np.random.default_rng(7)
    for kind in ("load", "store", "add"):
        for rank in (1, 2, 3, 4):
            for n in range(24):
                dtype = ["u8", "bf16", "f32", "u64"][n % 4] if kind != "add" else ["f32", "u64"][n % 2]
                size = SIZES[dtype]
                swizzle = ["none", "32B", "64B", "128B"][(n // 4) % 4]
                box = [{"none": 64, "32B": 32, "64B": 64, "128B": 128}[swizzle] // size]
                dims, steps = [int(rng.integers(1, 3 * box[0]))], [1]
                for _ in range(rank - 1):
                    b = int(rng.integers(1, {2: 12, 3: 6, 4: 4}[rank]))
                    box.append(b)
                    steps.append(int(rng.choice([1, 1, 2, 3])) if n >= 8 else 1)
                    dims.append(int(rng.integers(1, 2 * b + 3)))
                strides, total = [], dims[0] * size
                for d in dims[1:]:
                    stride = -(-total // 16) * 16 + 16 * int(rng.integers(0, 3))
                    strides.append(stride)
                    total = stride * d
                coords = [int(rng.integers(-b if kind == "load" else 0, d + 1)) for b, d in zip(box, dims)]
                coords[0] -= coords[0] % (16 // size)
                nan = dtype in ("bf16", "f32") and kind == "load" and n % 3 == 0
                sizes = (tuple(x) for x in (dims, strides, box, steps, coords))
                yield Copy(kind, dtype, *sizes, swizzle, "nan" if nan else "zero")


def digest(result: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(result).tobytes()).hexdigest()[:16]


def record() -> None:
    import test_datapath_gpu as t

    gpu, found = t.Gpu(), []
    for i, c in enumerate(cases()):
        data, image = random_bytes(c.bytes_of_tensor(), i), random_bytes(t.IMAGE, 10000 + i)
        pointer, other = gpu.upload(data), gpu.upload(np.zeros_like(image) if c.kind == "load" else image)
        tmap = t.TensorMap(pointer, c.dtype, c.dims, c.strides, c.box, c.steps, "none", c.swizzle, c.oob)
        coords = (ctypes.c_int32(x) for x in (*c.coords, 0, 0, 0, 0)[:5])
        args = [gpu.encode(tmap), ctypes.c_uint64(other), *coords, ctypes.c_uint32(0)]
        if c.kind == "load":
            gpu.launch(t.tma_load_ptx(len(c.dims)), *args, ctypes.c_uint32(tmap.box_bytes))
        else:
            gpu.launch(t.tma_store_ptx(len(c.dims), None if c.kind == "store" else "add"), *args)
        image, data = gpu.download(other, image), gpu.download(pointer, data)
        found.append(digest(image[:SEEN] if c.kind == "load" else data))
    FILE.write_text(json.dumps(found, indent=0) + "\n")


if __name__ == "__main__":
    record()
