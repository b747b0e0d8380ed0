"""The kernels of tools/hopper: the emulator against NumPy, and against a Hopper GPU where there is one.

tools/compare_with_gpu.py prints the same comparison as a table. Each case states its own tolerance, and why.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tools"))

import compare_with_gpu as compare  # noqa: E402
import hopper  # noqa: E402

QUICK = hopper.quick_cases()
ALL = hopper.all_cases()
SCHEDULES = ("eager", "lazy", "random")


def check(case, schedule: str, seed: int) -> None:
    made = compare.row(case, None, schedule, seed)
    assert made["ok"], made


@pytest.mark.parametrize("case", QUICK, ids=lambda c: c.name)
def test_against_numpy(case):
    check(case, SCHEDULES[QUICK.index(case) % 3], 1)


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(ALL)), ids=lambda i: ALL[i].name)
def test_every_case_against_numpy(index):
    check(ALL[index], SCHEDULES[index % 3], index)


# What the comparison must not let through: an edit to the PTX of one case, wrong bytes with no hazard to report.
WRONG = {
    "swizzle mode of a descriptor": ("bf16 n64 A K 128B", "or.b64 %desc_a, %wide, 0x40", "or.b64 %desc_a, %wide, 0x80"),
    "K step of an operand": ("bf16 n64 A K 128B", "add.u64 %db, %desc_b, 4;", "add.u64 %db, %desc_b, 2;"),
    "major of an operand": ("bf16 n64 A K 128B", "%da, %db, %more, 1, 1, 0, 0;", "%da, %db, %more, 1, 1, 0, 1;"),
    "box moved by one": ("tma_window", "add.s32 %e1, %c1, 8", "add.s32 %e1, %c1, 9"),
    "mask of the last keys": ("attention", "setp.gt.s32 %q, %left, 1", "setp.gt.s32 %q, %left, 3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_told(name):
    which, old, new = WRONG[name]
    case = compare.fresh(next(c for c in QUICK if which in c.name))
    assert old in case.ptx
    case.ptx = case.ptx.replace(old, new)
    compare.emulate(case)
    assert max(compare.distance(*o) for o in case.want) > 1


def test_a_missing_wait_is_told():
    case = compare.fresh(next(c for c in QUICK if c.name.startswith("transpose")))
    assert case.ptx.count("cp.async.wait_group 1;") == 1
    case.ptx = case.ptx.replace("cp.async.wait_group 1;", "cp.async.wait_group 2;")
    record = compare.emulate(case, "lazy")
    assert record.hazards and not np.array_equal(case.want[0][0], case.want[0][1])


@pytest.fixture(scope="module")
def gpu():
    try:
        return compare.Gpu()
    except compare.NoGpu as reason:
        pytest.skip(str(reason))


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(len(ALL)), ids=lambda i: ALL[i].name)
def test_against_the_gpu(gpu, index):
    made = compare.row(ALL[index], gpu, "eager", 0)
    assert made["ok"], made
