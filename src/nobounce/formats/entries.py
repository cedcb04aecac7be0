"""The JSON of a header read a stretch at a time, so that what it costs is bounded by its
length, whatever it says.

A JSON parser makes a list of 56 bytes of every "[]", and a stranger's header may hold 30 million of them.
Here a window of the text is decoded, parsed and handed on before the next one is looked at. What a tensor
needs fits in `MOST_ENTRY` characters; what is longer is refused. A window's whole entries are parsed by one
call into C: their text, up to a "},", with braces around it is a JSON object only if that "}" ends an entry,
as within a string or an inner object something would stay open.
"""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from nobounce.errors import clip
from nobounce.formats.strictjson import integer, lone_surrogate, no_constant, object_of

MOST_ENTRY = 256 << 10
"""Characters of the longest description of a tensor, and of a metadata value that is no string."""

METADATA_LIMIT = 16 << 20
"""Bytes of memory that the strings of __metadata__ may take; a string that is not
all ASCII may have 2 MiB."""

METADATA_KEYS = 1 << 17

_NAME_LIMIT = 16 * MOST_ENTRY

_PIECE = 256 << 10
_SPACE = re.compile("[ \t\n\r]*")
_METADATA = "__metadata__"
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")

_ENTRIES = json.JSONDecoder(object_pairs_hook=tuple, parse_constant=no_constant)
_CAREFUL = json.JSONDecoder(object_pairs_hook=tuple, parse_constant=no_constant, parse_int=integer)
_VALUES = json.JSONDecoder(object_pairs_hook=object_of, parse_constant=no_constant, parse_int=integer)

Pairs = list[tuple[str, Any]]


