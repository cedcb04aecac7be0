"""Section K is complete: each of its 215 items is a test named by its number, or is in the table with a reason."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

HERE = Path(__file__).parent
ITEMS = set(range(1, 216))


def _tested() -> set[int]:
    found: set[int] = set()
    for path in HERE.glob("test_K*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found |= {int(n) for n in re.findall(r"_K(\d{3})", node.name)}
    return found


def _not_run() -> dict[int, str]:
    spec = importlib.util.spec_from_file_location("not_run", HERE / "not_run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.NOT_RUN)


def test_every_item_is_a_test_or_has_a_reason() -> None:
    tested, left_out = _tested(), _not_run()
    assert tested | left_out.keys() == ITEMS
    assert not tested & left_out.keys()


def test_reasons_are_of_three_kinds() -> None:
    for number, reason in _not_run().items():
        assert reason.startswith(("bound to an AMD card: ", "K15, ", "K16, ")), number
