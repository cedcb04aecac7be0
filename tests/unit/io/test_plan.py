"""What the page cache holds of a large range is looked at by several threads, and comes out as one thread finds it."""

from __future__ import annotations

import errno
import os
import random
from itertools import pairwise
from pathlib import Path

import pytest

from capabilities import need
from nobounce.facts import cachestat, pagecache
from nobounce.formats.opened import Opened
from nobounce.io import plan
from nobounce.io.engine import Engine
from nobounce.route.types import CachedRange

MIB = 1 << 20
NBYTES = 16 * MIB + 777


@pytest.fixture
def fd(tmp_path: Path):  # type: ignore[no-untyped-def]
    path = tmp_path / "x"
    path.write_bytes(os.urandom(NBYTES))
    opened = os.open(path, os.O_RDONLY)
    os.fsync(opened)
    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_RANDOM)
    yield opened
    os.close(opened)


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """cachestat is refused; the sizes of the ranges that are sampled instead."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EPERM, "refused")

    asked: list[int] = []
    plain = pagecache.sample
    monkeypatch.setattr(cachestat, "cached_nbytes", refuse)
    monkeypatch.setattr(
        pagecache, "sample", lambda fd, at, nbytes: (asked.append(nbytes), plain(fd, at, nbytes))[1]
    )
    return asked


@pytest.mark.parametrize("warm", [(0, 0), (0, NBYTES), (5 * MIB, 6 * MIB), (0, 8 * MIB)])
@pytest.mark.parametrize("where", [(0, NBYTES), (4099, 9 * MIB + 5)])
def test_in_parts_or_as_a_whole(
    fd: int, monkeypatch: pytest.MonkeyPatch, warm: tuple[int, int], where: tuple[int, int]
) -> None:
    need("cachestat")
    os.pread(fd, warm[1], warm[0])
    alone = plan.cached_ranges(fd, *where)
    monkeypatch.setattr(plan, "SHARED_NBYTES", 2 * MIB)
    monkeypatch.setattr(plan, "own_cpus", lambda: 16)
    pool = Engine()
    try:
        for _ in range(20):
            assert plan.cached_ranges(fd, *where, pool) == alone
    finally:
        pool.close()


def test_it_is_looked_at_as_a_whole_where_a_look_leaves_pages_behind(
    fd: int, sampled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling has the kernel read what it misses: eight parts would leave eight times as much."""
    monkeypatch.setattr(plan, "SHARED_NBYTES", 2 * MIB)
    os.pread(fd, NBYTES, 0)
    pool = Engine()
    try:
        assert plan.cached_ranges(fd, 0, NBYTES, pool) == (CachedRange(0, NBYTES, True),)
    finally:
        pool.close()
    assert sampled == [NBYTES]


def test_a_header_is_no_reason_to_sample_twice(tmp_path: Path, sampled: list[int]) -> None:
    """The second time would find what the first one had the kernel read, and leave it there."""
    path = tmp_path / "m.safetensors"
    header = b'{"a":{"dtype":"U8","shape":[4194304],"data_offsets":[0,4194304]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4 * MIB))
    Opened(str(path)).file.close()
    assert sampled == [path.stat().st_size]


def test_of_a_cached_file_the_header_s_reader_looks_at_the_head_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("cachestat")
    path = tmp_path / "m.safetensors"
    header = b'{"a":{"dtype":"U8","shape":[4194304],"data_offsets":[0,4194304]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4 * MIB))
    asked: list[int] = []
    plain = cachestat.cached_nbytes
    monkeypatch.setattr(
        cachestat, "cached_nbytes", lambda fd, at, nbytes: (asked.append(nbytes), plain(fd, at, nbytes))[1]
    )
    Opened(str(path)).file.close()
    assert asked == [MIB]


def test_what_is_mixed_is_looked_at_three_times_and_comes_out_window_by_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look takes as long as there are cached pages: halving would come by each page nine times in a GiB."""
    need("cachestat")
    windows = 100
    path = tmp_path / "mixed"
    path.write_bytes(bytes(windows * plan.WINDOW))
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        draw = random.Random(3)
        held = [n < 40 or (n < 80 and draw.random() < 0.5) for n in range(windows)]
        for n in (n for n in range(windows) if held[n]):
            os.pread(fd, plan.WINDOW, n * plan.WINDOW)
        asked: list[int] = []
        plain = cachestat.cached_nbytes
        monkeypatch.setattr(
            cachestat,
            "cached_nbytes",
            lambda fd, at, nbytes: (asked.append(nbytes), plain(fd, at, nbytes))[1],
        )
        found = plan.cached_ranges(fd, 0, windows * plan.WINDOW)
    finally:
        os.close(fd)
    assert sum(asked) <= 3 * windows * plan.WINDOW
    by_window = [r.resident for r in found for _ in range(r.nbytes // plan.WINDOW)]
    assert by_window == held
    assert [r.file_offset for r in found] == [sum(r.nbytes for r in found[:n]) for n in range(len(found))]
    assert all(a.resident is not b.resident for a, b in pairwise(found)), (
        "neighbours of one state are one range"
    )


def test_where_looks_are_samples_as_few_as_possible_are_made(fd: int, sampled: list[int]) -> None:
    """Each miss has the kernel read a page: one place where cached and uncached bytes meet is found by halving."""
    os.pread(fd, 5 * MIB, 0)
    found = plan.cached_ranges(fd, 0, NBYTES)
    assert sum(r.nbytes for r in found) == NBYTES
    assert len(sampled) <= 2 * 4 + 1, "not window by window"


def test_parts_are_looked_at_by_several_threads_where_they_come_to_much(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("cachestat")
    monkeypatch.setattr(plan, "SHARED_NBYTES", 2 * MIB)
    monkeypatch.setattr(plan, "PART", 4 * MIB)
    looks: list[int] = []
    plain = plan._Look.run

    def run(self: plan._Look, pool: Engine) -> list[int | None]:
        looks.append(len(self._ranges))
        return plain(self, pool)

    monkeypatch.setattr(plan._Look, "run", run)
    os.pread(fd, 6 * MIB, 0)
    pool = Engine()
    try:
        found = plan.cached_ranges(fd, 0, NBYTES, pool)
    finally:
        pool.close()
    assert found == (CachedRange(0, 6 * MIB, True), CachedRange(6 * MIB, NBYTES - 6 * MIB, False))
    assert looks == [5, 2], "the parts, once, and the windows of the one that is mixed"
