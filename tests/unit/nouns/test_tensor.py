"""Tensors: shapes, element types, arrays of numpy and torch over the same memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from capabilities import need
from nobounce import reaper
from nobounce.buffer import Buffer
from nobounce.device import Device
from nobounce.dtypes import DTYPES, DType, array_shape, contiguous_strides
from nobounce.errors import ArgumentError, ClosedError, ExportError, UnavailableError
from nobounce.tensor import Tensor

NAMES = [d.name for d in DTYPES.values() if d.bits != 6]
SHAPES = [(), (4,), (3, 2), (2, 0, 4), (1, 1, 2), (0,)]


@pytest.fixture(params=["cpu", "sim:1"])
def device(request: pytest.FixtureRequest) -> Device:
    return Device(request.param)


def filled(device: Device, data: bytes) -> Buffer:
    buffer = device.allocate(len(data))
    buffer.copy_from(data, stream=None)
    buffer.wait()
    return buffer


def fits(dtype: DType, shape: tuple[int, ...]) -> bool:
    return not dtype.packed or (bool(shape) and shape[-1] % 2 == 0)


def size(dtype: DType, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=object)) * dtype.bits // 8


def each(test: Callable[..., None]) -> Callable[..., None]:
    pairs = [(n, s) for n in NAMES for s in SHAPES if fits(DTYPES[n], s)]
    return pytest.mark.parametrize(("name", "shape"), pairs)(test)


@each
def test_every_type_and_shape_becomes_a_numpy_array(
    device: Device, name: str, shape: tuple[int, ...]
) -> None:
    dtype = DTYPES[name]
    nbytes = size(dtype, shape)
    data = bytes(i % 2 for i in range(nbytes)) if name == "BOOL" else bytes(i % 251 for i in range(nbytes))
    tensor = Tensor(filled(device, b"\xff" * 64 + data), shape, name, offset=64)
    array = tensor.numpy()
    assert array.shape == array_shape(dtype, shape)
    assert array.dtype.name == dtype.numpy
    assert array.tobytes() == tensor.tobytes() == data
    assert (tensor.nbytes, tensor.numel, tensor.ndim) == (nbytes, int(np.prod(shape)), len(shape))
    made = Tensor.maker(tensor.buffer, "numpy")(0, shape, dtype, nbytes)
    assert (made.shape, made.dtype, made.tobytes()) == (array.shape, array.dtype, data)


@each
def test_every_type_and_shape_becomes_a_torch_tensor(
    device: Device, name: str, shape: tuple[int, ...]
) -> None:
    need("torch")
    import torch

    dtype = DTYPES[name]
    nbytes = size(dtype, shape)
    data = bytes(i % 2 for i in range(nbytes))
    tensor = Tensor(filled(device, b"\xff" * 64 + data), shape, name, offset=64)
    for made in (tensor.torch(), Tensor.maker(tensor.buffer, "torch")(0, shape, dtype, nbytes)):
        assert made.dtype is getattr(torch, str(dtype.torch))
        assert tuple(made.shape) == array_shape(dtype, shape)
        assert made.is_contiguous()
        assert made.reshape(-1).view(torch.uint8).numpy().tobytes() == data if shape else made.numel() == 1
        if device.name == "cpu" and nbytes:
            assert made.data_ptr() == tensor.address


def test_arrays_share_the_memory_of_cpu() -> None:
    tensor = Tensor(filled(Device("cpu"), bytes(16)), (4,), "F32")
    tensor.numpy()[1] = 2.5
    assert tensor.numpy().tolist() == [0, 2.5, 0, 0]
    assert np.asarray(tensor)[1] == 2.5
    np.asarray(tensor)[2] = 1
    assert np.from_dlpack(tensor).tolist() == [0, 2.5, 1, 0]


def test_torch_tensors_share_the_memory_of_cpu() -> None:
    need("torch")
    tensor = Tensor(filled(Device("cpu"), bytes(16)), (4,), "F32")
    tensor.torch()[1] = 2.5
    assert tensor.numpy().tolist() == [0, 2.5, 0, 0]


@pytest.mark.parametrize("name", ["F32", "BF16", "F64", "C64", "I16"])
def test_an_unaligned_tensor_has_right_values(name: str) -> None:
    need("torch")
    import torch

    dtype = DTYPES[name]
    nbytes = 4 * dtype.bits // 8
    tensor = Tensor(filled(Device("cpu"), b"\xff" + bytes(range(nbytes))), (4,), name, offset=1)
    assert tensor.numpy().tobytes() == bytes(range(nbytes))
    with tensor.buffer as part, Buffer._of(tensor._allocation) as all_of_it:
        make, whole = Tensor.maker(part, "torch"), Tensor.maker(all_of_it, "torch")
    for made in (tensor.torch(), make(0, (4,), dtype, nbytes), whole(1, (4,), dtype, nbytes)):
        assert made.clone().view(torch.uint8).numpy().tobytes() == bytes(range(nbytes))


def test_C40_the_same_byte_means_what_its_type_says() -> None:
    buffer = filled(Device("cpu"), b"\x80")
    ocp, amd = Tensor(buffer, (), "F8_E4M3").numpy(), Tensor(buffer, (), "F8_E4M3FNUZ").numpy()
    assert ocp.dtype == ml_dtypes.float8_e4m3fn
    assert amd.dtype == ml_dtypes.float8_e4m3fnuz
    assert float(ocp) == 0
    assert np.isnan(float(amd))


def test_C36_C42_fp8_and_bf16_are_ml_dtypes_arrays() -> None:
    assert float(Tensor(filled(Device("cpu"), b"\x38"), (1,), "F8_E4M3").numpy()[0]) == 1.0
    assert float(np.asarray(Tensor(filled(Device("cpu"), b"\x80\x3f"), (1,), "BF16"))[0]) == 1.0


def test_C41_complex_stays_complex() -> None:
    data = np.array([1 + 2j], np.complex64).tobytes()
    assert Tensor(filled(Device("cpu"), data), (1,), "C64").numpy().tolist() == [1 + 2j]


def test_C37_six_bit_types_are_raw_bytes_only() -> None:
    tensor = Tensor(filled(Device("cpu"), b"abc"), (4,), "F6_E2M3")
    assert tensor.tobytes() == bytes(tensor.buffer.view()) == b"abc"
    with pytest.raises(ArgumentError, match="raw bytes"):
        tensor.numpy()
    with pytest.raises(ExportError, match="raw bytes"):
        tensor.__dlpack__()
    assert not hasattr(tensor, "__array_interface__")


def test_F4_across_its_rows_is_raw_bytes_only() -> None:
    tensor = Tensor(filled(Device("cpu"), b"abc"), (2, 3), "F4")
    assert tensor.tobytes() == b"abc"
    with pytest.raises(ArgumentError, match="packs two elements"):
        tensor.numpy()
    with pytest.raises(ArgumentError):
        tensor.__dlpack__()
    with pytest.raises(ArgumentError, match="5 bits|whole bytes"):
        Tensor(filled(Device("cpu"), b"abc"), (3,), "F4")


def test_torch_without_the_type_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    need("torch")
    import torch

    monkeypatch.delattr(torch, "float8_e8m0fnu")
    tensor = Tensor(filled(Device("cpu"), b"a"), (1,), "F8_E8M0")
    with pytest.raises(ArgumentError, match="has no type for F8_E8M0"):
        tensor.torch()
    with pytest.raises(ArgumentError, match="has no type for F8_E8M0"):
        Tensor.maker(tensor.buffer, "torch")(0, (1,), DTYPES["F8_E8M0"], 1)


def test_without_torch_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    buffer = filled(Device("cpu"), b"abcd")
    with pytest.raises(UnavailableError, match=r"pip install nobounce\[torch\]"):
        Tensor(buffer, (1,), "F32").torch()
    with pytest.raises(UnavailableError, match="torch"):
        Tensor.maker(buffer, "torch")


@pytest.mark.parametrize(
    ("shape", "dtype", "offset", "says"),
    [
        ((5,), "F32", 0, "20 bytes at 0 leave a buffer of 16"),
        ((4,), "F32", 1, "16 bytes at 1 leave"),
        ((1,), "F32", -4, "4 bytes at -4 leave"),
        ((-1,), "F32", 0, "whole numbers"),
        ((1.0,), "F32", 0, "whole numbers"),
        ((True,), "F32", 0, "whole numbers"),
        ((1,), "FLOAT32", 0, "unknown dtype 'FLOAT32'"),
        ((1 << 62, 1 << 62), "U8", 0, "leave a buffer"),
    ],
)
def test_a_tensor_that_cannot_be_is_named(shape: Any, dtype: str, offset: int, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        Tensor(filled(Device("cpu"), bytes(16)), shape, dtype, offset=offset)


def test_a_tensor_of_a_closed_buffer_cannot_be_made() -> None:
    buffer = filled(Device("cpu"), bytes(16))
    buffer.close()
    with pytest.raises(ClosedError):
        Tensor(buffer, (1,), "U8")


@pytest.mark.parametrize("framework", [None, "numpy", "torch"])
def test_C72_what_a_maker_makes_outlives_the_buffer(device: Device, framework: Any) -> None:
    if framework == "torch":
        need("torch")
    data = bytes(range(64))
    buffer = filled(device, data)
    make = Tensor.maker(buffer, framework)
    buffer.close()
    made = [make(i * 16, (2, 4), DTYPES["I16"], 16) for i in range(4)]
    del make
    gc.collect()
    reaper.drain()
    with device.allocate(64) as other:
        other.fill(0xEE, stream=None)
        other.wait()
    flat = [np.asarray(m.numpy()).tobytes() if framework != "numpy" else m.tobytes() for m in made]
    assert b"".join(flat) == data


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_C73_memory_lives_as_long_as_its_last_array(framework: Any) -> None:
    if framework == "torch":
        need("torch")
    cpu = Device("cpu")
    buffer = filled(cpu, bytes(4096))
    address = buffer.handle
    one = Tensor.maker(buffer, framework)(1024, (4,), DTYPES["F32"], 16)
    two = getattr(Tensor(buffer, (8,), "BF16", offset=2048), framework)()
    part = two[2:4]
    buffer.close()
    del one, two, buffer
    gc.collect()
    reaper.drain()
    assert cpu._runtime.pointer_info(address).base == address
    del part
    gc.collect()
    reaper.drain()
    assert cpu._runtime.pointer_info(address).nbytes == 0


def test_a_tensor_is_seen_by_the_array_interface_where_it_has_a_name() -> None:
    buffer = filled(Device("cpu"), bytes(range(16)))
    interface = Tensor(buffer, (2, 2), "F32").__array_interface__
    assert interface["shape"] == (2, 2)
    assert interface["typestr"] == "<f4"
    assert interface["data"] == (buffer.handle, False)
    assert not hasattr(Tensor(buffer, (2, 2), "BF16"), "__array_interface__")
    assert not hasattr(Tensor(buffer, (4,), "F32"), "__cuda_array_interface__")


def test_the_buffer_protocol_keeps_shape_and_type() -> None:
    buffer = filled(Device("cpu"), bytes(16))
    view = Tensor(buffer, (2, 2), "F32").__buffer__(0)
    assert (view.shape, view.format, view.nbytes) == ((2, 2), "f", 16)
    with pytest.raises(BufferError, match="no buffer of BF16"):
        Tensor(buffer, (2, 2), "BF16").__buffer__(0)
    with pytest.raises(BufferError, match="cannot reach memory of sim:0"):
        Tensor(filled(Device("sim:0"), bytes(4)), (1,), "F32").__buffer__(0)
    if sys.version_info >= (3, 12):
        assert memoryview(Tensor(buffer, (2, 2), "F32")).shape == (2, 2)
    assert np.asarray(Tensor(buffer, (2, 2), "BF16")).dtype == ml_dtypes.bfloat16


def test_array_options_are_honoured(device: Device) -> None:
    tensor = Tensor(filled(device, bytes(range(8))), (8,), "U8")
    assert np.array(tensor, dtype=np.float32).tolist() == list(range(8))
    copied = np.array(tensor, copy=True)
    copied[:] = 0
    assert np.asarray(tensor).tolist() == list(range(8))
    with pytest.raises(ValueError, match="copy"):
        np.array(Tensor(filled(device, bytes(8)), (4,), "BF16"), dtype=np.float32, copy=False)


def test_a_part_of_a_tensors_memory_is_a_buffer(device: Device) -> None:
    whole = filled(device, bytes(range(32)))
    tensor = Tensor(whole, (4,), "U16", offset=8)
    with tensor.buffer as part:
        assert part.nbytes == 8
        assert part.handle == tensor.address == whole.handle + 8
        assert part.numpy().tolist() == list(range(8, 16))
    assert tensor.tobytes() == bytes(range(8, 16))
    assert tensor.device == device


def test_tensors_print_and_measure_themselves() -> None:
    tensor = Tensor(filled(Device("cpu"), bytes(12)), (3, 2), "BF16")
    assert repr(tensor) == "<Tensor BF16 [3, 2] on cpu>"
    assert len(tensor) == 3
    assert (tensor.shape, str(tensor.dtype)) == ((3, 2), "BF16")
    with pytest.raises(TypeError, match="scalar"):
        len(Tensor(filled(Device("cpu"), bytes(2)), (), "BF16"))


def test_strides_are_those_of_a_contiguous_array() -> None:
    assert contiguous_strides(()) == ()
    assert contiguous_strides((2, 3, 4)) == (12, 4, 1)
