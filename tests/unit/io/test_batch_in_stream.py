"""Requests of a batch in their place in a stream, behind one gate."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nobounce
from nobounce.io.movers import gather
from nobounce.testing import faults

PAGE = 4096
COUNT = 300
PATIENCE = 30.0
DATA = np.random.default_rng(11).integers(0, 256, COUNT * PAGE, np.uint8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("instream") / "data.bin"
    path.write_bytes(DATA.tobytes())
    return path


@pytest.fixture(params=["cpu", "sim:0"])
def device(request: pytest.FixtureRequest) -> nobounce.Device:
    return nobounce.Device(str(request.param))


class Held:
    """A stream that something keeps busy until `go` is set."""

    def __init__(self, device: nobounce.Device, stream: nobounce.Stream) -> None:
        self.go = threading.Event()
        device._runtime.host_call(stream.handle, lambda: self.go.wait(PATIENCE) and None)


@pytest.fixture
def stream(device: nobounce.Device) -> Iterator[nobounce.Stream]:
    with device.create_stream() as stream:
        yield stream


def blocks(seed: int = 0) -> Any:
    return np.random.default_rng(seed).permutation(COUNT) * PAGE


def expected(at: Any) -> Any:
    return DATA.reshape(COUNT, PAGE)[at // PAGE].reshape(-1)


def test_it_begins_when_the_stream_gets_there_and_what_comes_after_sees_every_block(
    path: Path, device: nobounce.Device, stream: nobounce.Stream
) -> None:
    at = blocks()
    with (
        nobounce.open(path) as f,
        device.allocate(COUNT * PAGE) as buffer,
        device.allocate(COUNT * PAGE) as copy,
    ):
        buffer.fill(0x11, stream=None)
        device.sync()
        held = Held(device, stream)
        batch = nobounce.Batch(capacity=COUNT)
        batch.read(f, buffer, file_offsets=at, nbytes=PAGE)
        transfer = batch.submit(stream=stream)
        copy.copy_from(buffer, stream=stream)
        assert not transfer.done()
        assert transfer.receipt is None
        assert batch.outstanding == 0
        held.go.set()
        stream.sync()
        assert transfer.done()
        result = transfer.result(PATIENCE)
        assert result.ok
        assert len(result) == COUNT
        assert (copy.numpy() == expected(at)).all()
        assert transfer.receipt is not None
        assert transfer.receipt.nbytes == batch.receipt.nbytes == COUNT * PAGE
        assert transfer.exception() is None
        batch.close()


def test_requests_of_several_files_and_calls_go_behind_one_gate(
    path: Path,
    tmp_path: Path,
    device: nobounce.Device,
    stream: nobounce.Stream,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nobounce.io.batch import instream

    gates: list[Any] = []
    plain = instream.KnownGate

    def noted(*given: Any) -> Any:
        gates.append(plain(*given))
        return gates[-1]

    monkeypatch.setattr(instream, "KnownGate", noted)
    other = tmp_path / "other.bin"
    other.write_bytes(DATA[::-1].tobytes())
    with nobounce.open(path) as f, nobounce.open(other) as g, device.allocate(4 * PAGE) as buffer:
        with nobounce.Batch() as batch:
            batch.read([f, g], buffer, file_index=[0, 1], file_offsets=[PAGE, PAGE], nbytes=PAGE)
            batch.read(g, buffer, file_offsets=0, nbytes=2 * PAGE, buffer_offsets=2 * PAGE)
            transfer = batch.submit(stream=stream)
        assert transfer.result(PATIENCE).ok
        got = buffer.numpy()
    back = DATA[::-1]
    assert len(gates) == 1
    wanted = np.concatenate([DATA[PAGE : 2 * PAGE], back[PAGE : 2 * PAGE], back[: 2 * PAGE]])
    assert (got == wanted).all()


def test_writes_take_what_the_stream_has_brought_by_then(
    tmp_path: Path, device: nobounce.Device, stream: nobounce.Stream
) -> None:
    path = tmp_path / "out.bin"
    with nobounce.open(path, "w+") as f, device.allocate(8 * PAGE) as buffer:
        held = Held(device, stream)
        buffer.fill(0x77, stream=stream)
        batch = nobounce.Batch()
        batch.write(f, buffer, file_offsets=np.arange(8)[::-1] * PAGE, nbytes=PAGE)
        transfer = batch.submit(stream=stream)
        held.go.set()
        assert transfer.result(PATIENCE).ok
        batch.close()
    assert path.read_bytes() == b"\x77" * 8 * PAGE


def test_the_batch_goes_on_with_other_requests_meanwhile(
    path: Path, device: nobounce.Device, stream: nobounce.Stream
) -> None:
    with nobounce.open(path) as f, device.allocate(2 * PAGE) as a, device.allocate(2 * PAGE) as b:
        held = Held(device, stream)
        with nobounce.Batch(capacity=2) as batch:
            first = batch.read(f, a, file_offsets=[0, PAGE], nbytes=PAGE)
            transfer = batch.submit(stream=stream)
            second = batch.read(f, b, file_offsets=[PAGE, 0], nbytes=PAGE)  # the capacity is free again
            assert batch.wait().ok
            assert not transfer.done()
            held.go.set()
            assert transfer.result(PATIENCE).ids.tolist() == first.tolist() == [0, 1]
            assert second.tolist() == [2, 3]
            assert batch.receipt.nbytes == 4 * PAGE


def test_one_bad_block_fails_alone_and_the_stream_goes_on(
    path: Path, device: nobounce.Device, stream: nobounce.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = gather.CallBlocks.read

    def one_bad(self: Any, reads: Any) -> Any:
        results = plain(self, reads)
        results[reads[:, 1] == 123 * PAGE] = -errno.EIO
        return results

    monkeypatch.setattr(gather.CallBlocks, "read", one_bad)
    monkeypatch.setattr("nobounce.io.batch.gather.blocks", lambda: gather.AtOnce(gather.CallBlocks()))
    path.read_bytes()
    at = np.arange(COUNT) * PAGE
    with nobounce.open(path) as f, device.allocate(COUNT * PAGE) as buffer:
        with nobounce.Batch(capacity=COUNT) as batch:
            batch.read(f, buffer, file_offsets=at, nbytes=PAGE)
            transfer = batch.submit(stream=stream)
        result = transfer.result(PATIENCE)
        assert list(result.errors) == [123]
        assert isinstance(transfer.exception(), nobounce.TransferError)
        assert transfer.exception() is result.errors[123]
        stream.sync()  # the caller has heard of it
        got = buffer.numpy()
        right = np.ones(COUNT * PAGE, bool)
        right[123 * PAGE : 124 * PAGE] = False
        assert (got[right] == DATA[right]).all()


def test_a_failure_that_nobody_asked_about_is_the_stream_s_to_raise(
    path: Path, device: nobounce.Device, stream: nobounce.Stream
) -> None:
    with nobounce.open(path) as f, device.allocate(PAGE) as buffer:
        with faults.inject(op="pread", error=errno.EIO):
            batch = nobounce.Batch()
            batch.read(f, buffer, file_offsets=0, nbytes=PAGE, cache="use")
            batch.submit(stream=stream)
            with pytest.raises(nobounce.TransferError) as caught:
                stream.sync()
        assert caught.value.errno == errno.EIO
        batch.close()


def test_cancelled_before_the_stream_gets_there_nothing_moves_and_everything_is_let_go(
    path: Path, device: nobounce.Device, stream: nobounce.Stream
) -> None:
    with nobounce.open(path) as f:
        buffer = device.allocate(PAGE)
        buffer.fill(0x22, stream=None)
        device.sync()
        held = Held(device, stream)
        with nobounce.Batch() as batch:
            batch.read(f, buffer, file_offsets=0, nbytes=PAGE)
            transfer = batch.submit(stream=stream)
        assert transfer.cancel()
        assert transfer.cancelled()
        with pytest.raises(nobounce.TransferCancelledError):
            transfer.result(PATIENCE)
        held.go.set()
        stream.sync()
        assert (buffer.numpy() == 0x22).all()
        buffer.close()  # nothing uses it any more


def test_a_buffer_s_block_waits_for_it(path: Path, device: nobounce.Device, stream: nobounce.Stream) -> None:
    with nobounce.open(path) as f:
        held = Held(device, stream)
        with device.allocate(PAGE) as buffer:
            with nobounce.Batch() as batch:
                batch.read(f, buffer, file_offsets=0, nbytes=PAGE)
                transfer = batch.submit(stream=stream)
            with pytest.raises(nobounce.BusyError):
                buffer.close()
            threading.Timer(0.05, held.go.set).start()
        assert transfer.done()


def test_what_cannot_go_into_the_stream_is_refused_and_lets_go(
    path: Path, device: nobounce.Device, stream: nobounce.Stream
) -> None:
    with nobounce.Batch() as batch:
        with pytest.raises(nobounce.ArgumentError, match="nothing has been added"):
            batch.submit(stream=stream)
        other = nobounce.Device("sim:0" if device.name == "cpu" else "cpu")
        with nobounce.open(path) as f, other.allocate(PAGE) as buffer:
            batch.read(f, buffer, file_offsets=0, nbytes=PAGE)
            with pytest.raises(nobounce.ArgumentError, match="belongs to another"):
                batch.submit(stream=stream)
            buffer.close()


def test_it_is_awaitable(path: Path, device: nobounce.Device, stream: nobounce.Stream) -> None:
    async def main() -> Any:
        with nobounce.open(path) as f, device.allocate(PAGE) as buffer, nobounce.Batch() as batch:
            batch.read(f, buffer, file_offsets=PAGE, nbytes=PAGE)
            result = await batch.submit(stream=stream)
            return result.ok, bytes(buffer.numpy())

    assert asyncio.run(main()) == (True, DATA[PAGE : 2 * PAGE].tobytes())


def test_one_call_reads_many_blocks_in_stream_order(
    path: Path, device: nobounce.Device, stream: nobounce.Stream
) -> None:
    at = blocks(5)
    with nobounce.open(path) as f, device.allocate(COUNT * PAGE) as buffer:
        held = Held(device, stream)
        transfer = f.read_many(buffer, file_offsets=at, nbytes=PAGE, stream=stream)
        assert not transfer.done()
        held.go.set()
        assert transfer.result(PATIENCE).nbytes == COUNT * PAGE
        assert (buffer.numpy() == expected(at)).all()


def test_to_add_waits_for_no_stream(path: Path, device: nobounce.Device, stream: nobounce.Stream) -> None:
    """Only a synchronous start waits for the work that is already in the buffer's stream."""
    with nobounce.open(path) as f, device.allocate(PAGE, stream=stream) as buffer:
        held = Held(device, stream)
        buffer.fill(1, stream=stream)
        batch = nobounce.Batch()
        batch.read(f, buffer, file_offsets=0, nbytes=PAGE)
        transfer = batch.submit(stream=stream)
        held.go.set()
        assert transfer.result(PATIENCE).ok
        assert bytes(buffer.numpy()) == DATA[:PAGE].tobytes()
        batch.close()


