from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import nobounce
from capabilities import need, tool
from nobounce import config
from nobounce.config import Settings
from nobounce.errors import TransferCancelledError
from nobounce.io import hooks
from nobounce.io.hooks import Operation
from nobounce.observe.ranges import Ranges


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").write_bytes(os.urandom(8192))
    return tmp_path / "data"


def test_subscribers_hear_of_enter_start_and_exit(data: Path) -> None:
    heard: list[tuple[str, Operation]] = []
    device = nobounce.Device("sim:0")
    with (
        nobounce.open(data) as f,
        device.allocate(8192) as buffer,
        device.create_stream() as stream,
        nobounce.subscribe(
            on_enter=lambda op: heard.append(("enter", op)),
            on_start=lambda op: heard.append(("start", op)),
            on_exit=lambda op: heard.append(("exit", op)),
        ),
    ):
        f.read(buffer)
        receipt = f.read_async(buffer, stream=stream).result()
        handle = stream.handle
    assert [what for what, _ in heard] == ["enter", "start", "exit"] * 2
    sync, queued = heard[2][1], heard[5][1]
    assert (sync.op, sync.device, sync.nbytes, sync.stream) == ("read", "sim:0", 8192, None)
    assert queued.receipt == receipt
    assert queued.stream == handle


def test_after_close_nothing_is_heard(data: Path) -> None:
    heard: list[Operation] = []
    with nobounce.open(data) as f, nobounce.Device("cpu").allocate(8192) as buffer:
        nobounce.subscribe(on_exit=heard.append).close()
        f.read(buffer)
    assert heard == []


def test_a_subscriber_that_fails_harms_no_transfer(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Operation) -> None:
        raise ValueError("mine")

    with (
        nobounce.open(data) as f,
        nobounce.Device("cpu").allocate(8192) as buffer,
        nobounce.subscribe(on_enter=fail, on_start=fail, on_exit=fail),
    ):
        assert f.read(buffer).nbytes == 8192
    assert caplog.text.count("a subscriber failed") == 3


def test_a_cancelled_transfer_exits_once_with_its_error(data: Path) -> None:
    heard: list[Operation] = []
    device = nobounce.Device("sim:0")
    with (
        nobounce.open(data) as f,
        device.allocate(8192) as buffer,
        device.create_stream() as stream,
        nobounce.subscribe(on_exit=heard.append),
    ):
        gate = device._runtime.gate(stream.handle, lambda: None)
        transfer = f.read_async(buffer, stream=stream)
        assert transfer.cancel()
        gate.open()
        stream.sync()
    assert len(heard) == 1
    assert isinstance(heard[0].error, TransferCancelledError)
    assert nobounce.stats().counters.get("cancelled", 1) == 1


def test_an_asynchronous_failure_carries_its_errno(data: Path) -> None:
    import errno

    from nobounce.testing.faults import inject

    heard: list[Operation] = []
    device = nobounce.Device("sim:0")
    with (
        nobounce.open(data) as f,
        device.allocate(8192) as buffer,
        device.create_stream() as stream,
        nobounce.subscribe(on_exit=heard.append),
        inject(op="read", error=errno.EIO, device="sim:0"),
    ):
        transfer = f.read_async(buffer, stream=stream, cache="avoid")
        assert transfer.exception() is not None
    assert getattr(heard[0].error, "errno", None) == 5


def test_ranges_open_at_the_first_byte_and_close_at_the_end(data: Path) -> None:
    said: list[object] = []
    ranges = Ranges(lambda name: said.append(name) or 7, lambda number: said.append(number))  # type: ignore[func-returns-value]
    hooks.add(ranges)
    with nobounce.open(data) as f, nobounce.Device("cpu").allocate(8192) as buffer:
        f.read(buffer)
    hooks.remove(ranges)
    assert said == [b"nobounce read 8192 B cpu", 7]


def test_a_group_of_a_batch_is_a_range(data: Path) -> None:
    said: list[object] = []
    ranges = Ranges(lambda name: said.append(name) or 7, lambda number: said.append(number))  # type: ignore[func-returns-value]
    hooks.add(ranges)
    with nobounce.open(data) as f, nobounce.Device("cpu").allocate(8192) as buffer, nobounce.Batch() as batch:
        batch.read(f, buffer, file_offsets=[0, 4096], nbytes=4096, cache="avoid")
        batch.wait().check()
    hooks.remove(ranges)
    assert said == [b"nobounce batch read of 2 cpu", 7]


def test_ranges_want_a_library_that_is_loaded_already(tmp_path: Path) -> None:
    assert Ranges.if_loaded() is None
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 00000000 00:00 1    /nowhere/libnvToolsExt.so.1\nnonsense\n")
    assert Ranges.if_loaded(str(maps)) is None


LIBRARY = """
#include <stdint.h>
#include <stdio.h>
uint64_t START(const char *name) { printf("start %s\\n", name); fflush(stdout); return 0x123456789abcdef0; }
void STOP(uint64_t id) { printf("stop %llx\\n", (unsigned long long)id); fflush(stdout); }
"""

