"""The receipt of a batch: sums by way and reason, not a segment per request, and the
evidence for its direct bytes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from nobounce.clock import Scheduler
from nobounce.facts.threadio import thread_io
from nobounce.io.evidence import MIN_NBYTES, SERVED
from nobounce.io.receipt import Evidence, Receipt, Retry, Segment
from nobounce.io.target import Piece
from nobounce.route.judge import DIRECT
from nobounce.route.types import BackendName, Op, Reason

if TYPE_CHECKING:
    from nobounce.io.batch.group import Group

PAGE = 4096
MOST_RETRIES = 64
_OPS: tuple[Op, Op] = ("read", "write")
_ORDER: tuple[Evidence, ...] = ("reported", "kernel")


class _Sum:
    """Bytes of one way and reason, and where the first of them lies."""

    __slots__ = ("buffer_offset", "file_offset", "nbytes", "reason")

    def __init__(self, reason: Reason, file_offset: int, buffer_offset: int) -> None:
        self.reason, self.file_offset, self.buffer_offset, self.nbytes = reason, file_offset, buffer_offset, 0


class Tally:
    """What the batch has done so far.

    Evidence is taken per stretch of work, from the first request under way to the moment when none is: the
    kernel's counters of the threads that carried it out must have moved by the direct bytes, and the page
    cache must not have grown.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[BackendName, str, bool], _Sum] = {}
        self._retries: list[Retry] = []
        self._retried = 0
        self._names: dict[str, None] = {}
        self._devices: dict[str, None] = {}
        self._requests = {"read": 0, "write": 0}
        self._requested = self._moved = 0
        self._queued_at: float | None = None
        self._started_at = self._ended_at = 0.0
        self._evidence: Evidence = "none"
        self._open = self._watched = self._sound = False
        self._before: tuple[int, int] | None = None
        self._thread = 0
        self._direct = [0, 0]
        self._short = 0
        self.hole_nbytes = 0
        """Of the direct bytes read, those that no disk was asked for."""
        self._holes_before = 0

    # what moves

    def added(self, group: Group, requests: int, nbytes: int, now: float) -> None:
        """`requests` valid requests of `nbytes` bytes were queued."""
        self._names[group.target.filename] = None
        self._devices[group.target.device_name] = None
        self._requests[group.op] += requests
        self._requested += nbytes
        if self._queued_at is None:
            self._queued_at = now

    def direct(self, group: Group, nbytes: int, file_offset: int, buffer_offset: int) -> None:
        """Bytes went direct; the offsets are of the first of them."""
        if nbytes:
            self._add("fastpath", DIRECT, False, nbytes, file_offset, buffer_offset)
            self._direct[_OPS.index(group.op)] += nbytes

    def pieces(self, group: Group, pieces: list[Piece]) -> None:
        for p in pieces:
            if p.backend == "fastpath":
                self.direct(group, p.nbytes, p.file_offset, p.buffer_offset)
            else:
                self._add(p.backend, p.reason, p.relayed, p.nbytes, p.file_offset, p.buffer_offset)

    def _deny(self, nbytes: int) -> None:
        """Bytes that were counted as direct came from the page cache."""
        direct = self._sums["fastpath", DIRECT.code, False]
        nbytes = min(nbytes, direct.nbytes)
        direct.nbytes -= nbytes
        self._moved -= nbytes
        self._add("fallback", SERVED, False, nbytes, direct.file_offset, direct.buffer_offset)

    def short(self) -> None:
        """A direct transfer fell short: the kernel may have counted up to a page more."""
        self._short += 1

    def retries(self, retries: list[Retry]) -> None:
        self._retried += len(retries)
        self._retries += retries[: MOST_RETRIES - len(self._retries)]

    def _add(
        self, backend: BackendName, reason: Reason, relayed: bool, nbytes: int, file_offset: int, at: int
    ) -> None:
        key = backend, reason.code, relayed
        found = self._sums.get(key)
        if found is None:
            found = self._sums[key] = _Sum(reason, file_offset, at)
        found.nbytes += nbytes
        self._moved += nbytes
        if file_offset < found.file_offset:
            found.file_offset, found.buffer_offset = file_offset, at

    # evidence

    def begin(self, groups: list[Group], now: float) -> None:
        """Requests of these groups are about to start."""
        if not self._open:
            self._open = self._sound = True
            self._direct = [0, 0]
            self._short, self._holes_before = 0, self.hole_nbytes
            self._watched = sum(g.direct_nbytes for g in groups) >= MIN_NBYTES
            self._thread = threading.get_ident()
            self._before = thread_io() if self._watched else None
            if not self._started_at:
                self._started_at = now
        for group in groups:
            group.note_before()
            if self._watched and group.direct_nbytes:
                group.watch = True
                group.resident_before = group.resident()
            else:
                group.watch = False

    @property
    def measuring(self) -> bool:
        """Whether `end` is still to come."""
        return self._open

    def group_done(self, group: Group) -> None:
        if group.watch and group.grew:
            self._sound = False
        if group.denied_nbytes:
            self._deny(group.denied_nbytes)

    def end(self, metered: tuple[int, int] | None, scheduler: Scheduler) -> None:
        """Nothing is under way any more; `metered` is what the I/O threads' counters
        moved by (None: not known)."""
        if not self._open:
            return
        self._open = False
        self._ended_at = scheduler.now()
        if not any(self._direct):
            return
        seen: Evidence = "kernel" if self._proven(metered) else "reported"
        self._evidence = seen if self._evidence == "none" else min(self._evidence, seen, key=_ORDER.index)

    def _proven(self, metered: tuple[int, int] | None) -> bool:
        if not self._watched or not self._sound or self._before is None or metered is None:
            return False
        after = thread_io() if threading.get_ident() == self._thread else None
        if after is None:
            return False
        slack = PAGE * (self._short + 1)
        for column, direct in enumerate(self._direct):
            moved = after[column] - self._before[column] + metered[column]
            if column == 0:
                direct -= self.hole_nbytes - self._holes_before
            if direct and not direct <= moved <= direct + slack:
                return False
        return True

    # the receipt

    def receipt(self) -> Receipt:
        """The sum so far. Offsets of a segment are those of its first bytes: between them may lie gaps."""
        notes = []
        both = self._requests["read"] and self._requests["write"]
        total = sum(self._requests.values())
        notes.append(f"a batch of {total} requests: segments are sums by way and reason")
        if both:
            notes.append(f"{self._requests['write']} of the requests are writes")
        if self._retried > len(self._retries):
            notes.append(f"{self._retried - len(self._retries)} more retries")
        segments = tuple(
            Segment(backend, s.file_offset, s.buffer_offset, s.nbytes, s.reason, relayed)
            for (backend, _, relayed), s in self._sums.items()
            if s.nbytes
        )
        return Receipt(
            op="write" if self._requests["write"] and not self._requests["read"] else "read",
            filename=_several(self._names),
            device=_several(self._devices),
            requested=self._requested,
            nbytes=self._moved,
            segments=segments,
            retries=tuple(self._retries),
            evidence=self._evidence if any(s.backend == "fastpath" for s in segments) else "none",
            queued_at=self._queued_at or 0.0,
            started_at=self._started_at,
            ended_at=max(self._ended_at, self._started_at),
            notes=tuple(notes),
            hole_bytes=self.hole_nbytes,
        )


def _several(names: dict[str, None]) -> str:
    found = list(names)
    if not found:
        return ""
    return found[0] if len(found) == 1 else f"{found[0]} and {len(found) - 1} more"
