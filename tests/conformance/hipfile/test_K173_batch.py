"""K14: batches."""

from __future__ import annotations

import errno
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hipfile_rig import BLOCK, OK, Rig, content, fails, get, in_threads, pattern, settings
from nobounce import hipfile
from nobounce.errors import InternalError, RuntimeStatus
from nobounce.hipfile import Batch, IOParams, Opcode, Status
from nobounce.hipfile import batch as batch_module
from nobounce.hipfile.driver import STATE
from nobounce.hipfile.states import OpState, check_move
from nobounce.io.engine import engine_for
from nobounce.testing.faults import inject


def _setup(capacity: int = 16) -> int:
    error, batch = hipfile.batch_io_setup(capacity)
    assert error == OK
    assert batch is not None
    return batch


def _read(
    handle: int, address: Any, size: int = BLOCK, offset: int = 0, to: int = 0, cookie: Any = None
) -> IOParams:
    return IOParams(handle, Opcode.BATCH_READ, Batch(address, offset, to, size), cookie)


def _all(batch: int, count: int) -> dict[Any, hipfile.IOEvents]:
    """`count` events by cookie."""
    error, events = hipfile.batch_io_get_status(batch, count, count, 60)
    assert error == OK
    assert len(events) == count
    return {e.cookie: e for e in events}


@pytest.fixture
def batch() -> Iterator[int]:
    made = _setup()
    yield made
    hipfile.batch_io_destroy(made)


class Stopped:
    """The direct reads and writes of sim:0 wait until they may go on; `entered` counts those that wait or have gone."""

    def __init__(self) -> None:
        self._go = threading.Event()
        self._changed = threading.Condition()
        self.entered = 0

    def enter(self) -> None:
        with self._changed:
            self.entered += 1
            self._changed.notify_all()
        assert self._go.wait(60)

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.entered >= count, 60)

    def go(self) -> None:
        self._go.set()


@pytest.fixture
def stopped(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stopped]:
    latch, direct = Stopped(), rig.runtime.direct_io()
    for name in ("read", "write"):
        real = getattr(direct, name)

        def call(*args: int, real: Any = real) -> int:
            latch.enter()
            return int(real(*args))

        monkeypatch.setattr(direct, name, call)
    yield latch
    latch.go()


