"""torch.ops.cute_kernels.active_attention (int and tensor lengths) and active_attention_append: schema, checks, fakes, dispatch."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels import reference
from cute_kernels.jit.target import pushed_targets as targets
from cute_kernels.kernels.attention_arguments import output_layouts
from cute_kernels.ops import _common as c
from cute_kernels.ops import dispatch

_OP = "active_attention"
_APPEND = "active_attention_append"
_OPT = "*, float? sm_scale=None, bool causal=True, int window_left=-1, float softcap=0.0, Tensor? attn_sink=None"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Order matters: torch tries overloads as defined and would turn a one-element tensor into an int (a hidden sync).
c.define(f"{_OP}.seq_lens(Tensor q, Tensor k_cache, Tensor v_cache, Tensor kv_len, {_OPT}) -> (Tensor, Tensor)")
c.define(f"{_OP}(Tensor q, Tensor k_cache, Tensor v_cache, SymInt kv_len, {_OPT}) -> (Tensor, Tensor)")
c.define(
    f"{_APPEND}(Tensor q, Tensor k_new, Tensor v_new, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor kv_len, {_OPT}) "
    "-> (Tensor, Tensor)"
)


def _check(op, q, k_cache, v_cache, kv_len, sm_scale, window_left, softcap, attn_sink, k_new, v_new) -> None:
    """Everything that layouts and options decide."""
    device = q.device
    c.check_tensor(op, "q", q, _DTYPES, (None, None, None, None), device, "[B, Hq, S, D]")
    b, h_q, _, d = q.shape
    c.check_tensor(op, "k_cache", k_cache, (q.dtype,), (b, None, None, d), device, "[B, Hkv, C, D]")
    _, h_kv, capacity, _ = k_cache.shape
    c.check_tensor(op, "v_cache", v_cache, (q.dtype,), (b, h_kv, capacity, d), device, "[B, Hkv, C, D] like k_cache")
    if d == 0:
        c.fail(op, "q", "have a head dimension D of at least 1", 0)
    if h_q and (h_kv == 0 or h_q % h_kv):
        c.fail(op, "q", f"have a number of heads that is a multiple of Hkv = {h_kv}", h_q)
    for name, t in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        c.check_unit_last_stride(op, name, t)
    if isinstance(kv_len, Tensor):
        c.check_tensor(op, "kv_len", kv_len, (torch.int32,), (b,), device, "[B]")
        c.check_unit_last_stride(op, "kv_len", kv_len)
    if sm_scale is not None:
        c.check_number(op, "sm_scale", sm_scale)
    if window_left < -1:
        c.fail(op, "window_left", "be -1 (no window) or at least 0", window_left)
    c.check_number(op, "softcap", softcap, "be 0 (none) or a positive number that is finite in float32", 0.0)
    if attn_sink is not None:
        c.check_tensor(op, "attn_sink", attn_sink, (torch.float32,), (h_q,), device, "[Hq]")
        c.check_unit_last_stride(op, "attn_sink", attn_sink)
    if k_new is not None:
        for name, t in (("k_new", k_new), ("v_new", v_new)):
            c.check_tensor(op, name, t, (q.dtype,), (b, h_kv, q.shape[2], d), device, "[B, Hkv, S, D]")
            c.check_unit_last_stride(op, name, t)


def _check_length(op: str, kv_len: int, capacity: int) -> None:
    if not 1 <= kv_len <= capacity:
        c.fail(op, "kv_len", f"lie in [1, C = {capacity}]", kv_len)


def _check_lengths(op: str, kv_len: Tensor, capacity: int) -> None:
    if kv_len.numel():
        low, high = int(kv_len.min()), int(kv_len.max())
        if low < 0 or high > capacity:
            c.fail(op, "kv_len", f"lie in [0, C = {capacity}]", f"values from {low} to {high}")


def _empty_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    b, h_q, s, d = q.shape
    return q.new_empty((b, s, h_q, d)).transpose(1, 2), q.new_empty((b, h_q, s), dtype=torch.float32)


_plans = c.Plans()
# Options -> (comparison with the layouts of the latest call, its plan). Below the dispatcher tensors have other dispatch keys.
_latest, _latest_below = c.Plans(), c.Plans()


def _plan(op, arguments, device, target):
    """What layouts, numbers and options decide, kept for the calls that repeat them: (function, allocator, sizes and strides of out
    and lse, capacity, bytes that each tensor spans, addresses at which they were seen not to overlap, backend).

    function(q, k_cache, v_cache, kv_len, attn_sink, k_new, v_new, out, lse); None: nothing to do
    """
    q = arguments["q"]
    kernel, backend = dispatch.select(_OP, device, target, arguments)
    extents = [c.extent_bytes(arguments[name]) for name in _MEMORY] if op == _APPEND else None
    allocate = c.allocator(device, target is not None and target.backend is not None)
    rest = allocate, output_layouts(q), arguments["k_cache"].shape[2], extents, set(), backend
    if q.numel() == 0:
        return None, *rest
    if hasattr(kernel, "prepare"):
        return kernel.prepare(**arguments, target=target), *rest
    numbers = {name: arguments[name] for name in ("sm_scale", "causal", "window_left", "softcap")}
    launch = reference.active_attention_into if kernel is None else kernel.launch

    def function(q, k_cache, v_cache, kv_len, attn_sink, k_new, v_new, out, lse):
        launch(
            out=out, lse=lse, q=q, k_cache=k_cache, v_cache=v_cache, kv_len=kv_len, attn_sink=attn_sink, k_new=k_new, v_new=v_new,
            **numbers,
        )  # fmt: skip

    return function, *rest


_MEMORY = ("q", "k_new", "v_new", "k_cache", "v_cache", "kv_len", "attn_sink")  # of an append: what may not overlap the caches


def _given(op, q, k_new, v_new, k_cache, v_cache, kv_len, attn_sink):
    """The tensors among the arguments."""
    tensors = (q, k_cache, v_cache) if type(kv_len) is int else (q, k_cache, v_cache, kv_len)
    if op == _APPEND:
        tensors = *tensors, k_new, v_new
    return tensors if attn_sink is None else (*tensors, attn_sink)


def _call(latest, op, q, k_new, v_new, k_cache, v_cache, kv_len, sm_scale, causal, window_left, softcap, attn_sink):
    """The operators. None, with nothing done, if the dispatcher is to convert the arguments or to hand them on.

    One function on purpose: as six more of them it took 5.8 us where it takes 4.7 (an int length; no GPU, launches left out).
    """
    by_int, pushed = type(kv_len) is int, targets.items
    options = (
        op, sm_scale, causal, window_left, softcap, by_int, attn_sink is None, torch.is_grad_enabled(),
        pushed[-1].target if pushed else None,
    )  # fmt: skip
    try:
        found = latest.get(options)
    except TypeError:  # what cannot be hashed is no number: the dispatcher names it
        found = None
    plan = None
    if found is not None:
        same, known = found
        if by_int and attn_sink is None:
            repeats = same(q, k_cache, v_cache)
        else:
            repeats = same(*_given(op, q, k_new, v_new, k_cache, v_cache, kv_len, attn_sink))
        if repeats:
            plan = known
    if plan is None:
        if latest is _latest:
            _check_kinds(op, q, k_new, v_new, k_cache, v_cache, kv_len, sm_scale, window_left, softcap)
            tensors = c.plain(q, k_new, v_new, k_cache, v_cache, None if by_int else kv_len)
            if not (tensors and _plain_options(sm_scale, causal, window_left, softcap, attn_sink)):
                return None
        plan = _find(
            latest, options, op, q, k_new, v_new, k_cache, v_cache, kv_len, sm_scale, causal, window_left, softcap, attn_sink
        )  # fmt: skip
    function, allocate, ((size, stride), (stat_size, stat_stride)), capacity, extents, apart, backend = plan
    if extents is not None:
        sink = 0 if attn_sink is None else attn_sink.data_ptr()
        addresses = (
            q.data_ptr(), k_new.data_ptr(), v_new.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), kv_len.data_ptr(), sink
        )  # fmt: skip
        if addresses not in apart:
            if not c.ranges_disjoint(addresses, extents):
                _check_append_memory(dict(zip(_MEMORY, (q, k_new, v_new, k_cache, v_cache, kv_len, attn_sink), strict=True)))
            elif len(apart) < 4096:
                apart.add(addresses)
    elif by_int and not 1 <= kv_len <= capacity:
        _check_length(op, kv_len, capacity)
    out = allocate(size, stride, q.dtype)
    lse = allocate(stat_size, stat_stride, torch.float32)
    if function is not None:
        if k_new is not None:
            torch.autograd.graph.increment_version((k_cache, v_cache))
        function(q, k_cache, v_cache, kv_len, attn_sink, k_new, v_new, out, lse)
    dispatch.state.backend = backend
    return out, lse


def _find(
    latest, options, op, q, k_new, v_new, k_cache, v_cache, kv_len, sm_scale, causal, window_left, softcap, attn_sink
):  # fmt: skip
    """Check everything; the plan, which the next such call may take."""
    if torch.is_grad_enabled():
        c.check_grad(op, q, k_cache, v_cache, attn_sink, k_new, v_new)
    by_int = type(kv_len) is int
    device = q.device
    target = dispatch.current_target(device)
    capacity = k_cache.shape[2]
    if op == _APPEND:
        c.check_writable(op, k_cache, v_cache)
    given = _given(op, q, k_new, v_new, k_cache, v_cache, kv_len, attn_sink)
    key = (options, target, *(c.layout(t) for t in given))
    plan, known = kept = _plans.get(key, (None, None))
    if plan is None:
        _check(op, q, k_cache, v_cache, kv_len, sm_scale, window_left, softcap, attn_sink, k_new, v_new)
        if by_int:
            _check_length(op, kv_len, capacity)
    look = not by_int and (c.checking() or (target is None and device.type == "cpu"))
    if look:
        _check_lengths(op, kv_len, capacity)
    if plan is None:
        arguments = dict(
            q=q, k_cache=k_cache, v_cache=v_cache, kv_len=kv_len, sm_scale=q.shape[3] ** -0.5 if sm_scale is None else sm_scale,
            causal=causal, window_left=window_left, softcap=softcap, attn_sink=attn_sink, k_new=k_new, v_new=v_new,
        )  # fmt: skip
        if window_left >= capacity + q.shape[2]:
            arguments["window_left"] = -1  # wider than any position: no window, and no number that 32 bits cannot hold
        if softcap > 1e15:
            arguments["softcap"] = 0.0  # x - softcap * tanh(x / softcap) is below x^3 / 3e30, and x / softcap would leave float32
        if op == _APPEND:
            _check_append_memory(arguments)
        plan = _plan(op, arguments, device, target)
    same = known
    if not look:
        same = c.same_layouts(*given, known=known)
        if same is not None:
            latest[options] = same, plan
    if (plan, same) != kept:
        _plans[key] = plan, same
    return plan


def _check_append_memory(tensors) -> None:
    written = {name: tensors[name] for name in ("k_cache", "v_cache")}
    c.check_written(_APPEND, written, {name: tensors[name] for name in ("q", "k_new", "v_new", "kv_len", "attn_sink")})


def _real(q, k_cache, v_cache, kv_len, *, sm_scale=None, causal=True, window_left=-1, softcap=0.0, attn_sink=None):
    return _call(
        _latest_below, _OP, q, None, None, k_cache, v_cache, kv_len, sm_scale, causal, window_left, softcap, attn_sink
    )  # fmt: skip


def _fake(q, k_cache, v_cache, kv_len, *, sm_scale=None, causal=True, window_left=-1, softcap=0.0, attn_sink=None):
    c.check_grad(_OP, q, k_cache, v_cache, attn_sink)
    _check(_OP, q, k_cache, v_cache, kv_len, sm_scale, window_left, softcap, attn_sink, None, None)
    if isinstance(kv_len, int):
        # A symbolic length is left to the real call: a guard here would split the graph of a decode loop.
        _check_length(_OP, kv_len, k_cache.shape[2])
    return _empty_outputs(q)


def _real_append(
    q, k_new, v_new, k_cache, v_cache, kv_len, *, sm_scale=None, causal=True, window_left=-1, softcap=0.0, attn_sink=None
):
    c.check_given(_APPEND, k_new=k_new, v_new=v_new)  # the dispatcher lets None through as an undefined tensor
    return _call(
        _latest_below, _APPEND, q, k_new, v_new, k_cache, v_cache, kv_len, sm_scale, causal, window_left, softcap, attn_sink
    )  # fmt: skip


# torch 2.11's Inductor, given two views of one storage that an operator mutates, clones past the end of the second and gives
# garbage without a word (seen on 2.11.0 with a three-line operator of its own; 2.13.0 is right). An error is better.
_SLAB_MISCOMPILES = tuple(int(x) for x in torch.__version__.split(".")[:2]) < (2, 13)


def _refuse_slab(k_cache: Tensor, v_cache: Tensor) -> None:
    if k_cache.untyped_storage()._cdata == v_cache.untyped_storage()._cdata:
        raise RuntimeError(
            f"{_APPEND}: torch.compile of torch {torch.__version__} miscompiles an operator that writes two views of one tensor: "
            "allocate k_cache and v_cache separately, or use torch 2.13 or newer"
        )


def _fake_append(
    q, k_new, v_new, k_cache, v_cache, kv_len, *, sm_scale=None, causal=True, window_left=-1, softcap=0.0, attn_sink=None
):
    c.check_given(_APPEND, k_new=k_new, v_new=v_new)  # the dispatcher lets None through as an undefined tensor
    c.check_grad(_APPEND, q, k_cache, v_cache, attn_sink, k_new, v_new)
    if _SLAB_MISCOMPILES:
        _refuse_slab(k_cache, v_cache)
    _check(_APPEND, q, k_cache, v_cache, kv_len, sm_scale, window_left, softcap, attn_sink, k_new, v_new)
    return _empty_outputs(q)


c.implement(f"{_OP}.seq_lens", _real, _fake)
c.implement(_OP, _real, _fake)
c.implement(_APPEND, _real_append, _fake_append)

_is_compiling, _dispatch_modes, _function_modes, _profiling = c.OBSERVERS
_int = torch.ops.cute_kernels.active_attention.default
_seq_lens = torch.ops.cute_kernels.active_attention.seq_lens
_append = torch.ops.cute_kernels.active_attention_append.default


def _check_kinds(op, q, k_new, v_new, k_cache, v_cache, kv_len, sm_scale, window_left, softcap) -> None:
    c.check_given(op, q=q, k_cache=k_cache, v_cache=v_cache)
    if op == _APPEND:
        c.check_given(op, k_new=k_new, v_new=v_new, kv_len=kv_len)
    elif not hasattr(type(kv_len), "__index__"):
        c.fail(op, "kv_len", "be an int or an int32 tensor", type(kv_len).__name__, TypeError)
    reals = dict(softcap=softcap) if sm_scale is None else dict(softcap=softcap, sm_scale=sm_scale)
    c.check_kinds(op, reals, dict(window_left=window_left))


def _plain_options(sm_scale, causal, window_left, softcap, attn_sink) -> bool:
    """Whether the dispatcher would pass these on as they are."""
    return (
        (sm_scale is None or type(sm_scale) is float) and type(causal) is bool and type(window_left) is int
        and type(softcap) is float and c.plain(attn_sink)
    )  # fmt: skip


def active_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_len: int | Tensor,
    *,
    sm_scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    softcap: float = 0.0,
    attn_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the filled prefix of a preallocated KV cache, read in place, KV heads never expanded.

    Query row s of a batch row sits at position p = kv_len - S + s. It sees key j if j < kv_len, if causal j <= p, and with a
    window, j >= p - window_left. With x = sm_scale * (q . k), or softcap * tanh(that / softcap):

        lse = ln sum exp x        out = sum exp(x) v / (sum exp(x) + exp(attn_sink))

    Args:
        q: [B, Hq, S, D] bfloat16, float16 (or float32: the reference backend). Any strides with the last 1: a transposed
            [B, S, Hq, D] or a slice of a fused QKV projection goes in as it is.
        k_cache, v_cache: [B, Hkv, C, D], q's dtype, any strides with the last 1; Hq a multiple of Hkv (grouped-query attention).
            Rows at or past kv_len may hold anything, NaN included.
        kv_len: a Python int in [1, C] for the whole batch, or an int32 tensor [B] on q's device, read by the kernel (no sync:
            one CUDA graph serves every length), clamped to [0, C].
        sm_scale: None means D ** -0.5.
        causal: bottom-right. S > kv_len is legal: rows at negative positions see no key.
        window_left: -1 for none.
        softcap: 0.0 for none.
        attn_sink: [Hq] float32, natural-log units; joins the denominator of out only. A NaN gives NaN to its head's rows.

    Returns:
        out: q's shape and dtype, with the strides of a contiguous [B, S, Hq, D] (so out.transpose(1, 2) flattens for free).
        lse: [B, Hq, S] float32, natural logarithm, sink left out; -inf where a row sees no key (its out is 0).

    Raises:
        TypeError for a dtype, ValueError for shapes, strides, devices and numbers, RuntimeError when gradients are asked for. On
        the CPU backend, and with CUTE_KERNELS_CHECK=1, also ValueError for a kv_len tensor with values outside [0, C].
    """
    if not (_is_compiling() or _dispatch_modes() or _function_modes() or _profiling()):  # c.unobserved(), without its frame
        results = _call(
            _latest, _OP, q, None, None, k_cache, v_cache, kv_len, sm_scale, causal, window_left, softcap, attn_sink
        )  # fmt: skip
        if results is not None:
            return results
    return (_seq_lens if isinstance(kv_len, Tensor) else _int)(
        q, k_cache, v_cache, kv_len,
        sm_scale=sm_scale, causal=causal, window_left=window_left, softcap=softcap, attn_sink=attn_sink,
    )  # fmt: skip


