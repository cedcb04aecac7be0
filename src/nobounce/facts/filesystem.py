"""The file system of a file, and ext4's true journaling mode.

mountinfo shows `data=` only where the mode was given at mount time and is not the default. The default itself
can be set in the superblock (tune2fs -o journal_data_writeback), and an ext4 without a journal has no mode at
all: /proc/fs/ext4/DEV/options shows what is in force.
"""

from __future__ import annotations

import contextlib
import os

from nobounce.facts.mounts import Mount, find_mount
from nobounce.facts.source import MOUNTINFO, LiveSource, Source
from nobounce.facts.statx import Statx
from nobounce.facts.types import FileSystemFacts, Journal

MEMORY_TYPES = frozenset({"tmpfs", "ramfs", "hugetlbfs", "devtmpfs", "rootfs"})
_MEMORY_MAGIC = frozenset({0x01021994, 0x858458F6, 0x958458F6})
_MODES: dict[str, Journal] = {"ordered": "ordered", "journal": "journal", "writeback": "writeback"}


MOST_KEPT = 256
"""File systems whose facts are kept."""


def filesystem_of(source: Source, found: Statx, label: str) -> FileSystemFacts:
    """Facts of the file system behind a statx answer; fstype "unknown" where no mount is listed for it.

    Of this machine they are kept while its mount table stays as it is: ext4 does not change its
    journaling mode on a remount.
    """
    if not isinstance(source, LiveSource) or found.mount_id is None:
        return _ask(source, found, label)
    try:
        table = source.read_bytes(MOUNTINFO)
    except OSError:
        return _ask(source, found, label)
    key = found.mount_id, found.device
    kept = source.file_systems.get(key)
    if kept is not None and kept[0] is table:
        return kept[1]
    facts = _ask(source, found, label)
    if facts.fstype != "unknown":
        if len(source.file_systems) >= MOST_KEPT:
            source.file_systems.clear()
        source.file_systems[key] = source.read_bytes(MOUNTINFO), facts
    return facts


def _ask(source: Source, found: Statx, label: str) -> FileSystemFacts:
    failure = None
    try:
        mount = find_mount(source.read_text(MOUNTINFO), found.mount_id, found.device)
        listed = mount is not None and found.mount_id in (None, mount.mount_id)
        if not listed and source.forget():
            mount = find_mount(source.read_text(MOUNTINFO), found.mount_id, found.device)
    except OSError as e:
        mount, failure = None, e.errno
    if mount is None:
        memory = _by_magic(source, label)
        return FileSystemFacts("unknown", "", "", (), None, MOUNTINFO, memory, False, failure)
    journal, decided_by = ext4_journal(source, mount) if mount.fstype == "ext4" else (None, MOUNTINFO)
    return FileSystemFacts(
        mount.fstype,
        mount.source,
        mount.mount_point,
        mount.options,
        journal,
        decided_by,
        mount.fstype in MEMORY_TYPES,
        mount.read_only,
    )


def _by_magic(source: Source, label: str) -> bool:
    try:
        return source.statfs_type(label) in _MEMORY_MAGIC
    except OSError:
        return False


def ext4_journal(source: Source, mount: Mount) -> tuple[Journal, str]:
    """(mode, the file that told): what is in force, else what was asked for at mount
    time (absent means ordered)."""
    for name in _device_names(source, mount):
        path = f"/proc/fs/ext4/{name}/options"
        try:
            lines = source.read_text(path).split()
        except OSError:
            continue
        for line in lines:
            if line.startswith("data="):
                return _MODES.get(line[5:], "unknown"), path
        return "none", path
    for option in mount.options:
        if option.startswith("data="):
            return _MODES.get(option[5:], "unknown"), MOUNTINFO
    return "unknown" if mount.source.startswith("/dev/root") else "ordered", MOUNTINFO


def _device_names(source: Source, mount: Mount) -> list[str]:
    major, minor = mount.device
    names = []
    with contextlib.suppress(OSError):
        names.append(os.path.basename(source.readlink(f"/sys/dev/block/{major}:{minor}")))
    if mount.source.startswith("/dev/"):
        names.append(os.path.basename(mount.source))
    return list(dict.fromkeys(names))
