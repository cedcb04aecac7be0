"""mountinfo: octal escapes, optional fields, lines that are none, and which mount a file is on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nobounce.facts.mounts import decode, find_mount, parse_mountinfo

GOOD = "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue"


def test_a_line_with_optional_fields() -> None:
    (mount,) = parse_mountinfo(GOOD)
    assert mount.mount_id == 36
    assert mount.device == (98, 0)
    assert (mount.root, mount.mount_point) == ("/mnt1", "/mnt2")
    assert (mount.fstype, mount.source) == ("ext3", "/dev/root")
    assert mount.options == ("rw", "noatime", "rw", "errors=continue")
    assert not mount.read_only


@pytest.mark.parametrize(
    ("options", "more", "read_only"), [("ro", "rw", True), ("rw", "ro", True), ("rw", "rw,ro_like", False)]
)
def test_read_only_by_mount_or_by_superblock(options: str, more: str, read_only: bool) -> None:
    (mount,) = parse_mountinfo(f"1 2 8:1 / /x {options} - xfs /dev/sda1 {more}")
    assert mount.read_only is read_only


def test_zero_one_and_several_optional_fields() -> None:
    for optional in ("", "shared:1 ", "shared:1 master:2 propagate_from:3 "):
        (mount,) = parse_mountinfo(f"1 2 8:1 / /x rw {optional}- xfs /dev/sda1 rw")
        assert mount.fstype == "xfs"


@pytest.mark.parametrize(
    ("field", "text"),
    [
        (r"/a\040b", "/a b"),
        (r"/tab\011", "/tab\t"),
        (r"/new\012line", "/new\nline"),
        (r"/back\134slash", "/back\\slash"),
        (r"/hash\043", "/hash#"),
        (r"/twice\134040", "/twice\\040"),
        (r"/short\04", r"/short\04"),
        (r"/not\999", r"/not\999"),
    ],
)
def test_octal_escapes(field: str, text: str) -> None:
    assert decode(field) == text
    (mount,) = parse_mountinfo(f"1 2 8:1 / {field} rw - xfs /dev/sda1 rw")
    assert mount.mount_point == text


@pytest.mark.parametrize("sign", ["\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028"])
def test_only_a_newline_ends_a_line(sign: str) -> None:
    """The kernel escapes space, tab, newline, backslash and hash; every other sign of a path comes as it is."""
    line = f"7 2 8:1 / /cut{sign}here rw - xfs /dev/sda1 rw"
    (mount,) = parse_mountinfo(line)
    assert mount.mount_point == f"/cut{sign}here"
    assert find_mount(line, 7, (0, 0)) == mount


BROKEN = [
    "",
    "-",
    "1 2 8:1 / /x rw",
    "1 2 8:1 / /x rw -",
    "1 2 8:1 / /x rw - xfs /dev/sda1",
    "x 2 8:1 / /x rw - xfs /dev/sda1 rw",
    "1 2 8 / /x rw - xfs /dev/sda1 rw",
    "1 2 8:a / /x rw - xfs /dev/sda1 rw",
    "1 2 8:1:2 / /x rw - xfs /dev/sda1 rw",
    "\x00\xff",
]


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_line_hides_no_other(line: str) -> None:
    assert [m.mount_id for m in parse_mountinfo(f"{GOOD}\n{line}\n{GOOD}\n")] == [36, 36]
    assert find_mount(f"{line}\n{GOOD}", 36, (0, 0)) is not None


def test_the_mount_id_decides_and_the_topmost_stands_in() -> None:
    text = "\n".join(
        [
            "10 1 8:1 / / rw - ext4 /dev/sda1 rw",
            "11 10 0:50 /sub /b rw - btrfs /dev/sdb rw",
            "12 10 8:1 /inside /bind ro - ext4 /dev/sda1 rw",
        ]
    )
    by_id = find_mount(text, 11, (8, 1))
    assert by_id is not None
    assert by_id.mount_point == "/b"
    newest = find_mount(text, None, (8, 1))
    assert newest is not None
    assert newest.mount_point == "/bind"
    gone = find_mount(text, 99, (8, 1))
    assert gone is not None
    assert gone.mount_id == 12
    assert find_mount(text, 99, (7, 7)) is None
    assert find_mount(text, 1, (7, 7)) is None, "1 is no prefix of 10"


@given(st.text(max_size=200))
def test_any_text_is_survived(text: str) -> None:
    parse_mountinfo(text)
    find_mount(text, 1, (8, 1))
