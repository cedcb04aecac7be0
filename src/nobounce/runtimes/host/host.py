"""The runtime that `cpu` and `sim` share: streams and events of host_order, copies of
host_copies, and memory.

At interpreter exit every gate is opened, and memory is no longer given back: the workers that might still use
it end with the process. In a forked child the memory is there, work that was pending in the parent is
reported as lost by the next synchronisation, and everything can be used again.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref

from nobounce.clock import THREADS, Scheduler
from nobounce.errors import DeviceError, RuntimeStatus
from nobounce.route.types import MemoryKind
from nobounce.runtimes import exits
from nobounce.runtimes.base import PointerInfo
from nobounce.runtimes.host.calls import api, invalid_value
from nobounce.runtimes.host.copies import HostCopies
from nobounce.runtimes.host.memory import Allocation, HostSpace
from nobounce.runtimes.host.ops import HostStream, Op
from nobounce.runtimes.host.order import HostOrder
from nobounce.runtimes.host.tickets import Ordered
from nobounce.runtimes.powers import (
    HostRegistration,
    LastErrors,
    ManagedMemory,
    OrderedMemory,
    Peers,
    StreamTraits,
    Timing,
)


class HostRuntime(
    HostOrder,
    HostCopies,
    Peers,
    OrderedMemory,
    ManagedMemory,
    HostRegistration,
    StreamTraits,
    Timing,
    LastErrors,
):
    """Memory, devices, peers and errors; `cpu` and `sim` say what their devices are."""

    def __init__(
        self,
        name: str,
        device_names: list[str],
        space: HostSpace,
        *,
        scheduler: Scheduler = THREADS,
        strict: bool,
    ) -> None:
        super().__init__(name, device_names, space, scheduler=scheduler, strict=strict)
        _runtimes.add(self)

    # devices

    def device_count(self) -> int:
        return len(self._devices)

    @api
    def current_device(self) -> int:
        return self._current("current_device").ordinal

    @api
    def set_current_device(self, device: int) -> None:
        self._local.device = self._device(device, "set_current_device").ordinal

    # memory

    @api
    def alloc(self, device: int, nbytes: int) -> int:
        return self._allocate("alloc", device, nbytes, MemoryKind.DEVICE)

    @api
    def alloc_async(self, device: int, nbytes: int, stream: int) -> int:
        s = self._stream(stream, "alloc_async")
        order = Ordered()
        address = self._allocate("alloc_async", device, nbytes, MemoryKind.DEVICE, order=order)
        if address:
            self._executor.submit(s, None, allocates=order)
        return address

    @api
    def alloc_pinned(self, nbytes: int) -> int:
        return self._allocate("alloc_pinned", None, nbytes, MemoryKind.PINNED)

    @api
    def alloc_managed(self, device: int, nbytes: int) -> int:
        return self._allocate("alloc_managed", device, nbytes, MemoryKind.MANAGED)

    @api
    def free(self, address: int) -> None:
        """Memory of `alloc_async` is freed without waiting, once what there is to do
        now is done (HIP rule 118)."""
        if address == 0:
            return
        found = self._owned("free", address)
        if found.kind is MemoryKind.PINNED:
            raise DeviceError("free", RuntimeStatus.InvalidDevicePointer, detail="pinned host memory")
        if not self._map.remove(found):
            raise invalid_value("free", f"{address:#x} is freed already")
        if found.order is not None:
            self._release_later(found)
            return
        self._executor.wait(self._executor.tails(self._host(found.device)))
        self._release(found)

    @api
    def free_async(self, address: int, stream: int) -> None:
        s = self._stream(stream, "free_async")
        if address == 0:
            return
        found = self._owned("free_async", address)
        if found.kind is not MemoryKind.DEVICE:
            raise invalid_value("free_async", f"{found.kind.value} memory")
        if not self._map.remove(found):
            raise invalid_value("free_async", f"{address:#x} is freed already")
        try:
            op = self._executor.submit(s, None, frees=found.order, call="free_async")
        except DeviceError:
            self._map.add(found)
            raise
        self._release_later(found, op)

    @api
    def free_pinned(self, address: int) -> None:
        """After an implicit synchronisation of all devices (HIP rule 130)."""
        if address == 0:
            return
        found = self._owned("free_pinned", address)
        if found.kind is not MemoryKind.PINNED or found.registered or not self._map.remove(found):
            raise invalid_value("free_pinned", f"{address:#x} is not memory of alloc_pinned")
        for device in self._devices:
            self._executor.wait(self._executor.tails(device))
        self._release(found)

    @api
    def register_host(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        if address <= 0 or nbytes <= 0:
            raise invalid_value("register_host", f"{nbytes} bytes at {address:#x}")
        found = self._map.find(address)
        if self._space.owns(address) or (found is not None and found.kind is not MemoryKind.PINNED):
            raise invalid_value("register_host", f"{address:#x} is not host memory")
        registered = Allocation(address, nbytes, MemoryKind.PINNED, None, address, registered=True)
        if not self._map.add(registered):
            raise DeviceError(
                "register_host",
                RuntimeStatus.HostMemoryAlreadyRegistered,
                detail=f"{nbytes} bytes at {address:#x}",
            )

    @api
    def unregister_host(self, address: int) -> None:
        found = self._map.find(address)
        if found is None or found.base != address or not found.registered or not self._map.remove(found):
            raise DeviceError(
                "unregister_host", RuntimeStatus.HostMemoryNotRegistered, detail=f"{address:#x}"
            )

    @api
    def pointer_info(self, address: int) -> PointerInfo:
        found = self._map.find(address)
        if found is None:
            if self._space.owns(address):
                raise invalid_value(
                    "pointer_info", f"{address:#x} is freed device memory, or never was allocated"
                )
            return PointerInfo(MemoryKind.PAGEABLE, None, 0, 0)
        return PointerInfo(found.kind, found.device, found.base, found.nbytes)

    def _allocate(
        self,
        call: str,
        device: int | None,
        nbytes: int,
        kind: MemoryKind,
        *,
        order: Ordered | None = None,
    ) -> int:
        where = None if device is None else self._device(device, call)
        if nbytes < 0:
            raise invalid_value(call, f"{nbytes} bytes")
        if nbytes == 0:
            return 0
        self._strike(where, "alloc_pinned" if kind is MemoryKind.PINNED else "alloc")
        made = self._space.allocate(nbytes, kind, device)
        made.order = order
        self._map.add(made)
        return made.base

    def _owned(self, call: str, address: int) -> Allocation:
        found = self._map.find(address)
        if found is None or found.base != address:
            raise invalid_value(call, f"{address:#x} is not the start of an allocation, or is freed already")
        return found

    def _release_later(self, allocation: Allocation, *after: Op) -> None:
        """Give memory back once all that is pending now has ended: a stray use must not crash the process."""
        tails = [op for device in self._devices for op in self._executor.tails(device)]
        device = self._host(allocation.device)
        releasing = HostStream(device, nonblocking=True, priority=1)
        self._executor.submit(
            releasing, lambda: self._release(allocation), after=(*after, *tails), inline=True
        )

    def _release(self, allocation: Allocation) -> None:
        if not (self._executor.exiting or sys.is_finalizing()):
            self._space.release(allocation)

    # peers

    @api
    def can_access_peer(self, device: int, peer: int) -> bool:
        self._device(device, "can_access_peer")
        self._device(peer, "can_access_peer")
        return device != peer and self._peers_possible()

    def _peers_possible(self) -> bool:
        return self.capabilities.peers

    @api
    def enable_peer_access(self, device: int, peer: int, flags: int = 0) -> None:
        self._device(device, "enable_peer_access")
        self._device(peer, "enable_peer_access")
        if flags:
            raise invalid_value("enable_peer_access", f"flags {flags}")
        if device == peer or not self._peers_possible():
            raise DeviceError(
                "enable_peer_access", RuntimeStatus.InvalidDevice, detail=f"{device} cannot reach {peer}"
            )
        if (device, peer) in self._peers:
            raise DeviceError("enable_peer_access", RuntimeStatus.PeerAccessAlreadyEnabled)
        self._peers.add((device, peer))

    @api
    def disable_peer_access(self, device: int, peer: int) -> None:
        self._device(device, "disable_peer_access")
        self._device(peer, "disable_peer_access")
        if (device, peer) not in self._peers:
            raise DeviceError("disable_peer_access", RuntimeStatus.PeerAccessNotEnabled)
        self._peers.discard((device, peer))

    # errors

    def last_error(self) -> int:
        code = self.peek_last_error()
        self._local.last_error = 0
        return code

    def peek_last_error(self) -> int:
        code: int = getattr(self._local, "last_error", 0)
        return code

    # the life of the process

    def _before_fork(self) -> None:
        if self.scheduler is THREADS:
            self._executor.lock.acquire()

    def _after_fork_in_parent(self) -> None:
        if self.scheduler is THREADS:
            self._executor.lock.release()

    def _after_fork_in_child(self) -> None:
        self._map.reset_lock()
        self._space.reset_lock()
        self._executor.restart(self._devices)

    def _at_exit(self) -> None:
        self._executor.exiting = True
        self._executor.open_all_gates()


_runtimes: weakref.WeakSet[HostRuntime] = weakref.WeakSet()
_forking: list[HostRuntime] = []


def _before_fork() -> None:
    _forking[:] = sorted(_runtimes, key=id)
    for runtime in _forking:
        runtime._before_fork()


def _after_fork_in_parent() -> None:
    for runtime in _forking:
        runtime._after_fork_in_parent()
    _forking.clear()


def _after_fork_in_child() -> None:
    for runtime in _forking:
        runtime._after_fork_in_child()
    _forking.clear()


def _at_exit() -> None:
    for runtime in list(_runtimes):
        runtime._at_exit()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
atexit.register(_at_exit)
exits.look_after(lambda: [gate for runtime in list(_runtimes) for gate in runtime._executor.closed_gates()])
