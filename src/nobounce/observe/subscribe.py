"""Callbacks of one's own on transfers: `nobounce.subscribe`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType

from nobounce.io import hooks
from nobounce.io.hooks import Operation

_log = logging.getLogger("nobounce")

Callback = Callable[[Operation], object]


class Subscription(hooks.Watcher):
    """Callbacks in force until `close`, or the end of the `with` block."""

    def __init__(
        self,
        on_enter: Callback | None = None,
        on_start: Callback | None = None,
        on_exit: Callback | None = None,
    ) -> None:
        self._on_enter, self._on_start, self._on_exit = on_enter, on_start, on_exit

    def entered(self, operation: Operation) -> None:
        _call(self._on_enter, operation)

    def started(self, operation: Operation) -> None:
        _call(self._on_start, operation)

    def exited(self, operation: Operation) -> None:
        _call(self._on_exit, operation)

    def close(self) -> None:
        """No more calls, but for those under way."""
        hooks.remove(self)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _call(fn: Callback | None, operation: Operation) -> None:
    if fn is None:
        return
    try:
        fn(operation)
    except Exception:
        _log.exception("a subscriber failed; the transfer is not concerned")


def subscribe(
    *,
    on_enter: Callback | None = None,
    on_start: Callback | None = None,
    on_exit: Callback | None = None,
) -> Subscription:
    """Have functions called with an `Operation` at each transfer's submission, first byte and end.

    They run on the thread where it happens, so they must be quick and must not wait for a transfer; what they
    raise is logged and goes no further. An operation that no backend takes is entered and exits at once, with
    its RouteError and no start. `operation.notes` is theirs, to keep a span or the like from enter to exit.

        with nobounce.subscribe(on_exit=lambda op: print(op.filename, op.receipt)):
            ...
    """
    made = Subscription(on_enter, on_start, on_exit)
    hooks.add(made)
    return made
