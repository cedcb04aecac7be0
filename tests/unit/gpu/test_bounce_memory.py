"""Slots of a bounce ring: huge pages of our own, registered, where the vendor's allocation is the slower way."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from doubles.hip_bindings import HipDouble
from nobounce.errors import DeviceError, OutOfMemoryError, RuntimeStatus
from nobounce.io.movers.bounce import SLOT_NBYTES, Ring
from nobounce.io.quiet import closed_gate
from nobounce.route.types import MemoryKind
from nobounce.runtimes import libc
from nobounce.runtimes.gpu import cuda, hip
from nobounce.runtimes.gpu import memory as gpu_memory
from nobounce.runtimes.gpu.gpu import GpuRuntime


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> GpuRuntime:
    """A double that does as CUDA does."""
    made = hip.load(HipDouble(devices=1))
    monkeypatch.setattr(made, "_registers_faster", True)
    return made


class Memory:
    """What is mapped, unmapped, registered and allocated."""

    def __init__(self, runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[str] = []
        self.mapped: dict[int, int] = {}
        map_huge, unmap, populate = libc.map_huge, libc.unmap, libc.populate

        def mapping(nbytes: int) -> int:
            address = map_huge(nbytes)
            self.order.append("map")
            self.mapped[address] = nbytes
            return address

        def unmapping(address: int, nbytes: int) -> None:
            assert self.mapped.pop(address) == nbytes
            self.order.append("unmap")
            unmap(address, nbytes)

        def populating(address: int, nbytes: int) -> None:
            assert self.mapped[address] == nbytes
            self.order.append("populate")
            populate(address, nbytes)

        # The double maps memory as well, by the module itself.
        self.libc = SimpleNamespace(
            **{**vars(libc), "map_huge": mapping, "unmap": unmapping, "populate": populating}
        )
        monkeypatch.setattr(gpu_memory, "libc", self.libc)
        for name in ("register_host", "alloc_pinned"):
            monkeypatch.setattr(runtime, name, self._noted(name, getattr(runtime, name)))

    def _noted(self, name: str, call: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.order.append(name)
            return call(*args, **kwargs)

        return noted


def flags_of(address: int) -> set[str]:
    """VmFlags of the mapping at `address`."""
    inside = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if line.startswith("VmFlags:"):
                if inside:
                    return set(line.split()[1:])
            elif "-" in line.split()[0]:
                first, end = (int(n, 16) for n in line.split()[0].split("-"))
                inside = first <= address < end
    return set()


def test_a_slot_is_registered_huge_pages_that_no_child_gets(
    runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(runtime, monkeypatch)
    address = runtime.alloc_bounce(SLOT_NBYTES)
    assert memory.order == ["map", "populate", "register_host"]
    assert memory.mapped == {address: SLOT_NBYTES}
    assert address % libc.HUGE_PAGE == 0
    assert {"dc", "hg"} <= flags_of(address), "not copied by fork, huge pages wanted"


def test_a_ring_takes_its_slots_so_and_they_carry_bytes(
    runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(runtime, monkeypatch)
    ring = Ring(runtime, 0)
    slot = ring.acquire(wait=True)
    assert slot is not None
    assert memory.order == ["map", "populate", "register_host"]
    data = os.urandom(4096)
    ring.view(slot[0])[:4096] = data
    device, stream = runtime.alloc(0, 4096), runtime.stream_create(0)
    runtime.copy_async(device, slot[0], 4096, stream)
    runtime.copy_async(slot[0] + 8192, device, 4096, stream)
    runtime.stream_sync(stream)
    assert bytes(ring.view(slot[0])[8192 : 8192 + 4096]) == data


def test_a_slot_that_goes_back_is_unregistered_and_unmapped(
    runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(runtime, monkeypatch)
    ring = Ring(runtime, 0)
    slot = ring.acquire(wait=True)
    assert slot is not None
    assert ring.trim() == 0, "it is in use"
    ring.release(slot)
    assert ring.trim() == ring.slot_nbytes
    assert ring.pinned_nbytes == 0
    assert not memory.mapped
    assert runtime.pointer_info(slot[0]).kind is MemoryKind.PAGEABLE
    again = ring.acquire(wait=True)
    assert again is not None
    ring.release(again)
    gate = closed_gate(runtime, runtime.stream_create(0), lambda: None)
    try:
        assert ring.trim() == 0, "to unpin would wait for the gate"
    finally:
        gate.open()
    assert ring.trim() == ring.slot_nbytes


@pytest.mark.parametrize(
    "error",
    [
        DeviceError("cudaHostRegister", RuntimeStatus.NotSupported),
        OutOfMemoryError("cudaHostRegister: 4194304 bytes"),
    ],
    ids=["refused", "no-memory"],
)
def test_where_registering_fails_the_vendor_allocates(
    runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(runtime, "register_host", refuse)
    memory = Memory(runtime, monkeypatch)
    address = runtime.alloc_bounce(SLOT_NBYTES)
    assert memory.order == ["map", "populate", "register_host", "unmap", "alloc_pinned"]
    assert not memory.mapped
    runtime.free_pinned(address)


def test_where_nothing_can_be_mapped_the_vendor_is_asked_and_says_why(
    runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*args: Any) -> int:
        raise OSError(12, "Cannot allocate memory")

    def no_more(*args: Any) -> int:
        raise OutOfMemoryError("cudaHostAlloc: 4194304 bytes")

    memory = Memory(runtime, monkeypatch)
    memory.libc.map_huge = none
    assert runtime.alloc_bounce(SLOT_NBYTES)
    assert memory.order == ["alloc_pinned"]
    monkeypatch.setattr(runtime, "alloc_pinned", no_more)
    with pytest.raises(OutOfMemoryError, match="cudaHostAlloc"):
        runtime.alloc_bounce(SLOT_NBYTES)


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
def test_an_interrupt_leaves_nothing_mapped_or_registered(
    runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    """An address that the vendor still takes for pinned would be copied from pages that are no longer there."""
    memory = Memory(runtime, monkeypatch)
    register = runtime.register_host

    def interrupted(*args: Any, **kwargs: Any) -> None:
        if behind:
            register(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(runtime, "register_host", interrupted)
    unregistered: list[int] = []
    plain = runtime.unregister_host

    def unregister(address: int) -> None:
        assert address in memory.mapped, "before it is unmapped"
        plain(address)
        unregistered.append(address)

    monkeypatch.setattr(runtime, "unregister_host", unregister)
    with pytest.raises(KeyboardInterrupt):
        runtime.alloc_bounce(SLOT_NBYTES)
    assert not memory.mapped
    assert len(unregistered) == behind


def test_what_may_still_be_registered_stays_mapped(
    runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    def failing(address: int) -> None:
        raise DeviceError("cudaHostUnregister", RuntimeStatus.Unknown)

    monkeypatch.setattr(runtime, "register_host", interrupted)
    monkeypatch.setattr(runtime, "unregister_host", failing)
    memory = Memory(runtime, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        runtime.alloc_bounce(SLOT_NBYTES)
    assert memory.order == ["map", "populate", "register_host"][: len(memory.order)]
    assert len(memory.mapped) == 1


def test_a_vendor_that_refuses_once_is_not_asked_for_each_slot(
    runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise DeviceError("cudaHostRegister", RuntimeStatus.NotSupported)

    monkeypatch.setattr(runtime, "register_host", refuse)
    memory = Memory(runtime, monkeypatch)
    for _ in range(3):
        runtime.free_pinned(runtime.alloc_bounce(SLOT_NBYTES))
    assert memory.order.count("map") == 1
    assert memory.order.count("alloc_pinned") == 3


def test_cuda_registers_and_hip_which_nobody_has_measured_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda.CudaAdapter.registers_faster
    plain = hip.load(HipDouble(devices=1))
    memory = Memory(plain, monkeypatch)
    plain.free_pinned(plain.alloc_bounce(SLOT_NBYTES))
    assert memory.order == ["alloc_pinned"]
