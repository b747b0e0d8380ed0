# ruff: noqa: E501  (assembly reads better unbroken)
"""Warps, barriers, memories and asynchronous copies on hand-written PTX, under all schedules."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from ptx_harness import kernel

from cute_kernels.emulator import TensorMap, run_ptx

SCHEDULES = ["eager", "lazy", "random"]
STORE = "mul.wide.u32 %d1, %tx, 4;\nadd.u64 %d1, %a0, %d1;\nst.global.u32 [%d1], %r1;"
WAIT = "{{\n.reg .pred W;\nL: mbarrier.try_wait.parity.shared.b64 W, [{bar}], {parity};\n@W bra D;\nbra L;\nD:\n}}\n"


@pytest.fixture(params=SCHEDULES)
def schedule(request):
    return request.param


def test_divergent_loop():
    """Each lane iterates its own number of times; all meet again."""
    body = (
        "mov.u32 %r1, 0;\nmov.u32 %r2, %tx;\nTOP: setp.eq.u32 %p1, %r2, 0;\n@%p1 bra OUT;\nadd.u32 %r1, %r1, %r2;\nsub.u32 %r2, %r2, 1;\n"
        "bra TOP;\nOUT: activemask.b32 %r3;\npopc.b32 %r3, %r3;\nmad.lo.u32 %r1, %r3, 1000, %r1;\n" + STORE
    )
    out = np.zeros(64, np.uint32)
    run_ptx(kernel(body), 1, 64, [out])
    assert out.tolist() == [32000 + i * (i + 1) // 2 for i in range(64)]


def test_lanes_exit_early_and_partial_warps():
    body = "setp.gt.u32 %p1, %tx, 20;\n@%p1 exit;\nactivemask.b32 %r1;\n" + STORE
    out = np.zeros(40, np.uint32)
    run_ptx(kernel(body), 1, 40, [out])
    assert out.tolist() == [2**21 - 1] * 21 + [0] * 19


def test_diverged_halves_that_wait_for_each_other():
    """Independent thread scheduling: one half spins until the other half has stored."""
    shared = ".shared .align 4 .b32 flag;"
    body = (
        "setp.ne.u32 %p1, %tx, 0;\n@%p1 bra OTHERS;\nSPIN: ld.volatile.shared.u32 %r2, [flag];\nsetp.ne.u32 %p2, %r2, 9;\n@%p2 bra SPIN;\nbra J;\n"
        "OTHERS: setp.eq.u32 %p3, %tx, 5;\n@%p3 st.volatile.shared.u32 [flag], 9;\nJ: mov.u32 %r1, 1;\n" + STORE
    )
    out = np.zeros(32, np.uint32)
    run_ptx(kernel(body, shared=shared), 1, 32, [out], checks="off")
    assert out.all()


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffles(mode):
    b, c = {"up": (3, 0), "down": (5, 31), "bfly": (6, 31), "idx": (9, 0x181F)}[mode]
    body = (
        f"add.u32 %r2, %tx, 100;\nshfl.sync.{mode}.b32 %r1|%p1, %r2, {b}, {c}, -1;\nselp.u32 %r3, 1000, 0, %p1;\nadd.u32 %r1, %r1, %r3;\n"
        + STORE
    )
    out = np.zeros(32, np.uint32)
    run_ptx(kernel(body), 1, 32, [out])
    want = []
    for lane in range(32):
        j = {"up": lane - 3, "down": lane + 5, "bfly": lane ^ 6, "idx": (lane & 0x18) | 9 & 7}[mode]
        ok = j >= 0 if mode == "up" else j <= (31 if mode != "idx" else lane & 0x18 | 7)
        want.append((j if ok else lane) + 100 + 1000 * ok)
    assert out.tolist() == want


def test_votes_match_redux_elect():
    body = (
        "and.b32 %r2, %tx, 3;\nsetp.eq.u32 %p1, %r2, 1;\nvote.sync.ballot.b32 %r3, %p1, -1;\nmatch.any.sync.b32 %r4, %r2, -1;\n"
        "redux.sync.add.u32 %r5, %r2, -1;\nelect.sync %r6|%p2, -1;\nselp.u32 %r7, 1, 0, %p2;\n"
        "xor.b32 %r1, %r3, %r4;\nadd.u32 %r1, %r1, %r5;\nadd.u32 %r1, %r1, %r7;\n" + STORE
    )
    out = np.zeros(32, np.uint32)
    run_ptx(kernel(body), 1, 32, [out])
    ballot = 0x22222222
    assert out.tolist() == [((ballot ^ (0x11111111 << (i & 3))) + 48 + (i == 0)) & 0xFFFFFFFF for i in range(32)]


def test_block_reduction(schedule):
    shared = ".shared .align 4 .b32 buf[128];"
    body = (
        "mov.u32 %r2, buf;\nmad.lo.u32 %r3, %tx, 4, %r2;\nmul.lo.u32 %r4, %tx, %tx;\nst.shared.u32 [%r3], %r4;\nmov.u32 %r5, 64;\n"
        "T: bar.sync 0;\nsetp.ge.u32 %p1, %tx, %r5;\n@%p1 bra N;\nmad.lo.u32 %r6, %r5, 4, %r3;\nld.shared.u32 %r7, [%r6];\nld.shared.u32 %r8, [%r3];\n"
        "add.u32 %r8, %r8, %r7;\nst.shared.u32 [%r3], %r8;\nN: shr.u32 %r5, %r5, 1;\nsetp.ne.u32 %p2, %r5, 0;\n@%p2 bra T;\nbar.sync 0;\n"
        "ld.shared.u32 %r1, [buf];\n" + STORE
    )
    out = np.zeros(128, np.uint32)
    record = run_ptx(kernel(body, shared=shared), 1, 128, [out], schedule=schedule, seed=3)
    assert out.tolist() == [sum(i * i for i in range(128))] * 128 and record.hazards == []


def test_barrier_reduction():
    body = "setp.lt.u32 %p1, %tx, 37;\nbar.red.popc.u32 %r1, 1, %p1;\n" + STORE
    out = np.zeros(64, np.uint32)
    run_ptx(kernel(body), 1, 64, [out])
    assert out.tolist() == [37] * 64


def test_atomics_across_ctas(schedule):
    body = (
        "atom.global.add.u32 %r2, [%a0], 1;\nred.global.max.u32 [%a0+4], %tx;\natom.global.cas.b32 %r3, [%a0+8], 0, 77;\n"
        "mov.f32 %r4, 0f3F000000;\nred.global.add.f32 [%a0+12], %r4;\n"
    )
    out = np.zeros(4, np.uint32)
    record = run_ptx(kernel(body), 3, 64, [out], schedule=schedule)
    assert out[:3].tolist() == [192, 63, 77] and out[3:].view(np.float32)[0] == 96 and record.hazards == []


def test_inter_cta_flag_needs_a_second_resident_cta():
    """CTA 0 waits for CTA 1: residency grows when everyone that runs only spins."""
    body = (
        "mov.u32 %r2, %ctaid.x;\nsetp.ne.u32 %p1, %r2, 0;\n@%p1 bra ONE;\nS: ld.acquire.gpu.global.u32 %r3, [%a0];\nsetp.eq.u32 %p2, %r3, 0;\n"
        "@%p2 bra S;\nld.global.u32 %r4, [%a0+4];\nst.global.u32 [%a0+8], %r4;\nexit;\nONE: st.global.u32 [%a0+4], 55;\n"
        "st.release.gpu.global.u32 [%a0], 1;\n"
    )
    out = np.zeros(4, np.uint32)
    record = run_ptx(kernel(body), 2, 1, [out])
    assert out.tolist() == [1, 55, 55, 0] and record.hazards == []


def test_local_memory_and_wide_vectors():
    body = (
        "mov.u64 %d2, stack;\nadd.u64 %d3, %d2, 4;\nst.local.u32 [%d3], %tx;\ncvta.local.u64 %d4, %d2;\nld.u32 %r1, [%d4+4];\n"
        "mul.wide.u32 %d5, %tx, 32;\nadd.u64 %d5, %a1, %d5;\nld.global.v8.b32 {%r2,%r3,%r4,%r5,%r6,%r7,%r8,%r9}, [%d5];\n"
        "add.u32 %r1, %r1, %r9;\n" + STORE
    )
    out, x = np.zeros(32, np.uint32), np.arange(256, dtype=np.uint32)
    run_ptx(kernel(body, params=2, shared=".local .align 8 .b8 stack[16];"), 1, 32, [out, x])
    assert out.tolist() == [i + 8 * i + 7 for i in range(32)]


PIPELINE = (
    """
