# ruff: noqa: E501  (assembly reads better unbroken)
"""Every check finds its fault, and reports its kind, its line and the other access; the repaired kernel is clean."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from ptx_harness import kernel
from test_machine_simt import BULK, STORE, WAIT, pipeline

from cute_kernels.emulator import Deadlock, EmulationError, run_ptx


def kinds(record) -> set[str]:
    return {h.kind for h in record.hazards}


def line_of(text: str, needle: str) -> int:
    return next(k + 1 for k, line in enumerate(text.split("\n")) if needle in line)


def run(body: str, *, shared: str = "", block: int = 64, args: int = 1, words: int = 256, **kw):
    """Runs on zeros; a fault's record is taken from the error."""
    text = kernel(body, params=args, shared=shared)
    arrays = [np.zeros(words, np.uint32) for _ in range(args)]
    try:
        record = run_ptx(text, kw.pop("grid", 1), block, arrays, **kw)
        return text, record, None
    except EmulationError as e:
        return text, e.record, e


EXCHANGE = (
    "mov.u32 %r2, buf;\nmad.lo.u32 %r3, %tx, 4, %r2;\nst.shared.u32 [%r3], %tx;\nbar.sync 0;\nxor.b32 %r4, %tx, 32;\n"
    "mad.lo.u32 %r3, %r4, 4, %r2;\nld.shared.u32 %r1, [%r3];\n" + STORE
)
BUF = ".shared .align 4 .b32 buf[64];"


def test_missing_block_barrier_is_a_race():
    _, clean, _ = run(EXCHANGE, shared=BUF)
    assert clean.hazards == []
    text, record, _ = run(EXCHANGE.replace("bar.sync 0;\n", ""), shared=BUF, schedule="random", seed=5)
    found = {h.kind: h for h in record.hazards}
    race = found.get("race-read-after-write-shared") or found["race-write-after-read-shared"]
    lines = {line_of(text, "st.shared"), line_of(text, "ld.shared")}
    assert {race.ptx_line, race.other_line} == lines


def test_missing_barrier_before_reuse():
    """Every thread overwrites its own slot, which a thread of the other warp reads."""
    reuse = "\nmad.lo.u32 %r3, %tx, 4, %r2;\nst.shared.u32 [%r3], 1;"
    text, record, _ = run(EXCHANGE + reuse, shared=BUF)
    assert kinds(record) <= {"race-write-after-read-shared", "race-read-after-write-shared"} and record.hazards
    assert run(EXCHANGE + "\nbar.sync 0;" + reuse, shared=BUF)[1].hazards == []


def test_sub_word_neighbours_are_not_a_race():
    """Two warps write different bytes of one word: no conflict; the same byte: a conflict."""
    body = "mov.u32 %r2, buf;\nshr.u32 %r3, %tx, 5;\nadd.u32 %r4, %r2, %r3;\nand.b32 %r5, %tx, 31;\nsetp.eq.u32 %p1, %r5, 0;\n@%p1 st.shared.u8 [%r4], %tx;\n"
    assert run(body, shared=BUF)[1].hazards == []
    assert kinds(run(body.replace("add.u32 %r4, %r2, %r3", "mov.u32 %r4, %r2"), shared=BUF)[1]) == {"race-write-after-write-shared"}


def test_uninitialised_shared_memory():
    text, record, _ = run("ld.shared.u32 %r1, [buf+8];\n" + STORE, shared=BUF)
    (h,) = record.hazards
    assert h.kind == "uninitialised-shared" and h.ptx_line == line_of(text, "ld.shared")


def test_uninitialised_register():
    body = "setp.lt.u32 %p1, %tx, 7;\n@%p1 mov.u32 %r1, 5;\nadd.u32 %r1, %r1, 1;\n" + STORE
    text, record, _ = run(body)
    (h,) = record.hazards
    assert h.kind == "uninitialised-register" and h.ptx_line == line_of(text, "st.global")
    assert run("mov.u32 %r1, 0;\n" + body)[1].hazards == []
    selected = "setp.lt.u32 %p1, %tx, 7;\n@%p1 mov.u32 %r1, 5;\nadd.u32 %r1, %r1, 1;\nselp.u32 %r1, %r1, 0, %p1;\n" + STORE
    assert run(selected)[1].hazards == []  # garbage that is selected away is no fault


