"""Streams and events in cuda.core's shape; foreign streams come in by protocol, never by
importing their library.

Only calls on the default streams (handles 0, 1 and 2) depend on the thread's current device: those are made
with the stream's own device current, and the caller's is restored (HIP rule 7, case C98).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

from nobounce import forked, reaper, transferend
from nobounce.device import Device, DeviceLike, as_device, default_device
from nobounce.errors import ArgumentError, ClosedError
from nobounce.protocols import StreamLike
from nobounce.records import record
from nobounce.runtimes.base import LEGACY_STREAM, PER_THREAD_STREAM
from nobounce.runtimes.powers import needed

_NOTHING = contextlib.nullcontext()


@record
class StreamOptions:
    """How a stream is made: non-blocking by default; `priority` None is the runtime's normal one."""

    nonblocking: bool = True
    priority: int | None = None


@record
class EventOptions:
    """How an event is made; events can time by default, as in HIP. One for other
    processes cannot (HIP rule 30)."""

    timing_enabled: bool = True
    blocking_sync: bool = False
    ipc_enabled: bool = False


class Stream:
    """An ordered queue of work on one device. Made by `Device.create_stream`, or
    `from_handle` over a foreign stream.

    `close` returns at once and pending work completes (HIP rule 10); a foreign stream is left to its owner.
    """

    __slots__ = ("__weakref__", "_born", "_closed", "_device", "_handle", "_owned", "_owner")

    _born: int
    _closed: bool
    _device: Device | None
    _handle: int
    _owned: bool
    _owner: object

    def __init__(self) -> None:
        raise TypeError("a Stream is made by Device.create_stream() or Stream.from_handle()")

    @classmethod
    def _of(cls, handle: int, device: Device | None, *, owned: bool, owner: object = None) -> Stream:
        self = cls.__new__(cls)
        self._closed, self._born = False, reaper.generation()
        self._handle, self._device, self._owned, self._owner = handle, device, owned, owner
        return self

    @classmethod
    def from_handle(cls, handle: int, device: DeviceLike = None, *, owner: object = None) -> Stream:
        """A Stream over a foreign handle: 0 null, 1 legacy, 2 per-thread, or a pointer. It
        is never destroyed here.

        `owner` is kept alive as long as this object. ArgumentError for a negative handle.
        """
        if isinstance(handle, bool) or not isinstance(handle, int):
            raise TypeError(f"a stream handle is an int, not {type(handle).__name__}")
        if handle < 0:
            raise ArgumentError(f"stream handle {handle} is negative")
        return cls._of(handle, as_device(device), owned=False, owner=owner)

    @property
    def handle(self) -> int:
        """The runtime's handle. ClosedError after `close`, and in a forked child."""
        if self._closed:
            raise self._gone()
        return self._handle

    def _gone(self) -> ClosedError:
        return (
            forked.error("stream")
            if self._born != reaper.generation()
            else ClosedError(f"{self!r} is closed")
        )

    def _inherited(self) -> None:
        self._closed = True

    @property
    def device(self) -> Device:
        """The device the stream's work runs on, whatever the current device is (HIP rule 7)."""
        return self._device if self._device is not None else default_device()

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def is_nonblocking(self) -> bool:
        """Whether the legacy default stream and this one ignore each other (HIP rule 16)."""
        traits = needed(self.device._runtime.stream_traits, self.device, "stream attributes")
        with self._on():
            return traits.stream_is_nonblocking(self.handle)

    @property
    def priority(self) -> int:
        """Lower is more urgent (HIP rule 8)."""
        traits = needed(self.device._runtime.stream_traits, self.device, "stream attributes")
        with self._on():
            return traits.stream_priority(self.handle)

    @property
    def is_done(self) -> bool:
        """True when nothing is pending (HIP rule 5)."""
        with self._on():
            return self.device._runtime.stream_query(self.handle)

    def query(self) -> bool:
        """True when nothing is pending; the same as `is_done`."""
        return self.is_done

    def sync(self) -> None:
        """Wait for this stream alone; raises its asynchronous error, once (HIP rules 6, 78), and so
        it does the error of a transfer that failed here and whose caller has not heard of it;
        further ones are its notes."""
        with self._on():
            self.device._runtime.stream_sync(self.handle)
        if transferend.untaken:
            device = self.device
            transferend.raise_untaken(transferend.of_stream(device._runtime, device.ordinal, self._handle))

    def wait(self, event_or_stream: Event | StreamLike) -> None:
        """Let later work of this stream wait for an Event, or for what another stream
        holds now; returns at once."""
        if isinstance(event_or_stream, Event):
            with self._on():
                self.device._runtime.stream_wait_event(self.handle, event_or_stream.handle)
            return
        if event_or_stream is None:
            raise TypeError("wait() needs an Event or a stream, not None")
        mine, untimed = self.handle, EventOptions(timing_enabled=False)
        with as_stream(event_or_stream, self.device).record(options=untimed) as event, self._on():
            self.device._runtime.stream_wait_event(mine, event.handle)

    def record(self, event: Event | None = None, *, options: EventOptions | None = None) -> Event:
        """Mark this point of the stream in `event`, or in a new one made with `options` (HIP rule 25)."""
        handle = self.handle
        if event is not None and options is not None:
            raise ArgumentError("record() takes an event or options for a new one, not both")
        made = event if event is not None else create_event(self.device, options or EventOptions())
        with self._on():
            self.device._runtime.event_record(made.handle, handle)
        return made

    def close(self) -> None:
        """Destroy the stream if it was made here; pending work completes. A second close does nothing."""
        if not self._closed:
            self._closed = True
            if self._owned and self._born == reaper.generation():
                self.device._runtime.stream_destroy(self._handle)
            if transferend.untaken:
                transferend.look_again()

    def _on(self) -> contextlib.AbstractContextManager[None]:
        return self.device._current() if self._handle <= PER_THREAD_STREAM else _NOTHING

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stream):
            return NotImplemented
        if self is other:
            return True
        same = self._handle == other._handle and self._device == other._device
        return same and not (self._closed or other._closed)

    def __hash__(self) -> int:
        return hash((self._handle, self._device))

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self, later: Callable[..., None] = reaper.later) -> None:
        if getattr(self, "_owned", False) and not self._closed and self._device is not None:
            runtime = self._device._runtime
            later(runtime.scheduler, self._born, runtime.stream_destroy, self._handle)

    def __repr__(self) -> str:
        where = self._device.name if self._device is not None else "default device"
        return f"<Stream {self._handle:#x} on {where}{', closed' if self._closed else ''}>"


