"""The optional powers of a runtime, each an interface of its own with its conformance
tests (testing/rules_*.py).

A runtime has a power when it inherits from the interface and, where the power depends on the machine,
declares it in its capabilities; `Runtime.peers` and its siblings in base.py then give it, and None otherwise.
Errors are those of the core.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

from nobounce.errors import UnavailableError

P = TypeVar("P")


def needed(power: P | None, device: object, what: str) -> P:
    """The power, for a call that makes no sense without it. Raises UnavailableError."""
    if power is None:
        raise UnavailableError(f"{device} has no {what}")
    return power


class Peers(ABC):
    """Devices that reach each other's memory (HIP rules 70, 71, 131)."""

    @abstractmethod
    def can_access_peer(self, device: int, peer: int) -> bool: ...

    @abstractmethod
    def enable_peer_access(self, device: int, peer: int, flags: int = 0) -> None: ...

    @abstractmethod
    def disable_peer_access(self, device: int, peer: int) -> None: ...

    @abstractmethod
    def copy_peer(
        self, dst: int, dst_device: int, src: int, src_device: int, nbytes: int, stream: int | None = None
    ) -> None:
        """hipMemcpyPeer(Async): asynchronous to the host (HIP rules 50, 70, 71)."""


class OrderedMemory(ABC):
    """Device memory that is allocated and freed in stream order (HIP rules 113 to 118)."""

    @abstractmethod
    def alloc_async(self, device: int, nbytes: int, stream: int) -> int:
        """Device memory usable by work ordered after this point of `stream` (HIP rule 113)."""

    @abstractmethod
    def free_async(self, address: int, stream: int) -> None:
        """Free device memory once `stream` gets there; 0 is fine (HIP rule 118)."""


class ManagedMemory(ABC):
    """Memory that host and devices reach at one address."""

    @abstractmethod
    def alloc_managed(self, device: int, nbytes: int) -> int: ...


class HostRegistration(ABC):
    """Pinning of host memory that exists already (HIP rule 128)."""

    @abstractmethod
    def register_host(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        """Pin existing host memory (HIP rule 128)."""

    @abstractmethod
    def unregister_host(self, address: int) -> None: ...


class Modules(ABC):
    """Kernels, as text that the device's driver compiles."""

    @abstractmethod
    def load_kernel(self, device: int, text: bytes, name: str) -> int:
        """The kernel of that name; it stays loaded for as long as the process lives. Raises
        DeviceError where the driver does not take the text (on CUDA: PTX)."""

    @abstractmethod
    def launch(self, kernel: int, grid: tuple[int, int], threads: int, argument: int, stream: int) -> None:
        """Put a launch into the stream: `grid` blocks of `threads` threads each, whose one parameter
        is 64 bits wide."""


class StreamTraits(ABC):
    """What a stream was made as: its urgency, where the capability `priorities` is declared
    (HIP rule 8), and its kind."""

    @abstractmethod
    def stream_priority_range(self, device: int) -> tuple[int, int]:
        """(least, greatest); lower numbers are more urgent (HIP rule 8)."""

    @abstractmethod
    def stream_priority(self, stream: int) -> int: ...

    @abstractmethod
    def stream_is_nonblocking(self, stream: int) -> bool: ...


class Timing(ABC):
    """Events that tell how much time passed between them."""

    @abstractmethod
    def event_elapsed(self, start: int, end: int) -> float:
        """Milliseconds from `start` to `end`, maybe negative (HIP rule 28)."""


class LastErrors(ABC):
    """The last failed status of each thread (HIP rules 73 to 76)."""

    @abstractmethod
    def last_error(self) -> int:
        """This thread's last failed status, and reset it (HIP rules 73, 74, 76)."""

    @abstractmethod
    def peek_last_error(self) -> int:
        """This thread's last failed status (HIP rule 75)."""
