"""Siblings say the same: an observer that fails stops no call, and a batch's errors carry the cures of single transfers."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

import nobounce
from capabilities import need
from filesystems import mounted_tmpfs
from nobounce.io import hooks


class Broken(hooks.Watcher):
    """Fails at whatever it is told."""

    def __getattribute__(self, name: str) -> object:
        if name.startswith("_"):
            return super().__getattribute__(name)
        raise ZeroDivisionError(name)


@pytest.fixture
def broken() -> Iterator[None]:
    observer = Broken()
    hooks.add(observer)
    yield
    hooks.remove(observer)


def test_a_broken_observer_stops_no_call(
    broken: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    need("numpy")
    path = tmp_path / "f"
    path.write_bytes(bytes(8192))
    device = nobounce.Device("sim:0")
    with device.create_stream() as s, nobounce.open(path) as f, device.allocate(8192) as buf:
        nobounce.register_stream(s)
        nobounce.deregister_stream(s)
        assert f.read(buf).nbytes == 8192
        f.read_async(buf, stream=s).result()
        with nobounce.Batch() as batch:
            batch.read(f, buf, file_offsets=[0, 4096], nbytes=4096, cache="avoid")
            assert batch.wait().ok
    assert any(r.levelno == logging.ERROR and "not concerned" in r.message for r in caplog.records)


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("method", ["threads", "auto"])
def test_a_batch_on_a_full_disk_says_what_a_single_write_says(
    device: str, method: Literal["threads", "auto"], tmp_path: Path
) -> None:
    need("mount", "numpy")
    with mounted_tmpfs(tmp_path, 1 << 20) as folder, nobounce.open(folder / "f", "w") as f:
        buf = nobounce.Device(device).allocate(4 << 20)
        with pytest.raises(nobounce.TransferError) as single:
            f.write(buf)
        f.truncate(0)
        with nobounce.Batch(method=method) as batch:
            batch.write(f, buf, file_offsets=0, nbytes=4 << 20)
            (error,) = batch.wait().errors.values()
    assert isinstance(error, nobounce.TransferError)
    assert error.errno == single.value.errno == errno.ENOSPC
    assert error.cure == single.value.cure == "The disk is full: free space and write again"
