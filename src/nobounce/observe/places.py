"""Where in the block a transfer counts: the words of its device, backend and direction, of its
reason, and its kind's row.

Each of these is made when it is first needed, with the counters' lock held.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Sequence
from typing import Any

from nobounce.observe.histogram import size_bucket
from nobounce.observe.layout import (
    BACKENDS,
    CODE_COUNT,
    CODE_KIND,
    CODE_NAME_NBYTES,
    CODE_NBYTES,
    CODE_WORDS,
    CODES_AT,
    DEVICE_NBYTES,
    FLOW_WORDS,
    FLOWS_AT,
    GLOBALS,
    GLOBALS_AT,
    MOST_CODES,
    MOST_FLOWS,
    MOST_ROWS,
    OPS,
    REASON,
    REFUSAL,
    ROW_WORDS,
    ROWS_AT,
    Flow,
    Header,
    row_additions,
)

OPERATIONS, NBYTES_AT, TIME, LATENCY = (
    int(Flow.OPERATIONS),
    int(Flow.NBYTES),
    int(Flow.TIME_NS),
    int(Flow.LATENCY),
)
AT = {name: GLOBALS_AT + i for i, name in enumerate(GLOBALS)}
RELAYED, CACHED_AT, UNALIGNED_AT = int(Flow.RELAYED_NBYTES), int(Flow.CACHED_NBYTES), int(Flow.UNALIGNED)
# Plain integers: arithmetic on members of an IntEnum takes longer than the counting itself.
CACHED = frozenset({"cached", "cache-use"})
UNALIGNED = frozenset({"offset-align", "size-align", "memory-align"})
OTHERS = "(others)"
MOST_REFUSALS = 12
"""Reasons of one refusal that are counted: more would not fit into a row, and no judge gives as many."""


class Places:
    """The block `memory` as 64-bit `words`, and what lies where in it."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.words = memoryview(memory).cast("Q")
        self._flows: dict[tuple[str, str, str], int] = {}
        self._codes: dict[tuple[int, str], int] = {}
        self._ones: dict[tuple[Any, ...], tuple[int, int, int]] = {}
        self._twos: dict[tuple[Any, ...], tuple[int, int, int, int, int]] = {}
        self._rows = 0

    def _flow(self, device: str, backend: str, op: str) -> int:
        found = self._flows.get((device, backend, op))
        return found if found is not None else self._new_flow(device, backend, op)

    def _new_flow(self, device: str, backend: str, op: str) -> int:
        count = len(self._flows)
        if count >= MOST_FLOWS - len(BACKENDS) * len(OPS) and device != OTHERS:
            self.words[AT["dropped_flows"]] += 1
            return self._flow(OTHERS, backend, op)
        at = FLOWS_AT + count * FLOW_WORDS
        self._flows[device, backend, op] = at
        put_text(self.memory, at, DEVICE_NBYTES, device)
        self.words[at + Flow.BACKEND], self.words[at + Flow.OP] = BACKENDS.index(backend), OPS.index(op)
        self.words[Header.FLOWS] = count + 1
        return at

    def _code(self, kind: int, code: str) -> int:
        found = self._codes.get((kind, code))
        if found is not None:
            return found
        count = len(self._codes)
        if count >= MOST_CODES - 2 and code != OTHERS:
            self.words[AT["dropped_codes"]] += 1
            return self._code(kind, OTHERS)
        at = CODES_AT + count * CODE_WORDS
        self._codes[kind, code] = at
        put_text(self.memory, at, CODE_NAME_NBYTES, code)
        self.words[at + CODE_KIND] = kind
        self.words[Header.CODES] = count + 1
        return at

    def _one(self, key: tuple[Any, ...]) -> tuple[int, int, int]:
        """The row, the time's word and the latencies of transfers of this kind."""
        device, op, backend, code, bits, relayed, *refused = key
        at, bucket, ones, sums = self._part(device, op, backend, code, bits, relayed)
        ones += self._refusal(device, op, refused)
        made = self._row([(ones, 0), (sums, 1)]), bucket + TIME, at + LATENCY
        self._ones[key] = made
        return made

    def _two(self, key: tuple[Any, ...]) -> tuple[int, int, int, int, int]:
        device, op, backend, code, bits, relayed, pieces, other, code_b, bits_b, relayed_b, *refused = key
        a, bucket_a, ones, sums_a = self._part(device, op, backend, code, bits, relayed)
        b, bucket_b, ones_b, sums_b = self._part(device, op, other, code_b, bits_b, relayed_b)
        ones += [*ones_b, *ones[1:] * (pieces - 2), *self._refusal(device, op, refused)]
        row = self._row([(ones, 0), (sums_a, 1), (sums_b, 2)])
        made = row, bucket_a + TIME, bucket_b + TIME, a + LATENCY, b + LATENCY
        self._twos[key] = made
        return made

    def _part(
        self, device: str, op: str, backend: str, code: str, bits: int, relayed: bool
    ) -> tuple[int, int, list[int], list[int]]:
        """The flow and the bucket of a part of a transfer, and the words that grow
        by one, and by its bytes."""
        at, c = self._flow(device, backend, op), self._code(REASON, code)
        bucket = at + size_bucket((1 << bits) >> 1)
        sums = [bucket + NBYTES_AT, c + CODE_NBYTES]
        sums += [at + RELAYED] * relayed + [at + CACHED_AT] * (code in CACHED)
        return at, bucket, [bucket + OPERATIONS, c + CODE_COUNT], sums

    def _refusal(self, device: str, op: str, codes: Sequence[str]) -> list[int]:
        """The words in which a request counts that the direct path refused for these reasons."""
        if not codes:
            return []
        words = [
            AT["fastpath_rejections"],
            *(self._code(REFUSAL, code) + CODE_COUNT for code in codes[:MOST_REFUSALS]),
        ]
        if not UNALIGNED.isdisjoint(codes):
            words.append(self._flow(device, "fallback", op) + UNALIGNED_AT)
        return words

    def _row(self, growing: list[tuple[list[int], int]]) -> int:
        """A new row: a reader adds its three sums to these words. Where there is
        no room, all are added up."""
        w = self.words
        entries = [word << 2 | which for words, which in growing for word in words]
        if self._rows >= MOST_ROWS:
            self._add_up()
        at = ROWS_AT + self._rows * ROW_WORDS
        w[at : at + ROW_WORDS] = memoryview(
            array("Q", [0, 0, 0, *entries] + [0] * (ROW_WORDS - 3 - len(entries)))
        )
        self._rows += 1
        w[Header.ROWS] = self._rows
        return at

    def _add_up(self) -> None:
        """Add every row to its words and begin with none again; row by row, so that a kill leaves
        one at most counted twice."""
        w = self.words
        for at in range(ROWS_AT, ROWS_AT + self._rows * ROW_WORDS, ROW_WORDS):
            for word, value in row_additions(w, at):
                w[word] += value
            w[at] = w[at + 1] = w[at + 2] = 0
        self._rows = w[Header.ROWS] = 0
        self._ones.clear()
        self._twos.clear()


def put_text(memory: mmap.mmap, word: int, room: int, text: str) -> None:
    raw = text.encode("utf-8", "replace")[: room - 1]
    memory[word * 8 : word * 8 + len(raw)] = raw
