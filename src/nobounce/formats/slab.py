"""A model's first allocation, made while its header is read.

A GPU that nobody used for 50 ms takes 3 to 4 ms to allocate, whatever the size, where a busy one takes 0.4 (benchmarks/README.md); reading
and checking a header takes 1 to 3. The first 8 bytes of a file say how much memory it will want.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from nobounce.clock import THREADS
from nobounce.formats.placement import PAGE, extent
from nobounce.io.engine import engine_for

if TYPE_CHECKING:
    from nobounce.buffer import Buffer
    from nobounce.device import Device

LEAST_NBYTES = 64 << 20
"""Bytes below which a file is loaded before another thread were worth waking."""

AWAKE_SECONDS = 1e-3
"""How long to wait for that thread: it takes a tenth, and one that is not there by then will do it later."""


class SlabAhead:
    """Memory of `device` for the first file of a model, and for any other on demand; a unit of work for the engine's pool."""

    tickets = 1

    def __init__(self, device: Device) -> None:
        self._device = device
        runtime = device._runtime
        self._useful = runtime.scheduler is THREADS and not runtime.capabilities.host_addressable
        self._changed = runtime.scheduler.condition()
        self._nbytes = 0
        self._under_way = self._begun = False
        self._slab: Buffer | None = None

    def begin(self, data_offset: int, file_nbytes: int) -> None:
        """Allocate for a file whose data section begins at `data_offset`, on another thread; nothing is raised."""
        first, end = extent(data_offset, file_nbytes, PAGE)
        if not self._useful or self._under_way or self._slab is not None or end - first < LEAST_NBYTES:
            return
        self._nbytes, self._under_way = end - first, True
        try:
            engine_for(self._device._runtime).submit(self)
        except BaseException as e:
            self._under_way = False
            if not isinstance(e, RuntimeError | MemoryError):
                raise
            return
        # A header is checked without ever letting go of the interpreter: a thread that is not awake by then would wait for that.
        with self._changed.mutex:
            self._changed.wait_for(lambda: self._begun, AWAKE_SECONDS)

    def work(self) -> None:
        """What the pool's thread does. Whoever takes the memory allocates again where this failed, and says why."""
        with self._changed.mutex:
            self._begun = True
            self._changed.notify_all()
        slab: Buffer | None = None
        try:
            with contextlib.suppress(Exception):
                slab = self._device.allocate(self._nbytes)
        finally:
            with self._changed.mutex:
                self._slab, self._under_way = slab, False
                self._changed.notify_all()

    def take(self, nbytes: int) -> Buffer:
        """A slab of so many bytes: the one made ahead where it has just that size. Raises as `Device.allocate`."""
        slab = self._made()
        if slab is not None:
            if slab.nbytes == nbytes:
                return slab
            slab.close()
        return self._device.allocate(nbytes)

    def close(self) -> None:
        """Give back what nobody has taken."""
        slab = self._made()
        if slab is not None:
            slab.close()

    def _made(self) -> Buffer | None:
        with self._changed.mutex:
            self._changed.wait_for(lambda: not self._under_way)
            slab, self._slab = self._slab, None
        return slab
