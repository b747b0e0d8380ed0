"""Mutants of our own small kernels: each one-line edit must be reported, with the right kind at the right PTX line.

Six of the kernels of ptx/ and 79 of these edits were written by someone who had not read the checker (cute_kernels/emulator's
machine). Two kernels were changed after the first run because their mutants were harmless (a cluster barrier that an mbarrier
made redundant) or out of reach (two warpgroups cannot exceed 64 K registers). That run did not report six of the edits (waits
that fall through, the missing init fence, the relaxed cluster arrive, a tcgen05.fence before dealloc, setmaxnreg over
.maxnreg): the checks that find them were written after it. wgmma_rs and its mutants came with their checks. WRONG_NUMBERS read
only ordered, initialised bytes through legal operands: no checker of accesses sees those, comparing the results does.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from faults import KERNELS, Edit, line_of  # noqa: E402

GEMM, TS, RING, BULK, CLUSTER, ROLES = "gemm_tma", "mma_ts", "cp_async_ring", "bulk_scale", "cluster_swap", "roles"
WGMMA, CP = "wgmma_rs", "cp_a"
MMA = r"tcgen05\.mma"
LD = r"tcgen05\.ld"
EMPTY_WAIT, FULL_WAIT, DONE_WAIT = r"try_wait.*\[%empty\]", r"try_wait.*\[%full\]", r"try_wait.*\[%(done|bar)\]"
LOAD_A, LOAD_B = r"shared::cta\.global\.tile.*\[%ma", r"shared::cta\.global\.tile.*\[%mb"


@dataclass(frozen=True)
class Mutant:
    """`kind` must be reported at the mutant's line that `at` matches (the `index`-th one of several)."""

    name: str
    kernel: str
    edit: Edit
    kind: str
    at: str
    index: int | None = None
    schedule: str = "eager"
    checks: str = "default"