LEGACY_DEFAULT_STREAM = Stream._of(LEGACY_STREAM, None, owned=False)
"""The legacy default stream of whichever device it is used with."""
PER_THREAD_DEFAULT_STREAM = Stream._of(PER_THREAD_STREAM, None, owned=False)
"""The calling thread's default stream of whichever device it is used with (HIP rule 19)."""


class Event:
    """A marker in a stream: completion, order across streams, and time. Made by
    `Device.create_event` or `Stream.record`.

    `end - start` is milliseconds; both must have been recorded and be complete, or DeviceError (HIP rule 28).
    """

    __slots__ = ("__weakref__", "_born", "_closed", "_device", "_handle", "_options")

    _born: int
    _closed: bool
    _device: Device
    _handle: int
    _options: EventOptions

    def __init__(self) -> None:
        raise TypeError("an Event is made by Device.create_event() or Stream.record()")

    @property
    def handle(self) -> int:
        """The runtime's handle. ClosedError after `close`."""
        if self._closed:
            raise ClosedError(f"{self!r} is closed")
        return self._handle

    @property
    def device(self) -> Device:
        return self._device

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def is_timing_enabled(self) -> bool:
        return self._options.timing_enabled

    @property
    def is_blocking_sync(self) -> bool:
        return self._options.blocking_sync

    @property
    def is_ipc_enabled(self) -> bool:
        return self._options.ipc_enabled

    @property
    def is_done(self) -> bool:
        """True when the recorded work has finished, or nothing was recorded (HIP rule 24)."""
        return self._device._runtime.event_query(self.handle)

    def sync(self) -> None:
        """Wait until the recorded work has finished (HIP rule 27)."""
        self._device._runtime.event_sync(self.handle)

    def close(self) -> None:
        """Destroy the event; streams that wait for it are still released (HIP rule 31)."""
        if not self._closed:
            self._closed = True
            if self._born == reaper.generation():
                self._device._runtime.event_destroy(self._handle)

    def __sub__(self, start: Event) -> float:
        if not isinstance(start, Event):
            return NotImplemented
        if start._device._runtime is not self._device._runtime:
            raise ArgumentError(f"no time lies between events of {start._device} and {self._device}")
        timing = needed(self._device._runtime.timing, self._device, "events that time")
        return timing.event_elapsed(start.handle, self.handle)

    def __enter__(self) -> Event:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self, later: Callable[..., None] = reaper.later) -> None:
        if hasattr(self, "_options") and not self._closed:
            runtime = self._device._runtime
            later(runtime.scheduler, self._born, runtime.event_destroy, self._handle)

    def __repr__(self) -> str:
        return f"<Event {self._handle:#x} on {self._device.name}{', closed' if self._closed else ''}>"