@pytest.mark.parametrize(
    "body,kind",
    [
        ("st.global.u32 [%a0+4096], 1;", "out-of-bounds-global"),
        ("ld.global.u32 %r1, [%a0+-4];\n" + STORE, "out-of-bounds-global"),
        ("ld.global.u32 %r1, [%a0+2];\n" + STORE, "misaligned"),
        ("mov.u32 %r2, buf;\nst.shared.u32 [%r2+100000], 1;", "out-of-bounds-shared"),
    ],
)
def test_bad_addresses(body, kind):
    text, record, error = run(body, shared=BUF)
    assert error is not None and kinds(record) == {kind} and f"PTX line {record.hazards[0].ptx_line}" in str(error)


def test_global_races_between_ctas():
    body = "mov.u32 %r1, %ctaid.x;\nsetp.eq.u32 %p1, %tx, 0;\n@%p1 st.global.u32 [%a0], %r1;"
    assert kinds(run(body, grid=2)[1]) == {"race-write-after-write-global"}
    assert run(body.replace("st.global.u32", "red.global.add.u32"), grid=2)[1].hazards == []


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
def test_bulk_copy_mutants(schedule):
    def go(shared_body, **kw):
        shared, body = shared_body
        return run(body, shared=shared, args=2, schedule=schedule, **kw)

    assert go(pipeline(BULK))[1].hazards == []
    # no wait
    text, record, _ = go(pipeline(BULK, wait=""))
    assert "race-read-after-write-shared" in kinds(record) or "uninitialised-shared" in kinds(record)
    assert {h.ptx_line for h in record.hazards} <= {line_of(text, "ld.shared"), line_of(text, "cp.async.bulk")}
    # too few bytes expected
    shared, body = pipeline(BULK)
    _, record, error = run(body.replace("%d9, [%r2], 1024", "%d9, [%r2], 512"), shared=shared, args=2, schedule=schedule)
    assert isinstance(error, Deadlock) and "512 bytes of tx-count pending" in str(error)
    # wrong parity: passes at once
    _, record, _ = go(pipeline(BULK, wait=WAIT.format(bar="%r2", parity=1)))
    assert kinds(record) & {"race-read-after-write-shared", "uninitialised-shared"}
    # no barrier between init and use by other warps
    shared, body = pipeline(BULK)
    _, record, error = run(body.replace("bar.sync 0;\n", ""), shared=shared, args=2, schedule=schedule)
    assert kinds(record) & {"mbarrier-init-race", "mbarrier-uninitialised"}


PHASES = """
mov.u32 %r2, bars;
setp.ne.u32 %p1, %tx, 0;
@%p1 bra READY;
mbarrier.init.shared.b64 [%r2], 1;
mbarrier.init.shared.b64 [%r2+8], 32;
READY:
bar.sync 0;
setp.ge.u32 %p1, %tx, 32;
@%p1 bra CONSUMER;
setp.ne.u32 %p1, %tx, 0;
@%p1 bra DONE;
mbarrier.arrive.shared.b64 _, [%r2];
ANSWER
mbarrier.arrive.release.cta.shared.b64 _, [%r2];
bra DONE;
CONSUMER:
FIRST: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0;
@!%p2 bra FIRST;
mbarrier.arrive.shared.b64 _, [%r2+8];
SECOND: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 1;
@!%p2 bra SECOND;
DONE:
"""
ANSWER = "SEEN: mbarrier.try_wait.parity.shared.b64 %p2, [%r2+8], 0;\n@!%p2 bra SEEN;"


def test_a_phase_that_ends_before_all_have_waited_for_the_one_before():
    """Without the answer the second arrival may come before the first wait, which then waits for ever: a deadlock in some
    schedules, and a finding in those where it happens to go well."""
    bars = ".shared .align 8 .b64 bars[2];"
    schedules = [("eager", 0), ("lazy", 0), *(("random", seed) for seed in range(6))]
    for schedule, seed in schedules:
        assert run(PHASES.replace("ANSWER", ANSWER), shared=bars, schedule=schedule, seed=seed)[1].hazards == []
    outcomes = set()
    for (schedule, seed), gap in product(schedules, ("", "nanosleep.u32 20;")):
        text, record, error = run(PHASES.replace("ANSWER", gap), shared=bars, schedule=schedule, seed=seed)
        (h,) = record.hazards
        outcomes.add(h.kind)
        assert h.kind == "deadlock" or (h.ptx_line, h.other_line) == (line_of(text, "arrive.release.cta"), line_of(text, "FIRST:"))
        assert (h.kind == "deadlock") == isinstance(error, Deadlock)
    assert outcomes == {"deadlock", "mbarrier-phase-overrun"}


