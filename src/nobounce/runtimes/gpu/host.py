"""Host functions in a GPU's streams, and the errors that they leave behind (HIP rules 39-45, 78).

One ctypes callback serves all of them for the life of the process; the vendor hands it a number that
finds the Python function. The vendor's thread has to take the GIL for it, so nothing may hold the GIL
while it waits for a stream.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from typing import NamedTuple

from nobounce.clock import Scheduler
from nobounce.errors import DeviceError, RuntimeStatus
from nobounce.runtimes.host.streams import inside

StreamKey = tuple[int, int, int]
"""(handle, device, thread): 0 and 1 are one stream per device, 2 is one per thread and device."""

CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

EXIT_PATIENCE = 5.0
"""Seconds that interpreter exit waits for host functions that are still to run: they
cannot run without Python."""


class _Call(NamedTuple):
    number: int
    stream: StreamKey
    fn: Callable[[], None]


class _Failure(NamedTuple):
    number: int
    stream: StreamKey
    error: BaseException


class HostCalls:
    """The functions that are still to run, kept alive until they ran (HIP rule 44), and what they raised."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._numbers = itertools.count(1)
        self._last = 0
        self._waiting: dict[int, _Call] = {}
        self._failures: list[_Failure] = []
        self._lock = threading.Lock()
        self.trampoline = CALLBACK(self._run)

    def add(self, stream: StreamKey, fn: Callable[[], None]) -> int:
        """The number to hand to the vendor."""
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = _Call(number, stream, fn)
            self._last = number
            return number

    def withdraw(self, number: int) -> None:
        """The vendor did not take it."""
        self._waiting.pop(number, None)

    def mark(self) -> int:
        """What an event remembers: failures of later host functions are not its business."""
        return self._last

    def fail(self, stream: StreamKey, error: BaseException) -> None:
        """Note an asynchronous error of a stream."""
        with self._lock:
            self._last = next(self._numbers)
            self._failures.append(_Failure(self._last, stream, error))

    def deliver(self, call: str, wanted: Callable[[StreamKey, int], bool]) -> None:
        """Raise the errors that `wanted(stream, number)` names, as one, once (HIP rule 78)."""
        if not self._failures:
            return
        with self._lock:
            mine = [f for f in self._failures if wanted(f.stream, f.number)]
            self._failures = [f for f in self._failures if f not in mine]
        if not mine:
            return
        made = DeviceError(
            call, RuntimeStatus.LaunchFailure, detail=f"a stream op failed: {_told(mine[0].error)}"
        )
        for other in mine[1:]:
            made.add_note(f"also: {_told(other.error)}")
        raise made from mine[0].error

    def drain(self) -> None:
        """At interpreter exit: let what is still to run do so, for a while."""
        end = self._scheduler.now() + EXIT_PATIENCE
        while self._waiting and self._scheduler.now() < end:
            self._scheduler.sleep(0.001)

    def _run(self, number: int | None) -> None:
        call = self._waiting.get(number or 0)
        if call is None:
            return
        inside.host_call = True
        try:
            call.fn()
        except BaseException as e:  # cannot propagate into the vendor's thread (HIP rule 43)
            with self._lock:
                self._failures.append(_Failure(call.number, call.stream, e))
        finally:
            inside.host_call = False
            self._waiting.pop(call.number, None)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
