"""python -m cute_kernels.emulator: its arguments, exit statuses and what it prints. (A run in a process: test_machine_simt.py.)"""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from cute_kernels.emulator.__main__ import main, parse_argument

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from ptx_harness import HEAD, kernel  # noqa: E402
from test_run_ptx import BOX, LANES  # noqa: E402


@pytest.fixture
def call(tmp_path, capsys):
    """call(text, *arguments) -> (exit status, stdout, stderr) on a file of that text (None: a file that is not there)."""

    def run(text: str | None, *arguments: str):
        path = tmp_path / "k.ptx"
        if text is not None:
            path.write_text(text)
        try:
            status = main([str(path), *arguments])
        except SystemExit as e:
            status = e.code
        return status, *capsys.readouterr()

    return run


TWO = LANES + LANES.split("64\n", 1)[1].replace("entry k(", "entry l(")
RUN = ("--grid", "1", "--arg")
WRONG = {
    "no file": (None, (), "k.ptx: No such file"),
    "no npy": (LANES, (*RUN, "gone.npy"), "No such file or directory: 'gone.npy'"),
    "argument count": (LANES, ("--grid", "1"), "k takes 1 arguments, 0 given"),
    "dtype": (LANES, (*RUN, "f33:4"), "--arg f33:4: 'f33' is not one of int, float"),
    "fill": (LANES, (*RUN, "f32:4=ten"), "--arg f32:4=ten: fill 'ten' is not zeros"),
    "shape": (LANES, (*RUN, "f32:four"), "--arg f32:four: invalid literal"),
    "hex": (LANES, (*RUN, "hex:0g"), "--arg hex:0g: non-hexadecimal"),
    "scalar": (LANES, (*RUN, "float:1"), "cannot take float"),
    "no entry": (TWO, (*RUN, "u32:32"), "entry must be given: the file has k, l"),
    "other entry": (LANES, (*RUN, "u32:32", "--entry", "z"), "no entry 'z'; the file has k"),
    "no kernel": (HEAD.format(target="sm_100a"), (*RUN, "u32:32"), "the file has no kernel"),
    "map without box": (BOX, (*RUN, "map:u32:2x16", "--arg", "u32:32"), "a map needs box="),
    "map option": (BOX, (*RUN, "map:u32:2x16,boxes=2x16", "--arg", "u32:32"), "'boxes' is not one of box"),
    "map refused by the driver": (BOX, (*RUN, "map:u32:2x16,box=2x3", "--arg", "u32:32"), "must be a multiple of 16 bytes"),
    "grid": (LANES, ("--grid", "0", "--arg", "u32:32"), "'0' is not up to three positive integers"),
    "shared memory": (LANES, (*RUN, "u32:32", "--dynamic-smem", "-1"), "dynamic_smem must be at least 0"),
    "unknown option": (LANES, ("--gird", "1"), "unrecognized arguments: --gird 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_commands(call, case):
    text, arguments, words = WRONG[case]
    status, out, err = call(text, *arguments)
    assert status == 2 and out == "" and err.count("\n") == 1 and err.startswith("cute_kernels.emulator: error: ") and words in err
    status, out, err = call(text, *arguments, "--json")
    told = json.loads(out)
    assert status == 2 == told["status"] and words in told["error"] and err == ""


@pytest.mark.parametrize(
    "text, words",
    [("not PTX", "PTX line 1: unexpected 'not'"), (kernel("tex.2d.v4.f32.f32 %r1;"), "unsupported instruction tex.2d")],
)
def test_what_is_not_supported(call, text, words):
    status, out, err = call(text, *RUN, "u32:32")
    assert status == 3 and out == "" and words in err and err.count("\n") == 1
    status, out, err = call(text, *RUN, "u32:32", "--json")
    assert status == 3 and words in json.loads(out)["error"] and err == ""


def test_a_launch_that_fails_and_one_with_hazards(call):
    status, out, _ = call(LANES, *RUN, "u32:16", "--json")
    record = json.loads(out)
    assert status == 2 and record["error"].startswith("out-of-bounds global store") and len(record["hazards"]) == 1
    assert call(LANES.replace("mov.u32 %r1, %tx;", ""), *RUN, "u32:32")[0] == 1


def test_tensor_maps_and_bytes(call, tmp_path):
    np.save(tmp_path / "x.npy", np.arange(64, dtype=np.uint32).reshape(4, 16))
    (tmp_path / "address").write_bytes(bytes(8))
    status, out, _ = call(BOX, *RUN, f"map:{tmp_path}/x.npy,box=2x16", "--arg", "u32:32", "--out", str(tmp_path / "o"))
    assert status == 0 and "tma-load 128" in out
    assert np.load(tmp_path / "o" / "arg1.npy").tolist() == list(range(32)) and np.load(tmp_path / "o" / "arg0.npy").shape == (
        4,
        16,
    )
    for argument in ("hex:0000000000000000", f"bin:{tmp_path}/address"):  # a pointer of eight zero bytes
        status, out, _ = call(LANES, *RUN, argument)
        assert status == 2 and "that is a null pointer" in out
    tmap = parse_argument("map:bf16:64x128=ones,box=8x64,swizzle=128B,element_strides=2x1,oob=nan", np.random.default_rng(0))
    assert tmap.dtype == "bf16" and tmap.dims == (128, 64) and tmap.box == (64, 8) and tmap.element_strides == (1, 2)
    assert tmap.swizzle == "128B" and tmap.oob_fill == "nan" and set(tmap.array.ravel().tolist()) == {0x3F80}
