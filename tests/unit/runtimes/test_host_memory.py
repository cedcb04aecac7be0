"""Where memory lies, and which allocation an address belongs to."""

from __future__ import annotations

import ctypes
import gc
import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nobounce.clock import THREADS
from nobounce.errors import OutOfMemoryError
from nobounce.facts.machine import this_machine
from nobounce.route.types import MemoryKind
from nobounce.runtimes import libc
from nobounce.runtimes.host import memory as host_memory
from nobounce.runtimes.host.memory import Allocation, AllocationMap, DeviceSpace, HostSpace
from nobounce.runtimes.host.sim import SimRuntime

DEVICE = MemoryKind.DEVICE


def allocation(base: int, nbytes: int) -> Allocation:
    return Allocation(base, nbytes, DEVICE, 0, base)


ranges = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 20), st.booleans()), max_size=40)


@given(ranges)
def test_the_map_finds_what_a_list_of_bytes_would(steps: list[tuple[int, int, bool]]) -> None:
    found_by = AllocationMap(THREADS)
    owner: dict[int, Allocation] = {}
    for base, nbytes, remove in steps:
        if remove and base in owner:
            victim = owner[base]
            assert found_by.remove(victim)
            assert not found_by.remove(victim)
            owner = {k: v for k, v in owner.items() if v is not victim}
            continue
        new = allocation(base, nbytes)
        free = all(b not in owner for b in range(base, base + nbytes))
        assert found_by.add(new) is free
        if free:
            owner.update(dict.fromkeys(range(base, base + nbytes), new))
    for address in range(230):
        assert found_by.find(address) is owner.get(address)


def test_the_map_can_be_read_while_others_write() -> None:
    found_by = AllocationMap(THREADS)
    fixed = allocation(1 << 40, 4096)
    found_by.add(fixed)
    stop = threading.Event()

    def churn(low: int) -> None:
        while not stop.is_set():
            mine = [allocation(low + i * 8192, 4096) for i in range(20)]
            for a in mine:
                assert found_by.add(a)
            for a in mine:
                assert found_by.remove(a)

    threads = [threading.Thread(target=churn, args=(n << 30,)) for n in (1, 2)]
    for t in threads:
        t.start()
    for _ in range(5000):
        assert found_by.find((1 << 40) + 17) is fixed
    stop.set()
    for t in threads:
        t.join()
    assert found_by.all() == [fixed]


@pytest.mark.parametrize("nbytes", [1, 4096, 2 << 20, (2 << 20) + 1, (5 << 20) - 3])
def test_memory_is_zeroed_aligned_and_writable_to_its_end(nbytes: int) -> None:
    a = HostSpace().allocate(nbytes, DEVICE, 0)
    assert a.base % (2 << 20 if nbytes >= 2 << 20 else 4096) == 0
    assert ctypes.string_at(a.base + nbytes - 1, 1) == b"\0"
    ctypes.memset(a.base, 1, nbytes)
    HostSpace().release(a)


def mapping_of(address: int) -> dict[str, str]:
    """Fields of the mapping in /proc/self/smaps that holds `address`; `low` and `high` in hex."""
    found: dict[str, str] = {}
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            first, _, rest = line.partition(" ")
            if not first.endswith(":"):
                if found:
                    return found
                low, _, high = first.partition("-")
                if int(low, 16) <= address < int(high, 16):
                    found = {"low": low, "high": high}
            elif found:
                found[first[:-1]] = rest.strip()
    assert found, "the memory is not mapped"
    return found


def address_space() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * libc.PAGE


def test_the_slack_of_alignment_is_given_back() -> None:
    before = address_space()
    taken = [HostSpace().allocate(2 << 20, DEVICE, 0) for _ in range(50)]
    assert address_space() - before < 120 << 20
    for a in taken:
        HostSpace().release(a)
    assert address_space() - before < 20 << 20


