"""The command line: one verb a file."""

from __future__ import annotations

import sys

import typer

from nobounce.cli import (
    bench,
    check,
    children,
    compare,
    config,
    convert,
    cp,
    diff,
    ending,
    explain,
    hipify,
    inspect,
    load,
    report,
    roundtrip,
    stats,
    streams,
    topology,
    trace,
    verify,
)
from nobounce.cli.output import checked
from nobounce.cli.usage import ProgramVerb, Verb, Verbs

app = typer.Typer(
    name="nobounce",
    cls=Verbs,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Move data between storage and GPU memory, and see which way every byte went.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("load", cls=Verb)(load.command)
app.command("explain", cls=Verb)(explain.command)
app.command("inspect", cls=Verb)(inspect.command)
app.command("bench", cls=Verb)(bench.command)
app.command("check", cls=Verb)(check.command)
app.command("compare", cls=Verb)(compare.command)
app.command("config", cls=Verb)(config.command)
app.command("convert", cls=Verb)(convert.command)
app.command("cp", cls=Verb)(cp.command)
app.command("diff", cls=Verb)(diff.command)
app.command("hipify", cls=Verb)(hipify.command)
app.command("roundtrip", cls=Verb)(roundtrip.command)
app.command("report", cls=Verb)(report.command)
app.command("stats", cls=ProgramVerb)(stats.command)
app.command("topology", cls=Verb)(topology.command)
app.command("trace", cls=ProgramVerb)(trace.command)
app.command("verify", cls=Verb)(verify.command)


def _version(show: bool) -> None:
    if show:
        from nobounce import __version__

        typer.echo(f"nobounce {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Move data between storage and GPU memory, and see which way every byte went."""


def main() -> None:
    """Entry point of the `nobounce` command."""
    streams.prepare()
    if sys.argv[0].endswith(("__main__.py", "cli/main.py")):
        sys.argv[0] = "nobounce"  # what reports and traces then call it
    children.spare_threads()
    code, asked = 0, None
    try:
        with ending.orderly(last=True):
            code = _run()
    except BaseException as e:  # before a verb has begun, or behind its end
        asked = e if isinstance(e, KeyboardInterrupt) else ending.asked()
        if asked is None:
            raise
    asked = asked or (None if code else ending.asked())
    if asked is not None:
        ending.tell(asked)
        code = ending.code(asked)
    ending.settle()
    sys.exit(code)


def _run() -> int:
    """The exit code. Raises KeyboardInterrupt."""
    try:
        app()
    except SystemExit as e:
        asked = _interrupt_behind(e)
        if asked is not None:
            raise asked from None
        return checked("", e.code if isinstance(e.code, int) else 0)
    return 0


def _interrupt_behind(error: SystemExit) -> KeyboardInterrupt | None:
    """The interrupt behind it that has not been told of, if there is one: typer ends
    by 130 without a word."""
    cause = None if error.__context__ is None else error.__context__.__cause__
    return cause if isinstance(cause, KeyboardInterrupt) else None


if __name__ == "__main__":
    main()