def active_attention_append(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_len: Tensor,
    *,
    sm_scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    softcap: float = 0.0,
    attn_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Write the new keys and values into the caches (in place), then attend as `active_attention` does.

    kv_len, int32 [B] on q's device, is the length AFTER the append: k_new[b, :, s] goes to row kv_len[b] - S + s. (FlashAttention's
    flash_attn_with_kvcache takes the length before it.) A row outside [0, C) is not written (attention then sees the C rows there
    are); kv_len 0 marks an idle slot. All other bytes of the caches stay as they are. k_new and v_new are [B, Hkv, S, D] of q's
    dtype, any strides with the last 1. The caches must not overlap each other, themselves or an input (ValueError); under
    torch.compile they should be two allocations, since Inductor copies the whole of a tensor two of whose views an operator writes
    (58 ms instead of 0.3 for two caches of 67 MB; before torch 2.13 wrongly, so that is a RuntimeError). Other arguments, results
    and errors as `active_attention`.
    """
    if not (_is_compiling() or _dispatch_modes() or _function_modes() or _profiling()):  # c.unobserved(), without its frame
        results = _call(
            _latest, _APPEND, q, k_new, v_new, k_cache, v_cache, kv_len, sm_scale, causal, window_left, softcap, attn_sink
        )  # fmt: skip
        if results is not None:
            return results
    return _append(
        q, k_new, v_new, k_cache, v_cache, kv_len,
        sm_scale=sm_scale, causal=causal, window_left=window_left, softcap=softcap, attn_sink=attn_sink,
    )  # fmt: skip
