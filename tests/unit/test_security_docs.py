"""docs/security.md says what listens, which variables name code and libraries, and where processes of ours begin: all of them."""

from __future__ import annotations

import re
from pathlib import Path

import nobounce
from nobounce.config import VARIABLES
from nobounce.facts.libraries import FOLLOWED

SOURCES = Path(nobounce.__file__).parent
DOCS = Path(__file__).parents[2] / "docs" / "security.md"


def lines_with(pattern: str) -> dict[str, list[str]]:
    """Lines of our sources that match, by file."""
    found: dict[str, list[str]] = {}
    for path in sorted(SOURCES.rglob("*.py")):
        lines = [x.strip() for x in path.read_text(encoding="utf-8").splitlines() if re.search(pattern, x)]
        if lines:
            found[str(path.relative_to(SOURCES))] = lines
    return found


def test_only_the_collector_listens() -> None:
    assert list(lines_with(r"\.(listen|bind)\(")) == ["observe/collect.py"]


def test_every_python_that_we_start_takes_nothing_from_the_current_folder() -> None:
    started = lines_with(r"sys\.executable")
    assert set(started) == {"checks/cures.py", "cli/children.py", "facts/libraries.py"}
    for path in ("checks/cures.py", "facts/libraries.py"):
        assert all("-P" in line for line in started[path])
    for line in started["cli/children.py"]:
        ours, the_users = '"-P"' in line, "*rest]" in line
        assert ours or the_users, line


def test_each_variable_that_names_a_folder_of_libraries_or_a_file_is_listed() -> None:
    text = DOCS.read_text(encoding="utf-8")
    ours = [v.name for v in VARIABLES if v.kind == "text" and not v.choices]
    # A device and a list of errors: names of nothing that is loaded, opened or written.
    for name in {*FOLLOWED, *ours} - {"NOBOUNCE_DEVICE", "NOBOUNCE_RETRY_ERRNOS"}:
        assert f"`{name}`" in text, name
