"""Blocks out of the store: pinned while they are read, and checked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nobounce.errors import ArgumentError, FormatError
from nobounce.kv import fileformat
from nobounce.kv.blocks import Blocks, nothing
from nobounce.kv.fileformat import Key
from nobounce.kv.result import BlockResult, BlockTransfer
from nobounce.protocols import IntArrayLike, SomeStream

if TYPE_CHECKING:
    from nobounce.kv.core import Core

    Array = np.ndarray[Any, Any]


def get(
    core: Core, keys: Sequence[Key], rows: IntArrayLike, stream: SomeStream | None
) -> BlockResult | BlockTransfer:
    """What `BlockStore.get` does."""
    core.check_open()
    digests, where = core.checked(keys, rows)
    if len(np.unique(where)) != len(where):
        raise ArgumentError("a row is given twice: each block of a get has a row of its own")
    if not digests:
        return nothing(stream)
    with core.lock:
        core.check_open()
        slots, entries = pinned(core, digests)
        core.under_way += 1
    at = np.flatnonzero(slots >= 0)
    blocks = Blocks(at, slots[at], where[at], [digests[i] for i in at.tolist()])
    found = slots >= 0

    def finish(carried: Callable[[], dict[int, Exception]]) -> BlockResult:
        errors: dict[int, Exception] = {}
        try:
            errors = carried()
        finally:
            _let_go(core, blocks, entries["generation"], errors)
        arrived = found.copy()
        arrived[at[list(errors)]] = False
        nbytes = int(arrived.sum()) * sum(core.of.row_nbytes)
        return BlockResult(arrived, nbytes, {int(at[i]): e for i, e in errors.items()})

    if stream is not None:
        return _get_in_stream(core, blocks, entries, found, stream, finish)

    def carried() -> dict[int, Exception]:
        if not len(at):
            return {}
        if core.mover.staged:
            return core.mover.read_staged(
                blocks.slots, blocks.rows, entries["data_sum"], _is_checked(entries)
            )
        with core.mover.batch(len(at)) as batch:
            core.mover.add(batch, "read", blocks.slots, blocks.rows)
            return core.mover.failures(batch.wait(), len(at))

    return finish(carried)


def _get_in_stream(
    core: Core,
    blocks: Blocks,
    entries: Array,
    found: Array,
    stream: SomeStream,
    finish: Callable[[Callable[[], dict[int, Exception]]], BlockResult],
) -> BlockTransfer:
    mover, count, errors = core.mover, len(blocks.at), dict[int, Exception]()
    early, good = found.copy(), np.arange(count)
    with contextlib.ExitStack() as undo:
        undo.callback(_let_go, core, blocks, entries["generation"], errors)
        staging = mover.staging(count) if mover.staged and count else None
        if staging is not None:
            undo.callback(mover.let_go, staging)
            errors |= mover.read_slots(staging, blocks.slots, entries["data_sum"], _is_checked(entries))
            early[blocks.at[list(errors)]] = False
            good = np.setdiff1d(good, list(errors))
        transfer = BlockTransfer(early)
        moved = None
        if len(good):
            with mover.batch(len(good)) as batch:
                if staging is not None:
                    mover.from_staging(batch, staging, good, blocks.rows[good])
                else:
                    mover.add(batch, "read", blocks.slots, blocks.rows)
                moved = batch.submit(stream=stream)
        undo.pop_all()

    def carried() -> dict[int, Exception]:
        try:
            if moved is None:
                return errors
            late = mover.failures(moved.result(0), len(good))
            return errors | {int(good[i]): e for i, e in late.items()}
        finally:
            if staging is not None:
                mover.let_go(staging)

    if moved is None:
        transfer._end(lambda: finish(carried))
    else:
        moved.add_done_callback(lambda _: transfer._end(lambda: finish(carried)))
    return transfer


def pinned(core: Core, digests: list[bytes]) -> tuple[Array, Array]:
    """The slot of each key, -1 where there is none, all pinned, and the entries of those that there are."""
    if core.readonly:
        core.table.refresh()
    else:
        core.table.check_size()
    slots = core.table.look_up(digests)
    here = np.flatnonzero(slots >= 0)
    slots[here[core.pins.add(slots[here])]] = -1
    if core.readonly:
        # What the writer did between the look and the lock is in the table by now: it moves the counter before it writes to a slot.
        here = np.flatnonzero(slots >= 0)
        try:
            core.table.refresh()
        except BaseException:
            core.pins.remove(slots[here])
            raise
        moved = here[core.table.look_up([digests[i] for i in here.tolist()]) != slots[here]]
        core.pins.remove(slots[moved])
        slots[moved] = -1
    core.table.touch([digests[i] for i in np.flatnonzero(slots >= 0).tolist()])
    return slots, core.table.entries[slots[slots >= 0]]


def _let_go(core: Core, blocks: Blocks, generations: Array, errors: dict[int, Exception]) -> None:
    with core.lock:
        try:
            core.pins.remove(blocks.slots)
            bad = [i for i, e in errors.items() if isinstance(e, FormatError)]
            if bad and not core.readonly:
                slots = blocks.slots[bad]
                same = core.table.entries["generation"][slots] == generations[bad]
                core.slots.discard(slots[same])
        finally:
            core.ended_one()


def _is_checked(entries: Array) -> Array:
    checked: Array = (entries["flags"] & fileformat.CHECKED) != 0
    return checked
