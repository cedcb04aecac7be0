"""What is left of an asynchronous transfer that failed or fell short until its caller knows: its error, and
the bytes it did not bring.

An error is raised once: by the Transfer's `result`, or by the stream's or device's `sync` or the file's
`sync` or `close`, whichever is asked first. Where none of them can be asked any more (the Transfer has been
collected, the file and the stream are closed), and at exit, it is logged.

Memory remembers in `arriving` which reads are to fill it. A write or a copy that is queued while one of them
has not been heard of takes that along, and looks when its turn has come: bytes that such a read did not bring
are not written. Order of submission is the order of these entries, because streams and events may only be
waited for after they were queued.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from nobounce import reaper
from nobounce.clock import THREADS
from nobounce.errors import ShortTransferError, TransferCancelledError, TransferError, printable
from nobounce.runtimes.base import PER_THREAD_STREAM

if TYPE_CHECKING:
    from nobounce.stream import Stream

_log = logging.getLogger("nobounce")

MOST_UNTAKEN = 64
"""Ends kept for a caller who may never ask; the oldest is logged to make room for another."""
MOST_NOTES = 8

Ranges = tuple[tuple[int, int, int], ...]
"""(first address, address behind the last, distance from where the read puts these bytes)."""
Arriving = dict["TransferEnd", Ranges]
Seen = tuple[tuple["TransferEnd", Ranges], ...]

FOREIGN: Arriving = {}
"""Of all memory that other libraries own: it is adopted anew in each call."""
untaken: dict[TransferEnd, None] = {}
"""Failed and short transfers whose callers have not heard of it, oldest first. Empty, which is
one look, nearly always."""
on_lost: list[Callable[[TransferEnd], None]] = []
"""Told of each error that is logged instead of raised."""
_any_missing = False
"""Whether a read of this process has ever failed or fallen short."""


class TransferEnd:
    """How one transfer of the object API ends. `start` and `stop` are the addresses of its bytes; a write has
    `seen` the reads that were to fill them."""

    __slots__ = (
        "__weakref__",
        "_asked",
        "_file",
        "_homes",
        "_place",
        "_stream",
        "_transfer",
        "done",
        "error",
        "missing",
        "seen",
        "start",
        "stop",
    )

    def __init__(
        self, stream: Stream, file: Any, asked: tuple[str, int, int], start: int, seen: Seen = ()
    ) -> None:
        """`asked`: "read" or "write", bytes, and the offset in the file."""
        self._asked, self.start, self.stop, self.seen = asked, start, start + asked[1], seen
        self._place = stream.device._runtime, stream.device.ordinal, stream._handle
        self._file: Callable[[], Any] = lambda: file
        self._stream: Callable[[], Stream | None] = weakref.ref(stream)
        self._transfer: Callable[[], Any] = _nothing
        self._homes: list[tuple[Arriving, object]] = []
        self.done = False
        self.error: BaseException | None = None
        self.missing: tuple[int, int] | None = None
        """The addresses of a read's bytes that did not come."""

    def fills(self, arriving: Arriving, witness: object, start: int, stop: int) -> None:
        """This read is queued: it fills part of [start, stop), memory that lives as long as `witness`."""
        self._homes.append((arriving, witness))
        arriving[self] = ((start, stop, 0),)

    def carries_to(self, arriving: Arriving, ranges: Ranges) -> None:
        """What it brings, or does not, is copied to these ranges."""
        self._homes.append((arriving, None))
        arriving[self] = arriving.get(self, ()) + ranges
        if self.done and self.missing is None:
            self._leave_homes()
            arriving.pop(self, None)

    def settle(self, transfer: object, moved: int, asked: int, error: BaseException | None) -> None:
        """The transfer has ended, and what waits for it does not go on yet. A second call changes nothing."""
        global _any_missing
        if self.done:
            if self.missing is None:
                self._leave_homes()  # an interrupt may have come between
            return
        short = bool(self._homes) and moved < asked
        if short:
            self.missing, _any_missing = (self.start + moved, self.stop), True
        self.error = error
        file = self._file()  # still here where an interrupt had this called a second time
        if error is None and not short:
            self._file, self.done = _nothing, True
            self._leave_homes()
            return
        _let_go(error)
        self._file = _nothing if file is None else weakref.ref(file, self._unless_asked)
        self.done = True
        self._transfer = weakref.ref(transfer, self._unless_asked)
        stream = self._stream()
        if stream is not None:
            self._stream = weakref.ref(stream, self._unless_asked)
        for arriving, witness in self._homes:
            if arriving is FOREIGN:
                self._watch(witness)
        self._homes = [(arriving, None) for arriving, _ in self._homes]
        untaken[self] = None
        if isinstance(error, TransferCancelledError):
            self.take()  # the caller did it
        elif len(untaken) > MOST_UNTAKEN:
            next(iter(list(untaken))).lose()

    def take(self) -> bool:
        """The caller hears of it now; from here on he may do with the bytes what he
        likes. False: he has before."""
        first = untaken.pop(self, False) is None
        self._leave_homes()
        return first

    def lose(self) -> None:
        """It cannot be asked for any more: log it. Its bytes stay undefined."""
        if untaken.pop(self, False) is not None or self.error is None:
            return
        cause = f" (after: {self.error.__cause__})" if self.error.__cause__ is not None else ""
        what = "" if isinstance(self.error, TransferError) else f"{self}: "
        _log.error("error never retrieved: %s%s%s", what, self.error, cause)
        # Not here: garbage may be collected, and this be called, inside of what is told.
        reaper.later(THREADS, reaper.generation(), _tell, self)

    def clipped(self, ranges: Ranges) -> Ranges:
        """What of these it fills: a late-bound read may have become smaller than it
        was when it was queued."""
        return tuple((max(a, self.start + by), min(b, self.stop + by), by) for a, b, by in ranges)

    def is_on(self, runtime: object, device: int, handle: int | None) -> bool:
        """Whether it was on this stream; None: on any of the device."""
        mine, ordinal, stream = self._place
        if handle is not None and handle > PER_THREAD_STREAM:
            return mine is runtime and stream == handle
        same = handle is None or max(stream, 1) == max(handle, 1)
        return same and mine is runtime and ordinal == device

    def is_of(self, file: object) -> bool:
        return self._file() is file

    def refusal(self, filename: str | None, file_offset: int, nbytes: int, call: str) -> TransferError:
        """The error of a write or a copy of bytes that this transfer left undefined; caused by its own."""
        op, asked, offset = self._asked
        cause = self.error or ShortTransferError(
            errno.EIO,
            filename=self.filename,
            file_offset=offset,
            nbytes=asked,
            backend="",
            call=op,
            detail="it came back short",
        )
        error = TransferError(
            getattr(cause, "errno", None) or errno.EIO,
            filename=filename,
            file_offset=file_offset,
            nbytes=nbytes,
            backend="",
            call=call,
            detail=f"the bytes are undefined, because a {op} that was to bring them failed: {cause}",
            cure="Take that transfer's result first, or fill the bytes again",
        )
        error.__cause__ = cause
        return error

    @property
    def file_offset(self) -> int:
        return self._asked[2]

    @property
    def filename(self) -> str | None:
        file = self._file()
        return None if file is None else str(file.name)

    def __str__(self) -> str:
        op, nbytes, offset = self._asked
        return f"{printable(self.filename or '?')}: {op} of {nbytes} bytes at offset {offset}"

    def _unless_asked(self, _: object = None, exiting: Callable[[], bool] = reaper.exiting) -> None:
        """Log it where neither the Transfer, nor the file, nor the stream is there to be asked."""
        if exiting():
            return  # `_at_exit` has logged it, and names of this module may be gone
        file, stream = self._file(), self._stream()
        if self._transfer() is not None or (file is not None and not file.closed):
            return
        if self._place[2] > PER_THREAD_STREAM and (stream is None or stream.is_closed):
            self.lose()

    def _watch(self, witness: object) -> None:
        """Foreign memory: when it goes, its addresses may soon be another's."""
        try:
            weakref.finalize(witness, FOREIGN.pop, self, None).atexit = False
        except TypeError:  # nothing tells when it goes: what was queued by now has the entry
            FOREIGN.pop(self, None)

    def _leave_homes(self) -> None:
        for arriving, _ in self._homes:
            if _any_missing and self.missing is None:
                # These bytes are there now, whatever went wrong with them before.
                for start, stop, _shift in self.clipped(arriving.get(self, ())):
                    overwrite(arriving, start, stop, of=lambda end: end.missing is not None)
            arriving.pop(self, None)
        self._homes = []  # last, so that a call that is interrupted here can start again


