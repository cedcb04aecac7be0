"""An adapter: the rows of the table bound to one vendor's bindings, and what differs between the vendors.

Statuses become exceptions here and nowhere else: the vendor's function, name and text, and a
`RuntimeStatus` by meaning. A function is looked up when it is first used, so that an old library without it
costs only its own callers.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from nobounce.errors import DeviceError, NobounceError, OutOfMemoryError, RuntimeStatus
from nobounce.runtimes.base import DeviceInfo, DirectIO, PointerInfo
from nobounce.runtimes.gpu.table import ROWS, Row

NOT_READY = int(RuntimeStatus.NotReady)

_SAME_MEANING = {
    34: RuntimeStatus.InsufficientDriver,  # cudaErrorStubLibrary
    36: RuntimeStatus.InsufficientDriver,  # cudaErrorCallRequiresNewerDriver
    46: RuntimeStatus.NoDevice,  # cudaErrorDevicesUnavailable
    709: RuntimeStatus.ContextIsDestroyed,
    710: RuntimeStatus.LaunchFailure,  # an assert in a kernel
    714: RuntimeStatus.LaunchFailure,  # hardware stack error
    715: RuntimeStatus.LaunchFailure,  # illegal instruction
    716: RuntimeStatus.IllegalAddress,  # misaligned address
    717: RuntimeStatus.IllegalAddress,  # invalid address space
    718: RuntimeStatus.IllegalAddress,  # invalid program counter
}
"""Vendors' codes that have another number than ours; all others keep theirs (CUDA's
and HIP's tables agree)."""

_BY_NUMBER = {int(status): status for status in RuntimeStatus}

Call = Callable[..., Any]
CopyMany = Callable[[list[tuple[int, int, int]], int], None]


def status_of(code: int) -> RuntimeStatus | None:
    """What a CUDA or HIP code means; None where we have no word for it."""
    return _BY_NUMBER.get(code) or _SAME_MEANING.get(code)


