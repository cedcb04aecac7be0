"""Options that several verbs share."""

from __future__ import annotations

import enum
from typing import Annotated

import typer


class RequireOption(enum.StrEnum):
    auto = "auto"
    fastpath = "fastpath"
    fallback = "fallback"


class CacheOption(enum.StrEnum):
    auto = "auto"
    use = "use"
    avoid = "avoid"


class FrameworkOption(enum.StrEnum):
    numpy = "numpy"
    torch = "torch"


Paths = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH...", help="A file, a folder with an index, or several files.", show_default=False
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device", "-d", metavar="D", help="cpu, sim:0, cuda:0, hip:0. Default: first GPU, else cpu."
    ),
]
Require = Annotated[RequireOption, typer.Option(help="fastpath: every byte direct, or fail before any I/O.")]
Cache = Annotated[
    CacheOption,
    typer.Option(
        help="auto: take what the page cache holds; use: read through it; avoid: leave no page behind."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def one_or_many(paths: list[str]) -> str | list[str]:
    """A single path may be a folder or an index; several are files."""
    return paths[0] if len(paths) == 1 else paths
