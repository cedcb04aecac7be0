"""Writes of a batch from a device's memory: gathered into bounce slots, and written past the page cache side by side."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nobounce
from capabilities import need
from nobounce import config
from nobounce.errors import DeviceError, RuntimeStatus
from nobounce.facts.pagecache import counted
from nobounce.io.batch import relays, threads
from nobounce.io.movers import gather
from nobounce.testing import faults

PAGE = 4096
COUNT = 700
DATA = np.random.default_rng(21).integers(0, 256, COUNT * PAGE, np.uint8)


@pytest.fixture(params=["ring", "polled", "calls"], autouse=True)
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "calls":
        monkeypatch.setattr("nobounce.io.batch.gather.blocks", lambda: gather.AtOnce(gather.CallBlocks()))
    else:
        need("io_uring")
    if request.param == "polled":
        config.override(config.Settings(relay="polled"))
    yield request.param
    config.override(None)


@pytest.fixture
def buffer() -> Any:
    with (
        nobounce.Device("sim:0").allocate(len(DATA)) as buffer,
        nobounce.Device("cpu").allocate(len(DATA)) as host,
    ):
        host.numpy()[:] = DATA
        buffer.copy_from(host, stream=None)
        buffer.device.sync()
        yield buffer


@pytest.fixture
def file(tmp_path: Path) -> Any:
    with nobounce.open(tmp_path / "out.bin", "w+") as f:
        f.truncate(COUNT * PAGE)
        yield f


@pytest.fixture
def windows_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests each window has written."""
    seen: list[int] = []
    plain = relays.WriteRelay.move

    def noted(self: Any, window: Any) -> Any:
        seen.append(len(window.nbytes))
        return plain(self, window)

    monkeypatch.setattr(relays.WriteRelay, "move", noted)
    return seen


def content(file: nobounce.File) -> Any:
    return np.fromfile(file.name, np.uint8)


@pytest.mark.parametrize("packed", [True, False])
def test_every_block_lands_where_it_belongs_and_leaves_no_page(
    file: nobounce.File, buffer: nobounce.Buffer, windows_of: list[int], packed: bool
) -> None:
    order = np.random.default_rng(1).permutation(COUNT)
    of = np.arange(COUNT) if packed else np.random.default_rng(2).permutation(COUNT)
    with nobounce.Batch(capacity=COUNT) as batch:
        batch.write(
            file, buffer, file_offsets=order * PAGE, nbytes=PAGE, buffer_offsets=of * PAGE, require="fallback"
        )
        result = batch.wait()
    assert result.ok
    assert result.backends == ["fallback"] * COUNT
    assert sum(windows_of) == COUNT
    assert len(windows_of) < COUNT / 20
    assert counted(file.fileno(), 0, COUNT * PAGE).resident_bytes == 0
    assert batch.receipt.nbytes == COUNT * PAGE
    assert batch.receipt.host_traffic_bytes == 2 * COUNT * PAGE
    wanted = np.zeros((COUNT, PAGE), np.uint8)
    wanted[order] = DATA.reshape(COUNT, PAGE)[of]
    assert (content(file) == wanted.reshape(-1)).all()


