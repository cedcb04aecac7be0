"""What a failed or short read left undefined is not written by what was queued behind it."""

from __future__ import annotations

import errno
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import nobounce
from capabilities import need
from nobounce import transferend
from nobounce.errors import ShortTransferError, TransferCancelledError, TransferError
from nobounce.runtimes import faults

SIZE = 1 << 20
HALF = SIZE // 2
STALE, OLD = b"s" * SIZE, b"o" * SIZE


class Bench:
    """A file that cannot be read, a short one, one to write into, a buffer of stale bytes, and a stream that can be stopped."""

    def __init__(self, folder: Path, device: str) -> None:
        for name, data in (("bad", OLD), ("short", OLD[: HALF + 100]), ("good", b"g" * SIZE), ("out", OLD)):
            (folder / name).write_bytes(data)
        self.device = nobounce.Device(device)
        self.out = folder / "out"
        self.files = {n: nobounce.open(folder / n, "r+") for n in ("bad", "short", "good", "out")}
        self.bad_fd = self.files["bad"].fileno()
        self.buffer = self.device.allocate(SIZE)
        self.stream, self.other = self.device.create_stream(), self.device.create_stream()
        self.buffer.fill(b"s", stream=self.stream)
        self.stream.sync()
        self.latch = threading.Event()

    def stop(self) -> None:
        """What is queued from here on waits for the latch."""
        self.device._runtime.host_call(self.stream.handle, self.latch.wait)

    def read(self, name: str = "bad", **where: Any) -> nobounce.Transfer:
        where = {"require": "fallback", "stream": self.stream} | where
        return self.files[name].read_async(self.buffer, **where)

    def write(self, **where: Any) -> nobounce.Transfer:
        return self.files["out"].write_async(self.buffer, **{"stream": self.stream} | where)

    def refused(self, write: nobounce.Transfer, code: int = errno.EIO) -> TransferError:
        """The write wrote nothing, because of what came before it."""
        error = write.exception(60)
        assert isinstance(error, TransferError)
        assert "undefined" in str(error)
        assert str(self.out) in str(error)
        assert error.errno == code
        assert isinstance(error.__cause__, TransferError | TransferCancelledError)
        assert self.out.read_bytes() == OLD
        return error


