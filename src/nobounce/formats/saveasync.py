"""A save that goes on while its caller does."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any

from nobounce import forked, reaper
from nobounce.buffer import Buffer
from nobounce.errors import ArgumentError, TransferTimeoutError, named
from nobounce.facts.machine import machine_facts
from nobounce.facts.source import LiveSource
from nobounce.formats.checksums import digest
from nobounce.formats.filewriter import Hooks, Progress
from nobounce.formats.nocollect import no_collection
from nobounce.formats.save import check_metadata, check_path, save_sources
from nobounce.formats.sources import sources
from nobounce.formats.staging import Staging
from nobounce.io.receipt import Receipt
from nobounce.protocols import BufferLike

_log = logging.getLogger("nobounce")


class SaveTransfer:
    """A save under way. Dropping it loses nothing: the save goes on, and a process
    does not end before it has.

    `staged` is set when the tensors' memory may be written again: when it is copied, or written; also where
    the save has failed. What was saved, or why it was not, `result` tells.
    """

    staged: threading.Event

    def __init__(self, path: str) -> None:
        self._path, self._born = path, reaper.generation()
        self._future: concurrent.futures.Future[Receipt] = concurrent.futures.Future()
        self._heard = False
        self.staged = threading.Event()

    def done(self) -> bool:
        """Whether the save has ended, with a receipt or an error."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Receipt:
        """Wait for the end and return the Receipt. Raises what `save` raises, and TransferTimeoutError
        after `timeout` seconds."""
        self._wait(timeout)
        return self._future.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end and return the error, or None. Raises TransferTimeoutError
        after `timeout` seconds."""
        self._wait(timeout)
        return self._future.exception()

    def add_done_callback(self, fn: Callable[[SaveTransfer], object]) -> None:
        """Call `fn(transfer)` once at the end, on the thread that saves, or now if it has ended."""
        self._future.add_done_callback(lambda _: fn(self))

    def __await__(self) -> Generator[Any, None, Receipt]:
        """As `result`, in a task. Cancelling the task does not end the save."""
        from asyncio import shield, wrap_future

        self._heard = True
        return shield(wrap_future(self._future)).__await__()

    def _wait(self, timeout: float | None) -> None:
        if self._born != reaper.generation():
            raise forked.error("save")
        if not concurrent.futures.wait([self._future], timeout).done:
            raise TransferTimeoutError(f"{named(self._path)}: the save is still under way after {timeout} s")
        self._heard = True

    def _run(self, work: Callable[[], Receipt]) -> None:
        try:
            receipt = work()
        except BaseException as e:
            self.staged.set()
            self._future.set_exception(e)
        else:
            self.staged.set()
            self._future.set_result(receipt)

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if at_exit() or getattr(self, "_heard", True) or not self._future.done():
            return
        error = self._future.exception()
        if error is not None:
            _log.error("error never retrieved: %s", error)

    def __repr__(self) -> str:
        state = "done" if self.done() else "staged" if self.staged.is_set() else "under way"
        return f"<SaveTransfer of {named(self._path)}, {state}>"


def save_async(
    tensors: Mapping[str, BufferLike],
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    max_shard_nbytes: int | None = None,
    checksums: bool = False,
    fsync: bool = True,
    progress: Progress | None = None,
    memory_budget: int | None = None,
    copy: bool = True,
) -> SaveTransfer:
    """Save as `save` does, on a thread of its own; returns at once a SaveTransfer.

    The tensors must not be written to before `transfer.staged` is set. With `copy`, that is when copies
    of them are on the host, in `memory_budget` bytes at most (default: a quarter of this process's
    memory): what does not fit is written first, from where it is. Without `copy`, their memory is leased
    until all is written, and nothing is copied but what must be gathered. Meanwhile closing a Buffer that
    is saved raises BusyError.

    What is wrong with the tensors and the metadata is raised now, as by `save`; all else comes
    out of the SaveTransfer.
    """
    name, texts = check_path(path), check_metadata(metadata)
    if checksums:
        digest(b"")
    budget = _budget(memory_budget)
    with no_collection():
        found = sources(tensors)
    leases = contextlib.ExitStack()
    for value in tensors.values():
        if isinstance(value, Buffer):
            leases.enter_context(value.in_use())
    transfer = SaveTransfer(name)

    def freed() -> None:
        leases.close()
        found.clear()
        transfer.staged.set()

    staging = Staging(budget, freed) if copy else None
    hooks = Hooks(progress) if staging is None else staging.hooks(progress)

    def work() -> Receipt:
        with leases:
            return save_sources(
                list(found), name, texts, max_shard_nbytes, sums=checksums, fsync=fsync, hooks=hooks
            )

    try:
        threading.Thread(target=transfer._run, args=(work,), name="nobounce-save").start()
    except RuntimeError:  # no further thread can be started
        transfer._run(work)
    return transfer


def _budget(given: int | None) -> int:
    if given is None:
        return machine_facts(LiveSource()).own_memory_nbytes // 4
    if isinstance(given, bool) or not isinstance(given, int):
        raise TypeError(f"memory_budget is an int, not {type(given).__name__}")
    if given < 0:
        raise ArgumentError(f"memory_budget {given} is below 0")
    return given