PROXY = """
mov.u32 %r2, buf;
mad.lo.u32 %r3, %tx, 4, %r2;
st.shared.u32 [%r3], %tx;
fence.proxy.async.shared::cta;
bar.sync 0;
setp.ne.u32 %p1, %tx, 0;
@%p1 exit;
cp.async.bulk.global.shared::cta.bulk_group [%a0], [%r2], 256;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
"""
BUF16 = ".shared .align 16 .b32 buf[64];"


GLOBAL_PROXY = """
mov.u32 %r2, buf;
mov.u32 %r3, bar;
setp.ne.u32 %p1, %tx, 0;
@%p1 bra READY;
mbarrier.init.shared.b64 [%r3], 1;
fence.mbarrier_init.release.cluster;
READY:
mul.wide.u32 %d1, %tx, 4;
add.u64 %d1, %d1, %a0;
st.global.u32 [%d1], %tx;
fence.proxy.async;
bar.sync 0;
@%p1 bra WAIT;
mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 256;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%a0], 256, [%r3];
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0;
@!%p2 bra WAIT;
"""


def test_generic_to_async_proxy_in_global_memory():
    shared = ".shared .align 16 .b32 buf[64];\n.shared .align 8 .b64 bar;"
    assert run(GLOBAL_PROXY, shared=shared)[1].hazards == []
    text, record, _ = run(GLOBAL_PROXY.replace("fence.proxy.async;\n", ""), shared=shared)
    (h,) = record.hazards
    assert (h.kind, h.ptx_line, h.other_line) == ("proxy-fence", line_of(text, "cp.async.bulk"), line_of(text, "st.global"))


REFILL = """
mad.lo.u32 %r4, %tx, 4, %r2;
ld.shared.u32 %r1, [%r4];
FENCE
bar.sync 0;
@%p1 bra AGAIN;
mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 256;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%a0], 256, [%r3];
AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 1;
@!%p2 bra AGAIN;
"""


def test_asynchronous_writes_after_generic_reads():
    """Strict asks for a proxy fence between; default does not, because TMA pipelines have none."""
    shared = ".shared .align 16 .b32 buf[64];\n.shared .align 8 .b64 bar;"
    bare, fenced = (GLOBAL_PROXY + REFILL.replace("FENCE", fence) for fence in ("", "fence.proxy.async.shared::cta;"))
    for body, checks in ((fenced, "strict"), (fenced, "default"), (bare, "default")):
        assert run(body, shared=shared, checks=checks)[1].hazards == []
    text, record, _ = run(bare, shared=shared, checks="strict")
    (h,) = record.hazards
    assert (h.kind, h.ptx_line, h.other_line) == (
        "proxy-fence",
        line_of(text, "cp.async.bulk.shared::cta"),
        line_of(text, "ld.shared.u32"),
    )


def test_generic_to_async_proxy():
    assert run(PROXY, shared=BUF16)[1].hazards == []
    text, record, _ = run(PROXY.replace("fence.proxy.async.shared::cta;\n", ""), shared=BUF16)
    (h,) = record.hazards
    assert (
        h.kind == "proxy-fence"
        and h.ptx_line == line_of(text, "cp.async.bulk.global")
        and h.other_line == line_of(text, "st.shared")
    )
    after = PROXY.replace("fence.proxy.async.shared::cta;\nbar.sync 0;", "bar.sync 0;\nfence.proxy.async.shared::cta;")
    assert run(after, shared=BUF16)[1].hazards == []  # by the reader, after the synchronisation
    assert kinds(run(PROXY.replace("cp.async.bulk.wait_group.read 0;", ""), shared=BUF16)[1]) == {"bulk-store-at-exit"}


def mbar(body: str) -> str:
    return "mov.u32 %r2, bars;\nsetp.ne.u32 %p1, %tx, 0;\n@%p1 exit;\n" + body


