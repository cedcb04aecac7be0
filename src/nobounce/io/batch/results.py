"""The ends of a batch's requests that nobody has taken yet, and the errors among them,
made when they are taken."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from nobounce.errors import InternalError, TransferCancelledError, TransferTimeoutError, errno_name
from nobounce.io.batch.table import CANCELLED, COMPLETE, TIMEOUT, BatchResult, Table

if TYPE_CHECKING:
    import numpy as np

    from nobounce.io.batch.group import Group

    Array = np.ndarray[Any, Any]


class Results:
    """Slots that have ended, in the order in which they did."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._ready: deque[Array] = deque()
        self.count = 0
        self.cookies: dict[int, Any] = {}
        """By id."""
        self.errors: dict[int, Exception] = {}
        """By slot: what a failed request raised."""
        self.judges: dict[int, Group] = {}
        """By slot: who says what is wrong with an invalid request."""

    def add(self, slots: Array, status: int) -> None:
        """These have ended with `status`."""
        self._table.status[slots] = status
        self._ready.append(slots)
        self.count += len(slots)

    def retrieve(self, zombies: set[int]) -> BatchResult:
        """Give everything out; the slots are free again, but for zombies: those when they end."""
        import numpy as np

        t = self._table
        slots = np.concatenate(list(self._ready)) if self._ready else np.zeros(0, np.int64)
        self._ready.clear()
        self.count = 0
        failed = slots[t.status[slots] != COMPLETE]
        ids = t.id[slots]
        cookies = tuple(self.cookies.pop(key, None) for key in ids.tolist()) if self.cookies else None
        result = BatchResult(
            ids=ids,
            nbytes=t.done[slots],
            errnos=t.errno[slots],
            codes=t.status[slots],
            ways=t.way[slots],
            cookies=cookies,
            errors={int(t.id[s]): self._error(s) for s in failed.tolist()},
        )
        if zombies:
            alive = np.array([s in zombies for s in slots.tolist()], bool)
            t.left[slots[alive]] = True
            slots = slots[~alive]
        t.give(slots)
        return result

    def _error(self, slot: int) -> Exception:
        t = self._table
        known = self.errors.pop(slot, None)
        if known is not None:
            return known
        place = int(t.file_offset[slot]), int(t.nbytes[slot]), int(t.buffer_offset[slot])
        group = self.judges.pop(slot, None)
        error = group.error_of(*place) if group is not None else None
        if error is not None:
            error.add_note(f"request {int(t.id[slot])} of the batch")
            return error
        what = f"request {int(t.id[slot])} of the batch ({place[1]} bytes at offset {place[0]})"
        if t.status[slot] == TIMEOUT:
            return TransferTimeoutError(f"{what} has not ended in time")
        if t.status[slot] == CANCELLED:
            return TransferCancelledError(f"{what} was cancelled before it started")
        return InternalError(f"{what} failed with {errno_name(int(t.errno[slot]))} and no reason")
