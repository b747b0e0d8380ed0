"""HuggingFace transformers: attn_implementation="cute_kernels", for models with static (or dynamic) caches.

    from cute_kernels.integrations.transformers import use_active_attention
    use_active_attention(model)
    model.generate(**inputs, cache_implementation="static")

With a StaticCache transformers attends to the whole capacity under a mask, with the KV heads expanded. Here the mask that the model
builds once a forward pass is the int32 [B] number of filled cache rows, on the device, and each layer calls `active_attention` with
it: no mask, no expanded heads, no sync, one CUDA graph for every length. Sliding windows, softcap and attention sinks go to the
kernel. What a length cannot say (padding inside a batch, chunked, packed or bidirectional patterns) gets transformers' own mask and
its sdpa implementation, with one warning per reason.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels.ops.active_attention import active_attention

__all__ = ["NAME", "register", "use_active_attention"]

NAME = "cute_kernels"

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
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"cute_kernels: {reason}: using transformers' sdpa attention over the whole cache", stacklevel=3)


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
        return attention_mask  # generate() made it ahead of a compiled forward
    reason = None
    length = None
    if not _is_causal(mask_function):
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
    return m.sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, device=device, **kwargs,
    )  # fmt: skip


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
    if attention_mask is None or attention_mask.ndim != 1:
        if softcap or s_aux is not None:
            raise NotImplementedError(
                f"{NAME}: {type(module).__name__} uses a softcap or attention sinks with an attention pattern that only "
                "transformers' sdpa attention has, which knows neither: use attn_implementation='eager'"
            )
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
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
    model.set_attn_implementation(register())
    return model
