#!/usr/bin/env python3
"""Decoding with fish-speech 0.1.0's model at S2-Pro's shape: unmodified, its published active-prefix slice, and ours.

    tools/bench_decode_model.py                         all variants, eager and compiled, one process each
    tools/bench_decode_model.py --variants ours --modes eager
    tools/bench_decode_model.py --check                 teacher-forced logits on the GPU, against float32
    tools/bench_decode_model.py --tiny                  a toy shape on the CPU

36 layers, 32/8 heads, D 128, capacity 32768, bf16, random weights; a prompt of 234 tokens, then upstream's own `decode_n_tokens`
(its loop, its sampler, its end check, its codebook layers) to about 400. Needs fish-speech==0.1.0, installed with --no-deps, and
this package's extra "integrations".

    full    the model as published: the whole capacity, KV heads expanded, MATH attention
    slice   fish-speech's later change (pull request 1312): mask, K and V first cut to the filled length, a Python int
    ours    use_active_attention(model)

compile is torch.compile(decode_one_token, fullgraph=True): for full and ours with mode "reduce-overhead" (CUDA graphs), as
fish-speech 0.1.0 has it; for slice with dynamic=True and the default mode, since its shapes change every token.

Columns: tokens/s of the loop by the wall clock; device ms a token, the sum of its kernels' times by torch.profiler; host ms a
token, the median time until decode_one_token returns; peak reserved GB of prefill and decode. The processes compile in parallel and
measure one at a time (a file lock).
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
from requirements_check import need_gpu, need_module  # noqa: E402

os.environ.setdefault("TQDM_DISABLE", "1")

VARIANTS = ("full", "slice", "ours")
MODES = ("eager", "compile")
# S2-Pro's slow part has the shape of a 4 B Qwen3; four layers of the same width for the ten codebooks.
S2_PRO = dict(
    vocab_size=155776, n_layer=36, n_head=32, n_local_heads=8, head_dim=128, dim=2560, intermediate_size=9728, max_seq_len=32768,
    codebook_size=4096, num_codebooks=10, n_fast_layer=4, attention_qk_norm=True, tie_word_embeddings=True, rope_base=1000000,
)  # fmt: skip
TINY = dict(
    vocab_size=300, n_layer=2, n_head=4, n_local_heads=2, head_dim=32, dim=64, intermediate_size=128, max_seq_len=128,
    codebook_size=64, num_codebooks=3, n_fast_layer=1, attention_qk_norm=True, tie_word_embeddings=True, initializer_range=0.2,
)  # fmt: skip


def make_model(shape: dict, dtype, device: str, seed: int = 0):
    """A random DualARTransformer, made on `device` in `dtype`. The last ids of the vocabulary are the semantic tokens, so that any
    sampled token is a legal one."""
    import torch
    from fish_speech.models.text2semantic import llama

    first = shape["vocab_size"] - shape["codebook_size"]
    tokenizer = SimpleNamespace(
        semantic_begin_id=first, semantic_end_id=shape["vocab_size"] - 1,
        semantic_id_to_token_id={i: first + i for i in range(shape["codebook_size"])}, get_token_id=lambda token: -1,
    )  # fmt: skip
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return llama.DualARTransformer(llama.DualARModelArgs(**shape), tokenizer=tokenizer).eval()
    finally:
        torch.set_default_dtype(torch.float32)


@functools.cache
def sliced_class(base):
    """fish-speech's Attention with everything cut to the first kv_len rows before the KV heads are expanded."""
    import torch.nn.functional as F
    from fish_speech.models.text2semantic.llama import apply_rotary_emb

    class SlicedAttention(base):
        def forward(self, x, freqs_cis, mask, input_pos=None):
            kv_len = self._kv_len.value
            batch, tokens, _ = x.shape
            q_size, kv_size = self.n_head * self.head_dim, self.n_local_heads * self.head_dim
            q, k, v = (
                y.view(batch, tokens, -1, self.head_dim) for y in self.wqkv(x).split([q_size, kv_size, kv_size], dim=-1)
            )
            if self.attention_qk_norm:
                q, k = self.q_norm(q), self.k_norm(k)
            q, k = apply_rotary_emb(q, freqs_cis), apply_rotary_emb(k, freqs_cis)
            k, v = self.kv_cache.update(input_pos, k.transpose(1, 2), v.transpose(1, 2))
            groups = self.n_head // self.n_local_heads
            k, v = (y[:, :, :kv_len].repeat_interleave(groups, dim=1) for y in (k, v))
            y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask[..., :kv_len])
            return self.wo(y.transpose(1, 2).contiguous().view(batch, tokens, q_size))

    return SlicedAttention


