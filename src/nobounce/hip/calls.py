"""HIP's runtime calls by their own names, on any runtime: each returns a tuple, its status
first, and raises nothing.

The conventions are those of AMD's bindings (`from hip import hip`): what C returns through pointers follows
the status. Addresses, streams and events are ints. Only one runtime is meant at a time: that of the device
given to `use`, else of the default device; ordinals and the current device of a thread are its own. What is
not here is in nobounce's objects (Device, Stream, Buffer).
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

from nobounce.buffer import as_buffer
from nobounce.device import Device, DeviceLike, as_device, default_device
from nobounce.errors import DeviceError, RuntimeStatus
from nobounce.hip.status import attempt, last_error, status_name
from nobounce.hip.types import (
    hipError_t,
    hipEventBlockingSync,
    hipEventDisableTiming,
    hipEventInterprocess,
    hipMemcpyKind,
    hipStreamNonBlocking,
)
from nobounce.runtimes.base import CopyKind, Runtime
from nobounce.runtimes.powers import needed

_used: Device | None = None


def use(device: DeviceLike) -> None:
    """Name the device whose runtime is meant, and make it the thread's current one. None goes
    back to the default device.

    Raises ArgumentError and UnavailableError as `Device` does.
    """
    global _used
    _used = None if device is None else as_device(device)
    if _used is not None:
        _used._runtime.set_current_device(_used.device_id)


def _runtime() -> Runtime:
    return (_used if _used is not None else default_device())._runtime


def _address(pointer: Any) -> int:
    """The address of an int, a ctypes pointer or any memory that nobounce knows; 0 for None."""
    if pointer is None:
        return 0
    if isinstance(pointer, ctypes.c_void_p):
        return pointer.value or 0
    if isinstance(pointer, int):
        return pointer
    return as_buffer(pointer, write=False).handle


def _handle(stream_or_event: Any) -> int:
    """The handle of an int or of an object that has one; None is the null stream."""
    return (
        0
        if stream_or_event is None
        else int(getattr(stream_or_event, "handle", stream_or_event))  # ours, too
    )


def _flags(flags: int, allowed: int) -> int:
    if flags & ~allowed:
        raise DeviceError("flags", RuntimeStatus.InvalidValue, detail=f"unknown flags {flags:#x}")
    return flags


# devices


def hipGetDeviceCount() -> tuple[hipError_t, int]:
    return attempt(lambda: _runtime().device_count(), 0)


def hipGetDevice() -> tuple[hipError_t, int]:
    return attempt(lambda: _runtime().current_device(), 0)


def hipSetDevice(deviceId: int) -> tuple[hipError_t]:
    """The calling thread's device."""
    return attempt(lambda: _runtime().set_current_device(deviceId))[:1]


def hipDeviceSynchronize() -> tuple[hipError_t]:
    """Wait for every stream of the current device (HIP rule 20)."""
    return attempt(lambda: _runtime().device_sync(_runtime().current_device()))[:1]


# memory


def hipMalloc(size: int) -> tuple[hipError_t, int | None]:
    """Device memory of `size` bytes on the current device."""
    return attempt(lambda: _runtime().alloc(_runtime().current_device(), size))


def hipFree(ptr: Any) -> tuple[hipError_t]:
    return attempt(lambda: _runtime().free(_address(ptr)))[:1]


def hipMallocAsync(size: int, stream: Any) -> tuple[hipError_t, int | None]:
    """Device memory in stream order (HIP rule 113); hipErrorNotSupported where the runtime has none."""

    def call() -> int:
        runtime = _runtime()
        memory = needed(runtime.ordered_memory, runtime.name, "stream-ordered memory")
        return memory.alloc_async(runtime.current_device(), size, _handle(stream))

    return attempt(call)


def hipFreeAsync(dev_ptr: Any, stream: Any) -> tuple[hipError_t]:
    def call() -> None:
        runtime = _runtime()
        needed(runtime.ordered_memory, runtime.name, "stream-ordered memory").free_async(
            _address(dev_ptr), _handle(stream)
        )

    return attempt(call)[:1]


def hipHostMalloc(size: int, flags: int = 0) -> tuple[hipError_t, int | None]:
    """Pinned host memory. Flags are accepted: there is one kind of it (HIP rule 128)."""
    return attempt(lambda: _runtime().alloc_pinned(size))


def hipHostFree(ptr: Any) -> tuple[hipError_t]:
    return attempt(lambda: _runtime().free_pinned(_address(ptr)))[:1]


def hipHostRegister(hostPtr: Any, sizeBytes: int, flags: int) -> tuple[hipError_t]:
    """Pin host memory that is there (HIP rule 128)."""

    def call() -> None:
        runtime = _runtime()
        needed(runtime.host_registration, runtime.name, "registration of host memory").register_host(
            _address(hostPtr), sizeBytes
        )

    return attempt(call)[:1]


def hipHostUnregister(hostPtr: Any) -> tuple[hipError_t]:
    def call() -> None:
        runtime = _runtime()
        needed(runtime.host_registration, runtime.name, "registration of host memory").unregister_host(
            _address(hostPtr)
        )

    return attempt(call)[:1]


def hipMallocManaged(size: int, flags: int) -> tuple[hipError_t, int | None]:
    def call() -> int:
        runtime = _runtime()
        memory = needed(runtime.managed_memory, runtime.name, "managed memory")
        return memory.alloc_managed(runtime.current_device(), size)

    return attempt(call)


