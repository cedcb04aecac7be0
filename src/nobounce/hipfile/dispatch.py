"""The table that every public function is called through, so that a tracing tool can put
itself between (hipFile A-39)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from nobounce.io import hooks
from nobounce.uninterrupted import unbroken

P = ParamSpec("P")
R = TypeVar("R")

dispatch_table: dict[str, Callable[..., Any]] = {}
"""Public functions by name. A tool replaces an entry by a function that calls the old one,
and puts it back when done."""


COUNTED = {
    "handle_register": "handle_register",
    "buf_register": "buf_register",
    "buf_deregister": "buf_deregister",
    "batch_io_setup": "batch_setup",
    "batch_io_submit": "batch_submit",
    "batch_io_cancel": "batch_cancel",
    "batch_io_destroy": "batch_destroy",
}
"""Functions whose calls statistics count, and the counters' names. Streams are counted below,
where all of them register."""


def _counted(name: str, fn: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        hooks.start()
        result = fn(*args, **kwargs)
        if hooks.observers:
            status: Any = result[0] if isinstance(result, tuple) and isinstance(result[0], tuple) else result
            hooks.registered(COUNTED[name], status is None or status[0] == 0)
        return result

    return call


def public(fn: Callable[P, R]) -> Callable[P, R]:
    """Enter `fn` in the table; the function returned calls whatever the table holds."""
    return _enter(fn.__name__, _counted(fn.__name__, fn) if fn.__name__ in COUNTED else fn)


def whole(fn: Callable[P, R]) -> Callable[P, R]:
    """The same for a function that changes what is registered or submitted: an interrupt of its
    caller does not cut it in two."""
    return _whole(fn, None)


def whole_or(undo: Callable[[R], object]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`whole`; what the function returns is given to `undo` where it does not reach the
    caller for an interrupt."""
    return lambda fn: _whole(fn, undo)


def _whole(fn: Callable[P, R], undo: Callable[[R], object] | None) -> Callable[P, R]:
    name = fn.__name__
    return _enter(name, unbroken(_counted(name, fn) if name in COUNTED else fn, undo))


def _enter(name: str, fn: Callable[P, R]) -> Callable[P, R]:
    dispatch_table[name] = fn

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        result: R = dispatch_table[name](*args, **kwargs)
        return result

    return call