@pytest.fixture(params=["cpu", "sim:0"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, request.param)
    yield made
    made.latch.set()
    transferend.untaken.clear()
    made.device.sync()
    transferend.untaken.clear()
    for file in made.files.values():
        file.close()


@contextmanager
def failing(times: int = 1, error: int = errno.EIO) -> Iterator[None]:
    with faults.inject(op="pread", error=error, times=times):
        yield


def both(bench: Bench, **where: Any) -> tuple[nobounce.Transfer, nobounce.Transfer]:
    """A failing read and a write queued behind it, before either begins."""
    bench.stop()
    read, write = bench.read(), bench.write(**where)
    with failing():
        bench.latch.set()
        write.exception(60)
    return read, write


def test_the_report(bench: Bench) -> None:
    read, write = both(bench)
    error = bench.refused(write)
    assert error.__cause__ is read.exception()


def test_taking_the_error_while_the_write_is_queued_is_too_late_for_that_write(bench: Bench) -> None:
    bench.stop()
    read = bench.read()
    latch = threading.Event()
    with failing():
        bench.latch.set()
        bench.device._runtime.host_call(bench.stream.handle, latch.wait)
        write = bench.write()
        assert isinstance(read.exception(), TransferError)
    latch.set()
    bench.refused(write)
    bench.write().result()  # now he knows
    assert bench.out.read_bytes() == STALE


def test_a_failure_that_nobody_has_heard_of_stays_one(bench: Bench) -> None:
    with failing():
        read = bench.read()
        while not read.done():
            pass
    bench.refused(bench.write())
    bench.refused(bench.write())


def test_behind_an_event(bench: Bench) -> None:
    bench.stop()
    bench.read()
    bench.other.wait(bench.stream)
    write = bench.write(stream=bench.other)
    with failing():
        bench.latch.set()
        bench.refused(write)


@pytest.mark.parametrize("late", [False, True])
def test_only_the_bytes_that_lack_count(bench: Bench, late: bool) -> None:
    def number(n: int) -> Any:
        return nobounce.Cell(n) if late else n

    bench.stop()
    bench.read(nbytes=number(HALF), buffer_offset=number(0))
    beside = bench.write(nbytes=number(HALF), buffer_offset=number(HALF), file_offset=HALF)
    across = bench.write(nbytes=number(2), buffer_offset=number(HALF - 1))
    with failing():
        bench.latch.set()
        assert beside.result(60).nbytes == HALF
        assert isinstance(across.exception(60), TransferError)
    assert bench.out.read_bytes() == OLD[:HALF] + STALE[HALF:]


def test_a_short_read_leaves_the_rest_undefined(bench: Bench) -> None:
    bench.stop()
    read = bench.read("short")
    inside, whole = bench.write(nbytes=HALF), bench.write()
    bench.latch.set()
    assert inside.result(60).nbytes == HALF
    error = whole.exception(60)
    assert isinstance(error, TransferError)
    assert isinstance(error.__cause__, ShortTransferError)
    assert bench.out.read_bytes() == OLD
    assert read.result().nbytes == HALF + 100
    bench.write().result()


def test_waiting_for_the_stream_is_hearing_of_a_short_read(bench: Bench) -> None:
    bench.read("short")
    bench.stream.sync()
    bench.write().result()


def test_a_cancelled_read(bench: Bench) -> None:
    bench.stop()
    read = bench.read()
    write = bench.write()
    assert read.cancel()
    bench.latch.set()
    error = bench.refused(write)
    assert isinstance(error.__cause__, TransferCancelledError)
    bench.write().result()


FILLS: dict[str, Callable[[Bench], object]] = {
    "read": lambda b: b.read("good"),
    "fill": lambda b: b.buffer.fill(b"g", stream=b.stream),
    "copy": lambda b: b.buffer.copy_from(bytearray(b"g" * SIZE), stream=b.stream),
}


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("when", ["queued behind it", "after it", "taken by nobody"])
def test_whole_bytes_put_over_them_are_good(fill: str, when: str, bench: Bench) -> None:
    if when == "queued behind it":
        bench.stop()
    with failing():
        read = bench.read()
        while when != "queued behind it" and not read.done():
            pass
        before = bench.write()
        FILLS[fill](bench)
        after = bench.write()
        bench.latch.set()
        assert isinstance(before.exception(60), TransferError)
    assert after.result(60).nbytes == SIZE
    assert bench.out.read_bytes() == b"g" * SIZE


def test_half_of_them_are_not(bench: Bench) -> None:
    bench.stop()
    bench.read()
    bench.read("good", nbytes=HALF)
    half, whole = bench.write(nbytes=HALF), bench.write()
    with failing():
        bench.latch.set()
        half.result(60)
        assert isinstance(whole.exception(60), TransferError)
    assert bench.out.read_bytes() == b"g" * HALF + OLD[HALF:]


def test_a_copy_carries_them_on(bench: Bench) -> None:
    bench.stop()
    read = bench.read()
    second, third = bench.device.allocate(SIZE), bench.device.allocate(SIZE)
    second.copy_from(bench.buffer, stream=bench.stream)
    third.copy_from(second, stream=bench.stream)
    write = bench.files["out"].write_async(third, stream=bench.stream)
    with failing():
        bench.latch.set()
        bench.refused(write)
    with pytest.raises(TransferError, match="undefined") as caught:
        bench.buffer.copy_to(second, stream=bench.stream)
    assert caught.value.__cause__ is not None
    read.exception()
    bench.buffer.copy_to(third, stream=bench.stream)
    bench.files["out"].write_async(third, stream=bench.stream).result()


def test_a_synchronous_write_says_so_too(bench: Bench) -> None:
    with failing():
        bench.read()
        bench.other.wait(bench.stream)
        other = bench.device.allocate(16)
        other.fill(0, stream=bench.other)
        other.wait()
        bench.buffer.allocation.pending = bench.other  # last used there, in order behind the read
        with pytest.raises(TransferError):
            bench.files["out"].write(bench.buffer)
    assert bench.out.read_bytes() == OLD
    need("numpy")
    with pytest.raises(TransferError), nobounce.Batch() as batch:
        batch.write(bench.files["out"], bench.buffer, file_offsets=0, nbytes=SIZE)
    assert bench.out.read_bytes() == OLD
    bench.files["good"].read(bench.buffer)
    bench.files["out"].write(bench.buffer)
    assert bench.out.read_bytes() == b"g" * SIZE


@pytest.mark.parametrize("kind", ["bytearray", "numpy"])
def test_memory_of_others_is_watched_while_it_lives(kind: str, tmp_path: Path) -> None:
    bench = Bench(tmp_path, "cpu")
    memory: Any = bytearray(STALE)
    if kind == "numpy":
        need("numpy")
        import numpy as np

        memory = np.frombuffer(memory, np.uint8)
    out = bench.files["out"]
    bench.stop()
    bench.files["bad"].read_async(memory, stream=bench.stream, require="fallback")
    write = out.write_async(memory, stream=bench.stream)
    with failing():
        bench.latch.set()
        bench.refused(write)
    if kind == "numpy":
        bench.refused(out.write_async(memory, stream=bench.stream))
    with pytest.raises(TransferError):
        bench.stream.sync()
    out.write_async(memory, stream=bench.stream).result()
    assert bench.out.read_bytes() == STALE
    del memory
    gc.collect()
    assert not transferend.FOREIGN


def test_hipfile_keeps_to_the_letter(bench: Bench) -> None:
    from nobounce import hipfile

    hipfile.use(bench.device)
    hipfile.driver_open()
    handles = [hipfile.handle_register(bench.files[n].fileno())[1] for n in ("bad", "out")]
    cells = hipfile.Cell(), hipfile.Cell()
    try:
        bench.stop()
        with faults.inject(op="pread", error=errno.EIO), faults.inject(op="read", error=errno.EIO):
            hipfile.read_async(handles[0], bench.buffer, SIZE, 0, 0, cells[0], bench.stream)
            hipfile.write_async(handles[1], bench.buffer, SIZE, 0, 0, cells[1], bench.stream)
            bench.latch.set()
            bench.stream.sync()
        assert cells[0].value < 0
        assert cells[1].value == SIZE
    finally:
        for handle in handles:
            hipfile.handle_deregister(handle)
        hipfile.driver_close()
