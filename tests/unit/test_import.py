from __future__ import annotations

import subprocess
import sys

import pytest

from pace import assert_takes_under

LIMIT_SECONDS = 0.06
HEAVY = ("numpy", "torch", "rich", "typer", "cuda", "rocm", "ml_dtypes", "safetensors")

MEASURE = """
import sys, time
begin = time.perf_counter()
import nobounce
print(time.perf_counter() - begin)
print(*sorted(m.partition(".")[0] for m in sys.modules))
"""


def child() -> tuple[float, set[str]]:
    """Seconds that `import nobounce` takes in a new interpreter, and the packages loaded after it."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, timeout=60
    )
    seconds, loaded = done.stdout.splitlines()
    return float(seconds), set(loaded.split())


@pytest.mark.serial
def test_import_takes_under_60_ms() -> None:
    child()  # compiles what is not yet compiled
    assert_takes_under(LIMIT_SECONDS, lambda: child()[0], tries=15)


def test_import_loads_nothing_heavy() -> None:
    assert not child()[1].intersection(HEAVY)
