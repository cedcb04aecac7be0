"""What the page cache holds: by cachestat, by sampling, and what cannot be learnt."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from capabilities import need
from nobounce.facts import cachestat, pagecache
from nobounce.facts.pagecache import drop, residency, sample
from nobounce.facts.types import Residency

MIB = 1 << 20


@pytest.fixture
def fd(tmp_path: Path):  # type: ignore[no-untyped-def]
    path = tmp_path / "x"
    path.write_bytes(os.urandom(4 * MIB))
    opened = os.open(path, os.O_RDONLY)
    os.fsync(opened)
    yield opened
    os.close(opened)


def test_cold_warm_and_half(fd: int) -> None:
    need("cachestat")
    drop(fd)
    assert residency(fd, 0, 4 * MIB) == Residency(0, 4 * MIB, "cachestat")
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(fd, 2 * MIB, 0)
    half = residency(fd, 0, 4 * MIB).resident_bytes
    assert half is not None
    assert 2 * MIB <= half < 4 * MIB
    os.pread(fd, 4 * MIB, 0)
    assert residency(fd, 0, 4 * MIB).resident_bytes == 4 * MIB
    assert residency(fd, 0, 5).resident_bytes == 5, "never more than was asked about"


def test_an_empty_range_holds_nothing(fd: int) -> None:
    assert residency(fd, 0, 0) == Residency(0, 0, "cachestat")


def test_samples_stand_in_where_cachestat_is_refused(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(errno.EPERM, "refused")

    monkeypatch.setattr(cachestat, "cached_nbytes", refuse)
    os.pread(fd, 4 * MIB, 0)
    assert pagecache.residency(fd, 0, 4 * MIB) == Residency(4 * MIB, 4 * MIB, "nowait")
    drop(fd)
    assert pagecache.residency(fd, 0, 4 * MIB).resident_bytes == 0


def test_a_missed_sample_is_not_met_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel starts to read what a sample missed: at fixed places a cold file would look cached the second time."""
    being_read: set[int] = set()

    def preadv(fd: int, buffers: object, offset: int, flags: int) -> int:
        page = offset // 4096
        assert page not in being_read, "a page asked twice"
        being_read.add(page)
        raise BlockingIOError(errno.EAGAIN, "not cached")

    monkeypatch.setattr(os, "preadv", preadv)
    assert sample(7, 0, 4096) == Residency(0, 4096, "nowait")
    being_read.clear()
    assert sample(7, 8192 + 5, 3 * 4096 + 1).resident_bytes == 0
    being_read.clear()
    for _ in range(20):
        assert sample(7, 0, 1 << 50).resident_bytes == 0
    assert len(being_read) == 20 * pagecache.SAMPLES


def test_where_neither_works_a_mapping_is_asked_unless_it_lies(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux before 6.5 with a file on overlay: no cachestat, no RWF_NOWAIT."""

    def refuse(*arguments: object) -> int:
        raise OSError(errno.EOPNOTSUPP, "refused")

    monkeypatch.setattr(cachestat, "cached_nbytes", refuse)
    monkeypatch.setattr(os, "preadv", refuse)
    drop(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    assert residency(fd, 0, 4 * MIB) == Residency(0, 4 * MIB, "mincore")
    os.pread(fd, MIB, MIB)
    assert residency(fd, 0, 4 * MIB).resident_bytes == MIB
    assert residency(fd, MIB + 5, 100) == Residency(100, 100, "mincore")
    assert residency(fd, 3 * MIB, 1 << 40).resident_bytes == 0, "past the end of the file is nothing"
    monkeypatch.setattr(cachestat, "_present", lambda fd, offset, nbytes: -(-nbytes // 4096))
    assert residency(fd, 0, 4 * MIB) == Residency(None, 4 * MIB, "unknown")


def test_an_interpreter_without_preadv2_cannot_sample(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "RWF_NOWAIT")
    assert sample(fd, 0, 4096) == Residency(None, 4096, "unknown")


def test_what_cannot_be_sampled_is_unknown() -> None:
    read, write = os.pipe()
    try:
        assert sample(read, 0, 4096) == Residency(None, 4096, "unknown")
        with pytest.raises(OSError) as caught:
            cachestat.mapped_nbytes(read, 0, 4096)
        assert caught.value.errno == errno.ENODEV
    finally:
        os.close(read)
        os.close(write)


def test_an_estimate_looks_at_a_few_places_of_a_large_range(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    need("cachestat")
    monkeypatch.setattr(pagecache, "PLACE_NBYTES", 4096)
    asked: list[int] = []
    plain = cachestat.cached_nbytes

    def count(descriptor: int, file_offset: int, nbytes: int) -> int:
        asked.append(nbytes)
        return plain(descriptor, file_offset, nbytes)

    monkeypatch.setattr(cachestat, "cached_nbytes", count)
    drop(fd)
    assert pagecache.estimate(fd, 0, 4 * MIB) == 0
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(fd, 2 * MIB, 0)
    assert 0.4 < pagecache.estimate(fd, 0, 4 * MIB) < 0.7
    os.pread(fd, 4 * MIB, 0)
    assert pagecache.estimate(fd, 0, 4 * MIB) == 1
    assert sum(asked) == 3 * 32 * 4096
    assert pagecache.estimate(fd, MIB, 4096) == 1
    assert pagecache.estimate(fd, 0, 0) == 0


def test_an_estimate_samples_no_more_than_a_question_where_pages_are_not_counted(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each missed sample has the kernel read something."""

    def refuse(*arguments: object) -> int:
        raise OSError(errno.EPERM, "refused")

    monkeypatch.setattr(cachestat, "cached_nbytes", refuse)
    monkeypatch.setattr(pagecache, "PLACE_NBYTES", 4096)
    seen: list[int] = []
    plain = pagecache.sample

    def sampled(descriptor: int, file_offset: int, nbytes: int) -> Residency:
        seen.append(nbytes)
        return plain(descriptor, file_offset, nbytes)

    monkeypatch.setattr(pagecache, "sample", sampled)
    os.pread(fd, 4 * MIB, 0)
    assert pagecache.estimate(fd, 0, 4 * MIB) == 1
    assert seen == [4 * MIB]
