"""That a transfer uses a file and a buffer: counted in and counted out once, wherever an interrupt hits.

The interpreter runs signal handlers behind calls, at the beginning of functions and where loops jump back,
so none runs between a count and the note of it beside it. The holder's `try` begins before `take`, and
`let_go` may be called again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nobounce.buffer import Buffer
    from nobounce.io.file import File


class Hold:
    """One transfer's use of a file and a buffer. One `in_order` of a stream is waited for where the
    buffer's `with` block ends."""

    __slots__ = ("_file", "_file_held", "_transfers", "_view", "_view_held")

    def __init__(self, file: File, view: Buffer, *, in_order: bool = False) -> None:
        self._file, self._view, self._transfers = file, view, int(in_order)
        self._file_held = self._view_held = False

    @property
    def held(self) -> bool:
        return self._file_held or self._view_held

    def take(self) -> None:
        """Raises ClosedError."""
        file, view = self._file, self._view
        with file._lock:
            if file._closed:
                file._check_open()
            file._in_flight += 1
            self._file_held = True
        with view._lock:
            if view._closed:
                raise view._gone()
            view._uses += 1
            view._transfers += self._transfers
            self._view_held = True

    def let_go(self) -> None:
        file, view = self._file, self._view
        with view._lock:
            if self._view_held:
                view._uses -= 1
                view._transfers -= self._transfers
                self._view_held = False
            idle = None if view._transfers else view._idle
        if idle is not None:
            with idle.mutex:
                idle.notify_all()
        with file._lock:
            if self._file_held:
                file._in_flight -= 1
                self._file_held = False
        if file._closed:
            file._close_if_left()