BARS = ".shared .align 8 .b64 bars[2];"


@pytest.mark.parametrize(
    "body,kind",
    [
        ("mbarrier.arrive.shared.b64 %d1, [%r2];", "mbarrier-uninitialised"),
        ("mbarrier.init.shared.b64 [%r2], 1;\nmbarrier.init.shared.b64 [%r2], 2;", "mbarrier-reinit"),
        ("mbarrier.init.shared.b64 [%r2], 1;\nmbarrier.arrive.shared.b64 %d1, [%r2], 3;", "mbarrier-underflow"),
        ("mbarrier.init.shared.b64 [%r2], 1;\nst.shared.u32 [%r2+4], 0;", "mbarrier-overwritten"),
        ("mbarrier.init.shared.b64 [%r2], 1;\nmbarrier.complete_tx.shared.b64 [%r2], 16;", "mbarrier-tx-at-exit"),
    ],
)
def test_mbarrier_misuse(body, kind):
    _, record, _ = run(mbar(body), shared=BARS, block=32)
    assert kind in kinds(record)


@pytest.mark.parametrize("use", ["mbarrier.init.shared.b64 [%r2+4], 1;", "mbarrier.arrive.shared.b64 %d1, [%r2+4];"])
def test_a_misaligned_mbarrier(use):
    _, record, error = run("mov.u32 %r2, bars;\nsetp.ne.u32 %p1, %tx, 0;\n@%p1 bra S;\n" + use + "\nS:\n", shared=BARS, block=32)
    assert kinds(record) == {"misaligned"} and "mbarrier at shared byte 1028, which is no multiple of 8" in str(error)


def test_deadlock_report():
    body = mbar("mbarrier.init.shared.b64 [%r2], 3;\nmbarrier.arrive.shared.b64 %d1, [%r2];\n" + WAIT.format(bar="%r2", parity=0))
    text, record, error = run(body, shared=BARS, block=32)
    assert isinstance(error, Deadlock)
    message = str(error)
    assert "2 of 3 arrivals pending" in message and "parity 0" in message and f"PTX line {line_of(text, 'try_wait')}" in message
    text, record, error = run("setp.lt.u32 %p1, %tx, 32;\n@%p1 bra D;\nbar.sync 1, 64;\nD:\n")
    assert isinstance(error, Deadlock) and "barrier 1: 32 of 64 threads arrived" in str(error)


def test_a_deadlock_names_every_wait_and_its_cause_first():
    """Warp 0 waits for warp 1, which waits for warp 2, which waits for bytes; warp 3 waits for all of them."""
    init = "".join(f"mbarrier.init.shared.b64 [%r2+{8 * k}], 1;\n" for k in range(3))
    roles = "".join(
        f"setp.ne.u32 %p1, %r9, {k};\n@%p1 bra N{k};\n{own}W{k}: mbarrier.try_wait.parity.shared.b64 %p2, [%r2+{8 * k}], 0;\n"
        f"@!%p2 bra W{k};\nmbarrier.arrive.shared.b64 %d1, [%r2+{8 * k - 8 if k else 0}];\nN{k}:\n"
        for k, own in enumerate(["", "", "mbarrier.arrive.expect_tx.shared.b64 %d1, [%r2+16], 16;\n"])
    )
    body = (
        "mov.u32 %r2, bars;\nshr.u32 %r9, %tx, 5;\nsetp.ne.u32 %p1, %tx, 0;\n@%p1 bra I;\n" + init + "I: bar.sync 0;\n"
        "and.b32 %r8, %tx, 31;\nsetp.ne.u32 %p3, %r8, 0;\n@%p3 exit;\n" + roles + "END: barrier.sync 1, 128;\n"
    )
    text, record, error = run(body, shared=".shared .align 8 .b64 bars[3];", block=128)
    assert isinstance(error, Deadlock) and kinds(record) == {"deadlock"}
    want = [line_of(text, label) for label in ("W2:", "W0:", "W1:", "END:")]
    assert [h.ptx_line for h in record.hazards] == want
    assert "0 of 1 arrivals pending, 16 bytes" in record.hazards[0].message


FLAG, CAS, EXCHANGED = "ld.volatile.global.u32 %r1, [%a0];", "atom.global.cas.b32 %r1, [%a0], 1, 2;", "atom.shared.exch.b32 %r1, [buf], 0;"


