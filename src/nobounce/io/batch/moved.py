"""What each request of a batch has moved, and by which way: into the table, into the
tally, and told at its end.

A request that both backends have a share in is the exception: the table has its ways and its bytes, but not
how many of them went direct. Those are kept here by slot, from the first share until the slot has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nobounce.facts.extents import hole_nbytes
from nobounce.io import hooks
from nobounce.io.batch.group import Group
from nobounce.io.batch.receipt import Tally
from nobounce.io.batch.table import FALLBACK, FASTPATH, STATUS_NAMES, Table
from nobounce.io.batch.threads import Outcome
from nobounce.io.evidence import SERVED
from nobounce.io.target import Piece
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

    def whole(self, group: Group, slots: Array) -> Array:
        """The ring has moved these as they were asked for; returns those that came from the
        page cache all the same."""
        t = self._table
        t.done[slots] = t.nbytes[slots]
        t.way[slots] = FASTPATH
        served = self._served(group, slots) if group.checked else slots[:0]
        if len(served):
            import numpy as np

            slots = slots[~np.isin(slots, served)]
        if len(slots):
            nbytes, first = int(t.nbytes[slots].sum()), slots[0]
            self._tally.direct(group, nbytes, int(t.file_offset[first]), int(t.buffer_offset[first]))
        return served

    def _served(self, group: Group, slots: Array) -> Array:
        """Those of these direct reads that the page cache served; they are fallback's from now on."""
        import numpy as np

        t = self._table
        places = zip(slots.tolist(), t.file_offset[slots].tolist(), t.done[slots].tolist(), strict=True)
        found = [slot for slot, file_offset, nbytes in places if group.served(file_offset, nbytes)]
        served = np.array(found, np.int64)
        t.way[served], t.reason[served] = FALLBACK, group.served_reason
        for slot in found:
            place = int(t.file_offset[slot]), int(t.buffer_offset[slot]), int(t.done[slot])
            self._tally.pieces(group, [Piece("fallback", *place, SERVED, False)])
        return served

    def gathered(self, group: Group, slots: Array, nbytes: Array, *, late: Array | None = None) -> None:
        """These have been read through host memory. `late`: which of them had their timeouts reported
        before: their rows stay."""
        t, relayed = self._table, group.target.ring is not None
        fresh = slots if late is None else slots[~late]
        t.done[fresh] = nbytes if late is None else nbytes[~late]
        t.way[fresh] = FALLBACK
        reasons = t.reason[slots]
        if bool((reasons == reasons[0]).all()):
            self._piece(group, slots, nbytes, relayed=relayed)
            return
        for one in set(reasons.tolist()):
            alike = reasons == one
            self._piece(group, slots[alike], nbytes[alike], relayed=relayed)

    def _piece(self, group: Group, slots: Array, nbytes: Array, *, relayed: bool) -> None:
        t, first = self._table, slots[self._table.file_offset[slots].argmin()]
        place = int(t.file_offset[first]), int(t.buffer_offset[first]), int(nbytes.sum())
        reason = group.answer.reason_list[int(t.reason[first])]
        self._tally.pieces(group, [Piece("fallback", *place, reason, relayed)])

    def all_there_is(self, group: Group, slot: int, nbytes: int) -> bool:
        """The ring has read up to the end of the file; whether that came from the page cache all the same."""
        import numpy as np

        self._table.done[slot] = nbytes
        self._table.way[slot] = FASTPATH if nbytes else 0
        if nbytes and group.checked and len(self._served(group, np.array([slot]))):
            return True
        self._direct(group, slot, nbytes)
        return False

    def a_part(self, group: Group, slot: int, nbytes: int) -> None:
        """The ring has moved the first `nbytes`; an I/O thread moves the rest, directly or not."""
        self._table.way[slot] |= FASTPATH
        self._mixed[slot] = nbytes
        self._direct(group, slot, nbytes)

    def by_thread(self, out: Outcome, *, late: bool) -> None:
        """An I/O thread has ended a request; `late`: after its timeout was reported, so that
        its row stays as it was."""
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
        t = self._table
        done, way = t.done[slots], t.way[slots]
        direct = done * (way == FASTPATH)
        if mixed is not None:
            direct += mixed
        holes = self._holes(group, slots, direct)
        self._tally.hole_nbytes += holes
        if not hooks.observers:
            return
        split = t.kind[slots] == many.SPLIT
        ends = hooks.BatchEnds(t.nbytes[slots], done, direct, way, t.reason[slots], split, holes)
        hooks.batch_ended(group, ends, STATUS_NAMES[status], now - group.submitted_at)

    def _holes(self, group: Group, slots: Array, direct: Array) -> int:
        """Of the `direct` bytes of these reads, those that no disk was asked for."""
        if not group.target.sparse or group.op != "read":
            return 0
        t, fd = self._table, group.target.seekable_fd
        rows = zip(t.file_offset[slots].tolist(), t.done[slots].tolist(), direct.tolist(), strict=True)
        return sum(min(nbytes, hole_nbytes(fd, start, done)) for start, done, nbytes in rows if nbytes)

    def forget(self, slots: list[int]) -> None:
        """These ended long after their timeout was reported: their slots are about to be others'."""
        for slot in slots:
            self._mixed.pop(slot, None)

    def _direct(self, group: Group, slot: int, nbytes: int) -> None:
        t = self._table
        self._tally.direct(group, nbytes, int(t.file_offset[slot]), int(t.buffer_offset[slot]))
