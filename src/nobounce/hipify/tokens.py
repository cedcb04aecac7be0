"""C and C++ source as tokens: enough of the language to tell a name from what only looks like one.

Strings (raw ones too), character constants, comments and the file names of #include are tokens of
their own. A line that ends with a backslash goes on in the next one, in comments as well. Every
character belongs to one token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_TOKEN = re.compile(
    r"""
    (?P<blank>[ \t\f\v\r\n]+ | \\\r?\n)
  | (?P<comment>//(?:\\\r?\n|[^\r\n])* | /\*.*?(?:\*/|\Z))
  | (?P<raw>(?:u8|[uUL])?R"(?P<fence>[^()\\\s"]{0,16})\(.*?\)(?P=fence)")
  | (?P<string>(?:u8|[uUL])?"(?:\\\r?\n|\\.|[^"\\\r\n])*"?)
  | (?P<char>(?:u8|[uUL])?'(?:\\\r?\n|\\.|[^'\\\r\n])*'?)
  | (?P<number>\.?[0-9](?:[eEpP][+-]|'[0-9A-Za-z]|[0-9A-Za-z_.])*)
  | (?P<name>[A-Za-z_$\x80-\U0010ffff][A-Za-z0-9_$\x80-\U0010ffff]*)
  | (?P<mark>->|::|.)
    """,
    re.DOTALL | re.VERBOSE,
)
_INCLUDE = re.compile(r"[ \t]*(?P<quote>[<\"])(?P<path>[^>\"\r\n]*)[>\"]")


class Token(NamedTuple):
    """`kind`: blank, comment, string, char, number, name, mark, or include for the file name of
    one, without its quotes."""

    kind: str
    text: str
    start: int


def tokens(text: str) -> Iterator[Token]:
    """All tokens in order."""
    at = 0
    directive: list[str] = []
    fresh = True
    """Whether nothing but blanks and comments has been in this line."""
    while at < len(text):
        if directive == ["#", "include"]:
            found = _INCLUDE.match(text, at)
            directive = []
            if found is not None:
                yield Token("mark", text[at : found.start("path")], at)
                yield Token("include", found["path"], found.start("path"))
                yield Token("mark", text[found.end("path") : found.end()], found.end("path"))
                at = found.end()
                fresh = False
                continue
        match = _TOKEN.match(text, at)
        if match is None:  # the last alternative takes anything
            return
        kind = match.lastgroup or "mark"
        kind = "string" if match["raw"] is not None else kind
        yield Token(kind, match[0], at)
        at = match.end()
        if kind == "blank":
            if "\n" in match[0] and not match[0].startswith("\\"):
                fresh, directive = True, []
        elif kind != "comment":
            if match[0] == "#" and fresh:
                directive = ["#"]
            elif directive == ["#"]:
                directive = ["#", "include"] if match[0] in ("include", "include_next", "import") else []
            fresh = False
