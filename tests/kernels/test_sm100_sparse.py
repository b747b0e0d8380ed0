"""The Blackwell sparse prefill kernel: what ptxas made of it, and its results, hazards and counts in the emulator. No GPU.

No Blackwell GPU has run this kernel. Everything here is the compiled PTX on the emulator, at its strict level.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import random
import re
import sys
from pathlib import Path

import oracles
import pytest
import torch

import cute_kernels as ck
from cute_kernels import reference
from cute_kernels.kernels.sm100 import sparse_layout as lay
from cute_kernels.kernels.sm100 import sparse_prefill as sparse

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
emulate = pytest.importorskip("cute_kernels.emulator").emulate
full = pytest.mark.full
TOOL = Path(__file__).parents[2] / "tools" / "bench_sparse_prefill.py"
SCHEDULES = (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2), ("random", 3))
# FlashMLA's own: out, then the two statistics (absolute, relative, cosine)
TOLERANCES = ((8e-4, 3.01 / 128, 7e-6), (1e-6, 2.01 / 65536, 1e-7), (1e-6, 2.01 / 65536, 1e-7))


@functools.cache
def bench():
    """tools/bench_sparse_prefill.py: case generator, float64 reference, FlashMLA's comparison."""
    spec = importlib.util.spec_from_file_location("bench_sparse_prefill", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(args, schedule="lazy", seed=0, checks="strict", sms=2, arch="sm_100a"):
    """((out, max_logits, lse), the launch's counters) through the operator; no hazard may be reported."""
    with emulate(arch, schedule=schedule, seed=seed, checks=checks, sm_count=sms) as emulation:
        got = ck.sparse_prefill(**args)
    assert ck.last_backend() == f"{arch}:sparse_prefill"
    assert not emulation.hazards, (schedule, seed, emulation.hazards[0])
    (launch,) = emulation.launches
    return got, launch.counters


def assert_close(got, want, name=""):
    for kind, g, w, tolerance in zip(("out", "max_logits", "lse"), got, want, TOLERANCES):
        difference = bench().differences(g, w, *tolerance)
        assert not difference, (name, kind, difference)


# ---------------------------------------------------------------------------------------------------- compiled code
PLAIN = sparse.Config(576, False, False, False, False)
ALL = sparse.Config(512, True, True, True, True)
EVERY = [sparse.Config(d, *flags) for d in (512, 576) for flags in itertools.product((False, True), repeat=4)]


@functools.cache
def sass_of(config, arch):
    cubin = pytest.importorskip("cute_kernels.jit.cubin")
    artifact = sparse.sparse_prefill_kernel.artifact(config, arch)
    (resources,) = cubin.resources(artifact.cubin)
    try:
        return artifact, resources, cubin.disassemble(artifact.cubin)
    except cubin.MissingTool as error:
        pytest.skip(str(error))


def opcodes(sass, pattern):
    return len(re.findall(rf"\s{pattern}", sass))


@pytest.mark.parametrize(
    "config, arch",
    [(PLAIN, "sm_100a"), (ALL, "sm_100a")]
    + [
        pytest.param(c, "sm_100a", marks=full if c.d_qk == 576 and c.has_mask else pytest.mark.nightly)
        for c in sparse._variants("sm_100a")
        if c != PLAIN
    ]
    + [pytest.param(PLAIN, "sm_103a", marks=full)]
    + [pytest.param(c, "sm_103a", marks=pytest.mark.nightly) for c in sparse._variants("sm_103a") if c != PLAIN]
    + [pytest.param(c, "sm_100a", marks=pytest.mark.nightly) for c in EVERY if c not in sparse._variants("sm_100a") and c != ALL],
    ids=str,
)
def test_compiled_code(config, arch):
    artifact, resources, sass = sass_of(config, arch)
    assert resources.registers <= lay.REGISTERS and resources.threads == lay.THREADS
    assert resources.stack == 0 and resources.spill_loads == resources.spill_stores == 0
    assert re.findall(r"tcgen05\.alloc\S+ \[\S+\], (\d+);", artifact.ptx) == ["512"]
    # the tensor core and TMA get their operands in uniform registers, without a loop over the lanes
    assert opcodes(sass, r"BRA\.U\.ANY") == 0
    # no fence wider than the CTA but for the two cluster barriers (start and end)
    assert opcodes(sass, r"MEMBAR\.ALL\.GPU") == 2
    steps = config.d_qk // 32
    # one scores product, 8 instructions per copy of the values' product
    assert opcodes(sass, "UTCHMMA") == opcodes(sass, r"UTCHMMA\.2CTA") and (opcodes(sass, "UTCHMMA") - steps) % 8 == 0
    assert opcodes(sass, r"UTMALDG\.2D\.GATHER4\.2CTA") == 8 * (5 if config.d_qk == 576 else 4)
    assert opcodes(sass, r"UTCCP\.T\.S\.2CTA") == steps
    assert opcodes(sass, "R2P") >= 4 and opcodes(sass, "FMNMX3") >= 8
    assert opcodes(sass, "FADD2" if config.general_scale else "FFMA2") >= 16


def test_budgets():
    for d_qk in (512, 576):
        layout = lay.Layout(d_qk)
        assert layout.bytes <= lay.MAX_SMEM
        assert layout.slot == lay.KEYS * d_qk // 2 * 2
        # the two slots that a row's Q passes through hold exactly this CTA's Q
        assert 2 * layout.slot == lay.HEADS * d_qk * 2
    assert lay.THREADS * lay.REGISTERS <= 65536
    columns = sorted([(lay.O_COLUMN, lay.HALF_V), (lay.P_COLUMN, lay.KEYS), (lay.Q_COLUMN, 576 // 4)])
    assert all(a + n <= b for (a, n), (b, _) in zip(columns, columns[1:])) and sum(columns[-1]) <= lay.TMEM_COLUMNS


def test_config_and_limits():
    q = torch.zeros(2, 64, 576, dtype=torch.bfloat16)
    kv = torch.zeros(5, 1, 576, dtype=torch.bfloat16)
    idx = torch.zeros(2, 1, 128, dtype=torch.int32)
    assert sparse.can_implement(q=q, kv=kv, indices=idx, sm_scale=1.0) is None
    assert sparse.config_of(q, 1.0, None, None, None) == PLAIN
    assert sparse.config_of(q, 0.0, None, None, None).general_scale
    assert "d_qk" in sparse.can_implement(q=q[:, :, :256], kv=kv, indices=idx, sm_scale=1.0)
    assert "128 heads" in sparse.can_implement(q=q.expand(2, 64, 576).repeat(1, 3, 1), kv=kv, indices=idx, sm_scale=1.0)


# ---------------------------------------------------------------------------------------------------- results
def cases():
    """(s_q, h_q, s_kv, topk) and options of bench.Case; one pair of CTAs takes all rows."""
    garbage = dict(d_qk=512, length="random", sink=True, bad=0.2)
    groups = dict(group=16, empty_rows=True, empty_blocks=True, nan=True, gain=20.0, seed=3)
    return [
        pytest.param((1, 128, 300, 128), {}, id="one block"),
        pytest.param((3, 128, 900, 200), garbage, marks=full, id="ragged, garbage, length, sink"),
        pytest.param((5, 128, 700, 256), groups, marks=full, id="groups of 16, empty rows and blocks, NaN rows, large logits"),
        pytest.param(
            (4, 16, 700, 256), dict(group=2, scale=-0.5, strided=True, gain=20.0, seed=4), marks=full,
            id="groups of 2, negative scale, strides",
        ),
        pytest.param(
            (1, 128, 3000, 2560), dict(group=128, density=0.9, sink=True, length="random", seed=1), marks=full,
            id="20 blocks, one group, length, sink",
        ),
        pytest.param((9, 70, 200, 40), dict(d_qk=512, empty_rows=True, bad=0.5), marks=full, id="nine short rows"),
        pytest.param((2, 8, 400, 384), dict(d_qk=512, group=1, density=0.1, scale=0.0), marks=full, id="groups of 1, scale 0"),
        pytest.param((2, 128, 50, 130), dict(length="zero", sink=True), marks=full, id="length 0"),
        # logits of 1e9: scale * x - maximum in one rounding would be far above 0
        pytest.param((1, 16, 100, 128), dict(group=2, scale=1e9, seed=4), marks=full, id="huge scale"),
        # a deadlock of an earlier version: one gather warp did not take part in loading Q and missed a phase of kv_empty
        pytest.param((5, 124, 587, 187), dict(length="random", bad=0.3, nan=True, seed=339), marks=full, id="five short rows"),
    ]  # fmt: skip


@pytest.mark.parametrize("sizes, options", cases())
def test_emulated(sizes, options):
    """Within FlashMLA's tolerances of float64, no hazard, and the same bits whatever order asynchronous work completes in."""
    case = bench().Case(*sizes, **options)
    args = bench().make(case, "cpu")
    want = bench().reference(args)
    first = None
    for schedule, seed in SCHEDULES:
        got, _ = run(args, schedule, seed)
        assert_close(got, want, (schedule, seed))
        first = first or got
        assert all(torch.equal(a, b) for a, b in zip(got, first)), f"{schedule} {seed} gives other bits"


def random_case(seed):
    """(case, schedule, its seed, SMs): every option of the contract, any group size and number of groups."""
    rng = random.Random(seed)
    group, heads, topk = 0, rng.randint(1, 128), rng.randint(1, 400)
    if rng.random() < 0.6:
        group = 1 << rng.randint(0, 7)
        heads, topk = group * rng.randint(1, min(8, 128 // group)), 128 * rng.randint(1, 4)
    case = bench().Case(
        rng.randint(1, 6), heads, rng.randint(20, 600), topk, d_qk=rng.choice([512, 576]), group=group,
        length=rng.choice(["", "random", "random", "zero"]), sink=rng.random() < 0.5, density=rng.choice([0.02, 0.3, 0.9]),
        bad=rng.choice([0, 0.3, 0.95]), empty_rows=rng.random() < 0.3, empty_blocks=rng.random() < 0.4, nan=rng.random() < 0.4,
        scale=rng.choice([0.5, 0.06, -0.3, 0.0, 3.0]), gain=rng.choice([1, 1, 20.0]), strided=rng.random() < 0.3, seed=seed,
    )  # fmt: skip
    return case, rng.choice(["eager", "lazy", "random", "random"]), rng.randint(0, 99), rng.choice([2, 2, 4, 8])


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(40))
def test_fuzz(seed):
    case, schedule, order, sms = random_case(seed)
    args = bench().make(case, "cpu")
    got, _ = run(args, schedule, order, sms=sms)
    assert_close(got, bench().reference(args), case)


@full
@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 6, 8, 13])
def test_block_counts(blocks):
    """Every fill level of the ring and of the pipeline, two rows of different length on one pair."""
    args = bench().make(bench().Case(2, 128, 64 * blocks + 40, 64 * blocks, d_qk=512, seed=blocks), "cpu")
    args["topk_length"] = torch.tensor([64 * blocks - 1, 64 * (blocks // 2) + 1], dtype=torch.int32)
    got, _ = run(args, "random", blocks)
    assert_close(got, bench().reference(args))


@full
@pytest.mark.parametrize("arch", sparse.ARCHS)
def test_several_pairs_share_the_rows(arch):
    args = bench().make(bench().Case(5, 128, 300, 130, bad=0.1), "cpu")
    got, counters = run(args, "random", 5, sms=6, arch=arch)
    assert counters.ctas == 6
    assert_close(got, bench().reference(args))


@full
@pytest.mark.parametrize("columns", ["rope", "nope"])
def test_each_part_of_d_qk_alone(columns):
    """Logits from the 64 rope columns alone, and without them: both halves of either reach the sum once."""
    args = bench().make(bench().Case(1, 128, 100, 64, gain=5.0), "cpu")
    if columns == "rope":
        args["q"][:, :, :512] = 0
    else:
        args["q"][:, :, 512:] = 0
    got, _ = run(args)
    assert_close(got, bench().reference(args))


@full
def test_nan_stays_with_the_rows_that_count_it():
    args = bench().make(bench().Case(3, 128, 200, 128, group=16, density=0.5, seed=2), "cpu")
    idx = args["indices"][:, 0]
    idx[0, 5] = 7
    idx[1:][idx[1:] == 7] = 8
    idx[2, 9] = 7  # listed by row 2, but masked for all of its groups
    args["head_group_mask"][0, 0, 0::16] |= 1 << 5
    args["head_group_mask"][2, 0, 1::16] &= 0xFF ^ (1 << 1)
    clean = bench().reference(args)
    args["kv"][7] = float("nan")
    got, _ = run(args)
    assert torch.isnan(got[0][0]).any()
    assert_close([x[1:] for x in got], [x[1:] for x in clean])


@full
def test_out_with_strides_and_nothing_outside_it():
    args = bench().make(bench().Case(3, 40, 200, 70), "cpu")
    base = torch.full((3, 64, 1024), 7.0, dtype=torch.bfloat16)
    got, _ = run({**args, "out": base[:, 10:50, 256:768]})
    assert_close(got, bench().reference(args))
    base[:, 10:50, 256:768] = 7.0
    assert (base == 7.0).all(), "wrote outside out"


@full
def test_strides_of_dimensions_with_one_entry_mean_nothing():
    args = bench().make(bench().Case(1, 16, 200, 128, group=16), "cpu")
    want = bench().reference(args)
    for name in ("q", "kv", "head_group_mask"):
        t = args[name]
        args[name] = t.as_strided(t.shape, [7 if n == 1 else s for n, s in zip(t.shape, t.stride())][:-1] + [1])
    out = torch.empty(1, 16, 512, dtype=torch.bfloat16).as_strided((1, 16, 512), (3, 512, 1))
    got, _ = run({**args, "out": out})
    assert_close(got, want)


@full
def test_one_head_and_sizes_zero():
    args = bench().make(bench().Case(2, 1, 30, 17, d_qk=512), "cpu")
    got, _ = run(args)
    assert_close(got, bench().reference(args))
    for name in ("kv", "indices"):
        empty = {**args, name: args[name][:0] if name == "kv" else args[name][:, :, :0]}
        (out, top, lse), counters = run(empty)
        assert not out.any() and torch.isneginf(top).all() and torch.isposinf(lse).all()
        assert counters.tensor_cycles == 0 and not counters.bytes["gather4"]
    for empty in ({**args, "q": args["q"][:0], "indices": args["indices"][:0]}, {**args, "q": args["q"][:, :0]}):
        with emulate("sm_100a") as emulation:
            out, _, _ = ck.sparse_prefill(**empty)
        assert out.numel() == 0 and not emulation.launches


@full
def test_offsets_past_2_31_elements():
    """The last of 4.1 million KV rows, and rows of q and out 2**31 elements apart (untouched pages take no memory)."""
    s_kv = 4_100_000
    args = bench().make(bench().Case(2, 16, 300, 128, group=16, sink=True), "cpu")
    small = args["kv"]
    kv = torch.empty((s_kv, 1, 576), dtype=torch.bfloat16)
    kv[-300:] = small
    want = bench().reference(args)
    args["kv"] = kv
    args["indices"] = args["indices"] + (s_kv - 300)
    gap = 2**31 + 64
    q = torch.empty(gap + 16 * 576, dtype=torch.bfloat16).as_strided((2, 16, 576), (gap, 576, 1))
    q.copy_(args["q"])
    args["q"] = q
    out = torch.empty(gap + 16 * 512, dtype=torch.bfloat16).as_strided((2, 16, 512), (gap, 512, 1))
    got, _ = run({**args, "out": out})
    assert_close(got, want)


def test_grid_of_many_rows():
    """s_q beyond any grid limit becomes rows per pair: 148 SMs run 74 pairs."""
    captures = []
    with emulate("sm_100a", backend=lambda emulation, capture: captures.append(capture)):
        ck.sparse_prefill(
            torch.zeros(70000, 1, 576, dtype=torch.bfloat16), torch.zeros(5, 1, 576, dtype=torch.bfloat16),
            torch.zeros(70000, 1, 4, dtype=torch.int32), 1.0,
        )  # fmt: skip
    assert tuple(captures[0].grid) == (148, 1, 1) and tuple(captures[0].cluster) == (2, 1, 1)


@full
def test_grouped_prefill_matches_attention_per_token():
    """64 tokens x 16 heads in groups of 8 over the union of their lists, against each token alone."""
    generator = torch.Generator().manual_seed(0)
    s_kv, topk = 400, 96
    q = (torch.randn(64, 16, 576, generator=generator) / 4).to(torch.bfloat16)
    kv = torch.randn(s_kv, 1, 576, generator=generator).to(torch.bfloat16)
    # neighbouring tokens share most of their keys
    indices = torch.empty(64, 1, topk, dtype=torch.int32)
    for start in range(0, 64, 8):
        pool = torch.randperm(s_kv, generator=generator)[: topk + 24]
        for t in range(start, start + 8):
            indices[t, 0] = pool[torch.randperm(len(pool), generator=generator)[:topk]].to(torch.int32)
    scale = 192**-0.5
    union, length, mask, _ = ck.group_topk(indices, s_kv, 8)
    args = dict(
        q=q.view(8, 128, 576), kv=kv, indices=union, sm_scale=scale, topk_length=length, head_group_mask=mask, head_group_size=16
    )
    got, _ = run(args, "random", 1, sms=4)
    want = oracles.sparse_prefill(q, kv, indices, scale)
    out = got[0].view(64, 16, 512).double()
    error = (out - want[0]).norm() / want[0].norm()
    assert error <= 3e-3, error
    # without the mask every token would attend to its neighbours' keys
    plain = reference.sparse_prefill(args["q"], kv, union, scale, topk_length=length, compute_dtype=torch.float64)
    assert (plain[0].view(64, 16, 512).double() - want[0]).norm() / want[0].norm() > 0.1
    assert_close([x.view(64, 16, -1).squeeze(-1) for x in got], want)


# ---------------------------------------------------------------------------------------------------- counts
def counts(d_qk, blocks, **options):
    args = bench().make(bench().Case(1, 128, 128 * blocks + 100, 128 * blocks, d_qk=d_qk, **options), "cpu")
    return args, run(args, "eager", checks="off")[1]


def softmax_instructions(counters):
    return sum(role.instructions.total() for name, role in counters.roles.items() if set(role.warps) <= {0, 1, 2, 3})


@pytest.mark.parametrize("d_qk", [pytest.param(512, marks=full), 576])
def test_bytes_and_tensor_cycles(d_qk):
    blocks = 4
    _, c = counts(d_qk, blocks)
    # every latent row crosses once per pair: 144 KiB per 128 keys at d 576 (FlashMLA gathers 272 KiB)
    assert c.bytes["gather4"] == blocks * 128 * d_qk * 2 <= blocks * 160 * 1024
    assert c.bytes["tma-load"] == 128 * d_qk * 2  # Q, once
    # 16,384 FLOP per clock and pair
    least = blocks * 2 * 128 * 128 * (d_qk + 512) / 16384
    assert c.tensor_flops == least * 16384
    assert least <= c.tensor_cycles <= 1.05 * least, c.tensor_cycles / least
    assert c.bytes["dsmem-load"] == c.bytes["dsmem-store"] == 0


@full
def test_skipped_blocks_cost_nothing():
    """Blocks that are all -1, past topk_length, or masked for every group: neither gathered nor multiplied."""
    _, want = counts(576, 2)
    for kind in ("invalid", "length", "masked"):
        args, _ = counts(576, 6, group=16, density=1.0)
        if kind == "invalid":
            args["indices"][:, :, 128:384] = -1
            args["indices"][:, :, 512:] = 1 << 30
        elif kind == "length":
            args["topk_length"] = torch.tensor([256], dtype=torch.int32)
        else:
            args["head_group_mask"][:, [0, 2, 3, 5]] = 0
        got, c = run(args, "eager")
        assert_close(got, bench().reference(args), kind)
        assert c.bytes["gather4"] == want.bytes["gather4"], kind
        assert c.tensor_cycles == want.tensor_cycles and c.exp2 == want.exp2, kind


@full
def test_what_the_mask_costs():
    """The softmax warps take each sub-block's validity word, which the key-list warp has ANDed with the mask: same instructions."""
    per_block = {}
    for name, options in (("plain", {}), ("masked", dict(group=16, density=1.0))):
        # the same keys in the first blocks, so that the reference maximum moves at the same places
        few, many = (softmax_instructions(counts(576, n, seed=1, **options)[1]) for n in (2, 4))
        per_block[name] = (many - few) / 2 / 8  # 8 softmax warps in the pair
    assert per_block["masked"] - per_block["plain"] <= 1, per_block


# ---------------------------------------------------------------------------------------------------- faults
@full
def test_a_sample_of_generated_faults_is_caught(capsys):
    """tools/kernel_mutants.py judges all of them (docs/measurements_sparse_prefill.md); here six."""
    spec = importlib.util.spec_from_file_location("kernel_mutants", TOOL.with_name("kernel_mutants.py"))
    tool = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.main(["sparse_prefill", "--rule", "^(commit|expect|fence)$", "--limit", "6"]) == 0
    assert " 0 survived" in capsys.readouterr().out
