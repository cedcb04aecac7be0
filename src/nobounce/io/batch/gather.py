"""The reads of a batch that are gathered: what the page cache holds, and what a device's memory gets through bounce slots.

Threads take windows of requests, as arrays, whatever calls they came by. Into memory that the host reaches blocks are read in
place. For a device they are packed into a slot, in the order in which they lie there, so that neighbours are one copy; while a
slot's copies are under way the thread fills another.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nobounce.clock import THREADS
from nobounce.errors import NobounceError
from nobounce.io.batch.windows import (
    BUFFERED,
    DIRECT,
    TRIED,
    Ended,
    Part,
    Relay,
    Window,
    nothing,
    read,
    split,
)
from nobounce.io.engine import machine_for
from nobounce.io.movers.gather import Blocks, blocks
from nobounce.io.strategy import Gathering, gathering
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
        self._queue: deque[Part] = deque()
        self._queued = self._workers = 0
        self._plan = Gathering(1, 1, 1)
        self._ended: list[Ended] = []
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
        align = target.relay_align
        direct = (t.nbytes[slots] % align == 0) & (t.file_offset[slots] % align == 0)
        if target.relay_fd >= 0 and target.ring is not None:
            how[~by_choice & direct] = DIRECT
        if target.drop_cache:
            chosen &= how == DIRECT
        return chosen, how

    def put(self, group: Group, slots: Array, how: Array) -> None:
        """Have these read."""
        import numpy as np

        t = self._table
        if group.target.ring is not None and len(slots) > 1:
            at = t.buffer_offset[slots]
            if not bool((at[1:] >= at[:-1]).all()):
                order = np.argsort(at, kind="stable")
                slots, how = slots[order], how[order]
        found = [int(how[0])] if bool((how == how[0]).all()) else np.unique(how).tolist()
        with self._changed.mutex:
            for one in found:
                chosen = slots if len(found) == 1 else slots[how == one]
                self._queue.append(Part(group, chosen, one))
            self._queued += len(slots)
            self.busy += len(slots)

    def start(self, helpers: int) -> None:
        """Have the pool's threads begin. `helpers`: so many threads are about to work here besides (`work`)."""
        with self._changed.mutex:
            if not self._queued:
                return
            nbytes = sum(int(self._table.nbytes[p.slots].sum()) for p in self._queue)
            settings = self._queue[0].group.settings
            plan = self._plan = gathering(settings, machine_for(THREADS), self._queued, nbytes)
            more = max(0, plan.width - helpers - self._workers)
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
        return self._queued > 0

    def take(self) -> list[Ended]:
        """What has ended."""
        with self._changed.mutex:
            found, self._ended = self._ended, []
            self.busy -= sum(len(e.slots) for e in found)
        return found

    def withdraw(self, wanted: Array) -> Array:
        """Take those of these that no thread has begun out of the queue again; returns them."""
        import numpy as np

        gone: list[Array] = [np.zeros(0, np.int64)]
        with self._changed.mutex:
            kept: deque[Part] = deque()
            for part in self._queue:
                out = np.isin(part.slots, wanted)
                gone.append(part.slots[out])
                if not out.all():
                    kept.append(part._replace(slots=part.slots[~out]))
            self._queue = kept
            taken = np.concatenate(gone)
            self._queued -= len(taken)
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
        window = self._claim(until)
        if window is None:
            return
        by = blocks()
        try:
            while window is not None:
                ring = window.parts[0].group.target.ring
                window = (
                    self._in_place(window, by, until)
                    if ring is None
                    else self._relay(window, ring, by, until)
                )
        finally:
            by.close()

    def _in_place(self, window: Window, by: Blocks, until: float) -> Window | None:
        """Read the window into memory that the host reaches; returns the next one."""
        self._tell(split(window, read(window, window.addresses, by)))
        return self._claim(until)

    def _relay(self, window: Window, ring: Ring, by: Blocks, until: float) -> Window | None:
        """Move the window, and those behind it that take the same way; returns the next that does not."""
        following: Window | None = window
        try:
            relay = Relay(ring)
        except NobounceError as e:
            self._tell(split(window, nothing(window), e))
            return self._claim(until)
        try:
            while following is not None and following.parts[0].group.target.ring is ring:
                self._tell(relay.move(following, by))
                following = self._claim(until)
            self._tell(relay.finish())
        finally:
            relay.close()
        return following

    def _claim(self, until: float) -> Window | None:
        """The next window: requests that go through one device's slots, or through none. None too once it is too late."""
        if self._engine.scheduler.now() >= until:
            return None
        with self._changed.mutex:
            parts: list[Part] = []
            rows, room = self._plan.rows, self._plan.nbytes
            while self._queue and rows > 0 and room > 0:
                part = self._queue[0]
                if parts and part.group.target.ring is not parts[0].group.target.ring:
                    break
                if parts and (part.how == DIRECT) != (parts[0].how == DIRECT):
                    break
                ends = self._table.nbytes[part.slots[:rows]].cumsum()
                fits = int(ends.searchsorted(room, "right"))
                if not fits:
                    if parts:
                        break
                    fits = 1  # larger than a share, not larger than a slot
                parts.append(part._replace(slots=part.slots[:fits]))
                if fits == len(part.slots):
                    self._queue.popleft()
                else:
                    self._queue[0] = part._replace(slots=part.slots[fits:])
                rows, room = rows - fits, room - int(ends[fits - 1])
            self._queued -= sum(len(p.slots) for p in parts)
        return self._window(parts) if parts else None

    def _window(self, parts: list[Part]) -> Window:
        import numpy as np

        t = self._table
        if len(parts) == 1:
            slots, target = parts[0].slots, parts[0].group.target
            fds = np.full(len(slots), target.relay_fd if parts[0].how == DIRECT else target.buffered_fd)
            bases: Any = target.address
        else:
            slots = np.concatenate([p.slots for p in parts])
            counts = [len(p.slots) for p in parts]
            each = [p.group.target for p in parts]
            fds = np.repeat(
                [a.relay_fd if p.how == DIRECT else a.buffered_fd for p, a in zip(parts, each, strict=True)],
                counts,
            )
            bases = np.repeat(np.array([a.address for a in each], np.int64), counts)
        return Window(parts, fds, t.file_offset[slots], t.nbytes[slots], t.buffer_offset[slots] + bases)

    def _tell(self, ended: list[Ended]) -> None:
        if not ended:
            return
        with self._changed.mutex:
            self._ended += ended
            self._changed.notify_all()
        self._wake()


class _Spell:
    """Work for the pool: `tickets` threads that serve the lane."""

    def __init__(self, lane: GatherLane, tickets: int) -> None:
        self._lane, self.tickets = lane, tickets

    def work(self) -> None:
        self._lane.serve()
