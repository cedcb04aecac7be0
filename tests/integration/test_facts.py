"""What facts say of real file systems: which mount a file is on, what statx reports there, what the page cache holds."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from capabilities import as_nobody, need
from filesystems import Machine
from nobounce.facts.file import examine
from nobounce.facts.pagecache import drop, residency, sample
from nobounce.facts.source import MOUNTINFO, CapturedSource, LiveSource, RecordingSource
from nobounce.facts.types import FileFacts, Residency

MIB = 1 << 20
NBYTES = 4 * MIB
EXT4 = ["ext4-ordered", "ext4-journal", "ext4-writeback", "ext4-no-journal", "ext4-tuned-writeback"]
ON_DISK = [*EXT4, "xfs", "btrfs", "overlay", "loop-on-loop", "bind"]


def written(folder: Path, name: str = "facts.bin") -> Path:
    path = folder / name
    with path.open("wb") as f:
        f.write(os.urandom(NBYTES))
        os.fsync(f.fileno())
    return path


@pytest.fixture
def fd(disks: Machine, request: pytest.FixtureRequest) -> Iterator[int]:
    """A file of 4 MiB on the file system that the test names, open for reading."""
    opened = os.open(written(disks.get(request.param)), os.O_RDONLY)
    yield opened
    os.close(opened)


def on(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fd", [name], indirect=True)


def facts(source: LiveSource, fd: int) -> FileFacts:
    return examine(source, fd, trial=True)


@pytest.mark.parametrize("fd", EXT4, indirect=True)
def test_ext4_s_mode_is_read_where_the_kernel_keeps_it(fd: int) -> None:
    found = facts(LiveSource(), fd).filesystem
    assert found.decided_by == f"/proc/fs/ext4/{Path(found.source).name}/options"
    told = [o for o in Path(found.decided_by).read_text().split() if o.startswith("data=")]
    assert told == ([] if found.journal == "none" else [f"data={found.journal}"])


@on("ext4-journal")
def test_data_journal_takes_o_direct_and_reports_that_it_means_nothing(fd: int) -> None:
    found = facts(LiveSource(), fd)
    assert found.direct_fd == "ok"
    assert (found.dio_mem_align, found.dio_offset_align) == (0, 0)


@pytest.mark.parametrize(
    "fd",
    ["ext4-ordered", "ext4-writeback", "ext4-no-journal", "xfs", "overlay", "loop-on-loop"],
    indirect=True,
)
def test_what_statx_reports_suffices_for_a_direct_read(fd: int) -> None:
    """A read at exactly the reported alignment works; overlay passes the report of the file below on."""
    found = facts(LiveSource(), fd)
    assert found.direct_fd == "ok"
    assert found.dio_offset_align is not None
    assert found.dio_mem_align is not None
    step = found.dio_offset_align
    assert 512 <= step <= 4096
    block = ctypes.create_string_buffer(3 * 4096)
    aligned = -ctypes.addressof(block) % 4096 + found.dio_mem_align
    direct = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT)
    try:
        view = memoryview(block).cast("B")[aligned : aligned + step]
        assert os.preadv(direct, [view], step) == step
        assert bytes(view) == os.pread(fd, step, step)
    finally:
        os.close(direct)


@pytest.mark.parametrize("fd", ["tmpfs"], indirect=True)
def test_tmpfs_takes_o_direct_and_reports_nothing(fd: int) -> None:
    found = facts(LiveSource(), fd)
    assert (found.direct_fd, found.dio_offset_align, found.filesystem.memory) == ("ok", None, True)


@pytest.mark.parametrize("name", ["btrfs", "overlay"])
def test_an_anonymous_device_is_looked_up_by_its_mount(disks: Machine, name: str) -> None:
    path = written(disks.get(name))
    with path.open("rb") as f:
        found = facts(LiveSource(), f.fileno())
    assert found.device[0] == 0
    assert (found.filesystem.fstype, found.filesystem.mount_point) == (name, str(disks.get(name)))


def test_a_subvolume_s_device_number_is_in_no_mount_table(disks: Machine) -> None:
    """st_dev of a btrfs subvolume that is reached through its parent's mount appears nowhere: only the id finds it."""
    folder = disks.get("btrfs") / "sub"
    disks.run("btrfs", "subvolume", "create", folder)
    with written(folder).open("rb") as f:
        found = facts(LiveSource(), f.fileno())
    number = ":".join(map(str, found.device))
    assert number not in [line.split()[2] for line in Path(MOUNTINFO).read_text().splitlines()]
    assert (found.filesystem.fstype, found.filesystem.mount_point) == ("btrfs", str(disks.get("btrfs")))


