"""Headers in the spellings that writers really print, scanned by a regular expression.

A header of 20,000 tensors costs the JSON parser 20,000 dicts and 40,000 lists; here it costs one `findall`
and a few passes that run in C. What makes it safe is a sum: matches do not overlap, each has the length of
its groups plus a fixed overhead, and together they must be as long as the text. Then they tile it: no byte
has gone unread. Whatever does not add up is left to the JSON parser, which also words the errors. Memory
stays bounded because the text is scanned in pieces, and equal descriptions of dtype and shape are judged once
and share one object.
"""

from __future__ import annotations

import re
from functools import cached_property, partial
from typing import Any, NamedTuple

from nobounce.dtypes import DTYPES
from nobounce.formats.strictjson import raw_decode
from nobounce.formats.tensorinfo import Layout, TensorInfo, layout

_PIECE = 1 << 20  # characters scanned at a time
TAIL = 4096  # more padding than any writer prints; what follows it is left to the JSON parser
_METADATA = '{"__metadata__":'
_NAME = r'"([^"\\\x00-\x1f]*)"'
_OFFSET = r"(0|[1-9][0-9]{0,19})"
_LEADING_ZERO = re.compile("(?<![0-9])0[0-9]")
_make: Any = partial(tuple.__new__, TensorInfo)
_layout: Any = partial(tuple.__new__, Layout)


class _Spelling:
    """One way to print entries: what follows a colon or a comma, and whether data_offsets come first."""

    def __init__(self, s: str, *, offsets_first: bool) -> None:
        kind = rf'"dtype":{s}"([A-Z0-9_]+)",{s}"shape":{s}\[([0-9,{s}]*)\]'
        span = rf'"data_offsets":{s}\[{_OFFSET},{s}{_OFFSET}\]'
        first, second = (span, kind) if offsets_first else (kind, span)
        self.space, self.offsets_first = s, offsets_first
        self.order = (0, 3, 4, 1, 2) if offsets_first else (0, 1, 2, 3, 4)
        self.comma = f",{s}"
        self.end = f"]}},{s}"
        self._pattern = rf"{_NAME}:{s}\{{{first},{s}{second}\}}"
        self.overhead = len(f'"":{s}{{"dtype":{s}"",{s}"shape":{s}[],{s}"data_offsets":{s}[,{s}]}},{s}')

    # Compiled when a header is met that may be spelt so: together they take a millisecond.

    @cached_property
    def entry(self) -> re.Pattern[str]:
        return re.compile(self._pattern)

    @cached_property
    def entries(self) -> re.Pattern[str]:
        return re.compile(self._pattern + self.comma)


_SPELLINGS = (
    _Spelling("", offsets_first=False),  # safetensors itself
    _Spelling(" ", offsets_first=False),  # json.dumps
    _Spelling("", offsets_first=True),  # sorted keys, as nlohmann::json prints them
)


class Scan(NamedTuple):
    """What a scan found: tensors in the order of the text, the bytes that each needs, the value of
    __metadata__.
    """

    tensors: dict[str, TensorInfo]
    needed: list[int]
    metadata: Any


class Outline(NamedTuple):
    """Where a header's entries stand (`position` to `end`, the place of the last "}"), how they are printed,
    the value of __metadata__.
    """

    position: int
    end: int
    spelling: _Spelling
    metadata: Any


def outline(head: str, tail: str, end: int) -> Outline | None:
    """The outline of a header that begins with "{", from its beginning and its end, which is at `end`; None
    where it wants the JSON parser, or where so much of the text does not tell.
    """
    end -= len(tail) - len(tail.rstrip(" ")) + 1
    metadata: Any = {}
    position = 1
    if head.startswith(_METADATA):
        start = len(_METADATA) + head.startswith(" ", len(_METADATA))
        try:
            metadata, position = raw_decode(head, start)
        except ValueError:
            return None
        if not head.startswith(",", position):
            return None
        position += 1 + head.startswith(" ", position + 1)
    if not tail.rstrip(" ").endswith("}"):
        return None
    spelling = next((s for s in _SPELLINGS if s.entry.match(head, position, end)), None)
    return None if spelling is None else Outline(position, end, spelling, metadata)


def scan(text: str) -> Scan | None:
    """The tensors of a header that begins with "{", or None where it wants the JSON parser.

    Names are unique and dtypes and shapes sound; ranges are not judged.
    """
    found = outline(text, text[-TAIL:], len(text))
    if found is None:
        return None
    position, end, spelling, metadata = found
    tensors: dict[str, TensorInfo] = {}
    needed: list[int] = []
    layouts: dict[tuple[str, str], Layout] = {}
    while position < end:
        if end - position <= _PIECE:
            piece, position = text[position:end] + spelling.comma, end
        else:
            cut = text.rfind(spelling.end, position, position + _PIECE) + len(spelling.end)
            if cut <= position:
                return None
            piece, position = text[position:cut], cut
        if not _scan_piece(piece, spelling, tensors, needed, layouts):
            return None
    if len(tensors) != len(needed) or "__metadata__" in tensors:
        return None
    return Scan(tensors, needed, metadata)


def _scan_piece(
    piece: str,
    spelling: _Spelling,
    tensors: dict[str, TensorInfo],
    needed: list[int],
    layouts: dict[tuple[str, str], Layout],
) -> bool:
    matches = spelling.entries.findall(piece)
    if not matches:
        return False
    groups = list(zip(*matches, strict=True))
    if sum(len("".join(g)) for g in groups) + spelling.overhead * len(matches) != len(piece):
        return False
    names, types, dims, starts, ends = (groups[i] for i in spelling.order)
    kinds = list(zip(types, dims, strict=True))
    fresh: dict[int, list[tuple[str, str]]] = {}
    for pair in set(kinds) - layouts.keys():
        fresh.setdefault(pair[1].count(",") + 1 if pair[1] else 0, []).append(pair)
    if not all(_describe(rank, pairs, layouts) for rank, pairs in fresh.items()):
        return False
    upto = list(map(int, ends))
    # usually each range begins where the one before ends: then the numbers are shared
    begin = [int(starts[0]), *(upto[:-1] if starts[1:] == ends[:-1] else map(int, starts[1:]))]
    dtypes, shapes, sizes = zip(*map(layouts.__getitem__, kinds), strict=True)
    tensors.update(zip(names, map(_make, zip(names, dtypes, shapes, begin, upto, strict=True)), strict=True))
    needed.extend(sizes)
    return True


def _describe(rank: int, pairs: list[tuple[str, str]], layouts: dict[tuple[str, str], Layout]) -> bool:
    """Add the layouts of dtypes with shapes of one rank, given as text; False where the
    JSON parser should look."""
    shapes: list[tuple[int, ...]] = [()] * len(pairs)
    largest = 0
    if rank:
        text = ",".join([dims for _, dims in pairs])
        try:
            flat = list(map(int, text.split(",")))
        except ValueError:
            return False
        if _LEADING_ZERO.search(text):
            return False
        shapes = list(zip(*[iter(flat)] * rank, strict=True))
        largest = max(flat)
    small = rank <= 2 and largest >> 24 == 0  # then nothing overflows
    for pair, shape in zip(pairs, shapes, strict=True):
        dtype = DTYPES.get(pair[0])
        if dtype is None:
            return False
        if not small:
            judged = layout(pair[0], list(shape))
            if isinstance(judged, str):
                return False
            layouts[pair] = judged
            continue
        bits = dtype.bits
        for dim in shape:
            bits *= dim
        if bits & 7:
            return False
        layouts[pair] = _layout((dtype, shape, bits >> 3))
    return True
