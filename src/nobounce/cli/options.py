"""Options that several verbs share."""

from __future__ import annotations

import enum
import re
from typing import Annotated

import typer

from nobounce.errors import ArgumentError


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


_UNITS = {"": 0, "b": 0, "k": 10, "kib": 10, "m": 20, "mib": 20, "g": 30, "gib": 30, "t": 40, "tib": 40}


def parse_size(option: str, text: str) -> int:
    """Bytes of "1MiB", "64k", "4096", as given to `option`. Raises ArgumentError."""
    found = re.fullmatch(r"([0-9]{1,15})\s*([a-zA-Z]*)", text.strip())
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None or int(found[1]) == 0:
        raise ArgumentError(f"{option} {text!r} is no size: write 1MiB, 64KiB or a number of bytes")
    return int(found[1]) << unit


def one_or_many(paths: list[str]) -> str | list[str]:
    """A single path may be a folder or an index; several are files."""
    return paths[0] if len(paths) == 1 else paths
