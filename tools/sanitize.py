#!/usr/bin/env python3
"""compute-sanitizer on small cases of the Hopper kernels, and on kernels with a planted race. Needs a GPU and compute-sanitizer.

    python tools/sanitize.py                    memcheck and racecheck of every case; exit status 1 if one is not as expected
    python tools/sanitize.py --case NAME        runs one case in this process (what the sanitizer is given)

A case named "planted ..." has a barrier taken out and is expected to be reported by racecheck: without that, "no hazard" of the
others would mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]


def group_topk(unaligned: bool = False) -> None:
    import torch

    import cute_kernels as ck

    indices = torch.randint(-5, 3000, (19, 1, 261), dtype=torch.int32, device="cuda")[:, :, 1 if unaligned else 5 :]
    bounds = torch.tensor([0, 3, 3, 19], dtype=torch.int32, device="cuda")
    lengths = torch.randint(0, 257, (19,), dtype=torch.int32, device="cuda")
    ck.group_topk(indices, 3000, 8, topk_length=lengths, cu_seqlens_q=bounds, max_union=512)
    ck.group_topk(indices, 200_000, 4)


def sparse(heads: int, **options) -> None:
    from sparse_cases import Case, make, run_ours

    run_ours(make(Case(5, heads, 300, 384, length="random", bad=0.2, sink=True, **options)))


def edited(module_name: str, old: str, new: str):
    """A kernel's module with one piece of its text replaced, under a name of its own."""
    text = Path(importlib.util.find_spec(module_name).origin).read_text()
    assert text.count(old) == 1, f"{module_name} no longer holds the text that the planted race replaces"
    file = Path(tempfile.mkdtemp(), "planted_" + module_name.rsplit(".", 1)[1] + ".py")
    file.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, str(file)


def planted_group_topk() -> None:
    """No barrier between setting bits and counting them."""
    import torch

    from cute_kernels.jit import current_target, kernel_builder
    from cute_kernels.kernels import group_topk as host

    store = "                (nexts + warp).store(smallest)\n"
    module, file = edited("cute_kernels.kernels.group_topk_kernel", store + "            cute.arch.sync_threads()\n", store)

    @kernel_builder("planted_group_topk", archs=host.ARCHS, sources=(file,))
    def build(config, arch):
        _, arguments = host.group_topk_kernel.build(config, arch)
        return module.GroupTopk(**config._asdict()), arguments

    indices = torch.randint(0, 3000, (16, 1, 256), dtype=torch.int32, device="cuda")
    results = host.launch(
        indices=indices, s_kv=3000, group_size=8, topk_length=None, cu_seqlens_q=None, n=2, u=2048
    )  # real outputs to write into
    run = build(host.Config(True, False, False, True), current_target(indices.device))
    run(indices, None, None, *results, 3000)


def planted_sparse() -> None:
    """The right column tiles of K_a are read without waiting for their copies."""
    import cutlass
    import cutlass.cute as cute
    from sparse_cases import Case, make, outputs

    from cute_kernels.jit import current_target, kernel_builder
    from cute_kernels.kernels.sm90 import sparse_kernel, sparse_layout, sparse_prefill

    class NoWait(sparse_kernel.SparsePrefillSm90):
        @cute.jit
        def tiles_ready(self, bars, which: cutlass.Constexpr[int], phase):
            if cutlass.const_expr(which != sparse_layout.A_RIGHT):
                cute.arch.mbarrier_wait(bars + sparse_layout.K_FULL + which, phase)
            cute.arch.fence_view_async_shared()

    @kernel_builder("planted_sparse", archs=("sm_90a",))
    def build(config, arch):
        return sparse_prefill._build(config, NoWait)

    args = make(Case(4, 64, 600, 450))
    config = sparse_prefill.Config(576, False, False, False, False, False)
    run = build(config, current_target(args["q"].device))
    run(args["q"], args["kv"], args["indices"], *outputs(args), None, None, None, args["sm_scale"], 4, 132)


CASES = {
    "group_topk": group_topk,
    "group_topk unaligned": lambda: group_topk(True),
    "sparse 64": lambda: sparse(64),
    "sparse 70, d 512": lambda: sparse(70, d_qk=512),
    "sparse 128, masked": lambda: sparse(128, group=16),
    "sparse 16, small groups": lambda: sparse(16, group=2),
    "planted group_topk": planted_group_topk,
    "planted sparse": planted_sparse,
}


def sanitize(tool: str, case: str) -> tuple[int, str]:
    """(number of errors or hazards reported, the last lines of the report); -1 if the run itself failed."""
    options = ["--print-limit", "5"] + (["--racecheck-report", "all"] if tool == "racecheck" else [])
    command = [shutil.which("compute-sanitizer"), "--tool", tool, *options, sys.executable, __file__, "--case", case]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=600)
    text = done.stdout + done.stderr
    found = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
    if found is None or "Traceback" in text:
        return -1, text[-600:]
    return int(found[1]), "\n".join(line for line in text.splitlines() if line.startswith("=========") and len(line) > 12)[:1500]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--case", choices=CASES)
    p.add_argument("--only", default="", help="run the cases whose name contains this")
    a = p.parse_args()
    if a.case:
        import torch

        torch.manual_seed(0)
        CASES[a.case]()
        torch.cuda.synchronize()
        return
    if shutil.which("compute-sanitizer") is None:
        raise SystemExit("compute-sanitizer is not on the PATH (it comes with the CUDA toolkit)")
    failed = 0
    for case in CASES:
        if a.only not in case:
            continue
        planted = case.startswith("planted")
        for tool in ("racecheck",) if planted else ("memcheck", "racecheck"):
            found, report = sanitize(tool, case)
            fine = found > 0 if planted else found == 0
            failed += not fine
            print(f"{tool:9s} {case:26s} {'as expected' if fine else 'NOT AS EXPECTED'}: {found} reported", flush=True)
            if not fine:
                print(report)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
