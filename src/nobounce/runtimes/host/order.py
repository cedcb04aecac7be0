"""Streams, events, host functions and gates of the host runtimes (HIP rules 1-45)."""

from __future__ import annotations

from collections.abc import Callable

from nobounce.errors import DeviceError, RuntimeStatus
from nobounce.runtimes import exits
from nobounce.runtimes.base import LEGACY_STREAM, NULL_STREAM, PER_THREAD_STREAM, Gate
from nobounce.runtimes.host.calls import api, invalid_value
from nobounce.runtimes.host.core import HostCore, HostEvent
from nobounce.runtimes.host.ops import HostStream
from nobounce.runtimes.host.streams import run_host_function

_LEAST, _GREATEST = 1, -1
_WAIT_DEFAULT, _WAIT_EXTERNAL = 0, 1


class HostOrder(HostCore):
    """Everything about order."""

    # streams

    @api
    def stream_create(self, device: int, *, nonblocking: bool = True, priority: int = 0) -> int:
        """Priorities out of range are clamped (HIP rule 8); a flag that is neither true nor
        false is refused (rule 9)."""
        where = self._device(device, "stream_create")
        if nonblocking not in (True, False):
            raise invalid_value("stream_create", f"unknown flag {nonblocking!r}")
        handle = self._new_handle()
        self._streams[handle] = HostStream(
            where, nonblocking=bool(nonblocking), priority=min(max(priority, _GREATEST), _LEAST)
        )
        return handle

    @api
    def stream_destroy(self, stream: int) -> None:
        """The null, legacy and per-thread streams cannot be destroyed (HIP rule 12)."""
        if self._streams.pop(stream, None) is None:
            what = (
                "a default stream"
                if stream in (NULL_STREAM, LEGACY_STREAM, PER_THREAD_STREAM)
                else "no stream, or destroyed before"
            )
            raise DeviceError(
                "stream_destroy", RuntimeStatus.InvalidResourceHandle, detail=f"{stream:#x} is {what}"
            )

    @api
    def stream_query(self, stream: int) -> bool:
        s = self._stream(stream, "stream_query")
        tickets = s.tickets
        if s is s.device.null:
            idle = not self._executor.tails(s.device, blocking_only=True)
        else:
            idle = not s.queue
        if idle:
            self._executor.covered(tickets)
        return idle

    @api
    def stream_sync(self, stream: int) -> None:
        s = self._stream(stream, "stream_sync")
        device = s.device
        if s is device.null:  # with all blocking streams (HIP rule 17)
            tickets = device.blocking_tickets
            self._executor.wait(self._executor.tails(device, blocking_only=True))
            self._executor.covered(tickets)
            self._deliver(device, "stream_sync", lambda failed, _: not failed.nonblocking)
        else:
            tickets = s.tickets
            self._executor.wait(self._executor.tail(s))
            self._executor.covered(tickets)
            self._deliver(device, "stream_sync", lambda failed, _: failed is s)

    @api
    def stream_wait_event(self, stream: int, event: int, flags: int = 0) -> None:
        """Later ops wait for the event's snapshot; no dependency on the null stream comes
        with it (HIP rules 22, 35)."""
        s = self._stream(stream, "stream_wait_event")
        e = self._event(event, "stream_wait_event")
        if flags not in (_WAIT_DEFAULT, _WAIT_EXTERNAL):
            raise invalid_value("stream_wait_event", f"flags {flags}: 0 (default) or 1 (external)")
        op = e.op
        if op is None or op.stream is s or (op.done and not op.tickets):
            return
        self._executor.submit(s, None, after=(op,), implicit=False)

    @api
    def stream_device(self, stream: int) -> int:
        return self._stream(stream, "stream_device").device.ordinal

    @api
    def stream_priority_range(self, device: int) -> tuple[int, int]:
        self._device(device, "stream_priority_range")
        return _LEAST, _GREATEST

    @api
    def stream_priority(self, stream: int) -> int:
        return self._stream(stream, "stream_priority").priority

    @api
    def stream_is_nonblocking(self, stream: int) -> bool:
        return self._stream(stream, "stream_is_nonblocking").nonblocking

    @api
    def device_sync(self, device: int) -> None:
        d = self._device(device, "device_sync")
        tickets = d.tickets
        self._executor.wait(self._executor.tails(d))
        self._executor.covered(tickets)
        self._deliver(d, "device_sync")

    # host functions and gates

    @api
    def host_call(self, stream: int, fn: Callable[[], None]) -> None:
        """An exception of `fn` becomes the stream's asynchronous error (HIP rule 43)."""
        s = self._stream(stream, "host_call")
        if not callable(fn):
            raise invalid_value("host_call", f"{fn!r} cannot be called")
        self._executor.submit(
            s, self._task(s.device, "host_call", lambda: run_host_function(fn)), signals=True
        )

    @api
    def gate(self, stream: int, on_reached: Callable[[], None], *, patient: bool = False) -> Gate:
        s = self._stream(stream, "gate")
        if not callable(on_reached):
            raise invalid_value("gate", f"{on_reached!r} cannot be called")
        exits.start()
        return self._executor.submit_gate(s, on_reached)

    # events

    @api
    def event_create(
        self, device: int, *, timing: bool = True, blocking_sync: bool = False, interprocess: bool = False
    ) -> int:
        """An interprocess event carries no timing (HIP rules 30, 34)."""
        d = self._device(device, "event_create")
        if interprocess and timing:
            raise invalid_value("event_create", "interprocess needs timing=False")
        handle = self._new_handle()
        self._events[handle] = HostEvent(d, timing=timing)
        return handle

    @api
    def event_destroy(self, event: int) -> None:
        self._event(event, "event_destroy")
        del self._events[event]

    @api
    def event_record(self, event: int, stream: int) -> None:
        """Refused on a stream of another device than the event's (HIP rule 32)."""
        e = self._event(event, "event_record")
        s = self._stream(stream, "event_record")
        if s.device is not e.device:
            raise DeviceError(
                "event_record",
                RuntimeStatus.InvalidResourceHandle,
                detail=f"an event of {e.device.name} on a stream of {s.device.name}",
            )
        e.op = self._executor.submit(s, None, timed=e.timing)

    @api
    def event_query(self, event: int) -> bool:
        op = self._event(event, "event_query").op
        if op is None:
            return True
        if op.done:
            self._executor.covered(op.tickets)
        return op.done

    @api
    def event_sync(self, event: int) -> None:
        op = self._event(event, "event_sync").op
        if op is None:
            return
        self._executor.wait((op,))
        self._executor.covered(op.tickets)
        s, number = op.stream, op.number
        self._deliver(s.device, "event_sync", lambda failed, n: failed is s and n <= number)

    @api
    def event_elapsed(self, start: int, end: int) -> float:
        """Refuses events without timing, not recorded, of two devices (HIP rule 28);
        NotReady while one is pending."""
        a, b = self._event(start, "event_elapsed"), self._event(end, "event_elapsed")
        if a.device is not b.device:
            raise DeviceError(
                "event_elapsed", RuntimeStatus.InvalidResourceHandle, detail="events of two devices"
            )
        first, last = a.op, b.op
        if first is None or last is None or not (a.timing and b.timing):
            raise DeviceError(
                "event_elapsed", RuntimeStatus.InvalidHandle, detail="not recorded, or created without timing"
            )
        if not (first.done and last.done):
            raise DeviceError("event_elapsed", RuntimeStatus.NotReady)
        return (last.time - first.time) * 1000.0
