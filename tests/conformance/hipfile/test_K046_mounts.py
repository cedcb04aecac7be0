"""K3: which file system a file is on. libmount's context, table and options are here mountinfo and /proc/fs/ext4."""

from __future__ import annotations

import errno

import pytest

from nobounce.facts.filesystem import ext4_journal, filesystem_of
from nobounce.facts.mounts import find_mount
from nobounce.facts.source import CapturedSource
from nobounce.facts.statx import Statx
from nobounce.facts.types import FileSystemFacts

LINE = "36 35 254:0 / / rw,noatime - {fstype} /dev/vda {options}\n"


def _facts(
    text: str | None, *, device: tuple[int, int] = (254, 0), mount_id: int | None = 36
) -> FileSystemFacts:
    """Facts of a file on a machine whose mountinfo is `text`, or cannot be read."""
    answers = {
        '["read", "/proc/self/mountinfo"]': {"errno": errno.EACCES} if text is None else {"value": text}
    }
    found = Statx(0o100644, 0, 1, device, (0, 0), 0, 0, mount_id, None, None, None)
    return filesystem_of(CapturedSource(answers), found, "/f")


def _mount(fstype: str, options: str = "rw") -> FileSystemFacts:
    return _facts(LINE.format(fstype=fstype, options=options))


def test_K046_without_a_mount_table_the_failure_is_told() -> None:
    assert _facts(None).error == errno.EACCES
    assert _facts("").error is None


def test_K047_a_malformed_table_hides_nothing_else() -> None:
    junk = "36 nonsense\n\x00\n36 35 254:0 / /\n"
    assert _facts(junk).fstype == "unknown"
    assert _facts(junk + LINE.format(fstype="xfs", options="rw")).fstype == "xfs"


def test_K048_options_that_cannot_be_read_leave_the_mount_tables_word() -> None:
    mount = find_mount(LINE.format(fstype="ext4", options="rw,data=journal"), 36, (254, 0))
    assert mount is not None
    assert ext4_journal(CapturedSource({}), mount) == ("journal", "/proc/self/mountinfo")


def test_K049_no_entry_is_neither_ext4_nor_xfs() -> None:
    found = _facts(LINE.format(fstype="xfs", options="rw"), device=(9, 9), mount_id=99)
    assert (found.fstype, found.journal) == ("unknown", None)


@pytest.mark.parametrize("fstype", ["ext4", "xfs", "btrfs", "nfs4", "tmpfs"])
def test_K050_file_system_type(fstype: str) -> None:
    assert _mount(fstype).fstype == fstype


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ("rw", "ordered"),
        ("rw,data=ordered", "ordered"),
        ("rw,data=journal", "journal"),
        ("rw,data=writeback,discard", "writeback"),
        ("rw,data=quantum", "unknown"),
    ],
)
def test_K051_ext4_data_modes(options: str, mode: str) -> None:
    assert _mount("ext4", options).journal == mode


def test_K052_xfs_has_no_mode() -> None:
    found = _mount("xfs", "rw,data=journal")
    assert (found.fstype, found.journal) == ("xfs", None)
