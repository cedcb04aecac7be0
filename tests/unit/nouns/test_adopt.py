"""The caller's own memory: taken by protocol, kept alive, and refused with the reason where it will not do."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from capabilities import need
from nobounce.buffer import Buffer, as_buffer
from nobounce.device import Device
from nobounce.errors import ArgumentError, ClosedError
from nobounce.route.types import MemoryKind
from nobounce.runtimes import registry
from nobounce.tensor import Tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda: bytearray(b"abcdefgh"),
        lambda: memoryview(bytearray(b"abcdefgh")),
        lambda: array.array("b", b"abcdefgh"),
        lambda: np.frombuffer(bytearray(b"abcdefgh"), np.int16),
        lambda: np.frombuffer(bytearray(b"abcdefgh"), ml_dtypes.bfloat16),
        lambda: np.frombuffer(bytearray(b"abcdefgh"), "M8[s]"),
        lambda: (ctypes.c_char * 8)(*b"abcdefgh"),
        lambda: Device("cpu").allocate(8),
    ],
    ids=["bytearray", "memoryview", "array", "numpy", "bf16", "datetime", "ctypes", "Buffer"],
)
def test_writable_memory_is_taken_without_a_copy(make: Any) -> None:
    obj = make()
    if isinstance(obj, Buffer):
        obj.copy_from(b"abcdefgh", stream=None)
    buffer = as_buffer(obj, write=True)
    assert buffer.nbytes == 8
    assert bytes(buffer.view()) == b"abcdefgh"
    buffer.view()[:2] = b"xy"
    seen = bytes(obj.view()) if isinstance(obj, Buffer) else np.asarray(obj).tobytes()
    assert seen == b"xycdefgh"
    assert buffer.device == Device("cpu")


def test_the_address_is_the_callers() -> None:
    obj = np.zeros(100, np.float32)
    buffer = as_buffer(obj[10:20], write=True)
    assert (buffer.handle, buffer.nbytes) == (obj.ctypes.data + 40, 40)
    assert buffer.memory_kind is MemoryKind.PAGEABLE


def test_a_buffer_is_itself_and_a_tensor_is_its_bytes() -> None:
    with Device("sim:0").allocate(16) as buffer:
        assert as_buffer(buffer, write=True) is buffer
        part = as_buffer(Tensor(buffer, (2,), "F32", offset=8), write=True)
        assert (part.handle, part.nbytes, part.device) == (buffer.handle + 8, 8, Device("sim:0"))
    with pytest.raises(ClosedError):
        as_buffer(buffer, write=False)


def test_the_caller_is_kept_alive() -> None:
    class Mine(bytearray):
        pass

    obj = Mine(b"abcd")
    alive = weakref.ref(obj)
    buffer = as_buffer(obj, write=True)
    with pytest.raises(BufferError):
        obj.extend(b"more")
    view = buffer.view()
    del obj
    buffer.close()
    gc.collect()
    assert alive() is not None
    assert bytes(view) == b"abcd"
    del view, buffer
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    "obj", [b"abcd", memoryview(b"abcd"), np.frombuffer(b"abcd", np.uint8), np.float32(1)]
)
def test_read_only_memory_may_be_read_from(obj: Any) -> None:
    buffer = as_buffer(obj, write=False)
    assert bytes(buffer.view()) == bytes(obj)
    assert buffer.is_read_only
    with pytest.raises(ArgumentError, match="read-only"):
        as_buffer(obj, write=True)


def test_a_read_only_mapping_is_taken() -> None:
    with mmap.mmap(-1, 4096, access=mmap.ACCESS_READ) as mapping:
        buffer = as_buffer(mapping, write=False)
        assert buffer.nbytes == 4096
        buffer.close()
        del buffer


@pytest.mark.parametrize(
    "obj",
    [
        np.zeros((4, 4)).T[1:],
        np.zeros((4, 4))[:, :2],
        np.zeros(8)[::2],
        np.zeros(8)[::-1],
        np.zeros((4, 4), ml_dtypes.bfloat16)[:, 1:],
        memoryview(bytearray(8))[::2],
    ],
)
@pytest.mark.parametrize("write", [True, False])
def test_what_is_not_contiguous_is_refused(obj: Any, write: bool) -> None:
    with pytest.raises(ArgumentError, match="not C-contiguous"):
        as_buffer(obj, write=write)


@pytest.mark.parametrize("obj", [np.array([None]), np.zeros(2, [("a", "O"), ("b", "i4")])])
def test_objects_have_no_bytes_to_move(obj: Any) -> None:
    with pytest.raises(ArgumentError, match="Python objects"):
        as_buffer(obj, write=True)


@pytest.mark.parametrize("obj", [None, 3, "abc", object(), [1, 2], bytearray, Device("cpu")])
def test_what_is_no_memory_is_a_type_error(obj: Any) -> None:
    with pytest.raises(TypeError, match="is no memory"):
        as_buffer(obj, write=False)


@pytest.mark.parametrize("obj", [bytearray(), np.zeros((0, 3)), np.zeros((3, 0))[:, ::2], b""])
def test_empty_memory_is_taken(obj: Any) -> None:
    buffer = as_buffer(obj, write=False)
    assert (buffer.handle, buffer.nbytes) == (0, 0)


def test_memory_of_our_own_is_known_for_what_it_is() -> None:
    with Device("cpu").allocate(64) as buffer:
        found = as_buffer(buffer.numpy()[8:16], write=True)
        assert (found.memory_kind, found.handle) == (MemoryKind.DEVICE, buffer.handle + 8)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn", "bool", "complex64"])
def test_torch_tensors_are_taken(name: str) -> None:
    need("torch")
    import torch

    tensor = torch.zeros(4, dtype=getattr(torch, name))
    buffer = as_buffer(tensor, write=True)
    assert (buffer.handle, buffer.nbytes) == (tensor.data_ptr(), 4 * tensor.element_size())
    address, view = tensor.data_ptr(), buffer.view()
    del tensor, buffer
    gc.collect()
    assert bytes(view) == bytes(len(view))
    assert address


def test_torch_tensors_with_a_gradient_are_taken() -> None:
    need("torch")
    import torch

    weight = torch.nn.Parameter(torch.zeros(4))
    assert as_buffer(weight, write=True).handle == weight.data_ptr()


def test_torch_tensors_without_plain_memory_are_refused() -> None:
    need("torch")
    import torch

    bad = {
        "not C-contiguous": torch.zeros(4, 4).T,
        "lazy conjugate": torch.zeros(2, dtype=torch.complex64).conj(),
        "device 'meta'": torch.zeros(2, device="meta"),
        "no memory": torch.zeros(2, 2).to_sparse(),
    }
    for says, tensor in bad.items():
        with pytest.raises(ArgumentError, match=says):
            as_buffer(tensor, write=True)


def test_any_dlpack_producer_is_taken() -> None:
    data = np.arange(4, dtype=np.int32)
    producer = SimpleNamespace(
        __dlpack__=lambda **options: data.__dlpack__(**options), __dlpack_device__=lambda: (1, 0)
    )
    assert as_buffer(producer, write=True).handle == data.ctypes.data


@pytest.fixture
def sim_as_cuda(monkeypatch: pytest.MonkeyPatch) -> Device:
    """sim in the place of the CUDA runtime."""
    sim = registry.get("sim")
    monkeypatch.setitem(registry._instances, "cuda", sim)
    return Device("sim:1")


def test_cuda_arrays_are_taken_with_their_stream(sim_as_cuda: Device) -> None:
    with sim_as_cuda.allocate(64) as real, sim_as_cuda.create_stream() as stream:
        interface = {"data": (real.handle + 8, False), "shape": (2, 4), "typestr": "<f4", "version": 3}
        theirs = SimpleNamespace(__cuda_array_interface__={**interface, "stream": stream.handle})
        buffer = as_buffer(theirs, write=True)
        assert (buffer.handle, buffer.nbytes, buffer.device) == (real.handle + 8, 32, sim_as_cuda)
        assert buffer.memory_kind is MemoryKind.DEVICE
        assert buffer.owner is theirs
        assert buffer.allocation.pending == stream
        strided = SimpleNamespace(__cuda_array_interface__={**interface, "strides": (32, 8)})
        with pytest.raises(ArgumentError, match="not C-contiguous"):
            as_buffer(strided, write=True)
        frozen = SimpleNamespace(__cuda_array_interface__={**interface, "data": (real.handle, True)})
        with pytest.raises(ArgumentError, match="read-only"):
            as_buffer(frozen, write=True)
        empty = SimpleNamespace(__cuda_array_interface__={**interface, "data": (0, False), "shape": (0,)})
        assert as_buffer(empty, write=True).nbytes == 0


def test_no_framework_is_imported_to_recognise_memory() -> None:
    code = """
import sys
from nobounce.buffer import as_buffer
from nobounce.device import Device
with Device("cpu").allocate(16) as buffer:
    buffer.copy_from(bytearray(16), stream=None)
    buffer.view()
assert not {"numpy", "torch", "cupy"} & set(sys.modules), "imported"
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
