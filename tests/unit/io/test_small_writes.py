"""Small writes like an earlier one: they take its way, on their caller's thread, and tell the same of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nobounce
from nobounce.io import kept, oncaller
from nobounce.testing import faults

PAGE = 4096
BLOCK = np.random.default_rng(4).integers(0, 256, 256 << 10, np.uint8)


@pytest.fixture(params=["cpu", "sim:0"])
def device(request: pytest.FixtureRequest) -> nobounce.Device:
    return nobounce.Device(str(request.param))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "out.bin"
    path.write_bytes(bytes(1 << 20))
    return path


@pytest.fixture
def by_plan(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of writes that went as an earlier one did."""
    seen: list[int] = []
    plain = oncaller.write_now

    def noted(*given: Any, **more: Any) -> nobounce.Receipt | None:
        receipt = plain(*given, **more)
        if receipt is not None:
            seen.append(receipt.nbytes)
        return receipt

    monkeypatch.setattr(oncaller, "write_now", noted)
    return seen


TIMES = (
    "seconds",
    "queued_seconds",
    "bytes_per_second_of_operation",
    "latency",
    "microseconds",
    "bounce_pinned_bytes",
)


def counted(found: Any) -> Any:
    """Statistics without what is a time."""
    if isinstance(found, dict):
        return {k: counted(v) for k, v in found.items() if k not in TIMES}
    return [counted(v) for v in found] if isinstance(found, list) else found


def filled(device: nobounce.Device) -> nobounce.Buffer:
    buffer = device.allocate(len(BLOCK))
    with nobounce.Device("cpu").allocate(len(BLOCK)) as host:
        host.numpy()[:] = BLOCK
        buffer.copy_from(host, stream=None)
    return buffer


@pytest.mark.parametrize("way", [{"cache": "use"}, {"require": "fallback"}, {"cache": "avoid"}])
@pytest.mark.parametrize("nbytes", [PAGE, 64 << 10, 256 << 10])
def test_the_bytes_and_the_receipt_are_those_of_the_whole_way(
    path: Path, device: nobounce.Device, by_plan: list[int], way: Any, nbytes: int
) -> None:
    if (device.name, way) == ("sim:0", {"cache": "avoid"}) or (device.name, way) == (
        "cpu",
        {"require": "fallback"},
    ):
        expected = []  # a vendor's direct path is asked each time; pages would have to be dropped behind the write
    else:
        expected = [nbytes]
    with nobounce.open(path, "r+") as f, filled(device) as buffer:
        first = f.write(buffer, nbytes=nbytes, file_offset=0, **way)
        assert by_plan == []
        second = f.write(buffer, nbytes=nbytes, file_offset=512 << 10, fsync=True, **way)
    assert by_plan == expected
    written = path.read_bytes()
    for at in (0, 512 << 10):
        assert written[at : at + nbytes] == BLOCK[:nbytes].tobytes()
    assert second.synced
    assert not first.synced
    for name in (
        "op",
        "filename",
        "device",
        "requested",
        "nbytes",
        "reasons",
        "evidence",
        "host_traffic_bytes",
    ):
        assert getattr(second, name) == getattr(first, name), name


@pytest.mark.parametrize(("file_offset", "nbytes"), [(512, PAGE), (PAGE, 1000), (1 << 20, 100)])
def test_what_is_not_aligned_is_left_to_the_whole_way(
    path: Path, device: nobounce.Device, by_plan: list[int], file_offset: int, nbytes: int
) -> None:
    with nobounce.open(path, "r+") as f, filled(device) as buffer:
        f.write(buffer, nbytes=PAGE)
        f.write(buffer, nbytes=nbytes, file_offset=file_offset)
    assert not by_plan
    assert path.read_bytes()[file_offset : file_offset + nbytes] == BLOCK[:nbytes].tobytes()


def test_it_is_counted_as_the_whole_way_is(
    path: Path, device: nobounce.Device, by_plan: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def added() -> Any:
        before = nobounce.stats()
        for n in range(5):
            f.write(buffer, nbytes=8 * PAGE, file_offset=8 * PAGE * n, cache="use")
        return counted((nobounce.stats() - before).to_dict())

    with nobounce.open(path, "r+") as f, filled(device) as buffer:
        f.write(buffer, nbytes=PAGE, cache="use")
        quickly = added()
        assert len(by_plan) == 5
        monkeypatch.setattr(kept, "find", lambda *_, **__: None)
        assert added() == quickly
    assert len(by_plan) == 5


def test_a_disk_that_cannot_keep_the_data_is_reported_once_asked(
    path: Path, device: nobounce.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of a lost page once; to write again and ask again would hide it."""
    asked: list[int] = []

    def lost(fd: int) -> None:
        asked.append(fd)
        if len(asked) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with nobounce.open(path, "r+") as f, filled(device) as buffer:
        f.write(buffer, nbytes=PAGE)
        monkeypatch.setattr(os, "fdatasync", lost)
        with pytest.raises(nobounce.TransferError) as caught:
            f.write(buffer, nbytes=PAGE, file_offset=PAGE, fsync=True)
        monkeypatch.undo()
    assert len(asked) == 1
    error = caught.value
    assert (error.errno, error.call, error.file_offset, error.nbytes) == (errno.EIO, "fdatasync", PAGE, PAGE)
    assert error.receipt is not None
    assert error.receipt.nbytes == PAGE
    assert not error.receipt.synced


def test_a_write_that_fails_or_stops_short_is_done_by_the_whole_way(
    path: Path, device: nobounce.Device, by_plan: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with nobounce.open(path, "r+") as f, filled(device) as buffer:
        f.write(buffer, nbytes=PAGE)
        plain = oncaller.write_plain
        with monkeypatch.context() as patch:
            patch.setattr(
                oncaller, "write_plain", lambda fd, address, nbytes, at: plain(fd, address, nbytes // 2, at)
            )
            assert f.write(buffer, nbytes=8 * PAGE, file_offset=PAGE).nbytes == 8 * PAGE
        with faults.inject(op="pwrite", error=errno.ENOSPC), pytest.raises(nobounce.TransferError) as caught:
            f.write(buffer, nbytes=PAGE, file_offset=PAGE, cache="use")
    assert caught.value.errno == errno.ENOSPC
    assert not by_plan
    assert path.read_bytes()[PAGE : 9 * PAGE] == BLOCK[: 8 * PAGE].tobytes()
