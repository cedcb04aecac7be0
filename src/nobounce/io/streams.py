"""Registered streams: what their users promised about the transfers on them (hipFile D-6 to D-8)."""

from __future__ import annotations

import threading

from nobounce.errors import ArgumentError
from nobounce.io import hooks
from nobounce.io.params import StreamFlags
from nobounce.runtimes.base import PER_THREAD_STREAM, Runtime
from nobounce.stream import Stream

_lock = threading.Lock()
_registered: dict[tuple[int, int, int], StreamFlags] = {}


def _key(runtime: Runtime, handle: int) -> tuple[int, int, int]:
    """A default stream is another one on each device; any other handle says by itself what it
    is, even when destroyed."""
    return id(runtime), runtime.stream_device(handle) if handle <= PER_THREAD_STREAM else -1, handle


def register(runtime: Runtime, handle: int, flags: int) -> None:
    """Register a stream. Raises ArgumentError for unknown flags and for a stream registered already."""
    if flags & ~int(StreamFlags.ALL) or flags < 0:
        raise ArgumentError(f"stream flags {flags:#x} hold unknown bits; known are {int(StreamFlags.ALL):#x}")
    key = _key(runtime, handle)
    hooks.start()
    with _lock:
        if key in _registered:
            raise ArgumentError(f"stream {handle:#x} is registered already")
        _registered[key] = StreamFlags(flags)
    hooks.registered("stream_register", True)


def deregister(runtime: Runtime, handle: int) -> None:
    """Take a registration back; transfers under way keep their promises. Raises
    ArgumentError for an unknown stream."""
    with _lock:
        if _registered.pop(_key(runtime, handle), None) is None:
            raise ArgumentError(f"stream {handle:#x} is not registered")
    hooks.registered("stream_deregister", True)


def flags_of(runtime: Runtime, handle: int) -> StreamFlags | None:
    """The flags of a registered stream, or None."""
    if not _registered:
        return None
    return _registered.get(_key(runtime, handle))


def register_stream(stream: Stream, flags: StreamFlags = StreamFlags.NONE) -> None:
    """Promise something about the transfers on `stream`: sizes and offsets that do not change after
    submission, aligned inputs.

    Raises ArgumentError for unknown flags and for a stream registered already (hipFile D-6).
    """
    register(stream.device._runtime, stream.handle, int(flags))


def deregister_stream(stream: Stream) -> None:
    """Take the promises back; transfers under way keep to them. Raises ArgumentError for a
    stream that is not registered."""
    deregister(stream.device._runtime, stream.handle)
