"""torch.ops.cute_kernels.sparse_prefill_fwd and .out: schema, checks, fakes, dispatch."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels import reference
from cute_kernels.jit.target import pushed_targets as targets
from cute_kernels.ops import _common as c
from cute_kernels.ops import dispatch

_OP = "sparse_prefill_fwd"
_ARGS = (
    "Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v=512, Tensor? attn_sink=None, Tensor? topk_length=None, "
    "Tensor? head_group_mask=None, int head_group_size=16"
)
BLOCK = 128  # keys per block of head_group_mask
MAX_GROUPS = 8  # 8 groups x 16 bytes = the 128 mask bytes of one block
D_QK = (512, 576)
D_V = 512
MAX_HEADS = 128

c.define(f"{_OP}({_ARGS}) -> (Tensor, Tensor, Tensor)")
c.define(f"{_OP}.out({_ARGS}, *, Tensor(a!) out) -> (Tensor, Tensor)")


def _check(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, head_group_mask, head_group_size, out) -> None:
    """Everything that layouts and numbers decide."""
    device = q.device
    c.check_tensor(_OP, "q", q, (torch.bfloat16,), (None, None, None), device, "[s_q, h_q, d_qk]")
    s_q, h_q, d_qk = q.shape
    if d_qk not in D_QK:
        c.fail(_OP, "q", "have d_qk 576 or 512", d_qk)
    if h_q > MAX_HEADS:
        c.fail(_OP, "q", f"have at most {MAX_HEADS} heads", h_q)
    if kv.dim() == 3 and kv.shape[1] != 1:
        c.fail(_OP, "kv", "have h_kv = 1 (one latent KV head)", kv.shape[1])
    c.check_tensor(_OP, "kv", kv, (torch.bfloat16,), (None, 1, d_qk), device, "[s_kv, 1, d_qk]")
    if kv.shape[0] > 2**31 - 1:
        c.fail(_OP, "kv", "have at most 2**31 - 1 rows (indices are int32)", kv.shape[0])
    c.check_tensor(_OP, "indices", indices, (torch.int32,), (s_q, 1, None), device, "[s_q, 1, topk]")
    topk = indices.shape[2]
    if d_v != D_V:
        c.fail(_OP, "d_v", "be 512", d_v)
    c.check_number(_OP, "sm_scale", sm_scale)
    if attn_sink is not None:
        c.check_tensor(_OP, "attn_sink", attn_sink, (torch.float32,), (h_q,), device, "[h_q]")
        c.check_unit_last_stride(_OP, "attn_sink", attn_sink)
    if topk_length is not None:
        c.check_tensor(_OP, "topk_length", topk_length, (torch.int32,), (s_q,), device, "[s_q]")
        c.check_unit_last_stride(_OP, "topk_length", topk_length)
    g = head_group_size
    if g < 1 or g > MAX_HEADS or g & (g - 1):
        c.fail(_OP, "head_group_size", "be a power of two from 1 to 128", g)
    if head_group_mask is not None:
        if h_q % g:
            c.fail(_OP, "head_group_size", f"divide h_q = {h_q}", g)
        if h_q > g * MAX_GROUPS:
            c.fail(_OP, "head_group_size", f"give at most {MAX_GROUPS} groups for h_q = {h_q}", f"{g}: {h_q // g} groups")
        if topk % BLOCK:
            c.fail(_OP, "indices", "have a topk that is a multiple of 128 when head_group_mask is given", topk)
        shape = (s_q, topk // BLOCK, BLOCK)
        c.check_tensor(_OP, "head_group_mask", head_group_mask, (torch.uint8,), shape, device, "[s_q, topk/128, 128]")
        c.check_unit_last_stride(_OP, "head_group_mask", head_group_mask)
        c.check_row_strides(_OP, "head_group_mask", head_group_mask)
    for name, t in (("q", q), ("kv", kv)):
        c.check_unit_last_stride(_OP, name, t)
        c.check_row_strides(_OP, name, t)
    c.check_unit_last_stride(_OP, "indices", indices)
    if out is not None:
        c.check_tensor(_OP, "out", out, (torch.bfloat16,), (s_q, h_q, d_v), device, "[s_q, h_q, d_v]")
        c.check_unit_last_stride(_OP, "out", out)
        c.check_row_strides(_OP, "out", out)


_plans = c.Plans()


def _plan(arguments, out, device, target):
    """What layouts and numbers decide, kept for the calls that repeat them:
    (function, allocator, sizes and strides of out and of the statistics, backend).

    function(q, kv, indices, out, max_logits, lse, attn_sink, topk_length, head_group_mask); None: nothing to do
    """
    s_q, h_q, _ = arguments["q"].shape
    d_v = arguments["d_v"]
    kernel, backend = dispatch.select("sparse_prefill", device, target, arguments)
    size, stride = (s_q, h_q), (max(h_q, 1), 1)  # as torch gives them to empty tensors too
    out_size, out_stride = (*size, d_v), (max(h_q, 1) * d_v, d_v, 1)
    emulated = target is not None and target.backend is not None
    rest = c.allocator(device, emulated), (out_size, out_stride, size, stride), backend
    if s_q == 0 or h_q == 0:
        return None, *rest
    if hasattr(kernel, "prepare"):
        # A function that is in memory or compiled now: later calls reach it without a look at their arguments.
        outputs = (out_size, out_stride) if out is None else out, (size, stride), (size, stride)
        return kernel.prepare(**arguments, outputs=outputs, target=target), *rest
    numbers = {name: arguments[name] for name in ("sm_scale", "d_v", "head_group_size")}
    launch = reference.sparse_prefill_into if kernel is None else kernel.launch

    def function(q, kv, indices, out, max_logits, lse, attn_sink, topk_length, head_group_mask):
        launch(
            out=out, max_logits=max_logits, lse=lse, q=q, kv=kv, indices=indices, attn_sink=attn_sink, topk_length=topk_length,
            head_group_mask=head_group_mask, **numbers,
        )  # fmt: skip

    return function, *rest


# Numbers and options -> (comparison with the layouts of the latest such call, its plan): for the Python function, and below the
# dispatcher, where tensors have other dispatch keys.
_latest, _latest_below = c.Plans(), c.Plans()


def _call(latest, q, kv, indices, sm_scale, d_v, attn_sink, topk_length, head_group_mask, head_group_size, out=None):
    """The operator. None, with nothing done, if the dispatcher is to convert the arguments or to hand them on.

    One function on purpose: as six more of them, with `unobserved`, it took 5.8 us where it takes 4.5 (no GPU, launches left out).
    """
    pushed = targets.items
    options = (
        sm_scale, d_v, head_group_size, attn_sink is None, topk_length is None, head_group_mask is None, torch.is_grad_enabled(),
        pushed[-1].target if pushed else None,
    )  # fmt: skip
    plan = None
    if out is None:
        try:
            found = latest.get(options)
        except TypeError:  # what cannot be hashed is no number: the dispatcher names it
            found = None
        if found is not None:
            same, known = found
            addresses = 0
            if attn_sink is None and topk_length is None and head_group_mask is None:
                repeats = same(q, kv, indices)
            else:
                repeats = same(q, kv, indices, *[t for t in (attn_sink, topk_length, head_group_mask) if t is not None])
                if head_group_mask is not None:
                    addresses = head_group_mask.data_ptr()
            if repeats and not (addresses | q.data_ptr() | kv.data_ptr()) & 15:
                plan = known
    if plan is None:
        if latest is _latest:
            _check_kinds(q, kv, indices, sm_scale, d_v, head_group_size)
            numbers = type(sm_scale) is float and type(d_v) is int and type(head_group_size) is int
            if not (numbers and c.plain(q, kv, indices, attn_sink, topk_length, head_group_mask)):
                return None
        plan = _find(
            latest, options, q, kv, indices, sm_scale, d_v, attn_sink, topk_length, head_group_mask, head_group_size, out
        )  # fmt: skip
    function, allocate, (out_size, out_stride, size, stride), backend = plan
    if out is None:
        out = allocate(out_size, out_stride, torch.bfloat16)
    else:
        torch.autograd.graph.increment_version(out)
    max_logits = allocate(size, stride, torch.float32)
    lse = allocate(size, stride, torch.float32)
    if function is not None:
        function(q, kv, indices, out, max_logits, lse, attn_sink, topk_length, head_group_mask)
    dispatch.state.backend = backend
    return out, max_logits, lse


def _check_kinds(q, kv, indices, sm_scale, d_v, head_group_size) -> None:
    c.check_given(_OP, q=q, kv=kv, indices=indices)
    c.check_kinds(_OP, dict(sm_scale=sm_scale), dict(d_v=d_v, head_group_size=head_group_size))


def _find(latest, options, q, kv, indices, sm_scale, d_v, attn_sink, topk_length, head_group_mask, head_group_size, out):
    """Check everything; the plan, which the next such call may take."""
    if torch.is_grad_enabled():
        c.check_grad(_OP, q, kv, attn_sink, out)
    device = q.device
    target = dispatch.current_target(device)
    tensors = [t for t in (q, kv, indices, attn_sink, topk_length, head_group_mask) if t is not None]
    key = (options, target, *(c.layout(t) for t in tensors), c.layout(out))
    arguments = dict(
        q=q, kv=kv, indices=indices, sm_scale=sm_scale, d_v=d_v, attn_sink=attn_sink, topk_length=topk_length,
        head_group_mask=head_group_mask, head_group_size=head_group_size,
    )  # fmt: skip
    plan, known = kept = _plans.get(key, (None, None))
    if plan is None:
        _check(**arguments, out=out)
    for name, t in (("q", q), ("kv", kv), ("head_group_mask", head_group_mask), ("out", out)):
        if t is not None:
            c.check_base(_OP, name, t)
    if out is not None:
        c.check_writable(_OP, out)
        c.check_written(_OP, {"out": out}, {n: t for n, t in arguments.items() if isinstance(t, Tensor)})
    look = topk_length is not None and (c.checking() or (target is None and device.type == "cpu"))
    if look:
        check_topk_length(_OP, topk_length, indices.shape[2])
    if plan is None:
        plan = _plan(arguments, out, device, target)
    same = known
    if out is None and not look:
        same = c.same_layouts(*tensors, known=known)
        if same is not None:
            latest[options] = same, plan
    if (plan, same) != kept:
        _plans[key] = plan, same
    return plan


def _real(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, head_group_mask=None, head_group_size=16):
    return _call(_latest_below, q, kv, indices, sm_scale, d_v, attn_sink, topk_length, head_group_mask, head_group_size)


def check_topk_length(op: str, topk_length: Tensor, topk: int) -> None:
    if topk_length.numel() == 0:
        return
    low, high = int(topk_length.min()), int(topk_length.max())
    if low < 0 or high > topk:
        c.fail(op, "topk_length", f"lie in [0, topk = {topk}]", f"values from {low} to {high}")


def _real_out(
    q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, head_group_mask=None, head_group_size=16, *, out
):
    return _call(_latest_below, q, kv, indices, sm_scale, d_v, attn_sink, topk_length, head_group_mask, head_group_size, out)[1:]


def _fake(
    q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, head_group_mask=None, head_group_size=16
):
    c.check_grad(_OP, q, kv, attn_sink)
    _check(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, head_group_mask, head_group_size, None)
    s_q, h_q, _ = q.shape
    stats = [q.new_empty((s_q, h_q), dtype=torch.float32) for _ in range(2)]
    return q.new_empty((s_q, h_q, d_v)), *stats


def _fake_out(
    q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, head_group_mask=None, head_group_size=16, *, out
):
    c.check_grad(_OP, q, kv, attn_sink, out)
    _check(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, head_group_mask, head_group_size, out)
    s_q, h_q, _ = q.shape
    return tuple(q.new_empty((s_q, h_q), dtype=torch.float32) for _ in range(2))


c.implement(_OP, _real, _fake)
c.implement(f"{_OP}.out", _real_out, _fake_out)

_is_compiling, _dispatch_modes, _function_modes, _profiling = c.OBSERVERS
_default = torch.ops.cute_kernels.sparse_prefill_fwd.default
_out = torch.ops.cute_kernels.sparse_prefill_fwd.out


def sparse_prefill(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    *,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    head_group_mask: Tensor | None = None,
    head_group_size: int = 16,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of every query row to its own list of latent KV rows (DeepSeek sparse attention, MLA absorbed form).

    A key counts for (row, head) if 0 <= index < s_kv, its position in the list is < topk_length[row], and its head group's mask
    bit is set. Over the counted keys, with x = sm_scale * (q . k):

        max_logits = max x        lse = ln sum exp x        out = sum exp(x) v / (sum exp(x) + exp(attn_sink))

    A row and head without a counted key gives out 0, max_logits -inf, lse +inf. A key listed twice counts twice.

    Args:
        q: [s_q, h_q, d_qk] bfloat16, h_q from 0 to 128, d_qk 576 or 512.
        kv: [s_kv, 1, d_qk] bfloat16. There is one KV head (h_kv must be 1); the values are kv[..., :d_v].
        indices: [s_q, 1, topk] int32, rows of kv. Values outside [0, s_kv) are ignored. Any topk; with a mask a multiple of 128.
        sm_scale: any number that is finite in float32, always given. Absorbed MLA uses (128 + 64) ** -0.5, not d_qk ** -0.5.
            (As everywhere in torch, a bool counts as the number 0 or 1.)
        d_v: 512.
        attn_sink: [h_q] float32, natural-log units; joins the denominator of out only. +inf gives out 0, -inf changes nothing,
            NaN gives NaN to the rows of its head that have a counted key.
        topk_length: [s_q] int32, read on the device and clamped to [0, topk].
        head_group_mask: [s_q, topk/128, 128] uint8. Bit j % 8 of byte 16*g + j // 8 of block b says whether the heads of group g
            may attend to indices[row, 0, 128*b + j]. Group g is heads [g*head_group_size, (g+1)*head_group_size), at most 8 groups.
        head_group_size: a power of two from 1 to 128; with a mask it must divide h_q, without one it means nothing.
        out: optional [s_q, h_q, d_v] bfloat16 to write; must not overlap an input.
    q, kv, out and head_group_mask need a last stride of 1, other strides and the base address a multiple of 16 bytes.

    Returns:
        (out [s_q, h_q, d_v] bfloat16, max_logits [s_q, h_q] float32, lse [s_q, h_q] float32), natural logarithm.

    Raises:
        TypeError for a dtype, ValueError for a shape, stride, device, overlap or number, RuntimeError when gradients are asked
        for. On the CPU backend, and with CUTE_KERNELS_CHECK=1, also ValueError for a topk_length outside [0, topk].

    The formula is FlashMLA's sparse prefill (natural-log statistics since January 2026); head_group_mask is its grouped form.
    """
    if not (_is_compiling() or _dispatch_modes() or _function_modes() or _profiling()):  # c.unobserved(), without its frame
        if out is None:
            results = _call(
                _latest, q, kv, indices, sm_scale, d_v, attn_sink, topk_length, head_group_mask, head_group_size
            )  # fmt: skip
            if results is not None:
                return results
        else:
            _check_kinds(q, kv, indices, sm_scale, d_v, head_group_size)
    args = q, kv, indices, sm_scale, d_v, attn_sink, topk_length, head_group_mask, head_group_size
    if out is None:
        return _default(*args)
    if torch.compiler.is_compiling() and not out.is_contiguous():  # Dynamo takes no such out= of any operator
        c.check_tensor(_OP, "out", out, (torch.bfloat16,), (*q.shape[:2], d_v), q.device, "[s_q, h_q, d_v]")
        result, *stats = _default(*args)
        return out.copy_(result), *stats
    return out, *_out(*args, out=out)
