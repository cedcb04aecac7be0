"""Direct I/O on NVIDIA through cuFile, offered only where something can carry it.

cuFile registers any file and reads it through POSIX in silence where neither nvidia-fs nor PCI P2PDMA is
there, so a file that registers proves nothing. Here cuFile is told not to (its compatibility mode is switched
off before the driver is opened) and its carriers are looked for first. Another library may have opened the
driver before, with that mode on, so every call is checked as well: cuFile's own count of POSIX operations,
and the count of nvidia-fs, which does not depend on cuFile. A call in whose time cuFile made a POSIX
operation, or nvidia-fs none, fails with EREMOTEIO: the engine repeats its bytes through fallback, or raises.
POSIX operations that another library makes at that moment count against it too.

None of this has run beside nvidia-fs: tests/unit/gpu/test_cufile.py runs it on doubles.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nobounce.errors import DeviceError
from nobounce.route.types import DirectFacts, Known
from nobounce.runtimes.base import DeviceInfo, DirectIO

Import = Callable[[], Any]


class Carriers(NamedTuple):
    """What could carry direct bytes to a device."""

    nvidia_fs: bool
    p2pdma: bool

    @property
    def any(self) -> bool:
        return self.nvidia_fs or self.p2pdma


def carriers(pci_bus_id: str | None, root: str = "/") -> Carriers:
    """nvidia-fs when its driver shows its files; PCI P2PDMA when the GPU offers
    memory to it (size above 0)."""
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
        self._p2pdma = False
        self._files: dict[int, int] = {}
        self._buffers: dict[int, bool] = {}
        """Whether a buffer is registered, by address; False: it was refused, and is not asked for again."""

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
                cure="load NVIDIA's nvidia-fs module (modprobe nvidia-fs), or enable PCI P2PDMA in the "
                "driver",
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
        self._p2pdma = found.p2pdma
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
            with contextlib.suppress(Exception):  # an older cuFile, or one that is open already
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
            if _posix_allowed(cufile) and _posix_operations(cufile) is None:
                self._why_not = (
                    "cuFile may use POSIX in silence (its compatibility mode is on, or cannot be asked for) "
                    "and counts nothing "
                    "that would show it",
                    "cufile-compat-mode",
                    "set allow_compat_mode to false in /etc/cufile.json",
                )
                return
            self._cufile = cufile

    # transfers

    def read(self, device: int, fd: int, address: int, nbytes: int, file_offset: int) -> int:
        return self._move("cuFileRead", device, fd, address, nbytes, file_offset)

    def write(self, device: int, fd: int, address: int, nbytes: int, file_offset: int) -> int:
        return self._move("cuFileWrite", device, fd, address, nbytes, file_offset)

    def _move(self, call: str, device: int, fd: int, address: int, nbytes: int, file_offset: int) -> int:
        if not self.facts(device).available:
            raise OSError(errno.ENODEV, f"{call}: {self.facts(device).because}")
        handle = self._handle(fd)
        which = 0 if call == "cuFileRead" else 1
        move = self._cufile.write if which else self._cufile.read
        posix, carried = _posix_operations(self._cufile), nvidia_fs_operations(self._root)
        try:
            moved = int(move(handle, address, nbytes, file_offset, 0))
        except Exception as e:
            raise self._failed(call, e) from e
        if moved > 0:
            self._check(call, posix, None if carried is None else carried[which], which)
        if moved < -1:
            name = _op_error(self._cufile, -moved)
            raise DeviceError(call, None, code=-moved, name=name, detail=f"{nbytes} bytes at {file_offset}")
        if moved < 0:
            raise OSError(errno.EIO, f"{call}: {os.strerror(errno.EIO)} (cuFile tells no errno)")
        return moved

    def _check(self, call: str, posix: int | None, carried: int | None, which: int) -> None:
        """Whether the bytes of a call that has ended went direct. Raises OSError (EREMOTEIO)
        where a counter denies it."""
        now = _posix_operations(self._cufile)
        if posix is not None and now is not None and now > posix:
            raise OSError(errno.EREMOTEIO, f"{call}: cuFile made {now - posix} POSIX operations instead")
        if carried is None or self._p2pdma:
            return  # nvidia-fs is not loaded or counts nothing, or PCI P2PDMA may have carried them
        after = nvidia_fs_operations(self._root)
        if after is not None and after[which] <= carried:
            raise OSError(
                errno.EREMOTEIO,
                f"{call}: nvidia-fs, which should have carried the bytes, counted no operation",
            )

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

    def _handle(self, fd: int) -> int:
        """The file's handle, had at its first transfer and kept until the file is closed."""
        with self._lock:
            handle = self._files.get(fd)
            if handle is None:
                handle = self._files[fd] = self._register(fd)
            return handle

    def deregister_file(self, fd: int) -> None:
        with self._lock:
            handle = self._files.pop(fd, None)
        if handle is not None:
            self._cufile.handle_deregister(handle)

    def register_buffer(self, address: int, nbytes: int) -> None:
        with self._lock:
            if self._cufile is None or address in self._buffers:
                return
            try:
                self._cufile.buf_register(address, nbytes, 0)
                self._buffers[address] = True
            except (
                Exception
            ):  # no room in the BAR, say: cuFile then goes by way of buffers of its own on the device
                self._buffers[address] = False

    def deregister_buffer(self, address: int) -> None:
        with self._lock:
            registered = self._buffers.pop(address, False)
        if registered:
            self._cufile.buf_deregister(address)


def _posix_allowed(cufile: Any) -> bool:
    """Whether cuFile may use POSIX; True where it does not say (before CUDA 12.9)."""
    try:
        return bool(cufile.get_parameter_bool(int(cufile.BoolConfigParameter.PROPERTIES_ALLOW_COMPAT_MODE)))
    except Exception:
        return True


def _posix_operations(cufile: Any) -> int | None:
    """POSIX reads and writes that cuFile has made so far, over all GPUs; None where
    it does not count them."""
    try:
        stats = cufile.StatsLevel3()
        cufile.get_stats_l3(stats.ptr)
        gpus = [stats.per_gpu_stats[i] for i in range(int(stats.num_gpus))]
        return sum(int(g.n_posix_reads) + int(g.n_posix_writes) for g in gpus)
    except Exception:  # an older cuFile
        return None


def nvidia_fs_operations(root: str = "/") -> tuple[int, int] | None:
    """(reads, writes) that nvidia-fs has carried so far for all processes; None where it is not loaded or
    does not count (its parameter rw_stats_enabled is 0, as it is by default)."""
    try:
        text = (Path(root) / "proc/driver/nvidia-fs/stats").read_text()
    except OSError:
        return None
    found = [re.search(rf"^{name}\s*:.*\bok=(\d+)", text, re.MULTILINE) for name in ("Reads", "Writes")]
    if re.search(r"^IO stats: Disabled", text, re.MULTILINE) or None in found:
        return None
    return int(found[0][1]), int(found[1][1])  # type: ignore[index]


def _op_error(cufile: Any, code: int) -> str:
    try:
        return str(cufile.OpError(code).name)
    except ValueError:
        return str(code)
