from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pace import assert_takes_under

IMPORT_SECONDS, LOAD_SECONDS = 0.04, 0.07
HEAVY = {"numpy", "torch", "rich", "typer", "cuda", "rocm", "ml_dtypes", "safetensors"}
NOT_FOR_A_LOAD = HEAVY | {
    "asyncio",
    "dataclasses",
    "inspect",
    "multiprocessing",
    "random",
    "socket",
    "subprocess",
    "tempfile",
}
"""Modules of others that take a millisecond or more, which no load needs."""
MODULES = Path(__file__).with_name("imported.txt")

MEASURE = """
import sys, time
before = set(sys.modules)
begin = time.perf_counter()
import nobounce
{then}
print(time.perf_counter() - begin)
print(*sorted(set(sys.modules) - before))
"""


def child(then: str = "", *arguments: str) -> tuple[float, set[str]]:
    """Seconds that `import nobounce` and `then` take in a new interpreter, and the modules loaded by them."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE.format(then=then), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    seconds, loaded = done.stdout.splitlines()
    return float(seconds), set(loaded.split())


@pytest.mark.serial
@pytest.mark.parametrize(("then", "seconds"), [("", IMPORT_SECONDS), ("nobounce.load", LOAD_SECONDS)])
def test_import_takes_milliseconds(then: str, seconds: float, tmp_path: Path) -> None:
    compiled = f"sys.pycache_prefix = {str(tmp_path)!r}; sys.dont_write_bytecode = False\n"
    code = MEASURE.format(then=then).replace("before =", compiled + "before =")

    def measured() -> float:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
        )
        return float(done.stdout.splitlines()[0])

    measured()  # compiles what is not yet compiled
    assert_takes_under(seconds, measured, tries=15)


def test_import_loads_nothing_heavy() -> None:
    assert not {name.partition(".")[0] for name in child()[1]} & HEAVY


def test_a_first_load_imports_what_it_needs_and_nothing_else(tmp_path: Path) -> None:
    """A module that is not in imported.txt costs every first load 0.3 ms and more: import it where it is needed, or add its name."""
    path = tmp_path / "m.safetensors"
    header = b'{"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
    listed = set(MODULES.read_text().split())
    _, imported = child("nobounce.load")
    _, loaded = child("nobounce.load(sys.argv[1], device='cpu')", str(path))
    assert not {name.partition(".")[0] for name in loaded} & NOT_FOR_A_LOAD
    ours = {name for name in imported | loaded if name.partition(".")[0] == "nobounce"}
    assert ours <= listed, sorted(ours - listed)
    assert listed <= ours, sorted(listed - ours)  # what is gone is taken from the list
