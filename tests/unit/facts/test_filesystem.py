"""Which file system a file is on, and ext4's true journaling mode."""

from __future__ import annotations

import errno

import pytest

from nobounce.facts.filesystem import ext4_journal, filesystem_of
from nobounce.facts.mounts import parse_mountinfo
from nobounce.facts.source import MOUNTINFO
from nobounce.facts.statx import Statx
from trees import Tree


def stat_of(device: tuple[int, int], mount_id: int | None = None) -> Statx:
    return Statx(0o100644, 1, 1, device, (0, 0), 1, 1, mount_id, None, None, None)


def machine(line: str) -> Tree:
    return Tree().put(MOUNTINFO, line + "\n")


EXT4 = "30 1 259:1 / /data rw - ext4 /dev/nvme0n1 {options}"


@pytest.mark.parametrize(
    ("options", "proc", "journal", "by"),
    [
        ("rw", None, "ordered", MOUNTINFO),
        ("rw,data=journal", None, "journal", MOUNTINFO),
        ("rw,data=writeback", None, "writeback", MOUNTINFO),
        ("rw,data=strange", None, "unknown", MOUNTINFO),
        ("rw", "rw\ndata=ordered\n", "ordered", "/proc/fs/ext4/nvme0n1/options"),
        ("rw", "rw\ndata=writeback\n", "writeback", "/proc/fs/ext4/nvme0n1/options"),
        ("rw", "rw\nbarrier\n", "none", "/proc/fs/ext4/nvme0n1/options"),
        ("rw,data=ordered", "data=journal\n", "journal", "/proc/fs/ext4/nvme0n1/options"),
        ("rw", "data=?\n", "unknown", "/proc/fs/ext4/nvme0n1/options"),
        ("rw", "", "none", "/proc/fs/ext4/nvme0n1/options"),
    ],
)
def test_the_mode_in_force_beats_the_mode_asked_for(
    options: str, proc: str | None, journal: str, by: str
) -> None:
    tree = machine(EXT4.format(options=options))
    if proc is not None:
        tree.put("/proc/fs/ext4/nvme0n1/options", proc)
    found = filesystem_of(tree, stat_of((259, 1), 30), "x")
    assert (found.fstype, found.journal, found.decided_by) == ("ext4", journal, by)


def test_the_name_of_the_device_comes_from_its_number() -> None:
    tree = machine("30 1 259:1 / / rw - ext4 /dev/root rw")
    (mount,) = parse_mountinfo(tree.read_text(MOUNTINFO))
    assert ext4_journal(tree, mount) == ("unknown", MOUNTINFO)
    tree.link("/sys/dev/block/259:1", "../../devices/virtual/block/nvme3n1")
    tree.put("/proc/fs/ext4/nvme3n1/options", "data=ordered\n")
    assert ext4_journal(tree, mount) == ("ordered", "/proc/fs/ext4/nvme3n1/options")


@pytest.mark.parametrize("fstype", ["tmpfs", "ramfs", "hugetlbfs"])
def test_memory(fstype: str) -> None:
    assert filesystem_of(machine(f"30 1 0:9 / /t rw - {fstype} none rw"), stat_of((0, 9)), "x").memory


def test_no_mount_and_no_mount_table_are_unknown() -> None:
    unlisted = filesystem_of(machine(EXT4.format(options="rw")), stat_of((9, 9), 77), "x")
    assert (unlisted.fstype, unlisted.error) == ("unknown", None)
    tree = Tree().fail(MOUNTINFO, errno.EACCES)
    assert filesystem_of(tree, stat_of((9, 9)), "x").error == errno.EACCES


def test_other_file_systems_have_no_journal_mode() -> None:
    found = filesystem_of(machine("30 1 259:1 / /x ro - xfs /dev/nvme0n1 rw"), stat_of((259, 1)), "x")
    assert (found.fstype, found.journal, found.read_only, found.mount_point) == ("xfs", None, True, "/x")
