"""The package's main job in small, on a real text and any machine: `tools/demo.sh`.

Prefill: a text's tokens are embedded and scored causally, every token gets its top-k list, and 16 heads attend sparsely to 576-wide
latent KV rows, per token and grouped (8 tokens x 16 heads as 128 pseudo-heads over the union of their lists). Decode: a loop that
appends to a preallocated cache and attends to its filled prefix alone.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import math
import re
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works uninstalled too
import cute_kernels as ck  # noqa: E402

HEADS, D_QK, D_V, TOPK, GROUP = 16, 576, 512, 2048, 8
SM_SCALE = (128 + 64) ** -0.5  # absorbed MLA: the unabsorbed head has 128 + 64 dims


def find_text(path: str | None) -> tuple[str, str]:
    """(where it comes from, text): the user's file, else prose that ships with Python, else a licence of the system."""
    if path:
        try:
            return path, Path(path).read_text(errors="replace")
        except OSError as error:
            raise SystemExit(f"demo.py: cannot read {path}: {error.strerror}") from None
    try:
        from pydoc_data.topics import topics

        return "the Python language reference that ships with Python (pydoc_data.topics)", "\n".join(topics.values())
    except ImportError:
        pass
    for candidate in ("/usr/share/common-licenses/GPL-3", Path(sys.base_prefix) / "LICENSE.txt"):
        if Path(candidate).exists():
            return str(candidate), Path(candidate).read_text(errors="replace")
    raise SystemExit("no text found on this machine: name one with --text FILE")


def embed(tokens: list[str], dim: int) -> torch.Tensor:
    """[n, dim]: each token's character trigrams hashed to fixed random vectors and summed, unit length."""
    vocabulary = {t: i for i, t in enumerate(dict.fromkeys(tokens))}
    rows = torch.zeros(len(vocabulary), dim)
    trigram_rows: dict[str, torch.Tensor] = {}
    for token, i in vocabulary.items():
        padded = f"^{token}$"
        for j in range(max(1, len(padded) - 2)):
            tri = padded[j : j + 3]
            if tri not in trigram_rows:
                seed = int.from_bytes(hashlib.blake2b(tri.encode(), digest_size=7).digest(), "little")
                trigram_rows[tri] = torch.randn(dim, generator=torch.Generator().manual_seed(seed))
            rows[i] += trigram_rows[tri]
    return F.normalize(rows, dim=-1)[torch.tensor([vocabulary[t] for t in tokens])]


def causal_mean(x: torch.Tensor, keep: float) -> torch.Tensor:
    """Exponential moving average along the text: y[t] = keep * y[t-1] + (1 - keep) * x[t]."""
    y = torch.empty_like(x)
    state = x[0]
    for t in range(len(x)):
        state = keep * state + (1 - keep) * x[t]
        y[t] = state
    return y


def prefill_inputs(tokens: list[str], queries: int):
    """Latent KV rows for the whole text, queries for its last tokens, and each query's top-k list."""
    g = torch.Generator().manual_seed(0)
    words = embed(tokens, 256)
    context = F.normalize(causal_mean(words, 0.98), dim=-1)
    state = F.normalize(words + 2.0 * context, dim=-1) * 16  # unit-variance features
    n = len(tokens)

    def project(x, out):
        return x @ torch.randn(x.shape[-1], out, generator=g) / math.sqrt(x.shape[-1])

    # The indexer, like DSA's: score[t, s] = sum over 4 heads of w_h * relu(q_h[t] . k[s]), keys at or before t.
    index_k = F.normalize(project(state, 64), dim=-1)
    index_q = F.normalize(project(context[-queries:], 4 * 64).view(queries, 4, 64), dim=-1)
    weight = torch.rand(4, generator=g)
    scores = torch.einsum("thd,sd->ths", index_q, index_k).relu_().mul_(weight[:, None]).sum(1)
    position = torch.arange(n - queries, n)
    scores.masked_fill_(torch.arange(n) > position[:, None], -math.inf)
    indices = scores.topk(min(TOPK, n), dim=-1).indices.int()[:, None].contiguous()
    kv = project(state, D_QK)
    q = (project(state[-queries:], HEADS * D_QK) * 1.5).view(queries, HEADS, D_QK)
    kv, q = rotate(kv[:, None], torch.arange(n)), rotate(q, position)
    return q.bfloat16(), kv.bfloat16(), indices


