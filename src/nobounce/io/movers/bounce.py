"""The bounce ring of a device: pinned host memory that fallback relays through, made once and bounded.

Pinning runs at 1.5 to 5 GiB/s, so slots are made on first need, kept until `trim`, and never
made per call (J-15, J-21).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from nobounce.errors import NobounceError, OutOfMemoryError
from nobounce.io import hooks
from nobounce.io.quiet import quiet_of
from nobounce.io.strategy import MAX_SLOTS, SLOT_NBYTES
from nobounce.runtimes.base import Runtime

REFUSED_SECONDS = 1.0
"""After pinned memory was short, slots that are there have to do for so long: asking for it again at
each slot takes its time."""
PATIENCE = 5.0
"""Seconds to wait for gates to open before the first copy streams are made all the same:
gates may be other devices'."""


class Ring:
    """Pinned slots of `SLOT_NBYTES` bytes for one device, at most `MAX_SLOTS`, each with an
    event for its last copy."""

    def __init__(
        self, runtime: Runtime, device: int, *, slot_nbytes: int = SLOT_NBYTES, most: int = MAX_SLOTS
    ) -> None:
        self.runtime, self.device, self.slot_nbytes, self.most = runtime, device, slot_nbytes, most
        self._changed = runtime.scheduler.condition()
        self._free: list[tuple[int, int]] = []
        self.wanted = 0
        """Threads waiting for a slot: whoever could use its own again gives it back then."""
        self._refused_until = -math.inf
        self._made = self._streams_made = 0
        self._streams: list[int] = []
        self._relays = 0
        self._views: dict[int, memoryview] = {}

    @contextmanager
    def shared(self) -> Iterator[None]:
        """While a relay that would take all it can get is at work."""
        with self._changed.mutex:
            self._relays += 1
        try:
            yield
        finally:
            with self._changed.mutex:
                self._relays -= 1

    @property
    def relays(self) -> int:
        """Relays at work that would take all they can get."""
        return self._relays

    @property
    def fair(self) -> int:
        """Slots that each relay at work may hold: three quarters of all, divided. The rest is
        for whoever needs just one."""
        return max(1, (self.most - self.most // 4) // max(1, self._relays))

    def acquire(self, *, wait: bool) -> tuple[int, int] | None:
        """A free slot as (address, event); None when there is none and `wait` is False.

        While a stream is held at a gate none is made but the first one: pinning memory may wait for the
        device, which waits for the gate. So nobody may wait here who holds a slot. Raises OutOfMemoryError
        when not even one slot can be pinned.
        """
        while True:
            with self._changed.mutex:
                while True:
                    # Who need not wait leaves it to who must.
                    if len(self._free) > (0 if wait else self.wanted):
                        return self._free.pop()
                    made = self._may_make() if self._made < self.most and not self._is_refused() else None
                    if made is not None:
                        self._made += 1
                        break
                    if not wait:
                        return None
                    self.wanted += 1
                    try:
                        self._changed.wait()
                    finally:
                        self.wanted -= 1
            try:
                slot = self._make()
            finally:
                made()
            if slot is not None:
                return slot
            with self._changed.mutex:
                self._refused_until = self.runtime.scheduler.now() + REFUSED_SECONDS
                self._check_some()

    def _is_refused(self) -> bool:
        """Whether pinned memory was short a moment ago, and there are slots to go on with."""
        return self._made > 0 and self.runtime.scheduler.now() < self._refused_until

    def _may_make(self) -> Callable[[], None] | None:
        """What to call once a slot is made; None while none may be."""
        quiet = quiet_of(self.runtime)
        if quiet is not None and quiet.try_call():
            return quiet.called
        return None if quiet is not None and self._made else _nothing

    def prepare(self, slots: int, streams: int) -> None:
        """Have so many slots free, and as many for each gate that is closed, and copy streams made, now:
        nothing is allocated while a stream is held at a gate."""
        quiet = quiet_of(self.runtime)
        wanted = slots * (1 + (quiet.gates if quiet is not None else 0))
        if (
            len(self._free) >= slots
            and self._made >= min(wanted, self.most)
            and self._streams_made >= streams
        ):
            return
        while True:
            with self._changed.mutex:
                enough = len(self._free) >= slots and self._made >= wanted
                if enough or self._made >= self.most or self._is_refused():
                    break
                self._made += 1
            slot = self._make()
            if slot is None:
                self._refused_until = self.runtime.scheduler.now() + REFUSED_SECONDS
                break
            self.release(slot)
        with self._changed.mutex:
            self._check_some()
            new = max(0, streams - self._streams_made)
        if new:
            self._make_streams(new, wait=True)

    def _check_some(self) -> None:
        if self._made == 0:
            raise OutOfMemoryError(
                f"cannot pin a bounce buffer of {self.slot_nbytes} bytes on {self.runtime.name}"
            )

    def _make_streams(self, wanted: int, *, wait: bool) -> bool:
        """Make copy streams; False, without `wait`, where a stream is held at a gate and the
        runtime cannot make any."""
        ahead = self.runtime.streams_ahead
        quiet = quiet_of(self.runtime) if ahead else None
        if quiet is not None:
            if wait:
                quiet.wait_to_call(PATIENCE)
            elif not quiet.try_call():
                return False
        try:
            with self._changed.mutex:
                count = max(wanted, ahead - self._streams_made)
                self._streams_made += count
            made: list[int] = []
            try:
                for _ in range(count):
                    made.append(self.runtime.stream_create(self.device, nonblocking=True))
            except NobounceError:
                if len(made) < wanted:  # fewer ahead is no reason to fail
                    raise
            finally:
                with self._changed.mutex:
                    self._streams_made -= count - len(made)
                    self._streams += made
                    self._changed.notify_all()
        finally:
            if quiet is not None:
                quiet.called()
        return True

    def _make(self) -> tuple[int, int] | None:
        """A slot that is counted already. Where none comes of it that is taken back, and who
        waits for one tries as well."""
        event = address = 0
        try:
            event = self.runtime.event_create(self.device, timing=False)
            address = self.runtime.alloc_bounce(self.slot_nbytes)
        except OutOfMemoryError:
            return None
        finally:
            if not address:
                with self._changed.mutex:
                    self._made -= 1
                    self._changed.notify_all()
                if event:
                    self.runtime.event_destroy(event)
        if not address:  # null is no memory, and asking again would give no other
            return None
        hooks.pinned(self.runtime.name, self.slot_nbytes)
        return address, event

    def release(self, slot: tuple[int, int]) -> None:
        with self._changed.mutex:
            self._free.append(slot)
            self._changed.notify_all()  # some wait for slots, some for streams

    def borrow(self) -> tuple[int, tuple[int, int]] | None:
        """A copy stream and a slot that are there, for whoever waits for nothing; None too while
        a large relay is at work."""
        with self._changed.mutex:
            if not self._streams or self._relays or len(self._free) <= self.wanted:
                return None
            return self._streams.pop(), self._free.pop()

    def lend(self, streams: list[int], slots: list[tuple[int, int]]) -> None:
        """Put a copy stream and a slot into these lists, which are the borrower's; waits for them, too. What
        is there is moved by a call into C, which no interrupt cuts in two."""
        with self._changed.mutex:
            if self._streams and not self._relays and len(self._free) > self.wanted:
                streams.extend(map(list.pop, (self._streams,)))
                slots.extend(map(list.pop, (self._free,)))
                return
        streams.append(self.copy_stream())
        slot = self.acquire(wait=True)
        if slot is not None:
            slots.append(slot)

    def take_back(self, streams: list[int], slots: list[tuple[int, int]]) -> None:
        """What `lend` gave, as far as it is still there."""
        with self._changed.mutex:
            with suppress(IndexError):
                self._streams.extend(iter(streams.pop, -1))
            with suppress(IndexError):
                self._free.extend(iter(slots.pop, (-1, -1)))
            self._changed.notify_all()

    def give_back(self, stream: int, slot: tuple[int, int]) -> None:
        """What `borrow` gave."""
        with self._changed.mutex:
            self._streams.append(stream)
            self._free.append(slot)
            self._changed.notify_all()

    def view(self, address: int) -> memoryview:
        """All of the slot at `address`; made once, as slots are."""
        view = self._views.get(address)
        if view is None:
            memory = (ctypes.c_char * self.slot_nbytes).from_address(address)
            view = self._views[address] = memoryview(memory).cast("B")
        return view

    def abandon(self, slots: int) -> None:
        """So many slots never come back, because something may write into them for good:
        others may be made for them."""
        with self._changed.mutex:
            self._made -= slots
            self._changed.notify_all()

    def trim(self) -> int:
        """Give the free slots back; returns their bytes. None while a stream is held at a gate:
        unpinning waits for the device."""
        quiet = quiet_of(self.runtime)
        if quiet is not None and not quiet.try_call():
            return 0
        given = 0
        try:
            while True:
                with self._changed.mutex:
                    if len(self._free) <= self.wanted:
                        return given * self.slot_nbytes
                    address, event = self._free.pop()
                    self._views.pop(address, None)
                try:
                    self.runtime.event_destroy(event)
                    self.runtime.free_bounce(address, self.slot_nbytes)
                finally:
                    self.abandon(1)
                given += 1
                hooks.pinned(self.runtime.name, -self.slot_nbytes)
        finally:
            if quiet is not None:
                quiet.called()

    def copy_stream(self) -> int:
        """A private non-blocking stream, to be given back with `return_stream`. Take it before a slot, never
        behind one: where no stream can be made while one is held at a gate, it is waited for."""
        while True:
            with self._changed.mutex:
                if self._streams:
                    return self._streams.pop()
                some = self._streams_made > 0
            if self._make_streams(1, wait=not some):
                continue
            with self._changed.mutex:
                self._changed.wait_for(lambda: bool(self._streams), 0.1)

    def return_stream(self, stream: int, *, aside: bool = False) -> None:
        """`aside`: copies of other transfers may still be under way on it, so whoever wants one next
        had better take another."""
        with self._changed.mutex:
            self._streams.insert(0 if aside else len(self._streams), stream)
            self._changed.notify_all()

    @property
    def pinned_nbytes(self) -> int:
        """Bytes of pinned memory the ring holds."""
        return self._made * self.slot_nbytes


class Rings:
    """One ring per device."""

    def __init__(self, lock: Callable[[], object]) -> None:
        self._rings: dict[tuple[int, int], Ring] = {}
        self._lock = lock()

    def trim(self) -> int:
        """As `Ring.trim`, of every ring."""
        return sum(ring.trim() for ring in list(self._rings.values()))

    def get(self, runtime: Runtime, device: int) -> Ring:
        key = (id(runtime), device)
        ring = self._rings.get(key)
        if ring is None:
            with self._lock:  # type: ignore[attr-defined]
                ring = self._rings.setdefault(key, Ring(runtime, device))
        return ring


def _nothing() -> None:
    return None
