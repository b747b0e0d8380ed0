"""fish-speech's text-to-semantic model, its attention replaced by one call of `active_attention_append` a layer.

    from cute_kernels.integrations.fish_speech import use_active_attention
    use_active_attention(model)          # a BaseTransformer of fish_speech 0.1.0, before or after setup_caches

fish-speech writes the new keys and values into its caches (two index_puts), expands the KV heads of all its capacity (two copies),
and attends to all of it under a mask gathered from a [capacity, capacity] matrix. Here one launch appends and attends to the filled
prefix in place. Caches, weights, sampling and the calls of `generate` stay as they are; lengths are read on the device, so a CUDA
graph of one decode step serves every step, and torch.compile makes one graph of it. Eager decoding waits for the host, which issues
thousands of small kernels a token; `cuda_graph_step` replays them all as one graph, in the place where fish-speech takes a compiled
step (see fish_speech_graph.py):

    generate(model=model, ..., decode_one_token=cuda_graph_step())
"""

from __future__ import annotations

import functools
import sys

import torch
from torch import Tensor, nn

from cute_kernels.integrations.fish_speech_graph import cuda_graph_step
from cute_kernels.ops.active_attention import active_attention_append

__all__ = ["cuda_graph_step", "restore_attention", "use_active_attention"]


class _Pass:
    """What the layers of one forward pass share; None outside a pass."""

    def __init__(self) -> None:
        self.kv_len: Tensor | None = None  # int32 [1] on the device
        self.rotation: tuple[Tensor, Tensor] | None = None  # freqs_cis as the model has it, and as complex numbers

    def start(self, input_pos: Tensor) -> None:
        self.kv_len = _length_after(input_pos)

    def end(self) -> None:
        self.kv_len = self.rotation = None

    def rotate(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        """apply_rotary_emb as one complex product: 3 kernels instead of 9, which is what an eager decode step waits for."""
        if self.rotation is None or self.rotation[0] is not freqs_cis:
            self.rotation = freqs_cis, torch.view_as_complex(freqs_cis.float())[:, None]
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.rotation[1]).flatten(-2).to(x.dtype)


def _length_after(input_pos: Tensor) -> Tensor:
    """int32 [1]: filled rows once the tokens at `input_pos` (consecutive positions) are in the cache."""
    return (input_pos[-1:] + 1).to(torch.int32)


@functools.cache
def _active_attention_class(base: type[nn.Module]) -> type[nn.Module]:
    apply_rotary_emb = sys.modules[base.__module__].apply_rotary_emb

    class ActiveAttention(base):
        """fish-speech's Attention. Without a cache, and in training, it is the original."""

        def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor | None, input_pos: Tensor | None = None) -> Tensor:
            cache = self.kv_cache
            if cache is None or input_pos is None or self.training:
                return super().forward(x, freqs_cis, mask, input_pos)
            batch, tokens, _ = x.shape
            h_q, h_kv, d = self.n_head, self.n_local_heads, self.head_dim
            qkv = self.wqkv(x).view(batch, tokens, h_q + 2 * h_kv, d)
            qk, v = qkv.split((h_q + h_kv, h_kv), dim=2)
            if self.attention_qk_norm:
                q, k = qk.split((h_q, h_kv), dim=2)
                qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=2)
            if torch.compiler.is_compiling():
                qk = apply_rotary_emb(qk, freqs_cis)  # which Inductor fuses; it knows no complex numbers
            else:
                qk = self._pass.rotate(qk, freqs_cis)
            q, k = qk.split((h_q, h_kv), dim=2)
            kv_len = self._pass.kv_len
            if kv_len is None:
                kv_len = _length_after(input_pos)
            if batch > 1:
                kv_len = kv_len.repeat(batch)
            k_cache, v_cache = cache.k_cache, cache.v_cache
            if k_cache.shape[0] != batch:
                k_cache, v_cache = k_cache[:batch], v_cache[:batch]
            out, _ = active_attention_append(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), k_cache, v_cache, kv_len)
            return self.wo(out.transpose(1, 2).reshape(batch, tokens, h_q * d))  # out is stored [B, S, Hq, D]: no copy

    ActiveAttention.__name__ = ActiveAttention.__qualname__ = f"Active{base.__name__}"
    return ActiveAttention


