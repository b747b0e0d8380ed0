"""Mutants of published kernels: which line of the PTX that their packages compile is changed, and what must be reported.

Nothing of the kernels is kept here: patterns find the lines in what is compiled at test time (for the versions that
published.py names). `expect` is the kind of the finding; `line` matches the PTX line that must be named.
"""

from __future__ import annotations

from dataclasses import dataclass

from faults import Edit

WAIT = r"mbarrier\.try_wait\.parity\S*\s+P1, .*, 10000000;"
SKIPPED = "mov.pred P1, 1;"
EXPECT = r"mbarrier\.arrive\.expect_tx\.shared\.b64\s+(\S+), (\[[^\]]+\]), \S+;"
PLAIN = r"mbarrier.arrive.shared.b64 \1, \2;"


@dataclass(frozen=True)
class Mutant:
    """`edit` on the kernel of published.py's interface called `kernel`; `expect` at a line that `line` matches."""

    kernel: str
    name: str
    edit: Edit
    expect: str = ""
    line: str = ""


MUTANTS = [
    Mutant("fa4", "expect-tx-gone", Edit(EXPECT, PLAIN, 0),
           "race-read-after-write-shared", r"tcgen05\.mma"),
    Mutant("fa4", "load-wait-skipped", Edit(r"mbarrier\.try_wait\.parity\.shared::cta\.b64\s+P1, .*, 10000000;", SKIPPED, 0),
           "race-read-after-write-tmem", r"tcgen05\.mma"),
    Mutant("fa4", "store-wait-skipped", Edit(WAIT, SKIPPED, 0),
           "uninitialised-shared", r"tensor\.4d\.global\.shared"),
    Mutant("fa4", "wait-st-gone", Edit(r"tcgen05\.wait::st\S*;", "", 0),
           "race-read-after-write-tmem", r"tcgen05\.mma"),
    Mutant("fa4", "dealloc-gone", Edit(r"tcgen05\.dealloc.*;"),
           "tmem-leak", r"tcgen05\.alloc"),
    Mutant("fa4", "bulk-wait-gone", Edit(r"cp\.async\.bulk\.wait_group\.read\s+0;"),
           "bulk-store-at-exit", r"tensor\.4d\.global\.shared"),
    Mutant("fa4", "proxy-fence-gone", Edit(r"fence\.proxy\.async\S*;", "", 0),
           "proxy-fence", r"tensor\.4d\.global\.shared"),
    Mutant("fa4", "commit-gone", Edit(r"tcgen05\.commit\S*\s+\[[^\]]*\];", "", 0),
           "deadlock", r"try_wait"),
    Mutant("fa4", "init-barrier-gone", Edit(r"bar\.sync\s+0;"),
           "mbarrier-uninitialised", r"try_wait"),
    Mutant("cudnn64", "gather-gone", Edit(r"cp\.async\.bulk\.tensor\.2d\.\S*gather4.*;", "", 0),
           "deadlock", r"try_wait"),
    Mutant("cudnn64", "wait-ld-gone", Edit(r"tcgen05\.wait::ld\S*;", "", 0),
           "race-write-after-read-tmem", r"tcgen05\.mma\.ws"),
    Mutant("cudnn64", "dealloc-gone", Edit(r"tcgen05\.dealloc.*;"),
           "tmem-leak", r"tcgen05\.alloc"),
    Mutant("cudnn64", "proxy-fence-gone", Edit(r"fence\.proxy\.async\S*;", "", -1),
           "proxy-fence", r"tensor\.3d\.global\.shared"),
    Mutant("cudnn64", "init-count", Edit(r"(mbarrier\.init\.shared\.b64\s+\[[^\]]+\]), \S+;", r"\1, 7;", 0),
           "deadlock", r"try_wait"),
    Mutant("cudnn64", "commit-gone", Edit(r"tcgen05\.commit\S*\s+\[[^\]]*\];", "", 0),
           "deadlock", r"try_wait"),
    Mutant("cudnn64", "q-wait-skipped", Edit(WAIT, SKIPPED, 0),
           "uninitialised-shared", r"tcgen05\.cp"),
    Mutant("quack2", "cluster-wait-gone", Edit(r"barrier\.cluster\.wait;", "", 0),
           "mbarrier-uninitialised", r"try_wait"),
    Mutant("quack2", "commit-gone", Edit(r"tcgen05\.commit\S*multicast\S*\s+\[[^\]]*\], \S+;", "", 0),
           "deadlock", r"try_wait"),
    Mutant("quack2", "commit-other-slot", Edit(r"(tcgen05\.commit\S*multicast\S*\s+\[%r\d+)\+96\]", r"\1+104]"),
           "deadlock", r"try_wait"),
    Mutant("quack2", "expect-tx-gone", Edit(EXPECT, PLAIN, 0),
           "deadlock", r"try_wait"),
    Mutant("quack2", "dealloc-gone", Edit(r"tcgen05\.dealloc.*;"),
           "tmem-leak", r"tcgen05\.alloc"),
    Mutant("quack2", "proxy-fence-gone", Edit(r"fence\.proxy\.async\S*;", "", -1),
           "proxy-fence", r"tensor\.3d\.global\.shared"),
    Mutant("quack1", "double-init", Edit(r"(mbarrier\.init\.shared\.b64\s+\[%r1)\+56\]", r"\1+48]"),
           "mbarrier-reinit", r"mbarrier\.init"),
    Mutant("quack1", "init-fence-gone", Edit(r"fence\.mbarrier_init.*;"),
           "mbarrier-init-fence", r"tensor\.3d\.shared"),
    Mutant("quack1", "named-barrier-count", Edit(r"bar\.sync\s+7, 160;", "bar.sync 7, 192;", 0),
           "deadlock", r"bar\.sync"),
    Mutant("quack1", "alloc-not-a-power", Edit(r"(tcgen05\.alloc\S*\s+\[\S+\]), \S+;", r"\1, 48;"),
           "tmem-alloc", r"tcgen05\.alloc"),
]  # fmt: skip

# Edits that report nothing. cudnn64 and quack2: a later wait of the same thread covers them on these shapes. quack1's wait::ld:
# the default level's relaxation (its registers are read before the release).
SILENT = [
    Mutant("cudnn64", "wait-st-gone", Edit(r"tcgen05\.wait::st\S*;", "", 0)),
    Mutant("quack2", "bulk-wait-gone", Edit(r"cp\.async\.bulk\.wait_group\.read\s+3;", "", 1)),
    Mutant("quack1", "wait-ld-gone", Edit(r"tcgen05\.wait::ld\S*;", "", 0)),
]  # fmt: skip
