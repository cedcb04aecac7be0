"""nobounce.kv.BlockStore: a block is found as it was stored, or it is not found."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nobounce
from capabilities import need
from filesystems import Machine
from nobounce.errors import (
    ArgumentError,
    BusyError,
    ClosedError,
    FileChangedError,
    FileError,
    FileMissingError,
    FormatError,
)
from nobounce.kv import BlockStore
from nobounce.kv.pins import Pins
from scale import cases

ROWS, ROW = 16, 8192
PARTS = 3


class Tensors:
    """PARTS tensors on a device, with rows of bytes that are known."""

    def __init__(self, device: str = "cpu", row: int = ROW, seed: int = 1) -> None:
        self.device, self.row = nobounce.Device(device), row
        self.buffers = [self.device.allocate(ROWS * row) for _ in range(PARTS)]
        made = np.random.Generator(np.random.SFC64(seed))
        self.first = [made.integers(1, 256, (ROWS, row), np.uint8) for _ in range(PARTS)]
        for buffer, rows in zip(self.buffers, self.first, strict=True):
            buffer.copy_from(rows.reshape(-1), stream=None)

    @property
    def layout(self) -> list[tuple[Any, int]]:
        return [(b, self.row) for b in self.buffers]

    def clear(self) -> None:
        for buffer in self.buffers:
            buffer.fill(0, stream=None)

    def row_of(self, row: int) -> list[bytes]:
        return [np.array(b.numpy()).reshape(ROWS, -1)[row].tobytes() for b in self.buffers]

    def stored(self, row: int) -> list[bytes]:
        return [rows[row].tobytes() for rows in self.first]


@pytest.fixture
def tensors() -> Tensors:
    return Tensors()


@pytest.fixture
def make(tmp_path: Path, tensors: Tensors) -> Callable[..., BlockStore]:
    def made(**options: Any) -> BlockStore:
        need("xxhash")
        return BlockStore(tmp_path / "s", **{"layout": tensors.layout, "capacity": 8} | options)

    return made


EMPTY = [bytes(ROW)] * PARTS


@pytest.mark.parametrize("in_stream", [False, True])
@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("row", [ROW, 1000])
@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_blocks_come_back_in_the_rows_asked_for(
    device: str, row: int, checksums: bool, in_stream: bool, tmp_path: Path
) -> None:
    need(*(["xxhash"] if checksums else []))
    tensors = Tensors(device, row)
    stream = tensors.device.create_stream() if in_stream else None
    with BlockStore(tmp_path / "s", layout=tensors.layout, capacity=8, checksums=checksums) as store:
        put = store.put(["a", b"a", 5], [2, 0, 9], stream=stream, durable=row == 1000)
        assert (put.result(20) if stream else put).found.tolist() == [True, True, True]
        tensors.clear()
        got = store.get(["none", 5, "a"], [4, 5, 6], stream=stream)
        assert got.found.tolist() == [False, True, True]
        result = got.result(20) if stream else got
        assert result.nbytes == 2 * PARTS * row
        assert tensors.row_of(4) == [bytes(row)] * PARTS
        assert tensors.row_of(5) == tensors.stored(9)
        assert tensors.row_of(6) == tensors.stored(2)
        assert tensors.row_of(7) == [bytes(row)] * PARTS


def test_work_behind_a_get_in_its_stream_sees_the_blocks(tmp_path: Path) -> None:
    tensors = Tensors("sim:0")
    stream = tensors.device.create_stream()
    with BlockStore(tmp_path / "s", layout=tensors.layout, capacity=8, checksums=False) as store:
        store.put([1], [3])
        tensors.clear()
        transfer = store.get([1], [0], stream=stream)
        copy = tensors.buffers[0].copy_to(None, stream=stream)
        stream.sync()
        assert np.array(copy.numpy())[:ROW].tobytes() == tensors.stored(3)[0]
        assert transfer.result(20).found.all()


def test_a_store_that_is_opened_again_has_its_blocks(
    make: Callable[..., BlockStore], tensors: Tensors
) -> None:
    with make() as store:
        store.put(["a", "b"], [1, 2])
    tensors.clear()
    with make() as store:
        assert len(store) == 2
        assert "a" in store
        assert "c" not in store
        assert store.get(["b"], [0]).found.all()
    assert tensors.row_of(0) == tensors.stored(2)


def test_a_key_has_its_newest_block(make: Callable[..., BlockStore], tensors: Tensors) -> None:
    with make() as store:
        for row in range(10):
            store.put(["a"], [row])
        assert len(store) == 1
    with make() as store:
        assert store.get(["a"], [0]).found.all()
    assert tensors.row_of(0) == tensors.stored(9)


def test_the_least_recently_used_go(make: Callable[..., BlockStore]) -> None:
    with make() as store:
        store.put(range(8), range(8))
        store.get([0, 1], [0, 1])
        store.put([100, 101, 102], [0, 1, 2])
        assert store.contains(range(8)).tolist() == [True, True, False, False, False, True, True, True]
        assert store.contains([100, 101, 102]).all()
        assert len(store) == 8


def test_pinned_blocks_stay(make: Callable[..., BlockStore]) -> None:
    with make() as store:
        store.put(range(8), range(8))
        with store.pinned([0, 1, 2, 99]) as found:
            assert found.tolist() == [True, True, True, False]
            store.put(range(50, 55), range(5))
            assert store.contains([0, 1, 2]).all()
            with pytest.raises(BusyError, match="no room for 6 blocks"):
                store.put(range(60, 66), range(6))
            assert len(store) == 8
            store.put(["a"], [0])
        store.put(range(70, 78), range(8))
        assert not store.contains([0, 1, 2]).any()


def test_a_reader_s_pins_hold_the_writer_off(make: Callable[..., BlockStore], tensors: Tensors) -> None:
    with make() as store, make(readonly=True) as reader:
        store.put(range(8), range(8))
        with reader.pinned([0]) as found:
            assert found.all()
            store.put(range(20, 27), range(7))
            assert store.contains([0]).all()
            assert reader.contains([0, 26]).all()
            with pytest.raises(BusyError):
                store.put(range(30, 38), range(8))
            store.put([0], [9])  # a new block of the key; the pinned one is not overwritten
        assert reader.get([0], [15]).found.all()
    assert tensors.row_of(15) == tensors.stored(9)


def test_a_slot_that_is_read_is_not_written_to_once_its_key_has_a_newer_block(
    make: Callable[..., BlockStore],
) -> None:
    with make() as store:
        store.put([0], [0])
        with store.pinned([0]):
            store.put([0], [9])
            store.put(range(1, 8), range(1, 8))
            assert len(store) == 7
            assert not store.contains([0]).any()  # the one that is not read made room
        store.put([8], [8])
        assert len(store) == 8


def test_a_reader_looks_again_once_it_holds_the_slots(
    make: Callable[..., BlockStore], tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look into the table and the lock the writer puts other blocks there."""
    with make(checksums=False) as store, make(checksums=False, readonly=True) as reader:
        store.put(range(8), range(8))
        add = Pins.add

        def late(pins: Pins, slots: Any) -> Any:
            monkeypatch.setattr(Pins, "add", add)
            store.put(range(10, 18), range(8))
            return pins.add(slots)

        monkeypatch.setattr(Pins, "add", late)
        tensors.clear()
        assert not reader.get(range(4), range(4)).found.any()
        assert [tensors.row_of(row) for row in range(4)] == [EMPTY] * 4
        assert reader.get([10], [0]).found.all()


