"""A failed transfer whose caller does not ask is raised once by what he does ask, or logged."""

from __future__ import annotations

import errno
import gc
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import nobounce
from capabilities import need
from filesystems import mounted_tmpfs
from nobounce import transferend
from nobounce.errors import TransferError

MIB = 1 << 20
Full = tuple[nobounce.File, nobounce.Buffer, nobounce.Stream]


@pytest.fixture(params=["cpu", "sim:0"])
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Full]:
    """A file on a file system of 1 MiB, a buffer of 4 MiB, and a stream."""
    device = nobounce.Device(request.param)
    with mounted_tmpfs(tmp_path, MIB) as folder:
        f, buffer, stream = nobounce.open(folder / "f", "w"), device.allocate(4 * MIB), device.create_stream()
        yield f, buffer, stream
        for close in (stream.close, f._close, buffer._wait_for_transfers):
            close()
        transferend.untaken.clear()


def ended(transfer: nobounce.Transfer) -> nobounce.Transfer:
    while not transfer.done():
        time.sleep(0.001)
    return transfer


def lost(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "never retrieved" in r.getMessage()]


def in_the_end(condition: Callable[[], bool]) -> None:
    """An I/O thread may hold a Transfer a moment longer than its caller does."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


ASKS: dict[str, Callable[[Full], object]] = {
    "stream": lambda full: full[2].sync(),
    "the same stream by its handle": lambda full: nobounce.Stream.from_handle(
        full[2].handle, full[1].device
    ).sync(),
    "device": lambda full: full[1].device.sync(),
    "file": lambda full: (full[2].is_done, full[0].sync()),
    "close": lambda full: full[0].close(),
    "buffer": lambda full: full[1].wait(),
    "the next transfer": lambda full: full[0].write(full[1], nbytes=1),
}


@pytest.mark.parametrize("ask", ASKS)
def test_it_is_raised_once_by_what_is_asked(ask: str, full: Full, caplog: pytest.LogCaptureFixture) -> None:
    f, buffer, stream = full
    waits = f.write_async(buffer, stream=stream, fsync=True)
    if ask in ("file", "close"):
        ended(waits)
    del waits
    with pytest.raises(TransferError, match=r"/f: pwrite of .* bytes at offset .* No space left") as caught:
        ASKS[ask](full)
    assert caught.value.errno == errno.ENOSPC
    stream.sync()
    f.close()
    buffer.device.sync()
    gc.collect()
    assert not lost(caplog)


def test_an_error_that_was_taken_is_not_raised_again(full: Full, caplog: pytest.LogCaptureFixture) -> None:
    f, buffer, stream = full
    first, second = (f.write_async(buffer, stream=stream) for _ in range(2))
    assert isinstance(first.exception(), TransferError)
    with pytest.raises(TransferError):
        second.result()
    stream.sync()
    f.sync()
    f.close()
    with pytest.raises(TransferError):
        first.result()  # as often as it is asked for
    del first, second
    assert not lost(caplog)


def test_many_are_one_error_with_notes(full: Full) -> None:
    f, buffer, stream = full
    for _ in range(12):
        f.write_async(buffer, stream=stream)
    with pytest.raises(TransferError) as caught:
        stream.sync()
    notes = caught.value.__notes__
    assert len(notes) == 9
    assert notes[0].startswith("this failed too: ")
    assert notes[-1] == "and 3 more"
    stream.sync()


def test_another_stream_does_not_raise_it(full: Full) -> None:
    f, buffer, stream = full
    f.write_async(buffer, stream=stream)
    with buffer.device.create_stream() as other:
        other.wait(stream)
        other.sync()
    with pytest.raises(TransferError):
        stream.sync()


def test_an_exception_on_its_way_keeps_its_place(full: Full, caplog: pytest.LogCaptureFixture) -> None:
    f, buffer, stream = full
    with pytest.raises(ZeroDivisionError), f:
        ended(f.write_async(buffer, stream=stream))
        raise ZeroDivisionError
    assert not lost(caplog), "the stream can still be asked"
    stream.close()
    in_the_end(lambda: len(lost(caplog)) == 1)


def test_leaving_the_block_raises_it(full: Full) -> None:
    f, buffer, stream = full
    with pytest.raises(TransferError), f, buffer:
        f.write_async(buffer, stream=stream)
    assert f.closed


def test_what_can_no_longer_be_asked_for_is_logged_and_counted(
    full: Full, caplog: pytest.LogCaptureFixture
) -> None:
    f, buffer, stream = full
    before = nobounce.stats()
    kept = f.write_async(buffer, stream=stream, nbytes=2 * MIB)
    stream.close()
    f._close()
    ended(kept)
    gc.collect()
    assert not lost(caplog), "its Transfer can still be asked"
    del kept
    in_the_end(lambda: len(lost(caplog)) == 1)
    (text,) = lost(caplog)
    assert "/f: pwrite of" in text
    assert "No space left" in text
    in_the_end(lambda: (nobounce.stats() - before).counters["unretrieved_errors"] == 1)


def test_a_caller_who_never_asks_is_told_in_the_end(full: Full, caplog: pytest.LogCaptureFixture) -> None:
    f, buffer, stream = full
    for _ in range(transferend.MOST_UNTAKEN + 3):
        ended(f.write_async(buffer, stream=stream))
    assert len(lost(caplog)) == 3
    assert caplog.records[-1].levelno == logging.ERROR


AT_EXIT = """
import sys, nobounce
device = nobounce.Device(sys.argv[2])
f, buffer, stream = nobounce.open(sys.argv[1], "w"), device.allocate(4 << 20), device.create_stream()
t = f.write_async(buffer, stream=stream, fsync=True)
while not t.done(): pass
if sys.argv[3] == "drop": del t
"""


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("transfer", ["keep", "drop"])
def test_at_exit_it_is_logged(device: str, transfer: str, tmp_path: Path) -> None:
    need("mount")
    with mounted_tmpfs(tmp_path, MIB) as folder:
        command = [sys.executable, "-c", AT_EXIT, folder / "f", device, transfer]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("error never retrieved: ")
    assert str(folder / "f") in line
    assert os.strerror(errno.ENOSPC) in line


def test_hipfile_keeps_to_the_letter(full: Full) -> None:
    from nobounce import hipfile

    f, buffer, stream = full
    hipfile.use(buffer.device)
    hipfile.driver_open()
    error, handle = hipfile.handle_register(f.fileno())
    assert not error
    moved = hipfile.Cell()
    try:
        assert not hipfile.write_async(handle, buffer, 4 * MIB, 0, 0, moved, stream)
        stream.sync()
        assert moved.value != 4 * MIB
    finally:
        hipfile.handle_deregister(handle)
        hipfile.driver_close()
