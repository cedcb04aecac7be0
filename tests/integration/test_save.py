"""Saving on real file systems: full ones, read-only ones, those without O_TMPFILE, and as another user."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

import nobounce
from capabilities import as_nobody, need, open_up
from filesystems import machine, mounted_tmpfs
from nobounce.errors import FileError

MIB = 1 << 20


@pytest.mark.parametrize("name", ["ext4-ordered", "xfs", "btrfs", "tmpfs", "overlay"])
def test_a_save_is_whole_on_every_file_system(tmp_path: Path, name: str) -> None:
    need("root")
    source = np.random.default_rng(1)
    tensors = {f"t{n}": source.integers(0, 256, n, dtype=np.uint8) for n in (1, 4096, 12 * MIB + 5, 5000)}
    with machine(tmp_path) as made:
        path = made.get(name) / "m"
        for _ in range(2):  # the second replaces the first
            receipt = nobounce.save(tensors, path)
            back = nobounce.load(path, device="cpu", framework="numpy")
            assert all(np.array_equal(back[n], t) for n, t in tensors.items())
        assert receipt.nbytes == path.stat().st_size
        assert [n for n in os.listdir(path.parent) if n.startswith((".nobounce", "m"))] == ["m"]


def test_a_disk_without_room_is_named_with_both_figures_before_anything_is_written(tmp_path: Path) -> None:
    need("root")
    with mounted_tmpfs(tmp_path, 4 * MIB) as where:
        nobounce.save({"w": np.ones(MIB, np.uint8)}, where / "m")
        status = os.statvfs(where)
        with pytest.raises(FileError) as caught:
            nobounce.save({"w": np.ones(8 * MIB, np.uint8)}, where / "m")
        assert caught.value.errno == errno.ENOSPC
        assert f"{8 * MIB + 4096} bytes are needed, {status.f_bavail * status.f_frsize} are free" in str(
            caught.value
        )
        assert os.listdir(where) == ["m"]
        assert nobounce.load(where / "m", device="cpu")["w"].nbytes == MIB


def test_a_read_only_file_system_is_named(tmp_path: Path) -> None:
    need("root")
    with mounted_tmpfs(tmp_path, MIB) as where, machine(tmp_path) as made:
        made.run("mount", "-o", "remount,ro", where)
        with pytest.raises(FileError, match="mounted read-only: name another") as caught:
            nobounce.save({"w": np.ones(5)}, where / "m")
        assert caught.value.errno == errno.EROFS


def test_a_folder_that_this_user_may_not_write_is_named(tmp_path: Path) -> None:
    open_up(tmp_path / "x")
    (tmp_path / "closed").mkdir()
    code = """
import sys
import nobounce, nobounce.formats.save, nobounce.outfile, nobounce.runtimes.host.cpu
import numpy as np
drop()
try:
    nobounce.save({"w": np.ones(3)}, sys.argv[1])
except nobounce.FilePermissionError as e:
    print(e)
"""
    done = as_nobody(code, str(tmp_path / "closed" / "m"))
    assert "Permission denied (EACCES)" in done.stdout, done.stderr
    assert os.listdir(tmp_path / "closed") == []
