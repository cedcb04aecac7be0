"""Puts observers in where the settings ask for them; `io.hooks` calls this at the first I/O of a process."""

from __future__ import annotations

import logging
import os

from nobounce.config import settings
from nobounce.errors import FileError
from nobounce.io import hooks
from nobounce.observe.counters import Counters

_log = logging.getLogger("nobounce")
_counters: Counters | None = None
_closers: list[hooks.Observer] = []


def start() -> None:
    """Count at level 1 and above, and export what is counted; trace where NOBOUNCE_TRACE names a file."""
    global _counters
    in_force = settings()
    if in_force.stats_level and _counters is None:
        from nobounce.observe import export

        memory, fd = export.make_memory()
        _counters = Counters(in_force, memory)
        hooks.add(_counters)
        if in_force.stats_collector and fd >= 0:
            export.introduce(fd, in_force.stats_collector)
    if in_force.trace:
        from nobounce.observe.trace import Tracer

        try:
            tracer = Tracer(in_force.trace, in_force.trace_events)
        except FileError as e:
            _log.warning("NOBOUNCE_TRACE: %s. Nothing is traced; the program goes on", e)
        else:
            _closers.append(tracer)
            hooks.add(tracer)
    if in_force.stats_level:
        from nobounce.observe import ranges

        annotator = ranges.Ranges.if_loaded()
        if annotator is not None:
            _closers.append(annotator)
            hooks.add(annotator)


def counters() -> Counters | None:
    """The counters of this process, or None where nothing is counted (yet)."""
    return _counters


def reset() -> None:
    """Forget everything, as a process that has done no I/O. For tests, and for a forked child."""
    global _counters
    if _counters is not None:
        from nobounce.observe import export

        export.stop()
        hooks.remove(_counters)
    _counters = None
    for observer in _closers:
        hooks.remove(observer)
    _closers.clear()
    hooks._started_for = 0


os.register_at_fork(after_in_child=reset)
