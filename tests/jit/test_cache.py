"""The disk cache: hits, damage, folders that cannot be written, pruning; and the way from a builder to a function through it."""

import errno
import json
import os
import tempfile
import threading
import time
import warnings

import pytest
import torch

from cute_kernels import jit
from cute_kernels.jit import builder as builders
from cute_kernels.jit import cache
from cute_kernels.jit import compile as compiler

# What the DSL compiles for if nobody says: only this arch's functions can be called in the process that compiled them.
NATIVE = (jit.current_target(torch.device("cuda", 0)) if torch.cuda.is_available() else None) or jit.Target("sm_100a", 148)
FILES = {"kernel.o": b"object", "kernel.ptx": b"ptx", "kernel.cubin": b"cubin"}
KEY, OTHER = "a1" * 32, "b2" * 32


def anew(toy):
    """As a new process would see it: nothing in memory."""
    toy.forget()
    return toy


def test_an_entry_comes_back(cache_folder):
    assert cache.lookup("k", "sm_90a", KEY) is None
    entry = cache.publish("k", "sm_90a", KEY, FILES, {"config": 1})
    found = cache.lookup("k", "sm_90a", KEY)
    assert found.folder == entry.folder and found.ptx() == "ptx" and found.cubin() == b"cubin" and found.meta["config"] == 1
    assert found.object_path.read_bytes() == b"object"
    assert cache.lookup("k", "sm_100a", KEY) is None and cache.lookup("k", "sm_90a", OTHER) is None
    assert cache.lookup("other", "sm_90a", KEY) is None
    assert not list(cache_folder.rglob(".new-*"))


@pytest.mark.parametrize("file", ["kernel.o", "kernel.ptx", "kernel.cubin", "meta.json"])
@pytest.mark.parametrize("damage", ["truncate", "empty", "change", "remove"])
def test_a_damaged_entry_is_a_miss_and_is_replaced(file, damage):
    path = cache.publish("k", "sm_90a", KEY, FILES, {}).folder / file
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes({"truncate": data[:-1], "empty": b"", "change": bytes([data[0] ^ 1]) + data[1:]}[damage])
    assert cache.lookup("k", "sm_90a", KEY) is None
    assert cache.publish("k", "sm_90a", KEY, FILES, {}) is not None
    assert cache.lookup("k", "sm_90a", KEY) is not None


def test_a_whole_entry_is_replaced_only_on_request():
    # Who compiled it first may have loaded those very files.
    cache.publish("k", "sm_90a", KEY, FILES, {"by": "first"})
    assert cache.publish("k", "sm_90a", KEY, FILES, {"by": "second"}).meta["by"] == "first"
    assert cache.publish("k", "sm_90a", KEY, FILES, {"by": "third"}, replace=True).meta["by"] == "third"
    assert cache.lookup("k", "sm_90a", KEY).meta["by"] == "third"


def test_an_entry_of_another_arch_or_key_is_a_miss():
    # A wrong-arch object links without complaint and fails at launch only, so it must not get that far.
    source = cache.publish("k", "sm_90a", KEY, FILES, {}).folder
    for arch, key in (("sm_100a", KEY), ("sm_90a", OTHER)):
        os.rename(source, target := cache._folder("k", arch, key))
        assert cache.lookup("k", arch, key) is None
        source = target


def test_meta_of_another_shape_is_a_miss():
    folder = cache.publish("k", "sm_90a", KEY, FILES, {}).folder
    wrong_files = json.dumps({"format": cache.FORMAT, "arch": "sm_90a", "key": KEY, "files": 3})
    for text in ("[]", "null", '{"format": "v0"}', wrong_files, "[" * 100_000):
        (folder / "meta.json").write_text(text)
        assert cache.lookup("k", "sm_90a", KEY) is None


def test_files_that_others_could_have_written_are_not_loaded():
    folder = cache.publish("k", "sm_90a", KEY, FILES, {}).folder
    assert not folder.stat().st_mode & 0o022
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="can be written by other users"):
        assert cache.lookup("k", "sm_90a", KEY) is None


def test_switched_off(monkeypatch, cache_folder):
    monkeypatch.setenv("CUTE_KERNELS_CACHE", "0")
    assert cache.publish("k", "sm_90a", KEY, FILES, {}) is None
    with cache.lock(KEY):
        pass
    assert not cache_folder.exists()


