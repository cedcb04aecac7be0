"""The command line: one verb a file."""

from __future__ import annotations

import sys

import typer

from nobounce.cli import (
    bench,
    check,
    compare,
    config,
    cp,
    ending,
    explain,
    inspect,
    load,
    report,
    roundtrip,
    stats,
    topology,
    trace,
)
from nobounce.cli.output import complain

app = typer.Typer(
    name="nobounce",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Move data between storage and GPU memory, and see which way every byte went.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("load")(load.command)
app.command("explain")(explain.command)
app.command("inspect")(inspect.command)
app.command("bench")(bench.command)
app.command("check")(check.command)
app.command("compare")(compare.command)
app.command("config")(config.command)
app.command("cp")(cp.command)
app.command("roundtrip")(roundtrip.command)
app.command("report")(report.command)
app.command("stats")(stats.command)
app.command("topology")(topology.command)
app.command("trace")(trace.command)


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
    if sys.argv[0].endswith(("__main__.py", "cli/main.py")):
        sys.argv[0] = "nobounce"  # what reports and traces then call it
    try:
        with ending.orderly():
            app()
    except (KeyboardInterrupt, SystemExit) as e:
        asked = _interrupt_behind(e)
        if asked is None:
            raise
        complain(f"nobounce: {ending.words(asked)}")  # before a verb has begun
        sys.exit(ending.code(asked))


def _interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    """The interrupt behind it that nobody has told of, if there is one: typer ends by 130 without a word."""
    if isinstance(error, KeyboardInterrupt):
        return error
    cause = None if error.__context__ is None else error.__context__.__cause__
    return cause if isinstance(cause, KeyboardInterrupt) else None


if __name__ == "__main__":
    main()
