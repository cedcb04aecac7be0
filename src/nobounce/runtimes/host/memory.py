"""Where the host runtimes' memory lies, and which allocation an address belongs to.

`cpu` gives out memory the host can use as it is. `sim` gives out addresses from ranges that are mapped
PROT_NONE, as a discrete GPU's are for the host: what is stored lies elsewhere, and host code that
cheats crashes at once. Freed addresses are not given out again soon, so that a use after free is an
error and not a surprise.
"""

from __future__ import annotations

import errno
import resource
import sys
from bisect import bisect_right
from collections.abc import Callable

from nobounce.clock import Scheduler
from nobounce.errors import OutOfMemoryError
from nobounce.facts.machine import this_machine
from nobounce.records import record
from nobounce.route.types import MemoryKind
from nobounce.runtimes import libc
from nobounce.runtimes.host.tickets import Ordered

_CHUNK = 64 << 30
_CHUNKS_BEFORE_REUSE = 16


@record(frozen=False)
class Allocation:
    """One allocation. `backing` is where its bytes lie for the host; `mapped` bytes
    are to be unmapped there."""

    base: int
    nbytes: int
    kind: MemoryKind
    device: int | None
    backing: int
    mapped: int = 0
    registered: bool = False
    order: Ordered | None = None
    """Of memory that alloc_async made."""
    ended: bool = False

    def at(self, address: int) -> int:
        """Where the byte at `address` lies for the host."""
        return self.backing + (address - self.base)


class AllocationMap:
    """Allocations by address. Lookups take no lock: writers publish a new pair of lists."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._lock = scheduler.lock()
        self._view: tuple[list[int], list[Allocation]] = ([], [])

    def reset_lock(self) -> None:
        """In a forked child, where another thread of the parent may have held it."""
        self._lock = self._scheduler.lock()

    def find(self, address: int) -> Allocation | None:
        """The allocation that holds `address`, interior addresses included."""
        bases, allocations = self._view
        at = bisect_right(bases, address) - 1
        if at < 0:
            return None
        found = allocations[at]
        return found if address - found.base < found.nbytes else None

    def add(self, allocation: Allocation) -> bool:
        """False, and nothing changes, when it overlaps another."""
        with self._lock:
            bases, allocations = self._view
            at = bisect_right(bases, allocation.base)
            if at and allocations[at - 1].base + allocations[at - 1].nbytes > allocation.base:
                return False
            if at < len(bases) and bases[at] < allocation.base + allocation.nbytes:
                return False
            self._view = (
                [*bases[:at], allocation.base, *bases[at:]],
                [*allocations[:at], allocation, *allocations[at:]],
            )
            return True

    def remove(self, allocation: Allocation) -> bool:
        """False when another thread has removed it."""
        with self._lock:
            bases, allocations = self._view
            at = bisect_right(bases, allocation.base) - 1
            if at < 0 or allocations[at] is not allocation:
                return False
            allocation.ended = True
            self._view = ([*bases[:at], *bases[at + 1 :]], [*allocations[:at], *allocations[at + 1 :]])
            return True

    def all(self) -> list[Allocation]:
        return list(self._view[1])

    def __del__(
        self,
        at_exit: Callable[[], bool] = sys.is_finalizing,
        unmap: Callable[[int, int], None] = libc.unmap,
    ) -> None:
        """What was not freed goes with the runtime. At exit it stays: threads that end with the
        process may write to it."""
        if not at_exit():
            for allocation in getattr(self, "_view", ((), ()))[1]:
                if allocation.mapped:
                    unmap(allocation.backing, allocation.mapped)


class HostSpace:
    """Memory of `cpu`: what the host has, huge pages where an allocation is large enough for one."""

    def allocate(self, nbytes: int, kind: MemoryKind, device: int | None) -> Allocation:
        """Raises OutOfMemoryError."""
        mapped = libc.round_up(nbytes, libc.PAGE)
        if nbytes > host_memory_nbytes():
            raise OutOfMemoryError(
                f"{nbytes} bytes of {kind.value} memory asked for, this process may have "
                f"{host_memory_nbytes()} "
                f"({this_machine().memory_from})"
            )
        try:
            base = libc.map_huge(mapped) if nbytes >= libc.HUGE_PAGE else libc.map_memory(mapped)
        except OSError as e:
            raise OutOfMemoryError(f"{nbytes} bytes of {kind.value} memory: mmap: {_why(e)}") from e
        return Allocation(base, nbytes, kind, device, base, mapped)

    def release(self, allocation: Allocation) -> None:
        if allocation.mapped:
            libc.unmap(allocation.backing, allocation.mapped)

    def reset_lock(self) -> None:
        """In a forked child, where another thread of the parent may have held it."""

    def owns(self, address: int) -> bool:
        """Whether `address` can only be device memory, allocated or not."""
        return False


class _Chunk:
    """A range of addresses that the host may not touch, given out from low to high."""

    def __init__(self) -> None:
        self.base = libc.map_memory(_CHUNK, libc.PROT_NONE)
        self.used = 0
        self.live = 0


class DeviceSpace(HostSpace):
    """Memory of `sim`: device addresses that mean nothing to the host."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._lock = scheduler.lock()
        self._chunks: list[_Chunk] = []

    def allocate(self, nbytes: int, kind: MemoryKind, device: int | None) -> Allocation:
        found = super().allocate(nbytes, kind, device)
        if kind is not MemoryKind.DEVICE:
            return found
        try:
            found.base = self._reserve(libc.round_up(nbytes, libc.HUGE_PAGE) + libc.HUGE_PAGE)
        except OSError as e:
            super().release(found)
            raise OutOfMemoryError(
                f"{nbytes} bytes of device memory: sim takes addresses in ranges of {_CHUNK >> 30} GiB: "
                f"mmap: {_why(e)}"
            ) from e
        return found

    def release(self, allocation: Allocation) -> None:
        super().release(allocation)
        if allocation.kind is MemoryKind.DEVICE:
            with self._lock:
                for chunk in self._chunks:
                    if 0 <= allocation.base - chunk.base < _CHUNK:
                        chunk.live -= 1

    def owns(self, address: int) -> bool:
        return any(0 <= address - chunk.base < _CHUNK for chunk in self._chunks)

    def reset_lock(self) -> None:
        self._lock = self._scheduler.lock()

    def _reserve(self, span: int) -> int:
        with self._lock:
            if not self._chunks or self._chunks[-1].used + span > _CHUNK:
                self._next_chunk()
            chunk = self._chunks[-1]
            base = chunk.base + chunk.used
            chunk.used += span
            chunk.live += 1
            return base

    def _next_chunk(self) -> None:
        if len(self._chunks) >= _CHUNKS_BEFORE_REUSE:
            for i, chunk in enumerate(self._chunks):
                if not chunk.live:
                    chunk.used = 0
                    self._chunks.append(self._chunks.pop(i))
                    return
        self._chunks.append(_Chunk())

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if not at_exit():  # names of this module are gone by then
            for chunk in getattr(self, "_chunks", ()):
                libc.unmap(chunk.base, _CHUNK)


def _why(error: OSError) -> str:
    """What mmap answered, with the limit on addresses where this process has one: the machine
    may have memory to spare."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if error.errno != errno.ENOMEM or limit == resource.RLIM_INFINITY:
        return str(error.strerror)
    return (
        f"{error.strerror}: `ulimit -v` allows this process {limit} bytes of addresses: raise it, or choose "
        "`ulimit -v unlimited`"
    )


def host_memory_nbytes() -> int:
    """Bytes of memory that this process may have: the machine's, or its control group's."""
    return this_machine().memory_nbytes
