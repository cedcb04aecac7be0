"""What a stream graph is made of: devices, their streams, and the ops in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from nobounce.clock import Scheduler

if TYPE_CHECKING:
    from nobounce.runtimes.host.streams import HostGate

Work = Callable[[], object]

NO_TICKETS: frozenset[int] = frozenset()


class HostDevice:
    """One device's streams."""

    def __init__(self, ordinal: int, name: str) -> None:
        self.ordinal, self.name = ordinal, name
        self.busy: set[HostStream] = set()
        self.errors: list[tuple[HostStream, int, Exception]] = []
        self.tickets = NO_TICKETS
        self.blocking_tickets = NO_TICKETS
        self.lost = False
        self.null = HostStream(self, nonblocking=False, priority=0)


class HostStream:
    """A FIFO of ops: `queue` holds those that have not ended."""

    __slots__ = (
        "__weakref__",
        "device",
        "nonblocking",
        "priority",
        "queue",
        "ready",
        "served",
        "submitted",
        "tickets",
    )

    def __init__(self, device: HostDevice, *, nonblocking: bool, priority: int) -> None:
        self.device, self.nonblocking, self.priority = device, nonblocking, priority
        self.queue: deque[Op] = deque()
        self.ready: Op | None = None
        self.served = False
        self.submitted = 0
        self.tickets = NO_TICKETS


class Op:
    """One entry of a stream. `work` None is a marker."""

    __slots__ = (
        "dependents",
        "done",
        "error",
        "gate",
        "latches",
        "missing",
        "number",
        "signals",
        "stream",
        "tickets",
        "time",
        "timed",
        "work",
    )

    def __init__(self, stream: HostStream, number: int, work: Work | None) -> None:
        self.stream, self.number, self.work = stream, number, work
        self.missing = 0
        self.dependents: list[Op] = []
        self.latches: list[Latch] = []
        self.done = False
        self.timed = False
        self.signals = False
        self.time = 0.0
        self.error: Exception | None = None
        self.gate: HostGate | None = None
        self.tickets = NO_TICKETS


class Latch:
    """Lets a host thread wait for several ops."""

    __slots__ = ("condition", "missing")

    def __init__(self, scheduler: Scheduler, missing: int) -> None:
        self.condition = scheduler.condition()
        self.missing = missing

    def count_down(self) -> None:
        with self.condition.mutex:
            self.missing -= 1
            if self.missing <= 0:
                self.condition.notify_all()

    def wait(self) -> None:
        with self.condition.mutex:
            while self.missing > 0:
                self.condition.wait()


class Worker:
    """A thread that serves whichever stream is ready."""

    __slots__ = ("condition", "ended", "stream")

    def __init__(self, scheduler: Scheduler, stream: HostStream) -> None:
        self.condition = scheduler.condition()
        self.stream: HostStream | None = stream
        self.ended = False