class Length:
    """The slice's length, for the layers of one pass."""

    value: int | None = None


def prepare(model, variant: str) -> Length:
    """`model` as one of the variants; returns the holder of the slice's length."""
    length = Length()
    if variant == "ours":
        from cute_kernels.integrations.fish_speech import use_active_attention

        use_active_attention(model)
    elif variant == "slice":
        for block in model.layers:  # the codebook layers have ten rows, and stay
            block.attention.__class__ = sliced_class(type(block.attention))
            block.attention._kv_len = length
    return length


def make_step(variant: str, mode: str, length, backend: str = "inductor"):
    """decode_one_token for upstream's loop: step(kv_len, **its arguments)."""
    import torch
    from fish_speech.models.text2semantic import inference

    def step(kv_len, **arguments):
        length.value = kv_len
        out = inference.decode_one_token_ar(**arguments)
        length.value = None
        return out

    if mode == "eager":
        return step
    torch._inductor.config.coordinate_descent_tuning = False  # minutes of tuning, for elementwise kernels
    if variant == "slice":
        return torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
    graphs = {"mode": "reduce-overhead"} if backend == "inductor" else {}
    return torch.compile(step, backend=backend, fullgraph=True, dynamic=False, **graphs)


class Decoder:
    """Prefill and decode loops of one variant."""

    def __init__(self, model, variant: str, mode: str, device: str, prompt: int, backend: str = "inductor") -> None:
        import torch
        from fish_speech.models.text2semantic import inference

        self.torch, self.inference, self.model, self.device, self.prompt = torch, inference, model, device, prompt
        self.variant = variant
        self.length = prepare(model, variant)
        self.step = make_step(variant, mode, self.length, backend)
        self.eager = make_step(variant, "eager", self.length)
        config = model.config
        g = torch.Generator().manual_seed(1)
        ids = torch.randint(0, config.codebook_size, (1 + config.num_codebooks, prompt), generator=g, dtype=torch.int)
        ids[0] += config.vocab_size - config.codebook_size
        self.ids = ids.to(device)
        number = functools.partial(torch.tensor, device=device, dtype=torch.bfloat16)
        self.sampling = dict(temperature=number(0.7), top_p=number(0.8), repetition_penalty=number(1.1))
        with torch.device(device):
            model.setup_caches(1, config.max_seq_len, dtype=next(model.parameters()).dtype)
        self.host: list[float] = []

    def prefill(self):
        """The first token, eager as upstream has it, and the position after the prompt."""
        torch = self.torch
        position = torch.arange(0, self.prompt, device=self.device)
        token = self.eager(
            self.prompt if self.variant == "slice" else None, model=self.model, x=self.ids[None], input_pos=position,
            audio_masks=None, audio_parts=None, **self.sampling,
        )  # fmt: skip
        return token, torch.tensor([self.prompt], device=self.device, dtype=torch.int)

    def decode(self, token, position, start: int, count: int):
        """`count` tokens by upstream's loop; `start` is the number of filled rows."""
        filled = start

        def one(**arguments):
            nonlocal filled
            filled += 1
            began = time.perf_counter()
            out = self.step(filled if self.variant == "slice" else None, **arguments)
            self.host.append(time.perf_counter() - began)
            return out

        model = self.model
        return self.inference.decode_n_tokens(
            model, token.clone().view(1, model.config.num_codebooks + 1, -1), position, count, audio_masks=None, audio_parts=None,
            decode_one_token=one, **self.sampling,
        )  # fmt: skip


