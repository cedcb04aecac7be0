"""The ring: what goes in comes out once, whatever order, wrap or signal; and where it cannot be had, that is said."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from capabilities import need
from nobounce.io.movers import uring
from nobounce.runtimes import libc

PAGE = 4096
COUNT = 1000


@pytest.fixture
def memory() -> Iterator[int]:
    address = libc.map_memory(COUNT * PAGE)
    yield address
    libc.unmap(address, COUNT * PAGE)


@pytest.fixture
def ring() -> Iterator[uring.Ring]:
    need("io_uring")
    made = uring.Ring(8)
    yield made
    made.close()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "data"
    path.write_bytes(b"".join(i.to_bytes(4, "little") * (PAGE // 4) for i in range(COUNT)))
    opened = os.open(path, os.O_RDONLY)
    yield opened
    os.close(opened)


def reads(fd: int, address: int, pages: list[int]) -> uring.Array:
    made = uring.blank(len(pages))
    made["opcode"], made["fd"] = uring.OP_READ, fd
    made["offset"] = np.array(pages) * PAGE
    made["address"] = address + np.arange(len(pages)) * PAGE
    made["nbytes"] = PAGE
    made["user_data"] = pages
    return made


def test_every_request_completes_once_through_many_wraps_of_a_small_ring(
    ring: uring.Ring, fd: int, memory: int
) -> None:
    assert ring.depth == 8
    pages = np.random.default_rng(1).permutation(COUNT).tolist()
    entries = uring.words(reads(fd, memory, pages))
    seen: list[int] = []
    position = 0
    while len(seen) < COUNT:
        n = min(ring.room, COUNT - position)
        ring.put(entries[position : position + n])
        position += n
        ring.enter(1)
        found = ring.take()
        assert (found["result"] == PAGE).all()
        seen += found["user_data"].tolist()
    assert sorted(seen) == list(range(COUNT))
    assert ring.in_flight == ring.waiting == 0
    held = np.frombuffer(_bytes(memory, COUNT * PAGE), "<u4").reshape(COUNT, -1)
    assert held[:, 0].tolist() == held[:, -1].tolist() == pages


def _bytes(address: int, nbytes: int) -> bytes:
    import ctypes

    return ctypes.string_at(address, nbytes)


def test_a_failing_request_is_a_result_and_no_exception(ring: uring.Ring, memory: int) -> None:
    ring.put(uring.words(reads(-1, memory, [5])))
    ring.enter(1)
    found = ring.take()
    assert found["user_data"].tolist() == [5]
    assert found["result"].tolist() == [-errno.EBADF]


def test_waiting_ends_at_the_timeout_and_at_a_signal(ring: uring.Ring) -> None:
    reader, writer = os.pipe()
    entry = uring.blank(1)
    entry["opcode"], entry["fd"], entry["op_flags"] = uring.OP_POLL_ADD, reader, uring.POLLIN
    ring.put(uring.words(entry))
    ring.enter(1, timeout=0.001)
    assert ring.waiting == 0
    assert ring.in_flight == 1
    caught = threading.Event()
    before = signal.signal(signal.SIGALRM, lambda *_: caught.set())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        while not caught.is_set():
            ring.enter(1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    os.write(writer, b"x")
    ring.enter(1)
    assert len(ring.take()) == 1
    os.close(reader)
    os.close(writer)


def test_it_says_why_there_is_no_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(number: int, *arguments: int) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(uring, "_why_not", None)
    monkeypatch.setattr(uring, "_syscall", forbidden)
    assert "not permitted" in uring.unavailable()


def test_a_kernel_too_old_for_the_flags_gets_plain_ones_and_a_ring_without_features_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need("io_uring")
    real, tries = uring._syscall, []

    def old(number: int, depth: int, params: int) -> int:
        tries.append(depth)
        if len(tries) == 1:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(number, depth, params)

    monkeypatch.setattr(uring, "_syscall", old)
    uring.Ring(2).close()
    assert len(tries) == 2
    monkeypatch.setattr(uring, "_NEEDED", 1 << 31)
    with pytest.raises(OSError, match=r"older than Linux 5\.11"):
        uring.Ring(2)


def test_closing_gives_back_memory_and_descriptor(fd_guard: None) -> None:
    need("io_uring")

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("io_uring")

    before = mappings()  # relays keep some
    ring = uring.Ring(4)
    assert mappings() == before + 2
    ring.close()
    ring.close()
    assert mappings() == before


def test_a_kernel_that_forbids_it_leads_to_threads(tmp_path: Path) -> None:
    """As seccomp filters and kernel.io_uring_disabled do: the set-up call answers with an error."""
    code = """
import os, resource, nobounce
from nobounce.io.movers import uring
def forbidden(*a): raise OSError(38, "Function not implemented")
uring._syscall = forbidden
path = __import__("sys").argv[1]
open(path, "wb").write(bytes(8192))
with nobounce.open(path) as f, nobounce.Device("cpu").allocate(8192) as buf, nobounce.Batch() as b:
    b.read(f, buf, file_offsets=[0, 4096], nbytes=4096)
    print(b.method, len(b.wait().check()))
try:
    nobounce.Batch(method="io_uring")
except nobounce.UnavailableError as e:
    print(e)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "d")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["threads 2", done.stdout.splitlines()[1]]
    assert done.stdout.splitlines()[1].startswith("io_uring_setup: Function not implemented (ENOSYS)")
