"""What the end of a request means: what it has moved, whether the rest of it goes another way,
and when its group is done."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

from nobounce.clock import Scheduler
from nobounce.errors import DeviceError, TransferError
from nobounce.io import hooks
from nobounce.io.batch.group import Group
from nobounce.io.batch.lanes import Lanes
from nobounce.io.batch.moved import Moved
from nobounce.io.batch.receipt import Tally
from nobounce.io.batch.results import Results
from nobounce.io.batch.table import COMPLETE, FAILED, Table
from nobounce.io.batch.threads import Outcome
from nobounce.io.batch.windows import DIRECT as PAST_CACHE
from nobounce.io.batch.windows import TRIED, Ended
from nobounce.io.receipt import Retry
from nobounce.io.target import Chunk
from nobounce.io.worker import RETRIED
from nobounce.route.judge import DIRECT

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    Array = np.ndarray[Any, Any]


class Ends:
    """What lanes report, brought into the table, the tally and the results. Called
    with the batch's lock held."""

    def __init__(
        self, table: Table, tally: Tally, results: Results, lanes: Lanes, scheduler: Callable[[], Scheduler]
    ) -> None:
        self.table, self.results, self._tally, self._lanes = table, results, tally, lanes
        self._scheduler = scheduler
        self.moved = Moved(table, tally)
        self.groups: dict[int, Group] = {}
        self.under_way = 0
        """Requests submitted that have not ended, zombies included."""
        self.zombies: set[int] = set()
        """Slots whose timeout has been reported while they still run."""

    def by_group(self, slots: Array) -> list[tuple[Group, Array]]:
        """These requests, group by group."""
        if len(self.groups) == 1:
            return [(group, slots) for group in self.groups.values()]
        import numpy as np

        keys = self.table.group[slots]
        return [(self.groups[k], slots[keys == k]) for k in np.unique(keys).tolist()]

    # of the ring

    def of_ring(self, slots: Array, results: Array) -> None:
        """Direct requests that the ring has ended."""
        t = self.table
        full = results == t.nbytes[slots]
        good = slots if full.all() else slots[full]
        if len(good):
            for group, part in self.by_group(good):
                served = self.moved.whole(group, part)
                if len(served) and group.target.only_direct:
                    part = part[[slot not in served for slot in part.tolist()]]
                    for slot in served.tolist():
                        self._refuted(group, slot)
                if len(part):
                    self.ended(group, part, COMPLETE)
        if len(good) != len(slots):
            for slot, result in zip(slots[~full].tolist(), results[~full].tolist(), strict=True):
                self._odd(slot, result)

    def _odd(self, slot: int, result: int) -> None:
        """A ring entry that did not simply do what was asked."""
        t = self.table
        group = self.groups[int(t.group[slot])]
        nbytes, file_offset, at = int(t.nbytes[slot]), int(t.file_offset[slot]), int(t.buffer_offset[slot])
        target = group.target
        code = -result if result < 0 else 0
        if code and code not in (errno.EINTR, errno.EAGAIN) and code not in target.retry_errnos:
            status = FAILED
            if slot not in self.zombies:
                t.errno[slot] = code
                self.results.errors[slot] = target.error(code, file_offset, nbytes, "fastpath")
            self._ended_one(group, slot, status)
            return
        moved = max(result, 0)
        if moved:
            self._tally.short()
        if group.op == "read" and not code and (moved == 0 or file_offset + moved >= _size(target.direct_fd)):
            served = self.moved.all_there_is(group, slot, moved)
            if served and group.target.only_direct:
                self._refuted(group, slot)
            else:
                self._ended_one(group, slot, COMPLETE)
            return
        moved -= moved % target.align  # an unaligned place to go on from would fail for ever
        backend, reason = ("fastpath", DIRECT)
        if code in target.retry_errnos:
            group.failed_directly(code)
            self._tally.retries([Retry(file_offset, nbytes, code)])
            backend, reason = "fallback", RETRIED
        if moved:
            self.moved.a_part(group, slot, moved)
        rest = Chunk(backend, file_offset + moved, at + moved, nbytes - moved, reason)  # type: ignore[arg-type]
        self._lanes.finish(group, slot, moved, rest)
        if backend == "fallback":
            self._lanes.divert(group, int(t.group[slot]))

    def _refuted(self, group: Group, slot: int) -> None:
        """A request that had to go direct and did not."""
        t = self.table
        error = group.denial(int(t.file_offset[slot]), int(t.nbytes[slot]))
        if error is not None and slot not in self.zombies:
            t.errno[slot] = errno.EOPNOTSUPP
            self.results.errors[slot] = error
        self._ended_one(group, slot, FAILED)

    # of the I/O threads

    def of_thread(self, out: Outcome) -> None:
        """A request that an I/O thread has ended."""
        late = out.slot in self.zombies
        self.moved.by_thread(out, late=late)
        if out.error is not None and not late:
            self.table.errno[out.slot] = out.errno
            self.results.errors[out.slot] = out.error
        self._ended_one(out.group, out.slot, COMPLETE if out.error is None else FAILED)

    def of_gathering(self, found: Ended) -> None:
        """Requests that were read through host memory, many at once."""
        import numpy as np

        group, slots, results, t = found.group, found.slots, found.results, self.table
        if found.error is not None:
            for slot in slots.tolist():
                self._failed(group, slot, found.error)
            return
        full = results == t.nbytes[slots]
        good = slots if full.all() else slots[full]
        if len(good):
            late = None
            if self.zombies:
                late = np.isin(good, list(self.zombies))
            self.moved.gathered(group, good, t.nbytes[good], late=late)
            self.ended(group, good, COMPLETE)
        if len(good) == len(slots):
            return
        slots, results = slots[~full], results[~full]
        if found.how == TRIED:
            unasked = results == -errno.EOPNOTSUPP
            if unasked.any():
                group.nowait = (
                    False  # not a question that this file system answers: the page cache is asked of each
                )
                mine = slots[unasked]
                held = group.holds(t.row[mine])
                self._lanes.repeat(group, mine[held])
                self._lanes.again(group, mine[~held])
            ends = t.file_offset[slots] + np.maximum(results, 0) >= _size(group.target.buffered_fd)
            missed = (results == -errno.EAGAIN) | ((results >= 0) & ~ends)
            if missed.any():
                self._lanes.again(group, slots[missed])
            slots, results = slots[~(unasked | missed)], results[~(unasked | missed)]
        part = self._gathered_in_part if group.op == "read" else self._written_in_part
        for slot, result in zip(slots.tolist(), results.tolist(), strict=True):
            part(group, slot, result, found.how)

    def _gathered_in_part(self, group: Group, slot: int, result: int, how: int) -> None:
        """A read through host memory that did not simply bring what was asked for."""
        import numpy as np

        t, target = self.table, group.target
        nbytes, file_offset, at = int(t.nbytes[slot]), int(t.file_offset[slot]), int(t.buffer_offset[slot])
        if result < 0 and result not in (-errno.EINTR, -errno.EAGAIN):
            self._failed(group, slot, target.error(-result, file_offset, nbytes, "fallback"))
            return
        moved = max(result, 0)
        if how == PAST_CACHE and file_offset + moved < _size(target.buffered_fd):
            moved -= moved % target.relay_align
        one = np.array([slot])
        if moved:
            late = np.array([slot in self.zombies]) if self.zombies else None
            self.moved.gathered(group, one, np.array([moved]), late=late)
        if result >= 0 and (moved == 0 or file_offset + moved >= _size(target.buffered_fd)):
            self.ended(group, one, COMPLETE)
            return
        reason = group.answer.reason_list[int(t.reason[slot])]
        rest = Chunk("fallback", file_offset + moved, at + moved, nbytes - moved, reason)
        self._lanes.finish(group, slot, moved, rest)

    def _written_in_part(self, group: Group, slot: int, result: int, how: int) -> None:
        """A write past the page cache that did not simply write what was given: a thread writes the rest
        through it, or says why not."""
        import numpy as np

        t = self.table
        nbytes, file_offset, at = int(t.nbytes[slot]), int(t.file_offset[slot]), int(t.buffer_offset[slot])
        if result < 0 and -result not in (errno.EINTR, errno.EAGAIN, errno.EINVAL):
            self._failed(group, slot, group.target.error(-result, file_offset, nbytes, "fallback"))
            return
        moved = max(result, 0)
        if moved:
            late = np.array([slot in self.zombies]) if self.zombies else None
            self.moved.gathered(group, np.array([slot]), np.array([moved]), late=late)
        reason = group.answer.reason_list[int(t.reason[slot])]
        rest = Chunk("fallback", file_offset + moved, at + moved, nbytes - moved, reason)
        self._lanes.finish(group, slot, moved, rest)

    def _failed(self, group: Group, slot: int, error: Exception) -> None:
        t = self.table
        if isinstance(error, DeviceError):
            place = int(t.file_offset[slot]), int(t.nbytes[slot])
            cause = error
            error = group.target.error(errno.EIO, *place, "fallback", call=cause.call, detail=str(cause))
            error.__cause__ = cause
        if slot not in self.zombies:
            t.errno[slot] = (error.errno if isinstance(error, TransferError) else 0) or errno.EIO
            self.results.errors[slot] = error
        self._ended_one(group, slot, FAILED)

    # whatever carried it

    def _ended_one(self, group: Group, slot: int, status: int) -> None:
        import numpy as np

        self.ended(group, np.array([slot]), status)

    def ended(self, group: Group, slots: Array, status: int) -> None:
        """Requests that nothing works on any more, whatever became of them."""
        n = len(slots)
        self.under_way -= n
        self._lanes.ended(group, n)
        fresh = slots
        if self.zombies:
            late = [s for s in slots.tolist() if s in self.zombies]
            if late:
                fresh = slots[[s not in self.zombies for s in slots.tolist()]]
                self.zombies.difference_update(late)
                self._bury(late)
        if len(fresh):
            self.results.add(fresh, status)
            self.moved.ended(group, fresh, status, self._scheduler().now())
        group.left -= n
        if group.left == 0:
            self._close_group(group)

    def _bury(self, late: list[int]) -> None:
        """Zombies that have ended at last: their slots are free, if their results have been taken."""
        import numpy as np

        self.moved.forget(late)
        gone = [s for s in late if self.table.left[s]]
        if gone:
            self.table.give(np.array(gone, np.int64))

    def _close_group(self, group: Group) -> None:
        for key, known in self.groups.items():
            if known is group:
                del self.groups[key]
                break
        try:
            group.finish()
        finally:
            self._tally.group_done(group)
            if hooks.watchers:
                hooks.batch_done(group, self._scheduler().now())


def _size(fd: int) -> int:
    return os.lseek(fd, 0, os.SEEK_END)
