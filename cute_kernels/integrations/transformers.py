"""HuggingFace transformers: attn_implementation="cute_kernels", for models with static (or dynamic) caches.

    from cute_kernels.integrations.transformers import use_active_attention
    use_active_attention(model)
    model.generate(**inputs, cache_implementation="static")

With a StaticCache transformers attends to the whole capacity under a mask, with the KV heads expanded. Here the mask that the model
builds once a forward pass is the int32 [B] number of filled cache rows, on the device, and each layer calls `active_attention` with
it: no mask, no expanded heads, no sync, one CUDA graph for every length. Sliding windows, softcap and attention sinks go to the
kernel. What a length cannot say (padding inside a batch, chunked, packed or bidirectional patterns) gets transformers' own mask and
its sdpa implementation, or the model's eager one where it has a softcap or sinks, which sdpa has not. What the operator cannot
compute (a v head dim other than the qk one, float64, a position bias) gets the same, under a mask made of the lengths. Each reason
is warned of once, outside compiled regions.

Compiled recipes that stay on the kernel: generate() with a static cache, which looks at its attention_mask outside the compiled
forward; and a compiled forward or decode step of your own that is given no attention_mask. Passed into a compiled forward a mask
falls back inside the graph, all ones or not: its values would cost a sync and a graph break. So does a sliding window, whose
pattern cannot be told while compiling, and a forward without any cache, where transformers adds packed sequences to the pattern.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels.ops.active_attention import active_attention

__all__ = ["NAME", "register", "use_active_attention"]

NAME = "cute_kernels"

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Model types whose layers index the mask before they call the attention function (the sparse ones add their own pattern to it).
_READS_THE_MASK = ("doge", "axk2", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "hy_v4")

_warned: set[str] = set()


def _is_causal(mask_function: Any) -> bool:
    """Plain causal attention, or that within a sliding window and nothing else."""
    from transformers import masking_utils as m

    if mask_function is m.causal_mask_function:
        return True
    # sliding_window_causal_mask_function(w) is and_masks(sliding_window_overlay(w), causal_mask_function): closures, told by cells
    # (not under dynamo, which reads no cells; generate() builds its masks outside the compiled region).
    if torch.compiler.is_compiling():
        return False
    cells = getattr(mask_function, "__closure__", None) or ()
    parts = cells[0].cell_contents if len(cells) == 1 else None
    if not isinstance(parts, tuple) or len(parts) != 2 or parts[1] is not m.causal_mask_function:
        return False
    overlay = m.sliding_window_overlay(1)
    return getattr(parts[0], "__code__", None) is overlay.__code__


def _fall_back(reason: str) -> None:
    if torch.compiler.is_compiling():
        return  # dynamo cannot trace warnings.warn: fullgraph=True would raise
    if reason not in _warned:
        _warned.add(reason)
        message = f"{NAME}: {reason}: using transformers' own attention (sdpa; eager with a softcap or sinks) over the whole cache"
        warnings.warn(message, stacklevel=3)


def active_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The "mask" of this implementation: the int32 [B] length, or transformers' sdpa mask where that does not say enough."""
    from transformers import masking_utils as m

    if attention_mask is not None and attention_mask.ndim == 1:
        if attention_mask.dtype != torch.int32 or attention_mask.shape[0] != batch_size:
            raise TypeError(
                f"{NAME}: attention_mask must be [batch, length] (or the int32 [{batch_size}] lengths that generate() passes), "
                f"got {attention_mask.dtype} {list(attention_mask.shape)}"
            )
        return attention_mask  # generate() made it ahead of a compiled forward
    reason = None
    length = None
    model_type = getattr(kwargs.get("config"), "model_type", None)
    if model_type in _READS_THE_MASK:
        reason = f"{model_type}, whose layers read the mask themselves"
    elif not _is_causal(mask_function):
        reason = "an attention pattern other than causal, or a sliding window built while compiling"
    else:
        active = q_offset + q_length - kv_offset
        if isinstance(active, Tensor):
            length = active.to(device=device, dtype=torch.int32).reshape(1).repeat(batch_size)
        else:
            length = torch.full((batch_size,), active, dtype=torch.int32, device=device)
        if attention_mask is not None:
            if torch.compiler.is_compiling():
                reason = "a padding mask that is first seen while compiling"
            else:
                # One sync, as transformers' own sdpa mask has it.
                seen = torch.arange(attention_mask.shape[-1], device=attention_mask.device) - kv_offset
                if not bool((attention_mask.bool() | (seen >= length[:, None].to(seen.device)) | (seen < 0)).all()):
                    reason = "padding inside the batch"
    if reason is None:
        return length
    if mask_function is not m.bidirectional_mask_function:
        _fall_back(reason)
    # A layer that reads its mask gets it in full: sdpa_mask leaves a plainly causal one to sdpa's is_causal, as None.
    make = m.eager_mask if model_type in _READS_THE_MASK else m.sdpa_mask
    return make(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, device=device, **kwargs,
    )  # fmt: skip