MUTANTS = [
    # Waits.
    Mutant("full-wait-skipped", GEMM, Edit(r"mbarrier.try_wait.*\[%full\], %par;", "setp.eq.u32 %ok, %zero, 0;"),
           "race-read-after-write-shared", MMA),
    Mutant("empty-wait-skipped", GEMM, Edit(r"mbarrier.try_wait.*\[%empty\], %par;", "setp.eq.u32 %ok, %zero, 0;"),
           "mbarrier-underflow", r"expect_tx", schedule="lazy"),
    Mutant("done-wait-skipped", GEMM, Edit(r"mbarrier.try_wait.*\[%done\], 0;", "setp.eq.u32 %ok, %zero, 0;"),
           "race-read-after-write-tmem", LD),
    Mutant("bulk-wait-skipped", BULK, Edit(r"mbarrier.try_wait.*;", "setp.ge.u32 %ok, %k, 0;"),
           "race-read-after-write-shared", r"ld\.shared\.f32"),
    Mutant("remote-wait-skipped", CLUSTER, Edit(r"mbarrier.try_wait.*;", "setp.ge.u32 %ok, %me, 0;"),
           "race-read-after-write-shared", r"ld\.shared\.f32"),
    Mutant("full-wait-falls-through", GEMM, Edit(r"@!%ok bra WAIT_FULL;"), "race-read-after-write-shared", MMA, schedule="lazy"),
    Mutant("done-wait-falls-through", TS, Edit(r"@!%ok bra WAIT_DONE;"), "race-read-after-write-tmem", LD, schedule="lazy"),
    Mutant("bulk-wait-falls-through", BULK, Edit(r"@!%ok bra WAIT;"), "race-read-after-write-shared", r"ld\.shared\.f32",
           schedule="lazy"),
    Mutant("remote-wait-falls-through", CLUSTER, Edit(r"@!%ok bra WAIT;"),
           "race-read-after-write-shared", r"ld\.shared\.f32", schedule="lazy"),
    Mutant("wait-st-gone", TS, Edit(r"tcgen05.wait::st.*;"), "race-read-after-write-tmem", MMA, 0),
    Mutant("cp-async-wait-gone", RING, Edit(r"cp.async.wait_group 1;"), "race-read-after-write-shared", r"ld\.shared"),
    Mutant("cp-async-wait-one-more", RING, Edit(r"wait_group 1;", "wait_group 2;"),
           "race-read-after-write-shared", r"ld\.shared"),
    Mutant("bulk-read-wait-gone", BULK, Edit(r"cp.async.bulk.wait_group.read 0;"),
           "race-write-after-read-shared", r"cp\.async\.bulk\.shared::cluster"),
    Mutant("store-wait-gone", GEMM, Edit(r"cp.async.bulk.wait_group 0;"),
           "bulk-store-at-exit", r"tensor\.2d\.global\.shared"),
    # The ISA pipelines tcgen05.cp before mma, not after; and a register dependence gives a load's value, no order of memory.
    Mutant("mma-wait-before-cp-gone", CP, Edit(r"mbarrier.try_wait.*\[%step\], 0;", "setp.eq.u32 %ok, %me, %me;"),
           "tcgen05-order", r"tcgen05\.cp", 1, checks="strict"),
    Mutant("mma-wait-before-cp-falls-through", CP, Edit(r"@!%ok bra WAIT_STEP;"), "tcgen05-order", r"tcgen05\.cp", 1,
           schedule="lazy", checks="strict"),
    Mutant("wait-ld-gone", CP, Edit(r"tcgen05.wait::ld.*;"), "tcgen05-wait-ld", r"st\.global.*%v0,", checks="strict"),
    Mutant("wait-ld-gone-before-dealloc", GEMM, Edit(r"tcgen05.wait::ld.*;"), "tmem-dealloc-race", r"tcgen05\.dealloc",
           checks="strict"),
    Mutant("cp-proxy-fence-of-global-memory", CP, Edit(r"fence.proxy.async.*;", "fence.proxy.async.global;"),
           "proxy-fence", r"tcgen05\.cp", 0),
    Mutant("cp-proxy-fence-gone", CP, Edit(r"fence.proxy.async.*;"), "proxy-fence", r"tcgen05\.cp", 0),
    # Phases and parities.
    Mutant("producer-parity", GEMM, Edit(r"xor.b32 %par, %par, 1;"), "deadlock", EMPTY_WAIT),
    Mutant("consumer-parity", GEMM, Edit(r"\[%full\], %par;", "[%full], 1;"), "race-read-after-write-shared", MMA,
           schedule="lazy"),
    Mutant("parity-not-flipped", BULK, Edit(r"and.b32 %par, %k, 1;", "mov.u32 %par, 0;"),
           "race-read-after-write-shared", r"ld\.shared", schedule="lazy"),
    Mutant("next-phase-before-all-waited", BULK, Edit(r"bar.sync 0;", "", -1),
           "mbarrier-phase-overrun", r"cp\.async\.bulk\.shared::cluster"),
    # Barriers: bytes, arrivals, initialisation.
    Mutant("expect-too-few", GEMM, Edit(r"\[%full\], 24576;", "[%full], 16384;"), "race-read-after-write-shared", MMA),
    Mutant("expect-too-many", GEMM, Edit(r"\[%full\], 24576;", "[%full], 24592;"), "deadlock", EMPTY_WAIT),
    Mutant("expect-gone", GEMM, Edit(r"mbarrier.arrive.expect_tx.*;", "mbarrier.arrive.shared::cta.b64 _, [%full];"),
           "race-read-after-write-shared", MMA),
    Mutant("expect-and-arrive-gone", GEMM, Edit(r"mbarrier.arrive.expect_tx.*;"), "deadlock", EMPTY_WAIT),
    Mutant("copy-too-short", BULK, Edit(r"\[%px\], 512", "[%px], 496"), "deadlock", DONE_WAIT),
    Mutant("commit-of-stage-gone", GEMM, Edit(r"tcgen05.commit.*\[%empty\];"), "deadlock", EMPTY_WAIT),
    Mutant("last-commit-gone", GEMM, Edit(r"tcgen05.commit.*\[%done\];"), "deadlock", DONE_WAIT),
    Mutant("cp-async-commit-gone", RING, Edit(r"cp.async.commit_group;", "", 2), "race-read-after-write-shared", r"ld\.shared"),
    Mutant("bulk-commit-gone", BULK, Edit(r"cp.async.bulk.commit_group;"),
           "race-write-after-read-shared", r"cp\.async\.bulk\.shared::cluster"),
    Mutant("arrive-gone", CLUSTER, Edit(r"mbarrier.arrive.*;"), "deadlock", DONE_WAIT),
    Mutant("arrive-at-own-barrier", CLUSTER, Edit(r"_, \[%bar_peer\]", "_, [%bar]"),
           "race-read-after-write-shared", r"ld\.shared\.f32"),
    Mutant("arrive-relaxed", CLUSTER, Edit(r"arrive.release.cluster", "arrive.relaxed.cluster"),
           "race-read-after-write-shared", r"ld\.shared\.f32"),
    Mutant("arrive-twice", BULK, Edit(r"(mbarrier.arrive.expect_tx.*;)", r"\1 mbarrier.arrive.shared::cta.b64 _, [%bar];"),
           "mbarrier-underflow", r"expect_tx"),
    Mutant("count-one-more", GEMM, Edit(r"\[%bars\], 1;", "[%bars], 2;"), "deadlock", EMPTY_WAIT),
    Mutant("count-one-less", CLUSTER, Edit(r"\[%bar\], 64;", "[%bar], 63;"), "mbarrier-underflow", r"mbarrier\.arrive"),
    Mutant("init-twice", GEMM, Edit(r"\[%bars\+24\], 1;", "[%bars+16], 1;"), "mbarrier-reinit", r"init.*\[%bars\+16\]", -1),
    Mutant("init-gone", GEMM, Edit(r"mbarrier.init.*\[%done\], 1;"), "mbarrier-uninitialised", DONE_WAIT),
    Mutant("init-not-synchronised", BULK, Edit(r"bar.sync 0;", "", 0), "mbarrier-uninitialised", DONE_WAIT),
    Mutant("init-fence-gone", CLUSTER, Edit(r"fence.mbarrier_init.*;"), "mbarrier-init-race", r"mbarrier\.arrive"),
    Mutant("init-fence-gone-tma", GEMM, Edit(r"fence.mbarrier_init.*;"), "mbarrier-init-fence", LOAD_A),
    Mutant("cluster-arrive-relaxed", CLUSTER, Edit(r"cluster.arrive.release", "cluster.arrive.relaxed", 0),
           "race-read-after-write-shared", r"ld\.shared::cluster"),
    # Proxies and tcgen05 fences.
    Mutant("proxy-fence-gone-store", GEMM, Edit(r"fence.proxy.async.*;"), "proxy-fence", r"tensor\.2d\.global\.shared"),
    Mutant("proxy-fence-gone-mma", TS, Edit(r"fence.proxy.async.*;"), "proxy-fence", MMA, 0),
    Mutant("proxy-fence-gone-bulk", BULK, Edit(r"fence.proxy.async.*;"), "proxy-fence", r"cp\.async\.bulk\.global"),
    Mutant("written-after-proxy-fence", BULK, Edit(r"(fence.proxy.async.*;)", r"\1 st.shared.f32 [%at], %v;"),
           "proxy-fence", r"cp\.async\.bulk\.shared::cluster"),
    Mutant("tcgen05-fence-after-gone", TS, Edit(r"tcgen05.fence::after.*;", "", 1), "tcgen05-fence", MMA, 0, checks="strict"),
    Mutant("tcgen05-fence-before-gone", TS, Edit(r"tcgen05.fence::before.*;", "", 1), "tcgen05-fence", MMA, 0, checks="strict"),
    Mutant("tcgen05-fence-gone-before-ld", GEMM, Edit(r"tcgen05.fence::after.*;", "", 2), "tcgen05-fence", LD, checks="strict"),
    Mutant("tcgen05-fence-gone-before-dealloc", GEMM, Edit(r"tcgen05.fence::after.*;", "", 3),
           "tcgen05-fence", r"tcgen05\.dealloc", checks="strict"),
    # CTA and cluster barriers.
    Mutant("syncthreads-gone", RING, Edit(r"bar.sync 0;"), "race-read-after-write-shared", r"ld\.shared", schedule="lazy"),
    Mutant("syncthreads-gone-mma", TS, Edit(r"bar.sync 0;", "", 1), "race-read-after-write-tmem", MMA, 0),
    Mutant("bar-sync-count", RING, Edit(r"bar.sync 0;", "bar.sync 0, 96;"), "deadlock", r"bar\.sync"),
    Mutant("bar-arrive-count", ROLES, Edit(r"bar.arrive 2, 384;", "bar.arrive 2, 256;"),
           "race-read-after-write-shared", r"ld\.shared"),
    Mutant("bar-arrive-gone", ROLES, Edit(r"bar.arrive 2, 384;"), "deadlock", r"bar\.sync 1"),
    Mutant("bar-id-17", ROLES, Edit(r"bar.sync 2, 384;", "bar.sync 17, 384;"), "fault", r"bar\.sync 17"),
    Mutant("cluster-wait-gone", CLUSTER, Edit(r"barrier.cluster.wait.*;", "", 0), "mbarrier-uninitialised", r"mbarrier\.arrive"),
    Mutant("cluster-wait-gone-before-dsmem", CLUSTER, Edit(r"barrier.cluster.wait.*;", "", 1),
           "race-read-after-write-shared", r"ld\.shared::cluster"),
    Mutant("cluster-wait-gone-before-exit", CLUSTER, Edit(r"barrier.cluster.wait.*;", "", 2),
           "dsmem-after-exit", r"ld\.shared::cluster"),
    Mutant("cluster-rank", CLUSTER, Edit(r"xor.b32 %peer, %rank, 1;", "xor.b32 %peer, %rank, 2;"),
           "cluster-rank", r"st\.shared::cluster"),
    # Buffers.
    Mutant("stages-overlap", GEMM, Edit(r"%off, %slot, 24576;", "%off, %slot, 8192;", 0), "race-write-after-write-shared", LOAD_A),
    Mutant("ring-one-short", RING, Edit(r"rem.u32 %slot, %ahead, 3;", "rem.u32 %slot, %ahead, 2;"),
           "race-write-after-read-shared", r"cp\.async\.cg", 2),
    Mutant("rows-not-filled", TS, Edit(r"%i, 512;", "%i, 384;"), "uninitialised-shared", MMA, 0),
    Mutant("copy-gone", RING, Edit(r"cp.async.cg.*;", "", 0), "uninitialised-shared", r"ld\.shared"),
    Mutant("register-unwritten", RING, Edit(r"mov.f32 %s2, 0f00000000;"), "uninitialised-register", r"st\.global"),
    Mutant("copy-misaligned", GEMM, Edit(r"%a_at, 16384;", "%a_at, 16392;", 0), "illegal-operand", LOAD_B),
    Mutant("bulk-size", BULK, Edit(r"\[%buf\], 512;", "[%buf], 520;"), "bulk-alignment", r"cp\.async\.bulk\.global"),
    Mutant("store-out-of-bounds", RING, Edit(r"\[%po\], \{", "[%po+16], {"), "out-of-bounds-global", r"st\.global"),
    Mutant("copy-out-of-bounds", RING, Edit(r"setp.ge.u32 %p, %ahead", "setp.gt.u32 %p, %ahead"),
           "out-of-bounds-global", r"cp\.async\.cg", 2),
    Mutant("shared-out-of-bounds", BULK, Edit(r"%t, %me, 2;", "%t, %me, 12;"), "out-of-bounds-shared", r"ld\.shared"),
    # Tensor memory.
    Mutant("dealloc-gone", GEMM, Edit(r"tcgen05.dealloc.*;"), "tmem-leak", r"tcgen05\.alloc"),
    Mutant("dealloc-half", GEMM, Edit(r"%tmem, 64;", "%tmem, 32;"), "tmem-dealloc", r"tcgen05\.dealloc"),
    Mutant("dealloc-too-early", GEMM, Edit(r"bar.sync 0;", "", 1), "tmem-dealloc-race", r"tcgen05\.dealloc"),
    Mutant("alloc-48", GEMM, Edit(r"\[%tptr\], 64;", "[%tptr], 48;"), "tmem-alloc", r"tcgen05\.alloc"),
    Mutant("alloc-too-small", GEMM, Edit(r"\[%tptr\], 64;", "[%tptr], 32;"), "tmem-unallocated", MMA),
    Mutant("alloc-after-relinquish", GEMM,
           Edit(r"(tcgen05.alloc.*;)", r"tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; \1"),
           "tmem-alloc", r"tcgen05\.alloc"),
    Mutant("lane-quarter", GEMM, Edit(r"%taddr, %taddr, %tmem;", "%taddr, %taddr, 0x00200000;"), "illegal-operand", LD),
    Mutant("columns-past-alloc", GEMM, Edit(r"%taddr, %taddr, %tmem;", "%taddr, %taddr, 16;"), "tmem-unallocated", LD),
    Mutant("accumulates-at-first", GEMM, Edit(r"setp.ne.u32 %first", "setp.ge.u32 %first"), "uninitialised-tmem", MMA),
    Mutant("a-in-wrong-columns", TS, Edit(r"%ta, %tmem, 64;", "%ta, %tmem, 72;"), "uninitialised-tmem", MMA, 3),
    Mutant("all-lanes-issue", GEMM, Edit(r"@!%leader bra EPILOGUE;"), "mma-many-threads", MMA),
    # Descriptors, one field at a time.
    Mutant("desc-start", GEMM, Edit(r"%lo_a, 1024;", "%lo_a, 1025;"), "race-read-after-write-shared", MMA),
    Mutant("desc-sbo", GEMM, Edit(r"0x40004040", "0x40004041"), "race-read-after-write-shared", MMA),
    Mutant("desc-sbo-no-swizzle", TS, Edit(r"0x00004040", "0x00004080"), "uninitialised-shared", MMA, 0),
    Mutant("desc-lbo", TS, Edit(r"0x80000", "0x90000"), "uninitialised-shared", MMA, 3),
    Mutant("desc-swizzle", GEMM, Edit(r"0x40004040", "0x80004040"), "descriptor-swizzle", MMA),
    Mutant("desc-swizzle-invalid", GEMM, Edit(r"0x40004040", "0x60004040"), "illegal-operand", MMA),
    Mutant("desc-constant", GEMM, Edit(r"0x40004040", "0x40000040"), "illegal-operand", MMA),
    Mutant("idesc-m-256", GEMM, Edit(r"0x08100490", "0x10100490"), "illegal-operand", MMA),
    Mutant("idesc-m-64", GEMM, Edit(r"0x08100490", "0x04100490"), "uninitialised-tmem", LD),
    Mutant("idesc-n-80", GEMM, Edit(r"0x08100490", "0x08140490"), "tmem-unallocated", MMA),
    Mutant("idesc-n-72", GEMM, Edit(r"0x08100490", "0x08120490"), "illegal-operand", MMA),
    Mutant("idesc-n-48", GEMM, Edit(r"0x08100490", "0x080c0490"), "uninitialised-tmem", LD),
    Mutant("idesc-d-type", GEMM, Edit(r"0x08100490", "0x081004b0"), "illegal-operand", MMA),
    # Registers that wgmma uses.
    Mutant("wgmma-wait-gone", WGMMA, Edit(r"wgmma.wait_group.*;"), "wgmma-register", r"st\.global\.v2\.f32 \[%pd\]"),
    Mutant("wgmma-wait-one-more", WGMMA, Edit(r"aligned 0;", "aligned 1;"), "wgmma-register", r"st\.global\.v2\.f32 \[%pd\]"),
    Mutant("wgmma-commit-gone", WGMMA, Edit(r"wgmma.commit_group.*;"), "wgmma-register", r"st\.global\.v2\.f32 \[%pd\+256\]"),
    Mutant("wgmma-fence-gone", WGMMA, Edit(r"wgmma.fence.*;"), "wgmma-fence", r"wgmma\.mma_async", 0),
    Mutant("wgmma-d-computed-after-fence", WGMMA, Edit(r"(wgmma.fence.*;)", r"\1 cvt.rn.f32.u32 %d0, %me;"),
           "wgmma-fence", r"wgmma\.mma_async", 0),
    Mutant("wgmma-a-overwritten", WGMMA, Edit(r"(wgmma.commit_group.*;)", r"\1 mov.b32 %a6, 0;"),
           "wgmma-register", r"commit_group"),
    Mutant("wgmma-d-read-between", WGMMA, Edit(r"(wgmma.commit_group.*;)", r"add.f32 %d3, %d3, 0f00000000; \1"),
           "wgmma-register", r"commit_group"),
    Mutant("wgmma-proxy-fence-gone", WGMMA, Edit(r"fence.proxy.async.*;"), "proxy-fence", r"wgmma\.mma_async", 0),
    Mutant("wgmma-syncthreads-gone", WGMMA, Edit(r"bar.sync 0;"), "race-read-after-write-shared", r"wgmma\.mma_async", 0),
    # Registers of warpgroups: the CTA has 64512.
    Mutant("setmaxnreg-dec-gone", ROLES, Edit(r"setmaxnreg.dec.*;"), "deadlock", r"setmaxnreg\.inc"),
    Mutant("setmaxnreg-over-budget", ROLES, Edit(r"u32 232;", "u32 240;"), "deadlock", r"setmaxnreg\.inc"),
    Mutant("setmaxnreg-1024-over", ROLES, Edit(r"u32 40;", "u32 48;"), "deadlock", r"setmaxnreg\.inc"),
]  # fmt: skip

