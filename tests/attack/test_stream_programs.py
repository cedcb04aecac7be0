"""5,000 random stream programs with faults, of seeds that no other test uses."""

from __future__ import annotations

from pathlib import Path

from programs import quick_file, run
from scale import cases

__all__ = ["quick_file"]

FIRST = 1_000_000


def test_random_programs_end_as_the_sequential_model_says(quick_file: Path) -> None:
    run(range(FIRST, FIRST + cases(5_000, 100)), quick_file)
