"""Buffers: bytes, copies, and who owns the memory when."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from nobounce import allocation, reaper
from nobounce.buffer import Buffer, as_buffer
from nobounce.device import Device
from nobounce.errors import ArgumentError, BusyError, ClosedError, DeviceError, OutOfMemoryError
from nobounce.route.types import MemoryKind
from nobounce.stream import Stream
from nobounce.tensor import Tensor


@pytest.fixture(params=["cpu", "sim:1"])
def device(request: pytest.FixtureRequest) -> Device:
    return Device(request.param)


@pytest.fixture
def cpu() -> Device:
    return Device("cpu")


@pytest.fixture
def latch() -> Iterator[threading.Event]:
    made = threading.Event()
    yield made
    made.set()


def hold(stream: Stream, latch: threading.Event) -> None:
    stream.device._runtime.host_call(stream.handle, lambda: latch.wait(30) and None)


def is_live(device: Device, address: int) -> bool:
    """Whether the runtime still knows memory there."""
    try:
        return device._runtime.pointer_info(address).nbytes > 0
    except DeviceError:  # sim knows its own addresses and says that this one is free
        return False


def test_a_buffer_tells_what_it_is(device: Device) -> None:
    with device.allocate(1000) as buffer:
        assert (buffer.nbytes, buffer.size, len(buffer)) == (1000, 1000, 1000)
        assert buffer.device == device
        assert buffer.memory_kind is MemoryKind.DEVICE
        assert buffer.is_host_accessible == (device.name == "cpu")
        assert buffer.is_device_accessible
        assert not buffer.is_managed
        assert not buffer.is_read_only
        assert not buffer.is_closed
        assert buffer.owner is None
        assert buffer.handle % 256 == 0
        assert "1000 bytes of device memory" in repr(buffer)
    assert "closed" in repr(buffer)


def test_close_frees_at_once(device: Device) -> None:
    buffer = device.allocate(5000)
    address = buffer.handle
    assert is_live(device, address)
    buffer.close()
    assert not is_live(device, address)
    buffer.close()
    assert buffer.is_closed


USES: dict[str, Callable[[Buffer], Any]] = {
    "handle": lambda b: b.handle,
    "device": lambda b: b.device,
    "view": lambda b: b.view(),
    "numpy": lambda b: b.numpy(),
    "fill": lambda b: b.fill(0, stream=None),
    "copy_to": lambda b: b.copy_to(stream=None),
    "copy_from": lambda b: b.copy_from(bytearray(8), stream=None),
    "in_use": lambda b: b.in_use().__enter__(),
    "as_buffer": lambda b: as_buffer(b, write=True),
    "tensor": lambda b: Tensor(b, (8,), "U8"),
}


@pytest.mark.parametrize("use", USES)
def test_a_closed_buffer_says_so(device: Device, use: str) -> None:
    buffer = device.allocate(8)
    buffer.close()
    with pytest.raises(ClosedError, match="closed"):
        USES[use](buffer)


def test_a_buffer_in_use_cannot_be_freed(device: Device) -> None:
    buffer = device.allocate(64)
    address = buffer.handle
    with buffer.in_use() as same, buffer.in_use():
        assert same is buffer
        with pytest.raises(BusyError, match=r"64 bytes is in use by 2 transfer"):
            buffer.close()
        assert is_live(device, address)
    buffer.close()
    assert not is_live(device, address)


def test_a_dropped_buffer_is_freed_by_the_reaper(device: Device) -> None:
    buffer = device.allocate(4096)
    address = buffer.handle
    del buffer
    gc.collect()
    reaper.drain()
    assert not is_live(device, address)


def test_a_finaliser_never_calls_the_runtime_itself(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    freed_by: list[str] = []
    done = threading.Event()
    real = type(device._runtime).free

    def free(runtime: Any, address: int) -> None:
        freed_by.append(threading.current_thread().name)
        real(runtime, address)
        done.set()

    monkeypatch.setattr(type(device._runtime), "free", free)
    buffer = device.allocate(64)
    del buffer
    assert done.wait(30)
    assert freed_by == ["nobounce-reaper"]
    done.clear()
    device.allocate(64).close()
    assert freed_by[1:] == [threading.current_thread().name]


def test_an_error_of_freeing_is_raised_by_close_and_by_nothing_else(
    monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    def free(runtime: Any, address: int) -> None:
        raise DeviceError("free", None, detail="the device is lost")

    monkeypatch.setattr(type(device._runtime), "free", free)
    buffer = device.allocate(64)
    with pytest.raises(DeviceError, match="the device is lost"):
        buffer.close()
    assert buffer.is_closed
    dropped = device.allocate(64)
    del dropped
    reaper.drain()


def test_out_of_memory_frees_what_was_dropped_first(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    waiting: list[int] = []

    def alloc(runtime: Any, ordinal: int, nbytes: int) -> int:
        if not waiting:
            raise OutOfMemoryError("full")
        return 4096

    monkeypatch.setattr(type(device._runtime), "alloc", alloc)
    monkeypatch.setattr(type(device._runtime), "free", lambda runtime, address: None)
    monkeypatch.setattr(reaper, "drain", lambda: waiting.append(1))
    with device.allocate(64) as buffer:
        assert buffer.handle == 4096


def test_C72_an_array_outlives_its_buffer(cpu: Device) -> None:
    with cpu.allocate(64) as buffer:
        buffer.fill(5, stream=None)
        address, array, view = buffer.handle, buffer.numpy(), buffer.view()
        by_protocol = np.asarray(buffer)
    assert is_live(cpu, address)
    with cpu.allocate(64) as other:
        assert other.handle != address
        other.fill(9, stream=None)
    assert array.tolist() == list(view) == by_protocol.tolist() == [5] * 64
    del array, view
    gc.collect()
    reaper.drain()
    assert is_live(cpu, address)
    assert by_protocol.sum() == 5 * 64
    del by_protocol
    gc.collect()
    reaper.drain()
    assert not is_live(cpu, address)


def test_arrays_and_views_write_through(cpu: Device) -> None:
    with cpu.allocate(4) as buffer:
        buffer.view()[:] = b"abcd"
        buffer.numpy()[0] = ord("x")
        assert bytes(buffer.view()) == b"xbcd"


def test_the_buffer_protocol_where_python_has_it(cpu: Device) -> None:
    with cpu.allocate(4) as buffer:
        buffer.view()[:] = b"abcd"
        if sys.version_info >= (3, 12):
            assert bytes(memoryview(buffer)) == b"abcd"
        assert bytes(buffer.__buffer__(0)) == b"abcd"


def test_memory_the_host_cannot_reach_is_copied() -> None:
    with Device("sim:0").allocate(8) as buffer:
        buffer.fill(b"\x01\x02", stream=None)
        assert buffer.numpy().tolist() == [1, 2] * 4
        assert np.asarray(buffer).tolist() == [1, 2] * 4
        with pytest.raises(ArgumentError, match="cannot reach device memory of sim:0"):
            buffer.view()
        assert not hasattr(buffer, "__array_interface__")
        assert not hasattr(buffer, "__cuda_array_interface__")
        with pytest.raises(ArgumentError, match="is a copy"):
            np.array(buffer, copy=False)


def test_pinned_memory_of_sim_is_the_hosts_too() -> None:
    with Device("sim:0").allocate(8, kind="pinned") as buffer:
        array = buffer.numpy()
        array[:] = 7
        assert bytes(buffer.view()) == b"\7" * 8
        assert buffer.is_device_accessible


def test_fill_repeats_patterns(device: Device) -> None:
    with device.allocate(8) as buffer, device.create_stream() as stream:
        buffer.fill(255, stream=stream)
        assert buffer.numpy().tolist() == [255] * 8
        buffer.fill(bytearray(b"\x01\x02\x03\x04"), stream=stream)
        assert buffer.numpy().tolist() == [1, 2, 3, 4] * 2
        assert buffer.stream == stream


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (256, ArgumentError),
        (-1, ArgumentError),
        (b"", ArgumentError),
        (b"abc", ArgumentError),
        (1.0, TypeError),
    ],
)
def test_fill_names_a_pattern_that_cannot_work(device: Device, value: Any, error: type[Exception]) -> None:
    with device.allocate(8) as buffer, pytest.raises(error, match="fill"):
        buffer.fill(value, stream=None)


def test_a_pattern_must_divide_the_buffer(device: Device) -> None:
    with device.allocate(6) as buffer, pytest.raises(ArgumentError, match="4 bytes does not divide 6"):
        buffer.fill(b"abcd", stream=None)


@pytest.mark.parametrize("source", ["cpu", "sim:0", "sim:1", "pinned", "host"])
@pytest.mark.parametrize("target", ["cpu", "sim:0", "sim:1", "pinned", "host"])
def test_copies_lead_everywhere(source: str, target: str) -> None:
    def make(where: str) -> Buffer:
        if where == "host":
            return as_buffer(bytearray(5000), write=True)
        if where == "pinned":
            return Device("sim:0").allocate(5000, kind="pinned")
        return Device(where).allocate(5000)

    data = bytes(range(250)) * 20
    with make(source) as src, make(target) as dst:
        src.copy_from(data, stream=None)
        assert src.copy_to(dst, stream=None) is dst
        assert dst.numpy().tobytes() == data


def test_a_copy_between_runtimes_waits_for_the_other_one(
    monkeypatch: pytest.MonkeyPatch, latch: threading.Event
) -> None:
    cpu, sim = Device("cpu"), Device("sim:0")
    release_when_called(monkeypatch, cpu, "stream_sync", latch)
    with (
        cpu.create_stream() as stream,
        sim.create_stream() as on,
        cpu.allocate(16) as src,
        sim.allocate(16) as dst,
    ):
        hold(stream, latch)
        src.fill(9, stream=stream)
        src.copy_to(dst, stream=on)
        assert dst.numpy().tolist() == [9] * 16


def test_a_copy_without_a_stream_goes_behind_earlier_work(latch: threading.Event) -> None:
    here, there = Device("sim:0"), Device("sim:1")
    with here.create_stream() as stream, here.allocate(16) as src, there.allocate(16) as dst:
        hold(stream, latch)
        src.fill(9, stream=stream)
        src.copy_to(dst, stream=None)
        assert not there.default_stream.is_done
        latch.set()
        assert dst.numpy().tolist() == [9] * 16


def test_copy_to_nothing_makes_a_buffer_on_the_same_device(device: Device) -> None:
    with device.create_stream() as stream, device.allocate(16, stream=stream) as src:
        src.fill(3, stream=stream)
        with src.copy_to(stream=stream) as fresh:
            assert fresh.device == device
            assert fresh.numpy().tolist() == [3] * 16


def test_copies_take_the_callers_memory(device: Device) -> None:
    array = np.arange(8, dtype=np.int16)
    with device.allocate(16) as buffer:
        buffer.copy_from(array, stream=None)
        out = bytearray(16)
        buffer.copy_to(out, stream=None).wait()
        assert out == array.tobytes()


def test_copies_of_unequal_sizes_are_refused(device: Device) -> None:
    with device.allocate(16) as a, device.allocate(15) as b:
        with pytest.raises(ArgumentError, match="16 bytes do not fit a buffer of 15"):
            a.copy_to(b, stream=None)
        with pytest.raises(TypeError):
            a.copy_to(b)  # type: ignore[call-arg]


def test_nothing_is_written_to_read_only_memory(device: Device) -> None:
    with device.allocate(4) as buffer:
        with pytest.raises(ArgumentError, match="read-only"):
            buffer.copy_to(b"abcd", stream=None)
        frozen = as_buffer(b"abcd", write=False)
        with pytest.raises(ArgumentError, match="read-only"):
            frozen.copy_from(buffer, stream=None)
        with pytest.raises(ArgumentError, match="read-only"):
            frozen.fill(0, stream=None)
        assert frozen.view().readonly
        assert not frozen.numpy().flags.writeable


def test_C76_looking_at_a_buffer_waits_for_its_stream(
    monkeypatch: pytest.MonkeyPatch, device: Device, latch: threading.Event
) -> None:
    release_when_called(monkeypatch, device, "stream_sync", latch)
    with device.create_stream() as stream, device.allocate(16) as buffer:
        hold(stream, latch)
        buffer.fill(9, stream=stream)
        assert not stream.is_done
        assert buffer.numpy().tolist() == [9] * 16


def test_looking_waits_for_a_stream_that_was_closed(
    monkeypatch: pytest.MonkeyPatch, device: Device, latch: threading.Event
) -> None:
    release_when_called(monkeypatch, device, "device_sync", latch)
    with device.allocate(16) as buffer:
        with device.create_stream() as stream:
            hold(stream, latch)
            buffer.fill(9, stream=stream)
        assert buffer.numpy().tolist() == [9] * 16


def release_when_called(
    monkeypatch: pytest.MonkeyPatch, device: Device, name: str, latch: threading.Event
) -> None:
    """Open the latch only once the runtime is asked to wait."""
    real = getattr(type(device._runtime), name)

    def wait(runtime: Any, handle: int) -> None:
        latch.set()
        real(runtime, handle)

    monkeypatch.setattr(type(device._runtime), name, wait)


def test_memory_allocated_in_stream_order_is_freed_in_it(device: Device, latch: threading.Event) -> None:
    with device.create_stream() as stream:
        buffer = device.allocate(64, stream=stream)
        assert buffer.stream is stream
        hold(stream, latch)
        buffer.fill(1, stream=stream)
        buffer.close()  # returns although the stream is held
        assert not stream.is_done
        latch.set()
        stream.sync()


def test_close_takes_the_stream_to_free_on(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    freed_on: list[int] = []
    real = type(device._runtime).free_async

    def free_async(runtime: Any, address: int, stream: int) -> None:
        freed_on.append(stream)
        real(runtime, address, stream)

    monkeypatch.setattr(type(device._runtime), "free_async", free_async)
    with device.create_stream() as first, device.create_stream() as second:
        buffer = device.allocate(64, stream=first)
        second.wait(first)
        buffer.close(second)
        device.allocate(64, stream=first).close()
        assert freed_on == [second.handle, first.handle]


def test_memory_of_a_closed_stream_is_freed_all_the_same(device: Device) -> None:
    with device.create_stream() as stream:
        buffer = device.allocate(64, stream=stream)
        address = buffer.handle
    buffer.close()
    assert not is_live(device, address)


def test_an_empty_buffer_works(device: Device) -> None:
    with device.allocate(0) as buffer, device.allocate(0) as other:
        assert (buffer.handle, buffer.nbytes) == (0, 0)
        buffer.fill(1, stream=None)
        buffer.copy_to(other, stream=None)
        buffer.copy_from(b"", stream=None)
        assert buffer.numpy().tolist() == []
        assert buffer.numpy().dtype == np.uint8


def test_from_handle_covers_foreign_memory(device: Device) -> None:
    class Owner:
        pass

    owner = Owner()
    with device.allocate(64) as real:
        real.fill(4, stream=None)
        part = Buffer.from_handle(real.handle + 16, 16, device=device, owner=owner)
        assert part.memory_kind is MemoryKind.DEVICE
        assert part.owner is owner
        assert part.numpy().tolist() == [4] * 16
        part.close()
        assert is_live(device, real.handle)
        with pytest.raises(ArgumentError, match="has 48 bytes from there"):
            Buffer.from_handle(real.handle + 16, 49, device=device)


def test_from_handle_names_what_is_no_address(device: Device) -> None:
    with pytest.raises(ArgumentError, match="no address"):
        Buffer.from_handle(0, 1, device=device)
    with pytest.raises(ArgumentError, match="no address"):
        Buffer.from_handle(-4, 1, device=device)
    with pytest.raises(TypeError, match="an address is an int"):
        Buffer.from_handle("4", 1, device=device)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="made by"):
        Buffer()
    assert Buffer.from_handle(0, 0, device=device).nbytes == 0


def test_closing_one_view_leaves_the_others(cpu: Device) -> None:
    with cpu.allocate(64) as buffer:
        tensor = Tensor(buffer, (4,), "U8", offset=8)
        part = tensor.buffer
        assert part.handle == buffer.handle + 8
        part.close()
        assert tensor.numpy().shape == (4,)


def test_many_threads_close_one_buffer_once(device: Device) -> None:
    buffer = device.allocate(64)
    start = threading.Barrier(8)
    errors: list[Exception] = []

    def close() -> None:
        start.wait()
        try:
            buffer.close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_gpus_memory_speaks_the_cuda_array_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Device("sim:0")
    monkeypatch.setattr(sim._runtime, "name", "cuda")
    with sim.create_stream() as stream:
        buffer = sim.allocate(64)
        buffer.fill(1, stream=stream)
        interface = buffer.__cuda_array_interface__
        assert interface["data"] == (buffer.handle, False)
        assert (interface["shape"], interface["typestr"], interface["version"]) == ((64,), "|u1", 3)
        assert interface["stream"] == stream.handle
        address = buffer.handle
        buffer.close()
        assert is_live(sim, address)  # a consumer holds the buffer itself for its memory
        assert not hasattr(buffer, "__cuda_array_interface__")
        del buffer
        gc.collect()
        reaper.drain()
        assert not is_live(sim, address)


def test_an_allocation_of_a_fork_parent_is_not_freed_by_the_child(
    monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    freed: list[int] = []
    monkeypatch.setattr(allocation, "_free", lambda runtime, address, *rest: freed.append(address))
    explicit, dropped = device.allocate(64), device.allocate(64)
    monkeypatch.setattr(reaper, "_generation", reaper.generation() + 1)
    explicit.close()
    del dropped
    reaper.drain()
    assert freed == []
