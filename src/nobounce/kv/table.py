"""The slot table: which block lies in which slot, on the disk and in memory.

The writer's memory is the truth while it lives, and every change goes to the file at once. A reader reads the table anew whenever the
change counter beside it has moved, and looks only at the entries that differ. Nothing is mapped: of a file that was truncated a mapping
would kill the process.
"""

from __future__ import annotations

import os
import struct
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from nobounce.errors import FileChangedError, FileError, named, named_errors
from nobounce.kv import fileformat
from nobounce.kv.pins import runs

if TYPE_CHECKING:
    from nobounce.kv.fileformat import Geometry

    Array = np.ndarray[Any, Any]

_COUNTER = struct.Struct("<Q")


class Table:
    """The entries of one store's file. The store's lock is held around every call."""

    def __init__(self, fd: int, path: str, geometry: Geometry, seed: int) -> None:
        self._fd, self._path, self._geometry, self._seed = fd, path, geometry, seed
        self.entries = np.zeros(geometry.capacity, fileformat.ENTRY)
        """What is believed of each slot: zeros where it is free."""
        self.slots: OrderedDict[bytes, int] = OrderedDict()
        """By the first 16 bytes of a key's digest, least recently used first."""
        self._seen: Array = np.zeros(geometry.capacity, fileformat.ENTRY)
        """The table as it was last read."""
        self.counter = -1
        self.generation = 0
        """The newest there has been."""
        self._boot = boot()

    # reading

    def refresh(self) -> None:
        """Read what has changed since the last time. Raises FileChangedError, FileError."""
        self.check_size()
        counter = self._counter()
        if counter == self.counter:
            return
        raw = self._pread(self._geometry.table_offset, self._seen.nbytes)
        found = np.frombuffer(raw, fileformat.ENTRY)
        words, old = (a.view("<u8").reshape(-1, fileformat.WORDS) for a in (found, self._seen))
        changed = np.flatnonzero((words != old).any(axis=1))
        self._seen, self.counter = found, counter
        for slot in changed.tolist():
            self._forget(slot)
        fresh = found[changed]
        good = fileformat.whole(fresh, self._seed) & (fresh["slot"] == changed.astype(np.uint64))
        # After a power cut an entry may be there without its data: what was neither synced nor summed is of this boot, or nothing.
        good &= (fresh["flags"] & (fileformat.CHECKED | fileformat.DURABLE) != 0) | (
            (fresh["boot"] == self._boot) & (self._boot != 0)
        )
        kept = changed[good]
        kept = kept[np.argsort(found["generation"][kept], kind="stable")]
        if len(kept):
            self.generation = max(self.generation, int(found["generation"][kept[-1]]))
        self.entries[kept] = found[kept]
        keys = np.ascontiguousarray(found["key"][kept]).tobytes()
        for index, slot in enumerate(kept.tolist()):
            self._enter(keys[16 * index : 16 * index + 16], slot)

    def look_up(self, digests: list[bytes]) -> Array:
        """The slot of each key's block, -1 where there is none."""
        get = self.slots.get
        slots = np.array([get(d[:16], -1) for d in digests], np.int64)
        tags = np.frombuffer(b"".join(d[16:] for d in digests), "<u8")
        slots[(slots >= 0) & (self.entries["tag"][slots] != tags)] = -1
        return slots

    def touch(self, digests: list[bytes]) -> None:
        """These were used just now."""
        for digest in digests:
            if digest[:16] in self.slots:
                self.slots.move_to_end(digest[:16])

    def check_size(self) -> None:
        """Raises FileChangedError where the file has been truncated."""
        nbytes = os.fstat(self._fd).st_size
        if nbytes < self._geometry.file_nbytes:
            raise self._truncated(nbytes)

    def _truncated(self, nbytes: int) -> FileError:
        why = f"the store was truncated to {nbytes} of {self._geometry.file_nbytes} bytes: remove it, and it is made anew"
        return FileChangedError(f"{named(self._path)}: {why}", 0, self._path)

    def _counter(self) -> int:
        return int(_COUNTER.unpack(self._pread(self._geometry.state_offset, _COUNTER.size))[0])

    def _pread(self, offset: int, nbytes: int) -> bytearray:
        raw = bytearray(nbytes)
        view, at = memoryview(raw), 0
        with named_errors(self._path, "read"):
            while at < nbytes:
                step = os.preadv(self._fd, [view[at:]], offset + at)
                if not step:
                    raise self._truncated(offset + at)
                at += step
        return raw

    # writing: the writer alone

    def claim(self) -> None:
        """Begin as the writer: everything is read, and entries that cannot be believed, or are older than another of their key, are
        cleared."""
        self.refresh()
        self.clear(np.flatnonzero(self._seen["generation"] != self.entries["generation"]))
        self.bump()

    def publish(
        self, slots: Array, digests: list[bytes], generation: int, sums: Array | None, durable: bool
    ) -> Array:
        """Write the entries of blocks whose data is in the file. Returns slots that are free now: of the older blocks of these keys,
        and those given of a key that has a newer one."""
        made = np.zeros(len(slots), fileformat.ENTRY)
        made["key"] = np.frombuffer(b"".join(d[:16] for d in digests), "<u8").reshape(-1, 2)
        made["tag"] = np.frombuffer(b"".join(d[16:] for d in digests), "<u8")
        made["generation"], made["slot"], made["boot"] = generation, slots, self._boot
        made["flags"] = (fileformat.CHECKED if sums is not None else 0) | (
            fileformat.DURABLE if durable else 0
        )
        if sums is not None:
            made["data_sum"] = sums
        fileformat.seal(made, self._seed)
        older = np.array([self.slots.get(d[:16], -1) for d in digests], np.int64)
        late = (older >= 0) & (self.entries["generation"][older] > generation)
        self._store(slots[~late], made[~late])
        for digest, slot in zip(
            (d for d, no in zip(digests, late.tolist(), strict=True) if not no),
            slots[~late].tolist(),
            strict=True,
        ):
            self._enter(digest[:16], slot)
        gone = older[(older >= 0) & ~late]
        self.clear(gone)
        self.bump()
        return np.concatenate([gone, slots[late]])

    def clear(self, slots: Array) -> None:
        """Nothing lies in these slots any more. The counter is the caller's to move."""
        for slot in slots.tolist():
            self._forget(slot)
        self._store(slots, np.zeros(len(slots), fileformat.ENTRY))

    def bump(self) -> None:
        """Tell readers that the table has changed."""
        with named_errors(self._path, "write"):
            os.pwrite(self._fd, _COUNTER.pack((self.counter + 1) % (1 << 64)), self._geometry.state_offset)
        self.counter = (self.counter + 1) % (1 << 64)

    def _store(self, slots: Array, made: Array) -> None:
        order = np.argsort(slots)
        slots, made = slots[order], made[order]
        self.entries[slots] = made
        at = 0
        with named_errors(self._path, "write"):
            for first, count in runs(slots):
                raw = made[at : at + count].tobytes()
                os.pwrite(self._fd, raw, self._geometry.table_offset + first * fileformat.ENTRY.itemsize)
                at += count

    def _enter(self, key: bytes, slot: int) -> None:
        old = self.slots.pop(key, None)
        if old is not None and old != slot:
            self.entries[old] = 0
        self.slots[key] = slot

    def _forget(self, slot: int) -> None:
        entry = self.entries[slot]
        key = entry["key"].tobytes()
        if entry["generation"] and self.slots.get(key) == slot:
            del self.slots[key]
        self.entries[slot] = 0


def boot() -> int:
    """32 bits that stand for this boot of the machine; 0 where the kernel does not say, which no entry has."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
            return int(f.read(8), 16) or 1
    except (OSError, ValueError):
        return 0
