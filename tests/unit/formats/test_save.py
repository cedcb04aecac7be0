"""nobounce.save: what it writes is what numpy, torch and safetensors say, whatever the memory looked like."""

from __future__ import annotations

import array
import errno
import math
import os
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nobounce
from capabilities import need
from nobounce.dtypes import DTYPES, array_shape
from nobounce.errors import (
    ArgumentError,
    FileError,
    FileIsDirectoryError,
    FileMissingError,
    TransferError,
)
from nobounce.formats.header import read_header_of
from nobounce.testing import faults

MIB = 1 << 20


def loaded(path: Path) -> dict[str, np.ndarray]:
    return nobounce.load(path, device="cpu", framework="numpy")


def on(device: str, data: bytes) -> nobounce.Buffer:
    buffer = nobounce.Device(device).allocate(len(data))
    buffer.copy_from(data, stream=None)
    buffer.wait()
    return buffer


@pytest.mark.parametrize("device", ["cpu", "sim:1"])
@pytest.mark.parametrize("shape", [(), (4,), (3, 2), (2, 0, 4), (1, 1, 8)])
def test_every_type_comes_back_as_it_was(tmp_path: Path, device: str, shape: tuple[int, ...]) -> None:
    tensors = {}
    for name, dtype in DTYPES.items():
        nbytes, odd = divmod(dtype.bits * math.prod(shape), 8)
        if not odd:
            data = bytes(i % 2 if name == "BOOL" else i * 37 % 256 for i in range(nbytes))
            tensors[name] = nobounce.Tensor(on(device, data), shape, dtype)
    receipt = nobounce.save(tensors, tmp_path / "m", metadata={"format": "pt", "é": "\n"})
    back = nobounce.load(tmp_path / "m", device="cpu")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (back[name].dtype.name, back[name].shape) == (name, shape)
        assert back[name].tobytes() == tensor.tobytes()
    assert back.metadata == {"format": "pt", "é": "\n"}
    assert receipt.nbytes == receipt.requested == (tmp_path / "m").stat().st_size
    assert receipt.fastpath_bytes + receipt.fallback_bytes == receipt.nbytes
    assert receipt.device == (device if 0 not in shape else "cpu")
    assert receipt.synced


