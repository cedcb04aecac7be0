"""The runtime `sim`: a simulated discrete GPU with several devices.

Its memory is reached by runtime calls alone, its rules are HIP's at their strictest, and faults come on
demand (`nobounce.testing.faults`). Use before the allocation's place in stream order is an error here (HIP
rule 113), as is any use of freed memory. Code that is right on `sim` is right on HIP and CUDA.
"""

from __future__ import annotations

from collections.abc import Iterable

from nobounce.clock import THREADS, Scheduler
from nobounce.config import settings
from nobounce.errors import OutOfMemoryError
from nobounce.route.types import DirectFacts, MemoryKind
from nobounce.runtimes import faults, libc, rawio
from nobounce.runtimes.base import Capabilities, DeviceInfo, DirectIO
from nobounce.runtimes.faults import Rule
from nobounce.runtimes.host.calls import invalid_value
from nobounce.runtimes.host.core import lost_error
from nobounce.runtimes.host.host import HostRuntime
from nobounce.runtimes.host.memory import DeviceSpace, host_memory_nbytes
from nobounce.runtimes.host.ops import HostDevice, Work
from nobounce.runtimes.host.tickets import Ordered, use_before_alloc

_BLOCK = 4096


class SimDirect(DirectIO):
    """Direct transfers into simulated device memory, struck by faults of op "read", "write" and "direct"."""

    def __init__(self, runtime: SimRuntime) -> None:
        self._runtime = runtime
        self._counts = [[0, 0] for _ in range(runtime.device_count())]

    def facts(self, device: int) -> DirectFacts:
        d = self._runtime._device(device, "facts")
        struck = self._runtime._struck(d, "direct")
        if struck is not None:
            because = struck.because or "the simulated device has no P2P"
            return DirectFacts(runtime="sim", available=False, because=because, code="no-p2p", p2p="no")
        return DirectFacts(
            runtime="sim",
            available=True,
            file_rule="probe",
            memory_kinds=frozenset({MemoryKind.DEVICE}),
            p2p="yes",
            virtual_function="no",
        )

    def read(self, device: int, fd: int, address: int, nbytes: int, file_offset: int) -> int:
        where, most = self._begin("read", device, address, nbytes)
        moved = min(most, rawio.read_plain(fd, where, nbytes, file_offset))
        self._count(device, 0, moved)
        return moved

    def prepare(self, device: int, address: int, nbytes: int) -> None:
        libc.populate(self._runtime._spot(address, nbytes, "prepare").where, nbytes)

    def write(self, device: int, fd: int, address: int, nbytes: int, file_offset: int) -> int:
        where, most = self._begin("write", device, address, nbytes)
        moved = min(most, rawio.write_plain(fd, where, nbytes, file_offset))
        self._count(device, 1, moved)
        return moved

    def _count(self, device: int, which: int, moved: int) -> None:
        with self._runtime._executor.lock:  # I/O threads share the counters
            self._counts[device][which] += moved

    def counters(self, device: int) -> tuple[int, int]:
        """(bytes read, bytes written) directly so far."""
        return self._counts[device][0], self._counts[device][1]

    def _begin(self, op: str, device: int, address: int, nbytes: int) -> tuple[int, int]:
        """Where the bytes are, and how many of them the call will admit to: a short one is
        still aligned for the kernel."""
        runtime = self._runtime
        d = runtime._device(device, op)
        spot = runtime._spot(address, nbytes, op)
        if spot.allocation is None or spot.kind is not MemoryKind.DEVICE or spot.allocation.device != device:
            raise invalid_value(op, f"{address:#x} is not memory of {d.name}")
        tickets, order = runtime._executor.tickets, spot.allocation.order
        if tickets is not None and order is not None and not tickets.knows(order):
            raise use_before_alloc(op)
        struck = runtime._struck(d, op)
        if struck is not None:
            runtime._suffer(struck, d, op)
            nbytes = faults.shortened(struck, nbytes, _BLOCK)
        return spot.where, nbytes


class SimRuntime(HostRuntime):
    """`devices` simulated GPUs (NOBOUNCE_SIM_DEVICES by default) with `memory_nbytes` each
    (the machine's, by default)."""

    capabilities = Capabilities(
        managed=True, priorities=True, peers=True, host_register=True, stream_ordered_alloc=True
    )

    def __init__(
        self,
        *,
        scheduler: Scheduler = THREADS,
        devices: int | None = None,
        faults: Iterable[Rule] = (),
        memory_nbytes: int | None = None,
    ) -> None:
        count = settings().sim_devices if devices is None else devices
        names = [f"sim:{i}" for i in range(count)]
        super().__init__("sim", names, DeviceSpace(scheduler), scheduler=scheduler, strict=True)
        self._faults = tuple(faults)
        self._memory_nbytes = memory_nbytes
        self._direct = SimDirect(self)

    def device_info(self, device: int) -> DeviceInfo:
        self._device(device, "device_info")
        return DeviceInfo(
            name="simulated GPU",
            total_nbytes=self._memory_nbytes or host_memory_nbytes(),
            pci_bus_id=f"0000:{device + 1:02x}:00.0",
            numa_node=0,
            uuid=f"sim-{device}",
            architecture="sim",
            multiprocessors=1,
        )

    def direct_io(self) -> DirectIO:
        return self._direct

    def lose(self, device: int) -> None:
        """Every later call on the device fails, as after a fault that costs a GPU
        its context (HIP rule 78)."""
        self._devices[device].lost = True

    def revive(self, device: int) -> None:
        """Undo `lose`: what a reset of the device does, its memory kept."""
        d = self._devices[device]
        d.lost = False
        self._executor.take_errors(d)

    # faults

    def _struck(self, device: HostDevice | None, op: str) -> Rule | None:
        if not (faults.ACTIVE or self._faults):
            return None
        return faults.take(op, device.name if device is not None else self.name, self._faults)

    def _suffer(self, struck: Rule, device: HostDevice | None, op: str) -> None:
        if struck.latency:
            self.scheduler.sleep(struck.latency)
        if struck.lost and device is not None:
            device.lost = True
            raise lost_error(device, op)
        faults.fail(struck, op)

    def _task(self, device: HostDevice, op: str, work: Work) -> Work:
        def run() -> None:
            if device.lost:
                raise lost_error(device, op)
            struck = self._struck(device, op)
            if struck is not None:
                self._suffer(struck, device, op)
            work()

        return run

    def _strike(self, device: HostDevice | None, op: str) -> None:
        struck = self._struck(device, op)
        if struck is not None:
            try:
                self._suffer(struck, device, op)
            except OSError as e:
                raise OutOfMemoryError(f"{op}: {e.strerror}, injected") from e
            if struck.error is None and not struck.latency:
                raise OutOfMemoryError(f"{op}: injected")

    def _allocate(
        self,
        call: str,
        device: int | None,
        nbytes: int,
        kind: MemoryKind,
        *,
        order: Ordered | None = None,
    ) -> int:
        if self._memory_nbytes is not None and kind is MemoryKind.DEVICE:
            used = sum(a.nbytes for a in self._map.all() if a.kind is kind and a.device == device)
            if used + nbytes > self._memory_nbytes:
                raise OutOfMemoryError(
                    f"{call}: {nbytes} bytes on sim:{device}, {self._memory_nbytes - used} of "
                    f"{self._memory_nbytes} free"
                )
        return super()._allocate(call, device, nbytes, kind, order=order)

    def _peers_possible(self) -> bool:
        return self._struck(None, "peer") is None


def create() -> SimRuntime:
    return SimRuntime()
