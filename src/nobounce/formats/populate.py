"""Fresh memory made ready ahead of a direct read.

Pages of a new allocation are zeroed when they are first touched. Left to the direct reads themselves, each
waits for that before its request reaches the disk; done by one thread running ahead, the disk never waits.
"""

from __future__ import annotations

from nobounce.buffer import Buffer

STEP = 32 << 20
MIN_NBYTES = 64 << 20


class Populate:
    """Touches a buffer's memory from its start on, as a unit of work for the engine's
    pool, until done or stopped."""

    tickets = 1

    def __init__(self, buffer: Buffer) -> None:
        self._runtime = buffer.device._runtime
        self._device, self._address, self._nbytes = buffer.device.ordinal, buffer.handle, buffer.nbytes
        self._changed = self._runtime.scheduler.condition()
        self._stopped = self._busy = False

    def work(self) -> None:
        direct = self._runtime.direct_io()
        if direct is None:
            return
        for start in range(0, self._nbytes, STEP):
            with self._changed.mutex:
                if self._stopped:
                    return
                self._busy = True
            try:
                direct.prepare(self._device, self._address + start, min(STEP, self._nbytes - start))
            finally:
                with self._changed.mutex:
                    self._busy = False
                    self._changed.notify_all()

    def stop(self) -> None:
        """No step is under way afterwards and none begins: the memory may be given back."""
        with self._changed.mutex:
            self._stopped = True
            self._changed.wait_for(lambda: not self._busy)


def populate_ahead(buffer: Buffer) -> Populate | None:
    """Work for the engine, where the host can reach the memory and there is enough of it to be
    worth a thread; else None."""
    runtime = buffer.device._runtime
    if not runtime.capabilities.host_addressable or buffer.nbytes < MIN_NBYTES:
        return None
    return Populate(buffer)
