"""The slots of a bounce ring that a relay holds, divided into units of one size.

As many as the ring grants, fewer when others relay as well; who calls is one thread at a time, so nothing here is locked.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from nobounce.io.bounce import Ring
from nobounce.io.target import Chunk

if TYPE_CHECKING:
    from nobounce.io.uring_relay import UringRelay


class Unit:
    """A part of a slot. While it is read into: `nbytes` from `file_offset`, `lead` bytes behind its start."""

    __slots__ = ("address", "buffer_offset", "chunk", "file_offset", "lead", "nbytes", "owner", "slot")
    chunk: Chunk
    owner: UringRelay

    def __init__(self, slot: tuple[int, int], address: int) -> None:
        self.slot, self.address = slot, address
        self.file_offset = self.buffer_offset = self.nbytes = self.lead = 0


class Slots:
    """What is held of `ring`, and which parts of it are free."""

    def __init__(self, ring: Ring, unit_nbytes: int) -> None:
        self._ring, self.unit_nbytes = ring, unit_nbytes
        self._most = 0
        """Slots that the transfers may hold together."""
        self._held: list[tuple[int, int]] = []
        self._free: deque[Unit] = deque()
        self._events: list[int] = []
        self._grew = False
        """Whether the last unit is of a slot that had to be made, which takes a millisecond or more: what can be read into by now
        should be, before the next one is."""

    def _unit(self, me: UringRelay) -> Unit | None:
        """A free part of a slot, or of one more slot, if there is any now."""
        if self._crowded():
            return self._spare()
        if not self._free and len(self._held) < self._keeps():
            before = self._ring.pinned_nbytes
            slot = self._ring.acquire(wait=False)
            if slot is not None:
                self._hold(slot)
                self._grew = self._ring.pinned_nbytes > before
        return self._free.popleft() if self._free else None

    def _hold(self, slot: tuple[int, int]) -> None:
        self._held.append(slot)
        self._events.append(slot[1])
        step = self.unit_nbytes
        last = self._ring.slot_nbytes - step
        self._free.extend(Unit(slot, slot[0] + at) for at in range(0, last + 1, step))

    def _keeps(self) -> int:
        """How many slots should be held at most: somebody may wait for one, or others relay as well by now."""
        return 1 if self._ring.wanted else min(self._ring.fair, self._most)

    def _crowded(self) -> bool:
        return len(self._held) > max(1, self._keeps())

    def _spare(self) -> Unit | None:
        """A unit of the slots that stay, while another one empties to be given back."""
        self._give_slots()
        leaving = self._held[-1] if self._crowded() else None
        for unit in self._free:
            if unit.slot is not leaving:
                self._free.remove(unit)
                return unit
        return None

    def _give_slots(self) -> None:
        """Give back slots that nothing is in, as far as there are too many."""
        for slot in list(self._held):
            parts = [u for u in self._free if u.slot is slot]
            whole = self._ring.slot_nbytes // self.unit_nbytes
            if self._crowded() and len(parts) == whole and slot[1] in self._events:
                self._held.remove(slot)
                self._events.remove(slot[1])
                for part in parts:
                    self._free.remove(part)
                self._ring.release(slot)
