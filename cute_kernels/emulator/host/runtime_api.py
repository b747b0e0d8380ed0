"""The runtime functions of the CuTe DSL, played by Python: libraries, kernels, attributes, launches, memory.

Each function below stands behind an export of ``libcute_dsl_runtime.so`` while a redirection is installed (see
redirect.py). Threads that are not emulating are passed on to the real function. Handles given out here are addresses
of small zeroed buffers, so that a real driver that receives one by mistake reads valid memory. A library's handle is
written into its module by the host code; `release()` clears those words again, so that after an emulation the
module loads itself anew (from the real runtime, or from the next emulation).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
from ctypes import CFUNCTYPE, c_int32, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field

from . import params, ptx_store
from .context import Capture, Emulation, current

SUCCESS, INVALID_VALUE, MEMORY_ALLOCATION, INVALID_HANDLE, NOT_SUPPORTED, UNKNOWN = 0, 1, 2, 400, 801, 999
_ATTR_CLUSTER, _ATTR_COOPERATIVE, _ATTR_PROGRAMMATIC = 4, 2, 6
_I, _U, _L, _P = c_int32, c_uint32, c_uint64, c_void_p


@dataclass
class Library:
    """One loaded cubin."""

    handle: int
    cubin: bytes
    kernels: dict[str, Kernel] = field(default_factory=dict)
    keep: object = None


@dataclass
class Kernel:
    """One kernel of a library; attributes as the host code set them."""

    handle: int
    name: str
    library: Library
    attributes: dict[int, int] = field(default_factory=dict)
    keep: object = None


_lock = threading.RLock()
_libraries: dict[int, Library] = {}
_kernels: dict[int, Kernel] = {}
_owners: dict[int, int] = {}  # address of a word in a module -> library handle written there
_allocations: dict[int, object] = {}
ORIGINALS: dict[str, object] = {}  # export -> the real function, filled when the library is redirected


def _handle() -> tuple[int, object]:
    block = ctypes.create_string_buffer(256)
    return ctypes.addressof(block), block


def elf_size(address: int) -> int:
    """Length in bytes of the ELF image at an address, from its section and program headers.

    Raises ValueError when there is no 64-bit ELF image.
    """
    head = ctypes.string_at(address, 64)
    if head[:4] != b"\x7fELF" or head[4] != 2:
        raise ValueError("the library image is not a 64-bit cubin")
    phoff, shoff = struct.unpack_from("<QQ", head, 32)
    phentsize, phnum, shentsize, shnum = struct.unpack_from("<HHHH", head, 54)
    end = max(64, shoff + shentsize * shnum, phoff + phentsize * phnum)
    for index in range(shnum):
        section = ctypes.string_at(address + shoff + index * shentsize, 64)
        kind, offset, size = struct.unpack_from("<4xI16xQQ", section)
        if kind != 8:  # SHT_NOBITS takes no space in the file
            end = max(end, offset + size)
    return end


def _fail(emulation: Emulation, error: BaseException, code: int = UNKNOWN) -> int:
    if emulation.pending is None:
        emulation.pending = error
    return code


def _guard(function):
    """Wraps a handler: inactive threads go to the real function, exceptions become a pending error and a code."""

    def handler(original, *args):
        emulation = current()
        if emulation is None:
            if original is not None:
                return original(*args)
            return NOT_SUPPORTED
        try:
            return function(emulation, *args)
        except BaseException as error:  # surfaces from the launching call, see patches.py
            return _fail(emulation, error)

    return handler


_FATBIN_MAGIC, _FATBIN_ELF = 0xBA55ED50, 2


def cubin_address(address: int) -> int:
    """Where the ELF image lies: at `address`, or in the first ELF entry of the fat binary there.

    A fat binary is a 16-byte header (magic, version, header bytes, payload bytes) and entries of their own header
    (kind, version, header bytes, payload bytes) and payload. Raises ValueError when it holds no plain ELF image.
    """
    magic, _, header, size = struct.unpack("<IHHQ", ctypes.string_at(address, 16))
    if magic != _FATBIN_MAGIC:
        return address
    at, end = address + header, address + header + size
    while at < end:
        kind, _, entry_header, entry_size = struct.unpack("<HHIQ", ctypes.string_at(at, 16))
        if kind == _FATBIN_ELF and ctypes.string_at(at + entry_header, 4) == b"\x7fELF":
            return at + entry_header
        at += entry_header + entry_size
    raise ValueError("the fat binary has no uncompressed cubin")


def _load(address: int) -> Library:
    address = cubin_address(address)
    image = ctypes.string_at(address, elf_size(address))
    handle, keep = _handle()
    library = Library(handle, image, keep=keep)
    with _lock:
        _libraries[handle] = library
    return library


def _get_kernel(library: int, name: bytes) -> Kernel:
    with _lock:
        owner = _libraries.get(library)
        if owner is None:
            raise RuntimeError(f"library handle {library:#x} was not loaded by this emulator: the function was"
                               " initialised on a real GPU before emulate() was entered")
        text = name.decode()
        if text not in owner.kernels:
            handle, keep = _handle()
            owner.kernels[text] = _kernels[handle] = Kernel(handle, text, owner, keep=keep)
        return owner.kernels[text]


@_guard
def library_load_data(emulation, out, data, *rest):
    library = _load(data)
    _P.from_address(out).value = library.handle
    with _lock:
        _owners[out] = library.handle
    return SUCCESS


@_guard
def library_load_from_file(emulation, out, path, *rest):
    with open(ctypes.string_at(path).decode(), "rb") as file:
        image = file.read()
    block = ctypes.create_string_buffer(image, len(image))
    library = _load(ctypes.addressof(block))
    _P.from_address(out).value = library.handle
    return SUCCESS


def library_unload(original, library):
    with _lock:
        owned = _libraries.pop(library or 0, None)
        if owned is not None:
            for kernel in owned.kernels.values():
                _kernels.pop(kernel.handle, None)
            for word in [w for w, handle in _owners.items() if handle == library]:
                del _owners[word]
            return SUCCESS
    if current() is not None or original is None:
        return SUCCESS
    return original(library)


@_guard
def library_get_kernel(emulation, out, library, name):
    _P.from_address(out).value = _get_kernel(library, ctypes.string_at(name)).handle
    return SUCCESS


@_guard
def library_get_kernel_count(emulation, out, library):
    owner = _libraries[library]
    _U.from_address(out).value = max(1, len(owner.kernels))
    return SUCCESS


@_guard
def library_get_global(emulation, *args):
    raise NotImplementedError("module-level global variables of a CuTe DSL library are not emulated")


@_guard
def set_attribute(emulation, kernel, attribute, value, *device):
    if kernel in _kernels:
        _kernels[kernel].attributes[attribute] = value
    return SUCCESS


def get_attribute_of_kernel(original, out, attribute, kernel, device):
    emulation = current()
    if emulation is None:
        return _real_kernel_attribute(out, attribute, kernel, device)
    _I.from_address(out).value = kernel_attribute(emulation, _kernels.get(kernel), attribute)
    return SUCCESS


def kernel_attribute(emulation: Emulation, kernel: Kernel | None, attribute: int) -> int:
    """CUfunction_attribute values: 0 max threads, 1 static shared bytes, 4 registers, 8 dynamic shared limit."""
    if attribute == 0:
        return 1024
    if kernel is not None and attribute in kernel.attributes:
        return kernel.attributes[attribute]
    return {8: emulation.device.smem_per_block_optin}.get(attribute, 0)


def _real_kernel_attribute(out, attribute, kernel, device) -> int:
    from cuda.bindings import driver

    error, ordinal = driver.cuDeviceGet(device)
    if int(error):
        return UNKNOWN
    error, value = driver.cuKernelGetAttribute(driver.CUfunction_attribute(attribute), driver.CUkernel(kernel), ordinal)
    if int(error):
        return UNKNOWN
    _I.from_address(out).value = value
    return SUCCESS


def init_library_once(original, word, load, load_to_device, set_error):
    """Loads a module's library unless its word is set; also the real one's job on threads that are not emulating."""
    if _P.from_address(word).value:
        return 0
    code = CFUNCTYPE(_I, _P)(load)(_local(word))
    library = _P.from_address(_local(word)).value
    if code == 0 and load_to_device:
        count = 1
        if current() is None:
            from cuda.bindings import runtime

            error, count = runtime.cudaGetDeviceCount()
            code = int(error)
        results = [CFUNCTYPE(_I, _P, _I)(load_to_device)(_local(word), device) for device in range(count)]
        if results and all(results):  # as the real one: a library that some device accepts is usable
            code = results[0]
    if code == 0:
        _P.from_address(word).value = library
        with _lock:
            _owners.pop(_local(word), None)
            if library in _libraries:
                _owners[word] = library
        return 0
    emulation = current()
    message = f"CUDA Error Code: {code}".encode()
    if emulation is not None and emulation.pending is None:
        emulation.pending = RuntimeError(f"loading the kernel library failed with code {code}")
    CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(set_error)(b"CUDADialectError", message)
    return -1


_words = threading.local()


def _local(word: int) -> int:
    """Address of a scratch word of this thread, so that a half-loaded library is never visible to other threads."""
    if not hasattr(_words, "block"):
        _words.block = (c_uint64 * 1)()
    return ctypes.addressof(_words.block)


def unload_library_once(original, word):
    handle = _P.from_address(word).value
    if not handle:
        return 0
    _P.from_address(word).value = None
    with _lock:
        _owners.pop(word, None)
        ours = handle in _libraries
    if ours:
        library_unload(None, handle)
    elif current() is None:
        from cuda.bindings import runtime

        runtime.cudaLibraryUnload(runtime.cudaLibrary_t(handle))
    return 0


@_guard
def get_device(emulation, out):
    _I.from_address(out).value = 0
    return SUCCESS


@_guard
def set_device(emulation, device):
    return SUCCESS if device == 0 else _fail(emulation, ValueError(f"the emulated machine has one GPU, not {device}"))


@_guard
def get_device_count(emulation, out):
    _I.from_address(out).value = 1
    return SUCCESS


def device_get(original, out, ordinal):
    if current() is None:
        from cuda.bindings import driver

        error, device = driver.cuDeviceGet(ordinal)
        if int(error) == 0:
            _I.from_address(out).value = int(device)
        return int(error)
    _I.from_address(out).value = ordinal
    return SUCCESS


@_guard
def device_get_attribute(emulation, out, attribute, device):
    _I.from_address(out).value = device_attribute(emulation, attribute)
    return SUCCESS


def device_attribute(emulation: Emulation, attribute: int) -> int:
    """CUdevice_attribute values of the emulated GPU. Raises KeyError for one that is not modelled."""
    device = emulation.device
    values = {
        1: 1024, 2: 1024, 3: 1024, 4: 64, 5: 2147483647, 6: 65535, 7: 65535, 8: 48 * 1024, 9: 65536, 10: 32,
        11: 2147483647, 12: 65536, 13: device.clock_khz, 16: device.sm_count, 17: 0, 18: 0, 20: 0, 31: 1, 32: 1,
        33: 0, 34: 0, 36: 3_996_000, 37: 8192, 38: device.l2_bytes, 39: 2048, 40: 3, 41: 1,
        75: device.capability[0], 76: device.capability[1], 78: 1, 79: 1, 81: device.smem_per_sm, 82: 65536, 83: 1,
        86: 1, 88: 1, 89: 1, 90: 1, 92: 1, 95: 1, 97: device.smem_per_block_optin, 106: 32, 108: device.l2_bytes,
        109: 134217728, 111: 1024, 115: 1, 120: 1, 121: 1,
    }  # fmt: skip
    return values[int(attribute)]


@_guard
def no_op(emulation, *args):
    return SUCCESS


def stream_wait_event(original, stream, event, flags):
    """Streams are one queue in an emulation."""
    if current() is not None:
        return SUCCESS
    from cuda.bindings import runtime

    return int(runtime.cudaStreamWaitEvent(runtime.cudaStream_t(stream), runtime.cudaEvent_t(event), flags)[0])


@_guard
def create_handle(emulation, out, *args):
    handle, keep = _handle()
    with _lock:
        _allocations[handle] = keep
    _P.from_address(out).value = handle
    return SUCCESS


@_guard
def elapsed(emulation, out, start, end):
    ctypes.c_float.from_address(out).value = float("nan")  # the emulator does not simulate time
    return SUCCESS


@_guard
def malloc(emulation, out, size, *stream):
    block = ctypes.create_string_buffer(size + 1024)
    address = (ctypes.addressof(block) + 1023) & ~1023
    with _lock:
        _allocations[address] = block
    emulation.memory_seen.add(address, size)
    _P.from_address(out).value = address
    return SUCCESS


@_guard
def free(emulation, address, *stream):
    with _lock:
        _allocations.pop(address, None)
    emulation.memory_seen.remove(address)
    return SUCCESS


@_guard
def memcpy(emulation, target, source, size, kind, *stream):
    ctypes.memmove(target, source, size)
    return SUCCESS


@_guard
def memset(emulation, target, value, size, *stream):
    ctypes.memset(target, value, size)
    return SUCCESS


@_guard
def occupancy(emulation, out, kernel, threads, smem):
    fits = emulation.device.smem_per_sm // (smem + 1024)
    _I.from_address(out).value = max(0, min(32, 2048 // max(1, threads), fits))
    return SUCCESS


# Orders of the driver's enums CUtensorMapDataType, Interleave, Swizzle, L2promotion and FloatOOBfill.
_MAP_DTYPES = (
    "u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32_ftz", "tf32", "tf32_ftz", "b4x16",
    "b4x16_p64", "b6x16_p32",
)  # fmt: skip
_MAP_SWIZZLES = ("none", "32B", "64B", "128B", "128B_32B-atom", "128B_32B-atom_8B-flip", "128B_64B-atom")


def encode_tensor_map(original, out, dtype, rank, address, dims, strides, box, steps, interleave, swizzle, l2, fill):
    """cuTensorMapEncodeTiled: packs a tensor map into the 128 bytes at `out`, or refuses as the driver does."""
    extents = tuple((_L * rank).from_address(dims))
    pitches = tuple((_L * (rank - 1)).from_address(strides)) if rank > 1 else ()
    boxes, step = tuple((_U * rank).from_address(box)), tuple((_U * rank).from_address(steps))
    emulation = current()
    if emulation is None:
        return _real_tensor_map(out, dtype, rank, address, extents, pitches, boxes, step, interleave, swizzle, l2, fill)
    try:
        from ..datapath.tensormap import TensorMap

        tensor_map = TensorMap(
            address=address or 0, dtype=_MAP_DTYPES[dtype], dims=extents, strides=pitches, box=boxes,
            element_strides=step, interleave=("none", "16B", "32B")[interleave], swizzle=_MAP_SWIZZLES[swizzle],
            oob_fill=("zero", "nan")[fill], l2_promotion=(0, 64, 128, 256)[l2],
        )  # fmt: skip
        tensor_map.check()
        ctypes.memmove(out, tensor_map.encode(), 128)
        return SUCCESS
    except BaseException as error:
        return _fail(emulation, error, INVALID_VALUE)


def _real_tensor_map(out, dtype, rank, address, dims, strides, box, steps, interleave, swizzle, l2, fill) -> int:
    from cuda.bindings import driver

    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    error, tensor_map = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType(dtype), rank, address or 0, [wide(d) for d in dims], [wide(s) for s in strides],
        [narrow(b) for b in box], [narrow(s) for s in steps], driver.CUtensorMapInterleave(interleave),
        driver.CUtensorMapSwizzle(swizzle), driver.CUtensorMapL2promotion(l2), driver.CUtensorMapFloatOOBfill(fill),
    )  # fmt: skip
    if int(error) == 0:
        ctypes.memmove(out, tensor_map.getPtr(), 128)
    return int(error)


def assert_success(original, code):
    """The host code of device-side asserts aborts the process on an error; an emulation raises it later instead."""
    emulation = current()
    if code and (emulation is None or emulation.pending is None):
        from cuda.bindings import runtime

        name = runtime.cudaGetErrorName(runtime.cudaError_t(code))[1].decode()
        os.write(2, f"CUDA Dialect Assertion failed on CUDA error: {name}\n".encode())
        os.abort()


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", _U * 3),
        ("block", _U * 3),
        ("smem", c_uint64),
        ("stream", _P),
        ("attributes", _P),
        ("count", _U),
    ]


_ATTRIBUTE_BYTES = 72  # id, four bytes of padding, a 64-byte union


def launch_kernel_ex(original, config, kernel, arguments):
    emulation = current()
    if emulation is None:
        if kernel in _kernels:
            return INVALID_HANDLE  # a module that belongs to an emulation of another thread
        return original(config, kernel, arguments) if original is not None else NOT_SUPPORTED
    try:
        launch = _Config.from_address(config)
        cluster, flags = (1, 1, 1), {}
        for index in range(launch.count):
            at = launch.attributes + index * _ATTRIBUTE_BYTES
            kind = _U.from_address(at).value
            words = tuple((_U * 3).from_address(at + 8))
            if kind == _ATTR_CLUSTER:
                cluster = words
            else:
                flags[kind] = words[0]
        return _launch(
            emulation, kernel, tuple(launch.grid), tuple(launch.block), cluster, launch.smem, launch.stream or 0,
            arguments, flags,
        )  # fmt: skip
    except BaseException as error:
        return _fail(emulation, error)


def launch_kernel(original, kernel, gx, gy, gz, bx, by, bz, arguments, smem, stream):
    """The launch without attributes is the extended launch with none, for the real runtime too."""
    config = _Config((gx, gy, gz), (bx, by, bz), smem, stream, None, 0)
    return launch_kernel_ex(ORIGINALS.get("_cudaLaunchKernelEx"), ctypes.addressof(config), kernel, arguments)


def _launch(emulation, kernel, grid, block, cluster, smem, stream, arguments, flags) -> int:
    known = _kernels.get(kernel)
    if known is None:
        raise RuntimeError(
            f"kernel handle {kernel or 0:#x} was not loaded by this emulator: the function was initialised on a real"
            " GPU before emulate() was entered; compile or load it inside"
        )
    emulation.keeper.collect()
    text = ptx_store.find(known.library.cubin, known.name)
    _check_target(emulation, text, known.name)
    slots = params.layout(text, known.name)
    capture = Capture(
        known.name, grid, block, cluster, int(smem), params.gather(slots, arguments), slots, int(stream),
        bool(flags.get(_ATTR_COOPERATIVE)), bool(flags.get(_ATTR_PROGRAMMATIC)), text,
    )  # fmt: skip
    emulation.run(capture)
    return SUCCESS


def _check_target(emulation: Emulation, text: str, name: str) -> None:
    have = params.target(text)
    number = int("".join(c for c in have if c.isdigit()))
    limit = int("".join(c for c in emulation.arch if c.isdigit()))
    specific = have[-1] in "af"
    same_family = have.endswith("f") and number // 10 == limit // 10 and number <= limit
    if (specific and have != emulation.arch and not same_family) or (not specific and number > limit):
        raise RuntimeError(f"kernel {name} is compiled for {have} and cannot run on the emulated {emulation.arch}")


CALLBACKS = {
    "_cudaLibraryLoadData": (CFUNCTYPE(_I, _P, _P, _P, _P, _U, _P, _P, _U), library_load_data),
    "_cudaLibraryLoadFromFile": (CFUNCTYPE(_I, _P, _P, _P, _P, _U, _P, _P, _U), library_load_from_file),
    "_cudaLibraryUnload": (CFUNCTYPE(_I, _P), library_unload),
    "_cudaLibraryGetKernel": (CFUNCTYPE(_I, _P, _P, _P), library_get_kernel),
    "_cudaLibraryGetKernelCount": (CFUNCTYPE(_I, _P, _P), library_get_kernel_count),
    "_cudaLibraryGetGlobal": (CFUNCTYPE(_I, _P, _P, _P, _P), library_get_global),
    "_cudaFuncSetAttribute": (CFUNCTYPE(_I, _P, _I, _I), set_attribute),
    "_cudaKernelSetAttributeForDevice": (CFUNCTYPE(_I, _P, _I, _I, _I), set_attribute),
    "_cuKernelGetAttribute": (CFUNCTYPE(_I, _P, _I, _P, _I), get_attribute_of_kernel),
    "_cudaGetDevice": (CFUNCTYPE(_I, _P), get_device),
    "_cudaSetDevice": (CFUNCTYPE(_I, _I), set_device),
    "_cudaGetDeviceCount": (CFUNCTYPE(_I, _P), get_device_count),
    "_cuDeviceGet": (CFUNCTYPE(_I, _P, _I), device_get),
    "_cudaDeviceGetAttribute": (CFUNCTYPE(_I, _P, _I, _I), device_get_attribute),
    "_cudaDeviceSynchronize": (CFUNCTYPE(_I), no_op),
    "_cudaStreamSynchronize": (CFUNCTYPE(_I, _P), no_op),
    "_cudaStreamWaitEvent": (CFUNCTYPE(_I, _P, _P, _U), stream_wait_event),
    "_cudaStreamCreate": (CFUNCTYPE(_I, _P), create_handle),
    "_cudaStreamDestroy": (CFUNCTYPE(_I, _P), no_op),
    "_cudaEventCreate": (CFUNCTYPE(_I, _P), create_handle),
    "_cudaEventRecord": (CFUNCTYPE(_I, _P, _P), no_op),
    "_cudaEventDestroy": (CFUNCTYPE(_I, _P), no_op),
    "_cudaEventElapsedTime": (CFUNCTYPE(_I, _P, _P, _P), elapsed),
    "_cudaMalloc": (CFUNCTYPE(_I, _P, _L), malloc),
    "_cudaMallocAsync": (CFUNCTYPE(_I, _P, _L, _P), malloc),
    "_cudaFree": (CFUNCTYPE(_I, _P), free),
    "_cudaFreeAsync": (CFUNCTYPE(_I, _P, _P), free),
    "_cudaMemcpy": (CFUNCTYPE(_I, _P, _P, _L, _I), memcpy),
    "_cudaMemcpyAsync": (CFUNCTYPE(_I, _P, _P, _L, _I, _P), memcpy),
    "_cudaMemset": (CFUNCTYPE(_I, _P, _I, _L), memset),
    "_cudaMemsetAsync": (CFUNCTYPE(_I, _P, _I, _L, _P), memset),
    "_cudaOccupancyMaxActiveBlocksPerMultiprocessor": (CFUNCTYPE(_I, _P, _P, _I, _L), occupancy),
    "_cudaLaunchKernel": (CFUNCTYPE(_I, _P, _U, _U, _U, _U, _U, _U, _P, _L, _P), launch_kernel),
    "_cudaLaunchKernelEx": (CFUNCTYPE(_I, _P, _P, _P), launch_kernel_ex),
    "_cuTensorMapEncodeTiled": (CFUNCTYPE(_I, _P, _I, _U, _P, _P, _P, _P, _P, _I, _I, _I, _I), encode_tensor_map),
    "cuda_dialect_assert_success": (CFUNCTYPE(None, _I), assert_success),
    "cuda_dialect_init_library_once": (CFUNCTYPE(_I, _P, _P, _P, _P), init_library_once),
    "cuda_dialect_unload_library_once": (CFUNCTYPE(None, _P), unload_library_once),
}


def release() -> None:
    """Clears the library word of every module loaded by an emulation; each then loads itself anew when next called.

    A module that was freed without its destructor leaves a word that may be unmapped, even by another thread just now:
    the words are read and written through /proc/self/mem, which answers with an error where an access would fault.
    """
    with _lock, open("/proc/self/mem", "r+b", buffering=0) as memory:
        for word, handle in _owners.items():
            expected = struct.pack("<Q", handle)
            try:
                if os.pread(memory.fileno(), 8, word) == expected:
                    os.pwrite(memory.fileno(), bytes(8), word)
            except OSError as error:
                if error.errno not in (errno.EIO, errno.EFAULT):
                    raise
        _owners.clear()
        _libraries.clear()
        _kernels.clear()
