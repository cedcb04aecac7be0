"""Save tensors as safetensors: one file, or a folder of shards with an index.

What cannot be saved is refused before anything is written; see `sources`, `layout`, `savefile` and `saveset`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence

from nobounce.errors import ArgumentError, FileError, clip, printable
from nobounce.formats.checksums import digest
from nobounce.formats.filewriter import Hooks, Progress
from nobounce.formats.layout import lay_out
from nobounce.formats.nocollect import no_collection
from nobounce.formats.savefile import write_file
from nobounce.formats.saveset import save_set
from nobounce.formats.sources import Source, sources
from nobounce.io.receipt import Receipt
from nobounce.protocols import BufferLike


def save(
    tensors: Mapping[str, BufferLike],
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    max_shard_nbytes: int | None = None,
    checksums: bool = False,
    fsync: bool = True,
    progress: Progress | None = None,
) -> Receipt:
    """Write `tensors` as safetensors; returns the Receipt of all bytes, headers included.

    A tensor is a nobounce Tensor or Buffer, a numpy array, a torch tensor, or any object with DLPack, the
    CUDA array interface or the buffer protocol, on any device and with any strides and byte order; bytes
    without a type are U8. `metadata` is kept in the header (transformers wants {"format": "pt"} there).
    With `max_shard_nbytes`, `path` is a folder, made if it is not there: files of at most so many bytes of
    tensors (one larger tensor has a file of its own), and an index that names them; else `path` is a file.
    With `checksums`, the metadata gets XXH3-64 sums of all bytes, which `nobounce verify` checks; this
    needs the xxhash package. With `fsync`, data and names are on the disk when the call returns; without, a
    crash of the machine, not of the process, may lose them. `progress(backend, nbytes)` is called as bytes
    are written. The memory must not change meanwhile. A file that is replaced keeps its mode; a new one
    gets 0666 less the umask.

    Raises ArgumentError for a tensor that cannot be saved, by name (shared memory, a type that safetensors
    lacks, `__metadata__`), TypeError for a name that is no str or a value that is no memory; FileError for a
    path that cannot be written and for a full disk; BusyError where another process saves into the folder;
    TransferError, OutOfMemoryError; UnavailableError for checksums without xxhash. After an error the old
    file, or the old set, is as it was, and nothing else is left.
    """
    name = check_path(path)
    texts = check_metadata(metadata)
    if checksums:
        digest(b"")  # an absent package is told before anything is written
    with no_collection():
        found = sources(tensors)
    return save_sources(
        found, name, texts, max_shard_nbytes, sums=checksums, fsync=fsync, hooks=Hooks(progress)
    )


def save_sources(
    found: Sequence[Source],
    path: str,
    metadata: Mapping[str, str],
    max_shard_nbytes: int | None,
    *,
    sums: bool,
    fsync: bool,
    hooks: Hooks,
) -> Receipt:
    """What `save` does with tensors and metadata that have been checked."""
    if max_shard_nbytes is not None:
        return save_set(
            found,
            path,
            metadata,
            max_shard_nbytes,
            sums=sums,
            fsync=fsync,
            hooks=hooks,
        )
    if os.path.isdir(path):
        raise FileError.because(
            path,
            errno.EISDIR,
            "is a folder: name a file in it, or give the size of a shard (max_shard_nbytes=) to write a set "
            "of files",
        )
    with no_collection():
        layout = lay_out(found, metadata, path, sums=sums)
    if hooks.prepare is not None:
        (layout,) = hooks.prepare([layout])
    return write_file(layout, path, fsync=fsync, hooks=hooks)


def check_metadata(metadata: Mapping[str, str] | None) -> Mapping[str, str]:
    """The metadata, checked. Raises TypeError for anything but text to text, ArgumentError
    for text that has no UTF-8."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata is a mapping of str to str, not {type(metadata).__name__}")
    for key, value in metadata.items():
        for what, text in (("a key", key), (f"the value of {clip(repr(key))}", value)):
            if not isinstance(text, str):
                raise TypeError(f"metadata maps str to str: {what} is {type(text).__name__}")
            try:
                text.encode()
            except UnicodeEncodeError:
                raise ArgumentError(f"metadata: {printable(what)} holds half of a surrogate pair") from None
    return metadata


def check_path(path: str | os.PathLike[str]) -> str:
    """The path as text. Raises ArgumentError."""
    name = os.fsdecode(path)
    if not name or "\0" in name:
        raise ArgumentError(f"{printable(name)!r} is no path of a file")
    return name
