"""A double of rocm.bindings.hip over a simulated device: the same names, arguments, enums and tuples.

What the bindings are strict about, it is strict about: kinds and attributes must be members of their enums, statuses come
back first, pointers and handles as objects with `__int__`, NULL as None. tests/unit/gpu compares its functions with the
real bindings where they are installed.
"""

from __future__ import annotations

import ctypes
import enum
import threading
from collections.abc import Callable
from typing import Any

from nobounce.errors import DeviceError, OutOfMemoryError, RuntimeStatus
from nobounce.route.types import MemoryKind
from nobounce.runtimes.base import CopyKind
from nobounce.runtimes.host.sim import SimRuntime

hipError_t = enum.IntEnum(  # noqa: N816
    "hipError_t",
    {f"hipError{s.name}" if s else "hipSuccess": int(s) for s in RuntimeStatus}
    | {"hipErrorStreamCaptureUnsupported": 900},
)
hipMemcpyKind = enum.IntEnum(  # noqa: N816
    "hipMemcpyKind",
    {
        "hipMemcpyHostToHost": 0,
        "hipMemcpyHostToDevice": 1,
        "hipMemcpyDeviceToHost": 2,
        "hipMemcpyDeviceToDevice": 3,
        "hipMemcpyDefault": 4,
        "hipMemcpyDeviceToDeviceNoCU": 1024,
    },
)
hipDeviceAttribute_t = enum.IntEnum(  # noqa: N816
    "hipDeviceAttribute_t",
    [
        "hipDeviceAttributeStreamPrioritiesSupported",
        "hipDeviceAttributeManagedMemory",
        "hipDeviceAttributeMemoryPoolsSupported",
        "hipDeviceAttributeHostRegisterSupported",
        "hipDeviceAttributeCanUseStreamWaitValue",
        "hipDeviceAttributeMultiprocessorCount",
        "hipDeviceAttributeHostNumaId",
    ],
)

Result = tuple[Any, ...]