NUMBERS = np.random.default_rng(5).standard_normal((6, 4, 10)).astype(np.float32)
STRANGE: dict[str, np.ndarray] = {
    "transposed": NUMBERS.T,
    "strided": NUMBERS[:, ::2],
    "backwards": NUMBERS[::-1, :, ::-3],
    "Fortran": np.asfortranarray(NUMBERS),
    "big-endian": NUMBERS.astype(">f4"),
    "big-endian complex": (NUMBERS + 1j).astype(">c8"),
    "big-endian slice": NUMBERS.astype(">f4")[:, 1:3].T,
    "big-endian scalar": np.array(-2.5, ">f8"),
    "broadcast": np.broadcast_to(np.arange(5, dtype=np.int16), (3, 5)),
    "bfloat16 transposed": NUMBERS.astype(ml_dtypes.bfloat16).T,
    "read-only": np.frombuffer(bytes(range(64)), np.uint16),
    "NaN payloads": np.array([0x7FA12345, 0xFFC00001], ">u4").view(">f4"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_values_are_those_that_numpy_sees(tmp_path: Path, name: str) -> None:
    value = STRANGE[name]
    nobounce.save({"x": value}, tmp_path / "m")
    back = loaded(tmp_path / "m")["x"]
    assert back.shape == value.shape
    native = np.ascontiguousarray(value).reshape(value.shape)
    if not value.dtype.isnative:
        native = native.byteswap().view(value.dtype.newbyteorder("="))
    assert back.dtype == native.dtype
    assert back.tobytes() == native.tobytes()


def test_large_arrays_in_another_order_are_brought_into_it_piece_by_piece(tmp_path: Path) -> None:
    one = np.arange(3 * 1031 * 1021 * 2, dtype=">i4").reshape(3, 1031, 1021 * 2)  # 25 MB, rows of odd sizes
    other = np.arange(4099 * 2053, dtype=np.uint16).reshape(4099, 2053)
    nobounce.save({"one": one, "other": other.T, "flat": one.ravel()[1:-1:2].copy()}, tmp_path / "m")
    back = loaded(tmp_path / "m")
    assert np.array_equal(back["one"], one)
    assert np.array_equal(back["other"], other.T)
    assert np.array_equal(back["flat"], one.ravel()[1:-1:2])


def test_torch_tensors_are_saved_as_safetensors_reads_them(tmp_path: Path) -> None:
    need("torch", "safetensors")
    import safetensors.torch
    import torch

    base = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    tensors = {
        "parameter": torch.nn.Parameter(base.clone()),
        "channels last": base.clone().to(memory_format=torch.channels_last),
        "transposed": base.clone().to(torch.bfloat16).transpose(0, 3),
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        "scalar": torch.tensor(True),
        "empty": torch.empty(0, 3, dtype=torch.float16),
        "fp8": base.clone().to(torch.float8_e4m3fn),
        "expanded": torch.tensor([1, 2, 3]).expand(4, 3),
    }
    nobounce.save(tensors, tmp_path / "m")
    back = safetensors.torch.load_file(tmp_path / "m")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        want = tensor.detach().resolve_conj().resolve_neg().contiguous()
        assert (back[name].dtype, back[name].shape) == (want.dtype, want.shape), name
        assert torch.equal(back[name].view(-1).view(torch.uint8), want.view(-1).view(torch.uint8)), name


def test_packed_torch_tensors_count_elements(tmp_path: Path) -> None:
    need("torch")
    import torch

    raw = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    nobounce.save({"f4": raw.view(torch.float4_e2m1fn_x2)}, tmp_path / "m")
    back = nobounce.load(tmp_path / "m", device="cpu")["f4"]
    assert (back.dtype.name, back.shape, back.tobytes()) == ("F4", (3, 8), bytes(range(12)))
    assert array_shape(back.dtype, back.shape) == (3, 4)


class ByDLPackAlone:
    def __init__(self, held: Any) -> None:
        self.held = held

    def __dlpack__(self, **options: Any) -> object:
        return self.held.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.held.__dlpack_device__()


def test_memory_comes_in_by_protocol(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float64).reshape(3, 4)
    tensors = {
        "bytes": b"abc",
        "memoryview": memoryview(values),
        "array": array.array("i", [1, 2, 3]),
        "buffer": on("sim:0", b"buffer"),
        "dlpack": ByDLPackAlone(values.copy()),
        "dlpack transposed": ByDLPackAlone(values.copy().T),
    }
    nobounce.save(tensors, tmp_path / "m")
    back = loaded(tmp_path / "m")
    assert back["bytes"].tobytes() == b"abc"
    assert back["array"].tolist() == [1, 2, 3]
    assert back["buffer"].tobytes() == b"buffer"
    for name in ("memoryview", "dlpack"):
        assert np.array_equal(back[name], values)
    assert np.array_equal(back["dlpack transposed"], values.T)


def test_data_begins_on_a_page_and_no_element_is_misaligned(tmp_path: Path) -> None:
    kinds = [np.uint8, np.float64, np.complex64, np.int16, np.float32, np.int64]
    tensors = {f"t{i}": np.ones(i * 7 + 1, kinds[i % len(kinds)]) for i in range(60)}
    tensors |= {
        "odd": np.ones(13, np.uint8),
        "page": np.ones(4096, np.uint8),
        "pages": np.ones((3, 1024), np.float32),
    }
    nobounce.save(tensors, tmp_path / "m")
    header = read_header_of(tmp_path / "m")
    assert header.data_offset % 4096 == 0
    for info in header.tensors.values():
        assert (header.data_offset + info.start) % (info.dtype.bits // 8) == 0
    assert [n for n, i in header.tensors.items() if i.nbytes % 4096 == 0] == list(header.tensors)[:2]


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_aligned_tensors_are_written_direct_from_where_they_are(tmp_path: Path, device: str) -> None:
    need("o_direct")
    data = os.urandom(5 * MIB)
    tensors = {name: nobounce.Tensor(on(device, data), (5, MIB), "U8") for name in "abcdefg"}
    receipt = nobounce.save(tensors, tmp_path / "m")
    assert receipt.fastpath_bytes == receipt.nbytes
    assert all(t.tobytes() == data for t in nobounce.load(tmp_path / "m", device="cpu").values())


def test_tensors_of_several_devices_share_a_file(tmp_path: Path) -> None:
    sizes = (1, 4096, 3 * MIB + 7, 100, 9 * MIB)
    tensors = {
        f"{device}-{n}": on(device, os.urandom(n)) for n in sizes for device in ("cpu", "sim:0", "sim:1")
    }
    receipt = nobounce.save(tensors, tmp_path / "m")
    back = nobounce.load(tmp_path / "m", device="cpu")
    assert {n: t.tobytes() for n, t in back.items()} == {n: bytes(t.numpy()) for n, t in tensors.items()}
    assert set(receipt.device.split(", ")) == {"cpu", "sim:0", "sim:1"}


def test_an_empty_mapping_is_an_empty_model(tmp_path: Path) -> None:
    nobounce.save({}, tmp_path / "m", metadata={"a": "b"})
    back = nobounce.load(tmp_path / "m", device="cpu")
    assert (dict(back), back.metadata) == ({}, {"a": "b"})


WIDE = np.zeros((4, 6), np.float32)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"__metadata__": WIDE}, "__metadata__"),
        ({"a": WIDE, "b": WIDE}, "'a' and tensor 'b' share memory"),
        ({"a": WIDE[:, :3], "b": WIDE[2:]}, "'a' and tensor 'b' share memory"),
        ({"a": WIDE.T, "b": WIDE[3, 5:]}, "share memory"),
        ({"w": np.zeros(3, np.complex128)}, "'w': safetensors has no element type for numpy's complex128"),
        ({"w": np.zeros(3, [("a", "f4")])}, "'w'"),
        ({"w": np.array(["text"])}, "'w'"),
        ({"w": np.array([object()])}, "'w'"),
        ({"w": np.ma.masked_array([1, 2], [0, 1])}, "'w': a masked array"),
        ({"\ud800": WIDE}, "surrogate"),
    ],
)
def test_what_a_file_cannot_hold_is_refused_by_name(
    tmp_path: Path, tensors: dict[str, Any], words: str
) -> None:
    with pytest.raises(ArgumentError, match=words):
        nobounce.save(tensors, tmp_path / "m")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("tensors", "metadata", "words"),
    [
        ({1: WIDE}, None, "name of a tensor is a str"),
        ({"w": [1.0, 2.0]}, None, "'w': list is no memory"),
        ({"w": 1.5}, None, "'w': float is no memory"),
        ([WIDE], None, "mapping"),
        ({"w": WIDE}, {"step": 3}, "the value of 'step' is int"),
        ({"w": WIDE}, {3: "step"}, "a key is int"),
        ({"w": WIDE}, ["a"], "metadata is a mapping"),
    ],
)
def test_wrong_types_are_named(tmp_path: Path, tensors: Any, metadata: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        nobounce.save(tensors, tmp_path / "m", metadata=metadata)
    assert os.listdir(tmp_path) == []


def test_torch_tensors_without_memory_are_refused_by_name(tmp_path: Path) -> None:
    need("torch")
    import torch

    for value in (
        torch.empty(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.ones(2, dtype=torch.complex128),
    ):
        with pytest.raises(ArgumentError, match="'w'"):
            nobounce.save({"w": value}, tmp_path / "m")
    tied = torch.ones(3, 3)
    with pytest.raises(ArgumentError, match="'head' and tensor 'tail' share memory"):
        nobounce.save({"head": tied, "tail": tied.t()}, tmp_path / "m")


def test_columns_that_lie_between_each_other_share_nothing(tmp_path: Path) -> None:
    fused = np.arange(60, dtype=np.float32).reshape(5, 12)
    nobounce.save({"q": fused[:, :4], "k": fused[:, 4:8], "v": fused[:, 8:]}, tmp_path / "m")
    back = loaded(tmp_path / "m")
    assert np.array_equal(np.concatenate([back["q"], back["k"], back["v"]], axis=1), fused)


def test_a_header_that_no_reader_opens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="could not be read"):
        nobounce.save({"w": WIDE}, tmp_path / "m", metadata={"k": "x" * (17 * MIB)})
    assert os.listdir(tmp_path) == []


def test_a_replaced_file_keeps_its_mode_and_what_was_loaded_from_it_its_values(tmp_path: Path) -> None:
    path = tmp_path / "m"
    nobounce.save({"w": np.arange(5000)}, path)
    path.chmod(0o640)
    model = nobounce.load(path, device="cpu", framework="numpy")
    nobounce.save({"w": model["w"], "x": np.ones(3)}, path)
    nobounce.save({"w": model["w"] + 1}, path, fsync=False)
    assert model["w"].tolist() == list(range(5000))
    assert loaded(path)["w"].tolist() == list(range(1, 5001))
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path, device: str, code: int) -> None:
    path = tmp_path / "m"
    nobounce.save({"old": np.arange(9)}, path)
    tensors = {n: on(device, os.urandom(3 * MIB)) for n in "abcdefghijkl"}
    with (
        faults.inject(op="pwrite", error=code),
        faults.inject(op="write", error=code, after=1),
        pytest.raises(FileError if code == errno.ENOSPC else TransferError) as caught,
    ):
        nobounce.save({**tensors, "odd": on(device, bytes(5))}, path)
    assert caught.value.errno == code
    assert caught.value.filename == str(path)
    if code == errno.ENOSPC:
        assert "Free some space" in str(caught.value)
    assert list(loaded(path)) == ["old"]
    assert os.listdir(tmp_path) == ["m"]
    nobounce.save(tensors, path)
    assert loaded(path).keys() == tensors.keys()