def _why_not(query: Tensor, key: Tensor, value: Tensor, position_bias: Tensor | None) -> str | None:
    """What of a layer's call the operator cannot compute, whatever the mask."""
    if value.shape[-1] != key.shape[-1]:
        return f"a v head dim ({value.shape[-1]}) other than the qk head dim ({key.shape[-1]})"
    if query.dtype not in _DTYPES:
        return f"{query.dtype} attention"
    if position_bias is not None:
        return "a position bias"
    return None


def _mask_of(length: Tensor, s_q: int, capacity: int, sliding_window: int | None) -> Tensor:
    """bool [B, 1, S, C]: what `active_attention` would attend to."""
    token = length[:, None] - s_q + torch.arange(s_q, device=length.device)
    ahead = token[:, None, :, None] - torch.arange(capacity, device=length.device)
    return (ahead >= 0) if sliding_window is None else (ahead >= 0) & (ahead < sliding_window)


def _own_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    softcap: float | None,
    s_aux: Tensor | None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' sdpa attention, or the eager function of the model's file where sdpa would leave out a softcap or sinks.
    indices [B, S, topk]: the keys of a sparse model's indexer, which it leaves to implementations other than those two."""
    if indices is not None:
        chosen = attention_mask.new_zeros((*indices.shape[:2], key.shape[2]), dtype=torch.bool).scatter(-1, indices.long(), True)
        left_out = ~chosen[:, None]
        lowest = False if attention_mask.dtype == torch.bool else torch.finfo(attention_mask.dtype).min
        attention_mask = attention_mask.masked_fill(left_out, lowest)
    if not softcap and s_aux is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise NotImplementedError(
            f"{NAME}: {type(module).__name__} has a softcap or sinks with a mask that a length cannot say, and its file no "
            "eager_attention_forward to fall back to: use attn_implementation='eager'"
        )
    if attention_mask is None and query.shape[2] > 1 and getattr(module, "is_causal", True):
        everything = torch.full((query.shape[0],), key.shape[2], device=query.device)  # sdpa's is_causal: eager wants it as a mask
        attention_mask = _mask_of(everything, query.shape[2], key.shape[2], kwargs.get("sliding_window"))
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        lowest = torch.finfo(query.dtype).min  # as transformers' eager_mask has it
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, lowest)
    return eager(module, query, key, value, attention_mask, softcap=softcap, s_aux=s_aux, **kwargs)[0], None


def active_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, Hq, S, D], key and value the layer's whole cache [B, Hkv, C, D]."""
    own = attention_mask is None or attention_mask.ndim != 1
    if not own and (reason := _why_not(query, key, value, kwargs.get("position_bias"))) is not None:
        _fall_back(reason)
        attention_mask = _mask_of(attention_mask, query.shape[2], key.shape[2], sliding_window)
        own = True
    if own:
        return _own_attention(
            module, query, key, value, attention_mask, softcap, s_aux,
            dropout=dropout, scaling=scaling, sliding_window=sliding_window, **kwargs,
        )  # fmt: skip
    if dropout:
        raise NotImplementedError(f"{NAME}: attention dropout is for training; the operator has no backward")
    out, _ = active_attention(
        query, key, value, attention_mask,
        sm_scale=scaling,
        window_left=-1 if sliding_window is None else sliding_window - 1,  # transformers counts the token itself
        softcap=softcap or 0.0,
        attn_sink=None if s_aux is None else s_aux.float(),
    )  # fmt: skip
    return out.transpose(1, 2), None


def register(name: str = NAME) -> str:
    """Make attn_implementation=name known to transformers (5.x); returns the name. Calling it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, active_attention_forward)
    AttentionMaskInterface.register(name, active_mask)
    return name


def use_active_attention(model: nn.Module) -> nn.Module:
    """Register, and switch a loaded model (a PreTrainedModel) to it; returns the model. To undo:
    model.set_attn_implementation("sdpa")."""
    if not hasattr(model, "set_attn_implementation"):
        raise TypeError(f"use_active_attention: needs a transformers PreTrainedModel, not {type(model).__name__}")
    model.set_attn_implementation(register())
    kept = model.config._attn_implementation
    if kept != NAME:
        warnings.warn(f"{NAME}: transformers has no way to switch {type(model).__name__}, which keeps {kept!r}", stacklevel=2)
    return model
