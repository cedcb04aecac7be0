"""Tensors of a file in several allocations, as torch's memory comes, and several files under way at once."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nobounce
from capabilities import need
from doubles.hip_bindings import HipDouble
from nobounce.device import Device
from nobounce.errors import OutOfMemoryError, TransferError
from nobounce.formats import loading, partial
from nobounce.formats import model as model_module
from nobounce.formats.fresh import FreshRead
from nobounce.formats.header import read_header_of
from nobounce.formats.loading import groups
from nobounce.formats.opened import open_files
from nobounce.formats.placement import place
from nobounce.runtimes import rawio
from nobounce.runtimes.gpu import hip

KIB = 1 << 10


class Pool:
    """Stands for torch's memory: takes what it is asked for from the device, and counts."""

    def __init__(self, device: Device) -> None:
        self.device, self.taken, self.settled = device, list[int](), 0
        self.alive: list[weakref.ref[Any]] = []

    def take(self, nbytes: int) -> nobounce.Buffer:
        self.taken.append(nbytes)
        buffer = self.device.allocate(nbytes)
        self.alive.append(weakref.ref(buffer.allocation))
        return buffer

    def settle(self) -> None:
        self.settled += 1


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Pool]]:
    made: list[Pool] = []

    def torch_memory(device: Device) -> Pool:
        made.append(Pool(device))
        return made[-1]

    monkeypatch.setattr(model_module, "torch_memory", torch_memory)
    monkeypatch.setattr(loading, "GROUP_NBYTES", 64 * KIB)
    monkeypatch.setattr(partial, "GROUP_NBYTES", 64 * KIB)
    return made


