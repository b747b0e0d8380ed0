"""Instructions of the Blackwell sparse prefill kernel: barriers, tensor memory, tensor core, TMA, one Python function each.

Everything here runs inside a kernel. Shared addresses are Int32 byte addresses of the CTA's own window, global addresses Int64.
Constant displacements and descriptor words are part of the PTX text. Loads that complete asynchronously (tcgen05.ld) stand in one
asm block with their wait, so that no use of a register can be scheduled between the two.
"""

from __future__ import annotations

import cutlass
import cutlass._mlir.dialects.cute_nvgpu as _cute_nvgpu_ir
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass.cutlass_dsl import dsl_user_op

from cute_kernels.kernels.sm100.sparse_layout import TILE

NEG_INF = float("-inf")
# below every finite logit; exp2(-inf - LOWEST) is 0, so that masked rows need no special case
LOWEST = -3.4028234663852886e38
PAIR = 3  # CTA mask of both CTAs of the pair
# mbarrier address of the pair's even CTA: bit 24 of a shared::cluster address tells the two apart
EVEN_CTA = -0x1000001


def _one(text: str, arguments: list) -> None:
    """Instructions for one thread of the warp, always the same; the whole warp comes by.

    The tensor core and TMA take their operands in uniform registers. Where the warp runs together, ptxas knows addresses to be
    uniform; in a role run by a single thread, or under a predicate instead of a branch, it loops over the lanes around every
    instruction (SASS: BRA.U.ANY, 14 instructions per tcgen05.mma and more than its 33 cycles). A test counts those loops: none.
    """
    cute.arch.inline_ptx(
        "{\n\t.reg .pred one;\n\telect.sync _|one, 0xffffffff;\n\t@!one bra skip;\n\t" + text + "\nskip:\n\t}",
        read_only_args=arguments,
    )


# ---- mbarriers -----------------------------------------------------------------------------------------------------------
# All in the default scope, which is the CTA's. The arrivals that cross to the other CTA hand over tensor memory and shared memory
# that the tensor core of the arriving CTA reads itself; no thread reads memory that a thread of the other CTA wrote. In cluster
# scope ptxas adds MEMBAR.ALL.GPU to each arrival and CCTL.IVALL to each wait (seen in SASS).
def barrier_init(address: Int32, count: int) -> None:
    cute.arch.inline_ptx(f"mbarrier.init.shared::cta.b64 [{{$r0}}], {count};", read_only_args=[address])


def wait(address: Int32, parity: Int32) -> None:
    """Wait until the phase of this parity has completed (0 is the first; parity 1 of a fresh barrier counts as complete)."""
    cute.arch.inline_ptx(
        "{\n\t.reg .pred done;\nagain:\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [{$r0}], {$r1};\n\t@done bra.uni over;\n\tbra.uni again;\nover:\n\t}",
        read_only_args=[address, parity],
    )


def arrive(address: Int32) -> None:
    """One thread of the warp arrives."""
    _one("mbarrier.arrive.shared::cta.b64 _, [{$r0}];", [address])


def arrive_even(address: Int32) -> None:
    """One thread of the warp arrives on the barrier of the pair's even CTA."""
    _one(
        ".reg .b32 even;\n\tmapa.shared::cluster.u32 even, {$r0}, 0;\n\t"
        "mbarrier.arrive.shared::cluster.b64 _, [even];",
        [address],
    )


