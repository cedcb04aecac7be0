"""Slots and copy streams of a bounce ring where making them waits for closed gates, as on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

import nobounce
from nobounce.clock import THREADS
from nobounce.errors import DeviceError, OutOfMemoryError, RuntimeStatus
from nobounce.io import hooks
from nobounce.io.movers.bounce import Ring
from nobounce.io.quiet import closed_gate
from nobounce.runtimes.base import Gate, Runtime

AHEAD = 4


class Rig:
    """A ring on a runtime in which making a stream behind a closed gate is a failure."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.ring = Ring(runtime, 0)
        self.held = runtime.stream_create(0)
        self.gate: Gate | None = None
        self.made = 0

    def close_gate(self) -> None:
        self.gate = closed_gate(self.runtime, self.held, lambda: None)

    def open_gate(self) -> None:
        gate, self.gate = self.gate, None
        if gate is not None:
            gate.open()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    runtime = nobounce.Device("sim:0")._runtime
    made = Rig(runtime)
    plain: Callable[..., int] = runtime.stream_create

    def create(device: int, **more: bool) -> int:
        assert made.gate is None, "a stream is made behind a closed gate"
        made.made += 1
        return plain(device, **more)

    monkeypatch.setattr(runtime, "stream_create", create)
    monkeypatch.setattr(type(runtime), "streams_ahead", AHEAD)
    yield made
    made.open_gate()


def test_all_copy_streams_are_made_before_the_first_gate_closes(rig: Rig) -> None:
    rig.ring.prepare(1, 1)
    assert rig.made == AHEAD
    rig.close_gate()
    streams = [rig.ring.copy_stream() for _ in range(AHEAD)]
    assert len(set(streams)) == AHEAD
    assert rig.made == AHEAD


def test_behind_a_gate_a_stream_is_waited_for_and_not_made(rig: Rig) -> None:
    rig.ring.prepare(1, 1)
    rig.close_gate()
    held = [rig.ring.copy_stream() for _ in range(AHEAD)]
    got: list[int] = []
    waiter = threading.Thread(target=lambda: got.append(rig.ring.copy_stream()), daemon=True)
    waiter.start()
    waiter.join(0.05)
    assert not got
    rig.ring.return_stream(held[0])
    waiter.join(10)
    assert got == [held[0]]
    assert rig.made == AHEAD


def test_a_stream_that_copies_of_others_may_be_on_is_the_last_to_be_taken_again(rig: Rig) -> None:
    """Whoever takes one for a small read waits for all that is on it."""
    rig.ring.prepare(1, 1)
    held = [rig.ring.copy_stream() for _ in range(AHEAD)]
    for stream in held[1:]:
        rig.ring.return_stream(stream)
    rig.ring.return_stream(held[0], aside=True)
    taken = [rig.ring.copy_stream() for _ in range(AHEAD)]
    assert taken[-1] == held[0]


def test_the_first_streams_wait_for_the_gates_that_are_closed(rig: Rig) -> None:
    rig.close_gate()
    done = threading.Event()

    def prepare() -> None:
        rig.ring.prepare(1, 1)
        done.set()

    threading.Thread(target=prepare, daemon=True).start()
    assert not done.wait(0.05)
    assert rig.made == 0
    rig.open_gate()
    assert done.wait(10)
    assert rig.made == AHEAD


def test_a_slot_given_back_reaches_who_waits_for_one_beside_who_waits_for_a_stream(rig: Rig) -> None:
    rig.ring.most = 1
    rig.ring.prepare(1, 1)
    rig.close_gate()
    streams = [rig.ring.copy_stream() for _ in range(AHEAD)]
    slot = rig.ring.acquire(wait=True)
    assert slot is not None
    waiting = threading.Thread(target=rig.ring.copy_stream, daemon=True)
    waiting.start()
    got: list[object] = []
    second = threading.Thread(target=lambda: got.append(rig.ring.acquire(wait=True)), daemon=True)
    second.start()
    second.join(0.05)
    rig.ring.release(slot)
    second.join(10)
    assert got == [slot]
    rig.ring.return_stream(streams[0])
    waiting.join(10)
    assert not waiting.is_alive()


def test_without_gates_more_streams_are_made_when_they_are_needed(rig: Rig) -> None:
    streams = [rig.ring.copy_stream() for _ in range(2 * AHEAD)]
    assert len(set(streams)) == 2 * AHEAD


def pinning(rig: Rig, monkeypatch: pytest.MonkeyPatch, alloc: Callable[[int], int]) -> None:
    monkeypatch.setattr(rig.runtime, "alloc_pinned", alloc)