@contextmanager
def _no_workers(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is submitted to the engine is queued here and never run."""
    queue: list[Any] = []
    with monkeypatch.context() as m:
        m.setattr(engine_for(rig.runtime), "submit", queue.append)
        yield queue


@pytest.mark.parametrize(("capacity", "code"), [(0, 5022), (1, 0), (128, 0), (129, 5022), (-1, 5022)])
def test_K173_capacity(capacity: int, code: int) -> None:
    error, batch = hipfile.batch_io_setup(capacity)
    assert error == fails(code)
    assert (batch is None) == bool(code)
    hipfile.batch_io_destroy(batch)


def test_K174_null_and_unknown_handles(rig: Rig) -> None:
    params = [_read(rig.file(), rig.memory(BLOCK).handle)]
    gone = _setup()
    hipfile.batch_io_destroy(gone)
    for bad in (None, 0, gone, gone + 1000):
        assert hipfile.batch_io_submit(bad, 1, params) == fails(5022)
        assert hipfile.batch_io_get_status(bad, 0, 1, 0) == (fails(5022), [])
        assert hipfile.batch_io_cancel(bad) == fails(5022)
        hipfile.batch_io_destroy(bad)


@pytest.mark.parametrize("count", [1, 16])
def test_K175_read_and_write(each: Rig, batch: int, count: int, backend: str) -> None:
    data = pattern(count * BLOCK)
    out = each.fd(bytes(count * BLOCK))
    source, target, memory = each.file(data), each.file_of(out), each.memory(count * BLOCK)
    reads = [_read(source, memory.handle, BLOCK, i * BLOCK, i * BLOCK, ("r", i)) for i in range(count)]
    assert hipfile.batch_io_submit(batch, count, reads) == OK
    for p in reads:
        p.fh = None  # the array may be reused at once
    events = _all(batch, count)
    assert {c: (e.status, e.ret) for c, e in events.items()} == {
        ("r", i): (Status.COMPLETE, BLOCK) for i in range(count)
    }
    assert get(memory) == data
    writes = [
        IOParams(target, Opcode.BATCH_WRITE, Batch(memory, i * BLOCK, i * BLOCK, BLOCK), i)
        for i in range(count)
    ]
    assert hipfile.batch_io_submit(batch, count, writes) == OK
    assert {e.result for e in _all(batch, count).values()} == {BLOCK}
    assert content(out) == data


def test_K176_bad_operations_are_refused(rig: Rig, batch: int) -> None:
    handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
    good: dict[str, Any] = {"handle": handle, "address": memory.handle}
    bad = {
        "null buffer": _read(handle, None),
        "no device memory": _read(handle, bytearray(BLOCK)),
        "negative file offset": _read(**good, offset=-1),
        "negative buffer offset": _read(**good, to=-1),
        "buffer offset at the end": _read(**good, size=0, to=BLOCK),
        "size": _read(**good, size=BLOCK + 1),
        "negative size": _read(**good, size=-1),
        "opcode": IOParams(handle, 2, Batch(memory.handle, 0, 0, BLOCK)),
        "mode": IOParams(handle, 0, Batch(memory.handle, 0, 0, BLOCK), mode=2),
    }
    for name, params in bad.items():
        assert hipfile.batch_io_submit(batch, 1, [params]) == fails(5022), name
    for unknown in (None, handle + 1):
        assert hipfile.batch_io_submit(batch, 1, [_read(unknown, memory.handle)]) == fails(5027)  # type: ignore[arg-type]
    for nr, params_list in ((0, [_read(**good)]), (1, None), (2, [_read(**good)]), (-1, [_read(**good)])):
        assert hipfile.batch_io_submit(batch, nr, params_list) == fails(5022)
    assert hipfile.batch_io_get_status(batch, 1, 1, 0) == (OK, [])
    hipfile.driver_close()
    assert hipfile.batch_io_submit(batch, 1, [_read(**good)]) == fails(5030)


def test_K177_over_the_capacity_is_5037(rig: Rig) -> None:
    handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
    batch = _setup(3)
    params = [_read(handle, memory.handle, cookie=i) for i in range(4)]
    assert hipfile.batch_io_submit(batch, 4, params) == fails(5037)
    assert hipfile.batch_io_submit(batch, 2, params) == OK
    assert hipfile.batch_io_submit(batch, 2, params) == fails(5037)
    assert hipfile.batch_io_submit(batch, 1, params[2:]) == OK
    error, events = hipfile.batch_io_get_status(batch, 1, 1)
    assert (error, len(events)) == (OK, 1)
    assert hipfile.batch_io_submit(batch, 2, params) == fails(5037), "unread events use capacity (E-4)"
    assert hipfile.batch_io_submit(batch, 1, params) == OK
    _all(batch, 3)
    hipfile.batch_io_destroy(batch)


def test_K178_all_or_nothing(rig: Rig, batch: int) -> None:
    handle, memory = rig.file(pattern(3 * BLOCK)), rig.memory(3 * BLOCK)
    params = [_read(handle, memory.handle, BLOCK, i * BLOCK, i * BLOCK) for i in range(3)]
    params[2].batch.size = 2 * BLOCK
    assert hipfile.batch_io_submit(batch, 3, params) == fails(5022)
    assert hipfile.batch_io_get_status(batch, 3, 3) == (OK, [])
    assert get(memory) == b"\xee" * (3 * BLOCK)
    assert STATE.files[handle]._in_flight == 0


@pytest.mark.parametrize("flags", [0, 1, 0xFFFFFFFF])
def test_K179_flags_are_ignored(rig: Rig, batch: int, flags: int) -> None:
    handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
    assert hipfile.batch_io_submit(batch, 1, [_read(handle, memory.handle)], flags) == OK
    assert _all(batch, 1)[None].status == Status.COMPLETE


LEGAL = {
    ("WAITING", "PENDING"), ("WAITING", "INVALID"), ("WAITING", "FAILED"),
    ("PENDING", "RUNNING"), ("PENDING", "CANCELED"), ("PENDING", "FAILED"),
    ("RUNNING", "COMPLETE"), ("RUNNING", "FAILED"), ("RUNNING", "TIMEOUT"),
    ("CANCELED", "CANCELED"), ("CANCELED", "FAILED"), ("COMPLETE", "FAILED"),
    ("INVALID", "FAILED"), ("TIMEOUT", "FAILED"), ("FAILED", "FAILED"),
}  # fmt: skip


def test_K180_state_transitions() -> None:
    for old, new in itertools.product(OpState, OpState):
        if (old.name, new.name) in LEGAL:
            check_move(old, new)
        else:
            with pytest.raises(InternalError, match=f"{old.name} to {new.name}"):
                check_move(old, new)
    assert {s.name for s in OpState if s.terminal} == {"COMPLETE", "CANCELED", "INVALID", "TIMEOUT", "FAILED"}
    assert OpState.RUNNING.public == Status.PENDING
    assert [s.public.value for s in OpState if s is not OpState.RUNNING] == [1, 2, 16, 8, 4, 32, 64]


@pytest.mark.parametrize(
    ("min_nr", "nr", "timeout"),
    [
        (0, None, None),
        (0, 0, None),
        (2, 1, None),
        (0, 1, (-1, 0)),
        (0, 1, (0, -1)),
        (0, 1, (0, 1_000_000_000)),
        (0, 1, -0.5),
    ],
)
def test_K181_get_status_arguments(batch: int, min_nr: int, nr: int | None, timeout: Any) -> None:
    assert hipfile.batch_io_get_status(batch, min_nr, nr, timeout) == (fails(5022), [])
    assert hipfile.batch_io_get_status(batch, 0, 1, (0, 999_999_999)) == (OK, [])


def test_K182_a_zero_timeout_returns_fewer_than_asked(rig: Rig, batch: int, stopped: Stopped) -> None:
    handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
    assert hipfile.batch_io_submit(batch, 2, [_read(handle, memory.handle, cookie=i) for i in range(2)]) == OK
    stopped.wait_for(1)
    for zero in (0, (0, 0)):
        assert hipfile.batch_io_get_status(batch, 2, 2, zero) == (OK, [])
    stopped.go()
    assert set(_all(batch, 2)) == {0, 1}


def test_K183_a_small_event_buffer_gets_the_rest_later(rig: Rig, batch: int) -> None:
    handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
    assert hipfile.batch_io_submit(batch, 5, [_read(handle, memory.handle, cookie=i) for i in range(5)]) == OK
    seen = []
    for expected in (2, 2, 1, 0):
        error, events = hipfile.batch_io_get_status(batch, 2, 2)
        assert (error, len(events)) == (OK, expected)
        seen += [e.cookie for e in events]
    assert sorted(seen) == list(range(5))


def test_K184_nothing_outstanding(batch: int) -> None:
    assert hipfile.batch_io_get_status(batch, 4, 4) == (OK, [])
    assert hipfile.batch_io_get_status(batch, 4, 4, None) == (OK, [])


def test_K185_a_timeout_returns_what_there_is(rig: Rig, batch: int, stopped: Stopped) -> None:
    handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
    assert hipfile.batch_io_submit(batch, 1, [_read(handle, memory.handle)]) == OK
    start = time.monotonic()
    assert hipfile.batch_io_get_status(batch, 1, 1, (0, 50_000_000)) == (OK, [])
    assert time.monotonic() - start >= 0.05
    stopped.go()
    _all(batch, 1)


def test_K186_an_event_is_told_once(rig: Rig, batch: int) -> None:
    handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
    assert (
        hipfile.batch_io_submit(
            batch, 2, [_read(handle, memory.handle, cookie="a"), _read(handle, memory.handle, cookie="b")]
        )
        == OK
    )
    assert set(_all(batch, 2)) == {"a", "b"}
    assert hipfile.batch_io_get_status(batch, 2, 2) == (OK, [])


class TestK187:
    """Cancel: what is queued, what runs, what has ended, nothing; and then submit again."""

    def test_K187_queued(self, rig: Rig, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
        handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
        with _no_workers(rig, monkeypatch) as queue:
            assert (
                hipfile.batch_io_submit(batch, 3, [_read(handle, memory.handle, cookie=i) for i in range(3)])
                == OK
            )
            assert hipfile.batch_io_cancel(batch) == OK
            events = _all(batch, 3)
            for work in queue:
                work.work()
        assert {(e.status, e.ret) for e in events.values()} == {(Status.CANCELED, 0)}
        assert get(memory) == b"\xee" * BLOCK, "what a worker finds cancelled it leaves alone"
        assert STATE.files[handle]._in_flight == 0
        assert hipfile.batch_io_submit(batch, 1, [_read(handle, memory.handle)]) == OK
        assert _all(batch, 1)[None].ret == BLOCK

    def test_K187_running_ones_are_waited_for(self, rig: Rig, batch: int, stopped: Stopped) -> None:
        handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
        assert hipfile.batch_io_submit(batch, 1, [_read(handle, memory.handle)]) == OK
        stopped.wait_for(1)
        ended = threading.Event()
        canceller = threading.Thread(target=lambda: (hipfile.batch_io_cancel(batch), ended.set()))
        canceller.start()
        assert not ended.wait(0.05)
        stopped.go()
        canceller.join(60)
        assert ended.is_set()
        event = _all(batch, 1)[None]
        assert (event.status, event.ret) == (Status.COMPLETE, BLOCK)

    def test_K187_ended_ones_stay_and_nothing_is_fine(self, rig: Rig, batch: int) -> None:
        assert hipfile.batch_io_cancel(batch) == OK
        handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
        assert hipfile.batch_io_submit(batch, 1, [_read(handle, memory.handle)]) == OK
        context = batch_module._contexts[batch]
        with context.changed:
            assert context.changed.wait_for(lambda: all(op.state.terminal for op in context.operations), 60)
        assert hipfile.batch_io_cancel(batch) == OK
        assert _all(batch, 1)[None].status == Status.COMPLETE


def test_K188_destroy_cancels_and_queued_work_keeps_its_context(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, memory, batch = rig.file(pattern(BLOCK)), rig.memory(BLOCK), _setup()
    with _no_workers(rig, monkeypatch) as queue:
        assert hipfile.batch_io_submit(batch, 2, [_read(handle, memory.handle)] * 2) == OK
        hipfile.batch_io_destroy(batch)
        assert STATE.files[handle]._in_flight == 0
        for work in queue:
            work.work()
    assert get(memory) == b"\xee" * BLOCK
    hipfile.batch_io_destroy(batch)
    assert hipfile.batch_io_cancel(batch) == fails(5022)


def test_K189_a_failed_write_reports_minus_efbig(rig: Rig, batch: int, backend: str) -> None:
    handle, memory = rig.file(), rig.memory(BLOCK)
    too_far = 1 << 62
    params = IOParams(handle, Opcode.BATCH_WRITE, Batch(memory.handle, too_far, 0, BLOCK), "w")
    assert hipfile.batch_io_submit(batch, 1, [params]) == OK
    event = _all(batch, 1)["w"]
    assert event.status == Status.FAILED
    assert event.ret == (1 << 64) - errno.EFBIG, "unsigned, as in C"
    assert event.result == -errno.EFBIG


@pytest.mark.parametrize(
    ("fault", "result"),
    [({"error": errno.EIO}, -errno.EIO), ({"error": RuntimeStatus.LaunchFailure}, -5011)],
)
def test_other_failures_of_an_operation(rig: Rig, batch: int, fault: dict[str, Any], result: int) -> None:
    """E-9."""
    handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
    with inject(op="read", device="sim:0", **fault):
        assert hipfile.batch_io_submit(batch, 1, [_read(handle, memory.handle)]) == OK
        event = _all(batch, 1)[None]
    assert (event.status, event.result) == (Status.FAILED, result)


def test_an_operation_is_retried_as_sync_is(rig: Rig, batch: int) -> None:
    """E-10."""
    settings()
    handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
    with inject(op="read", device="sim:0", error=errno.ENODEV):
        assert hipfile.batch_io_submit(batch, 1, [_read(handle, memory.handle)]) == OK
        assert _all(batch, 1)[None].ret == BLOCK
    assert get(memory) == pattern(BLOCK)


def test_K190_ten_threads_on_the_map_of_batches(rig: Rig) -> None:
    handle, memory = rig.file(pattern(BLOCK)), rig.memory(10 * BLOCK)

    def churn(i: int) -> None:
        for _ in range(20):
            batch = _setup(4)
            params = [_read(handle, memory.handle, BLOCK, 0, i * BLOCK, n) for n in range(3)]
            assert hipfile.batch_io_submit(batch, 3, params) == OK
            if i % 2:
                assert {e.ret for e in _all(batch, 3).values()} == {BLOCK}
            hipfile.batch_io_destroy(batch)
            assert hipfile.batch_io_cancel(batch) == fails(5022)

    assert in_threads(10, churn) == []
    assert STATE.files[handle]._in_flight == 0


def test_operations_that_no_thread_can_be_started_for_have_failed(
    rig: Rig, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, memory = rig.file(pattern(4 * BLOCK)), rig.registered(4 * BLOCK)
    with monkeypatch.context() as patch:
        patch.setattr(engine_for(rig.runtime), "submit", _refuse)
        requests = [_read(handle, memory.handle, offset=n * BLOCK, cookie=n) for n in range(4)]
        assert hipfile.batch_io_submit(batch, 4, requests) == OK
    events = _all(batch, 4)
    assert {e.status for e in events.values()} == {Status.FAILED}
    hipfile.handle_deregister(handle)
    assert handle not in STATE.files, "nothing is in use"


def _refuse(*_: object) -> None:
    raise RuntimeError("can't start new thread")
