"""A model's first allocation, made while its header is read.

Allocating 8 GiB takes a GPU 3 to 4 ms, 0.4 right after as much was freed (benchmarks/README.md); reading and
checking a header takes 1 to 3. The first 8 bytes of a file say how much memory it will want.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Literal

from nobounce.clock import THREADS
from nobounce.errors import OutOfMemoryError
from nobounce.formats.placement import extent
from nobounce.formats.torchmem import empty_cache
from nobounce.io.engine import engine_for
from nobounce.route.types import MemoryKind

if TYPE_CHECKING:
    from nobounce.buffer import Buffer
    from nobounce.device import Device

LEAST_NBYTES = 64 << 20
"""Bytes below which a file is loaded before another thread were worth waking."""
GRAIN = 64 << 10
"""The largest alignment of direct requests that a slab made ahead allows for: what the
file wants is not known yet."""
AWAKE_SECONDS = 1e-3
"""How long to wait for that thread: it takes a tenth, and one that is not there by then
is not waited for again."""


class SlabAhead:
    """Memory of `device` for the first file of a model, and for any other on demand; a unit of
    work for the engine's pool."""

    tickets = 1

    def __init__(self, device: Device, kind: MemoryKind = MemoryKind.DEVICE) -> None:
        self._device, self._kind = device, kind
        runtime = device._runtime
        self._useful = runtime.scheduler is THREADS and not runtime.capabilities.host_addressable
        self._changed = runtime.scheduler.condition()
        self._nbytes = 0
        self._state: Literal["idle", "offered", "allocating", "over"] = "idle"
        self._slab: Buffer | None = None
        self._closed = False

    def begin(self, data_offset: int, file_nbytes: int) -> None:
        """Allocate for a file whose data section begins at `data_offset`, on another
        thread; nothing is raised."""
        first, end = extent(data_offset, file_nbytes, GRAIN)
        if not self._useful or self._state != "idle" or end - first < LEAST_NBYTES:
            return
        self._nbytes, self._state = end - first, "offered"
        try:
            engine_for(self._device._runtime).submit(self)
        except (RuntimeError, MemoryError):
            self._withdraw()
            return
        # A header is checked without ever letting go of the interpreter: a thread that is not awake by
        # then would wait for that.
        with self._changed.mutex:
            self._changed.wait_for(lambda: self._state != "offered", AWAKE_SECONDS)

    def work(self) -> None:
        """What the pool's thread does. Whoever takes the memory allocates again where
        this failed, and says why."""
        with self._changed.mutex:
            if self._state != "offered":
                return
            self._state = "allocating"
            self._changed.notify_all()
        slab: Buffer | None = None
        try:
            with contextlib.suppress(Exception):
                slab = self._device.allocate(self._nbytes, kind=self._kind)
        finally:
            with self._changed.mutex:
                unwanted = slab if self._closed else None
                self._slab = None if self._closed else slab
                self._state = "over"
                self._changed.notify_all()
            if unwanted is not None:
                unwanted.close()

    def take(self, nbytes: int) -> Buffer:
        """A slab of at least so many bytes: the one made ahead where it is just large enough. What torch
        keeps unused on a GPU is given back before memory is short. Raises as `Device.allocate`."""
        slab = self._made()
        if slab is not None:
            if nbytes <= slab.nbytes < nbytes + 2 * GRAIN:
                return slab
            slab.close()
        try:
            return self._device.allocate(nbytes, kind=self._kind)
        except OutOfMemoryError:
            if not empty_cache():
                raise
            return self._device.allocate(nbytes, kind=self._kind)

    def settle(self) -> None:
        """Nothing uses what `take` returned."""

    def close(self) -> None:
        """Give back what nobody has taken, also what is being allocated where an
        interrupt ends the wait for it."""
        self._closed = True
        slab = self._made()
        if slab is not None:
            slab.close()

    def _withdraw(self) -> None:
        """Under no lock: no thread begins with it any more, if none has."""
        with self._changed.mutex:
            if self._state == "offered":
                self._state = "over"

    def _made(self) -> Buffer | None:
        """What was made. A thread that has not begun by now is not waited for: all may be
        busy with something slow."""
        self._withdraw()
        with self._changed.mutex:
            self._changed.wait_for(lambda: self._state != "allocating")
            slab, self._slab = self._slab, None
        return slab
