"""One head of attention: the accumulator of one wgmma chain is, after the softmax, the register operand of the next."""

from __future__ import annotations

import numpy as np

from cute_kernels.emulator import TensorMap

from .case import Case, kernel, tma_load, wait
from .gemm import Operand, encode


def attention(heads: int = 2, length: int = 150, seed: int = 0) -> Case:
    """64 queries against `length` keys of 64 dims, bf16: S = Q K^T from shared memory, the softmax in registers, O += P V with P in
    registers (bf16) and V MN-major. K and V come in two stages, 64 keys to a block."""
    rng = np.random.default_rng([seed, length])
    q, k, v = (encode("bf16", rng.standard_normal((heads, r, 64))) for r in (64, length, length))
    out = np.zeros((heads, 64, 64), np.float32)
    maps = [TensorMap.tiled(x[0], box=(1, 64, 64), swizzle="128B", dtype="bf16") for x in (q, k, v)]
    blocks, tile = -(-length // 64), 8192
    major_k, major_n = Operand(64, "bf16", "K", "128B"), Operand(64, "bf16", "MN", "128B")
    s_regs, o_regs = ("{" + ", ".join(f"%{r}{i}" for i in range(32)) + "}" for r in "so")
    new = "\n"

    def ask(slot: int, block: str) -> str:
        at = tile + 2 * tile * slot
        return f"""    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bars+{8 + 8 * slot}], {2 * tile};
    add.u32 %t, %base, {at};
    add.u32 %u, %bars, {8 + 8 * slot};
{tma_load(3, "%t", "%mk", f"%zero, {block}, %head", "%u")}
    add.u32 %t, %base, {at + tile};
{tma_load(3, "%t", "%mv", f"%zero, {block}, %head", "%u")}"""

    def over_rows(fn) -> str:
        return new.join(fn(i, i // 2 % 2) for i in range(32))

    def quad(op: str, r: str) -> str:
        return new.join(f"    shfl.sync.bfly.b32 %f, {r}, {d}, 31, 0xffffffff;\n    {op}.f32 {r}, {r}, %f;" for d in (1, 2))

    first = new.join(
        f"""    add.u64 %da, %desc_q, {major_k.start(i) >> 4};
    add.u64 %db, %desc_k, {major_k.start(i) >> 4};
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {s_regs}, %da, %db, {"%never" if i == 0 else "%always"}, 1, 1, 0, 0;"""
        for i in range(4)
    )
    second = new.join(
        f"""    add.u64 %db, %desc_v, {major_n.start(i) >> 4};
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {o_regs}, {{{", ".join(f"%b{4 * i + r}" for r in range(4))}}}, %db, """
        f"%always, 1, 1, 1;"
        for i in range(4)
    )
    mask = over_rows(
        lambda i, h: f"    setp.gt.s32 %q, %left, {8 * (i // 4) + i % 2};\n    selp.f32 %s{i}, %s{i}, 0fFF800000, %q;"
    )
    tops = over_rows(lambda i, h: f"    max.f32 %n{h}, %n{h}, %s{i};")
    powers = over_rows(
        lambda i, h: f"    fma.rn.f32 %s{i}, %s{i}, %scale, %g{h};\n    ex2.approx.f32 %s{i}, %s{i};\n"
        f"    add.f32 %l{h}, %l{h}, %s{i};"
    )
    # Registers 2 r, 2 r + 1 of S are neighbours in K of P: the fragment of A, four words to 16 keys.
    pack = new.join(f"    cvt.rn.bf16x2.f32 %b{r}, %s{2 * r + 1}, %s{2 * r};" for r in range(16))
    rescale = over_rows(lambda i, h: f"    mul.f32 %o{i}, %o{i}, %c{h};")
    halves = new.join(
        f"""{quad("max", f"%n{h}")}
    max.f32 %n{h}, %n{h}, %m{h};
    sub.f32 %c{h}, %m{h}, %n{h};
    mul.f32 %c{h}, %c{h}, %scale;
    ex2.approx.f32 %c{h}, %c{h};
    mov.f32 %m{h}, %n{h};
    mul.f32 %g{h}, %n{h}, %scale;
    neg.f32 %g{h}, %g{h};
    mul.f32 %l{h}, %l{h}, %c{h};"""
        for h in range(2)
    )
    write = []
    for j in range(8):
        for h in range(2):
            i = 4 * j + 2 * h
            write.append(f"""    div.rn.f32 %o{i}, %o{i}, %l{h};
    div.rn.f32 %o{i + 1}, %o{i + 1}, %l{h};
    st.global.v2.f32 [%out+{4 * (64 * 8 * h + 8 * j)}], {{%o{i}, %o{i + 1}}};""")
    ends = new.join(quad("add", f"%l{h}") for h in range(2))
    body = f"""
    mov.u32 %me, %tid.x;
    mov.u32 %base, smem;
    add.u32 %bars, %base, {5 * tile};
    mov.u32 %head, %ctaid.x;
    mov.u32 %zero, 0;
    mov.f32 %scale, 0f{np.float32(np.log2(np.e) / 8).view(np.uint32):08X};
{new.join(f"    mov.u64 %m{x}, map_{x};{new}    cvta.param.u64 %m{x}, %m{x};" for x in "qkv")}
    setp.ne.u32 %p, %me, 0;
    @%p bra ASKED;
    mbarrier.init.shared::cta.b64 [%bars], 1;
    mbarrier.init.shared::cta.b64 [%bars+8], 1;
    mbarrier.init.shared::cta.b64 [%bars+16], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bars], {tile};
{tma_load(3, "%base", "%mq", "%zero, %zero, %head", "%bars")}
{ask(0, "%zero")}
    mov.u32 %key, 64;
{ask(1, "%key") if blocks > 1 else ""}
ASKED:
    bar.sync 0;
    setp.eq.u32 %always, %me, %me;
    setp.ne.u32 %never, %me, %me;
{over_rows(lambda i, h: f"    mov.f32 %o{i}, 0f00000000;")}
    mov.f32 %m0, 0fFF800000;
    mov.f32 %m1, 0fFF800000;
    mov.f32 %l0, 0f00000000;
    mov.f32 %l1, 0f00000000;
    and.b32 %col, %me, 3;
    shl.b32 %col, %col, 1;
    // %left: keys that remain, counted from this thread's first column.
    mov.u32 %left, {length};
    sub.u32 %left, %left, %col;
    shr.u32 %t, %base, 4;
    and.b32 %t, %t, 0x3fff;
    cvt.u64.u32 %wide, %t;
    or.b64 %desc_q, %wide, {major_k.descriptor():#x};
    mov.u32 %block, 0;
{wait("QUERIES", "%bars", "0")}
BLOCK:
    and.b32 %slot, %block, 1;
    shr.u32 %par, %block, 1;
    and.b32 %par, %par, 1;
    shl.b32 %t, %slot, 3;
    add.u32 %bar, %bars, %t;
    add.u32 %bar, %bar, 8;
{wait("KEYS", "%bar", "%par")}
    mad.lo.u32 %t, %slot, {2 * tile}, %base;
    add.u32 %t, %t, {tile};
    shr.u32 %t, %t, 4;
    and.b32 %t, %t, 0x3fff;
    cvt.u64.u32 %wide, %t;
    or.b64 %desc_k, %wide, {major_k.descriptor():#x};
    add.u64 %wide, %wide, {tile >> 4};
    or.b64 %desc_v, %wide, {major_n.descriptor():#x};
    wgmma.fence.sync.aligned;
{first}
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
{mask}
    mov.f32 %n0, 0fFF800000;
    mov.f32 %n1, 0fFF800000;
{tops}
{halves}
{powers}
{pack}
{rescale}
    wgmma.fence.sync.aligned;
{second}
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    bar.sync 0;
    add.u32 %block, %block, 1;
    sub.u32 %left, %left, 64;
    // The slot just read takes block + 1 (two on from the one it held).
    add.u32 %t, %block, 1;
    setp.lt.u32 %q, %t, {blocks};
    @!%q bra NEXT;
    @%p bra NEXT;
    shl.b32 %key, %t, 6;
    setp.eq.u32 %q, %slot, 1;
    @%q bra ASK_ODD;
{ask(0, "%key")}
    bra NEXT;
ASK_ODD:
{ask(1, "%key")}
NEXT:
    bar.warp.sync 0xffffffff;
    setp.lt.u32 %q, %block, {blocks};
    @%q bra BLOCK;
{ends}
    ld.param.u64 %out, [out];
    shr.u32 %t, %me, 5;
    shl.b32 %t, %t, 4;
    shr.u32 %u, %me, 2;
    and.b32 %u, %u, 7;
    add.u32 %t, %t, %u;
    mad.lo.u32 %t, %head, 64, %t;
    mad.lo.u32 %t, %t, 64, %col;
    mul.wide.u32 %wide, %t, 4;
    add.u64 %out, %out, %wide;
{new.join(write)}"""
    registers = """    .reg .pred %p, %q, %ok, %always, %never;
    .reg .b32 %me, %base, %bars, %bar, %head, %zero, %t, %u, %slot, %par, %block, %key, %left, %col, %b<16>;
    .reg .f32 %s<32>, %o<32>, %m<2>, %n<2>, %l<2>, %c<2>, %g<2>, %f, %scale;
    .reg .b64 %mq, %mk, %mv, %out, %wide, %da, %db, %desc_q, %desc_k, %desc_v;"""
    s = np.einsum("hqd,hkd->hqk", q[1], k[1]) / 8
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    want = p @ v[1]
    # P is rounded to bf16 (2^-9 of each term); the exponentials and the sums are 2^-20.
    tolerance = 2.0**-8 * (p @ np.abs(v[1]))
    params = ", ".join(f".param .align 64 .b8 map_{x}[128]" for x in "qkv") + ", .param .u64 out"
    return Case(
        f"attention {heads} heads, {length} keys", kernel(params, registers, body, 128), (heads, 1, 1), 128, [*maps, out],
        [(out, want, tolerance)], 5 * tile + 64, features="wgmma, P in registers, V MN-major", keep=[q[0], k[0], v[0]],
    )  # fmt: skip
