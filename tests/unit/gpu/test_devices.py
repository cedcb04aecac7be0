"""Case C98 on the double: work for device 1 is done with device 1 current, and the caller's current device is kept."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nobounce
from doubles.hip_bindings import HipDouble
from nobounce import config
from nobounce.device import Device
from nobounce.errors import DeviceError, OutOfMemoryError, RuntimeStatus
from nobounce.io import prepare
from nobounce.route.types import MemoryKind
from nobounce.runtimes.gpu import hip
from nobounce.runtimes.gpu.gpu import GpuRuntime
from nobounce.testing import faults


@pytest.fixture
def double() -> HipDouble:
    return HipDouble()


@pytest.fixture
def runtime(double: HipDouble) -> Iterator[GpuRuntime]:
    made = hip.load(double)
    double.used.clear()
    yield made
    made._gates.open_all()


def test_C98_only_the_device_that_is_named_is_used(double: HipDouble, runtime: GpuRuntime) -> None:
    rt = runtime
    a = rt.alloc(1, 8192)
    s = rt.stream_create(1)
    p, m = rt.alloc_pinned(8192), rt.alloc_managed(1, 4096)
    e, f = rt.event_create(1), rt.event_create(1)
    rt.event_record(e, s)
    rt.copy_async(a, p, 8192, s)
    rt.fill_async(a, 1, 4096, s)
    rt.fill_async(a, 1, 4096, s, 2)
    rt.copy_batch([(a, p, 16)], s)
    rt.host_call(s, lambda: None)
    rt.event_record(f, s)
    rt.stream_wait_event(s, f)
    reached = threading.Event()
    gate = rt.gate(s, reached.set)
    assert reached.wait(30)
    gate.open()
    rt.stream_sync(s)
    assert rt.stream_query(s)
    assert rt.event_query(f)
    rt.event_sync(f)
    rt.event_elapsed(e, f)
    assert rt.stream_device(s) == 1
    assert rt.stream_is_nonblocking(s)
    rt.stream_priority(s)
    rt.stream_priority_range(1)
    rt.copy(p, a, 8192)
    rt.copy(a, p, 8192)
    rt.fill(a, 2, 8192)
    b = rt.alloc_async(1, 4096, s)
    rt.free_async(b, s)
    block = ctypes.create_string_buffer(16384)
    page = (ctypes.addressof(block) + 4095) // 4096 * 4096
    rt.register_host(page, 4096, read_only=True)
    rt.unregister_host(page)
    rt.device_sync(1)
    assert rt.pointer_info(a).device == 1
    rt.event_destroy(e)
    rt.event_destroy(f)
    rt.stream_destroy(s)
    for address in (a, m):
        rt.free(address)
    rt.free_pinned(p)
    assert double.used == {1}
    assert rt.current_device() == 0
    assert double.sim.current_device() == 0


def test_C98_the_current_device_is_kept_when_a_call_fails(double: HipDouble, runtime: GpuRuntime) -> None:
    s = runtime.stream_create(1)
    with pytest.raises(DeviceError):
        runtime.copy_async(1 << 60, 1 << 61, 16, s, 99)  # type: ignore[arg-type]
    with pytest.raises(DeviceError):
        runtime.stream_wait_event(s, runtime.event_create(1), 7)
    with faults.inject(op="alloc"), pytest.raises(OutOfMemoryError, match=r"4096 bytes on hip:1"):
        runtime.alloc(1, 4096)
    assert double.sim.current_device() == 0


def test_memory_of_one_device_for_a_stream_of_another_comes_from_its_pool(
    double: HipDouble, runtime: GpuRuntime
) -> None:
    s = runtime.stream_create(0)
    a = runtime.alloc_async(1, 4096, s)
    assert double.sim.pointer_info(a).device == 1
    assert double.calls["hipMallocFromPoolAsync"] == 1
    runtime.free_async(a, s)


def test_a_callers_own_stream_is_asked_for_its_device(double: HipDouble, runtime: GpuRuntime) -> None:
    theirs = double.sim.stream_create(1)
    a = runtime.alloc(1, 4096)
    double.used.clear()
    runtime.fill_async(a, 3, 4096, theirs)
    runtime.stream_sync(theirs)
    assert runtime.stream_device(theirs) == 1
    assert 1 in double.used
    with pytest.raises(DeviceError) as caught:
        runtime.stream_destroy(theirs)
    assert caught.value.status is RuntimeStatus.InvalidResourceHandle
    assert double.sim.stream_query(theirs), "a stream made elsewhere is left to its owner"


def test_an_error_carries_the_vendors_call_name_number_and_text(runtime: GpuRuntime) -> None:
    with pytest.raises(DeviceError) as caught:
        runtime.free(0xDEAD000)
    error = caught.value
    assert (error.call, error.name, error.code) == ("hipFree", "hipErrorInvalidValue", 1)
    assert "the text of hipErrorInvalidValue" in str(error)
    assert runtime.last_error() == 1


def test_a_failure_does_not_stay_in_the_vendors_last_error(double: HipDouble, runtime: GpuRuntime) -> None:
    """Another library in this thread asks it after its own launches, and would take ours for its own."""
    with pytest.raises(DeviceError):
        runtime.free(0xDEAD000)
    assert double.sim.peek_last_error() == 0


def test_words_of_gates_are_signal_memory_taken_in_advance(double: HipDouble, runtime: GpuRuntime) -> None:
    s = runtime.stream_create(0)
    runtime.gate(s, lambda: None).open()
    taken = double.calls["hipExtMallocWithFlags"]
    for _ in range(20):
        runtime.gate(s, lambda: None).open()
        runtime.stream_sync(s)
    assert double.calls["hipExtMallocWithFlags"] == taken == 128


def test_device_facts(runtime: GpuRuntime) -> None:
    info = runtime.device_info(1)
    assert info.name == "simulated GPU"
    assert info.pci_bus_id == "0000:02:00.0"
    assert info.architecture == "gfx90a:sramecc+:xnack-"
    assert info.uuid == "GPU-0123456789abcdef"


def test_pinned_memory_is_page_aligned_where_the_vendor_aligns_less(
    double: HipDouble, runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks: dict[int, int] = {}

    def misaligned(nbytes: int, flags: int) -> int:
        whole = double.sim.alloc_pinned(nbytes + 512)
        blocks[whole + 512] = whole
        return whole + 512

    def free(address: int) -> None:
        double.sim.free_pinned(blocks.pop(address))

    runtime._adapter.alloc_pinned, runtime._adapter.free_pinned = misaligned, free  # type: ignore[method-assign]
    p = runtime.alloc_pinned(100)
    assert p % 4096 == 0
    assert len(blocks) == 1
    runtime.free_pinned(p)
    assert not blocks


def test_unknown_memory_is_pageable(runtime: GpuRuntime) -> None:
    block = ctypes.create_string_buffer(64)
    assert runtime.pointer_info(ctypes.addressof(block)).kind is MemoryKind.PAGEABLE


def test_progress_sees_the_threads_own_device_and_not_that_of_the_transfer(
    tmp_path: Path, runtime: GpuRuntime
) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(os.urandom(1 << 18))
    config.override(config.Settings(chunk_nbytes=1 << 16, io_threads=1))
    device, seen = Device._of(runtime, 1), []
    used: set[int] = set()
    plain = runtime._adapter.copy_async

    def copied(*arguments: Any) -> Any:
        used.add(runtime.current_device())
        return plain(*arguments)

    runtime._adapter.copy_async = copied  # type: ignore[method-assign]
    with nobounce.open(path) as f, device.allocate(1 << 18) as buffer:
        receipt = prepare.transfer(
            f,
            "read",
            buffer,
            (None, 0, 0),
            "fallback",
            "use",
            progress=lambda _, nbytes: seen.append((runtime.current_device(), nbytes)),
        )
    assert receipt.nbytes == sum(nbytes for _, nbytes in seen) == 1 << 18
    assert {current for current, _ in seen} == {0}
    assert used == {1}
