"""Mode of a written file (huggingface_hub#1141): a new one as cp(1) makes it, an old one keeps owner, mode and access list."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from capabilities import as_nobody, need, open_up
from nobounce.cli.main import app


@pytest.fixture(params=[0o022, 0o077, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def nobounce(*words: str | Path) -> None:
    done = CliRunner().invoke(app, [str(w) for w in words])
    assert done.exit_code == 0, done.stderr


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mode", [0o644, 0o600, 0o775, 0o444, 0o4755])
def test_a_new_dest_has_the_mode_that_cp_gives(tmp_path: Path, umask: int, mode: int) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"new" * 5000)
    source.chmod(mode)
    subprocess.run(["cp", source, tmp_path / "as-cp"], check=True, timeout=60)
    nobounce("cp", source, tmp_path / "dest", "--device", "cpu")
    assert mode_of(tmp_path / "dest") == mode_of(tmp_path / "as-cp")
    assert (tmp_path / "dest").read_bytes() == source.read_bytes()


def test_in_a_folder_with_a_default_list_too(tmp_path: Path, umask: int) -> None:
    need("setfacl")
    subprocess.run(["setfacl", "-d", "-m", "u:daemon:rwx,g::r,o::-", tmp_path], check=True, timeout=60)
    (tmp_path / "source").write_bytes(b"new")
    (tmp_path / "source").chmod(0o644)
    subprocess.run(["cp", tmp_path / "source", tmp_path / "as-cp"], check=True, timeout=60)
    nobounce("cp", tmp_path / "source", tmp_path / "dest", "--device", "cpu")
    lists = [os.getxattr(tmp_path / n, "system.posix_acl_access") for n in ("dest", "as-cp")]
    assert lists[0] == lists[1]


def test_an_old_dest_keeps_owner_mode_and_list(tmp_path: Path, umask: int) -> None:
    need("root", "setfacl")
    (tmp_path / "source").write_bytes(b"new")
    dest = tmp_path / "dest"
    dest.write_bytes(b"old")
    os.chown(dest, 65534, 12)
    dest.chmod(0o660)
    subprocess.run(["setfacl", "-m", "u:daemon:r", dest], check=True, timeout=60)
    before, listed = dest.stat(), os.getxattr(dest, "system.posix_acl_access")
    nobounce("cp", tmp_path / "source", dest, "--device", "cpu")
    after = dest.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert os.getxattr(dest, "system.posix_acl_access") == listed
    assert dest.read_bytes() == b"new"


def test_where_owner_and_group_may_not_be_given_nobody_gains_anything(tmp_path: Path) -> None:
    open_up(tmp_path)
    tmp_path.chmod(0o777)
    for name, mode in (("wide", 0o666), ("group", 0o662)):
        (tmp_path / name).write_bytes(b"old")
        (tmp_path / name).chmod(mode)
    code = """
import sys
from nobounce import outfile
drop()
for name in sys.argv[1:]:
    outfile.write(name, b"new")
"""
    assert as_nobody(code, str(tmp_path / "wide"), str(tmp_path / "group")).stderr == ""
    assert mode_of(tmp_path / "wide") == 0o666
    assert mode_of(tmp_path / "group") == 0o622  # its readers were root's group; now they would be another
    assert (tmp_path / "group").read_bytes() == b"new"


def test_reports_honour_the_umask_and_traces_and_captures_are_private(tmp_path: Path, umask: int) -> None:
    (tmp_path / "data").write_bytes(bytes(4096))
    trace, page, capture = tmp_path / "t.json", tmp_path / "page.html", tmp_path / "c.tar"
    for old in (False, True):
        if old:
            for path in (trace, page, capture):
                path.chmod(0o664)
        nobounce(
            "trace", "-o", trace, "--", "nobounce", "cp", tmp_path / "data", tmp_path / "d", "--device", "cpu"
        )
        nobounce("report", trace, "--no-measure", "-o", page)
        CliRunner().invoke(app, ["check", str(tmp_path / "data"), "-d", "cpu", "--capture", str(capture)])
        assert mode_of(trace) == mode_of(capture) == 0o600
        assert mode_of(page) == (0o664 if old else 0o666 & ~umask)
