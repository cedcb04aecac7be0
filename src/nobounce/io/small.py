"""Small reads that go the same way each time: the first is judged in full, the next ones take its plan.

A 4 KiB read takes 15 us behind a gate of a GPU's stream; to gather its facts, judge them and make a job of chunks takes several
times that. Where a route does not depend on where in the file a read begins (it falls back for a reason of the file's, the
device's or the caller's), it is kept with the file. Whatever is out of the ordinary (a short read, an error) is left to
the whole way, which reads again and reports in full.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from nobounce.clock import THREADS
from nobounce.config import Settings, settings
from nobounce.errors import DeviceError, InternalError, NobounceError
from nobounce.facts.filtered import REFUSED
from nobounce.io import hooks
from nobounce.io.fallback import host_flags
from nobounce.io.receipt import Receipt, Segment
from nobounce.io.target import Chunk, Target
from nobounce.route.scores import INDIRECT
from nobounce.route.types import Reason, Refusal, Request, Route
from nobounce.runtimes import faults, rawio

if TYPE_CHECKING:
    from nobounce.buffer import Buffer
    from nobounce.io.bounce import Ring
    from nobounce.io.file import File
    from nobounce.io.job import Job
    from nobounce.runtimes.base import CopyCalls

MOST_NBYTES = 256 << 10
"""Above this, several threads and the usual way are no slower."""
AT_ONCE_NBYTES = 64 << 10
"""Up to here a submission that waits for the bytes takes no longer than one that puts a gate into the stream."""
RWF_NOWAIT = 0x8
HAS_FLAGS = hasattr(os, "RWF_NOWAIT")
MOST_PLANS = 32

Key = tuple[Any, ...]


class Plan(NamedTuple):
    """What two small reads with the same key have in common."""

    settings: Settings
    target: Target
    reason: Reason
    refusals: tuple[Refusal, ...]
    direct: bool
    """The relay reads by O_DIRECT."""
    process: int


_process = os.getpid()
"""A forked child starts anew: bounce rings are not inherited."""


def _forget() -> None:
    global _process
    _process = os.getpid()


os.register_at_fork(after_in_child=_forget)


def find(file: File, view: Buffer, require: str, cache: str, where: tuple[int, int, int]) -> Plan | None:
    """The plan for a read of (nbytes, file_offset, buffer_offset), or None: then the whole way decides, and names what is wrong."""
    nbytes, file_offset, buffer_offset = where
    if not 0 < nbytes <= MOST_NBYTES or faults.ACTIVE:
        return None
    allocation = view.allocation
    plan = file._plans.get((allocation.device.name, allocation.kind, require, cache))
    if (
        plan is None
        or plan.settings is not settings()
        or plan.process != _process
        or plan.target.runtime is not allocation.device._runtime
        or allocation.device.name in file._failed
    ):
        return None
    if (
        file_offset < 0
        or buffer_offset < 0
        or buffer_offset + nbytes > view.nbytes
        or file_offset + nbytes >= 1 << 62
    ):
        return None
    return plan


def keep(file: File, request: Request, route: Route, job: Job) -> None:
    """Keep the way of a read that was judged in full, if it is one way whatever the offset."""
    target = job.target
    if (
        request.op != "read"
        or len(route.segments) != 1
        or route.segments[0].backend != "fallback"
        or (request.cache == "auto" and request.require == "auto")
        or route.segments[0].reason.code == "unaligned-edge"
        or not _hard(request, route)
        or target.runtime.scheduler is not THREADS
        or request.earlier_failure is not None
        or len(file._plans) >= MOST_PLANS
    ):
        return
    direct = target.relay_fd >= 0 and request.cache != "use" and target.ring is not None
    if target.drop_cache and not (direct and target.vouched):
        return  # pages have to be dropped behind it, or may have to: btrfs reads what it has compressed through the page cache
    key = (request.memory.device, request.memory.kind, request.require, request.cache)
    file._plans[key] = Plan(
        request.settings, target, route.segments[0].reason, job.refusals, direct, _process
    )


def _hard(request: Request, route: Route) -> bool:
    """Whether the reason holds for every offset: asked for, or a refusal that is not one of alignment."""
    code = route.segments[0].reason.code
    if code in ("cache-use", "required-fallback"):
        return True
    return (
        not code.endswith("-align")
        and code not in INDIRECT
        and any(r.code == code for s in route.scores for r in s.refusals)
    )


def _read(fd: int, ring: Ring, slot: int, nbytes: int, file_offset: int, flags: int) -> int:
    """Into a slot. The interpreter's own call takes half of what one on an address does; built for an old C library it has no flags,
    and it is preadv2 also without any, which a filter may refuse."""
    if HAS_FLAGS or not flags:
        try:
            return os.preadv(fd, (ring.view(slot)[:nbytes],), file_offset, flags)
        except OSError as e:
            if e.errno not in REFUSED:
                raise
    return rawio.read_plain(fd, slot, nbytes, file_offset, flags)


class SmallRead:
    """One read by a plan; to whoever carries it out, counts it or waits for it, it is a `Job`."""

    direct_nbytes = 0
    tickets = 1

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
            nbytes, file_offset, buffer_offset = self._where
            at, began = self._address + buffer_offset, THREADS.now()
            whole = rawio.read_plain(t.buffered_fd, at, nbytes, file_offset, host_flags(t)) == nbytes
            if whole and hooks.watchers:
                self._tell(began, THREADS.now())
            return whole
        stream = ring.copy_stream()
        try:
            slot = ring.acquire(wait=True)
            if slot is None:
                return False
            try:
                with t.runtime.copy_calls(t.device) as calls:
                    return self._relay(calls, ring, stream, slot, host_flags(t))
            finally:
                ring.release(slot)
        finally:
            ring.return_stream(stream)

    def at_once(self) -> bool:
        """Do it now: a page-cached read in the order of a stream that has nothing before it needs no gate and no other thread.

        False: nothing was done. Not while a large transfer's copies would be waited for.
        """
        t, ring = self.target, self.target.ring
        if ring is None or self.stream is None or self.plan.direct or self.requested > AT_ONCE_NBYTES:
            return False
        done = False
        try:
            with t.runtime.copy_calls(t.device) as calls:
                mine = ring.borrow() if calls.is_clear(self.stream) else None
                if mine is None:
                    return False
                try:
                    self.begin()
                    done = self._relay(calls, ring, *mine, host_flags(t) | RWF_NOWAIT)
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
        self, calls: CopyCalls, ring: Ring, stream: int, borrowed: tuple[int, int], flags: int
    ) -> bool:
        """Through a slot and a private stream, in which hardly ever something is left; whether every byte is where it belongs."""
        t, slot = self.target, borrowed[0]
        nbytes, file_offset, buffer_offset = self._where
        watched = bool(hooks.watchers)
        began = THREADS.now() if watched else 0.0
        if self.plan.direct:
            lead = file_offset % t.relay_align
            ask = -(-(lead + nbytes) // t.relay_align) * t.relay_align
            got = rawio.read_plain(t.relay_fd, slot, ask, file_offset - lead)
        else:
            lead = 0
            got = _read(t.buffered_fd, ring, slot, nbytes, file_offset, flags)
        if got < lead + nbytes:
            return False
        copied, there = False, THREADS.now() if watched else 0.0
        try:
            calls.copy(self._address + buffer_offset, slot + lead, nbytes, stream)
            calls.finish(stream)
            copied = True
        finally:
            if not copied:  # the copy may still be under way, and the slot is about to be somebody else's
                with suppress(DeviceError):
                    t.runtime.stream_sync(stream)
        if watched:
            now = THREADS.now()
            hooks.copied(t.device_name, stream, "read", nbytes, there, now)
            self._tell(began, now)
        return True

    def _tell(self, began: float, ended: float) -> None:
        nbytes, file_offset, buffer_offset = self._where
        chunk = Chunk("fallback", file_offset, buffer_offset, nbytes, self.plan.reason, self.plan.direct)
        hooks.moved(self, chunk, began, ended)  # type: ignore[arg-type]

    def gone(self, error: BaseException) -> None:
        """For those who watch: it ended otherwise than by moving bytes."""
        if self.operation is not None:
            hooks.leave(self.operation, None, error, THREADS.now())

    def _account(self) -> None:
        t = self.target
        nbytes, file_offset, buffer_offset = self._where
        part = Segment("fallback", file_offset, buffer_offset, nbytes, self.plan.reason, t.ring is not None)
        self.receipt = Receipt(
            op="read",
            filename=t.filename,
            device=t.device_name,
            requested=nbytes,
            nbytes=nbytes,
            segments=(part,),
            queued_at=self.queued_at,
            started_at=self.started_at,
            ended_at=self.ended_at,
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
