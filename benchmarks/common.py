"""What every benchmark here needs: the machine in words, page-cache states that are verified, and the disk's limit."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import mmap
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

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
    buffer, nbytes, there = bytearray(CHUNK), path.stat().st_size, 0
    # Anybody's search for huge pages may cost the file a few of its pages: then they are read again.
    for _ in range(3):
        with path.open("rb", buffering=0) as f:
            while f.readinto(buffer):
                pass
        there = resident_bytes(path)
        if there >= nbytes:
            return
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
