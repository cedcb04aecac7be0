"""What every public call of a host runtime does around its work: refuse re-entry, keep
the thread's last error."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from nobounce.errors import DeviceError, OutOfMemoryError, RuntimeStatus
from nobounce.runtimes.host.streams import inside


class _HasLocal(Protocol):
    _local: threading.local


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=_HasLocal)


def api(call: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Refuse calls from host functions (HIP rule 41) and note failures as this thread's
    last error (rules 73-79)."""

    @functools.wraps(call)
    def checked(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if getattr(inside, "host_call", False):
                raise DeviceError(
                    call.__name__,
                    RuntimeStatus.NotPermitted,
                    detail="a host function may not call the runtime",
                )
            return call(self, *args, **kwargs)
        except DeviceError as e:
            if e.status is not RuntimeStatus.NotReady:
                self._local.last_error = e.code
            raise
        except OutOfMemoryError:
            self._local.last_error = int(RuntimeStatus.OutOfMemory)
            raise

    return checked


def invalid_value(call: str, detail: str) -> DeviceError:
    return DeviceError(call, RuntimeStatus.InvalidValue, detail=detail)
