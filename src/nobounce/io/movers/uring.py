"""io_uring through ctypes and numpy: no liburing, and no Python work per request.

Both rings are memory that the kernel shares; here they are numpy arrays over it. Many requests are put into
the submission ring by one slice assignment, and many completions are taken out by one copy.

Memory order. Without a polling kernel thread the kernel reads the submission tail inside io_uring_enter on
the caller's own thread, so program order is enough; a polling one is on another core (`_fence`). Completions
may be written by another core: the kernel stores them before it stores the tail, so the reader must not look
at them before it has seen the tail. Python's lock is such a barrier (its acquire is one in C), and it is
taken between the two looks.

Every entry submitted gives exactly one completion, so `in_flight` follows from the two rings' own counters
and stays right when a signal interrupts a call: nothing has to be remembered beside them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import threading
from typing import TYPE_CHECKING, Any

from nobounce.facts.filtered import sentence

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_SETUP, _ENTER, _REGISTER = 425, 426, 427
_IOWQ_MAX_WORKERS = 19
_SETUP_SQPOLL = 1 << 1
_SETUP_CLAMP = 1 << 4
_SETUP_SUBMIT_ALL = 1 << 7
_SETUP_COOP_TASKRUN = 1 << 8
_FEAT_SINGLE_MMAP = 1 << 0
_FEAT_NODROP = 1 << 1
_FEAT_EXT_ARG = 1 << 8
_NEEDED = _FEAT_SINGLE_MMAP | _FEAT_NODROP | _FEAT_EXT_ARG
"""All of them since Linux 5.11."""
_ENTER_GETEVENTS = 1
_ENTER_SQ_WAKEUP = 1 << 1
_ENTER_EXT_ARG = 1 << 3
_SQ_NEED_WAKEUP = 1
_OFF_SQES = 0x10000000
_MAP_SHARED_POPULATE = 0x01 | 0x8000
_PROT_READ_WRITE = 3
_MAP_FAILED = ctypes.c_size_t(-1).value

OP_POLL_ADD, OP_ASYNC_CANCEL, OP_READ, OP_WRITE = 6, 14, 22, 23
POLLIN = 1
MAX_DEPTH = 4096
ENTRY_WORDS = 8
"""64-bit words of an entry of the submission ring."""

_ENTRY, _COMPLETION = struct.Struct("=5Q24x"), struct.Struct("=Qi4x")
_libc = ctypes.CDLL(None, use_errno=True)
_LONG, _SIZE = ctypes.c_long, ctypes.c_size_t
_libc.syscall.argtypes = [_LONG, _LONG, _LONG, _LONG, _LONG, _SIZE, _LONG]
_libc.syscall.restype = _LONG
_libc.mmap.argtypes = [_SIZE, _SIZE, ctypes.c_int, ctypes.c_int, ctypes.c_int, _LONG]
_libc.mmap.restype = _SIZE
_libc.munmap.argtypes = [_SIZE, _SIZE]


def _syscall(number: int, *arguments: int) -> int:
    given = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    result: int = _libc.syscall(number, *given)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def no_ends() -> Array:
    """What `Ring.take` returns when nothing has ended."""
    import numpy as np

    return np.zeros(0, _cqe_dtype())


class _Wait(ctypes.Structure):
    """struct io_uring_getevents_arg with the timespec it points to behind it."""

    _fields_ = (
        ("sigmask", ctypes.c_uint64),
        ("sigmask_nbytes", ctypes.c_uint32),
        ("min_wait_usec", ctypes.c_uint32),
        ("timespec", ctypes.c_uint64),
        ("seconds", ctypes.c_int64),
        ("nanoseconds", ctypes.c_int64),
    )


_WAIT_NBYTES = 24


def sqe_dtype() -> np.dtype[Any]:
    """struct io_uring_sqe as far as reads, writes, polls and cancels use it."""
    import numpy as np

    fields = [
        ("opcode", "u1"),
        ("flags", "u1"),
        ("ioprio", "u2"),
        ("fd", "i4"),
        ("offset", "u8"),
        ("address", "u8"),
        ("nbytes", "u4"),
        ("op_flags", "u4"),
        ("user_data", "u8"),
        ("rest", "u8", (3,)),
    ]
    return np.dtype(fields)


def blank(count: int) -> Array:
    """`count` entries of zeros, with the fields of `sqe_dtype`."""
    import numpy as np

    return np.zeros(count, sqe_dtype())


def words(entries: Array) -> Array:
    """Entries as rows of 64-bit words, which numpy copies many times faster than records."""
    return entries.view("u8").reshape(len(entries), ENTRY_WORDS)


def _cqe_dtype() -> np.dtype[Any]:
    import numpy as np

    return np.dtype([("user_data", "u8"), ("result", "i4"), ("flags", "u4")])


def _set_up(depth: int, idle_ms: int = 0) -> tuple[int, ctypes.Array[ctypes.c_uint32]]:
    """(the ring's descriptor, what the kernel says of it). Raises OSError."""
    common = _SETUP_CLAMP
    best = common | _SETUP_SUBMIT_ALL | _SETUP_COOP_TASKRUN
    if idle_ms:
        common = best = common | _SETUP_SQPOLL
    for flags in (best, common):
        params = (ctypes.c_uint32 * 30)()
        params[2], params[4] = flags, idle_ms
        try:
            fd = _syscall(_SETUP, depth, ctypes.addressof(params))
        except OSError as e:
            if e.errno != errno.EINVAL or flags == common:
                raise
            continue
        break
    if params[5] & _NEEDED != _NEEDED:
        os.close(fd)
        raise OSError(errno.EOPNOTSUPP, "this kernel's io_uring is older than Linux 5.11")
    return fd, params


class Ring:
    """A submission and a completion ring for at most `depth` requests in flight.

    One thread at a time, but others may go on while one waits in `enter`. With `idle_ms` a thread of the
    kernel takes requests out of the submission ring (IORING_SETUP_SQPOLL), and looks for more for so many
    milliseconds after the last one before it sleeps: `hand_over` costs no system call until then.
    """

    def __init__(self, depth: int, *, idle_ms: int = 0) -> None:
        """Raises OSError where the kernel has no io_uring, forbids it, or is too old
        (ENOSYS, EPERM, EOPNOTSUPP)."""
        self._fd = -1
        self._maps: list[tuple[int, int]] = []
        self._barrier = threading.Lock()
        self._polled = idle_ms > 0
        self._fd, params = _set_up(min(max(depth, 1), MAX_DEPTH), idle_ms)
        try:
            self._map(params)
        except BaseException:
            self.close()
            raise

    def _map(self, params: ctypes.Array[ctypes.c_uint32]) -> None:
        import numpy as np

        entries, completions = params[0], params[1]
        sq, cq = params[10:20], params[20:30]
        ring = self._map_one(max(sq[6] + 4 * entries, cq[5] + 16 * completions), 0)
        sqes = self._map_one(64 * entries, _OFF_SQES)
        self.depth = entries
        self._sq_mask, self._cq_mask = entries - 1, completions - 1
        word = ctypes.c_uint32.from_address
        self._sq_head, self._sq_tail = word(ring + sq[0]), word(ring + sq[1])
        self._sq_flags = word(ring + sq[4])
        self._cq_head, self._cq_tail = word(ring + cq[0]), word(ring + cq[1])
        self._sqes = _array(sqes, 64 * entries).view("u8").reshape(entries, ENTRY_WORDS)
        self._cqes = _array(ring + cq[5], 16 * completions).view("u8").reshape(completions, 2)
        self._sq_memory = memoryview(self._sqes).cast("B")  # type: ignore[arg-type]
        self._cq_memory = memoryview(self._cqes).cast("B")  # type: ignore[arg-type]
        self._end = _cqe_dtype()
        _array(ring + sq[6], 4 * entries).view("u4")[:] = np.arange(entries, dtype=np.uint32)

    def _map_one(self, nbytes: int, offset: int) -> int:
        address: int = _libc.mmap(0, nbytes, _PROT_READ_WRITE, _MAP_SHARED_POPULATE, self._fd, offset)
        if address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f"mapping io_uring's rings: {os.strerror(code)}")
        self._maps.append((address, nbytes))
        return address

    @property
    def in_flight(self) -> int:
        """Requests put in whose completions have not been taken out."""
        return (self._sq_tail.value - self._cq_head.value) & 0xFFFFFFFF

    @property
    def waiting(self) -> int:
        """Completions that lie ready."""
        return (self._cq_tail.value - self._cq_head.value) & 0xFFFFFFFF

    @property
    def room(self) -> int:
        """Requests that may be put in now."""
        return self.depth - self.in_flight

    def put(self, entries: Array) -> None:
        """Put entries (`words`) into the submission ring, at most `room` of them. `enter` hands them over."""
        tail, n = self._sq_tail.value, len(entries)
        at = tail & self._sq_mask
        first = min(n, self.depth - at)
        self._sqes[at : at + first] = entries[:first]
        if first < n:
            self._sqes[: n - first] = entries[first:]
        if self._polled:
            self._fence()
        self._sq_tail.value = (tail + n) & 0xFFFFFFFF

    def put_one(self, head: int, file_offset: int, address: int, sizes: int, number: int) -> None:
        """`put` of the first words of one entry, without an array."""
        tail = self._sq_tail.value
        where = (tail & self._sq_mask) * 8 * ENTRY_WORDS
        _ENTRY.pack_into(self._sq_memory, where, head, file_offset, address, sizes, number)
        if self._polled:
            self._fence()
        self._sq_tail.value = (tail + 1) & 0xFFFFFFFF

    def take_one(self) -> tuple[int, int] | None:
        """The oldest completion that lies ready, as (user_data, result)."""
        head = self._cq_head.value
        if head == self._cq_tail.value:
            return None
        with self._barrier:
            found: tuple[int, int] = _COMPLETION.unpack_from(self._cq_memory, 16 * (head & self._cq_mask))
        self._cq_head.value = (head + 1) & 0xFFFFFFFF
        return found

    def hand_over(self) -> None:
        """Have the kernel begin with what was put in."""
        if not self._polled:
            self.enter()
        elif not self.is_awake:
            _libc.syscall(_ENTER, self._fd, 0, 0, _ENTER_SQ_WAKEUP, 0, 0)

    @property
    def is_awake(self) -> bool:
        """Whether the kernel's polling thread looks for requests."""
        self._fence()
        return not self._sq_flags.value & _SQ_NEED_WAKEUP

    def _fence(self) -> None:
        """What was stored before is seen by other cores before what is stored, or read, after: a release,
        and an acquire behind it."""
        with self._barrier:
            pass
        with self._barrier:
            pass

    def enter(self, at_least: int = 0, timeout: float | None = None) -> None:
        """Hand over what was put in, then wait for completions: `at_least` of them, or
        `timeout` seconds, or a signal.

        Raises OSError for what is the ring's own failure; a request's failure is its completion's result.
        """
        pending = (self._sq_tail.value - self._sq_head.value) & 0xFFFFFFFF
        flags, argument, nbytes = _ENTER_GETEVENTS | (_ENTER_SQ_WAKEUP if self._polled else 0), 0, 0
        if timeout is not None and at_least:
            wait = _Wait()
            seconds = min(max(timeout, 0.0), 1e9)
            wait.seconds, wait.nanoseconds = int(seconds), int((seconds - int(seconds)) * 1e9)
            wait.timespec = ctypes.addressof(wait) + _Wait.seconds.offset
            flags |= _ENTER_EXT_ARG
            argument, nbytes = ctypes.addressof(wait), _WAIT_NBYTES
        result: int = _libc.syscall(_ENTER, self._fd, pending, at_least, flags, argument, nbytes)
        if result < 0:
            code = ctypes.get_errno()
            # EAGAIN and EBUSY: the kernel is short of memory or wants completions taken out
            # first; ETIME: the timeout.
            if code not in (errno.EINTR, errno.ETIME, errno.EAGAIN, errno.EBUSY):
                raise OSError(code, os.strerror(code))

    def take(self) -> Array:
        """Every completion that lies ready, copied out: user_data, result (a count or minus an errno)."""
        head, tail = self._cq_head.value, self._cq_tail.value
        n = (tail - head) & 0xFFFFFFFF
        with self._barrier:
            at = head & self._cq_mask
            first = min(n, self._cq_mask + 1 - at)
            found = self._cqes[at : at + first].copy()
            if first < n:
                import numpy as np

                found = np.concatenate([found, self._cqes[: n - first]])
        self._cq_head.value = tail
        return found.view(self._end).reshape(n)

    def limit_workers(self, most: int) -> None:
        """At most so many kernel workers for each thread that submits here; before Linux 5.15
        there is no limit to set."""
        limits = (ctypes.c_uint32 * 2)(most, most)
        with contextlib.suppress(OSError):
            _syscall(_REGISTER, self._fd, _IOWQ_MAX_WORKERS, ctypes.addressof(limits), 2)

    def close(self) -> None:
        """Give the rings back; nothing may be in flight. In a forked child only its own
        mappings and descriptor go."""
        fd, self._fd = self._fd, -1
        self._sqes = self._cqes = self._sq_head = self._sq_tail = self._cq_head = self._cq_tail = None  # type: ignore[assignment]
        self._sq_memory = self._cq_memory = memoryview(b"")
        for address, nbytes in self._maps:
            _libc.munmap(address, nbytes)
        self._maps.clear()
        if fd >= 0:
            os.close(fd)


def _array(address: int, nbytes: int) -> Array:
    import numpy as np

    memory: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(memory, dtype=np.uint8)


_why_not: str | None = None


def unavailable() -> str:
    """Why there is no io_uring here (too old, forbidden by seccomp or kernel.io_uring_disabled), or "";
    asked once, without numpy."""
    global _why_not
    if _why_not is None:
        fd, call = -1, "io_uring_setup"
        try:
            fd, _ = _set_up(1)
            call = "io_uring_enter"  # a filter may let one call through and not the other
            _syscall(_ENTER, fd)
            _why_not = ""
        except OSError as e:
            _why_not = sentence(call, e)
        finally:
            if fd >= 0:
                os.close(fd)
    return _why_not
