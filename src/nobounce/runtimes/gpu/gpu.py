"""The runtime of real GPUs, `cuda` and `hip`: one class over an adapter to a vendor's own bindings.

What runs on an NVIDIA card is the code that runs on AMD's; cuda.py and hip.py hold what differs, quirks.py
what is known to behave otherwise. Neither vendor's runtime survives a fork: the child is told so at its first
call, and giving things back there does nothing. At interpreter exit every gate is opened.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import weakref
from typing import Any, NoReturn

from nobounce.clock import THREADS, Scheduler
from nobounce.errors import UnavailableError
from nobounce.runtimes import exits
from nobounce.runtimes.base import DeviceInfo, DirectIO
from nobounce.runtimes.gpu.adapter import Adapter
from nobounce.runtimes.gpu.memory import GpuMemory
from nobounce.runtimes.gpu.streams import GpuStreams
from nobounce.runtimes.host.calls import api, invalid_value
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

_GIVING_BACK = (
    "free",
    "free_async",
    "free_pinned",
    "free_bounce",
    "stream_destroy",
    "event_destroy",
    "unregister_host",
)


class GpuRuntime(
    GpuMemory,
    GpuStreams,
    Peers,
    OrderedMemory,
    ManagedMemory,
    HostRegistration,
    Modules,
    StreamTraits,
    Timing,
    LastErrors,
):
    """`count` devices behind `adapter`; nothing is started on them before something is asked of them."""

    def __init__(self, adapter: Adapter, count: int, *, scheduler: Scheduler = THREADS) -> None:
        super().__init__(adapter, count, scheduler=scheduler)
        self._direct: DirectIO | None = None
        _runtimes.add(self)

    # devices

    def device_count(self) -> int:
        if isinstance(self._adapter, _Forked):
            self._adapter.refuse()
        return self._count

    @api
    def device_info(self, device: int) -> DeviceInfo:
        return self._adapter.device_info(self._device(device, "device_info"))

    @api
    def current_device(self) -> int:
        return int(self._adapter.get_device())

    @api
    def set_current_device(self, device: int) -> None:
        self._adapter.set_current(self._device(device, "set_current_device"))

    @api
    def device_sync(self, device: int) -> None:
        self._device(device, "device_sync")
        with self._on(device):
            self._adapter.device_sync()
        self._host_calls.deliver("device_sync", lambda failed, number: failed[1] == device)

    def direct_io(self) -> DirectIO | None:
        if self._direct is None:
            self._direct = self._adapter.direct()
        return self._direct

    # kernels

    @api
    def load_kernel(self, device: int, text: bytes, name: str) -> int:
        self._device(device, "load_kernel")
        with self._apart(device):
            module = self._adapter.module_load(text + b"\0")
            return int(self._adapter.module_function(int(module), name.encode()))

    @api
    def launch(self, kernel: int, grid: tuple[int, int], threads: int, argument: int, stream: int) -> None:
        given = (argument,), (ctypes.c_uint64,)
        with self._on(self._where(stream)):
            self._adapter.launch(kernel, *grid, 1, threads, 1, 1, 0, stream, given, 0)

    # peers and errors

    @api
    def can_access_peer(self, device: int, peer: int) -> bool:
        self._device(device, "can_access_peer")
        self._device(peer, "can_access_peer")
        return device != peer and bool(self._adapter.can_access_peer(device, peer))

    @api
    def enable_peer_access(self, device: int, peer: int, flags: int = 0) -> None:
        self._device(device, "enable_peer_access")
        self._device(peer, "enable_peer_access")
        if flags:
            raise invalid_value("enable_peer_access", f"flags {flags}")
        with self._on(device):
            self._adapter.enable_peer(peer, 0)

    @api
    def disable_peer_access(self, device: int, peer: int) -> None:
        self._device(device, "disable_peer_access")
        self._device(peer, "disable_peer_access")
        with self._on(device):
            self._adapter.disable_peer(peer)

    def last_error(self) -> int:
        """Kept here: the vendor's own is reset after each failure, so that other libraries
        do not stumble over ours."""
        code = self.peek_last_error()
        self._local.last_error = 0
        return code

    def peek_last_error(self) -> int:
        return int(getattr(self._local, "last_error", 0))

    # the life of the process

    def _at_exit(self) -> None:
        self._gates.open_all()
        self._host_calls.drain()

    def _after_fork_in_child(self) -> None:
        refusing: Any = _Forked(self.name)
        self._adapter = refusing
        self._captures.forget()
        self._calls = None
        self._gates.forget_all()
        for name in _GIVING_BACK:
            setattr(self, name, _nothing)


class _Forked:
    """Stands for the adapter in a forked child."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, op: str) -> NoReturn:
        self.refuse()

    def refuse(self) -> NoReturn:
        raise UnavailableError(
            f"{self._name}: unavailable, because this process was forked from one that used the GPU "
            "already, and the "
            "GPU's runtime does not survive that: start processes with the spawn or forkserver method"
        )


def _nothing(*args: object, **kwargs: object) -> None:
    pass


_runtimes: weakref.WeakSet[GpuRuntime] = weakref.WeakSet()


def _after_fork() -> None:
    for runtime in list(_runtimes):
        runtime._after_fork_in_child()


def _at_exit() -> None:
    for runtime in list(_runtimes):
        if not isinstance(runtime._adapter, _Forked):
            runtime._at_exit()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
exits.look_after(lambda: [gate for runtime in list(_runtimes) for gate in runtime._gates.closed()])
