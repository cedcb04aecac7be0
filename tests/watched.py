"""A program under `nobounce stats` that does its first I/O when the test says so."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAM = """
import os, subprocess, sys, time, nobounce
buffer = nobounce.Device("cpu").allocate(65536)
print("ready", flush=True)
for line in sys.stdin:
    if line != "read\\n":
        subprocess.run(line, shell=True, check=True)
        continue
    begin = time.perf_counter()
    with nobounce.open(sys.argv[1]) as f:
        f.read(buffer, require="fallback")
    print(time.perf_counter() - begin, flush=True)
"""
NBYTES = 65536
"""What one read of the program moves, through fallback."""


@dataclass
class Watched:
    """`stats` and, below it, the program. After the block `code` and `told` are what `stats` ended with."""

    stats: subprocess.Popen[str]
    code: int = -1
    told: dict[str, Any] = field(default_factory=dict)
    errors: str = ""

    def read(self) -> float:
        """Have the program read; the seconds that it took there."""
        return float(self._say("read"))

    def collector(self) -> str:
        """The abstract name that the collector listens on, as every user can see it."""
        for _ in range(1000):
            for line in Path("/proc/net/unix").read_text().splitlines():
                name = line.rpartition(" ")[2]
                if name.startswith(f"@NOBOUNCESTATS-{self.stats.pid:x}-"):
                    return name[1:]
            time.sleep(0.01)
        raise AssertionError("no collector listens")

    def descriptors(self) -> int:
        """How many `stats` has open."""
        return len(list(Path(f"/proc/{self.stats.pid}/fd").iterdir()))

    def _say(self, line: str) -> str:
        assert self.stats.stdin is not None
        assert self.stats.stdout is not None
        self.stats.stdin.write(f"{line}\n")
        self.stats.stdin.flush()
        return self.stats.stdout.readline()


@contextmanager
def watched(data: Path, *options: str, program: str = PROGRAM) -> Iterator[Watched]:
    """`nobounce stats OPTIONS --json -- PROGRAM`, waiting for `read`; its end is waited for."""
    command = [sys.executable, "-m", "nobounce", "stats", "--json", *options]
    with subprocess.Popen(
        [*command, "--", sys.executable, "-c", program, str(data)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as stats:
        assert stats.stdout is not None
        try:
            assert stats.stdout.readline() == "ready\n"
            found = Watched(stats)
            yield found
            _, found.errors = stats.communicate(timeout=60)
        finally:
            stats.kill()
    found.code = stats.returncode
    found.told = json.JSONDecoder().raw_decode(found.errors)[0]
