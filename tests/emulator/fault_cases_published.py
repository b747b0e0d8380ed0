"""Mutants of published kernels: which line of the PTX that their packages compile is changed, and what must be reported.

Nothing of the kernels is kept here: patterns find the lines in what is compiled at test time (for the versions that
published.py names). `expect` is the kind of the finding; `line` matches the PTX line that must be named.
"""

from __future__ import annotations

from dataclasses import dataclass

from faults import Edit

PINNED = {
    "flash-attn-4": "4.0.0b36", "quack-kernels": "0.6.5", "nvidia-cudnn-frontend": "1.32.0", "nvidia-cutlass-dsl": "4.8.1",
}  # fmt: skip
WAIT = r"mbarrier\.try_wait\.parity\S*\s+P1, .*, 10000000;"
SKIPPED = "mov.pred P1, 1;"
LOOP = r"bra\.uni\s+LAB_WAIT;"
EXPECT = r"mbarrier\.arrive\.expect_tx\.shared\.b64\s+(\S+), (\[[^\]]+\]), \S+;"
PLAIN = r"mbarrier.arrive.shared.b64 \1, \2;"


@dataclass(frozen=True)
class Mutant:
    """`edit` on the kernel of published.py's interface called `kernel`; `expect` at a line that `line` matches.

    `at`: the line that the edit changes and the line that the finding names, in what PINNED compile. `schedules` that report it,
    and those of them that name an `elsewhere` line: which of several lines that `line` matches comes first is theirs to choose.
    A wait that falls through goes unreported where it never had to wait.
    """

    kernel: str
    name: str
    edit: Edit
    expect: str = ""
    line: str = ""
    at: tuple[int, int] = (0, 0)
    schedules: tuple[str, ...] = ("eager", "lazy", "random")
    elsewhere: tuple[str, ...] = ()


