"""HIP and CUDA libraries on this machine, and whether a HIP runtime has the calls of the direct path.

A library is loaded in a child process: what crashes there, or holds a GPU, does no harm here.
hipGetProcAddress is asked as hipFile does: both calls non-null and found (hipFile G-5).
"""

from __future__ import annotations

import glob
import json
import mmap
import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from typing import Any

from nobounce.facts.source import Source
from nobounce.facts.sysfs import names, real
from nobounce.facts.types import Known

HIP, CUDA, CUDART, CUFILE, LIBHIPFILE = "libamdhip64", "libcuda", "libcudart", "libcufile", "libhipfile"
_TIMEOUT = 20.0
_CALLS = ("hipAmdFileRead", "hipAmdFileWrite")


_PATH, _ROCM, _CUDA = "LD_LIBRARY_PATH", ("ROCM_HOME", "ROCM_PATH", "HIP_PATH"), ("CUDA_HOME", "CUDA_PATH")
FOLLOWED = (_PATH, *_ROCM, *_CUDA)
"""Variables that name folders of libraries."""


@dataclass(frozen=True, slots=True)
class HipLibrary:
    """One libamdhip64: its real path, the version it reports, and whether it has
    hipAmdFileRead and hipAmdFileWrite."""

    path: str
    version: int | None
    ais: Known
    because: str = ""


def candidates(source: Source, stem: str) -> list[str]:
    """Real paths of `stem`.so* in the places that hipFile looks in, in its order (G-5), and in
    installed wheels; each once."""
    folders: list[str] = [f for f in (source.environment(_PATH) or "").split(":") if f]
    for name in (*_ROCM, *(_CUDA if stem != HIP else ())):
        base = source.environment(name)
        folders += [f"{base}/lib", f"{base}/lib64"] if base else []
    folders += _rocm_folders(source)
    if stem not in (HIP, LIBHIPFILE):
        folders.append("/usr/local/cuda/lib64")
    found: list[str] = []
    for folder in dict.fromkeys(folders):
        found += [f"{folder}/{n}" for n in names(source, folder) if n.startswith(f"{stem}.so")]
    found += _in_packages(source, stem)
    found += [path for path in ldconfig(source) if os.path.basename(path).startswith(f"{stem}.so")]
    resolved = (real(source, path) for path in found)
    return list(dict.fromkeys(path for path in resolved if path is not None))


def _rocm_folders(source: Source) -> list[str]:
    patterns = ("/opt/rocm*/lib*", "/opt/rocm*/core-*/lib*")
    try:
        more = source.probe("glob", patterns, lambda: sorted(p for g in patterns for p in glob.glob(g)))
        more = [p for p in more if isinstance(p, str)] if isinstance(more, list) else []
    except OSError:
        more = []
    return ["/opt/rocm/lib", "/opt/rocm/lib64", *more]


_PACKAGES = (
    "_rocm_sdk_core/lib",
    "torch/lib",
    "nvidia/cu13/lib",
    "nvidia/cufile/lib",
    "nvidia/cuda_runtime/lib",
)
"""Where wheels of ROCm, PyTorch and CUDA keep their libraries, below a folder of installed packages."""


def _in_packages(source: Source, stem: str) -> list[str]:
    try:
        sites = source.probe(
            "sites", (), lambda: [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        )
    except OSError:
        return []
    sites = [s for s in sites if isinstance(s, str)] if isinstance(sites, list) else []
    folders = [f"{site}/{package}" for site in dict.fromkeys(sites) for package in _PACKAGES]
    return [
        f"{folder}/{n}" for folder in folders for n in names(source, folder) if n.startswith(f"{stem}.so")
    ]


def ldconfig(source: Source) -> list[str]:
    """Paths in the linker's cache that bear on GPUs. The cache keeps its strings as they
    are, each ended by a NUL."""

    def live() -> list[str]:
        with open("/etc/ld.so.cache", "rb") as f:
            raw = f.read(1 << 24)
        found = re.findall(rb"(/[^\0]*/lib(?:amdhip64|cuda|cudart|cufile|hipfile)\.so[^\0]*)\0", raw)
        return [os.fsdecode(p) for p in dict.fromkeys(found)]

    try:
        return [str(p) for p in source.probe("ldconfig", (), live)]
    except (OSError, TypeError):
        return []


_ASK = """
import ctypes, json, sys
answer = {}
try:
    library = ctypes.CDLL(sys.argv[1])
    version = ctypes.c_int()
    if library.hipRuntimeGetVersion(ctypes.byref(version)) == 0:
        answer["version"] = version.value
    find = library.hipGetProcAddress
    for name in (b"hipAmdFileRead", b"hipAmdFileWrite"):
        pointer, status = ctypes.c_void_p(), ctypes.c_int(-1)
        code = find(name, ctypes.byref(pointer), int(sys.argv[2]), ctypes.c_uint64(0), ctypes.byref(status))
        answer[name.decode()] = code == 0 and status.value == 0 and bool(pointer.value)
except (OSError, AttributeError) as e:
    answer["error"] = str(e)
print(json.dumps(answer))
"""
_ASKED_VERSION = 70200000


def hip_library(source: Source, path: str) -> HipLibrary:
    """What one library answers."""

    def live() -> Any:
        absent = _unnamed(path)
        return {"absent": absent} if absent else ask_child(_ASK, path, str(_ASKED_VERSION), site=False)

    try:
        found = source.probe("hip_library", (path,), live)
    except (OSError, subprocess.SubprocessError) as e:
        return HipLibrary(path, None, "unknown", f"it cannot be tried: {e}")
    return parse_answer(path, found)


def _unnamed(path: str) -> list[str]:
    """Calls whose name does not even occur in the library: then it need not be loaded to
    know that it has them not."""
    with open(path, "rb") as f:
        if os.fstat(f.fileno()).st_size == 0:
            return list(_CALLS)
        with mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as content:
            return [name for name in _CALLS if content.find(name.encode()) < 0]


def parse_answer(path: str, found: Any) -> HipLibrary:
    """The child's answer; anything else than an object of the expected shape is unknown."""
    if not isinstance(found, dict):
        return HipLibrary(path, None, "unknown", "loading it ended the process")
    version = found.get("version")
    version = version if isinstance(version, int) else None
    if "error" in found:
        return HipLibrary(path, version, "no", str(found["error"]))
    absent = found.get("absent")
    if isinstance(absent, list) and absent:
        return HipLibrary(path, None, "no", f"it has no {' and no '.join(str(n) for n in absent)}")
    missing = [n for n in _CALLS if found.get(n) is not True]
    if missing:
        return HipLibrary(path, version, "no", f"hipGetProcAddress does not find {' and '.join(missing)}")
    if version is None:
        return HipLibrary(path, None, "no", "it does not tell its version")
    return HipLibrary(path, version, "yes")


def ask_child(code: str, *arguments: str, timeout: float = _TIMEOUT, site: bool = True) -> Any:
    """What a Python child prints as JSON on its last line; None where it dies or prints
    something else. Raises OSError.

    Without `site` it has no installed packages, and starts sooner. It takes no module from the
    current folder (-P, and -I).
    """
    done = subprocess.run(
        [sys.executable, *(("-P",) if site else ("-I", "-S")), "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    lines = done.stdout.strip().splitlines()
    try:
        return json.loads(lines[-1]) if done.returncode == 0 and lines else None
    except ValueError:
        return None


def hip_libraries(source: Source) -> list[HipLibrary]:
    """Every libamdhip64 found, tried."""
    return [hip_library(source, path) for path in candidates(source, HIP)]
