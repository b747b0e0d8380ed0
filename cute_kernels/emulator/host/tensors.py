"""CPU tensors passed where the host code expects device tensors: relabelling, and what memory they cover.

Three ways lead from a torch tensor to a kernel argument, and each gets the same treatment while an emulation is active
on the thread: the DLPack device type is changed from CPU to CUDA (kernels compiled for CPU-labelled tensors use generic
addresses, and TVM-FFI host code refuses them), and the tensor's storage is noted as memory that a kernel may touch.
1. ``tensor.__dlpack__`` / ``__dlpack_device__`` (``from_dlpack``; ``cute.compile`` and calls given torch tensors).
2. The C exchange table behind ``torch.Tensor.__dlpack_c_exchange_api__``, which TVM-FFI calls for every tensor
   argument and caches per type: its function pointers are replaced in place, process-wide, by hooks that look at the
   thread after torch's function has succeeded, and put back on exit.
3. `DevicePretence`, a torch function mode (so per thread) for host code that insists on ``tensor.is_cuda`` or
   allocates with ``device="cuda"``.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Iterator

from . import redirect
from .context import current

KDL_CPU, KDL_CUDA = 1, 2
_KEEP_BYTES = 1 << 30


class MemorySeen:
    """Storage ranges handed to kernels: address -> bytes, with the storages kept alive up to 1 GiB in all.

    Beyond that the least recently passed are dropped; a kernel that still uses one is served from the process's memory
    map (see `memory.py`), with the bounds of the mapping instead of the tensor's.
    """

    def __init__(self) -> None:
        self._ranges: OrderedDict[int, tuple[int, object]] = OrderedDict()
        self._bytes = 0

    def add(self, address: int, size: int, owner: object = None) -> None:
        """Notes `size` bytes at `address`, kept alive by `owner`."""
        if not address or size <= 0:
            return
        self.remove(address)
        self._ranges[address] = (size, owner)
        self._bytes += size
        while self._bytes > _KEEP_BYTES and len(self._ranges) > 1:
            _, (old, _) = self._ranges.popitem(last=False)
            self._bytes -= old

    def remove(self, address: int) -> None:
        """Forgets the range that begins at `address`, if any."""
        if address in self._ranges:
            self._bytes -= self._ranges.pop(address)[0]

    def add_tensor(self, tensor) -> None:
        """Notes the whole storage of a torch CPU tensor."""
        storage = tensor.untyped_storage()
        self.add(storage.data_ptr(), storage.nbytes(), storage)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter([(address, size) for address, (size, _) in self._ranges.items()])


class _DLDevice(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", _DLDevice)]  # the head; the rest is not looked at


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    ]


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]


def relabel_capsule(capsule: object) -> None:
    """Changes the device of a DLPack capsule from CPU to CUDA 0, in place."""
    if _is_valid(capsule, b"dltensor"):
        head = _DLTensor.from_address(_pointer_of(capsule, b"dltensor"))
    elif _is_valid(capsule, b"dltensor_versioned"):
        head = _Versioned.from_address(_pointer_of(capsule, b"dltensor_versioned")).tensor
    else:
        raise TypeError(f"not an unused DLPack capsule: {capsule!r}")
    if head.device.type == KDL_CPU:
        head.device.type, head.device.id = KDL_CUDA, 0


def dlpack_methods(torch) -> dict[str, object]:
    """Replacements for torch.Tensor.__dlpack__ and __dlpack_device__."""
    plain, plain_device = torch.Tensor.__dlpack__, torch.Tensor.__dlpack_device__

    def __dlpack__(self, *args, **kwargs):
        emulation = current()
        if emulation is None or not _on_cpu(torch, self):
            return plain(self, *args, **kwargs)
        with torch._C.DisableTorchFunction():
            # A stream or a CUDA dl_device makes no sense for the CPU tensor underneath.
            kwargs = {k: v for k, v in kwargs.items() if k in ("max_version", "copy")}
            capsule = plain(self, **kwargs)
            emulation.memory_seen.add_tensor(self)
        relabel_capsule(capsule)
        return capsule

    def __dlpack_device__(self):
        if current() is not None and _on_cpu(torch, self):
            return (torch.utils.dlpack.DLDeviceType.kDLCUDA, 0)
        return plain_device(self)

    return {"__dlpack__": __dlpack__, "__dlpack_device__": __dlpack_device__}


def _on_cpu(torch, tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return tensor.device.type == "cpu"


class _ExchangeApi(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("from_object", ctypes.c_void_p),
        ("to_object", ctypes.c_void_p),
        ("borrow", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    ]


def _address(callback) -> int:
    return ctypes.cast(callback, ctypes.c_void_p).value


_FROM_OBJECT = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))
_BORROW = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
_STREAM = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class ExchangeTable:
    """torch's C exchange table, with hooks that relabel CPU tensors on emulating threads. Made once per process."""

    def __init__(self, torch):
        capsule = torch.Tensor.__dlpack_c_exchange_api__
        self._table = _ExchangeApi.from_address(_pointer_of(capsule, b"dlpack_exchange_api"))
        self._saved = {name: getattr(self._table, name) for name in ("from_object", "borrow", "stream")}
        self._real_stream = _STREAM(self._saved["stream"]) if self._saved["stream"] else None
        self._notes = {"from_object": _FROM_OBJECT(self._from_object), "borrow": _BORROW(self._borrow)}
        self._stream_callback = _STREAM(self._stream)
        self._hooks = {"stream": _address(self._stream_callback)}
        for name, note in self._notes.items():
            if self._saved[name]:
                self._hooks[name] = redirect.executable(redirect.call_then(self._saved[name], _address(note)))

    # Called after torch's function where that succeeded; its failure (a sparse tensor, say) goes to the caller as torch's error.
    def _from_object(self, tensor, out):
        self._note(tensor, _Versioned.from_address(out[0]).tensor)
        return 0

    def _borrow(self, tensor, out):
        self._note(tensor, _DLTensor.from_address(out))
        return 0

    @staticmethod
    def _note(tensor, head) -> None:
        emulation = current()
        if emulation is not None and head.device.type == KDL_CPU:
            head.device.type, head.device.id = KDL_CUDA, 0
            emulation.memory_seen.add_tensor(tensor)

    def _stream(self, device_type, device_id, out):
        if current() is not None:
            out[0] = None
            return 0
        return self._real_stream(device_type, device_id, out)

    def install(self) -> None:
        """Points the table at the hooks."""
        for name, hook in self._hooks.items():
            if self._saved[name]:
                setattr(self._table, name, hook)

    def restore(self) -> None:
        """Points the table at torch's own functions again."""
        for name, address in self._saved.items():
            setattr(self._table, name, address)

    def installed(self) -> bool:
        """Whether any entry differs from torch's."""
        return any(getattr(self._table, name) != address for name, address in self._saved.items())


