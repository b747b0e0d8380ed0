"""Published kernels and float64 references for them: what to call, with which inputs, and what must come out.

Every case calls a package's own Python interface with CPU tensors inside `emulate(pretend_cuda=True)`; nothing of the
packages is changed. Install with ``pip install --no-deps``: flash-attn-4==4.0.0b36 quack-kernels==0.6.5 einops
nvidia-cudnn-frontend==1.32.0. quack imports triton without needing it for these kernels; a stand-in is supplied when
triton is not installed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch

# quack's disk cache would hand back objects whose PTX was never kept.
os.environ["QUACK_CACHE_ENABLED"] = "0"


def require(*packages: str) -> str | None:
    """Why the packages cannot be used, or None."""
    for package in packages:
        try:
            missing = importlib.util.find_spec(package) is None
        except ModuleNotFoundError:
            missing = True
        if missing:
            return f"{package} is not installed (see tests/emulator/published.py)"
    if importlib.util.find_spec("quack") and "quack" not in sys.modules and importlib.util.find_spec("triton") is None:
        _import_quack_without_triton()
    return None


def _import_quack_without_triton() -> None:
    """quack's autotuner imports triton (a GB of wheels) for its benchmark function alone. The stand-in lasts for that import:
    torch's Inductor would take it for the real one."""
    importlib.import_module("torch._inductor.runtime.hints")  # looks for triton once, when imported
    stand_ins = {name: mock.MagicMock(name=name) for name in ("triton", "triton.language")}
    for stand_in in stand_ins.values():
        stand_in.__spec__ = None
    with mock.patch.dict(sys.modules, stand_ins):
        before = set(sys.modules)
        importlib.import_module("quack.autotuner")
        loaded = {name: sys.modules[name] for name in set(sys.modules) - before}
    sys.modules.update(loaded)  # patch.dict puts the whole table back


def forget_device() -> None:
    """Clears what the packages remember about the device, so that a real GPU is asked anew afterwards."""
    for module, name in (
        ("flash_attn.cute.interface", "_get_device_arch"),
        ("flash_attn.cute.cute_dsl_utils", "get_device_capacity"),
        ("flash_attn.cute.cute_dsl_utils", "get_max_active_clusters"),
        ("flash_attn.cute.cute_dsl_utils", "_get_device_arch_and_num_sms"),
        ("quack.cute_dsl_utils", "_get_device_capacity_cached"),
        ("quack.cute_dsl_utils", "get_compile_target_capacity"),
        ("quack.cute_dsl_utils", "get_max_active_clusters"),
        ("cudnn.deepseek_sparse_attention.sparse_attention_forward._interface_sm100", "_validated_device_capability"),
    ):
        function = getattr(sys.modules.get(module), name, None)
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@dataclass
class Case:
    """A call of a published kernel. `run()` returns [(result, float64 reference, absolute tolerance), ...]."""

    packages: tuple[str, ...]
    run: Callable[[], list[tuple[torch.Tensor, torch.Tensor, float]]]
    launches: int = 1
    arch: str = "sm_100a"
    explained: tuple[str, ...] = ()  # kinds of hazards that are faults of the kernel; docs/emulator.md explains them


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def _bf16_tolerance(reference: torch.Tensor, units: float = 2.0) -> float:
    """`units` times 2**-8 of the largest value: bf16 keeps 8 bits, and the kernels round twice on the way (P, output)."""
    return units * reference.abs().max().item() * 2.0**-8


def _attention(q, k, v, *, causal: bool, window: int | None = None):
    """Float64 attention of (batch, seq, heads, dim) tensors: output, log-sum-exp (batch, heads, seq)."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    x = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    rows = torch.arange(x.shape[-2])[:, None] + x.shape[-1] - x.shape[-2]
    keys = torch.arange(x.shape[-1])[None]
    if causal:
        x = x.masked_fill(keys > rows, float("-inf"))
    if window is not None:
        x = x.masked_fill(keys < rows - window, float("-inf"))
    return (x.softmax(-1) @ v).transpose(1, 2), x.logsumexp(-1)


def flash_attention(seq: int, heads: int, kv_heads: int, dim: int, causal: bool, window: int | None = None):
    """FlashAttention-4's forward (flash_fwd_sm100): a pair of CTAs where the shape allows."""
    from flash_attn.cute.interface import _flash_attn_fwd

    q, k, v = _random(1, seq, heads, dim), _random(1, seq, kv_heads, dim), _random(1, seq, kv_heads, dim)
    windows = {} if window is None else {"window_size_left": window, "window_size_right": 0}
    out, lse, *_ = _flash_attn_fwd(q, k, v, causal=causal, return_lse=True, **windows)
    reference, reference_lse = _attention(q, k, v, causal=causal, window=window)
    return [(out, reference, _bf16_tolerance(reference)), (lse, reference_lse, 1e-4)]


