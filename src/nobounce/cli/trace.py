"""nobounce trace: run a program and write a Chrome/Perfetto trace of its transfers."""

from __future__ import annotations

import contextlib
import os
from typing import Annotated

import typer

from nobounce import outfile, scratch
from nobounce.cli.children import run_program
from nobounce.cli.options import Json
from nobounce.cli.output import NOT_MET, complain, document, emit_json, run
from nobounce.errors import FileError, counted, named_errors, printable


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
    """Run a program and put the traces of all its processes into one file, for
    Perfetto or `nobounce report`."""

    def action() -> int:
        from nobounce.observe.traceread import find, merge

        with contextlib.ExitStack() as stack:
            # Before the program runs: where the trace cannot be written, that is said first.
            out = stack.enter_context(outfile.create(output, private=True))
            with named_errors(output, "write", outfile.CURES):
                within = stack.enter_context(scratch.private_folder(out.folder))
            name = os.path.join(within, "trace.json")
            environment = {"NOBOUNCE_TRACE": name}
            if limit is not None:
                environment["NOBOUNCE_TRACE_EVENTS"] = str(limit)
            code = run_program(program, environment)
            try:
                made = find(name)
            except FileError:
                made = []
            if made:
                told = merge(made, out)
                out.commit()
            else:
                told = dict.fromkeys(("events", "dropped", "cut"), 0)
        said = f"{counted(told['events'], 'event')} of {counted(len(made), 'process')} in {printable(output)}"
        if told["dropped"]:
            said += f"; {counted(told['dropped'], 'event')} over the limit dropped"
        if told["cut"]:
            said += (
                f"; {counted(told['cut'], 'process')} killed or ended by os._exit: what was done until then "
                "is there"
            )
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
