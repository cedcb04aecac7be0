"""Files of a model that are open and whose headers have been checked."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterable, Iterator

from nobounce.errors import FileChangedError, printable
from nobounce.facts.pagecache import counted, residency
from nobounce.formats.index import ModelFiles, resolve, verify_index
from nobounce.formats.populate import MIN_NBYTES
from nobounce.formats.reader import Descriptor, read_model
from nobounce.formats.sets import verify_split
from nobounce.formats.tensorinfo import Header
from nobounce.io.file import File
from nobounce.io.opening import open as open_file
from nobounce.records import replace

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

KEEP_OPEN = 16
PIECE = 128 << 10
HEAD = 1 << 20
"""What is asked of the page cache first; the header of most models ends before it."""
RWF_DONTCACHE = 0x80


def _nothing(*_: object) -> None:
    return None


class Opened:
    """A checked file of the model; descriptors are bounded, so it may be closed and opened again."""

    def __init__(
        self,
        path: str,
        meanwhile: Callable[[int], None] = _nothing,
        announce: Callable[[int, int], None] = _nothing,
    ) -> None:
        self.path, self._meanwhile, self._announce = path, meanwhile, announce
        self.file = open_file(path)
        try:
            self._identity = self._look()
            self.header = self._read_header()
            self._check()
        except BaseException:
            self.file.close()
            raise

    def _look(self) -> tuple[int, int, int, int]:
        status = os.fstat(self.file.fileno())
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def _read_header(self) -> Header:
        fd, nbytes = self.file.fileno(), self._identity[2]
        # A look at all of a cached file takes milliseconds, and is not worth it where its head is there.
        head = min(nbytes, HEAD)
        resident = counted(fd, 0, head).resident_bytes
        if resident is None or (resident != head and head < nbytes):
            resident = residency(fd, 0, nbytes).resident_bytes
        cold = resident == 0
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        try:
            source = Descriptor(
                fd, 0 if cold or resident == nbytes else RWF_DONTCACHE, hints=resident != nbytes
            )
            return read_model(
                source, path=self.path, file_nbytes=nbytes, announce=functools.partial(self._fetch, cold)
            )
        finally:
            if cold:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _fetch(self, cold: bool, data_offset: int) -> None:
        """Have the disk bring all of a long header at once, as with POSIX_FADV_RANDOM a read waits for it
        piece by piece; then tell where the data section begins."""
        if data_offset > PIECE:
            os.posix_fadvise(self.file.fileno(), 0, data_offset, os.POSIX_FADV_WILLNEED)
            nbytes = self._identity[2] - data_offset
            if cold and nbytes >= MIN_NBYTES:
                self._meanwhile(nbytes)
        self._announce(data_offset, self._identity[2])

    def _check(self) -> None:
        now = self._look()
        if now != self._identity:
            what = (
                f"its size went from {self._identity[2]} to {now[2]} bytes"
                if now[2] != self._identity[2]
                else "it was written to"
            )
            raise FileChangedError(
                f"{printable(self.path)}: the file changed while it was being loaded: {what}",
                errno.ESTALE,
                self.path,
            )

    def start(self) -> File:
        """The file, open, once more found to be the one whose header was read. `end` closes it."""
        if self.file.closed:
            self.file = open_file(self.path)
        self._check()
        return self.file

    def end(self) -> None:
        """Close the file. FileChangedError where it was changed since its header was read."""
        try:
            self._check()
        finally:
            self.file.close()

    @contextlib.contextmanager
    def reading(self) -> Iterator[File]:
        """The file, open; checks before and after that it is still the one whose header was read."""
        try:
            yield self.start()
            self._check()
        finally:
            self.file.close()


def open_files(
    paths: Paths,
    meanwhile: Callable[[int], None] = _nothing,
    announce: Callable[[int, int], None] = _nothing,
) -> tuple[ModelFiles, list[Opened]]:
    """Resolve `paths` and read and check every header. At most `KEEP_OPEN` files stay open. `meanwhile` is
    called while a disk brings a long header, if there is much behind it; `announce` before the first file's
    header is read, with the offset of its data section and its size in bytes.

    Raises FileError, FormatError and ArgumentError; on an error nothing stays open.
    """
    files = resolve(paths)
    opened: list[Opened] = []
    try:
        for shard in files.shards:
            one = Opened(shard.path, meanwhile, _nothing if opened else announce)
            opened.append(one)
            if len(files.shards) > KEEP_OPEN:
                one.file.close()
        verify_index(files.index, {s.name: o.header for s, o in zip(files.shards, opened, strict=True)})
        warnings = verify_split([o.header for o in opened])
    except BaseException:
        close_files(opened)
        raise
    return replace(files, warnings=(*files.warnings, *warnings)), opened


def close_files(opened: list[Opened]) -> None:
    """Close the files of `open_files`."""
    for one in opened:
        one.file.close()


def grain_of(file: File) -> int:
    """Alignment in bytes that direct requests to this file keep; at least a page (case
    C69: never assume 4096)."""
    facts = file.facts()
    return max(4096, facts.dio_offset_align or 0, facts.dio_mem_align or 0)
