"""A trace in Chrome's JSON format, which Perfetto reads too: one file per process,
written as it happens, bounded.

Tracks are threads of the process (submitting threads and I/O threads, by the kernel's numbers) and made-up
ones, numbered from `MADE_UP` on, for streams, copy streams and batches. Slices on one track nest or follow
each other: a stream carries one transfer at a time, a thread one chunk at a time. A flow goes from an
asynchronous transfer's submission to its slice in the stream.

Every event goes to the file when it happens, one a line, so memory does not grow, and a process that is
killed or leaves through os._exit leaves all that ended before. What is over the limit is counted and dropped;
the end of the file says how many, and what the counters said.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from nobounce.errors import FileError, NobounceError, RouteError, errno_name, printable
from nobounce.io import hooks
from nobounce.io.hooks import Operation
from nobounce.observe.batches import GroupSums, Lanes
from nobounce.outfile import create

if TYPE_CHECKING:
    from nobounce.io.batch.group import Group
    from nobounce.io.job import Job
    from nobounce.io.receipt import Receipt
    from nobounce.io.target import Chunk
    from nobounce.route.types import Op, Refusal

_log = logging.getLogger("nobounce")

MADE_UP = 1 << 23
"""Above every thread number that the kernel gives out (at most 2^22)."""
SCHEMA = "nobounce.trace/1"


def in_folder(name: str) -> str:
    """`name`, or, where that is a folder, the trace.json in it."""
    return os.path.join(name, "trace.json") if os.path.isdir(name) else name


def path_for(name: str, pid: int) -> str:
    """The file of one process: its id goes before the ending, out.json is out.123.json."""
    stem, ending = os.path.splitext(in_folder(name))
    return f"{stem}.{pid}{ending or '.json'}"


class Tracer(hooks.Watcher):
    """Writes the trace of this process to `path_for(name, pid)`, until the first write that
    fails. Raises FileError."""

    def __init__(self, name: str, limit: int) -> None:
        self._pid = os.getpid()
        self.path = path_for(name, self._pid)
        self._limit = limit
        self._lock = threading.Lock()
        self._limit_said = False
        self._tracks: dict[tuple[Any, ...], int] = {}
        self._named: set[int] = set()
        self._groups: dict[Group, GroupSums] = {}
        self._lanes = Lanes()
        self.events = self.dropped = self._flows = 0
        head = f'{{"displayTimeUnit":"ms","traceEvents":[\n{self._meta("process_name", 0, _command())}'
        self._file = create(self.path, private=True)
        try:
            self._file.write(head.encode())
            self._file.commit()
        except BaseException:
            self._file.close()
            raise
        self._open = True
        atexit.register(self.close)
        _at_end_of_multiprocessing_child(self)

    # what is told

    def _full(self, events: int) -> bool:
        """Whether these go over the limit; then they are counted, and nothing is made of them."""
        if self.events + events <= self._limit:
            return False
        with self._lock:
            self.dropped += events
            if not self._limit_said and self._open:
                # The end of the file says how many; a process that never gets there has said so much.
                self._limit_said = True
                full = {"ph": "i", "s": "p", "name": "trace limit reached", "cat": "limit", "pid": self._pid}
                full |= {"tid": 0, "ts": _us(time.monotonic()), "args": {"limit": self._limit}}
                self._write(f",\n{json.dumps(full, separators=(',', ':'))}")
        return True

    def exited(self, operation: Operation) -> None:
        if self._full(1 if operation.stream is None else 4):
            return
        stream = operation.stream
        start = operation.queued_at if operation.started_at is None else operation.started_at
        args = describe(operation)
        if isinstance(operation.error, RouteError) and operation.started_at is None:
            args |= {} if stream is None else {"stream": f"{stream:#x}"}
            stream = None  # it never got there
        if stream is None:
            thread = operation.thread
            self._slice(thread, self._thread(thread), operation.op, start, operation, args)
            return
        track = self._track("stream", operation.device, stream)
        self._slice(track, f"stream {stream:#x} on {operation.device}", operation.op, start, operation, args)
        base = self._flow()
        queued, at = _us(operation.queued_at), _us(start)
        submit = {"ph": "X", "name": f"submit {operation.op}", "cat": "submit", "pid": self._pid}
        submit |= {"tid": operation.thread, "ts": queued, "dur": 1.0, "args": {"nbytes": operation.nbytes}}
        self._emit(
            submit,
            {**base, "ph": "s", "tid": operation.thread, "ts": queued},
            {**base, "ph": "f", "bp": "e", "tid": track, "ts": at},
            name=(operation.thread, self._thread(operation.thread)),
        )

    def moved(self, job: Job, chunk: Chunk, began: float, ended: float) -> None:
        if self._full(1):
            return
        thread = threading.get_native_id()
        args = {"nbytes": chunk.nbytes, "file_offset": chunk.file_offset, "reason": chunk.reason.code}
        event = {"ph": "X", "name": f"{chunk.backend} {job.target.op}", "cat": "chunk", "pid": self._pid}
        event |= {"tid": thread, "ts": _us(began), "dur": _dur(began, ended), "args": args}
        self._emit(event, name=(thread, self._thread(thread)))

    def copied(self, device: str, stream: int, op: Op, nbytes: int, began: float, ended: float) -> None:
        track = self._track("copy", device, stream)
        # Copies of one stream run one behind the other, but are seen to end later: a slice begins
        # when the last one ended.
        with self._lock:
            last = self._tracks.get(("end", track), 0)
            begin = max(_us(began), last / 1000)
            end = max(begin, _us(ended))
            self._tracks["end", track] = int(end * 1000)
        event = {"ph": "X", "name": "copy", "cat": "copy", "pid": self._pid, "tid": track, "ts": begin}
        direction = "host to device" if op == "read" else "device to host"
        event |= {"dur": round(end - begin, 3), "args": {"nbytes": nbytes, "direction": direction}}
        self._emit(event, name=(track, f"copy stream {stream:#x} on {device}"))

    # batches: a slice per group, from its submission to the end of its last request

    def _sums(self, group: Group, now: float) -> GroupSums:
        found = self._groups.get(group)
        if found is None:
            found = self._groups[group] = GroupSums(now, threading.get_native_id())
        return found

    def batch_submitted(self, group: Group, now: float) -> None:
        sums = self._sums(group, now)
        sums.begun, sums.thread, sums.lane = now, threading.get_native_id(), self._lanes.take()

    def batch_ended(self, group: Group, ends: hooks.BatchEnds, status: str, seconds: float) -> None:
        self._sums(group, group.submitted_at).ended(group, ends, status)

    def batch_refused(self, group: Group, refusals: tuple[Refusal, ...], count: int) -> None:
        self._sums(group, group.submitted_at).turned_away(refusals, count)

    def batch_done(self, group: Group, now: float) -> None:
        sums = self._groups.pop(group, None)
        if sums is None:
            return
        self._lanes.give(sums.lane)
        if self._full(1 if sums.lane < 0 else 5):
            return
        args = sums.args(group)
        whole = {"name": f"batch {group.op}", "cat": "batch", "pid": self._pid, "args": args}
        if sums.lane < 0:  # never submitted, or more at once than there are tracks for: its sums alone
            track = self._track("batches")
            self._emit({**whole, "ph": "i", "s": "t", "tid": track, "ts": _us(now)}, name=(track, "batches"))
            return
        track = self._track("batch", sums.lane)
        begin, end, thread = _us(sums.begun), _us(now), threading.get_native_id()
        whole |= {"ph": "X", "tid": track, "ts": begin, "dur": _dur(sums.begun, now)}
        self._emit(whole, name=(track, f"batch {sums.lane + 1}"))
        flow = self._flow()
        point = {
            "ph": "X",
            "cat": "submit",
            "pid": self._pid,
            "dur": 1.0,
            "args": {"requests": args["requests"]},
        }
        self._emit(
            {**point, "name": f"submit batch {group.op}", "tid": sums.thread, "ts": begin},
            {**flow, "ph": "s", "tid": sums.thread, "ts": begin},
            name=(sums.thread, self._thread(sums.thread)),
        )
        self._emit(
            {**point, "name": f"batch {group.op} complete", "tid": thread, "ts": end},
            {**flow, "ph": "f", "bp": "e", "tid": thread, "ts": end},
            name=(thread, self._thread(thread)),
        )

    # tracks

    def _flow(self) -> dict[str, Any]:
        with self._lock:
            self._flows += 1
            return {"cat": "flow", "name": "order", "id": f"{self._pid}.{self._flows}", "pid": self._pid}

    def _track(self, *key: Any) -> int:
        found = self._tracks.get(key)
        if found is None:
            with self._lock:
                found = self._tracks.setdefault(key, MADE_UP + len(self._tracks))
        return found

    def _thread(self, number: int) -> str:
        if number in self._named:
            return ""
        for thread in threading.enumerate():
            if thread.native_id == number:
                return thread.name
        return f"thread {number}"

    def _slice(
        self, track: int, name: str, op: str, start: float, operation: Operation, args: dict[str, Any]
    ) -> None:
        ended = operation.ended_at if operation.ended_at is not None else start
        event = {"ph": "X", "name": op, "cat": "transfer", "pid": self._pid, "tid": track}
        event |= {"ts": _us(start), "dur": _dur(start, ended), "args": args}
        self._emit(event, name=(track, name))

    # the file

    def _emit(self, *events: dict[str, Any], name: tuple[int, str]) -> None:
        lines = [json.dumps(e, separators=(",", ":")) for e in events]
        with self._lock:
            if not self._open:
                return
            if self.events + len(lines) > self._limit:
                self.dropped += len(lines)
                return
            if name[0] not in self._named:
                self._named.add(name[0])
                lines.insert(0, self._meta("thread_name", name[0], name[1]))
            self.events += len(events)
            # At once: a process that leaves through os._exit, or is killed, writes nothing that waits.
            self._write("".join(f",\n{line}" for line in lines))

    def _meta(self, what: str, track: int, name: str) -> str:
        event = {"ph": "M", "name": what, "pid": self._pid, "tid": track, "args": {"name": printable(name)}}
        return json.dumps(event, separators=(",", ":"))

    def _write(self, text: str) -> None:
        try:
            self._file.write(text.encode())
        except FileError as e:
            self._stop()
            _log.warning("%s. Tracing stops here; the program goes on", e)

    def _stop(self) -> None:
        self._open = False
        self._file.close()

    def close(self) -> None:
        """Write what waits and the end of the file, with the counters and what was dropped."""
        atexit.unregister(self.close)
        with self._lock:
            if not self._open or self._pid != os.getpid():
                return
            end = {"schema": SCHEMA, "pid": self._pid, "events": self.events, "dropped": self.dropped}
            from nobounce.observe.snapshot import stats

            self._write(f'\n],"otherData":{json.dumps({**end, "stats": stats().to_dict()})}}}\n')
            if self._open:
                self._stop()


def describe(operation: Operation) -> dict[str, Any]:
    """A transfer as a slice's arguments: what was asked for, the receipt, the error."""
    args: dict[str, Any] = {
        "filename": printable(operation.filename),
        "device": operation.device,
        "file_offset": operation.file_offset,
        "requested": operation.nbytes,
        "queued_us": _dur(operation.queued_at, operation.started_at or operation.queued_at),
    }
    error = operation.error
    receipt = operation.receipt or getattr(error, "receipt", None)
    if receipt is not None:
        args |= {"nbytes": receipt.nbytes, **_ways(receipt), "receipt": receipt.to_dict()}
    if error is not None:
        args["error"] = printable(f"{type(error).__name__}: {error}")[:500]
        code = getattr(error, "errno", None)
        if isinstance(error, NobounceError) and isinstance(code, int):
            args["errno"] = errno_name(code)
        if isinstance(error, RouteError):
            args |= {"reason": error.refusals[0].code if error.refusals else "", "refused": _codes(error)}
    return args


def _ways(receipt: Receipt) -> dict[str, str]:
    backends = list(dict.fromkeys(s.backend for s in receipt.segments))
    most = max(receipt.reasons.items(), key=lambda item: item[1], default=("", 0))[0]
    return {"backend": "+".join(backends), "reason": most}


def _codes(error: RouteError) -> list[str]:
    return list(dict.fromkeys(r.code for r in error.refusals))


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _dur(start: float, end: float) -> float:
    return max(0.0, round((end - start) * 1e6, 3))


def _command() -> str:
    return " ".join([os.path.basename(sys.argv[0]) or "python", *sys.argv[1:]]) if sys.argv else "python"


def _at_end_of_multiprocessing_child(tracer: Tracer) -> None:
    """Children of multiprocessing leave through os._exit, past atexit, but run its own finalizers."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.Finalize(None, tracer.close, exitpriority=0)
