"""Blocks into the store: written first, entered into the table then."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nobounce.errors import ArgumentError, ClosedError, named
from nobounce.kv.blocks import Blocks, nothing
from nobounce.kv.fileformat import Key
from nobounce.kv.result import BlockResult, BlockTransfer
from nobounce.protocols import IntArrayLike, SomeStream

if TYPE_CHECKING:
    from nobounce.kv.core import Core

    Array = np.ndarray[Any, Any]

_NOT_CARRIED = ClosedError("the blocks were not carried")


def put(
    core: Core, keys: Sequence[Key], rows: IntArrayLike, stream: SomeStream | None, durable: bool
) -> BlockResult | BlockTransfer:
    """What `BlockStore.put` does."""
    core.check_open()
    if core.readonly:
        raise ArgumentError(f"{named(core.path)} was opened with readonly=True")
    digests, where = core.checked(keys, rows)
    if len(set(digests)) != len(digests):
        raise ArgumentError("a key is given twice: each block of a put has a key of its own")
    count = len(digests)
    if count > core.of.capacity:
        raise ArgumentError(f"{count} blocks do not fit a store of {core.of.capacity}")
    if not count:
        return nothing(stream)
    with core.lock:
        core.check_open()
        core.table.check_size()
        slots = core.slots.take(count)
        core.table.generation += 1
        generation = core.table.generation
        core.under_way += 1
    blocks = Blocks(np.arange(count), slots, where, digests)
    sums = np.zeros(count, np.uint64) if core.checksums else None

    def finish(carried: Callable[[], dict[int, Exception]]) -> BlockResult:
        errors: dict[int, Exception] = dict.fromkeys(range(count), _NOT_CARRIED)
        try:
            errors = carried()
            if durable:
                core.sync()
        except BaseException:
            errors = dict.fromkeys(range(count), _NOT_CARRIED)
            raise
        finally:
            _acknowledge(core, blocks, errors, generation, sums, durable)
        stored = np.ones(count, bool)
        stored[list(errors)] = False
        return BlockResult(stored, int(stored.sum()) * sum(core.of.row_nbytes), errors).check()

    if stream is not None:
        return _put_in_stream(core, blocks, stream, finish, sums, durable)

    def carried() -> dict[int, Exception]:
        if core.mover.staged:
            return core.mover.write_staged(slots, where, sums)
        with core.mover.batch(count) as batch:
            core.mover.add(batch, "write", slots, where)
            return core.mover.failures(batch.wait(), count)

    return finish(carried)


def _put_in_stream(
    core: Core,
    blocks: Blocks,
    stream: SomeStream,
    finish: Callable[[Callable[[], dict[int, Exception]]], BlockResult],
    sums: Array | None,
    durable: bool,
) -> BlockTransfer:
    mover, count, transfer = core.mover, len(blocks.rows), BlockTransfer(None)
    with contextlib.ExitStack() as undo:
        undo.callback(_acknowledge, core, blocks, dict.fromkeys(range(count), _NOT_CARRIED), 0, None, False)
        staging = mover.staging(count) if mover.staged else None
        if staging is not None:
            undo.callback(mover.let_go, staging)
        with mover.batch(count) as batch:
            if staging is not None:
                mover.to_staging(batch, staging, blocks.rows)
            else:
                mover.add(batch, "write", blocks.slots, blocks.rows)
            moved = batch.submit(stream=stream)
        undo.pop_all()

    def carried() -> dict[int, Exception]:
        try:
            errors = mover.failures(moved.result(0), count)
            return errors | mover.write_slots(staging, blocks.slots, sums) if staging is not None else errors
        finally:
            if staging is not None:
                mover.let_go(staging)

    def ended(_: object) -> None:
        if staging is None and not durable:
            transfer._end(lambda: finish(carried))
            return
        work = threading.Thread(target=transfer._end, args=(lambda: finish(carried),), name="nobounce-kv")
        try:
            work.start()  # not the engine's thread: others wait for that one
        except RuntimeError:  # the interpreter is going down
            work.run()

    moved.add_done_callback(ended)
    return transfer


def _acknowledge(
    core: Core,
    blocks: Blocks,
    errors: dict[int, Exception],
    generation: int,
    sums: Array | None,
    durable: bool,
) -> None:
    """Enter the blocks that are in the file into the table; the slots of the others are free again."""
    kept = np.ones(len(blocks.slots), bool)
    kept[list(errors)] = False
    free = blocks.slots
    try:
        if kept.any():
            good = [d for d, k in zip(blocks.digests, kept.tolist(), strict=True) if k]
            with core.lock:
                some = sums[kept] if sums is not None else None
                core.slots.publish(blocks.slots[kept], good, generation, some, durable)
                free = blocks.slots[~kept]
            if durable:
                core.sync()
    finally:
        with core.lock:
            core.slots.give_back(free)
            core.pins.unlock(blocks.slots)
            core.ended_one()