# Legal accesses, ordered and initialised, to the wrong bytes: the results tell.
WRONG_NUMBERS = {
    "desc-k-step": (GEMM, Edit(r"%lo_b, %lo_b, 2;", "%lo_b, %lo_b, 1;")),
    "idesc-b-major": (GEMM, Edit(r"0x08100490", "0x08110490")),
    "idesc-a-type": (GEMM, Edit(r"0x08100490", "0x08100410")),
    "cp-gone": (CP, Edit(r"tcgen05.cp.*;", "", 1)),
    "desc-lbo-half": (TS, Edit(r"0x80000", "0x40000")),
}

@pytest.mark.parametrize("checks", ["default", "strict"])
@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_unmutated(name, schedule, checks):
    kernel = KERNELS[name]
    outcome = kernel.run(kernel.text(), schedule=schedule, checks=checks, seed=3)
    assert outcome.error is None and outcome.right
    assert outcome.hazards == [], [str(h) for h in outcome.hazards]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_reported(mutant):
    kernel = KERNELS[mutant.kernel]
    text, _ = mutant.edit(kernel.text())
    line = line_of(text, mutant.at, mutant.index)
    outcome = kernel.run(text, schedule=mutant.schedule, checks=mutant.checks, seed=3)
    found = {(h.kind, h.ptx_line) for h in outcome.hazards}
    assert (mutant.kind, line) in found, f"wanted {(mutant.kind, line)}: {[str(h) for h in outcome.hazards]}, {outcome.error}"
    if mutant.kind == "deadlock":
        assert outcome.error is not None and f"PTX line {line}" in str(outcome.error)


