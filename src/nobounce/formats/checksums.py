"""Checksums of a model file: XXH3-64 over blocks, in the file's own metadata or beside it.

A block is what lies of the data section between two multiples of 16 MiB of the file: blocks can be read
and hashed in any order, and a bad one is found without its neighbours. What lies before the data section
has a digest of its own.

In a file that `save` wrote, two values of `__metadata__` hold them: `nobounce.checksums` is "xxh3-64 16777216
DIGEST", and `nobounce.checksums.blocks` the blocks' sums one after the other, each as 16 hexadecimal digits.
DIGEST is the XXH3-64 of all bytes before the data section, its own digits as zeros; so it covers the list
too. The header comes before the data and is written last: its length does not depend on the sums. For files
of others the same is in a file beside them, NAME.checksums.json.

XXH3 tells what a disk, a cable or a bug has changed, not what an enemy has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from nobounce import __version__
from nobounce.errors import FormatError, InternalError, UnavailableError, clip
from nobounce.formats.strictjson import loads

if TYPE_CHECKING:
    from nobounce.formats.tensorinfo import Header

BLOCK = 16 << 20
MOST_BLOCK = 256 << 20
"""The largest block, in bytes, that is believed: one is held in memory."""
KEY, BLOCKS_KEY = "nobounce.checksums", "nobounce.checksums.blocks"
ALGORITHM = "xxh3-64"
SUFFIX = ".checksums.json"
SCHEMA = "nobounce.checksums/1"
DIGITS = 16
_VALUE = re.compile(rf"{ALGORITHM} ([0-9]{{1,12}}) ([0-9a-f]{{{DIGITS}}})")
_SUMS = re.compile(rf"(?:[0-9a-f]{{{DIGITS}}})*")


class Recorded(NamedTuple):
    """Checksums that were stored: `where` ("metadata" or "sidecar"), the size of a block in bytes, the
    blocks' sums in their order, and the digest of what comes before the data section."""

    where: str
    block_nbytes: int
    blocks: tuple[str, ...]
    digest: str


class Hasher:
    """The sums of the blocks of consecutive bytes of a file, from `start` on. Raises
    UnavailableError without xxhash."""

    def __init__(self, start: int, block_nbytes: int = BLOCK) -> None:
        self._at, self._block = start, block_nbytes
        self._new: Callable[[], Any] = _xxhash().xxh3_64
        self._sum: Any = None
        self._done: list[str] = []

    def update(self, file_offset: int, data: Any) -> None:
        """Add the bytes at `file_offset`, a flat array of bytes; they follow those before. The hash
        is made without the GIL."""
        if file_offset != self._at:
            raise InternalError(f"bytes at {file_offset} were hashed where {self._at} comes next")
        taken, nbytes = 0, len(data)
        while taken < nbytes:
            step = min(nbytes - taken, self._block - self._at % self._block)
            if self._sum is None:
                self._sum = self._new()
            self._sum.update(data[taken : taken + step])
            taken, self._at = taken + step, self._at + step
            if self._at % self._block == 0:
                self._close()

    def blocks(self) -> list[str]:
        """The sums of all blocks so far, the last one as far as it goes."""
        self._close()
        return self._done

    def _close(self) -> None:
        if self._sum is not None:
            self._done.append(self._sum.hexdigest())
            self._sum = None


def digest(data: Any) -> str:
    """The XXH3-64 of some bytes, as 16 digits. Raises UnavailableError without xxhash."""
    found: str = _xxhash().xxh3_64_hexdigest(data)
    return found


def count(start: int, stop: int, block_nbytes: int = BLOCK) -> int:
    """How many blocks bytes [start, stop) of a file have."""
    return (stop - 1) // block_nbytes - start // block_nbytes + 1 if stop > start else 0


def without(metadata: Mapping[str, str]) -> dict[str, str]:
    """Metadata without the checksums of the file that it came from."""
    return {key: text for key, text in metadata.items() if key not in (KEY, BLOCKS_KEY)}


def reserved(blocks: int) -> dict[str, str]:
    """Metadata as long as that of so many blocks."""
    return {KEY: f"{ALGORITHM} {BLOCK} {'0' * DIGITS}", BLOCKS_KEY: "0" * (DIGITS * blocks)}


def sealed(header: bytes, blocks: Iterable[str]) -> bytes:
    """A header with the metadata of `reserved` as its first, with the sums in it."""
    sums = "".join(blocks)
    empty, full = (f'"{BLOCKS_KEY}":"{text}"'.encode() for text in ("0" * len(sums), sums))
    if empty not in header:
        raise InternalError("the header has no place for so many checksums")
    header = header.replace(empty, full, 1)
    return header.replace(_spelt("0" * DIGITS, BLOCK), _spelt(digest(header), BLOCK), 1)