@pytest.mark.parametrize(
    "load, schedule, checks",
    [(FLAG, "eager", "default"), (FLAG, "lazy", "off"), (FLAG, "random", "off"), (CAS, "eager", "off"), (EXCHANGED, "lazy", "default")],
)
def test_a_spin_without_effect_is_found_out(load, schedule, checks):
    """A flag that nothing sets: the state of the spinning warp repeats after some rounds, where random runs 3000."""
    body = f"st.shared.u32 [buf], 0;\nL: {load}\nadd.u32 %r3, %r1, 1;\nsetp.eq.u32 %p1, %r1, 0;\n@%p1 bra L;\n"
    _, record, error = run(body, shared=BUF, block=64, schedule=schedule, checks=checks)
    assert isinstance(error, Deadlock) and str(error).startswith("no progress: warps ") and "warp 1: " in str(error)
    assert "spinning: it runs, and changes nothing" in str(error)
    if schedule != "random":
        assert record.counters.total < 50_000


@pytest.mark.parametrize("clock", ["%clock64", "%globaltimer"])
def test_a_loop_that_waits_for_a_moment_ends(clock):
    body = f"mov.u64 %d1, {clock};\nL: mov.u64 %d2, {clock};\nsub.u64 %d3, %d2, %d1;\nsetp.lt.u64 %p1, %d3, 100000;\n@%p1 bra L;\n"
    _, record, error = run(body, block=32)
    assert error is None and record.hazards == [] and record.counters.opcodes["sub.u64"] == 100000 // 32


@pytest.mark.parametrize("schedule", ["eager", "lazy"])
def test_a_long_loop_is_no_spin(schedule):
    """Registers alone change for 20 rounds; and a flag that another warp sets after that is seen."""
    body = (
        "mov.u32 %r1, 0;\nsetp.ge.u32 %p1, %tx, 32;\n@%p1 bra L;\nC: add.u32 %r1, %r1, 1;\nsetp.lt.u32 %p2, %r1, 4000;\n@%p2 bra C;\n"
        "st.release.gpu.global.u32 [%a0], %r1;\nL: ld.acquire.gpu.global.u32 %r2, [%a0];\nsetp.eq.u32 %p2, %r2, 0;\n@%p2 bra L;\n"
    )
    _, record, error = run(body, block=64, schedule=schedule)
    assert error is None and record.hazards == []


def test_divergent_aligned_barrier():
    text, record, _ = run("setp.lt.u32 %p1, %tx, 5;\n@%p1 bra A;\nbar.sync 0;\nbra J;\nA: bar.sync 0;\nJ:\n", block=32)
    assert "divergent-barrier" in kinds(record)


