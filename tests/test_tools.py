"""Tools that need a GPU or a package say so in one line; the benchmark's table and CSV file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).parents[1] / "tools"
sys.path.insert(0, str(TOOLS))
import requirements_check  # noqa: E402
import sparse_timing  # noqa: E402


def run(monkeypatch, capsys, name, *arguments):
    """(exit status, stdout, stderr) of a tool's main, in this process."""
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        module.main()
    out, err = capsys.readouterr()
    return stopped.value.code, out, err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "name, arguments", [("bench_sparse_prefill", ["--time"]), ("bench_sparse_prefill", ["--all"]), ("bench_active_attention", [])]
)
def test_without_a_gpu(monkeypatch, capsys, name, arguments):
    status, out, err = run(monkeypatch, capsys, name, *arguments)
    assert status == 2 and not out and err.count("\n") == 1 and f"{name}.py: needs a" in err, err


@pytest.mark.parametrize(
    "name, arguments, text",
    [
        ("bench_sparse_prefill", ["--from", "/nonexistent/x.csv"], "there is no file /nonexistent/x.csv"),
        ("bench_sparse_prefill", ["--time", "--sglang", "/nonexistent/y.py"], "there is no file /nonexistent/y.py"),
        ("bench_sparse_prefill", ["--from", str(Path(__file__))], "its columns must be date, device, case"),
        ("bench_sparse_prefill", ["--from", "a.csv", "--host"], "--from measures nothing: leave out --host"),
        ("bench_sparse_prefill", [], "nothing to do: give --check"),
        ("bench_active_attention", ["--read", "a.csv"], "--read plots: give --plot"),
        ("bench_active_attention", ["--shapes", "foo"], "--shapes takes BxL or BxLxQ, by commas; not 'foo'"),
        ("bench_active_attention", ["--peers", "ours,nope"], "sdpa_full, fa3, flashinfer, by commas; not 'nope'"),
        ("compare_with_gpu", ["--emulator", "--only", "zzz"], "no case's name contains 'zzz'"),
        ("demo", ["--emulate", "foo"], "--emulate takes sm_90a, sm_100a and sm_103a, by commas, or no; not 'foo'"),
        ("demo", ["--tokens", "-3"], "--tokens must be at least 1"),
        ("kernel_mutants", ["decode", "--rule", "("], "'(' is no regular expression"),
    ],
)
def test_wrong_arguments(monkeypatch, capsys, name, arguments, text):
    status, out, err = run(monkeypatch, capsys, name, *arguments)
    assert status == 2 and not out and text in err and "Traceback" not in err


@pytest.mark.parametrize(
    "name, arguments, module",
    [
        ("bench_sparse_prefill", ["--time", "--plot", "x.png"], "matplotlib"),
        ("bench_active_attention", ["--plot", "x.png"], "matplotlib"),
        ("bench_decode_model", [], "fish_speech"),
    ],
)
def test_a_missing_package(monkeypatch, capsys, name, arguments, module):
    find = importlib.util.find_spec
    monkeypatch.setattr(requirements_check.importlib.util, "find_spec", lambda n, *a: None if n == module else find(n, *a))
    status, out, err = run(monkeypatch, capsys, name, *arguments)
    assert status == 2 and not out and err.count("\n") == 1 and f"needs the module {module} (pip install" in err, err


def test_csv_and_summary(tmp_path):
    rows = [
        ("a", "ours", "2.0", "500.0"),
        ("a", "FlashMLA", "2.5", "400.0"),
        ("b, masked", "ours, masked", "3.0", "10.0"),
        ("b, masked", "ours, no mask", "2.9", "11.0"),
        ("b, masked", "no mask: FlashMLA", "3.3", "9.0"),
        ("c", "ours, groups of 2", "5.0", "2.0"),
        ("c", "ours, groups of 4", "4.0", "3.0"),
        ("c", "SGLang, union 2", "9.0", ""),
        ("c", "SGLang, union 4", "8.0", ""),
        ("peers alone", "FlashMLA", "1.0", ""),
    ]
    path = tmp_path / "x.csv"
    with open(path, "w", newline="") as f:
        writer = sparse_timing.Writer(f)
        for row in rows:
            writer.writerow(["2026-01-01", "GPU", *row])
    assert sparse_timing.read(str(path)) == writer.rows == [["2026-01-01", "GPU", *row] for row in rows]
    assert sparse_timing.summary(writer.rows).splitlines()[2:] == [
        "| a | - | 2.000 | 500.0 | 2.500 | 1.25 | - | - |",
        "| b, masked | masked | 3.000 | 10.0 | - | - | - | - |",
        "| c | groups of 4 | 4.000 | 3.0 | - | - | 8.000 | 2.00 |",
    ]


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [["2026-01-01", "GPU", case, name, "1.0", "2.0"] for case in "ab" for name in ("ours", "FlashMLA")]
    sparse_timing.plot(rows, str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("race", ["", "exchange", "ring"])
@pytest.mark.parametrize("spelled_out", [False, True])
def test_the_sanitizers_edits_still_fit_the_kernel(spelled_out, race):
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
    import sanitize

    from cute_kernels.kernels.sm90 import sparse_kernel

    made = sanitize.edited_sparse(spelled_out, race)
    assert made is not sparse_kernel.SparsePrefillSm90 and made.__name__ == "SparsePrefillSm90"
    assert made.__mro__[2].__module__ == "planted_sparse_consumer"
