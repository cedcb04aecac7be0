"""Running a user's program under observation: its command line, its environment, its exit code."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from nobounce.errors import ArgumentError, FileError, named

OURS = (sys.executable, "-P", "-m")
"""This interpreter for a module of nobounce. Without -P it would take `json.py` and the like
from the current folder."""


def command_line(program: Sequence[str]) -> list[str]:
    """What to execute for PROGRAM args: `nobounce` is this one; a .py file that the system cannot execute by
    itself, and a module after -m, go to this Python.

    Raises ArgumentError for a program that is not there or may not be executed.
    """
    if not program:
        raise ArgumentError("no program: write it after --, as in `-- python train.py`")
    first, rest = program[0], list(program[1:])
    if first == "nobounce":
        return [*OURS, "nobounce", *rest]
    if first == "python" and shutil.which("python") is None:
        return [sys.executable, *rest]
    if first == "-m" and rest:
        return [sys.executable, "-m", *rest]
    if first.endswith(".py") and os.path.isfile(first) and not _executable(first):
        return [sys.executable, first, *rest]
    if shutil.which(first) is None:
        raise ArgumentError(_why_not(first))
    return [first, *rest]


def _why_not(program: str) -> str:
    shown = named(program)
    if os.path.isdir(program):
        return f"{shown} is a folder, no program"
    if not os.path.isfile(program):
        return f"there is no program {shown}"
    if os.path.dirname(program):
        return f"{shown} is not executable: run `chmod +x` on it, or write its interpreter before it"
    return f"there is no program {shown} in PATH; for the file of that name in this folder write ./{shown}"


def _executable(path: str) -> bool:
    try:
        with open(path, "rb") as f:
            return os.access(path, os.X_OK) and f.read(2) == b"#!"
    except OSError:
        return os.access(path, os.X_OK)


_OPENBLAS = "OPENBLAS_NUM_THREADS"
_ours: list[str] = []
"""What this process has put into its own environment."""


def spare_threads() -> None:
    """Have numpy's OpenBLAS, which nothing here needs, start no threads: it sends this process
    a SIGINT where it cannot."""
    if _OPENBLAS not in os.environ:
        os.environ[_OPENBLAS] = "1"
        _ours.append(_OPENBLAS)


def _inherited() -> dict[str, str]:
    """The environment of a program that is not ours."""
    return {name: value for name, value in os.environ.items() if name not in _ours}


def run_program(
    program: Sequence[str],
    environment: Mapping[str, str],
    tick: Callable[[subprocess.Popen[bytes]], None] | None = None,
    every: float = 0.1,
) -> int:
    """Run it with its own stdin, stdout and stderr; `tick` is called while it runs. Returns its exit
    code, 128 + n for signal n.

    Interrupts from the terminal reach the program by themselves; SIGTERM and SIGHUP are passed on. Raises
    ArgumentError for what is not there, FileError for what cannot be executed.
    """
    command = command_line(program)
    child: subprocess.Popen[bytes] | None = None
    asked: list[int] = []

    def pass_on(number: int, _: object) -> None:
        asked.append(number)
        if child is not None:
            child.send_signal(number)

    passed = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    old = {number: signal.signal(number, pass_on) for number in passed}
    try:
        try:
            child = subprocess.Popen(command, env={**_inherited(), **environment})
        except FileNotFoundError as e:
            shown = named(command[0])
            raise ArgumentError(f"{shown}: the interpreter that its first line names is not there") from e
        except OSError as e:
            raise FileError.from_oserror(e, command[0], "execute") from e
        old[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in asked:  # while it was being started; twice does no harm
            child.send_signal(number)
        while True:
            if tick is not None:
                tick(child)
            try:
                code = child.wait(every if tick is not None else None)
                break
            except subprocess.TimeoutExpired:
                continue
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
