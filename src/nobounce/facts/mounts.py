"""/proc/self/mountinfo (proc(5)), looked up by mount id.

btrfs subvolumes and overlay have anonymous device numbers, and a bind mount shares its device with
others: only the mount id of statx names the one mount that a file was opened through. The device
number is the second choice.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_ESCAPE = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """One line of mountinfo, decoded. `options` are the mount's and the superblock's, in that order."""

    mount_id: int
    parent_id: int
    device: tuple[int, int]
    root: str
    mount_point: str
    mount_options: tuple[str, ...]
    fstype: str
    source: str
    super_options: tuple[str, ...]

    @property
    def options(self) -> tuple[str, ...]:
        return self.mount_options + self.super_options

    @property
    def read_only(self) -> bool:
        return "ro" in self.mount_options or "ro" in self.super_options


def decode(field: str) -> str:
    r"""Undo mountinfo's octal escapes (\040 for a space)."""
    return _ESCAPE.sub(lambda m: chr(int(m[1], 8)), field)


def parse_mountinfo(text: str) -> list[Mount]:
    """Every well-formed line; others are passed over, since one odd mount must not hide the rest."""
    return [m for m in map(_parse_line, _lines(text)) if m is not None]


def _lines(text: str) -> list[str]:
    """Lines end at a newline alone: the kernel escapes that, but no carriage return, form
    feed or U+2028 in a path."""
    return text.split("\n")


def _parse_line(line: str) -> Mount | None:
    fields = line.split(" ")
    try:
        dash = fields.index("-", 6)
        major, minor = fields[2].split(":")
        fstype, source, super_options = fields[dash + 1 : dash + 4]
        return Mount(
            int(fields[0]),
            int(fields[1]),
            (int(major), int(minor)),
            decode(fields[3]),
            decode(fields[4]),
            tuple(fields[5].split(",")),
            decode(fstype),
            decode(source),
            tuple(super_options.split(",")),
        )
    except ValueError:
        return None


def find_mount(text: str, mount_id: int | None, device: tuple[int, int]) -> Mount | None:
    """The mount with this id; without an id, the last one with this device number
    (the topmost of several)."""
    if mount_id is not None:
        start = f"{mount_id} "
        for line in _lines(text):
            if line.startswith(start):
                mount = _parse_line(line)
                if mount is not None:
                    return mount
    same = [m for m in parse_mountinfo(text) if m.device == device]
    return same[-1] if same else None
