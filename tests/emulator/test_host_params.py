"""Parameter blocks, PTX lookup and DLPack relabelling, without the DSL."""

from __future__ import annotations

import ctypes

import pytest

from cute_kernels.emulator.host import params, ptx_store

PTX = """
.version 8.8
.target sm_100a
.address_size 64
.visible .entry first(
    .param .align 64 .b8 first_param_0[128], // a tensor map
    .param .u32 first_param_1,
    .param .u64 .ptr .global .align 16 first_param_2,
    .param .align 4 .b8 first_param_3[6],
    .param .u8 first_param_4
)
.reqntid 128, 1, 1
{ ret; }
.visible .entry second()
{ ret; }
"""


def test_layout_follows_alignment():
    assert params.entries(PTX) == ["first", "second"]
    assert params.target(PTX) == "sm_100a"
    assert [(offset, size) for _, offset, size in params.layout(PTX, "first")] == [
        (0, 128),
        (128, 4),
        (136, 8),
        (144, 6),
        (150, 1),
    ]
    assert params.layout(PTX, "second") == []


def test_layout_names_what_it_lacks():
    with pytest.raises(KeyError, match="no kernel third"):
        params.layout(PTX, "third")
    with pytest.raises(ValueError, match="not understood"):
        params.layout(".entry k(.param .texref t) {}", "k")


def test_gather_reads_every_slot():
    slots = [("a", 0, 4), ("b", 8, 8)]
    a, b = ctypes.c_uint32(7), ctypes.c_uint64(9)
    pointers = (ctypes.c_void_p * 2)(ctypes.addressof(a), ctypes.addressof(b))
    block = params.gather(slots, ctypes.addressof(pointers))
    assert block == bytes([7, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0])
    pointers[1] = None
    with pytest.raises(ValueError, match="null pointer"):
        params.gather(slots, ctypes.addressof(pointers))


def test_store_prefers_the_hash_and_refuses_to_guess(monkeypatch, tmp_path):
    for name in ("_by_hash", "_by_name", "_object_texts"):
        monkeypatch.setattr(ptx_store, name, {})
    for name in ("_folders", "_objects"):
        monkeypatch.setattr(ptx_store, name, [])
    cubin = b"\x7fELF one"
    with pytest.raises(ptx_store.MissingPtx, match="no PTX is known for kernel first"):
        ptx_store.find(cubin, "first")
    ptx_store.register_ptx("first", PTX)
    assert ptx_store.find(cubin, "first") == PTX
    other = PTX + "// other\n"
    ptx_store.register_ptx("first", other)
    with pytest.raises(ptx_store.MissingPtx, match="2 different PTX texts"):
        ptx_store.find(cubin, "first")
    ptx_store.register_ptx(ptx_store.cubin_hash(cubin), other)
    assert ptx_store.find(cubin, "first") == other
    with pytest.raises(ValueError, match="key must be"):
        ptx_store.register_ptx("fourth", PTX)
    with pytest.raises(ValueError, match="no .entry"):
        ptx_store.register_ptx("first", ".version 8.8")


def test_store_finds_the_neighbour_of_the_object_that_holds_the_cubin(monkeypatch, tmp_path):
    for name in ("_by_hash", "_by_name", "_object_texts"):
        monkeypatch.setattr(ptx_store, name, {})
    for name in ("_folders", "_objects"):
        monkeypatch.setattr(ptx_store, name, [])
    texts = {}
    for stem in ("x", "y"):
        (tmp_path / f"{stem}.o").write_bytes(b"object " + stem.encode() + b" cubin")
        texts[stem] = PTX + f"// {stem}\n"
        (tmp_path / f"{stem}.ptx").write_text(texts[stem])
    ptx_store.note_object(str(tmp_path / "x.o"))
    ptx_store.note_object(str(tmp_path / "y.o"))
    assert ptx_store.find(b"x cubin", "first") == texts["x"]
    assert ptx_store.find(b"y cubin", "first") == texts["y"]
    ptx_store.forget_objects()
    ptx_store._by_hash.clear()
    ptx_store.add_ptx_folder(str(tmp_path))
    assert ptx_store.find(b"x cubin", "first") == texts["x"]
    with pytest.raises(ptx_store.MissingPtx, match="2 different"):
        ptx_store.find(b"z cubin", "first")


def test_importing_the_host_does_not_load_the_dsl():
    import subprocess
    import sys

    code = (
        "import sys, cute_kernels.emulator.host;"
        "print([m for m in ('cutlass', 'tvm_ffi') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
