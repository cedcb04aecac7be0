"""Ctrl-C in a thread that carries out a small read itself: whichever line it hits, the stream goes on and the read ends."""

from __future__ import annotations

import ctypes
import linecache
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import nobounce
from doubles.hip_bindings import HipDouble
from nobounce import config
from nobounce.clock import THREADS
from nobounce.device import Device
from nobounce.errors import DeviceError, RuntimeStatus
from nobounce.io import engine, hold
from nobounce.io.quiet import closed_gate, quiet_of
from nobounce.runtimes.gpu import hip
from nobounce.runtimes.gpu.gpu import GpuRuntime

PATIENCE = 10.0
HERE = os.path.dirname(nobounce.__file__)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> GpuRuntime:
    """One whose streams get everywhere at once and whose copies move nothing."""
    made = hip.load(HipDouble(devices=1))
    assert isinstance(made, GpuRuntime)
    adapter: Any = made._adapter

    def write_value(stream: int, address: int, value: int, *_: Any) -> tuple[int]:
        ctypes.c_uint64.from_address(address).value = value
        return (0,)

    calls: dict[str, Any] = dict.fromkeys(
        ("wait_value", "copy_async", "event_record", "event_sync", "event_query"), lambda *_: (0,)
    )
    calls["write_value"] = write_value
    plain = adapter.function

    def function(row: Any) -> tuple[str, Any]:
        name, fn = plain(row)
        return name, calls.get(row.op, fn)

    adapter.function = function
    for op in calls:
        adapter.__dict__.pop(op, None)
    monkeypatch.setattr(made, "direct_io", lambda: None)
    return made


class Interrupt:
    """Raises KeyboardInterrupt at the nth line of this library that the calling thread gets to.

    Not where a `with` ends or a `try` begins, nor inside of hold.py: the interpreter looks for signals behind the calls, not there.
    """

    def __init__(self, nth: int) -> None:
        self.left, self.where = nth, ""

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(HERE) or name == hold.__file__:
            return None
        if event == "line" and not _line(frame).startswith(("with ", "try:")):
            self.left -= 1
            if self.left == 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