mov.u32 %r2, bars;
mov.u32 %r3, tile;
setp.ne.u32 %p1, %tx, 0;
@%p1 bra READY;
mbarrier.init.shared.b64 [%r2], 1;
fence.mbarrier_init.release.cluster;
READY:
bar.sync 0;
@%p1 bra CONSUME;
mbarrier.arrive.expect_tx.shared.b64 %d9, [%r2], 1024;
COPY
CONSUME:
WAIT
mad.lo.u32 %r4, %tx, 4, %r3;
ld.shared.u32 %r1, [%r4];
"""
    + STORE
)


def pipeline(copy: str, wait: str | None = None) -> str:
    shared = ".shared .align 8 .b64 bars;\n.shared .align 1024 .b32 tile[256];"
    wait = WAIT.format(bar="%r2", parity=0) if wait is None else wait
    return shared, PIPELINE.replace("COPY", copy).replace("WAIT", wait)


BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%a1], 1024, [%r2];"


def test_bulk_copy(schedule):
    shared, body = pipeline(BULK)
    out, x = np.zeros(64, np.uint32), np.arange(256, dtype=np.uint32) * 3
    record = run_ptx(kernel(body, params=2, shared=shared), 1, 64, [out, x], schedule=schedule)
    assert (out == x[:64]).all() and record.hazards == [] and record.counters.bytes["bulk-load"] == 1024


def test_tensor_copy_in_and_out(schedule):
    """A 128B-swizzled tile with out-of-range rows comes in, and goes back out through the same map."""
    src = np.arange(24 * 64, dtype=np.uint16).reshape(24, 64)
    dst = np.zeros((24, 64), np.uint16)
    text = kernel(
        """
