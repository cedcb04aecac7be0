"""Output files: whole or not at all, with the right owner and mode, and never through a link of another user."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capabilities import need, open_up
from nobounce import outfile, scratch
from nobounce.errors import ArgumentError, FileError

NOBODY = 65534


@pytest.fixture(params=["O_TMPFILE", "named"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test on a file system with nameless files and, so far as the program can tell, on one without."""
    if request.param == "named":
        plain = os.open

        def without(path: str, flags: int, *arguments: int, **options: int) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE")
            return plain(path, flags, *arguments, **options)

        monkeypatch.setattr(os, "open", without)
    return str(request.param)


def put(path: Path, data: bytes = b"new", **options: bool) -> None:
    with outfile.create(str(path), **options) as out:  # type: ignore[arg-type]
        out.write(data)
        out.commit(durable=True)


def listing(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask() -> Callable[[int], int]:
    before = os.umask(0o022)
    os.umask(before)
    yield os.umask  # type: ignore[misc]
    os.umask(before)


def test_a_new_file_appears_whole_at_commit(tmp_path: Path, fd_guard: None) -> None:
    with outfile.create(str(tmp_path / "f")) as out:
        out.write(b"ne")
        assert not (tmp_path / "f").exists()
        out.write(b"w")
        out.commit()
    assert (tmp_path / "f").read_bytes() == b"new"
    assert listing(tmp_path) == ["f"]


def test_an_old_file_stays_whole_until_commit_and_without_it(tmp_path: Path, fd_guard: None) -> None:
    (tmp_path / "f").write_bytes(b"old content")
    with outfile.create(str(tmp_path / "f")) as out:
        out.write(b"new")
    assert (tmp_path / "f").read_bytes() == b"old content"
    put(tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == b"new"
    assert listing(tmp_path) == ["f"]


def test_a_name_that_appears_meanwhile_is_replaced(tmp_path: Path) -> None:
    with outfile.create(str(tmp_path / "f")) as out:
        (tmp_path / "f").write_bytes(b"another's")
        out.write(b"new")
        out.commit()
    assert (tmp_path / "f").read_bytes() == b"new"


@pytest.mark.parametrize(
    ("mask", "asked", "got"), [(0o022, 0o666, 0o644), (0o077, 0o755, 0o700), (0, 0o444, 0o444)]
)
def test_a_new_file_s_mode_honours_the_umask(
    tmp_path: Path, umask: Callable[[int], int], mask: int, asked: int, got: int
) -> None:
    umask(mask)
    with outfile.create(str(tmp_path / "f"), mode=asked) as out:
        out.commit()
    assert mode_of(tmp_path / "f") == got


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o755])
def test_an_old_file_s_mode_and_owner_stay(tmp_path: Path, mode: int) -> None:
    need("root")
    (tmp_path / "f").touch()
    (tmp_path / "f").chmod(mode)
    os.chown(tmp_path / "f", NOBODY, 12)
    put(tmp_path / "f")
    status = (tmp_path / "f").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (mode, NOBODY, 12)


