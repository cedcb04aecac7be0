"""The runtime `cpu`: host memory as device memory, for machines without a GPU.

Device memory is private anonymous memory on huge pages that the host reads and writes in place. The direct
path is O_DIRECT straight into it: no P2P, but no page cache and no relay either.
"""

from __future__ import annotations

from nobounce.clock import THREADS, Scheduler
from nobounce.route.types import DirectFacts, MemoryKind
from nobounce.runtimes import libc, rawio
from nobounce.runtimes.base import Capabilities, DeviceInfo, DirectIO
from nobounce.runtimes.host.host import HostRuntime
from nobounce.runtimes.host.memory import HostSpace, host_memory_nbytes

KDLCPU = 1


class CpuDirect(DirectIO):
    """O_DIRECT reads and writes at plain addresses; what the kernel does not like comes back as its errno."""

    plain = True
    _FACTS = DirectFacts(
        runtime="cpu", available=True, file_rule="probe", memory_kinds=frozenset(MemoryKind), p2p="no"
    )

    def facts(self, device: int) -> DirectFacts:
        return self._FACTS

    def read(self, device: int, fd: int, address: int, nbytes: int, file_offset: int) -> int:
        return rawio.read_plain(fd, address, nbytes, file_offset)

    def prepare(self, device: int, address: int, nbytes: int) -> None:
        libc.populate(address, nbytes)

    def write(self, device: int, fd: int, address: int, nbytes: int, file_offset: int) -> int:
        return rawio.write_plain(fd, address, nbytes, file_offset)


class CpuRuntime(HostRuntime):
    """One device, `cpu`."""

    capabilities = Capabilities(
        host_addressable=True,
        managed=True,
        priorities=True,
        host_register=True,
        stream_ordered_alloc=True,
        dlpack_device_type=KDLCPU,
    )

    def __init__(self, *, scheduler: Scheduler = THREADS) -> None:
        super().__init__("cpu", ["cpu"], HostSpace(), scheduler=scheduler, strict=False)
        self._direct = CpuDirect()

    def device_info(self, device: int) -> DeviceInfo:
        self._device(device, "device_info")
        return DeviceInfo(name=_processor(), total_nbytes=host_memory_nbytes())

    def direct_io(self) -> DirectIO:
        return self._direct


def create() -> CpuRuntime:
    return CpuRuntime()


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
            for line in f:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return "cpu"
