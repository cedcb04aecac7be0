"""The one place that prints: human text and JSON come from the same data, so they cannot drift apart."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nobounce import __version__
from nobounce.cli import ending, streams
from nobounce.errors import (
    ArgumentError,
    ConfigError,
    FileError,
    NobounceError,
    OutOfMemoryError,
    RouteError,
    errno_name,
    printable,
)

REDRAW_SECONDS = 0.1

DONE, NOT_MET, USAGE = 0, 1, 2
"""Exit codes (docs/cli.md): done; asked for and not met; wrong usage or settings.
128 + n: ended by signal n."""


def document(verb: str, **fields: Any) -> dict[str, Any]:
    """The JSON object of a verb, with its schema and version."""
    return {"schema": f"nobounce.{verb}/1", "version": __version__, **fields}


def emit_json(data: dict[str, Any], results: str = "stdout") -> None:
    """Print one JSON object where results go: on stdout, else on stderr."""
    (sys.stdout if results == "stdout" else sys.stderr).write(json.dumps(data, indent=2) + "\n")


def say(text: str) -> None:
    """Print text on stdout."""
    sys.stdout.write(clean(text) + "\n")


def complain(text: str) -> None:
    """Print text on stderr."""
    sys.stderr.write(clean(text) + "\n")


def clean(text: str) -> str:
    """`text` line by line `printable`. A name in it is escaped before: it could hold a line end."""
    return "\n".join(map(printable, text.split("\n")))


def table(headings: list[str], rows: list[list[str]], *, right: frozenset[int] = frozenset()) -> str:
    """Columns as wide as their widest cell; columns in `right` are right-aligned."""
    widths = [max(len(h), *(len(r[i]) for r in rows)) if rows else len(h) for i, h in enumerate(headings)]

    def line(cells: list[str]) -> str:
        padded = [
            c.rjust(w) if i in right else c.ljust(w)
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(headings), *(line(r) for r in rows)])


def error_fields(error: BaseException) -> dict[str, Any]:
    """An exception as --json shows it."""
    fields: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    code = getattr(error, "errno", None)
    if isinstance(code, int):
        fields["errno"] = errno_name(code)
    for name in ("filename", "file_offset", "offset", "nbytes", "backend", "call", "tensor"):
        value = getattr(error, name, None)
        if value is not None:
            fields[name] = value
    if isinstance(error, RouteError):
        fields["refusals"] = [
            {"code": r.code, "sentence": r.sentence, "cure": r.cure} for r in error.refusals
        ]
    receipt = getattr(error, "receipt", None)
    if receipt is not None:
        fields["receipt"] = receipt.to_dict()
    return fields


def tell(verb: str, error: BaseException, as_json: bool, results: str = "stdout") -> None:
    """Say what went wrong: one line on stderr, whatever the message holds, or one JSON
    object where results go."""
    if as_json:
        emit_json(document(verb, error=error_fields(error)), results)
    else:
        complain(f"nobounce {verb}".rstrip() + f": {printable(str(error))}")


def run(
    verb: str, as_json: bool, action: Callable[[], int], results: str = "stdout", failed: int = NOT_MET
) -> int:
    """Run a verb's action; turn an exception of ours or of the system, or an interrupt, into
    one line and an exit code.

    `results` names where the verb prints its results, "stdout", "stderr" or "" (into a file); JSON of an
    error goes to stderr unless it is "stdout". Results that could not be printed are an error, a reader that
    has gone is none. `failed` is the exit code of errors that are not of usage.
    """
    ending.begin(verb)
    try:
        code = action()
    except KeyboardInterrupt as e:
        ending.tell(e)
        return ending.code(e)
    except Exception as e:
        asked = ending.asked()
        if asked is not None:  # raised inside an import, for one, an interrupt comes out as another error
            ending.tell(asked)
            return ending.code(asked)
        if not isinstance(e, NobounceError | OSError | MemoryError):
            raise
        tell(verb, _ours(e), as_json, results)
        code = USAGE if isinstance(e, ArgumentError | ConfigError) else failed
    return checked(verb, code, results, failed)


def checked(verb: str, code: int, results: str = "stdout", failed: int = NOT_MET) -> int:
    """The exit code, once it is known whether what was printed arrived."""
    why = streams.lost(getattr(sys, results)) if results else ""
    if not why:
        return code
    complain(f"nobounce {verb}".rstrip() + f": cannot write to {results}: {why}")
    return code or failed


def _ours(error: NobounceError | OSError | MemoryError) -> NobounceError:
    """`error`, or one of ours for what no layer below has named."""
    if isinstance(error, NobounceError):
        return error
    if isinstance(error, MemoryError):
        return OutOfMemoryError("the process can have no more memory")
    if isinstance(error.filename, str):
        return FileError.from_oserror(error, error.filename, "use")
    code = error.errno or errno.EIO
    return FileError(f"a call to the system failed: {os.strerror(code)} ({errno_name(code)})", code)


@contextmanager
def progress(total: int, title: str) -> Iterator[Callable[[str, int], None] | None]:
    """A progress bar on stderr with bytes, GiB/s and backend, only on a terminal; else None."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, Task, TextColumn
    from rich.text import Text

    class Rate(TextColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed / (1 << 30):.2f} GiB/s")

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        Rate(""),
        TextColumn("{task.fields[backend]}"),
    )
    # Drawn by those who advance it: a thread of its own may be one more than can be started.
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(title, total=total, backend="")
        drawn = 0.0

        def advance(backend: str, nbytes: int) -> None:
            nonlocal drawn
            bar.update(task, advance=nbytes, backend=backend)
            now = time.monotonic()
            if now - drawn > REDRAW_SECONDS:
                drawn = now
                bar.refresh()

        yield advance