def test_an_old_file_s_set_user_id_bit_goes_as_with_any_write(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    (tmp_path / "f").chmod(0o4755)
    put(tmp_path / "f")
    assert mode_of(tmp_path / "f") == 0o755


def test_a_folder_s_default_list_does_not_widen_an_old_file(tmp_path: Path) -> None:
    need("setfacl")
    (tmp_path / "f").touch()
    (tmp_path / "f").chmod(0o660)
    subprocess.run(["setfacl", "-d", "-m", "u:daemon:rw", str(tmp_path)], check=True, timeout=60)
    put(tmp_path / "f")
    assert mode_of(tmp_path / "f") == 0o660
    with pytest.raises(OSError, match="No data"):
        os.getxattr(tmp_path / "f", "system.posix_acl_access")


def test_a_private_file_is_0600_whatever_was_there(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    (tmp_path / "f").chmod(0o666)
    put(tmp_path / "f", private=True)
    assert mode_of(tmp_path / "f") == 0o600
    put(tmp_path / "g", private=True)
    assert mode_of(tmp_path / "g") == 0o600


def test_a_link_of_one_s_own_stays_and_what_it_names_is_replaced(tmp_path: Path, fd_guard: None) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "f").write_bytes(b"old")
    (tmp_path / "one").symlink_to("sub/two")
    (tmp_path / "sub" / "two").symlink_to("f")
    put(tmp_path / "one")
    assert (tmp_path / "sub" / "f").read_bytes() == b"new"
    assert (tmp_path / "one").is_symlink()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(FileError, match="ELOOP"):
        put(tmp_path / "loop")


def test_a_link_of_another_user_is_refused(tmp_path: Path, fd_guard: None) -> None:
    need("root")
    (tmp_path / "victim").write_bytes(b"victim")
    (tmp_path / "f").symlink_to("victim")
    os.chown(tmp_path / "f", NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(PermissionError, match=r"f: is a link of another user \(uid 65534\): name a file"):
        put(tmp_path / "f")
    os.mkfifo(tmp_path / "p")
    os.chown(tmp_path / "p", NOBODY, NOBODY)
    with pytest.raises(PermissionError, match="is a pipe of another user"):
        put(tmp_path / "p")
    assert (tmp_path / "victim").read_bytes() == b"victim"


def test_a_hard_link_at_the_name_is_replaced_and_its_file_untouched(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"victim")
    os.link(tmp_path / "victim", tmp_path / "f")
    put(tmp_path / "f", private=True)
    assert (tmp_path / "victim").read_bytes() == b"victim"
    assert mode_of(tmp_path / "victim") != 0o600
    assert (tmp_path / "f").read_bytes() == b"new"


def test_devices_pipes_and_descriptors_are_written_to(tmp_path: Path, fd_guard: None) -> None:
    put(Path("/dev/null"))
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    read, write = os.pipe()
    put(Path(f"/dev/fd/{write}"))
    (tmp_path / "to-it").symlink_to(f"/proc/self/fd/{write}")
    put(tmp_path / "to-it")
    os.close(write)
    assert os.read(read, 100) == b"newnew"
    os.close(read)
    with pytest.raises(ArgumentError, match="no regular file: it would be replaced"):
        put(Path("/dev/null"), whole=True)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        (".", errno.EISDIR),
        ("sub", errno.EISDIR),
        ("none/f", errno.ENOENT),
        ("file/f", errno.ENOTDIR),
        ("new/", errno.ENOENT),
    ],
)
def test_what_cannot_be_written_is_named(tmp_path: Path, fd_guard: None, name: str, code: int) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(FileError) as caught:
        outfile.create(f"{tmp_path}/{name}")
    assert caught.value.errno == code
    assert str(caught.value).startswith(f"{tmp_path}/{name}: cannot write: ")


def test_a_removed_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError, match="f: cannot write: No such file"):
        outfile.create("f")
    monkeypatch.chdir(tmp_path)


def test_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with outfile.create(str(tmp_path / "f")) as out:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, out.fd)
        os.close(full)
        with pytest.raises(FileError, match=r"f: cannot write: No space left on device \(ENOSPC\)\. Free"):
            out.write(b"new")
    assert (tmp_path / "f").read_bytes() == b"old"


LEFT = """
import os, signal, sys
from nobounce import outfile
out = outfile.create(sys.argv[1])
out.write(bytes(1 << 20))
if sys.argv[2] == "kill":
    os.rename = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
    out.commit()
else:
    rename = os.rename
    def wait(*a, **k):
        print("about to", flush=True)
        sys.stdin.read()
        rename(*a, **k)
    os.rename = wait
    out.commit()
"""


