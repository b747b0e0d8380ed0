"""The integrations on a GPU: kernels, CUDA graphs over growing lengths, torch.compile's reduce-overhead mode."""

import importlib.util

import pytest
import torch
from integrations import fish
from integrations.fish import needs_fish_speech

import cute_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.full]
needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers not installed")


def active_model(**changes):
    from cute_kernels.integrations.fish_speech import use_active_attention

    model = use_active_attention(fish.make_model(torch.bfloat16, **changes).cuda())
    with torch.device("cuda"):
        model.setup_caches(1, model.config.max_seq_len, torch.bfloat16)
    return model


def step(model, inp, position):
    return model.forward_generate(inp, position).logits[0, -1]


def forced(model, tokens, prefill: int, call=step) -> torch.Tensor:
    """float64 logits of given tokens, the prefill eager, each later token by `call` with one position tensor that counts up."""
    out = [step(model, tokens[None, :, :prefill], torch.arange(prefill, device="cuda"))]
    position = torch.tensor([prefill], device="cuda", dtype=torch.int)
    for i in range(prefill, tokens.shape[1]):
        out.append(call(model, tokens[None, :, i : i + 1].clone(), position).clone())
        position += 1
    return torch.stack(out).double()


@needs_fish_speech
@torch.no_grad()
def test_fish_speech_logits():
    """No more than twice the error of the unmodified bf16 model against float32."""
    tokens = fish.prompt(60).cuda()
    runs = {}
    for name, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        model = fish.make_model(torch.bfloat16).to(dtype).cuda()
        with torch.device("cuda"):
            model.setup_caches(1, 256, dtype)
        runs[name] = forced(model, tokens, 40)
    ours = forced(active_model(), tokens, 40)
    assert not cute_kernels.last_backend().startswith("reference")
    error, allowed = (ours - runs["float32"]).abs(), (runs["bf16"] - runs["float32"]).abs()
    assert error.max() <= 2 * allowed.max() and error.pow(2).mean() <= 4 * allowed.pow(2).mean()


@needs_fish_speech
@torch.no_grad()
def test_one_cuda_graph_for_every_length():
    """A step captured at one length and replayed at others gives the eager bits."""
    tokens = fish.prompt(80).cuda()
    model = active_model()
    want = forced(model, tokens, 20)
    inp, at = tokens[None, :, :1].clone(), torch.tensor([20], device="cuda", dtype=torch.int)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(model, inp, at)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(model, inp, at)

    def replay(model, token, position):
        inp.copy_(token)
        at.copy_(position)
        graph.replay()
        return out

    assert torch.equal(forced(model, tokens, 20, replay), want)


@needs_fish_speech
@pytest.mark.parametrize("active", [True, False])
def test_cuda_graph_step_generates_the_eager_tokens(active):
    """Upstream's generate with its own sampler: two texts, one captured step, the random numbers of eager decoding."""
    from fish_speech.models.text2semantic import inference

    from cute_kernels.integrations.fish_speech import cuda_graph_step

    model = active_model() if active else fish.make_model(torch.bfloat16).cuda()
    out = []
    for step in (inference.decode_one_token_ar, cuda_graph_step()):
        torch.manual_seed(5)
        for seed, length, new in ((1, 20, 40), (2, 30, 60)):
            tokens = fish.prompt(length, seed).cuda()
            out.append(
                inference.generate(
                    model=model, prompt=tokens, max_new_tokens=new, audio_masks=None, audio_parts=None, decode_one_token=step,
                    temperature=0.7, top_p=0.9, repetition_penalty=1.2,
                )
            )  # fmt: skip
    assert torch.equal(out[2], out[0]) and torch.equal(out[3], out[1])
    assert len(set(out[0][0, 20:].tolist())) > 3


@needs_fish_speech
@torch.no_grad()
def test_reduce_overhead():
    tokens = fish.prompt(60).cuda()
    model = active_model()
    want = forced(model, tokens, 20)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=False, mode="reduce-overhead")
    got = forced(model, tokens, 20, compiled)
    # Inductor keeps float32 where eager rounds to bf16 between operators.
    assert (got - want).abs().max() <= 0.05 * want.abs().max()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@needs_transformers
@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True])
def test_static_cache_generation(compiled):
    """Greedy generation with a static cache, eager and by transformers' own compilation, against sdpa in float32."""
    from integrations.test_transformers import make, text

    from cute_kernels.integrations.transformers import use_active_attention

    ids = text(2, 12).cuda()
    settings = dict(
        max_new_tokens=12, do_sample=False, cache_implementation="static", output_logits=True, return_dict_in_generate=True
    )
    ours = use_active_attention(make("llama", dtype=torch.bfloat16).cuda()).generate(ids, disable_compile=not compiled, **settings)
    assert not cute_kernels.last_backend().startswith("reference")
    logits = torch.stack(ours.logits).double()
    for name, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        model = make("llama", dtype=torch.bfloat16).to(dtype).cuda()
        rows = model(ours.sequences[:, :-1]).logits[:, 11:].transpose(0, 1).double()  # teacher-forced, no cache
        if name == "float32":
            exact = rows
        else:
            allowed = (rows - exact).abs()
    error = (logits - exact).abs()
    assert error.max() <= 2 * allowed.max() and error.pow(2).mean() <= 4 * allowed.pow(2).mean()
