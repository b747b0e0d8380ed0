"""The Hopper sparse prefill kernel: on a CPU, that every variant compiles without spills and without serialised products; on an
H100 or H200, the results against a float64 reference, FlashMLA's tolerances.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from cute_kernels import reference
from cute_kernels.kernels.sm90 import sparse_layout as layout
from cute_kernels.kernels.sm90 import sparse_prefill as sparse

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
hopper = pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU (H100, H200)")
TOOL = Path(__file__).parents[2] / "tools" / "bench_sparse_prefill.py"


@pytest.fixture(scope="module")
def bench():
    """tools/bench_sparse_prefill.py: case generator, float64 reference, FlashMLA's comparison."""
    spec = importlib.util.spec_from_file_location("bench_sparse_prefill", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------------------------------------- compiled code, no GPU
PLAIN = sparse.Config(576, False, False, False, False, False)
ALL = sparse.Config(512, True, True, True, True, True)


@pytest.mark.parametrize(
    "config",
    [PLAIN, ALL]
    + [
        pytest.param(c, marks=pytest.mark.full if c.d_qk == 576 and c.has_mask else pytest.mark.nightly)
        for c in sparse._variants("sm_90a")
        if c not in (PLAIN, ALL)
    ],
    ids=str,
)
def test_compiled_code(config):
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
    cubin = pytest.importorskip("cute_kernels.jit.cubin")
    artifact = sparse.sparse_prefill_kernel.artifact(config, "sm_90a")
    (resources,) = cubin.resources(artifact.cubin)
    # 384 threads x 168 = 64,512 registers; setmaxnreg deals them out as 216, 216, 72
    assert resources.registers == 168 and resources.stack == 0 and resources.spill_loads == resources.spill_stores == 0
    try:
        sass = cubin.disassemble(artifact.cubin)
    except cubin.MissingTool as error:
        pytest.skip(str(error))

    def count(opcode):
        return len(re.findall(rf"\s{re.escape(opcode)}", sass))

    steps = config.d_qk // 16
    # Q K_a^T is there twice (first iteration, loop), Q K_b^T once
    assert count("HGMMA.64x64x16") == 3 * steps
    # 4 steps each: left own and other, in the loop and after it; right own, and other with and without block b
    assert count("HGMMA.64x256x16") == 7 * 4
    # one wait per wait_group: when ptxas serialises, every HGMMA gets its own
    assert count("WARPGROUP.DEPBAR") <= 12
    assert count("LDGSTS.E.BYPASS.LTC256B.128") == 3 * 4 * config.d_qk // 64  # Q, K_a, K_b
    assert count("R2P") >= 8  # mask bits become predicates, not shifts


def test_shared_memory_fits():
    for d_qk in (512, 576):
        tiles = 3 * d_qk // 64 + (2 if d_qk == 512 else 1)  # Q, K_a, K_b, P_b and at 512 P_a
        rest = 2 * layout.INFO_STAGE + layout.EX_BYTES + 8 * layout.N_BARRIERS
        assert tiles * layout.TILE_BYTES + rest <= 232448
    assert (2 * layout.CONSUMER_REGISTERS + layout.PRODUCER_REGISTERS) * 128 <= 65536


def test_config_and_limits():
    q = torch.zeros(2, 64, 576, dtype=torch.bfloat16)
    kv = torch.zeros(5, 1, 576, dtype=torch.bfloat16)
    idx = torch.zeros(2, 1, 128, dtype=torch.int32)
    mask = torch.zeros(2, 1, 128, dtype=torch.uint8)
    assert sparse.can_implement(q=q, kv=kv, indices=idx, sm_scale=1.0) is None
    assert sparse.config_of(q, 1.0, None, None, None, 16) == PLAIN
    assert sparse.config_of(q, -1.0, None, None, None, 8).general_scale
    assert sparse.config_of(q, 0.0, None, None, mask, 8) == (576, False, False, True, True, True)
    assert not sparse.config_of(q, 1.0, None, None, mask, 16).small_groups
    odd = torch.zeros(2, 64, 580, dtype=torch.bfloat16)[:, :, :576]
    assert "16 bytes" in sparse.can_implement(q=odd, kv=kv, indices=idx, sm_scale=1.0)
    moved = torch.zeros(2 * 64 * 576 + 1, dtype=torch.bfloat16)[1:].view(2, 64, 576)
    assert sparse.can_implement(q=moved, kv=kv, indices=idx, sm_scale=1.0) is None  # the answer is kept: no address
    assert "d_qk" in sparse.can_implement(q=q[:, :, :256], kv=kv, indices=idx, sm_scale=1.0)


def test_tool_reference_agrees_with_package_reference(bench):
    """Two independent implementations of the contract, on the benchmark's own cases."""
    checked = 0
    for case in bench.check_grid():
        if case.s_q > 10 or case.topk > 700 or case.d_qk == 512:
            continue
        args = bench.make(case, "cpu")
        want = bench.reference(args)
        got = reference.sparse_prefill(**args, compute_dtype=torch.float64)
        assert not bench.differences(got[0].double(), want[0], 8e-4, 3.01 / 128, 7e-6), case.name()
        assert not bench.differences(got[1], want[1], 1e-9, 1e-9, 1e-7), case.name()
        assert not bench.differences(got[2], want[2], 1e-9, 1e-9, 1e-7), case.name()
        checked += 1
    assert checked >= 20


# ---------------------------------------------------------------------------------------------------- emulated, no GPU
def emulated_cases():
    """(s_q, h_q, s_kv, topk) and options of bench.Case: one to four blocks, masks, empty rows, several rows a CTA."""
    full = pytest.mark.full
    lengths = dict(d_qk=512, length="random", sink=True, bad=0.2)
    masked = dict(group=4, nan=True, gain=20.0, scale=-0.5)
    return [
        pytest.param((1, 16, 40, 70), {}, id="one pair"),
        pytest.param((2, 3, 300, 130), lengths, marks=full, id="odd blocks, length, sink"),
        pytest.param((2, 16, 300, 256), masked, marks=full, id="small groups, negative scale"),
        pytest.param((5, 70, 200, 64), dict(empty_rows=True), marks=full, id="two CTAs a row, empty rows"),
        pytest.param((8, 16, 400, 256), dict(empty_blocks=True, seed=3), marks=full, id="one to four blocks a row, mixed"),
        pytest.param((1, 16, 600, 448), {}, marks=full, id="seven blocks, the last without a partner"),
    ]


def close(bench, got, want):
    tolerances = ((8e-4, 3.01 / 128, 7e-6), (1e-6, 2.01 / 65536, 1e-7), (1e-6, 2.01 / 65536, 1e-7))
    return not any(bench.differences(g, w, *t) for g, w, t in zip(got, want, tolerances))


@pytest.mark.parametrize("sizes, options", emulated_cases())
def test_emulated(bench, sizes, options):
    """The compiled PTX on the CPU, wgmma, barriers and asynchronous copies included: right, and without a race, in any order."""
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
    from cute_kernels.emulator import emulate

    args = bench.make(bench.Case(*sizes, **options), "cpu")
    if options.get("group"):  # a mask with gaps between its blocks
        mask = args["head_group_mask"]
        wide = torch.full((mask.shape[0], mask.shape[1], 144), 255, dtype=torch.uint8)
        wide[:, :, :128] = mask
        args["head_group_mask"] = wide[:, :, :128]
    want = bench.reference(args)
    for schedule in ("lazy", "random"):
        with emulate("sm_90a", schedule=schedule, seed=1, sm_count=2) as emulation:
            got = bench.run_ours(args)
        assert close(bench, got, want), schedule
        assert not emulation.hazards, (schedule, emulation.hazards[0])


@pytest.mark.full
def test_emulator_sees_a_planted_race(bench):
    """Column tiles of K_a read without waiting for their copies."""
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
    import cutlass
    import cutlass.cute as cute

    from cute_kernels.emulator import emulate
    from cute_kernels.jit import current_target, kernel_builder
    from cute_kernels.kernels.sm90 import sparse_kernel

    class NoWait(sparse_kernel.SparsePrefillSm90):
        @cute.jit
        def tiles_ready(self, bars, which: cutlass.Constexpr[int], phase):
            if cutlass.const_expr(which != layout.A_RIGHT):
                cute.arch.mbarrier_wait(bars + layout.K_FULL + which, phase)
            cute.arch.fence_view_async_shared()

    @kernel_builder("sparse_prefill_sm90_no_wait", archs=("sm_90a",))
    def build(config, arch):
        return sparse.build(config, NoWait, tensor_maps=False)

    args = bench.make(bench.Case(1, 16, 600, 450), "cpu")
    results = bench.outputs(args)
    with emulate("sm_90a", schedule="lazy") as emulation:
        run = build(PLAIN, current_target(args["q"].device))
        run(args["q"], args["kv"], args["indices"], *results, None, None, None, args["sm_scale"], 4, 132)
    assert any("race" in str(hazard) for hazard in emulation.hazards)


# ---------------------------------------------------------------------------------------------------- on a Hopper GPU
def compare(bench, args, name=""):
    got = bench.run_ours(args)
    want = bench.reference(args)
    assert not bench.differences(got[0], want[0], 8e-4, 3.01 / 128, 7e-6), name
    assert not bench.differences(got[1], want[1], 1e-6, 2.01 / 65536, 1e-7), name
    assert not bench.differences(got[2], want[2], 1e-6, 2.01 / 65536, 1e-7), name
    again = bench.run_ours(args)
    assert all(torch.equal(a, b) for a, b in zip(got, again)), f"{name}: a second launch gives other bits"


@hopper
@pytest.mark.parametrize("part", range(6))
def test_grid(bench, part):
    for case in bench.check_grid()[part::6]:
        compare(bench, bench.make(case), case.name())


@hopper
def test_empty_sizes(bench):
    for case in (bench.Case(3, 64, 10, 0), bench.Case(3, 64, 0, 64), bench.Case(0, 64, 10, 64), bench.Case(3, 0, 10, 64)):
        args = bench.make(bench.Case(max(case.s_q, 1), max(case.h_q, 1), max(case.s_kv, 1), max(case.topk, 1)))
        args["q"] = args["q"][: case.s_q, : case.h_q] if case.h_q else args["q"][:, :0]
        args["q"] = args["q"].new_zeros(case.s_q, case.h_q, 576)
        args["kv"] = args["kv"].new_zeros(case.s_kv, 1, 576)
        args["indices"] = args["indices"].new_zeros(case.s_q, 1, case.topk)
        out, top, lse = bench.run_ours(args)
        torch.cuda.synchronize()
        if out.numel():
            assert not out.any() and torch.isneginf(top).all() and torch.isposinf(lse).all()


@hopper
def test_nan_stays_with_the_rows_that_count_it(bench):
    args = bench.make(bench.Case(64, 64, 500, 128, bad=0.1))
    kv, idx = args["kv"], args["indices"][:, 0]
    kv[7] = float("nan")
    lists_it = (idx == 7).any(1)
    out = bench.run_ours(args)[0]
    assert lists_it.any() and torch.isnan(out[lists_it]).all()
    assert not torch.isnan(out[~lists_it]).any()


@hopper
@pytest.mark.full
def test_many_rows(bench):
    """More rows than one grid dimension y or z could hold, each with a short list."""
    case = bench.Case(70000, 64, 500, 64, d_qk=512)
    args = bench.make(case)
    got = bench.run_ours(args)
    for rows in (slice(0, 3), slice(35000, 35003), slice(69997, 70000)):
        part = {k: v[rows] if k in ("q", "indices") else v for k, v in args.items()}
        want = bench.reference(part)
        assert not bench.differences(got[0][rows], want[0], 8e-4, 3.01 / 128, 7e-6)


@hopper
@pytest.mark.full
def test_offsets_past_2_31_elements(bench):
    """A KV cache of 4.1 million rows (4.7 GB): the last rows lie past 2**31 elements."""
    s_kv = 4_100_000
    kv = torch.empty((s_kv, 1, 576), dtype=torch.bfloat16, device="cuda")
    kv[-1000:] = torch.randn((1000, 1, 576), device="cuda", dtype=torch.float32).to(torch.bfloat16) / 10
    args = bench.make(bench.Case(4, 64, 1000, 256))
    args["kv"] = kv
    args["indices"] = args["indices"] + (s_kv - 1000)
    compare(bench, args)


@hopper
def test_out_with_strides(bench):
    args = bench.make(bench.Case(6, 40, 500, 128))
    base = torch.full((6, 64, 1024), 7.0, dtype=torch.bfloat16, device="cuda")
    results = (base[:, 10:50, 256:768], *(torch.empty(6, 40, device="cuda") for _ in range(2)))
    bench.run_ours(args, results)
    assert torch.equal(results[0], bench.run_ours(args)[0])
    base[:, 10:50, 256:768] = 7.0
    assert (base == 7.0).all(), "wrote outside out"


@hopper
def test_graph_replay_with_new_indices(bench):
    args = bench.make(bench.Case(20, 64, 500, 256))
    results = bench.run_ours(args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bench.run_ours(args, results)
    args["indices"].copy_(torch.randint(0, 500, args["indices"].shape, device="cuda", dtype=torch.int32))
    graph.replay()
    want = bench.run_ours(args)
    assert all(torch.equal(a, b) for a, b in zip(results, want))