def test_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", "~/x")
    assert str(cache.root()) == os.path.expanduser("~/x")
    monkeypatch.delenv("CUTE_KERNELS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.root() == tmp_path / "cute_kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative, which the XDG rules tell to ignore")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(cache.root()) == "/home/somebody/.cache/cute_kernels"


def test_pruning_keeps_what_was_used_last(monkeypatch):
    keys = [f"{i:02d}" * 32 for i in range(4)]
    for age, key in enumerate(keys):
        meta = cache.publish("k", "sm_90a", key, {**FILES, "kernel.o": bytes(2**20)}, {}).folder / "meta.json"
        os.utime(meta, (time.time() - 1000 * (age + 1),) * 2)
    assert cache.lookup("k", "sm_90a", keys[3]) is not None  # a use
    monkeypatch.setenv("CUTE_KERNELS_CACHE_MAX_MB", "2.5")
    assert cache.prune() == 2
    assert [cache.lookup("k", "sm_90a", k) is not None for k in keys] == [True, False, False, True]
    for unlimited in ("0", "nonsense"):
        monkeypatch.setenv("CUTE_KERNELS_CACHE_MAX_MB", unlimited)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert cache.prune() == 0
        assert [w for w in seen if "must be a number" in str(w.message)] if unlimited == "nonsense" else not seen


def test_a_limit_smaller_than_one_entry_keeps_the_newest(monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_CACHE_MAX_MB", "0.00001")
    cache.publish("k", "sm_90a", KEY, FILES, {})
    cache.publish("k", "sm_90a", OTHER, FILES, {})
    assert cache.lookup("k", "sm_90a", KEY) is None and cache.lookup("k", "sm_90a", OTHER) is not None


def test_remains_of_an_interrupted_write_go_after_a_day(cache_folder):
    cache.publish("k", "sm_90a", KEY, FILES, {})
    old, young = (cache_folder / cache.FORMAT / "k" / name for name in (".new-old", ".new-young"))
    for folder in (old, young):
        folder.mkdir()
        (folder / "kernel.o").write_bytes(b"x")
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    cache.prune()
    assert not old.exists() and young.exists() and cache.lookup("k", "sm_90a", KEY)


def test_clear_cache():
    for key in (KEY, OTHER):
        cache.publish("k", "sm_90a", key, FILES, {})
    with cache.lock(KEY):
        assert jit.clear_cache() == 2  # takes the lock file too, which must confuse nobody
        assert cache.lookup("k", "sm_90a", KEY) is None
    with cache.lock(KEY):
        pass
    assert jit.clear_cache() == 0


def test_threads_wait_for_each_other():
    inside, most = [0], [0]

    def work():
        with cache.lock(KEY):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.01)
            inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert most == [1]


# ---- through a builder ---------------------------------------------------------------------------------------------


def test_memory_then_disk_then_compile(toy_kernel):
    toy, config = toy_kernel.load()
    made = toy.artifact(config(2.0), "sm_100a")
    assert made.origin == "compiled" and ".target sm_100a" in made.ptx and made.cubin[:4] == b"\x7fELF"
    assert made.cubin in made.object_path.read_bytes(), "the emulator ties an object's kernels to the PTX beside it by this"
    assert made.object_path.with_suffix(".ptx").read_text() == made.ptx
    again = toy.artifact(config(2.0), "sm_100a")
    assert again.origin == "disk" and (again.ptx, again.cubin, again.dynamic_smem) == (made.ptx, made.cubin, made.dynamic_smem)
    function = toy(config(2.0), "sm_100a")
    assert toy(config(2.0), "sm_100a") is function and type(function).__name__ == "Function"
    assert toy(config(2.0), jit.Target("sm_100a", 148)) is not None
    assert toy_kernel.compiles == 1
    toy(config(3.0), "sm_100a"), toy(config(2.0), "sm_90a")
    assert toy_kernel.compiles == 3


def test_an_unloadable_entry_is_compiled_anew(toy_kernel):
    toy, config = toy_kernel.load()
    made = toy.artifact(config(2.0), "sm_90a")
    # Whole by its own account, but no object file.
    material = json.loads((made.object_path.parent / "meta.json").read_text())
    cache.publish(toy.name, "sm_90a", made.key, {**FILES, "kernel.ptx": made.ptx.encode()}, material, replace=True)
    with pytest.warns(RuntimeWarning, match="does not load, compiling anew"):
        toy(config(2.0), "sm_90a")
    assert toy_kernel.compiles == 2
    assert anew(toy)(config(2.0), "sm_90a") and toy_kernel.compiles == 2, "the bad entry was replaced"


def unwritable(monkeypatch, tmp_path, how):
    if how == "not a folder":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "file" / "cache"))
        return

    def refuse(*args, **kwargs):
        raise OSError(how, os.strerror(how))

    if how == errno.EROFS:  # nothing can be created
        real_open, real_folder, inside = os.open, tempfile.mkdtemp, str(cache.root())

        def open_(path, flags, *a, **k):
            return refuse() if flags & os.O_CREAT and str(path).startswith(inside) else real_open(path, flags, *a, **k)

        def mkdtemp(suffix=None, prefix=None, dir=None):
            return refuse() if str(dir).startswith(inside) else real_folder(suffix, prefix, dir)

        monkeypatch.setattr(os, "open", open_)
        monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    else:  # full: names can be created, contents cannot be written
        real_write = cache.Path.write_bytes

        def write(self, data):
            return refuse() if cache.FORMAT in self.parts else real_write(self, data)

        monkeypatch.setattr(cache.Path, "write_bytes", write)


