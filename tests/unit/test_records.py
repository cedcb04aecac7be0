"""Records stand for frozen dataclasses with slots: whatever a program does with one of those, it can do with a record."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from typing import Any

import pytest

import nobounce
from nobounce.records import field, record, replace


@record
class Point:
    """A place."""

    x: int
    y: int = 2
    tags: list[str] = field(default_factory=list)
    _hidden: int = 0

    @property
    def sum(self) -> int:
        return self.x + self.y


@dataclasses.dataclass(frozen=True, slots=True)
class Plain:
    """A place."""

    x: int
    y: int = 2
    tags: list[str] = dataclasses.field(default_factory=list)
    _hidden: int = dataclasses.field(default=0, repr=False, compare=False)

    @property
    def sum(self) -> int:
        return self.x + self.y


@record(frozen=False)
class Counter:
    n: int = 0


BOTH = pytest.mark.parametrize("kind", [Point, Plain])


@BOTH
def test_fields_by_position_name_and_default(kind: Any) -> None:
    assert (kind(1).x, kind(1).y, kind(1, 5).y, kind(y=3, x=1).sum) == (1, 2, 5, 4)
    assert kind(1).tags == []
    assert kind(1).tags is not kind(1).tags
    for wrong in ((), (1, 2, [], 0, 5)):
        with pytest.raises(TypeError):
            kind(*wrong)
    with pytest.raises(TypeError):
        kind(1, z=2)


@BOTH
def test_it_is_compared_and_shown_by_what_is_not_hidden(kind: Any) -> None:
    assert kind(1, 2, [], 7) == kind(1)
    assert kind(1) != kind(2)
    assert kind(1) != (1, 2, [])
    assert repr(kind(1)) == f"{kind.__name__}(x=1, y=2, tags=[])"
    assert hash(kind(1, 2, ())) == hash(kind(1, 2, (), 7))
    match kind(4, 5):
        case Point(x, y) | Plain(x, y):
            assert (x, y) == (4, 5)


@BOTH
def test_it_is_frozen_and_has_no_dictionary(kind: Any) -> None:
    for break_it in (lambda: setattr(kind(1), "x", 3), lambda: delattr(kind(1), "x")):
        with pytest.raises(dataclasses.FrozenInstanceError, match="field 'x'"):
            break_it()
    with pytest.raises((AttributeError, TypeError)):  # TypeError is a mistake of dataclasses'
        kind(1).other = 3
    assert not hasattr(kind(1), "__dict__")


@BOTH
def test_dataclasses_takes_it_for_one_of_its_own(kind: Any) -> None:
    assert dataclasses.is_dataclass(kind)
    assert [f.name for f in dataclasses.fields(kind)] == ["x", "y", "tags", "_hidden"]
    assert dataclasses.asdict(kind(1)) == {"x": 1, "y": 2, "tags": [], "_hidden": 0}
    assert dataclasses.astuple(kind(1)) == (1, 2, [], 0)
    assert dataclasses.replace(kind(1), x=3) == kind(3)
    assert dataclasses.fields(kind)[1].default == 2
    assert dataclasses.fields(kind)[2].default_factory is list


@BOTH
def test_it_survives_pickle_and_copy(kind: Any) -> None:
    one = kind(1, 3, ["a"], 9)
    for other in (pickle.loads(pickle.dumps(one)), copy.copy(one), copy.deepcopy(one)):
        assert other == one
        assert other._hidden == 9


@BOTH
def test_its_signature_is_that_of_its_fields(kind: Any) -> None:
    assert list(inspect.signature(kind).parameters) == ["x", "y", "tags", "_hidden"]
    assert inspect.signature(kind).parameters["y"].default == 2
    assert inspect.signature(kind).parameters["x"].annotation == "int"


def test_replace_without_dataclasses() -> None:
    assert replace(Point(1, 2, [], 4), y=9)._hidden == 4
    with pytest.raises(TypeError):
        replace(Point(1), z=9)


def test_a_record_that_is_not_frozen_equals_itself_alone() -> None:
    one, other = Counter(), Counter()
    one.n += 1
    assert (one.n, other.n) == (1, 0)
    assert Counter(1) != Counter(1)
    assert len({one, other}) == 2


def test_public_records_are_dataclasses_to_their_users() -> None:
    for kind in (
        nobounce.Receipt,
        nobounce.Settings,
        nobounce.Refusal,
        nobounce.Route,
        nobounce.StreamOptions,
    ):
        assert dataclasses.is_dataclass(kind)
        assert "self" not in inspect.signature(kind).parameters
