"""The ways of gathered windows for one thread: in place, or through bounce slots to a device or from one."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple, Protocol

from nobounce.errors import DeviceError, NobounceError
from nobounce.io.batch.windows import Copies, Ended, Reading, Window, into, nothing, out_of, split
from nobounce.io.movers.scatter import LEAST_COPIES, MOST_COPIES, TABLE_NBYTES, Scatter, scatter_of, table

if TYPE_CHECKING:
    from nobounce.io.movers.bounce import Ring
    from nobounce.io.movers.gather import Blocks
    from nobounce.runtimes.base import CopyCalls

SPARE_SLOTS = 1
"""Bounce slots of one thread beside those that are read into: their copies are under way."""


class Ways(Protocol):
    """A way into the buffer, for one thread."""

    def move(self, window: Window) -> list[Ended]:
        """Begin a window; returns what has ended meanwhile."""

    def finish(self) -> list[Ended]:
        """Everything that is under way."""

    def close(self) -> None:
        """Nothing is under way, but where the thread ends by an error of its own: then it is waited for."""


class InPlace:
    """Into memory that the host reaches."""

    def __init__(self, by: Blocks) -> None:
        self._by = by
        self._reading: deque[Reading] = deque()

    def move(self, window: Window) -> list[Ended]:
        self._reading.append(Reading(window, None, self._by))
        ended: list[Ended] = []
        while self._reading and (len(self._reading) >= self._by.ahead or self._reading[0].is_done()):
            ended += self._finish_one()
        return ended

    def finish(self) -> list[Ended]:
        ended: list[Ended] = []
        while self._reading:
            ended += self._finish_one()
        return ended

    def _finish_one(self) -> list[Ended]:
        one = self._reading.popleft()
        return split(one.window, one.finish())

    def close(self) -> None:
        if self._reading:
            self._by.drain()


class _Read(NamedTuple):
    """A window in a bounce slot."""

    reading: Reading
    slot: tuple[int, int]


class Slots:
    """One thread's slots of a device's bounce ring, as many as there are of those it can
    use, and its copy stream."""

    def __init__(self, ring: Ring, by: Blocks, *, scatters: bool) -> None:
        """`scatters`: neighbours in the slots may be apart on the device. Raises DeviceError and
        OutOfMemoryError, and holds nothing then."""
        self.ring, self._most = ring, by.ahead + SPARE_SLOTS
        self.free: list[tuple[int, int]] = []
        self._held = 0
        with ExitStack() as made:
            self.stream = ring.copy_stream()
            made.callback(ring.return_stream, self.stream)
            self.calls: CopyCalls = made.enter_context(ring.runtime.copy_calls(ring.device))
            first = ring.acquire(wait=True)
            if first is not None:
                self.free.append(first)
                self._held = 1
            self._undo = made.pop_all()
        self._scatter: Scatter | None = None
        if first is not None and scatters:
            self._scatter = scatter_of(ring, first[0], self.calls, self.stream)

    def more(self) -> bool:
        """Whether one more slot is free now, beside those that are used."""
        slot = self.ring.acquire(wait=False) if self._held < self._most else None
        if slot is not None:
            self._held += 1
            self.free.append(slot)
        return slot is not None

    def queue(self, copies: Copies, slot: tuple[int, int], used: int) -> None:
        """Start copies out of a slot of which `used` bytes hold data, or into it, and have its event tell of
        their end. Raises DeviceError and MemoryError."""
        count, ring = len(copies.nbytes), self.ring
        if (
            self._scatter is not None
            and LEAST_COPIES < count <= MOST_COPIES
            and used <= ring.slot_nbytes - TABLE_NBYTES
        ):
            rows = table(ring, slot[0], count)
            rows[:, 0], rows[:, 1], rows[:, 2] = copies
            at = slot[0] + ring.slot_nbytes - TABLE_NBYTES
            self._scatter.launch(at, count, int(copies.nbytes.max()), self.stream)
        else:
            listed: list[tuple[int, int, int]] = list(zip(*(c.tolist() for c in copies), strict=True))
            if count == 1:
                self.calls.copy(*listed[0], self.stream)
            elif count:
                self.calls.copy_many(listed, self.stream)
        self.calls.record(slot[1], self.stream)

    def close(self, used: list[tuple[int, int]], *, copying: bool) -> None:
        """Give slots and stream back, those that are `used` too, which copies may still be under way for."""
        with self._undo:
            if copying:
                self.calls.finish(self.stream)
            for slot in self.free + used:
                self.ring.release(slot)


class ReadRelay:
    """Windows on their way from files to a device: read into slots, and copied from there."""

    def __init__(self, ring: Ring, by: Blocks, *, scatters: bool) -> None:
        """Raises as `Slots`."""
        self._by, self._slots = by, Slots(ring, by, scatters=scatters)
        self._reading: deque[_Read] = deque()
        self._copying: deque[_Read] = deque()

    def close(self) -> None:
        if self._reading:
            self._by.drain()
        used = [one.slot for one in (*self._reading, *self._copying)]
        self._slots.close(used, copying=bool(self._copying))

    def move(self, window: Window) -> list[Ended]:
        ended = self._make_room()
        slot = self._slots.free.pop()
        self._reading.append(_Read(Reading(window, slot[0], self._by), slot))
        while self._reading and (len(self._reading) >= self._by.ahead or self._reading[0].reading.is_done()):
            ended += self._copy_one()
        return ended

    def _make_room(self) -> list[Ended]:
        """Have a slot free; returns what has ended meanwhile."""
        ended: list[Ended] = []
        while not self._slots.free and not self._slots.more():
            ended += self._finish_one() if self._copying else self._copy_one()
        return ended

    def _copy_one(self) -> list[Ended]:
        """Start the copies of the window that has been read into for the longest time."""
        oldest = self._reading[0]
        window, results = oldest.reading.window, oldest.reading.finish()
        self._copying.append(self._reading.popleft())
        try:
            copies = out_of(window, oldest.slot[0], results)
            self._slots.queue(copies, oldest.slot, int(window.nbytes.sum()))
        except (NobounceError, MemoryError) as e:
            return self._failed(e)
        return []

    def finish(self) -> list[Ended]:
        ended: list[Ended] = []
        while self._reading:
            ended += self._copy_one()
        while self._copying:
            ended += self._finish_one()
        return ended

    def _finish_one(self) -> list[Ended]:
        oldest = self._copying[0]
        try:
            self._slots.calls.sync(oldest.slot[1])
        except DeviceError as e:
            return self._failed(e)
        self._copying.popleft()
        self._slots.free.append(oldest.slot)
        return split(oldest.reading.window, oldest.reading.finish())

    def _failed(self, error: Exception) -> list[Ended]:
        """The device has refused copies: those of every window that has any are in doubt, and none
        is under way afterwards."""
        try:
            self._slots.calls.finish(self._slots.stream)
        except DeviceError as e:
            error.add_note(str(e))
        ended: list[Ended] = []
        while self._copying:
            one = self._copying.popleft()
            self._slots.free.append(one.slot)
            ended += split(one.reading.window, one.reading.finish(), error)
        return ended


class _Coming(NamedTuple):
    """A window whose bytes are being copied into a slot."""

    window: Window
    slot: tuple[int, int]


class WriteRelay:
    """Windows on their way from a device to files: copied into slots, and written from there."""

    def __init__(self, ring: Ring, by: Blocks, *, scatters: bool) -> None:
        """Raises as `Slots`."""
        self._by, self._slots = by, Slots(ring, by, scatters=scatters)
        self._copying: deque[_Coming] = deque()
        self._writing: deque[_Read] = deque()

    def close(self) -> None:
        if self._writing:
            self._by.drain()
        used = [c.slot for c in self._copying] + [w.slot for w in self._writing]
        self._slots.close(used, copying=bool(self._copying))

    def move(self, window: Window) -> list[Ended]:
        ended: list[Ended] = []
        while not self._slots.free and not self._slots.more():
            ended += self._finish_one() if self._writing else self._write_one()
        slot = self._slots.free.pop()
        self._copying.append(_Coming(window, slot))
        try:
            self._slots.queue(into(window, slot[0]), slot, int(window.nbytes.sum()))
        except (NobounceError, MemoryError) as e:
            return ended + self._failed(e)
        while len(self._copying) > 1:  # one window's copies are under way while others are written
            ended += self._write_one()
        return ended

    def _write_one(self) -> list[Ended]:
        """Wait for the copies of the oldest window, and begin to write it."""
        ended: list[Ended] = []
        while len(self._writing) >= self._by.ahead:
            ended += self._finish_one()
        oldest = self._copying[0]
        try:
            self._slots.calls.sync(oldest.slot[1])
        except DeviceError as e:
            return ended + self._failed(e)
        self._copying.popleft()
        self._writing.append(_Read(Reading(oldest.window, oldest.slot[0], self._by), oldest.slot))
        return ended

    def _finish_one(self) -> list[Ended]:
        oldest = self._writing[0]
        results = oldest.reading.finish()
        self._writing.popleft()
        self._slots.free.append(oldest.slot)
        return split(oldest.reading.window, results)

    def finish(self) -> list[Ended]:
        ended: list[Ended] = []
        while self._copying:
            ended += self._write_one()
        while self._writing:
            ended += self._finish_one()
        return ended

    def _failed(self, error: Exception) -> list[Ended]:
        """The device has refused copies: none of their windows is written, and no copy
        is under way afterwards."""
        try:
            self._slots.calls.finish(self._slots.stream)
        except DeviceError as e:
            error.add_note(str(e))
        ended: list[Ended] = []
        while self._copying:
            one = self._copying.popleft()
            self._slots.free.append(one.slot)
            ended += split(one.window, nothing(one.window), error)
        return ended
