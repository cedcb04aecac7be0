"""The slots of a bounce ring that a relay holds, divided into units of one size.

As many as the ring grants, fewer when others relay as well; who calls is one thread at a time,
so nothing here is locked.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from nobounce.io.movers.bounce import Ring
from nobounce.io.target import Chunk

if TYPE_CHECKING:
    from nobounce.io.movers.uring_relay import UringRelay


class Unit:
    """A part of a slot. While it is read into: `nbytes` from `file_offset`, `lead` bytes behind its start."""

    __slots__ = ("address", "buffer_offset", "chunk", "file_offset", "lead", "nbytes", "owner", "slot")
    chunk: Chunk
    owner: UringRelay

    def __init__(self, slot: tuple[int, int], address: int) -> None:
        self.slot, self.address = slot, address
        self.file_offset = self.buffer_offset = self.nbytes = self.lead = 0


class Units:
    """What is held of `ring`, and which parts of it are free."""

    def __init__(self, ring: Ring, unit_nbytes: int) -> None:
        self.ring, self.unit_nbytes = ring, unit_nbytes
        self.most = 0
        """Slots that the transfers may hold together."""
        self.held: list[tuple[int, int]] = []
        self.free: deque[Unit] = deque()
        self.events: list[int] = []
        self.grew = False
        """Whether the last unit is of a slot that had to be made, which takes a millisecond or more: what can
        be read into by now should be, before the next one is."""

    def take(self) -> Unit | None:
        """A free part of a slot, or of one more slot, if there is any now."""
        if self.crowded():
            return self._spare()
        if not self.free and len(self.held) < self._keeps():
            before = self.ring.pinned_nbytes
            slot = self.ring.acquire(wait=False)
            if slot is not None:
                self.hold(slot)
                self.grew = self.ring.pinned_nbytes > before
        return self.free.popleft() if self.free else None

    def hold(self, slot: tuple[int, int]) -> None:
        self.held.append(slot)
        self.events.append(slot[1])
        step = self.unit_nbytes
        last = self.ring.slot_nbytes - step
        self.free.extend(Unit(slot, slot[0] + at) for at in range(0, last + 1, step))

    def _keeps(self) -> int:
        """How many slots should be held at most: somebody may wait for one, or
        others relay as well by now."""
        return 1 if self.ring.wanted else min(self.ring.fair, self.most)

    def crowded(self) -> bool:
        return len(self.held) > max(1, self._keeps())

    def _spare(self) -> Unit | None:
        """A unit of the slots that stay, while another one empties to be given back."""
        self._give_slots()
        leaving = self.held[-1] if self.crowded() else None
        for unit in self.free:
            if unit.slot is not leaving:
                self.free.remove(unit)
                return unit
        return None

    def _give_slots(self) -> None:
        """Give back slots that nothing is in, as far as there are too many."""
        for slot in list(self.held):
            parts = [u for u in self.free if u.slot is slot]
            whole = self.ring.slot_nbytes // self.unit_nbytes
            if self.crowded() and len(parts) == whole and slot[1] in self.events:
                self.held.remove(slot)
                self.events.remove(slot[1])
                for part in parts:
                    self.free.remove(part)
                self.ring.release(slot)

    def event(self) -> int | None:
        """One that no batch has; not that of a slot that is to be given back. None:
        one has to be waited for."""
        kept = self.held[-1][1] if self.crowded() else 0
        return next((event for event in self.events if event != kept), None)

    def rest(self) -> None:
        """Give the slots back, which nothing is in: whoever holds some is sure to get on."""
        for slot in self.held:
            self.ring.release(slot)
        self.forget()

    def abandon(self) -> None:
        """Something may write into what is held for good: it never comes back."""
        self.ring.abandon(len(self.held))
        self.forget()

    def forget(self) -> None:
        for kept in (self.held, self.free, self.events):
            kept.clear()
