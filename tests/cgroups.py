"""Real control groups for tests, version 1 or 2: a child that runs in one has its limits.

with group("memory", {"memory.limit_in_bytes": 400 << 20, "memory.max": 400 << 20}) as folder:
    subprocess.run([*entering(folder), "nobounce", "bench", "."])
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

_numbers = itertools.count()


def hierarchy(controller: str) -> tuple[Path, str]:
    """(where a group of this controller can be made, the file that says why or ""): the root of its mount."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        point = Path(fields.split()[4])
        if kind == "cgroup" and controller in options.split(","):
            return point, ""
        if kind == "cgroup2" and controller in (point / "cgroup.subtree_control").read_text().split():
            return point, ""
    raise LookupError(f"no mounted hierarchy offers {controller}")


def why_not(controller: str) -> str:
    """Why no group can be made, or ""."""
    try:
        with group(controller, {}):
            return ""
    except (OSError, LookupError) as error:
        return str(error)


@contextlib.contextmanager
def group(controller: str, limits: Mapping[str, int | str]) -> Iterator[Path]:
    """A group with these limits, those whose file it has (the two versions name them differently). Raises OSError, LookupError."""
    folder = hierarchy(controller)[0] / f"nobounce-test-{os.getpid()}-{next(_numbers)}"
    folder.mkdir()
    try:
        for name, value in limits.items():
            if (folder / name).exists():
                (folder / name).write_text(str(value))
        yield folder
    finally:
        folder.rmdir()


def entering(folder: Path) -> list[str]:
    """What to put before a command so that it runs in the group."""
    code = (
        "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); os.execvp(sys.argv[2], sys.argv[2:])"
    )
    return [sys.executable, "-c", code, str(folder / "cgroup.procs")]
