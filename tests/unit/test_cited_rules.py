"""Every rule, item and case that a docstring, a comment or a page cites can be looked up in docs/rules/."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import nobounce

ROOT = Path(__file__).parents[2]
SOURCES = Path(nobounce.__file__).parent
RULES = re.compile(r"\b[Rr]ules?\s+(\d+(?:\s*(?:,|to|and|-)\s*\d+)*)")
ITEMS = re.compile(r"(?<![\w-])([A-J])-(\d+)(?: to (?:\1-)?(\d+))?(?![\w-])")
CASES = re.compile(r"\b[Cc]ases? (C\d+(?:(?:, | and | to )C\d+)*)")
NAMED = re.compile(r"def test_((?:C\d+_)+)")


def spans(text: str) -> set[int]:
    """The numbers of "46-51, 57" and of "46 to 51 and 57"."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:\s*(?:to|-)\s*(\d+))?", text):
        found |= set(range(int(first), int(last or first) + 1))
    return found


def cited(text: str) -> set[str]:
    names = {f"{n}" for m in RULES.finditer(text) for n in spans(m.group(1))}
    for letter, first, last in ITEMS.findall(text):
        names |= {f"{letter}-{n}" for n in range(int(first), int(last or first) + 1)}
    for numbers in CASES.findall(text):
        names |= {f"C{n}" for n in spans(numbers.replace("C", ""))}
    return names


def listed() -> set[str]:
    names: set[str] = set()
    for page in (ROOT / "docs/rules").glob("*.md"):
        for first, last in re.findall(r"^- \*\*([A-J]-\d+|C?\d+)(?: to (C\d+))?\*\*", page.read_text(), re.M):
            names.add(first)
            if last:
                names |= {f"C{n}" for n in range(int(first[1:]), int(last[1:]) + 1)}
    return names


def test_every_citation_resolves() -> None:
    pages = [p for p in SOURCES.glob("**/*.py") if "page" not in p.parts]
    pages += [*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]
    pages += [p for folder in ("tests", "benchmarks", "examples") for p in ROOT.glob(f"{folder}/**/*.py")]
    pages.remove(Path(__file__))
    known = listed()
    assert len(pages) > 500
    assert not {f"{page.name}: {name}" for page in pages for name in cited(page.read_text()) - known}


def test_cases_that_name_a_test_are_listed() -> None:
    known = listed()
    found = {
        (path.name, number)
        for path in ROOT.glob("tests/**/test_*.py")
        for names in NAMED.findall(path.read_text())
        for number in re.findall(r"\d+", names)
    }
    assert len(found) > 50
    assert not {(name, n) for name, n in found if not {f"C{n}", f"C-{n}"} & known}


def test_no_rule_is_listed_twice() -> None:
    for page in (ROOT / "docs/rules").glob("*.md"):
        names = re.findall(r"^- \*\*([^*]+)\*\*", page.read_text(), re.M)
        assert len(names) == len(set(names)), page


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("HIP rule 118", {"118"}),
        ("HIP rules 46-51, 57 say", {"46", "47", "48", "49", "50", "51", "57"}),
        ("rules 73, 74 and 76)", {"73", "74", "76"}),
        ("hipFile A-16 to A-18", {"A-16", "A-17", "A-18"}),
        ("(A-36, A-37), C-10", {"A-36", "A-37", "C-10"}),
        ("cases C72 to C74", {"C72", "C73", "C74"}),
        ("(cases C1, C2)", {"C1", "C2"}),
        ("UTF-8, x-A-3", set()),
    ],
)
def test_what_counts_as_a_citation(text: str, names: set[str]) -> None:
    assert cited(text) == names
