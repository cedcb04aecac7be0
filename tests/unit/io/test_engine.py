"""The pool where threads cannot be started: counts stay right, one thread is enough, and with none the caller does the work."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import nobounce
from nobounce.clock import THREADS, Task, Threads
from nobounce.io import engine
from nobounce.io.engine import Engine
from nobounce.io.movers import pagecache_dma
from nobounce.io.movers.pagecache_dma import Keeper, Window
from nobounce.testing.stepper import Stepper

MIB = 1 << 20


class Scarce(Threads):
    """Starts `left` threads of the pool, and no more."""

    def __init__(self, left: int) -> None:
        self.left, self.refused = left, 0

    def spawn(self, target: Callable[[], None], *, name: str) -> Task:
        if not name.startswith(("nobounce-io", "nobounce-unpin")):
            return super().spawn(target, name=name)
        if self.left <= 0:
            self.refused += 1
            raise RuntimeError("can't start new thread")
        self.left -= 1
        return super().spawn(target, name=name)


class Counted:
    """Work of so many tickets; `all_done` once each has been worked off."""

    def __init__(self, tickets: int, hold: threading.Event | None = None) -> None:
        self.tickets, self.done, self._hold = tickets, 0, hold
        self._lock, self.all_done, self.begun = threading.Lock(), threading.Event(), threading.Event()

    def work(self) -> None:
        self.begun.set()
        if self._hold is not None:
            assert self._hold.wait(30)
        with self._lock:
            self.done += 1
        if self.done == self.tickets:
            self.all_done.set()


@pytest.fixture
def pools() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for pool in made:
        pool.close()


def test_one_thread_does_what_was_meant_for_more(pools: list[Engine]) -> None:
    scheduler = Scarce(1)
    pool = Engine(scheduler)
    pools.append(pool)
    work = Counted(8)
    pool.submit(work)
    assert work.all_done.wait(30)
    assert scheduler.refused == 1, "it is not tried again for the same work"
    scheduler.left = 100
    hold = threading.Event()
    parts = [Counted(1, hold) for _ in range(3)]
    for part in parts:
        pool.submit(part)
    for part in parts:
        assert part.begun.wait(30), "threads that did not come to be still count: no room for new ones"
    hold.set()


def test_the_pool_s_whole_width_is_there_again_afterwards(pools: list[Engine]) -> None:
    scheduler = Scarce(1)
    pool = Engine(scheduler, most=2)
    pools.append(pool)
    first = Counted(2)
    pool.submit(first)
    assert first.all_done.wait(30)
    scheduler.left = 100
    hold = threading.Event()
    parts = [Counted(1, hold) for _ in range(2)]
    for part in parts:
        pool.submit(part)
    assert all(part.begun.wait(30) for part in parts)
    hold.set()


def test_without_any_thread_the_work_is_kept_for_whoever_waits(pools: list[Engine]) -> None:
    scheduler = Scarce(0)
    pool = Engine(scheduler)
    pools.append(pool)
    kept = Counted(8)
    pool.submit(kept)
    assert not pool._tickets
    assert not pool._starting
    scheduler.left = 100
    later = Counted(3)
    pool.submit(later)
    assert later.all_done.wait(30)
    scheduler.help()
    assert kept.all_done.wait(30), "by one of the threads, or by this one"


def test_threads_started_ahead_serve_what_comes_and_no_other_is_started(pools: list[Engine]) -> None:
    scheduler = Scarce(3)
    pool = Engine(scheduler)
    pools.append(pool)
    pool.start_threads(3)
    assert scheduler.left == 0
    until = time.monotonic() + 30
    while pool._idle < 3 and time.monotonic() < until:
        time.sleep(0.001)
    hold = threading.Event()
    parts = [Counted(1, hold) for _ in range(3)]
    for part in parts:
        pool.submit(part)
    assert all(part.begun.wait(30) for part in parts)
    hold.set()
    assert scheduler.refused == 0, "all three were there"


def test_threads_that_cannot_be_started_ahead_are_no_error(pools: list[Engine]) -> None:
    pool = Engine(Scarce(0))
    pools.append(pool)
    pool.start_threads(3)
    assert not pool._tickets


def test_who_works_himself_needs_no_thread(pools: list[Engine]) -> None:
    pool = Engine(Scarce(0))
    pools.append(pool)
    pool.assist(Counted(8))
    assert not pool._tickets


def test_an_interrupt_in_the_start_counts_nobody_and_a_thread_that_came_to_be_goes(
    pools: list[Engine],
) -> None:
    """Thread.start waits for the thread: an interrupt there leaves open whether it will run."""

    class Interrupted(Threads):
        def __init__(self) -> None:
            self.late: list[Callable[[], None]] = []

        def spawn(self, target: Callable[[], None], *, name: str) -> Task:
            self.late.append(target)
            raise KeyboardInterrupt

    scheduler = Interrupted()
    pool = Engine(scheduler)
    pools.append(pool)
    work = Counted(1)
    with pytest.raises(KeyboardInterrupt):
        pool.submit(work)
    assert not pool._tickets
    scheduler.late[0]()  # returns at once: it serves nobody
    assert (pool._threads, work.done) == (0, 0)


def test_who_offers_while_another_s_threads_do_not_come_to_be_starts_his_own(pools: list[Engine]) -> None:
    class Slow(Scarce):
        waiting, go = threading.Event(), threading.Event()

        def spawn(self, target: Callable[[], None], *, name: str) -> Task:
            if threading.current_thread().name == "first":
                self.waiting.set()
                assert self.go.wait(30)
                raise RuntimeError("can't start new thread")
            return super().spawn(target, name=name)

    scheduler = Slow(1)
    pool = Engine(scheduler, most=1)
    pools.append(pool)
    early, late = Counted(1), Counted(1)
    first = threading.Thread(target=pool.submit, args=(early,), name="first")
    first.start()
    assert scheduler.waiting.wait(30)
    pool.submit(late)
    assert late.all_done.wait(30)
    scheduler.go.set()
    first.join(30)
    assert early.all_done.wait(30), "the other's thread serves it"


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_schedule_work_is_done(seed: int) -> None:
    class Failing(Stepper):
        def spawn(self, target: Callable[[], None], *, name: str) -> Task:
            if name == "nobounce-io":
                self.checkpoint()
                if self._baton.random() < 0.6:
                    raise RuntimeError("can't start new thread")
            return super().spawn(target, name=name)

    def program(stepper: Stepper) -> None:
        pool = Engine(stepper, most=2)
        works = [Counted(n) for n in (1, 3, 2, 1)]
        for task in [stepper.spawn(lambda work=work: pool.submit(work), name="caller") for work in works]:  # type: ignore[misc]
            task.join()
        stepper.settle()
        stepper.help()
        for work in works:
            assert work.done == work.tickets
        assert not pool._tickets
        assert not pool._starting
        assert 0 <= pool._threads <= 2
        pool.close()

    with Failing(seed) as stepper:
        program(stepper)


# what the callers make of it


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Scarce:
    """The process's pool is new and gets no thread."""
    scarce = Scarce(0)
    monkeypatch.setattr(engine, "_engine", None)
    monkeypatch.setattr(THREADS, "spawn", scarce.spawn)
    return scarce


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "data.bin"
    made.write_bytes(os.urandom(48 * MIB))
    return made


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_a_transfer_in_a_stream_is_carried_out_by_its_caller_and_the_stream_goes_on(
    device: str, path: Path, no_threads: Scarce
) -> None:
    where = nobounce.Device(device)
    with nobounce.open(path) as f, where.allocate(f.nbytes) as buffer, where.create_stream() as stream:
        assert f.read_async(buffer, stream=stream).result(30).nbytes == 48 * MIB
        stream.sync()
        no_threads.left = 100
        assert f.read_async(buffer, stream=stream).result(30).nbytes == 48 * MIB
        stream.sync()


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_a_read_is_done_alone_on_the_main_thread_and_on_another(
    device: str, path: Path, no_threads: Scarce
) -> None:
    where = nobounce.Device(device)
    with nobounce.open(path) as f, where.allocate(f.nbytes) as buffer:
        assert f.read(buffer).nbytes == 48 * MIB
        got: list[nobounce.Receipt] = []
        other = threading.Thread(target=lambda: got.append(f.read(buffer)))
        other.start()
        other.join(30)
        assert [r.nbytes for r in got] == [48 * MIB]
        assert buffer.numpy().tobytes() == path.read_bytes()


