"""tools/bench_decode_model.py at a toy shape, on the CPU: every variant decodes, and the table says so."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from integrations.fish import needs_fish_speech

TOOL = Path(__file__).resolve().parent.parent.parent / "tools" / "bench_decode_model.py"
pytestmark = [needs_fish_speech, pytest.mark.full]


def start(*args: str) -> subprocess.CompletedProcess:
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    command = [sys.executable, str(TOOL), "--tiny", *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)


def run(*args: str) -> str:
    done = start(*args)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "variants", [("slice", "ours"), pytest.param(("full", "slice", "ours"), marks=pytest.mark.nightly)], ids=len
)
def test_variants(tmp_path, variants):
    out = run("--variants", *variants, "--modes", "eager", "--tokens", "2", "--warm", "1", "--csv", str(tmp_path / "t.csv"))
    rows = list(csv.DictReader(open(tmp_path / "t.csv")))
    assert [(r["variant"], r["mode"]) for r in rows] == [(v, "eager") for v in variants]
    assert all(float(r["tokens_per_s"]) > 0 and float(r["host_ms"]) > 0 for r in rows)
    assert rows[-1]["backend"] == "reference[cpu]"
    assert "failed" not in out and len(out.strip().splitlines()) == 1 + len(variants)


@pytest.mark.nightly
def test_check_of_the_logits():
    made = json.loads(run("--check").splitlines()[-1])
    assert made["max_ratio"] <= 2 and made["rms_ratio"] <= 2


@pytest.mark.nightly
def test_a_variant_that_fails_is_told():
    """Prompt and tokens do not fit the capacity."""
    done = start("--modes", "eager", "--variants", "ours", "--prompt", "126")
    assert done.returncode == 1 and "ours  eager  failed: IndexError" in done.stdout and "Traceback" in done.stderr
