"""Between the rows of the tensors and the slots of the file: straight, or by way of whole slots in memory.

Straight: one request for each row, all in one Batch. Where blocks have checksums, or a row's size is no multiple of a page, whole slots
are put together in memory that is also a file (memfd_create): a GPU's rows go to it and come from it by a Batch as they would to any
file, what is hashed is what moves, and the store's own file sees one aligned request for each slot.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nobounce.buffer import Buffer
from nobounce.errors import FileError, FormatError, UnavailableError
from nobounce.io.batch.batch import Batch
from nobounce.io.file import File

if TYPE_CHECKING:
    from nobounce.io.batch.table import BatchResult
    from nobounce.kv.fileformat import Geometry
    from nobounce.route.types import Cache, Op

    Array = np.ndarray[Any, Any]

KEPT_NBYTES = 256 << 20
"""Memory for whole slots that a store keeps until it is closed."""
STAGED_NBYTES = 16 << 20
"""Whole slots in memory at a time, in a call that waits: they stay in a core's caches between the copy, the sum and the write."""


class Part(NamedTuple):
    """One tensor of the layout: its memory, and the bytes of a row."""

    view: Buffer
    row_nbytes: int

    @property
    def rows(self) -> int:
        return self.view.nbytes // self.row_nbytes

    def table(self) -> Array:
        """Memory of the host as (rows, row_nbytes) bytes. Waits for work that is under way on it."""
        n = self.rows * self.row_nbytes
        table: Array = np.frombuffer(self.view.view(), np.uint8, n).reshape(-1, self.row_nbytes)
        return table


class Staging:
    """`count` whole slots in memory, as an array and as a file."""

    def __init__(self, count: int, slot_nbytes: int) -> None:
        try:
            fd = os.memfd_create("nobounce-kv", os.MFD_CLOEXEC)
            try:
                os.ftruncate(fd, count * slot_nbytes)
                self.memory: Array = np.frombuffer(mmap.mmap(fd, count * slot_nbytes), np.uint8)
                self.slots: Array = self.memory.reshape(count, -1)
                self._scratch: Array = np.empty(0, np.uint8)
                self.file = File.from_fd(fd, "slots in memory")
            finally:
                os.close(fd)
        except OSError as e:
            raise FileError.from_oserror(e, "slots in memory", "make") from e

    def gather(self, table: Array, rows: Array, at: int) -> None:
        """Copy rows of a table to byte `at` of the first slots. By way of memory that is kept, where numpy has no way without a copy: the
        pages of a fresh one cost more than the bytes."""
        to = self.slots[: len(rows), at : at + table.shape[1]]
        if to.flags.c_contiguous:
            np.take(table, rows, axis=0, out=to, mode="clip")
            return
        if self._scratch.size < to.size:
            self._scratch = np.empty(len(self.slots) * table.shape[1], np.uint8)
        between = self._scratch[: to.size].reshape(to.shape)
        np.take(table, rows, axis=0, out=between, mode="clip")
        to[:] = between

    @property
    def nbytes(self) -> int:
        return int(self.slots.nbytes)

    def close(self) -> None:
        self.file.close()


