"""Where a file system keeps the bytes of a file, asked range by range: FIEMAP
(Documentation/filesystems/fiemap.rst).

btrfs decides extent by extent: what it has compressed, or packed among its metadata, an O_DIRECT read gets
from the page cache, and the rest of that call with it, while the next extent is read directly. statx says
nothing of it, and a probe of one place proves that place alone. File systems that report DIOALIGN answer for
the whole file; they are not asked.

FIEMAP is asked window by window. The answers hold while the file's change time stands still. How dirty bytes
will be kept is decided when they are written, and btrfs shows the old extents until then: they are written
first, by FIEMAP_FLAG_SYNC, as a direct read of them would do.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterable
from typing import Literal, NamedTuple

from nobounce.facts import cachestat

IndirectCode = Literal["encoded-extent", "inline-extent", "page-cache-served"]

_FS_IOC_FIEMAP = 0xC020660B
_FS_IOC_GETFLAGS = 0x80086601
_FLAG_SYNC = 0x1
_LAST, _ENCODED, _ENCRYPTED, _NOT_ALIGNED, _INLINE, _TAIL, _UNWRITTEN = (
    0x1,
    0x8,
    0x80,
    0x100,
    0x200,
    0x400,
    0x800,
)
_HEADER = struct.Struct("=QQIIII")
_EXTENT = struct.Struct("=QQQQQIIII")
_MOST = 512
"""Extents that one call returns: 28 KiB of them."""
WINDOW = 64 << 20
"""Bytes of a file that are asked about at a time: 512 extents where btrfs has compressed all of it."""


class IndirectRange(NamedTuple):
    """Bytes of a file that O_DIRECT reads through the page cache, and why. Offset and size in bytes."""

    file_offset: int
    nbytes: int
    code: IndirectCode


class Extent(NamedTuple):
    """One extent as FIEMAP tells it; between extents are holes. `flags` are FIEMAP_EXTENT_*."""

    file_offset: int
    nbytes: int
    flags: int

    @property
    def is_plain(self) -> bool:
        """Whether an O_DIRECT read gets these bytes from a disk: neither indirect nor
        allocated and never written."""
        return _code(self.flags) is None and not self.flags & _UNWRITTEN


def extents(fd: int, file_offset: int, nbytes: int, *, sync: bool = False) -> list[Extent]:
    """The extents that a range touches, in the order of the file; `sync` writes dirty
    bytes of the file first.

    Raises OSError: EOPNOTSUPP where the file system has no FIEMAP.
    """
    found: list[Extent] = []
    end = file_offset + nbytes
    while file_offset < end:
        block = bytearray(_HEADER.size + _MOST * _EXTENT.size)
        _HEADER.pack_into(block, 0, file_offset, end - file_offset, _FLAG_SYNC if sync else 0, 0, _MOST, 0)
        fcntl.ioctl(fd, _FS_IOC_FIEMAP, block)
        count = min(_HEADER.unpack_from(block)[3], _MOST)
        table = memoryview(block)[_HEADER.size : _HEADER.size + count * _EXTENT.size]
        found += [Extent(e[0], e[2], e[5]) for e in _EXTENT.iter_unpack(table)]
        if count < _MOST or found[-1].flags & _LAST:
            break
        file_offset = found[-1].file_offset + found[-1].nbytes
    return found


def indirect(found: Iterable[Extent]) -> tuple[IndirectRange, ...]:
    """The extents that O_DIRECT reads through the page cache, neighbours of a kind joined."""
    joined: list[IndirectRange] = []
    for extent in found:
        code = _code(extent.flags)
        if code is None:
            continue
        last = joined[-1] if joined else None
        if last is not None and last.code == code and last.file_offset + last.nbytes >= extent.file_offset:
            nbytes = extent.file_offset + extent.nbytes - last.file_offset
            joined[-1] = IndirectRange(last.file_offset, nbytes, code)
        else:
            joined.append(IndirectRange(extent.file_offset, extent.nbytes, code))
    return tuple(joined)


def _code(flags: int) -> IndirectCode | None:
    if flags & (_INLINE | _TAIL):
        return "inline-extent"
    return "encoded-extent" if flags & (_ENCODED | _ENCRYPTED | _NOT_ALIGNED) else None


def indirect_in(fd: int, file_offset: int, nbytes: int) -> tuple[IndirectRange, ...]:
    """`indirect` of a range, dirty bytes written first if there are any. Raises OSError."""
    return indirect(_settled(fd, file_offset, nbytes, file_offset, nbytes)[0])


def _settled(fd: int, start: int, size: int, file_offset: int, nbytes: int) -> tuple[list[Extent], bool]:
    """The extents of a window, with none of [file_offset, file_offset + nbytes) dirty;
    whether none of the window is."""
    sync = _dirty(fd, file_offset, nbytes)
    return extents(fd, start, size, sync=sync), sync or not _dirty(fd, start, size)


def _dirty(fd: int, file_offset: int, nbytes: int) -> bool:
    """Whether bytes of a range are still to be written; True where the kernel does not say."""
    try:
        return cachestat.dirty_nbytes(fd, file_offset, nbytes) > 0
    except OSError:
        return True


class ExtentMap:
    """What is known of one file's extents. Several threads may ask: at worst a
    window is asked about twice."""

    def __init__(self) -> None:
        self._change_ns = -1
        self._windows: dict[int, tuple[IndirectRange, ...]] = {}
        self.learnt: tuple[IndirectRange, ...] = ()
        """What `learn` was told since the file changed."""
        self._unsupported = False

    def ranges(self, fd: int, file_offset: int, nbytes: int) -> tuple[IndirectRange, ...]:
        """The ranges that touch [file_offset, file_offset + nbytes), in order; none
        where FIEMAP cannot be asked."""
        end = min(file_offset + nbytes, self._refresh(fd))
        found: list[IndirectRange] = []
        for n in range(file_offset // WINDOW, -(-end // WINDOW)):
            window = self._windows.get(n)
            if window is None:
                window = self._ask(fd, n, file_offset, end - file_offset)
            found += window
        if self.learnt:
            found = _apart(sorted([*found, *self.learnt]))
        return tuple(r for r in found if r.file_offset < end and file_offset < r.file_offset + r.nbytes)

    def _ask(self, fd: int, n: int, file_offset: int, nbytes: int) -> tuple[IndirectRange, ...]:
        if self._unsupported:
            return ()
        windows = self._windows  # should the file change meanwhile, this goes with what was known before
        try:
            found, clean = _settled(fd, n * WINDOW, WINDOW, file_offset, nbytes)
        except OSError as e:
            self._unsupported = e.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EINVAL)
            return ()
        window = indirect(found)
        if clean:
            windows[n] = window
        return window

    def learn(self, fd: int, ranges: Iterable[tuple[int, int]]) -> None:
        """These (file_offset, nbytes) came through the page cache though no extent said so.
        Kept until the file changes."""
        self._refresh(fd)
        new = [IndirectRange(start, nbytes, "page-cache-served") for start, nbytes in ranges]
        self.learnt = tuple(_apart(sorted([*self.learnt, *new])))

    def _refresh(self, fd: int) -> int:
        """Forget everything where the file has changed; returns its size."""
        status = os.fstat(fd)
        if status.st_ctime_ns != self._change_ns:
            self._windows, self.learnt, self._change_ns = {}, (), status.st_ctime_ns
        return status.st_size


def _apart(found: list[IndirectRange]) -> list[IndirectRange]:
    """Sorted ranges without what an earlier one covers."""
    apart: list[IndirectRange] = []
    position = 0
    for each in found:
        start, end = max(each.file_offset, position), each.file_offset + each.nbytes
        if start < end:
            apart.append(IndirectRange(start, end - start, each.code))
            position = end
    return apart


def inode_flags(fd: int) -> int:
    """FS_*_FL of ioctl_iflags(2). Raises OSError where the file system has none."""
    block = bytearray(8)
    fcntl.ioctl(fd, _FS_IOC_GETFLAGS, block)
    return int.from_bytes(block[:4], "little")


def has_holes(fd: int) -> bool:
    """Whether any part of a file is a hole or was never written. Moves the descriptor's position."""
    try:
        nbytes = os.fstat(fd).st_size
        return nbytes > 0 and os.lseek(fd, 0, os.SEEK_HOLE) < nbytes
    except OSError:
        return False


def hole_nbytes(fd: int, file_offset: int, nbytes: int) -> int:
    """Bytes of a range that the file system answers with zeros without asking a disk: holes, and
    allocated ranges that were never written. 0 where it cannot tell. Moves the descriptor's position: not
    for one that a caller shares."""
    end, position, holes = file_offset + nbytes, file_offset, 0
    try:
        end = min(end, os.fstat(fd).st_size)
        while position < end:
            try:
                data = min(os.lseek(fd, position, os.SEEK_DATA), end)
            except OSError as e:
                if e.errno != errno.ENXIO:  # no data behind here
                    raise
                data = end
            holes += data - position
            position = os.lseek(fd, data, os.SEEK_HOLE) if data < end else end
    except OSError:
        return 0
    return holes
