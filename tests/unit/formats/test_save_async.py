"""nobounce.save_async: what is saved is what was there before `staged`, and nothing is lost."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nobounce
from nobounce.errors import ArgumentError, BusyError, FileError, FileMissingError, TransferTimeoutError
from nobounce.testing import faults

MIB = 1 << 20
SIZE, COUNT = 9 * MIB + 100, 6


class Latched:
    """A progress callback that lets a save go on, once its first piece is written, when `latch` is set."""

    def __init__(self) -> None:
        self.latch, self.reached = threading.Event(), threading.Event()

    def __call__(self, backend: str, nbytes: int) -> None:
        self.reached.set()
        assert self.latch.wait(60)


def made(device: str) -> dict[str, Any]:
    source = np.random.default_rng(8)
    arrays = {f"t{i}": source.integers(0, 256, SIZE, dtype=np.uint8) for i in range(COUNT)}
    arrays["strided"] = source.integers(0, 256, (1500, 1000), dtype=np.uint16).T
    if device == "host":
        return arrays
    found = {}
    for name, array in arrays.items():
        found[name] = nobounce.Device(device).allocate(array.nbytes)
        found[name].copy_from(np.ascontiguousarray(array), stream=None)
    return found


def contents(tensors: dict[str, Any]) -> dict[str, bytes]:
    return {
        n: bytes(t.numpy()) if isinstance(t, nobounce.Buffer) else t.tobytes() for n, t in tensors.items()
    }


def overwrite(tensors: dict[str, Any]) -> None:
    for tensor in tensors.values():
        if isinstance(tensor, nobounce.Buffer):
            tensor.fill(0xEE, stream=None)
            tensor.wait()
        else:
            tensor[:] = 0xEE


@pytest.mark.parametrize("most", [None, 20 * MIB], ids=["file", "set"])
@pytest.mark.parametrize("budget", [None, 30 * MIB, 0])
@pytest.mark.parametrize("device", ["host", "cpu", "sim:0"])
def test_memory_may_be_written_once_it_is_staged(
    tmp_path: Path, device: str, budget: int | None, most: int | None
) -> None:
    tensors = made(device)
    before = contents(tensors)
    progress = Latched()
    if budget is not None:  # pieces are written before it is staged
        progress.latch.set()
    transfer = nobounce.save_async(
        tensors, tmp_path / "m", progress=progress, memory_budget=budget, max_shard_nbytes=most
    )
    assert transfer.staged.wait(60)
    if budget is None:
        assert progress.reached.wait(60)
        assert not transfer.done()
    overwrite(tensors)
    progress.latch.set()
    receipt = transfer.result(60)
    assert contents(nobounce.load(tmp_path / "m", device="cpu")) == before
    files = [p for p in [tmp_path / "m", *tmp_path.glob("m/*")] if p.is_file() and p.suffix != ".json"]
    assert receipt.nbytes == sum(p.stat().st_size for p in files)


def test_leased_memory_is_busy_until_it_is_written(tmp_path: Path) -> None:
    tensors = made("cpu")
    before = contents(tensors)
    progress = Latched()
    transfer = nobounce.save_async(tensors, tmp_path / "m", copy=False, progress=progress, checksums=False)
    assert progress.reached.wait(60)
    assert not transfer.staged.is_set()
    with pytest.raises(BusyError):
        tensors["strided"].close()
    with pytest.raises(TransferTimeoutError, match="still under way"):
        transfer.result(0.01)
    progress.latch.set()
    transfer.result(60)
    assert transfer.staged.is_set()
    assert contents(nobounce.load(tmp_path / "m", device="cpu")) == before
    for buffer in tensors.values():
        buffer.close()


def test_what_is_wrong_with_tensors_is_raised_at_once(tmp_path: Path) -> None:
    one = np.ones(3)
    buffer = nobounce.Device("cpu").allocate(10)
    for tensors, options, error in (
        ({"a": one, "b": one}, {}, ArgumentError),
        ({"a": [1]}, {}, TypeError),
        ({"a": one}, {"metadata": {"k": 1}}, TypeError),
        ({"a": buffer}, {"memory_budget": -1}, ArgumentError),
        ({"a": buffer}, {"memory_budget": 1.5}, TypeError),
    ):
        with pytest.raises(error):
            nobounce.save_async(tensors, tmp_path / "m", **options)
    buffer.close()
    assert os.listdir(tmp_path) == []


def test_a_save_that_fails_says_so_and_lets_go(tmp_path: Path) -> None:
    tensors = {"a": nobounce.Device("cpu").allocate(5000), "b": np.ones(7, np.int8)}
    with faults.inject(op="pwrite", error=errno.ENOSPC):
        transfer = nobounce.save_async(tensors, tmp_path / "m")
        error = transfer.exception(60)
    assert isinstance(error, FileError)
    assert error.errno == errno.ENOSPC
    assert transfer.staged.is_set()
    with pytest.raises(FileError):
        transfer.result()
    tensors["a"].close()
    assert os.listdir(tmp_path) == []


def test_an_error_that_nobody_asks_for_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "nobounce"):
        transfer = nobounce.save_async({"a": np.ones(3)}, tmp_path / "gone" / "m")
        ended = threading.Event()
        transfer.add_done_callback(lambda _: ended.set())
        assert ended.wait(60)
        while threading.active_count() > 1 and any(t.name == "nobounce-save" for t in threading.enumerate()):
            pass
        del transfer
        gc.collect()
    assert "error never retrieved" in caplog.text
    assert "gone" in caplog.text


def test_a_save_can_be_awaited(tmp_path: Path) -> None:
    async def work() -> int:
        receipt = await nobounce.save_async({"a": np.ones(3000)}, tmp_path / "m")
        with pytest.raises(FileMissingError):
            await nobounce.save_async({"a": np.ones(3)}, tmp_path / "gone" / "m")
        return receipt.nbytes

    assert asyncio.run(work()) == (tmp_path / "m").stat().st_size


def test_a_process_does_not_end_before_its_save_has(tmp_path: Path) -> None:
    code = """
import sys
import numpy as np
import nobounce
nobounce.save_async({"w": np.full(50_000_000, 7, np.uint8)}, sys.argv[1])
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "m")], capture_output=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, b"")
    back = nobounce.load(tmp_path / "m", device="cpu", framework="numpy")["w"]
    assert back.nbytes == 50_000_000
    assert (back == 7).all()


def test_a_forked_child_is_told_that_the_save_is_its_parents(tmp_path: Path) -> None:
    code = """
import os, sys, threading
import numpy as np
import nobounce
latch, reached = threading.Event(), threading.Event()
def progress(backend, nbytes):
    reached.set()
    latch.wait()
transfer = nobounce.save_async({"w": np.zeros(50_000_000, np.uint8)}, sys.argv[1], progress=progress)
reached.wait()
pid = os.fork()
if not pid:
    try:
        transfer.result(5)
    except nobounce.ClosedError:
        os._exit(0)
    os._exit(1)
assert os.waitpid(pid, 0)[1] == 0
latch.set()
transfer.result()
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "m")], capture_output=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, b"")
