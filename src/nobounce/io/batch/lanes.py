"""Which lane carries a request: the ring for plain direct ones, I/O threads for the rest; and in
which order writes start.

Direct writes and writes through the page cache take turns: a page that holds bytes of both could
be written back over the direct ones (judge.py). A batch's writes therefore run in phases of one
kind; reads run beside them.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nobounce.clock import THREADS
from nobounce.errors import InternalError
from nobounce.io.batch.gather import GatherLane
from nobounce.io.batch.group import Group
from nobounce.io.batch.table import QUEUED, Table
from nobounce.io.batch.threads import WIDTH, Item, Outcome, ThreadLane
from nobounce.io.batch.uring import UringLane
from nobounce.io.batch.windows import Ended
from nobounce.io.engine import Engine
from nobounce.io.strategy import URING_NBYTES
from nobounce.io.target import Chunk
from nobounce.route import many

if TYPE_CHECKING:
    import numpy as np

    from nobounce.clock import Condition

    Array = np.ndarray[Any, Any]
    Parts = list[tuple[Group, Array]]


LOOK_SECONDS = 0.1
"""A wait comes back at least so often, so that its caller sees whether anyone still waits for it."""
GATHER = 256
"""Ends of the ring that are gathered before they are looked at: more would let errors and
statistics wait too long."""


class Lanes:
    """The lanes of one batch, made when they are first needed."""

    def __init__(self, table: Table, depth: int, lock: threading.Lock, *, use_uring: bool) -> None:
        self._table, self._depth, self._lock = table, depth, lock
        self._use_uring = use_uring
        self.pool: Engine | None = None
        self._uring: UringLane | None = None
        self._threads: ThreadLane | None = None
        self._gather: GatherLane | None = None
        self._ended: Condition | None = None
        """Notified of what I/O threads have ended, in either lane."""
        self._fresh = False
        """Whether the threads that gather have not been told of all that there is."""
        self._phases: deque[tuple[bool, Parts]] = deque()
        self._phase, self._phase_running = True, 0
        self.closed = False
        self._changed = threading.Condition(lock)
        self._waiter = False
        """Whether a thread waits for the lanes. It alone takes ends out of them: it would
        miss what another takes."""
        self._shared = False
        """Whether several threads have waited at once: then each end wakes the one who waits."""

    # in

    def start(self, group: Group, slots: Array) -> None:
        """Have these carried out; `flush` hands them to the kernel."""
        direct = self._table.kind[slots] == many.DIRECT
        if not direct.all():
            group.note_cold()
        if group.op == "read":
            self._launch(group, slots)
            return
        if group.most_gathered and group.target.ring is not None:
            direct |= self._gathering().takes(group, slots)[0]  # past the page cache, if not past the host
        for is_direct, part in ((True, slots[direct]), (False, slots[~direct])):
            if len(part):
                self._phases.append((is_direct, [(group, part)]))
        self._advance()

    def ended(self, group: Group, count: int) -> None:
        """So many requests of the group have ended."""
        if group.op == "write":
            self._phase_running -= count

    def _advance(self) -> None:
        while self._phases and (self._phase_running == 0 or self._phases[0][0] == self._phase):
            self._phase, parts = self._phases.popleft()
            for group, slots in parts:
                self._phase_running += len(slots)
                self._launch(group, slots)

    def _launch(self, group: Group, slots: Array) -> None:
        t = self._table
        if group.plain and self._ring() is not None:
            ours = (t.kind[slots] == many.DIRECT) & (t.nbytes[slots] <= URING_NBYTES)
            chosen = slots if ours.all() else slots[ours]
            lane = self._uring
            if len(chosen) and lane is not None:
                if group.target.populate:
                    self._populate(group, chosen)
                lane.put(chosen, group.op, group.target.direct_fd, group.target.address)
                slots = slots[~ours]
        if len(slots) and group.most_gathered:
            gather = self._gathering()
            chosen, how = gather.takes(group, slots)
            if chosen.all():
                gather.put(group, slots, how)
                slots = slots[:0]
            elif chosen.any():
                gather.put(group, slots[chosen], how[chosen])
                slots = slots[~chosen]
            self._fresh = True
        if len(slots):
            self._to_threads(group, slots)

    def _populate(self, group: Group, slots: Array) -> None:
        """Have the pages made that these reads go to: btrfs serves untouched memory from the page cache.
        Nearly packed ones at once."""
        t, direct = self._table, group.target.direct
        if direct is None:
            return
        first, nbytes = t.buffer_offset[slots], t.nbytes[slots]
        start, end = int(first.min()), int((first + nbytes).max())
        packed = end - start <= 2 * int(nbytes.sum())
        places = [(start, end - start)] if packed else zip(first.tolist(), nbytes.tolist(), strict=True)
        for at, size in places:
            direct.prepare(group.target.device, group.target.address + at, size)

    def repeat(self, group: Group, slots: Array) -> None:
        """Have these carried out once more, as the group has learnt to."""
        if len(slots):
            self._launch(group, slots)

    def again(self, group: Group, slots: Array) -> None:
        """The page cache does not hold these after all: they go the way they would have gone without it."""
        if not len(slots):
            return
        t = self._table
        t.kind[slots], t.reason[slots] = group.missed(t.row[slots])
        self._launch(group, slots)

    def _to_threads(self, group: Group, slots: Array) -> None:
        t = self._table
        columns = (t.kind, t.reason, t.file_offset, t.nbytes, t.buffer_offset)
        rows = zip(slots.tolist(), *(c[slots].tolist() for c in columns), strict=True)
        self._lane().put([Item(slot, group, *row) for slot, *row in rows])

    def finish(self, group: Group, slot: int, done: int, rest: Chunk) -> None:
        """What the ring left of a request goes on with the threads."""
        t = self._table
        place = int(t.file_offset[slot]), int(t.nbytes[slot]), int(t.buffer_offset[slot])
        self._lane().put([Item(slot, group, int(t.kind[slot]), -1, *place, done, (rest,))])

    def divert(self, group: Group, key: int) -> None:
        """The direct path has failed for this group: the threads send what has not begun through fallback."""
        import numpy as np

        if self._uring is not None:
            t = self._table
            mine = np.flatnonzero((t.group == key) & (t.status == QUEUED))
            self._to_threads(group, self._uring.withdraw(mine))

    def _ring(self) -> UringLane | None:
        if (
            self._uring is None
            and self._use_uring
            and self.pool is not None
            and self.pool.scheduler is THREADS
        ):
            try:
                self._uring = UringLane(self._depth, self._table)
            except OSError:
                self._use_uring = False  # no memory or descriptors left for a ring: threads do it
        return self._uring

    def _lane(self) -> ThreadLane:
        if self._threads is None:
            pool, ended = self._shared_ends()
            self._threads = ThreadLane(pool, min(WIDTH, self._depth), ended, self._ring_bell)
        return self._threads

    def _gathering(self) -> GatherLane:
        if self._gather is None:
            pool, ended = self._shared_ends()
            self._gather = GatherLane(pool, self._table, ended, self._ring_bell)
        return self._gather

    def _shared_ends(self) -> tuple[Engine, Condition]:
        if self.pool is None:
            raise InternalError("a request without a pool")
        if self._ended is None:
            self._ended = self.pool.scheduler.condition()
        return self.pool, self._ended

    def _ring_bell(self) -> None:
        lane = self._uring
        if lane is not None:
            lane.ring_bell()

    # out

    def take_ring(self) -> tuple[Array, Array] | None:
        """(slots, results) that the ring has ended."""
        lane = self._uring
        if self._waiter:
            return None
        return lane.take() if lane is not None and (lane.running or lane.reaped) else None

    def take_threads(self) -> list[Outcome]:
        """What the threads have ended."""
        if self._waiter or self._threads is None or not self._threads.busy:
            return []
        return self._threads.take()

    def take_gathered(self) -> list[Ended]:
        """What has been gathered."""
        if self._waiter or self._gather is None or not self._gather.busy:
            return []
        return self._gather.take()

    def refill(self) -> None:
        """Put what has room into the ring; `flush` or `block` hands it over."""
        if self._phases:
            self._advance()
        if self._uring is not None:
            self._uring.fill()

    def flush(self, *, waits: bool = True) -> None:
        """Hand over to the kernel what lies in the ring, and to I/O threads what is to be gathered; `waits`:
        the caller is about to do its part of that."""
        if self._uring is not None:
            self._uring.flush()
        if self._fresh and self._gather is not None:
            self._fresh = False
            self._gather.start(int(waits))

    def leave(self) -> None:
        """The caller stops waiting: what it would have done is the pool's."""
        self.flush(waits=False)
        if self._gather is not None and self._gather.queued and not self._gather.served:
            self._gather.start(0)

    def block(self, need: int, timeout: float | None) -> None:
        """Wait for about `need` ends, at most `timeout` seconds, the batch's lock let go
        meanwhile; or while another waits."""
        if self._waiter:
            self._shared = True
            self._changed.wait(self._slice(timeout))
            return
        self._waiter = True
        try:
            self._block(need, timeout)
        finally:
            self._waiter = False
            self._changed.notify_all()

    def _block(self, need: int, timeout: float | None) -> None:
        self.flush()
        uring, gather = self._uring, self._gather
        if gather is not None and gather.queued:
            if timeout is None:
                with self._unlocked():
                    gather.work(LOOK_SECONDS)
                return
            if not gather.served:
                gather.start(0)
        busy = self._threads_busy()
        if busy:
            with self._unlocked():
                THREADS.help()
        if uring is not None and busy:
            uring.make_bell()
            if self._threads_ready():
                return  # it ended before there was a bell to ring
        if uring is not None and uring.reaped:
            return
        if uring is not None and uring.running:
            self._block_on_ring(uring, 1 if self._shared else min(need, GATHER), timeout, busy)
        elif busy and self._ended is not None:
            with self._unlocked():
                self._wait_for_threads(self._ended, self._slice(timeout))
        else:
            raise InternalError(f"{need} requests of the batch are waited for and nobody works on them")

    def _wait_for_threads(self, ended: Condition, timeout: float | None) -> None:
        gather = self._gather
        try:
            if gather is not None:
                gather.waited_for = True
            with ended.mutex:
                ended.wait_for(lambda: self._threads_ready() or not self._threads_busy(), timeout)
        finally:
            if gather is not None:
                gather.waited_for = False

    def _threads_busy(self) -> bool:
        return any(lane is not None and lane.busy > 0 for lane in (self._threads, self._gather))

    def _threads_ready(self) -> bool:
        return any(lane is not None and lane.ready for lane in (self._threads, self._gather))

    def _slice(self, timeout: float | None) -> float | None:
        """Not in virtual time, where no one is interrupted and each wake-up is a step of the schedule."""
        if self.pool is None or self.pool.scheduler is not THREADS:
            return timeout
        return LOOK_SECONDS if timeout is None else min(timeout, LOOK_SECONDS)

    def _block_on_ring(self, uring: UringLane, need: int, timeout: float | None, busy: bool) -> None:
        """Wait, and refill the ring between two waits: until storage is at work
        again nothing else is done."""
        gathered = 0
        while True:
            uring.prepare(need - gathered, also_bell=busy)
            with self._unlocked():
                uring.wait(self._slice(timeout))
            if self.closed:
                return
            gathered += uring.reap()
            busy = busy or self._threads_busy()
            if gathered >= need or timeout is not None or busy or self._shared or not uring.queued:
                return
            uring.fill()

    @contextlib.contextmanager
    def _unlocked(self) -> Iterator[None]:
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()

    def metered(self) -> tuple[int, int] | None:
        """What the kernel's counters of the I/O threads moved by; None: not known."""
        return self._threads.take_metered() if self._threads is not None else (0, 0)

    # given up

    def withdraw(self, wanted: Array) -> Array:
        """Take those of these that nothing works on yet out of every queue; returns them."""
        import numpy as np

        gone: list[Array] = [np.zeros(0, np.int64)]
        phases: deque[tuple[bool, Parts]] = deque()
        for direct, parts in self._phases:
            kept: Parts = []
            for group, slots in parts:
                out = np.isin(slots, wanted)
                gone.append(slots[out])
                self._phase_running += int(out.sum())  # `ended` will take them away again
                if not out.all():
                    kept.append((group, slots[~out]))
            if kept:
                phases.append((direct, kept))
        self._phases = phases
        if self._uring is not None:
            gone.append(self._uring.withdraw(wanted))
        if self._gather is not None:
            gone.append(self._gather.withdraw(wanted))
        if self._threads is not None:
            chosen = set(wanted.tolist())
            gone.append(np.array(self._threads.withdraw(chosen.__contains__), np.int64))
        return np.concatenate(gone)

    def give_up(self, slots: Array) -> None:
        """Ask the kernel to cancel these, if it works on them."""
        if self._uring is not None:
            self._uring.cancel(slots)

    def close(self) -> None:
        """Give the ring back; nothing may be under way, but in a forked child, where it is the parent's."""
        self.closed = True
        uring, self._uring = self._uring, None
        self._threads = self._gather = None
        if uring is not None:
            uring.close()
