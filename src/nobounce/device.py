"""Devices: where bytes land, named `cpu`, `sim:0`, `cuda:0` or `hip:0`."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from nobounce import transferend
from nobounce.config import settings
from nobounce.errors import ArgumentError, ConfigError, UnavailableError, counted, printable
from nobounce.protocols import FrameworkDevice
from nobounce.route.types import MemoryKind
from nobounce.runtimes import registry
from nobounce.runtimes.base import LEGACY_STREAM, Capabilities, DeviceInfo, Runtime

if TYPE_CHECKING:
    from nobounce.buffer import Buffer
    from nobounce.protocols import StreamLike
    from nobounce.stream import Event, EventOptions, Stream, StreamOptions

GPU_RUNTIMES = ("hip", "cuda")
RUNTIMES = (*GPU_RUNTIMES, "sim", "cpu")


class Device:
    """One device of one runtime, in cuda.core's shape.

    `spec` is a name such as "cpu" or "cuda:0", another Device, the number of a GPU (of the runtime that
    `default_device()` is on), or a torch-like device (`.type` and `.index`); None means `default_device()`.
    PyTorch on ROCm calls its devices "cuda": `torch.version.hip` decides. Raises ArgumentError for a name
    that means nothing and UnavailableError, saying why, for a device that is not there.
    """

    __slots__ = ("_name", "_ordinal", "_runtime")

    def __init__(self, spec: DeviceLike = None) -> None:
        self._runtime, self._ordinal = _resolve(spec)
        self._name = registry.device_name(self._runtime, self._ordinal)

    @classmethod
    def _of(cls, runtime: Runtime, ordinal: int) -> Device:
        device = cls.__new__(cls)
        device._runtime, device._ordinal, device._name = (
            runtime,
            ordinal,
            registry.device_name(runtime, ordinal),
        )
        return device

    @property
    def name(self) -> str:
        """ "cpu", "sim:0", "cuda:0" or "hip:0"; `info.name` is the name of the product."""
        return self._name

    @property
    def ordinal(self) -> int:
        """The number of this device in its runtime."""
        return self._ordinal

    @property
    def device_id(self) -> int:
        """cuda.core's name for `ordinal`."""
        return self._ordinal

    @property
    def info(self) -> DeviceInfo:
        """Facts of the device: product name, bytes of memory, PCI address and the
        like; None where unknown."""
        return self._runtime.device_info(self._ordinal)

    @property
    def capabilities(self) -> Capabilities:
        """The optional powers of the device's runtime."""
        return self._runtime.capabilities

    def allocate(
        self, nbytes: int, *, stream: StreamLike = None, kind: MemoryKind | str = MemoryKind.DEVICE
    ) -> Buffer:
        """A new Buffer of `nbytes` bytes, its content undefined. Without `stream` it is
        usable at once, everywhere.

        With `stream` it is usable by work ordered after this point of the stream (HIP rule 113). `kind` may
        also be "pinned" or "managed". Raises OutOfMemoryError, ArgumentError.
        """
        from nobounce.buffer import allocate

        return allocate(self, nbytes, stream=stream, kind=kind)

    def create_stream(
        self,
        obj: StreamLike = None,
        options: StreamOptions | None = None,
        *,
        nonblocking: bool = True,
        priority: int | None = None,
    ) -> Stream:
        """A new Stream, non-blocking unless asked otherwise; or, given `obj`, a Stream over a foreign one.

        Lower numbers are more urgent; a priority out of range is clamped (HIP rule 8).

        Make streams before the first transfer is queued, and keep them: on a GPU, making one while a transfer
        waits in its stream or moves bytes can wait inside the driver for that transfer, and hold up the
        copies which would end it.
        """
        from nobounce.stream import StreamOptions, as_stream, create_stream

        if obj is not None:
            return as_stream(obj, self)
        return create_stream(self, options or StreamOptions(nonblocking=nonblocking, priority=priority))

    def create_event(
        self,
        options: EventOptions | None = None,
        *,
        timing_enabled: bool = True,
        blocking_sync: bool = False,
        ipc_enabled: bool = False,
    ) -> Event:
        """A new Event, able to time unless asked otherwise."""
        from nobounce.stream import EventOptions, create_event

        made = options or EventOptions(timing_enabled, blocking_sync, ipc_enabled)
        return create_event(self, made)

    @property
    def default_stream(self) -> Stream:
        """The legacy default stream of this device (HIP rules 15 to 18)."""
        from nobounce.stream import Stream

        return Stream.from_handle(LEGACY_STREAM, self)

    def sync(self) -> None:
        """Wait for every stream of this device, non-blocking ones included (HIP rule 20); raises
        as each one's `sync` does."""
        self._runtime.device_sync(self._ordinal)
        if transferend.untaken:
            transferend.raise_untaken(transferend.of_stream(self._runtime, self._ordinal, None))

    def can_access_peer(self, peer: DeviceLike) -> bool:
        """Whether copies between this device and `peer` need no detour through host memory."""
        other = as_device(peer)
        peers = self._runtime.peers
        if other._runtime is not self._runtime or peers is None:
            return False
        return peers.can_access_peer(self._ordinal, other._ordinal)

    def _current(self) -> _Current:
        """Make this the thread's current device for a while, and restore the caller's (case C98)."""
        return _Current(self._runtime, self._ordinal)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Device):
            return NotImplemented
        return self._runtime is other._runtime and self._ordinal == other._ordinal

    def __hash__(self) -> int:
        return hash(self._name)

    def __repr__(self) -> str:
        return f"Device({self._name!r})"

    def __str__(self) -> str:
        return self._name

    def __reduce__(self) -> tuple[type[Device], tuple[str]]:
        return Device, (self._name,)


