"""What a tool needs before it begins: says what is missing in one line on stderr and ends the program with status 2."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import NoReturn


def stop(text: str) -> NoReturn:
    print(f"{Path(sys.argv[0]).name}: {text}", file=sys.stderr)
    raise SystemExit(2)


def need_gpu(major: int | None = None, names: str = "an NVIDIA GPU") -> None:
    """major: of the compute capability that the tool's kernels are for."""
    import torch

    if not torch.cuda.is_available():
        stop(f"needs {names}; this torch ({torch.__version__}) sees none")
    have = torch.cuda.get_device_capability()
    if major is not None and have[0] != major:
        stop(f"needs {names}, compute capability {major}.x; {torch.cuda.get_device_name()} has {have[0]}.{have[1]}")


def need_module(module: str, what_for: str, install: str) -> None:
    if importlib.util.find_spec(module) is None:
        stop(f"{what_for} needs the module {module} ({install})")


def need_file(path: str) -> None:
    if not Path(path).is_file():
        stop(f"there is no file {path}")
