"""A small page-cached read into a stream that has nothing before it is done when the submission returns; any other waits its turn."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import nobounce
from doubles.hip_bindings import HipDouble
from nobounce.device import Device
from nobounce.errors import ClosedError, DeviceError, RuntimeStatus
from nobounce.io import engine, hooks, kept, oncaller, small
from nobounce.runtimes.gpu import hip
from nobounce.runtimes.gpu.gpu import GpuRuntime
from nobounce.stream import StreamOptions

PATIENCE = 30.0
NBYTES = 1 << 20


@pytest.fixture
def runtime() -> GpuRuntime:
    return hip.load(HipDouble(devices=1))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "data.bin"
    made.write_bytes(os.urandom(NBYTES))
    return made


class Opened:
    """A file with a plan for small reads, a buffer and a stream; what went behind a gate is counted."""

    def __init__(
        self, path: Path, runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch, **options: Any
    ) -> None:
        self.device = Device._of(runtime, 0)
        self.file, self.buffer = nobounce.open(path), self.device.allocate(kept.MOST_NBYTES)
        self.stream = self.device.create_stream(options=StreamOptions(**options))
        self.gates = 0
        self.file.read(self.buffer, nbytes=4096, cache="use")
        self.ring = engine.engine_for(runtime).rings.get(runtime, 0)
        plain = runtime.gate

        def gate(*a: Any, **k: Any) -> Any:
            self.gates += 1
            return plain(*a, **k)

        monkeypatch.setattr(runtime, "gate", gate)

    def read(self, nbytes: int = 4096, at: int = 8192, stream: Any = None) -> nobounce.Transfer:
        on = self.stream if stream is None else stream
        return self.file.read_async(self.buffer, stream=on, nbytes=nbytes, file_offset=at, cache="use")

    def holds(self, data: bytes) -> bool:
        return bool(self.buffer.numpy()[: len(data)].tobytes() == data)

    def close(self) -> None:
        self.stream.sync()
        assert len(self.ring._free) == self.ring._made
        for thing in (self.file, self.buffer, self.stream):
            thing.close()  # type: ignore[attr-defined]


def the_first_copy_fails(runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, left = runtime._adapter.copy_async, [1]

    def failing(*a: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise DeviceError("copy_async", RuntimeStatus.Unknown)
        return plain(*a)

    monkeypatch.setattr(runtime._adapter, "copy_async", failing, raising=False)
    monkeypatch.setattr(runtime, "_calls", None)


def test_it_is_done_when_the_submission_returns(
    path: Path, runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    o = Opened(path, runtime, monkeypatch)
    for at in (0, 8192, NBYTES - 4096):
        move = o.read(at=at)
        assert move.done()
        receipt = move.result(0)
        assert (receipt.nbytes, receipt.fallback_bytes, receipt.cached_bytes) == (4096, 4096, 4096)
        assert receipt.queued_at <= receipt.started_at <= receipt.ended_at
        assert o.holds(path.read_bytes()[at : at + 4096])
    assert o.gates == 0
    o.close()


def test_behind_work_it_waits_and_reads_what_the_file_holds_then(
    path: Path, runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    o = Opened(path, runtime, monkeypatch)
    go = threading.Event()
    runtime.host_call(o.stream.handle, lambda: go.wait(PATIENCE) and None)
    move = o.read(at=0)
    assert not move.done()
    assert o.gates == 1
    later = os.urandom(4096)
    with path.open("r+b") as f:
        f.write(later)
    go.set()
    assert move.result(PATIENCE).nbytes == 4096
    assert o.holds(later)
    o.close()


STREAMS = ["null", "legacy", "per thread", "blocking", "foreign"]


def as_on_cuda(runtime: GpuRuntime) -> None:
    """Asking the legacy stream leaves nothing in it."""
    runtime._adapter.asks_aside, runtime._adapter.legacy = True, 1


@pytest.mark.parametrize("on", STREAMS)
def test_a_stream_that_others_are_waited_for_in_is_clear_when_they_are(
    path: Path, runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch, on: str
) -> None:
    """The legacy stream waits for every blocking one, and those for it (HIP rules 15, 18); non-blocking ones are nobody's business."""
    as_on_cuda(runtime)
    o = Opened(path, runtime, monkeypatch)
    blocking, other, aside = (o.device.create_stream(nonblocking=n) for n in (False, False, True))
    foreign = runtime._adapter.stream_create(0, 0)
    stream = {"null": 0, "legacy": 1, "per thread": 2, "blocking": blocking, "foreign": foreign}[on]
    go = threading.Event()
    runtime.host_call(aside.handle, lambda: go.wait(PATIENCE) and None)
    assert o.read(at=0, stream=stream).done()
    assert o.gates == 0
    runtime.host_call(other.handle, lambda: go.wait(PATIENCE) and None)
    move = o.read(at=4096, stream=stream)
    assert o.gates == 1
    later = os.urandom(4096)
    with path.open("r+b") as f:
        f.seek(4096)
        f.write(later)
    go.set()
    assert move.result(PATIENCE).nbytes == 4096
    if on in ("null", "legacy"):  # the others begin when they themselves have nothing before them
        assert o.holds(later)
    o.device.sync()
    o.close()


