"""The table of mutants fits the sources: each text is there once, what it becomes still compiles, and its tests are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import nobounce
from mutants.table import MUTANTS, Mutant

SOURCES = Path(nobounce.__file__).parent
TESTS = Path(__file__).parents[1]

each = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)


@each
def test_its_text_is_there_once_and_what_it_becomes_compiles(mutant: Mutant) -> None:
    text = (SOURCES / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    changed = text.replace(mutant.old, mutant.new)
    assert changed != text
    compile(changed, mutant.file, "exec")


@each
def test_its_tests_are_there(mutant: Mutant) -> None:
    assert mutant.tests
    for test in mutant.tests:
        file, _, function = test.partition("::")
        name = re.escape(function.partition("[")[0])
        assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE), test


def test_there_are_thirty_of_different_names() -> None:
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) >= 30
