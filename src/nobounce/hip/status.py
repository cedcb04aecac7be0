"""How exceptions of the runtimes become HIP's statuses, and the last failed one of each
thread (HIP rules 73 to 76)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from nobounce.errors import ArgumentError, ClosedError, DeviceError, OutOfMemoryError, UnavailableError
from nobounce.hip.types import hipError_t

_thread = threading.local()


def failed(error: Exception) -> hipError_t:
    """The status of an exception of the layers below, remembered as this thread's last error."""
    if isinstance(error, DeviceError):
        status = _known(error.status)
    elif isinstance(error, OutOfMemoryError):
        status = hipError_t.hipErrorOutOfMemory
    elif isinstance(error, UnavailableError):
        status = hipError_t.hipErrorNotSupported
    else:
        status = hipError_t.hipErrorInvalidValue
    if status is not hipError_t.hipErrorNotReady:  # an answer, not an error (HIP rule 5)
        _thread.last = status
    return status


def _known(status: int | None) -> hipError_t:
    try:
        return hipError_t(hipError_t.hipErrorUnknown if status is None else status)
    except ValueError:
        return hipError_t.hipErrorUnknown


def status_name(status: int) -> str:
    """HIP's name of a number; an unknown one has a name too."""
    return _known(status).name


def attempt(call: Callable[[], Any], nothing: Any = None) -> tuple[hipError_t, Any]:
    """What `call` returns behind its status; `nothing` where it failed."""
    try:
        return hipError_t.hipSuccess, call()
    except (
        DeviceError,
        OutOfMemoryError,
        UnavailableError,
        ArgumentError,
        ClosedError,
        TypeError,
        OverflowError,
    ) as e:
        return failed(e), nothing


def last_error(*, reset: bool) -> hipError_t:
    """This thread's last failed status."""
    status: hipError_t = getattr(_thread, "last", hipError_t.hipSuccess)
    if reset:
        _thread.last = hipError_t.hipSuccess
    return status
