"""K2: registered files and their second descriptor."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from capabilities import need, tool
from hipfile_rig import BLOCK, OK, Rig, fails, pattern
from nobounce import hipfile
from nobounce.facts import statx
from nobounce.facts.source import LiveSource
from nobounce.hipfile.driver import STATE
from nobounce.route.scores import alignments
from situations import EXT4, request


def _flags(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_GETFL)


def _twin(handle: int, flavour: str) -> int:
    return STATE.files[handle]._fds[flavour]


@contextmanager
def _open_fails(monkeypatch: pytest.MonkeyPatch, code: int) -> Iterator[None]:
    """Every reopening through /proc/self/fd fails with `code`."""
    real = os.open

    def opened(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).startswith("/proc/self/fd/"):
            raise OSError(code, os.strerror(code))
        return real(path, *args, **kwargs)

    with monkeypatch.context() as m:
        m.setattr(os, "open", opened)
        yield


def _statx(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    real = statx.statx
    monkeypatch.setattr("nobounce.facts.source.statx", lambda fd: real(fd)._replace(**changes))


def test_K022_register_fd(rig: Rig) -> None:
    fd = rig.fd()
    error, handle = hipfile.handle_register(hipfile.Descr(fd, hipfile.FileHandleType.OPAQUE_FD))
    assert error == OK
    assert isinstance(handle, int)
    assert handle in STATE.files


def test_K023_dup_fd_is_5028(rig: Rig) -> None:
    fd = rig.fd()
    rig.file_of(fd)
    assert hipfile.handle_register(fd) == (fails(5028), None)
    other = os.dup(fd)
    try:
        assert hipfile.handle_register(other)[0] == OK, "another number of the same file is another file"
    finally:
        hipfile.driver_close()
        os.close(other)


def test_K024_win32_is_5008(rig: Rig) -> None:
    descr = hipfile.Descr(rig.fd(), hipfile.FileHandleType.OPAQUE_WIN32)
    assert hipfile.handle_register(descr) == (fails(5008), None)
    assert hipfile.handle_register(hipfile.Descr(rig.fd(), 77)) == (fails(5008), None)


def test_K025_userspace_fs_is_5008(rig: Rig) -> None:
    descr = hipfile.Descr(rig.fd(), hipfile.FileHandleType.USERSPACE_FS)
    assert hipfile.handle_register(descr) == (fails(5008), None)
    assert hipfile.use_count() == 0


def test_K026_statx_error_is_5030(rig: Rig, monkeypatch: pytest.MonkeyPatch, fd_guard: None) -> None:
    def broken(fd: int) -> statx.Statx:
        raise OSError(errno.EIO, "statx")

    fd = rig.fd()
    with monkeypatch.context() as m:
        m.setattr("nobounce.facts.source.statx", broken)
        assert hipfile.handle_register(fd) == (fails(5030), None)
    assert hipfile.handle_register(fd)[0] == OK
    rig.close()
    hipfile.driver_close()


def test_K027_fcntl_error_is_5030(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, command: int, *rest: int) -> int:
        raise OSError(errno.EBADF, "fcntl")

    fd = rig.fd()
    with monkeypatch.context() as m:
        m.setattr(fcntl, "fcntl", broken)
        assert hipfile.handle_register(fd) == (fails(5030), None)
    assert hipfile.handle_register(fd)[0] == OK


def test_K028_mount_table_error_is_5030(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LiveSource.read_bytes

    def broken(self: LiveSource, path: str, limit: int = 1 << 24) -> bytes:
        if path.endswith("/mountinfo"):
            raise OSError(errno.EACCES, "mountinfo")
        return real(self, path, limit)

    fd = rig.fd()
    with monkeypatch.context() as m:
        m.setattr(LiveSource, "read_bytes", broken)
        assert hipfile.handle_register(fd) == (fails(5030), None)
    assert hipfile.handle_register(fd)[0] == OK


def test_K029_bad_fd_is_5030(rig: Rig) -> None:
    fd = os.open(rig.folder, os.O_RDONLY)
    os.close(fd)
    for bad in (-1, fd, 1 << 20):
        assert hipfile.handle_register(bad) == (fails(5030), None)
    assert hipfile.use_count() == 0


def test_K030_deregister_unknown_is_silent(rig: Rig) -> None:
    handle = rig.file()
    for unknown in (None, 0, -1, handle + 1):
        hipfile.handle_deregister(unknown)
    assert handle in STATE.files
    hipfile.handle_deregister(handle)
    hipfile.handle_deregister(handle)
    assert handle not in STATE.files


def test_K031_deregister_with_outstanding_operations_keeps_the_file(rig: Rig) -> None:
    data = pattern(BLOCK)
    handle, memory, stream, done = rig.file(data), rig.memory(BLOCK), rig.stream(), hipfile.Cell()
    with rig.held(stream):
        assert hipfile.read_async(handle, memory.handle, BLOCK, 0, 0, done, stream) == OK
        hipfile.handle_deregister(handle)
        assert handle in STATE.files
    rig.sync(stream)
    assert done.value == BLOCK
    hipfile.handle_deregister(handle)
    assert handle not in STATE.files


def test_K032_a_direct_client_gets_a_buffered_twin(rig: Rig) -> None:
    fd = rig.fd(flags=os.O_RDWR | os.O_DIRECT)
    handle = rig.file_of(fd)
    assert _twin(handle, "direct") == fd
    twin = _twin(handle, "buffered")
    assert twin != fd
    assert not _flags(twin) & os.O_DIRECT
    assert os.fstat(twin).st_ino == os.fstat(fd).st_ino


@pytest.mark.parametrize("mode", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR])
def test_K033_a_buffered_client_gets_a_direct_twin(rig: Rig, mode: int) -> None:
    fd = rig.fd(flags=mode)
    handle = rig.file_of(fd)
    assert _twin(handle, "buffered") == fd
    twin = _twin(handle, "direct")
    assert _flags(twin) & os.O_DIRECT
    assert _flags(twin) & os.O_ACCMODE == mode
    assert not _flags(fd) & os.O_DIRECT, "the client's own flags stay as they are"


def test_K034_the_twin_is_closed_on_exec(rig: Rig) -> None:
    for flags in (os.O_RDWR, os.O_RDWR | os.O_DIRECT, os.O_RDWR | os.O_CLOEXEC):
        fd = rig.fd(flags=flags)
        handle = rig.file_of(fd)
        (twin,) = set(STATE.files[handle]._fds.values()) - {fd}
        assert fcntl.fcntl(twin, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_K035_deregistering_closes_the_twin_and_not_the_clients_fd(rig: Rig) -> None:
    fd = rig.fd()
    handle = rig.file_of(fd)
    twin = _twin(handle, "direct")
    hipfile.handle_deregister(handle)
    os.fstat(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(twin)


def test_K036_einval_on_the_twin_means_no_direct_fd(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = rig.fd(pattern(BLOCK))
    with _open_fails(monkeypatch, errno.EINVAL):
        error, handle = hipfile.handle_register(fd)
    assert error == OK
    memory = rig.memory(BLOCK)
    _, scores = hipfile.score(handle, memory.handle, BLOCK, 0, 0)
    assert scores is not None
    assert scores.fastpath.value == -1
    assert "no-direct-descriptor" in [r.code for r in scores.fastpath.refusals]
    assert hipfile.read(handle, memory.handle, BLOCK, 0, 0) == BLOCK


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE, errno.ENOENT])
def test_K037_another_errno_on_the_twin_is_an_error(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    fd = rig.fd()
    with _open_fails(monkeypatch, code):
        assert hipfile.handle_register(fd) == (fails(5030), None)
    os.fstat(fd)
    assert hipfile.use_count() == 0


def _aligned(rig: Rig) -> tuple[int, int]:
    handle = rig.file(pattern(BLOCK))
    facts = STATE.files[handle].facts()
    return alignments(
        request(file={"dio_mem_align": facts.dio_mem_align, "dio_offset_align": facts.dio_offset_align})
    )


def test_K038_memory_alignment_is_statxs(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    _statx(monkeypatch, dio_mem_align=8, dio_offset_align=512)
    assert _aligned(rig)[0] == 8


def test_K039_offset_alignment_is_statxs(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    _statx(monkeypatch, dio_mem_align=8, dio_offset_align=512)
    assert _aligned(rig)[1] == 512


def test_K040_without_dioalign_both_are_4096(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    _statx(monkeypatch, dio_mem_align=None, dio_offset_align=None)
    assert _aligned(rig) == (4096, 4096)


def test_K041_without_a_direct_fd_no_alignment_will_do(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = rig.fd(pattern(1 << 20))
    with _open_fails(monkeypatch, errno.EINVAL):
        _, handle = hipfile.handle_register(fd)
    memory = rig.memory(1 << 20)
    for nbytes in (512, 4096, 1 << 20):
        _, scores = hipfile.score(handle, memory.handle, nbytes, 0, 0)
        assert scores is not None
        assert scores.fastpath.value == -1


def test_K042_block_device_flag(rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert STATE.files[rig.file()].facts().kind != "block"
    _statx(monkeypatch, mode=0)
    assert STATE.files[rig.file()].facts().kind == "other", "statx told no type"
    monkeypatch.undo()
    need("loop")
    with _loop(tmp_path) as device:
        fd = os.open(device, os.O_RDONLY)
        try:
            handle = rig.file_of(fd)
            assert STATE.files[handle].facts().kind == "block"
        finally:
            hipfile.driver_close()
            os.close(fd)


@contextmanager
def _loop(folder: Path) -> Iterator[str]:
    import subprocess

    image = folder / "image"
    image.write_bytes(bytes(1 << 20))
    attach = [tool("losetup"), "--find", "--show", str(image)]
    device = subprocess.run(attach, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    try:
        yield device
    finally:
        subprocess.run([tool("losetup"), "--detach", device], check=True, timeout=60)


def test_K043_regular_file_flag(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert STATE.files[rig.file()].facts().kind == "regular"
    reader, writer = os.pipe()
    folder = os.open(rig.folder, os.O_RDONLY)
    try:
        for fd, kind in ((reader, "fifo"), (writer, "fifo"), (folder, "directory")):
            handle = rig.file_of(fd)
            assert STATE.files[handle].facts().kind == kind
    finally:
        hipfile.driver_close()
        for fd in (reader, writer, folder):
            os.close(fd)
    _statx(monkeypatch, mode=stat.S_IMODE(0o644))
    assert STATE.files[rig.file()].facts().kind == "other"


def _fastpath(fstype: str, journal: str | None) -> bool:
    from nobounce.config import Settings
    from nobounce.hipfile import whole

    system = replace(EXT4, fstype=fstype, journal=journal)
    asked = request(file={"filesystem": system}, memory={"device": "sim:0"})
    return whole.score(whole.adapt(asked, Settings())).fastpath.value == 100


def test_K044_ext4_ordered_flag() -> None:
    assert _fastpath("ext4", "ordered")
    assert not _fastpath("ext4", "journal")
    assert not _fastpath("ext3", None)


def test_K045_xfs_flag() -> None:
    assert _fastpath("xfs", None)
    assert not _fastpath("xfs2", None)


def test_opening_more_than_two_descriptors_per_file_is_not_needed(rig: Rig) -> None:
    """A-30: the client's and the twin."""
    fd = rig.fd()
    before = len(os.listdir("/proc/self/fd"))
    rig.file_of(fd)
    assert len(os.listdir("/proc/self/fd")) == before + 1