def test_a_reader_sees_what_the_writer_adds_and_evicts(
    make: Callable[..., BlockStore], tensors: Tensors
) -> None:
    with make() as store, make(readonly=True) as reader:
        assert not reader.contains([1]).any()
        assert len(reader) == 0
        store.put([1], [1])
        assert reader.get([1], [0]).found.all()
        assert tensors.row_of(0) == tensors.stored(1)
        store.put(range(10, 18), range(8))
        assert reader.get([1, 17], [0, 14]).found.tolist() == [False, True]
        assert store.discard([17, 17, "none"]) == 1
        assert not reader.contains([17]).any()
        with pytest.raises(ArgumentError, match="readonly"):
            reader.put([1], [1])


READER = """
import sys, numpy as np, nobounce
rows = np.zeros((8, 8192), np.uint8)
store = nobounce.kv.BlockStore(sys.argv[1], layout=[(rows, 8192)], capacity=6, readonly=True)
print("ready", flush=True)
seen = 0
while True:
    keys = [int(k) for k in np.random.randint(0, 12, 8)]
    result = store.get(keys, range(8))
    result.check()
    for key, row, found in zip(keys, rows, result.found):
        if found:
            assert (row == row[0]).all() and row[0] % 12 == key, (key, row)
            seen += 1
    if seen > 300:
        break
print(seen, flush=True)
"""


