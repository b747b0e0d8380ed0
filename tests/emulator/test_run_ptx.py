"""What `run_ptx` takes, refuses and reports about a launch that failed."""

from __future__ import annotations

import gc
import sys
import weakref

import numpy as np
import pytest

from cute_kernels.emulator import EmulationError, TensorMap, UnsupportedInstruction, run_ptx
from cute_kernels.emulator.machine.report import format_record, format_survey

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from ptx_harness import HEAD, kernel  # noqa: E402

STORE = "mul.wide.u32 %d1, %tx, 4;\nadd.u64 %d1, %a0, %d1;\nst.global.u32 [%d1], %r1;"
#: thread t stores t to out[t]
LANES = kernel("mov.u32 %r1, %tx;\n" + STORE)
#: thread t loads word t of a 2 x 16 box, which a tensor copy brought to shared memory, and stores it to out[t]
BOX = kernel(
    """
mov.u32 %r2, bars;
mov.u32 %r3, tile;
mov.u64 %d1, m;
mov.b32 %r7, 0;
setp.ne.u32 %p1, %tx, 0;
@%p1 bra B;
mbarrier.init.shared.b64 [%r2], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 %d9, [%r2], 128;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r3], [%d1, {%r7, %r7}], [%r2];
B: bar.sync 0;
L: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0;
@!%p2 bra L;
mad.lo.u32 %r4, %tx, 4, %r3;
ld.shared.u32 %r1, [%r4];
"""
    + STORE,
    shared=".shared .align 8 .b64 bars;\n.shared .align 128 .b8 tile[128];",
).replace("k(", "k(.param .align 64 .b8 m[128], ")


def zeros(n: int = 32) -> np.ndarray:
    return np.zeros(n, np.uint32)


def test_a_tensor_map_keeps_its_array_alive():
    array = np.arange(1 << 16, dtype=np.uint32).reshape(-1, 16)
    want, alive = array[:2].ravel().tolist(), weakref.ref(array)
    tmap, out = TensorMap.tiled(array, box=(2, 16)), zeros()
    del array
    gc.collect()
    assert alive() is tmap.array
    assert run_ptx(BOX, 1, 32, [tmap, out]).hazards == [] and out.tolist() == want
    same = TensorMap.decode(tmap.encode())
    assert same == tmap and hash(same) == hash(tmap) and same.array is None
    del tmap
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    "array",
    [
        zeros(64)[::2],
        zeros()[::-1],
        zeros(64).reshape(32, 2)[:, 0],
        np.broadcast_to(zeros(1), (32,)),
        zeros(64).reshape(8, 8)[:, :4],
    ],
    ids=["step", "reversed", "column", "broadcast", "columns"],
)
def test_arrays_with_gaps_are_refused(array):
    before = array.copy()
    with pytest.raises(ValueError, match=r"argument 0, shape \(.*does not fill its storage"):
        run_ptx(LANES, 1, 32, [array])
    assert (array == before).all()


@pytest.mark.parametrize("axes", [(0, 1), (1, 0)])
def test_arrays_without_gaps_in_any_order_of_axes(axes):
    array = zeros().reshape(8, 4).transpose(axes)
    run_ptx(LANES, 1, 32, [array])
    assert array.transpose(axes).ravel().tolist() == list(range(32))


def test_arrays_of_objects_are_refused():
    with pytest.raises(TypeError, match="argument 0 holds Python objects"):
        run_ptx(LANES, 1, 32, [np.zeros(32, object)])


def test_clusters_and_grids_are_integers():
    text = kernel("mov.u32 %r1, %cluster_nctarank;\n" + STORE)
    for cluster in (2, np.int64(2), (2,), (2, 1, 1), np.array([2, 1, 1])):
        out = zeros()
        assert run_ptx(text, np.int32(2), 32, [out], cluster=cluster).cluster == (2, 1, 1) and set(out) == {2}
    for name, wrong in {"grid": 2.0, "block": (32.5, 1, 1), "cluster": "2"}.items():
        with pytest.raises(TypeError, match=f"{name} must be an integer or up to three of them, not "):
            run_ptx(text, **({"grid": 2, "block": 32} | {name: wrong}), args=[zeros()])
    with pytest.raises(ValueError, match="grid must be three positive integers"):
        run_ptx(text, 0, 32, [zeros()])


def directed(*directives: str) -> str:
    return LANES.replace("p0)", "p0) " + " ".join(directives))


