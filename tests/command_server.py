"""The command line in forked children of one process that has imported it: hundreds of runs in seconds.

A request is one JSON line on stdin, its answer one on stdout. Each child begins as `python -m nobounce` would: with its own
arguments, variables, folder and standard streams, and with the calls to the system counted, one of them failing if asked.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

CLOSED, FULL, GONE = "closed", "/dev/full", "gone"
"""A standard stream that is closed, that has no room, or that is a pipe without a reader."""


@dataclass(frozen=True)
class Done:
    code: int
    """The exit code; -9 where the run took too long."""
    stdout: str
    stderr: str
    calls: dict[str, int]
    """How often each kind of call was made."""
    failed: bool
    """Whether the call that was to fail was reached."""


class CommandServer:
    """Runs verbs; the methods are for tests, the rest of the file runs in the other process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-W", "error", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.path.dirname(__file__)},
        )

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=30)

    def run(
        self,
        *arguments: str | Path,
        cwd: Path,
        fail: tuple[str, int, int] | None = None,
        env: Mapping[str, str] | None = None,
        stdout: str = "",
        stderr: str = "",
        seconds: int = 60,
    ) -> Done:
        """One run. `fail` is (kind of call, which of them, errno); the streams are captured, or one of the constants above."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {
            "arguments": [os.fspath(a) for a in arguments],
            "cwd": str(cwd),
            "fail": fail,
            "env": dict(env or {}),
            "streams": [stdout, stderr],
            "seconds": seconds,
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Done(**json.loads(self._process.stdout.readline()))


@contextlib.contextmanager
def serving() -> Iterator[CommandServer]:
    """A server for the block."""
    server = CommandServer()
    try:
        yield server
    finally:
        server.close()


def _preload() -> None:
    import nobounce

    for module in pkgutil.walk_packages(nobounce.__path__, "nobounce."):
        if not module.name.startswith(
            ("nobounce.testing", "nobounce.runtimes.gpu.cuda", "nobounce.runtimes.gpu.hip")
        ):
            importlib.import_module(module.name)
    # What typer and rich import at first use.
    from typer.testing import CliRunner

    from nobounce.cli.main import app

    for arguments in (["cp", "--help"], ["cp", "--bogus"]):
        CliRunner().invoke(app, arguments)


def _stream(fd: int, kind: str, captured: IO[bytes]) -> None:
    """Make `fd` what was asked for, and sys.stdout or sys.stderr what Python makes of that."""
    name = ("stdin", "stdout", "stderr")[fd]
    if kind == CLOSED:
        os.close(fd)
        setattr(sys, name, None)
        return
    if kind == GONE:
        read, write = os.pipe()
        os.close(read)
    else:
        write = os.dup(captured.fileno()) if not kind else os.open(kind, os.O_WRONLY)
    os.dup2(write, fd)
    os.close(write)
    encoding = os.environ.get("PYTHONIOENCODING") or "utf-8"
    text = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(fd, "w", closefd=False)),
        encoding=encoding,
        errors="strict" if fd == 1 else "backslashreplace",
        line_buffering=fd == 2,
    )
    setattr(sys, name, text)


def _become(request: dict[str, Any], captured: Sequence[IO[bytes]], told: IO[bytes]) -> None:
    """The child: never returns."""
    import atexit
    import fcntl

    import failing_calls

    os.setsid()
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for fd, kind, file in zip((1, 2), request["streams"], captured, strict=True):
        _stream(fd, kind, file)
    sys.argv = ["nobounce", *request["arguments"]]
    saved = fcntl.fcntl(told.fileno(), fcntl.F_DUPFD_CLOEXEC, 100)  # the file itself is closed by then
    calls = failing_calls.install(*(request["fail"] or ("", 0, 0)))
    atexit.register(lambda: calls.save(saved))
    from nobounce.__main__ import main

    main()


def _serve() -> None:
    _preload()
    gc.freeze()  # children share these pages, and do not look at them when they end
    answers = os.dup(1)
    os.dup2(2, 1)
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        with (
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
            tempfile.TemporaryFile() as told,
        ):
            pid = os.fork()
            if pid == 0:
                os.close(answers)
                _become(request, (out, err), told)
                sys.exit(0)
            code = _wait(pid, request["seconds"])
            texts = [file.seek(0) or file.read().decode("utf-8", "backslashreplace") for file in (out, err)]
            told.seek(0)
            answer = {"code": code, "stdout": texts[0], "stderr": texts[1]}
            answer |= json.loads(told.read() or b'{"calls": {}, "failed": false}')
        os.write(answers, json.dumps(answer).encode() + b"\n")


def _wait(pid: int, seconds: int) -> int:
    import select
    import signal

    handle = os.pidfd_open(pid)
    if not select.select([handle], [], [], seconds)[0]:
        os.kill(pid, signal.SIGABRT)  # faulthandler shows where it hangs
        select.select([handle], [], [], 5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    import faulthandler

    faulthandler.enable()
    try:
        _serve()
    except Exception:
        traceback.print_exc()
        sys.exit(1)
