"""Nothing lost, 5: a refused synchronous `require="fastpath"` was charged to fallback's errors and to "Asynchronous transfers: refused"."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import nobounce
from nobounce import config
from nobounce.io import hooks
from nobounce.observe import start
from nobounce.observe.report_text import report


@pytest.fixture(autouse=True)
def counting_afresh() -> Iterator[None]:
    start.reset()
    hooks.start()
    yield
    start.reset()
    config.override(None)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").write_bytes(os.urandom(1 << 16))
    return tmp_path / "data"


def refused(data: Path, require: str, *, in_stream: bool) -> nobounce.RouteError:
    """The error of a read that misses every alignment."""
    device = nobounce.Device("cpu")
    with (
        nobounce.open(data) as f,
        device.allocate(1 << 16) as buffer,
        device.create_stream() as stream,
        pytest.raises(nobounce.RouteError) as raised,
    ):
        if in_stream:
            f.read_async(buffer, stream=stream, nbytes=100, file_offset=1, require=require)  # type: ignore[arg-type]
        else:
            f.read(buffer, nbytes=100, file_offset=1, require=require)  # type: ignore[arg-type]
    return raised.value


@pytest.mark.parametrize("in_stream", [False, True])
def test_what_fastpath_alone_was_asked_for_is_fastpaths_error(data: Path, in_stream: bool) -> None:
    error = refused(data, "fastpath", in_stream=in_stream)
    s = nobounce.stats()
    assert error.backend == "fastpath"
    assert s.flow(backend="fastpath", op="read").errors == 1
    assert s.flow(backend="fallback").errors == 0
    assert (s.counters["async_submitted"], s.counters["refused"]) == (0, 1)
    lines = report(s).splitlines()
    assert "Asynchronous transfers: 0, cancelled: 0" in lines
    assert "Requests refused before a byte moved: 1" in lines
    assert [line for line in lines if line.startswith("Total Fallback read errors: 0")]


def test_a_required_fallback_is_fallbacks_error(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPFILE_ALLOW_COMPAT_MODE", "false")
    config.override(None)
    assert refused(data, "fallback", in_stream=False).backend == "fallback"
    assert nobounce.stats().flow(backend="fallback", op="read").errors == 1


def test_with_fallback_forbidden_it_is_fastpaths_error(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPFILE_ALLOW_COMPAT_MODE", "false")
    config.override(None)
    assert refused(data, "auto", in_stream=False).backend == "fastpath"
    assert nobounce.stats().flow(backend="fastpath", op="read").errors == 1
    assert nobounce.stats().flow(backend="fallback").errors == 0