@pytest.mark.parametrize("directive", [".maxntid 64", ".maxntid 64, 1, 1", ".maxntid 8, 8"])
def test_maxntid_bounds_the_block(directive):
    run_ptx(directed(directive), 1, 64, [zeros(64)])
    with pytest.raises(ValueError, match=r"block \(96, 1, 1\) has 96 threads; .maxntid .* allows 64"):
        run_ptx(directed(directive), 1, 96, [zeros(96)])


def test_directives_bound_the_cluster():
    required, most = directed(".reqnctapercluster 2"), directed(".maxclusterrank 2")
    assert run_ptx(required, 2, 32, [zeros()]).cluster == (2, 1, 1)
    with pytest.raises(ValueError, match=r"cluster \(4, 1, 1\) differs from .reqnctapercluster"):
        run_ptx(required, 4, 32, [zeros()], cluster=4)
    run_ptx(most, 2, 32, [zeros()], cluster=2)
    with pytest.raises(ValueError, match="4 CTAs; .maxclusterrank allows 2"):
        run_ptx(most, 4, 32, [zeros()], cluster=4)


SCALAR = (HEAD + ".visible .entry k(.param .u64 p, .param .{type} n) {{ .reg .b64 %a; .reg .b{bits} %n; ld.param.u64 %a, [p];\n"
          "ld.param.b{bits} %n, [n]; st.global.b{bits} [%a], %n; ret; }}")  # fmt: skip


@pytest.mark.parametrize(
    "kind, bits, fits, too_big",
    [
        ("u32", 32, [-(2**31), -1, 2**32 - 1], [2**32, 2**40, -(2**31) - 1]),
        ("u64", 64, [2**64 - 1], [2**64]),
        ("s16", 16, [-5], [2**16]),
    ],
)
def test_scalars_fit_their_parameter(kind, bits, fits, too_big):
    text = SCALAR.format(type=kind, bits=bits, target="sm_100a")
    for value in fits:
        out = np.zeros(1, f"u{bits // 8}")
        run_ptx(text, 1, 1, [out, value])
        assert int(out[0]) == value % 2**bits
    for value in too_big:
        with pytest.raises(ValueError, match=f"parameter n .* cannot hold {value}"):
            run_ptx(text, 1, 1, [np.zeros(1, f"u{bits // 8}"), value])


def test_mistakes_in_words():
    with pytest.raises(ValueError, match="dynamic_smem must be at least 0, not -1"):
        run_ptx(LANES, 1, 32, [zeros()], dynamic_smem=-1)
    with pytest.raises(TypeError, match="ptx must be a str or a parsed Module, not bytes"):
        run_ptx(LANES.encode(), 1, 32, [zeros()])
    with pytest.raises(ValueError, match="the file has no kernel"):
        run_ptx(HEAD.format(target="sm_100a"), 1, 32)
    for text in ("add.u32 %r1;", "st.global.u32 [%a0];"):
        with pytest.raises(UnsupportedInstruction, match=r"PTX line \d+: unsupported instruction .*;: the number of its operands"):
            run_ptx(kernel(text), 1, 32, [zeros()])


NEAR = {
    "%d1": (0, "in no allocation; that is a null pointer"),
    "%d1+64": (0, "in no allocation; that is a null pointer and 64 bytes"),
    "%d1+32": (1 << 20, "in no allocation, nor near one"),
    "%a0+128": (0, "4 bytes past the end of argument 0 "),
}


@pytest.mark.parametrize("operand", NEAR)
def test_where_an_address_lies(operand):
    base, words = NEAR[operand]
    with pytest.raises(EmulationError, match="out-of-bounds global store") as caught:
        run_ptx(kernel(f"mov.u64 %d1, {base};\nst.global.u32 [{operand}], %tx;"), 1, 1, [zeros()])
    assert len(caught.value.record.hazards) == 1
    assert words in str(caught.value)


def test_a_failed_launch_counts_what_ran():
    body = "mov.u32 %r1, %tx;\n" + STORE + "\nsetp.lt.u32 %p1, %tx, 32;\n@%p1 ret;\ntrap;"
    with pytest.raises(EmulationError, match="trap executed") as caught:
        run_ptx(kernel(body), 1, 64, [zeros(64)])
    record = caught.value.record
    assert record.counters.opcodes["st.global.u32"] == 2 and set(record.counters.roles) == {"warps 0", "warps 1"}
    assert record.counters.bytes["global-store"] == 256
    assert f" {record.counters.total} warp-instructions of 1 CTA in " in format_record(record)


def test_one_of_a_thing():
    from cute_kernels.emulator.machine.program import survey
    from cute_kernels.emulator.ptx.parser import parse

    module = parse(LANES)
    assert ", 1 entry\n" in format_survey(survey(module), module.version, module.target)