@pytest.mark.parametrize("checksums", [False, True])
def test_readers_of_other_processes_never_get_another_block(tmp_path: Path, checksums: bool) -> None:
    """Every block is of one byte that names its key, while the writer evicts all the time."""
    need("xxhash")
    rows = np.zeros((8, 8192), np.uint8)
    with BlockStore(tmp_path / "s", layout=[(rows, 8192)], capacity=6, checksums=checksums) as store:
        command = [sys.executable, "-c", READER, str(tmp_path / "s")]
        readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        try:
            for reader in readers:
                assert reader.stdout is not None
                assert reader.stdout.readline() == "ready\n"
            number = 0
            while any(r.poll() is None for r in readers):
                keys = random.Random(number).sample(range(12), 3)
                rows[:3] = np.array([k + 12 * (number % 20) for k in keys])[:, None]
                with contextlib.suppress(BusyError):  # readers have them all
                    store.put(keys, range(3))
                number += 1
            assert [r.wait() for r in readers] == [0, 0]
            assert number
        finally:
            for reader in readers:
                reader.kill()
                reader.communicate()


def test_bytes_that_are_flipped_anywhere_never_make_a_wrong_block(
    make: Callable[..., BlockStore], tensors: Tensors, tmp_path: Path
) -> None:
    with make() as store:
        store.put(range(8), range(8))
        start, slot = 2 * 4096, store.slot_nbytes
    whole = (tmp_path / "s").read_bytes()
    assert slot == PARTS * ROW
    generator = random.Random(3)
    table = [generator.randrange(start, start + 8 * 64) for _ in range(cases(2000, 60))]
    data = [generator.randrange(len(whole)) for _ in range(cases(2000, 40))]
    lost = 0
    for place in [0, 8, 4095, 4096, 4103, *table, *data]:
        torn = bytearray(whole)
        torn[place] ^= 1 << generator.randrange(8)
        (tmp_path / "s").write_bytes(torn)
        tensors.clear()
        try:
            with make(readonly=bool(generator.getrandbits(1))) as store:
                found = store.get(range(8), range(8)).found.tolist()
        except FormatError:
            assert place < 4096
            continue
        for row, there in enumerate(found):
            assert tensors.row_of(row) == (tensors.stored(row) if there else EMPTY), place
        lost += found.count(False)
        assert found.count(False) <= 1
    assert lost


def test_a_damaged_block_is_named_and_can_be_put_again(
    make: Callable[..., BlockStore], tensors: Tensors, tmp_path: Path
) -> None:
    with make() as store:
        store.put(range(4), range(4))
        with (tmp_path / "s").open("r+b") as f:
            f.seek(-6 * store.slot_nbytes - 100, os.SEEK_END)
            f.write(b"damaged")
        tensors.clear()
        result = store.get(range(4), range(4))
        assert result.found.tolist() == [True, False, True, True]
        with pytest.raises(FormatError, match="does not match its checksum") as caught:
            result.check()
        assert caught.value.offset is not None
        assert list(result.errors) == [1]
        assert not store.contains([1]).any()
        assert tensors.row_of(1) == EMPTY
        store.put([1], [0])
        assert store.get([1], [5]).check().found.all()


def test_a_torn_entry_reads_as_absent(make: Callable[..., BlockStore], tmp_path: Path) -> None:
    with make() as store:
        store.put(range(8), range(8))
    with (tmp_path / "s").open("r+b") as f:
        f.seek(2 * 4096 + 3 * 64)
        f.write(bytes(32))
    with make(readonly=True) as store:
        assert store.contains(range(8)).tolist().count(False) == 1
    with make() as store:
        assert len(store) == 7
        store.put(["a"], [0])
        assert len(store) == 8


