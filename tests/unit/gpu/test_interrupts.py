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
from tests.doubles.hip_bindings import HipDouble

import nobounce
from nobounce import config
from nobounce.clock import THREADS
from nobounce.device import Device
from nobounce.io import engine
from nobounce.io.quiet import quiet_of
from nobounce.runtimes import hip
from nobounce.runtimes.gpu import GpuRuntime

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

    Not where a `with` ends or a `try` begins: the interpreter looks for signals behind the calls, not there.
    """

    def __init__(self, nth: int) -> None:
        self.left, self.where = nth, ""

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(HERE):
            return None
        if event == "line" and not _line(frame).startswith(("with ", "try:")):
            self.left -= 1
            if self.left == 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


def _line(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


@pytest.mark.parametrize("whole", [False, True])
def test_an_interrupt_at_any_line_leaves_no_gate_closed(
    tmp_path: Path, runtime: GpuRuntime, whole: bool
) -> None:
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
