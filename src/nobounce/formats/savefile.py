"""One safetensors file, written whole or not at all.

The file has no name, or a temporary one where the file system wants it so, until every byte of it is on the
disk (`nobounce.outfile`). The header is written last.
"""

from __future__ import annotations

import errno
import os
from dataclasses import replace

from nobounce import outfile
from nobounce.clock import THREADS
from nobounce.device import Device
from nobounce.errors import FileError, TransferError, named_errors
from nobounce.formats.checksums import Hasher, sealed
from nobounce.formats.filewriter import FileWriter, Hooks
from nobounce.formats.layout import Layout, pieces
from nobounce.formats.nocollect import no_collection
from nobounce.formats.opened import grain_of
from nobounce.io.file import File
from nobounce.io.receipt import Receipt, merge_segments, total


def write_file(layout: Layout, path: str, *, fsync: bool, hooks: Hooks) -> Receipt:
    """Write what was laid out, and give it its name once it is whole. Raises as `save`
    does, and what a hook raises."""
    begin = THREADS.now()
    with outfile.create(path, whole=True) as out:
        check_room(out.folder, path, layout.nbytes)
        try:
            with File(os.dup(out.fd), path) as file:
                receipts = _write(file, layout, hooks)
        except TransferError as e:
            cure = outfile.CURES.get(e.errno or 0, "")
            if not cure:
                raise
            raise FileError.from_oserror(e, path, "write", cure) from e
        if hooks.check is not None:
            hooks.check()
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


def _write(file: File, layout: Layout, hooks: Hooks) -> list[Receipt]:
    grain = grain_of(file)
    with no_collection():
        todo = list(pieces(layout, grain))
    hasher = Hasher(layout.data_offset) if layout.sums else None
    with FileWriter(file, todo, grain, hooks, hasher.update if hasher else None) as writer:
        writer.write()
        receipts = writer.receipts
    header = sealed(layout.header, hasher.blocks()) if hasher else layout.header
    with Device("cpu").allocate(layout.data_offset) as memory:
        memory.view()[:] = header
        return [*receipts, file.write(memory)]


def check_room(folder: str, path: str, nbytes: int) -> None:
    """Raise FileError where the file system of a folder has no room for so many bytes at `path`. One that
    does not say is believed."""
    with named_errors(path, "write", outfile.CURES):
        status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if status.f_blocks and free < nbytes:
        raise FileError.because(
            path,
            errno.ENOSPC,
            f"cannot write: {nbytes} bytes are needed, {free} are free. {outfile.CURES[errno.ENOSPC]}",
        )
