"""Ctrl-C at a chosen step of a call: KeyboardInterrupt at the nth place where the interpreter would run a signal handler.

The interpreter looks for signals behind a call into C, where a function begins and where a loop jumps back, not between any other
two instructions: a lock taken by `with` is always given back.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import nobounce

_SCOPE = (os.path.dirname(nobounce.__file__), threading.__file__, contextlib.__file__)


class InterruptAt:
    """A trace function for `sys.settrace`. `where` names the place, "" while it was not reached; `steps` counts."""

    def __init__(self, nth: int) -> None:
        self._nth, self.steps, self.where = nth, 0, ""

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(_SCOPE) or _in_finaliser(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        last = -1

        def step(frame: FrameType, event: str, _: object) -> Any:
            nonlocal last
            if event == "opcode":
                before, last = last, frame.f_lasti
                if before >= 0 and _looks(frame.f_code, before, frame.f_lasti):
                    self._count(frame)
            return step

        if _names(frame.f_code).get(frame.f_lasti) == "RESUME":  # no generator that is closed
            self._count(frame)
        return step

    def _count(self, frame: FrameType) -> None:
        self.steps += 1
        if self.steps == self._nth:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"
            raise KeyboardInterrupt


def interrupted(nth: int, action: Callable[[], object]) -> tuple[str, bool]:
    """Run `action` with an interrupt at its nth step: (where, "" if it has fewer steps; whether KeyboardInterrupt came out)."""
    at = InterruptAt(nth)
    before = sys.gettrace()
    try:
        sys.settrace(at)
        action()
    except KeyboardInterrupt:
        return at.where, True
    finally:
        sys.settrace(before)
    return at.where, False


def steps(action: Callable[[], object]) -> int:
    """About how many steps `action` has: threads decide how many turns some loops take."""
    at = InterruptAt(sys.maxsize)
    before = sys.gettrace()
    try:
        sys.settrace(at)
        action()
    finally:
        sys.settrace(before)
    return at.steps


def _in_finaliser(frame: FrameType | None) -> bool:
    """What is raised there never comes out: the interpreter prints it."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


@functools.cache
def _looks(code: CodeType, before: int, now: int) -> bool:
    """Whether a signal that came during the instruction at `before` would be met as if it had come at `now`."""
    name = _names(code).get(before, "")
    call = name.startswith("CALL") and not name.startswith("CALL_INTRINSIC")
    return (call or name == "JUMP_BACKWARD") and _handler(code, before) == _handler(code, now)


@functools.cache
def _names(code: CodeType) -> dict[int, str]:
    return {i.offset: i.opname for i in dis.get_instructions(code)}


@functools.cache
def _handler(code: CodeType, offset: int) -> int | None:
    entries: Any = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    return next((e.target for e in entries if e.start <= offset < e.end), None)
