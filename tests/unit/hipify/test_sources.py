"""Encodings and files that are no source: bytes that were not rewritten stay, and what cannot be read is one sentence."""

from __future__ import annotations

import codecs
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nobounce.errors import FormatError, UnavailableError
from nobounce.hipify.convert import convert, language_of
from scale import cases

PROGRAM = "import kvikio\nf = kvikio.CuFile('é')\nf.read(a, 1)\n"
DONE = "import nobounce\nf = nobounce.open('é')\nf.read(a, nbytes=1)\n"


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-8", "iso8859-15"])
def test_an_encoding_that_the_source_names_is_kept(encoding: str) -> None:
    first = f"# -*- coding: {encoding} -*-\n"
    assert convert((first + PROGRAM).encode(encoding), "python", "nobounce").data == (first + DONE).encode(
        encoding
    )


def test_a_byte_order_mark_is_kept() -> None:
    assert (
        convert(codecs.BOM_UTF8 + PROGRAM.encode(), "python", "nobounce").data
        == codecs.BOM_UTF8 + DONE.encode()
    )
    c = codecs.BOM_UTF8 + b"cudaFree(p); // \xff\n"
    assert convert(c, "c", "nobounce").data == codecs.BOM_UTF8 + b"hipFree(p); // \xff\n"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"x = (\n", "a syntax error in line"),
        (b"import kvikio\nx = = 3\n", "a syntax error in line 2"),
        (b"# coding: nonsense\n", "encoding cannot be told"),
        (b"# coding: rot13\nimport kvikio\n", "no encoding of text"),
        (b"x = '\xff'\n", "encoding cannot be told"),
        (PROGRAM.encode("utf-16"), "encoding cannot be told"),
        (b"# coding: ascii\nx = 1\ny = '\xe9'\n", "it is no ascii"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(data: bytes, why: str) -> None:
    with pytest.raises(FormatError, match=why) as caught:
        convert(data, "python", "nobounce")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    ["[" * 5000 + "]" * 5000, "-" * 50_000 + "1", "+".join(["1"] * 50_000), "(" * 5000, "a" + ".b" * 50_000],
)
def test_deep_nesting_is_one_sentence_and_no_crash(value: str) -> None:
    with pytest.raises(FormatError, match="nested too deeply"):
        convert(f"import kvikio\nx = {value}\n".encode(), "python", "nobounce")


def test_a_missing_libcst_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libcst", None)
    with pytest.raises(UnavailableError, match=r"pip install nobounce\[hipify\]"):
        convert(PROGRAM.encode(), "python", "nobounce")
    assert convert(b"cudaFree(p);", "c", "nobounce").data == b"hipFree(p);"


def test_languages_are_known_by_suffix_or_first_line() -> None:
    assert [language_of(p) for p in ("a.py", "a.PYI", "b.cu", "b.h", "c.txt", "c")] == [
        "python",
        "python",
        "c",
        "c",
        None,
        None,
    ]
    assert language_of("tool", b"#!/usr/bin/env python3\nx = 1\n") == "python"
    assert language_of("tool", b"#!/bin/sh\n") is None


LINES = st.sampled_from(
    [
        "import os\n",
        "x = 1 ;  y=2\t# kvikio\n",
        "def f( a,b ) :\r\n\treturn a\r\n",
        "s = '''cufile.read(\n'''\n",
        "if x:\n    pass\n\n\n",
        "\x0c\n",
        "z = [1,\n  2 , ]\n",
        "é = 'ü'\n",
        "class A: pass\n",
        "x = \\\n  3\n",
    ]
)


@settings(max_examples=cases(500, 20))
@given(st.lists(LINES, max_size=8), st.booleans())
def test_what_is_not_rewritten_is_the_same_byte_for_byte(lines: list[str], mark: bool) -> None:
    data = (codecs.BOM_UTF8 if mark else b"") + "".join(lines).encode()
    source = convert(data, "python", "nobounce")
    assert source.data == data
    assert not source.changed
    rewritten = convert(data + b"import kvikio\nkvikio.CuFile(p)\n", "python", "nobounce").data
    assert rewritten == data + b"import nobounce\nnobounce.open(p)\n"
