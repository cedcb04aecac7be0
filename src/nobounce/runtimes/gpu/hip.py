"""HIP: loading AMD's bindings, and what differs from CUDA. Everything else is the table and GpuRuntime.

The bindings open `libamdhip64.so` at their first call and answer with a RuntimeError that says "dlopen" where
it is not there, or "dlsym" where an old library lacks a function. A process must have one HIP runtime:
PyTorch on ROCm brings its own, so a library that is already mapped is the one the bindings are made to open.
hip-python-interop is never imported: it overwrites NVIDIA's packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from nobounce.errors import DeviceError, UnavailableError
from nobounce.route.types import MemoryKind
from nobounce.runtimes.base import NULL_STREAM, DeviceInfo, DirectIO, PointerInfo
from nobounce.runtimes.gpu import table
from nobounce.runtimes.gpu.adapter import Adapter, Call
from nobounce.runtimes.gpu.amdfile import AmdFileDirect
from nobounce.runtimes.gpu.gpu import GpuRuntime

LIBRARY = "libamdhip64.so"

_ATTRIBUTES = {
    "priorities": "hipDeviceAttributeStreamPrioritiesSupported",
    "managed": "hipDeviceAttributeManagedMemory",
    "pools": "hipDeviceAttributeMemoryPoolsSupported",
    "host_register": "hipDeviceAttributeHostRegisterSupported",
    "wait_value": "hipDeviceAttributeCanUseStreamWaitValue",
    "multiprocessors": "hipDeviceAttributeMultiprocessorCount",
    "numa_node": "hipDeviceAttributeHostNumaId",
}
_HOST, _DEVICE, _MANAGED = 1, 2, 3  # hipMemoryType
_EXCHANGE = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))

_FOLDERS = (
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/opt/rocm*/lib",
)
"""Where distributions and ROCm put the library; only to explain why the bindings did not find it."""


class _Switched:
    """hipSetDevice, and back. One object per use: it remembers what was current."""

    __slots__ = ("_adapter", "_before", "_device")

    def __init__(self, adapter: HipAdapter, device: int) -> None:
        self._adapter, self._device = adapter, device

    def __enter__(self) -> None:
        self._before = self._adapter.get_device()
        if self._before != self._device:
            self._adapter.set_device(self._device)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before != self._device:
            self._adapter.set_device(self._before)


class HipAdapter(Adapter):
    """`hip` is rocm.bindings.hip."""

    name = "hip"
    dlpack_device_type = 10
    # A query by the null handle, and by no other, queues a marker behind every busy blocking stream.
    legacy, asks_aside, registers_faster = NULL_STREAM, False, False

    def __init__(self, hip: Any) -> None:
        self._hip = hip

    def function(self, row: table.Row) -> tuple[str, Call | None]:
        return row.hip or row.op, getattr(self._hip, row.hip, None) if row.hip else None

    def attribute_of(self, name: str) -> Any:
        return getattr(self._hip.hipDeviceAttribute_t, _ATTRIBUTES.get(name, ""), None)

    def kinds(self) -> dict[int, Any]:
        return {int(kind): kind for kind in self._hip.hipMemcpyKind}

    def text(self, value: Any) -> str:
        decoded = value.decode() if hasattr(value, "decode") else str(value)
        return decoded.split("\0", 1)[0] if isinstance(decoded, str) else str(decoded)

    # devices

    def on(self, device: int) -> _Switched:
        return _Switched(self, device)

    def start_thread(self) -> None:
        """HIP starts a thread by itself."""

    def touched_device(self) -> int | None:
        return None  # HIP does not tell which devices have been started

    def set_current(self, device: int) -> None:
        self.set_device(device)  # HIP starts a device at its first use, not here

    def pointer_info(self, address: int) -> PointerInfo:
        unknown = PointerInfo(MemoryKind.PAGEABLE, None, 0, 0)
        try:
            found = self.pointer(address)
        except DeviceError:  # before HIP 7 unknown memory is InvalidValue, since then it is Unregistered
            return unknown
        kind = int(found.type)
        if kind not in (_HOST, _DEVICE, _MANAGED):
            return unknown
        try:
            base, nbytes = self.address_range(address)
        except DeviceError:
            base, nbytes = 0, 0
        if kind == _MANAGED or found.isManaged:
            return PointerInfo(MemoryKind.MANAGED, int(found.device), base, nbytes)
        if kind == _DEVICE:
            return PointerInfo(MemoryKind.DEVICE, int(found.device), base, nbytes)
        return PointerInfo(MemoryKind.PINNED, None, base, nbytes)

    def device_info(self, device: int) -> DeviceInfo:
        uuid = architecture = None
        with contextlib.suppress(DeviceError):  # an old library has no hipDeviceGetUuid
            raw = self.device_uuid(device).bytes
            uuid = (
                self.text(raw)
                if hasattr(raw, "decode")
                else bytes(b & 0xFF for b in raw).decode("ascii", "replace")
            )
            uuid = f"GPU-{uuid}"
        with contextlib.suppress(DeviceError):
            architecture = self.text(self.properties(device).gcnArchName)
        node = self.number("numa_node", device)
        return DeviceInfo(
            name=self.device_name(256, device),
            total_nbytes=self.device_nbytes(device),
            pci_bus_id=self.pci_bus_id(32, device).lower(),
            numa_node=node if node is not None and node >= 0 else None,
            uuid=uuid,
            architecture=architecture,
            multiprocessors=self.number("multiprocessors", device),
        )

    def foreign_stream_device(self, stream: int) -> int:
        return int(self.stream_device(stream))

    # words, callbacks, direct I/O

    def words(self, count: int) -> list[int]:
        """Signal memory, which is 8 bytes an allocation."""
        made = [int(self.alloc_signal(8, table.HIP_SIGNAL_MEMORY)) for _ in range(count)]
        for address in made:
            ctypes.c_uint64.from_address(address).value = 0
        return made

    def capture_mode(self) -> Callable[[Any], int] | None:
        """By its address: the bindings' own function takes no mode."""
        try:
            address, result = self.symbol(b"hipThreadExchangeStreamCaptureMode", self.runtime_version(), 0)
        except (DeviceError, RuntimeError):
            return None
        return _EXCHANGE(address) if address and not result else None

    def host_function(self, trampoline: Any) -> Any:
        return ctypes.cast(trampoline, ctypes.c_void_p).value

    def register_flags(self, *, read_only: bool) -> int:
        """HIP has no flag for memory that may only be read: a read-only mapping is
        refused by the kernel driver."""
        return table.REGISTER_PORTABLE

    def direct(self) -> DirectIO:
        return AmdFileDirect(self)


