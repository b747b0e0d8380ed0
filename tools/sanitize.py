#!/usr/bin/env python3
"""compute-sanitizer on small cases of the Hopper kernels, and on kernels with a planted race. Needs a GPU and compute-sanitizer.

    python tools/sanitize.py                    memcheck and racecheck of every case; exit status 1 if one is not as expected
    python tools/sanitize.py --case NAME        runs one case in this process (what the sanitizer is given)

A case named "planted ..." has a barrier taken out or passed by and is expected to be reported by racecheck: without that, "no
hazard" of the others would mean nothing.
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

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.utils import SmemAllocator

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


def active(s: int, lengths: list[int], edit=None, **changes) -> None:
    """Active attention with appended rows: the decode kernel with these fields of its variant, without any what the operator takes.
    edit: a variant's function instead of the published one."""
    import torch

    import cute_kernels as ck
    from cute_kernels.jit import current_target
    from cute_kernels.kernels.sm90 import decode

    b, h_q, h_kv, d = len(lengths), 8, 2, 128
    q, k_new, v_new = (torch.randn(b, s, h, d, device="cuda").bfloat16().transpose(1, 2) for h in (h_q, h_kv, h_kv))
    k, v = (torch.randn(b, h_kv, max(lengths) + 5, d, device="cuda").bfloat16() for _ in range(2))
    kv_len = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    if not changes:
        ck.active_attention_append(q, k_new, v_new, k, v, kv_len)
        return
    options = dict(causal=True, window_left=-1, softcap=0.0, attn_sink=None, k_new=k_new, v_new=v_new)
    variant = decode.choose(q, k, v, kv_len, *options.values())._replace(**changes)
    tensors = dict(q=q, k_cache=k, v_cache=v, kv_len=kv_len)
    out, lse = torch.empty_like(q), torch.empty(b, h_q, s, device="cuda")
    if edit is not None:
        decode.decode_kernel = edit
    decode.prepare(target=current_target(q.device), variant=variant, sm_scale=0.1, **tensors, **options)(
        *tensors.values(), None, k_new, v_new, out, lse
    )


def planted_active() -> None:
    """The decode kernel's warps do not wait for each other's partial results."""
    from cute_kernels.jit import kernel_builder
    from cute_kernels.kernels.sm90 import decode

    wait = "            cute.arch.sync_threads()\n            if cutlass.const_expr(self.one_tile and not"
    module, file = edited("cute_kernels.kernels.sm90.decode_kernel", wait, wait.split("\n")[1])

    @kernel_builder("planted_active", archs=("sm_90a",), sources=(file,))
    def build(variant, arch):
        options = variant._asdict()
        del options["ctas"]
        return module.DecodeKernel(**options), published(variant, arch)[1]

    published = decode.decode_kernel.build
    active(1, [300], edit=build, stages=2)


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
    """No barrier between writing a word's rank and reading it."""
    import torch

    from cute_kernels.jit import current_target, kernel_builder
    from cute_kernels.kernels import group_topk as host

    loop = "                running = running + Int32(cute.arch.popc((bits + w).load()))\n"
    module, file = edited("cute_kernels.kernels.group_topk_kernel", loop + "            cute.arch.sync_threads()\n", loop)

    @kernel_builder("planted_group_topk", archs=host.ARCHS, sources=(file,))
    def build(config, arch):
        _, arguments = host.group_topk_kernel.build(config, arch)
        return module.GroupTopk(**config._asdict()), arguments

    indices = torch.randint(0, 3000, (16, 1, 256), dtype=torch.int32, device="cuda")
    results = host.launch(
        indices=indices, s_kv=3000, group_size=8, topk_length=None, cu_seqlens_q=None, n=2, u=2048
    )  # real outputs to write into
    run = build(host.Config(True, False, False, True, False), current_target(indices.device))
    run(indices, None, None, *results, 3000)


def planted_sparse() -> None:
    """The consumers read the flags of the mask ring before they wait for them."""
    from sparse_cases import Case, make, outputs

    from cute_kernels.jit import current_target, kernel_builder
    from cute_kernels.kernels.sm90 import sparse_consumer, sparse_device, sparse_kernel, sparse_layout, sparse_prefill

    class EarlyRead(sparse_kernel.SparsePrefillSm90):
        @cute.jit
        def read_info(self, right: cutlass.Constexpr[int], it, c):
            sparse_device.load_shared_u32(c.info + (it & 1) * sparse_layout.INFO_STAGE, sparse_layout.INFO_FLAGS)
            return sparse_consumer.Consumer.read_info(self, right, it, c)

    @kernel_builder("planted_sparse", archs=("sm_90a",))
    def build(config, arch):
        return sparse_prefill.build(config, EarlyRead, tensor_maps=False)

    args = make(Case(4, 64, 600, 450))
    config = sparse_prefill.Config(576, False, False, False, False, False)
    run = build(config, current_target(args["q"].device))
    run(args["q"], args["kv"], args["indices"], *outputs(args), None, None, None, args["sm_scale"], 4, 132)


