"""The table that every public function is called through, so that a tracing tool can put itself between (hipFile A-39)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from nobounce.io import hooks

P = ParamSpec("P")
R = TypeVar("R")

dispatch_table: dict[str, Callable[..., Any]] = {}
"""Public functions by name. A tool replaces an entry by a function that calls the old one, and puts it back when done."""


COUNTED = {
    "handle_register": "handle_register",
    "buf_register": "buf_register",
    "buf_deregister": "buf_deregister",
    "batch_io_setup": "batch_setup",
    "batch_io_submit": "batch_submit",
    "batch_io_cancel": "batch_cancel",
    "batch_io_destroy": "batch_destroy",
}
"""Functions whose calls statistics count, and the counters' names. Streams are counted below, where all of them register."""


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
    name = fn.__name__
    dispatch_table[name] = fn
    if name in COUNTED:
        fn = _counted(name, fn)
        dispatch_table[name] = fn

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        result: R = dispatch_table[name](*args, **kwargs)
        return result

    return call
