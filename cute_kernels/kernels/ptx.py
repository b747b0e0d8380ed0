"""The handful of PTX instructions the decode kernels issue by hand, one Python function each (those of every architecture).

Why by hand: a decode step is bound by latency and bandwidth, so which load is issued when and how wide it is has to be exact. Every
wrapper takes and returns DSL numbers (Int32 words that hold two 16-bit elements, Float32, Int64 addresses), never tensors, so that
register arrays stay plain Python lists.

Naming: `ld_`/`st_` + space + width in 32-bit words; predicates are Int32 values, 0 = off. A switched-off load returns zeros and
touches no memory.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def _asm(
    text: str, outs: str, ins: list[Any], constraints: str, side_effects: bool, loc: Any, ip: Any
) -> list[Any]:
    """Inline assembly with `outs` (one letter per result: r = 32-bit word, f = float) over MLIR values `ins`."""
    types = [{"r": T.i32, "f": T.f32}[o]() for o in outs]
    if not types:
        result_type = None
    elif len(types) == 1:
        result_type = types[0]
    else:
        result_type = llvm.StructType.get_literal(types)
    spec = ",".join([f"={o}" for o in outs] + ([constraints] if constraints else []))
    res = llvm.inline_asm(
        result_type, ins, text, spec,
        has_side_effects=side_effects, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    wrap = {"r": Int32, "f": Float32}
    if not types:
        return []
    if len(types) == 1:
        return [wrap[outs](res)]
    return [
        wrap[o](llvm.extractvalue(types[i], res, [i], loc=loc, ip=ip)) for i, o in enumerate(outs)
    ]


def _v(value: Any, loc: Any, ip: Any) -> Any:
    return value.ir_value(loc=loc, ip=ip)


# ---- global memory -----------------------------------------------------------------------------------------------
@dsl_user_op
def ld_global_nc_4(addr, pred, *, loc=None, ip=None) -> list[Int32]:
    """16 bytes of read-only data, not kept in L1 (each byte of a cache is used by one CTA once); zeros where pred is 0."""
    return _asm(
        "{\n.reg .pred p;\nsetp.ne.b32 p, $5, 0;\nmov.b32 $0, 0;\nmov.b32 $1, 0;\nmov.b32 $2, 0;\nmov.b32 $3, 0;\n"
        "@p ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];\n}",
        "rrrr", [_v(addr, loc, ip), _v(pred, loc, ip)], "l,r", True, loc, ip,
    )  # fmt: skip


@dsl_user_op
def ld_global_nc_4_always(addr, *, loc=None, ip=None) -> list[Int32]:
    """As ld_global_nc_4, without a predicate: ptxas turns some predicated loads into branches, one each."""
    return _asm("ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];", "rrrr", [_v(addr, loc, ip)], "l", True, loc, ip)


@dsl_user_op
def ld_global_nc_4_halves(addr, pred, *, loc=None, ip=None) -> list[Int32]:
    """As ld_global_nc_4, by eight 2-byte loads: for addresses that are not multiples of 16."""
    lines = ["{", ".reg .pred p;", "setp.ne.b32 p, $5, 0;"]
    lines += [f".reg .b16 h{i};\nmov.b16 h{i}, 0;" for i in range(8)]
    lines += [f"@p ld.global.nc.b16 h{i}, [$4+{2 * i}];" for i in range(8)]
    lines += [f"mov.b32 ${i}, {{h{2 * i}, h{2 * i + 1}}};" for i in range(4)]
    return _asm("\n".join(lines) + "\n}", "rrrr", [_v(addr, loc, ip), _v(pred, loc, ip)], "l,r", True, loc, ip)


@dsl_user_op
def ld_global_1(addr, *, loc=None, ip=None) -> Int32:
    """One 32-bit word that the host or an earlier kernel wrote."""
    return _asm("ld.global.nc.b32 $0, [$1];", "r", [_v(addr, loc, ip)], "l", True, loc, ip)[0]


@dsl_user_op
def ld_relaxed_4(addr, pred, *, loc=None, ip=None) -> list[Float32]:
    """16 bytes that another CTA of this launch wrote (after an acquire); zeros where pred is 0."""
    return _asm(
        "{\n.reg .pred p;\nsetp.ne.b32 p, $5, 0;\nmov.f32 $0, 0f00000000;\nmov.f32 $1, 0f00000000;\nmov.f32 $2, 0f00000000;\n"
        "mov.f32 $3, 0f00000000;\n@p ld.relaxed.gpu.global.v4.f32 {$0, $1, $2, $3}, [$4];\n}",
        "ffff", [_v(addr, loc, ip), _v(pred, loc, ip)], "l,r", True, loc, ip,
    )  # fmt: skip


@dsl_user_op
def ld_relaxed_2(addr, pred, *, loc=None, ip=None) -> list[Float32]:
    """8 bytes that another CTA of this launch wrote (after an acquire); zeros where pred is 0."""
    return _asm(
        "{\n.reg .pred p;\nsetp.ne.b32 p, $3, 0;\nmov.f32 $0, 0f00000000;\nmov.f32 $1, 0f00000000;\n"
        "@p ld.relaxed.gpu.global.v2.f32 {$0, $1}, [$2];\n}",
        "ff", [_v(addr, loc, ip), _v(pred, loc, ip)], "l,r", True, loc, ip,
    )  # fmt: skip


@dsl_user_op
def st_global_f4(addr, a, b, c, d, *, loc=None, ip=None) -> None:
    values = [_v(x, loc, ip) for x in (addr, a, b, c, d)]
    _asm("st.global.v4.f32 [$0], {$1, $2, $3, $4};", "", values, "l,f,f,f,f", True, loc, ip)


@dsl_user_op
def st_global_f2(addr, a, b, *, loc=None, ip=None) -> None:
    _asm("st.global.v2.f32 [$0], {$1, $2};", "", [_v(x, loc, ip) for x in (addr, a, b)], "l,f,f", True, loc, ip)


@dsl_user_op
def st_global_f1(addr, a, *, loc=None, ip=None) -> None:
    _asm("st.global.f32 [$0], $1;", "", [_v(addr, loc, ip), _v(a, loc, ip)], "l,f", True, loc, ip)


@dsl_user_op
def st_global_2(addr, a, b, *, loc=None, ip=None) -> None:
    _asm("st.global.v2.b32 [$0], {$1, $2};", "", [_v(x, loc, ip) for x in (addr, a, b)], "l,r,r", True, loc, ip)


@dsl_user_op
def st_global_1(addr, a, *, loc=None, ip=None) -> None:
    _asm("st.global.b32 [$0], $1;", "", [_v(addr, loc, ip), _v(a, loc, ip)], "l,r", True, loc, ip)


@dsl_user_op
def st_global_halves(addr, word, *, loc=None, ip=None) -> None:
    """The two 16-bit elements of a word, by 2-byte stores: for addresses that are not multiples of 4."""
    _asm(
        "{\n.reg .b16 a, b;\nmov.b32 {a, b}, $1;\nst.global.b16 [$0], a;\nst.global.b16 [$0+2], b;\n}",
        "", [_v(addr, loc, ip), _v(word, loc, ip)], "l,r", True, loc, ip,
    )  # fmt: skip


@dsl_user_op
def atom_inc_acq_rel(addr, last, *, loc=None, ip=None) -> Int32:
    """Old value of a 32-bit counter, which becomes old + 1, or 0 when old == last: the counter resets itself for the next
    launch. Releases this thread's (and, by a preceding warp or CTA barrier, its peers') stores and acquires those of the
    threads that counted before."""
    values = [_v(addr, loc, ip), _v(last, loc, ip)]
    return _asm("atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;", "r", values, "l,r", True, loc, ip)[0]


# ---- global to shared memory -------------------------------------------------------------------------------------
@dsl_user_op
def cp_async_16(to, addr, once: bool, *, loc=None, ip=None) -> None:
    """16 bytes of global memory to shared memory, past L1, without waiting. once: nobody else reads them, so L2 is to drop their
    lines first (the policy is what createpolicy.fractional.L2::evict_first makes)."""
    if not once:
        _asm("cp.async.cg.shared.global [$0], [$1], 16;", "", [_v(to, loc, ip), _v(addr, loc, ip)], "r,l", True, loc, ip)
        return
    _asm(
        "{\n.reg .b64 policy;\nmov.b64 policy, 0x12F0000000000000;\n"
        "cp.async.cg.shared.global.L2::cache_hint [$0], [$1], 16, policy;\n}",
        "", [_v(to, loc, ip), _v(addr, loc, ip)], "r,l", True, loc, ip,
    )  # fmt: skip


@dsl_user_op
def cp_async_16_zfill(to, addr, size, *, loc=None, ip=None) -> None:
    """As cp_async_16, but only the first `size` (0 or 16) bytes are read, the rest are zeros."""
    values = [_v(to, loc, ip), _v(addr, loc, ip), _v(size, loc, ip)]
    _asm("cp.async.cg.shared.global [$0], [$1], 16, $2;", "", values, "r,l,r", True, loc, ip)


@dsl_user_op
def cp_async_commit(*, loc=None, ip=None) -> None:
    _asm("cp.async.commit_group;", "", [], "", True, loc, ip)


@dsl_user_op
def cp_async_wait(pending: int, *, loc=None, ip=None) -> None:
    """Wait until at most `pending` of this thread's groups are under way."""
    _asm(f"cp.async.wait_group {pending};", "", [], "", True, loc, ip)


