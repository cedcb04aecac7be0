"""Which slots the writer may write to: free ones first, then those of the least recently used blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from nobounce.errors import BusyError
from nobounce.kv import fileformat

if TYPE_CHECKING:
    from nobounce.kv.pins import Pins
    from nobounce.kv.table import Table

    Array = np.ndarray[Any, Any]


class Slots:
    """The slots of one store. The store's lock is held around every call."""

    def __init__(self, table: Table, pins: Pins, sync: Callable[[], None]) -> None:
        self._table, self._pins, self._sync = table, pins, sync
        self._free: list[int] = np.flatnonzero(table.entries["generation"] == 0)[::-1].tolist()
        self._to_sync = False
        """An entry that a power cut would bring back was cleared, and its slot may be written to again."""

    def take(self, count: int) -> Array:
        """`count` slots that no other call uses, sorted and locked, without entries. Raises BusyError, and then nothing has changed."""
        taken: list[int] = []
        passed: list[int] = []
        oldest = iter(self._table.slots.values())
        while len(taken) < count:
            some = self._candidates(count - len(taken), passed, oldest)
            if not some:
                self._pins.unlock(np.array(taken, np.int64))
                used = self._table.entries["generation"][taken] != 0
                self._free += passed + np.array(taken, np.int64)[~used].tolist()
                raise BusyError(
                    f"there is no room for {count} blocks: all but {len(taken)} of {len(self._table.entries)} slots are in use. "
                    "Wait for transfers and pins to end, or make a store of a larger capacity"
                )
            lost = set(self._pins.lock(np.array(sorted(some), np.int64)))
            free = self._table.entries["generation"]
            passed += [s for s in lost if not free[s]]
            taken += [s for s in some if s not in lost]
        self._free += passed
        slots = np.array(sorted(taken), np.int64)
        self._clear(slots[self._table.entries["generation"][slots] != 0])
        if self._to_sync:
            self._sync()
            self._to_sync = False
        return slots

    def _candidates(self, count: int, passed: list[int], oldest: Iterator[int]) -> list[int]:
        """Up to `count` slots that no call of this process uses; free ones that it does use go to `passed`."""
        some: list[int] = []
        while self._free and len(some) < count:
            slot = self._free.pop()
            (passed if self._pins.count(slot) else some).append(slot)
        unused = (slot for slot in oldest if not self._pins.count(slot))
        some += islice(unused, count - len(some))
        return some

    def publish(
        self, slots: Array, digests: list[bytes], generation: int, sums: Array | None, durable: bool
    ) -> None:
        """Enter blocks whose data is in the file; the slots of what their keys had before are free."""
        self._note(np.array([s for d in digests if (s := self._table.slots.get(d[:16], -1)) >= 0], np.int64))
        self._free += self._table.publish(slots, digests, generation, sums, durable).tolist()

    def discard(self, slots: Array) -> None:
        """Forget the blocks in these slots, which are free then."""
        self._clear(slots)
        self._free += slots.tolist()

    def give_back(self, slots: Array) -> None:
        """Taken slots in which nothing was stored."""
        self._free += slots.tolist()

    def _clear(self, slots: Array) -> None:
        if len(slots):
            self._note(slots)
            self._table.clear(slots)
            self._table.bump()

    def _note(self, slots: Array) -> None:
        """A power cut could bring these entries back: where their data has no sum, that must not meet other data."""
        flags = self._table.entries["flags"][slots]
        self._to_sync |= bool(((flags & fileformat.DURABLE != 0) & (flags & fileformat.CHECKED == 0)).any())