class Pointer:
    """What the bindings wrap addresses and handles in."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __int__(self) -> int:
        return self._value


class Text:
    def __init__(self, text: str) -> None:
        self._text = text

    def decode(self) -> str:
        return self._text


class Attributes:
    """hipPointerAttribute_t."""

    def __init__(self, type: int, device: int, managed: int) -> None:
        self.type, self.device, self.isManaged = type, device, managed


class Properties:
    gcnArchName = Text("gfx90a:sramecc+:xnack-")  # noqa: N815 - the vendor's name


class Uuid:
    bytes = Text("0123456789abcdef")


EXCHANGE = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))

UNSAFE = frozenset(
    {
        "hipDeviceSynchronize",
        "hipMalloc",
        "hipMallocAsync",
        "hipMemcpy",
        "hipMemset",
        "hipFree",
        "hipHostMalloc",
        "hipHostFree",
        "hipHostRegister",
        "hipHostUnregister",
        "hipExtMallocWithFlags",
        "hipMallocManaged",
        "hipStreamCreateWithPriority",
        "hipStreamDestroy",
        "hipStreamQuery",
        "hipStreamSynchronize",
        "hipEventQuery",
        "hipEventSynchronize",
        "hipEventDestroy",
    }
)
"""What a capture in the default mode forbids to threads in that mode (HIP rules 84 to 88)."""

_TYPES = {MemoryKind.PAGEABLE: 0, MemoryKind.PINNED: 1, MemoryKind.DEVICE: 2, MemoryKind.MANAGED: 3}


def _pointer(value: int) -> Pointer | None:
    return Pointer(value) if value else None


class HipDouble:
    """Stands for the module. `calls` counts by function, `used` are the devices that were current in calls that start one,
    `wait_value` is what the device says it can."""

    hipError_t = hipError_t  # noqa: N815
    hipMemcpyKind = hipMemcpyKind  # noqa: N815
    hipDeviceAttribute_t = hipDeviceAttribute_t  # noqa: N815

    def __init__(self, devices: int = 2, *, wait_value: bool = True) -> None:
        self.sim = SimRuntime(devices=devices)
        self.wait_value = wait_value
        self.calls: dict[str, int] = {}
        self.used: set[int] = set()
        self._signals: list[Any] = []
        self._waits: list[tuple[Any, int, Any]] = []
        self._more = threading.Condition()
        self._poller: threading.Thread | None = None
        self.capturing: str = ""
        """"open" while some stream is captured in the default mode, "ended" once a call has ended that."""
        self._mode = threading.local()
        self._exchange = EXCHANGE(self._swap_mode)

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name.startswith("hip") and callable(found) and not isinstance(found, type):
            return self._answering(name, found)
        return found

    def _answering(self, name: str, do: Callable[..., Result]) -> Callable[..., Result]:
        def call(*args: Any) -> Result:
            self.calls[name] = self.calls.get(name, 0) + 1
            if self.capturing and name in UNSAFE and self.mode() == 0:
                self.capturing = "ended"
                return (hipError_t.hipErrorStreamCaptureUnsupported, *NOTHING.get(name, ()))
            if not name.startswith(HARMLESS):
                self.used.add(self.sim.current_device())
            try:
                return (hipError_t.hipSuccess, *do(*args))
            except DeviceError as e:
                return (hipError_t(e.code), *NOTHING.get(name, ()))
            except OutOfMemoryError:
                return (hipError_t.hipErrorOutOfMemory, *NOTHING.get(name, ()))

        return call

    # devices

    def hipInit(self, flags: int) -> Result:
        return ()

    def hipGetDeviceCount(self) -> Result:
        return (self.sim.device_count(),)

    def hipGetDevice(self) -> Result:
        return (self.sim.current_device(),)

    def hipSetDevice(self, device: int) -> Result:
        self.sim.set_current_device(device)
        return ()

    def hipDeviceSynchronize(self) -> Result:
        self.sim.device_sync(self.sim.current_device())
        return ()

    def hipDeviceGetAttribute(self, attribute: Any, device: int) -> Result:
        if not isinstance(attribute, hipDeviceAttribute_t):
            raise TypeError("argument 'attr' must be of type '_hipDeviceAttribute_t__Base'")
        self.sim.device_info(device)
        return (int(self.wait_value if "WaitValue" in attribute.name else 1),)

    def hipDeviceGetName(self, length: int, device: int) -> Result:
        return (Text(self.sim.device_info(device).name),)

    def hipDeviceTotalMem(self, device: int) -> Result:
        return (self.sim.device_info(device).total_nbytes,)

    def hipDeviceGetUuid(self, device: int) -> Result:
        return (Uuid(),)

    def hipDeviceGetPCIBusId(self, length: int, device: int) -> Result:
        return (Text(str(self.sim.device_info(device).pci_bus_id).upper()),)

    def hipGetDeviceProperties(self, device: int) -> Result:
        return (Properties(),)

    def hipRuntimeGetVersion(self) -> Result:
        return (70_000_000,)

    def hipDriverGetVersion(self) -> Result:
        return (70_000_000,)

    def hipGetProcAddress(self, symbol: Any, version: int, flags: int) -> Result:
        if not isinstance(symbol, bytes):
            raise TypeError("a CStr is made from bytes")
        if symbol == b"hipThreadExchangeStreamCaptureMode":
            return Pointer(ctypes.cast(self._exchange, ctypes.c_void_p).value or 0), 0
        return None, 1

    def mode(self) -> int:
        """The calling thread's capture mode: 0 is the default, 2 relaxed."""
        return int(getattr(self._mode, "value", 0))

    def _swap_mode(self, pointer: Any) -> int:
        before, self._mode.value = self.mode(), pointer[0]
        pointer[0] = before
        return 0

    # memory

    def hipMalloc(self, nbytes: int) -> Result:
        return (_pointer(self.sim.alloc(self.sim.current_device(), nbytes)),)

    def hipFree(self, address: int) -> Result:
        self.sim.free(address)
        return ()

    def hipMallocAsync(self, nbytes: int, stream: int) -> Result:
        return (_pointer(self.sim.alloc_async(self.sim.stream_device(stream), nbytes, stream)),)

    def hipFreeAsync(self, address: int, stream: int) -> Result:
        self.sim.free_async(address, stream)
        return ()

    def hipDeviceGetDefaultMemPool(self, device: int) -> Result:
        return (Pointer(0x900 + device),)

    def hipMallocFromPoolAsync(self, nbytes: int, pool: Pointer, stream: int) -> Result:
        return (_pointer(self.sim.alloc_async(int(pool) - 0x900, nbytes, stream)),)

    def hipHostMalloc(self, nbytes: int, flags: int) -> Result:
        return (_pointer(self.sim.alloc_pinned(nbytes)),)

    def hipHostFree(self, address: int) -> Result:
        self.sim.free_pinned(address)
        return ()

    def hipMallocManaged(self, nbytes: int, flags: int) -> Result:
        return (_pointer(self.sim.alloc_managed(self.sim.current_device(), nbytes)),)

    def hipExtMallocWithFlags(self, nbytes: int, flags: int) -> Result:
        if nbytes != 8 or flags != 2:
            raise DeviceError("hipExtMallocWithFlags", RuntimeStatus.InvalidValue)
        self._signals.append(ctypes.c_uint64(77))
        return (Pointer(ctypes.addressof(self._signals[-1])),)

    def hipHostRegister(self, address: int, nbytes: int, flags: int) -> Result:
        self.sim.register_host(address, nbytes)
        return ()

    def hipHostUnregister(self, address: int) -> Result:
        self.sim.unregister_host(address)
        return ()

    def hipPointerGetAttributes(self, address: int) -> Result:
        info = self.sim.pointer_info(address)
        managed = int(info.kind is MemoryKind.MANAGED)
        return (Attributes(_TYPES[info.kind], info.device or 0, managed),)

    def hipMemGetAddressRange(self, address: int) -> Result:
        info = self.sim.pointer_info(address)
        if not info.base:
            raise DeviceError("hipMemGetAddressRange", RuntimeStatus.InvalidValue)
        return Pointer(info.base), info.nbytes

    # copies and fills

    def hipMemcpy(self, dst: int, src: int, nbytes: int, kind: Any) -> Result:
        self.sim.copy(dst, src, nbytes, _kind(kind))
        return ()

    def hipMemcpyAsync(self, dst: int, src: int, nbytes: int, kind: Any, stream: int) -> Result:
        self.sim.copy_async(dst, src, nbytes, stream, _kind(kind))
        return ()

    def hipMemcpyPeer(self, dst: int, dst_device: int, src: int, src_device: int, nbytes: int) -> Result:
        self.sim.copy_peer(dst, dst_device, src, src_device, nbytes)
        return ()

    def hipMemcpyPeerAsync(
        self, dst: int, dst_device: int, src: int, src_device: int, nbytes: int, stream: int
    ) -> Result:
        self.sim.copy_peer(dst, dst_device, src, src_device, nbytes, stream)
        return ()

    def hipMemset(self, address: int, value: int, nbytes: int) -> Result:
        self.sim.fill(address, value, nbytes)
        return ()

    def hipMemsetAsync(self, address: int, value: int, nbytes: int, stream: int) -> Result:
        self.sim.fill_async(address, value, nbytes, stream)
        return ()

    def hipMemsetD16Async(self, address: int, value: int, count: int, stream: int) -> Result:
        self.sim.fill_async(address, value, 2 * count, stream, 2)
        return ()

    def hipMemsetD32Async(self, address: int, value: int, count: int, stream: int) -> Result:
        self.sim.fill_async(address, value, 4 * count, stream, 4)
        return ()

    # streams

    def hipStreamCreateWithPriority(self, flags: int, priority: int) -> Result:
        device = self.sim.current_device()
        return (Pointer(self.sim.stream_create(device, nonblocking=bool(flags & 1), priority=priority)),)

    def hipStreamDestroy(self, stream: int) -> Result:
        self.sim.stream_destroy(stream)
        return ()

    def hipStreamQuery(self, stream: int) -> Result:
        if not self.sim.stream_query(stream):
            raise DeviceError("hipStreamQuery", RuntimeStatus.NotReady)
        return ()

    def hipStreamIsCapturing(self, stream: int) -> Result:
        return (0,)

    def hipStreamSynchronize(self, stream: int) -> Result:
        self.sim.stream_sync(stream)
        return ()

    def hipStreamWaitEvent(self, stream: int, event: int, flags: int) -> Result:
        self.sim.stream_wait_event(stream, event, flags)
        return ()

    def hipStreamGetDevice(self, stream: int) -> Result:
        return (self.sim.stream_device(stream),)

    def hipDeviceGetStreamPriorityRange(self) -> Result:
        return self.sim.stream_priority_range(self.sim.current_device())

    def hipStreamGetPriority(self, stream: int) -> Result:
        return (self.sim.stream_priority(stream),)

    def hipStreamGetFlags(self, stream: int) -> Result:
        return (int(self.sim.stream_is_nonblocking(stream)),)

    def hipLaunchHostFunc(self, stream: int, fn: int, data: int) -> Result:
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(fn)
        self.sim.host_call(stream, lambda: call(data))
        return ()

    def hipStreamWriteValue64(self, stream: int, address: int, value: int, flags: int) -> Result:
        word = ctypes.c_uint64.from_address(address)

        def write() -> None:
            word.value = value

        self.sim.host_call(stream, write)
        return ()

    def hipStreamWaitValue64(self, stream: int, address: int, value: int, flags: int, mask: int) -> Result:
        if flags != 0 or mask != (1 << 64) - 1:
            raise DeviceError("hipStreamWaitValue64", RuntimeStatus.InvalidValue)
        gate = self.sim.gate(stream, lambda: None)
        with self._more:
            self._waits.append((ctypes.c_uint64.from_address(address), value, gate))
            if self._poller is None:
                self._poller = threading.Thread(target=self._poll, daemon=True)
                self._poller.start()
            self._more.notify()
        return ()

    def _poll(self) -> None:
        while True:
            with self._more:
                while not self._waits:
                    self._more.wait()
                self._more.wait(0.0002)
                done = [w for w in self._waits if w[0].value >= w[1]]
                # Not by the words again: one that changes in between would be in neither list, its stream held for good.
                self._waits = [w for w in self._waits if w not in done]
            for _, _, gate in done:
                gate.open()

    # events

    def hipEventCreateWithFlags(self, flags: int) -> Result:
        made = self.sim.event_create(
            self.sim.current_device(),
            timing=not flags & 2,
            blocking_sync=bool(flags & 1),
            interprocess=bool(flags & 4),
        )
        return (Pointer(made),)

    def hipEventDestroy(self, event: int) -> Result:
        self.sim.event_destroy(event)
        return ()

    def hipEventRecord(self, event: int, stream: int) -> Result:
        self.sim.event_record(event, stream)
        return ()

    def hipEventQuery(self, event: int) -> Result:
        if not self.sim.event_query(event):
            raise DeviceError("hipEventQuery", RuntimeStatus.NotReady)
        return ()

    def hipEventSynchronize(self, event: int) -> Result:
        self.sim.event_sync(event)
        return ()

    def hipEventElapsedTime(self, start: int, end: int) -> Result:
        return (self.sim.event_elapsed(start, end),)

    # peers and errors

    def hipDeviceCanAccessPeer(self, device: int, peer: int) -> Result:
        return (int(self.sim.can_access_peer(device, peer)),)

    def hipDeviceEnablePeerAccess(self, peer: int, flags: int) -> Result:
        self.sim.enable_peer_access(self.sim.current_device(), peer, flags)
        return ()

    def hipDeviceDisablePeerAccess(self, peer: int) -> Result:
        self.sim.disable_peer_access(self.sim.current_device(), peer)
        return ()

    def hipGetErrorString(self, error: Any) -> Result:
        if not isinstance(error, hipError_t):
            raise TypeError("argument 'hipError' must be of type '_hipError_t__Base'")
        return (Text(f"the text of {error.name}"),)

    def hipGetLastError(self) -> Result:
        self.sim.last_error()
        return ()


NOTHING: dict[str, Result] = dict.fromkeys(
    ("hipMalloc", "hipMallocAsync", "hipHostMalloc", "hipMallocManaged", "hipGetDeviceCount"), (None,)
)
"""What stands in the place of a result when the call fails."""


HARMLESS = (
    "hipGetDevice",
    "hipSetDevice",
    "hipDeviceGet",
    "hipPointerGet",
    "hipMemGetAddressRange",
    "hipStreamGetDevice",
    "hipGetLastError",
    "hipGetErrorString",
    "hipRuntimeGetVersion",
    "hipDriverGetVersion",
)
"""Calls that start no device."""


def _kind(kind: Any) -> CopyKind:
    if not isinstance(kind, hipMemcpyKind):
        raise TypeError("argument 'kind' must be of type '_hipMemcpyKind__Base'")
    return CopyKind(int(kind)) if kind < 5 else CopyKind.DEVICE_TO_DEVICE
