# ruff: noqa: E501  (assembly reads better unbroken)
"""The PTX front end: forms, scopes, inlining, reconvergence points, and errors that name the line."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_harness import HEAD, kernel

from cute_kernels.emulator import PtxError, UnsupportedInstruction, run_ptx
from cute_kernels.emulator.machine import engine  # noqa: F401  (registers the instructions)
from cute_kernels.emulator.machine.program import Program, survey
from cute_kernels.emulator.ptx.flatten import flatten
from cute_kernels.emulator.ptx.ir import Instr, Mem, Pair, Vec
from cute_kernels.emulator.ptx.parser import parse, parse_number


@pytest.mark.parametrize(
    "text,value",
    [("0x1F", 31), ("0b101", 5), ("017", 15), ("42U", 42), ("0f3F800000", 1.0), ("0d4000000000000000", 2.0), ("1.5", 1.5)],
)
def test_literals(text, value):
    assert parse_number(text).value == value


def test_module_structure():
    text = (
        HEAD.format(target="sm_90a")
        + """
.file 1 "a.cu"
.global .align 8 .u64 table[2] = {generic(other), 7};
.global .align 4 .u32 other = 5;
.const .align 4 .f32 c[2] = {0f3F800000, 2.0};
.extern .shared .align 16 .b8 dyn[];
.visible .entry k(.param .u64 p, .param .align 64 .b8 tmap[128])
.reqntid 64, 1, 1
{
 .reg .b32 %r<4>;
 .loc 1 12 3
 mov.u32 %r1, %tid.x;
 ret;
}
"""
    )
    m = parse(text)
    assert m.version == (8, 8) and m.target == "sm_90a" and m.entries == ["k"]
    k = m.functions["k"]
    assert [p.size for p in k.params] == [8, 128] and k.directives["reqntid"] == (64, 1, 1)
    flat = flatten(m, "k")
    assert flat.params[1].offset == 64 and flat.param_bytes == 192
    assert [v.size for v in m.variables] == [16, 4, 8, 0]
    first = next(x for x in k.body if isinstance(x, Instr))
    assert first.loc == (1, 12) and first.line == 15


def test_operand_forms():
    body = (
        "setp.lt.s32 %p1|%p2, %tx, 5;\nld.global.v4.b32 {%r1, %r2, %r3, _}, [%a0+16];\n"
        "@!%p1 mov.b64 {%r4, %r5}, %a0;\nshfl.sync.idx.b32 %r6|%p3, %r4, 0, 31, -1;\n"
    )
    ins = [x for x in parse(kernel(body)).functions["k"].body if isinstance(x, Instr)]
    setp, ld, mov, shfl = ins[2:6]
    assert isinstance(setp.operands[0], Pair)
    assert isinstance(ld.operands[0], Vec) and isinstance(ld.operands[1], Mem) and ld.operands[1].offset == 16
    assert mov.pred_neg and mov.pred.name == "%p1"
    assert isinstance(shfl.operands[0], Pair)


def test_names_are_scoped():
    """Inline assembly repeats register and label names: each pair of braces has its own."""
    block = "{\n.reg .pred P1;\nsetp.ne.u32 P1, %tx, 0;\n@P1 bra DONE;\nadd.u32 %r1, %r1, 1;\nDONE:\n}\n"
    body = "mov.u32 %r1, 0;\n" + block + block + "mul.wide.u32 %d1, %tx, 4;\nadd.u64 %d1, %a0, %d1;\nst.global.u32 [%d1], %r1;"
    out = np.zeros(32, np.uint32)
    run_ptx(kernel(body), 1, 32, [out])
    assert out.tolist() == [2] + [0] * 31


def test_functions_are_inlined_with_their_own_registers():
    text = (
        HEAD.format(target="sm_90a")
        + """
