"""DLPack both ways: versions, flags, devices, and no byte leaked or used after it was freed."""

from __future__ import annotations

import ctypes
import gc
import threading
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from capabilities import need
from nobounce import dlpack, reaper
from nobounce.buffer import as_buffer
from nobounce.device import Device
from nobounce.dtypes import DTYPES
from nobounce.errors import ArgumentError, ExportError
from nobounce.route.types import MemoryKind
from nobounce.tensor import Tensor


def made(nbytes: int = 64, name: str = "cpu") -> Tensor:
    buffer = Device(name).allocate(nbytes)
    buffer.copy_from(bytes(i % 256 for i in range(nbytes)), stream=None)
    buffer.wait()
    return Tensor(buffer, (nbytes,), "U8")


def is_live(address: int) -> bool:
    gc.collect()
    reaper.drain()
    return Device("cpu")._runtime.pointer_info(address).nbytes > 0


def managed(capsule: object) -> Any:
    for name, _, struct in dlpack._STRUCTS:
        if dlpack._is_valid(capsule, name):
            return struct.from_address(dlpack.pointer(capsule, name))
    raise AssertionError("no capsule")


@pytest.mark.parametrize("version", [None, (0, 8), (1, 0), (1, 1), (2, 0)])
def test_the_newest_version_both_know_is_spoken(version: tuple[int, int] | None) -> None:
    capsule = made().__dlpack__(max_version=version)
    versioned = version is not None and version[0] >= 1
    assert bool(dlpack._is_valid(capsule, b"dltensor_versioned")) == versioned
    assert bool(dlpack._is_valid(capsule, b"dltensor")) != versioned


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("name", [n for n, d in DTYPES.items() if d.bits != 6])
def test_a_capsule_says_what_the_tensor_is(name: str, versioned: bool) -> None:
    dtype = DTYPES[name]
    tensor = Tensor(made(256).buffer, (3, 4), name, offset=32)
    capsule = tensor.__dlpack__(max_version=(1, 0) if versioned else None)
    found = managed(capsule).dl_tensor
    assert dtype.dlpack is not None
    lanes = 2 if name == "F4" else 1
    assert (found.dtype.code, found.dtype.bits, found.dtype.lanes) == (*dtype.dlpack, lanes)
    assert (found.data, found.byte_offset) == (tensor.address, 0)
    assert found.shape[:2] == [3, 4 // lanes]
    assert (found.device.device_type, found.device.device_id) == (dlpack.CPU, 0)


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_an_unconsumed_capsule_keeps_and_gives_back_the_memory(version: tuple[int, int] | None) -> None:
    tensor = made()
    address = tensor.address
    capsule = tensor.__dlpack__(max_version=version)
    del tensor
    assert is_live(address)
    del capsule
    assert not is_live(address)


def test_a_consumer_that_refuses_gives_the_memory_back() -> None:
    tensor = Tensor(made().buffer, (32,), "BF16")
    address = tensor.address
    with pytest.raises((RuntimeError, BufferError)):
        np.from_dlpack(tensor)
    del tensor
    assert not is_live(address)


def test_the_memory_outlives_its_producer() -> None:
    tensor = made()
    address = tensor.address
    array = np.from_dlpack(tensor)
    del tensor
    assert is_live(address)
    assert array.tolist() == list(range(64))
    del array
    assert not is_live(address)


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_the_deleter_works_from_a_foreign_thread(version: tuple[int, int] | None) -> None:
    tensor = made()
    address = tensor.address
    foreign = dlpack.consume(tensor.__dlpack__(max_version=version))
    held = [foreign.owner]
    del tensor, foreign
    assert is_live(address)
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert not is_live(address)


def test_a_capsule_is_consumed_once() -> None:
    capsule = made().__dlpack__()
    dlpack.consume(capsule)
    with pytest.raises(ArgumentError, match="consumed before"):
        dlpack.consume(capsule)
    with pytest.raises(ArgumentError, match="not a DLPack capsule"):
        dlpack.consume(object())


def round_trip(tensor: Tensor) -> None:
    Tensor.from_dlpack(np.from_dlpack(tensor))
    tensor.__dlpack__(max_version=(1, 0))
    tensor.__dlpack__()


def test_ten_thousand_round_trips_leak_nothing() -> None:
    tensor = made()
    for _ in range(100):
        round_trip(tensor)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(10_000):
            round_trip(tensor)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 20_000
    address = tensor.address
    del tensor
    assert not is_live(address)


def test_torch_round_trips_leak_nothing() -> None:
    need("torch")
    tensor = Tensor(made().buffer, (32,), "BF16")
    for _ in range(10_000):
        Tensor.from_dlpack(tensor.torch())
    address = tensor.address
    del tensor
    assert not is_live(address)


@pytest.mark.parametrize("name", [n for n, d in DTYPES.items() if d.bits != 6])
def test_torch_tensors_come_back_as_what_they_were(name: str) -> None:
    need("torch")
    tensor = Tensor(made(256).buffer, (3, 4), name, offset=32)
    back = Tensor.from_dlpack(tensor.torch())
    assert (back.dtype, back.shape, back.address) == (tensor.dtype, tensor.shape, tensor.address)


@pytest.mark.parametrize("name", ["F32", "U16", "C64", "BOOL", "BF16", "F8_E4M3", "F8_E4M3FNUZ", "F8_E8M0"])
def test_numpy_arrays_come_in(name: str) -> None:
    dtype = DTYPES[name]
    kind = getattr(ml_dtypes, str(dtype.numpy), None) or np.dtype(dtype.numpy)
    array = np.zeros((3, 2), kind)
    tensor = Tensor.from_dlpack(array)
    assert (tensor.dtype, tensor.shape) == (dtype, (3, 2))
    assert tensor.address == array.ctypes.data
    address = array.ctypes.data
    del array
    gc.collect()
    assert tensor.numpy().ctypes.data == address
    assert not tensor.tobytes().strip(b"\0")


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 5)])
def test_odd_shapes_go_round(shape: tuple[int, ...]) -> None:
    array = np.ones(shape, np.int32)
    tensor = Tensor.from_dlpack(array)
    assert tensor.shape == shape
    assert np.from_dlpack(tensor).tolist() == array.tolist() == tensor.numpy().tolist()


