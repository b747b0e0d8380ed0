"""Active-length attention for many query rows (prefill, long q) on Blackwell: the host side of prefill_kernel.py.

`decode.launch` sends what `suits` here. One launch, no workspace.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cute_kernels.jit import kernel_builder

ARCHS = ("sm_100a", "sm_103a")


class Variant(NamedTuple):
    """What is compiled separately; field names as in prefill_kernel.PrefillKernel."""

    bf16: bool
    head_dim: int
    group: int
    wide: bool
    causal: bool
    window: bool
    softcap: bool
    sink: bool
    append: bool
    device_length: bool


def suits(q_len: int, group: int) -> bool:
    """More rows than two of the decode kernel's tiles, and so many tokens that keys need not be split to fill the GPU. A function
    of the call's shape alone. The bounds are estimates, not measured."""
    return q_len >= 16 and q_len * group > 64


def _common_variants(arch: str) -> tuple[Variant, ...]:
    return (Variant(True, 128, 4, True, True, False, False, False, False, False),)


@kernel_builder(
    "active_attention_prefill_sm100", archs=ARCHS, variants=_common_variants,
    options="--ptxas-options -O2",  # -O3 of ptxas 13.0 and 13.4 crashes on some loops around tcgen05.mma
)  # fmt: skip
def prefill_kernel(variant: Variant, arch: str) -> tuple[Any, tuple[Any, ...]]:
    """The kernel of one variant and the arguments of cute.compile."""
    import cutlass.cute as cute
    from cutlass import Float32, Int32

    from cute_kernels.kernels.sm100.fakes import flat, rows, stats
    from cute_kernels.kernels.sm100.prefill_kernel import PrefillKernel

    tensor = [rows(variant.bf16, variant.wide) for _ in range(6)]
    return PrefillKernel(**variant._asdict()), (
        *tensor[:4], stats(), flat(Int32) if variant.device_length else None, Int32(1), flat(Float32) if variant.sink else None,
        tensor[4] if variant.append else None, tensor[5] if variant.append else None, Float32(1.0), Float32(1.0), Int32(0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )  # fmt: skip
