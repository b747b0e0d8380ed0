"""fish-speech 0.1.0 with its attention replaced: the same tokens, the same caches, one graph, and the errors it should give."""

import pytest
import torch
from integrations import fish
from integrations.fish import needs_fish_speech
from torch.overrides import TorchFunctionMode

import cute_kernels
from cute_kernels.integrations import fish_speech_graph
from cute_kernels.integrations.fish_speech import cuda_graph_step, restore_attention, use_active_attention

pytestmark = needs_fish_speech


@pytest.fixture(autouse=True)
def one_thread():
    """Matrices of this size are slower on two threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("when", ["before setup_caches", "after setup_caches"])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_tokens_are_identical(monkeypatch, when, qk_norm):
    theirs, ours = (fish.make_model(attention_qk_norm=qk_norm) for _ in range(2))
    if when.startswith("after"):
        ours.setup_caches(1, 256, torch.float32)
    use_active_attention(ours)
    tokens = fish.prompt()
    want = fish.generate(theirs, tokens, 16, monkeypatch)
    got = fish.generate(ours, tokens, 16, monkeypatch)
    assert torch.equal(got, want)
    assert len(set(want[0, 20:].tolist())) > 3  # not one token again and again
    assert cute_kernels.last_backend() == "reference[cpu]"
    for a, b in zip(theirs.layers, ours.layers):
        # float32 layers in front of each cache, summed in another order
        assert torch.allclose(a.attention.kv_cache.k_cache, b.attention.kv_cache.k_cache, rtol=0, atol=2e-4)
        assert torch.allclose(a.attention.kv_cache.v_cache, b.attention.kv_cache.v_cache, rtol=0, atol=2e-4)


@pytest.mark.parametrize("head_dim,n_local_heads", [(32, 1), (128, 8)])
def test_logits_match(head_dim, n_local_heads):
    tokens = fish.prompt(24)
    theirs, ours = (fish.make_model(head_dim=head_dim, n_local_heads=n_local_heads) for _ in range(2))
    want = fish.forced(theirs, tokens, 20, 4)
    got = fish.forced(use_active_attention(ours), tokens, 20, 4)
    for name in ("slow", "fast"):
        a, b = getattr(want, name), getattr(got, name)
        assert (a - b).abs().max() < 1e-4 * a.abs().max()  # float32, five layers


def test_the_model_without_codebook_layers():
    """NaiveTransformer: no fast layers, its own forward_generate."""
    from fish_speech.models.text2semantic import llama

    made = []
    for _ in range(2):
        torch.manual_seed(0)
        config = llama.NaiveModelArgs(
            vocab_size=164, n_layer=2, n_head=4, n_local_heads=2, head_dim=32, dim=64, intermediate_size=128, max_seq_len=64,
            codebook_size=64, num_codebooks=fish.CODEBOOKS,
        )  # fmt: skip
        made.append(llama.NaiveTransformer(config, tokenizer=fish.Tokenizer()).eval())
    use_active_attention(made[1])
    tokens = fish.prompt(24)[None]
    out = []
    for model in made:
        model.setup_caches(1, 64, torch.float32)
        with torch.inference_mode():
            passes = [model.forward_generate(tokens[:, :, :20], torch.arange(20))]
            passes += [model.forward_generate(tokens[:, :, i : i + 1], torch.tensor([i])) for i in range(20, 24)]
        out.append(torch.stack([r.codebook_logits[0, -1] for r in passes]))
    assert torch.allclose(out[0], out[1], rtol=0, atol=1e-4 * float(out[0].abs().max()))


def test_stale_rows_do_not_matter():
    tokens = fish.prompt(24)
    clean, dirty = (use_active_attention(fish.make_model()) for _ in range(2))
    dirty.setup_caches(1, 256, torch.float32)
    for block in (*dirty.layers, *dirty.fast_layers):
        block.attention.kv_cache.k_cache.fill_(torch.nan)
        block.attention.kv_cache.v_cache.fill_(torch.nan)
    want, got = fish.forced(clean, tokens, 20, 4), fish.forced(dirty, tokens, 20, 4)
    assert torch.equal(got.slow, want.slow) and torch.equal(got.fast, want.fast)


def test_capacity_does_not_matter():
    tokens = fish.prompt(24)
    small, large = (use_active_attention(fish.make_model(max_seq_len=n)) for n in (32, 512))
    want, got = fish.forced(small, tokens, 20, 4), fish.forced(large, tokens, 20, 4)
    assert torch.equal(got.slow, want.slow)


def test_lengths_seen_by_the_operator(monkeypatch):
    seen = []
    from cute_kernels.integrations import fish_speech as module

    real = module.active_attention_append

    def spy(q, k_new, v_new, k_cache, v_cache, kv_len, **kwargs):
        seen.append((q.shape[2], int(kv_len), k_cache.shape[2]))
        return real(q, k_new, v_new, k_cache, v_cache, kv_len, **kwargs)

    monkeypatch.setattr(module, "active_attention_append", spy)
    fish.generate(use_active_attention(fish.make_model()), fish.prompt(20), 4, monkeypatch)
    slow = [s for s in seen if s[2] == 256]
    # Three layers to each pass; generate asks for the prefill's token and three more.
    assert slow == [(20, 20, 256)] * 3 + [(1, n, 256) for n in (21, 22, 23) for _ in range(3)]
    fast = [s for s in seen if s[2] == fish.CODEBOOKS]
    assert fast == [(1, n, fish.CODEBOOKS) for _ in range(4) for n in range(1, fish.CODEBOOKS + 1) for _ in range(2)]


def test_samples_share_a_batch(monkeypatch):
    theirs, ours = (fish.make_model() for _ in range(2))
    use_active_attention(ours)
    tokens = fish.prompt()[None].repeat(3, 1, 1)
    tokens[1, 0, :5] = 7
    tokens[2, 1:, 12:] = 9
    out = []
    with torch.inference_mode():
        for model in (theirs, ours):
            model.setup_caches(3, 256, torch.float32)
            first = model.forward_generate(tokens, torch.arange(20)).logits
            then = model.forward_generate(tokens[:, :, 4:5], torch.tensor([20], dtype=torch.int)).logits
            out.append(torch.stack([first, then]))
    assert torch.allclose(out[0], out[1], rtol=0, atol=1e-4 * float(out[0].abs().max()))
    # Fewer rows than the caches have: the first of them are used.
    with torch.inference_mode():
        alone = ours.forward_generate(tokens[1:2], torch.arange(20)).logits
    assert torch.allclose(alone[0], out[1][0, 1], rtol=0, atol=1e-4 * float(alone.abs().max()))


def test_training_and_uncached_passes_are_the_original():
    theirs, ours = (fish.make_model() for _ in range(2))
    use_active_attention(ours, keep_mask=True)
    tokens = fish.prompt()[None]
    x = torch.randn(1, 20, 64, generator=torch.Generator().manual_seed(0))
    mask = theirs.causal_mask[None, None, :20, :20]
    a = theirs.layers[0](x, theirs.freqs_cis[:20], mask)
    b = ours.layers[0](x, ours.freqs_cis[:20], mask)
    assert torch.equal(a, b) and b.requires_grad
    with pytest.raises(RuntimeError, match="setup_caches"):
        ours.forward_generate(tokens)


def test_mask_is_dropped_and_restored(monkeypatch):
    model = fish.make_model()
    names = set(model.state_dict())
    use_active_attention(model)
    assert model.causal_mask.numel() == 256 * fish.CODEBOOKS
    assert isinstance(model, torch.nn.Module) and type(model).__mro__[1].__name__ == "DualARTransformer"
    with pytest.raises(ValueError, match="replaced already"):
        use_active_attention(model)
    got = fish.generate(model, fish.prompt(), 6, monkeypatch)
    restore_attention(model)
    assert type(model).__name__ == "DualARTransformer" and type(model.layers[0].attention).__name__ == "Attention"
    assert torch.equal(model.causal_mask, torch.ones(256, 256, dtype=torch.bool).tril())
    with pytest.raises(ValueError, match="not replaced"):
        restore_attention(model)
    assert torch.equal(fish.generate(model, fish.prompt(), 6, monkeypatch), got)
    assert {n for n in model.state_dict() if "kv_cache" not in n} == names


def test_refuses_what_it_does_not_know():
    with pytest.raises(TypeError, match="fish_speech transformer, not Linear"):
        use_active_attention(torch.nn.Linear(2, 2))


def test_a_position_past_the_capacity():
    model = use_active_attention(fish.make_model(max_seq_len=24))
    model.setup_caches(1, 24, torch.float32)
    with torch.inference_mode(), pytest.raises((ValueError, IndexError)):
        model.forward_generate(fish.prompt(20)[None, :, :1], torch.tensor([24]))
    with torch.inference_mode(), pytest.raises(ValueError, match="kv_len"):  # the layer on its own
        model.layers[0].attention(torch.zeros(1, 1, 64), model.freqs_cis[:1], None, torch.tensor([24]))


@pytest.mark.full
def test_compiles_to_one_graph():
    """torch.compile(fullgraph=True) of a decode step: one graph for every length, the tokens of the eager model."""
    theirs, ours = (fish.make_model() for _ in range(2))
    use_active_attention(ours)
    tokens = fish.prompt(28)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    @torch.no_grad()
    def run(model, step):
        model.setup_caches(1, 256, torch.float32)
        model.forward_generate(tokens[None, :, :20], torch.arange(20))
        position = torch.tensor([20], dtype=torch.int)
        out = []
        for i in range(6):
            out.append(step(model, tokens[None, :, 20 + i : 21 + i].clone(), position))
            position += 1
        return torch.stack(out)

    def step(model, inp, position):
        result = model.forward_generate(inp, position)
        return model.forward_generate_fast(result.hidden_states, torch.tensor([0])) + result.logits.sum()

    torch._dynamo.reset()
    want = run(theirs, step)
    got = run(ours, torch.compile(step, backend=backend, fullgraph=True, dynamic=False))
    assert len(graphs) == 1
    assert torch.allclose(got, want, rtol=0, atol=1e-4 * float(want.abs().max()))


def sampled(model, tokens, new, seed=5, **kwargs):
    """Upstream's generate with its own sampler."""
    from fish_speech.models.text2semantic import inference

    torch.manual_seed(seed)
    return inference.generate(
        model=model, prompt=tokens, max_new_tokens=new, audio_masks=None, audio_parts=None, temperature=0.7, top_p=0.9,
        repetition_penalty=1.2, **kwargs,
    )  # fmt: skip


