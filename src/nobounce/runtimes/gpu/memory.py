"""Memory, copies and fills of the GPU runtime."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from nobounce.errors import DeviceError, OutOfMemoryError, RuntimeStatus
from nobounce.runtimes import libc
from nobounce.runtimes.base import CopyCalls, CopyKind, PointerInfo, one_by_one
from nobounce.runtimes.gpu import table
from nobounce.runtimes.gpu.adapter import CopyMany
from nobounce.runtimes.gpu.capture import Apart, Captures
from nobounce.runtimes.gpu.core import GpuCore, On
from nobounce.runtimes.host.calls import api, invalid_value

PAGE = 4096
_REFUSALS = RuntimeStatus.NotSupported, RuntimeStatus.InsufficientDriver, RuntimeStatus.InvalidValue


class GpuMemory(GpuCore):
    """Everything that allocates or moves bytes."""

    @api
    def alloc(self, device: int, nbytes: int) -> int:
        self._device(device, "alloc")
        if _nothing_to_allocate("alloc", nbytes):
            return 0
        with self._apart(device), _naming(self, device):
            return int(self._adapter.alloc(nbytes))

    @api
    def free(self, address: int) -> None:
        if address:
            with self._apart(self._holder(address)):
                self._adapter.free(address)

    @api
    def alloc_async(self, device: int, nbytes: int, stream: int) -> int:
        """From the device's default pool, also where the stream is another device's (HIP rule 118)."""
        self._device(device, "alloc_async")
        if _nothing_to_allocate("alloc_async", nbytes):
            return 0
        where = self._where(stream)
        with self._on(where), _naming(self, device):
            if where == device:
                return int(self._adapter.alloc_async(nbytes, stream))
            pool = self._adapter.default_pool(device)
            return int(self._adapter.alloc_from_pool(nbytes, pool, stream))

    @api
    def free_async(self, address: int, stream: int) -> None:
        if address:
            with self._on(self._where(stream)):
                self._adapter.free_async(address, stream)

    @api
    def alloc_pinned(self, nbytes: int) -> int:
        """Usable from every device; the vendors align small allocations less, so a
        page is asked for at least."""
        if _nothing_to_allocate("alloc_pinned", nbytes):
            return 0
        flags = table.HOST_PORTABLE | table.HOST_MAPPED
        with self._anywhere_apart():
            address: int = self._adapter.alloc_pinned(_pages(nbytes), flags)
            if address % PAGE == 0:
                return address
            self._adapter.free_pinned(address)
            wide: int = self._adapter.alloc_pinned(_pages(nbytes) + PAGE, flags)
            address = _pages(wide)
            self._pinned_within[address] = wide
            return address

    def alloc_bounce(self, nbytes: int) -> int:
        """Huge pages of our own, registered, where that takes less time than allocating (half of it on CUDA:
        benchmarks/README.md). Raises as `alloc_pinned`."""
        if not self._registers_faster:
            return self.alloc_pinned(nbytes)
        whole = libc.round_up(nbytes, libc.HUGE_PAGE)
        try:
            address = libc.map_huge(whole)
        except OSError:
            return self.alloc_pinned(nbytes)
        try:
            libc.keep_from_children(address, whole)
            libc.populate(address, whole)
            self.register_host(address, whole)
        except (DeviceError, OutOfMemoryError) as e:
            libc.unmap(address, whole)
            if isinstance(e, DeviceError):
                self._registers_faster = False  # and would be refused for each slot
            return self.alloc_pinned(nbytes)
        except BaseException:
            # An interrupt may have come behind the registration: an address that the vendor takes for pinned
            # must not become another allocation's.
            if self._is_unregistered(address):
                libc.unmap(address, whole)
            raise
        self._registered.add(address)
        return address

    def free_bounce(self, address: int, nbytes: int) -> None:
        """As `free_pinned`, or unregistered and unmapped. Raises DeviceError; the memory stays then."""
        if address not in self._registered:
            self.free_pinned(address)
            return
        self.unregister_host(address)
        self._registered.discard(address)
        libc.unmap(address, libc.round_up(nbytes, libc.HUGE_PAGE))

    def _is_unregistered(self, address: int) -> bool:
        """Whether `address` is known to be registered no longer."""
        try:
            self.unregister_host(address)
        except DeviceError as e:
            return e.status is RuntimeStatus.HostMemoryNotRegistered
        return True

    @api
    def free_pinned(self, address: int) -> None:
        if address:
            with self._anywhere_apart():
                self._adapter.free_pinned(self._pinned_within.get(address, address))
                self._pinned_within.pop(address, None)

    @api
    def alloc_managed(self, device: int, nbytes: int) -> int:
        self._device(device, "alloc_managed")
        if _nothing_to_allocate("alloc_managed", nbytes):
            return 0
        with self._apart(device), _naming(self, device):
            return int(self._adapter.alloc_managed(nbytes, table.MEM_ATTACH_GLOBAL))

    @api
    def register_host(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        """`read_only` where the device can take memory that may not be written (a read-only mapping)."""
        if address <= 0 or nbytes <= 0:
            raise invalid_value("register_host", f"{nbytes} bytes at {address:#x}")
        flags = self._adapter.register_flags(read_only=read_only)
        with self._anywhere_apart():
            self._adapter.register_host(address, nbytes, flags)

    @api
    def unregister_host(self, address: int) -> None:
        with self._anywhere_apart():
            self._adapter.unregister_host(address)

    @api
    def pointer_info(self, address: int) -> PointerInfo:
        with self._anywhere():
            return self._adapter.pointer_info(address)

    # copies

    @api
    def copy(self, dst: int, src: int, nbytes: int, kind: CopyKind = CopyKind.DEFAULT) -> None:
        direction = self._direction("copy", kind)
        if _nothing_to_move("copy", dst, src, nbytes) or (dst == src and kind == CopyKind.DEFAULT):
            return
        with self._on(self._holder(dst, src)):
            self._adapter.copy(dst, src, nbytes, direction)

    @api
    def copy_async(
        self, dst: int, src: int, nbytes: int, stream: int, kind: CopyKind = CopyKind.DEFAULT
    ) -> None:
        direction = self._direction("copy_async", kind)
        if _nothing_to_move("copy_async", dst, src, nbytes) or (dst == src and kind == CopyKind.DEFAULT):
            return
        with self._on(self._where(stream)):
            self._adapter.copy_async(dst, src, nbytes, direction, stream)

    @api
    def copy_peer(
        self, dst: int, dst_device: int, src: int, src_device: int, nbytes: int, stream: int | None = None
    ) -> None:
        self._device(dst_device, "copy_peer")
        self._device(src_device, "copy_peer")
        if _nothing_to_move("copy_peer", dst, src, nbytes):
            return
        if stream is None:
            with self._on(src_device):
                self._adapter.copy_peer(dst, dst_device, src, src_device, nbytes)
            return
        with self._on(self._where(stream)):
            self._adapter.copy_peer_async(dst, dst_device, src, src_device, nbytes, stream)

    @api
    def copy_batch(self, copies: list[tuple[int, int, int]], stream: int) -> None:
        """Checked as a whole first, then one copy after the other (HIP rule 72)."""
        for i, (dst, src, nbytes) in enumerate(copies):
            try:
                _nothing_to_move("copy_batch", dst, src, nbytes)
            except DeviceError as e:
                raise invalid_value("copy_batch", f"copy {i}: {e}") from e
        direction = self._kinds[int(CopyKind.DEFAULT)]
        copy_async = self._adapter.copy_async
        with self._on(self._where(stream)):
            for dst, src, nbytes in copies:
                if nbytes and dst != src:
                    copy_async(dst, src, nbytes, direction, stream)

    def copy_calls(self, device: int) -> AbstractContextManager[CopyCalls]:
        """Straight to the bindings with `device` current: no look-ups, and no host
        functions' errors are asked for."""
        calls = self._calls
        if calls is None:
            copy, direction = self._adapter.copy_async, self._kinds[int(CopyKind.DEFAULT)]

            def copy_on(dst: int, src: int, nbytes: int, stream: int) -> None:
                copy(dst, src, nbytes, direction, stream)

            a = self._adapter
            events = a.event_record, a.event_sync, a.event_query
            many = _at_once(a.copy_many(), one_by_one(copy_on))
            calls = self._calls = CopyCalls(copy_on, many, *events, a.stream_sync, self._is_clear)
        return _Copying(self._captures, self._on(device), calls)

    def _direction(self, call: str, kind: int) -> Any:
        direction = self._kinds.get(int(kind))
        if direction is None:
            raise DeviceError(call, RuntimeStatus.InvalidMemcpyDirection, detail=f"kind {int(kind)}")
        return direction

    # fills

    @api
    def fill(self, address: int, value: int, nbytes: int) -> None:
        if _nothing_to_move("fill", address, address, nbytes):
            return
        with self._on(self._holder(address)):
            self._adapter.fill(address, value & 0xFF, nbytes)

    @api
    def fill_async(self, address: int, value: int, nbytes: int, stream: int, width: int = 1) -> None:
        if width not in (1, 2, 4) or nbytes % width:
            raise invalid_value("fill_async", f"{nbytes} bytes of values of {width}")
        if _nothing_to_move("fill_async", address, address, nbytes):
            return
        a = self._adapter
        fill = {1: a.fill_async_1, 2: a.fill_async_2, 4: a.fill_async_4}[width]
        with self._on(self._where(stream)):
            fill(address, value & ((1 << 8 * width) - 1), nbytes // width, stream)


class _Copying(Apart[CopyCalls]):
    """Calls, and the device they are for current inside."""

    __slots__ = ("_calls",)

    def __init__(self, captures: Captures, on: On, calls: CopyCalls) -> None:
        super().__init__(captures, on)
        self._calls = calls

    def inside(self) -> CopyCalls:
        return self._calls


class _naming:  # noqa: N801 - read as a preposition
    """Say in an out-of-memory error which device it was."""

    def __init__(self, runtime: GpuCore, device: int) -> None:
        self._runtime, self._device = runtime, device

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OutOfMemoryError):
            raise OutOfMemoryError(f"{error} on {self._runtime.name}:{self._device}") from error


def _at_once(batch: CopyMany | None, plain: CopyMany) -> CopyMany:
    """`batch`, and `plain` from the first time on that this driver has no such thing, or
    refuses what `plain` does."""
    if batch is None:
        return plain
    known: list[CopyMany] = [batch]

    def copy_many(copies: list[tuple[int, int, int]], stream: int) -> None:
        try:
            known[0](copies, stream)
        except DeviceError as e:
            if known[0] is plain or e.status not in _REFUSALS:
                raise
            plain(copies, stream)  # again, if some were queued: they bring the same bytes
            known[0] = plain

    return copy_many


def _nothing_to_allocate(call: str, nbytes: int) -> bool:
    if nbytes < 0:
        raise invalid_value(call, f"{nbytes} bytes")
    return nbytes == 0


def _nothing_to_move(call: str, dst: int, src: int, nbytes: int) -> bool:
    if nbytes < 0:
        raise invalid_value(call, f"{nbytes} bytes")
    if nbytes and not (dst > 0 and src > 0):
        raise invalid_value(call, "null pointer")
    return nbytes == 0


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
