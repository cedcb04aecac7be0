"""What is kept for the next transfer, given back now."""

from __future__ import annotations

from nobounce.io.engine import engines
from nobounce.io.movers import gather, pollers, relay_pipe
from nobounce.uninterrupted import uninterrupted


def trim() -> int:
    """Give pinned memory back that is kept for the next transfers and that none uses now; returns
    how many bytes that was.

    It is what files are relayed through on their way to and from a device: 4 MiB a slot, at most 32 slots for
    each device. The next transfer pins anew, at 1.5 to 5 GiB/s. The kernel's rings, and the threads that
    serve them, go back as well. Nothing is unpinned while a stream is held for a transfer, as that would wait
    for it. Raises DeviceError.
    """

    def give_back(_: object) -> int:
        pollers.trim()
        gather.trim()
        relay_pipe.trim()
        return sum(engine.rings.trim() for engine in engines())

    return uninterrupted(give_back)