def measure(args: argparse.Namespace, variant: str, mode: str) -> dict:
    """One line of the table."""
    import torch

    device = "cpu" if args.tiny else "cuda"
    gpu = device == "cuda"
    shape = TINY if args.tiny else S2_PRO
    synchronize = torch.cuda.synchronize if gpu else lambda: None
    made: dict = {"variant": variant, "mode": mode}
    with torch.inference_mode() if mode == "eager" else torch.no_grad():
        began = time.perf_counter()
        decoder = Decoder(make_model(shape, torch.bfloat16, device), variant, mode, device, args.prompt, args.backend)
        if gpu:
            torch.cuda.empty_cache()  # the mask's construction left a gigabyte behind
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        made["build_s"] = round(time.perf_counter() - began, 1)
        began = time.perf_counter()
        decoder.decode(*decoder.prefill(), args.prompt, args.warm)
        synchronize()
        made["warm_s"] = round(time.perf_counter() - began, 1)
        if gpu and mode == "compile":  # compilation's own buffers are not the model's
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with open(args.lock, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            rates = []
            for _ in range(args.repeat):
                token, position = decoder.prefill()
                decoder.host.clear()
                synchronize()
                began = time.perf_counter()
                decoder.decode(token, position, args.prompt, args.tokens)
                synchronize()
                rates.append(args.tokens / (time.perf_counter() - began))
            made["tokens_per_s"] = round(statistics.median(rates), 2)
            made["host_ms"] = round(1e3 * statistics.median(decoder.host), 3)
            if gpu:
                made["reserved_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 2)
                made["device_ms"] = round(device_time(decoder, args), 3)
                made["gpu"] = torch.cuda.get_device_name()
    if variant == "ours":
        import cute_kernels

        made["backend"] = cute_kernels.last_backend()
    return made


def device_time(decoder: Decoder, args: argparse.Namespace) -> float:
    """Milliseconds of kernels and copies a token, over five tokens at the end of the text."""
    import torch

    count = 5
    start = args.prompt + args.tokens
    token, _ = decoder.prefill()
    position = torch.tensor([start], device=decoder.device, dtype=torch.int)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        decoder.decode(token, position, start, count)
        torch.cuda.synchronize()
    return sum(e.self_device_time_total for e in profile.key_averages()) / 1e3 / count


def check(args: argparse.Namespace) -> dict:
    """Teacher-forced logits: bf16 unmodified and ours against the float32 model with the same weights."""
    import torch

    device = "cpu" if args.tiny else "cuda"
    shape = {**(TINY if args.tiny else S2_PRO), "max_seq_len": 128 if args.tiny else 1024}
    steps, logits = 8, {}
    with torch.inference_mode():
        for name in ("float32", "bf16", "ours"):
            model = make_model(shape, torch.bfloat16, device)
            if name == "float32":
                model = model.float()
            decoder = Decoder(model, "ours" if name == "ours" else "full", "eager", device, args.prompt)
            rows = []
            for step in range(steps):
                if step == 0:
                    at, x = torch.arange(args.prompt, device=device), decoder.ids[None]
                else:
                    at, x = torch.tensor([args.prompt + step - 1], device=device), decoder.ids[None, :, step : step + 1]
                rows.append(model.forward_generate(x, at).logits[0, -1].double())
            logits[name] = torch.stack(rows)
            del model, decoder
            if device == "cuda":
                torch.cuda.empty_cache()
    error = {name: (logits[name] - logits["float32"]) for name in ("bf16", "ours")}
    top = {name: float(e.abs().max()) for name, e in error.items()}
    rms = {name: float(e.pow(2).mean().sqrt()) for name, e in error.items()}
    return {
        "max_error": top, "rms_error": rms, "max_ratio": top["ours"] / top["bf16"], "rms_ratio": rms["ours"] / rms["bf16"],
        "logits_rms": float(logits["float32"].pow(2).mean().sqrt()),
    }  # fmt: skip


def table(rows: list[dict]) -> str:
    base = {r["mode"]: r["tokens_per_s"] for r in rows if r["variant"] == "full" and "tokens_per_s" in r}
    head = ("variant", "mode", "tokens/s", "x full", "device ms", "host ms", "reserved GB", "warm s")
    lines = [head]
    for r in rows:
        if "error" in r:
            lines.append((r["variant"], r["mode"], "failed: " + r["error"]))
            continue
        speed = f"{r['tokens_per_s'] / base[r['mode']]:.2f}" if r["mode"] in base else "-"
        cells = [r.get(k, "-") for k in ("tokens_per_s", "device_ms", "host_ms", "reserved_gb", "warm_s")]
        lines.append((r["variant"], r["mode"], str(cells[0]), speed, *(str(c) for c in cells[1:])))
    widths = [max(len(line[i]) for line in lines if len(line) == len(head)) for i in range(len(head))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths)) if len(line) == len(head) else "  ".join(line) for line in lines
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--tiny", action="store_true", help="a toy shape on the CPU")
    parser.add_argument("--prompt", type=int, help="tokens of the prompt (default 234; tiny 20)")
    parser.add_argument("--tokens", type=int, help="tokens to decode (default 166; tiny 6)")
    parser.add_argument("--warm", type=int, default=20, help="tokens decoded before it (upstream's window fills at 16)")
    parser.add_argument("--repeat", type=int, default=1, help="loops measured; the median counts")
    parser.add_argument("--check", action="store_true", help="teacher-forced logits instead of speed")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for a process")
    parser.add_argument("--backend", default="inductor", help="torch.compile's backend; aot_eager to trace alone")
    parser.add_argument("--csv", help="also write the table there")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--lock", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.prompt = args.prompt or (20 if args.tiny else 234)
    args.tokens = args.tokens or (6 if args.tiny else 166)
    need_module("fish_speech", "the model", "pip install --no-deps fish-speech==0.1.0; see this file's docstring")
    if not args.tiny:
        need_gpu()
    if args.check:
        print(json.dumps(check(args)))
        return 0
    if args.child:
        print(json.dumps(measure(args, *args.child)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for variant in args.variants:
            for mode in args.modes:
                command = [sys.executable, __file__, "--child", variant, mode, "--lock", f"{folder}/lock"]
                for name in ("prompt", "tokens", "warm", "repeat", "backend"):
                    command += [f"--{name}", str(getattr(args, name))]
                log = open(f"{folder}/{variant}-{mode}", "w+")  # noqa: SIM115  (closed below)
                running.append((variant, mode, log, subprocess.Popen(command + ["--tiny"] * args.tiny, stdout=log, stderr=log)))
        rows = []
        end = time.monotonic() + args.timeout
        for variant, mode, log, process in running:
            try:
                process.wait(max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            log.seek(0)
            text = log.read()
            log.close()
            if process.returncode == 0:
                rows.append(json.loads(text.strip().splitlines()[-1]))
            else:
                print(f"== {variant} {mode}, exit status {process.returncode}\n{text[-3000:]}", file=sys.stderr)
                rows.append({"variant": variant, "mode": mode, "error": (text.strip().splitlines() or ["no output"])[-1][:200]})
    print(table(rows))
    if args.csv:
        names = sorted({k for r in rows for k in r}, key=lambda k: (k not in ("variant", "mode"), k))
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=names)
            writer.writeheader()
            writer.writerows(rows)
    return 1 if any("error" in r for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