def test_a_load_without_threads_is_whole(tmp_path: Path, no_threads: Scarce) -> None:
    header = b'{"a":{"dtype":"U8","shape":[33554432],"data_offsets":[0,33554432]}}'
    data = os.urandom(32 * MIB)
    model = tmp_path / "m.safetensors"
    model.write_bytes(len(header).to_bytes(8, "little") + header + data)
    assert nobounce.load(model, device="cpu")["a"].numpy().tobytes() == data


def test_requests_of_a_batch_are_carried_out_by_who_waits(path: Path, no_threads: Scarce) -> None:
    device = nobounce.Device("sim:0")
    with nobounce.open(path) as f, device.allocate(MIB) as buffer, nobounce.Batch(method="threads") as batch:
        places = [n * 4096 for n in range(8)]
        batch.read(f, buffer, nbytes=4096, file_offsets=places, buffer_offsets=places, cache="avoid")
        result = batch.wait(timeout=30)
        assert [event.error for event in result] == [None] * 8
        no_threads.left = 100
        batch.read(f, buffer, nbytes=4096, file_offsets=[0], buffer_offsets=[0], cache="avoid")
        assert [event.error for event in batch.wait(timeout=30)] == [None]


# pages that are to be given back


class Pinned:
    """Windows that say when they were given back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[int] = []
        self.held = False

        def give_back(window: Window, *, wait: bool = True) -> bool:
            if self.held and not wait:
                return False
            self.given.append(window.address)
            return True

        monkeypatch.setattr(Window, "give_back", give_back)

    def window(self, address: int) -> Window:
        return Window(None, address, 4096)  # type: ignore[arg-type]


def test_pages_are_given_back_at_once_where_no_thread_can_do_it_later(
    monkeypatch: pytest.MonkeyPatch, no_threads: Scarce
) -> None:
    monkeypatch.setattr(pagecache_dma, "IDLE_SECONDS", 0.0)
    pinned, keeper = Pinned(monkeypatch), Keeper()
    keeper.keep([pinned.window(1), pinned.window(2)])
    assert pinned.given == [1, 2]
    pinned.held = True
    keeper.keep([pinned.window(3)])
    assert pinned.given == [1, 2], "a stream is held at a gate: not now"
    no_threads.left = 1
    keeper.keep([pinned.window(4)])
    for _ in range(3000):
        if len(pinned.given) == 4:
            break
        THREADS.sleep(0.01)
    assert pinned.given == [1, 2, 3, 4], "the next to keep has a thread for all of them"


def test_an_interrupted_start_of_the_keeper_s_thread_is_made_up_for(
    monkeypatch: pytest.MonkeyPatch, no_threads: Scarce
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    pinned, keeper = Pinned(monkeypatch), Keeper()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(THREADS, "spawn", interrupted)
        keeper.keep([pinned.window(1)])
    assert not keeper._serving


def test_threads_that_make_their_first_calls_at_once_share_one_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each engine has its rings, of pinned memory."""
    monkeypatch.setattr(engine, "_engine", None)
    plain = engine.Engine.__init__

    def slow(self: engine.Engine, *a: object, **k: object) -> None:
        THREADS.sleep(0.02)
        plain(self, *a, **k)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.Engine, "__init__", slow)
    runtime = nobounce.Device("cpu")._runtime
    found: list[engine.Engine] = []
    threads = [
        THREADS.spawn(lambda: found.append(engine.engine_for(runtime)), name=f"t{n}") for n in range(6)
    ]
    for thread in threads:
        thread.join(30)
    assert len(found) == 6
    assert len(set(map(id, found))) == 1