def overwrite(
    arriving: Arriving, start: int, stop: int, of: Callable[[TransferEnd], bool] | None = None
) -> None:
    """[start, stop) gets other bytes, in an order behind the entries: what is queued from now on
    need not ask them about it."""
    for end, ranges in list(arriving.items()):
        if of is None or of(end):
            rest = _without(ranges, start, stop)
            if not rest:
                arriving.pop(end, None)
            elif rest != ranges and end in arriving:
                arriving[end] = rest


def lacking(seen: Seen, start: int, stop: int) -> TransferEnd | None:
    """The transfer that left some of [start, stop) undefined, as far as those that were
    `seen` have ended by now."""
    bad: list[tuple[int, int, TransferEnd]] = []
    for end, ranges in seen:
        if not end.done:
            continue  # nothing orders it before the one that asks
        for first, behind, shift in end.clipped(ranges):
            bad = [
                (a, b, who)
                for x, y, who in bad
                for a, b in ((x, min(y, first)), (max(x, behind), y))
                if a < b
            ]
            if end.missing is not None:
                a, b = max(first, end.missing[0] + shift), min(behind, end.missing[1] + shift)
                if a < b:
                    bad.append((a, b, end))
    return next((who for a, b, who in bad if a < stop and start < b), None)


def copied(of: Arriving, start: int, stop: int, to: Arriving, distance: int) -> None:
    """[start, stop) is copied to `distance` bytes further on, in an order behind the entries of both."""
    found = [
        (end, part) for end, ranges in list(of.items()) if (part := _within(ranges, start, stop, distance))
    ]
    overwrite(to, start + distance, stop + distance)
    for end, part in found:
        end.carries_to(to, part)