def _line(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


def behind_a_gate(runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small reads too: no stream has nothing before it."""
    monkeypatch.setattr(runtime, "_is_clear", lambda stream: False)
    monkeypatch.setattr(runtime, "_calls", None)


@pytest.mark.thorough
@pytest.mark.parametrize("whole", [False, True])
def test_an_interrupt_at_any_line_leaves_no_gate_closed(
    tmp_path: Path, runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    behind_a_gate(runtime, monkeypatch)
    path = tmp_path / "data.bin"
    path.write_bytes(os.urandom(8192))
    config.override(config.Settings(async_buffer_nbytes=4 << 20))  # one slot is quickly made
    quiet = quiet_of(runtime)
    assert quiet is not None
    hit = 0
    device = Device._of(runtime, 0)
    with nobounce.open(path) as f, device.allocate(8192) as buffer, device.create_stream() as stream:
        for nth in range(1, 10_000):
            engine.engine_for(runtime).rings._rings.clear()  # an interrupt may cost a slot
            f._plans.clear()
            f.read(buffer, nbytes=4096, cache="use")
            interrupt = Interrupt(nth)
            move = f.read_async(
                buffer, stream=stream, nbytes=8192 if whole else 4096, cache="use", file_offset=1
            )
            try:
                sys.settrace(interrupt)
                move.result()
            except KeyboardInterrupt:
                hit += 1
            finally:
                sys.settrace(None)
            ended = threading.Event()
            move.add_done_callback(lambda _, ended=ended: ended.set())  # type: ignore[misc]
            assert ended.wait(PATIENCE), interrupt.where
            deadline = THREADS.now() + PATIENCE  # the gate is opened right behind the end
            while (runtime._gates._shut or quiet._gates) and THREADS.now() < deadline:
                THREADS.sleep(0.001)
            assert not runtime._gates._shut, interrupt.where
            assert quiet._gates == 0, interrupt.where
            if interrupt.left > 0:
                break
        buffer._uses = 0  # it stays in use where the line that ends its use was hit
    assert hit > 50


def _settled(runtime: GpuRuntime) -> bool:
    quiet = quiet_of(runtime)
    assert quiet is not None
    deadline = THREADS.now() + PATIENCE
    while (runtime._gates._shut or quiet._gates) and THREADS.now() < deadline:
        THREADS.sleep(0.0001)
    return not (runtime._gates._shut or quiet._gates or quiet._calls)


@pytest.mark.parametrize("clear", [False, True])
def test_an_interrupt_at_any_line_of_a_submission_leaves_no_gate_closed(
    tmp_path: Path, runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch, clear: bool
) -> None:
    """Nobody would have known of the gate: the stream stood for good, or no memory was ever registered again."""
    if not clear:
        behind_a_gate(runtime, monkeypatch)
    path = tmp_path / "data.bin"
    path.write_bytes(os.urandom(8192))
    config.override(config.Settings(async_buffer_nbytes=4 << 20))
    hit, move = 0, None
    device = Device._of(runtime, 0)
    with nobounce.open(path) as f, device.allocate(8192) as buffer, device.create_stream() as stream:
        f.read_async(buffer, stream=stream, nbytes=4096, cache="use").result()
        while move is None:
            interrupt = Interrupt(hit + 1)
            try:
                sys.settrace(interrupt)
                move = f.read_async(buffer, stream=stream, nbytes=4096, cache="use", file_offset=1)
            except KeyboardInterrupt:
                hit += 1
            finally:
                sys.settrace(None)
            assert _settled(runtime), interrupt.where
            assert buffer._uses == 0, interrupt.where
        move.result()
    assert hit > 50


@pytest.mark.parametrize("on", ["sync", "stream"])
def test_an_interrupt_at_any_line_leaves_the_caller_s_capture_mode_as_it_was(
    tmp_path: Path, runtime: GpuRuntime, on: str
) -> None:
    """A thread left in relaxed mode would no longer be warned of what does not belong into its graphs."""
    path = tmp_path / "data.bin"
    path.write_bytes(os.urandom(8192))
    double: Any = runtime._adapter
    hit, done = 0, False
    device = Device._of(runtime, 0)
    with nobounce.open(path) as f, device.allocate(8192) as buffer, device.create_stream() as stream:
        f.read(buffer, nbytes=4096, cache="use")
        while not done:
            engine.engine_for(runtime).rings._rings.clear()  # an interrupt may cost a slot
            f._plans.clear()
            f.read(buffer, nbytes=4096, cache="use")
            interrupt = Interrupt(hit + 1)
            try:
                sys.settrace(interrupt)
                if on == "sync":
                    f.read(buffer, nbytes=4096, cache="use", file_offset=1)
                else:
                    f.read_async(buffer, stream=stream, nbytes=4096, cache="use", file_offset=1)
                done = True
            except KeyboardInterrupt:
                hit += 1
            finally:
                sys.settrace(None)
            assert double._hip.mode() == 0, interrupt.where
            assert _settled(runtime), interrupt.where
            buffer._uses = 0
    assert hit > 50


def test_a_small_read_whose_gate_is_refused_gives_its_buffer_back_once(
    tmp_path: Path, runtime: GpuRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(os.urandom(8192))
    device = Device._of(runtime, 0)

    def refuse(*_: object, **__: object) -> object:
        raise DeviceError("gate", RuntimeStatus.Unknown)

    with nobounce.open(path) as f, device.allocate(8192) as buffer, device.create_stream() as stream:
        f.read(buffer, nbytes=4096, cache="use")
        assert f._plans
        behind_a_gate(runtime, monkeypatch)
        monkeypatch.setattr(runtime, "gate", refuse)
        with pytest.raises(DeviceError):
            f.read_async(buffer, stream=stream, nbytes=4096, cache="use")
        assert buffer._uses == 0
        assert _settled(runtime)


def test_a_call_that_was_interrupted_at_its_beginning_holds_up_no_gate(runtime: GpuRuntime) -> None:
    quiet = quiet_of(runtime)
    assert quiet is not None
    assert quiet.try_call()  # and `called` never follows
    gate = closed_gate(runtime, runtime.stream_create(0), lambda: None)
    gate.open()
    assert _settled(runtime)
