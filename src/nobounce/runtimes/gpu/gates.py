"""Gates in a GPU's streams: the stream says "reached" in one word of host memory and waits for another.

Both are operations of the stream itself (cuStreamWriteValue64, cuStreamWaitValue64), so no callback holds a
vendor's thread while I/O runs. Each gate uses a pair of words with a ticket that only grows: the stream
writes the ticket, and waits until the other word has at least that value. A pair is used again when its
stream has been seen to pass its write *and* the gate is open; a late wait for an old ticket is then
satisfied by any newer one.

One thread watches the written words, because nothing wakes the host when a stream writes one. Right after a
gate is made, opened or reached it looks again and again, giving way each time; then it sleeps for a fiftieth
of the time that nothing has happened, at most 5 ms. So a gate behind a kernel of five seconds costs about a
hundredth of a core, and one behind nothing is seen within microseconds. While a gate is closed, freeing
memory and loading code wait for it in every thread: words are taken in advance, and nothing here allocates
for a single gate but Python objects.

A device that cannot wait for values gets a host function that says "reached" and stays until the gate is
opened; it does no I/O, but other host functions of the device may have to wait for it.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections import deque
from collections.abc import Callable

from nobounce.clock import Scheduler
from nobounce.errors import NobounceError
from nobounce.runtimes.base import Gate
from nobounce.runtimes.gpu.adapter import Adapter
from nobounce.runtimes.gpu.host import StreamKey
from nobounce.runtimes.gpu.table import WAIT_GEQ, WRITE_DEFAULT

SPIN = 100e-6
"""Seconds after the last event in which the watcher does not sleep."""
SHORTEST, LONGEST = 40e-6, 5e-3
"""Seconds that the watcher sleeps."""
SHARE = 50
"""It sleeps for this part of the time that nothing has happened, and this many times
as long as one look takes."""
DOZE, LINGER = 200e-6, 20e-3
"""Between looks that no caller waits for, and how long after the last event the watcher goes on
dozing instead of sleeping."""
HEALTH = 0.25
"""Seconds between two questions whether the device still lives, while nothing happens."""

_PAIRS = {"cuda": 1024, "hip": 64}
"""Pairs of words taken at once."""


class Pair:
    """Two words in host memory. `ticket` is the last one used."""

    __slots__ = ("go", "reached", "ticket")

    def __init__(self, reached: int, go: int) -> None:
        self.reached = ctypes.c_uint64.from_address(reached)
        self.go = ctypes.c_uint64.from_address(go)
        self.ticket = 0


class GpuGate(Gate):
    """One place in one stream."""

    __slots__ = (
        "_gates",
        "_opened",
        "_pair",
        "_passed",
        "_patient",
        "_stream",
        "_ticket",
        "on_reached",
        "promised",
    )
    can_look = True
    on_reached: Callable[[], None]

    def __init__(
        self, gates: Gates, pair: Pair, stream: StreamKey, on_reached: Callable[[], None], patient: bool
    ) -> None:
        self._gates, self._pair, self._stream, self.on_reached = gates, pair, stream, on_reached
        pair.ticket += 1
        self._ticket = pair.ticket
        self._opened = self._passed = False
        self._patient, self.promised = patient, False

    def open(self) -> None:
        self._gates._open(self)

    def look(self) -> bool:
        return self._gates._look(self)

    def is_reached(self) -> bool:
        return self._pair.reached.value >= self._ticket


class HostGate(Gate):
    """The way of a device that cannot wait for values."""

    def __init__(self, on_reached: Callable[[], None]) -> None:
        self._event = threading.Event()
        self.on_reached = on_reached

    def open(self) -> None:
        self._event.set()

    def wait(self) -> None:
        self._event.wait()


class Gates:
    """Every gate of one runtime.

    `alive(device)` asks the device anything and raises if it is lost; `failed(stream, error)` takes
    what `on_reached` raised.
    """

    def __init__(
        self,
        adapter: Adapter,
        scheduler: Scheduler,
        alive: Callable[[int], None],
        failed: Callable[[StreamKey, BaseException], None],
    ) -> None:
        self._adapter, self._scheduler = adapter, scheduler
        self._alive, self._failed = alive, failed
        self._changed = scheduler.condition()
        self._submitting: dict[StreamKey, threading.Lock] = {}
        self._free: deque[Pair] = deque()
        self._queues: dict[StreamKey, deque[GpuGate]] = {}
        self._shut: set[Gate] = set()
        self._version = 0
        self._last = 0.0
        self._looks_at = math.inf
        self._untold: list[GpuGate] = []
        self._watching = False

    def close_stream(
        self, handle: int, stream: StreamKey, on_reached: Callable[[], None], patient: bool = False
    ) -> Gate:
        """Put a closed gate into a stream; the device's context is current."""
        with self._changed.mutex:
            lock = self._submitting.setdefault(stream, threading.Lock())
            if not self._watching:  # only once it runs: without it no gate would ever be found reached
                self._scheduler.spawn(self._watch, name=f"nobounce-{self._adapter.name}-gates")
                self._watching = True
        pair = self._take()
        with lock:  # write and wait belong together: another gate's write between them would come too early
            gate = GpuGate(self, pair, stream, on_reached, patient)
            try:
                self._adapter.write_value(handle, ctypes.addressof(pair.reached), gate._ticket, WRITE_DEFAULT)
            except NobounceError:
                with self._changed.mutex:
                    self._free.append(pair)
                raise
            self._enter(gate)  # before the wait: the watcher wakes up while that is submitted
            try:
                self._adapter.wait_value(handle, ctypes.addressof(pair.go), gate._ticket, WAIT_GEQ)
            except BaseException:
                gate.on_reached = _nothing  # the stream is not held; its write is still to be waited for
                self._open(gate)
                raise
        return gate

    def close_host(
        self, launch: Callable[[Callable[[], None]], None], on_reached: Callable[[], None]
    ) -> Gate:
        """The same by a host function that `launch` puts into the stream."""
        gate = HostGate(on_reached)

        def hold() -> None:
            try:
                on_reached()
            finally:
                gate.wait()
                self._shut.discard(gate)

        self._shut.add(gate)
        try:
            launch(hold)
        except NobounceError:
            self._shut.discard(gate)
            raise
        return gate

    def closed(self) -> list[Gate]:
        return list(self._shut)

    def open_all(self) -> None:
        """At interpreter exit: nothing else opens them."""
        for gate in list(self._shut):
            gate.open()

    # words

    def _take(self) -> Pair:
        while True:
            with self._changed.mutex:
                if self._free:
                    return self._free.popleft()
            # Not under the lock: taking memory may wait for a closed gate, and opening one needs the lock.
            words = self._adapter.words(2 * _PAIRS[self._adapter.name])
            with self._changed.mutex:
                self._free.extend(Pair(a, b) for a, b in zip(words[::2], words[1::2], strict=True))

    def forget(self, stream: StreamKey) -> None:
        """The stream is destroyed; its handle may come back as another stream."""
        self._submitting.pop(stream, None)

    def forget_all(self) -> None:
        """In a forked child: nothing here opens the parent's gates, whose words may
        be memory that both share."""
        self._changed = self._scheduler.condition()
        for gate in self._shut:
            if isinstance(gate, GpuGate):
                gate._opened = True
        self._shut.clear()
        self._queues.clear()
        self._untold.clear()

    # what happens

    def _enter(self, gate: GpuGate) -> None:
        with self._changed.mutex:
            self._queues.setdefault(gate._stream, deque()).append(gate)
            self._shut.add(gate)
            self._version += 1
            self._last = now = self._scheduler.now()
            if not gate._patient or self._looks_at > now + DOZE:
                self._changed.notify_all()

    def _open(self, gate: GpuGate) -> None:
        with self._changed.mutex:
            if gate._opened:
                return  # the words may be another gate's by now
            gate._pair.go.value = gate._ticket
            self._shut.discard(gate)
            gate._opened = True
            if gate._passed:
                self._free.append(gate._pair)
            if self._queues:
                self._happened()

    def _happened(self) -> None:
        self._version += 1
        self._last = self._scheduler.now()
        self._changed.notify_all()

    # the watcher

    def _watch(self) -> None:
        asked = 0.0
        while True:
            with self._changed.mutex:
                while not self._queues and not self._untold:
                    lingers = self._scheduler.now() - self._last < LINGER
                    self._pause(DOZE if lingers else None)
                untold, self._untold = self._untold, []
                version, heads = self._version, [queue[0] for queue in self._queues.values()]
            for gate in untold:
                self._tell(gate)
            began = self._scheduler.now()
            passed = [gate for gate in heads if gate.is_reached()]
            if passed:
                self._pass(passed)
                continue
            now = self._scheduler.now()
            idle = now - self._last
            if idle < SPIN:
                if not all(gate._patient for gate in heads):
                    self._scheduler.sleep(0)
                    continue
                with self._changed.mutex:
                    if version == self._version:
                        self._pause(DOZE)
                continue
            if idle > HEALTH and now - asked > HEALTH:
                asked = now
                self._pass(self._lost(heads))
            pause = min(max(idle / SHARE, SHARE * (now - began), SHORTEST), LONGEST)
            with self._changed.mutex:
                if version == self._version:
                    self._pause(pause)

    def _pause(self, seconds: float | None) -> None:
        """Wait with the lock held, until something happens or for `seconds`. A caller that
        can wait so long need not wake it."""
        self._looks_at = math.inf if seconds is None else self._scheduler.now() + seconds
        self._changed.wait(seconds)
        self._looks_at = 0.0

    def _look(self, gate: GpuGate) -> bool:
        while not gate._passed:
            with self._changed.mutex:
                queue = self._queues.get(gate._stream)
                head = queue[0] if queue else None
            if head is None or not head.is_reached():
                break
            self._pass([head])
        return gate._passed

    def _pass(self, passed: list[GpuGate]) -> None:
        mine: list[GpuGate] = []
        told = 0
        try:
            with self._changed.mutex:
                for gate in passed:
                    queue = self._queues.get(gate._stream)
                    if not queue or queue[0] is not gate:
                        continue  # another thread has looked
                    mine.append(gate)
                    if len(queue) == 1:  # at one stroke: the watcher must never meet an empty queue
                        del self._queues[gate._stream]
                    else:
                        queue.popleft()
                    gate._passed = True
                    if gate._opened:
                        self._free.append(gate._pair)
                if mine and self._queues:
                    self._happened()
            for gate in mine:
                self._tell(gate)
                told += 1
        except BaseException:
            # The thread that looked was interrupted: the watcher tells them, one of them perhaps again.
            with self._changed.mutex:
                self._untold += mine[told:]
                self._happened()
            raise

    def _tell(self, gate: GpuGate) -> None:
        try:
            gate.on_reached()
        except Exception as e:  # the watcher serves everybody
            self._failed(gate._stream, e)

    def _lost(self, heads: list[GpuGate]) -> list[GpuGate]:
        """Gates on a device that has failed: nothing will reach them, and those that
        wait must find out by trying."""
        lost: set[int] = set()
        for device in {gate._stream[1] for gate in heads}:
            try:
                self._alive(device)
            except NobounceError:
                lost.add(device)
        return [gate for gate in heads if gate._stream[1] in lost]


def _nothing() -> None:
    pass
