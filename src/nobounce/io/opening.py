"""nobounce.open: a File by its path."""

from __future__ import annotations

import contextlib
import functools
import os

from nobounce.errors import ArgumentError, FileError
from nobounce.io.descriptors import MODES, check_kind
from nobounce.io.file import File


def open(path: str | os.PathLike[str] | int, mode: str = "r") -> File:  # noqa: A001 - named as its users know it
    """Open a file for transfers.

    `path` may be a descriptor: it is duplicated and stays the caller's. Modes are r, r+, w, w+, x, x+
    (always binary). Raises FileError (also FileNotFoundError, IsADirectoryError, PermissionError) and
    ArgumentError for a mode.
    """
    if isinstance(path, int):
        return File.from_fd(path)
    name = os.fspath(path)
    flags = MODES.get(mode.replace("b", ""))
    if flags is None:
        raise ArgumentError(f"mode {mode!r} is not one of {', '.join(MODES)}")
    try:
        # A pipe would block in open() until somebody writes: look before opening.
        with contextlib.suppress(FileNotFoundError):
            check_kind(os.stat(name).st_mode, name)
        return File._opened(functools.partial(os.open, name, flags | os.O_CLOEXEC, 0o666), name, "buffered")
    except OSError as e:
        if isinstance(e, FileError):
            raise
        raise FileError.from_oserror(e, name, "open") from e
