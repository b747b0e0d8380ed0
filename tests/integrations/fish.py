"""A small fish-speech model with random weights, and a greedy `generate`."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

PARTS = ("fish_speech", "loguru", "loralib", "transformers", "einops", "tiktoken", "tqdm", "click")
MISSING = [name for name in PARTS if importlib.util.find_spec(name) is None]
needs_fish_speech = pytest.mark.skipif(
    bool(MISSING), reason=f"{', '.join(MISSING)} not installed (tests/integrations/requirements.txt)"
)

CODEBOOKS = 4


class Tokenizer:
    """What the model asks of its tokenizer: which ids are semantic tokens, and which ends the text (none here)."""

    semantic_begin_id, semantic_end_id = 100, 163
    semantic_id_to_token_id = {i: 100 + i for i in range(64)}

    def get_token_id(self, token: str) -> int:
        return -1


def make_model(dtype=torch.float32, seed: int = 0, **changes):
    """DualARTransformer, 3 slow and 2 fast layers, 8 query and 2 key heads of 64, capacity 256."""
    from fish_speech.models.text2semantic import llama

    settings = dict(
        vocab_size=164, n_layer=3, n_head=8, n_local_heads=2, head_dim=64, dim=64, intermediate_size=128, max_seq_len=256,
        codebook_size=64, num_codebooks=CODEBOOKS, n_fast_layer=2, attention_qk_norm=True, tie_word_embeddings=False,
        initializer_range=0.1,
    )  # fmt: skip
    settings.update(changes)
    torch.manual_seed(seed)
    model = llama.DualARTransformer(llama.DualARModelArgs(**settings), tokenizer=Tokenizer())
    return model.to(dtype).eval()


def prompt(length: int = 20, seed: int = 1) -> torch.Tensor:
    """[1 + codebooks, length]: text tokens, then semantic tokens with their codes."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 64, (1 + CODEBOOKS, length), generator=g, dtype=torch.int)
    ids[0, length // 2 :] += 100
    return ids


def greedy(logits, **kwargs):
    """In place of inference.sample: the likeliest token of the last position."""
    return logits[0, -1].argmax(-1, keepdim=True).to(torch.int), None


def generate(model, tokens: torch.Tensor, new: int, monkeypatch, **kwargs) -> torch.Tensor:
    from fish_speech.models.text2semantic import inference

    monkeypatch.setattr(inference, "sample", greedy)
    return inference.generate(
        model=model, prompt=tokens, max_new_tokens=new, audio_masks=None, audio_parts=None,
        temperature=1.0, top_p=1.0, repetition_penalty=1.0, **kwargs,
    )  # fmt: skip


def forced(model, tokens: torch.Tensor, prefill: int, steps: int) -> SimpleNamespace:
    """float64 logits of the last prefilled position and of `steps` given tokens after it, and the codebook layers' after each."""
    model.setup_caches(1, model.config.max_seq_len, dtype=next(model.parameters()).dtype)
    slow, fast = [], []
    with torch.inference_mode():
        for step in range(steps + 1):
            lo, hi = (0, prefill) if step == 0 else (prefill + step - 1, prefill + step)
            result = model.forward_generate(tokens[None, :, lo:hi], torch.arange(lo, hi))
            slow.append(result.logits[0, -1].double())
            hidden = result.hidden_states
            for i in range(CODEBOOKS):
                fast.append(model.forward_generate_fast(hidden, torch.tensor([i])).flatten().double())
                hidden = model.fast_embeddings(tokens[1 + i, hi - 1 : hi].long() % 64)
    return SimpleNamespace(slow=torch.stack(slow), fast=torch.stack(fast))
