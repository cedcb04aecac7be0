"""Long headers checked column by column: the same verdict and the same tensors as the other ways of reading, or no verdict."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from formats_corpus import entry, parse, spellings
from hypothesis import given, settings
from hypothesis import strategies as st

from nobounce import errors
from nobounce.dtypes import DTYPES
from nobounce.formats import columnscan
from nobounce.formats.columns import Columns
from nobounce.formats.header import Header, parse_header
from nobounce.formats.placement import place

assert np  # the scan takes part only where numpy is loaded

KINDS = [name for name in DTYPES if len(name) <= 8]


@pytest.fixture(autouse=True)
def every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnscan, "MIN_NBYTES", 0)


def some(count: int, seed: int = 0) -> tuple[dict[str, Any], int]:
    rng, at, tensors = random.Random(seed), 0, {}
    for i in range(count):
        dtype = rng.choice(KINDS)
        shape = [rng.choice([0, 1, 2, 8, 16, 200]) for _ in range(rng.randrange(5))]
        bits = DTYPES[dtype].bits
        for dim in shape:
            bits *= dim
        if bits % 8:
            shape, bits = [8], 8 * DTYPES[dtype].bits
        tensors[f"{rng.choice(['layer', 'h,', 'x{}:[]', ''])}{i}"] = entry(dtype, shape, at, at + bits // 8)
        at += bits // 8
    return tensors, at


def scan(text: str, data_nbytes: int) -> Columns | None:
    found = columnscan.scan(text.encode(), data_nbytes)
    return None if found is None else found.columns


def both(text: str, data_nbytes: int) -> Iterator[Header | None]:
    """What comes out with the column scan and without it; None for an error."""
    raw = text.encode()
    for least in (0, 1 << 40):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(columnscan, "MIN_NBYTES", least)
            try:
                yield parse_header(
                    raw, path="m", file_nbytes=8 + len(raw) + data_nbytes, data_offset=8 + len(raw)
                )
            except errors.FormatError:
                yield None


@pytest.mark.parametrize("block", [200, 1 << 18])
@pytest.mark.parametrize("spelling", ["compact", "padded", "spaced"])
def test_the_usual_spellings_are_read_and_agree(
    spelling: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columnscan, "_BLOCK", block)
    for seed in range(20):
        tensors, data_nbytes = some(1 + seed * 40, seed)
        text = spellings({"__metadata__": {"format": "pt"}, **tensors})[spelling]
        columns = scan(text, data_nbytes)
        assert columns is not None
        assert len(columns) == len(tensors)
        ours, theirs = both(text, data_nbytes)
        assert ours is not None
        assert ours == theirs
        assert list(ours.tensors) == list(tensors)
        assert ours.metadata == {"format": "pt"}


def test_other_spellings_are_left_to_others() -> None:
    tensors, data_nbytes = some(30)
    for name in ("sorted", "escaped", "indented"):
        assert scan(spellings(tensors)[name], data_nbytes) is None
        ours, theirs = both(spellings(tensors)[name], data_nbytes)
        assert ours == theirs is not None


A, B = (
    '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}',
    '"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}',
)


@pytest.mark.parametrize(
    ("text", "data_nbytes"),
    [
        ("{" + A + "," + B.replace('"b"', '"a"') + "}", 2),
        ("{" + A + "," + B.replace('"b"', '"__metadata__"') + "}", 2),
        ("{" + A + "," + B.replace('"b"', '"\u00e9"') + "}", 2),
        ("{" + A + "," + B.replace('"b"', '"\\u0062"') + "}", 2),
        ("{" + A + "," + B.replace('"b"', '"b\t"') + "}", 2),
        ("{" + B + "," + A + "}", 2),  # out of order: another way reads it
        ("{" + A + "," + B.replace("[1,2]", "[2,3]") + "}", 3),
        ("{" + A + "," + B.replace("[1,2]", "[0,1]") + "}", 1),
        ("{" + A + "," + B.replace("[1,2]", "[01,2]") + "}", 2),
        ("{" + A + "," + B.replace("[1,2]", "[1,02]") + "}", 2),
        ("{" + A + "," + B.replace("[1,2]", "[1]") + "}", 2),
        ("{" + A + "," + B.replace("[1,2]", "[1,2,3]") + "}", 2),
        ("{" + A + "," + B.replace("[1,2]", "[,2]") + "}", 2),
        ("{" + A + "," + B.replace("[1,2]", "[1,]") + "}", 2),
        ("{" + A + "," + B.replace("[1,2]", "[-1,2]") + "}", 2),
        ("{" + A + "," + B.replace('"shape":[1]', '"shape":[01]') + "}", 2),
        ("{" + A + "," + B.replace('"shape":[1]', '"shape":[1,]') + "}", 2),
        ("{" + A + "," + B.replace('"shape":[1]', '"shape":[,1]') + "}", 2),
        ("{" + A + "," + B.replace('"shape":[1]', '"shape":[1 ]') + "}", 2),
        ("{" + A + "," + B.replace('"shape":[1]', '"shape":[2]') + "}", 2),
        (
            "{"
            + A
            + ","
            + B.replace('"shape":[1]', '"shape":[999999999999999999,99,0]').replace("[1,2]", "[1,1]")
            + "}",
            1,
        ),
        ("{" + A + "," + B.replace("U8", "F4") + "}", 2),
        ("{" + A + "," + B.replace("U8", "U9") + "}", 2),
        ("{" + A + "," + B.replace("U8", "") + "}", 2),
        ("{" + A + "," + B + "}", 3),
        ("{" + A + "," + B + "}", 1),
        ("{" + A + B + "}", 2),
        ("{" + A + "," + B + ",}", 2),
        ("{" + A + "," + B + "}}", 2),
        ("{" + A + "," + B, 2),
    ],
)
def test_what_is_in_doubt_is_left_to_others(text: str, data_nbytes: int) -> None:
    assert scan("{" + A + "," + B + "}", 2) is not None
    assert scan(text, data_nbytes) is None


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from(list('0123456789,:{}[]" \\-ax')), st.booleans())
def test_one_wrong_character_is_never_read_otherwise_than_by_others(
    seed: int, char: str, spaced: bool
) -> None:
    tensors, data_nbytes = some(6, seed % 7)
    text = json.dumps(tensors) if spaced else json.dumps(tensors, separators=(",", ":"))
    at = seed % (len(text) + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columnscan, "MIN_NBYTES", 0)
        ours, theirs = both(text[:at] + char + text[at + seed % 2 :], data_nbytes)
    assert ours == theirs


def test_placement_by_columns_is_that_by_tensors() -> None:
    for seed in range(40):
        tensors, data_nbytes = some(12, seed)
        text = json.dumps(tensors, separators=(",", ":")) + " " * (seed % 8)
        ours, theirs = both(text, data_nbytes)
        assert ours is not None
        assert theirs is not None
        for align in (1, 8, 256):
            one, other = place(ours, align=align), place(theirs, align=align)
            assert one == other


@pytest.mark.parametrize(
    ("spans", "data_nbytes"),
    [
        ([(0, 8), (4, 12)], 12),
        ([(0, 8), (0, 8)], 8),
        ([(0, 9), (1, 3), (4, 9)], 9),
        ([(0, 12), (3, 4), (4, 12)], 12),
        ([(4, 8)], 8),
        ([(0, 4), (8, 12)], 12),
        ([(0, 4)], 9),
        ([(0, 4), (4, 8)], 6),
    ],
)
def test_ranges_of_a_header_of_any_length_are_refused_in_the_same_words(
    spans: list[tuple[int, int]], data_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overlaps, holes and rests: a long header's tensors are columns where a short one's are objects."""
    tensors = {f"t{i}": entry("U8", [b - a], a, b) for i, (a, b) in enumerate(spans)}
    words = []
    for large in (1 << 40, 0):
        monkeypatch.setattr(columnscan, "LARGE", large)
        with pytest.raises(errors.FormatError) as caught:
            parse(tensors, data_nbytes)
        words.append((str(caught.value), caught.value.tensor, caught.value.offset))
    assert words[0] == words[1]


def test_numpy_is_not_loaded_for_it() -> None:
    code = """
import sys
from nobounce.formats import columnscan
from nobounce.formats.columns import Columns
columnscan.MIN_NBYTES = 0
raw = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
assert columnscan.scan(raw, 1) is None and "numpy" not in sys.modules
import numpy
assert columnscan.scan(raw, 1) is not None
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_short_headers_do_not_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert parse(json.loads("{" + A + "}"), 1).columns is None
