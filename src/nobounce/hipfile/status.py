"""Statuses: hipFile's error pairs, their texts, and how exceptions of the layers below become them
(hipFile A-1 to A-3, A-35)."""

from __future__ import annotations

import errno
import threading
from typing import NamedTuple

from nobounce.errors import (
    ArgumentError,
    DeviceError,
    OpError,
    OutOfMemoryError,
    RouteError,
    RuntimeStatus,
    TransferError,
)
from nobounce.hipfile.types import BASE_ERR


class Error(NamedTuple):
    """hipFileError_t. Truthy when something went wrong, unlike a plain tuple: `if error: ...` reads as in C.

    `hip_drv_err` means something only where `err` is 5011.
    """

    err: OpError
    hip_drv_err: int = 0

    def __bool__(self) -> bool:
        return self.err != OpError.SUCCESS or self.hip_drv_err != 0

    def __str__(self) -> str:
        text = f"{int(self.err)} - {op_error_string(self.err)}"
        return f"{text} (HIP error {self.hip_drv_err})" if is_hip_drv_err(self) else text


SUCCESS = Error(OpError.SUCCESS)

_TEXTS: dict[int, str] = {
    OpError.SUCCESS: "success",
    OpError.DRIVER_NOT_INITIALIZED: "the driver is not loaded",
    OpError.DRIVER_INVALID_PROPS: "invalid driver property",
    OpError.DRIVER_UNSUPPORTED_LIMIT: "this value of the property is not supported",
    OpError.DRIVER_VERSION_MISMATCH: "library and driver versions do not match",
    OpError.DRIVER_VERSION_READ_ERROR: "the driver version cannot be read",
    OpError.DRIVER_CLOSING: "the driver is closing and takes no new requests",
    OpError.PLATFORM_NOT_SUPPORTED: "the platform is not supported",
    OpError.IO_NOT_SUPPORTED: "the file is not supported",
    OpError.DEVICE_NOT_SUPPORTED: "the GPU is not supported",
    OpError.DRIVER_ERROR: "driver error",
    OpError.HIP_DRIVER_ERROR: "GPU driver error: see hip_drv_err",
    OpError.HIP_POINTER_INVALID: "bad GPU pointer",
    OpError.HIP_MEMORY_TYPE_INVALID: "the pointer's type of memory is not compatible",
    OpError.HIP_POINTER_RANGE_ERROR: "the range goes past the allocation",
    OpError.HIP_CONTEXT_MISMATCH: "context mismatch",
    OpError.INVALID_MAPPING_SIZE: "the access goes past the pinned buffer",
    OpError.INVALID_MAPPING_RANGE: "the access goes past the mapped region",
    OpError.INVALID_FILE_TYPE: "this type of file is not supported",
    OpError.INVALID_FILE_OPEN_FLAG: "the file's open flags are not supported",
    OpError.DIO_NOT_SET: "O_DIRECT is not set",
    OpError.INVALID_VALUE: "bad argument",
    OpError.MEMORY_ALREADY_REGISTERED: "the memory is registered already",
    OpError.MEMORY_NOT_REGISTERED: "the memory is not registered",
    OpError.PERMISSION_DENIED: "permission denied",
    OpError.DRIVER_ALREADY_OPEN: "the driver is open already",
    OpError.HANDLE_NOT_REGISTERED: "the file handle is not registered",
    OpError.HANDLE_ALREADY_REGISTERED: "the file is registered already",
    OpError.DEVICE_NOT_FOUND: "no such device",
    OpError.INTERNAL_ERROR: "internal error",
    OpError.GET_NEW_FD_FAILED: "cannot get a new file descriptor",
    OpError.DRIVER_SETUP_ERROR: "the driver cannot be initialised",
    OpError.IO_DISABLED: "the configuration forbids I/O on this file",
    OpError.BATCH_SUBMIT_FAILED: "submitting the batch failed",
    OpError.GPU_MEMORY_PINNING_FAILED: "GPU memory cannot be pinned",
    OpError.BATCH_FULL: "the batch is full",
    OpError.ASYNC_NOT_SUPPORTED: "asynchronous I/O is not supported",
    OpError.IO_MAX_ERROR: "largest error code",
}


