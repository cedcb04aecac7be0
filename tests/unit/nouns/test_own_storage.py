"""Loaded torch tensors have storages of their own: what copies a tensor's storage copies a tensor, not a file."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

import nobounce
from capabilities import MissingCapability
from nobounce.dtypes import DTYPES
from nobounce.errors import ArgumentError
from nobounce.tensor import Tensor

torch = pytest.importorskip("torch")
KINDS = [d for d in DTYPES.values() if d.bits >= 8 or d.name == "F4"]


def model_file(path: Path, tensors: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    save_file(tensors, path)
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {"small": torch.arange(3, dtype=torch.float32), "big": torch.zeros(1 << 20)}
    return model_file(tmp_path_factory.mktemp("m") / "m.safetensors", tensors)


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_what_copies_a_storage_copies_one_tensor(path: Path, device: str) -> None:
    small = nobounce.load(path, device=device, framework="torch")["small"]
    assert small.untyped_storage().nbytes() == 12
    for write in (lambda f: torch.save(small, f), lambda f: pickle.dump(small, f)):
        into = io.BytesIO()
        write(into)
        assert len(into.getvalue()) < 4096
    twin = copy.deepcopy(small)
    assert (twin.untyped_storage().nbytes(), twin.tolist()) == (12, [0, 1, 2])
    assert torch.load(io.BytesIO(_saved(small)), weights_only=True).tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="resiz"):
        small.resize_(100)
    assert not small._is_view()


def _saved(tensor: Any) -> bytes:
    into = io.BytesIO()
    torch.save(tensor, into)
    return into.getvalue()


def test_views_of_one_storage_where_they_are_asked_for(path: Path) -> None:
    model = nobounce.load(path, device="cpu", framework="torch", shared_storage=True)
    assert model["small"].untyped_storage().data_ptr() == model["big"].untyped_storage().data_ptr()
    assert model["small"].untyped_storage().nbytes() > 4 << 20
    with pytest.raises(ArgumentError, match="shared_storage"):
        nobounce.load(path, device="cpu", framework="numpy", shared_storage=True)  # type: ignore[call-overload]


def filled(device: str, data: bytes) -> nobounce.Buffer:
    buffer = nobounce.Device(device).allocate(len(data))
    stream = buffer.device.default_stream
    buffer.copy_from(data, stream=stream)
    stream.sync()
    return buffer


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_type_at_every_place(kind: Any, shared: bool, device: str) -> None:
    if getattr(torch, kind.torch, None) is None:
        raise MissingCapability(f"missing capability: torch.{kind.torch}")
    data = bytes(range(256))
    if kind.name == "BOOL":
        data = bytes(n % 2 for n in range(256))
    buffer = filled(device, data)
    make = Tensor.maker(buffer, "torch", shared_storage=shared)
    size = max(1, kind.bits // 8)
    pack = 2 if kind.packed else 1
    for offset in (0, size, 3):
        for shape in ((), (4 * pack,), (2, 2 * pack), (1, 1, 2 * pack)):
            if kind.packed and not shape:
                continue
            count = 1
            for dim in shape:
                count *= dim
            made = make(offset, shape, kind, count * kind.bits // 8)
            assert made.dtype == getattr(torch, kind.torch)
            assert made.shape == (*shape[:-1], shape[-1] // pack) if shape else made.shape == ()
            assert made.is_contiguous()
            raw = bytes(made.reshape(-1).view(torch.uint8).tolist()) if offset % size == 0 else None
            if raw is None:  # torch has no views of a tensor that lies at an odd place
                raw = bytes(made.clone().reshape(-1).view(torch.uint8).tolist())
            assert raw == data[offset : offset + len(raw)]
            assert len(raw) == count * kind.bits // 8
    assert make(0, (0, 3 * pack), kind, 0).shape == (0, 3)


def test_memory_lives_as_long_as_one_tensor_of_it() -> None:
    buffer = filled("cpu", bytes([7]) * 4096)
    gone = weakref.ref(buffer.allocation)
    make = Tensor.maker(buffer, "torch")
    one, other = make(0, (8,), DTYPES["U8"], 8), make(8, (8,), DTYPES["U8"], 8)
    storage = other.untyped_storage()
    buffer.close()
    del buffer, make, one, other
    gc.collect()
    assert gone() is not None
    assert storage[0] == 7
    del storage
    gc.collect()
    assert gone() is None


def test_tensors_of_one_place_share_its_memory(tmp_path: Path) -> None:
    tied = torch.arange(4.0)
    path = tmp_path / "tied.pt"
    torch.save({"a": tied, "b": tied, "row": torch.arange(6.0).reshape(2, 3).t()}, path)
    model = nobounce.load(path, device="cpu", framework="torch")
    model["a"][0] = 9
    assert model["b"][0] == 9
    assert model["row"].stride() == (1, 3)
    assert model["row"].untyped_storage().nbytes() == 24
    assert model["row"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_thousand_tensors_leave_no_reference_behind() -> None:
    buffer = nobounce.Device("cpu").allocate(4096)
    make = Tensor.maker(buffer, "torch")
    make(0, (8,), DTYPES["F32"], 32)
    before = sys.getrefcount(buffer.allocation), len(gc.get_objects())
    made = [make(n % 8 * 4, (8,), DTYPES["F32"], 32) for n in range(1000)]
    del made
    gc.collect()
    assert sys.getrefcount(buffer.allocation) <= before[0] + 1
    assert len(gc.get_objects()) < before[1] + 100