@functools.cache
def _active_model_class(base: type[nn.Module]) -> type[nn.Module]:
    class ActiveTransformer(base):
        """A fish-speech transformer that computes the length once a pass. `_active_base` is the class it was made from."""

        _active_base = base

        def forward_generate(self, inp: Tensor, input_pos: Tensor | None = None, *args, **kwargs):
            if input_pos is None:
                if self.layers[0].attention.kv_cache is None:
                    raise RuntimeError("use_active_attention: forward_generate without input_pos needs caches: call setup_caches")
                input_pos = torch.arange(inp.shape[-1], device=inp.device)
            self._pass.start(input_pos)
            try:
                return super().forward_generate(inp, input_pos, *args, **kwargs)
            finally:
                self._pass.end()

        if hasattr(base, "forward_generate_fast"):

            def forward_generate_fast(self, x: Tensor, input_pos: Tensor | None = None) -> Tensor:
                self._pass.start(input_pos)
                try:
                    return super().forward_generate_fast(x, input_pos)
                finally:
                    self._pass.end()

            def setup_caches(self, max_batch_size: int, max_seq_len: int, *args, **kwargs) -> None:
                # Upstream makes the codebook layers' caches anew for every text, which a captured or compiled step would have to
                # follow. Each step clears them before it reads them.
                enough = self.max_seq_len >= max_seq_len and self.max_batch_size >= max_batch_size
                if not enough or any(block.attention.kv_cache is None for block in self.fast_layers):
                    super().setup_caches(max_batch_size, max_seq_len, *args, **kwargs)

    ActiveTransformer.__name__ = ActiveTransformer.__qualname__ = f"Active{base.__name__}"
    return ActiveTransformer


def _attentions(model: nn.Module) -> list[nn.Module]:
    return [block.attention for block in (*model.layers, *getattr(model, "fast_layers", ()))]


def use_active_attention(model: nn.Module, *, keep_mask: bool = False) -> nn.Module:
    """Replace the cached attention of a fish-speech model, in place; returns the model. `restore_attention` undoes it.

    Args:
        model: fish_speech.models.text2semantic.llama.DualARTransformer or NaiveTransformer (0.1.0). Its slow and codebook layers
            both change.
        keep_mask: keep the [capacity, capacity] causal mask (1 GiB at 32768) that only training and passes without a cache read.

    Positions must be consecutive (prefill: arange(T), then one more each step), as fish-speech's `generate` passes them. A position
    past the capacity raises ValueError on the CPU; on a GPU the row is not written and the length is clamped, without a sync.
    """
    if hasattr(type(model), "_active_base"):
        raise ValueError("use_active_attention: the model's attention is replaced already")
    if not hasattr(model, "layers") or not hasattr(model, "forward_generate") or not hasattr(model, "causal_mask"):
        raise TypeError(f"use_active_attention: needs a fish_speech transformer, not {type(model).__name__}")
    shared = _Pass()
    for attention in _attentions(model):
        attention.__class__ = _active_attention_class(type(attention))
        attention._pass = shared
    model.__class__ = _active_model_class(type(model))
    model._pass = shared
    if not keep_mask:
        # forward_generate still gathers rows of the mask; no layer reads them, so a few columns will do. The codebook layers' pass
        # slices num_codebooks of them.
        model.causal_mask = model.causal_mask[:, : model.config.num_codebooks].clone()
    return model


def restore_attention(model: nn.Module) -> nn.Module:
    """Undo `use_active_attention`; returns the model. The caches keep their contents."""
    if not hasattr(type(model), "_active_base"):
        raise ValueError("restore_attention: the model's attention is not replaced")
    for attention in _attentions(model):
        attention.__class__ = type(attention).__mro__[1]
        del attention._pass
    model.__class__ = type(model)._active_base
    del model._pass
    n, device = model.config.max_seq_len, model.causal_mask.device
    if model.causal_mask.shape != (n, n):
        model.causal_mask = torch.ones(n, n, dtype=torch.bool, device=device).tril_()
    return model
