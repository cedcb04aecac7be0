"""Mutated files of the other formats: a sound Header, or FormatError that names the file."""

from __future__ import annotations

import random

import pytest

from fuzz import fuzz_formats
from scale import cases


@pytest.mark.parametrize("kind", fuzz_formats.MAKERS)
def test_mutated_files(kind: str) -> None:
    for seed in range(cases(200_000, 500)):
        raw, wrong = fuzz_formats.one(kind, random.Random(seed))
        assert wrong is None, f"seed {seed}: {wrong}\n{raw!r}"


@pytest.mark.parametrize("kind", fuzz_formats.MAKERS)
def test_what_the_fuzzer_starts_from_is_read(kind: str) -> None:
    for seed in range(100):
        raw = fuzz_formats.MAKERS[kind](random.Random(seed))
        fuzz_formats.check_sound(fuzz_formats.read(raw), raw)
