"""Mutated captures: `check --replay` judges each or refuses it in one sentence that names the file and the place."""

from __future__ import annotations

import copy
import json

import pytest

from captured import REQUEST, captures, judge, replay, tar
from fuzz.mutators import JUNK, Mutator
from nobounce.facts.source import SCHEMA
from scale import cases


@pytest.mark.parametrize("which", [0, 1])
def test_an_error_in_place_of_each_answer(which: int) -> None:
    """What no machine refuses is refused when the capture is read; everything else is an error that its asker expects."""
    answers = captures()[which]
    codes = [13, 2, 4095][: cases(3, 1)]
    for key in sorted(answers):
        for code in codes:
            judge({**answers, key: {"errno": code}})


@pytest.mark.parametrize("which", [0, 1])
def test_junk_in_place_of_each_answer(which: int) -> None:
    answers = captures()[which]
    keys = sorted(answers)
    junk = [copy.deepcopy(j) for j in JUNK]
    pairs = [(key, value) for key in keys for value in junk]
    for key, value in pairs[:: len(pairs) // cases(len(pairs), 60)]:
        judge({**answers, key: {"value": value}})


def test_mutated_captures() -> None:
    for seed in range(cases(10_000, 60)):
        mutator = Mutator(seed)
        try:
            judge(mutator.answers(captures()[seed % 2]))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error


def test_the_command_ends_with_one_of_its_codes() -> None:
    for seed in range(cases(3_000, 30)):
        mutator = Mutator(seed)
        changed = mutator.answers(captures()[seed % 2])
        request = mutator.mutate(copy.deepcopy(REQUEST))
        replay(tar(json.dumps({"schema": SCHEMA, "answers": changed}), json.dumps(request)))