mov.u32 %r2, bars;
mov.u32 %r3, tile;
mov.u64 %d1, t0;
mov.u64 %d2, t1;
mov.b32 %r6, 16;
mov.b32 %r7, 0;
setp.ne.u32 %p1, %tx, 0;
@%p1 exit;
mbarrier.init.shared.b64 [%r2], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 %d9, [%r2], 2048;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r3], [%d1, {%r7, %r6}], [%r2];
"""
        + WAIT.format(bar="%r2", parity=0)
        + """
fence.proxy.async.shared::cta;
mov.b32 %r6, 8;
cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d2, {%r7, %r6}], [%r3];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
""",
        params=0,
        shared=".shared .align 8 .b64 bars;\n.shared .align 1024 .b8 tile[2048];",
    ).replace("k()", "k(.param .align 64 .b8 t0[128], .param .align 64 .b8 t1[128])")
    maps = [TensorMap.tiled(a, box=(16, 64), swizzle="128B") for a in (src, dst)]
    record = run_ptx(text, 1, 32, maps, schedule=schedule)
    want = np.zeros((24, 64), np.uint16)
    want[8:16] = src[16:24]  # rows 24.. of the source are out of range: zeros
    assert (dst == want).all() and record.hazards == []


def test_cp_async_groups_and_zero_fill(schedule):
    shared = ".shared .align 16 .b32 tile[128];"
    body = (
        "mov.u32 %r3, tile;\nmad.lo.u32 %r4, %tx, 16, %r3;\nmul.wide.u32 %d2, %tx, 16;\nadd.u64 %d2, %a1, %d2;\nand.b32 %r5, %tx, 1;\n"
        "mul.lo.u32 %r5, %r5, 16;\ncp.async.cg.shared.global [%r4], [%d2], 16, %r5;\ncp.async.commit_group;\ncp.async.wait_group 0;\n"
        "ld.shared.u32 %r1, [%r4+12];\n" + STORE
    )
    out, x = np.zeros(32, np.uint32), np.arange(128, dtype=np.uint32)
    record = run_ptx(kernel(body, params=2, shared=shared), 1, 32, [out, x], schedule=schedule)
    assert out.tolist() == [4 * i + 3 if i & 1 else 0 for i in range(32)] and record.hazards == []


def test_cluster_shared_memory(schedule):
    """Each CTA stores to the other one's shared memory; st.async signals the other's mbarrier."""
    shared = ".shared .align 8 .b64 bar;\n.shared .align 8 .b32 box[2];"
    body = (
        "mov.u32 %r2, bar;\nmov.u32 %r3, box;\nmov.u32 %r4, %cluster_ctarank;\nsetp.ne.u32 %p1, %tx, 0;\n@%p1 bra B;\n"
        "mbarrier.init.shared.b64 [%r2], 1;\nmbarrier.arrive.expect_tx.shared.b64 %d9, [%r2], 4;\nfence.mbarrier_init.release.cluster;\n"
        "B: barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n@%p1 bra C;\nxor.b32 %r5, %r4, 1;\nmapa.shared::cluster.u32 %r6, %r3, %r5;\n"
        "mapa.shared::cluster.u32 %r7, %r2, %r5;\nadd.u32 %r8, %r4, 40;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r6], %r8, [%r7];\nC:\n"
        + WAIT.format(bar="%r2", parity=0)
        + "ld.shared.u32 %r1, [%r3];\nmov.u32 %r9, %ctaid.x;\nmad.lo.u32 %tx, %r9, 32, %tx;\n"
        + STORE
        + "\nbarrier.cluster.arrive;\nbarrier.cluster.wait;"
    )
    out = np.zeros(64, np.uint32)
    record = run_ptx(kernel(body, shared=shared), 2, 32, [out], cluster=(2, 1, 1), schedule=schedule)
    assert out.tolist() == [41] * 32 + [40] * 32 and record.hazards == []


def test_wgmma(schedule):
    """64x8x16 from shared memory without swizzle, against NumPy."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, s).astype(np.float16) for s in ((64, 16), (8, 16)))

    def core(x):  # K-major, no swizzle: 8x8 core matrices, K direction first
        return np.ascontiguousarray(x.reshape(-1, 8, 2, 8).transpose(0, 2, 1, 3)).reshape(-1)

    data = np.concatenate([core(a), core(b)]).view(np.uint32)
    copy = "\n".join(
        f"mad.lo.u32 %r4, %tx, 4, {512 * k};\ncvt.u64.u32 %d2, %r4;\nadd.u64 %d2, %a1, %d2;\nld.global.u32 %r5, [%d2];\nadd.u32 %r6, %r3, %r4;\nst.shared.u32 [%r6], %r5;"
        for k in range(4)
    ) + "\nsetp.lt.u32 %p2, %tx, 64;\nadd.u32 %r4, %tx, 512;\nmul.lo.u32 %r4, %r4, 4;\ncvt.u64.u32 %d2, %r4;\nadd.u64 %d2, %a1, %d2;\nadd.u32 %r6, %r3, %r4;\n@%p2 ld.global.u32 %r5, [%d2];\n@%p2 st.shared.u32 [%r6], %r5;"  # fmt: skip
    body = (
        "mov.u32 %r3, tile;\n" + copy + "\nfence.proxy.async.shared::cta;\nbar.sync 0;\n"
        "and.b32 %r7, %r3, 0x3FFFF;\nshr.u32 %r7, %r7, 4;\ncvt.u64.u32 %d3, %r7;\nmov.u64 %d4, 0x0000001000080000;\nor.b64 %d5, %d3, %d4;\n"
        "add.u64 %d6, %d5, 128;\nmov.b32 %r10, 0;\nmov.b32 %r11, 0;\nmov.b32 %r12, 0;\nmov.b32 %r13, 0;\nsetp.ne.u32 %p3, %tx, %tx;\n"
        "wgmma.fence.sync.aligned;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r10, %r11, %r12, %r13}, %d5, %d6, %p3, 1, 1, 0, 0;\n"
        "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
        "mul.wide.u32 %d7, %tx, 16;\nadd.u64 %d7, %a0, %d7;\nst.global.v4.b32 [%d7], {%r10, %r11, %r12, %r13};\n"
    )
    out = np.zeros((128, 4), np.float32)
    text = kernel(body, params=2, shared=".shared .align 128 .b32 tile[640];", target="sm_90a")
    record = run_ptx(text, 1, 128, [out, data], schedule=schedule)
    want = a.astype(np.float32) @ b.astype(np.float32).T
    got = np.zeros((64, 8), np.float32)
    for t in range(128):
        row, col = t // 32 * 16 + t % 32 // 4, 2 * (t % 4)
        got[row, col : col + 2], got[row + 8, col : col + 2] = out[t, :2], out[t, 2:]
    assert (got == want).all() and record.hazards == []


