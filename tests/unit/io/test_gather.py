"""Reads of a batch that are gathered: what the page cache holds, many at once, in place or by bounce slots."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nobounce
from capabilities import need
from nobounce.facts.pagecache import counted, drop
from nobounce.io.batch import relays
from nobounce.io.movers import gather, uring
from nobounce.io.strategy import SAMPLED_ROWS

PAGE = 4096
NBYTES = 3 * (1 << 20) + 777
DATA = np.random.default_rng(3).integers(0, 256, NBYTES, np.uint8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gather") / "data.bin"
    path.write_bytes(DATA.tobytes())
    return path


def by_calls() -> gather.AtOnce:
    return gather.AtOnce(gather.CallBlocks())


@pytest.fixture(params=["ring", "polled", "calls"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "calls":
        monkeypatch.setattr("nobounce.io.batch.gather.blocks", by_calls)
    else:
        need("io_uring")
    if request.param == "polled":
        monkeypatch.setenv("NOBOUNCE_RELAY", "polled")
    return str(request.param)


@pytest.fixture
def read_windows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests each window has read, and that none went another way."""
    seen: list[int] = []
    plain = relays.Reading

    def noted(window: Any, *rest: Any) -> Any:
        seen.append(len(window.nbytes))
        return plain(window, *rest)

    monkeypatch.setattr(relays, "Reading", noted)
    return seen


def warm(path: Path) -> None:
    path.read_bytes()


def read_all(
    device: str, path: Path, rows: Any, cache: str, **more: Any
) -> tuple[Any, Any, nobounce.Receipt]:
    """(the buffer's bytes, the result, the receipt) of rows of (file_offset, nbytes, buffer_offset)."""
    at, nbytes, to = (np.array(c, np.int64) for c in zip(*rows, strict=True))
    size = max(1, int((nbytes + to).max()))
    with nobounce.open(path) as f, nobounce.Device(device).allocate(size) as buffer:
        buffer.fill(0x5A, stream=None)
        with nobounce.Batch(capacity=len(rows)) as batch:
            batch.read(f, buffer, file_offsets=at, nbytes=nbytes, buffer_offsets=to, cache=cache, **more)  # type: ignore[arg-type]
            result = batch.wait()
        return buffer.numpy().copy(), result, batch.receipt


