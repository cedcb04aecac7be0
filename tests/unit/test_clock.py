"""The scheduler: real threads, and the seeded stepper with virtual time."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nobounce.clock import THREADS, Scheduler
from nobounce.errors import ArgumentError, InternalError
from nobounce.testing import baton as clock_baton
from nobounce.testing.stepper import DeadlockError, StepLimitError, Stepper, release_threads


@pytest.fixture(autouse=True)
def no_thread_is_leaked() -> Iterator[None]:
    release_threads()
    before = set(threading.enumerate())  # some that other tests left may end meanwhile
    yield
    release_threads()
    assert set(threading.enumerate()) <= before


class BoundedQueue:
    """A queue of at most `depth` items; `correct=False` notifies one waiter whoever it is, which loses wake-ups."""

    def __init__(self, scheduler: Scheduler, depth: int, *, correct: bool = True) -> None:
        self.items: deque[int] = deque()
        self.depth, self.correct = depth, correct
        self.changed = scheduler.condition()
        self.longest = 0

    def put(self, item: int) -> None:
        with self.changed:
            while len(self.items) >= self.depth:
                self.changed.wait()
            self.items.append(item)
            self.longest = max(self.longest, len(self.items))
            self._tell()

    def get(self) -> int:
        with self.changed:
            while not self.items:
                self.changed.wait()
            item = self.items.popleft()
            self._tell()
            return item

    def _tell(self) -> None:
        if self.correct:
            self.changed.notify_all()
        else:
            self.changed.notify()


def relay(
    scheduler: Scheduler, loads: list[int], takers: int, depth: int, *, correct: bool = True
) -> list[int]:
    """Producers put their loads, takers take equal shares of them; what was taken, sorted."""
    queue = BoundedQueue(scheduler, depth, correct=correct)
    taken: list[int] = []
    total = sum(loads)

    def produce(base: int, count: int) -> Callable[[], None]:
        def body() -> None:
            for i in range(count):
                queue.put(base * 100 + i)

        return body

    def take(count: int) -> Callable[[], None]:
        return lambda: taken.extend([queue.get() for _ in range(count)])

    shares = [total // takers + (i < total % takers) for i in range(takers)]
    tasks = [scheduler.spawn(produce(i, n), name=f"producer {i}") for i, n in enumerate(loads)]
    tasks += [scheduler.spawn(take(n), name=f"taker {i}") for i, n in enumerate(shares)]
    for task in tasks:
        task.join()
    assert queue.longest <= depth
    return sorted(taken)


def in_turn(*calls: Callable[[], object]) -> Callable[[], None]:
    def body() -> None:
        for call in calls:
            call()

    return body


def racy_counter(stepper: Stepper) -> int:
    count = 0

    def add() -> None:
        nonlocal count
        seen = count
        stepper.checkpoint()
        count = seen + 1

    tasks = [stepper.spawn(add, name=name) for name in "ab"]
    for task in tasks:
        task.join()
    return count


def opposite_orders(stepper: Stepper) -> None:
    first, second = stepper.lock(), stepper.lock()

    def left() -> None:
        with first, second:
            pass

    def right() -> None:
        with second, first:
            pass

    tasks = [stepper.spawn(left, name="left"), stepper.spawn(right, name="right")]
    for task in tasks:
        task.join()


def first_deadlock(program: Callable[[Stepper], object], seeds: int = 200) -> tuple[int, DeadlockError]:
    for seed in range(seeds):
        try:
            Stepper.run(program, seed=seed)
        except DeadlockError as error:
            return seed, error
    pytest.fail(f"none of {seeds} seeds deadlocks")


# Schedules


def trace_of(seed: int) -> list[tuple[str, str]]:
    with Stepper(seed) as stepper:
        relay(stepper, [3, 2], 2, 1)
    return stepper.trace


def test_same_seed_gives_the_same_schedule() -> None:
    for seed in range(20):
        assert trace_of(seed) == trace_of(seed)


def test_other_seeds_give_other_schedules() -> None:
    assert len({tuple(trace_of(seed)) for seed in range(20)}) > 15


def test_trace_names_tasks_and_points_and_is_bounded() -> None:
    with Stepper(0, trace_limit=5) as stepper:
        for _ in range(9):
            stepper.checkpoint()
        assert stepper.trace == [("main", "checkpoint")] * 5
        stepper.spawn(lambda: None, name="w").join()
        stepper.spawn(lambda: None, name="w").join()
        assert ("w#2", "end") in stepper.trace


def test_a_task_whose_thread_cannot_be_started_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    release_threads()
    with Stepper(0) as stepper:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                stepper.spawn(lambda: None, name="w")
        stepper.spawn(lambda: None, name="w").join()
        assert ("w", "end") in stepper.trace


def test_a_racy_counter_shows_both_outcomes() -> None:
    assert {Stepper.run(racy_counter, seed=seed) for seed in range(50)} == {1, 2}


def test_a_lock_makes_the_counter_right_under_every_seed() -> None:
    def program(stepper: Stepper) -> int:
        lock, count = stepper.lock(), 0

        def add() -> None:
            nonlocal count
            with lock:
                seen = count
                stepper.checkpoint()
                count = seen + 1

        for task in [stepper.spawn(add, name="adder") for _ in range(3)]:
            task.join()
        return count

    assert {Stepper.run(program, seed=seed) for seed in range(50)} == {3}


def test_each_point_lets_another_task_in() -> None:
    """What runs between two points of main is seen by the other task for some seed, whatever the first point is."""

    def order(seed: int, point: str) -> str:
        log: list[str] = []
        with Stepper(seed, spurious=0) as stepper:
            lock, condition = stepper.lock(), stepper.condition()
            lock.acquire()
            other = stepper.spawn(lambda: log.append("other"), name="other")
            log.append("before")
            if point == "acquire":
                condition.acquire()
            elif point == "release":
                lock.release()
            elif point == "sleep":
                stepper.sleep(0)
            elif point == "is_alive":
                other.is_alive()
            elif point == "wait":
                with condition:
                    condition.wait(0)
            log.append("after")
        return " ".join(log)

    for point in ("acquire", "release", "sleep", "is_alive", "wait"):
        assert {order(seed, point) for seed in range(40)} == {
            "other before after",
            "before other after",
            "before after other",
        }, point


# Deadlock, endless loops, errors


def test_deadlock_names_every_task_and_what_it_waits_for() -> None:
    seed, error = first_deadlock(opposite_orders)
    text = str(error)
    assert f"seed {seed}" in text
    assert "left waits for lock 2, held by right, at test_clock.py" in text
    assert "right waits for lock 1, held by left, at test_clock.py" in text
    assert "main waits for the end of left" in text or "main waits for the end of right" in text
    assert isinstance(error, InternalError)


def test_a_lock_taken_twice_is_a_deadlock() -> None:
    with Stepper(0) as stepper:
        lock = stepper.lock()
        lock.acquire()
        with pytest.raises(DeadlockError, match="main waits for lock 1, held by main"):
            lock.acquire()


def test_after_a_deadlock_main_can_clean_up() -> None:
    """The others are unwound before main hears of it, so a `finally` that needs their lock does not hang."""

    def program(stepper: Stepper) -> None:
        lock, condition = stepper.lock(), stepper.condition()

        def hold() -> None:
            with lock, condition:
                condition.wait()

        task = stepper.spawn(hold, name="holder")
        try:
            with condition:
                while True:
                    condition.wait()
        finally:
            task.join()
            with lock:
                cleaned.append(True)

    cleaned: list[bool] = []
    with pytest.raises(DeadlockError, match="holder waits for a notify of condition 2"):
        Stepper.run(program, seed=1, spurious=0)
    assert cleaned == [True]


def test_a_wait_cut_short_by_a_deadlock_holds_its_lock_again() -> None:
    with Stepper(0, spurious=0) as stepper:
        condition = stepper.condition()
        with condition:
            with pytest.raises(DeadlockError):
                condition.wait()
            assert condition.acquire(blocking=False) is False


def test_a_wait_cut_short_whose_lock_is_lost_still_tells_of_the_deadlock() -> None:
    def program(stepper: Stepper) -> None:
        condition = stepper.condition()
        stepper.spawn(in_turn(condition.acquire, condition.acquire), name="greedy")
        with condition:
            condition.wait()

    with pytest.raises(DeadlockError, match="greedy waits for condition 1, held by greedy"):
        Stepper.run(program, seed=0, spurious=0)


def test_a_lost_wakeup_is_found_by_some_seed() -> None:
    def wrong(stepper: Stepper) -> None:
        relay(stepper, [2, 2], 2, 1, correct=False)

    _, error = first_deadlock(wrong)
    assert "waits for a notify of condition 1" in str(error)


def test_tasks_stuck_when_main_has_ended_are_a_deadlock() -> None:
    def program(stepper: Stepper) -> None:
        lock = stepper.lock()
        lock.acquire()
        stepper.spawn(in_turn(lock.acquire), name="stuck")

    with pytest.raises(DeadlockError, match="stuck waits for lock 1, held by main"):
        Stepper.run(program, seed=0)


def test_an_endless_loop_ends_loudly() -> None:
    def spin() -> None:
        while True:
            stepper.checkpoint()

    with pytest.raises(StepLimitError, match="spinner"), Stepper(0, step_limit=500) as stepper:
        stepper.spawn(spin, name="spinner").join()
    with pytest.raises(StepLimitError, match="main"), Stepper(0, step_limit=500) as stepper:
        spin()


def fail() -> None:
    raise ValueError("broken")


def test_an_exception_that_ends_a_task_is_raised_at_the_end() -> None:
    with pytest.raises(ValueError, match="broken"):
        Stepper.run(lambda s: s.spawn(fail, name="bad"), seed=0)
    with pytest.raises(ValueError, match="broken"):
        Stepper.run(lambda s: s.spawn(fail, name="bad").join(), seed=0)
    stepper = Stepper(0)
    stepper.spawn(fail, name="bad")
    stepper.settle()
    with pytest.raises(ValueError, match="broken"):
        stepper.close()
    stepper.close()


def test_several_lost_exceptions_are_noted_on_the_first() -> None:
    def program(stepper: Stepper) -> None:
        stepper.spawn(fail, name="bad")
        stepper.spawn(fail, name="worse")

    with pytest.raises(ValueError, match="broken") as caught:
        Stepper.run(program, seed=0)
    assert len(caught.value.__notes__) == 1
    assert "had ended with ValueError('broken')" in caught.value.__notes__[0]


def test_what_the_program_raises_comes_before_what_a_task_raised() -> None:
    def program(stepper: Stepper) -> None:
        stepper.spawn(fail, name="bad").join()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        Stepper.run(program, seed=0)
    assert caught.value.__notes__ == ["task bad had ended with ValueError('broken')"]


def test_a_deadlock_after_a_task_died_has_that_as_its_cause() -> None:
    def program(stepper: Stepper) -> None:
        condition = stepper.condition()
        stepper.spawn(fail, name="bad").join()
        with condition:
            condition.wait()

    with pytest.raises(DeadlockError) as caught:
        Stepper.run(program, seed=0, spurious=0)
    assert isinstance(caught.value.__cause__, ValueError)


def test_system_exit_ends_a_task_silently() -> None:
    def leave() -> None:
        raise SystemExit

    Stepper.run(lambda s: s.spawn(leave, name="leaver").join(), seed=0)


# Time


def test_virtual_time_orders_sleeps_and_costs_nothing() -> None:
    def program(stepper: Stepper) -> list[tuple[str, float]]:
        log: list[tuple[str, float]] = []

        def nap(seconds: float) -> Callable[[], None]:
            def body() -> None:
                stepper.sleep(seconds)
                log.append((f"slept {seconds:g}", stepper.now()))

            return body

        for seconds in (500, 100):
            stepper.spawn(nap(seconds), name="sleeper")
        stepper.settle()
        return log

    started = time.monotonic()
    for seed in range(20):
        assert Stepper.run(program, seed=seed) == [("slept 100", 100.0), ("slept 500", 500.0)]
    assert time.monotonic() - started < 20


def test_time_stands_still_while_somebody_can_run() -> None:
    with Stepper(3) as stepper:
        assert stepper.now() == 0.0
        stepper.spawn(lambda: stepper.sleep(1), name="sleeper")
        for _ in range(50):
            stepper.checkpoint()
            assert stepper.now() == 0.0


def test_tasks_that_wake_at_one_time_run_in_either_order() -> None:
    def program(stepper: Stepper) -> str:
        log: list[str] = []

        for name in "ab":
            stepper.spawn(in_turn(partial(stepper.sleep, 1), partial(log.append, name)), name=name)
        stepper.settle()
        return "".join(log)

    assert {Stepper.run(program, seed=seed) for seed in range(40)} == {"ab", "ba"}


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_sleeping_a_negative_time_is_refused(seconds: float) -> None:
    with Stepper(0) as stepper, pytest.raises(ArgumentError):
        stepper.sleep(seconds)


def test_join_with_a_timeout_returns_while_the_task_lives() -> None:
    with Stepper(0) as stepper:
        task = stepper.spawn(lambda: stepper.sleep(10), name="slow")
        task.join(3)
        assert (stepper.now(), task.is_alive()) == (3.0, True)
        task.join(0)
        assert stepper.now() == 3.0
        task.join()
        assert (stepper.now(), task.is_alive()) == (10.0, False)


# Conditions


def test_a_timed_wait_says_whether_it_was_notified() -> None:
    def program(stepper: Stepper) -> None:
        condition = stepper.condition()

        def tell() -> None:
            stepper.sleep(2)
            with condition:
                condition.notify()

        with condition:
            assert condition.wait(1.5) is False
            assert stepper.now() == 1.5
            assert condition.wait(0) is False
            assert condition.wait(-1) is False
            assert stepper.now() == 1.5
            stepper.spawn(tell, name="teller")
            assert condition.wait(5) is True
            assert stepper.now() == 3.5
            assert condition.wait(10) is False  # the timer of the wait before is void
            assert stepper.now() == 13.5

    for seed in range(20):
        Stepper.run(program, seed=seed, spurious=0)


def test_a_wait_that_timed_out_takes_no_later_notify() -> None:
    def program(stepper: Stepper) -> list[bool]:
        condition, log = stepper.condition(), []

        def wait(timeout: float | None) -> None:
            with condition:
                log.append(condition.wait(timeout))
            stepper.sleep(100)

        stepper.spawn(partial(wait, 1), name="impatient")
        stepper.sleep(2)
        stepper.spawn(partial(wait, None), name="patient").join(20)
        with condition:
            condition.notify()
        stepper.settle()
        return log

    for seed in range(20):
        assert Stepper.run(program, seed=seed, spurious=0) == [False, True]


def test_a_wait_without_an_end_is_no_timer() -> None:
    with Stepper(0, spurious=0) as stepper:
        condition = stepper.condition()
        with pytest.raises(DeadlockError), condition:
            condition.wait(float("inf"))
        assert stepper.now() == 0.0


def test_wait_for_returns_the_predicate() -> None:
    def program(stepper: Stepper) -> None:
        condition, ready = stepper.condition(), []

        def tell() -> None:
            stepper.sleep(1)
            with condition:
                ready.append(1)
                condition.notify_all()

        stepper.spawn(tell, name="teller")
        with condition:
            assert condition.wait_for(lambda: bool(ready), timeout=0.5) is False
            assert stepper.now() == 0.5
            assert condition.wait_for(lambda: bool(ready)) is True

    for seed in range(20):
        Stepper.run(program, seed=seed, spurious=0.3)


def woken(seed: int, n: int, spurious: float = 0.0) -> set[int]:
    """Which of four waiters `notify(n)` wakes."""
    with Stepper(seed, spurious=spurious) as stepper:
        condition, log = stepper.condition(), set()

        def wait(i: int) -> Callable[[], None]:
            def body() -> None:
                with condition:
                    condition.wait()
                    log.add(i)

            return body

        for i in range(4):
            stepper.spawn(wait(i), name="waiter")
        stepper.settle()
        with condition:
            condition.notify(n)
        stepper.settle()
        return set(log)


def test_notify_wakes_as_many_as_asked_and_the_seed_picks_them() -> None:
    for n in (0, 1, 2, 4, 9):
        assert {len(woken(seed, n)) for seed in range(10)} == {min(n, 4)}
    assert {next(iter(woken(seed, 1))) for seed in range(60)} == {0, 1, 2, 3}


def test_notify_is_forgotten_when_nobody_waits() -> None:
    def program(stepper: Stepper) -> None:
        condition = stepper.condition()
        with condition:
            condition.notify_all()
            condition.wait()

    with pytest.raises(DeadlockError):
        Stepper.run(program, seed=0, spurious=0)


def test_spurious_wakeups_come_by_seed_and_not_always() -> None:
    counts = [len(woken(seed, 0, spurious=0.1)) for seed in range(40)]
    assert 0 in counts
    assert max(counts) > 0
    assert counts == [len(woken(seed, 0, spurious=0.1)) for seed in range(40)]


def test_a_condition_needs_its_lock_held() -> None:
    with Stepper(0) as stepper:
        condition, lock = stepper.condition(), stepper.lock()
        for call in (condition.wait, condition.notify, condition.notify_all):
            with pytest.raises(InternalError, match=r"main .* condition 1 without holding it"):
                call()
        with pytest.raises(InternalError, match="releases lock 2, which no task holds"):
            lock.release()
        lock.acquire()
        assert lock.acquire(blocking=False) is False
        stepper.spawn(lock.release, name="thief")
        stepper.settle()
        with pytest.raises(InternalError, match="thief releases lock 2, which main holds"):
            stepper.close()


# Ends


def test_idle_daemons_are_unwound_at_the_end() -> None:
    log: list[str] = []

    def program(stepper: Stepper) -> None:
        condition = stepper.condition()

        def serve() -> None:
            try:
                with condition:
                    while True:
                        condition.wait(60)
            except Exception:  # noqa: BLE001 - what a careless service would do
                log.append("caught")
            finally:
                with condition:
                    condition.notify_all()
                log.append("unwound")

        stepper.spawn(serve, name="daemon")
        stepper.spawn(serve, name="daemon")

    Stepper.run(program, seed=0)
    assert log == ["unwound", "unwound"]


def test_unwinding_raises_nothing_of_its_own() -> None:
    """Neither for a lock that a wait cannot take back, nor from a `finally` that fails: no real daemon is unwound."""
    log: list[str] = []

    def program(stepper: Stepper) -> None:
        shared, forever = stepper.condition(), stepper.condition()

        def wait() -> None:
            try:
                with shared:
                    shared.wait()
            except InternalError:
                log.append("release failed")
            finally:
                log.append("unwound")
                fail()

        def hold() -> None:
            shared.acquire()
            with forever:
                forever.wait()

        stepper.spawn(wait, name="waiter")
        stepper.settle()
        stepper.spawn(hold, name="holder")

    Stepper.run(program, seed=0, spurious=0)
    assert log == ["unwound"]


def test_a_task_that_never_ran_does_not_start_at_close() -> None:
    log: list[int] = []
    for seed in range(20):
        stepper = Stepper(seed)
        stepper.spawn(lambda: log.append(1), name="late")
        ran = len(log)
        stepper.close()
        assert len(log) == ran


def test_an_unwound_task_neither_blocks_nor_starts_others() -> None:
    refused: list[str] = []
    stepper = Stepper(0)

    def body() -> None:
        try:
            stepper.sleep(1)
        finally:
            for name, call in {
                "sleep": lambda: stepper.sleep(1),
                "checkpoint": stepper.checkpoint,
                "spawn": lambda: stepper.spawn(fail, name="x"),
            }.items():
                try:
                    call()
                except BaseException:  # noqa: BLE001 - the unwinding is none
                    refused.append(name)

    stepper.spawn(body, name="left behind").join(0.5)
    stepper.close()
    assert refused == ["sleep", "checkpoint", "spawn"]


def test_a_closed_stepper_schedules_nothing_but_its_locks_stay_usable() -> None:
    stepper = Stepper(0)
    lock, condition = stepper.lock(), stepper.condition()
    task = stepper.spawn(lambda: None, name="done")
    task.join()
    stepper.close()
    for call in (stepper.checkpoint, stepper.settle, lambda: stepper.sleep(1)):
        with pytest.raises(InternalError, match="closed"):
            call()
    with lock, condition:
        condition.notify_all()
        assert lock.acquire(blocking=False) is False
        with pytest.raises(InternalError, match="lock 1 is held and its Stepper is closed"):
            lock.acquire()
        with pytest.raises(InternalError, match="closed"):
            condition.wait()
    task.join()
    assert task.is_alive() is False
    assert stepper.now() == 0.0


def on_a_foreign_thread(call: Callable[[], object]) -> BaseException | None:
    caught: list[BaseException] = []

    def body() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            caught.append(error)

    thread = threading.Thread(target=body, name="stranger")
    thread.start()
    thread.join()
    return caught[0] if caught else None


def test_a_foreign_thread_is_refused_and_changes_nothing() -> None:
    with Stepper(0) as stepper:
        lock, condition = stepper.lock(), stepper.condition()
        task = stepper.spawn(lambda: stepper.sleep(1), name="sleeper")
        before = stepper.trace
        with lock:
            pass
        for call in (
            lock.acquire,
            lock.release,
            condition.wait,
            condition.notify,
            stepper.checkpoint,
            stepper.close,
            stepper.settle,
            task.join,
            lambda: stepper.sleep(1),
            lambda: stepper.spawn(fail, name="x"),
        ):
            error = on_a_foreign_thread(call)
            assert isinstance(error, InternalError)
            assert "thread stranger is not a task of this Stepper" in str(error)
        assert on_a_foreign_thread(task.is_alive) is None
        assert all(name in ("main", "sleeper") for name, _ in stepper.trace[len(before) :])
        task.join()
        assert stepper.now() == 1.0


def test_only_main_settles_and_closes() -> None:
    for verb in ("settle", "close"):
        stepper = Stepper(0)
        stepper.spawn(getattr(stepper, verb), name="eager")
        stepper.settle()
        with pytest.raises(InternalError, match=f"task eager may not {verb}"):
            stepper.close()


def test_a_task_cannot_join_itself() -> None:
    handles: list[object] = []

    def program(stepper: Stepper) -> None:
        def body() -> None:
            stepper.sleep(1)
            handles[0].join()  # type: ignore[attr-defined]

        handles.append(stepper.spawn(body, name="self"))

    with pytest.raises(InternalError, match="task self joins itself"):
        Stepper.run(program, seed=0)


def test_garbage_collection_is_held_back_and_given_back() -> None:
    assert gc.isenabled()
    assert Stepper.run(lambda _: gc.isenabled(), seed=0) is False
    assert gc.isenabled()
    with pytest.raises(ValueError, match="broken"):
        Stepper.run(lambda _: fail(), seed=0)
    assert gc.isenabled()


def test_an_interrupt_in_main_stops_the_others_first() -> None:
    """Ctrl-C, or a test's alarm, arrives while main waits for its turn."""
    stopped: list[str] = []
    handled = threading.Event()

    def spin() -> None:
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
            handled.wait(10)
            for _ in range(900_000):
                stepper.checkpoint()
            stopped.append("late")
        finally:
            stopped.append("unwound")

    def interrupt(*_: object) -> None:
        handled.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt), Stepper(0) as stepper:
            stepper.spawn(spin, name="spinner").join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert stopped == ["unwound"]


