"""nobounce trace: run a program and write a Chrome/Perfetto trace of its transfers."""

from __future__ import annotations

import os
import tempfile
from typing import Annotated

import typer

from nobounce.cli.children import run_program
from nobounce.cli.options import Json
from nobounce.cli.output import NOT_MET, complain, document, emit_json, run
from nobounce.errors import ArgumentError, FileError, counted, printable


def command(
    program: Annotated[
        list[str],
        typer.Argument(metavar="-- PROGRAM ARGS...", help="The program to run.", show_default=False),
    ],
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="The trace.")] = "trace.json",
    limit: Annotated[
        int | None,
        typer.Option(min=1000, help="Events one process may write; later ones are counted and dropped."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a program and put the traces of all its processes into one file, for Perfetto or `nobounce report`."""

    def action() -> int:
        from nobounce.observe.traceread import find, merge

        folder = os.path.dirname(output) or "."
        if not os.path.isdir(folder):
            raise ArgumentError(f"--output: there is no folder {printable(folder)}")
        if not os.access(folder, os.W_OK):
            raise FileError.from_oserror(PermissionError(13, "not writable"), output, "write")
        with tempfile.TemporaryDirectory(prefix=".nobounce-trace-", dir=folder) as scratch:
            name = os.path.join(os.path.abspath(scratch), "trace.json")
            environment = {"NOBOUNCE_TRACE": name}
            if limit is not None:
                environment["NOBOUNCE_TRACE_EVENTS"] = str(limit)
            code = run_program(program, environment)
            try:
                made = find(name)
            except FileError:
                made = []
            told = merge(made, output) if made else dict.fromkeys(("events", "dropped", "cut"), 0)
        said = f"{counted(told['events'], 'event')} of {counted(len(made), 'process')} in {printable(output)}"
        if told["dropped"]:
            said += f"; {counted(told['dropped'], 'event')} over the limit dropped"
        if told["cut"]:
            said += f"; {counted(told['cut'], 'process')} killed or ended by os._exit: what was done until then is there"
        if not made:
            said = "no process used nobounce: nothing was written"
        if as_json:
            fields = {k: told[k] for k in ("events", "dropped", "cut")}
            written = output if made else None
            emit_json(document("trace", output=written, exit_code=code, **fields), "stderr")
        else:
            complain(f"nobounce trace: {said}")
        return code if made else code or NOT_MET

    raise typer.Exit(run("trace", as_json, action, "stderr" if as_json else ""))
