"""Gates by words, on a stream that the test drives itself: what is written and waited for is seen, and nothing else moves."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest

from nobounce.clock import THREADS, Task, Threads
from nobounce.errors import DeviceError, RuntimeStatus
from nobounce.runtimes.gpu.gates import HEALTH, LONGEST, SHORTEST, Gates
from nobounce.runtimes.gpu.host import StreamKey

PATIENCE = 30.0


class Words:
    """An adapter of words alone. `reach` lets a stream pass its next write; `held` tells whether its wait still holds."""

    name = "hip"

    def __init__(self) -> None:
        self.block = (ctypes.c_uint64 * 4096)()
        self.taken = 0
        self.grown = 0
        self.ops: dict[int, list[tuple[str, int, int]]] = {}
        self.refuse: str = ""

    def words(self, count: int) -> list[int]:
        base, self.taken = self.taken, self.taken + count
        self.grown += 1
        return [ctypes.addressof(self.block) + 8 * i for i in range(base, base + count)]

    def write_value(self, stream: int, address: int, value: int, flags: int) -> None:
        self._op("write", stream, address, value)

    def wait_value(self, stream: int, address: int, value: int, flags: int) -> None:
        self._op("wait", stream, address, value)

    def _op(self, op: str, stream: int, address: int, value: int) -> None:
        if self.refuse == op:
            raise DeviceError(op, RuntimeStatus.InvalidResourceHandle)
        self.ops.setdefault(stream, []).append((op, address, value))

    def reach(self, stream: int) -> None:
        op, address, value = self.ops[stream].pop(0)
        assert op == "write"
        ctypes.c_uint64.from_address(address).value = value

    def held(self, stream: int) -> bool:
        op, address, value = self.ops[stream][0]
        assert op == "wait"
        return ctypes.c_uint64.from_address(address).value < value

    def go_on(self, stream: int) -> None:
        assert not self.held(stream)
        self.ops[stream].pop(0)


class Rig:
    def __init__(
        self, scheduler: Threads = THREADS, alive: Callable[[int], None] = lambda device: None
    ) -> None:
        self.words = Words()
        self.failures: list[tuple[StreamKey, BaseException]] = []
        adapter: Any = self.words
        self.gates = Gates(adapter, scheduler, alive, lambda s, e: self.failures.append((s, e)))

    def gate(self, stream: int, on_reached: Callable[[], None]) -> Any:
        return self.gates.close_stream(stream, (stream, 0, 0), on_reached)


def test_reached_then_opened() -> None:
    rig, reached = Rig(), threading.Event()
    gate = rig.gate(5, reached.set)
    assert not reached.wait(0.02)
    rig.words.reach(5)
    assert reached.wait(PATIENCE)
    assert rig.words.held(5)
    gate.open()
    assert not rig.words.held(5)


def test_opened_before_it_is_reached() -> None:
    rig, reached = Rig(), threading.Event()
    rig.gate(5, reached.set).open()
    assert not reached.wait(0.02)
    rig.words.reach(5)
    assert not rig.words.held(5)
    assert reached.wait(PATIENCE)


def test_whoever_waits_may_look_and_nobody_is_told_twice() -> None:
    rig = Rig()
    told: list[tuple[int, int]] = []
    for i in range(300):
        first = rig.gate(5, lambda i=i: told.append((2 * i, threading.get_ident())))  # type: ignore[misc]
        second = rig.gate(5, lambda i=i: told.append((2 * i + 1, threading.get_ident())))  # type: ignore[misc]
        assert not second.look()
        rig.words.reach(5)
        first.open()
        rig.words.go_on(5)
        rig.words.reach(5)
        assert second.look()
        assert second.look()
        second.open()
        rig.words.go_on(5)
    until = THREADS.now() + PATIENCE
    while len(told) < 600 and THREADS.now() < until:  # the watcher may still be telling
        THREADS.sleep(0.001)
    assert sorted(n for n, _ in told) == list(range(600))
    assert threading.get_ident() in {thread for _, thread in told}


def test_words_are_taken_once_and_used_again() -> None:
    """A second open of an old gate must not move the words, which are another gate's by then."""
    rig, reached = Rig(), threading.Semaphore(0)
    old = []
    for i in range(200):
        gate = rig.gate(5, reached.release)
        rig.words.reach(5)
        assert reached.acquire(timeout=PATIENCE)
        assert rig.words.held(5), i
        for stale in old:
            stale.open()
        assert rig.words.held(5), i
        gate.open()
        rig.words.go_on(5)
        old.append(gate)
    assert rig.words.grown == 1


def test_words_are_not_used_again_before_the_stream_has_passed_its_write() -> None:
    rig = Rig()
    for _ in range(64):
        rig.gate(5, lambda: None).open()
    assert rig.words.grown == 1
    rig.gate(5, lambda: None).open()
    assert rig.words.grown == 2


def test_words_are_not_used_again_while_their_gate_is_closed() -> None:
    """Its stream has passed the write and waits: a newer ticket in the other word would let it go on."""
    rig, reached = Rig(), threading.Event()
    gate = rig.gate(5, reached.set)
    rig.words.reach(5)
    assert reached.wait(PATIENCE)
    for _ in range(2 * 64):
        other = rig.gate(6, lambda: None)
        rig.words.reach(6)
        assert other.look()
        other.open()
        rig.words.go_on(6)
    assert rig.words.held(5)
    gate.open()
    assert not rig.words.held(5)


def test_closed_gates_share_no_words_however_often_an_old_one_was_opened() -> None:
    rig = Rig()
    old = rig.gate(5, lambda: None)
    rig.words.reach(5)
    assert old.look()
    for _ in range(3):
        old.open()
    streams = range(10, 80)
    gates = [rig.gate(stream, lambda: None) for stream in streams]
    for stream, gate in reversed(list(zip(streams, gates, strict=True))):
        rig.words.reach(stream)
        assert rig.words.held(stream), "a gate with the same words was opened before"
        gate.open()
        assert not rig.words.held(stream)