class Mover:
    """Carries blocks of one store."""

    def __init__(
        self, file: File, geometry: Geometry, parts: list[Part], cache: Cache, *, sums: bool
    ) -> None:
        self._file, self._of, self._parts, self._cache = file, geometry, parts, cache
        self._new: Callable[[], Any] | None = xxhash().xxh3_64 if sums else None
        self.staged = sums or any(n % 4096 for n in geometry.row_nbytes)
        self._on_host = all(p.view.device.name == "cpu" for p in parts)
        self._kept: list[Staging] = []
        self._lock = threading.Lock()

    def close(self) -> None:
        while self._kept:
            self._kept.pop().close()

    # straight

    def batch(self, count: int) -> Batch:
        """A batch with room for `count` blocks, row by row."""
        return Batch(capacity=max(1, count * len(self._parts)))

    def add(self, batch: Batch, op: Op, slots: Array, rows: Array) -> None:
        """Add every row of these blocks to the batch; its first requests, in the order of `failures`."""
        self._add(batch, op, self._file, self._of.data_offset + slots * self._of.slot_nbytes, rows)

    def _add(self, batch: Batch, op: Op, file: File, starts: Array, rows: Array) -> None:
        for part, at in zip(self._parts, self._of.part_offsets, strict=True):
            to, of, size = rows * part.row_nbytes, starts + at, part.row_nbytes
            if op == "read":
                batch.read(
                    file, part.view, file_offsets=of, nbytes=size, buffer_offsets=to, cache=self._cache
                )
            else:
                cache = self._write_cache
                batch.write(file, part.view, file_offsets=of, nbytes=size, buffer_offsets=to, cache=cache)

    @property
    def _write_cache(self) -> Cache:
        return "use" if self._cache == "use" else "avoid"

    def failures(self, result: BatchResult, count: int) -> dict[int, Exception]:
        """Why blocks failed, by their place in the call, of requests added by `add`."""
        return self._failures(result, count, np.array(self._of.row_nbytes))

    def _failures(self, result: BatchResult, count: int, asked: Array) -> dict[int, Exception]:
        errors: dict[int, Exception] = {}
        for key, error in result.errors.items():
            errors.setdefault(key % count, error)
        short = result.ids[result.nbytes < asked[result.ids // count]]
        for index in (short % count).tolist():
            if index not in errors:
                errors[index] = FormatError(
                    "the file ends inside a block: it was truncated", filename=self._file.name
                )
        return errors

    # by way of whole slots

    def write_staged(self, slots: Array, rows: Array, sums: Array | None) -> dict[int, Exception]:
        """Write blocks, waiting; fills `sums`. Returns why blocks failed."""
        errors: dict[int, Exception] = {}
        for some, staging in self._chunks(len(slots)):
            first, count = some.start, some.stop - some.start
            if self._on_host:
                for part, at in zip(self._parts, self._of.part_offsets, strict=True):
                    staging.gather(part.table(), rows[some], at)
                bad: dict[int, Exception] = {}
            else:
                with self.batch(count) as batch:
                    self.to_staging(batch, staging, rows[some])
                    bad = self.failures(batch.wait(), count)
            bad |= self.write_slots(staging, slots[some], sums[some] if sums is not None else None)
            errors |= {first + i: e for i, e in bad.items()}
        return errors

    def read_staged(self, slots: Array, rows: Array, sums: Array, checked: Array) -> dict[int, Exception]:
        """Read blocks, waiting, and look at the sums of those that have one. Returns why blocks failed: their rows are as they were."""
        errors: dict[int, Exception] = {}
        for some, staging in self._chunks(len(slots)):
            first, count = some.start, some.stop - some.start
            bad = self.read_slots(staging, slots[some], sums[some], checked[some])
            good = np.setdiff1d(np.arange(count), list(bad))
            if self._on_host:
                here = slice(0, count) if not bad else good  # a slice makes no copy
                for part, at in zip(self._parts, self._of.part_offsets, strict=True):
                    part.table()[rows[some][here]] = staging.slots[here, at : at + part.row_nbytes]
            elif len(good):
                with self.batch(len(good)) as batch:
                    self.from_staging(batch, staging, good, rows[some][good])
                    late = self.failures(batch.wait(), len(good))
                    bad |= {int(good[i]): e for i, e in late.items()}
            errors |= {first + i: e for i, e in bad.items()}
        return errors

    def to_staging(self, batch: Batch, staging: Staging, rows: Array) -> None:
        self._add(batch, "write", staging.file, np.arange(len(rows)) * self._of.slot_nbytes, rows)

    def from_staging(self, batch: Batch, staging: Staging, which: Array, rows: Array) -> None:
        self._add(batch, "read", staging.file, which * self._of.slot_nbytes, rows)

    def write_slots(self, staging: Staging, slots: Array, sums: Array | None) -> dict[int, Exception]:
        count, size = len(slots), self._of.slot_nbytes
        if sums is not None:
            sums[:] = self._sums(staging, count)
        with Batch(capacity=max(1, count)) as batch:
            offsets = self._of.data_offset + slots * size
            batch.write(
                self._file,
                staging.memory,
                file_offsets=offsets,
                nbytes=size,
                cache=self._write_cache,
            )
            return self._failures(batch.wait(), count, np.array([size]))

    def read_slots(self, staging: Staging, slots: Array, sums: Array, checked: Array) -> dict[int, Exception]:
        count, size = len(slots), self._of.slot_nbytes
        offsets = self._of.data_offset + slots * size
        with Batch(capacity=max(1, count)) as batch:
            batch.read(self._file, staging.memory, file_offsets=offsets, nbytes=size, cache=self._cache)
            errors = self._failures(batch.wait(), count, np.array([size]))
        if self._new is not None:
            for index in np.flatnonzero(checked & (self._sums(staging, count) != sums)).tolist():
                why = "the block does not match its checksum: it was damaged in the file"
                errors.setdefault(
                    index, FormatError(why, filename=self._file.name, offset=int(offsets[index]))
                )
        return errors

    def _sums(self, staging: Staging, count: int) -> Array:
        """The XXH3-64 of whole slots; the interpreter's lock is free meanwhile."""
        found = np.empty(count, np.uint64)
        assert self._new is not None
        for index in range(count):
            one = self._new()
            one.update(staging.slots[index])
            found[index] = one.intdigest()
        return found

    def staging(self, count: int) -> Staging:
        """Memory for `count` whole slots or more, of an earlier call where there is one: fresh pages cost more than what is done with them.
        The caller gives it to `let_go`."""
        with self._lock:
            fitting = [s for s in self._kept if len(s.slots) >= count]
            if fitting:
                smallest = min(fitting, key=lambda s: len(s.slots))
                self._kept.remove(smallest)
                return smallest
        return Staging(count, self._of.slot_nbytes)

    def let_go(self, staging: Staging) -> None:
        """Keep the memory for later calls; past KEPT_NBYTES the oldest is given back."""
        with self._lock:
            self._kept.append(staging)
            while sum(s.nbytes for s in self._kept) > KEPT_NBYTES:
                self._kept.pop(0).close()

    def _chunks(self, count: int) -> Iterator[tuple[slice, Staging]]:
        """(places in the call, staging) for each part of a call."""
        at_once = min(count, max(1, STAGED_NBYTES // self._of.slot_nbytes))
        staging = self.staging(at_once)
        try:
            for first in range(0, count, at_once):
                yield slice(first, min(first + at_once, count)), staging
        finally:
            self.let_go(staging)


def xxhash() -> Any:
    try:
        import xxhash
    except ImportError as e:
        raise UnavailableError(
            f"xxhash cannot be imported ({e}): pip install nobounce[checksums], or give checksums=False"
        ) from e
    return xxhash
