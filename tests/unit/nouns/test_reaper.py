"""The reaper: frees on its own thread, waits where a stepped scheduler wants it, and stops at exit and fork."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from nobounce import reaper
from nobounce.clock import THREADS, Threads


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reaper of this test's own, whose thread does not run."""
    monkeypatch.setattr(reaper, "_state", reaper._State())


def test_work_is_done_on_the_reapers_thread() -> None:
    names: list[str] = []
    done = threading.Event()
    reaper.start()
    reaper.start()
    reaper.later(
        THREADS, reaper.generation(), lambda: (names.append(threading.current_thread().name), done.set())
    )
    assert done.wait(30)
    assert names == ["nobounce-reaper"]
    assert sum(t.name == "nobounce-reaper" for t in threading.enumerate()) == 1


def test_an_error_stops_nothing(state: None) -> None:
    done: list[int] = []
    reaper.later(THREADS, reaper.generation(), lambda: 1 / 0)
    reaper.later(THREADS, reaper.generation(), done.append, 1)
    reaper.drain()
    assert done == [1]


def test_a_stepped_scheduler_waits_for_a_caller(state: None) -> None:
    done: list[int] = []
    other: Any = Threads()
    reaper.later(other, reaper.generation(), done.append, 1)
    assert reaper._state.queue.empty()
    reaper.patient()
    assert done == [1]
    reaper.later(other, reaper.generation(), done.append, 2)
    reaper.drain()
    assert done == [1, 2]


def test_an_earlier_generation_is_left_alone(state: None) -> None:
    done: list[int] = []
    reaper.later(THREADS, reaper.generation() - 1, done.append, 1)
    reaper.drain()
    assert done == []


@pytest.mark.parametrize("flag", [True, None])
def test_nothing_is_freed_at_exit(monkeypatch: pytest.MonkeyPatch, state: None, flag: bool | None) -> None:
    done: list[int] = []
    reaper.later(THREADS, reaper.generation(), done.append, 1)
    monkeypatch.setattr(reaper, "_exiting", flag)  # None: module globals are gone
    assert reaper.exiting()
    reaper.later(THREADS, reaper.generation(), done.append, 2)
    monkeypatch.setattr(reaper, "_exiting", flag or True)
    reaper.drain()
    assert done == []
