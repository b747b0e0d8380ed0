#!/usr/bin/env python3
"""Decoding with fish-speech 0.1.0's model at S2-Pro's shape: unmodified, its published active-prefix slice, and ours.

    tools/bench_decode_model.py                         all variants in all modes, one process each
    tools/bench_decode_model.py --variants ours --modes eager
    tools/bench_decode_model.py --check                 teacher-forced logits on the GPU, against float32
    tools/bench_decode_model.py --tiny                  a toy shape on the CPU

36 layers, 32/8 heads, D 128, capacity 32768, bf16, random weights; a prompt of 234 tokens, then upstream's own `decode_n_tokens`
(its loop, its sampler, its end check, its codebook layers) to 400. Needs fish-speech==0.1.0, installed with --no-deps, and this
package's extra "integrations".

    full    the model as published: the whole capacity, KV heads expanded, MATH attention
    slice   fish-speech's later change (pull request 1312): mask, K and V first cut to the filled length, a Python int
    ours    use_active_attention(model)

    eager   decode_one_token as it is
    graph   the same captured once, cuda_graph_step(); not slice, whose shapes change every token
    compile torch.compile(decode_one_token, fullgraph=True), with mode "reduce-overhead" (CUDA graphs) as fish-speech 0.1.0 has it;
            for slice with dynamic=True and the default mode
    layers  torch.compile of a layer, which all layers share (seconds instead of minutes); full and ours captured as in graph

Columns: tokens/s of the loop by the wall clock; device ms a token, the sum of its kernels' times by torch.profiler, and how many
they are; host ms a token, the median time until decode_one_token returns; peak reserved GB of prefill and decode. At most eight
processes warm up and compile side by side; once all are done, they measure one at a time.
"""

from __future__ import annotations

import argparse
import csv
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
MODES = ("eager", "graph", "compile", "layers")
MOST_PROCESSES = 8  # at once: 16 GB each
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

    if mode == "eager" or (variant == "slice" and mode == "layers"):
        return step
    if mode in ("graph", "layers"):
        from cute_kernels.integrations.fish_speech import cuda_graph_step

        captured = cuda_graph_step()
        return lambda kv_len, **arguments: captured(**arguments)
    torch._inductor.config.coordinate_descent_tuning = False  # minutes of tuning, for elementwise kernels
    if variant == "slice":
        return torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
    graphs = {"mode": "reduce-overhead"} if backend == "inductor" else {}
    return torch.compile(step, backend=backend, fullgraph=True, dynamic=False, **graphs)


def compile_layers(model, variant: str, backend: str) -> None:
    """One compilation for the slow layers and one for the codebook layers: their weights and caches are inputs."""
    import torch

    torch._inductor.config.coordinate_descent_tuning = False
    torch._dynamo.config.allow_unspec_int_on_nn_module = True  # the slice's length
    for block in (*model.layers, *model.fast_layers):
        block.compile(backend=backend, fullgraph=True, dynamic=variant == "slice")


class Decoder:
    """Prefill and decode loops of one variant."""

    def __init__(self, model, variant: str, mode: str, device: str, prompt: int, backend: str = "inductor") -> None:
        import torch
        from fish_speech.models.text2semantic import inference

        self.torch, self.inference, self.model, self.device, self.prompt = torch, inference, model, device, prompt
        self.variant = variant
        self.length = prepare(model, variant)
        if mode == "layers":
            compile_layers(model, variant, backend)
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
        with torch.compiler.set_stance("force_eager"):
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
    with torch.no_grad() if mode == "compile" else torch.inference_mode():
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
        if gpu and mode in ("compile", "layers"):  # compilation's own buffers are not the model's
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if args.turn:
            wait_for_turn(Path(args.turn))
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
            made.update(device_time(decoder))
            made["gpu"] = torch.cuda.get_device_name()
    if variant == "ours":
        import cute_kernels

        made["backend"] = cute_kernels.last_backend()
    return made


def wait_for_turn(turn: Path) -> None:
    turn.with_suffix(".ready").touch()
    while not turn.with_suffix(".go").exists():
        time.sleep(0.02)