def raise_untaken(ends: Iterable[TransferEnd]) -> None:
    """Raise the first error of these, those of the others as its notes; each of them counts as taken."""
    errors = [end.error for end in ends if end.take() and end.error is not None]
    if not errors:
        return
    first, *others = errors
    for other in others[:MOST_NOTES]:
        first.add_note(f"this failed too: {other}")
    if len(others) > MOST_NOTES:
        first.add_note(f"and {len(others) - MOST_NOTES} more")
    raise first


def of_stream(runtime: object, device: int, handle: int | None) -> list[TransferEnd]:
    """What no caller has heard of on this stream (None: on all of the device)."""
    return [end for end in list(untaken) if end.is_on(runtime, device, handle)]


def of_file(file: object) -> list[TransferEnd]:
    """What no caller has heard of of this file."""
    return [end for end in list(untaken) if end.is_of(file)]


def look_again() -> None:
    """A file or a stream has been closed: log what can no longer be asked for."""
    for end in list(untaken):
        end._unless_asked()


def _without(ranges: Ranges, start: int, stop: int) -> Ranges:
    return tuple(
        (a, b, shift) for x, y, shift in ranges for a, b in ((x, min(y, start)), (max(x, stop), y)) if a < b
    )


def _within(ranges: Ranges, start: int, stop: int, distance: int) -> Ranges:
    return tuple(
        (a + distance, b + distance, shift + distance)
        for x, y, shift in ranges
        if (a := max(x, start)) < (b := min(y, stop))
    )


def _let_go(error: BaseException | None) -> None:
    """The frames of its tracebacks are those of an I/O thread: they would keep the Transfer,
    the file and the buffer."""
    met: set[int] = set()
    while error is not None and id(error) not in met:
        met.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _nothing() -> None:
    return None


def _tell(end: TransferEnd) -> None:
    for tell in on_lost:
        tell(end)


def _at_exit() -> None:
    lost = list(untaken)
    for end in lost:
        end.lose()
    if lost:
        reaper.drain()


def _forget() -> None:
    """In a forked child: these are the parent's."""
    untaken.clear()
    FOREIGN.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_forget)
