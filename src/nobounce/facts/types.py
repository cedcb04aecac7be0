"""What the machine says about files, as plain frozen data. Nothing here decides anything."""

from __future__ import annotations

from typing import Literal

from nobounce.records import record

FileKind = Literal["regular", "block", "directory", "fifo", "char", "socket", "other"]
Journal = Literal["ordered", "journal", "writeback", "none", "unknown"]
Known = Literal["yes", "no", "unknown"]
DirectProbe = Literal["yes", "no", "uncounted", "unknown"]


@record
class FileSystemFacts:
    """The file system a file is on.

    `journal` is ext4's true journaling mode (None elsewhere), `memory` says that its files are memory (tmpfs
    and the like), `decided_by` is the file under /proc that told the mode, or the one that told the type,
    `error` the errno of a mount table that could not be read.
    """

    fstype: str
    source: str
    mount_point: str
    options: tuple[str, ...]
    journal: Journal | None
    decided_by: str
    memory: bool
    read_only: bool
    error: int | None = None


@record
class BlockFacts:
    """The stack of block devices below a file, summed up: `peer` says whether a device can DMA between
    every leg of it and another PCI device (hipFile G-11), `because` why not, and `decided_by` is the
    file under /sys that told.

    `backing` is hipFile's word (G-9: nvme, lvm, md, crypt, mpath, dm, loop, virtio, scsi or the device's
    name) and `nvme` are the PCI addresses of the local NVMe controllers found below.
    """

    name: str
    backing: str
    peer: Known
    because: str
    decided_by: str
    nvme: tuple[str, ...] = ()


@record
class FileFacts:
    """One open file. Sizes, offsets and alignments in bytes; `device` and `rdev` are (major, minor).

    `dio_*_align` is None where the kernel does not report it and 0 where it reports that there is no direct
    I/O. `direct_fd` says whether an O_DIRECT descriptor could be opened; `direct_probe` whether an aligned
    read through it was really direct (asked only where statx does not say; "uncounted": the kernel counts
    no reads of this file system). `block` is looked up only for devices whose direct path is P2P.
    `inode_flags` are FS_*_FL of ioctl_iflags(2) where writes depend on them. A `sparse` file has holes or
    ranges that were never written.
    """

    path: str | None
    kind: FileKind
    nbytes: int
    inode: int
    device: tuple[int, int]
    rdev: tuple[int, int]
    mount_id: int | None
    mtime_ns: int
    ctime_ns: int
    dio_mem_align: int | None
    dio_offset_align: int | None
    dio_read_offset_align: int | None
    access_mode: Literal["r", "w", "rw"]
    direct_fd: Literal["ok", "refused", "unknown"]
    direct_errno: int | None
    filesystem: FileSystemFacts
    direct_probe: DirectProbe = "unknown"
    block: BlockFacts | None = None
    inode_flags: int | None = None
    sparse: bool = False


@record
class Residency:
    """How many of `nbytes` bytes the page cache holds (None: not known), and how that was learnt."""

    resident_bytes: int | None
    nbytes: int
    how: Literal["cachestat", "mincore", "nowait", "unknown"]
