"""The requests of a batch that go straight to the kernel through io_uring, many per system call.

Their entries are made by the batch for all requests of a call at once; here they are copied into the
ring as room comes up, and completions are sorted into those that are simply done and the odd ones:
short, failed, cancelled.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from nobounce.io.batch.table import RUNNING, Table
from nobounce.io.movers import uring

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_WAKE = 1 << 62
_CANCEL = 1 << 61
_SPARE = 8
"""Entries kept for wake-ups and cancellations."""


class UringLane:
    """A queue of slots and a ring. The thread that waits on the batch drives it;
    nothing runs behind its back."""

    def __init__(self, depth: int, table: Table) -> None:
        """Raises OSError where there is no io_uring."""
        self._ring = uring.Ring(depth + _SPARE)
        self._depth = min(depth, self._ring.depth - _SPARE) if self._ring.depth > _SPARE else 1
        self._table = table
        self._queue: deque[tuple[Array, Array]] = deque()  # slots, and their entries for the ring
        self._special = 0
        self._reaped: list[Array] = []
        self._at_least = 1
        self._pending = False
        self.running = 0
        self._bell = -1
        self._bell_lock = threading.Lock()
        self._armed = False

    @property
    def queued(self) -> bool:
        return bool(self._queue)

    def put(self, slots: Array, op: str, fd: int, address: int) -> None:
        """Queue reads or writes between one file and one buffer at `address`; the
        first of them start at once."""
        room = self._depth - self.running
        if len(slots) > room > 0 and not self._queue:
            self._queue_up(slots[:room], op, fd, address)
            self.fill()
            self.flush()
            slots = slots[room:]
        self._queue_up(slots, op, fd, address)

    def _queue_up(self, slots: Array, op: str, fd: int, address: int) -> None:
        t = self._table
        made = uring.blank(len(slots))
        made["opcode"] = uring.OP_READ if op == "read" else uring.OP_WRITE
        made["fd"] = fd
        made["offset"] = t.file_offset[slots]
        made["address"] = t.buffer_offset[slots] + address
        made["nbytes"] = t.nbytes[slots]
        made["user_data"] = slots
        self._queue.append((slots, uring.words(made)))

    def withdraw(self, wanted: Array) -> Array:
        """Take slots of `wanted` that are not in the ring yet out of the queue; returns them."""
        import numpy as np

        gone: list[Array] = [np.zeros(0, np.int64)]
        kept: deque[tuple[Array, Array]] = deque()
        for slots, entries in self._queue:
            out = np.isin(slots, wanted)
            gone.append(slots[out])
            if not out.all():
                kept.append((slots[~out], entries[~out]))
        self._queue = kept
        return np.concatenate(gone)

    def fill(self) -> None:
        """Put as many queued requests into the ring as the depth allows; the next
        system call hands them over."""
        while self._queue and (room := self._depth - self.running) > 0:
            slots, entries = self._queue.popleft()
            if len(slots) > room:
                self._queue.appendleft((slots[room:], entries[room:]))
                slots, entries = slots[:room], entries[:room]
            self._table.status[slots] = RUNNING
            self.running += len(slots)
            self._ring.put(entries)
            self._pending = True

    def flush(self) -> None:
        """Hand over what lies in the ring."""
        if self._pending:
            self._pending = False
            self._ring.enter()

    def prepare(self, wanted: int, *, also_bell: bool) -> None:
        """Say what `wait` waits for: about `wanted` ends, or the bell.

        While more are queued than fit, that is few enough that the storage never runs dry.
        """
        if also_bell:
            self._arm()
        enough = max(1, self._depth // 4) if self._queue else self.running
        self._at_least = 1 if also_bell or self._special > self._armed else max(1, min(wanted, enough))
        self._pending = False

    def wait(self, timeout: float | None) -> None:
        """What `prepare` said, `timeout` seconds or a signal; other threads may use the lane meanwhile."""
        self._ring.enter(self._at_least, timeout)

    def reap(self) -> int:
        """Take ends out of the ring and keep them for `take`; returns how many that were.

        Until the ring is filled again the storage has less to do, so nothing is decoded here that can wait.
        """
        found = self._ring.take()
        if self._special:
            keys = found["user_data"]
            ours = keys < _CANCEL
            self._special -= int((~ours).sum())
            if bool((keys == _WAKE).any()):
                self._armed = False
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
            found = found[ours]
        count = len(found)
        if count:
            self.running -= count
            self._reaped.append(found)
        return count

    @property
    def reaped(self) -> bool:
        """Whether `take` has something without looking into the ring."""
        return bool(self._reaped)

    def take(self) -> tuple[Array, Array]:
        """(slots, results) of requests that have ended: a count of bytes or minus an errno."""
        import numpy as np

        self.reap()
        reaped, self._reaped = self._reaped, []
        found = reaped[0] if len(reaped) == 1 else np.concatenate([uring.no_ends(), *reaped])
        return found["user_data"].astype("i8"), found["result"].copy()

    def cancel(self, slots: Array) -> None:
        """Ask the kernel to give running requests up; they end all the same, by ECANCELED or as
        if nothing had been asked."""
        for slot in slots.tolist()[: _SPARE - 1 - self._special]:
            entry = uring.blank(1)
            entry["opcode"], entry["fd"], entry["address"] = uring.OP_ASYNC_CANCEL, -1, slot
            entry["user_data"] = _CANCEL
            self._special += 1
            self._ring.put(uring.words(entry))
        self._ring.enter()

    def ring_bell(self) -> None:
        """Wake the thread that waits; any thread may call it."""
        with self._bell_lock:
            if self._bell >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_write(self._bell, 1)

    def make_bell(self) -> None:
        """From now on `ring_bell` works."""
        if self._bell < 0:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def _arm(self) -> None:
        self.make_bell()
        if not self._armed:
            entry = uring.blank(1)
            entry["opcode"], entry["fd"], entry["op_flags"] = uring.OP_POLL_ADD, self._bell, uring.POLLIN
            entry["user_data"] = _WAKE
            self._special += 1
            self._armed = True
            self._ring.put(uring.words(entry))

    def close(self) -> None:
        """Give the ring back; a poll for the bell may still be in it, which no memory depends on."""
        self._ring.close()
        with self._bell_lock:  # a thread that rings late must not write to whatever has this number next
            bell, self._bell = self._bell, -1
        if bell >= 0:
            os.close(bell)
