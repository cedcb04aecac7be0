"""Ctrl-C at every step of a call: KeyboardInterrupt comes out, nothing stays in use, and the next call works."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nobounce
from capabilities import need
from interrupts import interrupted, steps
from nobounce.clock import THREADS
from nobounce.errors import BusyError
from scale import cases

# A standard file object that an interrupt drops is closed by Python, which says so.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

PAGE, NBYTES = 4096, 1 << 20
PATIENCE = 10.0

Call = Callable[[nobounce.File, nobounce.Buffer, nobounce.Stream], object]


def batch_of(method: str, count: int) -> Call:
    def call(f: nobounce.File, buffer: nobounce.Buffer, stream: nobounce.Stream) -> None:
        with nobounce.Batch(depth=8, method=method) as batch:  # type: ignore[arg-type]
            batch.read(f, buffer, file_offsets=np.arange(count) * PAGE, nbytes=PAGE, cache="avoid")
            batch.submit()
            batch.cancel([1])
            batch.wait()

    return call


def opened(f: nobounce.File, buffer: nobounce.Buffer, stream: nobounce.Stream) -> None:
    with nobounce.open(f.name):
        pass


def read(nbytes: int, **options: Any) -> Call:
    return lambda f, buffer, stream: f.read(buffer, nbytes=nbytes, **options)


def read_async(nbytes: int, **options: Any) -> Call:
    return lambda f, buffer, stream: f.read_async(buffer, nbytes=nbytes, stream=stream, **options).result()


CALLS: dict[str, Call] = {
    "open": opened,
    "read": read(NBYTES),
    "small read": read(PAGE, cache="use"),
    "unaligned read": read(PAGE, file_offset=1),
    "read_async": read_async(NBYTES),
    "small read_async": read_async(PAGE, cache="use", file_offset=1),
    "batch by io_uring": batch_of("io_uring", 32),
    "batch by threads": batch_of("threads", 8),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(random.Random(1).randbytes(NBYTES))
    return path


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def until(what: Callable[[], bool]) -> bool:
    """Whether it comes true in time: threads end what an interrupted call has begun."""
    limit = THREADS.now() + PATIENCE
    while not what():
        if THREADS.now() > limit:
            return False
        THREADS.sleep(0.001)
    return True


def closes(buffer: nobounce.Buffer) -> bool:
    try:
        buffer.close()
    except BusyError:
        return False
    return True


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_any_step_comes_out_and_leaves_nothing_in_use(
    path: Path, device: str, name: str
) -> None:
    if "io_uring" in name:
        need("io_uring")
    call, on = CALLS[name], nobounce.Device(device)
    with nobounce.open(path) as f, on.allocate(NBYTES) as buffer, on.create_stream() as stream:
        for _ in range(2):  # what a process makes once is there then
            call(f, buffer, stream)
        most = steps(lambda: call(f, buffer, stream))
        assert most > 20
    gc.collect()
    for nth in random.Random(name).sample(range(1, most), min(most - 1, cases(most - 1, 12))):
        before = descriptors()
        f, buffer, stream = nobounce.open(path), on.allocate(NBYTES), on.create_stream()
        where, came_out = interrupted(nth, lambda: call(f, buffer, stream))  # noqa: B023
        assert came_out or not where, where
        syncing = threading.Thread(target=stream.sync, daemon=True)
        syncing.start()
        syncing.join(PATIENCE)
        assert not syncing.is_alive(), f"the stream stands still: {where}"
        assert until(lambda: closes(buffer)), f"the buffer stays in use: {where}"  # noqa: B023
        stream.close()
        f.close()
        assert until(lambda: not descriptors() - before), f"a descriptor stays open: {where}"  # noqa: B023
    with nobounce.open(path) as f, on.allocate(NBYTES) as buffer, on.create_stream() as stream:
        call(f, buffer, stream)
        assert f.read(buffer).nbytes == NBYTES