def op_error_string(status: int) -> str:
    """The text of a status code; an unknown code has one too (A-2)."""
    return _TEXTS.get(int(status), f"unknown hipFile error {int(status)}")


def is_hipfile_err(status: int) -> bool:
    """IS_HIPFILE_ERR: whether the magnitude lies above 5000 (A-3)."""
    return abs(status) > BASE_ERR


def hipfile_errstr(status: int) -> str:
    """HIPFILE_ERRSTR: the text of the magnitude (A-3)."""
    return op_error_string(abs(status))


def is_hip_drv_err(error: Error) -> bool:
    """IS_HIP_DRV_ERR (A-3)."""
    return error.err == OpError.HIP_DRIVER_ERROR


def hip_drv_err(error: Error) -> int:
    """HIP_DRV_ERR (A-3)."""
    return error.hip_drv_err


_thread = threading.local()


def last_errno() -> int:
    """The errno behind this thread's last -1 from `read` or `write`; 0 before the first."""
    return getattr(_thread, "errno", 0)


def posix_failure(code: int) -> int:
    """Keep `code` as this thread's errno and return -1."""
    _thread.errno = code
    return -1


class Refused(Exception):
    """Carries a status out of the facade's own checks."""

    def __init__(self, code: OpError, hip: int = 0) -> None:
        super().__init__(code, hip)
        self.error = Error(code, hip)


class Rejected(Exception):
    """A request that breaks the region rule (A-36), or whose late-bound size has grown (D-5)."""


class OffsetError(Rejected):
    """A negative offset, which is EINVAL in the sync calls (A-37)."""


def as_error(failure: BaseException) -> Error:
    """The pair for what went wrong in a call that returns hipFileError_t."""
    if isinstance(failure, Refused):
        return failure.error
    if isinstance(failure, Rejected | ArgumentError):
        return Error(OpError.INVALID_VALUE)
    if isinstance(failure, OutOfMemoryError):
        return Error(OpError.HIP_DRIVER_ERROR, int(RuntimeStatus.OutOfMemory))
    if isinstance(failure, DeviceError):
        return Error(OpError.HIP_DRIVER_ERROR, failure.code)
    return Error(OpError.INTERNAL_ERROR)


def device_error(failure: BaseException) -> DeviceError | None:
    """The runtime's failure behind `failure`, if that is what it is."""
    if isinstance(failure, Refused):
        return None
    for e in (failure, failure.__cause__):
        if isinstance(e, DeviceError):
            return e
    return None


def sync_result(failure: BaseException) -> int:
    """What `read` and `write` return for a failure (A-35); keeps the errno where that is -1."""
    hip = device_error(failure)
    if hip is not None:
        return -hip.code  # J-9: the raw number, which may equal -1
    if isinstance(failure, Refused) and is_hip_drv_err(failure.error):
        return -failure.error.hip_drv_err
    if isinstance(failure, OutOfMemoryError):
        return posix_failure(errno.ENOMEM)
    if isinstance(failure, OffsetError):
        return posix_failure(errno.EINVAL)
    if isinstance(failure, OSError) and not isinstance(failure, RouteError):
        return posix_failure(failure.errno or errno.EIO)
    return -as_error(failure).err


def async_result(failure: BaseException) -> int:
    """What `bytes_done` becomes for a failure (D-5, D-12, D-13)."""
    if device_error(failure) is not None or isinstance(failure, OutOfMemoryError):
        return -OpError.HIP_DRIVER_ERROR
    if isinstance(failure, TransferError):
        return -OpError.INTERNAL_ERROR if failure.backend == "fastpath" else -1
    return -as_error(failure).err


def batch_result(failure: BaseException) -> int:
    """The `ret` of a failed operation of a batch (E-9)."""
    if device_error(failure) is not None or isinstance(failure, OutOfMemoryError):
        return -OpError.HIP_DRIVER_ERROR
    if isinstance(failure, OffsetError):
        return -errno.EINVAL
    if isinstance(failure, OSError) and not isinstance(failure, RouteError):
        return -(failure.errno or errno.EIO)
    return -as_error(failure).err