# ---- shared memory (32-bit addresses) --------------------------------------------------------------------------------
@dsl_user_op
def st_shared_f4(addr, a, b, c, d, *, loc=None, ip=None) -> None:
    values = [_v(x, loc, ip) for x in (addr, a, b, c, d)]
    _asm("st.shared.v4.f32 [$0], {$1, $2, $3, $4};", "", values, "r,f,f,f,f", True, loc, ip)


@dsl_user_op
def st_shared_4(addr, a, b, c, d, *, loc=None, ip=None) -> None:
    values = [_v(x, loc, ip) for x in (addr, a, b, c, d)]
    _asm("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "", values, "r,r,r,r,r", True, loc, ip)


@dsl_user_op
def stmatrix_4(addr, a, b, c, d, *, loc=None, ip=None) -> None:
    """Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l // 8."""
    values = [_v(x, loc, ip) for x in (addr, a, b, c, d)]
    _asm("stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};", "", values, "r,r,r,r,r", True, loc, ip)


@dsl_user_op
def st_shared_f2(addr, a, b, *, loc=None, ip=None) -> None:
    _asm("st.shared.v2.f32 [$0], {$1, $2};", "", [_v(x, loc, ip) for x in (addr, a, b)], "r,f,f", True, loc, ip)


@dsl_user_op
def ld_shared_f4(addr, *, loc=None, ip=None) -> list[Float32]:
    return _asm("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "ffff", [_v(addr, loc, ip)], "r", True, loc, ip)


@dsl_user_op
def ld_shared_4(addr, *, loc=None, ip=None) -> list[Int32]:
    return _asm("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "rrrr", [_v(addr, loc, ip)], "r", True, loc, ip)


@dsl_user_op
def ld_shared_f2(addr, *, loc=None, ip=None) -> list[Float32]:
    return _asm("ld.shared.v2.f32 {$0, $1}, [$2];", "ff", [_v(addr, loc, ip)], "r", True, loc, ip)


@dsl_user_op
def map_shared_rank(addr, rank, *, loc=None, ip=None) -> Int32:
    """The same shared memory address in CTA `rank` of the cluster, for ld_cluster_*."""
    return _asm("mapa.shared::cluster.u32 $0, $1, $2;", "r", [_v(addr, loc, ip), _v(rank, loc, ip)], "r,r", False, loc, ip)[0]


@dsl_user_op
def ld_cluster_f4(addr, pred, *, loc=None, ip=None) -> list[Float32]:
    """16 bytes of a CTA of the cluster; zeros where pred is 0."""
    return _asm(
        "{\n.reg .pred p;\nsetp.ne.b32 p, $5, 0;\nmov.f32 $0, 0f00000000;\nmov.f32 $1, 0f00000000;\nmov.f32 $2, 0f00000000;\n"
        "mov.f32 $3, 0f00000000;\n@p ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [$4];\n}",
        "ffff", [_v(addr, loc, ip), _v(pred, loc, ip)], "r,r", True, loc, ip,
    )  # fmt: skip


@dsl_user_op
def ld_cluster_f2(addr, pred, *, loc=None, ip=None) -> list[Float32]:
    """8 bytes of a CTA of the cluster; zeros where pred is 0."""
    return _asm(
        "{\n.reg .pred p;\nsetp.ne.b32 p, $3, 0;\nmov.f32 $0, 0f00000000;\nmov.f32 $1, 0f00000000;\n"
        "@p ld.shared::cluster.v2.f32 {$0, $1}, [$2];\n}",
        "ff", [_v(addr, loc, ip), _v(pred, loc, ip)], "r,r", True, loc, ip,
    )  # fmt: skip


# ---- arithmetic --------------------------------------------------------------------------------------------------
@dsl_user_op
def mma_16816(acc, a, b, bf16: bool, *, loc=None, ip=None) -> list[Float32]:
    """acc[4] + A[16, 16] (4 words) x B[16, 8] (2 words), one warp, fp32 accumulators.

    Lane = 4 * g + t. A: word 0 row g, k 2t and 2t+1; word 1 row g + 8; words 2, 3 the same at k + 8. B: word 0 k 2t and 2t+1 of
    column g, word 1 k + 8. Result: [0], [1] row g, columns 2t, 2t+1; [2], [3] row g + 8.
    """
    kind = "bf16" if bf16 else "f16"
    values = [_v(x, loc, ip) for x in (*a, *b, *acc)]
    return _asm(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, "
        "{$10, $11, $12, $13};",
        "ffff", values, "r,r,r,r,r,r,f,f,f,f", False, loc, ip,
    )  # fmt: skip


@dsl_user_op
def prmt(a, b, selector: int, *, loc=None, ip=None) -> Int32:
    """Four bytes picked from the eight of (a, b); the selector is a compile-time constant."""
    return _asm(f"prmt.b32 $0, $1, $2, {selector:#06x};", "r", [_v(a, loc, ip), _v(b, loc, ip)], "r,r", False, loc, ip)[0]


@dsl_user_op
def pack_16(low, high, bf16: bool, *, loc=None, ip=None) -> Int32:
    """Two fp32 numbers rounded to nearest even, low in the low half."""
    kind = "bf16x2" if bf16 else "f16x2"
    return _asm(f"cvt.rn.{kind}.f32 $0, $2, $1;", "r", [_v(low, loc, ip), _v(high, loc, ip)], "f,f", False, loc, ip)[0]


@dsl_user_op
def exp2(x, *, loc=None, ip=None) -> Float32:
    """2 ** x; -inf gives 0. Maximum relative error 2 ** -22."""
    return _asm("ex2.approx.ftz.f32 $0, $1;", "f", [_v(x, loc, ip)], "f", False, loc, ip)[0]


@dsl_user_op
def log2(x, *, loc=None, ip=None) -> Float32:
    """Base-2 logarithm; 0 gives -inf."""
    return _asm("lg2.approx.f32 $0, $1;", "f", [_v(x, loc, ip)], "f", False, loc, ip)[0]


@dsl_user_op
def rcp(x, *, loc=None, ip=None) -> Float32:
    return _asm("rcp.approx.ftz.f32 $0, $1;", "f", [_v(x, loc, ip)], "f", False, loc, ip)[0]


@dsl_user_op
def fma(a, b, c, *, loc=None, ip=None) -> Float32:
    """a * b + c, rounded once."""
    return _asm("fma.rn.f32 $0, $1, $2, $3;", "f", [_v(x, loc, ip) for x in (a, b, c)], "f,f,f", False, loc, ip)[0]


@dsl_user_op
def fmax(a, b, *, loc=None, ip=None) -> Float32:
    return _asm("max.f32 $0, $1, $2;", "f", [_v(a, loc, ip), _v(b, loc, ip)], "f,f", False, loc, ip)[0]


@dsl_user_op
def select_f(condition, a, b, *, loc=None, ip=None) -> Float32:
    """a where the Int32 condition is not 0, else b."""
    return _asm(
        "{\n.reg .pred p;\nsetp.ne.b32 p, $3, 0;\nselp.f32 $0, $1, $2, p;\n}",
        "f", [_v(a, loc, ip), _v(b, loc, ip), _v(condition, loc, ip)], "f,f,r", False, loc, ip,
    )[0]  # fmt: skip


@dsl_user_op
def shuffle_f(x, lane, *, loc=None, ip=None) -> Float32:
    """x of lane `lane` (all 32 lanes take part)."""
    return _asm("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "f", [_v(x, loc, ip), _v(lane, loc, ip)], "f,r", True, loc, ip)[0]


@dsl_user_op
def shuffle_xor_f(x, mask: int, *, loc=None, ip=None) -> Float32:
    return _asm(f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, 0xffffffff;", "f", [_v(x, loc, ip)], "f", True, loc, ip)[0]


@dsl_user_op
def shuffle_i(x, lane, *, loc=None, ip=None) -> Int32:
    return _asm("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "r", [_v(x, loc, ip), _v(lane, loc, ip)], "r,r", True, loc, ip)[0]


@dsl_user_op
def as_float(word, *, loc=None, ip=None) -> Float32:
    """The fp32 number with these bits."""
    return _asm("mov.b32 $0, $1;", "f", [_v(word, loc, ip)], "r", False, loc, ip)[0]


@dsl_user_op
def zeros(n: int, *, loc=None, ip=None) -> list[Float32]:
    """n zeros in registers of their own, written here and not, as constants are, where they are used: before a wgmma.fence."""
    return _asm("\n".join(f"mov.f32 ${i}, 0f00000000;" for i in range(n)), "f" * n, [], "", True, loc, ip)


@dsl_user_op
def special(name: str, *, loc=None, ip=None) -> Int32:
    """A special register such as %ctaid.x, read here and now: re-reading one costs less than keeping it across a loop that needs
    every register."""
    return _asm(f"mov.u32 $0, %{name};", "r", [], "", True, loc, ip)[0]


# ---- bulk copies ------------------------------------------------------------------------------------------------------
@dsl_user_op
def mbar_expect(bar, size: int, *, loc=None, ip=None) -> None:
    """Arrive and announce `size` bytes."""
    _asm(f"mbarrier.arrive.expect_tx.shared.b64 _, [$0], {size};", "", [_v(bar, loc, ip)], "r", True, loc, ip)


@dsl_user_op
def mbar_wait(bar, parity, *, loc=None, ip=None) -> None:
    """Wait for the phase of this parity (0 first, then 1, 0, ...) to complete."""
    _asm(
        "{\n.reg .pred p;\nwait:\nmbarrier.try_wait.parity.shared.b64 p, [$0], $1;\n@!p bra wait;\n}",
        "", [_v(bar, loc, ip), _v(parity, loc, ip)], "r,r", True, loc, ip,
    )  # fmt: skip
