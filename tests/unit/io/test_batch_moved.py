"""What each request of a batch has moved, as observers are told it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nobounce.io import hooks
from nobounce.io.batch.moved import Moved
from nobounce.io.batch.receipt import Tally
from nobounce.io.batch.table import COMPLETE, FALLBACK, FASTPATH, Table
from nobounce.io.batch.threads import Outcome
from nobounce.io.target import Piece
from nobounce.route.judge import DIRECT

GROUP: Any = SimpleNamespace(op="read", submitted_at=0.0, checked=False, target=SimpleNamespace(sparse=False))


class Ear(hooks.Observer):
    def __init__(self) -> None:
        self.direct: list[int] = []

    def batch_ended(self, group: Any, ends: hooks.BatchEnds, status: str, seconds: float) -> None:
        self.direct += ends.direct.tolist()


@pytest.fixture
def ear(monkeypatch: pytest.MonkeyPatch) -> Ear:
    ear = Ear()
    monkeypatch.setattr(hooks, "observers", (ear,))
    return ear


@pytest.fixture
def table() -> Table:
    table = Table(4)
    table.take(4)
    table.nbytes[:4] = 8192
    return table


def outcome(slot: int, *pieces: tuple[str, int]) -> Outcome:
    moved = [Piece(backend, 0, 0, n, DIRECT, False) for backend, n in pieces]  # type: ignore[arg-type]
    return Outcome(slot, GROUP, 8192, moved)


def test_direct_bytes_of_a_request_are_those_of_ring_and_thread(table: Table, ear: Ear) -> None:
    moved = Moved(table, Tally())
    moved.whole(GROUP, np.array([0]))
    moved.a_part(GROUP, 1, 4096)
    moved.by_thread(outcome(1, ("fallback", 4096)), late=False)
    moved.a_part(GROUP, 2, 4096)
    moved.by_thread(outcome(2, ("fastpath", 4096)), late=False)
    moved.all_there_is(GROUP, 3, 100)
    moved.ended(GROUP, np.arange(4), COMPLETE, 1.0)
    assert ear.direct == [8192, 4096, 8192, 100]
    assert table.way[:4].tolist() == [FASTPATH, FASTPATH | FALLBACK, FASTPATH, FASTPATH]
    assert table.done[:4].tolist() == [8192, 8192, 8192, 100]


@pytest.mark.parametrize("by_thread", [True, False])
def test_what_a_late_request_moved_is_not_counted_for_the_next_in_its_slot(
    table: Table, ear: Ear, by_thread: bool
) -> None:
    moved = Moved(table, Tally())
    moved.a_part(GROUP, 0, 4096)
    if by_thread:
        moved.by_thread(outcome(0, ("fallback", 4096)), late=True)
    else:
        moved.forget([0])
    table.way[0] = 0
    moved.whole(GROUP, np.array([0]))
    moved.ended(GROUP, np.array([0]), COMPLETE, 1.0)
    assert ear.direct == [8192]


def test_what_ended_with_nobody_listening_is_not_counted_later(
    table: Table, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = Moved(table, Tally())
    moved.a_part(GROUP, 0, 4096)
    with monkeypatch.context() as alone:
        alone.setattr(hooks, "observers", ())
        moved.ended(GROUP, np.array([0]), COMPLETE, 1.0)
    moved.whole(GROUP, np.array([0]))
    moved.ended(GROUP, np.array([0]), COMPLETE, 1.0)
    assert ear.direct == [8192]
