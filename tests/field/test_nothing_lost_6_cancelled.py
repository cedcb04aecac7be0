"""Cancelling, in the words of concurrent.futures and asyncio; and a device number that is never host memory."""

from __future__ import annotations

import asyncio
import concurrent.futures
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import nobounce
from nobounce.errors import TransferCancelledError
from nobounce.io.awaited import AwaitedCancelledError


@contextmanager
def waiting(path: Path, device: str = "sim:0") -> Iterator[tuple[nobounce.Transfer, threading.Event]]:
    """A transfer whose stream does not get to it before the latch is opened."""
    latch = threading.Event()
    on = nobounce.Device(device)
    path.write_bytes(b"x" * 8192)
    with on.create_stream() as stream, nobounce.open(path) as f, on.allocate(8192) as buffer:
        on._runtime.host_call(stream.handle, latch.wait)
        try:
            yield f.read_async(buffer, stream=stream), latch
        finally:
            latch.set()


def test_result_of_a_cancelled_transfer_is_caught_as_a_future_s(tmp_path: Path) -> None:
    with waiting(tmp_path / "f") as (transfer, _):
        assert transfer.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            transfer.result()
        with pytest.raises(TransferCancelledError) as caught:
            transfer.result()
    assert isinstance(caught.value, Exception)
    assert not isinstance(caught.value, asyncio.CancelledError), (
        "outside a loop nobody expects a BaseException"
    )


def test_awaiting_a_cancelled_transfer_is_awaiting_a_cancelled_future(tmp_path: Path) -> None:
    async def main(transfer: nobounce.Transfer) -> None:
        async def waits() -> nobounce.Receipt:
            return await transfer

        task = asyncio.ensure_future(waits())
        await asyncio.sleep(0)
        assert transfer.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert task.cancelled()
        assert isinstance(caught.value, TransferCancelledError)
        assert isinstance(pickle.loads(pickle.dumps(caught.value)), AwaitedCancelledError)
        with pytest.raises(TransferCancelledError):
            await transfer

    with waiting(tmp_path / "f") as (transfer, _):
        asyncio.run(main(transfer))


def test_cancelling_the_task_cancels_the_transfer(tmp_path: Path) -> None:
    async def main(transfer: nobounce.Transfer) -> None:
        async def waits() -> nobounce.Receipt:
            return await transfer

        task = asyncio.ensure_future(waits())
        await asyncio.sleep(0)
        task.cancel("enough")
        with pytest.raises(asyncio.CancelledError):
            await task
        assert transfer.cancelled()
        assert transfer.done()

    with waiting(tmp_path / "f") as (transfer, _):
        asyncio.run(main(transfer))


def test_a_timeout_around_await_is_a_timeout(tmp_path: Path) -> None:
    async def block(transfer: nobounce.Transfer) -> None:
        async with asyncio.timeout(0):
            await transfer

    async def wait_for(transfer: nobounce.Transfer) -> None:
        await asyncio.wait_for(transfer, 0.01)

    for main in (block, wait_for):
        with waiting(tmp_path / "f") as (transfer, _):
            with pytest.raises(TimeoutError):
                asyncio.run(main(transfer))
            assert transfer.cancelled()


def test_a_task_group_ends_with_its_cancelled_transfer(tmp_path: Path) -> None:
    async def main(transfer: nobounce.Transfer) -> None:
        async def waits() -> nobounce.Receipt:
            return await transfer

        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as group:
                group.create_task(waits())
                await asyncio.sleep(0)
                raise ZeroDivisionError
        assert caught.group_contains(ZeroDivisionError)

    with waiting(tmp_path / "f") as (transfer, _):
        asyncio.run(main(transfer))
        assert transfer.cancelled()


@pytest.mark.parametrize("default", ["", "cpu"])
def test_a_device_number_is_a_gpu_or_an_error(
    default: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if default:
        monkeypatch.setenv("NOBOUNCE_DEVICE", default)
    gpus = [d for d in nobounce.devices() if d.name.startswith(("cuda", "hip"))]
    if gpus:
        assert nobounce.Device(0) == gpus[0]
        return
    for call in (lambda: nobounce.Device(0), lambda: nobounce.load(tmp_path / "none", device=0)):
        with pytest.raises(
            nobounce.UnavailableError, match="a number means a GPU, and there is none: .*'cpu'"
        ):
            call()