def test_what_nobody_freed_goes_with_the_runtime() -> None:
    """A bounce ring keeps its slots: a program that makes many runtimes ran out of mappings."""
    before = address_space()
    for _ in range(20):
        runtime = SimRuntime(devices=1)
        for _ in range(10):
            runtime.alloc_pinned(4 << 20)
        runtime.alloc(0, 4 << 20)
        del runtime
        gc.collect()
    assert address_space() - before < 100 << 20


def test_large_memory_is_advised_to_huge_pages() -> None:
    a = HostSpace().allocate(3 << 20, DEVICE, 0)
    found = mapping_of(a.base)
    assert "hg" in found["VmFlags"].split()
    small = HostSpace().allocate(4096, DEVICE, 0)
    assert "hg" not in mapping_of(small.base)["VmFlags"].split()
    HostSpace().release(a)
    HostSpace().release(small)


def test_more_than_the_machine_has_is_refused() -> None:
    most = host_memory.host_memory_nbytes()
    said = f"{most + 1} bytes of device memory asked for, this process may have {most} ({this_machine().memory_from})"
    with pytest.raises(OutOfMemoryError, match=f"^{re.escape(said)}$"):
        HostSpace().allocate(most + 1, DEVICE, 0)


def test_a_refused_mapping_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "host_memory_nbytes", lambda: 1 << 62)
    with pytest.raises(OutOfMemoryError, match="mmap: Cannot allocate memory"):
        HostSpace().allocate(1 << 60, DEVICE, 0)


def test_device_addresses_are_not_given_out_twice_soon() -> None:
    space = DeviceSpace(THREADS)
    seen = set()
    for _ in range(100):
        a = space.allocate(4096, DEVICE, 0)
        assert a.base not in seen
        assert a.backing != a.base
        assert space.owns(a.base)
        seen.add(a.base)
        space.release(a)
        assert space.owns(a.base)
    pinned = space.allocate(4096, MemoryKind.PINNED, None)
    assert pinned.backing == pinned.base
    assert not space.owns(pinned.base)
    space.release(pinned)


def test_address_ranges_are_used_again_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_CHUNK", 8 << 20)
    monkeypatch.setattr(host_memory, "_CHUNKS_BEFORE_REUSE", 3)
    space = DeviceSpace(THREADS)
    kept = space.allocate(4096, DEVICE, 0)
    for _ in range(50):
        space.release(space.allocate(4096, DEVICE, 0))
    assert len(space._chunks) == 3
    assert space.owns(kept.base)
    space.release(kept)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("repeats", [1, 3, 1024, 5000])
def test_fill_repeats_a_value(width: int, repeats: int) -> None:
    nbytes = width * repeats
    block = ctypes.create_string_buffer(nbytes + 1)
    value = 0x8A7B6C5D & ((1 << 8 * width) - 1)
    libc.fill(ctypes.addressof(block), value, nbytes, width)
    assert block.raw == value.to_bytes(width, "little") * repeats + b"\0"


def test_copies_release_the_gil() -> None:
    """`ctypes.memmove` would not: while it copies, no Python runs."""
    nbytes = 256 << 20
    a, b = HostSpace().allocate(nbytes, DEVICE, 0), HostSpace().allocate(nbytes, DEVICE, 0)
    running, done = threading.Event(), threading.Event()

    def copy() -> None:
        running.set()
        libc.memcpy(a.base, b.base, nbytes)
        done.set()

    thread = threading.Thread(target=copy)
    thread.start()
    running.wait()
    turns = 0
    while not done.is_set():
        turns += 1
    thread.join()
    HostSpace().release(a)
    HostSpace().release(b)
    assert turns > 1000


def test_memory_is_populated_without_a_free_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(libc.os, "pidfd_open", full)
    nbytes = 4 * libc.HUGE_PAGE
    base = libc.map_huge(nbytes)
    try:
        libc.populate(base, nbytes)
    finally:
        libc.unmap(base, nbytes)
