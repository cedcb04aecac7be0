"""Copies of a relay into sim's device memory: they go in batches as long as enough of them is under way."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import nobounce
from capabilities import need
from nobounce import config
from nobounce.errors import DeviceError, RuntimeStatus, TransferError
from nobounce.io import engine
from nobounce.io.movers import relay_copies, relay_pipe, uring

MIB = 1 << 20
NBYTES = 64 * MIB + 123


@pytest.fixture(autouse=True)
def kernel() -> Iterator[None]:
    need("io_uring")
    config.override(config.Settings(relay="io_uring"))
    yield
    config.override(None)
    relay_pipe._forget()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "data.bin"
    made.write_bytes(os.urandom(NBYTES))
    return made


class Watched:
    """What every call for copies found: bytes of it, bytes under way before it, reads under way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[int, int, int]] = []
        self.sizes: list[int] = []
        plain, many = relay_copies.Copies.queue, nobounce.Device("sim:0")._runtime

        def copy(copies: Any, me: Any, owner: Any, units: Any) -> None:
            self.sent.append((sum(u.nbytes for u in units), copies.moving_nbytes, len(me.hub.pipe.reading)))
            plain(copies, me, owner, units)

        monkeypatch.setattr(relay_copies.Copies, "queue", copy)
        copy_calls = type(many).copy_calls

        def calls(runtime: Any, device: int) -> Any:
            manager = copy_calls(runtime, device)
            real = manager.__enter__()

            def copy_many(copies: list[tuple[int, int, int]], stream: int) -> None:
                self.sizes.append(len(copies))
                real.copy_many(copies, stream)

            class Entered:
                def __enter__(self) -> Any:
                    return real._replace(copy_many=copy_many)

                def __exit__(self, *error: object) -> None:
                    manager.__exit__(None, None, None)

            return Entered()

        monkeypatch.setattr(type(many), "copy_calls", calls)


def read(path: Path) -> bytes:
    device = nobounce.Device("sim:0")
    with nobounce.open(path) as file, device.allocate(NBYTES) as buffer:
        assert file.read(buffer, cache="use", require="fallback").nbytes == NBYTES
        return buffer.numpy().tobytes()


def test_a_copy_waits_for_more_only_while_enough_is_under_way(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_copies, "ENOUGH_NBYTES", 12 * MIB)
    monkeypatch.setattr(relay_copies, "BATCH_NBYTES", 20 * MIB)
    monkeypatch.setattr(relay_copies.Copies, "settle_ended", lambda self, me: None)  # so that it piles up
    seen = Watched(monkeypatch)
    for _ in range(50):  # all reads may end at once, so that nothing has to wait
        assert read(path) == path.read_bytes()
        if any(moving >= 12 * MIB for _, moving, _ in seen.sent) and any(n > 1 for n in seen.sizes):
            break
    for nbytes, moving, reading in seen.sent:
        assert nbytes >= 20 * MIB or moving < 12 * MIB or not reading, seen.sent
    assert any(moving >= 12 * MIB for _, moving, _ in seen.sent)
    assert any(n > 1 for n in seen.sizes), "one call for several of them"


def test_nothing_waits_where_nothing_is_under_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that end at once, as behind a slow disk, are queued one read after the other."""
    settle = relay_copies.Copies.settle_oldest

    def settle_all(self: Any, me: Any) -> None:
        while self.batches:
            settle(self, me)

    monkeypatch.setattr(relay_copies.Copies, "settle_ended", settle_all)
    plain = relay_copies.Copies.came

    def came(self: Any, units: Any) -> None:
        assert not self.come, "what had come was sent"
        plain(self, units)

    monkeypatch.setattr(relay_copies.Copies, "came", came)
    assert read(path) == path.read_bytes()


def test_a_thread_whose_copies_wait_for_more_looks_round_soon(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link must not stand still because one read takes long."""
    waits: list[tuple[bool, float | None]] = []
    plain = uring.Ring.enter
    held: list[Any] = []
    harvest = relay_pipe.Pipe.harvest

    def note(self: Any, *a: Any, **k: Any) -> None:
        held[:] = self.copies.come
        harvest(self, *a, **k)

    def enter(self: uring.Ring, at_least: int = 0, timeout: float | None = None) -> None:
        if at_least:
            waits.append((bool(held), timeout))
        plain(self, at_least, timeout)

    monkeypatch.setattr(relay_copies, "ENOUGH_NBYTES", MIB)
    monkeypatch.setattr(relay_copies.Copies, "settle_ended", lambda self, me: None)
    monkeypatch.setattr(relay_pipe.Pipe, "harvest", note)
    monkeypatch.setattr(uring.Ring, "enter", enter)
    monkeypatch.setattr(relay_copies, "BATCH_NBYTES", 32 * MIB)
    for _ in range(50):  # all reads may end at once, so that nothing has to wait
        assert read(path) == path.read_bytes()
        if any(waiting for waiting, _ in waits):
            break
    assert {timeout for waiting, timeout in waits if waiting} == {relay_pipe.GLANCE}
    assert {timeout for waiting, timeout in waits if not waiting} == {None}


