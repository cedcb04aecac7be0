"""A mount that hangs: a FUSE file system of one file, whose daemon stops once that was opened.

The daemon is this file as a program: MOUNTPOINT NBYTES. What waits for an answer that does not come stays in the kernel until its
process ends: no signal that is handled gets it out.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

NAME = "data.bin"
_ROOT, _FILE = 1, 2
_LOOKUP, _FORGET, _GETATTR, _OPEN, _STATFS, _RELEASE = 1, 2, 3, 14, 17, 18
_INIT, _OPENDIR, _RELEASEDIR, _INTERRUPT, _BATCH_FORGET = 26, 27, 29, 36, 42
_DETACH = 2


class Mounted(NamedTuple):
    """The file on it, and the process that serves it."""

    path: Path
    server: subprocess.Popen[str]

    def wait_until_it_hangs(self, pid: int) -> None:
        """Until the process waits for the daemon, which has stopped."""
        assert self.server.stdout is not None
        assert self.server.stdout.readline() == "stopped\n"
        while not any(
            "request_wait_answer" in t.read_text() for t in Path(f"/proc/{pid}/task").glob("*/wchan")
        ):
            time.sleep(0.001)


@contextlib.contextmanager
def hung_mount(folder: Path, nbytes: int) -> Iterator[Mounted]:
    """Mounted at `folder`; at the end it is unmounted, and readers that are still in it get an error."""
    command = [sys.executable, __file__, str(folder), str(nbytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "mounted\n"
            (folder / NAME).open("rb", buffering=0).close()
            yield Mounted(folder / NAME, server)
        finally:
            server.kill()
            ctypes.CDLL(None).umount2(os.fsencode(folder), _DETACH)


def _attributes(node: int, nbytes: int) -> bytes:
    mode, size = (0o40755, 0) if node == _ROOT else (0o100644, nbytes)
    times = (0,) * 6
    return struct.pack("<6Q10I", node, size, size // 512, *times[:3], *times[3:], mode, 1, 0, 0, 0, 4096, 0)


def _answer(opcode: int, node: int, body: bytes, nbytes: int) -> bytes | int:
    """What the kernel is told: a reply, or an errno."""
    if opcode == _INIT:
        return struct.pack("<4I2H2I2HI7I", 7, 31, 1 << 17, 0, 12, 9, 1 << 17, 1, 0, 0, 0, *(0,) * 7)
    if opcode == _GETATTR:
        return struct.pack("<QII", 60, 0, 0) + _attributes(node, nbytes)
    if opcode == _LOOKUP and body.rstrip(b"\0").decode() == NAME:
        return struct.pack("<4QII", _FILE, 0, 60, 60, 0, 0) + _attributes(_FILE, nbytes)
    if opcode in (_OPEN, _OPENDIR):
        return struct.pack("<QII", 1, 0, 0)
    if opcode == _STATFS:
        return bytes(80)
    if opcode in (_RELEASE, _RELEASEDIR):
        return b""
    return errno.ENOENT if opcode == _LOOKUP else errno.ENOSYS


def serve(folder: str, nbytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other"
    if libc.mount(b"hung", os.fsencode(folder), b"fuse.hung", 0, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    print("mounted", flush=True)
    opened = 0
    while True:
        try:
            asked = os.read(fd, 1 << 20)
        except OSError as e:
            if e.errno == errno.ENODEV:
                return  # unmounted
            raise
        _, opcode, unique, node = struct.unpack_from("<IIQQ", asked)
        if opcode in (_FORGET, _BATCH_FORGET, _INTERRUPT):
            continue
        answer = _answer(opcode, node, asked[40:], nbytes)
        error, body = (-answer, b"") if isinstance(answer, int) else (0, answer)
        with contextlib.suppress(FileNotFoundError):  # the request was given up
            os.write(fd, struct.pack("<IiQ", 16 + len(body), error, unique) + body)
        opened += opcode == _OPEN
        if opened == 2:
            print("stopped", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
