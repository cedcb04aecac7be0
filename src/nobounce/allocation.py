"""Memory, and who frees it: the part of a buffer that arrays, tensors and DLPack consumers share."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

from nobounce import reaper
from nobounce.device import Device
from nobounce.errors import ArgumentError, OutOfMemoryError
from nobounce.route.types import MemoryKind
from nobounce.runtimes.base import Runtime
from nobounce.runtimes.powers import needed
from nobounce.stream import Stream
from nobounce.transferend import FOREIGN, Arriving

Freeing = Literal["foreign", "device", "async", "pinned"]
_HOST_KINDS = frozenset({MemoryKind.PINNED, MemoryKind.MANAGED, MemoryKind.PAGEABLE})


class Allocation:
    """Memory and who frees it. `address` and `nbytes` in bytes; `owner` keeps foreign memory alive.

    `pending` is the stream this memory was last used on and not yet waited for; `stream` the one it is freed
    on. `arriving` are the reads that are to fill it, and those that failed to (transferend.py).
    """

    __slots__ = (
        "__weakref__",
        "_array",
        "_born",
        "_freeing",
        "address",
        "arriving",
        "device",
        "host",
        "kind",
        "nbytes",
        "owner",
        "pending",
        "read_only",
        "stream",
    )

    def __init__(
        self,
        address: int,
        nbytes: int,
        device: Device,
        kind: MemoryKind,
        *,
        freeing: Freeing = "foreign",
        owner: object = None,
        read_only: bool = False,
        stream: Stream | None = None,
    ) -> None:
        self.address, self.nbytes, self.device, self.kind = address, nbytes, device, kind
        self.owner, self.read_only, self.stream, self.pending = owner, read_only, stream, stream
        self.host = kind in _HOST_KINDS or device._runtime.capabilities.host_addressable
        self._freeing, self._born = freeing, reaper.generation()
        self._array: Any = None
        self.arriving: Arriving = FOREIGN if freeing == "foreign" else {}

    @property
    def is_owned(self) -> bool:
        """Whether it is freed here, and not by its owner."""
        return self._freeing != "foreign"

    def used_on(self, stream: Stream) -> None:
        """Remember that work on `stream` touches this memory; another device's stream cannot free it."""
        self.pending = stream
        if stream.device == self.device:
            self.stream = stream

    def wait(self) -> None:
        """Wait for the work this memory was last used in; raises that work's error."""
        pending = self.pending
        if pending is not None:
            if pending.is_closed:
                pending.device.sync()
            else:
                pending.sync()
            if self.pending is pending:
                self.pending = None

    def order(self, stream: Stream) -> None:
        """Let later work of `stream` wait for the work this memory was last used in."""
        pending = self.pending
        if pending is None or pending == stream:
            return
        if pending.is_closed or pending.device._runtime is not stream.device._runtime:
            self.wait()
        else:
            stream.wait(pending)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Host memory as a memoryview that keeps this allocation alive."""
        if nbytes == 0:
            view = memoryview(bytearray())
        else:
            array: Any = (ctypes.c_char * nbytes).from_address(self.address + offset)
            array._allocation = self
            view = memoryview(array).cast("B")
        return view.toreadonly() if self.read_only else view

    def array(self) -> Any:
        """All of it as one uint8 array that keeps this allocation alive; slices of it are cheap."""
        found = self._array() if self._array is not None else None
        if found is None:
            import numpy as np

            found = np.asarray(self.view(0, self.nbytes)) if self.nbytes else np.empty(0, np.uint8)
            self._array = weakref.ref(found)
        return found

    def copy_to_host(self, offset: int, nbytes: int) -> bytearray:
        """A fresh host copy, waited for. The runtime relays through pinned memory of its own."""
        self.wait()
        data = bytearray(nbytes)
        if nbytes:
            runtime = self.device._runtime
            target = ctypes.addressof(ctypes.c_char.from_buffer(data))
            with self.device._current():
                runtime.copy(target, self.address + offset, nbytes)
        return data

    def __del__(
        self, later: Callable[..., None] = reaper.later, exiting: Callable[[], bool] = reaper.exiting
    ) -> None:
        freeing: Freeing = getattr(self, "_freeing", "foreign")
        if freeing == "foreign" or not self.address or exiting():
            return
        runtime = self.device._runtime
        errors = getattr(_closing, "errors", None)
        if errors is None or self._born != reaper.generation():
            later(runtime.scheduler, self._born, _free, runtime, self.address, freeing, self.stream)
            return
        try:
            _free(runtime, self.address, freeing, self.stream)
        except Exception as error:  # noqa: BLE001 - free_here raises it
            errors.append(error)


_closing = threading.local()
"""`errors` is a list while this thread is inside `free_here`, where freeing at once is safe and may raise."""


@contextlib.contextmanager
def free_here() -> Iterator[None]:
    """Allocations whose last reference goes inside are freed at once, and an error is raised at the end."""
    errors: list[Exception] = []
    _closing.errors = errors
    try:
        yield
    finally:
        _closing.errors = None
    if errors:
        raise errors[0]


def _free(runtime: Runtime, address: int, freeing: Freeing, stream: Stream | None) -> None:
    direct = runtime.direct_io()
    if direct is not None:
        direct.deregister_buffer(address)
    if freeing == "pinned":
        runtime.free_pinned(address)
    elif freeing == "device" or stream is None or (ordered := runtime.ordered_memory) is None:
        runtime.free(address)
    elif stream.is_closed:
        # Its work may still be running, and freeing such memory does not wait (HIP rule 118).
        stream.device.sync()
        runtime.free(address)
    else:
        with stream._on():
            ordered.free_async(address, stream.handle)


def new_allocation(device: Device, nbytes: int, stream: Stream | None, kind: MemoryKind) -> Allocation:
    """Fresh memory. Out of memory, what collection has found and is not freed yet is freed first."""
    reaper.start()
    reaper.patient()
    try:
        address, freeing = _allocate(device, nbytes, stream, kind)
    except OutOfMemoryError:
        reaper.drain()
        address, freeing = _allocate(device, nbytes, stream, kind)
    return Allocation(address, nbytes, device, kind, freeing=freeing, stream=stream)


def _allocate(device: Device, nbytes: int, stream: Stream | None, kind: MemoryKind) -> tuple[int, Freeing]:
    runtime = device._runtime
    if kind is MemoryKind.PINNED:
        return runtime.alloc_pinned(nbytes), "pinned"
    if kind is MemoryKind.MANAGED:
        managed = needed(runtime.managed_memory, device, "managed memory")
        return managed.alloc_managed(device.ordinal, nbytes), "device"
    if stream is not None and (ordered := runtime.ordered_memory) is not None:
        with stream._on():
            return ordered.alloc_async(device.ordinal, nbytes, stream.handle), "async"
    return runtime.alloc(device.ordinal, nbytes), "device"


def fill_pattern(value: int | bytes | bytearray, nbytes: int) -> tuple[int, int]:
    """(number, width in bytes) of what `Buffer.fill` is to repeat over `nbytes` bytes."""
    if isinstance(value, int):
        if not 0 <= value <= 255:
            raise ArgumentError(
                f"fill value {value} is not a byte: give bytes of 1, 2 or 4 for a wider pattern"
            )
        return int(value), 1
    if not isinstance(value, bytes | bytearray):
        raise TypeError(f"a fill value is an int or bytes, not {type(value).__name__}")
    if len(value) not in (1, 2, 4):
        raise ArgumentError(f"a fill pattern has 1, 2 or 4 bytes, not {len(value)}")
    if nbytes % len(value):
        raise ArgumentError(f"a pattern of {len(value)} bytes does not divide {nbytes} bytes")
    return int.from_bytes(value, "little"), len(value)
