"""The caller's own memory as Buffers, by protocol: no framework is imported to recognise its arrays."""

from __future__ import annotations

import ctypes
import sys
from math import prod
from typing import Any

from nobounce import dlpack
from nobounce.allocation import Allocation
from nobounce.buffer import Buffer
from nobounce.device import Device, as_device, torch_runtime
from nobounce.dtypes import DTYPES, DType
from nobounce.errors import ArgumentError, NobounceError
from nobounce.route.types import MemoryKind
from nobounce.runtimes import registry
from nobounce.stream import as_stream

_BY_NUMPY = {d.numpy: d for d in DTYPES.values() if d.numpy is not None and d.name != "F4"}
_DEVICES = {
    dlpack.CPU: "cpu",
    dlpack.CUDA: "cuda",
    dlpack.CUDA_HOST: "cuda",
    dlpack.CUDA_MANAGED: "cuda",
    dlpack.ROCM: "hip",
    dlpack.ROCM_HOST: "hip",
}


class _PyBuffer(ctypes.Structure):
    """Py_buffer of the C API; the only way to the address of read-only memory."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
_release_buffer = ctypes.PYFUNCTYPE(None, ctypes.POINTER(_PyBuffer))(("PyBuffer_Release", ctypes.pythonapi))


def adopt(obj: Any) -> Buffer:
    """What `as_buffer` does for anything but a Buffer."""
    from nobounce.tensor import Tensor

    if isinstance(obj, Tensor):
        return obj.buffer
    if not isinstance(obj, type | int | str):
        for way in (_from_torch, _from_numpy, _from_cuda_array, _from_memory, _from_dlpack):
            buffer = way(obj)
            if buffer is not None:
                return buffer
    raise TypeError(
        f"{type(obj).__name__} is no memory: give a Buffer, a Tensor, an object with the buffer protocol, a "
        "numpy array, a "
        "torch tensor, or an object with __cuda_array_interface__ or __dlpack__ (Buffer.from_handle takes "
        "an address)"
    )


def take_tensor(obj: Any) -> tuple[Buffer, tuple[int, ...], DType]:
    """The memory, shape and element type of an object with `__dlpack__`."""
    dtype = _BY_NUMPY.get(str(getattr(obj, "dtype", None)))
    if type(obj).__module__ == "numpy" and dtype is not None:
        buffer = _from_numpy(obj)
        if buffer is not None:
            return buffer, tuple(obj.shape), dtype
    foreign = _consume(obj)
    return _foreign_buffer(foreign), foreign.shape, foreign.dtype


def _from_torch(obj: Any) -> Buffer | None:
    try:
        asked = obj.is_contiguous, obj.data_ptr, obj.numel, obj.element_size
        where = obj.device
    except AttributeError:
        return None
    try:
        contiguous, address, count, itemsize = (ask() for ask in asked)
    except RuntimeError as error:  # sparse, meta and fake tensors have no memory of their own
        raise ArgumentError(f"the {type(obj).__name__} has no memory to read or write: {error}") from error
    if not contiguous:
        raise ArgumentError(
            f"the tensor is not C-contiguous (strides {list(obj.stride())}): call contiguous() first"
        )
    if getattr(obj, "is_conj", bool)() or getattr(obj, "is_neg", bool)():
        raise ArgumentError(
            "the tensor is a lazy conjugate or negative: call resolve_conj() or resolve_neg() first"
        )
    return _over(address, count * itemsize, _torch_device(where), obj, read_only=False)


_torch_devices: dict[Any, Device] = {}
"""By torch.device, which is immutable: to look a device up takes as long as to read 4 KiB."""


def _torch_device(device: Any) -> Device:
    if type(device).__module__ != "torch" or device.index is None:
        return as_device(device)
    known = _torch_devices.get(device)
    if known is None or known._runtime not in registry.loaded():
        known = _torch_devices[device] = as_device(device)
    return known


def _from_numpy(obj: Any) -> Buffer | None:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(obj, numpy.generic):  # what its interface points to is gone at once
        return None
    interface = getattr(obj, "__array_interface__", None)
    if not isinstance(interface, dict) or not isinstance(interface.get("data"), tuple):
        return None
    if interface["typestr"][1] == "O" or getattr(getattr(obj, "dtype", None), "hasobject", False):
        raise ArgumentError("an array of Python objects has no bytes that could be moved")
    address, read_only = interface["data"]
    return _over(address, _nbytes(interface), _cpu(), obj, read_only=bool(read_only))


def _from_cuda_array(obj: Any) -> Buffer | None:
    interface = getattr(obj, "__cuda_array_interface__", None)
    if not isinstance(interface, dict):
        return None
    address, read_only = interface["data"]
    nbytes = _nbytes(interface)
    runtime = registry.get(torch_runtime())
    ordinal = runtime.pointer_info(address).device if address else runtime.current_device()
    buffer = _over(address, nbytes, Device._of(runtime, ordinal or 0), obj, read_only=bool(read_only))
    stream = interface.get("stream")
    if stream is not None:
        buffer.allocation.pending = as_stream(stream, buffer.device)
    return buffer


def _from_memory(obj: Any) -> Buffer | None:
    try:
        view = memoryview(obj)
    except TypeError:
        return None
    except (ValueError, BufferError) as error:
        raise ArgumentError(f"the {type(obj).__name__} does not give its memory: {error}") from error
    if not view.c_contiguous:
        raise ArgumentError(
            f"the memory is not C-contiguous (shape {list(view.shape or ())}, strides {view.strides})"
        )
    raw = _PyBuffer()
    _get_buffer(view, ctypes.byref(raw), 0)
    try:
        address = raw.buf or 0
    finally:
        _release_buffer(ctypes.byref(raw))
    return _over(address, view.nbytes, _cpu(), view, read_only=view.readonly)


def _from_dlpack(obj: Any) -> Buffer | None:
    return _foreign_buffer(_consume(obj)) if hasattr(obj, "__dlpack__") else None


def _consume(obj: Any) -> dlpack.Foreign:
    if not hasattr(obj, "__dlpack__"):
        raise TypeError(f"{type(obj).__name__} has no __dlpack__")
    options: dict[str, Any] = {"max_version": dlpack.VERSION}
    if hasattr(obj, "__dlpack_device__"):
        kind, _ = obj.__dlpack_device__()
        if int(kind) == dlpack.CUDA:
            options["stream"] = 1  # the legacy default stream, after which synchronous work comes
        elif int(kind) == dlpack.ROCM:
            options["stream"] = 0
    try:
        try:
            capsule = obj.__dlpack__(**options)
        except TypeError:  # a producer from before DLPack 1.0
            del options["max_version"]
            capsule = obj.__dlpack__(**options)
    except NobounceError:
        raise
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"the {type(obj).__name__} does not give its memory by DLPack: {error}"
        ) from error
    return dlpack.consume(capsule)


def _foreign_buffer(foreign: dlpack.Foreign) -> Buffer:
    name = _DEVICES.get(foreign.device_type)
    if name is None:
        raise ArgumentError(f"DLPack device type {foreign.device_type} is unknown here")
    ordinal = 0 if foreign.device_type in (dlpack.CUDA_HOST, dlpack.ROCM_HOST) else foreign.device_id
    device = _cpu() if name == "cpu" else Device(f"{name}:{ordinal}")
    return _over(foreign.address, foreign.nbytes, device, foreign.owner, read_only=foreign.read_only)


def _over(address: int, nbytes: int, device: Device, owner: object, *, read_only: bool) -> Buffer:
    if not nbytes:
        address = 0
    kind = device._runtime.pointer_info(address).kind if address else MemoryKind.PAGEABLE
    return Buffer._of(Allocation(address, nbytes, device, kind, owner=owner, read_only=read_only))


def _cpu() -> Device:
    return Device._of(registry.get("cpu"), 0)


def _nbytes(interface: dict[str, Any]) -> int:
    """Bytes of an array by either array interface. Raises ArgumentError where it is not C-contiguous."""
    shape, itemsize = tuple(interface["shape"]), _itemsize(interface["typestr"])
    _check_strides(shape, interface.get("strides"), itemsize)
    return int(itemsize * prod(shape))


def _itemsize(typestr: str) -> int:
    size = int(typestr[2:].partition("[")[0])  # datetimes add their unit: "<M8[s]"
    return size * 4 if typestr[1] == "U" else size


def _check_strides(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> None:
    if strides is None or 0 in shape:
        return
    expected = itemsize
    for dim, stride in zip(reversed(shape), reversed(strides), strict=True):
        if dim != 1 and stride != expected:
            raise ArgumentError(
                f"the array is not C-contiguous (shape {list(shape)}, strides {list(strides)} bytes): copy "
                "it first"
            )
        expected *= dim
