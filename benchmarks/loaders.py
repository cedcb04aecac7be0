"""The competitors, each called as a careful user of it would, and the child process that runs one of them once.

    python benchmarks/loaders.py NAME PATH DESCRIPTOR     (benchmarks/load.py calls it)

`prepare` runs before the clock starts, `load` while it runs, `tensors` after it has stopped: there every byte is summed,
so that a lazy loader is caught and all are shown to have brought the same bytes.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import math
import mmap
import os
import resource
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from files import ITEMSIZE

Bytes = npt.NDArray[np.uint8]
CHUNK = 4 << 20
HUGE = 2 << 20
MADV_POPULATE_READ = 22
MASK = (1 << 64) - 1


class Loader:
    """One way to bring a file into host memory. `modules` are imported before the clock starts."""

    name = ""
    title = ""
    modules: tuple[str, ...] = ()
    peer = False
    lazy = False

    def prepare(self, path: str) -> None:
        """What the clock must not see."""

    def load(self, path: str) -> Any:
        raise LookupError(self.name)

    def tensors(self, loaded: Any) -> Iterable[tuple[str, Bytes]]:
        """Each tensor's bytes, flat."""
        return ((name, flat(array)) for name, array in loaded.items())

    def receipt(self, loaded: Any) -> dict[str, Any]:
        return {}


def flat(array: Any) -> Bytes:
    """The bytes of a numpy array or torch tensor, without a copy."""
    if not isinstance(array, np.ndarray):
        import torch

        array = array.contiguous().view(torch.uint8).numpy()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class Nobounce(Loader):
    name, title = "nobounce", "nobounce.load"
    modules: tuple[str, ...] = ("numpy", "ml_dtypes", "nobounce")
    framework: Literal["numpy", "torch"] | None = None
    cache: Literal["auto", "avoid"] = "auto"

    def prepare(self, path: str) -> None:
        import nobounce

        # Names and runtimes are loaded on first use: those are imports, which the clock must not see. No thread starts.
        for name in nobounce.__all__:
            getattr(nobounce, name)
        nobounce.Device("cpu")
        for name in ("start", "counters", "export", "ranges"):
            importlib.import_module(f"nobounce.observe.{name}")

    def load(self, path: str) -> Any:
        import nobounce

        return nobounce.load(path, device="cpu", framework=self.framework, cache=self.cache)

    def tensors(self, loaded: Any) -> Iterable[tuple[str, Bytes]]:
        return ((name, flat(t.numpy() if self.framework is None else t)) for name, t in loaded.items())

    def receipt(self, loaded: Any) -> dict[str, Any]:
        return dict(loaded.receipt.to_dict())


class NobounceNumpy(Nobounce):
    name, title, framework = "nobounce-numpy", "nobounce.load, numpy", "numpy"


class NobounceTorch(Nobounce):
    name, title, framework = "nobounce-torch", "nobounce.load, torch", "torch"
    modules = (*Nobounce.modules, "torch")


class NobounceAvoid(Nobounce):
    name, title, cache = "nobounce-avoid", "nobounce.load, cache=avoid", "avoid"


class SafetensorsClone(Loader):
    name, title, modules = "safetensors-clone", "safetensors.torch + clone", ("torch", "safetensors.torch")

    def load(self, path: str) -> Any:
        from safetensors.torch import load_file

        # A mapped tensor may go once it is copied; popping keeps a fair peak.
        mapped = load_file(path)
        return {name: mapped.pop(name).clone() for name in list(mapped)}


class SafetensorsPread(Loader):
    name, title, modules = "safetensors-pread", "safetensors.torch, pread", ("torch", "safetensors.torch")

    def load(self, path: str) -> Any:
        from safetensors.torch import load_file

        return load_file(path, backend="pread")


class SafetensorsNumpy(Loader):
    name, title, modules = (
        "safetensors-numpy",
        "safetensors.numpy",
        ("numpy", "ml_dtypes", "safetensors.numpy"),
    )

    def load(self, path: str) -> Any:
        from safetensors.numpy import load_file

        return load_file(path)


