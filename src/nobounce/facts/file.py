"""Everything the machine says about one open file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from typing import Any, Literal

from nobounce.facts.extents import inode_flags
from nobounce.facts.filesystem import filesystem_of
from nobounce.facts.source import Source
from nobounce.facts.types import FileFacts, FileKind

_KINDS: dict[int, FileKind] = {
    stat.S_IFREG: "regular",
    stat.S_IFBLK: "block",
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "fifo",
    stat.S_IFCHR: "char",
    stat.S_IFSOCK: "socket",
}
_FLAGGED = frozenset({"btrfs", "ext2", "ext3", "ext4"})
"""File systems whose inode flags decide what a direct write is."""
_ACCESS: dict[int, Literal["r", "w", "rw"]] = {os.O_RDONLY: "r", os.O_WRONLY: "w", os.O_RDWR: "rw"}


def examine(source: Source, fd: int, *, path: str | None = None, trial: bool = False) -> FileFacts:
    """Facts of an open descriptor; with `trial`, whether its file can be opened with
    O_DIRECT too. Raises OSError.

    Only regular files and block devices are tried: opening a pipe waits for its other end,
    and a device may act on it.
    """
    label = path if path is not None else f"/proc/self/fd/{fd}"
    found = source.statx(fd, label)
    kind = _KINDS.get(stat.S_IFMT(found.mode), "other")
    code = source.open_direct(fd, label) if trial and kind in ("regular", "block") else None
    mode = source.probe("access_mode", (label,), lambda: fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE)
    system = filesystem_of(source, found, label)
    flags: Any = None
    if kind == "regular" and system.fstype in _FLAGGED:
        with contextlib.suppress(OSError):
            flags = source.probe("inode_flags", (label,), lambda: inode_flags(fd))
    return FileFacts(
        path=path,
        kind=kind,
        nbytes=found.nbytes,
        inode=found.inode,
        device=found.device,
        rdev=found.rdev,
        mount_id=found.mount_id,
        mtime_ns=found.mtime_ns,
        ctime_ns=found.ctime_ns,
        dio_mem_align=found.dio_mem_align,
        dio_offset_align=found.dio_offset_align,
        dio_read_offset_align=found.dio_read_offset_align,
        access_mode=_ACCESS.get(mode, "r") if isinstance(mode, int) else "r",
        direct_fd="unknown" if code is None else "refused" if code else "ok",
        direct_errno=code or None,
        filesystem=system,
        inode_flags=flags if isinstance(flags, int) else None,
    )
