"""What drives a batch: requests into the lanes, ends out of them. Every method is called with the batch's
lock held, which is let go only while a thread waits.

Nothing works behind the caller's back but the storage and the I/O threads: the ring is refilled inside `run`.
"""

from __future__ import annotations

import errno
import math
import os
import threading
from typing import TYPE_CHECKING, Any

from nobounce.clock import THREADS, Scheduler
from nobounce.io import hooks
from nobounce.io.batch.ends import Ends
from nobounce.io.batch.group import Group
from nobounce.io.batch.lanes import Lanes
from nobounce.io.batch.receipt import Tally
from nobounce.io.batch.results import Results
from nobounce.io.batch.table import (
    ADDED,
    CANCELLED,
    COMPLETE,
    INVALID,
    QUEUED,
    RUNNING,
    TIMEOUT,
    BatchResult,
    Table,
)
from nobounce.io.batch.windows import together
from nobounce.io.engine import Engine
from nobounce.route import many
from nobounce.uninterrupted import GivenUp

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


class Driver:
    """The requests of one batch, their lanes and their results."""

    def __init__(self, capacity: int, depth: int, *, use_uring: bool) -> None:
        self.lock = threading.Lock()
        self.table, self.tally = Table(capacity), Tally()
        self.pool: Engine | None = None
        self.results = Results(self.table)
        self._lanes = Lanes(self.table, depth, self.lock, use_uring=use_uring)
        self._ends = Ends(self.table, self.tally, self.results, self._lanes, lambda: self.scheduler)
        self._next_group = 0
        self._added: list[tuple[int, Array, float]] = []
        self._timed = False
        self.in_stream = False
        """Whether a stream has come to these requests: what is before them there has ended."""

    @property
    def under_way(self) -> int:
        """Requests submitted that have not ended, those given up by a timeout included."""
        return self._ends.under_way

    @property
    def outstanding(self) -> int:
        return self.table.used - int(self.table.left.sum()) if self._ends.zombies else self.table.used

    @property
    def _open(self) -> int:
        """Requests without a result yet."""
        return self.outstanding - self.results.count

    @property
    def added(self) -> list[Group]:
        """The groups of requests that have not been submitted."""
        return [self._ends.groups[key] for key, _, _ in self._added]

    @property
    def scheduler(self) -> Scheduler:
        return self.pool.scheduler if self.pool is not None else THREADS

    # in

    def add(self, group: Group, ids: Array, timeout: float | None, pool: Engine) -> None:
        """Requests of one call into the table. Bad ones and empty ones have ended already."""
        import numpy as np

        self.pool = self._lanes.pool = pool
        t, answer, n = self.table, group.answer, len(ids)
        if n == 0:
            group.release()
            return
        slots = t.take(n)
        key, self._next_group = self._next_group, self._next_group + 1
        t.id[slots], t.group[slots], t.row[slots] = ids, key, np.arange(n)
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
            self.results.judges.update(dict.fromkeys(slots[bad].tolist(), group))
            self.results.add(slots[bad], INVALID)
            if hooks.observers:
                for refusals, n in group.refusals():
                    hooks.batch_refused(group, refusals, n)
            self._ends.moved.ended(group, slots[bad], INVALID, self.scheduler.now())
        if empty.any():
            self.results.add(slots[empty], COMPLETE)
        good = slots[~(bad | empty)]
        moving = len(good)
        if moving or empty.any():
            self.tally.added(
                group, moving + int(empty.sum()), int(t.nbytes[good].sum()), self.scheduler.now()
            )
        if not moving:
            group.release()
            if hooks.watchers:
                hooks.batch_done(group, self.scheduler.now())
            return
        t.status[good] = ADDED
        group.left = moving
        self._ends.groups[key] = group
        self._added.append((key, good, math.inf if timeout is None else timeout))

    def submit(self, *, waits: bool = False) -> int:
        """Start what has been added; `waits`: the caller is about to do its part."""
        if not self._added:
            return 0
        if not self.in_stream:
            for group in self.added:
                group.view.wait()  # mostly waited for by now, but others may add while one waits
        added, self._added = self._added, []
        now = self.scheduler.now()
        groups = [self._ends.groups[key] for key, _, _ in added]
        self.tally.begin(groups, now)
        count = 0
        for (_, slots, timeout), group in zip(added, groups, strict=True):
            count += len(slots)
            group.submitted_at = now
            if hooks.watchers:
                hooks.batch_submitted(group, now)
            self._ends.under_way += len(slots)
            self.table.status[slots] = QUEUED
            if timeout != math.inf:
                self.table.deadline[slots] = now + timeout
                self._timed = True
            self._lanes.start(group, slots)
        self._lanes.refill()
        self._lanes.flush(waits=waits)
        return count

    # out

    def run(self, min_n: int | None, timeout: float | None, given_up: GivenUp) -> None:
        """Until `min_n` results are ready (None: all), nothing is left, `timeout` seconds have
        passed, or it is given up."""
        now = self.scheduler.now
        limit = math.inf if timeout is None else now() + timeout
        while True:
            self.submit(waits=min_n != 0)  # others may add while this thread waits
            self._collect()
            opened = self._open
            if opened <= 0 or (min_n is not None and self.results.count >= min_n):
                self._lanes.leave()
                return
            if limit <= now():
                self._lanes.leave()
                return
            until = min(limit, self._first_deadline()) if self._timed else limit
            left = None if until == math.inf else max(0.0, until - now())
            self._lanes.block(opened if min_n is None else min_n - self.results.count, left)
            if self._lanes.closed or given_up():
                return  # closed by another thread

    def drain(self) -> None:
        """Until nothing runs, zombies included."""
        while self.under_way:
            self._collect()
            if self.under_way:
                self._lanes.block(self.under_way, None)

    def _collect(self) -> None:
        """Take what has ended, start what has room."""
        found = self._lanes.take_ring()
        if found is not None and len(found[0]):
            self._lanes.refill()
            self._lanes.flush()  # the storage goes on while the ends are looked at
            self._ends.of_ring(*found)
        for out in self._lanes.take_threads():
            self._ends.of_thread(out)
        for part in together(self._lanes.take_gathered()):
            self._ends.of_gathering(part)
        if self._timed:
            self._expire()
        self._lanes.refill()
        if not self.under_way and self.tally.measuring:
            self.tally.end(self._lanes.metered(), self.scheduler)

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
        fresh = wanted[self.table.status[wanted] == ADDED]
        for group, part in self._ends.by_group(fresh) if len(fresh) else ():
            self._ends.under_way += len(part)  # `_ended` and `ended` count them as they count all
            self._lanes.ended(group, -len(part))
        added = []
        for key, slots, timeout in self._added:
            kept = slots[~np.isin(slots, wanted)]
            if len(kept):
                added.append((key, kept, timeout))
        self._added = added
        ended = np.concatenate([fresh, self._lanes.withdraw(wanted)])
        if status == CANCELLED:
            self.table.errno[ended] = errno.ECANCELED
        for group, part in self._ends.by_group(ended) if len(ended) else ():
            self._ends.ended(group, part, status)
        return len(ended)

    def _open_slots(self) -> Array:
        status: Array = self.table.status
        return (status >= ADDED) & (status <= RUNNING)

    def _first_deadline(self) -> float:
        waiting = self.table.deadline[self._open_slots()]
        return float(waiting.min()) if len(waiting) else math.inf

    def _expire(self) -> None:
        """End requests whose time is up; what the kernel or a thread works on is reported,
        and goes on as a zombie."""
        import numpy as np

        t = self.table
        opened = self._open_slots() & (t.deadline != math.inf)
        if not opened.any():
            self._timed = False
            return
        late = np.flatnonzero(opened & (t.deadline <= self.scheduler.now()))
        if not len(late):
            return
        t.errno[late] = errno.ETIMEDOUT
        self._withdraw(late, TIMEOUT)
        running = late[t.status[late] != TIMEOUT]
        if len(running):
            self._ends.zombies.update(running.tolist())
            self.results.add(running, TIMEOUT)
            self._lanes.give_up(running)

    def retrieve(self) -> BatchResult:
        """Everything that has ended and has not been given out, in the order of ending."""
        return self.results.retrieve(self._ends.zombies)

    # the end

    def close(self) -> None:
        """Nothing is under way: give the ring and whatever is still held back."""
        for group in list(self._ends.groups.values()):
            group.release()
        self._ends.groups.clear()
        self._lanes.close()

    def abandon(self) -> None:
        """In a forked child: what runs is the parent's, so only this process's own handles go."""
        self.close()


def _size(fd: int) -> int:
    return os.lseek(fd, 0, os.SEEK_END)
