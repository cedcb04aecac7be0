"""Changes of a text as spans that do not overlap: everything outside them stays as it is, byte for byte."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple


class Edit(NamedTuple):
    """Replace text[start:end]; start == end inserts."""

    start: int
    end: int
    text: str


class Lines:
    """Offsets of a text by line and column, with the line ends that Python knows: \\n, \\r\\n and \\r."""

    def __init__(self, text: str) -> None:
        self._starts = [0, *(m.end() for m in re.finditer(r"\r\n|\n|\r", text))]

    def offset(self, line: int, column: int) -> int:
        """Of a 1-based line and a 0-based column."""
        return self._starts[line - 1] + column

    def start(self, offset: int) -> int:
        """Where the line of an offset begins."""
        return self._starts[self.line(offset) - 1]

    def line(self, offset: int) -> int:
        """The 1-based line of an offset."""
        return bisect_right(self._starts, offset)


def apply(text: str, edits: Iterable[Edit]) -> str:
    """The text with all edits made; those at one place in the order given. Raises
    ValueError where two overlap."""
    out: list[str] = []
    at = 0
    for edit in sorted(edits, key=lambda e: (e.start, e.end)):
        if edit.start < at:
            raise ValueError(f"two changes at offset {edit.start}")
        out += text[at : edit.start], edit.text
        at = edit.end
    return "".join([*out, text[at:]])