def test_default_level_forgives_what_only_strict_reports():
    for mutant in MUTANTS:
        if mutant.checks == "strict":
            text, _ = mutant.edit(KERNELS[mutant.kernel].text())
            assert KERNELS[mutant.kernel].run(text, schedule="lazy").hazards == []


@pytest.mark.parametrize("name", sorted(WRONG_NUMBERS))
def test_wrong_numbers(name):
    kernel, edit = WRONG_NUMBERS[name]
    text, _ = edit(KERNELS[kernel].text())
    outcome = KERNELS[kernel].run(text, schedule="eager")
    assert outcome.hazards or outcome.right is False


def test_an_illegal_register_count_is_refused_before_the_launch():
    from cute_kernels.emulator import UnsupportedInstruction

    kernel = KERNELS[ROLES]
    for pattern, count in ((r"u32 232;", 264), (r"u32 40;", 44)):
        text, line = Edit(pattern, f"u32 {count};")(kernel.text())
        with pytest.raises(UnsupportedInstruction, match=f"line {line}.*setmaxnreg.*{count}"):
            kernel.run(text)


def test_distinct_mutants():
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) >= 25
    edited = {(m.kernel, m.edit(KERNELS[m.kernel].text())[0]) for m in MUTANTS}
    assert len(edited) == len(MUTANTS)
