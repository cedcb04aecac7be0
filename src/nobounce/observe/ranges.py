"""Ranges that vendor profilers show: NVTX or roctx, where the process has their library loaded already.

A library that is not loaded has no listener; loading it here would only cost time. NVTX 3 has no library
of its own but lives inside those that use it: there the Python modules `nvtx` and torch (built for CUDA) are
the way in, if they are imported and a tool has named itself in the variable that NVTX 3 looks into. Without
one its calls do nothing and only take their time. Names are short and bounded.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nobounce.io import hooks
from nobounce.io.hooks import Operation

if TYPE_CHECKING:
    from nobounce.io.batch.group import Group

TOOL = "NVTX_INJECTION64_PATH"
"""Where a profiler that starts a program puts its own library for NVTX 3 to call."""
LIBRARIES = (
    ("libnvToolsExt.so", "nvtxRangeStartA", "nvtxRangeEnd"),
    ("librocprofiler-sdk-roctx.so", "roctxRangeStartA", "roctxRangeStop"),
    ("libroctx64.so", "roctxRangeStartA", "roctxRangeStop"),
)


class Ranges(hooks.Watcher):
    """A range per transfer, from its first byte to its end, and per group of a batch; ranges of
    different threads may overlap."""

    def __init__(self, start: Callable[[bytes], Any], stop: Callable[[Any], object]) -> None:
        self._start, self._stop = start, stop
        self._open: dict[Operation | Group, Any] = {}
        self._lock = threading.Lock()

    @classmethod
    def if_loaded(cls, maps: str = "/proc/self/maps") -> Ranges | None:
        """Ranges through the first library that is mapped into this process, or None."""
        for path, start_name, stop_name in _mapped(maps):
            try:
                library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
                start, stop = getattr(library, start_name), getattr(library, stop_name)
            except (OSError, AttributeError):
                continue
            start.argtypes, start.restype = [ctypes.c_char_p], ctypes.c_uint64
            stop.argtypes, stop.restype = [ctypes.c_uint64], None
            return cls(start, stop)
        return cls._of_module()

    @classmethod
    def _of_module(cls) -> Ranges | None:
        if not os.environ.get(TOOL):
            return None
        nvtx = sys.modules.get("nvtx")
        if hasattr(nvtx, "start_range"):
            return cls(lambda name: nvtx.start_range(name.decode()), nvtx.end_range)  # type: ignore[union-attr]
        torch = sys.modules.get("torch")
        if torch is not None and getattr(getattr(torch, "version", None), "cuda", None):
            found = sys.modules.get("torch.cuda.nvtx")
            if hasattr(found, "range_start"):
                return cls(lambda name: found.range_start(name.decode()), found.range_end)  # type: ignore[union-attr]
        return None

    def started(self, operation: Operation) -> None:
        self._begin(operation, f"{operation.op} {operation.nbytes} B {operation.device}")

    def exited(self, operation: Operation) -> None:
        self._end(operation)

    def batch_submitted(self, group: Group, now: float) -> None:
        self._begin(group, f"batch {group.op} of {len(group.nbytes)} {group.target.device_name}")

    def batch_done(self, group: Group, now: float) -> None:
        self._end(group)

    def _begin(self, what: Operation | Group, name: str) -> None:
        opened = self._start(f"nobounce {name}".encode("ascii", "replace"))
        with self._lock:
            self._open[what] = opened

    def _end(self, what: Operation | Group) -> None:
        with self._lock:
            opened = self._open.pop(what, None)
        if opened is not None:
            self._stop(opened)


def _mapped(maps: str) -> list[tuple[str, str, str]]:
    try:
        with open(maps, "rb") as f:
            text = f.read()
        if not any(prefix.encode() in text for prefix, _, _ in LIBRARIES):  # nearly always
            return []
        lines = text.decode("utf-8", "surrogateescape").splitlines()
        paths = {line.split(maxsplit=5)[5] for line in lines if "/" in line}
    except (OSError, IndexError):
        return []
    found = []
    for prefix, start, stop in LIBRARIES:
        found += [(p, start, stop) for p in sorted(paths) if os.path.basename(p).startswith(prefix)]
    return found
