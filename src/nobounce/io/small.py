"""Small reads that go the same way each time: the first is judged in full, the next ones take its plan.

To gather a read's facts, judge them and make a job of chunks takes ten times as long as to read 4 KiB of
page-cached bytes. What does not depend on where in the file a read begins is kept with the file: the ways
that are tried for it, one after the other (what the page cache holds, then direct, or then host memory for a
reason of the file's, the device's or the caller's). Whatever is out of the ordinary (a short read, an error,
an unaligned edge) is left to the whole way, which reads again and reports in full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nobounce.clock import THREADS
from nobounce.errors import InternalError, NobounceError
from nobounce.io import hooks
from nobounce.io.kept import Plan, Way, is_held, suits
from nobounce.io.oncaller import copy, fill
from nobounce.io.receipt import Evidence, Receipt, Segment
from nobounce.io.target import Chunk
from nobounce.runtimes.rawio import RWF_NOWAIT, try_read

if TYPE_CHECKING:
    from nobounce.io.job import Job
    from nobounce.io.movers.bounce import Ring
    from nobounce.runtimes.base import CopyCalls

AT_ONCE_NBYTES = 64 << 10
"""Up to here a submission that waits for the bytes takes no longer than one that
puts a gate into the stream."""


class SmallRead:
    """One read by a plan; to whoever carries it out, counts it or waits for it, it is a `Job`."""

    tickets = 1
    direct_nbytes = 0

    def __init__(
        self,
        plan: Plan,
        address: int,
        where: tuple[int, int, int],
        stream: int | None,
        whole: Callable[[hooks.Operation | None], Job],
    ) -> None:
        self.plan, self.target, self.refusals = plan, plan.target, plan.refusals
        self._address, self._where, self.stream, self._whole = address, where, stream, whole
        self.requested = where[0]
        self._way = plan.ways[0]
        self.queued_at = self.started_at = self.ended_at = THREADS.now()
        self.receipt: Receipt | None = None
        self.error: BaseException | None = None
        self.done = False
        self._on_done: Callable[[Any], None] | None = None
        self.operation: hooks.Operation | None = None
        if hooks.watchers:
            t, (nbytes, file_offset, _) = self.target, where
            known = t.filename, t.device_name, file_offset, nbytes, stream
            self.operation = hooks.enter("read", *known, self.queued_at)

    def begin(self, on_done: Callable[[Any], None] | None = None) -> None:
        """As `Job.begin`."""
        self._on_done = on_done
        self.started_at = THREADS.now()
        if self.operation is not None:
            hooks.begin(self.operation, self.started_at)

    def work(self) -> None:
        """Read, and tell whoever waits."""
        try:
            try:
                moved = self._move()
            except (OSError, NobounceError):
                moved = False
            if moved:
                self.ended_at = THREADS.now()
                self._account()
            else:
                self._do_whole()
        except BaseException as e:
            self.error = e if isinstance(e, Exception) else InternalError("the transfer was interrupted")
            self.gone(self.error)
            if not isinstance(e, Exception):
                raise
        finally:
            self.done = True
            if self._on_done is not None:
                self._on_done(self)

    def _move(self) -> bool:
        """Whether every byte is where it belongs."""
        t, ring = self.target, self.target.ring
        if ring is None:
            return self._straight()
        stream = ring.copy_stream()
        try:
            slot = ring.acquire(wait=True)
            if slot is None:
                return False
            try:
                with t.runtime.copy_calls(t.device) as calls:
                    return any(self._relay(way, calls, ring, stream, slot) for way in self.plan.ways)
            finally:
                ring.release(slot)
        finally:
            ring.return_stream(stream)

    def _straight(self) -> bool:
        nbytes, file_offset, buffer_offset = self._where
        address, began = self._address + buffer_offset, THREADS.now()
        for way in self.plan.ways:
            if way.if_held and not is_held(way.fd, file_offset, nbytes):
                continue
            if way.grain > 1 and not suits(way, address, nbytes, file_offset):
                return False
            if try_read(way.fd, address, nbytes, file_offset, way.flags) == nbytes:
                self._way = way
                if hooks.watchers:
                    self._tell(began, THREADS.now())
                return True
        return False

    def at_once(self) -> bool:
        """Do it now: a page-cached read in the order of a stream that has nothing before it needs no
        gate and no other thread.

        False: nothing was done. Not while a large transfer's copies would be waited for.
        """
        t, ring, way = self.target, self.target.ring, self.plan.ways[0]
        if ring is None or self.stream is None or way.grain > 1 or self.requested > AT_ONCE_NBYTES:
            return False
        done = False
        try:
            with t.runtime.copy_calls(t.device) as calls:
                mine = ring.borrow() if calls.is_clear(self.stream) else None
                if mine is None:
                    return False
                try:
                    self.begin()
                    done = self._relay(way, calls, ring, *mine, RWF_NOWAIT)
                finally:
                    ring.give_back(*mine)
        except (OSError, NobounceError):
            return False
        if done:
            self.ended_at = THREADS.now()
            self._account()
            self.done = True
        return done

    def _relay(
        self,
        way: Way,
        calls: CopyCalls,
        ring: Ring,
        stream: int,
        borrowed: tuple[int, int],
        flags: int = 0,
    ) -> bool:
        """Through a slot and a private stream, in which hardly ever something is left; whether every
        byte is where it belongs."""
        t, slot = self.target, borrowed[0]
        nbytes, _, buffer_offset = self._where
        watched = bool(hooks.watchers)
        began = THREADS.now() if watched else 0.0
        lead = fill(way, ring, slot, self._where, flags)
        if lead is None:
            return False
        there = THREADS.now() if watched else 0.0
        copy(t, calls, self._address + buffer_offset, slot + lead, nbytes, stream)
        self._way = way
        if watched:
            now = THREADS.now()
            hooks.copied(t.device_name, stream, "read", nbytes, there, now)
            self._tell(began, now)
        return True

    def _tell(self, began: float, ended: float) -> None:
        nbytes, file_offset, buffer_offset = self._where
        way = self._way
        relayed = self.target.ring is not None and way.grain > 1
        chunk = Chunk(way.backend, file_offset, buffer_offset, nbytes, way.reason, relayed)
        hooks.moved(self, chunk, began, ended)  # type: ignore[arg-type]

    def gone(self, error: BaseException) -> None:
        """For those who watch: it ended otherwise than by moving bytes."""
        if self.operation is not None:
            hooks.leave(self.operation, None, error, THREADS.now())

    def _account(self) -> None:
        t, way = self.target, self._way
        nbytes, file_offset, buffer_offset = self._where
        part = Segment(way.backend, file_offset, buffer_offset, nbytes, way.reason, t.ring is not None)
        evidence: Evidence = "none"
        if way.backend == "fastpath":
            evidence, self.direct_nbytes, self.refusals = "reported", nbytes, ()
        times = self.queued_at, self.started_at, self.ended_at
        self.receipt = Receipt(
            "read", t.filename, t.device_name, nbytes, nbytes, (part,), (), evidence, *times
        )
        if hooks.observers:
            hooks.ended(self)  # type: ignore[arg-type]

    def _do_whole(self) -> None:
        job = self._whole(self.operation)
        job.queued_at = self.queued_at
        job.begin()
        while not job.done:
            job.work()
            job.wait()
        self.receipt, self.error = job.receipt, job.error
        self.started_at, self.ended_at = job.started_at, job.ended_at
