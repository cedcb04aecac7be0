"""Faults on demand: rules that make chosen calls of `sim`, and plain pread and pwrite, fail,
fall short or take long.

Public through `nobounce.testing.faults`. With no rule active a call pays one test of an empty tuple.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypedDict, Unpack

from nobounce.clock import Scheduler
from nobounce.errors import ArgumentError, DeviceError, OutOfMemoryError, RuntimeStatus
from nobounce.records import field, record

OPS = (
    "alloc",
    "alloc_pinned",
    "copy",
    "direct",
    "fill",
    "host_call",
    "peer",
    "pread",
    "pwrite",
    "read",
    "write",
)
"""alloc: device or managed memory; copy, fill, host_call: stream ops, when they run; read, write: direct
transfers; pread, pwrite: system calls of the fallback; direct: the direct path as a whole (its facts say
unavailable); peer: peer access."""


@record
class Rule:
    """What happens to which calls of one op. Every matching call counts; `calls` and `hits`
    tell how many there were."""

    op: str
    device: str | None = None
    error: int | None = None
    times: int | None = None
    after: int = 0
    every: int = 1
    short: int | float | None = None
    latency: float = 0.0
    lost: bool = False
    because: str = ""
    _seen: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def calls(self) -> int:
        """Calls that matched op and device."""
        return self._seen[0]

    @property
    def hits(self) -> int:
        """Calls that the fault struck."""
        return self._seen[1]

    def matches(self, op: str, device: str | None) -> bool:
        return self.op == op and (
            self.device is None or (device is not None and self.device in (device, device.split(":")[0]))
        )

    def strikes(self) -> bool:
        """Count one call and say whether it is one of those to strike."""
        with _lock:
            k = self._seen[0] - self.after
            self._seen[0] += 1
            hit = k >= 0 and k % self.every == 0 and (self.times is None or k // self.every < self.times)
            self._seen[1] += hit
        return hit


ACTIVE: tuple[Rule, ...] = ()
"""Rules in force for the whole process."""

_lock = threading.Lock()


class Conditions(TypedDict, total=False):
    """Which calls a rule strikes, and what happens to them; what is not given is as in `Rule`.

    `device` ("sim:0", or "sim" for all) limits it to one device; pread and pwrite have none. Of the matching
    calls the first `after` are spared, then each `every`-th is struck, `times` times at most. A struck call
    sleeps `latency` seconds, then loses its device for good (`lost`), else raises `error` (an errno, or a
    `RuntimeStatus` for a device error), else moves `short` bytes at most (an int) or that fraction of what
    was asked (a float; a byte at least, and whole blocks of 4096 for direct transfers, which the kernel would
    refuse otherwise). op="direct" and op="peer" say that there is no direct path, no peer access, `because`.
    """

    device: str | None
    error: int | None
    times: int | None
    after: int
    every: int
    short: int | float | None
    latency: float
    lost: bool
    because: str


def rule(op: str, **conditions: Unpack[Conditions]) -> Rule:
    """A rule, for `SimRuntime(faults=[...])`. Raises ArgumentError for conditions that no call can meet."""
    made = Rule(op, **conditions)
    if op not in OPS:
        raise ArgumentError(f"op {op!r}: choose one of {', '.join(OPS)}")
    if made.every < 1 or made.after < 0 or made.latency < 0:
        raise ArgumentError("every is at least 1, after and latency at least 0")
    if isinstance(made.short, float) and not 0.0 <= made.short <= 1.0:
        raise ArgumentError("short as a fraction lies between 0.0 and 1.0")
    return made


@contextmanager
def inject(*, op: str, **conditions: Unpack[Conditions]) -> Iterator[Rule]:
    """Make calls of `op` fail while the block runs, on the `Conditions` given."""
    made = rule(op, **conditions)
    global ACTIVE
    with _lock:
        ACTIVE = (*ACTIVE, made)
    try:
        yield made
    finally:
        with _lock:
            ACTIVE = tuple(r for r in ACTIVE if r is not made)


def take(op: str, device: str | None, own: tuple[Rule, ...] = ()) -> Rule | None:
    """The first rule that strikes this call, among the process's and a runtime's `own`."""
    struck = None
    for r in (*own, *ACTIVE):
        if r.matches(op, device) and r.strikes() and struck is None:
            struck = r
    return struck


def shortened(struck: Rule, nbytes: int, grain: int = 1) -> int:
    """How many bytes a struck call may move; a fraction is rounded down to `grain`
    bytes, which is the least."""
    if struck.short is None:
        return nbytes
    if isinstance(struck.short, float):
        return min(nbytes, max(grain, int(nbytes * struck.short) // grain * grain))
    return min(nbytes, struck.short)


def fail(struck: Rule, call: str) -> None:
    """Raise what the rule says, if it says so."""
    if struck.error is None:
        return
    if isinstance(struck.error, RuntimeStatus):
        if struck.error is RuntimeStatus.OutOfMemory:
            raise OutOfMemoryError(f"{call}: injected")
        raise DeviceError(call, struck.error, detail="injected")
    raise OSError(struck.error, os.strerror(struck.error))


def apply_io(
    op: str, nbytes: int, scheduler: Scheduler, device: str | None = None, own: tuple[Rule, ...] = ()
) -> int:
    """Let a fault strike one transfer; returns the bytes it may move. Raises OSError or DeviceError."""
    struck = take(op, device, own)
    if struck is None:
        return nbytes
    if struck.latency:
        scheduler.sleep(struck.latency)
    fail(struck, op)
    return shortened(struck, nbytes)


def _reset_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_lock)

ENODEV, EREMOTEIO, EIO, EINTR = errno.ENODEV, errno.EREMOTEIO, errno.EIO, errno.EINTR
"""The usual ones, for convenience."""