class _Current:
    __slots__ = ("_before", "_ordinal", "_runtime")

    def __init__(self, runtime: Runtime, ordinal: int) -> None:
        self._runtime, self._ordinal, self._before = runtime, ordinal, ordinal

    def __enter__(self) -> None:
        self._before = self._runtime.current_device()
        if self._before != self._ordinal:
            self._runtime.set_current_device(self._ordinal)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before != self._ordinal:
            self._runtime.set_current_device(self._before)


DeviceLike = Device | FrameworkDevice | str | int | None
"""A Device, a name such as "cuda:0", the number of a GPU, a framework's device with `.type` and `.index`,
or None for the default."""


def as_device(spec: DeviceLike) -> Device:
    """`spec` itself where it is a Device, else `Device(spec)`."""
    return spec if isinstance(spec, Device) else Device(spec)


def torch_runtime() -> str:
    """What torch means by "cuda": "hip" where the torch already imported was built for ROCm."""
    version = getattr(sys.modules.get("torch"), "version", None)
    return "hip" if getattr(version, "hip", None) else "cuda"


def _resolve(spec: DeviceLike) -> tuple[Runtime, int]:
    if spec is None:
        spec = default_device()
    if isinstance(spec, Device):
        return spec._runtime, spec._ordinal
    if isinstance(spec, str):
        return registry.parse_device(spec)
    if isinstance(spec, int) and not isinstance(spec, bool):
        runtime = _numbered(spec)
        count = runtime.device_count()
        if not 0 <= spec < count:
            raise ArgumentError(
                f"device {spec}: {runtime.name} has {counted(count, 'device')}, counted from 0"
            )
        return runtime, spec
    kind, index = getattr(spec, "type", None), getattr(spec, "index", None)
    if isinstance(kind, str) and (index is None or isinstance(index, int)):
        return _resolve_foreign(kind, index)
    raise TypeError(
        "a device is a name such as 'cpu' or 'cuda:0', an ordinal, a Device or an object with .type and "
        ".index, "
        f"not {type(spec).__name__}"
    )


def _numbered(ordinal: int) -> Runtime:
    """The runtime whose device `ordinal` means: that of NOBOUNCE_DEVICE, else the first GPU's; never cpu."""
    chosen = default_device()._runtime
    if chosen.name != "cpu":
        return chosen
    absent = {name: registry.absent_because(name) for name in GPU_RUNTIMES}
    for name, why in absent.items():
        if not why:
            return registry.get(name)
    raise UnavailableError(
        f"device {ordinal}: a number means a GPU, and there is none: {'; '.join(absent.values())}. "
        "Host memory is device 'cpu'"
    )


def _resolve_foreign(kind: str, index: int | None) -> tuple[Runtime, int]:
    name = torch_runtime() if kind == "cuda" else kind
    if name == "cpu":
        return registry.parse_device("cpu")
    if index is None and name in RUNTIMES:
        index = registry.get(name).current_device()
    return registry.parse_device(name if index is None else f"{name}:{index}")


def devices() -> list[Device]:
    """Every device that works, GPUs first; `unavailable()` says why the others are missing."""
    found: list[Device] = []
    for name in RUNTIMES:
        if not registry.absent_because(name):
            runtime = registry.get(name)
            found.extend(Device._of(runtime, i) for i in range(runtime.device_count()))
    return found


def unavailable() -> dict[str, str]:
    """Runtimes without a working device, and why."""
    answers = {name: registry.absent_because(name) for name in RUNTIMES}
    return {name: why for name, why in answers.items() if why}


def default_device() -> Device:
    """NOBOUNCE_DEVICE if set, else the first GPU that works, else cpu.

    Raises ConfigError for a variable that names no device, UnavailableError for one
    whose runtime is not there.
    """
    chosen = settings().device
    if chosen:
        try:
            return Device(chosen)
        except ArgumentError as e:
            raise ConfigError(f"NOBOUNCE_DEVICE: {e}") from e
        except UnavailableError as e:
            raise UnavailableError(f"NOBOUNCE_DEVICE={printable(chosen)}: {e}") from e
    for name in GPU_RUNTIMES:
        if not registry.absent_because(name):
            return Device._of(registry.get(name), 0)
    return Device("cpu")
