"""What every part of the GPU runtime leans on: which device a call is for, and making
it current for the call.

With one device nothing has to be made current but once per thread. With several, every call is made on the
device whose memory, stream or event it names, and what was current before is current again afterwards: no
call starts a device that it does not name (case C98).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from nobounce.clock import THREADS, Scheduler
from nobounce.errors import DeviceError, RuntimeStatus
from nobounce.route.types import MemoryKind
from nobounce.runtimes.base import (
    LEGACY_STREAM,
    NULL_STREAM,
    PER_THREAD_STREAM,
    Capabilities,
    CopyCalls,
    Runtime,
)
from nobounce.runtimes.gpu.adapter import Adapter
from nobounce.runtimes.gpu.capture import Apart, Captures
from nobounce.runtimes.gpu.gates import Gates
from nobounce.runtimes.gpu.host import HostCalls, StreamKey
from nobounce.runtimes.gpu.table import ROWS, STREAM_NONBLOCKING

On = contextlib.AbstractContextManager[Any]
_NOTHING: On = contextlib.nullcontext()


class GpuStream:
    """A stream made here."""

    __slots__ = ("device", "nonblocking")

    def __init__(self, device: int, *, nonblocking: bool) -> None:
        self.device, self.nonblocking = device, nonblocking


class GpuEvent:
    """`stream` and `mark` are those of the last record; `stream` is None until then."""

    __slots__ = ("device", "mark", "stream", "timing")

    def __init__(self, device: int, *, timing: bool) -> None:
        self.device, self.timing = device, timing
        self.stream: StreamKey | None = None
        self.mark = 0


class GpuCore(Runtime):
    """State and look-ups; `GpuRuntime` is the whole."""

    streams_ahead = 32

    def __init__(self, adapter: Adapter, count: int, *, scheduler: Scheduler = THREADS) -> None:
        self.name, self.scheduler = adapter.name, scheduler
        self._adapter = adapter
        self._count = count
        self._local = threading.local()
        self._used: set[int] = set()
        self._streams: dict[int, GpuStream] = {}
        self._events: dict[int, GpuEvent] = {}
        self._pinned_within: dict[int, int] = {}
        self._registered: set[int] = set()
        """Memory of our own that bounce rings have registered."""
        self._kinds = adapter.kinds()
        self._captures = Captures(adapter.capture_mode)
        self._calls: CopyCalls | None = None
        self._registers_faster = adapter.registers_faster
        self._host_calls = HostCalls(scheduler)
        self._trampoline: Any = None
        self._gates = Gates(adapter, scheduler, self._ask, self._host_calls.fail)
        self._health: dict[int, int] = {}
        self._can_wait: dict[int, bool] = {}
        self.capabilities = Capabilities(
            pinned=True,
            managed=adapter.flag("managed", 0),
            priorities=adapter.flag("priorities", 0),
            peers=count > 1,
            host_register=True,
            page_cache_dma=adapter.flag("register_read_only", 0),
            stream_ordered_alloc=adapter.flag("pools", 0),
            modules=adapter.function(ROWS["launch"])[1] is not None,
            dlpack_device_type=adapter.dlpack_device_type,
        )

    # devices

    def _device(self, ordinal: int, call: str) -> int:
        if not 0 <= ordinal < self._count:
            raise DeviceError(
                call, RuntimeStatus.InvalidDevice, detail=f"{self.name} has {self._count}, not {ordinal}"
            )
        return ordinal

    def _on(self, device: int) -> On:
        """`device` current for this thread inside."""
        if not getattr(self._local, "started", False):
            self._start_thread()
        if self._count > 1:
            self._used.add(device)
            return self._adapter.on(device)
        return _NOTHING

    def _start_thread(self) -> None:
        if self.scheduler.is_own_thread():
            self._captures.relax()
        if self._count == 1:
            self._adapter.start_thread()
        self._local.started = True

    def _apart(self, device: int) -> On:
        """As `_on`, for calls that a capture of another stream, in whatever thread,
        would forbid and be ended by."""
        return Apart(self._captures, self._on(device))

    def _current(self) -> int:
        if self._count == 1:
            return 0
        return int(self._adapter.get_device())

    def _anywhere_apart(self) -> On:
        return Apart(self._captures, self._anywhere())

    def _anywhere(self) -> On:
        """For calls that need some device, whichever: one that is in use already."""
        if self._count == 1:
            return self._on(0)
        touched = self._adapter.touched_device()
        if touched is None:
            touched = min(self._used, default=None)
        return self._on(self._current() if touched is None else touched)

    def _holder(self, *addresses: int) -> int:
        """The device whose memory one of `addresses` is, the first that is any; else the current one."""
        if self._count == 1:
            return 0
        for address in addresses:
            info = self._adapter.pointer_info(address)
            if info.kind in (MemoryKind.DEVICE, MemoryKind.MANAGED) and info.device is not None:
                return info.device
        return self._current()

    # handles

    def _where(self, stream: int) -> int:
        """The device of a stream."""
        mine = self._streams.get(stream)
        if mine is not None:
            return mine.device
        if self._count == 1:
            return 0
        if stream in (NULL_STREAM, LEGACY_STREAM, PER_THREAD_STREAM):
            return self._current()
        return self._adapter.foreign_stream_device(stream)

    @staticmethod
    def _key(stream: int, device: int) -> StreamKey:
        if stream == PER_THREAD_STREAM:
            return (stream, device, threading.get_ident())
        return (NULL_STREAM if stream == LEGACY_STREAM else stream, device, 0)

    def _event(self, handle: int, call: str) -> GpuEvent:
        event = self._events.get(handle)
        if event is None:
            raise DeviceError(
                call, RuntimeStatus.InvalidResourceHandle, detail=f"{handle:#x} is no event, or is destroyed"
            )
        return event

    def _is_clear(self, stream: int) -> bool:
        """`stream_is_clear`, its device current. A blocking stream waits for the legacy one, which waits
        for every blocking one, and whose query asks them all (HIP rules 15, 18); that of a captured
        stream would end the capture."""
        mine, a = self._streams.get(stream), self._adapter
        try:
            if stream > LEGACY_STREAM:
                if mine is not None:
                    alone = mine.nonblocking
                else:
                    alone = stream > PER_THREAD_STREAM and a.stream_flags(stream) & STREAM_NONBLOCKING
                if not (alone or a.asks_aside) or a.stream_capture(stream) or not a.stream_query(stream):
                    return False
                if alone:
                    return True
            return not a.stream_capture(a.legacy) and bool(a.stream_query(a.legacy))
        except DeviceError:
            return False

    # the device's health, asked by the watcher of gates through a stream of its own

    def _watched(self, device: int) -> None:
        """Have a stream on `device` to ask, before a gate closes; the device is current."""
        if device not in self._health:
            self._health[device] = self._adapter.stream_create(1, 0)

    def _ask(self, device: int) -> None:
        with self._on(device):
            self._adapter.stream_query(self._health[device])

    def _launch(self, stream: int, device: int, fn: Callable[[], None]) -> None:
        """Put a host function into a stream; its device is current."""
        if self._trampoline is None:
            self._trampoline = self._adapter.host_function(self._host_calls.trampoline)
        number = self._host_calls.add(self._key(stream, device), fn)
        try:
            self._adapter.host_call(stream, self._trampoline, number)
        except BaseException:
            self._host_calls.withdraw(number)
            raise
