"""FlashMLA's sparse prefill, by its own signature: change the import and nothing else.

    from cute_kernels.integrations.flash_mla import flash_mla_sparse_fwd

Same arguments, results and conventions (natural-log max_logits and lse, empty rows give 0, -inf, +inf). Wider than FlashMLA: any
h_q from 0 to 128 instead of 64 or 128, any topk instead of multiples of 64 or 128, s_q = 0, any finite sm_scale, CPU tensors.
Different: bad input raises ValueError or TypeError where FlashMLA raises RuntimeError.
"""

from __future__ import annotations

from torch import Tensor

from cute_kernels.ops.sparse_prefill import sparse_prefill


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    out: Tensor | None = None,
    *,
    use_legacy: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashMLA's flash_mla_sparse_fwd, with vLLM's `out=` and SGLang's `use_legacy=` (which of its kernels to take; ignored).

    q [s_q, h_q, d_qk] bfloat16, kv [s_kv, 1, d_qk] bfloat16, indices [s_q, 1, topk] int32 (values outside [0, s_kv) ignored),
    attn_sink [h_q] float32, topk_length [s_q] int32, out [s_q, h_q, d_v] bfloat16 to write. Returns (out, max_logits, lse), the
    statistics [s_q, h_q] float32 in natural-log units. Shapes, limits and errors: `cute_kernels.sparse_prefill`.
    """
    return sparse_prefill(
        q, kv, indices, sm_scale, d_v, attn_sink=attn_sink, topk_length=topk_length, out=out
    )
