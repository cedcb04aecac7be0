"""Put each mutant into a copy of the package and run its tests against it: `make mutants`, with words of names to choose by.

Exit code 0 if each of the tests failed with its mutant, and passed without any.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "nobounce"
SECONDS = 300
"""Most that the tests of one mutant may take; those that hang are ended sooner by their own timeouts."""
FAILED = re.compile(r"^(?:FAILED|ERROR) tests/(\S+)", re.MULTILINE)


def mutate(mutant: Mutant, package: Path) -> None:
    """Raises ValueError where the text is not there just once."""
    file = package / mutant.file
    text = file.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(
            f"{mutant.name}: the old text occurs {text.count(mutant.old)} times in {mutant.file}"
        )
    file.write_text(text.replace(mutant.old, mutant.new))


def run_tests(tests: tuple[str, ...], copy: Path) -> tuple[int, set[str]]:
    """(exit code, node ids that failed) of these tests against the package in `copy`."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "--timeout", "25"]
    command += ["-p", "no:cacheprovider", "--basetemp", str(copy / "tmp"), *(f"tests/{t}" for t in tests)]
    log = copy / "log"
    with log.open("w") as out:  # no pipe: a forked child that hangs would keep it open
        tested = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = tested.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(tested.pid, signal.SIGKILL)
            tested.wait()
    said = log.read_text(errors="replace")
    failed = set(FAILED.findall(said))
    if code not in (0, 1) and not failed:
        sys.stdout.write(said[-2000:])
    return code, failed


def killers(tests: tuple[str, ...], code: int, failed: set[str]) -> set[str]:
    """Which of `tests` have failed: one case of a parametrised test is enough. A process that died has failed in all."""
    if code < 0 or code in (3, 134, 137, 139):
        return set(tests)
    return {t for t in tests if any(f == t or f.startswith((f"{t}[", f"{t}::")) for f in failed)}


def copied(folder: str) -> Path:
    """A folder that holds a copy of the package, for PYTHONPATH."""
    copy = Path(folder)
    shutil.copytree(SOURCES, copy / "nobounce", ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants whose name holds one of these words")
    parser.add_argument("--list", action="store_true", help="name the tests that failed")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.words or any(w in m.name for w in options.words)]
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        every = tuple(sorted({t for m in chosen for t in m.tests}))
        code, failed = run_tests(every, copied(folder))
    if code:
        sys.stdout.write(f"without a mutant (exit code {code}): {', '.join(sorted(failed))}\n")
        return 2
    for mutant in chosen:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            copy = copied(folder)
            mutate(mutant, copy / "nobounce")
            code, failed = run_tests(mutant.tests, copy)
        alive = sorted(set(mutant.tests) - killers(mutant.tests, code, failed))
        survivors += [mutant] if alive else []
        word = f"SURVIVED {', '.join(alive)}" if alive else "caught"
        sys.stdout.write(f"{time.monotonic() - began:5.1f} s  {mutant.name}: {word}\n")
        if options.list:
            sys.stdout.write("".join(f"         {f}\n" for f in sorted(failed)))
        sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - len(survivors)} of {len(chosen)} caught\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
