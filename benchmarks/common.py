"""What every benchmark here needs: the machine in words, page-cache states that are verified, and fair races.

A race: one child process per run, its modules imported before the clock starts; competitors take turns, the order
rotates; the parent holds a touched pool of memory and frees it just before each load. On virtual machines memory that was
given back to the host costs several times more to touch again, so that whoever runs after a pause would lose.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import io
import json
import mmap
import os
import platform
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

State = Literal["cold", "warm"]
GIB = 1 << 30
CHUNK = 4 << 20
PAGE = mmap.PAGESIZE
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")
CHILD_SECONDS = 600
SYS_CACHESTAT = 451
_libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """The benchmark cannot measure what its numbers would claim."""


# The machine


def machine(directory: Path, peers: Sequence[str]) -> dict[str, Any]:
    """Cores, memory, kernel, storage of `directory`, and the version of each distribution in `peers` (None: not installed)."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "memory_bytes": meminfo("MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "root": os.geteuid() == 0,
        "huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "storage": storage(directory),
        "versions": {name: version(name) for name in peers},
    }


def print_machine(facts: dict[str, Any]) -> None:
    """The head of every benchmark's output."""
    disk = facts["storage"]
    print(
        f"machine   {facts['cores']} cores of {facts['cpu']}, {facts['memory_bytes'] / GIB:.1f} GiB memory,"
        f" Linux {facts['kernel']}, Python {facts['python']}, transparent huge pages: {facts['huge_pages']}"
    )
    print(f"storage   {disk['file_system']} ({disk['options']}) on {disk['device']}: {disk['disk']}")
    print(
        "versions  " + ", ".join(f"{name} {v or '(not installed)'}" for name, v in facts["versions"].items())
    )


def version(distribution: str) -> str | None:
    """The installed version, None without one."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def meminfo(key: str) -> int:
    """A line of /proc/meminfo, in bytes; 0 if it is not there."""
    return int((_field("/proc/meminfo", key) or "0").split()[0]) * 1024


def storage(directory: Path) -> dict[str, str]:
    """The file system that holds `directory` and the disk under it, by mountinfo and sysfs."""
    place = os.path.realpath(directory)
    best = ("", "unknown", "", "unknown", "")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ", 1)
        numbers, point, options = (
            left.split()[2],
            left.split()[4].encode().decode("unicode_escape"),
            left.split()[5],
        )
        kind, device = right.split()[:2]
        if (place == point or place.startswith(point.rstrip("/") + "/")) and len(point) >= len(best[0]):
            best = (point, kind, numbers, device, options)
    _, kind, numbers, device, options = best
    return {
        "file_system": kind,
        "options": options,
        "device": os.path.basename(device),
        "disk": _disk(numbers),
    }


def _disk(numbers: str) -> str:
    link = Path("/sys/dev/block") / numbers
    if not link.exists():
        return "no block device of its own"
    at = link.resolve()
    if (at / "partition").exists():
        at = at.parent
    # A virtual disk's flag says nothing about what is under it, so it is printed as the kernel has it.
    kind = f"rotational={_text(at / 'queue/rotational') or '?'}"
    size = int(_text(at / "size") or 0) * 512
    model = _text(at / "device/model")
    words = [
        at.name,
        model,
        kind,
        f"{size / GIB:.0f} GiB",
        f"scheduler {_chosen(str(at / 'queue/scheduler'))}",
    ]
    return ", ".join(w for w in words if w)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _chosen(path: str) -> str:
    text = _text(Path(path))
    return text[text.index("[") + 1 : text.index("]")] if "[" in text else text or "unknown"


def _field(path: str, key: str) -> str | None:
    for line in _text(Path(path)).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


# The page cache


def resident_bytes(path: Path) -> int:
    """Bytes of the file in the page cache, in whole pages: cachestat(2), or mincore(2) on a file of our own.

    Raises Refused where neither can be asked.
    """
    with path.open("rb") as f:
        status = os.fstat(f.fileno())
        wanted, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
        if _libc.syscall(SYS_CACHESTAT, f.fileno(), ctypes.byref(wanted), ctypes.byref(found), 0) == 0:
            return int(found[0]) * PAGE
        # mincore says "all resident" for a file that is not ours and that we may not write.
        if status.st_uid != os.geteuid():
            raise Refused(
                f"{path.name}: cachestat is refused and the file is not ours, so its page cache cannot be seen"
            )
        if not status.st_size:
            return 0
        with mmap.mmap(f.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as view:
            pages = -(-status.st_size // PAGE)
            vector, first = (ctypes.c_ubyte * pages)(), ctypes.c_char.from_buffer(view)
            failed = _libc.mincore(
                ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(status.st_size), vector
            )
            del first
            if failed:
                raise Refused(f"{path.name}: neither cachestat nor mincore tells what is in the page cache")
            return sum(v & 1 for v in vector) * PAGE


def drop(path: Path, *, everything: bool) -> None:
    """Make the file cold, and see that it is: written back, dropped, and as root with `everything` drop_caches too.

    Raises Refused if any of it stays in the page cache: reading it would measure memory, not the disk.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    if everything and os.geteuid() == 0:
        with contextlib.suppress(OSError):
            Path("/proc/sys/vm/drop_caches").write_text("1\n")
    left = resident_bytes(path)
    if left:
        raise Refused(
            f"{path.name}: {left:,} bytes stay in the page cache after dropping it, so a cold read cannot be measured"
        )


