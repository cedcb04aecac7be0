"""CUDA: loading NVIDIA's bindings, and what differs from HIP. Everything else is the table and GpuRuntime.

The runtime API is used throughout, so memory and streams live in each device's primary context, which
PyTorch, CuPy and cuda.core share. Where another device than the thread's own must be current, its primary
context is pushed and popped: cudaSetDevice would start the device it restores (case C98).
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, cast

from nobounce.errors import DeviceError, UnavailableError
from nobounce.route.types import MemoryKind
from nobounce.runtimes.base import LEGACY_STREAM, DeviceInfo, DirectIO, PointerInfo
from nobounce.runtimes.gpu import table
from nobounce.runtimes.gpu.adapter import Adapter, Call, CopyMany
from nobounce.runtimes.gpu.cufile import CuFileDirect
from nobounce.runtimes.gpu.gpu import GpuRuntime

_ATTRIBUTES = {
    "priorities": "cudaDevAttrStreamPrioritiesSupported",
    "managed": "cudaDevAttrManagedMemory",
    "pools": "cudaDevAttrMemoryPoolsSupported",
    "host_register": "cudaDevAttrHostRegisterSupported",
    "register_read_only": "cudaDevAttrHostRegisterReadOnlySupported",
    "multiprocessors": "cudaDevAttrMultiProcessorCount",
    "numa_node": "cudaDevAttrHostNumaId",
    "major": "cudaDevAttrComputeCapabilityMajor",
    "minor": "cudaDevAttrComputeCapabilityMinor",
}
_CAN_WAIT = "CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS"
_WORD = 64
"""Bytes between two words of a gate: a cache line each."""

_HOST, _DEVICE = 1, 2  # CUmemorytype

POINTER_ATTRIBUTES = ("MEMORY_TYPE", "DEVICE_ORDINAL", "IS_MANAGED", "RANGE_START_ADDR", "RANGE_SIZE")


class _Pointer(ctypes.Structure):
    """What cuPointerGetAttributes answers for `POINTER_ATTRIBUTES`, with room to spare for each."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in POINTER_ATTRIBUTES)


class _Query(threading.local):
    """One thread's answer and the addresses of its fields."""

    def __init__(self) -> None:
        self.answer = _Pointer()
        base = ctypes.addressof(self.answer)
        self.fields = (ctypes.c_void_p * len(POINTER_ATTRIBUTES))(
            *(base + getattr(_Pointer, name).offset for name in POINTER_ATTRIBUTES)
        )


