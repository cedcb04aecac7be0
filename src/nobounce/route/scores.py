"""How each backend scores a request, and every condition it refuses on.

hipFile keeps only the number (C-1 to C-11); here each failed condition is a Refusal with a cure. Pure
functions of a Request: `check` and real transfers call these same functions, so they cannot disagree.
"""

from __future__ import annotations

import errno

from nobounce.errors import ArgumentError, errno_name
from nobounce.facts.extents import IndirectCode, IndirectRange
from nobounce.route.types import MemoryKind, Reason, Refusal, Request, Score

UNREPORTED_ALIGN = 4096
"""Alignment assumed where direct I/O is proven but statx does not report DIOALIGN (hipFile A-26)."""

FS_EXTENT_FL, FS_NOCOW_FL = 0x80000, 0x800000
"""ioctl_iflags(2)."""

MEMORY_FILE_SYSTEMS = "tmpfs accepts O_DIRECT and means nothing by it: its files are memory already"


INDIRECT: dict[IndirectCode, Reason] = {
    "encoded-extent": Reason(
        "encoded-extent",
        "the file system keeps these bytes compressed or encrypted and reads them through the page cache",
        "write the file anew without compression (on btrfs: btrfs property set FILE compression none; btrfs "
        "filesystem "
        "defragment FILE)",
    ),
    "inline-extent": Reason(
        "inline-extent",
        "the file system keeps these bytes among its metadata and reads them through the page cache",
    ),
    "page-cache-served": Reason(
        "page-cache-served",
        "the kernel's counters show that the page cache served a direct read of these bytes",
    ),
}
"""Why a range of a file is read through the page cache, whatever its alignment."""


def check_region(
    *, file_offset: int, nbytes: int, buffer_offset: int, buffer_nbytes: int, what: str = "buffer"
) -> None:
    """hipFile's region rule (A-36, A-37), but a zero-size request at the very end of
    the buffer is fine (J-25).

    Raises ArgumentError naming the value; nothing has moved.
    """
    if nbytes < 0:
        raise ArgumentError(f"nbytes is {nbytes}: it cannot be negative")
    if file_offset < 0:
        raise ArgumentError(f"file_offset is {file_offset}: it cannot be negative")
    if buffer_offset < 0:
        raise ArgumentError(f"buffer_offset is {buffer_offset}: it cannot be negative")
    if buffer_offset > buffer_nbytes or nbytes > buffer_nbytes - buffer_offset:
        raise ArgumentError(
            f"nbytes {nbytes} at buffer_offset {buffer_offset} goes past the end of a {what} of "
            f"{buffer_nbytes} bytes"
        )
    if file_offset + nbytes > (1 << 63) - 1:
        raise ArgumentError(f"nbytes {nbytes} at file_offset {file_offset} goes past the largest file offset")


def alignments(request: Request) -> tuple[int, int]:
    """(memory, file offset) alignment in bytes that direct I/O needs here; sizes follow the
    offset's (hipFile C-10)."""
    file, direct = request.file, request.direct
    mem = file.dio_mem_align or UNREPORTED_ALIGN
    offset = file.dio_offset_align or UNREPORTED_ALIGN
    return max(mem, direct.min_mem_align), max(offset, direct.min_offset_align)


def policy_refusals(request: Request) -> list[Refusal]:
    """Why the caller's or the process's own settings keep this request off fastpath."""
    found = []
    if request.settings.force_compat_mode:
        found.append(
            Refusal(
                "fastpath-disabled",
                "HIPFILE_FORCE_COMPAT_MODE=true sends everything through fallback",
                "unset HIPFILE_FORCE_COMPAT_MODE",
            )
        )
    return found


def device_refusals(request: Request) -> list[Refusal]:
    """What about the device and its memory rules out fastpath."""
    direct, memory = request.direct, request.memory
    found = []
    if not direct.available:
        found.append(
            Refusal(direct.code, direct.because or f"{direct.runtime} has no direct path", direct.cure)
        )
    if direct.available and direct.virtual_function == "yes":
        found.append(
            Refusal(
                "virtual-function",
                f"{memory.device} is an SR-IOV virtual function, on which direct I/O is not available",
                "run on the host or pass the whole GPU through",
            )
        )
    if memory.kind not in direct.memory_kinds:
        kinds = ", ".join(sorted(k.value for k in direct.memory_kinds))
        found.append(
            Refusal(
                "memory-kind",
                f"the buffer is {memory.kind.value} memory and direct I/O of {direct.runtime} takes only "
                f"{kinds}",
                "allocate the buffer with Device.allocate"
                if MemoryKind.DEVICE in direct.memory_kinds
                else "",
            )
        )
    return found


