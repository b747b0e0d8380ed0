#!/usr/bin/env python3
"""compute-sanitizer on small cases of the Hopper kernels, and on kernels with a planted race. Needs a GPU and compute-sanitizer.

    python tools/sanitize.py                    memcheck and racecheck of every case; exit status 1 if one is not as expected
    python tools/sanitize.py --case NAME        runs one case in this process (what the sanitizer is given)

A case named "planted ..." has a barrier taken out or passed by and is expected to be reported by racecheck: without that, "no
hazard" of the others would mean nothing. racecheck before 2026.1 (CUDA 13.2) reports correct hand-overs of the sparse kernel (its
release notes name false positives of warpgroup-level synchronisation that were mended then): with such a version they are counted
apart, and the "spelled out" cases, where those forms are replaced, have to be clean. `pip install nvidia-cuda-sanitizer-api` brings
a newer one.
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
from requirements_check import need_gpu  # noqa: E402


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
    module, file = edited("cute_kernels.kernels.sm90.decode_kernel", (wait, wait.split("\n")[1], 1))

    @kernel_builder("planted_active", archs=("sm_90a",), sources=(file,))
    def build(variant, arch):
        options = variant._asdict()
        del options["ctas"]
        called, arguments = published(variant, arch)
        called.kernel = module.DecodeKernel(**options)
        return called, arguments

    published = decode.decode_kernel.build
    active(1, [300], edit=build, stages=2)


def edited(module_name: str, *edits: tuple[str, str, int]):
    """A kernel's module with pieces of its text replaced (old, new, how often it occurs), under a name of its own."""
    text = Path(importlib.util.find_spec(module_name).origin).read_text()
    for old, new, count in edits:
        assert text.count(old) == count, f"{module_name} no longer holds {count} times what is replaced: {old}"
        text = text.replace(old, new)
    file = Path(tempfile.mkdtemp(), "planted_" + module_name.rsplit(".", 1)[1] + ".py")
    file.write_text(text)
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
    module, file = edited("cute_kernels.kernels.group_topk_kernel", (loop + "            cute.arch.sync_threads()\n", loop, 1))

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


def edited_sparse(spelled_out: bool, race: str = ""):
    """The sparse kernel's class, edited.

    spelled_out: every hand-over in a form that racecheck 2025.3 follows. Nothing else differs, so that what it no longer reports
    were its reports of these forms, which are false (2026.4 does not make them):

    - One lane arrives at an mbarrier for a warp that has synchronised: here every lane arrives. racecheck takes an arrival to
      release the accesses of the arriving thread alone.
    - bar.arrive on one side of a named barrier: here bar.sync on both. racecheck orders two threads by how many barriers each has
      waited at, to which bar.arrive does not count.
    - Warpgroup 0 waits at BAR_LEFT, alone: here warpgroup 1 waits at one of its own too, so that the numbers stay equal.

    race: "exchange": warpgroup 0 reads warpgroup 1's maxima before the barrier; "ring": the consumers read their words of the
    ring before they wait for its mbarrier.
    """
    package = "cute_kernels.kernels.sm90."
    arrive = "        cute.arch.mbarrier_arrive(c.bars + INFO_EMPTY + stage)"
    one_lane = f"        if c.lane == 0:\n    {arrive}"
    line = "        cute.arch.barrier{0}(barrier_id={1}, number_of_threads={2})\n"
    of_consumer, of_kernel = [], []
    if race == "exchange":
        take = "        self.take_reference(EX_MAX_B, c)\n"
        of_consumer.append((line.format("", "BAR_B", 256) + take, take + line.format("", "BAR_B", 256), 1))
    if race == "ring":
        wait = "        cute.arch.mbarrier_wait(c.bars + INFO_FULL + stage, (it >> 1) & 1)\n"
        here = "        here = c.info + stage * INFO_STAGE\n"
        flags = "        flags = dev.load_shared_u32(here, INFO_FLAGS)\n"
        words = "        w0, w1 = dev.load_shared_v2(here + c.group0, INFO_BLOCK * right)\n"
        of_consumer.append((wait + here + flags + words, here + words + wait + flags, 1))
    if spelled_out:
        qk = line.format("", "BAR_QK", 256)
        no_b = "    " + line.format("_arrive", "BAR_B", 256) + "    " + line.format("", "BAR_A", 256)
        of_consumer += [
            (one_lane, arrive, 1),
            (no_b, "".join(reversed(no_b.splitlines(True))), 1),  # as bar.sync in warpgroup 0's order
            (qk, qk + "        if const_expr(self.d_qk == 576):\n    " + line.format("", "6", 128), 1),
            ("barrier_arrive(barrier_id", "barrier(barrier_id", 3),
        ]
        of_kernel.append(("mbarrier_init(bars + INFO_EMPTY + i, 8)", "mbarrier_init(bars + INFO_EMPTY + i, 256)", 1))
    consumer, _ = edited(package + "sparse_consumer", *of_consumer)
    own = (package + "sparse_consumer", consumer.__name__, 1)
    return edited(package + "sparse_kernel", *of_kernel, own)[0].SparsePrefillSm90