def test_schedules_give_the_same_bits():
    shared, body = pipeline(BULK)
    results = []
    for schedule, seed in [("eager", 0), ("lazy", 0), ("random", 1), ("random", 2)]:
        out = np.zeros(64, np.uint32)
        run_ptx(kernel(body, params=2, shared=shared), 1, 64, [out, np.arange(256, dtype=np.uint32)], schedule=schedule, seed=seed)
        results.append(out.tobytes())
    assert len(set(results)) == 1


def test_arguments_are_checked():
    text = kernel(STORE.replace("%r1", "%tx"))
    out = np.zeros(32, np.uint32)
    with pytest.raises(ValueError, match="takes 1 arguments, 2 given"):
        run_ptx(text, 1, 32, [out, out])
    with pytest.raises(ValueError, match="not a multiple of cluster"):
        run_ptx(text, 3, 32, [out], cluster=(2, 1, 1))
    with pytest.raises(ValueError, match="schedule must be"):
        run_ptx(text, 1, 32, [out], schedule="fast")
    with pytest.raises(TypeError, match="cannot take str"):
        run_ptx(text, 1, 32, ["x"])
    view = np.zeros(80, np.uint8)[3:67].view(np.uint32)[:8]  # unaligned storage is moved, and written back
    run_ptx(text, 1, 8, [view])
    assert view.tolist() == list(range(8))


