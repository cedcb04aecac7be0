"""Whether O_DIRECT means it, asked of file systems that do and that do not, as the kernel counts and where it refuses to."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest

from capabilities import need
from nobounce.facts import cachestat, probe
from nobounce.facts.mountstats import direct_bytes
from nobounce.facts.probe import BLOCK, probe_direct


class FileSystem:
    """One block of a file: O_DIRECT reads go past the page cache or, silently, through it."""

    def __init__(
        self, *, direct: bool, cached: bool = False, counts: bool = True, nbytes: int = BLOCK
    ) -> None:
        self.direct, self.cached, self.counts, self.nbytes = direct, cached, counts, nbytes
        self.read_bytes = 0
        self.sampled = 0

    def preadv(self, fd: int, buffers: list[object], offset: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            self.sampled += 1
            if not self.cached:
                self.cached = True  # Linux 6.18: what a sample missed is being read from then on
                raise BlockingIOError(errno.EAGAIN, "not cached")
            return 1
        if self.direct or not self.cached:
            self.read_bytes += -(-self.nbytes // 512) * 512
        self.cached = self.cached or not self.direct
        return self.nbytes

    def cached_nbytes(self, fd: int, file_offset: int, nbytes: int) -> int:
        if not self.counts:
            raise PermissionError(errno.EPERM, "not the caller's file")
        return BLOCK if self.cached else 0

    def thread_io(self) -> tuple[int, int]:
        return self.read_bytes, 0

    def asked(self, monkeypatch: pytest.MonkeyPatch) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", self.preadv)
            patch.setattr(probe, "_read", lambda fd, block, at: self.preadv(fd, [block], at))
            patch.setattr(cachestat, "cached_nbytes", self.cached_nbytes)
            patch.setattr(cachestat, "mapped_nbytes", lambda *_: None)
            patch.setattr(cachestat, "descriptor_type", lambda _: 0xEF53)
            patch.setattr(probe, "thread_io", self.thread_io)
            return probe_direct(7)


@pytest.mark.parametrize("nbytes", [BLOCK, 100])
@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("cached", [True, False])
def test_a_direct_file_is_found_direct_whoever_owns_it(
    cached: bool, counts: bool, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample before the read would start the page being read in, and the page would then look left behind."""
    system = FileSystem(direct=True, cached=cached, counts=counts, nbytes=nbytes)
    assert system.asked(monkeypatch) == "yes"
    assert system.sampled == 0, "a look that changes what is looked at"
    assert system.cached is cached


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("cached", [True, False])
def test_a_file_served_by_the_page_cache_is_never_found_direct(
    cached: bool, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert FileSystem(direct=False, cached=cached, counts=counts).asked(monkeypatch) == "no"


@pytest.mark.parametrize("counts", [True, False])
def test_nothing_follows_where_nothing_was_read_or_counted(
    counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert FileSystem(direct=True, counts=counts, nbytes=0).asked(monkeypatch) == "unknown"
    silent = FileSystem(direct=True, counts=counts)
    monkeypatch.setattr(silent, "thread_io", lambda: None)
    assert silent.asked(monkeypatch) == "unknown"
    answers = iter([(0, 0), (0, 0), None])
    monkeypatch.setattr(silent, "thread_io", lambda: next(answers))
    assert silent.asked(monkeypatch) == "unknown", "the counter could not be read after the read"


def test_an_error_of_the_read_is_no_direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "refused")

    system = FileSystem(direct=True)
    monkeypatch.setattr(system, "preadv", refuse)
    assert system.asked(monkeypatch) == "no"


def test_without_memory_for_a_block_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert FileSystem(direct=True).asked(monkeypatch) == "unknown"


@pytest.mark.parametrize("counts", [True, False])
def test_a_real_file_is_told_by_both_ways_alike(
    counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("o_direct")
    path = tmp_path / "x"
    path.write_bytes(os.urandom(BLOCK * 4))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
    if not counts:
        monkeypatch.setattr(cachestat, "cached_nbytes", FileSystem(direct=True, counts=False).cached_nbytes)
    try:
        assert probe_direct(direct) == "yes"
        assert probe_direct(fd) == "no", "a buffered descriptor"
    finally:
        os.close(direct)
        os.close(fd)


STATS = """device proc mounted on /proc with fstype proc
device nas:/a mounted on /mnt/a\\040b with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2
\tage:\t12
\tbytes:\t1 2 {} 4 5 6 7 8
device nas:/b mounted on /mnt/b with fstype nfs statvers=1.1
\topts:\tro
"""


def test_what_the_nfs_client_counts() -> None:
    assert direct_bytes(STATS.format(3), "/mnt/a b") == (3, 4)
    assert direct_bytes(STATS.format(3), "/mnt/b") is None, "it does not say"
    assert direct_bytes(STATS.format(3), "/proc") is None
    assert direct_bytes("", "/mnt/a b") is None


@pytest.mark.parametrize(("more", "answer"), [(BLOCK, "yes"), (0, "uncounted")])
def test_nfs_has_a_counter_of_its_own(more: int, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the thread's counter stands still and no page appears, the mount's decides; elsewhere nothing can."""
    system = FileSystem(direct=True)
    monkeypatch.setattr(system, "thread_io", lambda: (0, 0))
    totals = iter([(1000, 0), (1000 + more, 0)])
    monkeypatch.setattr(probe, "nfs_direct_bytes", lambda _: next(totals))
    with monkeypatch.context() as patch:
        patch.setattr(probe, "_read", lambda fd, block, at: system.preadv(fd, [block], at))
        patch.setattr(cachestat, "cached_nbytes", system.cached_nbytes)
        patch.setattr(cachestat, "descriptor_type", lambda _: 0x6969)
        patch.setattr(cachestat, "mapped_nbytes", lambda *_: None)
        patch.setattr(probe, "thread_io", system.thread_io)
        assert probe_direct(7, "/mnt/a") == answer
        assert probe_direct(7) == "uncounted"
