"""What a test kernel is: text, launch, arguments, answer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

HEAD = ".version 8.4\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
SPAN = {"none": 16, "32B": 32, "64B": 64, "128B": 128}


@dataclass
class Case:
    """One launch. `args` may hold arrays, maps on arrays of `keep`, and ints. `want`: (one of these arrays, what it must hold
    afterwards, the absolute tolerance; 0: bit for bit)."""

    name: str
    ptx: str
    grid: tuple[int, int, int]
    block: int
    args: list
    want: list[tuple[np.ndarray, np.ndarray, np.ndarray | float]]
    smem: int
    cluster: int = 1
    features: str = ""
    keep: list = field(default_factory=list)


def kernel(params: str, registers: str, body: str, threads: int, cluster: int = 1) -> str:
    clusters = f".reqnctapercluster {cluster}, 1, 1\n" if cluster > 1 else ""
    return f"{HEAD}.visible .entry k({params})\n.reqntid {threads}\n{clusters}{{\n{registers}\n{body}\n    ret;\n}}\n"


def wait(label: str, barrier: str, parity: str, scope: str = "") -> str:
    return f"{label}:\n    mbarrier.try_wait.parity{scope}.shared::cta.b64 %ok, [{barrier}], {parity};\n    @!%ok bra {label};"


def tma_load(rank: int, to: str, tmap: str, coords: str, barrier: str, mask: str = "") -> str:
    mode = ".multicast::cluster" if mask else ""
    tail = f", {mask}" if mask else ""
    name = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{mode}"
    return f"    {name} [{to}], [{tmap}, {{{coords}}}], [{barrier}]{tail};"