def test_an_entry_in_the_place_of_another_reads_as_absent(
    make: Callable[..., BlockStore], tensors: Tensors, tmp_path: Path
) -> None:
    with make(checksums=False) as store:
        store.put(range(7), range(7))
    raw = bytearray((tmp_path / "s").read_bytes())
    table = [bytes(raw[8192 + 64 * n : 8256 + 64 * n]) for n in range(8)]
    for n in range(8):
        raw[8192 + 64 * n : 8256 + 64 * n] = table[(n + 1) % 8]
    (tmp_path / "s").write_bytes(raw)
    with make(checksums=False, readonly=True) as store:
        assert len(store) == 0


def test_after_a_restart_of_the_machine_only_what_is_durable_or_checked_is_believed(
    tmp_path: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(checksums: bool) -> BlockStore:
        return BlockStore(tmp_path / "s", layout=tensors.layout, capacity=8, checksums=checksums)

    need("xxhash")
    with opened(False) as store:
        store.put(["plain"], [0])
        store.put(["durable"], [1], durable=True)
    with opened(True) as store:
        store.put(["checked"], [2])
        assert store.contains(["plain", "durable", "checked"]).all()
    monkeypatch.setattr("nobounce.kv.table.boot", lambda: 1)
    with opened(False) as store:
        assert store.contains(["plain", "durable", "checked"]).tolist() == [False, True, True]


def test_a_second_writer_is_refused_by_name(make: Callable[..., BlockStore]) -> None:
    with make(), pytest.raises(BusyError, match="another BlockStore writes"):
        make()
    make().close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"capacity": 9}, "capacity"),
        ({"identity": "another model"}, "identity"),
        ({"layout": [(bytearray(65536), 4096)] * 6}, "tensors in the layout"),
        ({"layout": [(bytearray(65536), 8192)]}, "bytes in a slot"),
        (
            {"layout": [(bytearray(65536), 4096), (bytearray(65536), 8192), (bytearray(65536), 12288)]},
            "rows have other sizes",
        ),
    ],
)
def test_a_store_of_another_layout_is_refused(
    options: dict[str, Any], says: str, make: Callable[..., BlockStore]
) -> None:
    make().close()
    with pytest.raises(FormatError, match=says):
        make(**options)
    with make() as store:
        assert len(store) == 0


def test_files_that_are_no_store_of_this_version_are_refused_and_stay_as_they_are(
    make: Callable[..., BlockStore], tmp_path: Path
) -> None:
    make().close()
    whole = (tmp_path / "s").read_bytes()
    for raw, says in (
        (b"", "no file of a BlockStore"),
        (bytes(len(whole)), "no file of a BlockStore"),
        (whole[:8] + struct.pack("<I", 2) + whole[12:], "version 2"),
    ):
        (tmp_path / "s").write_bytes(raw)
        for readonly in (False, True):
            with pytest.raises(FormatError, match=says):
                make(readonly=readonly)
        assert (tmp_path / "s").read_bytes() == raw


@pytest.mark.parametrize("checksums", [False, True])
def test_a_truncated_file_is_a_named_error(
    make: Callable[..., BlockStore], tmp_path: Path, checksums: bool
) -> None:
    with make(checksums=checksums) as store, make(readonly=True, checksums=checksums) as reader:
        store.put([1], [1])
        os.truncate(tmp_path / "s", 3 * 4096)
        for call in (lambda: store.get([1], [0]), lambda: store.put([2], [2]), lambda: reader.get([1], [0])):
            with pytest.raises(FileChangedError, match="truncated"):
                call()
    with pytest.raises(FileError, match="truncated"):
        make(checksums=checksums)


def test_a_full_disk_leaves_no_file(disks: Machine, tensors: Tensors) -> None:
    where = disks.get("tmpfs") / "kv"
    where.mkdir()
    with pytest.raises(FileError, match="ENOSPC") as caught:
        BlockStore(where / "s", layout=tensors.layout, capacity=1 << 16, checksums=False)
    assert caught.value.errno == 28
    assert os.listdir(where) == []
    with BlockStore(where / "s", layout=tensors.layout, capacity=8, checksums=False) as store:
        fill = (where / "fill").open("wb")
        with fill, pytest.raises(OSError):
            while True:
                fill.write(bytes(1 << 20))
        assert store.put(range(8), range(8)).found.all()  # its room is its own
        assert store.get(range(8), range(8)).found.all()
    (where / "fill").unlink()