LOADER = """
import ctypes, sys, nobounce
library = ctypes.CDLL(sys.argv[1]) if sys.argv[1] else None
with nobounce.open(sys.argv[2]) as f, nobounce.Device("cpu").allocate(8192) as b:
    f.read(b)
"""


@pytest.mark.parametrize(
    ("name", "start", "stop"),
    [
        ("libnvToolsExt.so.1", "nvtxRangeStartA", "nvtxRangeEnd"),
        ("librocprofiler-sdk-roctx.so.0", "roctxRangeStartA", "roctxRangeStop"),
        ("libroctx64.so.4", "roctxRangeStartA", "roctxRangeStop"),
    ],
)
def test_ranges_go_through_a_library_that_the_process_has_loaded(
    data: Path, tmp_path: Path, name: str, start: str, stop: str
) -> None:
    need("cc")
    source, library = tmp_path / "x.c", tmp_path / name
    source.write_text(LIBRARY.replace("START", start).replace("STOP", stop))
    subprocess.run([tool("cc"), "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)

    def said(path: str) -> list[str]:
        command = [sys.executable, "-c", LOADER, path, str(data)]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=60
        ).stdout.splitlines()

    assert said(str(library)) == ["start nobounce read 8192 B cpu", "stop 123456789abcdef0"]
    assert said("") == []


@pytest.fixture
def tool_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/opt/tool.so")


def test_a_module_with_no_tool_behind_it_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody who imports torch has it: each small read would have gone the long way."""
    fake = SimpleNamespace(range_start=lambda name: 5, range_end=lambda n: None)
    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(start_range=lambda name: 5, end_range=print))
    monkeypatch.setitem(sys.modules, "torch.cuda.nvtx", fake)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda="13.0")))
    monkeypatch.delenv("NVTX_INJECTION64_PATH", raising=False)
    assert Ranges.if_loaded(os.devnull) is None
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/opt/tool.so")
    assert Ranges.if_loaded(os.devnull) is not None


@pytest.mark.usefixtures("tool_listens")
def test_ranges_go_through_torch_where_it_brings_nvtx_inside_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    fake = SimpleNamespace(range_start=lambda name: said.append(name) or 5, range_end=said.append)
    monkeypatch.delitem(sys.modules, "nvtx", raising=False)
    monkeypatch.setitem(sys.modules, "torch.cuda.nvtx", fake)
    for cuda, expected in (("13.0", True), (None, False)):
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=cuda)))
        ranges = Ranges.if_loaded(os.devnull)
        assert (ranges is not None) == expected, (
            "on ROCm and on CPU builds torch.cuda.nvtx is not there to be called"
        )
        if ranges is not None:
            operation = Operation("read", "f", "cuda:0", 0, 7, None, 1.0, 1)
            ranges.started(operation)
            ranges.exited(operation)
    assert said == ["nobounce read 7 B cuda:0", 5]


@pytest.mark.usefixtures("tool_listens")
def test_a_module_that_gives_no_handle_is_not_asked_to_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvtx gives None where no tool listens."""
    ended: list[object] = []
    monkeypatch.setitem(
        sys.modules, "nvtx", SimpleNamespace(start_range=lambda name: None, end_range=ended.append)
    )
    ranges = Ranges.if_loaded(os.devnull)
    assert ranges is not None
    operation = Operation("read", "f", "cpu", 0, 7, None, 1.0, 1)
    ranges.started(operation)
    ranges.exited(operation)
    assert ended == []
    assert ranges._open == {}


@pytest.mark.usefixtures("tool_listens")
def test_ranges_go_through_a_module_that_is_imported(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks.start()  # as any transfer before: it would put ranges of the module in itself
    said: list[object] = []
    fake = SimpleNamespace(start_range=lambda name: said.append(name) or "handle", end_range=said.append)
    monkeypatch.setitem(sys.modules, "nvtx", fake)
    ranges = Ranges.if_loaded(os.devnull)
    assert ranges is not None
    hooks.add(ranges)
    with nobounce.open(data) as f, nobounce.Device("cpu").allocate(8192) as buffer:
        f.read(buffer)
    hooks.remove(ranges)
    assert said == ["nobounce read 8192 B cpu", "handle"]


def test_a_trace_that_cannot_be_written_is_said_once_and_costs_the_program_nothing(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config.override(Settings(trace="/no/such/folder/t.json"))
    hooks.start()
    hooks.start()
    with nobounce.open(data) as f, nobounce.Device("cpu").allocate(8192) as buffer:
        assert f.read(buffer).nbytes == 8192
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.startswith("NOBOUNCE_TRACE: /no/such/folder/t.")
    assert "(ENOENT)" in said
    assert said.endswith("the program goes on")


def test_an_interrupt_while_counting_is_being_loaded_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Python 3.12 it comes out of the making of a class as a RuntimeError."""

    def interrupted(name: str) -> object:
        raise RuntimeError("Error calling __set_name__ on 'Field' instance") from KeyboardInterrupt()

    monkeypatch.setattr(hooks, "_started_for", 0)
    monkeypatch.setattr("nobounce.io.hooks.importlib.import_module", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hooks.start()
    monkeypatch.undo()
    hooks.start()
