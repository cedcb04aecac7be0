"""Where transfers tell what becomes of them. `observe` fills it; with nobody there a call site
costs one look at a tuple.

`io` never imports `observe`: what observes is named here and loaded when the first I/O thread pool
or registration is made, so that `import nobounce` stays light and a statistics level of 0 loads,
counts and starts nothing.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from nobounce import transferend
from nobounce.clock import THREADS
from nobounce.config import settings
from nobounce.errors import RouteError
from nobounce.records import field, record

_log = logging.getLogger("nobounce")

if TYPE_CHECKING:
    from nobounce.io.batch.group import Group
    from nobounce.io.job import Job
    from nobounce.io.receipt import Receipt
    from nobounce.io.target import Chunk
    from nobounce.route.types import Op, Refusal, Route

FILLER = "nobounce.observe.start"
"""The module whose `start()` puts observers in; it decides by the settings and the
environment whether there is one."""


@record(frozen=False)
class Operation:
    """One read or write from its submission to its end, for those who watch single transfers.

    Offsets and sizes in bytes, times in seconds of the scheduler's clock. `stream` is the handle of the
    stream that the transfer has its place in, None for a synchronous one; `thread` is the submitting thread
    as the kernel numbers it. `notes` is the observers' own.
    """

    op: Op
    filename: str
    device: str
    file_offset: int
    nbytes: int
    stream: int | None
    queued_at: float
    thread: int
    started_at: float | None = None
    ended_at: float | None = None
    receipt: Receipt | None = None
    error: BaseException | None = None
    notes: dict[Any, Any] = field(default_factory=dict)


class BatchEnds(NamedTuple):
    """Ended requests as arrays of one length: bytes asked for, moved, and of these direct; bits of the
    backends (1 and 2), indices of the reasons (-1: none of its own), and whether the judge had split the
    request. `holes` is the sum of direct bytes that no disk was asked for."""

    requested: Any
    done: Any
    direct: Any
    ways: Any
    reasons: Any
    split: Any
    holes: int = 0


class Observer:
    """What can be told. Methods are called on the thread where it happens, must be
    quick and must not raise."""

    def ended(self, job: Job) -> None:
        """A transfer ended: `job.receipt`, or `job.error` with the receipt of what had moved."""

    def unstarted(
        self, op: Op, device: str, nbytes: int, stream: int | None, error: BaseException | None
    ) -> None:
        """A transfer ended before a byte was tried: refused, cancelled, or found wrong
        at the head of its stream."""

    def refused(self, op: Op, device: str, refusals: tuple[Refusal, ...], *, routed: bool) -> None:
        """The direct path refused a request that came to nothing, with every failed condition; `routed`:
        another way was found. The refusals of a transfer that was carried out are in its job.
        """

    def lost(self) -> None:
        """The error of a failed transfer was logged, because nobody could be told any more."""

    def registered(self, what: str, ok: bool) -> None:
        """A call of the hipFile module named `what`, or a stream's registration, and whether it succeeded."""

    def pinned(self, device: str, nbytes: int) -> None:
        """Bounce memory of a device was pinned, in bytes."""

    def batch_ended(self, group: Group, ends: BatchEnds, status: str, seconds: float) -> None:
        """Requests of a batch ended alike, `seconds` after their group was submitted."""

    def batch_refused(self, group: Group, refusals: tuple[Refusal, ...], count: int) -> None:
        """`count` requests of a batch were refused alike; they end as "invalid"."""


class Watcher(Observer):
    """One who also wants every transfer's entry, start and exit, and the chunks and copies it is made of."""

    def entered(self, operation: Operation) -> None:
        """A transfer was queued or is about to begin."""

    def started(self, operation: Operation) -> None:
        """Its first byte is about to be moved."""

    def exited(self, operation: Operation) -> None:
        """It ended: receipt, error or neither (cancelled) are in the operation."""

    def batch_submitted(self, group: Group, now: float) -> None:
        """A batch has begun with the requests of one call."""

    def batch_done(self, group: Group, now: float) -> None:
        """Nothing works on any of its requests any more; it need not have been submitted."""

    def moved(self, job: Job, chunk: Chunk, began: float, ended: float) -> None:
        """An I/O thread has worked on a chunk."""

    def copied(self, device: str, stream: int, op: Op, nbytes: int, began: float, ended: float) -> None:
        """A relayed copy on a private stream: from the call to the moment when it was seen to be done."""


observers: tuple[Observer, ...] = ()
watchers: tuple[Watcher, ...] = ()
"""Those of the observers who watch single transfers."""

_started_for = 0
_lock = threading.Lock()


def start() -> None:
    """Have the filler put observers in, once per process (and once more in a forked
    child). Raises ConfigError."""
    global _started_for
    if _started_for == os.getpid():
        return
    if settings().stats_level == 0 and not settings().trace:
        _started_for = os.getpid()
        return
    with _lock:
        if _started_for == os.getpid():
            return
        try:
            importlib.import_module(FILLER).start()
        except (ImportError, OSError) as e:  # no descriptor left, say: no reason to refuse a transfer
            _log.warning("nothing is counted in this process: %s", e)
        except (
            RuntimeError
        ) as e:  # before Python 3.12 an interrupt while a class is being made comes out as this
            if isinstance(e.__cause__, KeyboardInterrupt):
                raise e.__cause__ from None
            raise
        _started_for = os.getpid()


