"""The header of a safetensors file, read by somebody who does not trust it.

A file is an 8-byte little-endian length N, N bytes of JSON, and the data section. The JSON maps each tensor's
name to its dtype, shape and data_offsets, which count from the start of the data section. What is checked:
everything a later transfer relies on. Each tensor's range has the size that its dtype and shape give, and
together the ranges cover the data section with no hole, no overlap and no rest, so that no request made from
a Header can reach outside the file and no byte is read twice.

Stricter than safetensors 0.8 (each case is one that two readers may understand differently): a name or a
metadata key given twice, a list in place of an object, a header that does not begin with "{" (the format
demands it), and a shape whose non-zero dimensions overflow 64 bits even where a zero makes the product vanish
(C16). Fields of a tensor other than the three are ignored, with a warning, as safetensors ignores them.

Writers print headers in a handful of spellings. Those are read by `fastscan`, many tensors per call into C,
and judged by the same rules; any other spelling, and everything suspicious, goes through the JSON parser
below, which also words the errors.
"""

from __future__ import annotations

import errno
import functools
import gc
import itertools
import json
import os
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from nobounce import errors
from nobounce.errors import FormatError, clip, json_kind, printable
from nobounce.formats import columnscan, fastscan, magic
from nobounce.formats.covering import Bad, covering, covering_columns, number
from nobounce.formats.entries import BadText, Entries
from nobounce.formats.strictjson import Repeated
from nobounce.formats.tensorinfo import FIELDS, Header, TensorInfo, layout

if TYPE_CHECKING:
    from nobounce.formats.columns import Columns

__all__ = [
    "HEADER_LIMIT",
    "Header",
    "Reader",
    "TensorInfo",
    "open_regular",
    "parse_header",
    "read_header",
    "read_header_of",
]

HEADER_LIMIT = 100_000_000
"""The longest header, in bytes, that safetensors opens."""

_PIECE = 16 << 20
_MOST_EXTRA = 5
"""Unknown fields that a warning names."""


class Reader(Protocol):
    """Anything with read(nbytes) -> bytes that may return fewer bytes than asked, and b"" only at the end."""

    def read(self, nbytes: int, /) -> bytes: ...


def read_header_of(path: str | os.PathLike[str], *, limit: int = HEADER_LIMIT, strict: bool = True) -> Header:
    """Open `path`, read and check its header, close it.

    FileError (with its FileNotFoundError, IsADirectoryError and PermissionError kinds) where it cannot be
    opened or is no regular file; else as `read_header`.
    """
    fd, nbytes, name = open_regular(path)
    try:
        return read_header(fd, path=name, file_nbytes=nbytes, limit=limit, strict=strict)
    finally:
        os.close(fd)


def open_regular(path: str | os.PathLike[str]) -> tuple[int, int, str]:
    """Open a regular file for reading: (descriptor, nbytes, path). Pipes and devices are refused without
    opening them.
    """
    name = os.fsdecode(path)
    if "\0" in name:
        raise errors.ArgumentError(f"{printable(name)}: a path cannot hold a NUL character")
    fd = -1
    try:
        _need_regular(os.stat(name).st_mode, name)
        # O_NONBLOCK: should a pipe have taken the file's place since, opening it must not wait for a writer
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(fd)
        _need_regular(status.st_mode, name)
        return fd, status.st_size, name
    except errors.FileError:
        if fd >= 0:
            os.close(fd)
        raise
    except OSError as error:
        raise errors.FileError.from_oserror(error, name, "open") from error


_KINDS = {
    stat.S_IFIFO: ("a pipe", errno.ESPIPE),
    stat.S_IFSOCK: ("a socket", errno.ENXIO),
    stat.S_IFCHR: ("a character device", errno.EINVAL),
    stat.S_IFBLK: ("a block device", errno.EINVAL),
}


def _need_regular(mode: int, path: str) -> None:
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise errors.FileError.from_oserror(OSError(errno.EISDIR, ""), path, "read as a model file")
    kind, code = _KINDS.get(stat.S_IFMT(mode), ("no regular file", errno.EINVAL))
    raise errors.FileError(f"{printable(path)}: is {kind}; a regular file is needed", code, path)