class BadText(ValueError):
    """Text that is no strict JSON, or more than is read of it. `offset` counts bytes of the header."""

    def __init__(self, reason: str, offset: int, tensor: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.offset, self.tensor = reason, offset, tensor


class Entries:
    """Reads the object that `raw` holds. `metadata` is the value of __metadata__ once
    `batches` has come past it."""

    def __init__(self, raw: bytes) -> None:
        self._raw, self._read = memoryview(raw), 0  # and how many bytes of it are in the window, or were
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._text, self._at = "", 0  # the window, and a place in it
        self._bytes = self._chars = 0  # what came before the window
        self.metadata: Any = {}
        self._metadata_seen = False

    def batches(self) -> Iterator[Pairs]:
        """The tensors' names and values, some at a time, in the order of the text. An object
        is a tuple of its pairs.

        Raises BadText.
        """
        self._take("{", "Expecting an object")
        if not self._peek("}"):
            yield from self._pairs()
        self._take("}", "Expecting ',' delimiter")
        if self._skip():
            self._bad("Extra data")

    def _pairs(self) -> Iterator[Pairs]:
        going = True
        while going:
            if len(self._text) - self._at < _PIECE:
                self._more()
            cut = self._text.rfind("},", self._at) + 1
            found = self._whole(cut)
            if found:
                self._at = cut + 1
                yield found
                continue
            # One by one up to the cut: a window is tried as a whole once.
            until, one = self._chars + max(cut, self._at + 1), []
            while going and self._chars + self._at < until:
                one += self._pair()
                going = self._comma()
            yield one

    def _whole(self, cut: int) -> Pairs:
        """The entries up to a cut; none where they must be looked at one by one."""
        text = "{" + self._text[self._at : cut] + "}"
        if cut <= self._at or _METADATA in text:
            return []
        escaped = "\\u" in text
        halves = len(_HALF.findall(text)) if escaped else 0
        if halves and ("\\\\" in text or halves != 2 * len(_PAIR.findall(text))):
            return []  # half of a pair, perhaps: it is looked for in each string
        try:
            found: Pairs = list((_CAREFUL if "-0" in text else _ENTRIES).decode(text))
        except (ValueError, RecursionError):
            return []
        return [] if escaped and any(name == _METADATA for name, _ in found) else found

    def _pair(self) -> Pairs:
        """The next name and value; none where that was __metadata__, which is kept."""
        name = self._name()
        if name != _METADATA:
            return [(name, self._value(_ENTRIES))]
        if self._metadata_seen:
            raise BadText(f"{_METADATA!r} is given twice", 0, _METADATA)
        self._metadata_seen = True
        self.metadata = self._strings() if self._peek("{") else self._value(_VALUES)
        return []

    def _strings(self) -> dict[str, Any]:
        """The object of metadata, pair by pair."""
        found: dict[str, Any] = {}
        room = METADATA_LIMIT
        self._take("{", "")
        going = not self._peek("}")
        while going:
            key = self._name()
            if key in found:
                raise BadText(f"{clip(key)!r} is given twice in {_METADATA}", 0)
            found[key] = self._string(room) if self._peek('"') else self._value(_VALUES)
            room -= sys.getsizeof(key) + sys.getsizeof(found[key])
            if room < 0 or len(found) > METADATA_KEYS:
                self._too_long(f"__metadata__ has more than {METADATA_KEYS} keys or {METADATA_LIMIT} bytes")
            going = self._comma()
        self._take("}", "Expecting ',' delimiter")
        return found

    def _name(self) -> str:
        if not self._peek('"'):
            self._bad("Expecting property name enclosed in double quotes")
        name = self._string(_NAME_LIMIT)
        self._take(":", "Expecting ':' delimiter")
        return name

    def _string(self, room: int) -> str:
        """The string that begins here; it may take `room` bytes of memory."""
        while True:
            try:
                found, end = _ENTRIES.raw_decode(self._text, self._at)
                break
            except json.JSONDecodeError as error:
                if self._grown() > 2 * room:
                    self._too_long(f"a string takes more than {room} bytes")
                if not self._more():
                    self._bad(error.msg, error.pos)
        if lone_surrogate(found):
            self._bad("a string holds half of a surrogate pair")
        self._at = end
        return str(found)

    def _value(self, decoder: json.JSONDecoder) -> Any:
        while self._skip():
            reason, place = "", self._at
            try:
                found, end = decoder.raw_decode(self._text, self._at)
                if decoder is _ENTRIES and self._text.find("-0", self._at, end) >= 0:
                    decoder = _CAREFUL
                    continue
                if end - self._at > MOST_ENTRY:
                    break
                if end < len(self._text) or not self._more():  # a number may go on
                    if "\\u" in self._text[self._at : end] and lone_surrogate(found):
                        self._bad("a string holds half of a surrogate pair")
                    self._at = end
                    return found
                continue
            except RecursionError:
                self._bad("nested too deeply")
            except json.JSONDecodeError as error:
                reason, place = error.msg, error.pos
            except ValueError as error:
                if decoder is _ENTRIES:  # an integer too long for Python
                    decoder = _CAREFUL
                    continue
                reason = str(error)
            if len(self._text) - self._at > MOST_ENTRY and self._read < len(self._raw):
                break
            if not self._more():
                self._bad(reason, place)
        else:
            self._bad("Expecting value")
        self._too_long(f"a value has more than {MOST_ENTRY} characters")

    def _comma(self) -> bool:
        if self._peek(","):
            self._at += 1
            return True
        return False

    def _take(self, char: str, reason: str) -> None:
        if not self._peek(char):
            self._bad(reason)
        self._at += 1

    def _peek(self, char: str) -> bool:
        return self._skip() and self._text[self._at] == char

    def _skip(self) -> bool:
        """Go to the next character that is no white space; False where there is none."""
        while True:
            space = _SPACE.match(self._text, self._at)
            self._at = space.end() if space is not None else self._at
            if self._at < len(self._text):
                return True
            if not self._more():
                return False

    def _more(self) -> bool:
        """Drop what has been read and double what is left; False at the end of the header."""
        if self._read == len(self._raw):
            return False
        left = self._text[self._at :]
        self._bytes += len(self._text[: self._at].encode())
        self._chars += self._at
        piece = self._raw[self._read : self._read + max(_PIECE, len(left))]
        self._read += len(piece)
        self._text, self._at = left, 0
        try:
            self._text += self._decode(piece, self._read == len(self._raw))
        except UnicodeDecodeError as error:
            at = self._read - len(error.object) + error.start
            raise BadText("the header is not valid UTF-8", at) from None
        return True

    def _grown(self) -> int:
        """Bytes that the window would take after `_more`: sixteen a character where one is not ASCII, as such
        text is held with four and copied twice.
        """
        left = len(self._text) - self._at
        piece = bytes(self._raw[self._read : self._read + max(_PIECE, left)])
        return (left + len(piece)) * (1 if self._text.isascii() and piece.isascii() else 16)

    def _bad(self, reason: str, at: int | None = None) -> NoReturn:
        before = self._text[: self._at if at is None else at]
        raise BadText(f"the header is not valid JSON: {reason:.200}", self._bytes + len(before.encode()))

    def _too_long(self, reason: str) -> NoReturn:
        raise BadText(f"{reason}, which no tensor needs", self._bytes + len(self._text[: self._at].encode()))