def create_stream(device: Device, options: StreamOptions) -> Stream:
    """A new stream on `device`."""
    reaper.start()
    priority = 0 if options.priority is None else options.priority
    handle = device._runtime.stream_create(device.ordinal, nonblocking=options.nonblocking, priority=priority)
    stream = Stream._of(handle, device, owned=True)
    forked.know(stream)
    return stream


def create_event(device: Device, options: EventOptions) -> Event:
    """A new event on `device`."""
    reaper.start()
    handle = device._runtime.event_create(
        device.ordinal,
        timing=options.timing_enabled,
        blocking_sync=options.blocking_sync,
        interprocess=options.ipc_enabled,
    )
    event = Event.__new__(Event)
    event._handle, event._device, event._options = handle, device, options
    event._closed, event._born = False, reaper.generation()
    return event


def as_stream(obj: StreamLike, device: DeviceLike) -> Stream:
    """The Stream that `obj` means on `device` (case C78).

    Accepts a Stream, None (the device's legacy default stream), an int handle, and by protocol
    `__cuda_stream__`, `.cuda_stream` and `.ptr`. TypeError names these for anything else; ArgumentError for
    another runtime's stream.
    """
    target = as_device(device)
    if obj is None:
        return target.default_stream
    if isinstance(obj, Stream):
        return _bound(obj, target)
    handle = obj if isinstance(obj, int) and not isinstance(obj, bool) else _foreign_handle(obj)
    if handle > PER_THREAD_STREAM:
        target = Device._of(target._runtime, target._runtime.stream_device(handle))
    return Stream.from_handle(handle, target, owner=obj)


def _bound(stream: Stream, target: Device) -> Stream:
    if stream._closed:
        raise stream._gone()
    if stream._device is None:
        return Stream._of(stream._handle, target, owned=False)
    if stream._device._runtime is not target._runtime:
        raise ArgumentError(f"{stream!r} cannot order work on {target}: it belongs to another runtime")
    return stream


def _foreign_handle(obj: Any) -> int:
    protocol = getattr(obj, "__cuda_stream__", None)
    if protocol is not None and not isinstance(obj, type):
        version, handle = protocol() if callable(protocol) else protocol
        if version != 0:
            raise TypeError(f"{type(obj).__name__}.__cuda_stream__ speaks version {version}; 0 is understood")
        return int(handle)
    for name in ("cuda_stream", "ptr"):
        found = getattr(obj, name, None)
        if isinstance(found, int) and not isinstance(found, bool):
            return found
    raise TypeError(
        "a stream is a Stream, an int handle, None, or an object with __cuda_stream__, .cuda_stream "
        "(PyTorch) or .ptr "
        f"(CuPy), not {type(obj).__name__}"
    )
