"""The copies of a relay: what has been read goes to the device in batches, and its units
are free once it is there.

Between two copies of a stream the device rests for microseconds, while the next one's first bytes are
on their way: one copy of 4 MiB after the other comes to 0.96 of a link, batches of two to 0.98, of
four to 0.99 (benchmarks/README.md). So a copy waits for others, but only while enough of them are
under way that the link does not.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from nobounce.errors import NobounceError
from nobounce.io import hooks
from nobounce.io.movers.relay_slots import Unit, Units
from nobounce.io.target import Piece

if TYPE_CHECKING:
    from nobounce.io.movers.uring_relay import UringRelay

BATCH_NBYTES = 8 << 20
"""Bytes that a batch of copies is made of, where there is time to wait for them: what
waits could be read into."""
ENOUGH_NBYTES = 16 << 20
"""Bytes of copies under way that keep a link busy for as long as the next reads take:
a third of a millisecond."""


class Batch(NamedTuple):
    """Copies of one transfer that one event of `stream` stands for."""

    owner: UringRelay
    stream: int
    event: int
    units: list[Unit]
    pieces: list[Piece]
    nbytes: int
    began: float


class Copies:
    """What has come into the units, and the batches that are on their way out of them."""

    def __init__(self, units: Units) -> None:
        self._units = units
        self.come: list[Unit] = []
        """Units that were read and whose copies are not queued yet."""
        self.come_nbytes = self.moving_nbytes = 0
        self.batches: deque[Batch] = deque()

    def came(self, units: list[Unit]) -> None:
        self.come += units
        self.come_nbytes += sum(u.nbytes for u in units)

    def send(self, me: UringRelay, *, now: bool) -> None:
        """Queue the copies of what has come, `now` or unless they may as well wait for more."""
        if not self.come:
            return
        if not now and self.moving_nbytes >= ENOUGH_NBYTES and self.come_nbytes < BATCH_NBYTES:
            return
        come, self.come, self.come_nbytes = self.come, [], 0
        come.sort(key=_place)
        first = 0
        for n in range(1, len(come) + 1):
            if n == len(come) or come[n].owner is not come[first].owner:
                self.queue(me, come[first].owner, come[first:n])
                first = n

    def queue(self, me: UringRelay, owner: UringRelay, units: list[Unit]) -> None:
        """Queue the copies: one for each run of neighbours, one call and one event for all of them.

        On one stream, whosever they are: side by side they take a tenth longer, and free their units
        together instead of in turns.
        """
        t, stream = owner.target, me.stream
        pieces: list[Piece] = []
        copies: list[tuple[int, int, int]] = []
        began = owner.now()
        first = 0
        while first < len(units):
            u = units[first]
            nbytes, last = u.nbytes, first + 1
            while last < len(units) and _follows(u, nbytes, units[last]):
                nbytes += units[last].nbytes
                last += 1
            copies.append((t.address + u.buffer_offset, u.address + u.lead, nbytes))
            pieces.append(Piece("fallback", u.file_offset, u.buffer_offset, nbytes, u.chunk.reason, True))
            first = last
        try:
            event = self._event(me)
            if len(copies) == 1:
                me.calls.copy(*copies[0], stream)
            else:
                me.calls.copy_many(copies, stream)
            me.calls.record(event, stream)
            self._units.events.remove(event)
        except Exception as e:
            owner.lost = owner.lost or e
            self._quiesce(stream)  # copies that no event tells of may be under way
            self._units.free.extend(units)
            owner.out -= len(units)
            return
        nbytes = sum(u.nbytes for u in units)
        self.moving_nbytes += nbytes
        self.batches.append(Batch(owner, stream, event, units, pieces, nbytes, began))

    def wait(self, *more: int) -> None:
        """All that are under way, on `more` streams too: their destinations are about
        to be their owners' again."""
        for stream in {*more, *(batch.stream for batch in self.batches)}:
            self._quiesce(stream)

    def _quiesce(self, stream: int) -> None:
        """Wait for copies that no event tells of, on a stream that may be somebody else's by now."""
        with suppress(NobounceError):
            self._units.ring.runtime.stream_sync(stream)

    def _event(self, me: UringRelay) -> int:
        while (event := self._units.event()) is None:
            self.settle_oldest(me)
        return event

    def forget(self) -> None:
        """Nothing that is under way will be heard of again."""
        self.come.clear()
        self.batches.clear()

    def settle_ended(self, me: UringRelay) -> None:
        while self.batches:
            known = False
            with suppress(NobounceError):  # waiting for it says the same, and says it to its owner
                if not me.calls.query(self.batches[0].event):
                    return
                known = True
            self.settle_oldest(me, known=known)

    def settle_oldest(self, me: UringRelay, *, known: bool = False) -> None:
        """Wait for the oldest copies, unless they are `known` to be done: their units are free, and
        their bytes have arrived."""
        batch = self.batches.popleft()
        self.moving_nbytes -= batch.nbytes
        owner = batch.owner
        try:
            if not known:
                me.calls.sync(batch.event)
            owner.arrive(batch.pieces)
            if hooks.watchers:
                owner.tell(batch.stream, batch.nbytes, batch.began)
        except BaseException as e:
            self._quiesce(batch.stream)
            owner.lost = owner.lost or (e if isinstance(e, Exception) else InterruptedError("interrupted"))
            if not isinstance(e, Exception):
                raise
        finally:
            self._units.free.extend(batch.units)
            self._units.events.append(batch.event)
            owner.out -= len(batch.units)


def _place(unit: Unit) -> tuple[int, int]:
    return id(unit.owner), unit.file_offset


def _follows(first: Unit, nbytes: int, unit: Unit) -> bool:
    """Whether `unit` goes on where `nbytes` from `first` end, in the file, in the
    slot and at the destination."""
    return (
        unit.slot is first.slot
        and unit.address + unit.lead == first.address + first.lead + nbytes
        and unit.file_offset == first.file_offset + nbytes
        and unit.buffer_offset == first.buffer_offset + nbytes
        and unit.chunk.reason is first.chunk.reason
    )