def test_a_start_without_a_stream_comes_after_the_work_already_in_the_buffer_s(
    path: Path, device: nobounce.Device, stream: nobounce.Stream
) -> None:
    with nobounce.open(path) as f, device.allocate(PAGE, stream=stream) as buffer:
        held = Held(device, stream)
        buffer.fill(1, stream=stream)
        batch = nobounce.Batch()
        batch.read(f, buffer, file_offsets=0, nbytes=PAGE)
        threading.Timer(0.1, held.go.set).start()
        batch.submit()
        assert held.go.is_set()
        assert batch.wait().ok
        assert bytes(buffer.numpy()) == DATA[:PAGE].tobytes()
        batch.close()


def test_a_forked_child_has_none_of_it(path: Path) -> None:
    device = nobounce.Device("cpu")
    with nobounce.open(path) as f, device.allocate(PAGE) as buffer, device.create_stream() as stream:
        held = Held(device, stream)
        with nobounce.Batch() as batch:
            batch.read(f, buffer, file_offsets=0, nbytes=PAGE)
            transfer = batch.submit(stream=stream)
        if (child := os.fork()) == 0:
            os._exit(0 if transfer.done() and isinstance(transfer.exception(), nobounce.NobounceError) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        held.go.set()
        assert transfer.result(PATIENCE).ok
