"""Real file systems on loop devices, made on first use and taken down whatever happens."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from capabilities import need, tool

MIB = 1 << 20


@dataclass
class Machine:
    """Makes file systems below `root`; `close` unmounts and detaches everything, last first."""

    root: Path
    _undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _made: dict[str, Path] = field(default_factory=dict)

    def get(self, name: str) -> Path:
        """The mount point of file system `name` (a key of MAKERS), made on first use."""
        if name not in self._made:
            self._made[name] = getattr(self, MAKERS[name][0])(name, *MAKERS[name][1])
        return self._made[name]

    def run(self, *command: str | Path) -> str:
        words = [str(c) for c in command]
        done = subprocess.run(
            [tool(words[0]), *words[1:]], capture_output=True, text=True, check=False, timeout=60
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def loop(self, name: str, nbytes: int, *mkfs: str, within: Path | None = None) -> Path:
        """A loop device over a sparse file with a file system made by `mkfs`."""
        need("loop", mkfs[0])
        image = (within or self.root) / f"{name}.img"
        with image.open("wb") as f:
            f.truncate(nbytes)
        self.run(*mkfs, image)
        device = Path(self.run("losetup", "--find", "--show", image))
        self._undo.callback(self.run, "losetup", "--detach", device)
        return device

    def mount(self, source: str | Path, name: str, *options: str) -> Path:
        point = self.root / name
        point.mkdir()
        self.run("mount", *options, source, point)
        self._undo.callback(self._unmount, point)
        return point

    def _unmount(self, point: Path) -> None:
        """A failed test may still hold a file open: its traceback keeps it."""
        try:
            self.run("umount", point)
        except RuntimeError:
            self.run("umount", "--lazy", point)

    def _ext4(self, name: str, make: tuple[str, ...], options: str, tune: str) -> Path:
        device = self.loop(name, 64 * MIB, "mkfs.ext4", "-q", "-F", *make)
        if tune:
            self.run("tune2fs", "-o", tune, device)
        return self.mount(device, name, *(("-o", options) if options else ()))

    def _plain(self, name: str, mkfs: str, mib: int, *flags: str) -> Path:
        return self.mount(self.loop(name, mib * MIB, mkfs, *flags), name)

    def _tmpfs(self, name: str) -> Path:
        need("mount")
        return self.mount("none", name, "-t", "tmpfs", "-o", "size=64m")

    def _overlay(self, name: str) -> Path:
        need("overlay")
        base = self.get("ext4-ordered")
        for part in ("lower", "upper", "work"):
            (base / part).mkdir(exist_ok=True)
        where = f"lowerdir={base / 'lower'},upperdir={base / 'upper'},workdir={base / 'work'}"
        return self.mount("overlay", name, "-t", "overlay", "-o", where)

    def _loop_on_loop(self, name: str) -> Path:
        device = self.loop(name, 32 * MIB, "mkfs.ext4", "-q", "-F", within=self.get("xfs"))
        return self.mount(device, name)

    def half_compressed(self, name: str, half_nbytes: int) -> tuple[Path, bytes]:
        """A btrfs file, nothing of it cached: as many plain bytes as compressed ones behind them."""
        path = self.get("btrfs") / name
        plain, packed = os.urandom(half_nbytes), b"nobounce" * (half_nbytes // 8)
        with path.open("wb") as f:
            f.write(plain)
            os.fsync(f.fileno())
            self.run("btrfs", "property", "set", path, "compression", "zstd")
            f.write(packed)
            f.flush()
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return path, plain + packed

    def _packed(self, name: str) -> Path:
        """squashfs, which is made with its content: `packed.bin`, of which the second half can be compressed."""
        need("loop", "mksquashfs", "squashfs")
        folder, image = self.root / f"{name}.d", self.root / f"{name}.img"
        folder.mkdir()
        (folder / "packed.bin").write_bytes(os.urandom(MIB) + b"nobounce" * (MIB // 8))
        self.run("mksquashfs", folder, image, "-quiet", "-no-progress")
        return self.mount(image, name, "-t", "squashfs", "-o", "loop,ro")

    def _fuse(self, name: str, *options: str) -> Path:
        need("fuse")
        backing, point = self.root / f"{name}.d", self.root / name
        backing.mkdir()
        point.mkdir()
        server = Path(__file__).parent / "fuse_server.py"
        process = subprocess.Popen([sys.executable, str(server), str(backing), str(point), *options])
        self._undo.callback(process.wait, 30)
        self._undo.callback(self._unmount, point)
        while not os.path.ismount(point):
            if process.poll() is not None:
                raise RuntimeError(f"the FUSE server ended with {process.returncode}")
            time.sleep(0.01)
        return point

    def _btrfs_compressed(self, name: str) -> Path:
        device = self.loop(name, 128 * MIB, "mkfs.btrfs", "-q")
        return self.mount(device, name, "-o", "compress-force=zstd")

    def _bind(self, name: str) -> Path:
        return self.mount(self.get("ext4-ordered"), name, "--bind")

    def close(self) -> None:
        self._undo.close()


MAKERS: dict[str, tuple[str, tuple[object, ...]]] = {
    "ext4-ordered": ("_ext4", ((), "", "")),
    "ext4-journal": ("_ext4", ((), "data=journal", "")),
    "ext4-writeback": ("_ext4", ((), "data=writeback", "")),
    "ext4-no-journal": ("_ext4", (("-O", "^has_journal"), "", "")),
    "ext4-block-mapped": ("_ext4", (("-O", "^has_journal,^extent,^64bit,^metadata_csum"), "", "")),
    "ext4-tuned-writeback": ("_ext4", ((), "", "journal_data_writeback")),
    "xfs": ("_plain", ("mkfs.xfs", 320, "-q")),
    "btrfs": ("_plain", ("mkfs.btrfs", 128, "-q")),
    "tmpfs": ("_tmpfs", ()),
    "overlay": ("_overlay", ()),
    "loop-on-loop": ("_loop_on_loop", ()),
    "bind": ("_bind", ()),
    "btrfs-compressed": ("_btrfs_compressed", ()),
    "squashfs": ("_packed", ()),
    "fuse": ("_fuse", ()),
    "fuse-direct-io": ("_fuse", ("direct-io",)),
}


@contextlib.contextmanager
def machine(root: Path) -> Iterator[Machine]:
    """A Machine that is taken down at the end."""
    made = Machine(root)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def mounted_tmpfs(root: Path, nbytes: int) -> Iterator[Path]:
    """A tmpfs of its own of `nbytes` bytes below `root`, to be filled."""
    need("mount")
    with contextlib.ExitStack() as undo:
        machine = Machine(root, undo)
        yield machine.mount("none", f"tmpfs-{nbytes}", "-t", "tmpfs", "-o", f"size={nbytes}")
