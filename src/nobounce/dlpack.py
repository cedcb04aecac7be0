"""DLPack capsules, both ways.

A capsule carries a C struct with a deleter that its consumer calls at any time: from a thread Python has
never seen, while an exception is set, or after the interpreter has gone. A deleter written in Python
survives none of these. So numpy makes the capsules: an array of unsigned integers over the memory, which
keeps the allocation alive, exports itself with numpy's own deleter, and only the two facts numpy has no
words for, the element type and the device, are then written into the struct. numpy never looks at the
memory, so it may be a GPU's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

from nobounce import reaper
from nobounce.allocation import Allocation
from nobounce.dtypes import DTYPES, DType, array_shape
from nobounce.errors import ArgumentError, ExportError

CPU, CUDA, CUDA_HOST, ROCM, ROCM_HOST, CUDA_MANAGED = 1, 2, 3, 10, 11, 13
"""DLDeviceType of dlpack.h 1.1."""
READ_ONLY, IS_COPIED = 1, 2
"""Flags of a versioned capsule."""
VERSION = (1, 1)
"""The newest version that is spoken here."""


class DLDevice(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    _fields_ = (("dl_tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", DLTensor),
    )


_STRUCTS: tuple[tuple[bytes, bytes, Any], ...] = (
    (b"dltensor_versioned", b"used_dltensor_versioned", DLManagedTensorVersioned),
    (b"dltensor", b"used_dltensor", DLManagedTensor),
)
"""The name of a capsule, its name once consumed, and its struct. A capsule borrows its
name: these live for ever."""

_api: Any = ctypes.pythonapi
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", _api))
_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Span:
    """Memory that the host may be unable to reach, as numpy wants to hear of it."""

    __slots__ = ("__array_interface__", "_allocation")

    def __init__(self, allocation: Allocation, nbytes: int) -> None:
        self._allocation = allocation
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (allocation.address, allocation.read_only),
        }


def base_array(allocation: Allocation) -> Any:
    """A uint8 array over all of an allocation for `export`; where the host cannot
    reach it, never look inside."""
    import numpy as np

    if allocation.host:
        return allocation.array()
    return np.asarray(_Span(allocation, allocation.nbytes)) if allocation.nbytes else np.empty(0, np.uint8)


def export(
    base: Any,
    offset: int,
    shape: tuple[int, ...],
    dtype: DType,
    device: tuple[int, int],
    *,
    versioned: bool,
    copied: bool = False,
) -> object:
    """A capsule over the tensor at `offset` bytes of `base`, an array from `base_array` or any uint8 array.

    The consumer keeps `base` alive. Versioned where asked and numpy can (2.1). Raises ExportError for a type
    without a DLPack name, for read-only memory in an unversioned capsule.
    """
    import numpy as np

    if dtype.dlpack is None or (dtype.packed and dtype.bits != 4):
        raise ExportError(
            f"no consumer of DLPack knows {dtype.name}: take the tensor as raw bytes (a uint8 view)"
        )
    code, bits = dtype.dlpack
    dims = array_shape(dtype, shape)
    words = np.ndarray(dims, "c16" if bits == 128 else f"u{max(bits, 8) // 8}", base, offset)
    try:
        capsule = _numpy_capsule(words, versioned)
    except BufferError as error:
        raise ExportError(f"DLPack cannot hand out this memory: {error}") from error
    managed: Any
    if versioned and _is_valid(capsule, b"dltensor_versioned"):
        managed = DLManagedTensorVersioned.from_address(pointer(capsule, b"dltensor_versioned"))
        managed.flags |= IS_COPIED if copied else 0
    else:
        managed = DLManagedTensor.from_address(pointer(capsule, b"dltensor"))
    tensor = managed.dl_tensor
    tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = code, bits, 2 if bits == 4 else 1
    tensor.device.device_type, tensor.device.device_id = device
    return capsule


def _numpy_capsule(array: Any, versioned: bool) -> object:
    if not versioned:
        return array.__dlpack__()
    try:
        return array.__dlpack__(max_version=VERSION)
    except TypeError:  # numpy before 2.1 knows unversioned capsules only
        return array.__dlpack__()


class Foreign(NamedTuple):
    """What a consumed capsule holds. `shape` counts elements; `owner` gives the memory back when it goes."""

    address: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: DType
    device_type: int
    device_id: int
    read_only: bool
    owner: object


class _Consumed:
    """Owns a consumed struct: calls its deleter once, but not when the interpreter is going down."""

    __slots__ = ("_address", "_deleter")

    def __init__(self, address: int, deleter: int | None) -> None:
        self._address, self._deleter = address, deleter

    def __del__(self, exiting: Callable[[], bool] = reaper.exiting, call: Any = _Deleter) -> None:
        if getattr(self, "_deleter", None) and not exiting():
            call(self._deleter)(self._address)


def consume(capsule: object) -> Foreign:
    """Take over a capsule; it cannot be consumed again. ArgumentError, with the memory given back, where it
    will not do: not C-contiguous, an element type without a safetensors name, a newer major version.
    """
    for name, used, struct in _STRUCTS:
        if _is_valid(capsule, name):
            address = pointer(capsule, name)
            managed = struct.from_address(address)
            _set_name(capsule, used)
            owner = _Consumed(address, managed.deleter)
            return _read(managed, owner)
    raise ArgumentError("not a DLPack capsule, or one that was consumed before")


def _read(managed: Any, owner: _Consumed) -> Foreign:
    flags = 0
    if isinstance(managed, DLManagedTensorVersioned):
        if managed.major != VERSION[0]:
            raise ArgumentError(f"DLPack version {managed.major}.{managed.minor} is not understood, 1.x is")
        flags = managed.flags
    tensor = managed.dl_tensor
    dims = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides:
        _check_contiguous(dims, tuple(tensor.strides[: tensor.ndim]))
    code, bits, lanes = tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes
    dtype = _BY_CODE.get((code, bits))
    if dtype is None or (lanes != 1 and not (bits == 4 and lanes == 2 and dims)):
        raise ArgumentError(f"DLPack type code {code} with {bits} bits and {lanes} lanes has no name here")
    if lanes == 2:
        dims = (*dims[:-1], dims[-1] * 2)
    total = bits
    for dim in dims:
        total *= dim
    if total % 8:
        raise ArgumentError(f"{dtype.name} {list(dims)} does not fill whole bytes")
    where = (tensor.data or 0) + tensor.byte_offset if total else 0
    return Foreign(
        where,
        total // 8,
        dims,
        dtype,
        tensor.device.device_type,
        tensor.device.device_id,
        bool(flags & READ_ONLY),
        owner,
    )


def _check_contiguous(dims: tuple[int, ...], strides: tuple[int, ...]) -> None:
    if 0 in dims:
        return
    expected = 1
    for dim, stride in zip(reversed(dims), reversed(strides), strict=True):
        if dim != 1 and stride != expected:
            raise ArgumentError(
                f"the array is not C-contiguous (shape {list(dims)}, strides {list(strides)} elements): "
                "copy it first"
            )
        expected *= dim


_BY_CODE = {d.dlpack: d for d in DTYPES.values() if d.dlpack is not None}
