"""The one place that prints: human text and JSON come from the same data, so they cannot drift apart."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nobounce import __version__
from nobounce.cli import ending
from nobounce.errors import ArgumentError, ConfigError, NobounceError, RouteError, errno_name

DONE, NOT_MET, USAGE = 0, 1, 2
"""Exit codes (docs/cli.md): done; asked for and not met; wrong usage or settings. 128 + n: ended by signal n."""


def document(verb: str, **fields: Any) -> dict[str, Any]:
    """The JSON object of a verb, with its schema and version."""
    return {"schema": f"nobounce.{verb}/1", "version": __version__, **fields}


def emit_json(data: dict[str, Any]) -> None:
    """Print one JSON object on stdout."""
    sys.stdout.write(json.dumps(data, indent=2) + "\n")


def say(text: str) -> None:
    """Print text on stdout."""
    sys.stdout.write(text + "\n")


def complain(text: str) -> None:
    """Print text on stderr."""
    sys.stderr.write(text + "\n")


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


def run(verb: str, as_json: bool, action: Callable[[], int]) -> int:
    """Run a verb's action; turn an exception of ours, or an interrupt, into one line and an exit code."""
    try:
        code = action()
        sys.stdout.flush()
        return code
    except NobounceError as e:
        if as_json:
            emit_json(document(verb, error=error_fields(e)))
        else:
            complain(f"nobounce {verb}: {e}")
        return USAGE if isinstance(e, ArgumentError | ConfigError) else NOT_MET
    except KeyboardInterrupt as e:
        complain(f"nobounce {verb}: {ending.words(e)}")
        return ending.code(e)
    except BrokenPipeError:
        sys.stderr.close()
        return NOT_MET
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG) or e.filename is not None:
            raise
        complain(f"nobounce {verb}: cannot write to stdout: {os.strerror(e.errno)} ({errno_name(e.errno)})")
        # What is still in the buffer would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_MET


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
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total, backend="")

        def advance(backend: str, nbytes: int) -> None:
            bar.update(task, advance=nbytes, backend=backend)

        yield advance
