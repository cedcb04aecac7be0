"""What a conformance test works with: memory, streams and events that are tidied up, and held streams.

"Not done yet" is shown by holding a stream with a gate, never by a sleep. While a gate is closed a GPU may
refuse to free or allocate, so a test takes all its memory first.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from nobounce.errors import DeviceError, RuntimeStatus
from nobounce.runtimes.base import Gate, Runtime
from nobounce.runtimes.powers import (
    HostRegistration,
    LastErrors,
    ManagedMemory,
    OrderedMemory,
    Peers,
    StreamTraits,
    Timing,
)

P = TypeVar("P")

QUIET = 0.03
"""Seconds after which a call that should not return is taken to be waiting. A wrong
guess can only hide a fault."""

PATIENCE = 30.0
"""Seconds after which a call that should return is taken to hang."""


class Call:
    """A call running on a thread of its own."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        self._fn = fn
        self._value: Any = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._value = self._fn()
        except BaseException as e:  # handed to the test
            self._error = e
        finally:
            self._done.set()

    def is_waiting(self) -> bool:
        """True when it has not returned after a moment."""
        return not self._done.wait(QUIET)

    def result(self) -> Any:
        """What it returned or raised; fails when it hangs."""
        assert self._done.wait(PATIENCE), "the call does not return"
        if self._error is not None:
            raise self._error
        return self._value


class Rig:
    """A runtime and everything a test takes from it."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._frees: list[Callable[[], None]] = []
        self._gates: list[Gate] = []
        self._keep: list[object] = []

    # powers: a test that needs one that is not everywhere says so by `requires`

    @property
    def peers(self) -> Peers:
        return _declared(self.runtime.peers)

    @property
    def ordered_memory(self) -> OrderedMemory:
        return _declared(self.runtime.ordered_memory)

    @property
    def managed_memory(self) -> ManagedMemory:
        return _declared(self.runtime.managed_memory)

    @property
    def host_registration(self) -> HostRegistration:
        return _declared(self.runtime.host_registration)

    @property
    def stream_traits(self) -> StreamTraits:
        return _declared(self.runtime.stream_traits)

    @property
    def timing(self) -> Timing:
        return _declared(self.runtime.timing)

    @property
    def last_errors(self) -> LastErrors:
        return _declared(self.runtime.last_errors)

    # memory

    def device(self, nbytes: int = 4096, device: int = 0) -> int:
        """Device memory, zeroed."""
        address = self.runtime.alloc(device, nbytes)
        self._frees.append(lambda: self.runtime.free(address))
        self.put(address, bytes(nbytes))
        return address

    def pinned(self, nbytes: int = 4096) -> int:
        address = self.runtime.alloc_pinned(nbytes)
        self._frees.append(lambda: self.runtime.free_pinned(address))
        ctypes.memset(address, 0, nbytes)
        return address

    def managed(self, nbytes: int = 4096) -> int:
        address = self.managed_memory.alloc_managed(0, nbytes)
        self._frees.append(lambda: self.runtime.free(address))
        ctypes.memset(address, 0, nbytes)
        return address

    def pageable(self, nbytes: int = 4096) -> int:
        block = ctypes.create_string_buffer(nbytes)
        self._keep.append(block)
        return ctypes.addressof(block)

    def put(self, address: int, data: bytes) -> None:
        """Set bytes of any memory, done on return."""
        block = ctypes.create_string_buffer(data, len(data))
        self.runtime.copy(address, ctypes.addressof(block), len(data))

    def get(self, address: int, nbytes: int = 4096) -> bytes:
        """The bytes of any memory."""
        block = ctypes.create_string_buffer(nbytes)
        self.runtime.copy(ctypes.addressof(block), address, nbytes)
        return block.raw

    # order

    def stream(self, device: int = 0, *, nonblocking: bool = True, priority: int = 0) -> int:
        made = self.runtime.stream_create(device, nonblocking=nonblocking, priority=priority)
        self._frees.append(lambda: self._quietly(self.runtime.stream_destroy, made))
        return made

    def event(self, device: int = 0, *, timing: bool = True, interprocess: bool = False) -> int:
        made = self.runtime.event_create(device, timing=timing, interprocess=interprocess)
        self._frees.append(lambda: self._quietly(self.runtime.event_destroy, made))
        return made

    def recorded(self, stream: int, device: int = 0) -> int:
        """An event recorded now."""
        event = self.event(device)
        self.runtime.event_record(event, stream)
        return event

    def hold(self, stream: int) -> Gate:
        """Hold the stream at this point; returns when it has got there."""
        reached = threading.Event()
        gate = self.hold_later(stream, reached.set)
        assert reached.wait(PATIENCE), "the stream does not reach its gate"
        return gate

    def hold_later(self, stream: int, on_reached: Callable[[], None] = lambda: None) -> Gate:
        """Hold the stream at this point, which it may not have reached."""
        gate = self.runtime.gate(stream, on_reached)
        self._gates.append(gate)
        return gate

    def background(self, fn: Callable[[], Any]) -> Call:
        return Call(fn)

    # the end

    def close(self) -> None:
        for gate in self._gates:
            gate.open()
        self._quietly(self.runtime.set_current_device, 0)
        for device in range(self.runtime.device_count()):
            self._quietly(self.runtime.device_sync, device)
        while self._frees:
            self._quietly(self._frees.pop())
        self.last_errors.last_error()

    @staticmethod
    def _quietly(fn: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(DeviceError):  # what the test provoked, or freed itself
            fn(*args)


def _declared(power: P | None) -> P:
    assert power is not None, "the runtime has not the power that the test needs"
    return power


class raises_status:  # noqa: N801 - read as pytest.raises is
    """`with raises_status(RuntimeStatus.InvalidValue): ...`"""

    def __init__(self, status: RuntimeStatus) -> None:
        self.status = status
        self.error: DeviceError | None = None

    def __enter__(self) -> raises_status:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        assert error is not None, f"no error, {self.status.name} expected"
        if not isinstance(error, DeviceError):
            return False
        assert error.status is self.status, f"{error}, {self.status.name} expected"
        self.error = error
        return True