def file_refusals(request: Request) -> list[Refusal]:
    """What about the file rules out fastpath (hipFile C-6, C-9; on `cpu` and `sim`
    whatever proves direct)."""
    file, system = request.file, request.file.filesystem
    found = []
    if file.kind not in ("regular", "block"):
        return [_no_offsets(file.kind)]
    if file.kind == "regular" and system.memory:
        found.append(
            Refusal(
                "memory-file-system",
                f"the file is on {system.fstype}: {MEMORY_FILE_SYSTEMS}",
                "copy it to a disk",
            )
        )
        return found
    if file.dio_offset_align == 0 or file.dio_mem_align == 0:
        found.append(
            Refusal(
                "no-direct-io",
                f"{system.fstype} says that this file has no direct I/O (statx reports a DIOALIGN of 0)",
                _move_cure(request),
            )
        )
    if file.direct_fd == "refused":
        code = file.direct_errno or errno.EINVAL
        cure = _move_cure(request) if code == errno.EINVAL else "make the file readable through /proc/self/fd"
        found.append(
            Refusal(
                "no-direct-descriptor", f"opening the file with O_DIRECT fails with {errno_name(code)}", cure
            )
        )
    if request.direct.file_rule == "hipfile":
        found += _hipfile_file_system(request) + _block_stack(request)
    elif file.dio_offset_align is None and file.direct_probe != "yes":
        sentence = f"the kernel does not report DIOALIGN and {_PROBES[file.direct_probe]}"
        found.append(Refusal("direct-io-unproven", sentence, _move_cure(request)))
    if request.op == "write":
        found += _buffered_writes(request)
    return found


_PROBES = {
    "no": "a probe read was served by the page cache",
    "uncounted": (
        "what is read here cannot be counted: a probe read moved no counter of the kernel and left no page"
    ),
    "unknown": "no probe read has shown direct I/O",
}


def _buffered_writes(request: Request) -> list[Refusal]:
    """Files whose O_DIRECT writes the kernel makes through the page cache, which it empties again, so
    that nothing is seen of it.

    btrfs: every file with checksums, since Linux 6.15 (btrfs_direct_write in fs/btrfs/direct-io.c). ext2 to
    ext4: holes of a file that is mapped by blocks instead of extents (ext4_iomap_begin).
    """
    file, fstype = request.file, request.file.filesystem.fstype
    flags = file.inode_flags or 0
    if file.kind != "regular":
        return []
    if fstype == "btrfs" and not flags & FS_NOCOW_FL:
        return [
            Refusal(
                "checksummed",
                "btrfs writes files that have checksums through the page cache",
                "make the file in a folder with chattr +C, which takes its checksums away, or use ext4 or "
                "xfs",
            )
        ]
    if fstype in ("ext2", "ext3", "ext4") and file.inode_flags is not None and not flags & FS_EXTENT_FL:
        return [
            Refusal(
                "block-mapped",
                f"{fstype} maps this file by blocks and fills its holes through the page cache",
                "copy the file to a file system made with extents (mkfs.ext4 -O extents)",
            )
        ]
    if fstype == "overlay" and file.dio_offset_align is None:
        sentence = "overlay does not say what is below it, and a probe read proves nothing about writes"
        return [Refusal("direct-io-unproven", sentence, _move_cure(request))]
    return []


def _no_offsets(kind: str) -> Refusal:
    """The same words for both backends: neither can, for the same reason."""
    names = {"fifo": "pipe", "char": "character device", "directory": "folder", "other": "file of this kind"}
    sentence = f"a {names.get(kind, kind)} has no offsets to read or write at"
    return Refusal("file-kind", sentence, "use a regular file or a block device")


def _move_cure(request: Request) -> str:
    return (
        "copy the file to ext4 (data=ordered) or xfs"
        if request.file.kind == "regular"
        else "use a block device that supports O_DIRECT"
    )


