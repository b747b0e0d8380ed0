"""Stand-ins for the tensors of active-length attention, for cute.compile."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute


def rows(bf16: bool, wide: bool) -> Any:
    """[., ., ., D]; that rows start at multiples of 16 bytes is checked by the generated host code, cheaper than in Python."""
    shape = tuple(cute.sym_int() for _ in range(4))
    stride = tuple(cute.sym_int64(divisibility=8 if wide else 1) for _ in range(3))
    dtype = cutlass.BFloat16 if bf16 else cutlass.Float16
    return cute.runtime.make_fake_tensor(dtype, shape, (*stride, 1), assumed_align=16 if wide else 2)


def stats() -> Any:
    """[B, Hq, S] fp32."""
    shape, stride = tuple(cute.sym_int() for _ in range(3)), tuple(cute.sym_int64() for _ in range(3))
    return cute.runtime.make_fake_tensor(cutlass.Float32, shape, stride, assumed_align=4)


def flat(element: Any) -> Any:
    return cute.runtime.make_fake_tensor(element, (cute.sym_int64(),), (1,), assumed_align=element.width // 8)
