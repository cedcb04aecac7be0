"""Every exception nobounce raises, and hipFile's status codes.

    NobounceError
    |
    |   yours: the call, the setting or the file's content is wrong; nothing has moved
    +-- ArgumentError (ValueError)             a bad offset, size, device name, flag
    |   +-- ExportError (BufferError)          memory that DLPack cannot hand out this way
    +-- ConfigError (ValueError)               an environment variable, or two that contradict each other
    +-- ClosedError (ValueError)               a file, buffer, stream or event used after its end
    +-- BusyError (RuntimeError)               freed or changed while a transfer uses it
    +-- RouteError (OSError, EOPNOTSUPP)       the backend asked for cannot take it; carries the refusals
    +-- FormatError (ValueError)               a model file that cannot be trusted: file, tensor and offset
    |
    |   the outside world's: the file, the device or the machine said no
    +-- FileError (OSError, with errno)        opening or examining a file; its subclasses also inherit
    |   |                                      FileNotFoundError, IsADirectoryError, PermissionError
    |   +-- FileChangedError                   the file is not what it was when the plan was made
    +-- TransferError (OSError, with errno)    a read or write failed; carries the receipt of what did move
    |   +-- ShortTransferError                 fewer bytes than the caller required
    +-- TransferTimeoutError (TimeoutError)
    +-- TransferCancelledError (CancelledError of concurrent.futures)    cancelled before it started
    |   +-- AwaitedCancelledError (asyncio.CancelledError)    the same, from `await`; in nobounce.io.awaited
    +-- OutOfMemoryError (MemoryError)         device or pinned memory
    +-- UnavailableError (ImportError)         a runtime, library or device that is not there, and why
    +-- DeviceError (RuntimeError)             a runtime call failed: the call, its code and its name
    |
    |   ours
    +-- InternalError (RuntimeError)           a promise inside nobounce did not hold: please report it

Each class also inherits the builtin exception a caller would guess, so `except OSError` and `except
ValueError` work. Every error survives pickle and copy with all its fields, so it crosses from a worker
process as it was raised. Of its cause it keeps what is an error of nobounce too.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import enum
import errno as _errno
import os
from typing import TYPE_CHECKING, Any

from nobounce import misnamed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nobounce.io.receipt import Receipt
    from nobounce.route.types import Refusal


class NobounceError(Exception):
    """Root of every exception raised by nobounce."""

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy, which would otherwise call the class with `args`: most classes
        here are made from keywords."""
        cause = self.__cause__ if isinstance(self.__cause__, NobounceError) else None
        held = {name: getattr(self, name, None) for name in _BUILTIN_FIELDS}
        fields = {name: value for name, value in held.items() if value is not None} | self.__dict__
        return _remade, (type(self), self.args, fields, cause)


_BUILTIN_FIELDS = ("errno", "strerror", "filename", "filename2", "msg", "name", "path")
"""What OSError and ImportError keep beside `__dict__`."""


def _remade(
    kind: type[NobounceError], args: tuple[Any, ...], fields: dict[str, Any], cause: NobounceError | None
) -> NobounceError:
    # Not `kind.__new__`: by the order of bases that is MemoryError's, which makes nothing but a MemoryError.
    error: NobounceError = (OSError if issubclass(kind, OSError) else Exception).__new__(kind, *args)
    error.args = args  # an OSError with an `__init__` of its own does not take them from `__new__`
    for name, value in fields.items():
        setattr(error, name, value)
    error.__cause__ = cause
    return error


class ArgumentError(NobounceError, ValueError):
    """An argument that can never work; nothing has moved."""


class ExportError(ArgumentError, BufferError):
    """Memory that cannot be handed out this way; the array API wants a BufferError for it."""


class ConfigError(NobounceError, ValueError):
    """An environment variable with a value that means nothing, or two that contradict each other."""


class ClosedError(NobounceError, ValueError):
    """The file, buffer, stream or event has been closed."""


class BusyError(NobounceError, RuntimeError):
    """The object is in use by a transfer."""


class InternalError(NobounceError, RuntimeError):
    """A promise inside nobounce did not hold."""


class FormatError(NobounceError, ValueError):
    """A file that is not what it claims to be.

    Attributes: `filename`, `tensor` (name or None), `offset` (bytes from the start of the file, or None).
    """

    reason: str
    filename: str | None
    tensor: str | None
    offset: int | None

    def __init__(
        self,
        reason: str,
        *,
        filename: str | None = None,
        tensor: str | None = None,
        offset: int | None = None,
    ) -> None:
        self.reason, self.filename, self.tensor, self.offset = reason, filename, tensor, offset
        where = [named(filename)] if filename is not None else []
        if tensor is not None:
            where.append(f"tensor {clip(tensor)!r}")
        if offset is not None:
            where.append(f"offset {offset}")
        super().__init__(f"{', '.join(where)}: {reason}" if where else reason)


