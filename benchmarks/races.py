"""Fair races.

One child process per run, its modules imported before the clock starts; competitors take turns, in another order each round; the
parent holds a touched pool of memory and frees it just before each load. On virtual machines memory that was given back to
the host costs several times more to touch again, so that whoever runs after a pause would lose.
"""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import common
import numpy as np

State = Literal["cold", "warm"]
CHILD_SECONDS = 600


class Pool:
    """Touched memory, held while nobody loads and freed just before a load. Sizes in bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = min(nbytes, common.meminfo("MemAvailable") // 3)
        self._memory: mmap.mmap | None = None

    def fill(self) -> None:
        """Map the pool and write to each of its pages."""
        if self._memory is None and self.nbytes:
            self._memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._memory.madvise(mmap.MADV_HUGEPAGE)
            np.frombuffer(self._memory, np.uint8)[:: common.PAGE] = 1

    def free(self) -> None:
        """Give it all to whoever allocates next."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One run. Seconds of wall, user and system time; bytes; `disk_bytes` were read from a block device during the load.

    `imported` names modules that were first imported under the clock, which should be none.
    `peak_growth_bytes` is how far the peak of resident memory rose beyond what was resident before, less the tensors' bytes.
    """

    loader: str
    file: str
    state: State
    run: int
    nbytes: int = 0
    seconds: float = 0.0
    user_seconds: float = 0.0
    system_seconds: float = 0.0
    peak_growth_bytes: int = 0
    disk_bytes: int | None = None
    cache_growth_bytes: int = 0
    imported: tuple[str, ...] = ()
    digest: str = ""
    receipt: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def gibps(self) -> float:
        return self.nbytes / common.GIB / self.seconds

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def rounds(names: Sequence[str], runs: int) -> Iterator[tuple[int, str]]:
    """Everybody once a round, each round in another order, the same orders every time.

    In a fixed order everybody always comes after the same one, and a disk that saves up while it is used little gives less after
    a fast reader than after a slow one.
    """
    draw, order, last = random.Random(runs), list(names), None
    for run in range(runs):
        draw.shuffle(order)
        while order == last and len(order) > 1:
            draw.shuffle(order)
        last = list(order)
        yield from ((run, name) for name in last)


def run_child(command: Sequence[str], get_ready: Callable[[], None]) -> dict[str, Any]:
    """Start a child, wait until its modules are imported, call `get_ready`, let it go, return what it says of its load.

    The last argument that the child is given is the descriptor to answer on: a line "ready", then one line of JSON. A child
    that dies or says nothing for `CHILD_SECONDS` is an answer, too: {"error": why}. It is gone when this returns or raises.
    """
    answers, theirs = os.pipe()
    with open(answers, "rb", buffering=0) as lines, tempfile.TemporaryFile() as words:
        try:
            child = subprocess.Popen(
                [sys.executable, *command, str(theirs)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=words,
                pass_fds=(theirs,),
            )
        finally:
            os.close(theirs)
        try:
            line = _line(lines)
            if line == b"ready\n":
                get_ready()
                _say(child, b"go\n")
                line = _line(lines)
            if line:
                return dict(json.loads(line))
            child.wait(CHILD_SECONDS)
            words.seek(0)
            said = words.read().decode(errors="replace").strip().splitlines()
            return {"error": said[-1] if said else f"exit code {child.returncode}"}
        finally:
            if child.poll() is None:
                child.kill()
            child.communicate()


def _say(child: subprocess.Popen[bytes], words: bytes) -> None:
    # A child that is gone is noticed when it is asked for its answer.
    if child.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(words)
            child.stdin.flush()


def _line(lines: io.FileIO) -> bytes:
    """The next line; b"" if the other side closed before it was whole."""
    text, until = b"", time.monotonic() + CHILD_SECONDS
    while not text.endswith(b"\n"):
        if not select.select([lines], [], [], max(0.0, until - time.monotonic()))[0]:
            return json.dumps({"error": f"no answer in {CHILD_SECONDS} s"}).encode()
        got = lines.read(1 << 16)
        if not got:
            return b""
        text += got
    return text


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, minimum, maximum)."""
    return statistics.median(values), min(values), max(values)


class Results:
    """The samples so far, and what can be asked of them."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def of(self, file: str, state: State, name: str) -> list[Sample]:
        """The good samples of one loader."""
        return [s for s in self.samples if (s.file, s.state, s.loader) == (file, state, name) and not s.error]

    def median(self, file: str, state: State, name: str) -> float | None:
        """Median seconds; None without a good sample."""
        good = self.of(file, state, name)
        return spread([s.seconds for s in good])[0] if good else None
