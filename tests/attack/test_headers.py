"""Mutated headers and indexes: a right answer, as safetensors gives it where it accepts, or FormatError that names the file."""

from __future__ import annotations

import random

from fuzz import fuzz_header
from nobounce.formats import columnscan
from scale import cases


def test_mutated_headers() -> None:
    for seed in range(cases(200_000, 500)):
        raw, wrong = fuzz_header.one(random.Random(seed))
        assert wrong is None, f"seed {seed}: {wrong}\n{raw!r}"


def test_mutated_headers_by_columns(monkeypatch: object) -> None:
    """The same with the scan that long headers take."""
    least = columnscan.MIN_NBYTES
    columnscan.MIN_NBYTES = 0
    try:
        for seed in range(cases(50_000, 300)):
            raw, wrong = fuzz_header.one(random.Random(seed))
            assert wrong is None, f"seed {seed}: {wrong}\n{raw!r}"
    finally:
        columnscan.MIN_NBYTES = least