def expected(rows: Any, size: int) -> Any:
    wanted = np.full(size, 0x5A, np.uint8)
    for at, nbytes, to in rows:
        part = DATA[at : at + nbytes]
        wanted[to : to + len(part)] = part
    return wanted


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("cache", ["auto", "use"])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30), count=st.sampled_from([1, 2, 40, 300]), shuffled=st.booleans())
def test_every_block_lands_where_it_belongs(
    path: Path, by: str, device: str, cache: str, seed: int, count: int, shuffled: bool
) -> None:
    """Of any size and alignment, over the end of the file, with gaps between them and in any order."""
    rng = np.random.default_rng(seed)
    nbytes = rng.choice([0, 1, 7, 512, PAGE, PAGE + 1, 65536], count)
    at = rng.integers(0, NBYTES + 100, count)
    to = np.cumsum(nbytes + rng.choice([0, 0, 3, 4096], count)) - nbytes
    order = rng.permutation(count) if shuffled else np.arange(count)
    rows = [(int(at[i]), int(nbytes[i]), int(to[i])) for i in order]
    warm(path)
    got, result, receipt = read_all(device, path, rows, cache)
    assert result.ok
    moved = [len(DATA[a : a + n]) for a, n, _ in rows]
    assert dict(zip(result.ids.tolist(), result.nbytes.tolist(), strict=True)) == dict(enumerate(moved))
    assert receipt.nbytes == sum(moved)
    assert receipt.fastpath_bytes == 0
    assert set(receipt.reasons) <= {"cached" if cache == "auto" else "cache-use"}
    wanted = expected(rows, len(got))
    for (_, n, to_), m in zip(rows, moved, strict=True):  # behind a short read anything may stand
        got[to_ + m : to_ + n] = wanted[to_ + m : to_ + n]
    assert (got == wanted).all()


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_what_the_page_cache_holds_is_read_in_windows_of_many(
    path: Path, read_windows: list[int], device: str
) -> None:
    warm(path)
    rows = [(n * PAGE, PAGE, n * PAGE) for n in range(700)]
    got, result, receipt = read_all(device, path, rows, "auto")
    assert (got == DATA[: 700 * PAGE]).all()
    assert result.backends == ["fallback"] * 700
    assert sum(read_windows) == 700
    assert len(read_windows) < 70
    assert receipt.host_traffic_bytes == (0 if device == "cpu" else 2 * 700 * PAGE)


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_blocks_that_are_not_cached_after_all_go_their_own_way_and_are_told_apart(
    path: Path, device: str, by: str
) -> None:
    """Of many blocks a few are asked for; the receipt still says of every byte where it came from."""
    count = NBYTES // PAGE
    gone = [n for n in range(7, count, 43) if n % (count // SAMPLED_ROWS)]  # none of the few
    with nobounce.open(path) as f:
        fd = f.fileno()
        os.fdatasync(fd)
        drop(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # a page is read alone
        for n in set(range(count)) - set(gone):
            os.pread(fd, 1, n * PAGE)
        absent = [n for n in range(count) if counted(fd, n * PAGE, PAGE).resident_bytes == 0]
    assert absent
    assert set(absent) <= set(gone)  # the kernel may have read one more page than it was asked for
    rows = [(n * PAGE, PAGE, n * PAGE) for n in range(count)]
    got, result, receipt = read_all(device, path, rows, "auto")
    assert result.ok
    assert (got == DATA[: count * PAGE]).all()
    assert receipt.nbytes == count * PAGE
    # A missed block makes the kernel read its neighbours ahead, so a few of the others may have come back by their turn.
    # Two threads of the kernel may so bring all of them back for each other.
    direct = receipt.reasons.get("direct", 0)
    assert direct <= len(absent) * PAGE
    assert direct or by == "polled"
    assert receipt.reasons["cached"] == count * PAGE - direct
    ways = dict(zip(result.ids.tolist(), result.backends, strict=True))
    assert {n for n, way in ways.items() if way != "fallback"} <= set(absent)


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_cold_blocks_are_not_read_through_the_page_cache(path: Path, device: str) -> None:
    with nobounce.open(path) as f:
        os.fdatasync(f.fileno())
        drop(f.fileno())
        assert counted(f.fileno(), 0, NBYTES).resident_bytes == 0
        rows = [(n * PAGE, PAGE, n * PAGE) for n in range(600)]
        got, _, receipt = read_all(device, path, rows, "auto")
        assert (got == DATA[: 600 * PAGE]).all()
        assert receipt.fastpath_bytes == receipt.nbytes
        assert counted(f.fileno(), 0, NBYTES).resident_bytes == 0


def test_a_file_system_that_cannot_be_asked_is_read_without_asking(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FUSE and overlay answer RWF_NOWAIT with EOPNOTSUPP."""
    plain, flagged = gather.CallBlocks.read, []

    def refusing(self: Any, reads: Any) -> Any:
        flagged.append(bool((reads[:, 3] >> np.uint64(32)).any()))
        if flagged[-1]:
            return np.full(len(reads), -errno.EOPNOTSUPP, np.int64)
        return plain(self, reads)

    monkeypatch.setattr(gather.CallBlocks, "read", refusing)
    monkeypatch.setattr("nobounce.io.batch.gather.blocks", by_calls)
    count = 500
    with nobounce.open(path) as f:  # every page but two, which are none of the few that are asked for
        os.fdatasync(f.fileno())
        drop(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for n in set(range(count)) - {9, 77}:
            os.pread(f.fileno(), 1, n * PAGE)
    rows = [(n * PAGE, PAGE, n * PAGE) for n in range(count)]
    got, result, receipt = read_all("cpu", path, rows, "auto")
    assert result.ok
    assert (got == DATA[: count * PAGE]).all()
    assert any(flagged)
    assert not all(flagged)
    assert receipt.reasons == {"cached": (count - 2) * PAGE, "direct": 2 * PAGE}


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_one_bad_block_of_many_fails_alone_and_is_named(
    path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = gather.CallBlocks.read

    def one_bad(self: Any, reads: Any) -> Any:
        results = plain(self, reads)
        results[reads[:, 1] == 123 * PAGE] = -errno.EIO
        return results

    monkeypatch.setattr(gather.CallBlocks, "read", one_bad)
    monkeypatch.setattr("nobounce.io.batch.gather.blocks", by_calls)
    warm(path)
    rows = [(n * PAGE, PAGE, n * PAGE) for n in range(600)]
    got, result, receipt = read_all(device, path, rows, "use")
    assert list(result.errors) == [123]
    error = result.errors[123]
    assert isinstance(error, nobounce.TransferError)
    assert (error.errno, error.file_offset, error.nbytes, error.backend) == (
        errno.EIO,
        123 * PAGE,
        PAGE,
        "fallback",
    )
    assert receipt.nbytes == 599 * PAGE
    wanted = DATA[: 600 * PAGE].copy()
    wanted[123 * PAGE : 124 * PAGE] = got[123 * PAGE : 124 * PAGE]
    assert (got == wanted).all()


def test_what_was_added_and_submitted_is_read_without_anybody_waiting(path: Path) -> None:
    warm(path)
    with (
        nobounce.open(path) as f,
        nobounce.Device("cpu").allocate(100 * PAGE) as buffer,
        nobounce.Batch() as batch,
    ):
        batch.read(f, buffer, file_offsets=np.arange(100) * PAGE, nbytes=PAGE, cache="use")
        batch.submit()
        while len(batch.wait(min_n=0)) == 0:
            pass


def test_few_blocks_start_no_thread_where_their_caller_waits(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nobounce.io.engine import Engine

    monkeypatch.setattr(Engine, "submit", lambda *_: pytest.fail("the pool was asked"))
    warm(path)
    got, _, _ = read_all("cpu", path, [(n * PAGE, PAGE, n * PAGE) for n in range(8)], "auto")
    assert (got == DATA[: 8 * PAGE]).all()


def test_rings_are_kept_for_the_next_reads(path: Path) -> None:
    need("io_uring")
    warm(path)
    rows = [(n * PAGE, PAGE, n * PAGE) for n in range(500)]
    read_all("cpu", path, rows, "use")
    kept = list(gather._kept)
    assert kept
    for _ in range(5):
        read_all("cpu", path, rows, "use")
    assert len(gather._kept) <= gather.KEPT_RINGS
    assert any(ring in gather._kept for ring in kept)
    assert all(isinstance(ring, uring.Ring) and ring.in_flight == 0 for ring in gather._kept)


def test_a_timeout_of_a_gathered_read_is_reported_and_its_row_stays_as_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    go, plain = threading.Event(), gather.CallBlocks.read

    def held(self: Any, *given: Any) -> Any:
        assert go.wait(30)
        return plain(self, *given)

    monkeypatch.setattr(gather.CallBlocks, "read", held)
    monkeypatch.setattr("nobounce.io.batch.gather.blocks", by_calls)
    warm(path)
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(PAGE) as buffer:
        batch = nobounce.Batch()
        batch.read(f, buffer, file_offsets=0, nbytes=PAGE, cache="use", timeout=0.05)
        result = batch.wait()
        assert result.statuses == ["timeout"]
        assert isinstance(result.errors[0], nobounce.TransferTimeoutError)
        with pytest.raises(nobounce.BusyError):
            buffer.close()
        go.set()
        batch.close()
        assert batch.receipt.nbytes == PAGE


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_one_call_reads_many_blocks_of_a_file(path: Path, device: str) -> None:
    warm(path)
    at = np.random.default_rng(1).permutation(NBYTES // PAGE)[:300] * PAGE
    with nobounce.open(path) as f, nobounce.Device(device).allocate(300 * PAGE) as buffer:
        receipt = f.read_many(buffer, file_offsets=at, nbytes=PAGE)
        assert receipt.nbytes == 300 * PAGE
        assert buffer.numpy().tobytes() == b"".join(DATA[a : a + PAGE].tobytes() for a in at.tolist())
        assert f.read_many(buffer, file_offsets=[], nbytes=PAGE).nbytes == 0
        assert f.read_many(buffer, file_offsets=7, nbytes=5, buffer_offsets=3).nbytes == 5
        with pytest.raises(nobounce.ArgumentError, match="nbytes") as caught:
            f.read_many(buffer, file_offsets=[0, 0, 0], nbytes=[1, -1, -2])
        assert any("1 more of the 3 blocks" in n for n in caught.value.__notes__)
        with pytest.raises(nobounce.ArgumentError, match="differ in length"):
            f.read_many(buffer, file_offsets=[0, 1], nbytes=[1, 2, 3])


def test_one_call_reads_many_files(tmp_path: Path) -> None:
    """Of some nothing is known yet, some are not in the page cache, one is asked for twice."""
    parts = [DATA[n * 5000 : n * 5000 + 4500 + n].tobytes() for n in range(20)]
    files = []
    for n, part in enumerate(parts):
        (tmp_path / str(n)).write_bytes(part)
        files.append(nobounce.open(tmp_path / str(n)))
    for n in (3, 4):
        os.fdatasync(files[n].fileno())
        drop(files[n].fileno())
    files[7].facts()
    index = [*range(20), 5]
    with nobounce.Device("cpu").allocate(21 * 5000) as buffer, nobounce.Batch() as batch:
        ids = batch.read(files, buffer, file_index=index, file_offsets=0, nbytes=5000)
        result = batch.wait().check()
        got = dict(zip(result.ids.tolist(), result.nbytes.tolist(), strict=True))
        assert [got[i] for i in ids.tolist()] == [len(parts[n]) for n in index]
        held = buffer.numpy().tobytes()
        assert all(held[k * 5000 :][: len(parts[n])] == parts[n] for k, n in enumerate(index))
        assert batch.receipt.reasons.keys() > {"cached"}
        assert batch.receipt.nbytes == sum(len(parts[n]) for n in index)
        with pytest.raises(nobounce.ArgumentError, match=r"file_index\[1\] is 20: there are 20 files"):
            batch.read(files, buffer, file_index=[0, 20], file_offsets=0, nbytes=1)
        with pytest.raises(nobounce.ArgumentError, match="no file_index"):
            batch.read(files, buffer, file_offsets=0, nbytes=1)
        with pytest.raises(nobounce.ArgumentError, match="for several files"):
            batch.read(files[0], buffer, file_index=0, file_offsets=0, nbytes=1)
    for f in files:
        f.close()


@pytest.mark.parametrize("call", ["copy", "record", "sync"])
def test_copies_that_the_device_refuses_fail_their_requests_and_lose_no_slot(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    from contextlib import nullcontext

    from nobounce.errors import RuntimeStatus
    from nobounce.io.engine import engine_for

    device = nobounce.Device("sim:0")
    runtime, plain = device._runtime, device._runtime.copy_calls
    left = [2]

    def copy_calls(ordinal: int) -> Any:
        with plain(ordinal) as calls:

            def broken(*given: Any) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    raise nobounce.DeviceError(call, RuntimeStatus.Unknown)
                return getattr(calls, call)(*given)

            return nullcontext(
                calls._replace(**{call: broken}, **({"copy_many": broken} if call == "copy" else {}))
            )

    warm(path)
    rows = [(n * PAGE, PAGE, n * PAGE) for n in range(700)]
    read_all("sim:0", path, rows, "use")
    ring = engine_for(runtime).rings.get(runtime, 0)
    before = ring._made, len(ring._free)
    monkeypatch.setattr(runtime, "copy_calls", copy_calls)
    monkeypatch.setattr("nobounce.io.strategy.GATHER_LEAST_NBYTES", 1 << 20)
    _, result, receipt = read_all("sim:0", path, rows, "use")
    assert 0 < len(result.errors) <= 700
    for error in result.errors.values():
        assert isinstance(error, nobounce.TransferError)
        assert (error.errno, error.backend) == (errno.EIO, "fallback")
        assert isinstance(error.__cause__, nobounce.DeviceError)
    assert receipt.nbytes == (700 - len(result.errors)) * PAGE
    assert (ring._made, len(ring._free)) == before
    monkeypatch.undo()
    got, result, _ = read_all("sim:0", path, rows, "use")
    assert result.ok
    assert (got == DATA[: 700 * PAGE]).all()


@pytest.mark.parametrize("place", [{"buffer_offsets": (1 << 63) - 1}, {"file_offsets": (1 << 63) - 1}])
def test_an_offset_past_every_sum_is_invalid_in_a_file_of_which_nothing_is_known(
    path: Path, place: dict[str, int]
) -> None:
    warm(path)
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(PAGE) as buffer, nobounce.Batch() as batch:
        batch.read(f, buffer, **{"file_offsets": 0, "buffer_offsets": 0, "nbytes": PAGE, **place})  # type: ignore[arg-type]
        assert batch.wait().statuses == ["invalid"]