class _Pushed:
    """A primary context that is current inside. Stateless, so one object per device serves every thread."""

    def __init__(self, adapter: CudaAdapter, context: Any) -> None:
        self._adapter, self.context = adapter, context

    def __enter__(self) -> None:
        self._adapter.context_push(self.context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._adapter.context_pop()


class CudaAdapter(Adapter):
    """`driver` and `runtime` are cuda.bindings' modules of these names."""

    name = "cuda"
    dlpack_device_type = 2
    legacy, asks_aside, registers_faster = LEGACY_STREAM, True, True

    def __init__(self, driver: Any, runtime: Any) -> None:
        self._driver, self._runtime = driver, runtime
        self._contexts: dict[int, _Pushed] = {}
        wanted = [
            int(getattr(driver.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{n}")) for n in POINTER_ATTRIBUTES
        ]
        self._wanted = (ctypes.c_int * len(wanted))(*wanted)
        self._query = _Query()
        self._ask: Call | None = None

    def function(self, row: table.Row) -> tuple[str, Call | None]:
        module, _, name = row.cuda.partition(":")
        where = self._driver if module == "driver" else self._runtime
        return name or row.op, getattr(where, name, None) if name else None

    def attribute_of(self, name: str) -> Any:
        return getattr(self._runtime.cudaDeviceAttr, _ATTRIBUTES.get(name, ""), None)

    def number(self, name: str, device: int) -> int | None:
        if name != "wait_value":
            return super().number(name, device)
        attribute = getattr(self._driver.CUdevice_attribute, _CAN_WAIT, None)
        if attribute is None:
            return None
        status, value = self._driver.cuDeviceGetAttribute(attribute, device)
        return None if status else int(value)

    def kinds(self) -> dict[int, Any]:
        return {int(kind): kind for kind in self._runtime.cudaMemcpyKind}

    def copy_many(self) -> CopyMany | None:
        """cudaMemcpyBatchAsync, since CUDA 12.8; the bindings or the driver may be older."""
        attributes = getattr(self._runtime, "cudaMemcpyAttributes", None)
        if attributes is None or self.function(table.ROWS["copy_batch"])[1] is None:
            return None
        each = attributes()
        each.srcAccessOrder = self._runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        batch, alike = self.copy_batch, ([each], [0], 1)

        def copy_many(copies: list[tuple[int, int, int]], stream: int) -> None:
            dsts, srcs, sizes = map(list, zip(*copies, strict=True))
            batch(dsts, srcs, sizes, len(copies), *alike, stream)

        return copy_many

    def text(self, value: Any) -> str:
        raw = bytes(value) if not isinstance(value, str) else value.encode()
        return raw.split(b"\0", 1)[0].decode(errors="replace")

    def _status_for_text(self, status: Any) -> Any:
        return self._runtime.cudaError_t(int(status))  # the driver's numbers mean the same

    # contexts

    def on(self, device: int) -> _Pushed:
        pushed = self._contexts.get(device)
        if pushed is None:
            pushed = self._contexts[device] = _Pushed(self, self.context_retain(device))
        return pushed

    def start_thread(self) -> None:
        if not self.context_get():
            self.set_device(0)

    def touched_device(self) -> int | None:
        return int(self.context_device()) if self.context_get() else None

    def set_current(self, device: int) -> None:
        """By contexts as far as that goes: a thread that has once called cudaSetDevice could not leave the
        device again without starting the one it goes back to."""
        if self.context_state(device)[1]:
            self.context_set(self.on(device).context)
            return
        self.context_set(0)
        if self.get_device() != device:
            self.set_device(device)

    # devices and pointers

    def pointer_info(self, address: int) -> PointerInfo:
        """By ctypes: cuda-bindings 13.1 to 13.3 answer 0 for every device ordinal (quirks.py)."""
        if self._ask is None:
            self._ask = ctypes.CDLL("libcuda.so.1").cuPointerGetAttributes
        query = self._query
        ctypes.memset(ctypes.addressof(query.answer), 0, ctypes.sizeof(_Pointer))
        status = self._ask(len(self._wanted), self._wanted, query.fields, ctypes.c_uint64(address))
        found = query.answer
        if status or found.MEMORY_TYPE not in (_HOST, _DEVICE):
            return PointerInfo(MemoryKind.PAGEABLE, None, 0, 0)
        device = found.DEVICE_ORDINAL & 0x7FFFFFFF
        base, nbytes = int(found.RANGE_START_ADDR), int(found.RANGE_SIZE)
        if found.IS_MANAGED & 0xFF:
            return PointerInfo(MemoryKind.MANAGED, device, base, nbytes)
        if found.MEMORY_TYPE == _DEVICE:
            return PointerInfo(MemoryKind.DEVICE, device, base, nbytes)
        return PointerInfo(MemoryKind.PINNED, None, base, nbytes)

    def device_info(self, device: int) -> DeviceInfo:
        raw = bytes(self.device_uuid(device).bytes)[:16].hex()
        major, minor = self.number("major", device), self.number("minor", device)
        node = self.number("numa_node", device)
        return DeviceInfo(
            name=self.device_name(256, device),
            total_nbytes=self.device_nbytes(device),
            pci_bus_id=self.pci_bus_id(32, device).lower(),
            numa_node=node if node is not None and node >= 0 else None,
            uuid=f"GPU-{raw[:8]}-{raw[8:12]}-{raw[12:16]}-{raw[16:20]}-{raw[20:]}",
            architecture=f"sm_{major}{minor}",
            multiprocessors=self.number("multiprocessors", device),
        )

    def foreign_stream_device(self, stream: int) -> int:
        return int(self.stream_device(stream))

    # words, callbacks, direct I/O

    def words(self, count: int) -> list[int]:
        base = self.alloc_pinned(count * _WORD, table.HOST_PORTABLE | table.HOST_MAPPED)
        ctypes.memset(base, 0, count * _WORD)
        return [base + i * _WORD for i in range(count)]

    def capture_mode(self) -> Callable[[Any], int] | None:
        try:  # it never waits, so the interpreter's lock is kept
            return cast(
                "Callable[[Any], int]", ctypes.PyDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
            )
        except (OSError, AttributeError):
            return None

    def host_function(self, trampoline: Any) -> Any:
        return self._runtime.cudaHostFn_t(ctypes.cast(trampoline, ctypes.c_void_p).value)

    def register_flags(self, *, read_only: bool) -> int:
        ro = read_only and self.flag("register_read_only", 0)
        return table.REGISTER_PORTABLE | (table.CUDA_REGISTER_READ_ONLY if ro else 0)

    def direct(self) -> DirectIO:
        return CuFileDirect(self.device_info)


def create() -> GpuRuntime:
    """The runtime `cuda`. Raises UnavailableError with the reason (HIP rule 81)."""
    try:
        driver: Any = importlib.import_module("cuda.bindings.driver")
        runtime: Any = importlib.import_module("cuda.bindings.runtime")
    except ImportError as e:
        raise _unavailable(
            f"the package cuda-bindings cannot be imported ({e}): pip install nobounce[cuda]"
        ) from e
    return load(driver, runtime)


def load(driver: Any, runtime: Any) -> GpuRuntime:
    """As `create`, over bindings that are already imported (or a double of them)."""
    try:
        status = driver.cuInit(0)[0]
    except RuntimeError as e:
        raise _unavailable(f"the NVIDIA driver's libcuda.so.1 cannot be loaded: {e}") from e
    adapter = CudaAdapter(driver, runtime)
    if status and int(status) != 100:
        raise _unavailable(
            f"cuInit answers {status.name} ({int(status)}): "
            f"{adapter.error_text(runtime.cudaError_t(int(status)))}"
        )
    if status:
        raise _unavailable("there is no device")
    try:
        count = adapter.device_count()
    except DeviceError as e:
        raise _unavailable(_why_no_count(driver, runtime, e)) from e
    if not count:
        raise _unavailable("there is no device")
    return GpuRuntime(adapter, count)


def _why_no_count(driver: Any, runtime: Any, error: DeviceError) -> str:
    if error.code == 100:
        return "there is no device"
    if error.code == 35:
        has, needs = driver.cuDriverGetVersion()[1], runtime.getLocalRuntimeVersion()[1]
        return (
            f"the driver supports CUDA {has // 1000}.{has % 1000 // 10} and the installed cuda-bindings need "
            f"{needs // 1000}.{needs % 1000 // 10}: update the driver, or install older cuda-bindings"
        )
    return str(error)


def _unavailable(because: str) -> UnavailableError:
    return UnavailableError(f"cuda: unavailable, because {because}")
