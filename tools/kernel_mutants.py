#!/usr/bin/env python
"""Mutate a kernel's PTX, one fault at a time, and see whether the emulator or a wrong result tells.

    python tools/kernel_mutants.py sparse_prefill            every executed site, every rule
    python tools/kernel_mutants.py sparse_prefill --rule commit --limit 5 --show
    python tools/kernel_mutants.py sparse_prefill --jobs 16 --seconds 600 --json sparse.json
    python tools/kernel_mutants.py --list

A fault is one edit of one PTX line: a barrier, fence, commit, wait or TMA instruction deleted, its count, parity, byte number or
CTA mask off by one, or one field of a matrix or instruction descriptor off by one (RULES below). Every line that the unmutated
kernel executes is a site. A mutant is caught when the launch ends in an error (deadlock, illegal operand), when a hazard is
reported, or when the results are wrong; it is tried under the lazy, a random and the eager schedule until one of them tells.
What survives is printed with its line, and with the reason where a subject lists it as equivalent. The mutants are judged in a
scattered order, so that what --seconds lets through is a fair sample of all of them.

To add a kernel: write a function that returns a `Subject` and put it into SUBJECTS. No GPU is needed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import importlib.util
import json
import multiprocessing
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[1]
SCHEDULES = (("lazy", 0), ("random", 1), ("eager", 0))
TIMEOUT = 120  # seconds; a mutant's run that takes longer, and ten times longer than the unmutated one, counts as caught (it hangs)


@dataclass
class Subject:
    """A kernel under test. `run()` calls it (inside `emulate`) on fixed inputs and says whether the results are right."""

    arch: str
    run: Callable[[], bool]
    sm_count: int | None = None
    entry: str = ""  # only launches whose kernel name matches are mutated
    checks: str = "strict"
    # (rule, pattern of the line or of its neighbourhood) -> why such a mutant computes the same
    equivalent: list[tuple[str, str, str]] = field(default_factory=list)


# ---------------------------------------------------------------------------------------------------- faults
def _off(text: str, group: int, *deltas: int, least: int = 0):
    """Edits that move the decimal number matched by `group`."""

    def edit(m: re.Match) -> list[tuple[str, str]]:
        value = int(m[group])
        a, b = m.span(group)[0] - m.start(), m.span(group)[1] - m.start()
        return [(f"{text}{d:+d}", m[0][:a] + str(value + d) + m[0][b:]) for d in deltas if value + d >= least]

    return edit


def _gone(m: re.Match) -> list[tuple[str, str]]:
    return [("gone", "")]


def _wait(m: re.Match) -> list[tuple[str, str]]:
    head, done, address, parity, tail = (part or "" for part in m.groups())
    flipped = f"{{ .reg .b32 odd; xor.b32 odd, {parity}, 1; {head} {done}, {address}, odd{tail}; }}"
    return [("skipped", f"setp.eq.b32 {done}, 0, 0;"), ("parity", flipped)]


def _twice(m: re.Match) -> list[tuple[str, str]]:
    return [("gone", ""), ("twice", f"{m[0]} {m[0]}")]


def _fields(widths: dict[str, tuple[int, int]]):
    """Fields of a descriptor word, name -> (first bit, bits): each off by one."""

    def edit(m: re.Match) -> list[tuple[str, str]]:
        value, out = int(m[1]) & 0xFFFFFFFF, []
        a, b = m.span(1)[0] - m.start(), m.span(1)[1] - m.start()
        for name, (first, bits) in widths.items():
            mask = (1 << bits) - 1
            for delta in (1, -1):
                new = value & ~(mask << first) | ((((value >> first) & mask) + delta) & mask) << first
                if new != value and (bits > 1 or delta == 1):
                    out.append((f"{name}{delta:+d}", m[0][:a] + str(new) + m[0][b:]))
        return out

    return edit


INSTRUCTION_FIELDS = {
    "d-type": (4, 2), "a-type": (7, 3), "b-type": (10, 3), "negate-a": (13, 1), "negate-b": (14, 1), "a-major": (15, 1),
    "b-major": (16, 1), "n": (17, 6), "m": (24, 5),
}  # fmt: skip
DESCRIPTOR_FIELDS = {"stride": (0, 14), "constant": (14, 3), "base": (17, 3), "swizzle": (29, 3)}

# name -> (pattern, edits); the first rule that matches a line takes it
RULES: dict[str, tuple[str, Callable]] = {
    "init": (r"mbarrier\.init\.\S+\s+\[[^\]]+\],\s*(\d+);", lambda m: _gone(m) + _off("count", 1, 1, -1, least=1)(m)),
    "wait": (r"(mbarrier\.try_wait\.parity\S*)\s+([^,]+),\s*(\[[^\]]+\]),\s*([^,;]+)(,\s*\d+)?;", _wait),
    "expect": (r"mbarrier\.arrive\.expect_tx\S*\s+\S+,\s*\[[^\]]+\],\s*(\d+);", lambda m: _gone(m) + _off("bytes", 1, 16, -16)(m)),
    "arrive": (r"mbarrier\.arrive(?!\.expect)\S*\s+\S+,\s*\[[^\]]+\](,\s*\d+)?;", _twice),
    "mapa": (r"mapa\S*\s+\S+,\s*\S+,\s*(\d+);", _off("rank", 1, 1)),
    "bar": (r"(?<![\w.])(?:bar|barrier)\.(?:sync|arrive|cta)\S*\s+[^,;]+,\s*(\d+);",
            lambda m: _gone(m) + _off("count", 1, 32, -32)(m)),
    "bar-all": (r"(?<![\w.])(?:bar|barrier)\.(?:sync|cta)\S*\s+\d+;", _gone),
    "cluster": (r"barrier\.cluster\.(?:arrive|wait)\S*;", _gone),
    "fence": (r"(?:fence\.\S+|tcgen05\.fence::\S+?);", _gone),
    "wait-tmem": (r"tcgen05\.wait::\S+;", _gone),
    "commit": (r"tcgen05\.commit\S*\s+\[[^\]]+\](?:,\s*\S+)?;", _twice),
    "commit-mask": (r"mov\.b16\s+both,\s*(\d+);", _off("mask", 1, -1, -2)),
    "alloc": (r"tcgen05\.(?:alloc|dealloc|relinquish)[^;]*;", _gone),
    "mma": (r"tcgen05\.mma\S*\s[^;]*;", _gone),
    "accumulate": (r"setp\.(ne|eq)\.b32\s+(?:first|more),\s*\S+,\s*0;",
                   lambda m: [("inverted", m[0].replace(m[1], "eq" if m[1] == "ne" else "ne", 1))]),
    "copy": (r"tcgen05\.cp\S*\s[^;]*;", _gone),
    "tmem-access": (r"tcgen05\.(?:ld|st)\.\S+\s[^;]*;", lambda m: []),
    "tma": (r"cp\.async\.bulk\.tensor[^;]*;", _twice),
    "instruction": (r"mov\.b32\s+kind,\s*(\d+);", _fields(INSTRUCTION_FIELDS)),
    "descriptor": (r"mov\.b64\s+\w+,\s*\{lo,\s*(\d+)\};", _fields(DESCRIPTOR_FIELDS)),
    "descriptor-or": (r"or\.b32\s+lo,\s*lo,\s*(\d+);", _off("leading", 1, 65536, -65536)),
    "descriptor-start": (r"add\.u32\s+lo,\s*\S+,\s*(\d+);", _off("start", 1, 1, -1)),
    "descriptor-leading": (r"add\.s32\s+\S+,\s*\S+,\s*(\d*);", lambda m: (
        _off("leading", 1, 65536, -65536)(m) if m[1] and int(m[1]) >= 1 << 20 and int(m[1]) % 65536 == 0 else [])),
    "operand": (r"add\.u32\s+(?:a|d|dst|column),\s*\S+,\s*(\d+);", _off("offset", 1, 1)),
    "register-count": (r"setmaxnreg\S*\s+\d+;", _gone),
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    rule: str
    what: str
    line: int  # 1-based
    before: str
    after: str


def mutants(ptx: str, executed: set[int] | None = None) -> list[Mutant]:
    """Every edit of every line (of the executed ones, if given)."""
    out = []
    for number, line in enumerate(ptx.split("\n"), 1):
        code = line.split("//")[0]
        if executed is not None and number not in executed:
            continue
        for rule, (pattern, edits) in RULES.items():
            m = re.search(pattern, code)
            if m is None:
                continue
            for what, new in edits(m):
                out.append(Mutant(rule, what, number, line.strip(), (code[: m.start()] + new + code[m.end() :]).strip()))
            break
    return out


def apply(ptx: str, mutant: Mutant) -> str:
    lines = ptx.split("\n")
    assert lines[mutant.line - 1].strip() == mutant.before
    lines[mutant.line - 1] = mutant.after
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------- runs
class Hang(Exception):
    """A run took longer than TIMEOUT."""


class FirstHazard(Exception):
    """The kind of a mutant's first hazard."""