def _sparse_reference(q, kv, lists, d_v: int, sink=None):
    out = torch.zeros(q.shape[0], q.shape[1], d_v, dtype=torch.float64)
    lse = torch.zeros(q.shape[0], q.shape[1], dtype=torch.float64)
    for row, keys in enumerate(lists):
        chosen = kv[keys].double()
        x = q[row].double() @ chosen.T * q.shape[-1] ** -0.5
        lse[row] = x.logsumexp(-1)
        weight = 1.0 if sink is None else 1.0 / (1.0 + torch.exp(sink.double() - lse[row]))[:, None]
        out[row] = x.softmax(-1) @ chosen[:, :d_v] * weight
    return out, lse


def flash_attention_sparse_mla(heads: int, one_cta: bool):
    """FlashAttention-4's sparse MLA forward: 128 heads on a pair of CTAs, or up to 64 on one with 64-key blocks."""
    from flash_attn.cute.interface import _flash_attn_fwd

    rows, topk, keys = 2, 256, 512
    q, qv = _random(1, rows, heads, 64), _random(1, rows, heads, 512)
    k, v = _random(1, keys, 1, 64), _random(1, keys, 1, 512)
    indices = torch.stack([torch.randperm(keys)[:topk] for _ in range(rows)]).to(torch.int32)
    with mock.patch.dict(os.environ, {"FLASH_ATTENTION_MLA_1CTA": str(int(one_cta))}):
        out, lse, *_ = _flash_attn_fwd(q, k, v, qv=qv, gather_kv_indices=indices[None], return_lse=True)
    # The latent is [v, k] for the scores (the order does not matter to a dot product) and v for the values.
    latent, queries = torch.cat([v, k], -1)[0, :, 0], torch.cat([qv, q], -1)[0]
    reference, reference_lse = _sparse_reference(queries, latent, indices.long(), 512)
    return [(out[0], reference, _bf16_tolerance(reference)), (lse[0], reference_lse, 1e-4)]


def cudnn_sparse(heads: int, dim: int):
    """cudnn-frontend's sparse prefill: 64 heads with gather4 and .ws MMA, or 128 on a pair of CTAs with a CLC scheduler."""
    from cudnn.deepseek_sparse_attention.sparse_attention_forward import _interface_sm100 as interface

    rows, topk, keys = 2, 256, 512
    q, kv, sink = _random(rows, heads, dim), _random(keys, dim), torch.randn(heads)
    indices = torch.stack([torch.randperm(keys)[:topk] for _ in range(rows)]).to(torch.int32)
    indices[:, 180:190] = -1
    length = torch.tensor([topk, 200], dtype=torch.int32)
    out, max_logits, lse, _ = interface.sparse_attention_forward_sm100(
        q, kv, indices, attn_sink=sink, topk_length=length
    )
    lists = [row[: int(n)] for row, n in zip(indices, length)]
    lists = [row[row >= 0].long() for row in lists]
    reference, reference_lse = _sparse_reference(q, kv, lists, 512, sink)
    logits = [q[r].double() @ kv[keys].double().T * dim**-0.5 for r, keys in enumerate(lists)]
    largest = torch.stack([x.max(-1).values for x in logits])
    return [
        (out, reference, _bf16_tolerance(reference)),
        (lse, reference_lse, 1e-4),
        (max_logits, largest, 1e-4),
    ]


def quack_gemm(dtype: torch.dtype = torch.bfloat16, epilogue: bool = False, **config):
    """quack's GEMM (gemm_sm100): persistent, warp-specialised; D = alpha A B^T + beta C + a row vector."""
    from quack.gemm import gemm

    m, n, k = 512, 384, 256
    a, b, d = _random(1, m, k, dtype=dtype), _random(1, n, k, dtype=dtype), torch.zeros(1, m, n, dtype=torch.bfloat16)
    reference = a.double() @ b.double().transpose(1, 2)
    c = None
    if epilogue:
        c, bias = _random(1, m, n), torch.randn(1, n)
        config |= {"alpha": 0.5, "beta": 2.0, "rowvec_bias": bias}
        reference = 0.5 * reference + 2.0 * c.double() + bias.double()[:, None]
    gemm(a, b, d, c, None, **config)
    return [(d, reference, _bf16_tolerance(reference, 1.0))]


