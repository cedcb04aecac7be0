"""What each request of a batch has moved, and by which way: into the table, into the tally, and told at its end.

A request that both backends have a share in is the exception: the table has its ways and its bytes, but not how many of
them went direct. Those are kept here by slot, from the first share until the slot has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nobounce.io import hooks
from nobounce.io.batch_group import Group
from nobounce.io.batch_receipt import Tally
from nobounce.io.batch_table import FALLBACK, FASTPATH, STATUS_NAMES, Table
from nobounce.io.batch_threads import Outcome
from nobounce.route import many

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


class Moved:
    """Bytes and ways of a batch's requests. Called with the batch's lock held."""

    def __init__(self, table: Table, tally: Tally) -> None:
        self._table, self._tally = table, tally
        self._mixed: dict[int, int] = {}
        """Direct bytes of requests that fallback has a share in."""

    def whole(self, group: Group, slots: Array) -> None:
        """The ring has moved these as they were asked for."""
        t, first = self._table, slots[0]
        t.done[slots] = t.nbytes[slots]
        t.way[slots] = FASTPATH
        nbytes = int(t.nbytes[slots].sum())
        self._tally.direct(group, nbytes, int(t.file_offset[first]), int(t.buffer_offset[first]))

    def all_there_is(self, group: Group, slot: int, nbytes: int) -> None:
        """The ring has read up to the end of the file."""
        self._table.done[slot] = nbytes
        self._table.way[slot] = FASTPATH if nbytes else 0
        self._direct(group, slot, nbytes)

    def a_part(self, group: Group, slot: int, nbytes: int) -> None:
        """The ring has moved the first `nbytes`; an I/O thread moves the rest, directly or not."""
        self._table.way[slot] |= FASTPATH
        self._mixed[slot] = nbytes
        self._direct(group, slot, nbytes)

    def by_thread(self, out: Outcome, *, late: bool) -> None:
        """An I/O thread has ended a request; `late`: after its timeout was reported, so that its row stays as it was."""
        t, slot = self._table, out.slot
        self._tally.pieces(out.group, out.pieces)
        self._tally.retries(out.retries)
        direct = [p.nbytes for p in out.pieces if p.backend == "fastpath"]
        if direct and out.done < int(t.nbytes[slot]):
            self._tally.short()
        already = self._mixed.pop(slot, 0)
        if late:
            return
        way = int(t.way[slot])
        for piece in out.pieces:
            way |= FASTPATH if piece.backend == "fastpath" else FALLBACK
        t.done[slot], t.way[slot] = out.done, way
        if way == FASTPATH | FALLBACK:
            self._mixed[slot] = already + sum(direct)

    def ended(self, group: Group, slots: Array, status: int, now: float) -> None:
        """These ended alike: tell who listens."""
        mixed = [self._mixed.pop(slot, 0) for slot in slots.tolist()] if self._mixed else None
        if not hooks.observers:
            return
        t = self._table
        done, way = t.done[slots], t.way[slots]
        direct = done * (way == FASTPATH)
        if mixed is not None:
            direct += mixed
        split = t.kind[slots] == many.SPLIT
        ends = hooks.BatchEnds(t.nbytes[slots], done, direct, way, t.reason[slots], split)
        hooks.batch_ended(group, ends, STATUS_NAMES[status], now - group.submitted_at)

    def forget(self, slots: list[int]) -> None:
        """These ended long after their timeout was reported: their slots are about to be others'."""
        for slot in slots:
            self._mixed.pop(slot, None)

    def _direct(self, group: Group, slot: int, nbytes: int) -> None:
        t = self._table
        self._tally.direct(group, nbytes, int(t.file_offset[slot]), int(t.buffer_offset[slot]))