def warm(path: Path) -> None:
    """Read the file through the page cache, and see that all of it stays there. Raises Refused otherwise."""
    buffer = bytearray(CHUNK)
    with path.open("rb", buffering=0) as f:
        while f.readinto(buffer):
            pass
        nbytes = os.fstat(f.fileno()).st_size
    if (there := resident_bytes(path)) < nbytes:
        raise Refused(
            f"{path.name}: only {there:,} of {nbytes:,} bytes stay in the page cache, so a warm read cannot be measured"
        )


def refuse_memory(directory: Path) -> None:
    """Raise Refused for a directory on a memory file system: it accepts O_DIRECT and has no disk."""
    kind = storage(directory)["file_system"]
    if kind in MEMORY_FILE_SYSTEMS:
        raise Refused(
            f"the directory is on {kind}: its files are page cache and no disk can be measured; give --dir another"
        )


# Races


class Pool:
    """Touched memory, held while nobody loads and freed just before a load. Sizes in bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = min(nbytes, meminfo("MemAvailable") // 3)
        self._memory: mmap.mmap | None = None

    def fill(self) -> None:
        """Map the pool and write to each of its pages."""
        if self._memory is None and self.nbytes:
            self._memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._memory.madvise(mmap.MADV_HUGEPAGE)
            np.frombuffer(self._memory, np.uint8)[::PAGE] = 1

    def free(self) -> None:
        """Give it all to whoever allocates next."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One run. Seconds of wall, user and system time; bytes; `disk_bytes` were read from a block device during the load.

    `imported` counts modules that were first imported under the clock, which nobody should need.
    `peak_growth_bytes` is how far the peak of resident memory rose beyond what was resident before, less the tensors' bytes.
    """

    loader: str
    file: str
    state: State
    run: int
    nbytes: int = 0
    seconds: float = 0.0
    user_seconds: float = 0.0
    system_seconds: float = 0.0
    peak_growth_bytes: int = 0
    disk_bytes: int | None = None
    cache_growth_bytes: int = 0
    imported: int = 0
    digest: str = ""
    receipt: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def gibps(self) -> float:
        return self.nbytes / GIB / self.seconds

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def rotations(names: Sequence[str], runs: int) -> Iterator[tuple[int, str]]:
    """Round robin: each round has everybody once, and begins one further than the round before."""
    for run in range(runs):
        at = run % max(1, len(names))
        for name in (*names[at:], *names[:at]):
            yield run, name


def run_child(command: Sequence[str], get_ready: Callable[[], None]) -> dict[str, Any]:
    """Start a child, wait until its modules are imported, call `get_ready`, let it go, return what it says of its load.

    The last argument that the child is given is the descriptor to answer on: a line "ready", then one line of JSON. A child
    that dies or says nothing for `CHILD_SECONDS` is an answer, too: {"error": why}. It is gone when this returns or raises.
    """
    answers, theirs = os.pipe()
    with open(answers, "rb", buffering=0) as lines, tempfile.TemporaryFile() as words:
        try:
            child = subprocess.Popen(
                [sys.executable, *command, str(theirs)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=words,
                pass_fds=(theirs,),
            )
        finally:
            os.close(theirs)
        try:
            line = _line(lines)
            if line == b"ready\n":
                get_ready()
                _say(child, b"go\n")
                line = _line(lines)
            if line:
                return dict(json.loads(line))
            child.wait(CHILD_SECONDS)
            words.seek(0)
            said = words.read().decode(errors="replace").strip().splitlines()
            return {"error": said[-1] if said else f"exit code {child.returncode}"}
        finally:
            if child.poll() is None:
                child.kill()
            child.communicate()


def _say(child: subprocess.Popen[bytes], words: bytes) -> None:
    # A child that is gone is noticed when it is asked for its answer.
    if child.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(words)
            child.stdin.flush()


def _line(lines: io.FileIO) -> bytes:
    """The next line; b"" if the other side closed before it was whole."""
    text, until = b"", time.monotonic() + CHILD_SECONDS
    while not text.endswith(b"\n"):
        if not select.select([lines], [], [], max(0.0, until - time.monotonic()))[0]:
            return json.dumps({"error": f"no answer in {CHILD_SECONDS} s"}).encode()
        got = lines.read(1 << 16)
        if not got:
            return b""
        text += got
    return text


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, minimum, maximum)."""
    return statistics.median(values), min(values), max(values)