def test_a_task_that_blocks_for_real_cannot_hang_main(monkeypatch: pytest.MonkeyPatch) -> None:
    """Main gives it up after a while: at an interrupt, and at close."""
    monkeypatch.setattr(clock_baton, "_PATIENCE_S", 0.02)
    interrupted = KeyboardInterrupt("now")

    def interrupt(*_: object) -> None:
        raise interrupted

    gate = threading.Event()

    def block() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        gate.wait()

    def linger() -> None:
        try:
            stepper.sleep(1)
        finally:
            gate.wait()

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt, match="now"):
            Stepper.run(lambda s: s.spawn(block, name="blocker").join(), seed=0)
        stepper = Stepper(0)
        stepper.spawn(linger, name="lingerer").join(0.5)
        with pytest.raises(InternalError, match="task lingerer does not end"):
            stepper.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
        gate.set()
        for thread in threading.enumerate():
            if thread.name == "nobounce-stepper":
                thread.join(10)


def test_two_thousand_programs_take_seconds_and_few_threads() -> None:
    def program(stepper: Stepper) -> list[int]:
        return relay(stepper, [2], 1, 1)

    started = time.monotonic()
    for seed in range(2000):
        assert Stepper.run(program, seed=seed) == [0, 1]
    assert time.monotonic() - started < 20
    assert sum(t.name == "nobounce-stepper" for t in threading.enumerate()) == 2


