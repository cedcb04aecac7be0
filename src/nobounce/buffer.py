"""Buffers: bytes on a device, in cuda.core's shape, and the allocations that arrays share with them.

A Buffer is a handle that can be closed; its Allocation is the memory, and lives as long as anything looks at
it: a Buffer, a Tensor, a numpy array, a DLPack consumer. Closing a Buffer therefore never pulls memory from
under an array (case C72).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from nobounce import forked, reaper, transferend
from nobounce.allocation import Allocation, fill_pattern, free_here, new_allocation
from nobounce.copying import copy
from nobounce.cudaarray import cuda_array_interface
from nobounce.device import Device, DeviceLike, as_device
from nobounce.errors import ArgumentError, BusyError, ClosedError, ExportError
from nobounce.protocols import BufferLike, StreamLike
from nobounce.route.types import MemoryKind
from nobounce.stream import Stream, as_stream

if TYPE_CHECKING:
    import numpy as np

    from nobounce.clock import Condition
    from nobounce.tensor import Tensor


def allocate(
    device: Device, nbytes: int, *, stream: StreamLike = None, kind: MemoryKind | str = MemoryKind.DEVICE
) -> Buffer:
    """What `Device.allocate` does."""
    _check_nbytes(nbytes)
    try:
        wanted = MemoryKind(kind)
    except ValueError:
        wanted = MemoryKind.PAGEABLE
    if wanted is MemoryKind.PAGEABLE:
        raise ArgumentError(f"kind={kind!r} cannot be allocated; device, pinned and managed can")
    ordered = as_stream(stream, device) if stream is not None else None
    made = Buffer._of(new_allocation(device, nbytes, ordered, wanted))
    forked.know(made)
    return made


class Buffer:
    """`nbytes` bytes of memory at `handle` on one device. Made by `Device.allocate`,
    `from_handle` or `as_buffer`.

    A context manager: leaving the block waits for the transfers that use the buffer. `close` refuses with
    BusyError while one does; arrays, tensors and DLPack consumers of a closed buffer keep its memory.
    Everything but `close` raises ClosedError after it.
    """

    __slots__ = (
        "__weakref__",
        "_address",
        "_allocation",
        "_closed",
        "_exported",
        "_idle",
        "_lock",
        "_nbytes",
        "_transfers",
        "_uses",
    )

    _address: int
    _allocation: Allocation | None
    _closed: bool
    _exported: bool
    _idle: Condition | None
    _lock: threading.Lock
    _nbytes: int
    _transfers: int
    _uses: int

    def __init__(self) -> None:
        raise TypeError("a Buffer is made by Device.allocate(), Buffer.from_handle() or as_buffer()")

    @classmethod
    def _of(cls, allocation: Allocation, offset: int = 0, nbytes: int | None = None) -> Buffer:
        self = cls.__new__(cls)
        self._allocation = allocation
        self._address = allocation.address + offset if allocation.address else 0
        self._nbytes = allocation.nbytes if nbytes is None else nbytes
        self._lock, self._uses, self._closed, self._exported = threading.Lock(), 0, False, False
        self._transfers, self._idle = 0, None
        return self

    @classmethod
    def from_handle(
        cls, address: int, nbytes: int, *, device: DeviceLike, owner: object = None, read_only: bool = False
    ) -> Buffer:
        """A Buffer over memory that its owner frees; `owner` is kept alive with it.

        The runtime says what kind of memory it is. ArgumentError where the range leaves the
        allocation it begins in.
        """
        _check_nbytes(nbytes)
        if isinstance(address, bool) or not isinstance(address, int):
            raise TypeError(f"an address is an int, not {type(address).__name__}")
        if address < 0 or (address == 0 and nbytes):
            raise ArgumentError(f"{address:#x} is no address for {nbytes} bytes")
        where = as_device(device)
        kind = MemoryKind.PAGEABLE if not address else _kind(where, address, nbytes)
        return cls._of(Allocation(address, nbytes, where, kind, owner=owner, read_only=read_only))

    @property
    def allocation(self) -> Allocation:
        """The memory itself. ClosedError after `close`."""
        allocation = self._allocation
        if self._closed or allocation is None:
            raise self._gone()
        return allocation

    @property
    def handle(self) -> int:
        """The address; 0 for an empty buffer."""
        return self._address if self.allocation.address else 0

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self._nbytes

    @property
    def size(self) -> int:
        """cuda.core's name for `nbytes`."""
        return self._nbytes

    @property
    def device(self) -> Device:
        return self.allocation.device

    @property
    def memory_kind(self) -> MemoryKind:
        """Device, pinned, managed or pageable memory."""
        return self.allocation.kind

    @property
    def is_host_accessible(self) -> bool:
        """Whether the host can load and store the memory at its address."""
        return self.allocation.host

    @property
    def is_device_accessible(self) -> bool:
        """Whether the device can: everything but pageable memory, which only `cpu` reaches."""
        allocation = self.allocation
        return allocation.kind is not MemoryKind.PAGEABLE or allocation.device.capabilities.host_addressable

    @property
    def is_managed(self) -> bool:
        return self.allocation.kind is MemoryKind.MANAGED

    @property
    def is_read_only(self) -> bool:
        """Whether the owner of foreign memory allows reading only."""
        return self.allocation.read_only

    @property
    def owner(self) -> object:
        """The owner of foreign memory, else None."""
        return self.allocation.owner

    @property
    def stream(self) -> Stream | None:
        """The stream it was allocated or last used on; synchronous I/O waits for it."""
        return self.allocation.stream

    @property
    def is_closed(self) -> bool:
        return self._closed

    def wait(self) -> None:
        """Wait for the work this buffer was last used in; raises that work's error."""
        self.allocation.wait()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[Buffer]:
        """While inside, `close` raises BusyError. ClosedError where the buffer is closed already."""
        self._acquire()
        try:
            yield self
        finally:
            self._release()

    def _acquire(self) -> None:
        with self._lock:
            if self._closed:
                raise self._gone()
            self._uses += 1

    def _release(self) -> None:
        with self._lock:
            self._uses -= 1

    def _gone(self) -> ClosedError:
        allocation = self._allocation
        if allocation is not None and allocation._born != reaper.generation():
            return forked.error(f"buffer on {allocation.device}")
        return ClosedError("the buffer is closed")

    def _inherited(self) -> None:
        self._lock, self._uses, self._transfers, self._idle = threading.Lock(), 0, 0, None
        if self._allocation is not None:
            self._allocation.pending = None
            self._closed = self._closed or self._allocation.device._runtime.name != "cpu"

    def _wait_for_transfers(self) -> None:
        with self._lock:
            if not self._transfers or self._allocation is None:
                return
            if self._idle is None:
                self._idle = self._allocation.device._runtime.scheduler.condition()
            idle = self._idle
        with idle.mutex:
            idle.wait_for(lambda: not self._transfers)

    def close(self, stream: StreamLike = None) -> None:
        """Give the memory back, unless arrays or tensors still look at it: then when the last of them goes.

        With `stream`, memory allocated in stream order is freed once the stream gets there; otherwise
        on the stream the buffer remembers (HIP rule 118). BusyError while a transfer uses it. A
        second close does nothing.
        """
        with self._lock:
            if self._closed:
                return
            if self._uses:
                raise BusyError(f"the buffer of {self._nbytes} bytes is in use by {self._uses} transfer(s)")
            allocation = self._allocation
            if stream is not None and allocation is not None:
                allocation.stream = as_stream(stream, allocation.device)
            self._closed = True
            if self._exported:  # someone holds this object for its memory
                return
            self._allocation = None
        with free_here():
            del allocation

    def copy_to(self, dst: BufferLike | None = None, *, stream: StreamLike) -> Buffer:
        """Copy everything to `dst`, in order on `stream`; returns `dst` as a Buffer.

        `dst` is a Buffer, or any memory `as_buffer` takes; None allocates on this device. With `stream=None`
        the copy goes on a default stream, behind what either buffer was last used in. The host may return
        before the copy is done, as HIP rules 52 to 56 say. ArgumentError where the sizes differ.
        """
        if dst is None:
            dst = allocate(self.device, self._nbytes, stream=stream)
        target = as_buffer(dst, write=True)
        copy(target, self, stream)
        return target

    def copy_from(self, src: BufferLike, *, stream: StreamLike) -> None:
        """Copy everything from `src` (a Buffer, or any memory `as_buffer` takes), in order on
        `stream`; see `copy_to`."""
        copy(self, as_buffer(src, write=False), stream)

    def fill(self, value: int | bytes | bytearray, *, stream: StreamLike) -> None:
        """Set every byte to `value` (0 to 255), or repeat 1, 2 or 4 bytes, in order on
        `stream`; returns at once.

        ArgumentError where the bytes do not divide the buffer.
        """
        allocation = self.allocation
        if allocation.read_only:
            raise ArgumentError("the memory is read-only")
        number, width = fill_pattern(value, self._nbytes)
        where = as_stream(stream, allocation.device)
        if self._nbytes:
            with where._on():
                allocation.device._runtime.fill_async(
                    self._address, number, self._nbytes, where.handle, width
                )
            allocation.used_on(where)
            if allocation.arriving:
                transferend.overwrite(allocation.arriving, self._address, self._address + self._nbytes)

    def view(self) -> memoryview:
        """The bytes as a memoryview which keeps the memory, even after `close`. Waits for work under way.

        ExportError where the host cannot reach the memory.
        """
        allocation = self.allocation
        if not allocation.host:
            raise ExportError(
                f"the host cannot reach {allocation.kind.value} memory of {allocation.device}: copy it"
            )
        allocation.wait()
        return allocation.view(self._locate(0, self._nbytes), self._nbytes)

    def __buffer__(self, flags: int, /) -> memoryview:
        return self.view()

    def numpy(self) -> np.ndarray[Any, Any]:
        """A uint8 array of the bytes which owns the memory; a fresh copy where the host cannot reach it."""
        return self._tensor().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return self._tensor().__array__(dtype, copy)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if self._closed or not self.is_host_accessible:
            raise AttributeError("__array_interface__: the host cannot reach this memory")
        return {"version": 3, "shape": (self._nbytes,), "typestr": "|u1", "data": self.view()}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return cuda_array_interface(self, (self._nbytes,), "|u1")

    def __dlpack__(self, **options: Any) -> object:
        return self._tensor().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor().__dlpack_device__()

    def _tensor(self) -> Tensor:
        from nobounce.tensor import Tensor

        return Tensor(self, (self._nbytes,), "U8")

    def _locate(self, offset: int, nbytes: int) -> int:
        """Where `nbytes` bytes at `offset` of this buffer begin in its allocation."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self._nbytes:
            raise ArgumentError(f"{nbytes} bytes at {offset} leave a buffer of {self._nbytes} bytes")
        return self._address - self.allocation.address + offset if self._nbytes else 0

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the transfers in stream order that use the buffer, then close. A batch that uses it is not
        waited for: BusyError, as from `close`."""
        self._wait_for_transfers()
        self.close()

    def __len__(self) -> int:
        return self._nbytes

    def __repr__(self) -> str:
        if self._closed or self._allocation is None:
            return f"<Buffer of {self._nbytes} bytes, closed>"
        kind = self._allocation.kind.value
        return (
            f"<Buffer of {self._nbytes} bytes of {kind} memory at {self._address:#x} on "
            f"{self._allocation.device}>"
        )


