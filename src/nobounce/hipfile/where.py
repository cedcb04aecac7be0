"""From a pointer or a stream handle to the runtime that knows it.

C has one HIP runtime per process; here several may be loaded, and their addresses and handles never
coincide. The default streams (0, 1, 2) belong to every runtime: they mean the one named by `use`, else
that of the default device.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from nobounce.buffer import Buffer, as_buffer
from nobounce.device import Device, DeviceLike, as_device, default_device
from nobounce.errors import ArgumentError, ClosedError, DeviceError, OpError, RuntimeStatus
from nobounce.hipfile.status import Refused
from nobounce.route.types import MemoryKind
from nobounce.runtimes import registry
from nobounce.runtimes.base import NULL_STREAM, PER_THREAD_STREAM, PointerInfo, Runtime
from nobounce.stream import Stream, as_stream

_used: Device | None = None


def use(device: DeviceLike) -> None:
    """Name the device whose runtime the default streams, and pointers that no loaded
    runtime knows, belong to.

    None goes back to the default device. Raises ArgumentError and UnavailableError as `Device` does.
    """
    global _used
    _used = None if device is None else as_device(device)


def used_device() -> Device:
    """The device of `use`, else the default one."""
    return _used if _used is not None else default_device()


class Memory(NamedTuple):
    """What a base pointer points to. `owner` is the object that was given instead of a pointer."""

    address: int
    device: Device
    room: int
    """Bytes from the pointer to the end of its allocation."""
    owner: Buffer | None


def pointer_of(base: Any) -> int:
    """The address of an int, a `c_void_p`, or any memory that nobounce knows. Raises Refused
    with 5022, for null too."""
    address = _address(base)
    if address is None:
        address = _buffer_of(base).handle
    if address <= 0:
        raise Refused(OpError.INVALID_VALUE)
    return address


def find_memory(base: Any) -> Memory:
    """The device memory behind a base pointer.

    Raises Refused: 5022 for null, for what is no memory and where HIP says "invalid value", 5013 for memory
    that is not a device's, 5011 for other HIP errors (A-31, A-33).
    """
    address = pointer_of(base)
    owner: Buffer | None = None
    if _address(base) is not None:
        runtime, info = _who_knows(address)
    else:
        owner = _buffer_of(base)
        runtime = owner.device._runtime
        info = _ask(runtime, address)
    if info.kind is not MemoryKind.DEVICE or info.device is None:
        raise Refused(OpError.HIP_MEMORY_TYPE_INVALID)
    return Memory(address, Device._of(runtime, info.device), info.base + info.nbytes - address, owner)


def _address(base: Any) -> int | None:
    if isinstance(base, ctypes.c_void_p):
        base = base.value
    return base or 0 if base is None or isinstance(base, int) else None


def _buffer_of(base: Any) -> Buffer:
    try:
        return as_buffer(base, write=False)
    except (TypeError, ArgumentError, ClosedError):
        raise Refused(OpError.INVALID_VALUE) from None


def _who_knows(address: int) -> tuple[Runtime, PointerInfo]:
    for runtime in _candidates():
        info = _ask(runtime, address)
        if info.kind is not MemoryKind.PAGEABLE:
            return runtime, info
    runtime = used_device()._runtime
    return runtime, _ask(runtime, address)


def _candidates() -> list[Runtime]:
    first = [_used._runtime] if _used is not None else []
    return first + [r for r in registry.loaded() if r not in first]


def _ask(runtime: Runtime, address: int) -> PointerInfo:
    try:
        return runtime.pointer_info(address)
    except DeviceError as e:
        if e.status is RuntimeStatus.InvalidValue:
            raise Refused(OpError.INVALID_VALUE) from e
        raise Refused(OpError.HIP_DRIVER_ERROR, e.code) from e


def find_stream(stream: Any) -> tuple[Runtime, int]:
    """The runtime and handle of a stream; None is the null stream. Raises DeviceError
    where no runtime knows it."""
    if stream is None:
        return used_device()._runtime, NULL_STREAM
    if not isinstance(stream, int):
        home = stream._device if isinstance(stream, Stream) else None
        found = as_stream(stream, home or used_device())
        return found.device._runtime, found.handle
    if 0 <= stream <= PER_THREAD_STREAM:
        return used_device()._runtime, stream
    for runtime in _candidates():
        try:
            runtime.stream_device(stream)
        except DeviceError:
            continue
        return runtime, stream
    runtime = used_device()._runtime
    runtime.stream_device(stream)
    return runtime, stream