def test_unaligned_ones_and_those_of_the_page_cache_go_by_threads_and_spoil_no_neighbour(
    file: nobounce.File, buffer: nobounce.Buffer, windows_of: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that share a page with others are written through it, when the direct ones have ended."""
    order: list[str] = []

    def noted(plain: Any, what: str) -> Any:
        def call(*given: Any) -> Any:
            order.append(what)
            return plain(*given)

        return call

    monkeypatch.setattr(relays.Reading, "finish", noted(relays.Reading.finish, "direct"))
    monkeypatch.setattr(threads, "_host", noted(threads._host, "page cache"))
    sizes = np.where(np.arange(COUNT) % 3 == 0, PAGE, 1000)
    at = np.cumsum(np.where(sizes == PAGE, PAGE, PAGE)) - PAGE
    with nobounce.Batch(capacity=2 * COUNT) as batch:
        batch.write(file, buffer, file_offsets=at, nbytes=sizes, buffer_offsets=at, require="fallback")
        batch.write(
            file,
            buffer,
            file_offsets=at[sizes == 1000] + 1000,
            nbytes=PAGE - 1000,
            buffer_offsets=at[sizes == 1000] + 1000,
            require="fallback",
        )
        assert batch.wait().ok
    assert sum(windows_of) == int((sizes == PAGE).sum())
    assert (content(file) == DATA).all()
    assert set(order) == {"direct", "page cache"}
    assert order == sorted(order)


def ends_with(monkeypatch: pytest.MonkeyPatch, where: Any, result: int) -> None:
    """Have the writes at offsets for which `where` is true end with this result."""
    plain = relays.Reading.finish

    def odd(self: Any) -> Any:
        results = plain(self)
        results[where(self.window.reads[:, 1])] = result
        return results

    monkeypatch.setattr(relays.Reading, "finish", odd)


def test_one_bad_block_of_many_fails_alone(
    file: nobounce.File, buffer: nobounce.Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_with(monkeypatch, lambda at: at == 123 * PAGE, -errno.ENOSPC)
    with nobounce.Batch(capacity=COUNT) as batch:
        batch.write(file, buffer, file_offsets=np.arange(COUNT) * PAGE, nbytes=PAGE, require="fallback")
        result = batch.wait()
    assert list(result.errors) == [123]
    error: Any = result.errors[123]
    assert (error.errno, error.file_offset, error.nbytes) == (errno.ENOSPC, 123 * PAGE, PAGE)
    assert "full" in str(error)


@pytest.mark.parametrize("result", [-errno.EINVAL, 512])
def test_what_is_not_written_whole_a_thread_writes(
    file: nobounce.File, buffer: nobounce.Buffer, monkeypatch: pytest.MonkeyPatch, result: int
) -> None:
    ends_with(monkeypatch, lambda at: at % (7 * PAGE) == 0, result)
    with nobounce.Batch(capacity=COUNT) as batch:
        batch.write(file, buffer, file_offsets=np.arange(COUNT) * PAGE, nbytes=PAGE, require="fallback")
        assert batch.wait().ok
    assert batch.receipt.nbytes == COUNT * PAGE
    assert (content(file) == DATA).all()


def test_a_write_that_stops_short_at_the_end_of_the_file_is_not_taken_for_its_end(
    tmp_path: Path, buffer: nobounce.Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plain = tmp_path / "short.bin", relays.Reading.finish

    def short(self: Any) -> Any:
        results = plain(self)
        os.truncate(path, 512)
        results[:] = 512
        return results

    monkeypatch.setattr(relays.Reading, "finish", short)
    with nobounce.open(path, "w+") as f, nobounce.Batch() as batch:
        batch.write(f, buffer, file_offsets=0, nbytes=2 * PAGE, require="fallback")
        result = batch.wait()
    assert result.ok
    assert result.nbytes.tolist() == [2 * PAGE]
    assert path.read_bytes() == DATA[: 2 * PAGE].tobytes()


def test_a_device_that_refuses_a_copy_fails_its_blocks_and_writes_none_of_them(
    file: nobounce.File, buffer: nobounce.Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise DeviceError("copy", RuntimeStatus.InvalidValue)

    with monkeypatch.context() as patch:
        patch.setattr(relays.Slots, "queue", broken)
        with nobounce.Batch(capacity=COUNT) as batch:
            batch.write(file, buffer, file_offsets=np.arange(COUNT) * PAGE, nbytes=PAGE, require="fallback")
            result = batch.wait()
    assert len(result.errors) == COUNT
    assert all(isinstance(e, nobounce.TransferError) and e.call == "copy" for e in result.errors.values())
    assert not content(file).any()


def test_in_stream_order_it_writes_what_the_stream_has_brought(
    file: nobounce.File, buffer: nobounce.Buffer
) -> None:
    with buffer.device.create_stream() as stream:
        buffer.fill(0x33, stream=stream)
        with nobounce.Batch(capacity=COUNT) as batch:
            batch.write(file, buffer, file_offsets=np.arange(COUNT) * PAGE, nbytes=PAGE, require="fallback")
            transfer = batch.submit(stream=stream)
        buffer.fill(0x44, stream=stream)
        assert transfer.result(30).ok
    assert (content(file) == 0x33).all()


def test_injected_faults_still_reach_writes(file: nobounce.File, buffer: nobounce.Buffer) -> None:
    with faults.inject(op="pwrite", error=errno.EIO), nobounce.Batch() as batch:
        batch.write(file, buffer, file_offsets=0, nbytes=PAGE, require="fallback")
        result = batch.wait()
    assert [getattr(e, "errno", None) for e in result.errors.values()] == [errno.EIO]
