"""Compile ahead of the first call: `warmup()`, and CUTE_KERNELS_JIT=import."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cute_kernels.jit import target as _target
from cute_kernels.jit.builder import discover


@dataclass(frozen=True)
class WarmupResult:
    """One kernel that warm-up made ready. origin: "disk" (was there) or "compiled"; seconds: what it took."""

    kernel: str
    config: Any
    arch: str
    origin: str
    seconds: float


def warmup(*kernels: str, arch: str | Iterable[str] | None = None, configs: Iterable[Any] | None = None) -> list[WarmupResult]:
    """Compile kernels into the disk cache, so that no later call of any process has to. Needs no GPU when `arch` is given.

    kernels: names (see `tools/inspect_kernel.py --list`); none means all. arch: "sm_90a", "sm_100a", "sm_103a", or several; default
    CUTE_KERNELS_ARCH, else the visible GPUs. configs: instead of the kernel's default variants (one kernel only).

    Returns one `WarmupResult` per compiled variant. Raises ValueError for an unknown name, UnsupportedGPUError for an arch or GPU
    without kernels, RuntimeError when there is neither a GPU nor an arch, jit.CompileError.
    """
    if arch is None:
        archs = _target.visible_archs()
        if not archs:
            _target.detect()  # names an unsupported GPU
            raise RuntimeError(f"no GPU is visible: give arch= or set CUTE_KERNELS_ARCH. Supported: {_target.supported_text()}")
    else:
        archs = [_target.check_arch(a) for a in ([arch] if isinstance(arch, str) else arch)]
    builders = discover()
    unknown = [name for name in kernels if name not in builders]
    if unknown:
        raise ValueError(f"kernels must be names of {sorted(builders)}, got {unknown[0]!r}")
    if configs is not None and len(kernels) != 1:
        raise ValueError(f"configs go with exactly one kernel name, got {len(kernels)}")
    results = []
    for name in kernels or sorted(builders):
        builder = builders[name]
        for one in archs:
            if one not in builder.archs:
                if kernels and arch is not None:
                    raise _target.UnsupportedGPUError(f"kernel {name} is for {', '.join(builder.archs)}, not for {one}")
                continue
            for config in configs if configs is not None else builder.variants(one):
                made = builder.artifact(config, one)
                results.append(WarmupResult(name, config, one, made.origin, made.seconds))
    return results


def on_import() -> None:
    """What CUTE_KERNELS_JIT=import does: compile all default variants, for CUTE_KERNELS_ARCH or the visible GPUs."""
    archs = _target.visible_archs()
    if not archs:
        warnings.warn(
            "cute_kernels: CUTE_KERNELS_JIT=import compiled nothing: no supported GPU is visible and CUTE_KERNELS_ARCH is not set",
            RuntimeWarning,
            stacklevel=3,
        )
        return
    warmup(arch=archs)
