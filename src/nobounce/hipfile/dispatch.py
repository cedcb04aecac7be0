"""The table that every public function is called through, so that a tracing tool can put itself between (hipFile A-39)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

dispatch_table: dict[str, Callable[..., Any]] = {}
"""Public functions by name. A tool replaces an entry by a function that calls the old one, and puts it back when done."""


def public(fn: Callable[P, R]) -> Callable[P, R]:
    """Enter `fn` in the table; the function returned calls whatever the table holds."""
    name = fn.__name__
    dispatch_table[name] = fn

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        result: R = dispatch_table[name](*args, **kwargs)
        return result

    return call
