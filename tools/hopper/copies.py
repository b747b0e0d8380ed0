"""Kernels without tensor maps or tensor cores: mbarrier rings with bulk copies, clusters, cp.async."""

from __future__ import annotations

import numpy as np

from .case import Case, kernel, wait


def ring(tiles: int = 23, stages: int = 3, seed: int = 0) -> Case:
    """y[tile] = x[0] + ... + x[tile], 512 floats to a tile. Warp 4 fetches into a ring of `stages` (full, empty), warps 0-3 add
    and hand over to warp 5 by a second ring of 2 (filled, drained), which writes out. Integers: every sum is exact."""
    tile = 2048
    rng = np.random.default_rng(seed)
    x = rng.integers(-9, 10, (2, tiles, tile // 4)).astype(np.float32)
    y = np.zeros_like(x)
    bars = (stages + 2) * tile
    # full[i] at 8 i, empty[i] behind them, then filled[2], drained[2].
    filled = 16 * stages
    step = """    add.u32 %slot, %slot, 1;
    setp.eq.u32 %q, %slot, {n};
    @%q xor.b32 %par, %par, 1;
    @%q mov.u32 %slot, 0;
    add.u32 %k, %k, 1;
    setp.lt.u32 %q, %k, %n;
    @%q bra {to};"""
    body = f"""
    mov.u32 %me, %tid.x;
    shr.u32 %warp, %me, 5;
    mov.u32 %base, smem;
    add.u32 %bars, %base, {bars};
    ld.param.u32 %n, [tiles];
    ld.param.u64 %px, [x];
    ld.param.u64 %py, [y];
    mov.u32 %t, %ctaid.x;
    mul.lo.u32 %t, %t, %n;
    mul.wide.u32 %wide, %t, {tile};
    add.u64 %px, %px, %wide;
    add.u64 %py, %py, %wide;
    setp.ne.u32 %p, %me, 0;
    @%p bra INITIALISED;
{chr(10).join(f"    mbarrier.init.shared::cta.b64 [%bars+{8 * i}], 1;" for i in range(stages))}
{chr(10).join(f"    mbarrier.init.shared::cta.b64 [%bars+{8 * (stages + i)}], 4;" for i in range(stages))}
{chr(10).join(f"    mbarrier.init.shared::cta.b64 [%bars+{filled + 8 * i}], 128;" for i in range(2))}
{chr(10).join(f"    mbarrier.init.shared::cta.b64 [%bars+{filled + 16 + 8 * i}], 1;" for i in range(2))}
    fence.mbarrier_init.release.cluster;
INITIALISED:
    bar.sync 0;
    mov.u32 %k, 0;
    mov.u32 %slot, 0;
    mov.u32 %par, 0;
    and.b32 %lane, %me, 31;
    setp.eq.u32 %leader, %lane, 0;
    setp.eq.u32 %p, %warp, 4;
    @%p bra PRODUCER;
    setp.eq.u32 %p, %warp, 5;
    @%p bra WRITER;

    // Consumers: four floats a thread; the second ring's slot and parity run on their own.
    mov.u32 %slot2, 0;
    mov.u32 %par2, 1;
    mov.f32 %s0, 0f00000000;
    mov.f32 %s1, 0f00000000;
    mov.f32 %s2, 0f00000000;
    mov.f32 %s3, 0f00000000;
    shl.b32 %mine, %me, 4;
CONSUME:
    shl.b32 %t, %slot, 3;
    add.u32 %bar, %bars, %t;
{wait("FULL", "%bar", "%par")}
    mad.lo.u32 %t, %slot, {tile}, %base;
    add.u32 %t, %t, %mine;
    ld.shared.v4.f32 {{%v0, %v1, %v2, %v3}}, [%t];
    bar.warp.sync 0xffffffff;
    @%leader mbarrier.arrive.shared::cta.b64 _, [%bar+{8 * stages}];
    add.f32 %s0, %s0, %v0;
    add.f32 %s1, %s1, %v1;
    add.f32 %s2, %s2, %v2;
    add.f32 %s3, %s3, %v3;
    shl.b32 %t, %slot2, 3;
    add.u32 %bar, %bars, %t;
    add.u32 %bar, %bar, {filled};
    add.u32 %t, %bar, 16;
{wait("DRAINED", "%t", "%par2")}
    mad.lo.u32 %t, %slot2, {tile}, %base;
    add.u32 %t, %t, %mine;
    st.shared.v4.f32 [%t+{stages * tile}], {{%s0, %s1, %s2, %s3}};
    fence.proxy.async.shared::cta;
    mbarrier.arrive.shared::cta.b64 _, [%bar];
    xor.b32 %slot2, %slot2, 1;
    setp.eq.u32 %q, %slot2, 0;
    @%q xor.b32 %par2, %par2, 1;
{step.format(n=stages, to="CONSUME")}
    bra END;

PRODUCER:
    @!%leader bra END;
    mov.u32 %par, 1;
FETCH:
    shl.b32 %t, %slot, 3;
    add.u32 %bar, %bars, %t;
    add.u32 %t, %bar, {8 * stages};
{wait("EMPTY", "%t", "%par")}
    mad.lo.u32 %t, %slot, {tile}, %base;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {tile};
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%t], [%px], {tile}, [%bar];
    add.u64 %px, %px, {tile};
{step.format(n=stages, to="FETCH")}
    bra END;

WRITER:
    @!%leader bra END;
WRITE:
    shl.b32 %t, %slot, 3;
    add.u32 %bar, %bars, %t;
    add.u32 %bar, %bar, {filled};
{wait("FILLED", "%bar", "%par")}
    mad.lo.u32 %t, %slot, {tile}, %base;
    add.u32 %t, %t, {stages * tile};
    cp.async.bulk.global.shared::cta.bulk_group [%py], [%t], {tile};
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
    mbarrier.arrive.shared::cta.b64 _, [%bar+16];
    add.u64 %py, %py, {tile};
{step.format(n=2, to="WRITE")}
    cp.async.bulk.wait_group 0;
END:"""
    registers = """    .reg .pred %p, %q, %ok, %leader;
    .reg .b32 %me, %warp, %lane, %base, %bars, %bar, %n, %k, %slot, %par, %slot2, %par2, %t, %mine;
    .reg .f32 %s<4>, %v<4>;
    .reg .b64 %px, %py, %wide;"""
    want = np.cumsum(x, axis=1, dtype=np.float64).astype(np.float32)
    params = ".param .u64 x, .param .u64 y, .param .u32 tiles"
    return Case(
        f"ring {stages} stages, {tiles} tiles", kernel(params, registers, body, 192), (2, 1, 1), 192, [x, y, tiles],
        [(y, want, 0.0)], bars + 16 * stages + 32, features="mbarrier rings, bulk copies",
    )  # fmt: skip


# ------------------------------------------------------------------ clusters


def cluster_softmax(rows: int = 3, seed: int = 0) -> Case:
    """Softmax of rows of 2048 floats, 512 to each CTA of a cluster of four. The maxima travel by st.async into every CTA's inbox,
    whose mbarrier counts their bytes; the sums are read from the peers' shared memory between two cluster barriers."""
    rng = np.random.default_rng(seed)
    x = (3 * rng.standard_normal((rows, 2048))).astype(np.float32)
    y = np.zeros_like(x)
    butterfly = "\n".join(
        f"    shfl.sync.bfly.b32 %w, %m, {d}, 31, 0xffffffff;\n    {{op}}.f32 %m, %m, %w;" for d in (16, 8, 4, 2, 1)
    )
    # Shared memory: per-warp values at 0, the inbox at 64, this CTA's sum at 96, the inbox's barrier at 128.
    inside = """{fold}
    shl.b32 %t, %warp, 2;
    add.u32 %t, %base, %t;
    @%leader st.shared.f32 [%t], %m;
    bar.sync 0;
    ld.shared.v4.f32 {{%a0, %a1, %a2, %a3}}, [%base];
    {op}.f32 %a0, %a0, %a1;
    {op}.f32 %a2, %a2, %a3;
    {op}.f32 %m, %a0, %a2;"""
    send = "\n".join(
        f"""    mapa.shared::cluster.u32 %t, %mine, {r};
    mapa.shared::cluster.u32 %u, %bar, {r};
    st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%t], %bits, [%u];"""
        for r in range(4)
    )
    gather = "\n".join(
        f"    mapa.shared::cluster.u32 %t, %base, {r};\n    ld.shared::cluster.f32 %a{r}, [%t+96];" for r in range(4)
    )
    body = f"""
    mov.u32 %me, %tid.x;
    shr.u32 %warp, %me, 5;
    and.b32 %lane, %me, 31;
    setp.eq.u32 %leader, %lane, 0;
    mov.u32 %base, smem;
    add.u32 %bar, %base, 128;
    mov.u32 %rank, %cluster_ctarank;
    mov.u32 %t, %ctaid.x;
    shl.b32 %t, %t, 11;
    shl.b32 %u, %me, 4;
    add.u32 %t, %t, %u;
    cvt.u64.u32 %wide, %t;
    ld.param.u64 %px, [x];
    ld.param.u64 %py, [y];
    add.u64 %px, %px, %wide;
    add.u64 %py, %py, %wide;
    setp.ne.u32 %p, %me, 0;
    @%p bra INITIALISED;
    mbarrier.init.shared::cta.b64 [%bar], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 16;
INITIALISED:
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    ld.global.v4.f32 {{%v0, %v1, %v2, %v3}}, [%px];
    max.f32 %m, %v0, %v1;
    max.f32 %w, %v2, %v3;
    max.f32 %m, %m, %w;
{inside.format(op="max", fold=butterfly.format(op="max"))}
    @%p bra SENT;
    shl.b32 %t, %rank, 2;
    add.u32 %mine, %base, %t;
    add.u32 %mine, %mine, 64;
    mov.b32 %bits, %m;
{send}
SENT:
{wait("MAXIMA", "%bar", "0", ".acquire.cluster")}
    ld.shared.v4.f32 {{%a0, %a1, %a2, %a3}}, [%base+64];
    max.f32 %a0, %a0, %a1;
    max.f32 %a2, %a2, %a3;
    max.f32 %top, %a0, %a2;
    mul.f32 %top, %top, 0f3FB8AA3B;
    neg.f32 %top, %top;
{chr(10).join(f"    fma.rn.f32 %v{i}, %v{i}, 0f3FB8AA3B, %top;{chr(10)}    ex2.approx.f32 %v{i}, %v{i};" for i in range(4))}
    add.f32 %m, %v0, %v1;
    add.f32 %w, %v2, %v3;
    add.f32 %m, %m, %w;
    bar.sync 0;
{inside.format(op="add", fold=butterfly.format(op="add"))}
    @!%p st.shared.f32 [%base+96], %m;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
{gather}
    add.f32 %a0, %a0, %a1;
    add.f32 %a2, %a2, %a3;
    add.f32 %a0, %a0, %a2;
{chr(10).join(f"    div.rn.f32 %v{i}, %v{i}, %a0;" for i in range(4))}
    st.global.v4.f32 [%py], {{%v0, %v1, %v2, %v3}};
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;"""
    registers = """    .reg .pred %p, %ok, %leader;
    .reg .b32 %me, %warp, %lane, %base, %bar, %rank, %t, %u, %mine, %bits;
    .reg .f32 %v<4>, %a<4>, %m, %w, %top;
    .reg .b64 %px, %py, %wide;"""
    z = x.astype(np.float64)
    e = np.exp(z - z.max(1, keepdims=True))
    want = e / e.sum(1, keepdims=True)
    # x log2(e) in float32 has an error of |x| 2^-23; the rest (ex2.approx 2^-22, 2048 terms added in a tree) is less.
    return Case(
        f"cluster_softmax {rows} rows", kernel(".param .u64 x, .param .u64 y", registers, body, 128, 4), (4 * rows, 1, 1), 128,
        [x, y], [(y, want, want * 2.0**-18 + 1e-30)], 192, 4, features="cluster, st.async, DSMEM",
    )  # fmt: skip


# ------------------------------------------------------------------ cp.async


def transpose(m: int = 150, n: int = 200, seed: int = 0) -> Case:
    """[m, n] 16-bit -> [n, m]: a CTA takes 64 rows and walks along them in 64 columns, the next tile in flight (two groups of
    cp.async, zero fill past the edges), through ldmatrix.trans and stmatrix. Even m; n a multiple of 8."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 65536, (m, n)).astype(np.uint16)
    y = np.zeros((n, m), np.uint16)
    pitch = 144  # bytes of a row in shared memory
    tile = 64 * pitch
    fetch = []
    for i in range(4):  # 512 chunks of 16 bytes, 128 a turn
        fetch.append(f"""    shr.u32 %r, %me, 3;
    add.u32 %r, %r, {16 * i};
    and.b32 %c, %me, 7;
    shl.b32 %c, %c, 3;
    mad.lo.u32 %to, %r, {pitch}, %into;
    mad.lo.u32 %to, %c, 2, %to;
    add.u32 %r, %r, %row0;
    add.u32 %c, %c, %col;
    setp.lt.u32 %p, %r, {m};
    setp.lt.and.u32 %p, %c, {n}, %p;
    mad.lo.u32 %t, %r, {n}, %c;
    selp.b32 %t, %t, 0, %p;
    selp.b32 %size, 16, 0, %p;
    mul.wide.u32 %wide, %t, 2;
    add.u64 %wide, %px, %wide;
    cp.async.cg.shared.global [%to], [%wide], 16, %size;""")
    fetch.append("    cp.async.commit_group;")
    turn = []
    for r in range(0, 64, 16):
        turn.append(f"""    add.u32 %t, %load, {r * pitch};
    ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{%v0, %v1, %v2, %v3}}, [%t];
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%store+{2 * r}], {{%v0, %v1, %v2, %v3}};""")
    spill = []
    for i in range(16):  # 64 rows of 32 words, 128 words a turn
        spill.append(f"""    shr.u32 %r, %me, 5;
    add.u32 %r, %r, {4 * i};
    and.b32 %c, %me, 31;
    mad.lo.u32 %t, %r, {pitch}, %done;
    mad.lo.u32 %t, %c, 4, %t;
    ld.shared.b32 %v0, [%t];
    add.u32 %r, %r, %col;
    mad.lo.u32 %c, %c, 2, %row0;
    setp.lt.u32 %p, %r, {n};
    setp.lt.and.u32 %p, %c, {m}, %p;
    mad.lo.u32 %t, %r, {m}, %c;
    mul.wide.u32 %wide, %t, 2;
    add.u64 %wide, %py, %wide;
    @%p st.global.b32 [%wide], %v0;""")
    new = "\n"
    body = f"""
    mov.u32 %me, %tid.x;
    mov.u32 %base, smem;
    ld.param.u64 %px, [x];
    ld.param.u64 %py, [y];
    mov.u32 %row0, %ctaid.x;
    shl.b32 %row0, %row0, 6;
    add.u32 %done, %base, {2 * tile};
    mov.u32 %col, 0;
    mov.u32 %into, %base;
{new.join(fetch)}
    // Lane l names row l % 8 of matrix l / 8: matrices 1 and 3 eight rows on, matrices 2 and 3 eight columns on.
    and.b32 %r, %me, 7;
    shr.u32 %t, %me, 3;
    and.b32 %t, %t, 1;
    shl.b32 %t, %t, 3;
    shr.u32 %c, %me, 4;
    and.b32 %c, %c, 1;
    shl.b32 %c, %c, 3;
    shr.u32 %w, %me, 5;
    mad.lo.u32 %c, %w, 16, %c;
    add.u32 %size, %r, %t;
    mul.lo.u32 %size, %size, {pitch};
    mad.lo.u32 %lane_load, %c, 2, %size;
    add.u32 %c, %c, %r;
    mul.lo.u32 %c, %c, {pitch};
    mad.lo.u32 %store, %t, 2, %c;
    add.u32 %store, %store, %done;
    mov.u32 %stage, 0;
