"""The combine kernel: its reference against attention itself, the compiled code, and the kernel in the emulator and on a GPU."""

import math

import pytest
import torch

from cute_kernels import jit
from cute_kernels.jit import cubin as cubins
from cute_kernels.kernels import combine as host
from cute_kernels.kernels.combine import Config, combine, combine_kernel
from cute_kernels.reference.combine import combine as reference

ARCHS = ("sm_90a", "sm_100a")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def parts(n_split, rows, d, dtype=F32, empty=0.3, seed=0, device="cpu"):
    """Random partial results; empty parts are marked in both ways and hold NaN; row 1 has nothing at all."""
    g = torch.Generator().manual_seed(seed)
    out = torch.randn(n_split, rows, d, generator=g).to(dtype)
    lse = torch.randn(n_split, rows, generator=g) * 3
    none = torch.rand(n_split, rows, generator=g) < empty
    if rows > 1:
        none[:, 1] = True
    lse[none] = torch.where(torch.rand(n_split, rows, generator=g) < 0.5, math.inf, -math.inf)[none]
    out[none] = math.nan
    return out.to(device), lse.to(device)


def check(out, lse, partial_out, partial_lse, sink):
    """Against float64. The output may be half a unit of its type off, and a few of float32 (ex2.approx is 2 ulp)."""
    want, want_lse = reference(partial_out, partial_lse, attn_sink=sink, out_dtype=torch.float64, compute_dtype=torch.float64)
    scale = partial_out.double().nan_to_num(0.0).abs().amax().item() if partial_out.numel() else 0.0
    tolerance = torch.finfo(out.dtype).eps / 2 * want.abs() + 8 * 2.0**-23 * scale
    assert (out.double() - want).abs().le(tolerance).all(), (out.double() - want).abs().max()
    assert torch.equal(lse.isneginf(), want_lse.isneginf()) and not lse.isnan().any()
    finite = want_lse.isfinite()
    assert (lse.double() - want_lse)[finite].abs().le(2.0**-21 * want_lse[finite].abs().clamp(min=1)).all()
    none = partial_lse.isinf().all(0)
    assert (out[none] == 0).all() and lse[none].isneginf().all()


# ---- the reference -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_sink", [False, True])
def test_the_reference_is_attention_over_all_keys(with_sink):
    torch.manual_seed(0)
    rows, keys, d = 6, 50, 16
    logits, v = torch.randn(rows, keys, dtype=torch.float64) * 4, torch.randn(keys, d, dtype=torch.float64)
    sink = torch.randn(3, dtype=torch.float64) if with_sink else None
    cuts = [0, 7, 7, 30, 50]  # one part is empty
    out, lse = [], []
    for i, (a, b) in enumerate(zip(cuts, cuts[1:])):
        lse.append(logits[:, a:b].logsumexp(1) if b > a else torch.full((rows,), math.inf if i % 2 else -math.inf).double())
        out.append(logits[:, a:b].softmax(1) @ v[a:b] if b > a else torch.full((rows, d), math.nan).double())
    got, got_lse = reference(torch.stack(out), torch.stack(lse), attn_sink=sink, compute_dtype=torch.float64)
    whole = logits.logsumexp(1)
    denominator = whole.exp() + (sink.repeat(2).exp() if with_sink else 0)
    torch.testing.assert_close(got, logits.exp() @ v / denominator[:, None])
    torch.testing.assert_close(got_lse, whole)


def test_the_reference_at_its_edges():
    out, lse = reference(torch.randn(0, 3, 4), torch.randn(0, 3))
    assert (out == 0).all() and lse.isneginf().all()
    out, lse = reference(torch.ones(2, 1, 4), torch.tensor([[0.0], [math.nan]]))
    assert out.isnan().all() and lse.isnan().all(), "NaN is data, not an empty part"
    out, _ = reference(torch.ones(2, 2, 4), torch.zeros(2, 2), attn_sink=torch.tensor([math.inf, -math.inf]))
    assert (out[0] == 0).all() and (out[1] == 1).all()
    out, lse = reference(torch.ones(2, 1, 4), torch.tensor([[1e4], [-1e4]]))
    assert (out == 1).all() and lse.item() == 1e4


# ---- the compiled code ---------------------------------------------------------------------------------------------

