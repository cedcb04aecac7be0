"""The directory of a zip archive, for archives whose members are stored as they are (PKWARE's APPNOTE.TXT
6.3, sections 4.3 and 4.4).

The end of the file says where the central directory lies, the directory names each member and where its local
header is, and behind that lie the member's bytes: of a stored one, the bytes of the file. Archives that a
reader may understand in two ways are refused: bytes in front of the archive or behind it, a name given twice,
a local header that names another member.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from nobounce.errors import FormatError, clip, counted
from nobounce.formats import magic
from nobounce.formats.assemble import MOST_TENSORS
from nobounce.formats.reader import Source, read_exactly

_END = struct.Struct("<4s4H2IH")
_END64_AT = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_MOST_COMMENT = (1 << 16) - 1
_MOST_DIRECTORY = 100_000_000
_FULL16, _FULL32 = (1 << 16) - 1, (1 << 32) - 1
_METHODS = {0: "stored", 8: "deflate", 12: "bzip2", 14: "LZMA", 93: "zstd", 95: "xz"}
_ENCRYPTED, _UTF8 = 1, 1 << 11
_AHEAD = 512
"""Local headers whose pages a disk is asked for before the first of them is read."""


class Member(NamedTuple):
    """A member of an archive; `local` is where its local header begins, `nbytes` its size in the archive."""

    name: str
    local: int
    nbytes: int
    method: int

    @property
    def how(self) -> str:
        """What it is packed with."""
        return _METHODS.get(self.method, f"method {self.method}")


class Archive:
    """The members of an archive by name, in the order of its directory."""

    def __init__(self, source: Source, path: str, file_nbytes: int) -> None:
        self._source, self.path, self.file_nbytes = source, path, file_nbytes
        self.directory, self.directory_nbytes, count = self._end()
        self.members: dict[str, Member] = {}
        self._read_members(count)

    def bad(self, reason: str, member: str | None = None, offset: int | None = None) -> FormatError:
        """The error for this archive, or for one of its members."""
        where = "" if member is None else f"member {clip(member)!r}: "
        return FormatError(where + reason, filename=self.path, offset=offset)

    def _end(self) -> tuple[int, int, int]:
        """Where the central directory begins, its bytes, and how many members it has."""
        least = min(self.file_nbytes, _END.size + _MOST_COMMENT)
        begin = self.file_nbytes - least
        tail = read_exactly(self._source, self.path, least, begin, "the end of the archive")
        at = tail.rfind(b"PK\5\6")
        while at >= 0 and (
            len(tail) - at < _END.size or at + _END.size + _END.unpack_from(tail, at)[7] != len(tail)
        ):
            at = tail.rfind(b"PK\5\6", 0, at)
        if at < 0:
            raise self.bad(
                f"truncated: the directory at the end of the zip archive is missing; {magic.AGAIN}"
            )
        _, disk, first_disk, here, count, nbytes, offset, _ = _END.unpack_from(tail, at)
        end = begin + at
        larger = self._end64(end)  # torch writes one for small archives too
        if larger is not None:
            plain = disk, first_disk, here, count, nbytes, offset
            end, *fields = larger
            if any(a not in (b, _FULL16, _FULL32) for a, b in zip(plain, fields, strict=True)):
                raise self.bad("the two ends of the archive contradict each other", offset=end)
            disk, first_disk, here, count, nbytes, offset = fields
        if disk or first_disk or here != count:
            raise self.bad("an archive in several parts; join them", offset=end)
        if offset + nbytes != end:
            raise self.bad(
                f"the directory [{offset}, {offset + nbytes}) does not end where it should, at {end}: bytes "
                "were put in front of "
                f"the archive, or it is damaged; {magic.AGAIN}",
                offset=end,
            )
        if nbytes > _MOST_DIRECTORY or count > min(2 * MOST_TENSORS, nbytes // _ENTRY.size):
            raise self.bad(
                f"a directory of {counted(count, 'member')} in {nbytes} bytes is no model's", offset=offset
            )
        return offset, nbytes, count

    def _end64(self, end: int) -> tuple[int, ...] | None:
        """The same fields from the larger record of an archive that needs one, and where that begins;
        None where there is none."""
        if end < _END64_AT.size:
            return None
        raw = read_exactly(
            self._source, self.path, _END64_AT.size, end - _END64_AT.size, "the end of the archive"
        )
        mark, _, at, _ = _END64_AT.unpack(raw)
        if mark != b"PK\6\7":
            return None
        if at + _END64.size > end - _END64_AT.size:
            raise self.bad("the zip64 end of the archive lies behind its end", offset=end)
        raw = read_exactly(self._source, self.path, _END64.size, at, "the end of the archive")
        mark, _, _, _, disk, first_disk, here, count, nbytes, offset = _END64.unpack(raw)
        if mark != b"PK\6\6":
            raise self.bad("the zip64 end of the archive is missing", offset=at)
        return at, disk, first_disk, here, count, nbytes, offset

    def _read_members(self, count: int) -> None:
        raw = read_exactly(self._source, self.path, self.directory_nbytes, self.directory, "the directory")
        at = 0
        for _ in range(count):
            here = self.directory + at
            if at + _ENTRY.size > len(raw):
                raise self.bad("the directory ends inside a member", offset=here)
            found = _ENTRY.unpack_from(raw, at)
            mark, _, _, flags, method, _, _, _, packed, unpacked, named, extra, comment, _, _, _, local = (
                found
            )
            at += _ENTRY.size
            if mark != b"PK\1\2" or at + named + extra + comment > len(raw):
                raise self.bad("the directory is damaged", offset=here)
            name = _text(raw[at : at + named], flags)
            if name is None:
                raise self.bad("a name in the directory is no text", offset=here)
            fields = raw[at + named : at + named + extra]
            packed, unpacked, local = self._large(name, fields, packed, unpacked, local)
            at += named + extra + comment
            if name in self.members:
                raise self.bad("is in the archive twice", name, here)
            if flags & _ENCRYPTED:
                raise self.bad(
                    "is encrypted; unpack the archive with its password and pack it anew", name, here
                )
            if local + _LOCAL.size + packed > self.directory:
                raise self.bad("reaches into the directory", name, here)
            if method == 0 and packed != unpacked:
                raise self.bad(f"is stored, but {packed} bytes stand for {unpacked}", name, here)
            self.members[name] = Member(name, local, packed, method)
        if at != len(raw):
            raise self.bad("the directory has more bytes than members", offset=self.directory + at)

    def _large(
        self, name: str, fields: bytes, packed: int, unpacked: int, local: int
    ) -> tuple[int, int, int]:
        """Sizes and place from the zip64 field, for those that say so (APPNOTE 4.5.3)."""
        numbers = [unpacked, packed, local]
        if _FULL32 not in numbers:
            return packed, unpacked, local
        at = 0
        larger: list[int] = []
        while at + 4 <= len(fields):
            kind, nbytes = struct.unpack_from("<2H", fields, at)
            if kind == 1:
                held = fields[at + 4 : at + 4 + nbytes]
                larger = [int.from_bytes(held[k : k + 8], "little") for k in range(0, len(held) - 7, 8)]
                break
            at += 4 + nbytes
        wanted = iter(larger)
        unpacked, packed, local = (next(wanted, n) if n == _FULL32 else n for n in numbers)
        if _FULL32 in (packed, local):
            raise self.bad("its zip64 sizes are missing", name, self.directory)
        return packed, unpacked, local

    def begins(self, members: Iterable[Member]) -> dict[str, int]:
        """Where the bytes of each member begin in the file: behind its local header, which is read for it."""
        several, found = list(members), {}
        for number, member in enumerate(several):
            if number % _AHEAD == 0 and len(several) > 1:
                for later in several[number : number + _AHEAD]:
                    self._source.will_need(_LOCAL.size + len(later.name), later.local)
            found[member.name] = self._begin(member)
        return found

    def _begin(self, member: Member) -> int:
        if member.method != 0:
            raise self.bad(f"is compressed ({member.how})", member.name, member.local)
        # The name is read with the header. UTF-8 takes at most as many bytes as the directory has for it.
        nbytes = _LOCAL.size + len(member.name.encode())
        raw = read_exactly(self._source, self.path, nbytes, member.local, "a member")
        mark, _, flags, method, _, _, _, _, _, named, extra = _LOCAL.unpack_from(raw)
        if (
            mark != b"PK\3\4"
            or method != 0
            or _text(raw[_LOCAL.size : _LOCAL.size + named], flags) != member.name
        ):
            raise self.bad("its own header says something else than the directory", member.name, member.local)
        begin = member.local + _LOCAL.size + int(named) + int(extra)
        if begin + member.nbytes > self.directory:
            raise self.bad("reaches into the directory", member.name, member.local)
        return begin

    def read(self, member: Member, most: int) -> bytes:
        """All bytes of a stored member of at most `most` bytes."""
        begin = self._begin(member)
        if member.nbytes > most:
            raise self.bad(f"has {member.nbytes} bytes, over the limit of {most}", member.name, member.local)
        return read_exactly(self._source, self.path, member.nbytes, begin, "a member")


def _text(raw: bytes, flags: int) -> str | None:
    """A member's name; None where it is none."""
    try:
        return raw.decode("utf-8" if flags & _UTF8 else "cp437")
    except UnicodeDecodeError:
        return None