def test_one_file_through_two_mounts(disks: Machine) -> None:
    """A bind mount that is read-only: the same inode, and each descriptor tells of the mount it came by."""
    path = written(disks.get("ext4-ordered"))
    bound = disks.get("bind")
    source = LiveSource()
    with path.open("rb") as straight, (bound / path.name).open("rb") as other:
        first, second = facts(source, straight.fileno()), facts(source, other.fileno())
        assert (first.device, first.inode) == (second.device, second.inode)
        assert first.filesystem.mount_point == str(disks.get("ext4-ordered"))
        assert second.filesystem.mount_point == str(bound)
    disks.run("mount", "-o", "remount,ro,bind", bound)
    try:
        with path.open("rb") as straight, (bound / path.name).open("rb") as other:
            assert not facts(source, straight.fileno()).filesystem.read_only
            assert facts(source, other.fileno()).filesystem.read_only, "the kept mount table is old"
    finally:
        disks.run("mount", "-o", "remount,rw,bind", bound)


def test_a_new_mount_is_seen_and_a_detached_one_is_unknown_or_found_by_device(disks: Machine) -> None:
    disks.get("ext4-journal")
    written(disks.get("ext4-journal"))
    source = LiveSource()
    source.read_text(MOUNTINFO)
    point = disks.root / "late"
    point.mkdir()
    disks.run("mount", "--bind", disks.get("ext4-journal"), point)
    try:
        with (point / "facts.bin").open("rb") as f:
            assert facts(source, f.fileno()).filesystem.mount_point == str(point)
            disks.run("umount", "--lazy", point)
            after = facts(source, f.fileno()).filesystem
    finally:
        point.rmdir()
    assert (after.fstype, after.journal) == ("ext4", "journal")
    assert after.mount_point == str(disks.get("ext4-journal"))


@pytest.mark.parametrize(
    "odd",
    ["a b", "tab\t", "line\nbreak", "back\\040", "cr\rx", "ff\fx", "nel\x85x", "ls\u2028x", "h#x", "\udcff"],
)
def test_a_mount_point_of_any_name_is_found(disks: Machine, odd: str) -> None:
    need("mount")
    point = disks.root / f"odd{odd}"
    point.mkdir()
    disks.run("mount", "-t", "tmpfs", "-o", "size=1m", "none", point)
    try:
        (point / "x").write_bytes(b"x")
        with (point / "x").open("rb") as f:
            found = facts(LiveSource(), f.fileno()).filesystem
    finally:
        disks.run("umount", point)
        point.rmdir()
    assert (found.fstype, found.mount_point) == ("tmpfs", str(point))


def test_the_process_may_move_to_another_mount_namespace(disks: Machine) -> None:
    """The table that is open stays the old namespace's, and no poll tells of the move."""
    need("mount")
    point = disks.root / "elsewhere"
    point.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _MOVES, str(point)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"tmpfs {point}\n"), done.stderr


_MOVES = """
import ctypes, os, subprocess, sys
from nobounce.facts.file import examine
from nobounce.facts.source import MOUNTINFO, LiveSource
point, source = sys.argv[1], LiveSource()
source.read_text(MOUNTINFO)
assert ctypes.CDLL(None).unshare(0x20000) == 0
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "none", point], check=True)
fd = os.open(point, os.O_RDONLY)
found = examine(source, fd).filesystem
print(found.fstype, found.mount_point)
"""