def as_buffer(obj: BufferLike, *, write: bool) -> Buffer:
    """`obj` as a Buffer: itself, or a Buffer over the caller's own memory, which it keeps alive.

    Takes a Buffer, a Tensor, and by protocol objects with the buffer protocol, numpy arrays,
    `__cuda_array_interface__`, DLPack, and torch tensors (torch is never imported). `write` says that the
    memory will be written to. ArgumentError names why it will not do: read-only, not contiguous. TypeError
    where `obj` is no memory at all.
    """
    if not isinstance(obj, Buffer):
        from nobounce.adopt import adopt

        obj = adopt(obj)
    allocation = obj.allocation
    if write and allocation.read_only:
        raise ArgumentError("the memory is read-only, and this would write to it")
    return obj


def _kind(device: Device, address: int, nbytes: int) -> MemoryKind:
    found = device._runtime.pointer_info(address)
    if found.nbytes and address + nbytes > found.base + found.nbytes:
        left = found.base + found.nbytes - address
        raise ArgumentError(
            f"{nbytes} bytes at {address:#x} leave their allocation, which has {left} bytes from there"
        )
    return found.kind


def _check_nbytes(nbytes: int) -> None:
    if isinstance(nbytes, bool) or not isinstance(nbytes, int):
        raise TypeError(f"nbytes is an int, not {type(nbytes).__name__}")
    if not 0 <= nbytes < 1 << 63:
        raise ArgumentError(f"nbytes {nbytes} is not between 0 and 2**63 - 1")
