"""attn_implementation="cute_kernels" in transformers: small random models against the unmodified ones, both kinds of cache."""

import importlib.util
import sys
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


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_padding_with_softcap_or_sinks_falls_back_to_eager(kind):
    """sdpa would leave out the softcap or the sinks; the comparison is with the unmodified eager model."""
    ids = text()
    ids[1, :5] = 0
    mask = (ids != 0).long()
    want = generate(make(kind), ids, "static", attention_mask=mask)
    model = integration.use_active_attention(make(kind))
    integration._warned.clear()
    with pytest.warns(UserWarning, match="padding inside the batch: .*eager with a softcap or sinks"):
        got = generate(model, ids, "static", attention_mask=mask)
    assert torch.equal(got, want)


def test_a_layer_without_an_eager_function_is_refused():
    q = torch.zeros(1, 2, 4, 16)
    with pytest.raises(NotImplementedError, match="Module has a softcap or sinks"):
        integration.active_attention_forward(torch.nn.Module(), q, q, q, torch.ones(1, 1, 4, 4, dtype=torch.bool), softcap=5.0)


# kind -> (further settings of make(), the reason of the warning)
OWN = {
    "deepseek_v3": ({}, r"a v head dim \(16\) other than the qk head dim \(32\)"),
    "deepseek_v32": ({}, "deepseek_v32, whose layers read the mask"),
    "doge": ({}, "doge, whose layers read the mask"),
    "llama": ({"dtype": torch.float64}, "torch.float64 attention"),
    "mistral": ({"dtype": torch.float64}, "torch.float64 attention"),
}
_MLA = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 32,
    "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "head_dim": 16, "v_head_dim": 16,
    "moe_intermediate_size": 32, "num_key_value_heads": 4,
}  # fmt: skip
_INDEXER = {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 32, "mlp_layer_types": None}
OWN_KINDS = {
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", _MLA, "sdpa"),
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32ForCausalLM", {**_MLA, **_INDEXER}, "sdpa"),
    "doge": ("DogeConfig", "DogeForCausalLM", {}, "eager"),  # its sdpa loses causality where transformers leaves the mask out
}


@pytest.mark.parametrize("cache", ["static", None])
@pytest.mark.parametrize("kind", OWN)
def test_what_the_operator_cannot_compute_falls_back(kind, cache, monkeypatch):
    import transformers

    monkeypatch.setattr(sys.modules[__name__], "KINDS", {**KINDS, **OWN_KINDS})
    if not hasattr(transformers, KINDS[kind][1]):
        pytest.skip(f"this transformers has no {KINDS[kind][1]}")
    settings, reason = OWN[kind]
    ids = text()
    want = generate(make(kind, **settings), ids, cache)
    model = integration.use_active_attention(make(kind, **settings))
    integration._warned.clear()
    with pytest.warns(UserWarning, match=reason):
        got = generate(model, ids, cache)
    assert torch.equal(got, want)


@pytest.mark.parametrize("window", [None, 3])
def test_mask_of_the_lengths(window):
    """What the fallback attends to is what the operator attends to; a position bias is not lost."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 2, rows, 16, generator=generator) for rows in (4, 11, 11))
    length = torch.tensor([5, 9], dtype=torch.int32)
    layer = torch.nn.Module()
    want, _ = integration.active_attention_forward(layer, q, k, v, length, scaling=0.25, sliding_window=window)
    mask = integration._mask_of(length, 4, 11, window)
    got = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.25).transpose(1, 2)
    assert torch.allclose(got, want, rtol=0, atol=1e-5)
    bias = torch.randn(1, 2, 4, 11, generator=generator)
    integration._warned.clear()
    with pytest.warns(UserWarning, match="a position bias"):
        got, _ = integration.active_attention_forward(
            layer, q, k, v, length, scaling=0.25, sliding_window=window, position_bias=bias
        )  # fmt: skip
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias.masked_fill(~mask, -torch.inf), scale=0.25)
    assert torch.allclose(got, want.transpose(1, 2), rtol=0, atol=1e-5)


def test_what_is_no_model_is_named():
    from transformers import BloomConfig, BloomForCausalLM

    with pytest.raises(TypeError, match="needs a transformers PreTrainedModel, not Linear"):
        integration.use_active_attention(torch.nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="no way to switch BloomForCausalLM, which keeps 'eager'"):
        integration.use_active_attention(BloomForCausalLM(BloomConfig(vocab_size=8, hidden_size=8, n_head=1, n_layer=1)))
    model = integration.use_active_attention(make("llama"))
    for mask in (torch.ones(12), torch.ones(12, dtype=torch.int32)):
        with pytest.raises(TypeError, match=r"attention_mask must be \[batch, length\]"):
            model(text(), attention_mask=mask)


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
    operators = [node for node in graphs[0].graph.nodes if "cute_kernels" in str(node.target)]
    assert len(operators) == SIZES["num_hidden_layers"]
    assert torch.allclose(torch.stack(out).double(), want, rtol=0, atol=1e-5 * float(want.abs().max()))


@pytest.mark.full
@pytest.mark.parametrize("kind,padded", [("llama", False), ("gpt_oss", True)])
def test_a_mask_falls_back_inside_the_graph(kind, padded):
    """An attention_mask passed into a compiled forward, and no cache at all: one graph, no warning from inside it."""
    ids = text()
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :5] = 0
    model = integration.use_active_attention(make(kind))
    integration._warned.clear()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="cute_kernels")
        got = compiled(ids, attention_mask=mask, use_cache=False).logits
        bare = compiled(ids, use_cache=False).logits
        want = make(kind)(ids, attention_mask=mask, use_cache=False).logits
        plain = make(kind)(ids, use_cache=False).logits
    seen = mask.bool()
    assert torch.allclose(got[seen], want[seen], rtol=0, atol=1e-4 * float(want.abs().max()))
    assert torch.allclose(bare, plain, rtol=0, atol=1e-4 * float(plain.abs().max()))


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