_table: list[ExchangeTable] = []
_table_lock = threading.Lock()


def exchange_table(torch) -> ExchangeTable | None:
    """The process's exchange table, or None for a torch without one (TVM-FFI then uses ``__dlpack__``)."""
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        return None
    with _table_lock:
        if not _table:
            _table.append(ExchangeTable(torch))
        return _table[0]


ALIGNMENT = 512  # bytes: what CUDA's allocator gives, and host code may assume more than the CPU allocator's 64


def device_copy(tensor):
    """The torch CPU tensor itself if its address is a multiple of 512, else a copy of it that is, as on a GPU.

    TVM-FFI functions check the alignment that they were compiled for (often 128 bytes); CPU tensors have 64.
    """
    import numpy as np
    import torch

    with torch._C.DisableTorchFunction():
        if tensor.numel() == 0 or tensor.data_ptr() % ALIGNMENT == 0 or tensor.layout is not torch.strided:
            return tensor
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        raw = np.zeros(span * tensor.element_size() + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        copy = torch.from_numpy(raw[start : start + span * tensor.element_size()]).view(tensor.dtype)
        copy = copy.as_strided(tensor.shape, tensor.stride()).copy_(tensor.detach())
        return copy.requires_grad_(tensor.requires_grad)


def device_pretence(torch):
    """A torch function mode under which CPU tensors answer as CUDA tensors, and CUDA allocations are made on the CPU.

    ``t.is_cuda`` is True, ``t.device`` is cuda:0, ``t.get_device()`` 0, ``t.record_stream`` does nothing, and any
    ``device=`` argument that names a CUDA device becomes ``cpu``, with CUDA's alignment. Only Python-visible answers
    change.
    """
    from torch.overrides import TorchFunctionMode

    base = torch._C.TensorBase if hasattr(torch._C, "TensorBase") else torch._C._TensorBase
    is_cuda, is_cpu, device = base.is_cuda.__get__, base.is_cpu.__get__, base.device.__get__
    fake = torch.device("cuda", 0)

    def to_cpu(value):
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == "cuda" else value
        if isinstance(value, str) and value.split(":")[0] == "cuda":
            return "cpu"
        return value

    class Pretence(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if function == is_cuda:
                return True
            if function == is_cpu:
                return False
            if function == device:
                return fake
            name = getattr(function, "__name__", "")
            if name == "get_device":
                return 0
            if name == "cuda":
                return device_copy(args[0])
            if name in ("__dlpack__", "__dlpack_device__"):
                return function(*args, **kwargs)
            before = kwargs.get("device"), args
            if "device" in kwargs:
                kwargs["device"] = to_cpu(kwargs["device"])
            if name in ("to", "new_empty", "new_zeros", "new_full", "new_tensor", "new_ones"):
                args = (args[0], *(to_cpu(a) for a in args[1:]))
            result = function(*args, **kwargs)
            allocated = before[0] is not kwargs.get("device") or any(a is not b for a, b in zip(before[1], args))
            return device_copy(result) if allocated and isinstance(result, torch.Tensor) else result

    return Pretence()
