"""Requests to judge: a plain one that goes direct, and changes to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nobounce.config import Settings
from nobounce.facts.types import FileFacts, FileSystemFacts
from nobounce.route.types import DirectFacts, MemoryFacts, MemoryKind, Request

EXT4 = FileSystemFacts(
    fstype="ext4",
    source="/dev/vda",
    mount_point="/",
    options=("rw",),
    journal="ordered",
    decided_by="/proc/self/mountinfo",
    memory=False,
    read_only=False,
)
FILE = FileFacts(
    path="/data/model.bin",
    kind="regular",
    nbytes=1 << 30,
    inode=12,
    device=(254, 0),
    rdev=(0, 0),
    mount_id=7,
    mtime_ns=1,
    ctime_ns=1,
    dio_mem_align=512,
    dio_offset_align=512,
    dio_read_offset_align=None,
    access_mode="rw",
    direct_fd="ok",
    direct_errno=None,
    filesystem=EXT4,
)
MEMORY = MemoryFacts(MemoryKind.DEVICE, 1 << 21, 1 << 26, "cpu")
DIRECT = DirectFacts("cpu", True, memory_kinds=frozenset(MemoryKind))


def request(**changes: Any) -> Request:
    """A read of 1 MiB at 1 MiB that goes direct, changed by `changes` (file, memory, direct: dicts of their fields)."""
    parts = {"file": FILE, "memory": MEMORY, "direct": DIRECT}
    for name, base in parts.items():
        change = changes.pop(name, None)
        if isinstance(change, dict):
            parts[name] = replace(base, **change)
        elif change is not None:
            parts[name] = change
    fields: dict[str, Any] = {
        "op": "read",
        "settings": Settings(),
        "file_offset": 1 << 20,
        "nbytes": 1 << 20,
        **parts,
    }
    return Request(**{**fields, **changes})


def on(fstype: str, **more: Any) -> dict[str, Any]:
    """File facts on another file system."""
    return {"filesystem": replace(EXT4, fstype=fstype, **more)}
