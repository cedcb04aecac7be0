"""Batch: many reads and writes at once, vectorised from the arguments down to the kernel.

A call takes arrays, is judged as arrays, and becomes ring entries as arrays, so that 10,000 small requests
cost a system call per hundred and no Python per request. Requests that io_uring cannot carry (a vendor's
direct call, a relay, an unaligned edge) go to I/O threads, with the same rules as `File.read`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from nobounce import forked
from nobounce.buffer import as_buffer
from nobounce.clock import THREADS
from nobounce.errors import ArgumentError, ClosedError, NobounceError, UnavailableError
from nobounce.io.batch.columns import integers, requests
from nobounce.io.batch.driver import Driver
from nobounce.io.batch.group import Group
from nobounce.io.batch.instream import BatchTransfer, put
from nobounce.io.batch.refusals import refuse
from nobounce.io.batch.table import BatchEvent, BatchResult
from nobounce.io.engine import engine_for
from nobounce.io.movers import uring
from nobounce.io.prepare import in_order
from nobounce.io.receipt import Receipt, total
from nobounce.protocols import BufferLike, IntArrayLike, SomeStream, StreamLike
from nobounce.route.types import Cache, Op, Require
from nobounce.uninterrupted import GivenUp, uninterrupted

if TYPE_CHECKING:
    import numpy as np

    from nobounce.buffer import Buffer
    from nobounce.clock import Scheduler
    from nobounce.io.file import File

    Array = np.ndarray[Any, Any]

T = TypeVar("T")
Method = Literal["auto", "io_uring", "threads"]
METHODS: tuple[Method, ...] = ("auto", "io_uring", "threads")


class Batch:
    """Many requests at once, on any files, buffers and devices. A context manager; leaving
    it carries everything out.

        with nobounce.Batch(capacity=10_000) as batch:
            batch.read(file, buffer, file_offsets=offsets, nbytes=4096)
            result = batch.wait().check()

    Each request has a status of its own: a bad or failing one is reported and the others run. Requests may
    end in any order, and nothing orders those that overlap. A buffer must not be used while requests on it
    run: closing it raises BusyError. Several threads may use one batch. It does not survive a fork: the
    child has to make its own.

    An interrupt (Ctrl-C) comes out of the call that it hits, and leaves the batch usable: requests that the
    call has added stay added, and their results are there for the next `wait`.
    """

    def __init__(
        self, capacity: int = 1024, *, depth: int = 128, strict: bool = False, method: Method = "auto"
    ) -> None:
        """`capacity` requests may be waiting for their results to be taken; `depth` of them run at once.

        With `strict` a call that holds a bad request is refused as a whole. `method` says what carries out
        plain direct requests; "auto" takes threads where the kernel has no io_uring for us, "io_uring" raises
        UnavailableError. Raises ArgumentError.
        """
        if capacity < 1 or depth < 1:
            raise ArgumentError(f"capacity={capacity!r} and depth={depth!r}: give at least 1 of each")
        if method not in METHODS:
            raise ArgumentError(f"method={method!r} is not one of {', '.join(METHODS)}")
        why = uninterrupted(lambda _: uring.unavailable()) if method != "threads" else ""
        if why and method == "io_uring":
            raise UnavailableError(why)
        self.capacity, self.depth, self.strict = capacity, min(depth, uring.MAX_DEPTH // 2), strict
        self._uring = method != "threads" and not why
        self._pid = os.getpid()
        self._next_id = 0
        self._closed = False
        self._driver = Driver(capacity, self.depth, use_uring=self._uring)
        self._in_stream: list[BatchTransfer] = []
        """Those of which the receipt is not yet a part of `_moved`."""
        self._moved: list[Receipt] = []
        self._to_wait: list[Buffer] = []
        """Buffers of requests that have been added: work already in their streams comes first."""
        _open.add(self)

    # adding requests

    def read(
        self,
        file: File | Sequence[File],
        buffer: BufferLike,
        *,
        file_offsets: IntArrayLike,
        nbytes: IntArrayLike,
        file_index: IntArrayLike | None = None,
        buffer_offsets: IntArrayLike | None = None,
        require: Require = "auto",
        cache: Cache = "auto",
        timeout: float | None = None,
        cookies: Sequence[object] | None = None,
    ) -> Array:
        """Add reads; returns their ids (int64, counting up from 0 over the batch's life). They start
        with `submit` or `wait`.

        `file_offsets`, `nbytes` and `buffer_offsets` are bytes: integers or flat sequences of them, scalars
        stand for all. Without `buffer_offsets` the requests lie packed in the buffer, one behind the other.
        Of several files, `file_index` says by its place in `file` which each request reads. `require` and
        `cache` are those of `File.read`, and so is what lies behind the bytes of a short read. `timeout`
        seconds after its start a request ends with status "timeout"; where the kernel cannot give it up it
        goes on in the dark, and holds its buffer until it ends. `cookies` come back with the results.

        A request outside the buffer is "invalid", and so is one that `require` leaves no backend: the others
        run. Raises ArgumentError for arguments that fit no request, for more requests than the capacity has
        room for and, with `strict`, for the first bad request; RouteError where no request of the call has a
        backend; ClosedError, ConfigError.
        """
        where = file_offsets, nbytes, buffer_offsets, file_index
        return self._add("read", file, buffer, where, (require, cache, timeout), cookies)

    def write(
        self,
        file: File | Sequence[File],
        buffer: BufferLike,
        *,
        file_offsets: IntArrayLike,
        nbytes: IntArrayLike,
        file_index: IntArrayLike | None = None,
        buffer_offsets: IntArrayLike | None = None,
        require: Require = "auto",
        cache: Cache = "avoid",
        timeout: float | None = None,
        cookies: Sequence[object] | None = None,
    ) -> Array:
        """Add writes; as `read`. `File.sync` afterwards puts them on the disk.

        Writes that need the page cache (unaligned edges) never run beside direct writes of the batch: a page
        that holds bytes of both could be written back over the direct ones.
        """
        where = file_offsets, nbytes, buffer_offsets, file_index
        return self._add("write", file, buffer, where, (require, cache, timeout), cookies)

    def _add(
        self,
        op: Op,
        file: File | Sequence[File],
        buffer: BufferLike,
        where: tuple[Any, Any, Any, Any],
        how: tuple[Require, Cache, float | None],
        cookies: Sequence[object] | None,
    ) -> Array:
        import numpy as np

        view = as_buffer(buffer, write=op == "read")
        places, shares = requests(view.nbytes, file, where)
        count = len(places[0])
        require, cache, timeout = how
        if cookies is not None and len(cookies) != count:
            raise ArgumentError(f"{len(cookies)} cookies for {count} requests")
        if timeout is not None and not timeout >= 0:
            raise ArgumentError(f"timeout={timeout!r}: give seconds, or None")
        if view.allocation.arriving:
            view.wait()
            for share in shares:
                for file_offset, size, at in zip(*(c[share.rows].tolist() for c in places), strict=True):
                    in_order(share.file, op, view, (size, file_offset, at))

        def add(_: GivenUp) -> Array:
            pool = engine_for(view.device._runtime)
            if self._driver.pool is not None and self._driver.pool.scheduler is not pool.scheduler:
                raise ArgumentError(f"{view.device.name} keeps another clock than the batch's other devices")
            if count > self._driver.table.free:
                raise ArgumentError(
                    f"{count} requests do not fit: the capacity is {self.capacity} and the results of "
                    f"{self._driver.table.used} have not been taken. Take them with wait(), or make a "
                    "larger Batch"
                )
            with contextlib.ExitStack() as made:
                groups = []
                for share in shares:
                    group = Group(share.file, op, view, share.of(places), require, cache, pool)
                    made.callback(group.release)
                    groups.append(group)
                refuse(groups, shares, count, strict=self.strict)
                made.pop_all()
            first, self._next_id = self._next_id, self._next_id + count
            ids = np.arange(first, first + count, dtype=np.int64)
            if cookies is not None:
                self._driver.results.cookies.update(zip(ids.tolist(), cookies, strict=True))
            for group, share in zip(groups, shares, strict=True):
                self._driver.add(group, ids if share.all else ids[share.rows], timeout, pool)
            self._to_wait.append(view)
            return ids

        return self._locked(add, view.device._runtime.scheduler)

    def _locked(self, call: Callable[[GivenUp], T], scheduler: Scheduler | None = None) -> T:
        """`call` with the lock held, on a thread that no interrupt reaches."""

        self._own()

        def locked(given_up: GivenUp) -> T:
            while True:
                driver = self._driver
                with driver.lock:
                    if driver is self._driver:  # else its requests went into a stream meanwhile
                        self._guard()
                        return call(given_up)

        return uninterrupted(locked, scheduler or self._driver.scheduler)

    # carrying them out

    @overload
    def submit(self, *, stream: None = None) -> int: ...

    @overload
    def submit(self, *, stream: SomeStream) -> BatchTransfer: ...

    def submit(self, *, stream: StreamLike | None = None) -> int | BatchTransfer:
        """Start what has been added; returns how many requests that are. Never waits for storage; work
        already in the buffers' streams comes first.

        With `stream`, all of it takes its place there, behind one gate: after everything before it on the
        stream, before everything after. Returns a BatchTransfer at once, whose `result()` is the BatchResult;
        these requests are the batch's no longer. A request that fails leaves its bytes undefined, and later
        work on the stream goes on. Raises ArgumentError where nothing has been added, or the stream is
        another device's than a buffer.
        """
        if stream is None:
            self._wait_for_buffers()
            return self._locked(lambda _: self._driver.submit())

        def apart(_: GivenUp) -> tuple[Driver, list[Group]]:
            driver = self._driver
            if driver.under_way:
                raise ArgumentError(
                    "requests of the batch run already: wait() for them before others go into a stream"
                )
            if not (groups := driver.added):
                raise ArgumentError("nothing has been added that could go into the stream")
            self._driver = Driver(self.capacity, self.depth, use_uring=self._uring)
            self._to_wait.clear()
            return driver, groups

        transfer = put(*self._locked(apart), stream)
        self._in_stream.append(transfer)
        return transfer

    def _wait_for_buffers(self) -> None:
        while self._to_wait:
            self._to_wait[-1].wait()
            self._to_wait.pop()

    def wait(self, min_n: int | None = None, timeout: float | None = None) -> BatchResult:
        """Start what has been added, wait for `min_n` results (None: all of them) or `timeout`
        seconds, and take what is there.

        With min_n=0 it only looks. More requests than the depth are started as others end, inside `wait`. A
        result is given out once; fewer than `min_n` come back when time is up or nothing is left.
        """
        if min_n is not None and min_n < 0:
            raise ArgumentError(f"min_n={min_n}: give 0 or more")
        THREADS.help()
        self._wait_for_buffers()

        def take(given_up: GivenUp) -> BatchResult:
            self._driver.run(min_n, timeout, given_up)
            if self._closed:
                raise ClosedError("the batch was closed while it was waited for")
            if given_up():
                raise ClosedError(
                    "the wait was interrupted"
                )  # heard by no one: results stay for the next wait
            return self._driver.retrieve()

        return self._locked(take)

    def __iter__(self) -> Iterator[BatchEvent]:
        """Every request as it ends, until none is left."""
        while self.outstanding:
            yield from self.wait(min_n=1)

    def cancel(self, ids: IntArrayLike | None = None) -> int:
        """Cancel requests (`ids`, or all) that no one works on yet; they end as
        "cancelled". Returns how many.

        What runs already goes on: `wait` reports it.
        """
        import numpy as np

        wanted = None if ids is None else np.atleast_1d(integers(ids, "ids"))
        return self._locked(lambda _: self._driver.cancel(wanted))

    # what is known

    @property
    def receipt(self) -> Receipt:
        """The sum of what the batch has moved so far, in streams by what has ended there: bytes per backend
        and reason, retries, evidence."""
        self._own()
        ended = [t for t in self._in_stream if t.done()]
        self._in_stream = [t for t in self._in_stream if t not in ended]
        self._moved += [t.receipt for t in ended if t.receipt is not None]
        with self._driver.lock:
            own = self._driver.tally.receipt()
        return total([*self._moved, own]) if self._moved else own

    @property
    def outstanding(self) -> int:
        """Requests whose results have not been taken."""
        return self._driver.outstanding

    @property
    def running(self) -> int:
        """Requests that have been started and have not ended, those given up by a timeout included."""
        return self._driver.under_way

    @property
    def method(self) -> Literal["io_uring", "threads"]:
        """What carries out plain direct requests."""
        return "io_uring" if self._uring else "threads"

    @property
    def closed(self) -> bool:
        return self._closed

    # lifetime

    def close(self) -> None:
        """Cancel what has not begun, wait for what runs, and let go of everything. Closing twice is fine."""
        if self._pid != os.getpid():
            self._closed = True
            self._driver.abandon()
        elif not self._closed:
            uninterrupted(self._close, self._driver.scheduler)

    def _close(self, _: GivenUp) -> None:
        with self._driver.lock:
            if self._closed:
                return
            try:
                self._driver.cancel(None)
                self._driver.drain()
            finally:
                self._closed = True
                self._driver.close()

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Carry out what has been added and raise the first error whose result nobody took;
        after an exception, `close`."""
        try:
            if kind is None and not self._closed and self.outstanding:
                self.wait().check()
        finally:
            self.close()

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if at_exit():
            # No other thread runs any more to end what is waited for; `_settle` was there before.
            return
        try:
            self.close()
        except (AttributeError, TypeError, OSError, NobounceError):
            return  # a batch that was never made, or an interpreter that is going down

    def _own(self) -> None:
        """Before a lock is taken: in a forked child it may be held by a thread that is not there."""
        if self._pid != os.getpid():
            raise forked.error("batch")

    def _guard(self) -> None:
        self._own()
        if self._closed:
            raise ClosedError("the batch is closed")

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.outstanding} of {self.capacity}"
        return f"<nobounce.Batch {state}, {self.method}>"


_open: weakref.WeakSet[Batch] = weakref.WeakSet()


def _settle() -> None:
    """At exit, while threads still run: what has not begun is cancelled, and what runs is waited for."""
    for batch in list(_open):
        if batch._closed or batch._pid != os.getpid() or not batch._driver.lock.acquire(blocking=False):
            continue  # a thread that uses it settles it itself
        driver = batch._driver
        try:
            with contextlib.suppress(OSError, NobounceError):
                driver.cancel(None)
                driver.drain()
        finally:
            driver.lock.release()


atexit.register(_settle)
