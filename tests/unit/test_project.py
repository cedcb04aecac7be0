"""The promises that the repository makes about itself."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import nobounce

ROOT = Path(__file__).parents[2]
PACKAGE = Path(nobounce.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
LISTS_NAMES = {
    "__init__.py",
    "hip/__init__.py",
    "hipfile/__init__.py",
    "kv/__init__.py",
    "testing/__init__.py",
}
MOST_LINES = 420

# A letter in brackets, so that this file does not hold what it looks for.
UNFINISHED = re.compile(r"T[O]DO|FIX[M]E|\bX{3}\b|raise NotImplemented[E]rror|pragma: no [c]over")
REGISTRIES = re.compile(r"pypi[.]org|python[h]osted|npm[j]s|deb[i]an\.org|download\.py[t]orch")
DEVELOPER_PATHS = re.compile(r"/(?:home|Users)/\w+/|/[r]oot/|/opt/[w]heels")


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def project_files() -> list[Path]:
    """Tracked files, or every file where there is no repository (an unpacked sdist)."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        found = [ROOT / name for name in listed.split("\0") if name]
    else:
        made = {"__pycache__", ".pytest_cache", ".hypothesis"}
        found = [p for p in ROOT.rglob("*") if not made.intersection(p.relative_to(ROOT).parts)]
    return [path for path in found if path.is_file()]


@pytest.mark.parametrize("document", ["README.md", "Makefile"])
def test_every_make_command_named_is_a_target(document: str) -> None:
    named = set(
        re.findall(r"(?:^|[`\"])make ([a-z][\w-]*)", (ROOT / document).read_text(), flags=re.MULTILINE)
    )
    assert named, "no command found: the pattern is wrong"
    assert named <= targets()


def test_the_readme_names_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert {"make demo", "make test"} <= set(readme.splitlines())


def test_every_script_the_makefile_runs_exists() -> None:
    scripts = re.findall(r"\b(?:benchmarks|examples|tests|tools)/[\w/]+\.py", (ROOT / "Makefile").read_text())
    assert scripts
    assert [s for s in scripts if not (ROOT / s).is_file()] == []


def test_the_changelog_knows_this_version() -> None:
    assert f"## {nobounce.__version__} " in (ROOT / "CHANGELOG.md").read_text()


def test_package_inits_are_empty_but_those_that_list_names() -> None:
    inits = [p for p in SOURCES if p.name == "__init__.py"]
    assert [relative(p) for p in inits if p.stat().st_size and relative(p) not in LISTS_NAMES] == []


def test_every_package_has_its_init() -> None:
    folders = {p.parent for p in SOURCES}
    assert [relative(f) for f in folders if not (f / "__init__.py").is_file()] == []


def test_modules_have_one_subject() -> None:
    lengths = {relative(p): len(p.read_text().splitlines()) for p in SOURCES}
    assert {name: n for name, n in lengths.items() if n > MOST_LINES} == {}


def test_what_tests_share_has_one_name() -> None:
    """`tests.capabilities` is a second module beside `capabilities`: its MissingCapability is no skip to conftest.py."""
    twins = re.compile(r"^\s*(?:from|import) tests\b", re.MULTILINE)
    assert [
        str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("*.py") if twins.search(p.read_text())
    ] == []


def test_nothing_is_left_unfinished() -> None:
    found = {relative(p): UNFINISHED.findall(p.read_text()) for p in SOURCES}
    assert {name: words for name, words in found.items() if words} == {}


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    wrong = []
    for path in project_files():
        text = path.read_bytes().decode("utf-8", "ignore")
        hits = [*DEVELOPER_PATHS.findall(text), *REGISTRIES.findall(text)]
        if len(ROOT.parts) > 2 and f"{ROOT}/" in text:
            hits.append(str(ROOT))
        wrong += [f"{path.relative_to(ROOT)}: {hit}" for hit in hits]
    assert wrong == []


def test_sentences_name_who_acts() -> None:
    """Not "nobody waits", but which thread, caller or process does not."""
    riddles = re.compile(r"\b(?:whoever|nobody|somebody|no one)\b", re.IGNORECASE)
    old = ("io/", "formats/")  # sentences there are older than this rule
    found = {relative(p): riddles.findall(p.read_text()) for p in SOURCES if not relative(p).startswith(old)}
    assert {name: words for name, words in found.items() if words} == {}