# The disk's limit


def fio_limit(path: Path, depths: Sequence[int] = (8, 16, 32)) -> dict[str, Any]:
    """Sequential direct reads of `path` by fio: {"gibps", "engine", "depth", "memory", "tries"}, or {"missing": why}.

    Small-page buffers understate the disk: fio gets reserved huge pages where there are some, else transparent ones.
    """
    if shutil.which("fio") is None:
        return {"missing": "fio is not installed"}
    tries: list[dict[str, Any]] = []
    why = ""
    for engine in ("io_uring", "libaio"):
        for depth in depths:
            try:
                tries.append(_fio(path, engine, depth))
            except (OSError, subprocess.SubprocessError, ValueError, LookupError) as e:
                why = f"fio failed with {engine}: {getattr(e, 'stderr', '') or e}".strip().splitlines()[0]
                break
        if tries:
            return {**max(tries, key=lambda t: float(t["gibps"])), "tries": tries}
    return {"missing": why}


def _fio(path: Path, engine: str, depth: int) -> dict[str, Any]:
    free = int((_field("/proc/meminfo", "HugePages_Free") or "0").split()[0]) * meminfo("Hugepagesize")
    reserved = free >= (depth + 1) * CHUNK
    command = [
        "fio",
        "--name=limit",
        f"--filename={path}",
        "--rw=read",
        "--bs=4M",
        "--direct=1",
        "--readonly",
    ]
    command += [f"--ioengine={engine}", f"--iodepth={depth}", "--output-format=json", "--thread"]
    command += [
        f"--size={path.stat().st_size // CHUNK * CHUNK}",
        f"--mem={'mmaphuge' if reserved else 'malloc'}",
    ]
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=CHILD_SECONDS
    )
    read = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]
    return {
        "gibps": read["bw_bytes"] / GIB,
        "engine": engine,
        "depth": depth,
        "memory": "reserved huge pages" if reserved else "transparent huge pages",
    }
