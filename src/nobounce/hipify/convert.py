"""One source, as bytes: which language it is in, its encoding, the conversion. What cannot be read is a
FormatError of one sentence."""

from __future__ import annotations

import ast
import codecs
import io
import os
import re
import tokenize
import warnings
from dataclasses import dataclass

from nobounce.errors import FormatError, UnavailableError
from nobounce.hipify.c import convert_c
from nobounce.hipify.report import Converted, Language, Target

SUFFIXES: dict[str, Language] = {
    **dict.fromkeys((".py", ".pyi", ".pyw"), "python"),
    **dict.fromkeys((".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh", ".h", ".hh", ".hpp", ".hxx", ".inl"), "c"),
}
"""Languages by suffix."""
_MOST_BRACKETS = 200
"""CPython's own limit of nesting."""
_LONGEST_LINE = 5000
_TOO_DEEP = "it is nested too deeply"
MOST_NBYTES = 64 << 20
"""No source is larger: what is claims a suffix that is not its own."""


@dataclass(frozen=True, slots=True)
class Source:
    """A source before and after: `data` equals `old` byte for byte unless something was rewritten."""

    old: bytes
    data: bytes
    converted: Converted
    encoding: str

    @property
    def changed(self) -> bool:
        return self.data != self.old


def language_of(path: str, data: bytes = b"") -> Language | None:
    """By suffix, else by a first line that names Python; None where neither tells."""
    found = SUFFIXES.get(os.path.splitext(path)[1].lower())
    if found is None and data.startswith(b"#!") and b"python" in data.split(b"\n", 1)[0]:
        return "python"
    return found


def convert(data: bytes, language: Language, target: Target) -> Source:
    """Raises FormatError, and UnavailableError where libcst is missing."""
    if language == "c":  # names are ASCII, and every byte is a letter of latin-1
        mark = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
        done = convert_c(data[len(mark) :].decode("latin-1"))
        return Source(data, mark + done.text.encode("latin-1"), done, "latin-1")
    mark, encoding = _encoding(data)
    body = data[len(mark) :]
    try:
        text = body.decode(encoding)
    except (UnicodeDecodeError, LookupError) as e:
        raise FormatError(f"it is no {encoding}, which it says it is: {e}") from None
    if text.encode(encoding, "surrogateescape") != body:
        raise FormatError(f"{encoding} does not give back the bytes that were read")
    done = _python(text, target)
    try:
        return Source(data, mark + done.text.encode(encoding), done, encoding)
    except UnicodeEncodeError:
        raise FormatError(f"{encoding} has no letters for what would be written") from None


def _encoding(data: bytes) -> tuple[bytes, str]:
    """The byte order mark, if there is one, and the encoding (PEP 263)."""
    mark = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
    try:
        found, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        found = "utf-8" if mark else found
        if not getattr(codecs.lookup(found), "_is_text_encoding", True):
            raise FormatError(f"{found} is no encoding of text")
    except (SyntaxError, LookupError) as e:
        raise FormatError(f"its encoding cannot be told: {e}") from None
    return mark, found


def _python(text: str, target: Target) -> Converted:
    try:
        import libcst
    except ImportError:
        raise UnavailableError(
            "rewriting Python needs libcst: pip install nobounce[hipify]; C and C++ sources go without"
        ) from None
    from nobounce.hipify.python import convert_python

    if _is_too_deep(text):
        raise FormatError(_TOO_DEEP)
    try:
        return convert_python(text, target)
    except libcst.ParserSyntaxError as e:
        raise FormatError(f"a syntax error in line {e.raw_line}") from None
    except RecursionError:
        raise FormatError(_TOO_DEEP) from None


def _is_too_deep(text: str) -> bool:
    """Whether libcst's parser, which knows no limit, could run out of stack and end the process.

    CPython's own gives up sooner. It does not know the syntax of later versions, though: what it calls wrong
    is let through where neither brackets nor lines are of a size for that.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (RecursionError, MemoryError):
        return True
    except (SyntaxError, ValueError):
        depth = most = 0
        for bracket in re.findall(r"[][(){}]", text):
            depth = depth + 1 if bracket in "([{" else max(depth - 1, 0)
            most = max(most, depth)
        return most > _MOST_BRACKETS or max(map(len, text.splitlines()), default=0) > _LONGEST_LINE
    return False