class SafetensorsLazy(Loader):
    name, title, modules, lazy = (
        "safetensors-lazy",
        "safetensors.torch, mapped",
        ("torch", "safetensors.torch"),
        True,
    )

    def load(self, path: str) -> Any:
        from safetensors.torch import load_file

        return load_file(path)


def read_header(raw: bytes | memoryview) -> dict[str, Any]:
    header = json.loads(bytes(raw))
    header.pop("__metadata__", None)
    return dict(header)


class ReadInto(Loader):
    """What anybody would write, and would be lucky to: np.empty asks for huge pages, bytearray does not."""

    name, title = "readinto", "plain readinto, np.empty"
    modules = ("numpy", "ml_dtypes")

    def room(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, np.uint8)

    def load(self, path: str) -> Any:
        import ml_dtypes

        kinds = {
            "F32": np.float32,
            "BF16": ml_dtypes.bfloat16,
            "F16": np.float16,
            "I64": np.int64,
            "U8": np.uint8,
        }
        with open(path, "rb", buffering=0) as f:
            header = read_header(f.read(int.from_bytes(f.read(8), "little")))
            data = self.room(os.fstat(f.fileno()).st_size - f.tell())
            left = memoryview(data)
            while left and (got := f.readinto(left)):
                left = left[got:]
        arrays = {}
        for name, info in header.items():
            start, end = info["data_offsets"]
            arrays[name] = data[start:end].view(kinds[info["dtype"]]).reshape(info["shape"])
        return arrays


class ReadIntoBytearray(ReadInto):
    """The same into a bytearray, which is zeroed first, on small pages."""

    name, title = "readinto-bytearray", "plain readinto, bytearray"

    def room(self, nbytes: int) -> Bytes:
        return np.frombuffer(bytearray(nbytes), np.uint8)


