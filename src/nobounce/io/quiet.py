"""Gates and memory registration keep out of each other's way.

Registering or unregistering host memory waits, inside the driver, for work on the device, and holds up every
copy meanwhile. Behind a closed gate that is a deadlock: the gate opens when its copies are done. So while a
gate is closed nobody registers (a relay does instead) and what is to be unregistered waits; a new gate waits
for the one call under way.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from threading import get_ident

from nobounce.runtimes.base import Gate, Runtime
from nobounce.runtimes.exits import closed_by, promise

_lock = threading.Lock()
_all: weakref.WeakKeyDictionary[Runtime, Quiet] = weakref.WeakKeyDictionary()


class Quiet:
    """One runtime's count of closed gates and of registrations under way."""

    def __init__(self, runtime: Runtime) -> None:
        self._changed = runtime.scheduler.condition()
        self._gates = 0
        self._calls: set[int] = set()
        """The threads that call: one that was interrupted between beginning and ending is found
        out when it comes again."""

    @property
    def gates(self) -> int:
        """Gates that are closed now."""
        return self._gates

    def gate_closes(self, gate: KnownGate) -> None:
        """Before a gate is made: no registration is under way afterwards, and none
        begins until `gate_opened`."""
        with self._changed.mutex:
            self._calls.discard(get_ident())
            gate.counts, self._gates = True, self._gates + 1
            self._changed.wait_for(lambda: not self._calls)

    def gate_opened(self, gate: KnownGate) -> None:
        """Of a gate that is told again nothing more is made."""
        with self._changed.mutex:
            if gate.counts:
                gate.counts, self._gates = False, self._gates - 1
            self._changed.notify_all()

    def try_call(self) -> bool:
        """Whether a registration may be made now; if so, `called` must follow."""
        with self._changed.mutex:
            if self._gates:
                return False
            self._calls.add(get_ident())
            return True

    def wait_to_call(self, timeout: float | None = None) -> None:
        """Wait until no gate is closed, at most `timeout` seconds; `called` must follow."""
        with self._changed.mutex:
            self._changed.wait_for(lambda: self._gates == 0, timeout)
            self._calls.add(get_ident())

    def called(self) -> None:
        with self._changed.mutex:
            self._calls.discard(get_ident())
            self._changed.notify_all()


def quiet_of(runtime: Runtime) -> Quiet | None:
    """The runtime's own, or None where no memory is ever registered."""
    if not runtime.capabilities.host_register:
        return None
    found = _all.get(runtime)
    if found is None:
        with _lock:
            found = _all.setdefault(runtime, Quiet(runtime))
    return found


def closed_gate(
    runtime: Runtime, stream: int, on_reached: Callable[[], None], *, patient: bool = False
) -> Gate:
    """`runtime.gate`, known to whoever would register memory until it is opened. The
    caller opens it in any case."""
    gate = KnownGate(runtime)
    try:
        gate.shut(stream, on_reached, patient=patient)
    except BaseException:
        gate.open()
        raise
    return gate


class KnownGate(Gate):
    """A gate that its owner holds before `shut` closes it: wherever that is
    interrupted, somebody can open it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._quiet = runtime, quiet_of(runtime)
        self._gate: Gate | None = None
        self._begun = self._opened = self.counts = False

    def shut(self, stream: int, on_reached: Callable[[], None], *, patient: bool = False) -> None:
        """Close it, once; when that raises, `open` it all the same."""
        self.on_reached, self._begun = on_reached, True
        if self._quiet is not None:
            self._quiet.gate_closes(self)
        gate = promise(self._runtime.gate(stream, on_reached, patient=patient))
        self.can_look = gate.can_look
        self._gate = gate
        if self._opened:
            gate.open()

    def open(self) -> None:
        self._opened = True
        if self._gate is not None:
            self._gate.open()
        elif self._begun:  # interrupted, or the stream was there before `shut` has ended
            for gate in closed_by(self.on_reached):
                gate.open()
        if self.counts and self._quiet is not None:
            self._quiet.gate_opened(self)

    def look(self) -> bool:
        return self._gate is not None and self._gate.look()


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    for runtime, quiet in _all.items():
        quiet._changed = runtime.scheduler.condition()  # gates of the parent may still be opened here
    _all.clear()


os.register_at_fork(after_in_child=_forget)