def test_what_a_killed_process_left_goes_with_the_next_run_and_what_a_living_one_needs_stays(
    tmp_path: Path,
) -> None:
    (tmp_path / "f").write_bytes(b"old")
    (tmp_path / ".nobounce-mine").write_bytes(b"no name of ours")
    command = [sys.executable, "-c", LEFT, str(tmp_path / "f")]
    subprocess.run([*command, "kill"], check=False, timeout=60)
    left = {n for n in listing(tmp_path) if n.startswith(".nobounce-")} - {".nobounce-mine"}
    assert len(left) == 1
    assert (tmp_path / "f").read_bytes() == b"old"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*command, "wait"], text=True, **pipes) as living:  # type: ignore[call-overload]
        assert living.stdout.readline() == "about to\n"
        needed = {n for n in listing(tmp_path) if n.startswith(".nobounce-")} - {".nobounce-mine"}
        assert len(needed) == 1
        assert not needed & left
        put(tmp_path / "f")
        assert needed < set(listing(tmp_path))
        living.communicate("")
        assert living.returncode == 0
    assert (tmp_path / "f").stat().st_size == 1 << 20
    assert listing(tmp_path) == [".nobounce-mine", "f"]


def test_a_swapped_name_is_noticed_and_its_file_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(b"old")
    (tmp_path / "victim").write_bytes(b"victim")
    (tmp_path / "victim").chmod(0o600)
    real = os.stat

    def swap(path: str, *arguments: int, **options: int) -> os.stat_result:
        if str(path).startswith(".nobounce-") and out.fd >= 0:
            (spot,) = tmp_path.glob(f"**/{path}")
            spot.unlink()
            spot.symlink_to(tmp_path / "victim")
        return real(path, *arguments, **options)

    with outfile.create(str(tmp_path / "f")) as out:
        monkeypatch.setattr(os, "stat", swap)
        with pytest.raises(FileError, match="f: another file took the place of the new one"):
            out.commit()
        monkeypatch.undo()
    assert (tmp_path / "f").read_bytes() == b"old"
    assert (tmp_path / "victim").read_bytes() == b"victim"
    assert mode_of(tmp_path / "victim") == 0o600


def test_a_scratch_file_has_no_name(tmp_path: Path, fd_guard: None) -> None:
    with scratch.unnamed(str(tmp_path), 8192) as (path, fd):
        assert listing(tmp_path) == []
        assert os.fstat(fd).st_size == 8192
        with open(path, "r+b") as f:
            f.write(b"x" * 8192)
        assert os.pread(fd, 1, 8191) == b"x"


def test_a_private_folder_is_found_by_its_path_whatever_its_name_comes_to_mean(
    tmp_path: Path, fd_guard: None
) -> None:
    (tmp_path / "trap").mkdir()
    with scratch.private_folder(str(tmp_path)) as path:
        (name,) = {n for n in listing(tmp_path) if n.startswith(".nobounce-")}
        assert mode_of(tmp_path / name) == 0o700
        (tmp_path / name).rename(tmp_path / "moved")
        (tmp_path / name).symlink_to("trap")
        outfile.write(f"{path}/trace.7.json", b"trace", private=True)
        assert listing(tmp_path / "moved") == ["trace.7.json"]
    assert listing(tmp_path / "trap") == []
    assert listing(tmp_path / "moved") == []


def test_a_private_folder_whose_name_is_taken_at_once_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fd_guard: None, way: str
) -> None:
    """By a link, by nothing, and by another folder of this user, whose traces are not ours to remove."""
    other = tmp_path / "other"
    other.mkdir(0o700)
    (other / "trace.7.json").touch()
    real, made = os.mkdir, []

    def swap(name: str, *arguments: Any, **options: Any) -> None:
        real(name, *arguments, **options)
        made.append(name)
        if len(made) <= 3:
            os.rename(tmp_path / name, tmp_path / f"taken-{len(made)}")
        if len(made) == 1:
            os.symlink("other", tmp_path / name)
        elif len(made) == 2:
            os.rename(other, tmp_path / name)

    monkeypatch.setattr(os, "mkdir", swap)
    with scratch.private_folder(str(tmp_path)) as path:
        outfile.write(f"{path}/trace.8.json", b"trace", private=True)
        assert listing(tmp_path / made[3]) == ["trace.8.json"]
    assert len(made) == (5 if way == "named" else 4)  # the trace has one of its own
    assert not (tmp_path / made[3]).exists()
    assert listing(tmp_path / made[1]) == ["trace.7.json"]