@pytest.mark.parametrize("on", STREAMS)
def test_on_hip_only_a_default_stream_is_asked_for_by_the_null_handle(
    path: Path, runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch, on: str
) -> None:
    """A query of the null stream puts a marker into it, behind every busy blocking one and before whatever those do next."""
    o = Opened(path, runtime, monkeypatch)
    blocking, foreign = o.device.create_stream(nonblocking=False), runtime._adapter.stream_create(0, 0)
    stream = {"null": 0, "legacy": 1, "per thread": 2, "blocking": blocking, "foreign": foreign}[on]
    asked: list[int] = []
    plain = runtime._adapter.stream_query

    def query(handle: int) -> bool:
        asked.append(handle)
        return bool(plain(handle))

    with monkeypatch.context() as patch:
        patch.setattr(runtime._adapter, "stream_query", query, raising=False)
        clear = runtime.stream_is_clear(stream if isinstance(stream, int) else stream.handle)
    default = on in ("null", "legacy")
    assert clear is default
    assert asked == ([0] if default else [])
    assert o.read(stream=stream).result(PATIENCE).nbytes == 4096
    assert o.gates == (0 if default else 1)
    o.device.sync()
    o.close()


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_where_null_is_the_thread_s_own_stream_the_legacy_one_is_asked_by_its_number(
    path: Path, runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch, handle: int
) -> None:
    """CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM=1 makes it so."""
    as_on_cuda(runtime)
    asked: list[int] = []

    def query(stream: int) -> bool:
        asked.append(stream)
        return stream != 1

    monkeypatch.setattr(runtime._adapter, "stream_query", query, raising=False)
    assert not runtime.stream_is_clear(handle)
    assert asked[-1] == 1


