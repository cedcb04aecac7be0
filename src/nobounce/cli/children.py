"""Running somebody's program under observation: its command line, its environment, its exit code."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from nobounce.errors import ArgumentError, printable


def command_line(program: Sequence[str]) -> list[str]:
    """What to execute for PROGRAM args: `nobounce` is this one, a .py file that cannot be executed goes to this Python.

    Raises ArgumentError for a program that is not there.
    """
    if not program:
        raise ArgumentError("no program: write it after --, as in `-- python train.py`")
    first, rest = program[0], list(program[1:])
    if first == "nobounce":
        return [sys.executable, "-m", "nobounce.cli.main", *rest]
    if first == "python" and shutil.which("python") is None:
        return [sys.executable, *rest]
    if first.endswith(".py") and os.path.isfile(first) and not os.access(first, os.X_OK):
        return [sys.executable, first, *rest]
    if shutil.which(first) is None:
        raise ArgumentError(f"there is no program {printable(first)}")
    return [first, *rest]


def run_program(
    program: Sequence[str],
    environment: Mapping[str, str],
    tick: Callable[[subprocess.Popen[bytes]], None] | None = None,
    every: float = 0.1,
) -> int:
    """Run it with its own stdin, stdout and stderr; `tick` is called while it runs. Returns its exit code, 128 + n for signal n.

    Interrupts from the terminal reach the program by themselves; a SIGTERM sent to us is passed on.
    """
    child = subprocess.Popen(command_line(program), env={**os.environ, **environment})
    old_int = signal.signal(signal.SIGINT, signal.SIG_IGN)
    old_term = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    try:
        while True:
            if tick is not None:
                tick(child)
            try:
                code = child.wait(every if tick is not None else None)
                break
            except subprocess.TimeoutExpired:
                continue
    finally:
        signal.signal(signal.SIGINT, old_int)
        signal.signal(signal.SIGTERM, old_term)
    return code if code >= 0 else 128 - code
