"""A model's first allocation is made while its header is read; whatever becomes of it, a load does as without."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import nobounce
from capabilities import need
from nobounce import buffer
from nobounce.clock import THREADS
from nobounce.errors import FormatError, OutOfMemoryError
from nobounce.formats import load, slab
from nobounce.io import prepare
from nobounce.io.engine import engine_for

NBYTES = 1 << 20


class Watch:
    """Every allocation of device memory: its size, the thread, and whether it has been closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[int, str]] = []
        self.buffers: list[nobounce.Buffer] = []
        self.fail = 0
        plain = buffer.allocate

        def allocate(device: nobounce.Device, nbytes: int, **k: Any) -> nobounce.Buffer:
            self.made.append((nbytes, threading.current_thread().name))
            if self.fail:
                self.fail -= 1
                raise OutOfMemoryError(f"no {nbytes} bytes")
            made = plain(device, nbytes, **k)
            self.buffers.append(made)
            return made

        monkeypatch.setattr(buffer, "allocate", allocate)
        monkeypatch.setattr(slab, "LEAST_NBYTES", 4096)
        monkeypatch.setattr(slab, "AWAKE_SECONDS", 30.0)  # a busy machine wakes it late

    def threads(self) -> list[bool]:
        """Of each allocation, whether a thread of the pool made it."""
        return [name.startswith("nobounce-io") for _, name in self.made]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def save(path: Path, **arrays: Any) -> Path:
    need("safetensors")
    from safetensors.numpy import save_file

    save_file(arrays, path)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(tmp_path / "m.safetensors", a=np.arange(NBYTES // 4, dtype=np.float32))


def is_whole(model: load.Model) -> bool:
    return bool((np.asarray(model["a"].numpy()) == np.arange(NBYTES // 4, dtype=np.float32)).all())


def test_the_pool_allocates_while_the_header_is_read(path: Path, watch: Watch) -> None:
    model = nobounce.load(path, device="sim:0")
    assert is_whole(model)
    assert watch.threads() == [True]


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_small_files_and_host_memory_are_allocated_when_they_are_needed(
    path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    if device == "sim:0":
        monkeypatch.setattr(slab, "LEAST_NBYTES", 2 * NBYTES)
    assert is_whole(nobounce.load(path, device=device))
    assert watch.threads() == [False]


def test_only_the_first_file_is_known_ahead(tmp_path: Path, watch: Watch) -> None:
    for n in range(3):
        save(tmp_path / f"{n}.safetensors", **{f"t{n}": np.full(NBYTES, n, np.uint8)})
    model = nobounce.load(sorted(tmp_path.iterdir()), device="sim:0")
    assert [int(model[f"t{n}"].numpy()[-1]) for n in range(3)] == [0, 1, 2]
    assert watch.threads() == [True, False, False]


def test_a_bad_header_is_reported_and_the_memory_given_back(path: Path, watch: Watch) -> None:
    data = bytearray(path.read_bytes())
    data[8:12] = b"{]{]"
    path.write_bytes(data)
    with pytest.raises(FormatError):
        nobounce.load(path, device="sim:0")
    assert watch.threads() == [True]
    assert all(b.is_closed for b in watch.buffers)


def test_where_tensors_must_move_more_memory_is_taken(path: Path, watch: Watch) -> None:
    """They are as many bytes as the file says, but not in its places."""
    odd = save(
        path.with_name("odd.safetensors"), a=np.zeros(NBYTES // 4, np.float32), b=np.zeros(3, np.uint8)
    )
    model = nobounce.load(odd, device="sim:0", align=4096)
    assert len(model) == 2
    assert watch.threads()[:2] == [True, False]
    assert watch.made[0][0] != watch.made[1][0]
    assert watch.buffers[0].is_closed


def test_out_of_memory_is_raised_by_the_load_itself(path: Path, watch: Watch) -> None:
    watch.fail = 2
    with pytest.raises(OutOfMemoryError, match="no 1052672 bytes"):
        nobounce.load(path, device="sim:0")
    assert watch.threads() == [True, False]


def test_memory_that_was_short_a_moment_ago_is_asked_for_again(path: Path, watch: Watch) -> None:
    watch.fail = 1
    assert is_whole(nobounce.load(path, device="sim:0"))
    assert watch.threads() == [True, False]


def test_a_pool_without_threads_does_no_harm(
    path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(work: Any) -> None:
        raise RuntimeError("can't start new thread")

    engine = engine_for(nobounce.Device("sim:0")._runtime)
    ahead = slab.SlabAhead(nobounce.Device("sim:0"))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "submit", submit)
        ahead.begin(4096, NBYTES)
    with ahead.take(NBYTES) as made:
        assert made.nbytes == NBYTES
    assert watch.threads() == [False]


class Slow:
    """Allocations of device memory that begin and then wait to be let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        plain = nobounce.Device.allocate

        def slow(device: nobounce.Device, nbytes: int, **k: Any) -> nobounce.Buffer:
            self.begun.set()
            assert self.go.wait(30)
            return plain(device, nbytes, **k)

        monkeypatch.setattr(nobounce.Device, "allocate", slow)


def test_who_takes_it_waits_until_it_is_made(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    ahead = slab.SlabAhead(nobounce.Device("sim:0"))
    ahead.begin(4096, NBYTES)
    assert slow.begun.wait(30)
    taken: list[nobounce.Buffer] = []
    thread = THREADS.spawn(lambda: taken.append(ahead.take(NBYTES - 4096)), name="taker")
    slow.go.set()
    thread.join(30)
    assert [b.nbytes for b in taken] == [NBYTES], "less than two grains more than was asked for"
    ahead.close()
    assert not taken[0].is_closed
    taken[0].close()
    assert watch.threads() == [True]


def test_it_is_taken_only_where_it_is_just_large_enough(watch: Watch) -> None:
    for wanted, fits in ((NBYTES, True), (NBYTES - 2 * slab.GRAIN, False), (NBYTES + 1, False)):
        ahead = slab.SlabAhead(nobounce.Device("sim:0"))
        ahead.begin(4096, NBYTES)
        with ahead.take(wanted) as made:
            assert made.nbytes == (NBYTES if fits else wanted)
        assert len([b for b in watch.buffers if not b.is_closed]) == 0


def test_a_pool_whose_threads_are_all_busy_is_not_waited_for(
    path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that hangs may keep them; a bad one is told of at once all the same."""
    monkeypatch.setattr(slab, "AWAKE_SECONDS", 1e-3)
    offered: list[Any] = []
    engine = engine_for(nobounce.Device("sim:0")._runtime)
    ahead = slab.SlabAhead(nobounce.Device("sim:0"))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "submit", offered.append)
        ahead.begin(4096, NBYTES)
    ahead.close()
    assert offered == [ahead]
    ahead.work()
    assert not watch.made, "who comes too late finds nothing to do"
    again = slab.SlabAhead(nobounce.Device("sim:0"))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "submit", offered.append)
        again.begin(4096, NBYTES)
    with again.take(NBYTES):
        assert watch.threads() == [False]


def test_an_interrupt_keeps_no_memory(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of what the pool begins with afterwards nor of what it is allocating."""
    engine = engine_for(nobounce.Device("sim:0")._runtime)
    ahead = slab.SlabAhead(nobounce.Device("sim:0"))
    submit = engine.submit

    def interrupted(work: Any) -> None:
        submit(work)
        raise KeyboardInterrupt

    slow = Slow(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ahead.begin(4096, NBYTES)
    assert slow.begun.wait(30)

    def no_wait(*a: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ahead, "_changed", SimpleNamespace(mutex=ahead._changed.mutex, wait_for=no_wait))
        with pytest.raises(KeyboardInterrupt):
            ahead.close()
    slow.go.set()
    with ahead._changed.mutex:
        ahead._changed.wait_for(lambda: ahead._state == "over", 30)
    for _ in range(300):
        if watch.buffers and watch.buffers[0].is_closed:
            break
        THREADS.sleep(0.01)
    assert [b.is_closed for b in watch.buffers] == [True]
    assert ahead._slab is None


def test_a_load_looks_at_the_page_cache_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once at all of it, that is, and at the head of the file before its header is read."""
    need("cachestat")
    looks: list[int] = []
    plain = prepare.cached_ranges

    def look(fd: int, file_offset: int, nbytes: int, pool: Any = None) -> Any:
        looks.append(nbytes)
        return plain(fd, file_offset, nbytes, pool)

    monkeypatch.setattr(prepare, "cached_ranges", look)
    assert is_whole(nobounce.load(path, device="sim:0"))
    assert len(looks) == 1