def test_what_is_not_contiguous_is_refused() -> None:
    array = np.zeros((4, 4), np.float32)
    for bad in (array.T[:, 1:], array[::2], array[:, ::-1], array[:, :2]):
        with pytest.raises(ArgumentError, match="not C-contiguous"):
            Tensor.from_dlpack(bad)
    assert Tensor.from_dlpack(array[1:2, :]).shape == (1, 4)
    assert Tensor.from_dlpack(array[:, :0]).shape == (4, 0)


def test_a_refused_capsule_gives_its_memory_back() -> None:
    tensor = made()
    address = tensor.address
    array = np.from_dlpack(tensor).reshape(8, 8).T
    del tensor
    with pytest.raises(ArgumentError):
        Tensor.from_dlpack(array)
    del array
    assert not is_live(address)


def test_read_only_memory_stays_read_only() -> None:
    array = np.arange(4, dtype=np.int32)
    array.flags.writeable = False
    tensor = Tensor.from_dlpack(array)
    assert tensor.buffer.is_read_only
    assert not tensor.numpy().flags.writeable
    with pytest.raises(ArgumentError, match="read-only"):
        as_buffer(tensor, write=True)
    capsule = tensor.__dlpack__(max_version=(1, 0))
    assert managed(capsule).flags & dlpack.READ_ONLY
    with pytest.raises(ExportError, match="readonly"):
        tensor.__dlpack__()
    assert np.from_dlpack(tensor).tolist() == [0, 1, 2, 3]


class Array:
    """A numpy array seen through DLPack alone."""

    def __init__(self, array: Any) -> None:
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


def test_capsules_that_are_not_contiguous_are_refused() -> None:
    array = np.zeros((4, 4), np.float32)
    for bad in (array.T[:, 1:], array[::2], array[:, ::-1], array[:, :2]):
        with pytest.raises(ArgumentError, match="not C-contiguous"):
            Tensor.from_dlpack(Array(bad))
        with pytest.raises(ArgumentError, match="not C-contiguous"):
            as_buffer(Array(bad), write=True)
    for good in (array, array[1:2, :], array[:, :0], array[2], np.zeros(())):
        assert Tensor.from_dlpack(Array(good)).shape == good.shape


def test_a_read_only_capsule_stays_read_only() -> None:
    array = np.arange(4, dtype=np.int32)
    assert not Tensor.from_dlpack(Array(array)).buffer.is_read_only
    array.flags.writeable = False
    assert Tensor.from_dlpack(Array(array)).buffer.is_read_only


def test_types_without_a_name_are_refused() -> None:
    with pytest.raises(ArgumentError, match="code 5 with 128 bits"):
        Tensor.from_dlpack(np.zeros(2, np.complex128))


def test_what_speaks_no_dlpack_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="no __dlpack__"):
        Tensor.from_dlpack(3)


def test_a_producer_that_refuses_is_quoted() -> None:
    need("torch")
    import torch

    with pytest.raises(ArgumentError, match="by DLPack"):
        Tensor.from_dlpack(torch.zeros(3, requires_grad=True))


class Producer:
    """A producer from before DLPack 1.0, of whatever device and version is asked for."""

    def __init__(self, tensor: Tensor, **changes: int) -> None:
        self.tensor, self.changes = tensor, changes

    def __dlpack__(self, stream: object = None) -> object:
        capsule = self.tensor.__dlpack__()
        found = managed(capsule).dl_tensor
        found.device.device_type = self.changes.get("device", dlpack.CPU)
        found.dtype.lanes = self.changes.get("lanes", 1)
        found.byte_offset = self.changes.get("byte_offset", 0)
        return capsule


def test_old_producers_are_understood() -> None:
    tensor = made()
    assert Tensor.from_dlpack(Producer(tensor)).address == tensor.address
    assert Tensor.from_dlpack(Producer(tensor, byte_offset=8)).address == tensor.address + 8