def of_metadata(header: Header) -> Recorded | None:
    """The checksums in a file's own metadata. Raises FormatError where they make no sense."""
    value = header.metadata.get(KEY)
    if value is None:
        return None

    def bad(reason: str) -> NoReturn:
        raise FormatError(f"the metadata {KEY!r} {reason}", filename=header.path)

    found = _VALUE.fullmatch(value)
    if found is None:
        bad(f"is {clip(value)!r}, no checksums that are known here")
    recorded = _checked("metadata", int(found[1]), header.metadata.get(BLOCKS_KEY, ""), found[2], header)
    return bad(recorded) if isinstance(recorded, str) else recorded


def digest_matches(recorded: Recorded, before_data: bytes) -> bool:
    """Whether the bytes before the data section are those that the checksums were made of."""
    if recorded.where == "metadata":
        own = _spelt(recorded.digest, recorded.block_nbytes)
        if before_data.count(own) != 1:
            return False
        before_data = before_data.replace(own, _spelt("0" * DIGITS, recorded.block_nbytes))
    return digest(before_data) == recorded.digest


def sidecar(header: Header, before_data: bytes, blocks: Iterable[str]) -> bytes:
    """The text of the file beside a file of others."""
    document = {
        "schema": SCHEMA,
        "version": __version__,
        "nbytes": header.file_nbytes,
        "data_offset": header.data_offset,
        "algorithm": ALGORITHM,
        "block_nbytes": BLOCK,
        "before_data": digest(before_data),
        "blocks": "".join(blocks),
    }
    document["digest"] = digest(_canonical(document))
    return json.dumps(document, indent=2).encode() + b"\n"


def of_sidecar(raw: bytes, header: Header, path: str) -> Recorded:
    """The checksums in a file beside a file. Raises FormatError where they make no sense, or are those
    of a file of another size."""

    def bad(reason: str) -> NoReturn:
        raise FormatError(reason, filename=path)

    try:
        found = loads(raw.decode())
    except ValueError as e:
        bad(f"the checksums are not valid JSON: {clip(str(e))}")
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        bad(f"is no list of checksums: its schema is not {SCHEMA}")
    kinds = {"nbytes": int, "data_offset": int, "block_nbytes": int, "before_data": str, "blocks": str}
    for key, kind in {**kinds, "algorithm": str, "digest": str}.items():
        if type(found.get(key)) is not kind:
            bad(f"the field {key} is missing, or of another kind")
    if found["algorithm"] != ALGORITHM:
        bad(f"the algorithm {clip(found['algorithm'])!r} is not known here")
    if digest(_canonical(found)) != found["digest"]:
        bad("the list of checksums was changed: it does not match its own digest")
    if (found["nbytes"], found["data_offset"]) != (header.file_nbytes, header.data_offset):
        bad(
            f"the checksums are those of a file of {found['nbytes']} bytes with data from "
            f"{found['data_offset']} on; "
            f"the file has {header.file_nbytes}, with data from {header.data_offset} on"
        )
    recorded = _checked("sidecar", found["block_nbytes"], found["blocks"], found["before_data"], header)
    return bad(recorded) if isinstance(recorded, str) else recorded


def _checked(where: str, block_nbytes: int, sums: str, before: str, header: Header) -> Recorded | str:
    """The checksums, or why they cannot be this file's."""
    if not 4096 <= block_nbytes <= MOST_BLOCK or block_nbytes % 4096:
        return f"has blocks of {block_nbytes} bytes: no multiple of 4096 up to {MOST_BLOCK}"
    if not _SUMS.fullmatch(sums):
        return "has sums that are no hexadecimal digits"
    want = count(header.data_offset, header.file_nbytes, block_nbytes)
    if len(sums) != DIGITS * want:
        return (
            f"has {len(sums) / DIGITS:g} sums for {want} blocks: the file was rewritten since they were made"
        )
    blocks = tuple(sums[i : i + DIGITS] for i in range(0, len(sums), DIGITS))
    return Recorded(where, block_nbytes, blocks, before)


def _spelt(digits: str, block_nbytes: int) -> bytes:
    """The first value as `save` writes it."""
    return f'"{KEY}":"{ALGORITHM} {block_nbytes} {digits}"'.encode()


def _canonical(document: Mapping[str, Any]) -> bytes:
    """What the digest of a sidecar covers."""
    keys = ("nbytes", "data_offset", "algorithm", "block_nbytes", "before_data", "blocks")
    return " ".join(str(document[key]) for key in keys).encode()


def _xxhash() -> Any:
    try:
        import xxhash
    except ImportError as e:
        raise UnavailableError(f"xxhash cannot be imported ({e}): pip install nobounce[checksums]") from e
    return xxhash