def quack_softmax():
    """quack's softmax over rows."""
    from quack.softmax import softmax_fwd

    x = _random(16, 1024)
    reference = x.double().softmax(-1)
    return [(softmax_fwd(x), reference, _bf16_tolerance(reference))]


def quack_rmsnorm():
    """quack's RMS norm, with the reciprocal root as a second result."""
    from quack.rmsnorm import rmsnorm_fwd

    x, weight = _random(16, 1024), torch.randn(1024)
    out, _, rstd = rmsnorm_fwd(x, weight, store_rstd=True)
    reference_rstd = torch.rsqrt(x.double().pow(2).mean(-1) + 1e-6)
    reference = x.double() * reference_rstd[:, None] * weight.double()
    return [(out, reference, _bf16_tolerance(reference)), (rstd, reference_rstd, 1e-5)]


def quack_topk():
    """quack's top-k by a bitonic network: values exact."""
    from quack.topk import topk

    x = _random(16, 256)
    return [(topk(x, 32)[0], x.double().topk(32)[0], 0.0)]


FA4, QUACK, CUDNN = ("flash_attn.cute", "quack", "einops"), ("quack",), ("cudnn",)
PAIR = {"tile_M": 256, "tile_N": 256, "cluster_M": 2, "cluster_N": 1}
HOPPER = {"tile_M": 128, "tile_N": 128, "cluster_M": 2, "cluster_N": 1}
CASES = {
    "fa4-dense": Case(FA4, lambda: flash_attention(512, 1, 1, 128, causal=False)),
    "fa4-causal": Case(FA4, lambda: flash_attention(512, 1, 1, 128, causal=True)),
    "fa4-causal-gqa-d64": Case(FA4, lambda: flash_attention(256, 4, 2, 64, causal=True)),
    "fa4-window": Case(FA4, lambda: flash_attention(384, 2, 1, 128, causal=True, window=100)),
    "fa4-sparse-mla-2cta": Case(FA4, lambda: flash_attention_sparse_mla(128, one_cta=False)),
    "fa4-sparse-mla-kb64": Case(FA4, lambda: flash_attention_sparse_mla(64, one_cta=True)),
    "cudnn-sparse-head64-d576": Case(CUDNN, lambda: cudnn_sparse(64, 576)),
    "cudnn-sparse-head64-d512": Case(CUDNN, lambda: cudnn_sparse(64, 512)),
    "cudnn-sparse-head128": Case(CUDNN, lambda: cudnn_sparse(128, 512), explained=("mbarrier-phase-overrun",)),
    "quack-gemm-2cta": Case(QUACK, lambda: quack_gemm(**PAIR)),
    "quack-gemm-2cta-clc": Case(QUACK, lambda: quack_gemm(**PAIR, is_dynamic_persistent=True)),
    "quack-gemm-2cta-fp8": Case(QUACK, lambda: quack_gemm(torch.float8_e4m3fn, **PAIR)),
    "quack-gemm-2cta-epilogue": Case(QUACK, lambda: quack_gemm(epilogue=True, **PAIR | {"tile_N": 128})),
    "quack-gemm-1cta": Case(QUACK, lambda: quack_gemm(tile_M=128, tile_N=128, cluster_M=1, cluster_N=1)),
    "quack-softmax": Case(QUACK, quack_softmax),
    "quack-rmsnorm": Case(QUACK, quack_rmsnorm),
    "quack-topk": Case(QUACK, quack_topk),
    "fa4-dense-sm90": Case(FA4, lambda: flash_attention(256, 1, 1, 128, causal=False), arch="sm_90a"),
    "fa4-causal-d64-sm90": Case(FA4, lambda: flash_attention(256, 2, 2, 64, causal=True), arch="sm_90a"),
    "quack-gemm-sm90": Case(QUACK, lambda: quack_gemm(**HOPPER), arch="sm_90a"),
    "quack-gemm-pingpong-sm90": Case(QUACK, lambda: quack_gemm(**HOPPER, pingpong=True), arch="sm_90a"),
    "quack-gemm-fp8-sm90": Case(QUACK, lambda: quack_gemm(torch.float8_e4m3fn, **HOPPER), arch="sm_90a"),
}