class _SystemError(NobounceError, OSError):
    """An OSError with a message of our own: str() gives the message, errno and
    filename stay what they are."""

    def __init__(self, message: str, code: int, filename: str | None = None) -> None:
        OSError.__init__(self, code, message, filename)
        self.message = message

    def __str__(self) -> str:
        return self.message


class RouteError(_SystemError):
    """No backend that the caller allows accepts the request.

    `refusals` holds every failed condition of every backend that was considered. `backend` is the one that
    `require=` or the settings left, or None where both were open. `receipt` is None where nothing has moved.
    It is there where the kernel's counters deny afterwards that bytes went the way that was asked for: the
    buffer's contents are undefined then.
    """

    refusals: tuple[Refusal, ...]
    backend: str | None
    receipt: Receipt | None

    def __init__(
        self,
        message: str,
        refusals: Sequence[Refusal] = (),
        *,
        filename: str | None = None,
        backend: str | None = None,
        receipt: Receipt | None = None,
    ) -> None:
        super().__init__(message, _errno.EOPNOTSUPP, filename)
        self.refusals = tuple(refusals)
        self.backend, self.receipt = backend, receipt


class FileError(_SystemError):
    """A file that cannot be opened or examined. `except FileNotFoundError` and its like also match."""

    @classmethod
    def from_oserror(cls, error: OSError, path: str, doing: str, cure: str = "") -> FileError:
        """The named error for an `OSError` met while `doing` something ("open", "statx") with `path`."""
        code = error.errno or _errno.EIO
        why = f"cannot {doing}: {os.strerror(code)} ({errno_name(code)})"
        if cure:
            why += f". {cure}"
        elif code == _errno.ENOENT and (better := misnamed.cure(path, misnamed.link_target(path))):
            why += f"; {printable(better)}"
        return cls.because(path, code, why)

    @classmethod
    def because(cls, path: str, code: int, why: str) -> FileError:
        """The error of the class that belongs to `code`, for a reason of our own."""
        return _FILE_ERRORS.get(code, cls)(f"{named(path)}: {why}", code, path)


class FileMissingError(FileError, FileNotFoundError):
    """The path does not exist."""


class FileIsDirectoryError(FileError, IsADirectoryError):
    """The path is a directory where a file is needed."""


class FilePermissionError(FileError, PermissionError):
    """The file may not be opened by this user."""


class FileChangedError(FileError):
    """The file changed between planning and reading."""


_FILE_ERRORS: dict[int, type[FileError]] = {
    _errno.ENOENT: FileMissingError,
    _errno.EISDIR: FileIsDirectoryError,
    _errno.EACCES: FilePermissionError,
    _errno.EPERM: FilePermissionError,
}


@contextlib.contextmanager
def named_errors(path: str, doing: str, cures: Mapping[int, str] | None = None) -> Iterator[None]:
    """The system's errors while `doing` something ("read", "write") with `path`, as
    FileError; `cures` by errno."""
    try:
        yield
    except NobounceError:
        raise
    except OSError as e:
        raise FileError.from_oserror(e, path, doing, (cures or {}).get(e.errno or 0, "")) from e


class TransferError(_SystemError):
    """A transfer that failed part of the way.

    Attributes: `errno`, `filename`, `file_offset` and `nbytes` of the failed part, `backend` ("" where none
    was tried), `call` (the system or vendor call), `detail` and `cure` ("" where there is none) and
    `receipt`: what had moved before, or None.
    """

    file_offset: int
    nbytes: int
    backend: str
    call: str
    receipt: Receipt | None
    detail: str
    cure: str

    def __init__(
        self,
        code: int,
        *,
        filename: str | None,
        file_offset: int,
        nbytes: int,
        backend: str,
        call: str,
        detail: str = "",
        cure: str = "",
        receipt: Receipt | None = None,
    ) -> None:
        self.file_offset, self.nbytes, self.backend, self.call = file_offset, nbytes, backend, call
        self.receipt = receipt
        self.detail, self.cure = detail, cure
        text = detail or f"{os.strerror(code)} ({errno_name(code)})"
        on = f" on {backend}" if backend else ""
        message = (
            f"{'?' if filename is None else named(filename)}: {call} of {nbytes} bytes at offset "
            f"{file_offset} failed{on}: {text}"
        )
        super().__init__(f"{message}. {cure}" if cure else message, code, filename)


class ShortTransferError(TransferError):
    """The file ended, or the device stopped, before the bytes the caller required."""


class TransferTimeoutError(NobounceError, TimeoutError):
    """The time allowed for waiting has passed; the transfer itself goes on."""


class TransferCancelledError(NobounceError, concurrent.futures.CancelledError):
    """The transfer was cancelled before it started."""


class OutOfMemoryError(NobounceError, MemoryError):
    """Device, pinned or host memory could not be had."""