@pytest.mark.parametrize("fd", ON_DISK, indirect=True)
def test_residency_follows_reads_and_drops(fd: int) -> None:
    need("cachestat")
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
    drop(fd)
    cold = residency(fd, 0, NBYTES)
    assert cold.resident_bytes == 0
    assert cold.how == ("mincore" if "overlay" in os.readlink(f"/proc/self/fd/{fd}") else "cachestat")
    os.pread(fd, MIB, MIB)
    assert residency(fd, 0, NBYTES).resident_bytes == MIB
    assert residency(fd, MIB, MIB).resident_bytes == MIB
    assert residency(fd, 2 * MIB, 2 * MIB).resident_bytes == 0
    drop(fd, MIB, MIB // 2)
    assert residency(fd, MIB, MIB).resident_bytes == MIB // 2
    os.pread(fd, NBYTES, 0)
    assert residency(fd, 0, NBYTES).resident_bytes == NBYTES


@on("tmpfs")
def test_memory_file_systems_are_always_resident(fd: int) -> None:
    need("cachestat")
    drop(fd)
    assert residency(fd, 0, NBYTES).resident_bytes == NBYTES


@pytest.mark.parametrize("fd", ["ext4-ordered", "xfs", "btrfs"], indirect=True)
def test_samples_agree_with_the_kernel_s_count(fd: int) -> None:
    os.pread(fd, NBYTES, 0)
    assert sample(fd, 0, NBYTES) == Residency(NBYTES, NBYTES, "nowait")
    drop(fd)
    assert sample(fd, 0, NBYTES).resident_bytes == 0


@on("overlay")
def test_where_sampling_is_not_offered_the_answer_is_unknown(fd: int) -> None:
    """Linux 6.18: preadv2(RWF_NOWAIT) on overlay is EOPNOTSUPP. A kernel that can do it must be right."""
    os.pread(fd, NBYTES, 0)
    assert sample(fd, 0, NBYTES).resident_bytes in (None, NBYTES)


STRANGER = """
import random, sys
from nobounce.facts.pagecache import residency
drop()
with open(sys.argv[1], "rb") as f:
    for _ in range(4):
        found = residency(f.fileno(), 0, 4 << 20)
        print(found.how, found.resident_bytes)
"""


def as_a_stranger(path: Path) -> list[list[str]]:
    """What the residency of a cold file of 4 MiB is to a user who may only read it, four times."""
    path.chmod(0o644)
    with path.open("rb") as f:
        drop(f.fileno())
    for above in path.parents:
        if not above.stat().st_mode & 1:
            above.chmod(above.stat().st_mode | 0o011)
    done = as_nobody(STRANGER, str(path))
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", ["ext4-ordered", "xfs"])
def test_a_user_s_second_look_at_a_cold_file_still_finds_it_cold(disks: Machine, name: str) -> None:
    """cachestat refuses a file that the user may not write, and each sample that misses makes the kernel read its page."""
    looks = as_a_stranger(written(disks.get(name)))
    assert len(looks) == 4
    assert all(how in ("nowait", "cachestat") and int(nbytes) <= MIB for how, nbytes in looks), looks


def test_a_user_s_cold_file_on_overlay_is_never_said_to_be_cached(disks: Machine) -> None:
    """There mincore would say that all of it is."""
    looks = as_a_stranger(written(disks.get("overlay")))
    assert looks == [["unknown", "None"]] * 4


@pytest.mark.parametrize("name", [*ON_DISK, "tmpfs"])
def test_a_capture_tells_what_the_machine_told(disks: Machine, name: str) -> None:
    path = written(disks.get(name))
    recording = RecordingSource(LiveSource())
    with path.open("rb") as f:
        live = examine(recording, f.fileno(), path=str(path), trial=True)
    assert examine(CapturedSource.from_json(recording.to_json()), -1, path=str(path), trial=True) == live