def read_header(
    source: int | Reader,
    *,
    path: str,
    file_nbytes: int,
    limit: int = HEADER_LIMIT,
    strict: bool = True,
    announce: Callable[[int], None] | None = None,
) -> Header:
    """Read and check the header of a file of `file_nbytes` bytes, from a descriptor or from a stream at its
    start.

    The descriptor's position is not used and not moved; nothing is closed. A header of more than `limit`
    bytes, or one that reaches beyond the file, is refused before memory is taken for it (cases C1, C2).
    `announce` is told where the data section begins before the header is read.
    Raises FormatError; FileError where reading fails.
    """
    first = _read(source, min(8, file_nbytes), 0, path, file_nbytes)
    declared = int.from_bytes(first, "little")
    if file_nbytes < 8 or declared > min(limit, file_nbytes - 8):
        reason = _no_header(first + _more(source, path), declared, limit, file_nbytes)
        raise FormatError(reason, filename=path, offset=0)
    if announce is not None:
        announce(8 + declared)
    raw = _read(source, declared, 8, path, file_nbytes)
    return parse_header(raw, path=path, file_nbytes=file_nbytes, data_offset=8 + declared, strict=strict)


def _more(source: int | Reader, path: str) -> bytes:
    """What follows the first 8 bytes, for a look at what the file is."""
    try:
        return os.pread(source, magic.HEAD - 8, 8) if isinstance(source, int) else source.read(magic.HEAD - 8)
    except OSError as error:
        raise errors.FileError.from_oserror(error, path, "read the header") from error


def _no_header(head: bytes, declared: int, limit: int, file_nbytes: int) -> str:
    """Why a file that begins with `head` holds no header that could be read."""
    if head[8:10] == b'{"' and declared <= limit:
        reason = (
            f"truncated: the declared header length {declared} reaches beyond the file of {file_nbytes} bytes"
        )
        return f"{reason}; {magic.AGAIN}"
    if not file_nbytes and head:
        return (
            "the file says that it has 0 bytes and holds more, as those of /proc do: copy it first, with "
            "`nobounce cp` or cat"
        )
    if file_nbytes < 8:
        empty = "the file is empty, " if not file_nbytes else ""
        return f"{empty}truncated: {file_nbytes} bytes cannot hold the 8-byte header length; {magic.AGAIN}"
    real = magic.what_it_is(head)
    if real is not None:
        return real
    if declared > limit:
        reason = f"header too large: its declared length {declared} is over the limit of {limit} bytes"
        return f"{reason} (the file has {file_nbytes})"
    return f"the declared header length {declared} reaches beyond the file of {file_nbytes} bytes"


def _read(source: int | Reader, nbytes: int, offset: int, path: str, file_nbytes: int) -> bytes:
    pieces, have = [], 0
    while have < nbytes:
        want = min(nbytes - have, _PIECE)
        try:
            piece = os.pread(source, want, offset + have) if isinstance(source, int) else source.read(want)
        except OSError as error:
            raise errors.FileError.from_oserror(error, path, "read the header") from error
        if not piece:
            reason = (
                f"truncated: the file ends inside the header (it had {file_nbytes} bytes when it was opened)"
            )
            raise FormatError(reason, filename=path, offset=offset + have)
        pieces.append(piece)
        have += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def parse_header(raw: bytes, *, path: str, file_nbytes: int, data_offset: int, strict: bool = True) -> Header:
    """Check the JSON of a header against a file of `file_nbytes` bytes whose data section begins at
    `data_offset`.

    Pure. `strict=False` turns metadata values that are no strings into strings, with a warning (case C8);
    nothing that a transfer relies on is ever relaxed. Raises FormatError naming the file, the tensor and the
    offset in the file.
    """
    # A burst of 20,000 small objects makes the collector walk everything else that lives in the process
    # (100 ms beside an imported torch); nothing here is cyclic. Whoever found it enabled enables it again.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _parse(raw, path, file_nbytes, data_offset, strict)
    finally:
        if collecting:
            gc.enable()


