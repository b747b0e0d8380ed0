"""Logit softcap on the device: cap * tanh(x / cap), in base 2."""

from __future__ import annotations

from typing import Any

from cutlass import Int32

from cute_kernels.kernels import ptx
from cute_kernels.kernels.scales import LOG2E


def capped(y: Any, cap_log2: Any) -> Any:
    """tanh(y) * cap_log2, with y = x / cap and cap_log2 = cap * log2(e).

    tanh y = 1 - 2 / (exp 2y + 1): tanh.approx errs by 2^-11, which a cap of 50 makes 0.02. For |y| < 1/32 that would cancel, and a
    cap of 1e5 make an error of 6e-3 of it: y - y^3 / 3 + 2 y^5 / 15 is right to 5e-11 there.
    """
    y2 = y * y
    near = y * (1.0 + y2 * (y2 * (2 / 15) - 1 / 3))
    far = 1.0 - 2.0 * ptx.rcp(ptx.exp2(y * (2 * LOG2E)) + 1.0)
    return ptx.select_f(Int32(y2 < 1 / 1024), near, far) * cap_log2