def sparse_edited(heads: int, spelled_out: bool, race: str = "", **options) -> None:
    from sparse_cases import Case, make, outputs

    from cute_kernels.jit import current_target, kernel_builder
    from cute_kernels.kernels.sm90 import sparse_prefill
    from cute_kernels.kernels.sparse_arguments import build as arguments_of

    @kernel_builder(f"sparse_edited_{spelled_out}_{race}", archs=("sm_90a",), sources=(__file__,))
    def build(config, arch):
        return arguments_of(config, edited_sparse(spelled_out, race), tensor_maps=False)

    args = make(Case(5, heads, 300, 384, length="random", bad=0.2, sink=True, **options))
    group = args.get("head_group_size", 16)
    config = sparse_prefill.config_of(
        args["q"], args["sm_scale"], args["attn_sink"], args["topk_length"], args.get("head_group_mask"), group
    )
    run = build(config, current_target(args["q"].device))
    optional = (args["attn_sink"], args["topk_length"], args.get("head_group_mask"))
    run(args["q"], args["kv"], args["indices"], *outputs(args), *optional, args["sm_scale"], group.bit_length() - 1, 132)


class Exchange:
    """Correct by the PTX memory model, in the ways in which the sparse kernel hands shared memory over; each way alone.

    barrier: warpgroup 1 stores, fences and arrives at a named barrier of 256 threads on which warpgroup 0 waits, three times over;
    warpgroup 0's arrival at a second one lets it store again.
    ring: lanes 0 to 7 of warp 8 store, synchronise their warp, and lane 0 arrives at an mbarrier on which warpgroup 0 waits;
    each of its warps reads, synchronises, and its lane 0 arrives at a second one, on which warp 8 waits before it stores again.
    every_lane: the same with arrivals of every lane, and with bar.sync in place of bar.arrive."""

    def __init__(self, ring: bool, every_lane: bool) -> None:
        self.ring, self.every_lane = ring, every_lane

    @cute.jit
    def __call__(self, out: cute.Tensor, stream):
        self.kernel(out).launch(grid=[1, 1, 1], block=[288, 1, 1], stream=stream)

    @cute.jit
    def hand_over(self, barrier: cutlass.Constexpr[int]):
        if cutlass.const_expr(self.every_lane):
            cute.arch.barrier(barrier_id=barrier, number_of_threads=256)
        else:
            cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=256)

    @cute.jit
    def arrive(self, tid: Int32, mbarrier: cute.Pointer):
        cute.arch.sync_warp()
        if cutlass.const_expr(self.every_lane):
            cute.arch.mbarrier_arrive(mbarrier)
        elif tid % 32 == 0:
            cute.arch.mbarrier_arrive(mbarrier)

    @cute.kernel
    def kernel(self, out: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        allocator = SmemAllocator()
        words = allocator.allocate_array(Int32, 128, byte_alignment=16)
        bars = allocator.allocate_array(cutlass.Int64, 2, byte_alignment=8)
        each = 32 if self.every_lane else 1
        if tid == 0:
            cute.arch.mbarrier_init(bars, each)
            cute.arch.mbarrier_init(bars + 1, 4 * each)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        total = Int32(0)
        for turn in cutlass.range(3, unroll=1):
            if tid < 128:
                if cutlass.const_expr(self.ring):
                    cute.arch.mbarrier_wait(bars, turn & 1)
                    total = total + (words + tid % 8).load()
                    self.arrive(tid, bars + 1)
                else:
                    cute.arch.barrier(barrier_id=3, number_of_threads=256)
                    total = total + (words + (127 - tid)).load()
                    self.hand_over(4)
            elif tid < 256:
                if cutlass.const_expr(not self.ring):
                    (words + (tid - 128)).store(tid + turn)
                    cute.arch.fence_view_async_shared()
                    self.hand_over(3)
                    cute.arch.barrier(barrier_id=4, number_of_threads=256)
            else:
                if cutlass.const_expr(self.ring):
                    cute.arch.mbarrier_wait(bars + 1, (turn & 1) ^ 1)
                    if tid < 264:
                        (words + (tid - 256)).store(tid + turn)
                    self.arrive(tid, bars)
        if tid < 128:
            out[tid] = total


def control(ring: bool, every_lane: bool) -> None:
    import torch

    from cute_kernels.jit import current_target, kernel_builder

    @kernel_builder(f"control_{ring}_{every_lane}", archs=("sm_90a",), sources=(__file__,))
    def build(config, arch):
        stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        return Exchange(*config), (cute.runtime.make_fake_compact_tensor(Int32, (128,), assumed_align=16), stream)

    out = torch.zeros(128, dtype=torch.int32, device="cuda")
    build((ring, every_lane), current_target(out.device))(out)
    tid = torch.arange(128, device=out.device)
    assert torch.equal(out, (3 * (256 + tid % 8 if ring else 255 - tid) + 3).int())


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
    "sparse 64, spelled out": lambda: sparse_edited(64, True),
    "sparse 70, d 512, spelled out": lambda: sparse_edited(70, True, d_qk=512),
    "sparse 128, masked, spelled out": lambda: sparse_edited(128, True, group=16),
    "control: named barrier": lambda: control(False, False),
    "control: named barrier, spelled out": lambda: control(False, True),
    "control: ring": lambda: control(True, False),
    "control: ring, spelled out": lambda: control(True, True),
    "planted group_topk": planted_group_topk,
    "planted sparse, exchange": lambda: sparse_edited(64, False, "exchange"),
    "planted sparse, ring": lambda: sparse_edited(64, False, "ring"),
    "planted sparse, exchange, spelled out": lambda: sparse_edited(64, True, "exchange"),
    "planted sparse, ring, spelled out": lambda: sparse_edited(64, True, "ring"),
    "planted active": planted_active,
}


