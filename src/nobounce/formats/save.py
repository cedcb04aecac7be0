"""Save tensors as safetensors: the old file or the whole new one, whatever happens.

The file has no name, or a temporary one where the file system wants it so, until every byte of it is on the disk (`nobounce.outfile`).
The header is written last.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import replace

from nobounce import outfile
from nobounce.clock import THREADS
from nobounce.device import Device
from nobounce.errors import ArgumentError, FileError, TransferError, clip, printable
from nobounce.formats.filewriter import FileWriter, Progress
from nobounce.formats.layout import Layout, lay_out, pieces
from nobounce.formats.load import grain_of
from nobounce.formats.nocollect import no_collection
from nobounce.formats.sources import sources
from nobounce.io.file import File
from nobounce.io.receipt import Receipt, merge_segments, total
from nobounce.protocols import BufferLike


def save(
    tensors: Mapping[str, BufferLike],
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    fsync: bool = True,
    progress: Progress | None = None,
) -> Receipt:
    """Write `tensors` to one safetensors file; returns the Receipt of all its bytes, header included.

    A tensor is a nobounce Tensor or Buffer, a numpy array, a torch tensor, or any object with DLPack, the CUDA array interface or the
    buffer protocol, on any device and with any strides and byte order; bytes without a type are U8. `metadata` is kept in the header
    (transformers wants {"format": "pt"} there). With `fsync`, data and name are on the disk when the call returns; without, a crash of
    the machine, not of the process, may lose them. `progress(backend, nbytes)` is called as bytes are written. The memory must not
    change meanwhile. A file that is replaced keeps its mode; a new one gets 0666 less the umask.

    Raises ArgumentError for a tensor that cannot be saved, by name (shared memory, a type that safetensors lacks, `__metadata__`),
    TypeError for a name that is no str or a value that is no memory; FileError for a path that cannot be written and for a full
    disk; TransferError, OutOfMemoryError. After an error the old file is as it was, and nothing else is left.
    """
    name = _path(path)
    if os.path.isdir(name):
        raise FileError.because(name, errno.EISDIR, "is a folder: name a file in it")
    texts = check_metadata(metadata)
    with no_collection():
        layout = lay_out(sources(tensors), texts, name)
    return write_file(layout, name, fsync=fsync, progress=progress)


def write_file(layout: Layout, path: str, *, fsync: bool, progress: Progress | None) -> Receipt:
    """Write what was laid out, and give it its name once it is whole. Raises as `save` does."""
    begin = THREADS.now()
    with outfile.create(path, whole=True) as out:
        check_room(out.fd, path, layout.nbytes)
        try:
            with File(os.dup(out.fd), path) as file:
                receipts = _write(file, layout, progress)
        except TransferError as e:
            cure = outfile.CURES.get(e.errno or 0, "")
            if not cure:
                raise
            raise FileError.from_oserror(e, path, "write", cure) from e
        out.commit(durable=fsync)
    whole = total(receipts, filename=path)
    devices = dict.fromkeys(p.source.device.name for p in layout.placed if p.source.nbytes)
    return replace(
        whole,
        # A tensor's own memory has no place in a whole: the bytes are told by their places in the file.
        segments=merge_segments(replace(s, buffer_offset=s.file_offset) for s in whole.segments),
        device=", ".join(devices) or whole.device,
        queued_at=begin,
        started_at=begin,
        ended_at=THREADS.now(),
        synced=fsync,
    )


def _write(file: File, layout: Layout, progress: Progress | None) -> list[Receipt]:
    grain = grain_of(file)
    with no_collection():
        todo = list(pieces(layout, grain))
    with FileWriter(file, todo, grain, progress) as writer:
        writer.write()
        receipts = writer.receipts
    with Device("cpu").allocate(layout.data_offset) as memory:
        memory.view()[:] = layout.header
        return [*receipts, file.write(memory)]


def check_room(fd: int, path: str, nbytes: int) -> None:
    """Raise FileError where the file system of an open file has no room for so many bytes. One that does not say is believed."""
    status = os.fstatvfs(fd)
    free = status.f_bavail * status.f_frsize
    if status.f_blocks and free < nbytes:
        raise FileError.because(
            path,
            errno.ENOSPC,
            f"cannot write: {nbytes} bytes are needed, {free} are free. {outfile.CURES[errno.ENOSPC]}",
        )


def check_metadata(metadata: Mapping[str, str] | None) -> Mapping[str, str]:
    """The metadata, checked. Raises TypeError for anything but text to text, ArgumentError for text that has no UTF-8."""
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


def _path(path: str | os.PathLike[str]) -> str:
    name = os.fsdecode(path)
    if not name or "\0" in name:
        raise ArgumentError(f"{printable(name)!r} is no path of a file")
    return name