def hipMemcpy(dst: Any, src: Any, sizeBytes: int, kind: int) -> tuple[hipError_t]:
    """Copy on the null stream (HIP rules 46 to 51)."""

    def call() -> None:
        _runtime().copy(_address(dst), _address(src), sizeBytes, _kind(kind))

    return attempt(call)[:1]


def hipMemcpyAsync(dst: Any, src: Any, sizeBytes: int, kind: int, stream: Any) -> tuple[hipError_t]:
    """Copy in stream order (HIP rules 52 to 57)."""

    def call() -> None:
        _runtime().copy_async(_address(dst), _address(src), sizeBytes, _handle(stream), _kind(kind))

    return attempt(call)[:1]


def _kind(kind: int) -> CopyKind:
    try:
        return CopyKind(int(hipMemcpyKind(kind)))
    except ValueError:
        raise DeviceError("hipMemcpy", RuntimeStatus.InvalidMemcpyDirection, detail=f"kind {kind}") from None


def hipMemset(dst: Any, value: int, sizeBytes: int) -> tuple[hipError_t]:
    """Set bytes on the null stream (HIP rules 58, 59)."""
    return attempt(lambda: _runtime().fill(_address(dst), value & 0xFF, sizeBytes))[:1]


def hipMemsetAsync(dst: Any, value: int, sizeBytes: int, stream: Any) -> tuple[hipError_t]:
    return attempt(lambda: _runtime().fill_async(_address(dst), value & 0xFF, sizeBytes, _handle(stream)))[:1]


# streams


def hipStreamCreate() -> tuple[hipError_t, int | None]:
    """A stream that is ordered with the null stream."""
    return hipStreamCreateWithFlags(0)


def hipStreamCreateWithFlags(flags: int) -> tuple[hipError_t, int | None]:
    return hipStreamCreateWithPriority(flags, 0)


def hipStreamCreateWithPriority(flags: int, priority: int) -> tuple[hipError_t, int | None]:
    """Lower numbers are more urgent (HIP rule 8)."""

    def call() -> int:
        nonblocking = _flags(flags, hipStreamNonBlocking) == hipStreamNonBlocking
        runtime = _runtime()
        return runtime.stream_create(runtime.current_device(), nonblocking=nonblocking, priority=priority)

    return attempt(call)


def hipStreamDestroy(stream: Any) -> tuple[hipError_t]:
    """Pending work completes (HIP rule 10)."""
    return attempt(lambda: _runtime().stream_destroy(_handle(stream)))[:1]


def hipStreamSynchronize(stream: Any) -> tuple[hipError_t]:
    return attempt(lambda: _runtime().stream_sync(_handle(stream)))[:1]


def hipStreamQuery(stream: Any) -> tuple[hipError_t]:
    """hipErrorNotReady while something is pending (HIP rule 5)."""
    return _ready(*attempt(lambda: _runtime().stream_query(_handle(stream))))


def hipStreamWaitEvent(stream: Any, event: Any, flags: int) -> tuple[hipError_t]:
    return attempt(lambda: _runtime().stream_wait_event(_handle(stream), _handle(event), flags))[:1]


# events


def hipEventCreate() -> tuple[hipError_t, int | None]:
    return hipEventCreateWithFlags(0)


def hipEventCreateWithFlags(flags: int) -> tuple[hipError_t, int | None]:
    def call() -> int:
        _flags(flags, hipEventBlockingSync | hipEventDisableTiming | hipEventInterprocess)
        runtime = _runtime()
        return runtime.event_create(
            runtime.current_device(),
            timing=not flags & hipEventDisableTiming,
            blocking_sync=bool(flags & hipEventBlockingSync),
            interprocess=bool(flags & hipEventInterprocess),
        )

    return attempt(call)


def hipEventDestroy(event: Any) -> tuple[hipError_t]:
    return attempt(lambda: _runtime().event_destroy(_handle(event)))[:1]


def hipEventRecord(event: Any, stream: Any) -> tuple[hipError_t]:
    return attempt(lambda: _runtime().event_record(_handle(event), _handle(stream)))[:1]


def hipEventSynchronize(event: Any) -> tuple[hipError_t]:
    return attempt(lambda: _runtime().event_sync(_handle(event)))[:1]


def hipEventQuery(event: Any) -> tuple[hipError_t]:
    """hipErrorNotReady until it is reached (HIP rule 27)."""
    return _ready(*attempt(lambda: _runtime().event_query(_handle(event))))


def hipEventElapsedTime(start: Any, stop: Any) -> tuple[hipError_t, float | None]:
    """Milliseconds (HIP rule 28)."""

    def call() -> float:
        runtime = _runtime()
        return needed(runtime.timing, runtime.name, "timing of events").event_elapsed(
            _handle(start), _handle(stop)
        )

    return attempt(call)


def _ready(status: hipError_t, ready: bool | None) -> tuple[hipError_t]:
    return (hipError_t.hipErrorNotReady,) if ready is False else (status,)


# errors


def hipGetLastError() -> tuple[hipError_t]:
    """This thread's last failed status, and reset it (HIP rules 73, 74, 76)."""
    return (last_error(reset=True),)


def hipPeekAtLastError() -> tuple[hipError_t]:
    return (last_error(reset=False),)


def hipGetErrorName(hip_error: int) -> tuple[hipError_t, bytes]:
    """The name as bytes, as AMD's bindings return C strings."""
    return hipError_t.hipSuccess, status_name(hip_error).encode()


def hipGetErrorString(hipError: int) -> tuple[hipError_t, bytes]:
    """A few words, made of the name."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", status_name(hipError).removeprefix("hipError"))
    return hipError_t.hipSuccess, words.removeprefix("hip ").lower().encode()
