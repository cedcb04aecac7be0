"""A graph that the program captures, in the default mode, survives whatever is done here meanwhile (HIP rule 88)."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

import nobounce
from capabilities import need
from doubles.hip_bindings import HipDouble
from nobounce import config
from nobounce.clock import THREADS
from nobounce.device import Device
from nobounce.runtimes.gpu import hip
from nobounce.runtimes.gpu.gpu import GpuRuntime

PATIENCE = 30.0
NBYTES = 20 << 20


@pytest.fixture
def double() -> HipDouble:
    return HipDouble(devices=1)


@pytest.fixture
def runtime(double: HipDouble) -> GpuRuntime:
    return hip.load(double)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "data.bin"
    made.write_bytes(os.urandom(NBYTES))
    return made


def test_the_double_ends_a_capture(double: HipDouble, runtime: GpuRuntime) -> None:
    stream = runtime.stream_create(0)
    double.capturing = "open"
    assert runtime.stream_query(stream)
    assert double.capturing == "open"
    assert double.hipStreamQuery(stream)[0].name == "hipErrorStreamCaptureUnsupported"
    assert double.capturing == "ended"


@pytest.mark.parametrize(("nbytes", "relay"), [(4096, "threads"), (NBYTES, "threads"), (NBYTES, "io_uring")])
@pytest.mark.parametrize("on", ["stream", "legacy", "sync"])
def test_reads_do_not_end_it(
    path: Path, double: HipDouble, runtime: GpuRuntime, nbytes: int, on: str, relay: str
) -> None:
    if relay == "io_uring":
        need("io_uring")
    config.override(config.Settings(relay=relay))
    device = Device._of(runtime, 0)
    data = path.read_bytes()[:nbytes]
    with nobounce.open(path) as f, device.create_stream() as stream:
        double.capturing = "open"
        for _ in range(3):
            with device.allocate(NBYTES) as buffer:
                if on == "sync":
                    f.read(buffer, nbytes=nbytes, cache="use")
                else:
                    where: Any = stream if on == "stream" else 0
                    f.read_async(buffer, stream=where, nbytes=nbytes, cache="use").result(PATIENCE)
                assert double.capturing == "open"
                double.capturing = ""
                assert buffer.numpy()[:nbytes].tobytes() == data
                double.capturing = "open"
        assert double.mode() == 0, "the caller's thread is as it was"
    assert double.capturing == "open"
    double.capturing = ""


def test_a_load_does_not_end_it(tmp_path: Path, double: HipDouble, runtime: GpuRuntime) -> None:
    need("safetensors")
    import numpy as np
    from safetensors.numpy import save_file

    made = {"a": np.arange(1 << 20, dtype=np.float32), "b": np.ones(3, np.uint8)}
    save_file(made, tmp_path / "m.safetensors")
    double.capturing = "open"
    model = nobounce.load(tmp_path / "m.safetensors", device=Device._of(runtime, 0), align=256)
    assert double.capturing == "open"
    double.capturing = ""
    assert all((model[name].numpy() == array).all() for name, array in made.items())


def test_a_caller_in_another_mode_keeps_it(path: Path, double: HipDouble, runtime: GpuRuntime) -> None:
    double._mode.value = 1
    with nobounce.open(path) as f, Device._of(runtime, 0).allocate(4096) as buffer:
        f.read(buffer, cache="use")
        assert double.mode() == 1


def test_threads_of_ours_leave_the_default_mode_for_good(double: HipDouble, runtime: GpuRuntime) -> None:
    modes: list[int] = []
    done = threading.Event()

    def ask() -> None:
        modes.append(double.mode())
        runtime.stream_priority_range(0)
        modes.append(double.mode())
        done.set()

    THREADS.spawn(ask, name="nobounce-test")
    assert done.wait(PATIENCE)
    done.clear()
    other = threading.Thread(target=ask)
    other.start()
    other.join()
    assert modes == [0, 2, 0, 0]


@pytest.mark.parametrize("missing", ["symbol", "function"])
def test_without_the_function_all_else_works(
    path: Path, double: HipDouble, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def refused(*_: Any) -> Any:
        raise RuntimeError("dlsym failed")

    answer = (lambda *_: (0, None, 1)) if missing == "symbol" else refused
    monkeypatch.setattr(HipDouble, "hipGetProcAddress", lambda self, *a: answer(*a)[1:])
    runtime = hip.load(double)
    with nobounce.open(path) as f, Device._of(runtime, 0).allocate(4096) as buffer:
        assert f.read(buffer, cache="use").nbytes == 4096
        assert buffer.numpy().tobytes() == path.read_bytes()[:4096]