def test_counters_by_role():
    body = "setp.ge.u32 %p1, %tx, 32;\n@%p1 bra B;\nmov.f32 %r2, 0f3F800000;\nex2.approx.ftz.f32 %r3, %r2;\nbra J;\nB: add.u32 %r2, %tx, 1;\nJ: bar.sync 0;"
    counters = run_ptx(kernel(body), 1, 64, [np.zeros(1, np.uint32)]).counters
    assert counters.exp2 == 32 and set(counters.roles) == {"warps 0", "warps 1"} and counters.barrier_waits == 2
    assert counters.total == sum(counters.lines.values())


def test_command_line(tmp_path):
    path = tmp_path / "k.ptx"
    path.write_text(kernel("mov.u32 %r1, %tx;\n" + STORE))
    base = [sys.executable, "-m", "cute_kernels.emulator", str(path)]
    listed = subprocess.run(base + ["--list", "--json"], capture_output=True, text=True)
    assert listed.returncode == 0 and json.loads(listed.stdout)["entries"]["k"]["st.global.u32"]["supported"]
    ran = subprocess.run(
        base + ["--grid", "1", "--arg", "u32:32", "--out", str(tmp_path), "--json"], capture_output=True, text=True
    )
    assert ran.returncode == 0 and json.loads(ran.stdout)["hazards"] == []
    assert np.load(tmp_path / "arg0.npy").tolist() == list(range(32))
    failed = subprocess.run(base + ["--grid", "1", "--arg", "u32:16"], capture_output=True, text=True)
    assert failed.returncode == 2 and "out-of-bounds global store" in failed.stdout
