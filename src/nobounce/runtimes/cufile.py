"""Direct I/O on NVIDIA through cuFile, offered only where something can carry it.

cuFile registers any file and reads it through POSIX in silence where neither nvidia-fs nor PCI P2PDMA is there, so a file
that registers proves nothing. Here cuFile is told not to (its compatibility mode is switched off before the driver is
opened), its carriers are looked for first, and its own count of POSIX operations decides what is evidence: bytes of an
interval in which it made one are not called direct.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nobounce.errors import DeviceError
from nobounce.route.types import DirectFacts, Known
from nobounce.runtimes.base import DeviceInfo, DirectCounters, DirectIO

Import = Callable[[], Any]


class Carriers(NamedTuple):
    """What could carry direct bytes to a device."""

    nvidia_fs: bool
    p2pdma: bool

    @property
    def any(self) -> bool:
        return self.nvidia_fs or self.p2pdma


def carriers(pci_bus_id: str | None, root: str = "/") -> Carriers:
    """nvidia-fs when its driver shows its files; PCI P2PDMA when the GPU offers memory to it (size above 0)."""
    at = Path(root)
    nvidia_fs = (at / "proc/driver/nvidia-fs").is_dir() and (at / "sys/module/nvidia_fs").is_dir()
    size = 0
    if pci_bus_id:
        with contextlib.suppress(OSError, ValueError):
            size = int((at / "sys/bus/pci/devices" / pci_bus_id / "p2pmem/size").read_text())
    return Carriers(nvidia_fs, size > 0)


def _bindings() -> Any:
    return importlib.import_module("cuda.bindings.cufile")


class CuFileDirect(DirectIO):
    """`info` tells a device's PCI address; `root` and `bindings` are there for tests."""

    def __init__(
        self, info: Callable[[int], DeviceInfo], *, root: str = "/", bindings: Import = _bindings
    ) -> None:
        self._info, self._root, self._import = info, root, bindings
        self._lock = threading.Lock()
        self._cufile: Any = None
        self._why_not: tuple[str, str, str] | None = None
        self._facts: dict[int, DirectFacts] = {}
        self._files: dict[int, int] = {}
        self._direct = [0, 0]
        self._seen = (0, 0, 0)

    def facts(self, device: int) -> DirectFacts:
        known = self._facts.get(device)
        if known is None:
            known = self._facts[device] = self._find_out(device)
        return known

    def _find_out(self, device: int) -> DirectFacts:
        found = carriers(self._info(device).pci_bus_id, self._root)
        p2p: Known = "yes" if found.p2pdma else "unknown" if found.nvidia_fs else "no"
        if not found.any:
            return DirectFacts(
                runtime="cuda",
                available=False,
                because="neither nvidia-fs is loaded nor does the GPU offer memory to PCI P2PDMA",
                code="no-nvidia-fs",
                cure="load NVIDIA's nvidia-fs module (modprobe nvidia-fs), or enable PCI P2PDMA in the driver",
                p2p=p2p,
            )
        if not self._opened(found):
            because, code, cure = self._why_not or ("", "", "")
            return DirectFacts(
                runtime="cuda", available=False, because=because, code=code, cure=cure, p2p=p2p
            )
        return DirectFacts(
            runtime="cuda",
            available=True,
            file_rule="probe",
            min_mem_align=4096,
            min_offset_align=4096,
            p2p=p2p,
        )

    def _opened(self, found: Carriers) -> bool:
        with self._lock:
            if self._cufile is None and self._why_not is None:
                self._open(found)
            return self._cufile is not None

    def _open(self, found: Carriers) -> None:
        try:
            cufile = self._import()
        except ImportError as e:
            self._why_not = (
                f"cuFile's bindings cannot be imported: {e}",
                "no-cufile-bindings",
                "pip install nobounce[cuda]",
            )
            return
        os.environ.setdefault("CUFILE_LOGFILE_PATH", os.devnull)  # else it writes cufile.log where it stands
        try:
            flags = cufile.BoolConfigParameter
            with contextlib.suppress(
                Exception
            ):  # an older cuFile, or one that is open already: the counters decide
                cufile.set_parameter_bool(int(flags.PROPERTIES_ALLOW_COMPAT_MODE), False)
                if found.p2pdma and not found.nvidia_fs:
                    cufile.set_parameter_bool(int(flags.USE_PCIP2PDMA), True)
            cufile.driver_open()
        except RuntimeError as e:
            self._why_not = (
                f"libcufile cannot be loaded: {e}",
                "no-cufile-library",
                "install libcufile (NVIDIA's package nvidia-cufile or gds-tools)",
            )
        except Exception as e:  # cuFileError is an Exception of no particular kind
            self._why_not = (f"cuFileDriverOpen fails: {e}", "no-cufile-driver", "")
        else:
            with contextlib.suppress(Exception):
                cufile.set_stats_level(3)
                cufile.stats_start()
            self._cufile = cufile

    # transfers

    def read(self, device: int, fd: int, address: int, nbytes: int, file_offset: int) -> int:
        return self._move("cuFileRead", device, fd, address, nbytes, file_offset)

    def write(self, device: int, fd: int, address: int, nbytes: int, file_offset: int) -> int:
        return self._move("cuFileWrite", device, fd, address, nbytes, file_offset)

    def _move(self, call: str, device: int, fd: int, address: int, nbytes: int, file_offset: int) -> int:
        if not self.facts(device).available:
            raise OSError(errno.ENODEV, f"{call}: {self.facts(device).because}")
        handle, own = self._files.get(fd), False
        if handle is None:
            handle, own = self._register(fd), True  # not kept: the number may be another file's next time
        move = self._cufile.read if call == "cuFileRead" else self._cufile.write
        try:
            moved = int(move(handle, address, nbytes, file_offset, 0))
        except Exception as e:
            raise self._failed(call, e) from e
        finally:
            if own:
                self._cufile.handle_deregister(handle)
        if moved < -1:
            name = _op_error(self._cufile, -moved)
            raise DeviceError(call, None, code=-moved, name=name, detail=f"{nbytes} bytes at {file_offset}")
        if moved < 0:
            raise OSError(errno.EIO, f"{call}: {os.strerror(errno.EIO)} (cuFile tells no errno)")
        return moved

    def _register(self, fd: int) -> int:
        descriptor = self._cufile.Descr()
        descriptor.type = int(self._cufile.FileHandleType.OPAQUE_FD)
        descriptor.handle.fd = fd
        try:
            return int(self._cufile.handle_register(descriptor.ptr))
        except Exception as e:
            raise self._failed("cuFileHandleRegister", e) from e

    def _failed(self, call: str, error: Exception) -> DeviceError | OSError:
        code = int(getattr(error, "status", 0) or 0)
        if 0 < code < 5000:
            return OSError(code, f"{call}: {error}")
        return DeviceError(call, None, code=code, name=_op_error(self._cufile, code), detail=str(error))

    def register_file(self, fd: int) -> int:
        if self._cufile is not None:
            self._files[fd] = self._register(fd)
        return fd

    def deregister_file(self, token: int) -> None:
        handle = self._files.pop(token, None)
        if handle is not None:
            self._cufile.handle_deregister(handle)

    def register_buffer(self, address: int, nbytes: int) -> None:
        if self._cufile is not None:
            try:
                self._cufile.buf_register(address, nbytes, 0)
            except Exception as e:
                raise self._failed("cuFileBufRegister", e) from e

    def deregister_buffer(self, address: int) -> None:
        if self._cufile is not None:
            self._cufile.buf_deregister(address)

    # evidence

    def counters(self, device: int) -> DirectCounters | None:
        """cuFile's bytes, without those of intervals in which it used POSIX. None where it does not count by path."""
        if self._cufile is None:
            return None
        try:
            now = self._totals()
        except Exception:  # an older cuFile
            return None
        with self._lock:
            if now[2] == self._seen[2]:
                self._direct[0] += max(0, now[0] - self._seen[0])
                self._direct[1] += max(0, now[1] - self._seen[1])
            self._seen = now
            return DirectCounters(*self._direct)

    def _totals(self) -> tuple[int, int, int]:
        """Bytes read, bytes written, POSIX operations, over all GPUs."""
        stats = self._cufile.StatsLevel3()
        self._cufile.get_stats_l3(stats.ptr)
        gpus = [stats.per_gpu_stats[i] for i in range(int(stats.num_gpus))]
        read = sum(int(g.read_bytes) for g in gpus)
        written = sum(int(g.writes_bytes) for g in gpus)
        return read, written, sum(int(g.n_posix_reads) + int(g.n_posix_writes) for g in gpus)


def _op_error(cufile: Any, code: int) -> str:
    try:
        return str(cufile.OpError(code).name)
    except ValueError:
        return str(code)
