"""What goes into a key, and what a kernel consists of."""

import dataclasses
import enum
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from cute_kernels.jit import compile as compiler
from cute_kernels.jit import sources


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Data:
    a: int
    b: tuple = ()


class Named(NamedTuple):
    a: int


def test_canonical_tells_values_apart():
    values = [0, 1, True, False, None, "1", 1.0, 0.5, -0.0, 0.0, Color.RED, Color.BLUE, torch.bfloat16, torch.float16, Data(1),
              Data(1, (2,)), Named(1), (1, 2), (1, (2,)), float("nan"), float("inf")]  # fmt: skip
    texts = [compiler.json.dumps(compiler.canonical(v), sort_keys=True) for v in values]
    same = {t for t in texts if texts.count(t) > 1}
    assert same == set(), same


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.zeros(1), lambda: 0, Data(object())])
def test_canonical_refuses_what_it_cannot_write_down(value):
    with pytest.raises(TypeError, match="config may hold"):
        compiler.canonical(value)


def key(builder, config, arch="sm_100a", options=None, digest="d"):
    return compiler.make_key(builder, config, arch, options or compiler.options_for(builder, config, arch, False), digest)[0]


def test_everything_that_decides_the_object_is_in_the_key(toy_kernel, monkeypatch):
    toy, config = toy_kernel.load()
    base = key(toy, config(2.0))
    assert key(toy, config(2.0)) == base
    others = [
        key(toy, config(2.5)),
        key(toy, config(2.0), "sm_90a"),
        key(toy, config(2.0), digest="e"),
        key(toy, config(2.0), options=compiler.options_for(toy, config(2.0), "sm_100a", True)),
    ]
    monkeypatch.setattr(toy, "options", "--opt-level 2")
    others.append(key(toy, config(2.0)))
    monkeypatch.setattr(toy, "options", lambda c, arch: f"--opt-level {int(c.scale)}")
    others.append(key(toy, config(1.0)))
    monkeypatch.setattr(toy, "options", "")
    monkeypatch.setenv("CUTE_DSL_ENABLE_ASSERTIONS", "1")
    others.append(key(toy, config(2.0)))
    monkeypatch.delenv("CUTE_DSL_ENABLE_ASSERTIONS")
    monkeypatch.setenv("CUTE_DSL_DUMP_DIR", "/somewhere")
    assert key(toy, config(2.0)) == base, "where dumps go changes no code"
    for name, version in (("nvidia-cutlass-dsl-libs-cu13", "4.8.1"), ("apache-tvm-ffi", "9"), ("python", "3.99")):
        monkeypatch.setattr(sources, "toolchain", lambda n=name, v=version: {**REAL(), n: v})
        others.append(key(toy, config(2.0)))
    assert len({base, *others}) == len(others) + 1


REAL = sources.toolchain


def test_the_toolchain_names_every_part_of_the_compiler():
    found = sources.toolchain()
    assert {"nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "apache-tvm-ffi", "python", "host"} <= set(found)
    assert "absent" not in found.values()


def test_sources_are_found_by_the_import_statements():
    names = {p.relative_to(sources.PACKAGE).as_posix() for p in sources.closure(sources.PACKAGE / "kernels" / "combine.py")}
    assert names == {"kernels/combine.py", "kernels/combine_kernel.py"}, "the jit layer is not part of a kernel"


def test_every_form_of_import(tmp_path):
    package = tmp_path / "p"
    (package / "sub").mkdir(parents=True)
    for name in ("a", "b", "c", "d", "e", "unused", "sub/f", "sub/__init__"):
        (package / f"{name}.py").write_text("")
    (package / "sub" / "f.py").write_text("from .. import e\n")
    start = package / "start.py"
    start.write_text(
        "from .a import x\n"
        "from . import (\n    b,  # why\n    c as other,\n)\n"
        "def build():\n    from .d import y\n    from .sub.f import z\n    import cute_kernels.kernels.combine_kernel as k, os\n"
        "# from .unused import w\n"
    )
    found = {p.name for p in sources.closure(start)}
    assert found == {"start.py", "a.py", "b.py", "c.py", "d.py", "e.py", "f.py", "combine_kernel.py"}


def test_the_digest_depends_on_names_and_texts(tmp_path):
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("ab"), two.write_text("c")
    first = sources.digest([one, two])
    one.write_text("a"), two.write_text("bc")
    assert sources.digest([one, two]) != first
    assert sources.digest([Path(one)]) != sources.digest([Path(two)])