# Properties


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    loads=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    takers=st.integers(1, 3),
    depth=st.integers(1, 3),
    spurious=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_a_bounded_queue_loses_and_invents_nothing(
    seed: int, loads: list[int], takers: int, depth: int, spurious: float
) -> None:
    taken = Stepper.run(lambda s: relay(s, loads, takers, depth), seed=seed, spurious=spurious)
    assert taken == [i * 100 + j for i, n in enumerate(loads) for j in range(n)]


# Real threads


def test_threads_relay_through_a_bounded_queue() -> None:
    assert relay(THREADS, [3, 2], 2, 1) == [0, 1, 2, 100, 101]


def test_threads_are_daemons_with_the_name_given() -> None:
    gate, seen = threading.Event(), []

    def body() -> None:
        seen.append((threading.current_thread().name, threading.current_thread().daemon))
        gate.wait()

    task = THREADS.spawn(body, name="worker")
    try:
        task.join(0.001)
        assert task.is_alive()
    finally:
        gate.set()
    task.join()
    assert not task.is_alive()
    assert seen == [("worker", True)]


def test_threads_lock_and_condition_are_not_reentrant() -> None:
    for lock in (THREADS.lock(), THREADS.condition()):
        with lock:
            assert lock.acquire(blocking=False) is False
        assert lock.acquire(blocking=False) is True
        lock.release()


def test_threads_wait_and_time_are_real() -> None:
    condition, started = THREADS.condition(), THREADS.now()
    with condition:
        assert condition.wait(0.002) is False
        assert condition.wait_for(lambda: True) is True
    THREADS.sleep(0.002)
    THREADS.checkpoint()
    assert THREADS.now() - started >= 0.004
