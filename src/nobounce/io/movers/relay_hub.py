"""Transfers that relay through one ring at the same time have their reads done by one thread of theirs.

Each thread that waits for the kernel, asks for copies and hands the interpreter's lock to the others takes
slots and time from them: eight together came to two thirds of what one reaches. So the first of them drives:
it starts everybody's reads in turns, queues everybody's copies on its own stream, and passes the role on when
its own transfer is over. The others sleep.

Only who drives touches slots, units, reads and copies; the lock guards who that is and who sleeps.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from nobounce.io.movers.bounce import Ring
from nobounce.io.movers.relay_pipe import Pipe

if TYPE_CHECKING:
    from nobounce.io.movers.uring_relay import UringRelay

_lock = threading.Lock()
_hubs: weakref.WeakKeyDictionary[Ring, dict[int, Hub]] = weakref.WeakKeyDictionary()


class Hub:
    """The transfers that share a pipe, and which of their threads drives it."""

    def __init__(self, ring: Ring, unit_nbytes: int) -> None:
        self.pipe = Pipe(ring, unit_nbytes)
        self._ring = ring
        self._mutex = ring.runtime.scheduler.lock()
        self.driver: UringRelay | None = None
        self._asleep: list[UringRelay] = []
        self.members: list[UringRelay] = []
        self.broken = False
        self._error: Exception = InterruptedError("the relay was interrupted")
        self._shared = ExitStack()
        self._shared.enter_context(ring.shared())

    # who drives

    def give(self, me: UringRelay) -> None:
        """`me` has a chunk to be read."""
        self.pipe.give(me)

    def until(self, me: UringRelay, ready: Callable[[], bool]) -> None:
        """Drive until `ready()`, or sleep while another thread does. What fails is found in the members."""
        me.is_ready = ready
        while True:
            with self._mutex:
                if ready():
                    self._wake_a_driver()
                    return
                if self.driver is None or self.driver is me:
                    self.driver = me
                    break
                self._asleep.append(me)
            me.sleep()
        try:
            while not ready():
                self.pipe.step(me)
                self._wake_the_ready()
        except BaseException as e:
            self._break(e)
            if not isinstance(e, Exception):
                raise

    def release(self, me: UringRelay) -> None:
        """`me` drives no longer. Between two chunks it keeps the role: it is back before
        another thread were awake."""
        with self._mutex:
            if self.driver is me:
                if not self.broken:
                    self.pipe.rest()
                self.driver = None
            self._wake_a_driver()

    def _wake_a_driver(self) -> None:
        if self.driver is None and self._asleep:
            self._asleep.pop(0).wake()

    def _wake_the_ready(self) -> None:
        with self._mutex:
            if self._asleep:
                for sleeper in [s for s in self._asleep if s.is_ready()]:
                    self._asleep.remove(sleeper)
                    sleeper.wake()

    def _break(self, error: BaseException) -> None:
        """The kernel's ring failed, or memory for a slot: nobody's transfer goes on, and what
        is read into is nobody's."""
        with _lock:
            self._unlist()
            if isinstance(error, Exception):
                self._error = error
            self.broken = True
            members = list(self.members)
        self.pipe.copies.wait(*([self.driver.stream] if self.driver is not None else []))
        for member in members:
            member.lose(self.failure())
        self.pipe.abandon()
        self._shared.close()
        self._wake_the_ready()

    def failure(self) -> Exception:
        """What broke it, for one member: each raises its own."""
        try:
            return copy.copy(self._error)
        except Exception:  # one that cannot be copied
            return self._error

    def _unlist(self) -> None:
        known, unit_nbytes = _hubs.get(self._ring, {}), self.pipe.units.unit_nbytes
        if known.get(unit_nbytes) is self:
            del known[unit_nbytes]

    def resize(self) -> None:
        """Members came or went. Under the lock of all hubs."""
        self.pipe.units.most = sum(m.most_slots for m in self.members)
        self.pipe.shared = len(self.members) > 1

    def close(self) -> None:
        """The last member has left: nothing is under way."""
        self._unlist()
        if self.broken:
            return
        self._shared.close()
        self.pipe.close()


def join(me: UringRelay, ring: Ring, unit_nbytes: int) -> Hub:
    """The hub for units of this size, with `me` in it. Raises OSError where the
    kernel gives no ring for one."""
    with _lock:
        known = _hubs.setdefault(ring, {})
        hub = known.get(unit_nbytes)
        if hub is None:
            hub = known[unit_nbytes] = Hub(ring, unit_nbytes)
        hub.members.append(me)
        hub.resize()
    return hub


def leave(me: UringRelay, hub: Hub) -> None:
    """Nothing of `me` is under way; the last one gives everything back."""
    hub.release(me)
    with _lock:
        hub.members.remove(me)
        hub.resize()
        if not hub.members:
            hub.close()


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    _hubs.clear()


os.register_at_fork(after_in_child=_forget)
