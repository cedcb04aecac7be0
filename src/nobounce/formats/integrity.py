"""What is wrong with the files of a model: structure, index, sizes, and every block that its checksums deny.

Blocks are read by the engine with cache="avoid", so that they come from the disk and not from what the page
cache remembers. One pass serves the checksums in a file's metadata and those beside it. Everything is told,
not the first thing alone.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from nobounce import outfile
from nobounce.buffer import Buffer
from nobounce.device import Device
from nobounce.errors import FileError, FormatError, TransferError, counted, named_errors
from nobounce.formats.checksums import (
    BLOCK,
    SUFFIX,
    Recorded,
    digest,
    digest_matches,
    of_metadata,
    of_sidecar,
    sidecar,
)
from nobounce.formats.header import HEADER_LIMIT, open_regular
from nobounce.formats.index import ModelFiles, find, verify_index
from nobounce.formats.opened import Opened
from nobounce.formats.sets import verify_split
from nobounce.formats.tensorinfo import Header
from nobounce.io.file import File
from nobounce.io.transfer import Transfer
from nobounce.stream import Stream

READING = 4
"""Blocks that are read at once."""
MOST_TENSORS = 10
"""Tensors of a bad block that are named."""
CODES = {
    "missing": "a file that the index or the numbers of other files promise is not there",
    "format": "the file is not what it claims to be",
    "index": "index and shard disagree about a tensor",
    "changed": "the file changed while it was read",
    "read": "bytes could not be read",
    "block": "a block's bytes are not those that its checksum was made of",
    "header": "what lies before the data section is not what the checksums were made of",
    "checksums": "the checksums make no sense, or are those of another file",
}
"""What may be wrong (docs/saving.md)."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. `offset` and `nbytes`, in bytes, say where in the file; `tensors` are those
    concerned, the first of them."""

    code: str
    sentence: str
    file: str
    tensors: tuple[str, ...] = ()
    offset: int | None = None
    nbytes: int | None = None


@dataclass(slots=True)
class Examined:
    """A file that could be read: its format, bytes, tensors, where its checksums are, and how
    many blocks were compared."""

    path: str
    format: str
    nbytes: int
    tensors: int
    checksums: tuple[str, ...] = ()
    blocks: int = 0


@dataclass(slots=True)
class Report:
    """What was found. `is_complete` where there was nothing wrong and every file had checksums."""

    files: list[Examined] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return not self.problems and all(f.checksums for f in self.files)


def verify(path: str, *, record: bool = False, progress: Callable[[str, int], None] | None = None) -> Report:
    """Examine the model at a path: a file, a folder or an index. With `record`, checksums of every file are
    stored beside it, if nothing is wrong with it; old ones there are replaced.

    Raises FileError for a path that is not there or holds no model, ArgumentError for a folder of
    several; UnavailableError for checksums without xxhash. What is wrong with a model is no
    error: it is in the report.
    """
    report = Report()
    try:
        files = find(path)
    except FormatError as e:
        report.problems.append(_problem("format", e, path))
        return report
    report.warnings += files.warnings
    for shard in files.missing:
        tensors = () if files.index is None else files.index.weight_map.items()
        lost = [name for name, where in tensors if where == shard.name]
        sentence = f"is not there; it would hold {counted(len(lost), 'tensor')}" if lost else "is not there"
        report.problems.append(Problem("missing", sentence, shard.path, tuple(lost[:MOST_TENSORS])))
    gone = {shard.path for shard in files.missing}
    headers: dict[str, Header] = {}
    for shard in files.shards:
        if shard.path not in gone:
            header = _examine(shard.path, report, record, progress)
            if header is not None:
                headers[shard.name] = header
    _compare_index(files, headers, report)
    return report


def _compare_index(files: ModelFiles, headers: dict[str, Header], report: Report) -> None:
    if not headers:
        return
    where = files.index.path if files.index is not None else files.shards[0].path
    try:
        found = verify_index(files.index, headers, strict=False)
        report.warnings += found.warnings
        for tensor, shard in found.absent:
            sentence = f"the index gives it the tensor {tensor!r}, which it does not hold"
            report.problems.append(Problem("index", sentence, _path_of(files, shard), (tensor,)))
        for tensor, shard in found.unlisted:
            sentence = f"holds the tensor {tensor!r}, which the index does not give it"
            report.problems.append(Problem("index", sentence, _path_of(files, shard), (tensor,)))
        report.warnings += verify_split(list(headers.values()))
    except FormatError as e:
        report.problems.append(_problem("index", e, where))


def _path_of(files: ModelFiles, shard: str) -> str:
    return next((s.path for s in files.shards if s.name == shard), shard)


def _examine(
    path: str, report: Report, record: bool, progress: Callable[[str, int], None] | None
) -> Header | None:
    """Look at one file; what is wrong goes into the report."""
    before = len(report.problems)
    try:
        opened = Opened(path)
    except FormatError as e:
        report.problems.append(_problem("format", e, path))
        return None
    except FileError as e:
        report.problems.append(Problem("read", str(e), path))
        return None
    header = opened.header
    report.warnings += header.warnings
    done = Examined(path, header.format, header.file_nbytes, len(header.tensors))
    report.files.append(done)
    try:
        with opened.reading() as file:
            start = os.pread(file.fileno(), header.data_offset, 0)
            known = [] if record else list(_beside(header, report))
            try:
                known += filter(None, [of_metadata(header)])
            except FormatError as e:
                report.problems.append(Problem("checksums", e.reason, path))
            done.checksums = tuple(r.where for r in known)
            for recorded in known:
                if not digest_matches(recorded, start):
                    sentence = (
                        "the bytes before the data section are not those of the checksums in its "
                        f"{recorded.where}"
                    )
                    report.problems.append(Problem("header", sentence, path, offset=0, nbytes=len(start)))
            sums: dict[int, list[str]] = {}
            for size in dict.fromkeys([r.block_nbytes for r in known] + ([BLOCK] if record else [])):
                told = [r for r in known if r.block_nbytes == size]
                sums[size] = _compare_blocks(file, header, told, size, report, progress)
                done.blocks += len(sums[size])
    except FileError as e:
        report.problems.append(Problem("changed", str(e), path))
        return header
    if record and len(report.problems) == before:
        outfile.write(path + SUFFIX, sidecar(header, start, sums[BLOCK]))
        done.checksums = (*done.checksums, "sidecar")
    return header


def _beside(header: Header, report: Report) -> Iterator[Recorded]:
    """The checksums in the file beside a file, if there is one."""
    path = header.path + SUFFIX
    if not os.path.lexists(path):
        return
    try:
        fd, nbytes, _ = open_regular(path)
        with named_errors(path, "read"), open(fd, "rb") as f:
            if nbytes > HEADER_LIMIT:
                raise FormatError(f"checksums of {nbytes} bytes are over the limit of {HEADER_LIMIT}")
            yield of_sidecar(f.read(HEADER_LIMIT), header, path)
    except FormatError as e:
        report.problems.append(Problem("checksums", e.reason, path))
    except FileError as e:
        report.problems.append(Problem("read", str(e), path))


def _compare_blocks(
    file: File,
    header: Header,
    known: list[Recorded],
    size: int,
    report: Report,
    progress: Callable[[str, int], None] | None,
) -> list[str]:
    """Read every block and compare it with what was recorded; returns the sums, ""
    of what could not be read."""
    ranges = _blocks(header.data_offset, header.file_nbytes, size)
    sums = []
    for number, (offset, nbytes, found) in enumerate(_read(file, ranges, size, progress)):
        if isinstance(found, TransferError):
            sentence = f"the block of {nbytes} bytes at offset {offset} cannot be read: {found}"
            report.problems.append(
                Problem("read", sentence, file.name, _within(header, offset, nbytes), offset, nbytes)
            )
            sums.append("")
            continue
        sums.append(found)
        wrong = [r for r in known if r.blocks[number] != found]
        if wrong:
            tensors = _within(header, offset, nbytes)
            sentence = (
                f"the block of {nbytes} bytes at offset {offset} is not what was saved:"
                f" its {', '.join(r.where for r in wrong)} says {wrong[0].blocks[number]}, it has {found}"
            )
            report.problems.append(Problem("block", sentence, file.name, tensors, offset, nbytes))
    return sums


def _blocks(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    """(offset, nbytes) of each block of bytes [start, stop) of a file."""
    found = []
    while start < stop:
        end = min(stop, start - start % size + size)
        found.append((start, end - start))
        start = end
    return found


def _read(
    file: File, ranges: Iterable[tuple[int, int]], size: int, progress: Callable[[str, int], None] | None
) -> Iterator[tuple[int, int, str | TransferError]]:
    """(offset, nbytes, sum or error) of each range, in order; several are read while one is hashed."""
    device, todo = Device("cpu"), list(ranges)
    grain = max(4096, file.facts().dio_offset_align or 0)
    with ExitStack() as stack:
        lanes = deque(
            _Lane(
                stack.enter_context(device.create_stream()),
                stack.enter_context(device.allocate(size + grain)),
            )
            for _ in range(min(READING, len(todo)))
        )
        under_way = deque(lane.read(file, *where, grain) for lane, where in zip(lanes, todo, strict=False))
        stack.callback(lambda: [transfer.cancel() for transfer in reversed(under_way)])
        for number, (offset, nbytes) in enumerate(todo):
            lane = lanes[0]
            lanes.rotate(-1)
            found: str | TransferError
            try:
                receipt = under_way.popleft().result()
                lead = offset % grain
                found = digest(lane.buffer.view()[lead : lead + receipt.nbytes])
            except TransferError as e:
                found = e
            if progress is not None:
                progress("fastpath", nbytes)
            if number + READING < len(todo):
                under_way.append(lane.read(file, *todo[number + READING], grain))
            yield offset, nbytes, found


class _Lane(NamedTuple):
    """A stream, and memory for a block."""

    stream: Stream
    buffer: Buffer

    def read(self, file: File, offset: int, nbytes: int, grain: int) -> Transfer:
        return file.read_async(
            self.buffer,
            stream=self.stream,
            nbytes=nbytes,
            file_offset=offset,
            buffer_offset=offset % grain,
            cache="avoid",
        )


def _within(header: Header, offset: int, nbytes: int) -> tuple[str, ...]:
    """The first tensors that have bytes in a range of the file."""
    start, stop = offset - header.data_offset, offset - header.data_offset + nbytes
    found = []
    for info in header.tensors.values():
        if info.start < stop and info.end > start:
            found.append(info.name)
            if len(found) == MOST_TENSORS:
                break
    return tuple(found)


def _problem(code: str, error: FormatError, path: str) -> Problem:
    tensors = () if error.tensor is None else (error.tensor,)
    return Problem(code, error.reason, error.filename or path, tensors, error.offset)
