"""attn_implementation="cute_kernels" in transformers: small random models against the unmodified ones, both kinds of cache."""

import importlib.util
import warnings

import pytest
import torch

import cute_kernels
from cute_kernels.integrations import transformers as integration
from cute_kernels.ops.dispatch import KERNELS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers not installed (pip install cute-kernels[integrations])"
)

SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=None, initializer_range=0.2,
)  # fmt: skip
# kind -> (config, model, further settings, the implementation to compare with). Windows shorter than the text.
KINDS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}, "sdpa"),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 8}, "sdpa"),
    "gemma2": (
        "Gemma2Config", "Gemma2ForCausalLM",
        {"sliding_window": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 50,
         "tie_word_embeddings": False}, "eager",
    ),
    "gpt_oss": (
        "GptOssConfig", "GptOssForCausalLM", {"sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1}, "eager",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    """Matrices of this size are slower on two threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(kind: str, implementation: str | None = None, dtype=torch.float32, **changes):
    import transformers

    config, model, more, unmodified = KINDS[kind]
    config = getattr(transformers, config)(**{**SIZES, **more, **changes})
    config._attn_implementation = implementation or unmodified
    torch.manual_seed(0)
    made = getattr(transformers, model)(config).to(dtype).eval()
    for name, p in made.named_parameters():  # gpt_oss starts its sinks and experts from empty memory
        if "sinks" in name or "expert" in name or "router" in name:
            with torch.no_grad():
                p.copy_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
    return made


def text(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(2, 128, (batch, length), generator=torch.Generator().manual_seed(3))


def generate(model, ids, cache: str | None, **kwargs):
    return model.generate(
        ids, max_new_tokens=10, do_sample=False, cache_implementation=cache, disable_compile=True, **kwargs
    )  # fmt: skip


@pytest.mark.parametrize("cache", ["static", None])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_identical(kind, cache):
    ids = text()
    want = generate(make(kind), ids, cache)
    model = integration.use_active_attention(make(kind))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = generate(model, ids, cache)
    assert cute_kernels.last_backend() == "reference[cpu]"
    assert torch.equal(got, want)
    assert len(set(want[:, 12:].flatten().tolist())) > 3


def forced(model, ids, prefill: int, capacity: int = 64, poison: bool = False) -> torch.Tensor:
    """float64 logits of the given tokens, the first `prefill` in one pass, the rest one by one, with a static cache."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=capacity)
    out = []
    with torch.no_grad():
        for lo, hi in [(0, prefill)] + [(i, i + 1) for i in range(prefill, ids.shape[1])]:
            out.append(model(ids[:, lo:hi], past_key_values=cache, use_cache=True).logits[:, -1].double())
            if poison and lo == 0:
                for layer in cache.layers:
                    layer.keys[:, :, prefill:] = torch.nan
                    layer.values[:, :, prefill:] = torch.nan
    return torch.stack(out)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_match(kind):
    ids = text()
    want = forced(make(kind), ids, 7)
    got = forced(integration.use_active_attention(make(kind)), ids, 7)
    assert (want - got).abs().max() < 1e-4 * want.abs().max()  # float32, two layers


def test_stale_rows_and_capacity_do_not_matter():
    ids = text()
    model = integration.use_active_attention(make("llama"))
    want = forced(model, ids, 7)
    assert torch.equal(forced(model, ids, 7, poison=True), want)
    assert torch.equal(forced(model, ids, 7, capacity=200), want)


def test_by_name():
    """Registered once, it is an implementation like another: in the constructor, in set_attn_implementation, and back."""
    name = integration.register()
    assert name == integration.register() == "cute_kernels"
    model = make("llama", name)
    ids = text()
    want = forced(make("llama"), ids, 7)
    assert (forced(model, ids, 7) - want).abs().max() < 1e-4 * want.abs().max()
    model.set_attn_implementation("sdpa")
    assert torch.equal(forced(model, ids, 7), want)


def test_padding_inside_a_batch_falls_back():
    ids = text()
    ids[1, :5] = 0
    mask = (ids != 0).long()
    want = generate(make("llama"), ids, "static", attention_mask=mask)
    model = integration.use_active_attention(make("llama"))
    integration._warned.clear()
    with pytest.warns(UserWarning, match="padding inside the batch"):
        got = generate(model, ids, "static", attention_mask=mask)
    assert torch.equal(got, want)
    full = generate(model, text(), "static", attention_mask=torch.ones(2, 12, dtype=torch.long))
    assert torch.equal(full, generate(model, text(), "static"))


def test_what_neither_has_is_refused():
    """Sinks with padding: sdpa would ignore the sinks."""
    ids = text()
    ids[1, :5] = 0
    model = integration.use_active_attention(make("gpt_oss"))
    integration._warned.clear()
    with pytest.warns(UserWarning, match="padding"), pytest.raises(NotImplementedError, match="attention sinks"):
        generate(model, ids, "static", attention_mask=(ids != 0).long())


def test_training_is_refused():
    model = integration.use_active_attention(make("llama"))
    with pytest.raises(RuntimeError, match="grad"):
        model(text())


@pytest.mark.full
def test_compiles_to_one_graph():
    """A decode step with a StaticCache: fullgraph, one graph for every length."""
    from transformers import StaticCache

    ids = text(1, 14)
    model = integration.use_active_attention(make("llama"))
    want = forced(model, ids, 8)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()

    def decode(token, cache):
        return model(token, past_key_values=cache, use_cache=True).logits

    step = torch.compile(decode, backend=backend, fullgraph=True)
    cache = StaticCache(config=model.config, max_cache_len=64)
    with torch.no_grad():
        out = [model(ids[:, :8], past_key_values=cache, use_cache=True).logits[:, -1]]
        out += [step(ids[:, i : i + 1].clone(), cache)[:, -1] for i in range(8, 14)]
    assert len(graphs) == 1
    assert torch.allclose(torch.stack(out).double(), want, rtol=0, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize(
    "kind,graphs",
    [
        pytest.param("llama", 1, marks=pytest.mark.full),
        pytest.param("gemma2", 2, marks=pytest.mark.nightly),  # a window that is not full, and a full one
    ],
)
def test_generate_compiles(kind, graphs):
    """generate()'s own torch.compile of the forward (for CUDA devices only, unless told otherwise) takes the length as the mask."""
    from transformers import CompileConfig

    config = CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    ids = text()
    want = generate(make(kind), ids, "static")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = integration.use_active_attention(make(kind))
    got = model.generate(ids, max_new_tokens=10, do_sample=False, cache_implementation="static", compile_config=config)
    assert torch.equal(got, want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.nightly  # the same kernels run under test_fish_speech_emulated.py in the full set
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_two_steps_in_bf16(kind, arch):
    """Emulated kernels, teacher-forced: no more than twice the error of the unmodified bf16 model against float32."""
    pytest.importorskip("cutlass", reason="needs the CuTe DSL")
    if ("active_attention", arch) not in KERNELS:
        pytest.skip(f"no kernel for {arch}")
    from cute_kernels.emulator import emulate

    ids = text(2, 9)
    exact = forced(make(kind, dtype=torch.bfloat16).float(), ids, 7)
    allowed = (forced(make(kind, dtype=torch.bfloat16), ids, 7) - exact).abs()
    model = integration.use_active_attention(make(kind, dtype=torch.bfloat16))
    with emulate(arch) as e:
        ours = forced(model, ids, 7)
        assert cute_kernels.last_backend().startswith(arch)
    assert e.hazards == [] and len(e.launches) == 3 * SIZES["num_hidden_layers"]
    error = (ours - exact).abs()
    assert error.max() <= 2 * allowed.max(), (float(error.max()), float(allowed.max()))
    assert error.pow(2).mean().sqrt() <= 2 * allowed.pow(2).mean().sqrt()