def tmem(body: str, alloc: str = "32", free: str = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 32;") -> str:
    return (
        f"mov.u32 %r2, slot;\ntcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], {alloc};\nbar.sync 0;\nld.shared.u32 %r5, [slot];\n"
        + body
        + "\n"
        + free
    )


SLOT = ".shared .align 4 .b32 slot;"
ROUND = (
    "mov.u32 %r6, 3;\ntcgen05.st.sync.aligned.32x32b.x2.b32 [%r5], {%tx, %r6};\ntcgen05.wait::st.sync.aligned;\n"
    "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r7}, [%r5];\ntcgen05.wait::ld.sync.aligned;\n" + STORE
)


def test_tensor_memory_round_trip_and_faults():
    _, record, _ = run(tmem(ROUND), shared=SLOT, block=32)
    assert record.hazards == []
    for mutant, kind in [
        (tmem(ROUND, free=""), "tmem-leak"),
        (tmem(ROUND, free="tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 64;"), "tmem-dealloc"),
        (tmem(ROUND.replace("tcgen05.wait::st.sync.aligned;\n", "")), "race-read-after-write-tmem"),
        (
            tmem("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r5];\ntcgen05.wait::ld.sync.aligned;\n" + STORE),
            "uninitialised-tmem",
        ),
        (
            tmem(ROUND.replace("mov.u32 %r6, 3;", "mov.u32 %r6, 3;\nadd.u32 %r8, %r5, 40;").replace("[%r5]", "[%r8]")),
            "tmem-unallocated",
        ),
        (
            tmem(ROUND.replace("mov.u32 %r6, 3;", "mov.u32 %r6, 3;\nadd.u32 %r8, %r5, 0x200000;").replace("[%r5]", "[%r8]")),
            "illegal-operand",
        ),
        (tmem(ROUND, alloc="48"), "tmem-alloc"),
    ]:
        _, record, _ = run(mutant, shared=SLOT, block=32)
        assert kind in kinds(record), (kind, record.hazards, record.error)


def test_tensor_memory_allocation_blocks():
    """A second CTA-wide allocation waits for the first to be freed; without that it is a deadlock that says so."""
    body = tmem("", alloc="512", free="tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;")
    _, record, error = run(body, shared=SLOT, block=32)
    assert isinstance(error, Deadlock) and "tcgen05.alloc of 32 columns: 0 of 512 are free" in str(error)


def test_register_budget():
    body = "setmaxnreg.inc.sync.aligned.u32 232;\n"
    _, record, error = run(body, block=512, words=1)
    assert isinstance(error, Deadlock) and "setmaxnreg.inc to 232" in str(error)
    _, record, _ = run("setmaxnreg.inc.sync.aligned.u32 64;\n", block=512)
    assert kinds(record) == {"setmaxnreg"}


@pytest.mark.parametrize("checks", ["default", "strict"])
def test_two_warpgroups_start_with_what_ptxas_gives(checks):
    """A copying and a computing warpgroup, as in NVIDIA's Hopper GEMMs: no .maxnreg, and 256 threads leave the file half used."""
    body = "setp.ge.u32 %p1, %tx, 128;\n@%p1 bra COMPUTES;\nsetmaxnreg.dec.sync.aligned.u32 40;\nbra DONE;\n"
    body += "COMPUTES:\nsetmaxnreg.inc.sync.aligned.u32 232;\nDONE:\n"
    _, record, error = run(body, block=256, checks=checks)
    assert error is None and record.hazards == []


def test_checks_off_reports_nothing():
    assert run(EXCHANGE.replace("bar.sync 0;\n", ""), shared=BUF, checks="off")[1].hazards == []


def test_hazards_carry_source_lines():
    body = ".loc 1 77 1\nld.shared.u32 %r1, [buf];\n" + STORE
    text = kernel(body, shared=BUF).replace(".address_size 64\n", '.address_size 64\n.file 1 "model.py"\n')
    record = run_ptx(text, 1, 32, [np.zeros(32, np.uint32)])
    assert record.hazards[0].source == "model.py:77" and "model.py:77" in str(record.hazards[0])


def test_every_reported_kind_is_documented():
    """The table of kinds and the calls that report them name the same kinds."""
    import re
    from pathlib import Path

    from cute_kernels.emulator.machine import hazards

    folder = Path(hazards.__file__).parent
    text = "".join(p.read_text() for p in folder.glob("ops_*.py")) + (folder / "engine.py").read_text() + (folder / "state.py").read_text()
    used = set(re.findall(r'(?:report|fatal)\(\s*"([a-z0-9-]+)"', text)) | {"tcgen05-fence", "tmem-dealloc-race", "proxy-fence"}
    assert used <= set(hazards.KINDS), used - set(hazards.KINDS)
    assert all(level in ("default", "strict", "both") for level, _ in hazards.KINDS.values())


@pytest.mark.parametrize("warps, checks, found", [(4, "strict", False), (3, "strict", True), (3, "default", False)])
def test_setmaxnreg_of_part_of_a_warpgroup(warps, checks, found):
    body = f"setp.ge.u32 %p1, %tx, {32 * warps};\n@%p1 bra KEEPS;\nsetmaxnreg.dec.sync.aligned.u32 64;\nKEEPS:\n"
    text, record, error = run(body, block=256, checks=checks)
    assert error is None
    got = {(h.kind, h.ptx_line) for h in record.hazards}
    assert got == ({("setmaxnreg", line_of(text, "setmaxnreg"))} if found else set())


def test_a_write_after_a_write_names_the_earlier_one():
    text = kernel("mov.u32 %r2, buf;\nsetp.ge.u32 %p1, %tx, 32;\n@%p1 bra SECOND;\nst.shared.u32 [%r2], 1;\nbra DONE;\nSECOND:\n"
                  "st.shared.u32 [%r2], 2;\nDONE:\n", shared=".shared .align 4 .b8 buf[64];")
    record = run_ptx(text, 1, 64, [np.zeros(4, np.uint32)])
    assert [{h.ptx_line, h.other_line} for h in record.hazards] == [{line_of(text, "[%r2], 1"), line_of(text, "[%r2], 2")}]


def test_local_memory_that_nothing_wrote():
    body = "mov.u32 %r2, loc;\nst.local.u16 [%r2], 1;\nld.local.u32 %r1, [%r2];\nld.local.u32 %r3, [%r2+4];\n"
    text, record, error = run(body, shared=".local .align 8 .b8 loc[16];")
    assert error is None
    assert {(h.kind, h.ptx_line) for h in record.hazards} == {("uninitialised-local", line_of(text, "[%r2+4]"))}


READ_BACK = """mov.u32 %r2, buf;
setp.ne.u32 %p1, %tx, 0;
@%p1 bra DONE;
st.shared.u32 [%r2], 7;
st.shared.u32 [%r2+4], 7;
st.shared.u32 [%r2+8], 7;
st.shared.u32 [%r2+12], 7;
fence.proxy.async.shared::cta;
cp.async.bulk.global.shared::cta.bulk_group [%a0], [%r2], 16;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
ld.global.u32 %r1, [%a0];
st.global.u32 [%a0+64], %r1;
DONE:
"""


@pytest.mark.parametrize("load", ["ld.global.u32", "ld.volatile.global.u32"])
@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
def test_a_store_that_only_its_reads_were_waited_for(schedule, load):
    """cp.async.bulk.wait_group.read frees the shared memory; what a thread then reads of the destination may be old, and is."""
    for wait, clean in (("wait_group 0", True), ("wait_group.read 0", False)):
        text = kernel(READ_BACK.replace("wait_group 0", wait).replace("ld.global.u32", load), shared=".shared .align 16 .b8 buf[16];")
        out = np.zeros(64, np.uint32)
        record = run_ptx(text, 1, 32, [out], schedule=schedule)
        found = {(h.kind, h.ptx_line, h.other_line) for h in record.hazards}
        race = ("race-read-after-write-global", line_of(text, load), line_of(text, "cp.async.bulk.global"))
        assert found == (set() if clean else {race}) and out[0] == 7
        assert out[16] == (7 if clean or schedule == "eager" else 0) or (schedule == "random" and not clean)


# ---- what is under way when a CTA exits
AT_EXIT = """mov.u32 %r2, buf;
mov.u32 %r3, bar;
setp.ne.u32 %p1, %tx, 0;
@%p1 bra ISSUED;
mbarrier.init.shared::cta.b64 [%r3], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 128;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%a0], 128, [%r3];
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
@!%p2 bra WAIT;
ISSUED:
"""


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
def test_a_copy_under_way_at_exit(schedule):
    shared = ".shared .align 128 .b8 buf[128];\n.shared .align 8 .b64 bar;"
    _, record, error = run(AT_EXIT, shared=shared, schedule=schedule)
    assert error is None and record.hazards == []
    text, record, error = run(AT_EXIT.replace("@!%p2 bra WAIT;\n", "").replace("mbarrier.try", "// "), shared=shared, schedule=schedule)
    assert error is None and {(h.kind, h.ptx_line) for h in record.hazards} == {("shared-at-exit", line_of(text, "cp.async.bulk"))}


LATE_ARRIVAL = """mov.u32 %r2, bar;
setp.ne.u32 %p1, %tx, 0;
@%p1 bra READY;
mbarrier.init.shared::cta.b64 [%r2], 2;
fence.mbarrier_init.release.cluster;
READY:
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mov.u32 %r4, %cluster_ctarank;
xor.b32 %r4, %r4, 1;
mapa.shared::cluster.u32 %r3, %r2, %r4;
@%p1 bra ARRIVED;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3];
ARRIVED:
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
def test_an_arrival_at_a_cta_that_may_have_exited(schedule):
    how = dict(shared=".shared .align 8 .b64 bar;", grid=2, cluster=2, block=32, schedule=schedule)
    _, record, error = run(LATE_ARRIVAL, **how)
    assert error is None and record.hazards == []
    text, record, error = run(LATE_ARRIVAL.rsplit("barrier.cluster.arrive", 1)[0], **how)
    assert error is None and {(h.kind, h.ptx_line) for h in record.hazards} == {("dsmem-after-exit", line_of(text, "mbarrier.arrive"))}


@pytest.mark.parametrize("space, found", [("", False), (".global", False), (".shared::cta", True)])
def test_a_proxy_fence_of_another_space(space, found):
    """A global buffer that a thread wrote and a bulk copy reads."""
    fence = f"fence.proxy.async{space};\nmbarrier.arrive.expect_tx"
    body = AT_EXIT.replace("mbarrier.init", "st.global.u32 [%a0], %tx;\nmbarrier.init").replace("mbarrier.arrive.expect_tx", fence)
    text, record, error = run(body, shared=".shared .align 128 .b8 buf[128];\n.shared .align 8 .b64 bar;")
    assert error is None
    want = {("proxy-fence", line_of(text, "cp.async.bulk"))} if found else set()
    assert {(h.kind, h.ptx_line) for h in record.hazards} == want


@pytest.mark.parametrize("arrivals", [1, 2])
def test_a_phase_begun_at_exit(arrivals):
    body = "mov.u32 %r2, bar;\nsetp.ne.u32 %p1, %tx, 0;\n@%p1 bra DONE;\nmbarrier.init.shared::cta.b64 [%r2], 2;\n"
    body += "mbarrier.arrive.shared::cta.b64 _, [%r2];\n" * arrivals + "DONE:\n"
    for checks in ("default", "strict"):
        text, record, error = run(body, shared=".shared .align 8 .b64 bar;", checks=checks)
        found = {(h.kind, h.ptx_line) for h in record.hazards}
        begun = checks == "strict" and arrivals == 1
        assert error is None and found == ({("mbarrier-arrivals-at-exit", line_of(text, "mbarrier.init"))} if begun else set())


def test_a_commit_by_a_thread_that_issued_nothing():
    """Lane 1 commits what lane 0 issued: on hardware that commit tracks nothing."""
    from faults import KERNELS

    kernel = KERNELS["cp_a"]
    alone = "setp.ne.u32 %p, %me, 0;\n    @%p bra ISSUED;"
    text = kernel.text().replace(alone, "setp.gt.u32 %p, %me, 1; @%p bra ISSUED;\n    setp.ne.u32 %p, %me, 0;")
    for op in ("cp", "mma", "commit"):
        text = text.replace(f"    tcgen05.{op}.", f"    @!%p tcgen05.{op}.")
    assert kernel.run(text).hazards == []
    text = text.replace("@!%p tcgen05.commit", "@%p tcgen05.commit").replace("@%p tcgen05.commit", "@!%p tcgen05.commit", 1)
    found = {(h.kind, h.ptx_line) for h in kernel.run(text).hazards}
    assert found == {("tcgen05-commit", line_of(text, "@%p tcgen05.commit"))}


# ---- what the ISA pipelines in one tensor pipe (9.7.16.6.2)
@pytest.mark.parametrize(
    "earlier, later, ordered",
    [
        (("cp", 1, "128x256b"), ("mma", 1, (8, 8, 0)), True),
        (("shift", 1, None), ("mma", 1, (8, 8, 0)), True),
        (("mma", 1, (8, 8, 0)), ("mma", 1, (8, 8, 0)), True),
        (("mma", 1, (8, 8, 0)), ("shift", 1, None), True),
        (("shift", 1, None), ("cp", 1, "4x256b"), True),
        (("shift", 1, None), ("cp", 1, "128x256b"), False),
        (("mma", 1, (8, 8, 0)), ("cp", 1, "128x256b"), False),
        (("cp", 1, "128x256b"), ("cp", 1, "128x256b"), False),
        (("cp", 1, "128x256b"), ("shift", 1, None), False),
        (("mma", 1, (8, 8, 0)), ("mma", 1, (16, 8, 0)), False),  # another N
        (("mma", 1, (8, 8, 0)), ("mma", 1, (8, 8, 64)), False),  # another accumulator
        (("cp", 1, "128x256b"), ("mma", 2, (8, 8, 0)), False),  # another cta_group
    ],
)
def test_pipelined_pairs(earlier, later, ordered):
    from cute_kernels.emulator.machine.ops_tensor import pipelined

    assert pipelined(earlier, later) is ordered