class Adapter(ABC):
    """Every op of the table is an attribute: `adapter.copy_async(dst, src, nbytes, kind, stream)`.

    `adapter.stream_query` and `adapter.event_query` return False for NotReady, the others what their row
    says: nothing, one value or a tuple.
    """

    name: str
    dlpack_device_type: int
    legacy: int
    """The handle to ask of the legacy stream; 0 may be the calling thread's own."""
    asks_aside: bool
    """Whether a query of the legacy stream leaves nothing behind in it that blocking
    streams would wait for."""
    registers_faster: bool
    """Whether memory of our own is registered faster than pinned memory is allocated."""

    def __getattr__(self, op: str) -> Call:
        row = ROWS.get(op)
        if row is None:
            raise AttributeError(op)
        bound = self._bind(row)
        setattr(self, op, bound)
        return bound

    # what a vendor's adapter supplies

    @abstractmethod
    def function(self, row: Row) -> tuple[str, Call | None]:
        """The vendor's function for a row, and its name; None where the bindings have none."""

    @abstractmethod
    def attribute_of(self, name: str) -> Any:
        """The vendor's device attribute for one of `ATTRIBUTES`, or None."""

    @abstractmethod
    def kinds(self) -> dict[int, Any]:
        """The vendor's copy directions by number."""

    @abstractmethod
    def text(self, value: Any) -> str:
        """A C string as the bindings return it."""

    @abstractmethod
    def on(self, device: int) -> contextlib.AbstractContextManager[Any]:
        """`device` is current inside, and what was current before is current again afterwards."""

    @abstractmethod
    def start_thread(self) -> None:
        """Make calls possible on a thread that makes its first one; used where there is one device."""

    @abstractmethod
    def touched_device(self) -> int | None:
        """The calling thread's current device if the device has been used, so that
        using it costs nothing new."""

    @abstractmethod
    def set_current(self, device: int) -> None:
        """Make `device` the calling thread's current one; a device that was not used is not
        started by that, where possible."""

    @abstractmethod
    def pointer_info(self, address: int) -> PointerInfo: ...

    @abstractmethod
    def device_info(self, device: int) -> DeviceInfo: ...

    @abstractmethod
    def foreign_stream_device(self, stream: int) -> int:
        """The device of a stream that was made elsewhere."""

    @abstractmethod
    def words(self, count: int) -> list[int]:
        """Addresses of `count` 8-byte words, zero, that streams can write and wait for;
        they are never given back."""

    @abstractmethod
    def capture_mode(self) -> Callable[[Any], int] | None:
        """The vendor's function that swaps the calling thread's capture mode (capture.py);
        None where there is none."""

    def copy_many(self) -> CopyMany | None:
        """`CopyCalls.copy_many` by one call of the vendor's; None where it has none that is of use."""
        return None

    @abstractmethod
    def host_function(self, trampoline: Any) -> Any:
        """A ctypes callback as the bindings want it."""

    @abstractmethod
    def register_flags(self, *, read_only: bool) -> int: ...

    @abstractmethod
    def direct(self) -> DirectIO: ...

    # shared

    def flag(self, name: str, device: int) -> bool:
        """A device attribute that is a yes or no; a library that does not know it says no."""
        return bool(self.number(name, device))

    def number(self, name: str, device: int) -> int | None:
        attribute = self.attribute_of(name)
        if attribute is None:
            return None
        try:
            return int(self.attribute(attribute, device))
        except DeviceError:
            return None

    def failure(self, function: str, status: Any, detail: str = "") -> NobounceError:
        """The exception for a status that is not success."""
        code = int(status)
        name = getattr(status, "name", str(code))
        with contextlib.suppress(
            Exception
        ):  # the text is a courtesy; a library that cannot give it fails twice
            text = self.error_text(self._status_for_text(status))
            detail = f"{text}: {detail}" if detail else text
        if code == RuntimeStatus.OutOfMemory:
            return OutOfMemoryError(f"{function}: {name} ({code}): {detail}")
        return DeviceError(function, status_of(code), detail=detail, code=code, name=name)

    def _status_for_text(self, status: Any) -> Any:
        return status

    def _bind(self, row: Row) -> Call:
        name, fn = self.function(row)
        if fn is None:
            return _missing(name, "the installed bindings have no such function")
        if row.op == "take_last_error":
            return fn  # its status is its answer
        if row.op == "error_text":
            return lambda status: self.text(fn(status)[1])
        extra = row.hip_extra if self.name == "hip" else ()
        many = len(row.out) > 1
        convert: list[Call] = [_CONVERT.get(kind, self.text if kind == "text" else _same) for kind in row.out]
        first = convert[0] if convert else None
        sized = row.args.index("nbytes") if "nbytes" in row.args else -1

        def call(*args: Any) -> Any:
            try:
                result = fn(*args, *extra)
            except RuntimeError as e:  # the bindings did not find the library, or the symbol in it
                raise DeviceError(name, RuntimeStatus.NotSupported, detail=str(e)) from e
            status = result[0]
            if status:
                if row.asks and status == NOT_READY:
                    # A status, no error: the next look must not find it (HIP rule 79).
                    self.take_last_error()
                    return False
                self.take_last_error()
                raise self.failure(name, status, f"{args[sized]} bytes" if sized >= 0 else "")
            if row.asks:
                return True
            if first is None:
                return None
            if many:
                return tuple(to(value) for to, value in zip(convert, result[1:], strict=True))
            return first(result[1])

        return call


def _missing(name: str, why: str) -> Call:
    def call(*args: Any) -> Any:
        raise DeviceError(name, RuntimeStatus.NotSupported, detail=why)

    return call


def _integer(value: Any) -> int:
    return 0 if value is None else int(value)


def _same(value: Any) -> Any:
    return value


_CONVERT: dict[str, Call] = {
    "address": _integer,
    "handle": _integer,
    "number": _integer,
    "seconds": float,
    "object": _same,
}

ATTRIBUTES = (
    "priorities",
    "managed",
    "pools",
    "host_register",
    "register_read_only",
    "wait_value",
    "multiprocessors",
    "numa_node",
)
"""Device attributes the runtime asks for, by our names."""
