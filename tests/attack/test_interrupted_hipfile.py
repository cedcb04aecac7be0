"""Ctrl-C at every step of the hipfile module's calls: KeyboardInterrupt comes out, nothing stays in use, and the next call works."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hipfile_rig import OK, Rig
from interrupts import interrupted, steps
from nobounce import hipfile
from nobounce.clock import THREADS
from scale import cases

PAGE, COUNT = 4096, 8
PATIENCE = 10.0


class Made:
    """A registered file and a registered buffer, and what a call leaves behind for the test to look at."""

    def __init__(self, rig: Rig, fd: int) -> None:
        self.fd, self.batch, self.told = fd, None, 0
        self.file = rig.file_of(fd)
        self.buffer = rig.registered(COUNT * PAGE)
        self.stream = rig.stream()
        self.done, self.other = hipfile.Cell(0), hipfile.Cell(0)

    def requests(self) -> list[hipfile.IOParams]:
        where = [
            hipfile.Batch(
                dev_ptr_base=self.buffer.handle, file_offset=i * PAGE, dev_ptr_offset=i * PAGE, size=PAGE
            )
            for i in range(COUNT)
        ]
        return [
            hipfile.IOParams(
                batch=b, fh=self.file, opcode=hipfile.Opcode.BATCH_READ, mode=hipfile.BatchMode.BATCH
            )
            for b in where
        ]


def batch(made: Made) -> None:
    made.batch = hipfile.batch_io_setup(COUNT)[1]
    assert hipfile.batch_io_submit(made.batch, COUNT, made.requests()) == OK
    error, events = hipfile.batch_io_get_status(made.batch, 1, 2)
    made.told += len(events)
    error, events = hipfile.batch_io_get_status(made.batch, COUNT - made.told, COUNT)
    made.told += len(events)
    assert (error, made.told) == (OK, COUNT)
    assert hipfile.batch_io_submit(made.batch, COUNT, made.requests()) == OK
    assert hipfile.batch_io_cancel(made.batch) == OK
    hipfile.batch_io_destroy(made.batch)


def read(made: Made) -> None:
    assert hipfile.read(made.file, made.buffer.handle, PAGE, 0, 0) == PAGE


def write(made: Made) -> None:
    assert hipfile.write(made.file, made.buffer.handle, PAGE, 0, 0) == PAGE


def read_async(made: Made) -> None:
    assert hipfile.read_async(made.file, made.buffer.handle, PAGE, 0, 0, made.done, made.stream) == OK


def score(made: Made) -> None:
    assert hipfile.score(made.file, made.buffer.handle, PAGE, 0, 0)[0] == OK


def register_file(made: Made) -> None:
    again = os.open(f"/proc/self/fd/{made.fd}", os.O_RDWR)
    try:
        error, handle = hipfile.handle_register(again, made.other)
        assert error == OK
        hipfile.handle_deregister(handle)
    finally:
        os.close(again)


def register_buffer(made: Made) -> None:
    assert hipfile.buf_deregister(made.buffer.handle) == OK
    assert hipfile.buf_register(made.buffer.handle, COUNT * PAGE) == OK


CALLS: list[Callable[[Made], None]] = [
    batch,
    read,
    write,
    read_async,
    score,
    register_file,
    register_buffer,
]


def until(what: Callable[[], bool]) -> bool:
    """Whether it comes true in time: threads end what an interrupted call has begun."""
    limit = THREADS.now() + PATIENCE
    while not what():
        if THREADS.now() > limit:
            return False
        THREADS.sleep(0.001)
    return True


@pytest.fixture(params=["cpu", "sim:0"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(request.param, tmp_path)
    hipfile.use(rig.device)
    assert hipfile.driver_open() == OK
    try:
        yield rig
    finally:
        while hipfile.use_count():
            hipfile.driver_close()
        hipfile.use(None)
        rig.close()


@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_at_any_step_comes_out_and_leaves_nothing_in_use(
    rig: Rig, call: Callable[[Made], None]
) -> None:
    fd = rig.fd(random.Random(1).randbytes(COUNT * PAGE))

    def plain() -> None:
        made = Made(rig, fd)
        call(made)
        rig.sync(made.stream)
        hipfile.handle_deregister(made.file)
        assert hipfile.buf_deregister(made.buffer.handle) == OK

    for _ in range(2):  # what a process makes once is there then
        plain()
    made = Made(rig, fd)
    most = steps(lambda: call(made))
    rig.sync(made.stream)
    hipfile.handle_deregister(made.file)
    gc.collect()
    for nth in random.Random(call.__name__).sample(range(1, most), min(most - 1, cases(most - 1, 12))):
        before = set(os.listdir("/proc/self/fd"))
        made = Made(rig, fd)
        where, came_out = interrupted(nth, lambda: call(made))  # noqa: B023
        assert came_out or not where, where
        if call is batch:
            ends_or_goes_on(made, where)
        syncing = threading.Thread(target=rig.sync, args=(made.stream,), daemon=True)
        syncing.start()
        syncing.join(PATIENCE)
        assert not syncing.is_alive(), f"the stream stands still: {where}"
        assert until(lambda: forgotten(made)), f"the file stays in use: {where}"  # noqa: B023
        hipfile.handle_deregister(made.other.value)  # known here wherever the call was interrupted
        assert until(lambda: released(made)), f"the buffer stays in use: {where}"  # noqa: B023
        assert until(lambda: not set(os.listdir("/proc/self/fd")) - before), f"a descriptor: {where}"  # noqa: B023
    plain()


def ends_or_goes_on(made: Made, where: str) -> None:
    """The batch takes a new operation, if it was not destroyed, and tells of every one."""
    if made.batch is None:
        return
    error, events = hipfile.batch_io_get_status(made.batch, COUNT, COUNT, PATIENCE)
    if error == OK:
        assert made.told + len(events) <= 2 * COUNT, where
        assert all(e.status in (hipfile.Status.COMPLETE, hipfile.Status.CANCELED) for e in events), where
        assert hipfile.batch_io_get_status(made.batch, 1, COUNT, 0) == (OK, []), where
        assert hipfile.batch_io_submit(made.batch, COUNT, made.requests()) == OK, where
        error, events = hipfile.batch_io_get_status(made.batch, COUNT, COUNT, PATIENCE)
        assert (error, len(events)) == (OK, COUNT), where
    hipfile.batch_io_destroy(made.batch)
    made.batch = None


def forgotten(made: Made) -> bool:
    """Deregistration of a file in use is refused in silence."""
    hipfile.handle_deregister(made.file)
    return hipfile.read(made.file, made.buffer.handle, PAGE, 0, 0) < 0


def released(made: Made) -> bool:
    known = hipfile.buf_deregister(made.buffer.handle)
    return known in (OK, hipfile.Error(hipfile.OpError.MEMORY_NOT_REGISTERED))
