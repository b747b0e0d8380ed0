"""Our own operators inside an emulation: the target they see, and that it leaves with the block."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")
target = pytest.importorskip("cute_kernels.jit.target")

from cute_kernels.emulator.host import current, emulate, ptx_store, record_only  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize("arch, sms", [("sm_100a", 148), ("sm_90a", 132)])
def test_cpu_tensors_have_the_emulated_target(arch, sms):
    assert target.current_target(CPU) is None
    with emulate(arch, backend=record_only) as emulation:
        seen = target.current_target(CPU)
        assert (seen.arch, seen.num_sms) == (arch, sms)
        assert seen.backend.emulation is emulation is current()
    assert target.current_target(CPU) is None


def test_nested_and_failed_blocks_leave_the_outer_target():
    with emulate("sm_100a", backend=record_only):
        with pytest.raises(ZeroDivisionError):
            with emulate("sm_90a", backend=record_only, sm_count=3):
                assert target.current_target(CPU).num_sms == 3
                raise ZeroDivisionError
        assert target.current_target(CPU).arch == "sm_100a"
    assert target.current_target(CPU) is None


def test_other_threads_have_no_target():
    seen = []
    with emulate(backend=record_only):
        thread = threading.Thread(target=lambda: seen.append(target.current_target(CPU)))
        thread.start()
        thread.join()
    assert seen == [None]


def test_noted_objects_bring_their_ptx(tmp_path, monkeypatch):
    for name in ("_by_hash", "_by_name", "_object_texts"):
        monkeypatch.setattr(ptx_store, name, {})
    monkeypatch.setattr(ptx_store, "_objects", [])
    path = tmp_path / "k.o"
    path.write_bytes(b"head cubin tail")
    text = ".target sm_100a\n.entry k() { ret; }"
    with emulate(backend=record_only):
        target.current_target(CPU).backend.note_object(str(path), text)
    assert ptx_store.find(b"cubin", "k") == text
    path.unlink()
    with pytest.raises(ptx_store.MissingPtx):
        ptx_store.find(b"other", "k")


def test_an_operator_without_a_kernel_raises_instead_of_running_the_reference(monkeypatch):
    import cute_kernels
    from cute_kernels.ops import dispatch

    indices = torch.zeros(4, 1, 8, dtype=torch.int32)
    monkeypatch.setattr(dispatch, "KERNELS", {})
    cute_kernels.group_topk(indices, 16)
    with emulate("sm_103a", backend=record_only):
        with pytest.raises(dispatch.NoKernelError, match="sm_103a"):
            cute_kernels.group_topk(indices, 16)
    cute_kernels.group_topk(indices, 16)
    assert cute_kernels.last_backend() == "reference[cpu]"