@pytest.mark.parametrize("how", ["not a folder", errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_is_survived_with_one_warning(toy_kernel, monkeypatch, tmp_path, how):
    toy, config = toy_kernel.load()
    unwritable(monkeypatch, tmp_path, how)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        functions = [anew(toy)(config(2.0), "sm_90a") for _ in range(2)]
    assert all(functions) and toy_kernel.compiles == 2
    assert len([w for w in seen if "cannot be kept" in str(w.message)]) == 1, [str(w.message) for w in seen]
    assert not list(tmp_path.rglob(".new-*")), "no remains"


def test_a_read_only_folder_still_serves_what_it_has(toy_kernel, monkeypatch, tmp_path):
    toy, config = toy_kernel.load()
    toy.artifact(config(2.0), "sm_90a")
    unwritable(monkeypatch, tmp_path, errno.EROFS)
    monkeypatch.setattr(cache.os, "utime", lambda *a: (_ for _ in ()).throw(OSError(errno.EROFS, "")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert toy(config(2.0), "sm_90a") and toy_kernel.compiles == 1


def test_nowhere_to_write_at_all(toy_kernel, monkeypatch):
    toy, config = toy_kernel.load()
    monkeypatch.setenv("CUTE_KERNELS_CACHE", "0")

    def refuse(*args):
        raise OSError(errno.ENOSPC, "")

    monkeypatch.setattr(compiler, "private_folder", refuse)
    function = toy(config(2.0), NATIVE.arch)
    assert type(function).__name__ == "Function", "the in-process function, without the wrapper for keyword arguments"


def test_an_export_that_fails_does_not_break_the_launch(toy_kernel, monkeypatch):
    from cutlass.cutlass_dsl import tvm_ffi_provider

    def refuse(self, *args, **kwargs):
        raise RuntimeError("no export today")

    toy, config = toy_kernel.load()
    monkeypatch.setattr(tvm_ffi_provider.TVMFFIJitCompiledFunctionBase, "export_to_c", refuse)
    with pytest.warns(RuntimeWarning, match="cannot be exported.*no export today"):
        made = toy.artifact(config(2.0), NATIVE.arch)
        other = toy.artifact(config(2.0), "sm_90a" if NATIVE.arch != "sm_90a" else "sm_100a")
    assert made.object_path is None and f".target {NATIVE.arch}" in made.ptx and type(made.load()).__name__ == "Function"
    with pytest.raises(jit.CompileError, match="could not be exported"):
        other.load()


def test_a_compile_that_fails_says_which_kernel(toy_kernel):
    toy, config = toy_kernel.load()
    with pytest.raises(jit.CompileError, match=rf"{toy.name} .*scale.* does not compile for sm_90a: no negative scale") as caught:
        toy(config(-1.0), "sm_90a")
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(jit.CompileError):
        toy(config(-1.0), "sm_90a")  # a failure is not remembered as a kernel
    assert toy(config(2.0), "sm_90a")


def test_an_arch_that_the_kernel_is_not_for(toy_kernel):
    toy, config = toy_kernel.load()
    for arch, text in (("sm_103a", f"kernel {toy.name} is for sm_90a, sm_100a"), ("sm_75", "must be one of the supported")):
        with pytest.raises(jit.UnsupportedGPUError, match=text):
            toy(config(2.0), arch)


def test_two_kernels_of_one_name(toy_kernel, tmp_path):
    toy_kernel.load()
    with pytest.raises(ValueError, match="two kernels are named"):
        builders.kernel_builder(toy_kernel.package, archs=("sm_90a",))(lambda config, arch: None)
    with pytest.raises(ValueError, match="sources must name modules"):
        builders.kernel_builder("x", archs=("sm_90a",), sources=("no_such_module",))


def test_a_source_edited_after_its_import_is_not_kept(toy_kernel):
    toy, config = toy_kernel.load()
    toy.artifact(config(2.0), "sm_90a")
    toy_kernel.write_device(4.5)
    with pytest.warns(RuntimeWarning, match="device.py changed after this process had imported it"):
        made = toy.artifact(config(3.0), "sm_90a")
    assert made.origin == "compiled" and not made.object_path.is_relative_to(cache.root())


def test_the_function_takes_arguments_by_position(toy_kernel):
    toy, config = toy_kernel.load()
    function = toy(config(2.0), "sm_90a")
    x = torch.zeros(4)
    with pytest.raises(Exception, match="device_type=cuda"):
        function(x, x, 4)
    with pytest.raises(TypeError):
        function(a=x, b=x, n=4)