COMPILED = [
    Config("Float32", "BFloat16", 128, True, True),
    Config("Float32", "Float32", 512, False, True),
    Config("BFloat16", "Float16", 64, False, True),
    Config("Float16", "BFloat16", 72, True, False),
]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("config", COMPILED, ids=lambda c: f"{c.part}-{c.out}-{c.d}")
def test_the_machine_code(config, arch):
    made = combine_kernel.artifact(config, arch)
    (r,) = cubins.resources(made.cubin)
    assert (r.stack, r.spill_loads, r.spill_stores, r.static_smem, r.threads) == (0, 0, 0, 0, 128)
    assert r.registers <= 64 and made.dynamic_smem == [0]
    ptx = cubins.ptx_opcodes(made.ptx)
    load = "ld.global.v4.b32" if config.wide else None
    if load:
        assert ptx[load] >= host_kernel().IN_FLIGHT, ptx
    assert ptx["ex2.approx.ftz.f32"] == 1 + config.has_sink and ptx["lg2.approx.ftz.f32"] == 1
    assert ptx["shfl.sync.bfly.b32"] and not ptx["bar.sync"]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.skipif(cubins.find_tool("nvdisasm") is None, reason="needs nvdisasm")
def test_the_loads_are_issued_before_they_are_used(arch):
    """The loop's 16-byte loads stand together: `IN_FLIGHT` of them between two uses, else a lane waits for each."""
    text = cubins.disassemble(combine_kernel.artifact(COMPILED[0], arch).cubin)
    opcodes = [line for line in text.splitlines() if "LDG.E.128" in line or "FFMA" in line]
    kinds = "".join("L" if "LDG" in line else "F" for line in opcodes)
    assert "L" * host_kernel().IN_FLIGHT in kinds, kinds


def host_kernel():
    from cute_kernels.kernels.combine_kernel import Combine

    return Combine


# ---- bad input and choices of the host -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (dict(partial_out=torch.zeros(2, 3, 4, dtype=torch.float64)), TypeError, "partial_out must be float32"),
        (dict(partial_out=torch.zeros(2, 3)), ValueError, r"\[n_split, rows, d\]"),
        (dict(partial_out=torch.zeros(2, 4, 3).transpose(1, 2)), ValueError, "last stride 1"),
        (dict(partial_lse=torch.zeros(2, 3, dtype=torch.float64)), TypeError, "partial_lse must be float32"),
        (dict(partial_lse=torch.zeros(3, 2)), ValueError, r"partial_lse must have the shape \(2, 3\)"),
        (dict(attn_sink=torch.zeros(2)), ValueError, r"rows \(3\) a multiple of h"),
        (dict(attn_sink=torch.zeros(0)), ValueError, "attn_sink must be"),
        (dict(attn_sink=torch.zeros(3, device="meta")), ValueError, "attn_sink must be on partial_out's device"),
        (dict(attn_sink=torch.zeros(3, dtype=BF16)), TypeError, "attn_sink must be float32"),
        (dict(out_dtype=torch.int32), TypeError, "out_dtype must be"),
        ({}, RuntimeError, "combine has kernels for sm_90a.*see reference.combine"),
    ],
)
def test_bad_input(change, error, text):
    arguments = dict(partial_out=torch.zeros(2, 3, 4), partial_lse=torch.zeros(2, 3)) | change
    with pytest.raises(error, match=text):
        combine(arguments.pop("partial_out"), arguments.pop("partial_lse"), **arguments)


def test_which_rows_are_wide():
    out = torch.empty(3, 128, dtype=BF16)
    assert host._wide(torch.empty(2, 3, 128), out)
    assert not host._wide(torch.empty(2 * 3 * 128 + 1)[1:].view(2, 3, 128), out), "the address"
    assert not host._wide(torch.empty(2, 3, 130)[..., :128], out), "a stride"
    assert host._wide(torch.empty(2, 1, 130)[..., :128][:1], out[:1]), "a stride of a dimension of size 1 does not matter"
    assert not host._wide(torch.empty(2, 3, 126), torch.empty(3, 126)), "d"
    assert not host._wide(torch.empty(2, 3, 128), torch.empty(3, 130, dtype=BF16)[:, :128])


# ---- the kernel ----------------------------------------------------------------------------------------------------

CASES = {  # n_split, rows, d, type of the parts, of the result, heads of the sink
    "one part": (1, 5, 128, F32, BF16, 0),
    "more parts than lanes": (40, 3, 64, BF16, BF16, 3),
    "a row's lanes are a quarter of a warp": (9, 11, 32, F32, F32, 11),
    "columns of several CTAs": (3, 2, 512, F32, F32, 1),
    "columns that are no power of two": (4, 5, 96, F16, F32, 0),
    "no vectors": (5, 6, 7, F32, F32, 2),
    "no vectors, half": (5, 6, 7, F32, F16, 2),
}


def run_case(name, device):
    n, rows, d, dtype, out_dtype, heads = CASES[name]
    partial_out, partial_lse = parts(n, rows, d, dtype, device=device)
    sink = torch.linspace(-2, 2, heads, device=device) if heads else None
    out, lse = combine(partial_out, partial_lse, attn_sink=sink, out_dtype=out_dtype)
    assert out.dtype == out_dtype and out.shape == (rows, d) and lse.shape == (rows,)
    check(out, lse, partial_out, partial_lse, sink)