def _alarm(signum, frame):
    raise Hang


def run(subject: Subject, schedule: str, seed: int, mutant: Mutant | None = None, timeout: int = 0):
    """(what told, the emulation): "" if nothing did. No limit of time unless `timeout` says how many seconds."""
    from cute_kernels.emulator import EmulationError, emulate
    from cute_kernels.emulator.host.backend import run_on_machine
    from cute_kernels.emulator.machine import engine

    report = engine.Machine.report

    def report_once(machine, *args, **options):
        report(machine, *args, **options)
        if machine.hazards:
            raise FirstHazard(machine.hazards[0].kind)

    # a mutant's run ends with its first hazard
    patched = mock.patch.object(engine.Machine, "report", report if mutant is None else report_once)

    def backend(emulation, capture):
        if mutant is not None and re.search(subject.entry, capture.entry):
            capture = dataclasses.replace(capture, ptx=apply(capture.ptx, mutant))
        return run_on_machine(emulation, capture)

    signal.signal(signal.SIGALRM, _alarm)
    signal.alarm(timeout)
    try:
        with patched, emulate(
            subject.arch, schedule=schedule, seed=seed, checks=subject.checks, sm_count=subject.sm_count, backend=backend
        ) as emulation:
            right = subject.run()
    except Hang:
        return "hang", None
    except FirstHazard as hazard:
        return f"hazard {hazard}", None
    except EmulationError as error:
        return f"error {getattr(error, 'kind', type(error).__name__)}", None
    finally:
        signal.alarm(0)
    if emulation.hazards:
        return f"hazard {emulation.hazards[0].kind}", emulation
    return ("" if right else "wrong result"), emulation