def expect(address: Int32, size: int) -> None:
    """One thread of the warp arrives and announces `size` bytes."""
    _one(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [{{$r0}}], {size};", [address])


def pair_barrier(name: Int32) -> None:
    """Named barrier of the two warps that share 32 heads (64 threads)."""
    cute.arch.inline_ptx("bar.sync {$r0}, 64;", read_only_args=[name])


def fence_async() -> None:
    """Order this thread's shared-memory stores before later accesses of the tensor core."""
    cute.arch.inline_ptx("fence.proxy.async.shared::cta;")


# ---- tensor memory -------------------------------------------------------------------------------------------------------
def tmem_alloc(address: Int32, columns: int) -> None:
    cute.arch.inline_ptx(
        f"tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [{{$r0}}], {columns};\n\t"
        "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;",
        read_only_args=[address],
    )


def tmem_free(base: Int32, columns: int) -> None:
    cute.arch.inline_ptx(f"tcgen05.dealloc.cta_group::2.sync.aligned.b32 {{$r0}}, {columns};", read_only_args=[base])


def fence_before() -> None:
    """Order this thread's tensor-memory accesses before its next barrier arrival."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def fence_after() -> None:
    """Order this thread's tensor-memory accesses after the barrier it has waited for."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


def _registers(letter: str, first: int, count: int) -> str:
    return "{" + ", ".join(f"{{${letter}{i}}}" for i in range(first, first + count)) + "}"


def tmem_load(*addresses: Int32) -> list[list[Float32]]:
    """32 columns of this thread's lane from each address, complete."""
    text = ""
    for i in range(len(addresses)):
        text += f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {_registers('w', 32 * i, 32)}, [{{$r{i}}}];\n\t"
    values = cute.arch.inline_ptx(
        text + "tcgen05.wait::ld.sync.aligned;", write_only_types=[Float32] * (32 * len(addresses)),
        read_only_args=list(addresses),
    )  # fmt: skip
    return [list(values[32 * i : 32 * i + 32]) for i in range(len(addresses))]


def tmem_store(address: Int32, values: list[Float32]) -> None:
    """32 columns of this thread's lane; complete after `tmem_store_wait`."""
    cute.arch.inline_ptx(
        f"tcgen05.st.sync.aligned.32x32b.x32.b32 [{{$r0}}], {_registers('r', 1, 32)};", read_only_args=[address, *values]
    )


def tmem_store_wait() -> None:
    cute.arch.inline_ptx("tcgen05.wait::st.sync.aligned;")


# ---- tensor core, issued by one thread for both CTAs -----------------------------------------------------------------------
def matrix_start(address: Int32) -> Int32:
    """A shared-memory address as the lower word of a matrix descriptor holds it (bits 18 and up name the CTA, not the place)."""
    return (address & 0x3FFFF) >> 4


def mma_ts(d: Int32, a: Int32, b_low: Int32, kind: int, steps: list[tuple[int, int, int]]) -> None:
    """D = A B^T over `steps` of 16: A in tensor memory `step[0]` columns after a, B in shared memory `step[1]` bytes after the
    start in b_low, with upper descriptor word step[2]."""
    text = f".reg .pred first, more;\n\t.reg .b32 a, lo, kind;\n\t.reg .b64 b;\n\tmov.b32 kind, {kind};\n\t"
    text += "setp.ne.b32 first, 0, 0;\n\tsetp.eq.b32 more, 0, 0;"
    for i, (a_offset, b_offset, b_high) in enumerate(steps):
        text += (
            f"\n\tadd.u32 a, {{$r1}}, {a_offset};\n\tadd.u32 lo, {{$r2}}, {b_offset >> 4};\n\tmov.b64 b, {{lo, {b_high}}};"
            f"\n\ttcgen05.mma.cta_group::2.kind::f16 [{{$r0}}], [a], b, kind, {'more' if i else 'first'};"
        )
    _one(text, [d, a, b_low])


def mma_ss(d: Int32, a_low: Int32, a_high: int, b_low: Int32, b_high: int, kind: int, accumulate: Int32, steps: list) -> None:
    """D (+)= A B over `steps` of 16, both in shared memory, step[0] and step[1] bytes after their starts; the first step
    overwrites D if `accumulate` is 0."""
    text = f".reg .pred first, more;\n\t.reg .b32 lo, kind;\n\t.reg .b64 a, b;\n\tmov.b32 kind, {kind};\n\t"
    text += "setp.ne.b32 first, {$r3}, 0;\n\tsetp.eq.b32 more, 0, 0;"
    for i, (a_offset, b_offset) in enumerate(steps):
        text += (
            f"\n\tadd.u32 lo, {{$r1}}, {a_offset >> 4};\n\tmov.b64 a, {{lo, {a_high}}};"
            f"\n\tadd.u32 lo, {{$r2}}, {b_offset >> 4};\n\tmov.b64 b, {{lo, {b_high}}};"
            f"\n\ttcgen05.mma.cta_group::2.kind::f16 [{{$r0}}], a, b, kind, {'more' if i else 'first'};"
        )
    _one(text, [d, a_low, b_low, accumulate])


def tmem_copy(column: Int32, low: Int32, steps: list[tuple[int, int, int]]) -> None:
    """128 rows x 32 bytes of each CTA's shared memory to 8 columns of its tensor memory, once per step: columns after `column`,
    bytes after the start in `low`, upper descriptor word."""
    text = ".reg .b32 d, lo;\n\t.reg .b64 s;"
    for column_offset, offset, high in steps:
        text += (
            f"\n\tadd.u32 d, {{$r0}}, {column_offset};\n\tadd.u32 lo, {{$r1}}, {offset >> 4};\n\tmov.b64 s, {{lo, {high}}};"
            "\n\ttcgen05.cp.cta_group::2.128x256b [d], s;"
        )
    _one(text, [column, low])


def commit(barrier: Int32) -> None:
    """Arrive on this barrier of both CTAs when everything given to the tensor core so far is done."""
    _one(
        f".reg .b16 both;\n\tmov.b16 both, {PAIR};\n\t"
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [{$r0}], both;",
        [barrier],
    )


# ---- TMA -----------------------------------------------------------------------------------------------------------------
@dsl_user_op
def tensor_map(atom: cute.CopyAtom, *, loc=None, ip=None) -> Int64:
    """Address of the tensor map that a TMA atom owns (a kernel parameter)."""
    scratch = cute.make_ptr(Int64, 0, cute.AddressSpace.smem, assumed_align=8, loc=loc, ip=ip)
    kind = ir.Type.parse("!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<64>>")
    pointer = _cute_nvgpu_ir.get_tma_desc_addr(kind, atom._unpack(tma_bar_ptr=scratch, loc=loc, ip=ip), loc=loc, ip=ip)
    return pointer.toint(loc=loc, ip=ip)


def gather_rows(dst: Int32, desc: Int64, column: Int32, rows: list[Int32], barrier: Int32, policy: Int64, boxes: int) -> None:
    """Four rows of `boxes` column tiles of 64 (a box's width, TILE bytes apart in shared memory), the bytes counted by `barrier`;
    rows outside the tensor are zeros."""
    text = ".reg .b32 dst, column;"
    for i in range(boxes):
        text += (
            f"\n\tadd.u32 dst, {{$r0}}, {i * TILE};\n\tadd.u32 column, {{$r2}}, {64 * i};\n\tcp.async.bulk.tensor.2d."
            "shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes.cta_group::2.L2::cache_hint [dst], "
            "[{$r1}, {column, {$r3}, {$r4}, {$r5}, {$r6}}], [{$r7}], {$r8};"
        )
    _one(text, [dst, desc, column, *rows, barrier, policy])


def load_box(dst: Int32, desc: Int64, column: Int32, head: Int32, row: Int32, barrier: Int32, policy: Int64) -> None:
    """A box of Q (columns, heads) of query row `row`, counted by `barrier`; absent heads are zeros."""
    _one(
        "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes.cta_group::2.L2::cache_hint "
        "[{$r0}], [{$r1}, {{$r2}, {$r3}, {$r4}}], [{$r5}], {$r6};",
        [dst, desc, column, head, row, barrier, policy],
    )


def store_box(desc: Int64, column: Int32, head: Int32, row: Int32, src: Int32, policy: Int64) -> None:
    """A box (columns, heads) of query row `row` from shared memory to `out`; absent heads are not written."""
    _one(
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint [{$r0}, {{$r1}, {$r2}, {$r3}}], [{$r4}], {$r5};"
        "\n\tcp.async.bulk.commit_group;",
        [desc, column, head, row, src, policy],
    )


def stores_have_read() -> None:
    """Wait until the boxes that this warp has stored have left shared memory."""
    _one("cp.async.bulk.wait_group.read 0;", [])


def policy(kind: str) -> Int64:
    """L2 eviction policy: evict_last for rows that other query rows read again, evict_first for what is used once."""
    return cute.arch.inline_ptx(f"createpolicy.fractional.L2::{kind}.b64 {{$w0}}, 1.0;", write_only_types=[Int64])


# ---- memory --------------------------------------------------------------------------------------------------------------
def load_global(address: Int64) -> Int32:
    return cute.arch.inline_ptx("ld.global.nc.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def load_global_float(address: Int64) -> Float32:
    return cute.arch.inline_ptx("ld.global.nc.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address])


def store_global_float(address: Int64, value: Float32) -> None:
    cute.arch.inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[address, value])


def load_shared(address: Int32, offset: int = 0) -> Int32:
    return cute.arch.inline_ptx(
        f"ld.shared.b32 {{$w0}}, [{{$r0}}+{offset}];", write_only_types=[Int32], read_only_args=[address]
    )


def load_shared_float(address: Int32, offset: int = 0) -> Float32:
    return cute.arch.inline_ptx(
        f"ld.shared.f32 {{$w0}}, [{{$r0}}+{offset}];", write_only_types=[Float32], read_only_args=[address]
    )


def load_shared_4(address: Int32, offset: int, kind: type) -> list:
    letter = "f32" if kind is Float32 else "b32"
    return list(
        cute.arch.inline_ptx(
            f"ld.shared.v4.{letter} {_registers('w', 0, 4)}, [{{$r0}}+{offset}];",
            write_only_types=[kind] * 4,
            read_only_args=[address],
        )
    )


def store_shared(address: Int32, value: Int32, offset: int = 0) -> None:
    cute.arch.inline_ptx(f"st.shared.b32 [{{$r0}}+{offset}], {{$r1}};", read_only_args=[address, value])


def store_shared_float(address: Int32, value: Float32, offset: int = 0) -> None:
    cute.arch.inline_ptx(f"st.shared.f32 [{{$r0}}+{offset}], {{$r1}};", read_only_args=[address, value])


def store_shared_4(address: Int32, offset: int, values: list) -> None:
    letter = "f32" if isinstance(values[0], Float32) else "b32"
    cute.arch.inline_ptx(
        f"st.shared.v4.{letter} [{{$r0}}+{offset}], {_registers('r', 1, 4)};", read_only_args=[address, *values]
    )


# ---- arithmetic ----------------------------------------------------------------------------------------------------------
def pack_bf16(low: Float32, high: Float32) -> Int32:
    """Two numbers rounded to nearest even, `low` in the lower half."""
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Int32], read_only_args=[low, high]
    )