class Host(TorchFunctionMode):
    """Outside of everything else: tells a copy of numbers from the host where none is allowed."""

    forbidden = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if self.forbidden:
            assert func is not torch.tensor
            assert func != torch.Tensor.__setitem__ or not isinstance(args[1], int)  # x[0] = 1 is a copy, x[mask] = 1 a fill
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("active", [True, False])
def test_bookkeeping_of_captured_steps(monkeypatch, active):
    """cuda_graph_step with captures played by the CPU: a replay runs the step again on the tensors it was captured with. Tokens as
    without it; a second text is captured anew only where its caches are new, and so are new parameters."""
    captures = []

    def capture(function):
        captures.append(function)
        random = torch.get_rng_state()  # a real capture draws nothing
        host.forbidden = True
        out = function()
        host.forbidden = False
        torch.set_rng_state(random)
        return lambda: out.copy_(function()), out

    monkeypatch.setattr(fish_speech_graph, "_capture", capture)
    monkeypatch.setattr(fish_speech_graph, "_capturable", lambda x: True)
    theirs, ours = (fish.make_model() for _ in range(2))
    if active:
        use_active_attention(ours)
    step = cuda_graph_step()
    with Host() as host:
        for number, (length, new) in enumerate([(20, 10), (30, 8), (20, 6)]):
            if number == 2:
                weight = theirs.embeddings.weight.detach().flip(0)
                theirs.embeddings.weight.data.copy_(weight)
                ours.embeddings.weight = torch.nn.Parameter(weight)
            tokens = fish.prompt(length, number)
            assert torch.equal(sampled(ours, tokens, new, decode_one_token=step), sampled(theirs, tokens, new))
            assert len(captures) == ([1, 1, 2] if active else [1, 2, 3])[number]


def test_graph_step_without_a_gpu_is_the_step():
    ours = use_active_attention(fish.make_model())
    want = sampled(ours, fish.prompt(), 6)
    assert torch.equal(sampled(ours, fish.prompt(), 6, decode_one_token=cuda_graph_step()), want)