def test_a_private_folder_that_never_gets_its_name_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fd_guard: None
) -> None:
    real = os.mkdir

    def swap(name: str, *arguments: Any, **options: Any) -> None:
        real(name, *arguments, **options)
        os.rename(tmp_path / name, tmp_path / f"taken-{name}")

    monkeypatch.setattr(os, "mkdir", swap)
    with pytest.raises(PermissionError), scratch.private_folder(str(tmp_path)):
        raise AssertionError("not reached")


def test_a_killed_run_s_folder_goes_with_the_next_and_no_other_file_with_it(tmp_path: Path) -> None:
    for digit, inside in (("0", "trace.7.json"), ("1", "thesis.txt")):
        folder = tmp_path / f".nobounce-{digit * 16}"
        folder.mkdir(0o700)
        (folder / inside).touch()
    with scratch.private_folder(str(tmp_path)):
        pass
    assert listing(tmp_path) == [f".nobounce-{'1' * 16}"]
    assert listing(tmp_path / f".nobounce-{'1' * 16}") == ["thesis.txt"]


def test_others_may_not_be_robbed_of_their_file_nor_of_a_read_only_one(tmp_path: Path) -> None:
    need("unprivileged")
    from capabilities import as_nobody

    open_up(tmp_path)
    tmp_path.chmod(0o1777)
    (tmp_path / "roots").write_bytes(b"old")
    (tmp_path / "open").write_bytes(b"old")
    (tmp_path / "open").chmod(0o666)
    done = as_nobody(
        """
import errno, sys
from nobounce import errors, outfile
drop()
folder = sys.argv[1]
for name, whole in (("roots", False), ("open", True)):
    try:
        outfile.create(f"{folder}/{name}", whole=whole)
    except errors.FileError as e:
        print(e)
outfile.write(f"{folder}/open", b"new")  # cannot be replaced in a sticky folder, but may be written
""",
        str(tmp_path),
    )
    assert done.stderr == ""
    first, second = done.stdout.splitlines()
    assert first == f"{tmp_path}/roots: this user may not write it: `chmod u+w` it, or name another"
    assert second.startswith(f"{tmp_path}/open: belongs to another user (uid 0) in a sticky folder")
    assert (tmp_path / "open").read_bytes() == b"new"
    assert (tmp_path / "open").stat().st_uid == 0


def test_a_swap_at_the_last_moment_does_not_put_another_file_at_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fd_guard: None
) -> None:
    """As who may write to the folder, and not to what this user alone may, could do between any two calls."""
    shared, victim = tmp_path / "shared", tmp_path / "victim"
    shared.mkdir(0o777)
    victim.write_bytes(b"secret")
    real, swaps = os.rename, 0

    def swapping(source: str, target: str, **options: int) -> None:
        nonlocal swaps
        for name in listing(shared):
            if name.startswith(".nobounce-"):
                swaps += 1
                real(shared / name, shared / f"taken-{swaps}")
                (shared / name).symlink_to(victim)
        real(source, target, **options)

    (shared / "out").write_bytes(b"old")
    monkeypatch.setattr(os, "rename", swapping)
    put(shared / "out")
    assert swaps
    assert not (shared / "out").is_symlink()
    assert ((shared / "out").read_bytes(), victim.read_bytes()) == (b"new", b"secret")


def test_without_modes_a_file_has_the_name_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fd_guard: None
) -> None:
    """vfat gives every folder the mode that it was mounted with."""
    real = os.mkdir
    monkeypatch.setattr(os, "mkdir", lambda name, mode=0o777, **options: real(name, 0o755, **options))
    for data in (b"one", b"two"):
        put(tmp_path / "out", data)
        assert (tmp_path / "out").read_bytes() == data
        assert listing(tmp_path) == ["out"]