.func (.param .b32 r) twice(.param .b32 x)
{
 .reg .b32 %r<3>;
 .reg .pred %p<2>;
 ld.param.b32 %r1, [x];
 setp.gt.s32 %p1, %r1, 10;
 @%p1 bra BIG;
 add.s32 %r2, %r1, %r1;
 st.param.b32 [r], %r2;
 ret;
BIG:
 st.param.b32 [r], -1;
 ret;
}
.visible .entry k(.param .u64 p)
{
 .reg .b32 %r<5>;
 .reg .b64 %d<3>;
 ld.param.u64 %d1, [p];
 mov.u32 %r1, %tid.x;
 {
 .param .b32 a0;
 st.param.b32 [a0], %r1;
 .param .b32 r0;
 call.uni (r0), twice, (a0);
 ld.param.b32 %r2, [r0];
 }
 {
 .param .b32 a0;
 st.param.b32 [a0], %r2;
 .param .b32 r0;
 call (r0), twice, (a0);
 ld.param.b32 %r2, [r0];
 }
 mul.wide.u32 %d2, %r1, 4;
 add.u64 %d1, %d1, %d2;
 st.global.b32 [%d1], %r2;
 ret;
}
"""
    )
    out = np.zeros(32, np.int32)
    record = run_ptx(text, 1, 32, [out])

    def twice(x):
        return -1 if x > 10 else 2 * x

    assert out.tolist() == [twice(twice(i)) for i in range(32)] and record.hazards == []


def test_branch_table_and_reconvergence():
    body = (
        "and.b32 %r1, %tx, 3;\nts: .branchtargets L0, L1, L2, L3;\nbrx.idx %r1, ts;\n"
        "L0: mov.u32 %r2, 10;\nbra.uni J;\nL1: mov.u32 %r2, 20;\nbra.uni J;\nL2: mov.u32 %r2, 30;\nbra.uni J;\nL3: mov.u32 %r2, 40;\n"
        "J:\nactivemask.b32 %r3;\nand.b32 %r3, %r3, 0xff;\nadd.u32 %r2, %r2, %r3;\n"
        "mul.wide.u32 %d1, %tx, 4;\nadd.u64 %d1, %a0, %d1;\nst.global.u32 [%d1], %r2;"
    )
    out = np.zeros(32, np.uint32)
    run_ptx(kernel(body), 1, 32, [out])
    assert out.tolist() == [10 * (i % 4 + 1) + 0xFF for i in range(32)]  # all lanes are together again at J


def test_errors_name_the_line():
    with pytest.raises(PtxError, match="PTX line 16: unknown name '%zz'"):
        parse(kernel("mov.u32 %zz, 1;"))
    with pytest.raises(PtxError, match="unexpected character"):
        parse("?")
    with pytest.raises(PtxError, match="unknown label NOWHERE"):
        flatten(parse(kernel("bra NOWHERE;")), "k")
    with pytest.raises(PtxError, match="no entry 'x'"):
        flatten(parse(kernel("")), "x")


def test_unknown_instructions_are_reported_before_the_launch():
    out = np.zeros(32, np.uint32)
    body = "mul.wide.u32 %d1, %tx, 4;\nadd.u64 %d1, %a0, %d1;\nst.global.u32 [%d1], 1;\nfrobnicate.b32 %r1, %r2;\nadd.foo.u32 %r1, %tx, 1;"
    with pytest.raises(
        UnsupportedInstruction, match=r"PTX line 19: unsupported instruction frobnicate\.b32.*line 20.*add\.foo\.u32"
    ):
        run_ptx(kernel(body), 1, 32, [out])
    assert not out.any()
    table = survey(parse(kernel(body)))["k"]
    assert not table["frobnicate.b32"]["supported"] and table["st.global.u32"]["supported"]


FUNCTIONS = """
.func (.param .b32 r) twice(.param .b32 x) { .reg .b32 %n; ld.param.b32 %n, [x]; add.u32 %n, %n, %n; st.param.b32 [r], %n; ret; }
.global .u64 table[3] = {0, twice, generic(twice)};
.global .u64 pointer[1] = {generic(table)};
.global .align 4 .u32 number[1] = {7};
.visible .entry direct(.param .u64 p) {
.reg .b64 %a; .reg .b32 %n; ld.param.u64 %a, [p]; ld.global.u32 %n, [number];
{ .param .b32 x; .param .b32 y; st.param.b32 [x], %n; call (y), twice, (x); ld.param.b32 %n, [y]; }
st.global.u32 [%a], %n; ret; }
"""


@pytest.mark.parametrize(
    "use", ["mov.u64 %b, twice;", "mov.u64 %b, table;", "ld.global.u64 %b, [table+8];", "mov.u64 %b, pointer;"]
)
def test_the_address_of_a_function_makes_its_entry_alone_unusable(use):
    text = HEAD.format(target="sm_100a") + FUNCTIONS + ".visible .entry indirect() { .reg .b64 %b; " + use + " ret; }"
    out = np.zeros(1, np.uint32)
    run_ptx(text, 1, 1, [out], entry="direct")
    assert out[0] == 14
    line = text.count("\n") + 1
    with pytest.raises(UnsupportedInstruction, match=rf"PTX line {line}: unsupported instruction .*: the address of function twice"):
        run_ptx(text, 1, 1, entry="indirect")
    table = survey(parse(text))
    assert all(row["supported"] for row in table["direct"].values())
    assert [row["why"] for row in table["indirect"].values() if not row["supported"]]


def test_programs_hold_few_items():
    """Straight-line code becomes one item, whatever its length."""
    program = Program(parse(kernel("add.u32 %r1, %tx, 1;\n" * 50)), "k")
    assert len(program.items) == 2