def _parse(raw: bytes, path: str, file_nbytes: int, data_offset: int, strict: bool) -> Header:
    begin = data_offset - len(raw)

    def bad(reason: str, tensor: str | None = None, offset: int | None = None) -> NoReturn:
        raise FormatError(reason, filename=path, tensor=tensor, offset=begin if offset is None else offset)

    if raw[:3] == b"\xef\xbb\xbf":
        bad("the header begins with a byte order mark; write plain UTF-8 and, for padding, use spaces")
    if raw[:1] != b"{":
        if raw.lstrip(b"\0 \t\r\n")[:1] == b"{":
            bad("the header must begin with '{'; to pad it, use spaces after the JSON")
        real = magic.what_it_is(len(raw).to_bytes(8, "little") + raw[: magic.HEAD - 8])
        if real is not None and begin == 8:
            bad(real, offset=0)
        bad("the header is not a JSON object: it must begin with '{'")
    if raw[-1:] == b"\0":
        bad("the header is padded with NUL bytes; use spaces", offset=begin + len(raw.rstrip(b"\0")))
    warnings: list[str] = []
    data_nbytes = file_nbytes - data_offset
    found = columnscan.scan(raw, data_nbytes)
    if found is not None:
        metadata = _metadata(found.metadata, strict, bad, warnings)
        return Header(
            path, file_nbytes, len(raw), data_offset, None, metadata, tuple(warnings), columns=found.columns
        )
    tensors: dict[str, TensorInfo] = {}
    columns: Columns | None = None
    scanned = _fast(raw, begin, bad) if len(raw) < columnscan.LARGE else None
    if scanned is not None:
        metadata = _metadata(scanned.metadata, strict, bad, warnings)
        tensors = scanned.tensors
        if [i[4] - i[3] for i in tensors.values()] != scanned.needed:
            pairs = zip(tensors.values(), scanned.needed, strict=True)
            _wrong_size(*next(p for p in pairs if p[0].nbytes != p[1]), bad, data_offset)
    else:
        extra: dict[str, str] = {}
        entries = Entries(raw)
        try:
            if len(raw) < columnscan.LARGE:
                tensors = _by_name(entries, bad, data_offset, extra)
            else:
                columns = _gathered(entries, bad, data_offset, extra)
        except BadText as error:
            bad(error.reason, tensor=error.tensor, offset=begin + error.offset)
        metadata = _metadata(entries.metadata, strict, bad, warnings)
        if extra:
            warnings.append(_ignored(extra))
    if columns is not None:
        columns = covering_columns(columns, data_nbytes, bad, data_offset)
    else:
        tensors = covering(tensors, data_nbytes, bad, data_offset)
    return Header(
        path,
        file_nbytes,
        len(raw),
        data_offset,
        None if columns else tensors,
        metadata,
        tuple(warnings),
        columns=columns,
    )


def _fast(raw: bytes, begin: int, bad: Bad) -> fastscan.Scan | None:
    try:
        return fastscan.scan(raw.decode())
    except UnicodeDecodeError as error:
        bad("the header is not valid UTF-8", offset=begin + error.start)


