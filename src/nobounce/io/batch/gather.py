"""The requests of a batch that are gathered: reads of what the page cache holds, and what goes through bounce
slots to or from a device.

Threads take windows of requests, as arrays, whatever calls they came by. Into memory that the host reaches
blocks are read in place. For a device they are packed into a slot, in the order in which they lie there, so
that neighbours are one copy; while a slot's copies are under way the thread fills another.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nobounce.clock import THREADS
from nobounce.errors import NobounceError
from nobounce.io.batch.relays import InPlace, ReadRelay, Ways, WriteRelay
from nobounce.io.batch.windows import (
    BUFFERED,
    DIRECT,
    TRIED,
    Ended,
    Part,
    Window,
    cut,
    nothing,
    split,
    window,
)
from nobounce.io.engine import machine_for
from nobounce.io.movers.gather import Blocks, blocks
from nobounce.io.movers.pollers import polled
from nobounce.io.strategy import PAGE, gathering
from nobounce.route import many

if TYPE_CHECKING:
    import numpy as np

    from nobounce.clock import Condition
    from nobounce.io.batch.group import Group
    from nobounce.io.batch.table import Table
    from nobounce.io.engine import Engine
    from nobounce.io.movers.bounce import Ring

    Array = np.ndarray[Any, Any]


class GatherLane:
    """A queue of requests and the threads that serve it; whoever waits for the batch is one of them."""

    def __init__(self, engine: Engine, table: Table, changed: Condition, wake: Callable[[], None]) -> None:
        """`changed` is notified of ends, `wake` called."""
        self._engine, self._table, self._changed, self._wake = engine, table, changed, wake
        self._added: list[Part] = []
        self._windows: deque[list[Part]] = deque()
        """Taken out, and ends put in, without a lock: each is one step of the interpreter, and threads that
        wait for a lock whose owner waits for the interpreter are slower than one."""
        self._ended: deque[Ended] = deque()
        self._workers, self._width, self._polled = 0, 1, 0
        self.waited_for = False
        """Whether a thread waits for `changed`, or is about to: set before it looks whether there
        is anything to wait for."""
        self.busy = 0
        """Requests put in whose ends have not been taken out."""

    def takes(self, group: Group, slots: Array) -> tuple[Array, Array]:
        """(those of these requests that are read here, how each is)."""
        import numpy as np

        t, target = self._table, group.target
        how = np.full(len(slots), BUFFERED, np.int8)
        chosen = (t.kind[slots] == many.WHOLE) & (t.nbytes[slots] <= group.most_gathered)
        cached = t.reason[slots] == group.cached_reason
        how[cached] = TRIED if group.nowait else BUFFERED
        by_choice = cached | (group.cache == "use")
        align = target.relay_align if group.op == "read" else max(target.relay_align, PAGE)
        direct = (t.nbytes[slots] % align == 0) & (t.file_offset[slots] % align == 0)
        if target.relay_fd >= 0 and target.ring is not None:
            how[~by_choice & direct] = DIRECT
        if group.op == "write":  # what goes through the page cache is the threads'
            return chosen & (how == DIRECT), how
        if target.drop_cache:  # no page may stay, and what btrfs has compressed leaves some
            chosen &= (how == DIRECT) & target.vouched
        return chosen, how

    def put(self, group: Group, slots: Array, how: Array) -> None:
        """Have these read."""
        import numpy as np

        t, target = self._table, group.target
        to = t.buffer_offset[slots]
        if target.ring is not None and not bool((to[1:] >= to[:-1]).all()):
            order = np.argsort(to, kind="stable")
            slots, how, to = slots[order], how[order], to[order]
        columns = slots, t.file_offset[slots], t.nbytes[slots], to + target.address
        alike = bool((how == how[0]).all())
        for one in [int(how[0])] if alike else np.unique(how).tolist():
            mine, at, nbytes, address = columns if alike else (c[how == one] for c in columns)
            self._added.append(Part.of(group, one, mine, (at, nbytes, address)))
        self.busy += len(slots)

    def start(self, helpers: int) -> None:
        """Have the pool's threads begin. `helpers`: so many threads are about to
        work here besides (`work`)."""
        added, self._added = self._added, []
        if added:
            count, nbytes = sum(len(p.slots) for p in added), sum(int(p.nbytes.sum()) for p in added)
            direct = any(p.how == DIRECT for p in added)
            settings = added[0].group.settings
            plan = gathering(settings, machine_for(THREADS), count, nbytes, direct=direct)
            self._width, self._polled = plan.width, plan.polled
            self._windows.extend(cut(added, plan.rows, plan.nbytes))
        with self._changed.mutex:
            more = max(0, min(self._width, len(self._windows)) - helpers - self._workers)
            self._workers += more
        if more:
            self._engine.submit(_Spell(self, more))

    @property
    def served(self) -> bool:
        """Whether any thread of the pool is at it."""
        return self._workers > 0

    @property
    def ready(self) -> bool:
        return bool(self._ended)

    @property
    def queued(self) -> bool:
        return bool(self._windows or self._added)

    def take(self) -> list[Ended]:
        """What has ended."""
        found = []
        while self._ended:
            found.append(self._ended.popleft())
        self.busy -= sum(len(e.slots) for e in found)
        return found

    def withdraw(self, wanted: Array) -> Array:
        """Take those of these that no thread has begun out of the queue again; returns them."""
        import numpy as np

        gone: list[Array] = [np.zeros(0, np.int64)]
        queued = [self._added]
        while (parts := self._next()) is not None:
            queued.append(parts)
        kept: list[list[Part]] = []
        for parts in queued:
            left = []
            for part in parts:
                out = np.isin(part.slots, wanted)
                gone.append(part.slots[out])
                if not out.all():
                    left.append(part.without(out) if out.any() else part)
            kept.append(left)
        self._added = kept[0]
        self._windows.extend(left for left in kept[1:] if left)
        taken = np.concatenate(gone)
        self.busy -= len(taken)
        return taken

    # what threads run

    def serve(self) -> None:
        """Read windows until there are none, as one of the pool's threads."""
        try:
            self.work()
        finally:
            with self._changed.mutex:
                self._workers -= 1
                self._changed.notify_all()

    def work(self, seconds: float = math.inf) -> None:
        """Read windows until there are none, or for about so many seconds."""
        until = self._engine.scheduler.now() + seconds
        mine = self._claim(until)
        if mine is None:
            return
        by = self._blocks()
        try:
            while mine is not None:
                mine = self._follow(mine, by, until)
        finally:
            by.close()

    def _blocks(self) -> Blocks:
        return (polled(self._polled, self._polled) if self._polled else None) or blocks()

    def _follow(self, mine: Window, by: Blocks, until: float) -> Window | None:
        """Move the window, and those behind it that take the same way; returns the next that does not."""
        ring = mine.parts[0].ring
        try:
            way = _way(mine, ring, by)
        except NobounceError as e:
            self._tell(split(mine, nothing(mine), e))
            return self._claim(until)
        following: Window | None = mine
        try:
            while following is not None and following.parts[0].goes_with(mine.parts[0]):
                self._tell(way.move(following))
                following = self._claim(until)
            self._tell(way.finish())
        finally:
            way.close()
        return following

    def _next(self) -> list[Part] | None:
        try:
            return self._windows.popleft()
        except IndexError:
            return None

    def _claim(self, until: float) -> Window | None:
        """The next window; None too once it is too late."""
        if self._engine.scheduler.now() >= until:
            return None
        parts = self._next()
        return None if parts is None else window(parts)

    def _tell(self, ended: list[Ended]) -> None:
        self._ended.extend(ended)
        if ended and self.waited_for:
            with self._changed.mutex:
                self._changed.notify_all()
        if ended:
            self._wake()


def _way(first: Window, ring: Ring | None, by: Blocks) -> Ways:
    """The way of this window and of those that go with it. Raises DeviceError and OutOfMemoryError."""
    if ring is None:
        return InPlace(by)
    relay = WriteRelay if first.parts[0].group.op == "write" else ReadRelay
    return relay(ring, by, scatters=not first.packed)


class _Spell:
    """Work for the pool: `tickets` threads that serve the lane."""

    def __init__(self, lane: GatherLane, tickets: int) -> None:
        self._lane, self.tickets = lane, tickets

    def work(self) -> None:
        self._lane.serve()
