"""benchmarks/ab.py: pairs and their ratios, names of versions, rows of each script."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from capabilities import need

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ab.py"


@pytest.fixture(scope="module")
def ab() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("ab", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ab"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["ab"]


def test_the_verdict_is_the_median_of_the_paired_ratios(ab: ModuleType) -> None:
    slower = [(10.0, 9.0), (20.0, 19.0), (1.0, 0.96)]
    faster = [(10.0, 30.0), (10.0, 9.0), (10.0, 11.0)]
    rows = {r["row"]: r for r in ab.compare({"slower": slower, "faster": faster})}
    assert (rows["slower"]["ratio"], rows["slower"]["met"]) == (0.95, False)
    assert (rows["faster"]["ratio"], rows["faster"]["met"]) == (1.1, True)
    assert rows["faster"]["pairs"] == faster, "every sample is kept"


def test_a_time_becomes_a_rate_and_a_row_that_occurs_twice_its_median(ab: ModuleType) -> None:
    found = ab._stats({"counting_us": {"whole": [2.0, 4.0, 8.0]}, "level_0_us": [10.0], "level_1_us": [20.0]})
    assert found == {"counting, whole": 0.25, "4 KiB read, level 0": 0.1, "4 KiB read, level 1": 0.05}
    sample = {"file": "small", "state": "cold", "loader": "nobounce", "nbytes": 12, "error": ""}
    runs = [{**sample, "seconds": s} for s in (2.0, 3.0, 4.0)]
    assert ab._load({"samples": [*runs, {**sample, "seconds": 1.0, "error": "failed"}]}) == {
        "small, cold, nobounce": 4.0
    }


def test_the_others_of_a_race_are_no_rows(ab: ModuleType) -> None:
    """A version is not slower because fio was."""
    samples = [{"contestant": c, "iops": 10.0} for c in ("fio", "fio-tuned", "nobounce", "preadv-32")]
    assert ab._random({"samples": samples}) == {"nobounce": 10.0}


def test_a_version_is_a_name_of_ours_or_git_s(ab: ModuleType) -> None:
    need("git")
    if not (SCRIPT.parents[1] / ".git").exists():
        with pytest.raises(SystemExit, match="no commit"):
            ab.commit_of("HEAD")
        return
    assert len(ab.commit_of("HEAD")) == 40
    with pytest.raises(SystemExit, match=r"none of engine-0"):
        ab.commit_of("no-such-version")
