"""Every example runs; the round trip says what hipFile's does, and undoes a set-up that fails half-way."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import nobounce
from capabilities import need
from nobounce import hipfile
from nobounce.hipfile.driver import STATE
from nobounce.runtimes import registry

EXAMPLES = Path(__file__).parents[2] / "examples"
ROUNDTRIP = EXAMPLES / "roundtrip_async_multi_stream_registered.py"
LINE = re.compile(r"OK  (\S+) == (\S+)  \(4194304 bytes across 4 registered streams, hash 0x([0-9a-f]{16})\)")


def _run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=100
    )


def test_every_example_is_run_here() -> None:
    assert {p.name for p in EXAMPLES.glob("*.py")} == {"demo.py", "opentelemetry_exporter.py", ROUNDTRIP.name}


def test_the_demo_runs() -> None:
    need("safetensors", "demo_model")
    done = _run(EXAMPLES / "demo.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_transfers_become_opentelemetry_spans(tmp_path: Path) -> None:
    need("opentelemetry")
    path = tmp_path / "data"
    path.write_bytes(bytes(8192))
    done = _run(EXAMPLES / "opentelemetry_exporter.py", path, "sim:0")
    assert done.returncode == 0, done.stderr
    decoder, text, spans = json.JSONDecoder(), done.stdout.strip(), []
    while text:
        span, end = decoder.raw_decode(text)
        spans.append(span)
        text = text[end:].lstrip()
    assert [s["name"] for s in spans] == ["nobounce read"] * 2
    for span in spans:
        moved = [span["attributes"][f"nobounce.{b}_bytes"] for b in ("fastpath", "fallback")]
        assert sum(moved) == 8192
        assert span["start_time"] <= span["events"][0]["timestamp"] <= span["end_time"]


@pytest.mark.parametrize("device", [(), ("sim:1",)])
def test_the_round_trip_prints_hipfiles_line_for_both_apis(tmp_path: Path, device: tuple[str, ...]) -> None:
    need("o_direct")
    read, write = tmp_path / "read", tmp_path / "write"
    done = _run(ROUNDTRIP, read, write, *device)
    assert done.returncode == 0, done.stderr
    lines = [LINE.fullmatch(line) for line in done.stdout.splitlines()]
    assert len(lines) == 2
    for found in lines:
        assert found is not None, done.stdout
        assert found.groups() == (str(read), str(write), "529aaa6348e22325")
    assert read.read_bytes() == write.read_bytes() == bytes(range(256)) * (1 << 14)


def test_a_longer_output_file_is_not_cut(tmp_path: Path) -> None:
    need("o_direct")
    write = tmp_path / "write"
    write.write_bytes(b"z" * ((4 << 20) + 10))
    assert _run(ROUNDTRIP, tmp_path / "read", write, "sim:0").returncode == 0
    assert write.read_bytes()[4 << 20 :] == b"z" * 10


def test_failures_go_to_stderr_with_exit_code_1(tmp_path: Path) -> None:
    for arguments in (
        (),
        (tmp_path / "none" / "read", tmp_path / "write"),
        (tmp_path / "r", tmp_path / "w", "sim:99"),
        (tmp_path / "r", tmp_path / "w", "99"),
    ):
        done = _run(ROUNDTRIP, *arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr
        assert "Traceback" not in done.stderr


@pytest.fixture
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("roundtrip_example", ROUNDTRIP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    while hipfile.use_count():
        hipfile.driver_close()
    hipfile.use(None)


LANE = ["stream_deregister", "buf_deregister"]
BOTH_FILES = ["handle_deregister", "handle_deregister", "driver_close"]


@pytest.mark.parametrize(
    ("step", "after", "expected"),
    [
        ("handle_register", 0, ["driver_close"]),
        ("handle_register", 1, ["handle_deregister", "driver_close"]),
        ("buf_register", 0, BOTH_FILES),
        ("buf_register", 1, LANE + BOTH_FILES),
        ("stream_register", 1, ["buf_deregister", *LANE, *BOTH_FILES]),
        ("read_async", 0, LANE * 4 + BOTH_FILES),
        ("read_async", 1, LANE * 4 + BOTH_FILES),
        ("write_async", 0, LANE * 4 + BOTH_FILES),
    ],
)
def test_a_set_up_that_fails_half_way_is_undone_in_reverse(
    example: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fd_guard: None,
    step: str,
    after: int,
    expected: list[str],
) -> None:
    need("o_direct")
    device = nobounce.Device("sim:0")
    runtime = registry.get("sim")
    files = tmp_path / "read", tmp_path / "write"
    example.roundtrip(example.with_hipfile, str(files[0]), str(files[1]), device)
    live, streams = len(runtime._map.all()), len(runtime._streams)  # type: ignore[attr-defined]
    table, calls = hipfile.dispatch_table, []
    order: list[str] = []
    real = table[step]

    def fails(*args: object) -> object:
        calls.append(args)
        if len(calls) <= after:
            return real(*args)
        error = hipfile.Error(hipfile.OpError.INTERNAL_ERROR)
        return (error, None) if step == "handle_register" else error

    for name in ("stream_deregister", "buf_deregister", "handle_deregister", "driver_close"):
        old = table[name]
        monkeypatch.setitem(table, name, lambda *a, name=name, old=old: (order.append(name), old(*a))[1])
    monkeypatch.setitem(table, step, fails)
    with pytest.raises(example.Failed, match=step):
        example.roundtrip(example.with_hipfile, str(files[0]), str(files[1]), device)
    assert hipfile.use_count() == 0
    assert not STATE.files
    assert not STATE.buffers
    assert order[-1] == "driver_close"
    assert order == expected
    device.sync()
    assert len(runtime._map.all()) <= live  # type: ignore[attr-defined]
    assert len(runtime._streams) <= streams  # type: ignore[attr-defined]


def test_objects_undo_a_failed_set_up_too(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fd_guard: None
) -> None:
    need("o_direct")
    device = nobounce.Device("sim:0")
    with pytest.raises(nobounce.NobounceError):
        monkeypatch.setattr(example, "SLICE", 1 << 62)
        example.with_objects(__file__, str(tmp_path / "none"), device)
