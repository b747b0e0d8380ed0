"""Blackwell's tensor core, tensor memory and barriers by hand: descriptors as numbers, and one Python function per instruction.

Addresses of shared memory are 32-bit (shared::cta), of tensor memory lane << 16 | column. Every wrapper takes and returns DSL
numbers, as those of cute_kernels.kernels.ptx do, so that register arrays stay plain Python lists.

Shared-memory layouts of 16-bit matrices, as the tensor core and TMA swizzle them (byte address bits):
  128B  rows of 128 bytes, 8 rows an atom of 1024: bits 4-6 ^= bits 7-9
   32B  rows of 32 bytes, 8 rows an atom of 256: bit 4 ^= bit 7
K-major: a row is a line of K, `stride` bytes from 8 rows to the next 8. MN-major: a row is a line of M or N at one k, `stride`
bytes from 8 k to the next 8, `leading` bytes from one line's width (64 or 16 elements) to the next.
"""

from __future__ import annotations

from cutlass import Float32, Int32
from cutlass.cutlass_dsl import dsl_user_op

from cute_kernels.kernels.ptx import _asm, _v

SWIZZLE_128B, SWIZZLE_32B = 2, 6
NEGATE_A = 1 << 13  # of the instruction descriptor


def instruction_descriptor(m: int, n: int, bf16: bool, a_mn_major: bool, b_mn_major: bool) -> int:
    """For kind::f16 with fp32 accumulators; m and n as the ISA allows them for cta_group::1."""
    if not (m == 64 and n % 8 == 0 or m == 128 and n % 16 == 0) or not 8 <= n <= 256:
        raise ValueError(f"no tensor-core shape {m} x {n}")
    kind = 1 if bf16 else 0
    return 1 << 4 | kind << 7 | kind << 10 | int(a_mn_major) << 15 | int(b_mn_major) << 16 | (n >> 3) << 17 | (m >> 4) << 24


