"""Streams and events: the shape of cuda.core, foreign streams by protocol, and the end of their life."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from capabilities import need
from nobounce import reaper
from nobounce.device import Device
from nobounce.errors import ArgumentError, ClosedError, DeviceError
from nobounce.stream import (
    LEGACY_DEFAULT_STREAM,
    PER_THREAD_DEFAULT_STREAM,
    Event,
    EventOptions,
    Stream,
    StreamOptions,
    as_stream,
)


@pytest.fixture(params=["cpu", "sim:1"])
def device(request: pytest.FixtureRequest) -> Device:
    return Device(request.param)


@pytest.fixture
def latch() -> Iterator[threading.Event]:
    made = threading.Event()
    yield made
    made.set()


def hold(stream: Stream, latch: threading.Event) -> None:
    stream.device._runtime.host_call(stream.handle, lambda: latch.wait(30) and None)


def test_a_stream_is_non_blocking_unless_asked(device: Device) -> None:
    with device.create_stream() as a, device.create_stream(nonblocking=False) as b:
        assert a.is_nonblocking
        assert not b.is_nonblocking
        assert a.device == device
        assert a.__cuda_stream__() == (0, a.handle)
    with device.create_stream(options=StreamOptions(nonblocking=False, priority=-1)) as c:
        assert not c.is_nonblocking
        assert c.priority == -1


def test_sync_waits_and_query_does_not(device: Device, latch: threading.Event) -> None:
    with device.create_stream() as stream:
        assert stream.is_done
        assert stream.query()
        hold(stream, latch)
        assert not stream.query()
        latch.set()
        stream.sync()
        assert stream.is_done


def test_a_stream_waits_for_an_event_and_for_a_stream(device: Device, latch: threading.Event) -> None:
    with device.create_stream() as first, device.create_stream() as second, device.create_stream() as third:
        hold(first, latch)
        event = first.record()
        second.wait(event)
        third.wait(second)
        second_mark, third_mark = second.record(), third.record()
        assert not any(e.is_done for e in (event, second_mark, third_mark))
        latch.set()
        third_mark.sync()
        assert event.is_done
        assert second_mark.is_done


def test_wait_takes_foreign_streams(device: Device, latch: threading.Event) -> None:
    with device.create_stream() as first, device.create_stream() as second:
        hold(first, latch)
        second.wait(SimpleNamespace(cuda_stream=first.handle))
        assert not second.is_done
        latch.set()
        second.sync()
        with pytest.raises(TypeError):
            second.wait(None)


def test_events_measure_milliseconds(device: Device) -> None:
    with device.create_stream() as stream, stream.record() as start:
        end = stream.record(device.create_event())
        end.sync()
        assert end - start >= 0
        assert start - start == 0
        assert start.is_timing_enabled
        assert start.device == device


def test_an_event_without_timing_does_not_measure(device: Device) -> None:
    with device.create_stream() as stream:
        start = stream.record(options=EventOptions(timing_enabled=False))
        end = stream.record()
        stream.sync()
        with pytest.raises(DeviceError):
            _ = end - start
        with pytest.raises(ArgumentError, match="not both"):
            stream.record(end, options=EventOptions())


def test_no_time_lies_between_runtimes() -> None:
    with pytest.raises(ArgumentError, match="no time lies between"):
        _ = Device("cpu").create_event() - Device("sim:0").create_event()
    with pytest.raises(TypeError):
        _ = Device("cpu").create_event() - 1  # type: ignore[operator]


def test_event_options_are_told(device: Device) -> None:
    event = device.create_event(timing_enabled=False, blocking_sync=True, ipc_enabled=False)
    assert (event.is_timing_enabled, event.is_blocking_sync, event.is_ipc_enabled) == (False, True, False)


@pytest.mark.parametrize(
    "use", ["handle", "sync", "is_done", "record", "wait", "priority", "__cuda_stream__"]
)
def test_a_closed_stream_says_so(device: Device, use: str) -> None:
    stream = device.create_stream()
    stream.close()
    stream.close()
    assert stream.is_closed
    with pytest.raises(ClosedError, match="closed"):
        found = getattr(stream, use)
        found(device.create_event()) if use == "wait" else found()
    with pytest.raises(ClosedError):
        as_stream(stream, device)


@pytest.mark.parametrize("use", ["handle", "sync", "is_done"])
def test_a_closed_event_says_so(device: Device, use: str) -> None:
    with device.create_event() as event:
        pass
    assert event.is_closed
    with pytest.raises(ClosedError, match="closed"):
        getattr(event, use)()


def test_close_returns_at_once_and_work_completes(device: Device, latch: threading.Event) -> None:
    stream = device.create_stream()
    hold(stream, latch)
    event = stream.record()
    stream.close()
    assert not event.is_done
    latch.set()
    event.sync()


@pytest.mark.parametrize("how", ["closed", "dropped"])
@pytest.mark.parametrize("what", ["stream", "event"])
def test_what_is_closed_or_dropped_is_destroyed_once(
    monkeypatch: pytest.MonkeyPatch, device: Device, what: str, how: str
) -> None:
    destroyed: list[int] = []
    real = getattr(type(device._runtime), f"{what}_destroy")

    def destroy(runtime: object, handle: int) -> None:
        destroyed.append(handle)
        real(runtime, handle)

    monkeypatch.setattr(type(device._runtime), f"{what}_destroy", destroy)
    made: Stream | Event = device.create_stream() if what == "stream" else device.create_event()
    handle = made.handle
    if how == "closed":
        made.close()
        assert handle in destroyed
    del made
    gc.collect()
    reaper.drain()
    assert destroyed.count(handle) == 1


def test_C78_streams_come_in_by_protocol(device: Device) -> None:
    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, stream.handle

    with device.create_stream() as stream:
        foreign = (
            stream.handle,
            Protocol(),
            SimpleNamespace(__cuda_stream__=(0, stream.handle)),
            SimpleNamespace(cuda_stream=stream.handle),
            SimpleNamespace(ptr=stream.handle),
        )
        assert as_stream(stream, device) is stream
        for obj in foreign:
            found = as_stream(obj, device)
            assert found == stream
            assert found.handle == stream.handle
            found.close()  # a foreign stream is left to its owner
        assert stream.is_done
        assert device.create_stream(stream.handle) == stream


def test_C78_none_means_the_default_stream(device: Device) -> None:
    assert as_stream(None, device) == device.default_stream == as_stream(1, device)
    assert as_stream(LEGACY_DEFAULT_STREAM, device) == device.default_stream
    assert as_stream(PER_THREAD_DEFAULT_STREAM, device).handle == 2
    assert as_stream(PER_THREAD_DEFAULT_STREAM, device).device == device
    assert as_stream(0, device).device == device


@pytest.mark.parametrize("wrong", ["3", 1.5, True, object(), [1], SimpleNamespace(ptr="x"), Stream])
def test_C78_anything_else_is_a_type_error_that_says_what_is_taken(device: Device, wrong: object) -> None:
    with pytest.raises(TypeError, match=r"__cuda_stream__, \.cuda_stream .PyTorch. or \.ptr"):
        as_stream(wrong, device)


def test_C78_a_newer_protocol_is_refused(device: Device) -> None:
    with pytest.raises(TypeError, match="version 1"):
        as_stream(SimpleNamespace(__cuda_stream__=lambda: (1, 2)), device)


def test_C78_a_buffer_is_no_stream(device: Device) -> None:
    with device.allocate(8) as buffer, pytest.raises(TypeError, match="not Buffer"):
        as_stream(buffer, device)


def test_C78_a_torch_tensor_is_no_stream() -> None:
    need("torch")
    import torch

    with pytest.raises(TypeError, match="not Tensor"):
        as_stream(torch.zeros(1), Device("cpu"))


def test_a_stream_of_another_runtime_orders_nothing() -> None:
    with Device("sim:0").create_stream() as stream, pytest.raises(ArgumentError, match="another runtime"):
        as_stream(stream, "cpu")


def test_a_foreign_handle_belongs_to_its_own_device() -> None:
    with Device("sim:1").create_stream() as stream:
        assert as_stream(stream.handle, "sim:0").device == Device("sim:1")


def test_handles_that_cannot_be() -> None:
    with pytest.raises(ArgumentError, match="negative"):
        Stream.from_handle(-1, "cpu")
    with pytest.raises(TypeError, match="int"):
        Stream.from_handle("1", "cpu")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Stream()
    with pytest.raises(TypeError):
        Event()
