"""Active-length attention on an H100/H200 under CUDA graphs and torch.compile, through the public operators."""

from __future__ import annotations

import math

import pytest
import torch
from test_sm90_decode import check, device_lengths, hopper, make, same

import cute_kernels as ck

STEPS = 12


class Layer(torch.nn.Module):
    """One attention layer with static caches: projections, append, attention."""

    def __init__(self, h_q=8, h_kv=2, d=64, capacity=300):
        super().__init__()
        self.h_q, self.h_kv, self.d = h_q, h_kv, d
        self.qkv = torch.nn.Linear(h_q * d, (h_q + 2 * h_kv) * d, bias=False)
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.full((1, h_kv, capacity, d), math.nan))

    def forward(self, x, lengths):
        s = x.shape[1]
        q, k, v = self.qkv(x).view(1, s, -1, self.d).transpose(1, 2).split((self.h_q, self.h_kv, self.h_kv), 1)
        out, _ = ck.active_attention_append(q, k, v, self.k_cache, self.v_cache, lengths)
        return x + out.transpose(1, 2).flatten(2)


@pytest.fixture
def decode():
    """(run(step) -> hidden states of every token, fresh caches each time)."""
    torch.manual_seed(0)
    layer = Layer().cuda().bfloat16().eval()
    start = torch.randn(1, 1, layer.h_q * layer.d, device="cuda").bfloat16()

    def run(step):
        layer.k_cache.fill_(math.nan)
        layer.v_cache.fill_(math.nan)
        lengths = device_lengths([1])
        x, states = start, []
        for _ in range(STEPS):
            x = step(x, lengths).clone()
            states.append(x)
            lengths += 1
        return torch.cat(states, 1)

    with torch.no_grad():
        yield layer, start, run
    torch._dynamo.reset()


@hopper
def test_a_compiled_step_and_reduce_overhead(decode):
    layer, _, run = decode
    want = run(layer)
    assert not want.isnan().any()
    for options in ({}, {"mode": "reduce-overhead"}):
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, **options)
        for _ in range(3):  # reduce-overhead records after its warm-up
            got = run(compiled)
        error = (got - want).float().norm() / want.float().norm()
        assert error < 0.01, (options, error)  # Inductor fuses and rounds the projections differently


@hopper
def test_a_whole_decode_is_one_graph(decode):
    from torch._dynamo.testing import CompileCounterWithBackend

    layer, start, run = decode
    want = run(layer)
    counter = CompileCounterWithBackend("inductor")

    @torch.compile(fullgraph=True, backend=counter)
    def loop(x, lengths):
        states = []
        for i in range(STEPS):
            x = layer(x, lengths + i)
            states.append(x)
        return torch.cat(states, 1)

    layer.k_cache.fill_(math.nan)
    layer.v_cache.fill_(math.nan)
    got = loop(start, device_lengths([1]))
    assert counter.frame_count == 1
    assert (got - want).float().norm() / want.float().norm() < 0.01


@hopper
def test_one_graph_captured_at_235_serves_every_length():
    capacity = 32768
    q, k, v = make(1, 32, 8, 1, 128, capacity, [capacity], seed=4)
    lengths = device_lengths([235])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ck.active_attention(q, k, v, lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = ck.active_attention(q, k, v, lengths)
    # Every length to 300, then steps of about 1 %, to the capacity.
    n, tried = 0, 0
    while n <= capacity:
        lengths.fill_(n)
        for x in result:
            x.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        if n:
            assert same(result, ck.active_attention(q, k, v, n)), n
        if n % 7 == 0:
            check(result, q, k, v, [n])
        n, tried = (capacity if n < capacity < n + max(1, n // 100) else n + max(1, n // 100)) if n >= 300 else n + 1, tried + 1
    assert tried > 500