@pytest.mark.parametrize("later", [False, True])
def test_bytes_that_a_failed_read_left_undefined_are_not_saved(tmp_path: Path, later: bool) -> None:
    (tmp_path / "data").write_bytes(bytes(MIB))
    device = nobounce.Device("cpu")
    with (
        nobounce.open(tmp_path / "data") as file,
        device.allocate(MIB // 2) as buffer,
        device.create_stream() as stream,
        device.create_stream() as other,
    ):
        half = {"nbytes": MIB // 4, "require": "fallback"}
        with faults.inject(op="pread", error=errno.EIO):
            read = file.read_async(buffer, stream=stream, **half)
            while not read.done():
                device._runtime.scheduler.sleep(0.001)
        if later:  # what the buffer was last used in went well
            file.read_async(buffer, stream=other, buffer_offset=MIB // 4, **half).result()
        with pytest.raises(TransferError, match="data: .* failed"):
            nobounce.save({"w": buffer}, tmp_path / "m")
        assert read.exception() is not None
    assert os.listdir(tmp_path) == ["data"]


def test_a_folder_a_missing_one_and_a_device_are_no_target(tmp_path: Path) -> None:
    with pytest.raises(FileIsDirectoryError, match="is a folder"):
        nobounce.save({"w": WIDE}, tmp_path)
    with pytest.raises(FileMissingError, match="missing"):
        nobounce.save({"w": WIDE}, tmp_path / "missing" / "m")
    with pytest.raises(ArgumentError, match="no regular file"):
        nobounce.save({"w": WIDE}, "/dev/null")
    with pytest.raises(ArgumentError, match="path"):
        nobounce.save({"w": WIDE}, "a\0b")


def test_progress_tells_every_byte_of_the_tensors(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    tensors = {n: on("sim:0", bytes(5 * MIB)) for n in "abc"}
    nobounce.save(tensors, tmp_path / "m", progress=lambda backend, nbytes: told.append((backend, nbytes)))
    assert sum(nbytes for _, nbytes in told) == 15 * MIB


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["u1", "<i2", ">i4", "<f8", ">c8"]), st.lists(st.integers(0, 9), max_size=3)
        ),
        max_size=12,
    ),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)
def test_any_set_of_tensors_is_read_back_by_safetensors(
    tmp_path_factory: pytest.TempPathFactory,
    kinds: list[tuple[str, list[int]]],
    metadata: dict[str, str],
) -> None:
    need("safetensors")
    import safetensors.numpy

    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    source = np.random.default_rng(3)
    tensors = {f"n{i}": source.integers(0, 99, shape).astype(kind).T for i, (kind, shape) in enumerate(kinds)}
    nobounce.save(tensors, path, metadata=metadata)
    back = safetensors.numpy.load_file(path)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].shape == tensor.shape
        assert np.array_equal(back[name], tensor)
    raw = path.read_bytes()
    assert (8 + struct.unpack("<Q", raw[:8])[0]) % 4096 == 0
