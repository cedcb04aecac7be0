"""The driver: a use count for the process, and what is registered while it is above 0 (hipFile A-16 to A-23).

One lock guards the count and the maps. A call that does I/O takes a file and a buffer out of the maps under
it and marks them in use there, so that a concurrent close or deregistration never pulls them away (C-31).
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading

from nobounce.buffer import Buffer
from nobounce.config import PUBLISHED, Settings, settings
from nobounce.errors import OpError
from nobounce.hipfile.dispatch import public, whole, whole_or
from nobounce.hipfile.status import SUCCESS, Error
from nobounce.hipfile.store import Store
from nobounce.io.file import File

_log = logging.getLogger("nobounce")

API_VERSION = (0, 5, 0)


class State:
    """Count, files by handle, handles by descriptor, buffers by exact pointer, parameters."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.count = 0
        self.files: dict[int, File] = {}
        self.handles: dict[int, int] = {}
        self.buffers: dict[int, Buffer] = {}
        self.store = Store()
        self.new_handle = itertools.count(0x48460001).__next__

    def open(self) -> None:
        """Count one more user; the first applies the staged parameters."""
        if self.count == 0:
            self.store.apply()
        self.count += 1

    def open_if_closed(self) -> None:
        """Implicit initialisation never counts above 1 (A-19)."""
        if self.count == 0:
            self.open()

    def close(self) -> None:
        """Count one user less; the last one clears."""
        with self.lock:
            self.count -= 1
            if self.count == 0:
                self.clear()

    def clear(self) -> None:
        """Forget buffers, then files. Those in use live on until their operations end."""
        busy = (
            sum(b._uses > 0 for b in self.buffers.values()),
            sum(f._in_flight > 0 for f in self.files.values()),
        )
        if any(busy):
            _log.critical("hipfile: closed while %d buffer(s) and %d file(s) are in use", *busy)
        self.buffers.clear()
        files = list(self.files.values())
        self.files.clear()
        self.handles.clear()
        self.store.drop()
        for file in files:
            file.close()

    def settings(self) -> Settings:
        """The settings in force for the facade's I/O. Raises ConfigError."""
        with self.lock:
            return self.store.settings()


STATE = State()


def published_profile() -> bool:
    """Whether NOBOUNCE_PROFILE asks for the published library in every detail. Raises ConfigError."""
    return settings().profile == PUBLISHED


@whole_or(lambda _: STATE.close())
def driver_open() -> Error:
    """Count one more user of the driver."""
    with STATE.lock:
        STATE.open()
    return SUCCESS


@whole
def driver_close() -> Error:
    """Count one less; at 0 every buffer and file is deregistered, streams and batches
    are not. 5001 at 0 (A-17)."""
    with STATE.lock:
        if STATE.count == 0:
            return Error(OpError.DRIVER_NOT_INITIALIZED)
        STATE.close()
    return SUCCESS


@public
def use_count() -> int:
    """How many users the driver has."""
    return STATE.count


@public
def get_version() -> tuple[Error, tuple[int, int, int]]:
    """(major, minor, patch) of the hipFile API that this module speaks; opens nothing (A-14)."""
    return SUCCESS, API_VERSION


def _after_fork_in_child() -> None:
    """The child starts closed: the parent's registrations are the parent's, and their
    second descriptors are closed."""
    STATE.lock = threading.RLock()
    STATE.count = 0
    files = list(STATE.files.values())
    STATE.files, STATE.handles, STATE.buffers = {}, {}, {}
    STATE.store = Store()
    for file in files:
        file._lock = threading.Lock()
        file._in_flight = 0
        file.close()


def _at_exit() -> None:
    files, buffers = list(STATE.files.values()), list(STATE.buffers.values())
    busy = sum(b._uses > 0 for b in buffers), sum(f._in_flight > 0 for f in files)
    if any(busy):
        _log.critical("hipfile: the process ends while %d buffer(s) and %d file(s) are in use", *busy)


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
