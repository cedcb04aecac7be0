"""What every part of a host runtime leans on: devices, handles, and what an address means."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import NamedTuple

from nobounce.clock import THREADS, Scheduler
from nobounce.errors import DeviceError, NobounceError, RuntimeStatus
from nobounce.route.types import MemoryKind
from nobounce.runtimes.base import LEGACY_STREAM, NULL_STREAM, PER_THREAD_STREAM, Runtime
from nobounce.runtimes.host.calls import invalid_value
from nobounce.runtimes.host.memory import Allocation, AllocationMap, HostSpace
from nobounce.runtimes.host.ops import HostDevice, HostStream, Op, Work
from nobounce.runtimes.host.streams import Executor

_handles = itertools.count(0x1000, 0x10)

INLINE_NBYTES = 64 << 10
"""An op up to this size runs on the submitting thread of `cpu` where nothing is before it:
handing it over costs more."""


class HostEvent:
    """`op` is the snapshot of the last record (HIP rules 24-26)."""

    __slots__ = ("device", "op", "timing")

    def __init__(self, device: HostDevice, *, timing: bool) -> None:
        self.device, self.timing = device, timing
        self.op: Op | None = None


class Spot(NamedTuple):
    """What an address means: `where` is what the host can load and store."""

    kind: MemoryKind
    allocation: Allocation | None
    where: int


class HostCore(Runtime):
    """Handles and addresses; `HostRuntime` is the whole."""

    def __init__(
        self,
        name: str,
        device_names: list[str],
        space: HostSpace,
        *,
        scheduler: Scheduler = THREADS,
        strict: bool,
    ) -> None:
        self.name, self.scheduler = name, scheduler
        self._strict = strict
        self._space = space
        self._devices = [HostDevice(i, n) for i, n in enumerate(device_names)]
        self._executor = Executor(scheduler, name, inline=not strict, tickets=strict)
        self._map = AllocationMap(scheduler)
        self._streams: dict[int, HostStream] = {}
        self._events: dict[int, HostEvent] = {}
        self._peers: set[tuple[int, int]] = set()
        self._local = threading.local()

    # hooks for a stricter runtime

    def _task(self, device: HostDevice, op: str, work: Work) -> Work:
        """The work as it is to run on `device`; faults come in here."""
        return work

    def _strike(self, device: HostDevice | None, op: str) -> None:
        """Let a fault strike a call that is not a stream op."""

    # devices

    def _device(self, ordinal: int, call: str) -> HostDevice:
        if not 0 <= ordinal < len(self._devices):
            raise DeviceError(
                call,
                RuntimeStatus.InvalidDevice,
                detail=f"{self.name} has {len(self._devices)}, not {ordinal}",
            )
        device = self._devices[ordinal]
        if device.lost:
            raise lost_error(device, call)
        return device

    def _current(self, call: str) -> HostDevice:
        return self._device(getattr(self._local, "device", 0), call)

    # handles

    def _stream(self, handle: int, call: str) -> HostStream:
        stream = self._streams.get(handle)
        if stream is None:
            if handle in (NULL_STREAM, LEGACY_STREAM):
                return self._current(call).null
            if handle == PER_THREAD_STREAM:
                return self._per_thread(self._current(call))
            raise DeviceError(
                call, RuntimeStatus.InvalidResourceHandle, detail=f"{handle:#x} is no stream, or is destroyed"
            )
        if stream.device.lost:
            raise lost_error(stream.device, call)
        return stream

    def _per_thread(self, device: HostDevice) -> HostStream:
        mine: dict[int, HostStream] | None = getattr(self._local, "streams", None)
        if mine is None:
            mine = self._local.streams = {}
        if device.ordinal not in mine:
            mine[device.ordinal] = HostStream(device, nonblocking=False, priority=0)
        return mine[device.ordinal]

    def _event(self, handle: int, call: str) -> HostEvent:
        event = self._events.get(handle)
        if event is None:
            raise DeviceError(
                call, RuntimeStatus.InvalidResourceHandle, detail=f"{handle:#x} is no event, or is destroyed"
            )
        return event

    def _new_handle(self) -> int:
        return next(_handles)  # never given out twice, in any runtime: a stale handle is always known as such

    # addresses

    def _spot(self, address: int, nbytes: int, call: str) -> Spot:
        """Raises InvalidValue for null, freed device memory, and a range past its
        allocation (HIP rules 63, 66)."""
        if address <= 0:
            raise invalid_value(call, "null pointer")
        found = self._map.find(address)
        if found is None:
            if self._space.owns(address):
                raise invalid_value(call, f"{address:#x} is freed device memory, or never was allocated")
            return Spot(MemoryKind.PAGEABLE, None, address)
        if address + nbytes > found.base + found.nbytes:
            raise invalid_value(
                call,
                f"{nbytes} bytes at {address:#x} go past the allocation of {found.nbytes} at {found.base:#x}",
            )
        return Spot(found.kind, found, found.at(address))

    def _host(self, ordinal: int | None) -> HostDevice:
        return self._devices[ordinal or 0]

    # waiting

    def _wait_for(self, op: Op, call: str) -> None:
        """Wait for an op of one's own, and raise what became of it."""
        self._executor.wait([op])
        self._executor.covered(op.tickets)
        if op.error is not None:
            self._executor.forget_error(op)
            raise as_device_error(op.error, call)

    def _deliver(
        self, device: HostDevice, call: str, wanted: Callable[[HostStream, int], bool] | None = None
    ) -> None:
        """Raise the asynchronous errors that `wanted` names, as one, once (HIP rule 78)."""
        if device.lost:
            raise lost_error(device, call)
        errors = self._executor.take_errors(device, wanted)
        if errors:
            first = as_device_error(errors[0], call)
            for other in errors[1:]:
                first.add_note(f"also: {other}")
            raise first


def as_device_error(error: Exception, call: str) -> NobounceError:
    """What a failed op is raised as."""
    if isinstance(error, NobounceError):
        return error
    made = DeviceError(
        call, RuntimeStatus.LaunchFailure, detail=f"a stream op failed: {type(error).__name__}: {error}"
    )
    made.__cause__ = error
    return made


def lost_error(device: HostDevice, call: str) -> DeviceError:
    return DeviceError(call, RuntimeStatus.LaunchFailure, detail=f"device {device.name} is lost")
