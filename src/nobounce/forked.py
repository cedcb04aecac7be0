"""What a forked child makes of the objects that it inherits.

Threads do not survive a fork, nor does a GPU's runtime. Whatever waits for them would wait for ever:
a transfer under way, a stream, a batch, a GPU's memory. In the child these answer at once that they
are the parent's. Files and `cpu` memory go on working; what the parent's threads did with them at
that moment is forgotten.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from nobounce.errors import ClosedError


class Inheritable(Protocol):
    """An object that is told in a forked child that it has been inherited."""

    def _inherited(self) -> None: ...


_known: weakref.WeakSet[Inheritable] = weakref.WeakSet()


def know(thing: Inheritable) -> None:
    """Tell it in a forked child."""
    _known.add(thing)


def error(what: str) -> ClosedError:
    """What using an inherited `what` raises in the child."""
    return ClosedError(
        f"this process was forked, and the {what} belongs to its parent: make one of your own here, or "
        "start processes with "
        "the spawn or forkserver method"
    )


def _tell() -> None:
    for thing in list(_known):
        thing._inherited()


os.register_at_fork(after_in_child=_tell)