def model(path: Path, sizes: list[int], seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    need("safetensors")
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    tensors = {f"{seed}.{n:03}": rng.integers(0, 256, size, np.uint8) for n, size in enumerate(sizes)}
    save_file(tensors, path)
    return tensors


SIZES = [10 * KIB, 0, 50 * KIB, 7, 64 * KIB, 300 * KIB + 1, 3, 5, 63 * KIB, 2 * KIB, 0]


def device_of(name: str) -> Device:
    return Device._of(hip.load(HipDouble(devices=1)), 0) if name == "hip double" else Device(name)


@pytest.mark.parametrize("cache", ["use", "avoid", "auto"])
@pytest.mark.parametrize("name", ["cpu", "sim:0", "hip double"])
def test_every_byte_comes_into_its_group(tmp_path: Path, pools: list[Pool], name: str, cache: Any) -> None:
    need("torch")
    path = tmp_path / "m.safetensors"
    wanted = model(path, SIZES * 3)
    device = device_of(name)
    if name == "hip double":  # torch does not reach the double's memory: what is raw does
        framework: Any = None
        pools.append(Pool(device))
        how = loading.How(None, False, "auto", cache, 1, None, grouped=True)
        _, opened = open_files(path)
        got: Any = nobounce.Model()
        receipts: list[nobounce.Receipt] = []
        model_module._run(got, receipts, [loading.Loading(opened[0], pools[0], device, how)])
        found = {k: np.frombuffer(t.tobytes(), np.uint8) for k, t in got.items()}
        receipt = receipts[0]
    else:
        framework = "torch"
        got = nobounce.load(path, device=device, framework=framework, cache=cache)
        found = {k: t.numpy() for k, t in got.items()}
        receipt = got.receipt
    assert list(found) == list(wanted)
    for key, array in wanted.items():
        assert np.array_equal(found[key], array), key
    (pool,) = pools
    assert len(pool.taken) > 6
    assert pool.settled == 1
    assert max(pool.taken) < 310 * KIB
    assert receipt.nbytes >= path.stat().st_size - 8 * KIB
    assert receipt.requested == receipt.nbytes
    position = receipt.segments[0].file_offset
    for s in receipt.segments:  # one read brings each byte once; direct ones begin and end at whole blocks
        assert s.file_offset <= position
        position = s.file_offset + s.nbytes


def test_one_read_spans_all_groups_and_its_receipt_is_of_one_memory(
    tmp_path: Path, pools: list[Pool]
) -> None:
    need("torch")
    path = tmp_path / "m.safetensors"
    model(path, SIZES)
    got = nobounce.load(path, device="cpu", framework="torch", cache="use")
    (segment,) = got.receipt.segments
    assert (segment.buffer_offset, segment.nbytes) == (0, path.stat().st_size)
    assert got.receipt.requested == path.stat().st_size


def test_one_tensor_keeps_its_group_alone(tmp_path: Path, pools: list[Pool]) -> None:
    need("torch")
    path = tmp_path / "m.safetensors"
    model(path, SIZES)
    got = nobounce.load(path, device="cpu", framework="torch", cache="use")
    kept = got["0.004"]
    del got
    gc.collect()
    assert [ref() is not None for ref in pools[0].alive].count(True) == 1
    assert kept.numel() == 64 * KIB


def test_groups_end_at_tensors_and_larger_tensors_are_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    model(path, [30, 30, 200, 10, 90, 1, 100, 0])
    header = read_header_of(path)
    spot = place(header)
    found = groups(header, spot, 4096, 100)
    sizes = [i.nbytes for i in header.tensors.values()]
    spans = [(g.start, g.end) for g in found]
    assert spans[0][0] == 0
    assert spans[-1][1] == header.data_nbytes
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    for g in found:
        assert g.end - g.start <= 100 or g.end - g.start in sizes
        assert (g.file_offset % 4096, g.nbytes % 4096) == (0, 0)
        assert g.file_offset + g.lead == header.data_offset + g.start
    assert len(groups(header, spot, 4096, 1 << 30)) == 1


def test_a_failed_read_gives_all_groups_back(
    tmp_path: Path, pools: list[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    need("torch")
    path = tmp_path / "m.safetensors"
    model(path, SIZES)

    def broken(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(rawio, "read_plain", broken)
    with pytest.raises(TransferError):
        nobounce.load(path, device="cpu", framework="torch", cache="use")
    gc.collect()
    assert [ref() for ref in pools[0].alive] == [None] * len(pools[0].taken)


def test_memory_that_runs_out_gives_back_what_was_taken(tmp_path: Path, pools: list[Pool]) -> None:
    need("torch")
    path = tmp_path / "m.safetensors"
    model(path, SIZES)
    take = Pool.take

    def short(self: Pool, nbytes: int) -> nobounce.Buffer:
        if len(self.taken) == 2:
            raise OutOfMemoryError("none left")
        return take(self, nbytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pool, "take", short)
        with pytest.raises(OutOfMemoryError, match="none left"):
            nobounce.load(path, device="cpu", framework="torch")
    gc.collect()
    assert [ref() for ref in pools[0].alive] == [None, None]


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_the_next_file_begins_before_the_last_one_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    wanted: dict[str, Any] = {}
    paths = [tmp_path / f"{n}.safetensors" for n in range(4)]
    for n, path in enumerate(paths):
        wanted |= model(path, [2 << 20, 5], n)
    order: list[str] = []

    class Reading(FreshRead):
        def begin(self) -> None:
            order.append(f"begin {Path(self._file.name).stem}")
            super().begin()

        def finish(self, meanwhile: Any) -> Any:
            receipt = super().finish(meanwhile)
            order.append(f"end {Path(self._file.name).stem}")
            return receipt

    monkeypatch.setattr(loading, "FreshRead", Reading)
    got = nobounce.load(paths, device=device, framework="numpy")
    assert list(got) == list(wanted)
    assert all(np.array_equal(got[k], v) for k, v in wanted.items())
    assert order == [
        *("begin 0", "begin 1", "end 0", "begin 2", "end 1", "begin 3", "end 2", "end 3"),
    ]
    assert [Path(r.filename).stem for r in got.receipts] == ["0", "1", "2", "3"]


def test_where_a_later_file_cannot_go_direct_nothing_of_the_earlier_ones_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"{n}.safetensors" for n in range(3)]
    for n, path in enumerate(paths):
        model(path, [3 << 20], n)
    ends: list[str] = []

    class Reading(FreshRead):
        def begin(self) -> None:
            if self._file.name.endswith("1.safetensors"):
                raise OSError("refused")
            super().begin()

        def abandon(self) -> None:
            super().abandon()
            ends.append(Path(self._file.name).stem)

    monkeypatch.setattr(loading, "FreshRead", Reading)
    with pytest.raises(OSError, match="refused"):
        nobounce.load(paths, device="cpu")
    assert ends == ["0", "1"]
    monkeypatch.undo()
    assert len(nobounce.load(paths, device="cpu")) == 3


@pytest.mark.parametrize("cache", ["use", "avoid"])
def test_chosen_tensors_lie_in_groups_too(tmp_path: Path, pools: list[Pool], cache: Any) -> None:
    need("torch")
    path = tmp_path / "m.safetensors"
    wanted = model(path, SIZES * 3)
    names = [n for n in wanted if int(n[-1]) % 2 or n.endswith("5")]
    got = nobounce.load(path, device="cpu", framework="torch", names=names, cache=cache)
    assert list(got) == [n for n in wanted if n in names]
    assert all(np.array_equal(got[n].numpy(), wanted[n]) for n in names)
    assert len(pools[-1].taken) > 3
    kept = got[names[-2]]
    del got
    gc.collect()
    assert [ref() is not None for ref in pools[-1].alive].count(True) == 1
    assert kept.numel() == wanted[names[-2]].size
