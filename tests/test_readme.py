"""What the README shows runs as it stands there."""

import re
from pathlib import Path

import pytest

import cute_kernels as ck

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_the_examples_run():
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
    emulated, use = BLOCKS
    names = {}
    exec(use, names)
    assert tuple(names["packed"].shape) == (8, 128, 512) and ck.last_backend() == "reference[cpu]"
    exec(emulated, names)
    assert ck.last_backend() == "sm_90a:decode" and not names["run"].hazards


def test_its_links_and_scripts_exist():
    root = Path(__file__).resolve().parents[1]
    for target in re.findall(r"\]\(([\w/.]+)\)", README) + re.findall(r"tools/\w+\.\w+", README):
        assert (root / target).exists(), target
