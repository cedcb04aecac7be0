"""What drives a batch: requests into the lanes, ends out of them. Every method is called with the batch's lock held, which is
let go only while a thread waits.

Nothing works behind the caller's back but the storage and the I/O threads: the ring is refilled inside `run`.
"""

from __future__ import annotations

import errno
import math
import os
from collections import deque
from typing import TYPE_CHECKING, Any

from nobounce.clock import THREADS, Lock
from nobounce.errors import (
    InternalError,
    TransferCancelledError,
    TransferTimeoutError,
    printable,
)
from nobounce.io.batch_group import URING_NBYTES, Group
from nobounce.io.batch_receipt import Tally
from nobounce.io.batch_table import (
    ADDED,
    CANCELLED,
    COMPLETE,
    FAILED,
    FALLBACK,
    FASTPATH,
    INVALID,
    QUEUED,
    RUNNING,
    TIMEOUT,
    BatchResult,
    Table,
    gather,
)
from nobounce.io.batch_threads import WIDTH, Item, Outcome, ThreadLane
from nobounce.io.batch_uring import UringLane
from nobounce.io.engine import Engine
from nobounce.io.job import RETRIED
from nobounce.io.receipt import Retry
from nobounce.io.target import Chunk
from nobounce.route import many
from nobounce.route.judge import DIRECT

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