def run_strides(device):
    """Transposed statistics, parts inside rows, an output cut from a wider tensor; no address is a multiple of 16."""
    partial_out, partial_lse = parts(4, 6, 24, device=device)
    odd = torch.full((6, 4, 27), math.nan, device=device)[..., 1:25].transpose(0, 1)
    odd.copy_(partial_out)
    turned = partial_lse.t().contiguous().t()
    out, lse = torch.full((6, 25), 7.0, device=device), torch.empty(6, device=device)
    host.launch(odd, turned, out[:, :24], lse, None, jit.current_target(odd.device))
    check(out[:, :24], lse, partial_out, partial_lse, None)
    assert (out[:, 24] == 7).all(), "nothing but the output is written"


def run_edges(device):
    lse = torch.tensor([[1e4, 0.0, math.nan, -3e38], [-1e4, -math.inf, 0.0, math.inf]], device=device)
    values = torch.stack([torch.full((4, 32), 1.0), torch.full((4, 32), 2.0)]).to(device)
    sink = torch.tensor([0.0, math.inf, 0.0, -math.inf], device=device)
    out, total = combine(values, lse, attn_sink=sink)
    assert (out[0] == 1).all() and total[0] == 1e4
    assert (out[1] == 0).all() and total[1] == 0, "a sink of +inf takes everything, and is left out of the lse"
    assert out[2].isnan().all() and total[2].isnan(), "NaN is data, not an empty part"
    assert (out[3] == 1).all() and total[3] == torch.tensor(-3e38)
    for shape in ((0, 3, 32), (3, 0, 32), (2, 3, 0)):
        out, total = combine(torch.empty(shape, device=device), torch.zeros(shape[:2], device=device))
        assert out.shape == shape[1:] and (out == 0).all() and total.isneginf().all()


def emulate(arch):
    emulator = pytest.importorskip("cute_kernels.emulator")
    return emulator.emulate(arch)




@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", CASES)
def test_in_the_emulator(name, arch):
    with emulate(arch) as emulation:
        run_case(name, "cpu")
    assert len(emulation.launches) == 1 and not emulation.hazards


@pytest.mark.parametrize("arch", ARCHS)
def test_strides_and_edges_in_the_emulator(arch):
    with emulate(arch) as emulation:
        run_strides("cpu")
        run_edges("cpu")
    assert len(emulation.launches) == 2 and not emulation.hazards


def test_an_object_from_the_disk_runs_in_the_emulator():
    """The second emulation loads what the first one compiled; its PTX comes from beside the object."""
    origins = []
    real = combine_kernel.artifact

    def artifact(*args, **kwargs):
        made = real(*args, **kwargs)
        origins.append(made.origin)
        return made

    combine_kernel.artifact = artifact
    try:
        for _ in range(2):
            combine_kernel.forget()
            with emulate("sm_100a"):
                run_case("one part", "cpu")
    finally:
        del combine_kernel.artifact
    assert origins == ["compiled", "disk"]


@pytest.mark.parametrize("off", ["CUTE_KERNELS_CACHE"])
def test_the_emulator_without_a_disk_cache(off, monkeypatch):
    monkeypatch.setenv(off, "0")
    combine_kernel.forget()
    with emulate("sm_100a"):
        run_case("one part", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    run_case(name, "cuda")


@pytest.mark.gpu
def test_strides_and_edges_on_a_gpu():
    run_strides("cuda")
    run_edges("cuda")


@pytest.mark.gpu
def test_offsets_beyond_32_bits_on_a_gpu():
    rows, d, stride = 3, 128, 2**31 + 64
    if torch.cuda.mem_get_info()[0] < 3 * 2**31 * 4:
        pytest.skip("needs 24 GiB of GPU memory")
    buffer = torch.empty(2 * stride + rows * d, device="cuda", dtype=F32)
    wide = buffer.as_strided((3, rows, d), (stride, d, 1))
    partial_out, partial_lse = parts(3, rows, d, device="cuda")
    wide.copy_(partial_out)
    out, lse = combine(wide, partial_lse)
    check(out, lse, partial_out, partial_lse, None)


@pytest.mark.gpu
def test_one_cuda_graph_serves_new_data():
    partial_out, partial_lse = parts(4, 16, 128, device="cuda")
    combine(partial_out, partial_lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = combine(partial_out, partial_lse)
    new_out, new_lse = parts(4, 16, 128, seed=1, device="cuda")
    partial_out.copy_(new_out), partial_lse.copy_(new_lse)
    graph.replay()
    check(out, lse, new_out, new_lse, None)