@pytest.mark.parametrize(("kind", "stream"), [(dlpack.CPU, None), (dlpack.CUDA, 1), (dlpack.ROCM, 0)])
def test_a_gpus_producer_is_asked_for_order_on_the_default_stream(kind: int, stream: int | None) -> None:
    class Asked:
        options: dict[str, Any]

        def __dlpack_device__(self) -> tuple[int, int]:
            return kind, 0

        def __dlpack__(self, **options: Any) -> object:
            self.options = options
            raise BufferError("not today")

    asked = Asked()
    with pytest.raises(ArgumentError, match="not today"):
        Tensor.from_dlpack(asked)
    assert asked.options.pop("max_version") == dlpack.VERSION
    assert asked.options == ({} if stream is None else {"stream": stream})


@pytest.mark.parametrize(("changes", "says"), [({"device": 7}, "device type 7"), ({"lanes": 4}, "4 lanes")])
def test_what_no_one_here_knows_is_named(changes: dict[str, int], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        Tensor.from_dlpack(Producer(made(), **changes))


def test_a_newer_major_version_is_refused() -> None:
    tensor = made()
    address = tensor.address
    capsule = tensor.__dlpack__(max_version=(1, 0))
    managed(capsule).major = 2
    with pytest.raises(ArgumentError, match=r"version 2\."):
        dlpack.consume(capsule)
    del tensor, capsule
    assert not is_live(address)


def test_memory_no_framework_knows_is_handed_out_by_copy_only() -> None:
    tensor = made(8, "sim:0")
    with pytest.raises(BufferError, match="no framework knows memory of sim:0"):
        tensor.__dlpack_device__()
    with pytest.raises(ExportError, match="no framework knows"):
        tensor.__dlpack__()
    with pytest.raises(ExportError, match="copy=False"):
        tensor.__dlpack__(dl_device=(1, 0), copy=False)
    capsule = tensor.__dlpack__(dl_device=(1, 0), max_version=(1, 0))
    assert managed(capsule).flags & dlpack.IS_COPIED
    foreign = dlpack.consume(capsule)
    assert ctypes.string_at(foreign.address, foreign.nbytes) == bytes(range(8))


def test_pinned_memory_is_host_memory_to_dlpack() -> None:
    with Device("sim:0").allocate(8, kind="pinned") as buffer:
        assert buffer.memory_kind is MemoryKind.PINNED
        assert buffer.__dlpack_device__() == (dlpack.CPU, 0)
        buffer.numpy()[:] = 3
        assert np.from_dlpack(buffer).tolist() == [3] * 8


def test_a_copy_is_one_and_says_so() -> None:
    tensor = made()
    capsule = tensor.__dlpack__(copy=True, max_version=(1, 0))
    assert managed(capsule).flags & dlpack.IS_COPIED
    assert dlpack.consume(capsule).address != tensor.address
    assert np.from_dlpack(tensor, copy=False).ctypes.data == tensor.address
    with pytest.raises(ExportError, match=r"DLPack device \(2, 0\)"):
        tensor.__dlpack__(dl_device=(2, 0))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    """sim in the guise of a GPU that frameworks know."""
    import dataclasses

    device = Device("sim:1")
    powers = dataclasses.replace(device.capabilities, dlpack_device_type=dlpack.CUDA)
    monkeypatch.setattr(device._runtime, "capabilities", powers)
    return device


def test_a_gpus_memory_goes_out_where_it_is(gpu: Device) -> None:
    with gpu.allocate(64) as buffer:
        tensor = Tensor(buffer, (4, 2), "BF16", offset=16)
        assert tensor.__dlpack_device__() == (dlpack.CUDA, 1)
        capsule = tensor.__dlpack__(stream=-1, max_version=(1, 0))
        found = managed(capsule).dl_tensor
        assert found.data == buffer.handle + 16
        assert (found.device.device_type, found.device.device_id) == (dlpack.CUDA, 1)
        second = tensor.__dlpack__(stream=-1, max_version=(1, 0), copy=True)
        copied = managed(second)
        assert copied.flags & dlpack.IS_COPIED
        assert copied.dl_tensor.data != found.data
        assert copied.dl_tensor.device.device_type == dlpack.CUDA


@pytest.mark.parametrize("consumer", ["stream", None, -1])
def test_the_consumers_stream_waits_for_work_under_way(gpu: Device, consumer: Any) -> None:
    release = threading.Event()
    with gpu.create_stream() as mine, gpu.create_stream() as theirs, gpu.allocate(64) as buffer:
        gpu._runtime.host_call(mine.handle, lambda: release.wait(30) and None)
        buffer.fill(1, stream=mine)
        handle = theirs.handle if consumer == "stream" else consumer
        asked = theirs if consumer == "stream" else gpu.default_stream
        capsule = buffer.__dlpack__(stream=handle, max_version=(1, 0))
        assert asked.is_done == (consumer == -1)
        release.set()
        mine.sync()
        asked.sync()
        del capsule
