"""The classes of hipFile's own Python bindings, by their names (hipFile H-1 to H-9), over
this module's functions.

They are here so that a program written for those bindings runs; new code is better off with `nobounce.open`,
whose transfers own what they use and return receipts.
"""

from __future__ import annotations

import ctypes
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from nobounce.errors import NobounceError, OpError
from nobounce.hipfile import buffers, driver, handles, parameters, queued, streams, syncio
from nobounce.hipfile.params import Cell
from nobounce.hipfile.status import Error, is_hip_drv_err, last_errno, op_error_string
from nobounce.hipfile.types import Descr, DriverProps, FileHandleType
from nobounce.uninterrupted import unbroken

__version__ = ".".join(map(str, driver.API_VERSION))


class HipFileException(NobounceError, RuntimeError):
    """A status other than success. `hipfile_err` is the code, `hip_err` the
    runtime's where the code is 5011."""

    def __init__(self, hipfile_err: int, hip_err: int = 0) -> None:
        self.hipfile_err, self.hip_err = hipfile_err, hip_err
        text = f"{int(hipfile_err)} - {op_error_string(hipfile_err)}"
        if hipfile_err == OpError.HIP_DRIVER_ERROR:
            text = f"{text} (HIP error {hip_err})"
        super().__init__(text)


def _check(error: Error) -> None:
    if error:
        raise HipFileException(error.err, error.hip_drv_err if is_hip_drv_err(error) else 0)


def check(result: Any) -> Any:
    """The value of a call of this module: raises where the call failed, and takes the status off
    what is returned with one.

    For programs written for bindings that raise, cuFile's for one: `check(hipfile.read(...))` is the count.
    Raises HipFileException, and OSError with `last_errno()` for -1.
    """
    if isinstance(result, Error):
        _check(result)
        return None
    if isinstance(result, tuple) and result and isinstance(result[0], Error):
        _check(result[0])
        return result[1] if len(result) == 2 else result[1:]
    if isinstance(result, int) and not isinstance(result, bool) and result < 0:
        if result == -1:
            raise OSError(last_errno(), os.strerror(last_errno()))
        raise HipFileException(-result)
    return result


def get_version() -> tuple[int, int, int]:
    """(major, minor, patch) of the hipFile API."""
    error, version = driver.get_version()
    _check(error)
    return version


def driver_get_properties() -> DriverProps:
    """The driver's properties. Raises HipFileException where the profile forbids them."""
    error, properties = parameters.driver_get_properties()
    _check(error)
    if properties is None:
        raise HipFileException(OpError.INTERNAL_ERROR)
    return properties


def supports_async() -> bool:
    """Whether streams can be registered: probed with the null stream."""
    if streams.stream_register(None, 0):
        return False
    _check(streams.stream_deregister(None))
    return True


