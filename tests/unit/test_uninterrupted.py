"""Calls that an interrupt of the main thread does not cut in two: they end, and what they made is not lost."""

from __future__ import annotations

import signal
import threading

import pytest

from nobounce import uninterrupted as uninterrupted_module
from nobounce.clock import THREADS
from nobounce.uninterrupted import GivenUp, uninterrupted

PATIENCE = 10.0


def until(there: list[str], seconds: float = PATIENCE) -> None:
    deadline = THREADS.now() + seconds
    while not there and THREADS.now() < deadline:
        THREADS.sleep(0.001)


def interrupt() -> None:
    """Ctrl-C, once the main thread waits: a signal just before that is handled when it has waited."""
    THREADS.sleep(0.05)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_an_interrupt_ends_the_waiting_alone_and_the_result_is_undone() -> None:
    told: list[str] = []
    undone: list[str] = []

    def call(given_up: GivenUp) -> str:
        interrupt()
        deadline = THREADS.now() + 2.0
        while not given_up() and THREADS.now() < deadline:
            THREADS.sleep(0.001)
        told.append(f"given up: {given_up()}")
        return "made"

    with pytest.raises(KeyboardInterrupt):
        uninterrupted(call, undo=undone.append)
    until(undone)
    assert told == ["given up: True"]
    assert undone == ["made"]


def test_a_result_that_reaches_its_caller_is_not_undone() -> None:
    undone: list[str] = []
    assert uninterrupted(lambda given_up: f"{given_up()}", undo=undone.append) == "False"
    THREADS.sleep(0.01)
    assert not undone


def test_another_call_goes_through_while_an_interrupted_one_still_runs() -> None:
    begun, go, ended = threading.Event(), threading.Event(), list[str]()

    def slow(given_up: GivenUp) -> None:
        begun.set()
        interrupt()
        assert go.wait(PATIENCE)
        ended.append("slow")

    with pytest.raises(KeyboardInterrupt):
        uninterrupted(slow)
    assert begun.is_set()
    assert uninterrupted(lambda _: "quick") == "quick"
    assert not ended
    go.set()
    until(ended)
    assert ended == ["slow"]


def test_two_calls_do_not_count_on_one_thread() -> None:
    """However soon the second comes: before the thread has taken the first."""
    go, ended = threading.Event(), list[str]()
    uninterrupted(lambda _: None)  # a thread is idle now

    def slow(_: GivenUp) -> None:
        assert go.wait(PATIENCE)
        ended.append("slow")

    calls = [uninterrupted_module._Call(slow), uninterrupted_module._Call(lambda _: ended.append("quick"))]
    for call in calls:
        assert uninterrupted_module._threads.put(call)  # type: ignore[arg-type]
    assert calls[1].ended.acquire(timeout=PATIENCE)
    assert ended == ["quick"]
    go.set()
    assert calls[0].ended.acquire(timeout=PATIENCE)
