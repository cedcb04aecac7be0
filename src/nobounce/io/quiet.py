"""Gates and memory registration keep out of each other's way.

Registering or unregistering host memory waits, inside the driver, for work on the device, and holds up every copy meanwhile.
Behind a closed gate that is a deadlock: the gate opens when its copies are done. So while a gate is closed nobody registers
(a relay does instead) and what is to be unregistered waits; a new gate waits for the one call under way.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

from nobounce.runtimes.base import Gate, Runtime
from nobounce.runtimes.exits import promise

_lock = threading.Lock()
_all: weakref.WeakKeyDictionary[Runtime, Quiet] = weakref.WeakKeyDictionary()


class Quiet:
    """One runtime's count of closed gates and of registrations under way."""

    def __init__(self, runtime: Runtime) -> None:
        self._changed = runtime.scheduler.condition()
        self._gates = self._calls = 0

    @property
    def gates(self) -> int:
        """Gates that are closed now."""
        return self._gates

    def gate_closes(self) -> None:
        """Before a gate is made: no registration is under way afterwards, and none begins until `gate_opened`."""
        with self._changed.mutex:
            self._gates += 1
            self._changed.wait_for(lambda: self._calls == 0)

    def gate_opened(self, gate: _KnownGate | None = None) -> None:
        """Once for each `gate_closes`; of a gate that is told again nothing more is made."""
        with self._changed.mutex:
            if gate is None:
                self._gates -= 1
            elif gate.counts:
                gate.counts, self._gates = False, self._gates - 1
            self._changed.notify_all()

    def try_call(self) -> bool:
        """Whether a registration may be made now; if so, `called` must follow."""
        with self._changed.mutex:
            if self._gates:
                return False
            self._calls += 1
            return True

    def wait_to_call(self, timeout: float | None = None) -> None:
        """Wait until no gate is closed, at most `timeout` seconds; `called` must follow."""
        with self._changed.mutex:
            self._changed.wait_for(lambda: self._gates == 0, timeout)
            self._calls += 1

    def called(self) -> None:
        with self._changed.mutex:
            self._calls -= 1
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
    """`runtime.gate`, known to whoever would register memory until it is opened. The caller opens it in any case."""
    quiet = quiet_of(runtime)
    if quiet is None:
        return promise(runtime.gate(stream, on_reached, patient=patient))
    quiet.gate_closes()
    try:
        return _KnownGate(promise(runtime.gate(stream, on_reached, patient=patient)), quiet)
    except BaseException:
        quiet.gate_opened()
        raise


class _KnownGate(Gate):
    def __init__(self, gate: Gate, quiet: Quiet) -> None:
        self._gate, self._quiet = gate, quiet
        self.can_look = gate.can_look
        self.counts = True

    def open(self) -> None:
        self._gate.open()
        if self.counts:
            self._quiet.gate_opened(self)

    def look(self) -> bool:
        return self._gate.look()


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    _all.clear()


os.register_at_fork(after_in_child=_forget)
