"""The one table of variables."""

from __future__ import annotations

from nobounce.config import VARIABLES, Settings


def test_the_table_s_defaults_are_those_in_force() -> None:
    assert {v.name: getattr(Settings(), v.field) for v in VARIABLES} == {v.name: v.default for v in VARIABLES}
