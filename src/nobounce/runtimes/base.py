"""What a runtime offers, on plain integers: addresses, handles, bytes.

A runtime is one implementation of memory, streams and events. Everything above it works on this interface
alone, so nothing may assume that device memory is host memory. Stream handles 0 (null: the legacy stream of
the thread's current device), 1 (legacy) and 2 (per-thread) are accepted wherever a stream is (HIP rule 21).

Every method raises `DeviceError` with a `RuntimeStatus` for a call that HIP would refuse, `OutOfMemoryError`
where memory is short, and `UnavailableError` where the runtime is not there.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from nobounce.clock import THREADS, Scheduler
from nobounce.records import record
from nobounce.route.types import DirectFacts, MemoryKind
from nobounce.runtimes.powers import (
    HostRegistration,
    LastErrors,
    ManagedMemory,
    Modules,
    OrderedMemory,
    Peers,
    StreamTraits,
    Timing,
)

NULL_STREAM = 0
LEGACY_STREAM = 1
PER_THREAD_STREAM = 2


class CopyKind(enum.IntEnum):
    """hipMemcpyKind; DEFAULT infers the direction from the pointers (HIP rules 64, 65)."""

    HOST_TO_HOST = 0
    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    DEVICE_TO_DEVICE = 3
    DEFAULT = 4


@record
class Capabilities:
    """The optional powers of a runtime; the conformance class tests what is declared.

    `host_addressable`: the host can load and store device memory at its address, so fallback needs no relay.
    `page_cache_dma`: pages of a file mapping can be registered, read-only, and copied from by the device.
    `dlpack_device_type`: kDLCPU 1, kDLCUDA 2, kDLROCM 10; None where no framework knows the memory.
    """

    host_addressable: bool = False
    pinned: bool = True
    managed: bool = False
    priorities: bool = False
    peers: bool = False
    host_register: bool = False
    page_cache_dma: bool = False
    stream_ordered_alloc: bool = False
    graphs: bool = False
    pools: bool = False
    virtual_memory: bool = False
    modules: bool = False
    dlpack_device_type: int | None = None


@record
class PointerInfo:
    """What an address belongs to: `base` and `nbytes` of the allocation (0 for pageable
    memory, whose size is unknown)."""

    kind: MemoryKind
    device: int | None
    base: int
    nbytes: int


@record
class DeviceInfo:
    """Facts of one device. Bytes; None where the runtime does not know."""

    name: str
    total_nbytes: int | None = None
    pci_bus_id: str | None = None
    numa_node: int | None = None
    uuid: str | None = None
    architecture: str | None = None
    multiprocessors: int | None = None


class Gate(ABC):
    """Holds a stream at one point until `open` is called; see `Runtime.gate`."""

    @abstractmethod
    def open(self) -> None:
        """Let the stream go on. Any thread, any number of times."""

    promised = False
    """A thread of this library will open it, whatever happens (exits)."""
    can_look = False
    """Whether `look` may find out something."""
    on_reached: Callable[[], None] | None = None
    """What is called when the stream gets here."""

    def look(self) -> bool:
        """Whether the stream is known to have got here; calls `on_reached` in this thread
        if that has not been done.

        For a thread that waits anyway: it sees the stream arrive sooner than the runtime's own thread wakes
        up. A runtime that needs no looking says False.
        """
        return False


class DirectIO(ABC):
    """Direct transfers between a file and device memory. It never refuses by policy: only the judge does."""

    plain: bool = False
    """Whether `read` and `write` are the bare system calls at the given address, so that
    io_uring may stand in for them."""

    @abstractmethod
    def facts(self, device: int) -> DirectFacts:
        """What direct I/O to `device` can do, as plain data for the judge."""

    @abstractmethod
    def read(self, device: int, fd: int, address: int, nbytes: int, file_offset: int) -> int:
        """Read from `fd` (opened O_DIRECT) into device memory; returns bytes moved, maybe
        short, 0 at end of file.

        Raises OSError with the driver's errno, EREMOTEIO where the vendor's counters deny that bytes went
        direct, DeviceError for a runtime failure. Interrupted calls raise EINTR.
        """

    @abstractmethod
    def write(self, device: int, fd: int, address: int, nbytes: int, file_offset: int) -> int:
        """Write device memory to `fd` (opened O_DIRECT); returns bytes moved, maybe short."""

    def prepare(self, device: int, address: int, nbytes: int) -> None:  # noqa: B027 - optional
        """Make sure that memory about to be read into is there, for file systems
        that will not fault it in."""

    def deregister_file(self, fd: int) -> None:  # noqa: B027 - optional
        """Undo what the first transfer with `fd` has prepared: it is about to be closed."""

    def register_buffer(self, address: int, nbytes: int) -> None:  # noqa: B027 - optional
        """Prepare device memory for direct transfers, once; what cannot be prepared is used as it is."""

    def deregister_buffer(self, address: int) -> None:  # noqa: B027 - optional
        """Undo `register_buffer`, if there was one: the memory is about to be freed."""


class CopyCalls(NamedTuple):
    """`copy(dst, src, nbytes, stream)`, `copy_many([(dst, src, nbytes), ...], stream)`, in no order among
    themselves and not for a default stream, `record(event, stream)`, `sync(event)`, `query(event)`,
    `finish(stream)`, which waits for all that is in a stream, and `is_clear(stream)`,
    `Runtime.stream_is_clear`: without detours."""

    copy: Callable[[int, int, int, int], None]
    copy_many: Callable[[list[tuple[int, int, int]], int], None]
    record: Callable[[int, int], None]
    sync: Callable[[int], None]
    query: Callable[[int], bool]
    finish: Callable[[int], None]
    is_clear: Callable[[int], bool]


def one_by_one(
    copy: Callable[[int, int, int, int], None],
) -> Callable[[list[tuple[int, int, int]], int], None]:
    """`CopyCalls.copy_many` where the vendor has no call for it."""

    def copy_many(copies: list[tuple[int, int, int]], stream: int) -> None:
        for dst, src, nbytes in copies:
            copy(dst, src, nbytes, stream)

    return copy_many


class Runtime(ABC):
    """Memory, streams and events of one kind of device."""

    name: str
    capabilities: Capabilities
    scheduler: Scheduler = THREADS
    streams_ahead = 0
    """Copy streams that a bounce ring makes at once, before a gate closes: making one behind a closed gate
    would wait for it, and hold up every copy meanwhile. 0: made when they are needed."""
    engine: object = None
    """The I/O engine of a runtime that does not live in real time; kept here so that
    it ends with its runtime."""

    # devices

    @abstractmethod
    def device_count(self) -> int:
        """How many devices there are; 0 is an answer, not an error."""

    @abstractmethod
    def device_info(self, device: int) -> DeviceInfo: ...

    @abstractmethod
    def current_device(self) -> int:
        """The calling thread's current device (0 at first)."""

    @abstractmethod
    def set_current_device(self, device: int) -> None: ...

    @abstractmethod
    def device_sync(self, device: int) -> None:
        """Wait for every stream of `device`, non-blocking ones included (HIP rule 20)."""

    @abstractmethod
    def direct_io(self) -> DirectIO | None:
        """The direct path, or None where this runtime has none."""

    # memory

    @abstractmethod
    def alloc(self, device: int, nbytes: int) -> int:
        """Device memory, at least 256-byte aligned, usable at once; nbytes 0 gives address 0."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Free device memory after an implicit device synchronise (HIP rule 118); 0 is fine (rule 129)."""

    @abstractmethod
    def alloc_pinned(self, nbytes: int) -> int:
        """Page-aligned pinned host memory; nbytes 0 gives address 0 (HIP rule 128)."""

    def alloc_bounce(self, nbytes: int) -> int:
        """Pinned host memory for the slots of a bounce ring. As `alloc_pinned`."""
        return self.alloc_pinned(nbytes)

    def free_bounce(self, address: int, nbytes: int) -> None:
        """Give back what `alloc_bounce` gave for so many bytes. As `free_pinned`."""
        self.free_pinned(address)

    @abstractmethod
    def free_pinned(self, address: int) -> None: ...

    @abstractmethod
    def pointer_info(self, address: int) -> PointerInfo:
        """What `address` belongs to; unknown memory is PAGEABLE (HIP rule 133)."""

    # copies

    @abstractmethod
    def copy(self, dst: int, src: int, nbytes: int, kind: CopyKind = CopyKind.DEFAULT) -> None:
        """hipMemcpy: on the null stream, host blocking as HIP rules 46-51, 57 say."""

    @abstractmethod
    def copy_async(
        self, dst: int, src: int, nbytes: int, stream: int, kind: CopyKind = CopyKind.DEFAULT
    ) -> None:
        """hipMemcpyAsync: in stream order, host blocking as HIP rules 52-57 say."""

    @abstractmethod
    def copy_batch(self, copies: list[tuple[int, int, int]], stream: int) -> None:
        """(dst, src, nbytes) each; one op in the stream, validated as a whole (HIP rule 72)."""

    @abstractmethod
    def fill(self, address: int, value: int, nbytes: int) -> None:
        """hipMemset on the null stream (HIP rules 58, 59)."""

    @abstractmethod
    def fill_async(self, address: int, value: int, nbytes: int, stream: int, width: int = 1) -> None:
        """Set nbytes bytes to a repeated value of `width` 1, 2 or 4 bytes (HIP rule 60)."""

    def copy_calls(self, device: int) -> AbstractContextManager[CopyCalls]:
        """The calls of a relay, for one thread and many chunks: what can be done once is done on entering."""
        copy, many = self.copy_async, one_by_one(self.copy_async)
        events = self.event_record, self.event_sync, self.event_query
        return nullcontext(CopyCalls(copy, many, *events, self.stream_sync, self.stream_is_clear))

    # streams

    @abstractmethod
    def stream_create(self, device: int, *, nonblocking: bool = True, priority: int = 0) -> int: ...

    @abstractmethod
    def stream_destroy(self, stream: int) -> None:
        """Returns at once; pending work completes (HIP rule 10)."""

    @abstractmethod
    def stream_query(self, stream: int) -> bool:
        """True when nothing is pending (HIP rule 5)."""

    def stream_is_clear(self, stream: int) -> bool:
        """True when whatever is put into the stream next is sure to wait for nothing; False also
        where that cannot be told."""
        return False

    @abstractmethod
    def stream_sync(self, stream: int) -> None:
        """Wait for this stream alone; raises its asynchronous error, once (HIP rules 6, 78)."""

    @abstractmethod
    def stream_wait_event(self, stream: int, event: int, flags: int = 0) -> None: ...

    @abstractmethod
    def stream_device(self, stream: int) -> int: ...

    @abstractmethod
    def host_call(self, stream: int, fn: Callable[[], None]) -> None:
        """Run `fn` on a runtime thread in stream order; it must not call the runtime (HIP rules 39-45)."""

    @abstractmethod
    def gate(self, stream: int, on_reached: Callable[[], None], *, patient: bool = False) -> Gate:
        """Hold `stream` here until the gate is opened; returns at once.

        `on_reached` is called once, on a runtime thread, when everything before has finished; it may only
        signal. A `patient` caller is likely to `look` by itself: no thread is woken for it that looks within
        200 us anyway. An implementation must open its gates at interpreter exit.
        """

    # events

    @abstractmethod
    def event_create(
        self, device: int, *, timing: bool = True, blocking_sync: bool = False, interprocess: bool = False
    ) -> int: ...

    @abstractmethod
    def event_destroy(self, event: int) -> None: ...

    @abstractmethod
    def event_record(self, event: int, stream: int) -> None: ...

    @abstractmethod
    def event_query(self, event: int) -> bool: ...

    @abstractmethod
    def event_sync(self, event: int) -> None: ...

    # optional powers (powers.py): None where the runtime does not declare them

    @property
    def peers(self) -> Peers | None:
        return self if isinstance(self, Peers) else None

    @property
    def ordered_memory(self) -> OrderedMemory | None:
        return self if isinstance(self, OrderedMemory) and self.capabilities.stream_ordered_alloc else None

    @property
    def managed_memory(self) -> ManagedMemory | None:
        return self if isinstance(self, ManagedMemory) and self.capabilities.managed else None

    @property
    def host_registration(self) -> HostRegistration | None:
        return self if isinstance(self, HostRegistration) and self.capabilities.host_register else None

    @property
    def modules(self) -> Modules | None:
        return self if isinstance(self, Modules) and self.capabilities.modules else None

    @property
    def stream_traits(self) -> StreamTraits | None:
        return self if isinstance(self, StreamTraits) else None

    @property
    def timing(self) -> Timing | None:
        return self if isinstance(self, Timing) else None

    @property
    def last_errors(self) -> LastErrors | None:
        return self if isinstance(self, LastErrors) else None