@pytest.mark.parametrize("why", ["captured", "legacy captured", "cannot say", "fails"])
def test_a_stream_that_may_wait_for_another_gets_a_gate(
    path: Path, runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    o = Opened(path, runtime, monkeypatch, nonblocking=why != "legacy captured")
    if why == "captured":  # a query would end the capture
        monkeypatch.setattr(runtime._adapter, "stream_capture", lambda stream: 1, raising=False)
        monkeypatch.setattr(
            runtime._adapter, "stream_query", lambda stream: pytest.fail("queried"), raising=False
        )
        assert not runtime.stream_is_clear(o.stream.handle)
        return
    if why == "legacy captured":  # by a blocking stream, which it waits for
        as_on_cuda(runtime)
        monkeypatch.setattr(runtime._adapter, "stream_capture", lambda stream: stream == 1, raising=False)

    def refused(stream: int) -> int:
        raise DeviceError("stream_capture", RuntimeStatus.NotSupported)

    if why in ("cannot say", "fails"):
        which = "stream_capture" if why == "cannot say" else "stream_query"
        monkeypatch.setattr(runtime._adapter, which, refused, raising=False)
    move = o.read()
    assert move.result(PATIENCE).nbytes == 4096
    assert o.gates == 1
    assert o.holds(path.read_bytes()[8192:12288])
    monkeypatch.undo()
    o.close()


def test_a_foreign_stream_is_asked_for_its_flags(
    path: Path, runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_cuda(runtime)
    o = Opened(path, runtime, monkeypatch)
    foreign = {flag: runtime._adapter.stream_create(flag, 0) for flag in (0, 1)}
    for flag, handle in foreign.items():
        asked: list[int] = []
        plain = runtime._adapter.stream_query

        def query(stream: int, asked: list[int] = asked, plain: Any = plain) -> bool:
            asked.append(stream)
            return bool(plain(stream))

        with monkeypatch.context() as patch:
            patch.setattr(runtime._adapter, "stream_query", query, raising=False)
            assert o.read(stream=handle).result(PATIENCE).nbytes == 4096
        assert asked == ([handle] if flag else [handle, 1])
        assert o.gates == 0
    o.close()


def test_what_is_not_in_the_page_cache_is_not_waited_for(
    path: Path, runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says so by EAGAIN, or brings it at once where the disk is as quick as that."""
    o = Opened(path, runtime, monkeypatch)
    plain, flags = os.preadv, []

    def preadv(fd: int, buffers: Any, offset: int, how: int = 0) -> int:
        flags.append(how)
        if how & small.RWF_NOWAIT:
            raise BlockingIOError(errno.EAGAIN, "not in the page cache")
        return plain(fd, buffers, offset, how)

    monkeypatch.setattr(os, "preadv", preadv)
    at = NBYTES // 2
    move = o.read(at=at)
    assert o.gates == 1
    assert move.result(PATIENCE).nbytes == 4096
    assert flags == [small.RWF_NOWAIT, 0]
    assert o.holds(path.read_bytes()[at : at + 4096])
    o.close()


def test_an_interpreter_without_preadv2_reads_by_the_c_library_s_own(
    path: Path, runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was built for a C library from before it."""
    o = Opened(path, runtime, monkeypatch)
    plain = os.preadv

    def preadv(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags:
            raise NotImplementedError("preadv2")
        return plain(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(oncaller, "HAS_FLAGS", False)
    assert o.read(at=4096).done()
    assert o.holds(path.read_bytes()[4096:8192])
    o.close()


@pytest.mark.parametrize(("nbytes", "gates"), [(small.AT_ONCE_NBYTES, 0), (small.AT_ONCE_NBYTES + 1, 1)])
def test_a_larger_one_does_not_hold_the_caller_up(
    path: Path, runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch, nbytes: int, gates: int
) -> None:
    o = Opened(path, runtime, monkeypatch)
    move = o.read(nbytes)
    assert o.gates == gates
    assert move.result(PATIENCE).nbytes == nbytes
    assert o.holds(path.read_bytes()[8192 : 8192 + nbytes])
    o.close()


def test_where_the_copy_fails_it_is_tried_again_behind_a_gate_and_the_slot_is_back(
    path: Path, runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    o = Opened(path, runtime, monkeypatch)
    the_first_copy_fails(runtime, monkeypatch)
    move = o.read()
    assert move.result(PATIENCE).nbytes == 4096
    assert o.gates == 1
    assert o.holds(path.read_bytes()[8192:12288])
    o.close()


def test_a_read_past_the_end_is_short_as_behind_a_gate(
    path: Path, runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    o = Opened(path, runtime, monkeypatch)
    assert o.read(at=NBYTES - 100).result(PATIENCE).nbytes == 100
    assert o.holds(path.read_bytes()[-100:])
    o.close()


def test_it_is_a_transfer_like_any_other(
    path: Path, runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    o = Opened(path, runtime, monkeypatch)
    moves = [o.read(at=at) for at in (0, 4096)]
    assert o.gates == 0
    told: list[nobounce.Transfer] = []
    for move in moves:
        move.add_done_callback(told.append)
        assert (move.exception(0), move.cancel(), move.cancelled(), move.running()) == (
            None,
            False,
            False,
            False,
        )
    assert told == moves
    assert asyncio.run(_both(moves)) == [m.result(0) for m in moves]
    assert [m.result().segments[0].file_offset for m in moves] == [0, 4096]
    o.file.close()  # nothing holds it any more
    with pytest.raises(ClosedError):
        o.read()
    o.buffer.close()
    assert o.buffer.is_closed


async def _both(moves: list[nobounce.Transfer]) -> list[nobounce.Receipt]:
    return [await move for move in moves]


def test_not_while_a_large_transfer_is_relayed(
    path: Path, runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copies are under way, and the small one's would be waited for behind them."""
    o = Opened(path, runtime, monkeypatch)
    with o.ring.shared():
        assert o.read().result(PATIENCE).nbytes == 4096
    assert o.gates == 1
    o.stream.sync()
    assert o.read().done()
    assert o.gates == 1
    o.close()


def test_an_interrupt_reaches_the_caller_and_whoever_watches(
    path: Path, runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Watch(hooks.Watcher):
        def exited(self, operation: hooks.Operation) -> None:
            seen.append(operation)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    seen: list[hooks.Operation] = []
    o, watch = Opened(path, runtime, monkeypatch), Watch()
    hooks.add(watch)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(runtime._adapter, "copy_async", interrupted, raising=False)
            patch.setattr(runtime, "_calls", None)
            with pytest.raises(KeyboardInterrupt):
                o.read()
    finally:
        hooks.remove(watch)
    assert [type(operation.error) for operation in seen] == [KeyboardInterrupt]
    assert o.read().result(PATIENCE).nbytes == 4096
    o.close()


@pytest.mark.parametrize("fails", [False, True])
def test_whoever_watches_is_told_and_sends_it_no_other_way(
    path: Path, runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """A profiler's ranges are always on where its library is mapped. One that has to wait after all has begun once."""

    class Watch(hooks.Watcher):
        def started(self, operation: hooks.Operation) -> None:
            told.append("started")

        def exited(self, operation: hooks.Operation) -> None:
            told.append("exited")
            seen.append(operation)

    told: list[str] = []
    seen: list[hooks.Operation] = []
    o, watch = Opened(path, runtime, monkeypatch), Watch()
    if fails:
        the_first_copy_fails(runtime, monkeypatch)
    hooks.add(watch)
    try:
        receipt = o.read().result(PATIENCE)
    finally:
        hooks.remove(watch)
    assert told == ["started", "exited"]
    assert o.gates == int(fails)
    assert seen[0].started_at == receipt.started_at
    assert seen[0].receipt is receipt
    o.close()