def exp2(x: Float32) -> Float32:
    return cute.math.exp2(x, fastmath=True)


def log2(x: Float32) -> Float32:
    return cute.math.log2(x, fastmath=True)


def add_all(a: list[Float32], b: list[Float32]) -> list[Float32]:
    """Elementwise sum, two at a time."""
    out = []
    for i in range(0, len(a), 2):
        out += cute.arch.add_packed_f32x2((a[i], a[i + 1]), (b[i], b[i + 1]))
    return out


def scale_all(a: list[Float32], factor: Float32) -> list[Float32]:
    out = []
    for i in range(0, len(a), 2):
        out += cute.arch.mul_packed_f32x2((a[i], a[i + 1]), (factor, factor))
    return out


def maximum(values: list[Float32]) -> Float32:
    """As a tree, which the compiler turns into three-way maxima."""
    while len(values) > 1:
        values = [cute.arch.fmax(*values[i : i + 2]) if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]
    return values[0]


def total(values: list[Float32]) -> Float32:
    pairs = [(values[i], values[i + 1]) for i in range(0, len(values), 2)]
    while len(pairs) > 1:
        pairs = [cute.arch.add_packed_f32x2(pairs[i], pairs[i + 1]) for i in range(0, len(pairs), 2)]
    return pairs[0][0] + pairs[0][1]


def keep_where(word: Int32, values: list[Float32]) -> list[Float32]:
    """values[j] where bit j of the word is set, else -inf."""
    return [
        cutlass.select_((word & Int32(_signed(1 << j))) != Int32(0), x, Float32(NEG_INF)) for j, x in enumerate(values)
    ]


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x