class Direct(Loader):
    """The yardstick of the cold race: O_DIRECT, four threads, 4 MiB each, into memory that is there; no tensors are made."""

    name, title, modules = "odirect", "O_DIRECT yardstick", ("numpy",)
    threads = 4

    def prepare(self, path: str) -> None:
        nbytes = os.stat(path).st_size
        room = -(-nbytes // CHUNK) * CHUNK
        self.memory = mmap.mmap(-1, room + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self.memory, np.uint8)
        whole[:: mmap.PAGESIZE] = 1
        start = -whole.ctypes.data % HUGE
        self.buffer = memoryview(self.memory)[start : start + room]
        self.nbytes = nbytes

    def load(self, path: str) -> Any:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        turn, problems = itertools.count(), []

        def work() -> None:
            try:
                while (at := next(turn) * CHUNK) < self.nbytes:
                    got = os.preadv(fd, [self.buffer[at : at + CHUNK]], at)
                    if got < min(CHUNK, self.nbytes - at):
                        raise OSError(f"{got} bytes at {at}")
            except OSError as e:
                problems.append(e)

        team = [threading.Thread(target=work) for _ in range(self.threads)]
        for t in team:
            t.start()
        for t in team:
            t.join()
        os.close(fd)
        if problems:
            raise problems[0]
        return self.buffer

    def tensors(self, loaded: Any) -> Iterable[tuple[str, Bytes]]:
        base = 8 + int.from_bytes(loaded[:8], "little")
        data = np.frombuffer(loaded, np.uint8)
        for name, info in read_header(loaded[8:base]).items():
            start, end = info["data_offsets"]
            yield name, data[base + start : base + end]


class FastSafetensors(Loader):
    name, title, modules = "fastsafetensors", "fastsafetensors", ("torch", "fastsafetensors")
    peer = True

    def load(self, path: str) -> Any:
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup

        self.loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
        self.loader.add_filenames({0: [path]})
        self.files = self.loader.copy_files_to_device()
        return {key: self.files.get_tensor(key) for key in self.files.key_to_rank_lidx}


class Runai(Loader):
    name, title, modules = "runai", "runai-model-streamer", ("torch", "runai_model_streamer")
    peer = True

    def load(self, path: str) -> Any:
        from runai_model_streamer import SafetensorsStreamer

        self.streamer = SafetensorsStreamer()
        self.streamer.stream_file(path, device="cpu", owned=True)
        return dict(self.streamer.get_tensors())


LOADERS: dict[str, type[Loader]] = {
    kind.name: kind
    for kind in (
        Nobounce,
        NobounceNumpy,
        NobounceTorch,
        NobounceAvoid,
        SafetensorsClone,
        SafetensorsPread,
        SafetensorsNumpy,
        ReadInto,
        ReadIntoBytearray,
        Direct,
        FastSafetensors,
        Runai,
        SafetensorsLazy,
    )
}


def digest(tensors: Iterable[tuple[str, Bytes]]) -> str:
    """One number for all bytes of all tensors, in any order: each sum of 64-bit words counts by its tensor's name and size."""
    total = 0
    for name, data in tensors:
        whole = data.nbytes // 8 * 8
        words = int(np.add.reduce(data[:whole].view("<u8"), dtype=np.uint64)) if whole else 0
        words += int.from_bytes(data[whole:].tobytes(), "little") + data.nbytes
        total += words * (zlib.crc32(name.encode()) | 1)
    return f"{total & MASK:016x}"


def reference(path: Path) -> str:
    """The digest of what the file holds, read in the plainest way, a tensor at a time."""

    def tensors() -> Iterator[tuple[str, Bytes]]:
        with path.open("rb") as f:
            header = read_header(f.read(int.from_bytes(f.read(8), "little")))
            base = f.tell()
            for name, info in header.items():
                start, end = info["data_offsets"]
                if end - start != math.prod(info["shape"]) * ITEMSIZE[info["dtype"]]:
                    raise ValueError(f"{path.name}: {name} is not as long as its shape")
                f.seek(base + start)
                yield name, np.frombuffer(f.read(end - start), np.uint8)

    return digest(tensors())


def status_bytes(key: str) -> int:
    """A line of /proc/self/status in bytes: VmRSS now, VmHWM at most since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def disk_bytes() -> int | None:
    """Bytes that this process had read from block devices; None where the kernel does not tell."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def bring_code_back() -> None:
    """Have all code and constants of this process in memory again: dropping the machine's caches threw out what nobody had used.

    Modules are imported before the clock starts; that they are read a second time, page by page under it, would be no better.
    """
    advise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, *_, name = line.split(maxsplit=5)
        if name.startswith("/") and rights.startswith("r-"):
            start, end = (int(n, 16) for n in span.split("-"))
            advise(ctypes.c_size_t(start), ctypes.c_size_t(end - start), MADV_POPULATE_READ)


def run(loader: Loader, path: str) -> dict[str, Any]:
    """One load under the clock; seconds and bytes."""
    loader.prepare(path)
    bring_code_back()
    # 5 resets VmHWM to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    resident, from_disk = status_bytes("VmRSS"), disk_bytes()
    modules = set(sys.modules)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    loaded = loader.load(path)
    seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_SELF)
    imported = sorted(sys.modules.keys() - modules)
    peak, now_from_disk = status_bytes("VmHWM"), disk_bytes()
    return {
        "seconds": seconds,
        "user_seconds": used.ru_utime - usage.ru_utime,
        "system_seconds": used.ru_stime - usage.ru_stime,
        "peak_rise_bytes": peak - resident,
        "disk_bytes": None if from_disk is None or now_from_disk is None else now_from_disk - from_disk,
        "imported": imported,
        "receipt": loader.receipt(loaded),
        "digest": digest(loader.tensors(loaded)),
    }


def main() -> None:
    """Import, say ready, wait for the word, load once, answer in one JSON line on the descriptor given."""
    name, path, descriptor = sys.argv[1:]
    with open(int(descriptor), "w", buffering=1) as answer:
        try:
            loader = LOADERS[name]()
            for module in loader.modules:
                importlib.import_module(module)
            print("ready", file=answer)
            if sys.stdin.readline().strip() != "go":
                return
            print(json.dumps(run(loader, path)), file=answer)
        except Exception as e:
            print(json.dumps({"error": f"{type(e).__name__}: {e}"}), file=answer)


if __name__ == "__main__":
    main()
