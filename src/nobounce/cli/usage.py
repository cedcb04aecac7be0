"""How verbs are used: their usage lines, and wrong usage as one line or one JSON object."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from nobounce.cli.output import USAGE, tell
from nobounce.errors import ArgumentError

# typer has click beside it or, in later versions, inside: this name leads to the class of all usage
# errors in both.
_UsageError: Any = typer.BadParameter.__base__


class Verb(TyperCommand):
    """A verb. Its usage line shows arguments as they are written, in brackets where they may be left out."""

    results = "stdout"
    """Where its JSON goes, an error's too."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """What stands behind the verb's name in its usage line."""
        arguments = [p for p in self.params if p.param_type_name == "argument"]
        return ["[OPTIONS]", *(str(a.metavar) if a.required else f"[{a.metavar}]" for a in arguments)]

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Read the arguments. An empty one names no file, device or size and is refused; a
        program's own are not looked at."""
        own = args[: args.index("--")] if "--" in args else args
        with _told(str(info_name), "--json" in own, self.results):
            if "" in own:
                raise _UsageError(f"argument {own.index('') + 1} is empty")
            return super().make_context(info_name, args, parent, **extra)


class ProgramVerb(Verb):
    """A verb that runs a program: stdout is the program's."""

    results = "stderr"


class Verbs(TyperGroup):
    """All verbs."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Read what stands before the verb. No argument at all shows the help, and is wrong usage."""
        with _told():
            try:
                return super().make_context(info_name, list(args) or ["--help"], parent, **extra)
            except typer.Exit:
                if args:
                    raise
                raise typer.Exit(USAGE) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the verb."""
        with _told():
            return super().resolve_command(ctx, args)


@contextmanager
def _told(verb: str = "", as_json: bool = False, results: str = "stdout") -> Iterator[None]:
    """Wrong usage inside is said, and ends the command with 2."""
    try:
        yield
    except _UsageError as e:
        name = f"nobounce {verb}".rstrip()
        said = e.format_message().rstrip(".")
        tell(verb, ArgumentError(f"{said} (see `{name} --help`)"), as_json, results)
        raise typer.Exit(USAGE) from None
