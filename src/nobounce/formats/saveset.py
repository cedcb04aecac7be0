"""A set of shards with an index: at any moment the index names one whole set.

Shards never replace one another: each save gives its own a new generation, eight random hexadecimal digits in
their names. The index is replaced last, in one step. Then the shards that the old index named are removed,
and those of saves that were killed, which are told by their names: one process saves into a folder at a time,
and holds a flock(2) on it that goes with the process.

Nothing outside of the folder is written or removed: an index that is a link is refused, and shards that an
old index names in folders below stay.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from nobounce import outfile
from nobounce.errors import (
    ArgumentError,
    BusyError,
    FileError,
    FormatError,
    NobounceError,
    named,
    named_errors,
)
from nobounce.formats.filewriter import Hooks
from nobounce.formats.header import HEADER_LIMIT
from nobounce.formats.index import INDEX_NAME, parse_index, read_index
from nobounce.formats.layout import Layout, lay_out
from nobounce.formats.nocollect import no_collection
from nobounce.formats.savefile import check_room, write_file
from nobounce.formats.sources import Source
from nobounce.io.receipt import Receipt, total

_OURS = re.compile(r"model-[0-9a-f]{8}-[0-9]{5,}-of-[0-9]{5,}\.safetensors")


@dataclass(frozen=True, slots=True)
class _Shard:
    name: str
    layout: Layout


def save_set(
    found: Sequence[Source],
    folder: str,
    metadata: Mapping[str, str],
    max_shard_nbytes: int,
    *,
    sums: bool,
    fsync: bool,
    hooks: Hooks,
) -> Receipt:
    """What `save` does with `max_shard_nbytes`."""
    if isinstance(max_shard_nbytes, bool) or not isinstance(max_shard_nbytes, int):
        raise TypeError(f"max_shard_nbytes is an int, not {type(max_shard_nbytes).__name__}")
    if max_shard_nbytes < 1:
        raise ArgumentError(f"max_shard_nbytes {max_shard_nbytes} is not above 0")
    with no_collection():
        groups = split(found, max_shard_nbytes)
        shards = _named(groups, metadata, folder, sums)
    index_path = os.path.join(folder, INDEX_NAME)
    index = _index_of(shards, index_path)
    with _folder(folder, fsync) as where:
        _refuse_link(where, index_path)
        check_room(folder, folder, sum(s.layout.nbytes for s in shards) + len(index))
        receipts: list[Receipt] = []
        layouts = [s.layout for s in shards]
        if hooks.prepare is not None:
            layouts = hooks.prepare(layouts)
        try:
            for shard, layout in zip(shards, layouts, strict=True):
                path = os.path.join(folder, shard.name)
                receipts.append(write_file(layout, path, fsync=fsync, hooks=hooks))
            with outfile.create(index_path, whole=True) as out:
                old = _named_by(index_path)
                out.write(index)
                out.commit(durable=fsync)
        except BaseException:
            if not _named_by(index_path) & {s.name for s in shards}:
                _remove(where, [s.name for s in shards])
            raise
        new = {s.name for s in shards}
        _remove(where, [n for n in (*old, *_left_by_killed(where)) if n not in new])
    devices = dict.fromkeys(name for r in receipts for name in r.device.split(", "))
    return replace(total(receipts, filename=folder), device=", ".join(devices))


def split(found: Sequence[Source], most: int) -> list[list[Source]]:
    """The tensors in the order of the mapping, cut where a shard would have more than
    `most` bytes of them. Pure."""
    groups: list[list[Source]] = [[]]
    nbytes = 0
    for source in found:
        if groups[-1] and nbytes + source.nbytes > most:
            groups.append([])
            nbytes = 0
        groups[-1].append(source)
        nbytes += source.nbytes
    return groups


def _named(
    groups: Sequence[Sequence[Source]], metadata: Mapping[str, str], folder: str, sums: bool
) -> list[_Shard]:
    generation, count = secrets.token_hex(4), len(groups)
    shards = []
    for number, group in enumerate(groups, 1):
        name = f"model-{generation}-{number:05d}-of-{count:05d}.safetensors"
        shards.append(_Shard(name, lay_out(group, metadata, os.path.join(folder, name), sums=sums)))
    return shards


def _index_of(shards: Sequence[_Shard], path: str) -> bytes:
    """The text of the index. Raises ArgumentError where no reader would take it: no tensors, or
    more than 100 MB of names."""
    placed = [(p.source, shard.name) for shard in shards for p in shard.layout.placed]
    document = {
        "metadata": {"total_size": sum(source.nbytes for source, _ in placed)},
        "weight_map": {source.name: name for source, name in placed},
    }
    text = json.dumps(document, ensure_ascii=False, indent=1).encode() + b"\n"
    if not placed:
        raise ArgumentError("no tensors: an index names at least one")
    if len(text) > HEADER_LIMIT:
        raise ArgumentError(
            f"the index would have {len(text)} bytes, and no reader opens one of more than {HEADER_LIMIT}"
        )
    try:
        parse_index(text, path=path)
    except FormatError as e:
        raise ArgumentError(f"such an index could not be read: {e}") from e
    return text


@contextlib.contextmanager
def _folder(folder: str, fsync: bool) -> Iterator[int]:
    """A descriptor of the folder, made if it is not there, while no other process saves into it. A folder
    that was made for nothing goes.

    Raises FileError, BusyError.
    """
    made = False
    with named_errors(folder, "write", outfile.CURES):
        try:
            where = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            os.mkdir(folder)
            made = True
            where = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(where, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"{named(folder)}: another process saves into this folder: wait for it") from None
        except OSError:
            pass  # a file system without locks
        yield where
        if made and fsync:
            outfile.sync_folder(os.path.dirname(os.path.abspath(folder)))
        made = False
    finally:
        os.close(where)
        if made:
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def _refuse_link(where: int, path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISLNK(os.stat(INDEX_NAME, dir_fd=where, follow_symlinks=False).st_mode):
            raise FileError.because(
                path,
                errno.EXDEV,
                "is a link, and may lead out of the folder: remove it, or name another folder",
            )


def _named_by(index_path: str) -> set[str]:
    """The shards beside an index that it names; none where it is not there, or is no index."""
    try:
        names = set(read_index(index_path).weight_map.values())
    except (NobounceError, OSError):
        return set()
    return {name for name in names if "/" not in name and name.endswith(".safetensors")}


def _left_by_killed(where: int) -> list[str]:
    try:
        return [name for name in os.listdir(where) if _OURS.fullmatch(name)]
    except OSError:
        return []


def _remove(where: int, names: Sequence[str]) -> None:
    """Unlink files and links of the folder; one that cannot be removed stays: the index does not name it."""
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=where)
