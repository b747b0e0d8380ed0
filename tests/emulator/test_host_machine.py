"""The hook on the real machine: small kernels of our own, run through their usual calls."""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

from cute_kernels.emulator import EmulationError, emulate  # noqa: E402

sys.path.insert(0, __file__.rsplit("/", 1)[0])
import host_kernels as kernels  # noqa: E402


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
def test_vector_add(arch, schedule):
    a, b, c = torch.randn(1000), torch.randn(1000), torch.full((1000,), float("nan"))
    with emulate(arch, schedule=schedule, seed=3) as emulation:
        kernels.compile_tvm_ffi()(a, b, c)
    assert torch.equal(c, a + b) and emulation.hazards == []
    counters = emulation.counters
    assert counters["opcodes"]["add.f32"] == 32 and counters["bytes"]["global-load"] == 2 * 4000
    assert emulation.captures[0].entry in emulation.report() and "0 hazards" in emulation.report()


def test_views_of_one_storage():
    storage = torch.randn(3, 1000)
    a, b, c = storage
    with emulate() as emulation:
        kernels.compile_tvm_ffi()(a, b, c)
    assert torch.equal(storage[2], storage[0] + storage[1]) and emulation.hazards == []


def increment(tensor, n: int):
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_ptr

    pointer = make_ptr(cutlass.Float32, tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=4)
    cute.compile(kernels.increment, pointer, n)(pointer, n)


def test_raw_pointers_have_the_bounds_of_their_tensor():
    x = torch.zeros(100)
    with emulate() as emulation:
        increment(x, 100)
        assert torch.equal(x, torch.ones(100)) and emulation.hazards == []
        with pytest.raises(EmulationError, match="4 bytes past the end"):
            increment(x, 101)


def test_memory_outside_torch_is_bounded_by_its_mapping():
    import mmap

    page = mmap.mmap(-1, mmap.PAGESIZE)
    x = torch.frombuffer(page, dtype=torch.float32)[:100].zero_()
    address = x.data_ptr()

    class Foreign:
        def data_ptr(self):
            return address

    keep = memoryview(page)
    del x
    with emulate():
        increment(Foreign(), 100)
    assert torch.equal(torch.frombuffer(keep, dtype=torch.float32)[:101], torch.tensor([1.0] * 100 + [0.0]))


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
def test_tma_tile_copy(arch, schedule):
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack

    source, target = torch.randn(128, 96).half(), torch.zeros(128, 96).half()
    with emulate(arch, schedule=schedule) as emulation:
        wrapped = [from_dlpack(t, assumed_align=16) for t in (source, target)]
        cute.compile(kernels.tile_copy, *wrapped)(*wrapped)
    assert torch.equal(source, target) and emulation.hazards == [], emulation.report()
    (tensor_map,) = emulation.captures[0].tensor_maps().values()
    assert tensor_map.address == source.data_ptr() and tensor_map.dtype == "f16" and tensor_map.swizzle == "64B"
    assert tensor_map.dims == (96, 128) and tensor_map.strides == (192,) and tensor_map.box == (32, 64)


def test_failed_launches_are_recorded_in_order():
    x, y = torch.zeros(100), torch.zeros(100)
    with emulate() as emulation:
        increment(x, 100)
        with pytest.raises(EmulationError, match="4 bytes past the end") as caught:
            increment(y, 101)
        increment(x, 100)
        with pytest.raises(ValueError, match="seed"):  # before anything runs: a capture without a launch
            emulation.seed, seed = "x", emulation.seed
            increment(x, 100)
        emulation.seed = seed
    first, failed, last = emulation.launches
    assert failed is caught.value.record and [c.launch for c in emulation.captures] == [first, failed, last, None]
    assert [bool(r.error) for r in emulation.launches] == [False, True, False] and str(caught.value) == failed.error
    assert [h.kind for h in emulation.hazards] == ["out-of-bounds-global"] == [h.kind for h in failed.hazards]
    assert 0 < failed.counters.total < first.counters.total
    lines = emulation.report().splitlines()
    at = [k for k, text in enumerate(lines) if text.startswith("launch ")]
    assert [lines[k].split(": ")[-1].split(", ")[:2] for k in at[1:2]] == [["did not finish", "1 hazard"]]
    assert lines[at[0]].split(": ")[-1].startswith("0 hazards, ") and lines[at[2]].split(": ")[-1].startswith("0 hazards, ")
    assert lines[at[1] + 1].startswith("  ERROR out-of-bounds global") and lines[at[1] + 2].startswith("  out-of-bounds-global: ")
    assert at[2] == at[1] + 3 and lines[at[3]].endswith("did not finish") and "ERROR" in lines[at[3] + 1]