def test_what_is_under_way_is_counted_to_the_byte(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipes: set[Any] = set()
    plain = relay_pipe.Pipe.step

    def step(self: Any, me: Any) -> None:
        pipes.add(self)
        plain(self, me)
        assert self.copies.moving_nbytes == sum(b.nbytes for b in self.copies.batches)
        assert self.copies.come_nbytes == sum(u.nbytes for u in self.copies.come)

    monkeypatch.setattr(relay_pipe.Pipe, "step", step)
    assert read(path) == path.read_bytes()
    assert pipes
    assert not any(p.copies.moving_nbytes or p.copies.come_nbytes for p in pipes)


def test_what_can_be_read_into_is_read_into_before_another_slot_is_made(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making one takes a millisecond or more on a GPU, and a process's first transfer makes two dozen."""
    runtime = nobounce.Device("sim:0")._runtime
    monkeypatch.setattr(engine.engine_for(runtime).rings, "_rings", {})
    order: list[str] = []
    make, enter = runtime.alloc_bounce, uring.Ring.enter

    def made(nbytes: int) -> int:
        order.append("made")
        return make(nbytes)

    def entered(self: uring.Ring, at_least: int = 0, timeout: float | None = None) -> None:
        pending = (self._sq_tail.value - self._sq_head.value) & 0xFFFFFFFF
        order.append(f"{pending} begun, {at_least} waited for")
        enter(self, at_least, timeout)

    monkeypatch.setattr(runtime, "alloc_bounce", made)
    monkeypatch.setattr(uring.Ring, "enter", entered)
    assert read(path) == path.read_bytes()
    makings = [n for n, what in enumerate(order) if what == "made"]
    assert len(makings) > 3
    for first, second in pairwise(makings):
        between = order[first + 1 : second]
        assert between, "two were made in a row"
        assert re.match(r"[1-9]\d* begun, 0 ", between[0]), "its read begins at once, and nobody waits for it"
    order.clear()
    assert read(path) == path.read_bytes()
    begun = next(what for what in order if what != "made")
    assert not begun.startswith("1 begun"), "what is there is used at once"


@pytest.mark.parametrize("queued", [0, 1])
def test_a_call_for_copies_that_fails_half_way_loses_one_transfer_and_no_slot(
    path: Path, monkeypatch: pytest.MonkeyPatch, queued: int
) -> None:
    """Those that it did queue are waited for before their slots are anybody's again."""
    device = nobounce.Device("sim:0")
    runtime = device._runtime
    ring = engine.engine_for(runtime).rings.get(runtime, device.ordinal)
    assert read(path) == path.read_bytes()
    copy_calls, synced, failed = type(runtime).copy_calls, [], []
    sync = runtime.stream_sync

    class Entered:
        def __init__(self, manager: Any) -> None:
            self.manager = manager

        def __enter__(self) -> Any:
            real = self.manager.__enter__()

            def copy_many(copies: list[tuple[int, int, int]], stream: int) -> None:
                if failed:
                    real.copy_many(copies, stream)
                    return
                real.copy_many(copies[:queued], stream)
                failed.append(stream)
                raise DeviceError("copy_many", RuntimeStatus.LaunchFailure)

            return real._replace(copy_many=copy_many, copy=lambda d, s, n, to: copy_many([(d, s, n)], to))

        def __exit__(self, *error: object) -> None:
            self.manager.__exit__(None, None, None)

    def waiting(stream: int) -> None:
        synced.append(stream)
        sync(stream)

    monkeypatch.setattr(type(runtime), "copy_calls", lambda rt, n: Entered(copy_calls(rt, n)))
    monkeypatch.setattr(runtime, "stream_sync", waiting)
    with pytest.raises((DeviceError, TransferError), match="copy_many"):
        read(path)
    assert failed
    assert failed[0] in synced
    assert len(ring._free) == ring._made, "every slot is back"
    assert read(path) == path.read_bytes()
