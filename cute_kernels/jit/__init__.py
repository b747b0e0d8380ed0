"""Just-in-time compilation: which GPU, which compiled kernel, where it is kept.

A kernel author writes a builder: a function from a config to the arguments of `cute.compile`. Everything else (options, locks, disk
cache, PTX for the emulator, warm-up, the message on a terminal) is done here. In full:

    from typing import NamedTuple
    from cute_kernels.jit import kernel_builder

    class Config(NamedTuple):                        # whatever changes code; never a length, a stride or an address
        bf16: bool
        has_sink: bool

    @kernel_builder("combine", archs=("sm_90a", "sm_100a"), variants=(Config(True, False),))
    def combine_kernel(config: Config, arch: str):   # runs on a miss only: import the DSL and the device code in here
        import cutlass.cute as cute
        from cute_kernels.kernels.combine_kernel import Combine
        stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        return Combine(**config._asdict()), (cute.runtime.make_fake_tensor(...), ..., stream)

    run = combine_kernel(config, target)             # target: a Target (`current_target(device)`) or an arch string
    run(out, lse, sink)                              # positional; torch tensors; None for an absent tensor; no stream argument

`run` is a raw `tvm_ffi.Function` reloaded from the exported object: it takes torch's current stream of the tensors' device, so pass
no stream, and arguments by position only. `combine_kernel(config, target)` is a dictionary lookup once it is there; a launcher that
counts every microsecond keeps `run`, with `target.key` in the key (an emulated kernel is another object), and has its builder
return `cute_kernels.kernels.by_address.by_address(kernel, arguments)`: then it passes addresses and a stream instead of tensors.

`variants` are the configs that `cute_kernels.warmup()` compiles (a tuple, or a function of the arch). `options` adds compiler flags
("--ptxas-options -O2", or a function of config and arch). The cache key holds the text of the builder's file and of every
cute_kernels module that it imports, directly or not, inside functions too; name modules that are found in another way in `sources`.
`combine_kernel.artifact(config, arch)` gives PTX, cubin and the object's path, with no GPU.

Environment: CUTE_KERNELS_ARCH (compile for this arch), CUTE_KERNELS_CACHE_DIR (default: $XDG_CACHE_HOME/cute_kernels, else
~/.cache/cute_kernels), CUTE_KERNELS_CACHE=0 (keep nothing on disk), CUTE_KERNELS_CACHE_MAX_MB (default 1024, 0 for no limit),
CUTE_KERNELS_QUIET=1 (no message on the terminal), CUTE_KERNELS_LINEINFO=1 (line numbers in PTX and SASS), CUTE_KERNELS_JIT=import.

Modules: target (which GPU), builder (the decorator and the registry), compile (the compiler call), cache (the disk), sources
(what a kernel consists of), warmup, cubin (what is inside a compiled kernel). Importing this package imports neither cutlass nor
tvm_ffi, nothing of cuda that torch itself does not import, and initialises no CUDA.
"""

from __future__ import annotations

from cute_kernels.jit.builder import KernelBuilder, discover, kernel_builder, registered
from cute_kernels.jit.cache import clear_cache
from cute_kernels.jit.compile import Artifact, CompileError
from cute_kernels.jit.target import Target, UnsupportedGPUError, current_target, detect, pop_target, push_target
from cute_kernels.jit.warmup import WarmupResult, on_import, warmup

__all__ = [
    "Artifact",
    "CompileError",
    "KernelBuilder",
    "Target",
    "UnsupportedGPUError",
    "WarmupResult",
    "clear_cache",
    "current_target",
    "detect",
    "discover",
    "kernel_builder",
    "on_import",
    "pop_target",
    "push_target",
    "registered",
    "warmup",
]