def _by_name(entries: Entries, bad: Bad, data_offset: int, extra: dict[str, str]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for name, entry in itertools.chain.from_iterable(entries.batches()):
        if name in tensors:
            bad(f"{clip(name)!r} is given twice", tensor=name)
        tensors[name] = _entry(name, entry, bad, data_offset, extra)
    return tensors


def _gathered(entries: Entries, bad: Bad, data_offset: int, extra: dict[str, str]) -> Columns | None:
    """The tensors of a long header as columns, as there would be too many objects;
    None where there is none."""
    from nobounce.formats.gather import LARGEST, Gather

    def judge(name: str, entry: Any) -> TensorInfo:
        info = _entry(name, entry, bad, data_offset, extra)
        if info.end >= LARGEST:
            bad(
                f"truncated: its data ends at {number(info.end)}, beyond any file; {magic.AGAIN}",
                tensor=name,
            )
        return info

    gather = Gather(judge, functools.partial(_note, extra))
    for pairs in entries.batches():
        gather.add(pairs)
    if gather.empty:
        return None
    columns = gather.columns()
    twice = gather.repeated(columns)
    if twice is not None:
        bad(f"{clip(twice)!r} is given twice", tensor=twice)
    return columns


def _metadata(value: Any, strict: bool, bad: Bad, warnings: list[str]) -> dict[str, str]:
    if value is None:
        warnings.append("__metadata__ is null; it is taken as absent")
        return {}
    if isinstance(value, Repeated):
        bad(f"{clip(value.key)!r} is given twice in __metadata__")
    if not isinstance(value, dict):
        bad("__metadata__ is not an object of strings")
    for key, text in value.items():
        if isinstance(text, str):
            continue
        if strict or isinstance(text, Repeated):
            bad(f"__metadata__ value of {clip(key)!r} is {json_kind(text)}, expected a string")
        value[key] = json.dumps(text)
        warnings.append(f"__metadata__ value of {clip(key)!r} is {json_kind(text)}; it is taken as a string")
    return value


def _entry(name: str, entry: Any, bad: Bad, data_offset: int, extra: dict[str, str]) -> TensorInfo:
    """One tensor from the pairs of its JSON object, its size checked. Fields that are
    not known go into `extra`."""
    if not isinstance(entry, tuple):
        bad(f"expected an object with {', '.join(FIELDS)}, found {json_kind(entry)}", tensor=name)
    pairs, entry = entry, dict(entry)
    if len(pairs) != len(entry):
        keys = [key for key, _ in pairs]
        bad(f"{clip(next(k for i, k in enumerate(keys) if k in keys[:i]))!r} is given twice", tensor=name)
    for field in FIELDS:
        if field not in entry:
            bad(f"the field {field} is missing", tensor=name)
    if len(entry) > len(FIELDS):
        for field in entry.keys() - FIELDS:
            _note(extra, field, name)
    span = entry["data_offsets"]
    if type(span) is not list or len(span) != 2:
        bad("data_offsets is not a list of two integers", tensor=name)
    start, end = span
    if type(start) is not int or type(end) is not int:
        bad(
            f"data_offsets holds {json_kind(start if type(start) is not int else end)}, expected integers",
            tensor=name,
        )
    if start < 0 or end < 0:
        bad(f"negative data_offsets [{number(start)}, {number(end)}]", tensor=name)
    if end < start:
        bad(f"reversed data_offsets [{number(start)}, {number(end)}]", tensor=name)
    found = layout(entry["dtype"], entry["shape"])
    if isinstance(found, str):
        bad(found, tensor=name)
    info = TensorInfo(name, found.dtype, found.shape, start, end)
    if end - start != found.nbytes:
        _wrong_size(info, found.nbytes, bad, data_offset)
    return info


def _note(extra: dict[str, str], field: str, name: str) -> None:
    """Keep a field that is not known, and the first tensor that has it."""
    if len(extra) < _MOST_EXTRA:
        extra.setdefault(field, name)


def _ignored(extra: dict[str, str]) -> str:
    """The warning about fields that are not known."""
    shown = ", ".join(f"{clip(field)!r} (tensor {clip(name)!r})" for field, name in extra.items())
    more = " and perhaps more" if len(extra) == _MOST_EXTRA else ""
    return f"fields that are not known are ignored: {shown}{more}"


def _wrong_size(info: TensorInfo, want: int, bad: Bad, data_offset: int) -> NoReturn:
    if info.end < info.start:
        bad(f"reversed data_offsets [{info.start}, {info.end}]", tensor=info.name)
    need = f"{info.dtype.name} {clip(str(list(info.shape)))} needs {want} bytes"
    bad(
        f"{need}, its data_offsets hold {number(info.nbytes)}",
        info.name,
        data_offset + min(info.start, 1 << 64),
    )