class Exchange:
    """Correct by the PTX memory model, and what the sparse kernel does: warpgroup 1 of three stores, fences and arrives at a named
    barrier of 256 threads on which warpgroup 0 waits; lanes 0 to 7 of warpgroup 2 store, synchronise their warp, and lane 0 arrives
    at an mbarrier on which warpgroup 0 waits too."""

    def __init__(self, ring: bool) -> None:
        self.ring = ring

    @cute.jit
    def __call__(self, out: cute.Tensor, stream):
        self.kernel(out).launch(grid=[1, 1, 1], block=[384, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, out: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        allocator = SmemAllocator()
        words = allocator.allocate_array(Int32, 128, byte_alignment=16)
        bars = allocator.allocate_array(cutlass.Int64, 1, byte_alignment=8)
        if tid == 0:
            cute.arch.mbarrier_init(bars, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if tid < 128:
            if cutlass.const_expr(self.ring):
                cute.arch.mbarrier_wait(bars, 0)
                out[tid] = (words + tid % 8).load()
            else:
                cute.arch.barrier(barrier_id=3, number_of_threads=256)
                out[tid] = (words + (127 - tid)).load()
        elif tid < 256:
            if cutlass.const_expr(not self.ring):
                (words + (tid - 128)).store(3 * tid)
                cute.arch.fence_view_async_shared()
                cute.arch.barrier_arrive(barrier_id=3, number_of_threads=256)
        elif tid < 288:
            if cutlass.const_expr(self.ring):
                if tid < 264:
                    (words + (tid - 256)).store(3 * tid)
                cute.arch.sync_warp()
                if tid == 256:
                    cute.arch.mbarrier_arrive(bars)


def control(ring: bool) -> None:
    import torch

    from cute_kernels.jit import current_target, kernel_builder

    @kernel_builder(f"control_{ring}", archs=("sm_90a",))
    def build(config, arch):
        stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        return Exchange(config), (cute.runtime.make_fake_compact_tensor(Int32, (128,), assumed_align=16), stream)

    out = torch.zeros(128, dtype=torch.int32, device="cuda")
    build(ring, current_target(out.device))(out)
    tid = torch.arange(128, device=out.device)
    assert torch.equal(out, (3 * (256 + tid % 8) if ring else 3 * (255 - tid)).int())


CASES = {
    "group_topk": group_topk,
    "group_topk unaligned": lambda: group_topk(True),
    "sparse 64": lambda: sparse(64),
    "sparse 70, d 512": lambda: sparse(70, d_qk=512),
    "sparse 128, masked": lambda: sparse(128, group=16),
    "sparse 16, small groups": lambda: sparse(16, group=2),
    "active decode": lambda: active(1, [0, 40, 700], stages=2),
    "active decode, q_len 3": lambda: active(3, [2, 700], stages=1),
    "active chunks": lambda: active(1, [90, 900], ctas=8),
    "active cluster": lambda: active(3, [2, 40, 400], cluster=8),
    "active prefill": lambda: active(520, [300, 0, 700]),
    "control: named barrier": lambda: control(False),
    "control: ring": lambda: control(True),
    "planted group_topk": planted_group_topk,
    "planted sparse": planted_sparse,
    "planted active": planted_active,
}


STATIC = 1024  # bytes of shared memory in front of the dynamic part, which racecheck counts


def known_areas(d_qk: int) -> list[range]:
    """Shared bytes of the sparse kernel that racecheck reports although they are handed over in order, in the two ways of
    `Exchange`: maxima of the other warpgroup behind a named barrier, and the mask words of the ring (not its flags)."""
    from cute_kernels.kernels.sm90 import sparse_layout as layout

    tiles = 3 * d_qk // 64 + (2 if d_qk == 512 else 1)
    ring = STATIC + tiles * layout.TILE_BYTES
    exchange = (ring + 2 * layout.INFO_STAGE + 15) // 16 * 16
    masks = [range(ring + i * layout.INFO_STAGE, ring + i * layout.INFO_STAGE + layout.INFO_FLAGS) for i in range(2)]
    return [*masks, range(exchange, exchange + layout.EX_BYTES)]


def sanitize(tool: str, case: str) -> tuple[list[str], str]:
    """(what was reported: "error" or the shared address of a hazard; the report). ["failed"] if the run itself failed."""
    options = ["--print-limit", "20000", "--show-backtrace", "no"]
    options += ["--racecheck-report", "hazard"] if tool == "racecheck" else ["--report-api-errors", "no"]
    command = [shutil.which("compute-sanitizer"), "--tool", tool, *options, sys.executable, __file__, "--case", case]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=600)
    text = done.stdout + done.stderr
    if "SUMMARY" not in text or "Traceback" in text:
        return ["failed"], text[-1500:]
    if tool == "racecheck":
        return re.findall(r"hazard detected at __shared__ (0x[0-9a-f]+)", text), text
    return ["error"] * int(re.search(r"ERROR SUMMARY: (\d+)", text)[1]), text


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
        for tool in ("racecheck",) if planted or case.startswith("control") else ("memcheck", "racecheck"):
            found, report = sanitize(tool, case)
            known = []
            if tool == "racecheck" and "sparse" in case and found != ["failed"]:
                areas = known_areas(512 if "512" in case else 576)
                known = [x for x in found if any(int(x, 16) in area for area in areas)]
            rest = len(found) - len(known)
            fine = (case.startswith("control") or (rest > 0) == planted) and found != ["failed"]
            failed += not fine
            note = f", {len(known)} in areas handed over as in the controls" if known else ""
            print(f"{tool:9s} {case:26s} {'as expected' if fine else 'NOT AS EXPECTED'}: {rest} reported{note}", flush=True)
            if not fine:
                print("    ", sorted(set(found))[:40])
                print(report[:2500])
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
