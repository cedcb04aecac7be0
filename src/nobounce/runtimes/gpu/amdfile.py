"""Direct I/O on AMD: hipAmdFileRead and hipAmdFileWrite, which no header exports (hipFile C-13 to C-16).

They are asked of the HIP runtime by name (hipGetProcAddress, since HIP 6.2) and called through ctypes:

    hipError_t f(hipAmdFileHandle_t file, void *address, uint64_t nbytes, int64_t file_offset,
                 uint64_t *moved, int32_t *status)

The handle is an 8-byte union by value whose `fd` counts on Linux. `status` is a negative or positive errno of
the kernel driver, which comes before the HIP status. Nothing here has run on AMD hardware.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import threading
from typing import TYPE_CHECKING, Any

from nobounce.errors import DeviceError
from nobounce.route.types import MAX_RW_COUNT, DirectFacts, Known
from nobounce.runtimes.base import DirectIO

if TYPE_CHECKING:
    from nobounce.runtimes.gpu.adapter import Adapter

NAMES = ("hipAmdFileRead", "hipAmdFileWrite")
ALIGNMENT = 4096
"""The kernel driver answers EINVAL to less (hipFile C-16)."""


class _Handle(ctypes.Union):
    _fields_ = (("handle", ctypes.c_void_p), ("fd", ctypes.c_int), ("pad", ctypes.c_uint8 * 8))


class _File(ctypes.Structure):
    """A struct around the union: ctypes passes no bare union by value."""

    _fields_ = (("of", ctypes.c_uint64),)


PROTOTYPE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    _File,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_int32),
)


class AmdFileDirect(DirectIO):
    """Direct transfers of the HIP runtime behind `adapter`."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._local = threading.local()

    def facts(self, device: int) -> DirectFacts:
        missing = [name for name in NAMES if self._function(name) is None]
        if missing:
            return DirectFacts(
                runtime="hip",
                available=False,
                because=f"the HIP runtime has no {' and no '.join(missing)}",
                code="no-amd-file-calls",
                cure="install ROCm 7.2 or later, whose HIP runtime has AMD Infinity Storage",
                file_rule="hipfile",
            )
        return DirectFacts(
            runtime="hip",
            available=True,
            file_rule="hipfile",
            min_mem_align=ALIGNMENT,
            min_offset_align=ALIGNMENT,
            max_nbytes=MAX_RW_COUNT,
            virtual_function=virtual_function(self._adapter.pci_bus_id(32, device)),
        )

    def read(self, device: int, fd: int, address: int, nbytes: int, file_offset: int) -> int:
        return self._move(NAMES[0], device, fd, address, nbytes, file_offset)

    def write(self, device: int, fd: int, address: int, nbytes: int, file_offset: int) -> int:
        return self._move(NAMES[1], device, fd, address, nbytes, file_offset)

    def _move(self, call: str, device: int, fd: int, address: int, nbytes: int, file_offset: int) -> int:
        function = self._function(call)
        if function is None:
            raise OSError(19, f"{call}: the HIP runtime has no such function")
        if not getattr(self._local, "ready", False):
            self._adapter.init(0)  # a thread whose first HIP call this is would crash (hipFile C-14)
            self._local.ready = True
        moved, status = ctypes.c_uint64(), ctypes.c_int32()
        file = _Handle(handle=0)
        file.fd = fd
        with self._adapter.on(device):
            code = function(
                _File.from_buffer_copy(bytes(file)),
                address,
                min(nbytes, MAX_RW_COUNT),
                file_offset,
                ctypes.byref(moved),
                ctypes.byref(status),
            )
        if status.value:
            number = abs(status.value)
            raise OSError(number, f"{call}: {os.strerror(number)}")
        if code:
            raise DeviceError(
                call, None, code=code, name=f"hipError {code}", detail=f"{nbytes} bytes at {file_offset}"
            )
        return moved.value

    @functools.cache  # noqa: B019 - one object per process
    def _function(self, name: str) -> Any:
        try:
            version = self._adapter.runtime_version()
            address, result = self._adapter.symbol(name.encode(), version, 0)
        except (DeviceError, RuntimeError):  # no hipGetProcAddress before HIP 6.2, or no such symbol
            return None
        return PROTOTYPE(address) if address and not result else None  # G-5: non-null, with query result 0


@functools.cache
def virtual_function(pci_bus_id: str) -> Known:
    """Whether the GPU is an SR-IOV virtual function: sysfs knows on the host, amdsmi in a
    guest where it is installed."""
    if os.path.exists(f"/sys/bus/pci/devices/{pci_bus_id.lower()}/physfn"):
        return "yes"
    try:
        amdsmi: Any = importlib.import_module("amdsmi")
    except Exception:  # amdsmi raises KeyError at import where its library is not there
        return "unknown"
    try:
        amdsmi.amdsmi_init()
        try:
            for handle in amdsmi.amdsmi_get_processor_handles():
                if amdsmi.amdsmi_get_gpu_device_bdf(handle).lower() == pci_bus_id.lower():
                    return _virtualization(amdsmi, handle)
        finally:
            amdsmi.amdsmi_shut_down()
    except Exception:  # its own exception classes differ by version
        return "unknown"
    return "unknown"


def _virtualization(amdsmi: Any, handle: Any) -> Known:
    answer = amdsmi.amdsmi_get_gpu_virtualization_mode(handle)
    mode = answer.get("mode") if isinstance(answer, dict) else answer
    name = str(getattr(mode, "name", mode)).upper()
    if "GUEST" in name:
        return "yes"
    return "no" if "BAREMETAL" in name or "HOST" in name or "PASSTHROUGH" in name else "unknown"
