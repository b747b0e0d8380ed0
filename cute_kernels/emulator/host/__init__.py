"""The emulator's hook into the CuTe DSL: `emulate()`, `current()`, `register_ptx()`.

Modules: emulate (the context manager), context (what is active on a thread), redirect (the runtime library's entry
points), runtime_api (what stands behind them), patches (Python-level patches), tensors (CPU tensors as device tensors),
ptx_store (PTX of a launched kernel), params (parameter blocks), memory and backend (the way to the machine), bridge
(our own operators). Importing this package imports neither torch nor the DSL.
"""

from __future__ import annotations

from .backend import record_only
from .context import Capture, Device, Emulation, current
from .emulate import emulate, is_installed
from .ptx_store import MissingPtx, add_ptx_folder, cubin_hash, note_object, register_ptx
from .redirect import RedirectError

__all__ = [
    "Capture",
    "Device",
    "Emulation",
    "MissingPtx",
    "RedirectError",
    "add_ptx_folder",
    "cubin_hash",
    "current",
    "emulate",
    "is_installed",
    "note_object",
    "record_only",
    "register_ptx",
]