class Driver:
    """The requests of one batch, their lanes and their results."""

    def __init__(self, capacity: int, depth: int, lock: Lock, *, use_uring: bool) -> None:
        self.table, self.tally = Table(capacity), Tally()
        self.cookies: dict[int, Any] = {}
        self.pool: Engine | None = None
        self._depth, self._lock, self._use_uring = depth, lock, use_uring
        self._uring: UringLane | None = None
        self._threads: ThreadLane | None = None
        self._groups: dict[int, Group] = {}
        self._next_group = 0
        self._added: list[tuple[int, Array, float]] = []
        self._ready: deque[Array] = deque()
        self._ready_count = 0
        self.under_way = 0
        """Requests submitted that have not ended, zombies included."""
        self._zombies: set[int] = set()
        """Slots whose timeout has been reported while they still run."""
        self._errors: dict[int, Exception] = {}
        self._judges: dict[int, Group] = {}
        self._timed = False
        self._phases: deque[tuple[bool, list[tuple[Group, Array]]]] = deque()
        self._phase, self._phase_running = True, 0

    @property
    def outstanding(self) -> int:
        return self.table.used - int(self.table.left.sum()) if self._zombies else self.table.used

    @property
    def _open(self) -> int:
        """Requests without a result yet."""
        return self.outstanding - self._ready_count

    @property
    def _scheduler(self) -> Any:
        return self.pool.scheduler if self.pool is not None else THREADS

    # in

    def add(self, group: Group, ids: Array, timeout: float | None, pool: Engine) -> None:
        """Requests of one call into the table. Bad ones and empty ones have ended already."""
        self.pool = pool
        t, answer, n = self.table, group.answer, len(ids)
        if n == 0:
            group.release()
            return
        slots = t.take(n)
        key, self._next_group = self._next_group, self._next_group + 1
        t.id[slots], t.group[slots] = ids, key
        t.file_offset[slots], t.nbytes[slots], t.buffer_offset[slots] = (
            group.file_offset,
            group.nbytes,
            group.buffer_offset,
        )
        t.kind[slots], t.reason[slots] = answer.kinds, answer.reasons
        t.done[slots] = t.errno[slots] = t.way[slots] = 0
        t.deadline[slots] = math.inf
        bad = (answer.kinds == many.INVALID) | (answer.kinds == many.REFUSED)
        empty = answer.kinds == many.EMPTY
        if bad.any():
            t.errno[slots[answer.kinds == many.INVALID]] = errno.EINVAL
            t.errno[slots[answer.kinds == many.REFUSED]] = errno.EOPNOTSUPP
            self._judges.update(dict.fromkeys(slots[bad].tolist(), group))
            self._give_out(slots[bad], INVALID)
        if empty.any():
            self._give_out(slots[empty], COMPLETE)
        good = slots[~(bad | empty)]
        moving = len(good)
        if moving or empty.any():
            self.tally.added(
                group, moving + int(empty.sum()), int(t.nbytes[good].sum()), self._scheduler.now()
            )
        if not moving:
            group.release()
            return
        t.status[good] = ADDED
        group.left = moving
        self._groups[key] = group
        self._added.append((key, good, math.inf if timeout is None else timeout))

    def submit(self) -> int:
        """Start what has been added."""
        if not self._added:
            return 0
        added, self._added = self._added, []
        now = self._scheduler.now()
        groups = [self._groups[key] for key, _, _ in added]
        self.tally.begin(groups, now)
        count = 0
        for (_, slots, timeout), group in zip(added, groups, strict=True):
            count += len(slots)
            self.under_way += len(slots)
            self.table.status[slots] = QUEUED
            if timeout != math.inf:
                self.table.deadline[slots] = now + timeout
                self._timed = True
            direct = self.table.kind[slots] == many.DIRECT
            if not direct.all():
                group.note_cold()
            if group.op == "read":
                self._launch(group, slots)
            else:
                if direct.any():
                    self._phases.append((True, [(group, slots[direct])]))
                if not direct.all():
                    self._phases.append((False, [(group, slots[~direct])]))
        self._advance()
        if self._uring is not None:
            self._uring.fill()
        return count

    def _advance(self) -> None:
        """Start waiting writes: direct ones and those through the page cache never at the same time."""
        while self._phases and (self._phase_running == 0 or self._phases[0][0] == self._phase):
            self._phase, parts = self._phases.popleft()
            for group, slots in parts:
                self._phase_running += len(slots)
                self._launch(group, slots)

    def _launch(self, group: Group, slots: Array) -> None:
        t = self.table
        if group.plain and self._ring() is not None:
            ours = (t.kind[slots] == many.DIRECT) & (t.nbytes[slots] <= URING_NBYTES)
            chosen = slots if ours.all() else slots[ours]
            lane = self._uring
            if len(chosen) and lane is not None:
                lane.entries(chosen, group.op, group.target.direct_fd, group.target.address)
                lane.put(chosen)
                slots = slots[~ours]
        if len(slots):
            columns = (t.kind, t.reason, t.file_offset, t.nbytes, t.buffer_offset)
            rows = zip(slots.tolist(), *(c[slots].tolist() for c in columns), strict=True)
            self._lane().put([Item(slot, group, *row) for slot, *row in rows])

    def _ring(self) -> UringLane | None:
        if self._uring is None and self._use_uring and self._scheduler is THREADS:
            try:
                self._uring = UringLane(self._depth, self.table)
            except OSError:
                self._use_uring = False  # no memory or descriptors left for a ring: threads do it
        return self._uring

    def _lane(self) -> ThreadLane:
        if self._threads is None:
            if self.pool is None:
                raise InternalError("a request without a pool")
            self._threads = ThreadLane(self.pool, min(WIDTH, self._depth), self._ring_bell)
        return self._threads

    def _ring_bell(self) -> None:
        lane = self._uring
        if lane is not None:
            lane.ring_bell()

    # out

    def run(self, min_n: int | None, timeout: float | None) -> None:
        """Until `min_n` results are ready (None: all), nothing is left, or `timeout` seconds have passed."""
        now = self._scheduler.now
        limit = math.inf if timeout is None else now() + timeout
        while True:
            self._collect()
            opened = self._open
            if opened <= 0 or (min_n is not None and self._ready_count >= min_n):
                return
            until = limit if not self._timed else min(limit, self._first_deadline())
            left = until - now() if until != math.inf else None
            if limit != math.inf and limit <= now():
                return
            need = opened if min_n is None else min_n - self._ready_count
            self._block(need, None if left is None else max(0.0, left))
            if self._uring is None and self._threads is None:
                return  # closed by another thread meanwhile

    def drain(self) -> None:
        """Until nothing runs, zombies included."""
        while self.under_way:
            self._collect()
            if self.under_way:
                self._block(self.under_way, None)

    def _block(self, need: int, timeout: float | None) -> None:
        uring, threads = self._uring, self._threads
        busy = threads is not None and threads.busy > 0
        if uring is not None and threads is not None and busy:
            uring.make_bell()
            if threads.ready:
                return  # it ended before there was a bell to ring
        self._lock.release()
        try:
            if uring is not None and uring.running:
                uring.wait(need, timeout, also_bell=busy)
            elif threads is not None and busy:
                threads.wait(timeout)
            else:
                raise InternalError(f"{need} requests of the batch are waited for and nobody works on them")
        finally:
            self._lock.acquire()

    def _collect(self) -> None:
        """Take what has ended, start what has room."""
        lane = self._uring
        if lane is not None and lane.running:
            slots, results = lane.take()
            if len(slots):
                self._completions(slots, results)
        if self._threads is not None and self._threads.busy:
            for out in self._threads.take():
                self._outcome(out)
        if self._timed:
            self._expire()
        if self._phases:
            self._advance()
        if self._uring is not None and self._uring.queued:
            self._uring.fill()
        if not self.under_way and self.tally.measuring:
            metered: tuple[int, int] | None = (0, 0)
            if self._threads is not None:
                metered = self._threads.take_metered()
            self.tally.end(metered, self._scheduler)

    def _completions(self, slots: Array, results: Array) -> None:
        t = self.table
        full = results == t.nbytes[slots]
        good = slots if full.all() else slots[full]
        if len(good):
            t.done[good] = t.nbytes[good]
            t.way[good] = FASTPATH
            for group, part in self._by_group(good):
                first = part[0]
                nbytes = int(t.nbytes[part].sum())
                self.tally.direct(group, nbytes, int(t.file_offset[first]), int(t.buffer_offset[first]))
                self._ended(group, part, COMPLETE)
        if len(good) != len(slots):
            for slot, result in zip(slots[~full].tolist(), results[~full].tolist(), strict=True):
                self._odd(slot, result)

    def _by_group(self, slots: Array) -> list[tuple[Group, Array]]:
        if len(self._groups) == 1:
            return [(group, slots) for group in self._groups.values()]
        import numpy as np

        keys = self.table.group[slots]
        return [(self._groups[k], slots[keys == k]) for k in np.unique(keys).tolist()]

    def _odd(self, slot: int, result: int) -> None:
        """A ring entry that did not simply do what was asked."""
        t = self.table
        group = self._groups[int(t.group[slot])]
        nbytes, file_offset, at = int(t.nbytes[slot]), int(t.file_offset[slot]), int(t.buffer_offset[slot])
        target = group.target
        code = -result if result < 0 else 0
        if code and code not in (errno.EINTR, errno.EAGAIN) and code not in target.retry_errnos:
            status = FAILED
            if slot not in self._zombies:
                t.errno[slot] = code
                self._errors[slot] = group.error(code, file_offset, nbytes, "fastpath")
            self._ended_one(group, slot, status)
            return
        moved = max(result, 0)
        if moved:
            self.tally.short()
        if group.op == "read" and not code and (moved == 0 or file_offset + moved >= _size(target.direct_fd)):
            t.done[slot] = moved
            t.way[slot] = FASTPATH if moved else 0
            self.tally.direct(group, moved, file_offset, at)
            self._ended_one(group, slot, COMPLETE)
            return
        moved -= moved % target.align  # an unaligned place to go on from would fail for ever
        backend, reason = ("fastpath", DIRECT)
        if code in target.retry_errnos:
            group.failed_directly(code)
            self.tally.retries([Retry(file_offset, nbytes, code)])
            backend, reason = "fallback", RETRIED
        if moved:
            t.way[slot] |= FASTPATH
            self.tally.direct(group, moved, file_offset, at)
        rest = Chunk(backend, file_offset + moved, at + moved, nbytes - moved, reason)  # type: ignore[arg-type]
        item = Item(slot, group, int(t.kind[slot]), -1, file_offset, nbytes, at, moved, (rest,))
        self._lane().put([item])
        if backend == "fallback" and self._uring is not None:
            # The others of this file and device would fail in the same way: the threads send them through fallback.
            import numpy as np

            mine = np.flatnonzero((t.group == t.group[slot]) & (t.status == QUEUED))
            self._requeue(group, self._uring.withdraw(mine))

    def _requeue(self, group: Group, slots: Array) -> None:
        t = self.table
        columns = (t.kind, t.reason, t.file_offset, t.nbytes, t.buffer_offset)
        rows = zip(slots.tolist(), *(c[slots].tolist() for c in columns), strict=True)
        self._lane().put([Item(slot, group, *row) for slot, *row in rows])

    def _outcome(self, out: Outcome) -> None:
        """A request that an I/O thread has ended."""
        t, group = self.table, out.group
        self.tally.pieces(group, out.pieces)
        self.tally.retries(out.retries)
        way = int(t.way[out.slot])
        for piece in out.pieces:
            way |= FASTPATH if piece.backend == "fastpath" else FALLBACK
        if out.slot not in self._zombies:
            t.done[out.slot], t.way[out.slot] = out.done, way
        if any(p.backend == "fastpath" for p in out.pieces) and out.done < int(t.nbytes[out.slot]):
            self.tally.short()
        if out.error is not None and out.slot not in self._zombies:
            t.errno[out.slot] = out.errno
            self._errors[out.slot] = out.error
        self._ended_one(group, out.slot, COMPLETE if out.error is None else FAILED)

    def _ended_one(self, group: Group, slot: int, status: int) -> None:
        import numpy as np

        self._ended(group, np.array([slot]), status)

    def _ended(self, group: Group, slots: Array, status: int) -> None:
        """Requests that nothing works on any more, whatever became of them."""
        n = len(slots)
        self.under_way -= n
        if group.op == "write":
            self._phase_running -= n
        fresh = slots
        if self._zombies:
            late = [s for s in slots.tolist() if s in self._zombies]
            if late:
                fresh = slots[[s not in self._zombies for s in slots.tolist()]]
                self._zombies.difference_update(late)
                self._bury(late)
        if len(fresh):
            self._give_out(fresh, status)
        group.left -= n
        if group.left == 0:
            self._close_group(group)

    def _bury(self, late: list[int]) -> None:
        """Zombies that have ended at last: their slots are free, if their results have been taken."""
        import numpy as np

        gone = [s for s in late if self.table.left[s]]
        if gone:
            self.table.give(np.array(gone, np.int64))

    def _close_group(self, group: Group) -> None:
        for key, known in self._groups.items():
            if known is group:
                del self._groups[key]
                break
        try:
            group.finish()
        finally:
            self.tally.group_done(group)

    def _give_out(self, slots: Array, status: int) -> None:
        self.table.status[slots] = status
        self._ready.append(slots)
        self._ready_count += len(slots)

    # given up

    def cancel(self, ids: Array | None) -> int:
        """Requests that nothing works on yet end as cancelled; returns how many."""
        import numpy as np

        t = self.table
        wanted = t.status == ADDED
        wanted |= t.status == QUEUED
        if ids is not None:
            wanted &= np.isin(t.id, ids)
        return self._withdraw(np.flatnonzero(wanted), CANCELLED)

    def _withdraw(self, wanted: Array, status: int) -> int:
        """Take these out of every queue and end them; returns how many no one had begun."""
        import numpy as np

        if not len(wanted):
            return 0
        t = self.table
        gone = [wanted[t.status[wanted] == ADDED]]
        self.under_way += len(gone[0])  # `_ended` counts them as it counts all
        added = []
        for key, slots, timeout in self._added:
            kept = slots[~np.isin(slots, wanted)]
            if self._groups[key].op == "write":
                self._phase_running += len(slots) - len(kept)
            if len(kept):
                added.append((key, kept, timeout))
        self._added = added
        phases: deque[tuple[bool, list[tuple[Group, Array]]]] = deque()
        for direct, parts in self._phases:
            rest = []
            for group, slots in parts:
                out = np.isin(slots, wanted)
                gone.append(slots[out])
                self._phase_running += int(out.sum())
                if not out.all():
                    rest.append((group, slots[~out]))
            if rest:
                phases.append((direct, rest))
        self._phases = phases
        if self._uring is not None:
            gone.append(self._uring.withdraw(wanted))
        if self._threads is not None:
            # A request that ran in the ring before is not new any more: only whole ones are taken back.
            chosen = set(wanted.tolist())
            gone.append(np.array(self._threads.withdraw(chosen.__contains__), np.int64))
        ended = np.concatenate(gone)
        if len(ended):
            for group, part in self._by_group(ended):
                self._ended(group, part, status)
        return len(ended)

    def _open_slots(self) -> Array:
        status: Array = self.table.status
        return (status >= ADDED) & (status <= RUNNING)

    def _first_deadline(self) -> float:
        waiting = self.table.deadline[self._open_slots()]
        return float(waiting.min()) if len(waiting) else math.inf

    def _expire(self) -> None:
        """End requests whose time is up; what the kernel or a thread works on is reported, and goes on as a zombie."""
        import numpy as np

        t = self.table
        opened = self._open_slots() & (t.deadline != math.inf)
        if not opened.any():
            self._timed = False
            return
        late = np.flatnonzero(opened & (t.deadline <= self._scheduler.now()))
        if not len(late):
            return
        t.errno[late] = errno.ETIMEDOUT
        self._withdraw(late, TIMEOUT)
        running = late[t.status[late] != TIMEOUT]
        if len(running):
            self._zombies.update(running.tolist())
            self._give_out(running, TIMEOUT)
            if self._uring is not None:
                self._uring.cancel(running)

    # results

    def retrieve(self) -> BatchResult:
        """Everything that has ended and has not been given out, in the order of ending."""
        import numpy as np

        slots = np.concatenate(list(self._ready)) if self._ready else np.zeros(0, np.int64)
        self._ready.clear()
        self._ready_count = 0
        t = self.table
        failed = slots[t.status[slots] != COMPLETE]
        errors = {int(t.id[s]): self._error(s) for s in failed.tolist()}
        result = gather(t, slots, self.cookies, errors)
        if self._zombies:
            alive = np.array([s in self._zombies for s in slots.tolist()], bool)
            t.left[slots[alive]] = True
            slots = slots[~alive]
        t.give(slots)
        return result

    def _error(self, slot: int) -> Exception:
        t = self.table
        known = self._errors.pop(slot, None)
        if known is not None:
            return known
        place = int(t.file_offset[slot]), int(t.nbytes[slot]), int(t.buffer_offset[slot])
        group = self._judges.pop(slot, None)
        if group is not None:
            error = group.error_of(*place)
            if error is not None:
                error.add_note(f"request {int(t.id[slot])} of the batch")
                return error
        what = f"request {int(t.id[slot])} of the batch ({place[1]} bytes at offset {place[0]})"
        if t.status[slot] == TIMEOUT:
            return TransferTimeoutError(f"{what} has not ended in time")
        if t.status[slot] == CANCELLED:
            return TransferCancelledError(f"{what} was cancelled before it started")
        return InternalError(f"{what} failed without a reason: {printable(os.strerror(int(t.errno[slot])))}")

    # the end

    def close(self) -> None:
        """Nothing is under way: give the ring and whatever is still held back."""
        for group in list(self._groups.values()):
            group.release()
        self._groups.clear()
        uring, self._uring = self._uring, None
        self._threads = None
        if uring is not None:
            uring.close()

    def abandon(self) -> None:
        """In a forked child: what runs is the parent's, so only this process's own handles go."""
        self.close()


def _size(fd: int) -> int:
    return os.lseek(fd, 0, os.SEEK_END)
