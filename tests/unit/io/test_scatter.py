"""Blocks that lie apart on the device: a kernel makes the copies out of a slot, where the device has one."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nobounce
from nobounce.errors import DeviceError, RuntimeStatus
from nobounce.io.batch import relays
from nobounce.io.movers import scatter

PAGE = 4096
COUNT = 3000
DATA = np.random.default_rng(12).integers(0, 256, COUNT * PAGE, np.uint8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scatter") / "data.bin"
    path.write_bytes(DATA.tobytes())
    return path


class Kernel:
    """What a device's kernel does, by copies of the runtime in its stream."""

    def __init__(self, device: nobounce.Device) -> None:
        self.runtime = device._runtime
        self.launches: list[int] = []

    def launch(self, table: int, rows: int, most_nbytes: int, stream: int) -> None:
        self.launches.append(rows)
        words = (ctypes.c_uint64 * (rows * scatter.ROW_WORDS)).from_address(table)
        listed = np.frombuffer(words, np.int64).reshape(rows, scatter.ROW_WORDS).tolist()
        assert max(nbytes for _, _, nbytes in listed) == most_nbytes
        for to, of, nbytes in listed:
            self.runtime.copy_async(to, of, nbytes, stream)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel(nobounce.Device("sim:0"))
    monkeypatch.setattr(relays, "scatter_of", lambda *_: made)
    return made


def places(sizes: Any, seed: int = 1) -> Any:
    """Where blocks of these sizes lie, in any order and with gaps."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(sizes))
    to = np.zeros(len(sizes), np.int64)
    to[order] = np.cumsum(sizes[order] + 64) - sizes[order] - 64
    return to


@pytest.mark.parametrize("sizes", [np.full(2500, PAGE), np.arange(1, 900), np.full(40, 200_000)])
def test_every_block_lands_where_it_belongs(path: Path, kernel: Kernel, sizes: Any) -> None:
    path.read_bytes()
    to, rng = places(sizes), np.random.default_rng(2)
    at = rng.integers(0, len(DATA) - int(sizes.max()), len(sizes))
    room = int((to + sizes).max())
    with nobounce.open(path) as f, nobounce.Device("sim:0").allocate(room) as buffer:
        buffer.fill(0x5A, stream=None)
        f.read_many(buffer, file_offsets=at, nbytes=sizes, buffer_offsets=to)
        got = buffer.numpy()
    wanted = np.full(room, 0x5A, np.uint8)
    for a, n, t in zip(at.tolist(), sizes.tolist(), to.tolist(), strict=True):
        wanted[t : t + n] = DATA[a : a + n]
    assert (got == wanted).all()
    assert sum(kernel.launches) == len(sizes)
    assert len(kernel.launches) < len(sizes) / 5


def test_what_lies_packed_is_one_copy_and_needs_no_kernel(path: Path, kernel: Kernel) -> None:
    path.read_bytes()
    with nobounce.open(path) as f, nobounce.Device("sim:0").allocate(len(DATA)) as buffer:
        f.read_many(buffer, file_offsets=np.arange(COUNT) * PAGE, nbytes=PAGE)
        assert (buffer.numpy() == DATA).all()
    assert not kernel.launches


def test_a_launch_that_fails_is_an_error_of_its_blocks(path: Path, kernel: Kernel) -> None:
    def broken(*_: Any) -> None:
        raise DeviceError("launch", RuntimeStatus.LaunchFailure)

    path.read_bytes()
    sizes = np.full(64, PAGE)
    kernel.launch = broken  # type: ignore[method-assign]
    with (
        nobounce.open(path) as f,
        nobounce.Device("sim:0").allocate(64 * (PAGE + 64)) as buffer,
        pytest.raises(nobounce.TransferError, match="launch"),
    ):
        f.read_many(buffer, file_offsets=np.arange(64) * PAGE, nbytes=sizes, buffer_offsets=places(sizes))


def test_a_device_without_modules_has_its_blocks_copied(path: Path) -> None:
    path.read_bytes()
    device, sizes = nobounce.Device("sim:0"), np.full(64, PAGE)
    assert device._runtime.modules is None
    to = places(sizes)
    with nobounce.open(path) as f, device.allocate(64 * (PAGE + 64)) as buffer:
        f.read_many(buffer, file_offsets=np.arange(64) * PAGE, nbytes=sizes, buffer_offsets=to)
        got = buffer.numpy()
        assert all(
            (got[t : t + PAGE] == DATA[n * PAGE : (n + 1) * PAGE]).all() for n, t in enumerate(to.tolist())
        )