def rotate(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the last 64 dims."""
    angle = position[:, None] * 10000.0 ** (-torch.arange(32) / 32)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., D_V : D_V + 32], x[..., D_V + 32 :]
    return torch.cat([x[..., :D_V], a * cos - b * sin, a * sin + b * cos], dim=-1)


def errors(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """(max abs, ||got - want|| / ||want||) in float64."""
    gap = got.double().cpu() - want.double()
    return float(gap.abs().max()), float(gap.norm() / want.double().norm())


def timed(call):
    start = time.perf_counter()
    result = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def show(label: str, value: str) -> None:
    print(f"  {label:<58}{value}")


def prefill(tokens: list[str], queries: int) -> None:
    print(f"\nSparse prefill: {queries} query tokens x {HEADS} heads, d_qk {D_QK}, d_v {D_V}, {len(tokens)} KV rows")
    print("  Lists: an untrained indexer in DSA's form (4 heads, ReLU of random projections of hashed-trigram embeddings")
    print(f"  and their running mean, keys at or before the token), top {min(TOPK, len(tokens))}. Real text, random weights: no")
    print("  trained model.")
    q, kv, indices = prefill_inputs(tokens, queries)
    topk = indices.shape[2]
    union, length, _, _ = ck.group_topk(indices, kv.shape[0], GROUP)
    mean_union = float(length.double().mean())
    show(f"union of {GROUP} lists, mean keys (of {GROUP} x topk = {GROUP * topk})", f"{mean_union:.0f}")
    show("  published for trained indexers on real prompts", "about 2.4k of 16k")
    fewer = topk * GROUP / mean_union
    show("KV rows read per token, per-token / grouped", f"{topk} / {mean_union / GROUP:.0f}  ({fewer:.1f}x fewer)")

    exact = ck.reference.sparse_prefill(q.double(), kv.double(), indices, SM_SCALE, compute_dtype=torch.float64)[0]
    rows = []
    for device in ["cpu"] + (["cuda"] if torch.cuda.is_available() else []):
        a = [t.to(device) for t in (q, kv, indices)]
        token, t_token = timed(lambda a=a: ck.sparse_prefill(*a, SM_SCALE)[0])
        rows.append((f"per token ({ck.last_backend()})", token, t_token))
        grouped, t_grouped = timed(lambda a=a: ck.grouped_sparse_prefill(*a, SM_SCALE, group_size=GROUP)[0])
        rows.append((f"grouped, {GROUP} x {HEADS} heads ({ck.last_backend()})", grouped, t_grouped))
    n = queries // GROUP * GROUP
    packed = q[:n].reshape(n // GROUP, GROUP * HEADS, D_QK)
    no_mask = ck.sparse_prefill(packed, kv, union[: n // GROUP], SM_SCALE, topk_length=length[: n // GROUP])[0]
    print(f"  {'against exact per-token attention (float64)':<58}{'max abs':>10}{'relative':>12}{'seconds':>10}")
    for label, got, seconds in rows:
        worst, relative = errors(got, exact)
        print(f"  {label:<58}{worst:>10.1e}{relative:>12.1e}{seconds:>10.2f}")
    worst, relative = errors(no_mask.view(n, HEADS, D_V), exact[:n])
    print(f"  {'grouped with the mask left out (wrong on purpose)':<58}{worst:>10.1e}{relative:>12.1e}")
    print("  published: 2e-3 with the mask, 0.34 without (what the mask is worth depends on the lists and the values)")


class OneLayer(torch.nn.Module):
    """A decoder of one attention layer with random weights: enough for a real append-attend-choose loop."""

    def __init__(self, vocabulary: int, capacity: int, h_q=32, h_kv=8, d=128):
        super().__init__()
        torch.manual_seed(0)
        self.h_q, self.h_kv, self.d = h_q, h_kv, d
        self.embed = torch.nn.Embedding(vocabulary, 512)
        self.qkv = torch.nn.Linear(512, (h_q + 2 * h_kv) * d, bias=False)
        self.out = torch.nn.Linear(h_q * d, vocabulary, bias=False)
        cache = torch.full((2, 1, h_kv, capacity, d), math.nan)  # the unfilled tail really may hold anything
        self.register_buffer("k", cache[0].clone())
        self.register_buffer("v", cache[1].clone())

    def project(self, tokens):
        b, s = tokens.shape
        q, k, v = self.qkv(self.embed(tokens)).split([self.h_q * self.d, self.h_kv * self.d, self.h_kv * self.d], -1)
        return (t.view(b, s, -1, self.d).transpose(1, 2) for t in (q, k, v))

    def forward(self, tokens, kv_len):
        q, k, v = self.project(tokens)
        y, _ = ck.active_attention_append(q, k, v, self.k, self.v, kv_len)
        return self.out(y.transpose(1, 2).flatten(2)[:, -1]), q, y


def full_capacity(model: OneLayer, q, length: int) -> torch.Tensor:
    """What a static cache without a length does: every head of every row of the capacity, masked."""
    group = model.h_q // model.h_kv
    q = q.float()
    k, v = (t.float().nan_to_num(0.0).repeat_interleave(group, 1) for t in (model.k, model.v))
    mask = torch.arange(k.shape[2], device=k.device)[None, None, None] < length
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@torch.no_grad()
def decode(tokens: list[str], steps: int, capacity: int, device: str) -> None:
    vocabulary = {t: i for i, t in enumerate(dict.fromkeys(tokens))}
    dtype = torch.float32 if device == "cpu" else torch.bfloat16  # the kernels take 16-bit types
    model = OneLayer(len(vocabulary), capacity).to(device, dtype)
    prompt = torch.tensor([[vocabulary[t] for t in tokens[:234]]], device=device)
    kv_len = torch.tensor([prompt.shape[1]], dtype=torch.int32, device=device)  # on the device: no sync, one graph for all lengths
    logits, _, _ = model(prompt, kv_len)
    token, worst, active, full, checked = logits.argmax(-1, keepdim=True), 0.0, 0.0, 0.0, 0
    for step in range(steps):
        kv_len += 1
        (logits, q, y), seconds = timed(lambda t=token: model(t, kv_len))
        active += seconds
        if step % max(1, steps // 4) == 0:
            want, seconds = timed(lambda q=q: full_capacity(model, q, int(kv_len)))
            full, checked = full + seconds, checked + 1
            worst = max(worst, float((y - want).abs().max()))
        token = logits.argmax(-1, keepdim=True)
    length = int(kv_len)
    print(f"\nDecode: {steps} steps after a prompt of {prompt.shape[1]} tokens, on {device}")
    print(f"  32 query heads, 8 KV heads, D 128, a preallocated cache of {capacity} rows.")
    print(f"  One attention layer, random weights, {str(dtype)[6:]}, greedy; the unfilled part of the cache is NaN.")
    show("backend", str(ck.last_backend()))
    show("KV rows read per head in the last step (capacity)", f"{length} ({capacity})")
    show("max abs error against masked full-capacity attention", f"{worst:.1e} over {checked} steps")
    show("ms per step: append + attend + choose", f"{active / steps * 1e3:.1f}")
    show("ms for masked full-capacity attention with repeated heads", f"{full / checked * 1e3:.1f}")


@torch.no_grad()
def emulated(tokens: list[str], arch: str) -> None:
    """The GPU kernels on a small part of the same input, their PTX executed by the emulator, beside the reference."""
    from cute_kernels.emulator import emulate

    print(f"\nThe {arch} kernels on a small part of this, their PTX executed on the CPU by the emulator: numbers, not timings")

    q, kv, indices = prefill_inputs(tokens, GROUP)
    indices = indices[:, :, : min(256, indices.shape[2])].contiguous()
    length = ck.group_topk(indices, kv.shape[0], GROUP)[1]
    want = ck.sparse_prefill(q, kv, indices, SM_SCALE)[0]
    start = time.perf_counter()
    with emulate(arch) as run:
        got = ck.grouped_sparse_prefill(q, kv, indices, SM_SCALE, group_size=GROUP)[0]
    worst, relative = errors(got, want)
    show(f"group_topk and grouped prefill, {GROUP} x {HEADS} heads, {int(length[0])} keys", f"{time.perf_counter() - start:.0f} s")
    show("  against per-token attention: max abs, relative; hazards", f"{worst:.1e}, {relative:.1e}; {len(run.hazards)}")

    vocabulary = {t: i for i, t in enumerate(dict.fromkeys(tokens))}
    model = OneLayer(len(vocabulary), 512).bfloat16()
    kv_len = torch.tensor([234], dtype=torch.int32)
    logits, _, _ = model(torch.tensor([[vocabulary[t] for t in tokens[:234]]]), kv_len)
    kernel, exact, steps = copy.deepcopy(model), model, 3
    worst = relative = seconds = hazards = 0
    for _ in range(steps):
        kv_len += 1
        token = logits.argmax(-1, keepdim=True)
        logits, _, want = exact(token, kv_len)
        start = time.perf_counter()
        with emulate(arch) as run:
            got = kernel(token, kv_len)[2]
            backend = ck.last_backend()
        seconds += time.perf_counter() - start
        worst, relative = (max(x, y) for x, y in zip((worst, relative), errors(got, want)))
        hazards += len(run.hazards)
    show(f"decode, {steps} steps of append and attend, {int(kv_len)} keys", f"{backend}, {seconds:.0f} s")
    show("  against the reference: max abs, relative; hazards", f"{worst:.1e}, {relative:.1e}; {hazards}")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--text", help="a text file (default: prose that ships with Python)")
    p.add_argument("--tokens", type=int, default=8192, help="tokens of the text to use as context")
    p.add_argument("--queries", type=int, default=128, help="query tokens, the last of the text")
    p.add_argument("--steps", type=int, default=48, help="decode steps")
    p.add_argument("--capacity", type=int, default=8192, help="rows of the preallocated cache")
    p.add_argument("--emulate", default="sm_90a,sm_100a", help="whose kernels to run in the emulator (default: both), or no")
    a = p.parse_args()
    for name in ("tokens", "queries", "steps", "capacity"):
        if getattr(a, name) < 1:
            p.error(f"--{name} must be at least 1")
    archs = [] if a.emulate == "no" else a.emulate.split(",")
    if unknown := [arch for arch in archs if arch not in ("sm_90a", "sm_100a", "sm_103a")]:
        p.error(f"--emulate takes sm_90a, sm_100a and sm_103a, by commas, or no; not {unknown[0]!r}")
    source, text = find_text(a.text)
    tokens = re.findall(r"\w+|[^\w\s]", text)[: a.tokens]
    if len(tokens) < 512:
        raise SystemExit(f"{source}: {len(tokens)} tokens are too few; name a text of at least 512 words with --text FILE")
    queries = min(a.queries, len(tokens) // 2)
    print(f"cute_kernels {ck.__version__}, torch {torch.__version__}", end="; ")
    print(f"GPU: {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "no GPU: the exact reference runs on the CPU")
    print(f"Text: {source}, {len(tokens)} tokens (words and punctuation)")
    prefill(tokens, queries)
    decode(tokens, a.steps, max(a.capacity, 234 + a.steps), "cuda" if torch.cuda.is_available() else "cpu")
    for arch in archs:
        emulated(tokens, arch)
    if archs:
        print("\nThe Blackwell (sm_100a) kernels have run in the emulator only: none of them has been timed on a GPU.")


if __name__ == "__main__":
    main()