def test_behind_a_gate_a_slot_is_waited_for_and_not_pinned(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning memory may wait for the device, and the device waits for the gate."""
    rig.ring.prepare(1, 1)
    rig.close_gate()
    pinning(rig, monkeypatch, lambda nbytes: pytest.fail("memory is pinned behind a closed gate"))
    slot = rig.ring.acquire(wait=True)
    assert slot is not None
    assert rig.ring.acquire(wait=False) is None
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(rig.ring.acquire(wait=True)), daemon=True)
    waiter.start()
    waiter.join(0.05)
    assert not got
    rig.ring.release(slot)
    waiter.join(10)
    assert got == [slot]
    rig.open_gate()
    monkeypatch.undo()
    assert rig.ring.acquire(wait=False) is not None


def test_what_is_prepared_is_free_and_not_lent_already(rig: Rig) -> None:
    rig.ring.prepare(2, 1)
    taken = [rig.ring.acquire(wait=False) for _ in range(2)]
    rig.ring.prepare(2, 1)
    assert len(rig.ring._free) == 2
    assert not set(taken) & set(rig.ring._free)


def test_slots_that_a_failing_device_did_not_make_are_not_counted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever came after `most` failures would wait for a slot that nobody has."""
    plain = rig.runtime.alloc_pinned

    def fail(nbytes: int) -> int:
        raise DeviceError("alloc_pinned", RuntimeStatus.Unknown)

    rig.ring.most = 2
    with monkeypatch.context() as patch:
        patch.setattr(rig.runtime, "alloc_pinned", fail)
        for _ in range(2):
            with pytest.raises(DeviceError):
                rig.ring.acquire(wait=False)
        with pytest.raises(DeviceError):
            rig.ring.prepare(2, 1)
    pinning(rig, monkeypatch, plain)
    assert rig.ring.acquire(wait=False) is not None
    assert rig.ring.acquire(wait=False) is not None


def test_who_waits_for_the_only_slot_is_told_that_it_could_not_be_pinned(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.ring.most = 1
    making, go = threading.Event(), threading.Event()

    def fail(nbytes: int) -> int:
        making.set()
        assert go.wait(10)
        raise OutOfMemoryError("none left")

    pinning(rig, monkeypatch, fail)
    errors: list[BaseException] = []

    def acquire() -> None:
        try:
            rig.ring.acquire(wait=True)
        except OutOfMemoryError as e:
            errors.append(e)

    first, second = (threading.Thread(target=acquire, daemon=True) for _ in range(2))
    first.start()
    assert making.wait(10)
    second.start()
    while not rig.ring.wanted:
        THREADS.sleep(0)
    go.set()
    for thread in (first, second):
        thread.join(10)
    assert len(errors) == 2


def test_every_stream_that_is_held_finds_its_share_of_slots(rig: Rig) -> None:
    """Eight transfers queued one after the other: none has begun, so all of the first's slots are still free."""
    rig.ring.prepare(2, 1)
    assert rig.ring._made == 2
    rig.close_gate()
    rig.ring.prepare(2, 1)
    assert rig.ring._made == 4
    rig.ring.prepare(2, 1)
    assert rig.ring._made == 4


def test_pinned_memory_that_was_short_once_is_asked_for_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one bad moment would leave the ring with a single slot for the life of the process."""
    asked: list[int] = []

    def fail(nbytes: int) -> int:
        asked.append(nbytes)
        raise OutOfMemoryError("none left")

    now = THREADS.now()
    monkeypatch.setattr(rig.runtime.scheduler, "now", lambda: now)
    assert rig.ring.acquire(wait=True) is not None
    with monkeypatch.context() as patch:
        patch.setattr(rig.runtime, "alloc_pinned", fail)
        for _ in range(3):
            assert rig.ring.acquire(wait=False) is None
            rig.ring.prepare(1, 1)
    assert len(asked) == 1, "not at each slot"
    assert rig.ring.acquire(wait=False) is None
    now += 10
    assert rig.ring.acquire(wait=False) is not None


def test_fewer_streams_ahead_than_wanted_are_no_error(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = rig.runtime.stream_create

    def create(device: int, **more: bool) -> int:
        if rig.made == 2:
            raise OutOfMemoryError("no stream left")
        return plain(device, **more)

    monkeypatch.setattr(rig.runtime, "stream_create", create)
    rig.ring.prepare(1, 1)
    assert rig.ring.copy_stream() != rig.ring.copy_stream()
    with pytest.raises(OutOfMemoryError):
        rig.ring.copy_stream()


def test_an_observer_that_fails_costs_no_slot(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(hooks.Observer):
        def pinned(self, device: str, nbytes: int) -> None:
            raise LookupError("no such device")

    monkeypatch.setattr(hooks, "observers", (Broken(),))
    slot = rig.ring.acquire(wait=True)
    assert slot is not None
    rig.ring.release(slot)


def test_who_need_not_wait_leaves_a_slot_to_who_must(rig: Rig) -> None:
    """One that holds slots already can go on with those; one that has none cannot."""
    rig.ring.most = 1
    slot = rig.ring.acquire(wait=True)
    assert slot is not None
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(rig.ring.acquire(wait=True)), daemon=True)
    waiter.start()
    while not rig.ring.wanted:
        THREADS.sleep(0)
    rig.ring.release(slot)
    taken = rig.ring.acquire(wait=False)  # before the one that waits has come round
    if taken is not None:
        rig.ring.release(taken)
    waiter.join(10)
    assert got == [slot]
    assert taken is None
