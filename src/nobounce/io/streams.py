"""Registered streams: what their users promised about the transfers on them (hipFile D-6 to D-8)."""

from __future__ import annotations

import threading

from nobounce.errors import ArgumentError
from nobounce.io.params import StreamFlags
from nobounce.runtimes.base import NULL_STREAM, Runtime

_lock = threading.Lock()
_registered: dict[tuple[int, int, int], StreamFlags] = {}


def _key(runtime: Runtime, handle: int) -> tuple[int, int, int]:
    device = runtime.stream_device(handle)
    return id(runtime), device if handle <= 2 else -1, handle


def register(runtime: Runtime, handle: int, flags: int) -> None:
    """Register a stream. Raises ArgumentError for unknown flags and for a stream registered already."""
    if flags & ~int(StreamFlags.ALL) or flags < 0:
        raise ArgumentError(f"stream flags {flags:#x} hold unknown bits; known are {int(StreamFlags.ALL):#x}")
    key = _key(runtime, handle)
    with _lock:
        if key in _registered:
            raise ArgumentError(f"stream {handle:#x} is registered already")
        _registered[key] = StreamFlags(flags)


def deregister(runtime: Runtime, handle: int) -> None:
    """Take a registration back; transfers under way keep their promises. Raises ArgumentError for an unknown stream."""
    with _lock:
        for key in (
            (id(runtime), -1, handle),
            *(k for k in _registered if k[0] == id(runtime) and k[2] == handle),
        ):
            if key in _registered and (
                handle > 2 or key[1] == runtime.current_device() or handle != NULL_STREAM
            ):
                del _registered[key]
                return
    raise ArgumentError(f"stream {handle:#x} is not registered")


def flags_of(runtime: Runtime, handle: int) -> StreamFlags | None:
    """The flags of a registered stream, or None."""
    if not _registered:
        return None
    return _registered.get(_key(runtime, handle))
