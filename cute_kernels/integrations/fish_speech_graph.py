"""fish-speech's decode step as one CUDA graph.

decode_one_token_ar issues thousands of kernels a token at S2-Pro's shape: 36 layers, ten passes of four codebook layers, ten
samplings. Captured once, they are one launch. That takes attention whose work depends on no host number, which
`use_active_attention` gives (as does the unmodified model, at the price of its whole capacity); slices cut by the host cannot be
captured.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class _Constants(TorchFunctionMode):
    """Numbers without copies from the host, which a capture does not allow. Upstream asks for them in two ways, ten times a token
    each: torch.tensor([position]), kept here from an eager step, and `x[0] = False`, a copy of a CPU tensor, here a fill."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, Tensor] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func == torch.Tensor.__setitem__ and type(args[2]) in (bool, int, float) and _is_view(args[1]):
            args[0][args[1]].fill_(args[2])
            return None
        if func is not torch.tensor:
            return func(*args, **kwargs)
        key = repr((args, sorted(kwargs.items())))
        if key not in self.made:
            self.made[key] = func(*args, **kwargs)
        return self.made[key].clone()  # the caller may write into it


def _is_view(index: Any) -> bool:
    """Whether tensor[index] is a view (no masks, no lists of positions)."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or type(part) in (int, slice) for part in parts)


def _capture(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """(replay, the tensor that a replay writes)."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = function()
    return graph.replay, out


def _memory(model: nn.Module) -> list[int]:
    """Where the caches and the parameters are: a graph holds these addresses."""
    blocks = (*model.layers, *getattr(model, "fast_layers", ()))
    caches = (b.attention.kv_cache for b in blocks)
    return [t.data_ptr() for c in caches if c is not None for t in (c.k_cache, c.v_cache)] + [model.embeddings.weight.data_ptr()]


class _Recorded:
    """One set of shapes: the tensors that a step reads, and once captured, its replay."""

    def __init__(self, inputs: dict[str, Any], memory: list[int]) -> None:
        self.memory = memory
        with torch.inference_mode(False):  # inference tensors could not be written outside inference mode
            self.inputs = {k: v.clone() if isinstance(v, Tensor) else v for k, v in inputs.items()}
        self.constants = _Constants()
        self.warm = False
        self.replay: Callable[[], None] | None = None
        self.out: Tensor | None = None

    def __call__(self, step: Callable[..., Tensor], inputs: dict[str, Any]) -> Tensor:
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                self.inputs[name].copy_(value)
        with torch.no_grad():
            if not self.warm:  # on the tensors of the capture: a compiled part of the step shall see nothing new there
                with self.constants:
                    out = step(**self.inputs)
                self.warm = True
                return out
            if self.replay is None:
                with self.constants:
                    self.replay, self.out = _capture(lambda: step(**self.inputs))
            self.replay()
        return self.out.clone()


def cuda_graph_step(step: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
    """A decode_one_token for fish-speech's `generate` and `decode_n_tokens` that replays one CUDA graph a token, at every length.

    Args:
        step: the function to capture, with decode_one_token_ar's arguments (None: that function). It must not read a value on the
            host or depend on a Python number that changes.

    The first call with a set of shapes runs eagerly, the second captures; both give their token, and the sampler draws the numbers
    of eager decoding. New caches or parameters (new addresses) are captured anew; parameters changed in place are seen. Prefills,
    audio prompts and models on the CPU run eagerly. The graph's memory stays as long as the returned function does. Captured steps
    that use the kernels here must not replay at the same time on two streams.
    """
    recorded: dict[Any, _Recorded] = {}
    signature = None

    def decode_one_token(*args, **kwargs) -> Tensor:
        nonlocal step, signature
        if step is None:
            from fish_speech.models.text2semantic.inference import decode_one_token_ar as step
        signature = signature or inspect.signature(step)
        inputs = signature.bind(*args, **kwargs).arguments
        model, x = inputs["model"], inputs["x"]
        if x.shape[-1] != 1 or not _capturable(x) or inputs.get("audio_parts") is not None:
            return step(**inputs)
        key = id(model), tuple((k, v.shape, v.dtype, v.device) for k, v in inputs.items() if isinstance(v, Tensor))
        memory = _memory(model)
        found = recorded.get(key)
        if found is None or found.memory != memory:
            recorded.pop(key, None)  # its graph's memory goes first
            found = recorded[key] = _Recorded(inputs, memory)
        return found(step, inputs)

    return decode_one_token


def _capturable(x: Tensor) -> bool:
    return x.is_cuda