def test_a_late_write_of_another_stream_does_not_disturb() -> None:
    rig, first, second = Rig(), threading.Event(), threading.Event()
    a = rig.gate(5, first.set)
    b = rig.gate(6, second.set)
    rig.words.reach(6)
    assert second.wait(PATIENCE)
    assert not first.is_set()
    rig.words.reach(5)
    assert first.wait(PATIENCE)
    b.open()
    assert rig.words.held(5)
    a.open()


def test_a_host_function_holds_its_stream_until_the_gate_is_opened() -> None:
    """On a device that cannot wait for values."""
    rig, reached, passed = Rig(), threading.Event(), threading.Event()

    def launch(hold: Callable[[], None]) -> None:
        def serve() -> None:
            hold()
            passed.set()

        threading.Thread(target=serve, daemon=True).start()

    gate = rig.gates.close_host(launch, reached.set)
    assert reached.wait(PATIENCE)
    assert not passed.wait(0.02)
    gate.open()
    assert passed.wait(PATIENCE)
    assert not rig.gates.closed()


def test_gates_of_one_stream_are_reached_in_order() -> None:
    rig, seen, done = Rig(), [], threading.Event()
    gates = [rig.gate(5, lambda i=i: seen.append(i)) for i in range(20)]  # type: ignore[misc]
    last = rig.gate(5, done.set)
    for gate in [*gates, last]:
        rig.words.reach(5)
        gate.open()
        rig.words.go_on(5)
    assert done.wait(PATIENCE)
    assert seen == list(range(20))


def test_write_and_wait_of_one_stream_are_never_mixed() -> None:
    rig, start = Rig(), threading.Barrier(8)

    def submit() -> None:
        start.wait()
        for _ in range(30):
            rig.gate(5, lambda: None).open()

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    ops = [op for op, _, _ in rig.words.ops[5]]
    assert ops == ["write", "wait"] * 240


def test_a_stream_that_refuses_gets_no_gate() -> None:
    rig, reached = Rig(), threading.Event()
    rig.words.refuse = "write"
    with pytest.raises(DeviceError):
        rig.gate(5, reached.set)
    rig.words.refuse = "wait"
    with pytest.raises(DeviceError):
        rig.gate(5, reached.set)
    rig.words.refuse = ""
    rig.words.reach(5)  # of the gate that could not wait: it must be nobody's
    again = threading.Event()
    gate = rig.gate(5, again.set)
    rig.words.reach(5)
    assert again.wait(PATIENCE)
    gate.open()
    assert not reached.is_set()


def test_a_watcher_that_cannot_be_started_is_tried_again_with_the_next_gate() -> None:
    class Scarce(Threads):
        full = True

        def spawn(self, target: Callable[[], None], *, name: str) -> Task:
            if self.full:
                raise RuntimeError("can't start new thread")
            return super().spawn(target, name=name)

    scheduler = Scarce()
    rig, reached = Rig(scheduler), threading.Event()
    with pytest.raises(RuntimeError, match="can't start"):
        rig.gate(5, reached.set)
    assert not rig.words.ops, "the stream is not held"
    assert not rig.gates.closed()
    scheduler.full = False
    gate = rig.gate(5, reached.set)
    rig.words.reach(5)
    assert reached.wait(PATIENCE)
    gate.open()


def test_open_all_opens_what_is_closed() -> None:
    rig = Rig()
    kept = [rig.gate(stream, lambda: None) for stream in (5, 6)]
    kept[0].open()
    rig.gates.open_all()
    for stream in (5, 6):
        rig.words.reach(stream)
        assert not rig.words.held(stream)


def test_what_on_reached_raises_is_told_and_the_watcher_goes_on() -> None:
    rig, reached = Rig(), threading.Event()

    def fail() -> None:
        raise LookupError("no")

    rig.gate(5, fail).open()
    rig.gate(6, reached.set).open()
    rig.words.reach(5)
    rig.words.reach(6)
    assert reached.wait(PATIENCE)
    assert [(stream, str(error)) for stream, error in rig.failures] == [((5, 0, 0), "no")]


def test_a_lost_device_reaches_nothing_so_its_gates_are_given_up() -> None:
    """Whoever waits finds out by trying: its copies fail."""

    def lost(device: int) -> None:
        raise DeviceError("ask", RuntimeStatus.LaunchFailure)

    rig, reached = Rig(alive=lost), threading.Event()
    rig.gate(5, reached.set)
    assert reached.wait(PATIENCE)


class Counting(Threads):
    """Counts the looks of the watcher: one sleep or timed wait each."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def condition(self) -> Any:
        waits = self.waits

        class Condition(threading.Condition):
            def __init__(self) -> None:
                self.mutex = threading.Lock()
                super().__init__(self.mutex)

            def wait(self, timeout: float | None = None) -> bool:
                if timeout is not None:
                    waits.append(timeout)
                return super().wait(timeout)

        return Condition()


def test_the_watcher_sleeps_longer_the_longer_nothing_happens() -> None:
    scheduler = Counting()
    rig, asked = Rig(scheduler), threading.Event()
    rig.gates._alive = lambda device: asked.set()
    gate = rig.gate(5, lambda: None)
    assert asked.wait(PATIENCE)  # after HEALTH seconds of nothing
    waits = list(scheduler.waits)
    assert waits == sorted(waits) or max(waits) == LONGEST
    assert SHORTEST <= waits[0] < LONGEST / 10
    assert max(waits) >= min(LONGEST, HEALTH / 60)
    rig.words.reach(5)
    gate.open()
