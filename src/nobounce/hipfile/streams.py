"""Registered streams: promises about the operations on them (hipFile D-6 to D-9). Needs no open driver."""

from __future__ import annotations

from typing import Any

from nobounce.errors import ArgumentError, ClosedError, DeviceError, NobounceError, OpError
from nobounce.hipfile.dispatch import public
from nobounce.hipfile.status import SUCCESS, Error, as_error
from nobounce.hipfile.where import find_stream
from nobounce.io import streams


@public
def stream_register(stream: Any, flags: int) -> Error:
    """Register a stream (None is the null stream) with STREAM_* flags.

    5022 for unknown flags and for a stream that is registered, 5011 where the runtime does not know it.
    """
    return _with(stream, lambda runtime, handle: streams.register(runtime, handle, flags))


@public
def stream_deregister(stream: Any) -> Error:
    """Take a registration back; 5022 for an unknown stream. Operations under way go on (D-7)."""
    return _with(stream, streams.deregister)


def _with(stream: Any, act: Any) -> Error:
    try:
        runtime, handle = find_stream(stream)
        act(runtime, handle)
    except (TypeError, ClosedError):
        return Error(OpError.INVALID_VALUE)
    except (ArgumentError, DeviceError, NobounceError) as e:
        return as_error(e)
    return SUCCESS
