from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nobounce
from nobounce.config import Settings
from nobounce.errors import FormatError
from nobounce.observe import layout
from nobounce.observe.counters import Counters
from nobounce.observe.layout import Header
from nobounce.observe.snapshot import Stats, parse, total

Maker = Callable[..., Any]


def block(*jobs: Any) -> bytes:
    counters = Counters(Settings())
    for job in jobs:
        counters.ended(job)
    return counters.block()


def forged(raw: bytes, word: int, value: int) -> bytes:
    return raw[: word * 8] + struct.pack("<Q", value) + raw[word * 8 + 8 :]


def test_snapshots_are_frozen() -> None:
    s = Stats()
    with pytest.raises(dataclasses.FrozenInstanceError):
        s.level = 2  # type: ignore[misc]


def test_the_difference_is_what_happened_between(job: Maker) -> None:
    counters = Counters(Settings())
    counters.ended(job(("direct", 4096)))
    before = parse(counters.block())
    counters.ended(job(("direct", 8192)))
    counters.ended(job(("cached", 100), device="cpu"))
    between = parse(counters.block()) - before
    assert (between.fastpath_bytes, between.fallback_bytes, between.flow(backend="fastpath").operations) == (
        8192,
        100,
        1,
    )
    assert between.reasons == {"direct": (1, 8192), "cached": (1, 100)}
    assert between.seconds > 0


def test_processes_add_up(job: Maker) -> None:
    one, two = parse(block(job(("direct", 1)))), parse(block(job(("direct", 2)), job(("x", 3), device="cpu")))
    two = dataclasses.replace(two, pids=(1,))
    both = total([one, two])
    assert (both.fastpath_bytes, both.fallback_bytes, len(both.pids)) == (3, 3, 2)
    assert both.devices == ("cpu", "sim:0")
    assert total([]) == Stats()


def test_before_any_io_there_is_an_empty_snapshot() -> None:
    s = nobounce.stats()
    assert (s.fastpath_bytes, s.fallback_bytes, s.flows, s.level) == (0, 0, (), 1)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (Header.MAGIC, 1),
        (Header.VERSION, 99),
        (Header.NBYTES, 8),
        (Header.FLOWS, layout.MOST_FLOWS + 1),
        (Header.FLOWS, 1 << 63),
        (Header.CODES, layout.MOST_CODES + 1),
        (Header.LEVEL, 4),
        (Header.STARTED_NS, (1 << 64) - 1),
        (layout.FLOWS_AT + layout.Flow.BACKEND, 2),
        (layout.FLOWS_AT + layout.Flow.OP, 9),
        (layout.CODES_AT + layout.CODE_KIND, 7),
    ],
)
def test_a_forged_block_is_refused(job: Maker, word: int, value: int) -> None:
    with pytest.raises(FormatError):
        parse(forged(block(job(("direct", 1))), word, value))


def test_a_process_is_shown_by_its_number_here_not_by_the_one_in_its_container() -> None:
    assert parse(block(), pid=4711).pids == (4711,)
    assert parse(block()).pids == (os.getpid(),)


def test_a_block_cut_short_is_refused() -> None:
    with pytest.raises(FormatError):
        parse(block()[:-1])


@given(st.lists(st.tuples(st.integers(0, layout.WORDS - 1), st.integers(0, (1 << 64) - 1)), max_size=30))
def test_whatever_a_block_holds_reading_it_ends_in_a_snapshot_or_a_format_error(
    changes: list[tuple[int, int]],
) -> None:
    raw = BLOCK
    for word, value in changes:
        raw = forged(raw, word, value)
    try:
        s = parse(raw)
    except FormatError:
        return
    assert s.to_dict()["flows"] is not None
    assert str(s.command).isprintable()


BLOCK = block()


def test_control_characters_of_a_command_line_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["x\x1b[2J", "\n"])
    assert parse(Counters(Settings()).block()).command == "x\\x1b[2J \\n"


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (Header.ROWS, layout.MOST_ROWS + 1),
        (layout.ROWS_AT + layout.ROW_ENTRIES, layout.WORDS << 2),
        (layout.ROWS_AT + layout.ROW_ENTRIES, Header.PID << 2),
        (layout.ROWS_AT + layout.ROW_ENTRIES, layout.GLOBALS_AT << 2 | 3),
    ],
)
def test_sums_that_point_out_of_the_counters_are_refused(job: Maker, word: int, value: int) -> None:
    raw = block(job(("direct", 4096)))
    assert parse(raw).fastpath_bytes == 4096
    with pytest.raises(FormatError, match="row"):
        parse(forged(raw, word, value))