def test_wrong_arguments_are_told(make: Callable[..., BlockStore]) -> None:
    with make() as store:
        for keys, rows, says in (
            ([1, 2], [1], "2 keys and 1 rows"),
            ([1], [ROWS], "the tensors have 16 rows"),
            ([1], [-1], "rows\\[0\\] is -1"),
            ("ab", [1, 2], "one key"),
            ([1.5], [1], "not float"),
            ([True], [1], "not bool"),
        ):
            for call in (store.put, store.get):
                with pytest.raises(ArgumentError, match=says):
                    call(keys, rows)  # type: ignore[call-overload]
        with pytest.raises(ArgumentError, match="key is given twice"):
            store.put([1, 1], [0, 1])
        with pytest.raises(ArgumentError, match="row is given twice"):
            store.get([1, 2], [0, 0])
        with pytest.raises(ArgumentError, match="do not fit"):
            store.put(range(9), range(9))
        assert store.put([], []).found.tolist() == []
        assert store.get([], []).nbytes == 0
        assert len(store) == 0
    for options in ({"capacity": 0}, {"layout": []}, {"layout": [(bytearray(8), 16)]}, {"layout": [7]}):
        with pytest.raises(ArgumentError):
            make(**options)


def test_a_closed_store_says_so(make: Callable[..., BlockStore], tmp_path: Path) -> None:
    store = make()
    store.close()
    store.close()
    for call in (lambda: store.put([1], [1]), lambda: store.get([1], [1]), lambda: len(store), store.sync):
        with pytest.raises(ClosedError):
            call()
    (tmp_path / "s").unlink()
    with pytest.raises(FileMissingError):
        make(readonly=True)


def test_closing_waits_for_what_is_in_a_stream(tmp_path: Path) -> None:
    tensors = Tensors("sim:0")
    stream = tensors.device.create_stream()
    with BlockStore(tmp_path / "s", layout=tensors.layout, capacity=8, checksums=False) as store:
        transfer = store.put(range(8), range(8), stream=stream)
    assert transfer.done()
    assert transfer.result().found.all()
    with BlockStore(tmp_path / "s", layout=tensors.layout, capacity=8, checksums=False) as store:
        assert len(store) == 8


@pytest.mark.parametrize("checksums", [False, True])
def test_a_store_leaves_no_descriptor_open(make: Callable[..., BlockStore], checksums: bool) -> None:
    stream = nobounce.Device("cpu").create_stream()
    counts = []
    for _ in range(3):
        with make(checksums=checksums) as store, make(checksums=checksums, readonly=True) as reader:
            for _ in range(3):
                store.put([1], [1], stream=stream).result(20)
                reader.get([1], [1], stream=stream).result(20)
                store.put([2], [1])
                reader.get([2], [1])
        del store, reader
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1] == counts[2]


@pytest.mark.parametrize("checksums", [False, True])
def test_a_call_that_is_refused_leaves_every_slot_free(
    make: Callable[..., BlockStore], checksums: bool
) -> None:
    elsewhere = nobounce.Device("sim:0").create_stream()
    with make(checksums=checksums) as store, make(checksums=checksums, readonly=True) as reader:
        with pytest.raises(ArgumentError, match="another runtime"):
            store.put(range(8), range(8), stream=elsewhere)
        store.put(range(8), range(8))
        for one in (store, reader):
            with pytest.raises(ArgumentError, match="another runtime"):
                one.get(range(8), range(8), stream=elsewhere)
        assert store.put(range(10, 18), range(8)).found.all()


def test_a_forked_child_is_told_that_the_store_is_its_parent_s(make: Callable[..., BlockStore]) -> None:
    with make() as store:
        store.put([1], [1])
        pid = os.fork()
        if not pid:
            code = 1
            try:
                store.get([1], [1])
            except ClosedError as e:
                code = 0 if "forked" in str(e) else 2
            store.close()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert store.get([1], [1]).found.all()
        with pytest.raises(BusyError):
            make()


def test_threads_share_a_store(make: Callable[..., BlockStore]) -> None:
    errors: list[BaseException] = []
    with make(capacity=64) as store:

        def work(number: int) -> None:
            try:
                for i in range(20):
                    store.put([(number << 8) + i], [number])
                    store.get([(number << 8) + i - 1], [8 + number]).check()
            except BaseException as e:
                errors.append(e)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert len(store) == 64
