from __future__ import annotations

import ast
import difflib
from pathlib import Path

import pytest

import api_snapshot
import nobounce


def test_the_public_api_is_what_the_snapshot_says() -> None:
    was, now = api_snapshot.SNAPSHOT.read_text(encoding="utf-8"), api_snapshot.snapshot()
    change = "\n".join(
        difflib.unified_diff(was.splitlines(), now.splitlines(), "snapshot", "now", lineterm="", n=1)
    )
    assert not change, f"`make api` writes the snapshot anew if this is meant\n{change}"


@pytest.mark.parametrize("name", nobounce.__all__)
def test_each_public_name_loads(name: str) -> None:
    assert getattr(nobounce, name) is not None
    assert name in dir(nobounce)


def test_the_list_is_sorted_and_says_each_name_once() -> None:
    assert nobounce.__all__ == sorted(set(nobounce.__all__))


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(nobounce.__file__).read_text(encoding="utf-8"))
    seen = {
        (node.module.removeprefix("nobounce."), alias.name, alias.asname)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("nobounce.")
        for alias in node.names
    }
    assert seen == {(module, name, name) for name, module in nobounce._HOME.items()}


def test_every_public_exception_is_exported() -> None:
    from nobounce import errors

    public = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and not name.startswith("_")
    }
    assert public <= set(nobounce.__all__)


def test_a_misspelt_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = nobounce.lode