STATIC = 1024  # bytes of shared memory in front of the dynamic part, which racecheck counts


def version() -> tuple[int, int]:
    text = subprocess.run([shutil.which("compute-sanitizer"), "--version"], capture_output=True, text=True).stdout
    return tuple(int(x) for x in re.search(r"Version (\d+)\.(\d+)", text).groups())


def known_areas(d_qk: int) -> list[range]:
    """Shared bytes of the sparse kernel that racecheck before 2026.1 reports although they are handed over in order: the ring and
    the exchanged maxima and sums. `edited_sparse` says why, and shows it by having no report."""
    from cute_kernels.kernels.sm90 import sparse_layout as layout

    tiles = 3 * d_qk // 64 + (2 if d_qk == 512 else 1)
    ring = STATIC + tiles * layout.TILE_BYTES
    return [range(ring, (ring + 2 * layout.INFO_STAGE + 15) // 16 * 16 + layout.EX_BYTES)]


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

        need_gpu(9, "an H100 or H200")
        torch.manual_seed(0)
        CASES[a.case]()
        torch.cuda.synchronize()
        return
    if shutil.which("compute-sanitizer") is None:
        raise SystemExit("compute-sanitizer is not on the PATH (it comes with the CUDA toolkit)")
    failed, old = 0, version() < (2026, 1)
    for case in CASES:
        # before 2026.1 a race planted in the published text cannot be told from the false reports
        if a.only not in case or (old and case.startswith("planted sparse") and "spelled out" not in case):
            continue
        planted = case.startswith("planted")
        for tool in ("racecheck",) if planted or case.startswith("control") else ("memcheck", "racecheck"):
            found, report = sanitize(tool, case)
            known = []
            if old and tool == "racecheck" and "sparse" in case and "spelled out" not in case and found != ["failed"]:
                areas = known_areas(512 if "512" in case else 576)
                known = [x for x in found if any(int(x, 16) in area for area in areas)]
            rest = len(found) - len(known)
            fine = (case.startswith("control") or (rest > 0) == planted) and found != ["failed"]
            failed += not fine
            note = f", {len(known)} in the ring and the exchange area" if known else ""
            print(f"{tool:9s} {case:26s} {'as expected' if fine else 'NOT AS EXPECTED'}: {rest} reported{note}", flush=True)
            if not fine:
                print("    ", sorted(set(found))[:40])
                print(report[:2500])
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