class UnavailableError(NobounceError, ImportError):
    """A runtime, library or device that is not there; the message says why."""


class DeviceError(NobounceError, RuntimeError):
    """A runtime call failed.

    Attributes: `call` (the function), `status` (a `RuntimeStatus`, or None where the vendor's code has no
    equal there), `code` (the vendor's number) and `name` (the vendor's name for it).
    """

    call: str
    status: RuntimeStatus | None
    code: int
    name: str

    def __init__(
        self, call: str, status: RuntimeStatus | None, *, detail: str = "", code: int = 0, name: str = ""
    ) -> None:
        self.call, self.status = call, status
        self.code = code or (int(status) if status is not None else 0)
        self.name = name or (status.name if status is not None else "")
        super().__init__(f"{call}: {self.name} ({self.code})" + (f": {detail}" if detail else ""))


class RuntimeStatus(enum.IntEnum):
    """HIP's error numbers that the runtimes use (hip_runtime_api.h); CUDA's are mapped to them by meaning."""

    Success = 0
    InvalidValue = 1
    OutOfMemory = 2
    NotInitialized = 3
    Deinitialized = 4
    InvalidDevicePointer = 17
    InvalidMemcpyDirection = 21
    InsufficientDriver = 35
    NoDevice = 100
    InvalidDevice = 101
    InvalidContext = 201
    InvalidHandle = 400
    InvalidResourceHandle = 400  # HIP gives both names to 400
    IllegalState = 401
    NotReady = 600
    IllegalAddress = 700
    PeerAccessAlreadyEnabled = 704
    PeerAccessNotEnabled = 705
    ContextIsDestroyed = 709
    HostMemoryAlreadyRegistered = 712
    HostMemoryNotRegistered = 713
    LaunchFailure = 719
    NotPermitted = 800
    NotSupported = 801
    Unknown = 999


class OpError(enum.IntEnum):
    """hipFile's status codes (hipFile A-2); 5021 and 5032 are deliberately unused there."""

    SUCCESS = 0
    DRIVER_NOT_INITIALIZED = 5001
    DRIVER_INVALID_PROPS = 5002
    DRIVER_UNSUPPORTED_LIMIT = 5003
    DRIVER_VERSION_MISMATCH = 5004
    DRIVER_VERSION_READ_ERROR = 5005
    DRIVER_CLOSING = 5006
    PLATFORM_NOT_SUPPORTED = 5007
    IO_NOT_SUPPORTED = 5008
    DEVICE_NOT_SUPPORTED = 5009
    DRIVER_ERROR = 5010
    HIP_DRIVER_ERROR = 5011
    HIP_POINTER_INVALID = 5012
    HIP_MEMORY_TYPE_INVALID = 5013
    HIP_POINTER_RANGE_ERROR = 5014
    HIP_CONTEXT_MISMATCH = 5015
    INVALID_MAPPING_SIZE = 5016
    INVALID_MAPPING_RANGE = 5017
    INVALID_FILE_TYPE = 5018
    INVALID_FILE_OPEN_FLAG = 5019
    DIO_NOT_SET = 5020
    INVALID_VALUE = 5022
    MEMORY_ALREADY_REGISTERED = 5023
    MEMORY_NOT_REGISTERED = 5024
    PERMISSION_DENIED = 5025
    DRIVER_ALREADY_OPEN = 5026
    HANDLE_NOT_REGISTERED = 5027
    HANDLE_ALREADY_REGISTERED = 5028
    DEVICE_NOT_FOUND = 5029
    INTERNAL_ERROR = 5030
    GET_NEW_FD_FAILED = 5031
    DRIVER_SETUP_ERROR = 5033
    IO_DISABLED = 5034
    BATCH_SUBMIT_FAILED = 5035
    GPU_MEMORY_PINNING_FAILED = 5036
    BATCH_FULL = 5037
    ASYNC_NOT_SUPPORTED = 5038
    IO_MAX_ERROR = 5039


def errno_name(code: int) -> str:
    """The symbol of an errno, such as "EIO"."""
    return _errno.errorcode.get(code, f"errno {code}")


def counted(number: int, noun: str) -> str:
    """A number and what it counts: "1 tensor", "2 tensors", "2 processes"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def named(path: str) -> str:
    """A path as messages show it: `printable`, and '' for an empty one."""
    return printable(path) or "''"


def printable(text: str) -> str:
    """`text` with control characters and lone surrogates escaped, safe for a terminal or a log."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode("ascii") for c in text
    )


def clip(text: str, limit: int = 200) -> str:
    """`text` short enough for a message."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def json_kind(value: Any) -> str:
    """What a value from JSON is, for a message."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    kinds = {str: "a string", int: "a number", float: "a fraction", list: "a list"}
    return kinds.get(type(value), "an object")
