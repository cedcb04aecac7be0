"""HIP and CUDA libraries on this machine, and whether a HIP runtime has the calls of the direct path.

A library is loaded in a child process: what crashes there, or holds a GPU, does no harm here. hipGetProcAddress is asked
as hipFile does: both calls non-null and found (hipFile G-5).
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from nobounce.facts.source import Source
from nobounce.facts.sysfs import names, real
from nobounce.facts.types import Known

HIP, CUDA, CUDART, CUFILE, LIBHIPFILE = "libamdhip64", "libcuda", "libcudart", "libcufile", "libhipfile"
_TIMEOUT = 20.0


@dataclass(frozen=True, slots=True)
class HipLibrary:
    """One libamdhip64: its real path, the version it reports, and whether it has hipAmdFileRead and hipAmdFileWrite."""

    path: str
    version: int | None
    ais: Known
    because: str = ""


def candidates(source: Source, stem: str) -> list[str]:
    """Real paths of `stem`.so* in the places that hipFile looks in, in its order (G-5), each once."""
    folders: list[str] = [f for f in (source.environment("LD_LIBRARY_PATH") or "").split(":") if f]
    for name in ("ROCM_HOME", "ROCM_PATH", "HIP_PATH", *(("CUDA_HOME", "CUDA_PATH") if stem != HIP else ())):
        base = source.environment(name)
        folders += [f"{base}/lib", f"{base}/lib64"] if base else []
    folders += _rocm_folders(source)
    if stem not in (HIP, LIBHIPFILE):
        folders.append("/usr/local/cuda/lib64")
    found: list[str] = []
    for folder in dict.fromkeys(folders):
        found += [f"{folder}/{n}" for n in names(source, folder) if n.startswith(f"{stem}.so")]
    found += [path for path in ldconfig(source) if os.path.basename(path).startswith(f"{stem}.so")]
    resolved = (real(source, path) for path in found)
    return list(dict.fromkeys(path for path in resolved if path is not None))


def _rocm_folders(source: Source) -> list[str]:
    patterns = ("/opt/rocm*/lib*", "/opt/rocm*/core-*/lib*")
    try:
        more = source.probe("glob", patterns, lambda: sorted(p for g in patterns for p in glob.glob(g)))
    except OSError:
        more = []
    return ["/opt/rocm/lib", "/opt/rocm/lib64", *(str(p) for p in more)]


def ldconfig(source: Source) -> list[str]:
    """Paths in the linker's cache that bear on GPUs."""

    def live() -> list[str]:
        program = shutil.which("ldconfig") or shutil.which("ldconfig", path="/usr/sbin:/sbin")
        if program is None:
            return []
        done = subprocess.run([program, "-p"], capture_output=True, text=True, check=False, timeout=_TIMEOUT)
        return re.findall(r"=> (\S*/lib(?:amdhip64|cuda|cudart|cufile|hipfile)\.so\S*)", done.stdout)

    try:
        return [str(p) for p in source.probe("ldconfig", (), live)]
    except (OSError, TypeError, subprocess.SubprocessError):
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
    try:
        found = source.probe("hip_library", (path,), lambda: ask_child(_ASK, path, str(_ASKED_VERSION)))
    except (OSError, subprocess.SubprocessError) as e:
        return HipLibrary(path, None, "unknown", f"it cannot be tried: {e}")
    return parse_answer(path, found)


def parse_answer(path: str, found: Any) -> HipLibrary:
    """The child's answer; anything else than an object of the expected shape is unknown."""
    if not isinstance(found, dict):
        return HipLibrary(path, None, "unknown", "loading it ended the process")
    version = found.get("version")
    version = version if isinstance(version, int) else None
    if "error" in found:
        return HipLibrary(path, version, "no", str(found["error"]))
    missing = [n for n in ("hipAmdFileRead", "hipAmdFileWrite") if found.get(n) is not True]
    if missing:
        return HipLibrary(path, version, "no", f"hipGetProcAddress does not find {' and '.join(missing)}")
    if version is None:
        return HipLibrary(path, None, "no", "it does not tell its version")
    return HipLibrary(path, version, "yes")


def ask_child(code: str, *arguments: str, timeout: float = _TIMEOUT) -> Any:
    """What a Python child prints as JSON on its last line; None where it dies or prints something else. Raises OSError."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
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
