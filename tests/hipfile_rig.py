"""What the hipFile tests need: a device, a file, memory whose bytes can be set and seen, streams that can be held."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from nobounce import config, hipfile
from nobounce.buffer import Buffer, allocate
from nobounce.config import Settings
from nobounce.device import Device
from nobounce.errors import OpError
from nobounce.hipfile import Error
from nobounce.route.types import MemoryKind
from nobounce.stream import Stream

BLOCK = 4096
CHUNK = 4 << 20
OK = hipfile.SUCCESS


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Bytes that show where they came from: byte i is (i + i // 256 + seed) & 0xFF."""
    row = bytes(range(256))
    rows = (row[(i + seed) % 256 :] + row[: (i + seed) % 256] for i in range(-(-nbytes // 256)))
    return b"".join(rows)[:nbytes]


def part(buffer: Buffer, offset: int, nbytes: int) -> Buffer:
    """A view of some of the bytes."""
    return Buffer.from_handle(buffer.handle + offset, nbytes, device=buffer.device, owner=buffer)


def put(buffer: Buffer, data: bytes, offset: int = 0) -> None:
    """Set bytes of device memory."""
    part(buffer, offset, len(data)).copy_from(bytearray(data), stream=None)
    buffer.device.sync()


def get(buffer: Buffer, offset: int = 0, nbytes: int | None = None) -> bytes:
    """Bytes of device memory."""
    buffer.device.sync()
    view = part(buffer, offset, buffer.nbytes - offset if nbytes is None else nbytes)
    return view.numpy().tobytes()


def fails(code: int, hip: int = 0) -> Error:
    """The error pair to expect."""
    return Error(OpError(code), hip)


def settings(**changes: Any) -> Settings:
    """Put settings in force that take any file system, so that the tests' own does not matter."""
    made = replace(Settings(unsupported_file_systems=True), **changes)
    config.override(made)
    return made


def only(backend: str) -> None:
    """Force one backend."""
    settings(allow_compat_mode=False) if backend == "fastpath" else settings(force_compat_mode=True)


class Rig:
    """A device and a folder; files and memory are closed at the end."""

    def __init__(self, device: str, folder: Path) -> None:
        self.device, self.folder = Device(device), folder
        self.runtime = self.device._runtime
        self._fds: list[int] = []
        self._buffers: list[Buffer] = []
        self._streams: list[Stream] = []
        self._release: list[Callable[[], None]] = []
        self._count = 0

    def path(self) -> Path:
        self._count += 1
        return self.folder / f"file{self._count}"

    def fd(self, data: bytes = b"", flags: int = os.O_RDWR, path: Path | None = None) -> int:
        """A descriptor of a file with this content."""
        path = path or self.path()
        path.write_bytes(data)
        fd = os.open(path, flags)
        self._fds.append(fd)
        return fd

    def file(self, data: bytes = b"", flags: int = os.O_RDWR) -> int:
        """A registered file with this content."""
        error, handle = hipfile.handle_register(self.fd(data, flags))
        assert error == OK
        assert handle is not None
        return handle

    def file_of(self, fd: int) -> int:
        error, handle = hipfile.handle_register(fd)
        assert error == OK
        assert handle is not None
        return handle

    def memory(
        self,
        nbytes: int,
        fill: bytes | None = None,
        *,
        kind: MemoryKind = MemoryKind.DEVICE,
        device: Device | None = None,
    ) -> Buffer:
        """Memory, all bytes 0xEE unless `fill` says otherwise."""
        buffer = allocate(device or self.device, nbytes, kind=kind)
        self._buffers.append(buffer)
        if kind is MemoryKind.DEVICE:
            put(buffer, fill if fill is not None else b"\xee" * nbytes)
        return buffer

    def registered(self, nbytes: int, fill: bytes | None = None) -> Buffer:
        buffer = self.memory(nbytes, fill)
        assert hipfile.buf_register(buffer.handle, nbytes) == OK
        return buffer

    def stream(self, flags: int | None = None, device: Device | None = None) -> int:
        """A non-blocking stream's handle, registered if `flags` is given."""
        stream = (device or self.device).create_stream()
        self._streams.append(stream)
        if flags is not None:
            assert hipfile.stream_register(stream.handle, flags) == OK
        return stream.handle

    def sync(self, stream: int) -> None:
        self.runtime.stream_sync(stream)

    @contextmanager
    def held(self, stream: int) -> Iterator[Callable[[], None]]:
        """The stream does not move until the block ends or the function given is called."""
        reached = threading.Event()
        gate = self.runtime.gate(stream, reached.set)
        try:
            assert reached.wait(30)
            yield gate.open
        finally:
            gate.open()

    def close(self) -> None:
        self.device.sync()
        for release in self._release:
            release()
        for stream in self._streams:
            hipfile.stream_deregister(stream.handle)
            stream.close()
        for buffer in self._buffers:
            buffer.close()
        for fd in self._fds:
            try:
                os.close(fd)
            except OSError:
                continue  # the test closed it


def size_of(fd: int) -> int:
    return os.fstat(fd).st_size


def content(fd: int) -> bytes:
    """The whole file, as a buffered reader sees it."""
    with open(f"/proc/self/fd/{fd}", "rb") as f:
        return f.read()


def in_threads(count: int, act: Callable[[int], None]) -> list[BaseException]:
    """Run `act(i)` in `count` threads that start together; returns what they raised."""
    start, errors = threading.Barrier(count), []

    def run(i: int) -> None:
        try:
            start.wait(30)
            act(i)
        except BaseException as e:  # noqa: BLE001 - handed to the test
            errors.append(e)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads), "a thread hangs"
    return errors
