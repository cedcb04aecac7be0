"""A relay whose reads the kernel does: one thread keeps many reads under way through io_uring and
queues the copies behind them.

Threads of this process hand the interpreter's lock to one another at every call, four times a slot; with
twelve of them that takes as long as copying 2 MiB. io_uring's workers copy from the page cache without it, so
one thread reaches the link, and a program's own threads are left alone. Slots are divided so that sixteen
reads are under way, also for a stream that may hold four slots only; copies of neighbours that ended together
are one call. Transfers under way at once share a `Hub`.
"""

from __future__ import annotations

from collections.abc import Callable

from nobounce.io import hooks
from nobounce.io.movers import fallback
from nobounce.io.movers.bounce import Ring
from nobounce.io.movers.fallback import Mover, PartialError, Relay
from nobounce.io.movers.relay_hub import join, leave
from nobounce.io.movers.relay_slots import Unit
from nobounce.io.target import Chunk, Piece, Target, joined
from nobounce.runtimes.base import CopyCalls

UNITS = 16
"""Reads that a relay keeps under way, if its slots can be divided into as many."""
LEAST_NBYTES = 256 << 10
"""Smaller reads cost more to ask for than they gain by being many."""


class UringRelay(Relay):
    """The share of one transfer, which holds up to `target.strategy.kernel_slots` slots of the ring.

    Whoever drives the hub changes `out`, `arrived`, `lost` and what `again` notes, whatever this thread does;
    `chunk` and `begun` are the driver's from `give` until `chunk` is None again.
    """

    def __init__(self, target: Target, ring: Ring) -> None:
        super().__init__(target, ring)
        self.target, self.most_slots = target, target.strategy.kernel_slots
        self.chunk: Chunk | None = None
        self.begun = 0
        """Bytes of the chunk whose reads have been started."""
        self.out = 0
        """Units that are read into or copied from."""
        self.arrived: list[Piece] = []
        self.lost: Exception | None = None
        self.is_ready: Callable[[], bool] = self._is_handed_over
        self._end: int | None = None
        self._failure: tuple[int, OSError] | None = None
        self._changed = target.runtime.scheduler.condition()
        self._awake = False
        self.hub = join(self, ring, unit_nbytes(target, ring))

    # what the hub asks

    @property
    def stream(self) -> int:
        return self._stream or 0

    @property
    def calls(self) -> CopyCalls:
        return self._calls

    def is_over(self) -> bool:
        """Whether nothing more need be read."""
        return self._failure is not None or self.lost is not None

    def sleep(self) -> None:
        with self._changed.mutex:
            self._changed.wait_for(lambda: self._awake)
            self._awake = False

    def wake(self) -> None:
        with self._changed.mutex:
            self._awake = True
            self._changed.notify_all()

    def again(self, unit: Unit) -> bool:
        """A read that came back short or failed: a plain one says where the file ends, or what is wrong."""
        moved, ended, error = self._fill(
            unit.address, unit.file_offset, unit.nbytes, unit.lead, direct=unit.chunk.direct
        )
        position = unit.file_offset + moved
        if ended:
            self._end = position if self._end is None else min(self._end, position)
        if error is not None and (self._failure is None or position < self._failure[0]):
            self._failure = position, error
        unit.nbytes = moved
        return moved > 0

    def arrive(self, pieces: list[Piece]) -> None:
        with self._changed.mutex:
            self.arrived += pieces

    def lose(self, error: Exception) -> None:
        """Nothing that is under way will be heard of again."""
        if self.out or self.chunk is not None:
            self.lost = self.lost or error
        self.chunk, self.out = None, 0

    def now(self) -> float:
        return self._now()

    def tell(self, stream: int, nbytes: int, began: float) -> None:
        t = self.target
        hooks.copied(t.device_name, stream, t.op, nbytes, began, t.runtime.scheduler.now())

    # what a worker calls

    def _read(self, chunk: Chunk) -> tuple[list[Piece], int | None]:
        self.ready()
        hub = self.hub
        self.begun = 0
        if not self.is_over() and not hub.broken:
            self.chunk = chunk
            hub.give(self)
            hub.until(self, self._is_handed_over)
        if hub.broken and self.begun < chunk.nbytes and self.lost is None:
            self.lost = hub.failure()
        return self._report(), self._end

    def _is_handed_over(self) -> bool:
        return self.chunk is None or self.hub.broken

    def _is_quiet(self) -> bool:
        return self.out == 0 and (self.chunk is None or self.hub.broken)

    def _report(self) -> list[Piece]:
        """What has arrived since the last report. Raises PartialError and what a
        runtime raised, once each."""
        lost, self.lost = self.lost, None
        if lost is not None:
            raise lost
        with self._changed.mutex:
            pieces, self.arrived = self.arrived, []
        failure, self._failure = self._failure, None
        if failure is not None:
            raise PartialError(failure[1], pieces, failure[0]) from failure[1]
        return joined(pieces)

    def step_out(self) -> None:
        """As `Relay.step_out`; a caller's function may take its time, so another thread drives meanwhile."""
        self.hub.release(self)
        super().step_out()

    def flush(self) -> list[Piece]:
        """As `Relay.flush`; also raises PartialError. Returns only when the kernel
        writes into no slot any more."""
        if self.out:
            self._step_in()
        try:
            self.hub.until(self, self._is_quiet)
        finally:
            leave(self, self.hub)
            super().flush()
        return self._report()


def unit_nbytes(target: Target, ring: Ring) -> int:
    """Bytes of one read: a power of two, so that transfers of like sizes have the same."""
    share = min(ring.slot_nbytes, max(LEAST_NBYTES, target.strategy.kernel_slots * ring.slot_nbytes // UNITS))
    return 1 << share.bit_length() - 1


def mover(target: Target) -> Mover:
    """A worker's own fallback for this target.

    Where a signal may interrupt the thread at any moment it could lose sight of a read
    that the kernel still does.
    """
    if (
        target.ring is not None
        and target.strategy.kernel_slots
        and not target.runtime.scheduler.interruptible()
    ):
        try:
            return UringRelay(target, target.ring)
        except OSError:
            pass  # no descriptor or no locked memory left for another ring: the plain relay needs neither
    return fallback.mover(target)