MUTANTS = [
    Mutant("fa4", "expect-tx-gone", Edit(EXPECT, PLAIN, 0),
           "race-read-after-write-shared", r"tcgen05\.mma",
           at=(363, 830)),
    Mutant("fa4", "load-wait-skipped", Edit(r"mbarrier\.try_wait\.parity\.shared::cta\.b64\s+P1, .*, 10000000;", SKIPPED, 0),
           "race-read-after-write-tmem", r"tcgen05\.mma",
           at=(1016, 1022)),
    Mutant("fa4", "store-wait-skipped", Edit(WAIT, SKIPPED, 0),
           "uninitialised-shared", r"tensor\.4d\.global\.shared",
           at=(239, 248)),
    Mutant("fa4", "store-wait-falls-through", Edit(LOOP, "", 0),
           "uninitialised-shared", r"tensor\.4d\.global\.shared",
           at=(241, 248), schedules=("eager", "lazy")),
    Mutant("fa4", "wait-st-gone", Edit(r"tcgen05\.wait::st\S*;", "", 0),
           "race-read-after-write-tmem", r"tcgen05\.mma",
           at=(2849, 998)),
    Mutant("fa4", "dealloc-gone", Edit(r"tcgen05\.dealloc.*;"),
           "tmem-leak", r"tcgen05\.alloc",
           at=(1466, 682)),
    Mutant("fa4", "bulk-wait-gone", Edit(r"cp\.async\.bulk\.wait_group\.read\s+0;"),
           "bulk-store-at-exit", r"tensor\.4d\.global\.shared",
           at=(269, 263)),
    Mutant("fa4", "proxy-fence-gone", Edit(r"fence\.proxy\.async\S*;", "", 0),
           "proxy-fence", r"tensor\.4d\.global\.shared",
           at=(5042, 248)),
    Mutant("fa4", "commit-gone", Edit(r"tcgen05\.commit\S*\s+\[[^\]]*\];", "", 0),
           "deadlock", r"try_wait",
           at=(844, 1531)),
    Mutant("fa4", "init-barrier-gone", Edit(r"bar\.sync\s+0;"),
           "mbarrier-uninitialised", r"try_wait",
           at=(193, 239), elsewhere=("random",)),
    Mutant("cudnn64", "gather-gone", Edit(r"cp\.async\.bulk\.tensor\.2d\.\S*gather4.*;", "", 0),
           "deadlock", r"try_wait",
           at=(494, 1580)),
    Mutant("cudnn64", "slot-wait-falls-through", Edit(LOOP, "", 2),
           "race-write-after-write-shared", r"gather4",
           at=(429, 494)),
    Mutant("cudnn64", "wait-ld-gone", Edit(r"tcgen05\.wait::ld\S*;", "", 0),
           "race-write-after-read-tmem", r"tcgen05\.mma\.ws",
           at=(1610, 1009)),
    Mutant("cudnn64", "dealloc-gone", Edit(r"tcgen05\.dealloc.*;"),
           "tmem-leak", r"tcgen05\.alloc",
           at=(3333, 102)),
    Mutant("cudnn64", "proxy-fence-gone", Edit(r"fence\.proxy\.async\S*;", "", -1),
           "proxy-fence", r"tensor\.3d\.global\.shared",
           at=(3307, 3314)),
    Mutant("cudnn64", "init-count", Edit(r"(mbarrier\.init\.shared\.b64\s+\[[^\]]+\]), \S+;", r"\1, 7;", 0),
           "deadlock", r"try_wait",
           at=(71, 1580)),
    Mutant("cudnn64", "commit-gone", Edit(r"tcgen05\.commit\S*\s+\[[^\]]*\];", "", 0),
           "deadlock", r"try_wait",
           at=(359, 1580)),
    Mutant("cudnn64", "q-wait-skipped", Edit(WAIT, SKIPPED, 0),
           "uninitialised-shared", r"tcgen05\.cp",
           at=(187, 204)),
    Mutant("quack2", "cluster-wait-gone", Edit(r"barrier\.cluster\.wait;", "", 0),
           "mbarrier-uninitialised", r"try_wait",
           at=(176, 294), elsewhere=("random",)),
    Mutant("quack2", "tile-wait-falls-through", Edit(LOOP, "", 1),
           "race-read-after-write-shared", r"ld\.shared",
           at=(369, 373), schedules=("lazy", "random")),
    Mutant("quack2", "commit-gone", Edit(r"tcgen05\.commit\S*multicast\S*\s+\[[^\]]*\], \S+;", "", 0),
           "deadlock", r"try_wait",
           at=(802, 432)),
    Mutant("quack2", "commit-other-slot", Edit(r"(tcgen05\.commit\S*multicast\S*\s+\[%r\d+)\+96\]", r"\1+104]"),
           "deadlock", r"try_wait",
           at=(802, 432)),
    Mutant("quack2", "expect-tx-gone", Edit(EXPECT, PLAIN, 0),
           "deadlock", r"try_wait",
           at=(323, 1023), schedules=("eager", "random"), elsewhere=("random",)),
    Mutant("quack2", "dealloc-gone", Edit(r"tcgen05\.dealloc.*;"),
           "tmem-leak", r"tcgen05\.alloc",
           at=(1695, 891)),
    Mutant("quack2", "proxy-fence-gone", Edit(r"fence\.proxy\.async\S*;", "", -1),
           "proxy-fence", r"tensor\.3d\.global\.shared",
           at=(1649, 1657)),
    Mutant("quack1", "tile-wait-falls-through", Edit(LOOP, "", 1),
           "race-read-after-write-shared", r"ld\.shared",
           at=(314, 318), schedules=("lazy", "random")),
    Mutant("quack1", "double-init", Edit(r"(mbarrier\.init\.shared\.b64\s+\[%r1)\+56\]", r"\1+48]"),
           "mbarrier-reinit", r"mbarrier\.init",
           at=(103, 103)),
    Mutant("quack1", "init-fence-gone", Edit(r"fence\.mbarrier_init.*;"),
           "mbarrier-init-fence", r"tensor\.3d\.shared",
           at=(152, 281)),
    Mutant("quack1", "named-barrier-count", Edit(r"bar\.sync\s+7, 160;", "bar.sync 7, 192;", 0),
           "deadlock", r"bar\.sync",
           at=(557, 786)),
    Mutant("quack1", "alloc-not-a-power", Edit(r"(tcgen05\.alloc\S*\s+\[\S+\]), \S+;", r"\1, 48;"),
           "tmem-alloc", r"tcgen05\.alloc",
           at=(784, 784)),
]  # fmt: skip

# Edits that report nothing under any schedule (tested under one). cudnn64 and quack2: a later wait of the same thread covers them
# on these shapes. quack1's wait::ld: the default level's relaxation (its registers are read before the release).
SILENT = [
    Mutant("cudnn64", "wait-st-gone", Edit(r"tcgen05\.wait::st\S*;", "", 0), schedules=("eager",)),
    Mutant("quack2", "bulk-wait-gone", Edit(r"cp\.async\.bulk\.wait_group\.read\s+3;", "", 1), schedules=("eager",)),
    Mutant("quack1", "wait-ld-gone", Edit(r"tcgen05\.wait::ld\S*;", "", 0), schedules=("eager",)),
]  # fmt: skip