def judge(subject: Subject, mutant: Mutant, timeout: int) -> str:
    """How the mutant was caught, or ""."""
    for schedule, seed in SCHEDULES:
        told, _ = run(subject, schedule, seed, mutant, timeout)
        if told:
            return told
    return ""


def judge_all(subject: Subject, every: list[Mutant], timeout: int, jobs: int, deadline: float):
    """(mutant, how it was caught) as each is judged, by `jobs` processes that inherit the compiled kernel.

    None is begun after `deadline`."""
    if jobs == 1:
        for mutant in every:
            if time.time() < deadline:
                yield mutant, judge(subject, mutant, timeout)
        return
    context = multiprocessing.get_context("fork")  # the subject holds tensors and closures: nothing of it has to be pickled
    todo, done = context.SimpleQueue(), context.SimpleQueue()

    def work():
        import torch

        torch.set_num_threads(1)
        while (i := todo.get()) is not None:
            try:
                told = judge(subject, every[i], timeout) if time.time() < deadline else None
            except BaseException as error:  # the parent raises it
                done.put((i, error))
                raise
            done.put((i, told))

    workers = [context.Process(target=work, daemon=True) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    feeder = threading.Thread(target=lambda: [todo.put(i) for i in [*range(len(every)), *[None] * jobs]], daemon=True)
    feeder.start()
    for _ in every:
        i, told = done.get()
        if isinstance(told, BaseException):
            raise RuntimeError(f"the run of {every[i]} failed") from told
        if told is not None:
            yield every[i], told
    for worker in workers:
        worker.join()


def reason(subject: Subject, ptx: str, mutant: Mutant) -> str:
    """Why a survivor is equivalent, if the subject says so."""
    lines = ptx.split("\n")
    around = f"{mutant.what}: " + "\n".join(lines[max(0, mutant.line - 24) : mutant.line + 8])
    for rule, pattern, why in subject.equivalent:
        here = re.search(pattern, f"{mutant.what}: {mutant.before}")
        if rule == mutant.rule and (here or re.search(pattern, around)):
            return why
    return ""


# ---------------------------------------------------------------------------------------------------- kernels
def sparse_prefill() -> Subject:
    """Blackwell sparse prefill, d_qk 576, mask, length, sink: four rows and six empty ones on one pair of CTAs."""
    import torch

    import cute_kernels as ck

    spec = importlib.util.spec_from_file_location("bench_sparse_prefill", ROOT / "tools" / "bench_sparse_prefill.py")
    bench = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = bench
    spec.loader.exec_module(bench)
    # Sub-blocks per row: none, 5, 1, 5, five times none, 1. 20 uses of the ring's 5 slots; 18 records, so that each of the 8 is
    # reused, those of empty rows twice; an odd number and a short row among long ones, as the compiler unrolls the key-list loop
    # and copies values(); large logits, so that O is rescaled
    lengths = [0, 300, 64, 300, *[0] * 5, 64]
    case = bench.Case(len(lengths), 128, 500, 384, group=16, density=0.6, sink=True, gain=20.0, seed=5, bad=0.1)
    args = bench.make(case, "cpu")
    args["topk_length"] = torch.tensor(lengths, dtype=torch.int32)
    want = bench.reference(args)
    tolerances = ((8e-4, 3.01 / 128, 7e-6), (1e-6, 2.01 / 65536, 1e-7), (1e-6, 2.01 / 65536, 1e-7))

    def right() -> bool:
        out = torch.full((len(lengths), 128, 512), float("nan"), dtype=torch.bfloat16)
        got = ck.sparse_prefill(**args, out=out)
        return not any(bench.differences(g, w, *t) for g, w, t in zip(got, want, tolerances))

    equivalent = [
        ("descriptor", r"base[+-]1: mov.b64 a", "S is not swizzled: its base offset is not used"),
        ("alloc", r"gone: tcgen05.relinquish", "each CTA allocates once, and no other CTA fits beside it"),
        ("tma", r"twice: \S*global.shared", "the same bytes are stored twice"),
        ("fence", r"fence\.mbarrier_init", "no access to tensor memory lies before the first cluster barrier"),
        # s_full(i) in the loop: scores(i + 2) have waited for p_empty(i + 1), which every softmax warp signals after s_full(i)
        ("wait", r"skipped(?s:.)*setp\.ne\.b32\s+%p\d+, %r\d+, 3;", "implied by p_empty of the next sub-block"),
        ("fence", r"bar\.warp\.sync(?s:.)*fence::before(?s:.)*cluster\.arrive",
         "before the last cluster barrier: each warp's use of tensor memory lies before an earlier fence and arrival of its own"),
        ("register-count", r"gone: setmaxnreg\.inc", "registers, not results: without it the epilogue has 168"),
    ]
    return Subject("sm_100a", right, sm_count=2, entry="sparse", equivalent=equivalent)


def _active_attention(s: int, lengths: list[int], cap: int | None, entry: str) -> Subject:
    """active_attention of 4 heads on one KV head, D 128, NaN behind each length; `cap`: the decode kernel's split_cap."""
    import torch

    from cute_kernels import reference
    from cute_kernels.kernels.sm100 import decode

    b, h_q, d = len(lengths), 4, 128
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(b, h_q, s, d, generator=gen).bfloat16()
    k, v = (torch.randn(b, 1, max(lengths) + 5, d, generator=gen).bfloat16() for _ in range(2))
    # logits of +-2 and more towards the end: the maximum moves, and no 16 keys of a product's step go without weight
    k *= (2 + 2 * torch.arange(k.shape[2]) / k.shape[2])[:, None].bfloat16()
    for i, n in enumerate(lengths):
        k[i, :, n:], v[i, :, n:] = float("nan"), float("nan")
    kv_len = torch.tensor(lengths, dtype=torch.int32)
    want = reference.active_attention(q.double(), k.double(), v.double(), kv_len, compute_dtype=torch.float64)
    variant = None
    if cap is not None:
        variant = decode.choose(q, k, v, kv_len, True, -1, 0.0, None, None, None)._replace(split_cap=cap)

    def right() -> bool:
        out = torch.full((b, s, h_q, d), float("nan"), dtype=q.dtype).transpose(1, 2)
        lse = torch.full((b, h_q, s), float("nan"))
        decode.launch(q, k, v, kv_len, d**-0.5, True, -1, 0.0, None, None, None, out, lse, variant)
        near = torch.allclose(out.double(), want[0], rtol=2**-7, atol=2**-8)
        return near and torch.allclose(lse.double(), want[1], rtol=1e-4, atol=1e-4)

    equivalent = [
        ("descriptor-or", r"or.b32 lo, lo, 65536;", "K-major and swizzled: the leading offset is not used"),
        ("descriptor-or", r"or.b32 lo, lo, 16777216;", "P of 16 rows is one atom wide: the leading offset is not used"),
        ("alloc", r"relinquish", "lets other CTAs allocate, and orders nothing"),
        ("fence", r"bar.sync\s+0;", "no access to tensor memory lies before this barrier, or behind it"),
    ]
    return Subject("sm_100a", right, entry=entry, equivalent=equivalent)


def decode() -> Subject:
    """Blackwell active_attention, few rows: two splits of 5 and 4 tiles, the last one cut, so that every ring turns."""
    return _active_attention(1, [1030], 1, "decode")


def prefill() -> Subject:
    """Blackwell active_attention, many rows: two row tiles, of which one is cut, over five and six key tiles: every slot is used
    twice; a second batch row whose first key tile is cut."""
    return _active_attention(60, [660, 70], None, "prefill")


SUBJECTS: dict[str, Callable[[], Subject]] = {"sparse_prefill": sparse_prefill, "decode": decode, "prefill": prefill}


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None
    return text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", nargs="?", choices=sorted(SUBJECTS))
    parser.add_argument("--list", action="store_true", help="the kernels, and nothing else")
    parser.add_argument("--rule", type=_pattern, default="", help="only rules that match this regular expression")
    parser.add_argument("--line", type=int, default=0, help="only this PTX line")
    parser.add_argument("--limit", type=int, default=0, help="at most so many mutants, spread over all of them")
    parser.add_argument("--jobs", type=int, default=1, help="judge in so many processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no mutant later than this")
    parser.add_argument("--show", action="store_true", help="print every mutant as it is judged")
    parser.add_argument("--json", default="", help="write all verdicts to this file")
    parser.add_argument("--resume", default="", help="take over this file's verdicts on the same PTX lines")
    options = parser.parse_args(argv)
    if options.list or not options.kernel:
        print("\n".join(f"{name}: {make.__doc__}" for name, make in SUBJECTS.items()))
        return 0
    subject = SUBJECTS[options.kernel]()
    start = time.time()
    executed: set[int] = set()
    longest = 0.0
    for schedule, seed in SCHEDULES:
        told, emulation = run(subject, schedule, seed)
        if told:
            print(f"the unmutated kernel fails under {schedule}: {told}")
            return 1
        (index,) = [i for i, c in enumerate(emulation.captures) if re.search(subject.entry, c.entry)]
        launch = emulation.launches[index]
        executed |= {line for line, n in launch.counters.lines.items() if n}
        longest = max(longest, launch.wall_seconds)
    ptx = emulation.captures[index].ptx
    every = [m for m in mutants(ptx, executed) if re.search(options.rule, m.rule) and options.line in (0, m.line)]
    idle = len(mutants(ptx)) - len(mutants(ptx, executed))
    if options.limit and len(every) > options.limit:
        every = [every[i * len(every) // options.limit] for i in range(options.limit)]
    every.sort(key=lambda m: hashlib.sha256(f"{m.line} {m.rule} {m.what}".encode()).digest())
    total = len(every)
    print(f"{total} mutants; {idle} more on lines that this subject does not execute; {longest:.1f} s a run", flush=True)
    verdicts = []
    if options.resume:
        names = [f.name for f in dataclasses.fields(Mutant)]
        known = {Mutant(*map(v.get, names)): v["caught"] for v in json.loads(Path(options.resume).read_text())}
        for m in (old := [m for m in every if m in known]):
            why = "" if known[m] else reason(subject, ptx, m)
            verdicts.append({**dataclasses.asdict(m), "caught": known[m], "equivalent": why})
        every = [m for m in every if m not in known]
        print(f"{len(old)} judged before", flush=True)
    timeout = max(TIMEOUT, int(10 * longest))
    for mutant, told in judge_all(subject, every, timeout, options.jobs, start + options.seconds):
        why = "" if told else reason(subject, ptx, mutant)
        verdicts.append({**dataclasses.asdict(mutant), "caught": told, "equivalent": why})
        if options.show or not told:
            verdict = told or (f"EQUIVALENT: {why}" if why else "SURVIVED")
            print(f"line {mutant.line} {mutant.rule} {mutant.what}: {verdict}: {mutant.before}", flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(verdicts, indent=1))
    if left := total - len(verdicts):
        print(f"out of time: {left} of {total} not judged")
    by_rule = collections.defaultdict(lambda: [0, 0, 0])
    for v in verdicts:
        by_rule[v["rule"]][0] += 1
        by_rule[v["rule"]][1] += bool(v["caught"])
        by_rule[v["rule"]][2] += bool(v["equivalent"])
    print(f"\n{'rule':20} mutants caught equivalent survived")
    for rule, (n, caught, equivalent) in sorted(by_rule.items()):
        print(f"{rule:20} {n:7} {caught:6} {equivalent:10} {n - caught - equivalent:8}")
    caught = sum(bool(v["caught"]) for v in verdicts)
    left = sum(not v["caught"] and not v["equivalent"] for v in verdicts)
    kinds = collections.Counter(" ".join(v["caught"].split()[:2]) for v in verdicts if v["caught"])
    share = caught / max(1, caught + left)
    print(f"\n{len(verdicts)} mutants: {caught} caught, {len(verdicts) - caught - left} equivalent, {left} survived; "
          f"caught of those not equivalent: {share:.1%}; {time.time() - start:.0f} s")  # fmt: skip
    print(", ".join(f"{kind} {n}" for kind, n in kinds.most_common()))
    return 0 if share >= 0.95 else 2


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