def smem_descriptor(swizzle: int, leading: int, stride: int) -> int:
    """All of a matrix descriptor but the address; `leading` and `stride` in bytes."""
    for value in (leading, stride):
        if value % 16 or not 0 <= value >> 4 < 1 << 14:
            raise ValueError(f"offset {value}")
    return (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 46 | swizzle << 61


# ---- tensor core -------------------------------------------------------------------------------------------------
def _matrix(name: str, operand: int, descriptor: int) -> str:
    """Register `name` becomes the descriptor of the matrix whose address is the asm operand; `lo` is a scratch register."""
    return (
        f"shr.u32 lo, ${operand}, 4;\nor.b32 lo, lo, {descriptor & 0xFFFFFFFF};\nmov.b64 {name}, {{lo, {descriptor >> 32}}};\n"
    )


@dsl_user_op
def mma(d, a, a_desc: int, b, b_desc: int, idesc: int, accumulate, more_idesc=0, *, loc=None, ip=None) -> None:
    """D (tensor memory) = A x B (+ D where accumulate is not 0), K = 16, A and B at shared-memory addresses with the layouts of
    smem_descriptor. One thread issues it for the CTA; its MMAs run in order. more_idesc: descriptor bits known at run time only."""
    values = [_v(Int32(x), loc, ip) for x in (d, a, b, accumulate, more_idesc)]
    _asm(
        "{\n.reg .pred more;\n.reg .b32 lo, kind;\n.reg .b64 a, b;\n"
        + _matrix("a", 1, a_desc) + _matrix("b", 2, b_desc) + f"mov.b32 kind, {idesc};\nor.b32 kind, kind, $4;\n"
        "setp.ne.b32 more, $3, 0;\ntcgen05.mma.cta_group::1.kind::f16 [$0], a, b, kind, more;\n}",
        "", values, "r,r,r,r,r", True, loc, ip,
    )  # fmt: skip


@dsl_user_op
def mma_ts(d, a, b, b_desc: int, idesc: int, accumulate, *, loc=None, ip=None) -> None:
    """As mma, with A in tensor memory: 16-bit pairs, 8 columns for K = 16."""
    values = [_v(Int32(x), loc, ip) for x in (d, a, b, accumulate)]
    _asm(
        "{\n.reg .pred more;\n.reg .b32 lo, kind;\n.reg .b64 b;\n" + _matrix("b", 2, b_desc) + f"mov.b32 kind, {idesc};\n"
        "setp.ne.b32 more, $3, 0;\ntcgen05.mma.cta_group::1.kind::f16 [$0], [$1], b, kind, more;\n}",
        "", values, "r,r,r,r", True, loc, ip,
    )  # fmt: skip


@dsl_user_op
def commit(bar, *, loc=None, ip=None) -> None:
    """One arrival at the barrier when all MMAs that this thread has issued are done."""
    _asm(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [$0];",
        "", [_v(bar, loc, ip)], "r", True, loc, ip,
    )  # fmt: skip


# ---- tensor memory -----------------------------------------------------------------------------------------------
@dsl_user_op
def alloc(to, columns: int, *, loc=None, ip=None) -> None:
    """Allocate columns (a power of two, 32..512), their address to shared memory; a whole warp, which alone may free them."""
    _asm(
        f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [$0], {columns};\n"
        "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
        "", [_v(to, loc, ip)], "r", True, loc, ip,
    )  # fmt: skip


@dsl_user_op
def dealloc(address, columns: int, *, loc=None, ip=None) -> None:
    _asm(f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 $0, {columns};", "", [_v(address, loc, ip)], "r", True, loc, ip)


@dsl_user_op
def ld(address, count: int, *, loc=None, ip=None) -> list[Float32]:
    """`count` columns of this thread's lane (the address names the warp's first lane), waited for."""
    outs = ", ".join(f"${i}" for i in range(count))
    text = f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {{{outs}}}, [${count}];\ntcgen05.wait::ld.sync.aligned;"
    return _asm(text, "f" * count, [_v(address, loc, ip)], "r", True, loc, ip)


@dsl_user_op
def ld_half(address, count: int, *, loc=None, ip=None) -> list[Float32]:
    """Of the warp's first 16 lanes, as an M = 64 result uses them: threads 0-15 get columns 0..count-1 of lane `thread`, threads
    16-31 the `count` columns after those. Waits for them."""
    outs = ", ".join(f"${i}" for i in range(count))
    text = f"tcgen05.ld.sync.aligned.16x32bx2.x{count}.b32 {{{outs}}}, [${count}], {count};\ntcgen05.wait::ld.sync.aligned;"
    return _asm(text, "f" * count, [_v(address, loc, ip)], "r", True, loc, ip)


@dsl_user_op
def st(address, words, *, loc=None, ip=None) -> None:
    """Words (Int32 or Float32) to as many columns of this thread's lane; not waited for (see wait_st)."""
    count = len(words)
    ins = ", ".join(f"${i + 1}" for i in range(count))
    kinds = ",".join("f" if isinstance(w, Float32) else "r" for w in words)
    _asm(
        f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [$0], {{{ins}}};",
        "", [_v(address, loc, ip), *[_v(w, loc, ip) for w in words]], "r," + kinds, True, loc, ip,
    )  # fmt: skip


@dsl_user_op
def wait_st(*, loc=None, ip=None) -> None:
    _asm("tcgen05.wait::st.sync.aligned;", "", [], "", True, loc, ip)


@dsl_user_op
def fence_before(*, loc=None, ip=None) -> None:
    """Before a barrier arrival that hands tensor memory to another thread."""
    _asm("tcgen05.fence::before_thread_sync;", "", [], "", True, loc, ip)


@dsl_user_op
def fence_after(*, loc=None, ip=None) -> None:
    """After a barrier wait by which tensor memory came from another thread."""
    _asm("tcgen05.fence::after_thread_sync;", "", [], "", True, loc, ip)


# ---- arithmetic --------------------------------------------------------------------------------------------------
@dsl_user_op
def fmax3(a, b, c, *, loc=None, ip=None) -> Float32:
    return _asm("max.f32 $0, $1, $2, $3;", "f", [_v(x, loc, ip) for x in (a, b, c)], "f,f,f", False, loc, ip)[0]


@dsl_user_op
def fma_pair(a0, a1, b, c, *, loc=None, ip=None) -> list[Float32]:
    """(a0 * b + c, a1 * b + c) in one instruction."""
    return _asm(
        "{\n.reg .b64 x, y, z;\nmov.b64 x, {$2, $3};\nmov.b64 y, {$4, $4};\nmov.b64 z, {$5, $5};\n"
        "fma.rn.f32x2 x, x, y, z;\nmov.b64 {$0, $1}, x;\n}",
        "ff", [_v(x, loc, ip) for x in (a0, a1, b, c)], "f,f,f,f", False, loc, ip,
    )  # fmt: skip


@dsl_user_op
def add_pair(a0, a1, b0, b1, *, loc=None, ip=None) -> list[Float32]:
    """(a0 + b0, a1 + b1) in one instruction."""
    return _asm(
        "{\n.reg .b64 x, y;\nmov.b64 x, {$2, $3};\nmov.b64 y, {$4, $5};\nadd.rn.f32x2 x, x, y;\nmov.b64 {$0, $1}, x;\n}",
        "ff", [_v(x, loc, ip) for x in (a0, a1, b0, b1)], "f,f,f,f", False, loc, ip,
    )  # fmt: skip


# ---- shared-memory barriers --------------------------------------------------------------------------------------
@dsl_user_op
def mbar_init(bar, count: int, *, loc=None, ip=None) -> None:
    """A barrier whose phase completes with `count` arrivals and all announced bytes; publish with fence_mbar_init."""
    _asm(f"mbarrier.init.shared.b64 [$0], {count};", "", [_v(bar, loc, ip)], "r", True, loc, ip)


@dsl_user_op
def fence_mbar_init(*, loc=None, ip=None) -> None:
    _asm("fence.mbarrier_init.release.cluster;", "", [], "", True, loc, ip)


@dsl_user_op
def mbar_arrive(bar, *, loc=None, ip=None) -> None:
    _asm("mbarrier.arrive.shared.b64 _, [$0];", "", [_v(bar, loc, ip)], "r", True, loc, ip)


@dsl_user_op
def fence_proxy_async(*, loc=None, ip=None) -> None:
    """This thread's writes to shared memory become visible to TMA and the tensor core (after a barrier, to those of others)."""
    _asm("fence.proxy.async.shared::cta;", "", [], "", True, loc, ip)


@dsl_user_op
def st_shared_4(addr, a, b, c, d, *, loc=None, ip=None) -> None:
    values = [_v(x, loc, ip) for x in (addr, a, b, c, d)]
    _asm("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "", values, "r,r,r,r,r", True, loc, ip)


@dsl_user_op
def st_shared_1(addr, a, *, loc=None, ip=None) -> None:
    kind = "f" if isinstance(a, Float32) else "r"
    _asm("st.shared.b32 [$0], $1;", "", [_v(addr, loc, ip), _v(a, loc, ip)], f"r,{kind}", True, loc, ip)


@dsl_user_op
def ld_shared_1(addr, *, loc=None, ip=None) -> Int32:
    return _asm("ld.shared.b32 $0, [$1];", "r", [_v(addr, loc, ip)], "r", True, loc, ip)[0]


@dsl_user_op
def ld_global_1_if(addr, pred, *, loc=None, ip=None) -> Int32:
    """One 32-bit word that the host or an earlier kernel wrote; 0, and no access, where pred is 0."""
    return _asm(
        "{\n.reg .pred p;\nsetp.ne.b32 p, $2, 0;\nmov.b32 $0, 0;\n@p ld.global.nc.b32 $0, [$1];\n}",
        "r", [_v(addr, loc, ip), _v(pred, loc, ip)], "l,r", True, loc, ip,
    )[0]  # fmt: skip


@dsl_user_op
def ld_global_f4_if(addr, pred, *, loc=None, ip=None) -> list[Float32]:
    """16 bytes that another CTA of this launch wrote, after an acquire; zeros, and no access, where pred is 0."""
    return _asm(
        "{\n.reg .pred p;\nsetp.ne.b32 p, $5, 0;\nmov.f32 $0, 0f00000000;\nmov.f32 $1, 0f00000000;\nmov.f32 $2, 0f00000000;\n"
        "mov.f32 $3, 0f00000000;\n@p ld.global.v4.f32 {$0, $1, $2, $3}, [$4];\n}",
        "ffff", [_v(addr, loc, ip), _v(pred, loc, ip)], "l,r", True, loc, ip,
    )  # fmt: skip


@dsl_user_op
def ld_global_f2_if(addr, pred, *, loc=None, ip=None) -> list[Float32]:
    """As ld_global_f4_if, 8 bytes."""
    return _asm(
        "{\n.reg .pred p;\nsetp.ne.b32 p, $3, 0;\nmov.f32 $0, 0f00000000;\nmov.f32 $1, 0f00000000;\n"
        "@p ld.global.v2.f32 {$0, $1}, [$2];\n}",
        "ff", [_v(addr, loc, ip), _v(pred, loc, ip)], "l,r", True, loc, ip,
    )  # fmt: skip


@dsl_user_op
def st_global_4(addr, a, b, c, d, *, loc=None, ip=None) -> None:
    values = [_v(x, loc, ip) for x in (addr, a, b, c, d)]
    _asm("st.global.v4.b32 [$0], {$1, $2, $3, $4};", "", values, "l,r,r,r,r", True, loc, ip)


@dsl_user_op
def st_global_16(addr, x, bf16: bool, pred, *, loc=None, ip=None) -> None:
    """One fp32 number rounded to 16 bits, where pred is not 0."""
    kind = "bf16" if bf16 else "f16"
    _asm(
        f"{{\n.reg .pred p;\n.reg .b16 h;\nsetp.ne.b32 p, $2, 0;\ncvt.rn.{kind}.f32 h, $1;\n@p st.global.b16 [$0], h;\n}}",
        "", [_v(addr, loc, ip), _v(x, loc, ip), _v(pred, loc, ip)], "l,f,r", True, loc, ip,
    )  # fmt: skip


@dsl_user_op
def st_global_f1_if(addr, x, pred, *, loc=None, ip=None) -> None:
    _asm(
        "{\n.reg .pred p;\nsetp.ne.b32 p, $2, 0;\n@p st.global.f32 [$0], $1;\n}",
        "", [_v(addr, loc, ip), _v(x, loc, ip), _v(pred, loc, ip)], "l,f,r", True, loc, ip,
    )  # fmt: skip
