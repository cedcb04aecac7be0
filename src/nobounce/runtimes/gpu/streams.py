"""Streams, events, host functions and gates of the GPU runtime.

A handle that was not made here is a caller's own stream and is passed on as it is: neither CUDA nor HIP since
7.0 can say whether it is one (HIP rule 14). Events are always made here.
"""

from __future__ import annotations

from collections.abc import Callable

from nobounce.errors import DeviceError, RuntimeStatus
from nobounce.runtimes import exits
from nobounce.runtimes.base import PER_THREAD_STREAM, Gate
from nobounce.runtimes.gpu import table
from nobounce.runtimes.gpu.core import GpuCore, GpuEvent, GpuStream
from nobounce.runtimes.host.calls import api, invalid_value

_WAIT_FLAGS = (0, 1)
"""Default and External (HIP rule 38)."""


class GpuStreams(GpuCore):
    """Order."""

    @api
    def stream_create(self, device: int, *, nonblocking: bool = True, priority: int = 0) -> int:
        self._device(device, "stream_create")
        if nonblocking not in (True, False):
            raise invalid_value("stream_create", f"nonblocking {nonblocking!r}")
        flags = table.STREAM_NONBLOCKING if nonblocking else table.STREAM_DEFAULT
        with self._apart(device):
            made: int = self._adapter.stream_create(flags, priority)
        self._streams[made] = GpuStream(device, nonblocking=nonblocking)
        return made

    @api
    def stream_destroy(self, stream: int) -> None:
        mine = self._streams.pop(stream, None)
        if mine is None:
            raise DeviceError(
                "stream_destroy", RuntimeStatus.InvalidResourceHandle, detail=f"{stream:#x} was not made here"
            )
        with self._apart(mine.device):
            self._gates.forget(self._key(stream, mine.device))
            self._adapter.stream_destroy(stream)

    @api
    def stream_query(self, stream: int) -> bool:
        with self._apart(self._where(stream)):
            return bool(self._adapter.stream_query(stream))

    @api
    def stream_is_clear(self, stream: int) -> bool:
        with self._apart(self._where(stream)):
            return self._is_clear(stream)

    @api
    def stream_sync(self, stream: int) -> None:
        device = self._where(stream)
        with self._apart(device):
            self._adapter.stream_sync(stream)
        key = self._key(stream, device)
        self._host_calls.deliver("stream_sync", lambda failed, number: failed == key)

    @api
    def stream_wait_event(self, stream: int, event: int, flags: int = 0) -> None:
        self._event(event, "stream_wait_event")
        if flags not in _WAIT_FLAGS:
            raise invalid_value("stream_wait_event", f"flags {flags}")
        with self._on(self._where(stream)):
            self._adapter.stream_wait_event(stream, event, flags)

    @api
    def stream_device(self, stream: int) -> int:
        if stream in self._streams or stream <= PER_THREAD_STREAM:
            return self._where(stream)
        with self._anywhere():
            return self._adapter.foreign_stream_device(stream)

    @api
    def stream_priority_range(self, device: int) -> tuple[int, int]:
        self._device(device, "stream_priority_range")
        with self._on(device):
            least, greatest = self._adapter.priority_range()
            return int(least), int(greatest)

    @api
    def stream_priority(self, stream: int) -> int:
        with self._on(self._where(stream)):
            return int(self._adapter.stream_priority(stream))

    @api
    def stream_is_nonblocking(self, stream: int) -> bool:
        with self._on(self._where(stream)):
            return bool(self._adapter.stream_flags(stream) & table.STREAM_NONBLOCKING)

    @api
    def host_call(self, stream: int, fn: Callable[[], None]) -> None:
        if not callable(fn):
            raise invalid_value("host_call", f"{fn!r} is not callable")
        device = self._where(stream)
        with self._on(device):
            self._launch(stream, device, fn)

    @api
    def gate(self, stream: int, on_reached: Callable[[], None], *, patient: bool = False) -> Gate:
        if not callable(on_reached):
            raise invalid_value("gate", f"{on_reached!r} cannot be called")
        exits.start()
        device = self._where(stream)
        with self._apart(device):
            self._watched(device)
            if device not in self._can_wait:
                self._can_wait[device] = self._adapter.flag("wait_value", device)
            if self._can_wait[device]:
                return self._gates.close_stream(stream, self._key(stream, device), on_reached, patient)
            return self._gates.close_host(lambda hold: self._launch(stream, device, hold), on_reached)

    # events

    @api
    def event_create(
        self, device: int, *, timing: bool = True, blocking_sync: bool = False, interprocess: bool = False
    ) -> int:
        self._device(device, "event_create")
        if interprocess and timing:
            raise invalid_value("event_create", "an event for other processes cannot time (HIP rule 30)")
        flags = 0 if timing else table.EVENT_DISABLE_TIMING
        flags |= table.EVENT_BLOCKING_SYNC if blocking_sync else 0
        flags |= table.EVENT_INTERPROCESS if interprocess else 0
        with self._apart(device):
            made: int = self._adapter.event_create(flags)
        self._events[made] = GpuEvent(device, timing=timing)
        return made

    @api
    def event_destroy(self, event: int) -> None:
        mine = self._event(event, "event_destroy")
        del self._events[event]
        with self._apart(mine.device):
            self._adapter.event_destroy(event)

    @api
    def event_record(self, event: int, stream: int) -> None:
        mine = self._event(event, "event_record")
        device = self._where(stream)
        if device != mine.device:
            raise DeviceError(
                "event_record",
                RuntimeStatus.InvalidResourceHandle,
                detail=f"an event of device {mine.device} on a stream of device {device} (HIP rule 32)",
            )
        with self._on(device):
            mark = self._host_calls.mark()
            self._adapter.event_record(event, stream)
        mine.stream, mine.mark = self._key(stream, device), mark

    @api
    def event_query(self, event: int) -> bool:
        mine = self._event(event, "event_query")
        with self._apart(mine.device):
            return bool(self._adapter.event_query(event))

    @api
    def event_sync(self, event: int) -> None:
        mine = self._event(event, "event_sync")
        with self._apart(mine.device):
            self._adapter.event_sync(event)
        recorded, mark = mine.stream, mine.mark
        self._host_calls.deliver("event_sync", lambda failed, number: failed == recorded and number <= mark)

    @api
    def event_elapsed(self, start: int, end: int) -> float:
        a, b = self._event(start, "event_elapsed"), self._event(end, "event_elapsed")
        for event in (a, b):
            if not event.timing or event.stream is None:
                why = "made without timing" if not event.timing else "never recorded"
                raise DeviceError("event_elapsed", RuntimeStatus.InvalidHandle, detail=f"an event {why}")
        if a.device != b.device:
            raise DeviceError(
                "event_elapsed", RuntimeStatus.InvalidResourceHandle, detail="events of two devices"
            )
        with self._on(a.device):
            return float(self._adapter.event_elapsed(start, end))
