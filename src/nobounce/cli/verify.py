"""nobounce verify: whether the files of a model are what they should be, and what exactly is wrong."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nobounce.cli.options import Json
from nobounce.cli.output import DONE, NOT_MET, document, emit_json, progress, run, say
from nobounce.errors import counted, printable

if TYPE_CHECKING:
    from nobounce.formats.integrity import Examined, Problem

NO_CHECKSUMS = 3
"""Exit code: nothing is wrong, but a file has no checksums, so its bytes were not looked at."""


def _line(problem: Problem) -> str:
    """A problem as text."""
    tensors = ", ".join(printable(repr(t)[1:-1]) for t in problem.tensors)
    where = f" (tensors: {tensors})" if tensors else ""
    return f"wrong: {printable(problem.file)}: {printable(problem.sentence)}{where}"


def _described(problem: Problem) -> dict[str, Any]:
    """A problem as --json shows it."""
    return {
        "code": problem.code,
        "file": problem.file,
        "tensors": list(problem.tensors),
        "offset": problem.offset,
        "nbytes": problem.nbytes,
        "sentence": problem.sentence,
    }


def _judged(examined: Examined) -> str:
    what = f"{examined.format}, {counted(examined.tensors, 'tensor')}, {examined.nbytes:,} bytes"
    if not examined.checksums:
        return f"{printable(examined.path)}: {what}; no checksums"
    read = f"{counted(examined.blocks, 'block')} read, checksums in {' and '.join(examined.checksums)}"
    return f"{printable(examined.path)}: {what}; {read}"


def command(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...", help="Files, folders or indexes, each a model.", show_default=False
        ),
    ],
    record: Annotated[
        bool,
        typer.Option("--record", help="Store checksums of each file beside it, as NAME.checksums.json."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Check structure, index, sizes and checksums of models.

    Ends with 0 if all is right, 1 if something is wrong, 3 if a file has no checksums.
    """

    def action() -> int:
        from nobounce.formats.integrity import verify

        total = sum(os.path.getsize(p) for p in paths if os.path.isfile(p))
        with progress(total, "verify") as advance:
            reports = [verify(path, record=record, progress=advance) for path in paths]
        problems = [p for r in reports for p in r.problems]
        code = NOT_MET if problems else DONE if all(r.is_complete for r in reports) else NO_CHECKSUMS
        files, warnings = [f for r in reports for f in r.files], [w for r in reports for w in r.warnings]
        if as_json:
            emit_json(
                document(
                    "verify",
                    exit_code=code,
                    files=[
                        {
                            "path": f.path,
                            "format": f.format,
                            "nbytes": f.nbytes,
                            "tensors": f.tensors,
                            "checksums": list(f.checksums),
                            "blocks": f.blocks,
                        }
                        for f in files
                    ],
                    problems=[_described(p) for p in problems],
                    warnings=warnings,
                )
            )
            return code
        for examined in files:
            say(_judged(examined))
        for warning in warnings:
            say(f"warning: {warning}")
        for problem in problems:
            say(_line(problem))
        if problems:
            say(f"{counted(len(problems), 'problem')} in {counted(len(reports), 'model')}")
        elif code == NO_CHECKSUMS:
            say(
                "nothing is wrong, but without checksums no data was read; "
                "save(checksums=True) or --record makes them"
            )
        else:
            say("all right")
        return code

    raise typer.Exit(run("verify", as_json, action))