def add(observer: Observer) -> None:
    """Tell this observer too."""
    global observers, watchers
    with _lock_of_tuples:
        observers = (*observers, observer)
        watchers = tuple(o for o in observers if isinstance(o, Watcher))


def remove(observer: Observer) -> None:
    """Tell it no more. An observer that is not there is no error."""
    global observers, watchers
    with _lock_of_tuples:
        observers = tuple(o for o in observers if o is not observer)
        watchers = tuple(o for o in observers if isinstance(o, Watcher))


_lock_of_tuples = threading.Lock()


def _tell(told: tuple[Observer, ...], method: str, *arguments: Any, **named: Any) -> None:
    """Call `method` of each. One that fails is a defect of its own: a transfer must end all the same."""
    for observer in told:
        try:
            getattr(observer, method)(*arguments, **named)
        except Exception:
            _log.exception("%s failed; the transfer is not concerned", type(observer).__name__)


def ended(job: Job) -> None:
    """The end of a transfer that had a job, before anybody who waits for it is told."""
    for observer in observers:  # `_tell` by name takes a fifth longer, of every transfer
        try:
            observer.ended(job)
        except Exception:
            _log.exception("%s failed; the transfer is not concerned", type(observer).__name__)
    if job.operation is not None:
        leave(job.operation, job.receipt, job.error, job.ended_at)


def enter(
    op: Op, filename: str, device: str, file_offset: int, nbytes: int, stream: int | None, now: float
) -> Operation:
    """Tell the watchers of a new transfer; the operation comes back for `begin` and `leave`."""
    operation = Operation(op, filename, device, file_offset, nbytes, stream, now, threading.get_native_id())
    _tell(watchers, "entered", operation)
    return operation


def begin(operation: Operation, now: float) -> None:
    """The start of an operation. One that has to start over is told once; its time
    is that of the last start."""
    again, operation.started_at = operation.started_at is not None, now
    if again:
        return
    _tell(watchers, "started", operation)


def leave(operation: Operation, receipt: Receipt | None, error: BaseException | None, now: float) -> None:
    """The end of an operation; a second one is not told."""
    if operation.ended_at is not None:
        return
    operation.ended_at, operation.receipt, operation.error = now, receipt, error
    _tell(watchers, "exited", operation)


def moved(job: Job, chunk: Chunk, began: float, ended: float) -> None:
    _tell(watchers, "moved", job, chunk, began, ended)


def copied(device: str, stream: int, op: Op, nbytes: int, began: float, ended: float) -> None:
    _tell(watchers, "copied", device, stream, op, nbytes, began, ended)


def batch_ended(group: Group, ends: BatchEnds, status: str, seconds: float) -> None:
    _tell(observers, "batch_ended", group, ends, status, seconds)


def batch_refused(group: Group, refusals: tuple[Refusal, ...], count: int) -> None:
    _tell(observers, "batch_refused", group, refusals, count)


def batch_submitted(group: Group, now: float) -> None:
    _tell(watchers, "batch_submitted", group, now)


def batch_done(group: Group, now: float) -> None:
    _tell(watchers, "batch_done", group, now)


def refusals_of(route: Route) -> tuple[Refusal, ...]:
    """Why the direct path refused the request; a job carries them to its end, where
    they are counted with it."""
    for score in route.scores:
        if score.refusals and score.backend == "fastpath":
            return score.refusals
    return ()


def _refused(op: Op, device: str, refusals: tuple[Refusal, ...], routed: bool) -> None:
    _tell(observers, "refused", op, device, refusals, routed=routed)


def unrouted(
    op: Op,
    device: str,
    nbytes: int,
    stream: int | None,
    error: RouteError,
    *,
    file_offset: int = 0,
    now: float | None = None,
) -> None:
    """Tell of a request that no backend took: it ends where it begins, with the refusals and the
    file's name in its error."""
    _refused(op, device, error.refusals, False)
    _unstarted(op, device, nbytes, stream, error)
    if watchers:
        now = THREADS.now() if now is None else now
        name = str(error.filename or "?")
        leave(enter(op, name, device, file_offset, nbytes, stream, now), None, error, now)


def _unstarted(op: Op, device: str, nbytes: int, stream: int | None, error: BaseException | None) -> None:
    _tell(observers, "unstarted", op, device, nbytes, stream, error)


class Subject(NamedTuple):
    """What a queued transfer is about, for telling of one that ends before it begins."""

    op: Op
    device: str
    nbytes: int
    stream: int
    operation: Operation | None
    refusals: tuple[Refusal, ...] = ()

    def unstarted(self, error: BaseException, now: float) -> None:
        if isinstance(error, RouteError):
            _refused(self.op, self.device, error.refusals, False)
        elif self.refusals:
            _refused(self.op, self.device, self.refusals, True)
        _unstarted(self.op, self.device, self.nbytes, self.stream, error)
        if self.operation is not None:
            leave(self.operation, None, error, now)


def registered(what: str, ok: bool) -> None:
    _tell(observers, "registered", what, ok)


def pinned(device: str, nbytes: int) -> None:
    _tell(observers, "pinned", device, nbytes)


transferend.on_lost.append(lambda _: _tell(observers, "lost"))


def _forget() -> None:
    """In a forked child nobody is told until `start` is called there; what the user subscribed stays."""
    global _lock, _lock_of_tuples
    _lock, _lock_of_tuples = threading.Lock(), threading.Lock()


os.register_at_fork(after_in_child=_forget)
