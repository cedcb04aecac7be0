"""nobounce.hip: HIP's calls by their own names, their statuses first."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from nobounce import hip
from nobounce.hip import hipError_t, hipMemcpyKind

OK = (hipError_t.hipSuccess,)


@pytest.fixture(params=["cpu", "sim:0"], autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    hip.use(request.param)
    hip.hipGetLastError()
    yield request.param
    hip.use(None)


def test_every_name_is_there() -> None:
    assert hip.__all__ == sorted(hip.__all__)
    assert all(hasattr(hip, name) for name in hip.__all__)


def test_bytes_go_to_the_device_and_back() -> None:
    status, pointer = hip.hipMalloc(4096)
    assert status is hipError_t.hipSuccess
    there, back = np.arange(4096, dtype=np.uint16).view(np.uint8)[:4096].copy(), bytearray(4096)
    assert hip.hipMemcpy(pointer, there.ctypes.data, 4096, hipMemcpyKind.hipMemcpyHostToDevice) == OK
    assert hip.hipMemset(pointer, 7, 16) == OK
    assert hip.hipMemcpy(back, pointer, 4096, hipMemcpyKind.hipMemcpyDeviceToHost) == OK
    assert bytes(back) == bytes([7] * 16) + there.tobytes()[16:]
    assert hip.hipFree(pointer) == OK


def test_streams_and_events_order_work_and_tell_times() -> None:
    (_, stream), (_, pointer) = hip.hipStreamCreateWithFlags(hip.hipStreamNonBlocking), hip.hipMalloc(256)
    (_, begin), (_, end) = hip.hipEventCreate(), hip.hipEventCreate()
    _, pinned = hip.hipHostMalloc(256, hip.hipHostMallocDefault)
    assert hip.hipEventRecord(begin, stream) == OK
    assert hip.hipMemsetAsync(pointer, 1, 256, stream) == OK
    assert hip.hipMemcpyAsync(pinned, pointer, 256, hipMemcpyKind.hipMemcpyDefault, stream) == OK
    assert hip.hipEventRecord(end, stream) == OK
    assert hip.hipStreamWaitEvent(None, end, 0) == OK
    assert hip.hipStreamSynchronize(stream) == OK
    assert hip.hipStreamQuery(stream) == OK == hip.hipEventQuery(end) == hip.hipEventSynchronize(end)
    status, milliseconds = hip.hipEventElapsedTime(begin, end)
    assert status == 0
    assert milliseconds is not None
    assert milliseconds >= 0
    for event in (begin, end):
        assert hip.hipEventDestroy(event) == OK
    assert hip.hipStreamDestroy(stream) == OK == hip.hipHostFree(pinned) == hip.hipFree(pointer)
    assert hip.hipDeviceSynchronize() == OK


def test_what_fails_is_a_status_and_the_last_error_of_the_thread() -> None:
    assert hip.hipFree(0x1234) == (hipError_t.hipErrorInvalidValue,)
    assert hip.hipPeekAtLastError() == hip.hipGetLastError() == (hipError_t.hipErrorInvalidValue,)
    assert hip.hipGetLastError() == OK
    assert hip.hipStreamCreateWithFlags(99) == (hipError_t.hipErrorInvalidValue, None)
    assert hip.hipMemcpy(1, 2, 3, 77) == (hipError_t.hipErrorInvalidMemcpyDirection,)
    assert hip.hipMemcpy("text", 2, 3, 0)[0] is hipError_t.hipErrorInvalidValue
    assert hip.hipMalloc(1 << 60) == (hipError_t.hipErrorOutOfMemory, None)
    assert hip.hipGetErrorName(2) == (hipError_t.hipSuccess, b"hipErrorOutOfMemory")
    assert hip.hipGetErrorString(2) == (hipError_t.hipSuccess, b"out of memory")
    assert hip.hipGetErrorName(12345) == (hipError_t.hipSuccess, b"hipErrorUnknown")


def test_devices_are_counted_and_chosen(device: str) -> None:
    status, count = hip.hipGetDeviceCount()
    assert status == 0
    assert hip.hipSetDevice(count - 1) == OK
    assert hip.hipGetDevice() == (hipError_t.hipSuccess, count - 1)
    assert hip.hipSetDevice(count) == (hipError_t.hipErrorInvalidDevice,)
    assert hip.hipSetDevice(0) == OK