TILE:
    // The next tile goes to the other stage; its readers of two turns ago are behind the barrier at the end of the turn.
    add.u32 %col, %col, 64;
    xor.b32 %stage, %stage, 1;
    mad.lo.u32 %into, %stage, {tile}, %base;
{new.join(fetch)}
    sub.u32 %col, %col, 64;
    cp.async.wait_group 1;
    bar.sync 0;
    xor.b32 %t, %stage, 1;
    mad.lo.u32 %load, %t, {tile}, %base;
    add.u32 %load, %load, %lane_load;
{new.join(turn)}
    bar.sync 0;
{new.join(spill)}
    bar.sync 0;
    add.u32 %col, %col, 64;
    setp.lt.u32 %p, %col, {n};
    @%p bra TILE;
    cp.async.wait_all;"""
    registers = """    .reg .pred %p;
    .reg .b32 %me, %base, %row0, %col, %r, %c, %t, %w, %to, %into, %size, %stage, %load, %lane_load, %store, %done, %v<4>;
    .reg .b64 %px, %py, %wide;"""
    return Case(
        f"transpose {m} x {n}", kernel(".param .u64 x, .param .u64 y", registers, body, 128), (-(-m // 64), 1, 1), 128, [x, y],
        [(y, x.T.copy(), 0.0)], 3 * tile, features="cp.async, ldmatrix, stmatrix",
    )  # fmt: skip