class _Opened(ABC):
    """Open while a context manager is inside."""

    @abstractmethod
    def open(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Registered(ABC):
    """Registered while a context manager is inside."""

    @abstractmethod
    def register(self) -> None: ...

    @abstractmethod
    def deregister(self) -> None: ...

    def __enter__(self) -> Self:
        self.register()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.deregister()


class Driver(_Opened):
    """One user of the driver; a context manager."""

    def open(self) -> None:
        _check(driver.driver_open())

    def close(self) -> None:
        _check(driver.driver_close())

    @staticmethod
    def use_count() -> int:
        return driver.use_count()


class Buffer(_Registered):
    """A range of device memory at `ptr`, which it does not own; registered while a
    context manager is inside."""

    def __init__(self, ptr: Any, length: int, flags: int = 0) -> None:
        self._ptr, self._length, self._flags, self._registered = ptr, length, flags, False

    @classmethod
    def from_ctypes_void_p(cls, ptr: ctypes.c_void_p, length: int, flags: int = 0) -> Buffer:
        """Raises ValueError for null."""
        if ptr.value is None:
            raise ValueError("the pointer is null")
        return cls(ptr.value, length, flags)

    @property
    def ptr(self) -> Any:
        return self._ptr

    @unbroken
    def register(self) -> None:
        _check(buffers.buf_register(self._ptr, self._length, self._flags))
        self._registered = True

    @unbroken
    def deregister(self) -> None:
        """Does nothing unless registered."""
        if self._registered:
            _check(buffers.buf_deregister(self._ptr))
            self._registered = False


class Stream(_Registered):
    """A registration of a stream; a context manager. Both ways are idempotent."""

    def __init__(self, handle: Any, flags: int = 0) -> None:
        self._handle, self._flags, self._registered = handle, flags, False

    @property
    def handle(self) -> Any:
        return self._handle

    @property
    def registered(self) -> bool:
        return self._registered

    def register(self) -> None:
        if not self._registered:
            _check(streams.stream_register(self._handle, self._flags))
            self._registered = True

    def deregister(self) -> None:
        if self._registered:
            _check(streams.stream_deregister(self._handle))
            self._registered = False


class AsyncIOHandle:
    """Parameters of an asynchronous operation, settable until the stream gets there, and its result.

    The library itself keeps it alive until then.
    """

    def __init__(self, size: int, file_offset: int, buffer_offset: int) -> None:
        self._size, self._file_offset, self._buffer_offset = (
            Cell(size),
            Cell(file_offset),
            Cell(buffer_offset),
        )
        self._bytes_done = Cell(0)

    size = property(lambda self: self._size.value, lambda self, value: setattr(self._size, "value", value))
    file_offset = property(
        lambda self: self._file_offset.value, lambda self, value: setattr(self._file_offset, "value", value)
    )
    buffer_offset = property(
        lambda self: self._buffer_offset.value,
        lambda self, value: setattr(self._buffer_offset, "value", value),
    )

    @property
    def bytes_done(self) -> int:
        """Valid once the stream has been waited for; negative for an error."""
        return self._bytes_done.value


class FileHandle(_Opened):
    """A file that is opened and registered by `open`; a context manager. O_DIRECT is
    the caller's business."""

    _fd: int | None = None
    _handle: int | None = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        flags: int,
        mode: int = 0o644,
        handle_type: int = FileHandleType.OPAQUE_FD,
    ) -> None:
        self._path, self._flags, self._mode = path, flags, mode
        self.handle_type = handle_type

    path = property(lambda self: self._path)
    flags = property(lambda self: self._flags)
    mode = property(lambda self: self._mode)
    handle = property(lambda self: self._handle)

    @property
    def handle_type(self) -> FileHandleType:
        return self._handle_type

    @handle_type.setter
    def handle_type(self, value: int) -> None:
        """Raises RuntimeError while open, ValueError for what is no type, UnsupportedHandleType for Win32."""
        if self._handle is not None:
            raise RuntimeError("the file is open")
        kind = FileHandleType(value)
        if kind is FileHandleType.OPAQUE_WIN32:
            raise UnsupportedHandleType("Win32 handles do not exist here")
        self._handle_type = kind

    @unbroken
    def open(self) -> None:
        """Open and register. Raises RuntimeError if open already, OSError, HipFileException;
        nothing stays open then."""
        if self._handle is not None:
            raise RuntimeError("the file is open")
        fd = os.open(self._path, self._flags, self._mode)
        try:
            error, handle = handles.handle_register(Descr(fd, self._handle_type))
            _check(error)
        except BaseException:
            os.close(fd)
            raise
        self._fd, self._handle = fd, handle

    @unbroken
    def close(self) -> None:
        """Deregister and close; a second time does nothing."""
        self._close()

    def _close(self) -> None:
        fd, handle, self._fd, self._handle = self._fd, self._handle, None, None
        if handle is not None:
            handles.handle_deregister(handle)
        if fd is not None:
            os.close(fd)

    def read(self, buffer: Buffer, size: int, file_offset: int, buffer_offset: int) -> int:
        """Bytes read. Raises OSError, HipFileException, RuntimeError where not open."""
        return self._result(syncio.read(self._open_handle(), buffer.ptr, size, file_offset, buffer_offset))

    def write(self, buffer: Buffer, size: int, file_offset: int, buffer_offset: int) -> int:
        """Bytes written. Raises as `read`."""
        return self._result(syncio.write(self._open_handle(), buffer.ptr, size, file_offset, buffer_offset))

    def read_async(
        self, buffer: Buffer, size: int, file_offset: int, buffer_offset: int, stream: Any
    ) -> AsyncIOHandle:
        """Read in stream order. Raises HipFileException for what is refused at once."""
        return self._queue(queued.read_async, buffer, size, file_offset, buffer_offset, stream)

    def write_async(
        self, buffer: Buffer, size: int, file_offset: int, buffer_offset: int, stream: Any
    ) -> AsyncIOHandle:
        """Write in stream order. Raises as `read_async`."""
        return self._queue(queued.write_async, buffer, size, file_offset, buffer_offset, stream)

    def _queue(
        self,
        call: Callable[..., Error],
        buffer: Buffer,
        size: int,
        file_offset: int,
        buffer_offset: int,
        stream: Any,
    ) -> AsyncIOHandle:
        made = AsyncIOHandle(size, file_offset, buffer_offset)
        where = made._size, made._file_offset, made._buffer_offset, made._bytes_done
        _check(call(self._open_handle(), buffer.ptr, *where, stream))
        return made

    def _open_handle(self) -> int:
        if self._handle is None:
            raise RuntimeError("the file is not open")
        return self._handle

    def _result(self, moved: int) -> int:
        if moved == -1:
            code = last_errno()
            raise OSError(code, os.strerror(code), os.fspath(self._path))
        if moved < 0:
            raise HipFileException(-moved)
        return moved

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if at_exit():
            return
        try:
            self._close()
        except Exception as e:  # noqa: BLE001 - as the bindings do
            print(f"hipfile: closing {self._path!r} failed: {e}", file=sys.stderr)


class UnsupportedHandleType(NobounceError, NotImplementedError):
    """A kind of handle that this system does not have."""