def _hipfile_file_system(request: Request) -> list[Refusal]:
    file, system = request.file, request.file.filesystem
    if file.kind == "block" or request.settings.unsupported_file_systems or system.fstype == "xfs":
        return []
    if system.fstype == "ext4":
        if system.journal == "ordered":
            return []
        return [
            Refusal(
                "ext4-journal",
                f"ext4 at {system.mount_point} runs with data={system.journal or 'unknown'} and the direct "
                "path wants ordered",
                "mount -o remount,data=ordered is refused on a mounted file system: set it in /etc/fstab "
                "for "
                f"{system.mount_point} and mount again",
            )
        ]
    return [
        Refusal(
            "file-system",
            f"{system.fstype} is not a file system of the direct path (ext4 with data=ordered, xfs)",
            "move the file to ext4 or xfs, or set HIPFILE_UNSUPPORTED_FILE_SYSTEMS=true to try",
        )
    ]


def _block_stack(request: Request) -> list[Refusal]:
    """Block devices below the file that cannot do P2P, which a real request would learn by ENODEV (J-29)."""
    block = request.file.block
    if block is None or block.peer != "no":
        return []
    return [
        Refusal(
            "block-stack",
            block.because,
            "move the file to a volume on local NVMe, directly or through LVM",
        )
    ]


def history_refusals(request: Request) -> list[Refusal]:
    """An earlier direct failure of this file on this device (J-17)."""
    if request.earlier_failure is None:
        return []
    return [
        Refusal(
            "failed-before",
            f"the direct path failed with {errno_name(request.earlier_failure)} for this file on "
            f"{request.memory.device}",
            "close and reopen the file to try again",
        )
    ]


def alignment_refusals(request: Request) -> list[Refusal]:
    """Where the request as a whole misses the alignment (hipFile C-10, C-11). Splitting
    may still save its middle."""
    mem, offset = alignments(request)
    found = []
    if request.file_offset % offset:
        found.append(
            Refusal(
                "offset-align", f"file_offset {request.file_offset} is not a multiple of {offset}", "align it"
            )
        )
    if request.nbytes % offset:
        found.append(
            Refusal("size-align", f"nbytes {request.nbytes} is not a multiple of {offset}", "round it up")
        )
    address = request.memory.address + request.buffer_offset
    if address % mem:
        found.append(
            Refusal(
                "memory-align",
                f"the memory address plus buffer_offset ({address:#x}) is not a multiple of {mem}",
                "use an aligned buffer_offset",
            )
        )
    return found


def indirect_ranges(request: Request) -> tuple[IndirectRange, ...]:
    """Those of the request's bytes that only the page cache can read."""
    if request.op != "read" or not request.indirect:
        return ()
    start, end = request.file_offset, request.file_offset + request.nbytes
    return tuple(r for r in request.indirect if r.file_offset < end and start < r.file_offset + r.nbytes)


def range_refusals(request: Request) -> list[Refusal]:
    """Where parts of the request cannot go direct because of how the file system keeps them.
    The other parts still may."""
    found: dict[str, Refusal] = {}
    for each in indirect_ranges(request):
        reason = INDIRECT[each.code]
        sentence = f"{reason.sentence}: {each.nbytes} bytes at {each.file_offset}"
        found.setdefault(each.code, Refusal(reason.code, sentence, reason.cure))
    return list(found.values())


def hard_refusals(request: Request) -> list[Refusal]:
    """Every refusal that holds for each byte of the request, whatever its alignment."""
    return (
        policy_refusals(request)
        + device_refusals(request)
        + file_refusals(request)
        + history_refusals(request)
    )


def score_fastpath(request: Request) -> Score:
    """100, or -1 with every failed condition, for the request as it stands (hipFile C-1, C-5 to C-11)."""
    refusals = hard_refusals(request)
    if not refusals or all(r.code not in ("file-kind", "memory-file-system") for r in refusals):
        refusals = refusals + alignment_refusals(request) + range_refusals(request)
    return Score("fastpath", -1 if refusals else 100, tuple(refusals))


def score_fallback(request: Request) -> Score:
    """1, or -1 with the refusals (hipFile C-22; pinned and managed memory are accepted, J-26)."""
    refusals = []
    if not request.settings.allow_compat_mode:
        refusals.append(
            Refusal(
                "fallback-disabled",
                "HIPFILE_ALLOW_COMPAT_MODE=false forbids fallback, the page cache and any retry",
                "unset HIPFILE_ALLOW_COMPAT_MODE",
            )
        )
    if request.file.kind not in ("regular", "block"):
        refusals.append(_no_offsets(request.file.kind))
    return Score("fallback", -1 if refusals else 1, tuple(refusals))
