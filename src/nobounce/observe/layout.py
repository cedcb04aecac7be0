"""Where each counter lies: 64-bit words in one block of shared memory, alike for who counts and who reads.

    header      64 words   magic, version, sizes, process, level, settings; the command line as text
    globals     64 words   counters of the process
    codes       96 x 8     refusals and reasons by code: a name of 40 bytes, its kind, two counters
    flows       64 x 256   one per device, backend and direction
    rows        512 x 32   sums not yet added: a count, two sums of bytes, and the words that each belongs to

A transfer counts in a dozen words; those that grow alike for all transfers of a kind are kept as one row's
three sums, which the reader adds to their words. That is what makes counting cheap. The writer raises
`SEQUENCE` before a change and again after it, so an odd number means "in the middle". Numbers only grow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum

WORD = 8
MAGIC = int.from_bytes(b"NOBOUNCE", "little")
VERSION = 3


class Header(IntEnum):
    """Words of the header."""

    MAGIC = 0
    VERSION = 1
    NBYTES = 2
    PID = 3
    LEVEL = 4
    STARTED_WALL_NS = 5
    STARTED_NS = 6
    SEQUENCE = 7
    FLOWS = 8
    CODES = 9
    SETTINGS = 10
    PARENT = 11
    ROWS = 12
    NAME = 16


NAME_NBYTES = (64 - Header.NAME) * WORD
"""Room for the command line."""


class Flag(IntEnum):
    """Bits of `Header.SETTINGS`."""

    ALLOW_COMPAT_MODE = 1
    FORCE_COMPAT_MODE = 2
    UNSUPPORTED_FILE_SYSTEMS = 4
    PUBLISHED_PROFILE = 8


GLOBALS_AT = 64
GLOBALS = (
    "handle_register_ok",
    "handle_register_err",
    "handle_deregister_ok",
    "handle_deregister_err",
    "buf_register_ok",
    "buf_register_err",
    "buf_deregister_ok",
    "buf_deregister_err",
    "stream_register_ok",
    "stream_register_err",
    "stream_deregister_ok",
    "stream_deregister_err",
    "batch_setup_ok",
    "batch_setup_err",
    "batch_submit_ok",
    "batch_submit_err",
    "batch_cancel_ok",
    "batch_cancel_err",
    "batch_destroy_ok",
    "batch_destroy_err",
    "batch_requests_complete",
    "batch_requests_failed",
    "batch_requests_cancelled",
    "batch_requests_timeout",
    "batch_requests_invalid",
    "batch_read_bytes",
    "batch_write_bytes",
    "last_batch_read_bytes",
    "last_batch_write_bytes",
    "async_submitted",
    "cancelled",
    "refused",
    "fastpath_rejections",
    "bounce_pinned_bytes",
    "dropped_flows",
    "dropped_codes",
    "batch_time_ns",
    "hole_read_bytes",
    "unretrieved_errors",
)
"""Counters of the process, in their order."""

CODES_AT = 128
MOST_CODES = 96
CODE_WORDS = 8
CODE_NAME_NBYTES = 5 * WORD
CODE_KIND, CODE_COUNT, CODE_NBYTES = 5, 6, 7
REFUSAL, REASON = 1, 2
"""Kinds of codes: why the direct path refused a request; why bytes took the way they took."""

FLOWS_AT = CODES_AT + MOST_CODES * CODE_WORDS
MOST_FLOWS = 64
FLOW_WORDS = 256
DEVICE_NBYTES = 4 * WORD
BACKENDS = ("fastpath", "fallback")
OPS = ("read", "write")


class Flow(IntEnum):
    """Words of one flow. Histograms have 16 buckets by size (hipFile F-4); times in nanoseconds."""

    DEVICE = 0
    BACKEND = 4
    OP = 5
    UNALIGNED = 6
    RETRIES = 7
    ASYNC = 8
    RELAYED_NBYTES = 9
    CACHED_NBYTES = 10
    QUEUED_NS = 11
    SHORT = 12
    OPERATIONS = 16
    NBYTES = 32
    TIME_NS = 48
    ERRORS = 64
    LATENCY = 96


SIZE_BUCKETS = 16
LATENCY_BUCKETS = 160
ROWS_AT = FLOWS_AT + MOST_FLOWS * FLOW_WORDS
MOST_ROWS = 512
ROW_WORDS = 32
ROW_ENTRIES = 3
"""Words of a row before its entries: each names a word (above bit 2) and which of the three sums
it takes (bits 0 and 1)."""
WORDS = ROWS_AT + MOST_ROWS * ROW_WORDS
NBYTES = WORDS * WORD


def additions(words: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(word, value): what the rows of a block add to its words. Raises ValueError for rows that
    this library has not written."""
    rows = words[Header.ROWS]
    if rows > MOST_ROWS:
        raise ValueError(f"{rows} rows of sums")
    for row in range(rows):
        yield from row_additions(words, ROWS_AT + row * ROW_WORDS)


def row_additions(words: Sequence[int], at: int) -> Iterator[tuple[int, int]]:
    """The same of the row at word `at`."""
    for entry in words[at + ROW_ENTRIES : at + ROW_WORDS]:
        if not entry:
            return
        word, which = entry >> 2, entry & 3
        if not GLOBALS_AT <= word < ROWS_AT or which >= ROW_ENTRIES:
            raise ValueError(f"a row of sums names word {word}")
        yield word, words[at + which]