def create() -> GpuRuntime:
    """The runtime `hip`. Raises UnavailableError with the reason (HIP rule 81)."""
    try:
        hip: Any = importlib.import_module("rocm.bindings.hip")
        paths: Any = importlib.import_module("rocm.bindings.util.paths")
    except ImportError as e:
        raise _unavailable(
            f"the package rocm-bindings-hip cannot be imported ({e}): pip install nobounce[rocm]"
        ) from e
    mapped = mapped_libraries()
    if len(mapped) > 1:
        raise _unavailable(f"the process has two HIP runtimes already: {' and '.join(mapped)}")
    with _opening(paths, mapped[0] if mapped else None):
        made = load(hip)
    after = mapped_libraries()
    if len(after) > 1:
        raise _unavailable(f"the process would have two HIP runtimes: {' and '.join(after)}")
    return made


def load(hip: Any, find: Callable[[], list[str]] | None = None) -> GpuRuntime:
    """As `create`, over bindings that are already imported (or a double of them)."""
    adapter = HipAdapter(hip)
    try:
        status, count = hip.hipGetDeviceCount()[:2]
    except RuntimeError as e:
        raise _unavailable(_why_not_loaded(str(e), (find or versioned_libraries)())) from e
    if status:
        code, name = int(status), getattr(status, "name", str(status))
        if code in (100, 101):
            raise _unavailable(f"there is no device ({name}{_why_no_device()})")
        raise _unavailable(f"hipGetDeviceCount answers {name} ({code})")
    if not count:
        raise _unavailable(f"there is no device{_why_no_device()}")
    return GpuRuntime(adapter, int(count))


def mapped_libraries(maps: str = "/proc/self/maps") -> list[str]:
    """The HIP runtimes mapped into this process, by path."""
    try:
        with open(maps) as lines:
            paths = {line.rstrip("\n").split(maxsplit=5)[5] for line in lines if "libamdhip64" in line}
    except (OSError, IndexError):
        return []
    return sorted({os.path.realpath(p) for p in paths if os.path.basename(p).startswith(LIBRARY)})


def versioned_libraries() -> list[str]:
    """HIP runtimes that are there under a versioned name only, which the bindings do not look for."""
    found: list[str] = []
    for folder in _FOLDERS:
        for where in sorted(glob.glob(folder)):
            found += sorted(glob.glob(os.path.join(glob.escape(where), f"{LIBRARY}.*")))
    return found


_patching = threading.Lock()


@contextlib.contextmanager
def _opening(paths: Any, mapped: str | None) -> Iterator[None]:
    """Have the bindings open the library that is mapped already, if there is one: they look
    it up at their first call."""
    if mapped is None:
        yield
        return
    with _patching:
        found = paths.get_library_path

        def already_mapped(shortname: str, *args: Any, **kwargs: Any) -> bytes:
            return os.fsencode(mapped) if shortname == "amdhip64" else found(shortname, *args, **kwargs)

        paths.get_library_path = already_mapped
        try:
            yield
        finally:
            paths.get_library_path = found


def _why_not_loaded(error: str, versioned: list[str]) -> str:
    if "dlopen" in error and "cannot open shared object file" in error and versioned:
        names = " and ".join(sorted({_soname(path) for path in versioned}))
        folder = os.path.dirname(versioned[0])
        return (
            f"the HIP runtime is found, but only as {names}, which the bindings do not open: install the "
            "package with "
            f"{LIBRARY}, or set ROCM_PATH to a folder whose lib/{LIBRARY} links to it (it is in {folder})"
        )
    if "dlopen" in error and "cannot open shared object file" in error:
        return f"there is no {LIBRARY}: install ROCm, or set ROCM_PATH to where it is"
    return f"the HIP runtime cannot be used: {error}"


def _soname(path: str) -> str:
    """libamdhip64.so.5 of libamdhip64.so.5.2.21153: the name programs are linked to."""
    return ".".join(os.path.basename(path).split(".")[:3])


def _why_no_device() -> str:
    return "" if os.path.exists("/dev/kfd") else "; /dev/kfd does not exist"


def _unavailable(because: str) -> UnavailableError:
    return UnavailableError(f"hip: unavailable, because {because}")
