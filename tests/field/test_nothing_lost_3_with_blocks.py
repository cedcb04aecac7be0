"""Leaving a buffer's `with` block waits for the transfers that use it; closing it in mid-flight stays an error."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import nobounce
from capabilities import need
from nobounce.device import Device
from nobounce.errors import BusyError
from nobounce.io.engine import engine_for
from nobounce.runtimes import faults
from nobounce.runtimes.host.sim import SimRuntime
from nobounce.testing.stepper import Stepper

SIZE = 1 << 20


@pytest.mark.parametrize("name", ["cpu", "sim:0"])
def test_the_readme_s_pattern(name: str, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * SIZE)
    device = nobounce.Device(name)
    for _ in range(20):
        with nobounce.open(path, "r+") as f, device.allocate(SIZE) as buf, device.create_stream() as s:
            t = f.read_async(buf, stream=s)
            u = f.write_async(buf, stream=s, file_offset=SIZE)
        assert (t.done(), u.done(), buf.is_closed) == (True, True, True)
    assert path.read_bytes() == b"x" * 2 * SIZE


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_leaving_waits_whatever_the_reason(error: type[Exception] | None, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * SIZE)
    device = nobounce.Device("sim:0")
    stream, latch, left = device.create_stream(), threading.Event(), threading.Event()
    device._runtime.host_call(stream.handle, latch.wait)

    def block() -> None:
        with nobounce.open(path) as f, device.allocate(SIZE) as buf:
            f.read_async(buf, stream=stream)
            if error is not None:
                raise error
        left.set()

    def leave() -> None:
        try:
            block()
        except ZeroDivisionError:
            left.set()

    thread = threading.Thread(target=leave)
    thread.start()
    assert not left.wait(0.05)
    latch.set()
    assert left.wait(30)
    thread.join()


def test_closing_in_mid_flight_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * SIZE)
    device = nobounce.Device("sim:0")
    stream, latch = device.create_stream(), threading.Event()
    device._runtime.host_call(stream.handle, latch.wait)
    with nobounce.open(path) as f, device.allocate(SIZE) as buf:
        t = f.read_async(buf, stream=stream)
        with pytest.raises(BusyError):
            buf.close()
        latch.set()
        t.result()
        buf.close()


def test_a_batch_is_not_waited_for(tmp_path: Path) -> None:
    """It may never be submitted: waiting for it would be for ever."""
    need("numpy")
    path = tmp_path / "f"
    path.write_bytes(b"x" * SIZE)
    with nobounce.open(path) as f, nobounce.Batch() as batch:
        with pytest.raises(BusyError), nobounce.Device("cpu").allocate(SIZE) as buf:
            batch.read(f, buf, file_offsets=0, nbytes=SIZE, cache="avoid")
        batch.wait()
        buf.close()


def test_in_every_schedule(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 8192)

    def run(stepper: Stepper) -> None:
        runtime = SimRuntime(scheduler=stepper, devices=1, faults=[faults.rule("read", latency=0.5)])
        device = Device._of(runtime, 0)
        with nobounce.open(path) as f, device.allocate(8192) as buf, device.create_stream() as s:
            moves = [f.read_async(buf, stream=s, nbytes=4096, buffer_offset=k % 2 * 4096) for k in range(3)]
        assert all(m.done() for m in moves)
        engine_for(runtime).close()

    for seed in range(20):
        Stepper.run(run, seed=seed)
