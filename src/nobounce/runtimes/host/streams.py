"""Stream order for the host runtimes: a graph of ops, run by a few workers.

An op waits for the op before it in its stream, for the legacy null stream where HIP rules 15 and 16 say so,
and for what a wait names. An op whose last dependency ends is handed to a worker; a stream that waits holds
no thread, so thousands of streams cost nothing. Markers (event records, waits) end as soon as what they stand
behind has ended, on the thread that ended it, which is when their time is taken (HIP rule 29).

One lock guards the graph and is never held while an op runs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any

from nobounce.clock import Scheduler
from nobounce.errors import DeviceError, RuntimeStatus
from nobounce.runtimes.base import Gate
from nobounce.runtimes.host.ops import HostDevice, HostStream, Latch, Op, Work, Worker
from nobounce.runtimes.host.tickets import Ordered, Tickets
from nobounce.uninterrupted import GivenUp, uninterrupted

_IDLE_SECONDS = 5.0
_MOST_IDLE = 8
_MOST_ERRORS = 1000

inside = threading.local()
"""`inside.host_call` is true on a thread that runs a host function (HIP rule 41)."""


class HostGate(Gate):
    """Holds its stream from when `op` is reached until `open`."""

    def __init__(self, executor: Executor, on_reached: Callable[[], None]) -> None:
        self._executor = executor
        self.on_reached = on_reached
        self.opened = False
        self.parked: Op | None = None

    def open(self) -> None:
        self._executor.open_gate(self)


class Executor:
    """The graph of one runtime. `inline` lets a submitter run small ops itself where
    nothing is before them."""

    def __init__(self, scheduler: Scheduler, name: str, *, inline: bool, tickets: bool) -> None:
        self.scheduler, self.name, self.inline = scheduler, name, inline
        self.lock = scheduler.lock()
        self.tickets = Tickets() if tickets else None
        self._idle: list[Worker] = []
        self._gates: set[HostGate] = set()
        self._generation = 0
        self.exiting = False

    # submission

    def submit(
        self,
        stream: HostStream,
        work: Work | None,
        *,
        after: Iterable[Op] = (),
        implicit: bool = True,
        inline: bool = False,
        timed: bool = False,
        signals: bool = False,
        gate: HostGate | None = None,
        allocates: Ordered | None = None,
        touches: Collection[Ordered] = (),
        frees: Ordered | None = None,
        call: str = "",
    ) -> Op:
        """Queue `work` on `stream`, after the ops `after` too; never waits, unless `inline`
        lets this thread run it now.

        `implicit` adds the dependencies on the legacy null stream. `allocates`, `touches` and `frees` name
        stream-ordered memory, whose order is checked where there are tickets. An op that `signals` tells the
        host that all before it has happened.
        """
        if gate is None and (inline or work is None):
            now = self.run_now(stream, work, after=after, implicit=implicit, timed=timed)
            if now is not None:
                return now

        def queue(_: GivenUp) -> Op:
            known = {"call": call, "allocates": allocates, "touches": touches, "frees": frees}
            return self._queue(stream, work, tuple(after), implicit, timed, signals, gate, known)

        op = uninterrupted(queue, self.scheduler)
        self._help()
        return op

    def _queue(
        self,
        stream: HostStream,
        work: Work | None,
        after: tuple[Op, ...],
        implicit: bool,
        timed: bool,
        signals: bool,
        gate: HostGate | None,
        memory: dict[str, Any],
    ) -> Op:
        with self.lock:
            deps = self._before(stream, after, implicit)
            if self.tickets is not None:
                self.tickets.admit(stream, after, implicit, **memory)
            op = self._made(stream, work)
            stream.queue.append(op)
            stream.device.busy.add(stream)
            op.timed, op.signals, op.gate = timed, signals, gate
            if gate is not None:
                self._gates.add(gate)
            for dep in deps:
                dep.dependents.append(op)
            op.missing = len(deps)
            if deps:
                return op
            if work is None:
                self._finish(op)
                return op
            stream.ready = op
            self._serve(stream)
            return op

    def run_now(
        self,
        stream: HostStream,
        work: Work | None,
        *,
        after: Iterable[Op] = (),
        implicit: bool = True,
        timed: bool = False,
    ) -> Op | None:
        """Run `work` on this thread if nothing is before it; None, and nothing happens, if something is.

        The op never enters the graph: nothing can come to stand behind it before this returns. So an
        interrupt leaves nothing.
        """
        if not self.inline:
            return None
        with self.lock:
            if self._before(stream, after, implicit):
                return None
            op = self._made(stream, work)
        try:
            if work is not None:
                work()
        except Exception as e:  # noqa: BLE001 - the stream's asynchronous error (HIP rule 78)
            op.error = e
            self._note_error(op)
        op.done, op.work, op.time = True, None, self.scheduler.now() if timed else 0.0
        return op

    def _before(self, stream: HostStream, after: Iterable[Op], implicit: bool) -> list[Op]:
        """The ops that one submitted now has to wait for. The lock is held."""
        deps = [d for d in after if not d.done]
        if implicit:
            self._add_null_dependencies(stream, deps)
        if stream.queue:
            deps.append(stream.queue[-1])
        return deps

    def _made(self, stream: HostStream, work: Work | None) -> Op:
        stream.submitted += 1
        op = Op(stream, stream.submitted, work)
        op.tickets = stream.tickets
        return op

    def submit_gate(self, stream: HostStream, on_reached: Callable[[], None]) -> HostGate:
        gate = HostGate(self, on_reached)
        self.submit(stream, on_reached, signals=True, gate=gate)
        return gate

    def _add_null_dependencies(self, stream: HostStream, deps: list[Op]) -> None:
        null = stream.device.null
        if stream is null:
            deps += [s.queue[-1] for s in stream.device.busy if not s.nonblocking and s is not null]
        elif not stream.nonblocking and null.queue:
            deps.append(null.queue[-1])

    # completion; the lock is held

    def _finish(self, first: Op) -> None:
        ended = [first]
        ready: list[HostStream] = []
        while ended:
            op = ended.pop()
            if op.done:
                continue
            op.done = True
            if op.timed:
                op.time = self.scheduler.now()
            stream = op.stream
            stream.queue.popleft()
            if not stream.queue:
                stream.device.busy.discard(stream)
            self._note_error(op)
            for waiting in op.dependents:
                waiting.missing -= 1
                if waiting.missing == 0:
                    if waiting.work is None:
                        ended.append(waiting)
                    else:
                        waiting.stream.ready = waiting
                        ready.append(waiting.stream)
            for latch in op.latches:
                latch.count_down()
            op.dependents, op.latches, op.work = [], [], None
        if len(ready) > 1:
            ready.sort(key=lambda s: s.priority)  # more urgent first (HIP rule 8)
        for stream in ready:
            self._serve(stream)

    def _note_error(self, op: Op) -> None:
        errors = op.stream.device.errors
        if op.error is not None and len(errors) < _MOST_ERRORS:
            errors.append((op.stream, op.number, op.error))

    def _serve(self, stream: HostStream) -> None:
        if stream.served:
            return  # its worker looks again before it goes idle
        stream.served = True
        if self._idle:
            worker = self._idle.pop()
            with worker.condition.mutex:
                worker.stream = stream
                worker.condition.notify()
            return
        worker = Worker(self.scheduler, stream)
        generation = self._generation
        try:
            self.scheduler.spawn(
                lambda: self._serve_forever(worker, generation), name=f"nobounce-{self.name}"
            )
        except (RuntimeError, MemoryError):
            self.scheduler.keep(lambda: self._drain(stream, generation))

    def _help(self) -> None:
        """Serve streams for which no thread could be started; not in a host function, to
        which the runtime is closed."""
        if not getattr(inside, "host_call", False):
            self.scheduler.help()

    # workers

    def _serve_forever(self, worker: Worker, generation: int) -> None:
        while True:
            stream = worker.stream
            if stream is not None:
                worker.stream = None
                self._drain(stream, generation)
                self._help()
            if generation != self._generation:
                return
            stream = None
            with self.lock:
                if len(self._idle) >= _MOST_IDLE:
                    return
                self._idle.append(worker)
            with worker.condition.mutex:
                if worker.stream is None:
                    worker.condition.wait(_IDLE_SECONDS)
                if worker.stream is not None:
                    continue
            with self.lock:
                if worker in self._idle:
                    self._idle.remove(worker)
                    return

    def _drain(self, stream: HostStream, generation: int) -> None:
        """Run what is ready in one stream until nothing is."""
        self.lock.acquire()
        try:
            while (op := stream.ready) is not None:
                stream.ready = None
                self.lock.release()
                try:
                    if generation != self._generation:
                        return
                    self._do(op)
                finally:
                    self.lock.acquire()
                if generation != self._generation:
                    return
                self._after_work(op)
            stream.served = False
        finally:
            self.lock.release()

    def _do(self, op: Op) -> None:
        work = op.work
        if work is None:
            return
        if op.signals:
            self.covered(op.tickets)
        try:
            if op.gate is None:
                work()
            else:
                run_host_function(work)
        except (Exception, KeyboardInterrupt, SystemExit) as e:
            op.error = e if isinstance(e, Exception) else RuntimeError(f"{type(e).__name__} in a stream")

    def _after_work(self, op: Op) -> None:
        gate = op.gate
        if gate is not None and not gate.opened:
            gate.parked = op
            return
        if gate is not None:
            self._gates.discard(gate)
        self._finish(op)

    def open_gate(self, gate: HostGate) -> None:
        uninterrupted(lambda _: self._open_gate(gate), self.scheduler)
        self._help()

    def _open_gate(self, gate: HostGate) -> None:
        with self.lock:
            if gate.opened:
                return
            gate.opened = True
            if gate.parked is not None:
                parked, gate.parked = gate.parked, None
                self._gates.discard(gate)
                self._finish(parked)

    # the host waits

    def wait(self, ops: Iterable[Op]) -> None:
        """Until all have ended."""
        if sys.is_finalizing():
            return  # workers are gone: nothing would ever end
        self._help()
        with self.lock:
            pending = [op for op in ops if not op.done]
            if not pending:
                return
            latch = Latch(self.scheduler, len(pending))
            for op in pending:
                op.latches.append(latch)
        latch.wait()

    def covered(self, tickets: frozenset[int]) -> None:
        """The host knows that these stream-ordered allocations have happened."""
        if tickets and self.tickets is not None:
            with self.lock:
                self.tickets.live -= tickets

    def tail(self, stream: HostStream) -> list[Op]:
        with self.lock:
            return [stream.queue[-1]] if stream.queue else []

    def tails(self, device: HostDevice, *, blocking_only: bool = False) -> list[Op]:
        with self.lock:
            return [s.queue[-1] for s in device.busy if not (blocking_only and s.nonblocking)]

    def take_errors(
        self, device: HostDevice, wanted: Callable[[HostStream, int], bool] | None = None
    ) -> list[Exception]:
        """Asynchronous errors not delivered yet (HIP rule 78); each is handed out once."""
        if not device.errors:
            return []
        with self.lock:
            taken = [e for s, n, e in device.errors if wanted is None or wanted(s, n)]
            device.errors[:] = [x for x in device.errors if x[2] not in taken]
            return taken

    def forget_error(self, op: Op) -> None:
        """The submitter raises it itself."""
        with self.lock:
            errors = op.stream.device.errors
            errors[:] = [x for x in errors if x[2] is not op.error]

    # the end of the process, and fork

    def closed_gates(self) -> list[HostGate]:
        with self.lock:
            return [gate for gate in self._gates if not gate.opened]

    def open_all_gates(self) -> None:
        for gate in list(self._gates):
            gate.open()

    def restart(self, devices: Iterable[HostDevice]) -> None:
        """In a forked child: nothing of the parent's pending work will run here, and
        a sync says so."""
        self._generation += 1
        self.lock = self.scheduler.lock()
        self._idle = []
        for gate in self._gates:
            gate.opened, gate.parked = True, None
        self._gates = set()
        for device in devices:
            for stream in list(device.busy):
                lost = DeviceError(
                    "fork",
                    RuntimeStatus.ContextIsDestroyed,
                    detail="work pending at fork() runs in the parent only",
                )
                device.errors.append((stream, stream.submitted, lost))
                for op in stream.queue:
                    op.done, op.work, op.dependents, op.latches = True, None, [], []
                stream.queue.clear()
                stream.ready, stream.served = None, False
            device.busy.clear()


def run_host_function(fn: Work) -> None:
    """Run a user's function with the runtime closed to it (HIP rule 41)."""
    inside.host_call = True
    try:
        fn()
    finally:
        inside.host_call = False