def device_time(decoder: Decoder) -> dict:
    """Milliseconds of kernels and copies a token, and their number, over five tokens to a length of 400."""
    import torch

    count = 5
    start = 400 - count
    token, _ = decoder.prefill()
    position = torch.tensor([start], device=decoder.device, dtype=torch.int)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        decoder.decode(token, position, start, count)
        torch.cuda.synchronize()
    found = [(e.self_device_time_total / 1e3 / count, e.count / count, e.key) for e in profile.key_averages()]
    found = sorted((e for e in found if e[0]), reverse=True)
    return {
        "device_ms": round(sum(ms for ms, _, _ in found), 3),
        "kernels": round(sum(n for _, n, _ in found)),
        "longest": "; ".join(f"{ms:.3f} ms {n:.0f} x {name[:60]}" for ms, n, name in found[:8]),
    }


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
    head = ("variant", "mode", "tokens/s", "x full", "device ms", "kernels", "host ms", "reserved GB", "warm s")
    lines = [head]
    for r in rows:
        if "error" in r:
            lines.append((r["variant"], r["mode"], "failed: " + r["error"]))
            continue
        speed = f"{r['tokens_per_s'] / base[r['mode']]:.2f}" if r["mode"] in base else "-"
        cells = [r.get(k, "-") for k in ("tokens_per_s", "device_ms", "kernels", "host_ms", "reserved_gb", "warm_s")]
        lines.append((r["variant"], r["mode"], str(cells[0]), speed, *(str(c) for c in cells[1:])))
    widths = [max(len(line[i]) for line in lines if len(line) == len(head)) for i in range(len(head))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths)) if len(line) == len(head) else "  ".join(line) for line in lines
    )


class Run:
    """The process of one line."""

    def __init__(self, args: argparse.Namespace, variant: str, mode: str, folder: Path) -> None:
        self.variant, self.mode = variant, mode
        self.turn = folder / f"{variant}-{mode}"
        command = [sys.executable, __file__, "--child", variant, mode, "--turn", str(self.turn)]
        for name in ("prompt", "tokens", "warm", "repeat", "backend"):
            command += [f"--{name}", str(getattr(args, name))]
        self.log = open(self.turn.with_suffix(".log"), "w+")  # noqa: SIM115  (closed in row)
        self.process = subprocess.Popen(command + ["--tiny"] * args.tiny, stdout=self.log, stderr=self.log)
        self.late = ""

    def warm(self) -> bool:
        return self.turn.with_suffix(".ready").exists() or self.process.poll() is not None

    def kill(self, why: str) -> None:
        self.late = why
        self.process.kill()
        self.process.wait()

    def row(self) -> dict:
        self.log.seek(0)
        text = self.log.read()
        self.log.close()
        if self.process.returncode == 0:
            return json.loads(text.strip().splitlines()[-1])
        print(f"== {self.variant} {self.mode}, exit status {self.process.returncode}\n{text[-3000:]}", file=sys.stderr)
        error = self.late or (text.strip().splitlines() or ["no output"])[-1][:200]
        return {"variant": self.variant, "mode": self.mode, "error": error}


def run_together(runs: list[Run], timeout: float) -> list[dict]:
    """Warm up side by side, then measure one after the other; each row goes to stderr as it comes."""
    rows = []
    end = time.monotonic() + timeout
    while time.monotonic() < end and not all(run.warm() for run in runs):
        time.sleep(0.1)
    for run in runs:
        if not run.warm():
            run.kill(f"not warm after {timeout:.0f} s")
    for run in runs:
        run.turn.with_suffix(".go").touch()
        try:
            run.process.wait(timeout)
        except subprocess.TimeoutExpired:
            run.kill(f"not measured after {timeout:.0f} s")
        rows.append(run.row())
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


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
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for all processes to warm up, and for each to measure")
    parser.add_argument("--backend", default="inductor", help="torch.compile's backend; aot_eager to trace alone")
    parser.add_argument("--csv", help="also write the table there")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.prompt = args.prompt or (20 if args.tiny else 234)
    args.tokens = args.tokens or (6 if args.tiny else 166)
    need_module("fish_speech", "the model", "pip install --no-deps fish-speech==0.1.0, and this package's extra 'integrations'")
    if not args.tiny and not args.child:
        need_gpu()
    if args.check:
        print(json.dumps(check(args)))
        return 0
    if args.child:
        print(json.dumps(measure(args, *args.child)))
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        pairs = [(v, m) for m in ("eager", "graph", "layers", "compile") if m in args.modes for v in args.variants]
        pairs = [pair for pair in pairs if pair != ("slice", "graph")]
        for i in range(0, len(pairs), MOST_PROCESSES):
            rows += run_together([Run(args, *pair, Path(folder)) for pair in pairs[i : i + MOST_PROCESSES]], args.timeout)
    rows.sort(key=lambda r: (args.modes.index(r["mode"]), args.variants.index(r["variant"])))
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
