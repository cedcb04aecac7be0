"""Issue 13, item 10: bytes of the buffer behind `receipt.nbytes` are undefined on every way, and no byte beyond the request is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import nobounce
from capabilities import need

PAGE = 4096
FILE, ASKED, BUFFER = 10_000, 4 * PAGE, 8 * PAGE
"""The file ends in the third page of four that are asked for; direct reads are whole blocks of it."""


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("how", ["sync", "async", "batch"])
@pytest.mark.parametrize("cache", ["avoid", "use", "auto"])
@pytest.mark.parametrize("require", ["auto", "fastpath", "fallback"])
def test_every_way_moves_the_file_s_bytes_and_stays_inside_the_request(
    tmp_path: Path, device: str, how: str, cache: Any, require: Any
) -> None:
    need("o_direct")
    path = tmp_path / "short.bin"
    path.write_bytes(b"\x11" * FILE)
    on = nobounce.Device(device)
    ways: dict[str, Any] = {"cache": cache, "require": require}
    place: dict[str, Any] = {"nbytes": ASKED, "buffer_offset": PAGE, **ways}
    with nobounce.open(path) as f, on.allocate(BUFFER) as buffer, on.create_stream() as stream:
        buffer.fill(0xAA, stream=stream)
        stream.sync()
        if how == "sync":
            moved = f.read(buffer, **place).nbytes
        elif how == "async":
            moved = f.read_async(buffer, stream=stream, **place).result().nbytes
        else:
            with nobounce.Batch() as batch:
                batch.read(f, buffer, file_offsets=0, nbytes=ASKED, buffer_offsets=PAGE, **ways)
                (end,) = batch.wait().check()
                moved = end.nbytes
        found = buffer.numpy().tobytes()
    assert moved == FILE
    assert found[PAGE : PAGE + FILE] == b"\x11" * FILE
    assert found[:PAGE] == b"\xaa" * PAGE
    assert found[PAGE + ASKED :] == b"\xaa" * (BUFFER - PAGE - ASKED)
