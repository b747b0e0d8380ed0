"""Data paths of the emulator: what one instruction reads, writes and computes.

Pure functions on numpy arrays, with no scheduling and no state of their own:

========== ==========================================================================================================
formats    number formats (f16, bf16, tf32, fp8, fp6, fp4, ue8m0, s8, u8): decode to float32, encode with rounding
swizzle    the XOR patterns that TMA and the tensor cores apply to shared-memory byte addresses
tensormap  CUtensorMap: build, check, encode to the 128 opaque bytes, decode them, replace a field
tma        plans of cp.async.bulk.tensor: tile, gather4, scatter4, reduce
umma       tcgen05.mma: instruction and shared-memory descriptors, accumulator layouts, arithmetic
tmem       tcgen05.ld / .st register maps, tcgen05.cp and tcgen05.shift plans
wgmma      wgmma.mma_async: descriptors, fragments, arithmetic
mma_sync   mma.sync, ldmatrix, stmatrix, movmatrix
========== ==========================================================================================================

A *plan* names every byte that an operation reads and writes before it does so, so that the machine can check races and
bounds first; `apply` then does it. Plans hold no reference to any memory and are cached. An operand that the
instruction set forbids raises `IllegalOperand`.
"""

from __future__ import annotations

from .errors import IllegalOperand

__all__ = ["IllegalOperand"]
