"""Nine Hopper kernels in PTX, with inputs and NumPy answers: what tools/compare_with_gpu.py runs in the emulator and on a GPU.

Each function returns a `Case`: the PTX text, the launch, its arguments and, computed by NumPy alone, what must come out. Outputs
that hold moved bytes or small integers are compared bit for bit; the others with a tolerance that the case states.

    tma_window       tensor loads and stores of boxes that leave the tensor on both sides, every swizzle mode
    tma_add          the same boxes added to a tensor by cp.reduce.async.bulk.tensor
    ring             producer, consumer and writer warps round two mbarrier rings, bulk copies in and out
    cluster_softmax  four CTAs: st.async with complete_tx, ld.shared::cluster, barrier.cluster
    transpose        cp.async with zero fill in two groups, ldmatrix.trans, stmatrix
    gemm             wgmma, both operands in shared memory, each major and swizzle, bf16, fp16, fp8, tf32; TMA ring
    gemm (regs)      wgmma with A in registers
    gemm (cluster)   B multicast to two CTAs, empty slots signalled across the cluster
    attention        one head: softmax between two chains of wgmma, P from registers, V MN-major
"""

from __future__ import annotations

from .attention import attention
from .boxes import tma_window
from .case import SPAN, Case
from .copies import cluster_softmax, ring, transpose
from .gemm import gemm

__all__ = ["Case", "all_cases", "attention", "cluster_softmax", "gemm", "quick_cases", "ring", "tma_window", "transpose"]


def quick_cases() -> list[Case]:
    """One of each kind, seconds in the emulator."""
    return [
        tma_window("128B"), tma_window("64B", "f32", 3, add=True), ring(), cluster_softmax(), transpose(), gemm(),
        gemm("f16", a_major="MN", b_major="MN"), gemm("e4m3"), gemm("f16", b_major="MN", a_regs=True), gemm(n=128, cluster=2),
        attention(),
    ]  # fmt: skip


def all_cases() -> list[Case]:
    """Every swizzle, major, format and source of A."""
    cases = [tma_window(s, t, r) for s in SPAN for t, r in (("u16", 2), ("bf16", 3), ("f32", 2), ("u8", 3))]
    cases += [tma_window(s, "f32", r, add=True) for s in SPAN for r in (2, 3)]
    cases += [ring(23, 3), ring(9, 2), ring(2, 4), cluster_softmax(), transpose(), transpose(64, 64), transpose(66, 328)]
    for fmt in ("bf16", "f16"):
        for a_major, b_major in (("K", "K"), ("MN", "K"), ("K", "MN"), ("MN", "MN")):
            cases += [gemm(fmt, a_major, b_major, s, s) for s in SPAN]
        cases += [gemm(fmt, a_regs=True), gemm(fmt, b_major="MN", b_swizzle="64B", a_regs=True)]
    for fmt in ("e4m3", "e5m2", "tf32"):
        cases += [gemm(fmt, a_swizzle=s, b_swizzle=s) for s in SPAN]
        cases += [gemm(fmt, a_regs=True), gemm(fmt, a_swizzle="64B", b_swizzle="32B", n=96)]
    cases += [gemm(n=128, cluster=2), gemm("e5m2", n=64, cluster=2), gemm("f16", n=256, k=300, stages=2)]
    cases += [attention(), attention(1, 64), attention(1, 1), attention(3, 320)]
    return cases
