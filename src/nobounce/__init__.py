from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_NAMES = {
    "buffer": ("Buffer", "as_buffer"),
    "config": ("Settings", "settings"),
    "device": ("Device", "DeviceLike", "default_device", "devices", "unavailable"),
    "errors": (
        "ArgumentError",
        "BusyError",
        "ClosedError",
        "ConfigError",
        "DeviceError",
        "ExportError",
        "FileChangedError",
        "FileError",
        "FileIsDirectoryError",
        "FileMissingError",
        "FilePermissionError",
        "FormatError",
        "InternalError",
        "NobounceError",
        "OutOfMemoryError",
        "RouteError",
        "ShortTransferError",
        "TransferCancelledError",
        "TransferError",
        "TransferTimeoutError",
        "UnavailableError",
    ),
    "formats.ggml": ("dequantize",),
    "formats.load": ("load",),
    "formats.model": ("Model",),
    "formats.openmodel": ("OpenModel", "StoredTensor", "open_model"),
    "formats.save": ("save",),
    "formats.saveasync": ("SaveTransfer", "save_async"),
    "io.batch.batch": ("Batch",),
    "io.batch.instream": ("BatchTransfer",),
    "io.batch.table": ("BatchEvent", "BatchResult"),
    "io.file": ("File",),
    "io.opening": ("open",),
    "io.params": ("Cell", "StreamFlags"),
    "io.receipt": ("Receipt", "Retry", "Segment"),
    "io.streams": ("deregister_stream", "register_stream"),
    "io.transfer": ("Transfer",),
    "io.trim": ("trim",),
    "observe.snapshot": ("Flow", "Stats", "stats"),
    "observe.subscribe": ("Subscription", "subscribe"),
    "protocols": ("BufferLike", "IntArrayLike", "IntCell", "IntLike", "StreamLike"),
    "route.types": ("Reason", "Refusal", "Route", "Score"),
    "stream": (
        "Event",
        "EventOptions",
        "LEGACY_DEFAULT_STREAM",
        "PER_THREAD_DEFAULT_STREAM",
        "Stream",
        "StreamOptions",
    ),
    "tensor": ("Tensor",),
}
"""Every public name but the version, under the module it lives in, loaded at first use (PEP 562)."""

_MODULES = ("errors", "hip", "hipfile", "kv", "testing")
"""Public modules, loaded at first use too."""

_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(["__version__", *_HOME])

if TYPE_CHECKING:
    from nobounce import errors as errors
    from nobounce import hip as hip
    from nobounce import hipfile as hipfile
    from nobounce import kv as kv
    from nobounce import testing as testing
    from nobounce.buffer import Buffer as Buffer
    from nobounce.buffer import as_buffer as as_buffer
    from nobounce.config import Settings as Settings
    from nobounce.config import settings as settings
    from nobounce.device import Device as Device
    from nobounce.device import DeviceLike as DeviceLike
    from nobounce.device import default_device as default_device
    from nobounce.device import devices as devices
    from nobounce.device import unavailable as unavailable
    from nobounce.errors import ArgumentError as ArgumentError
    from nobounce.errors import BusyError as BusyError
    from nobounce.errors import ClosedError as ClosedError
    from nobounce.errors import ConfigError as ConfigError
    from nobounce.errors import DeviceError as DeviceError
    from nobounce.errors import ExportError as ExportError
    from nobounce.errors import FileChangedError as FileChangedError
    from nobounce.errors import FileError as FileError
    from nobounce.errors import FileIsDirectoryError as FileIsDirectoryError
    from nobounce.errors import FileMissingError as FileMissingError
    from nobounce.errors import FilePermissionError as FilePermissionError
    from nobounce.errors import FormatError as FormatError
    from nobounce.errors import InternalError as InternalError
    from nobounce.errors import NobounceError as NobounceError
    from nobounce.errors import OutOfMemoryError as OutOfMemoryError
    from nobounce.errors import RouteError as RouteError
    from nobounce.errors import ShortTransferError as ShortTransferError
    from nobounce.errors import TransferCancelledError as TransferCancelledError
    from nobounce.errors import TransferError as TransferError
    from nobounce.errors import TransferTimeoutError as TransferTimeoutError
    from nobounce.errors import UnavailableError as UnavailableError
    from nobounce.formats.ggml import dequantize as dequantize
    from nobounce.formats.load import load as load
    from nobounce.formats.model import Model as Model
    from nobounce.formats.openmodel import OpenModel as OpenModel
    from nobounce.formats.openmodel import StoredTensor as StoredTensor
    from nobounce.formats.openmodel import open_model as open_model
    from nobounce.formats.save import save as save
    from nobounce.formats.saveasync import SaveTransfer as SaveTransfer
    from nobounce.formats.saveasync import save_async as save_async
    from nobounce.io.batch.batch import Batch as Batch
    from nobounce.io.batch.instream import BatchTransfer as BatchTransfer
    from nobounce.io.batch.table import BatchEvent as BatchEvent
    from nobounce.io.batch.table import BatchResult as BatchResult
    from nobounce.io.file import File as File
    from nobounce.io.opening import open as open
    from nobounce.io.params import Cell as Cell
    from nobounce.io.params import StreamFlags as StreamFlags
    from nobounce.io.receipt import Receipt as Receipt
    from nobounce.io.receipt import Retry as Retry
    from nobounce.io.receipt import Segment as Segment
    from nobounce.io.streams import deregister_stream as deregister_stream
    from nobounce.io.streams import register_stream as register_stream
    from nobounce.io.transfer import Transfer as Transfer
    from nobounce.io.trim import trim as trim
    from nobounce.observe.snapshot import Flow as Flow
    from nobounce.observe.snapshot import Stats as Stats
    from nobounce.observe.snapshot import stats as stats
    from nobounce.observe.subscribe import Subscription as Subscription
    from nobounce.observe.subscribe import subscribe as subscribe
    from nobounce.protocols import BufferLike as BufferLike
    from nobounce.protocols import IntArrayLike as IntArrayLike
    from nobounce.protocols import IntCell as IntCell
    from nobounce.protocols import IntLike as IntLike
    from nobounce.protocols import StreamLike as StreamLike
    from nobounce.route.types import Reason as Reason
    from nobounce.route.types import Refusal as Refusal
    from nobounce.route.types import Route as Route
    from nobounce.route.types import Score as Score
    from nobounce.stream import LEGACY_DEFAULT_STREAM as LEGACY_DEFAULT_STREAM
    from nobounce.stream import PER_THREAD_DEFAULT_STREAM as PER_THREAD_DEFAULT_STREAM
    from nobounce.stream import Event as Event
    from nobounce.stream import EventOptions as EventOptions
    from nobounce.stream import Stream as Stream
    from nobounce.stream import StreamOptions as StreamOptions
    from nobounce.tensor import Tensor as Tensor
else:
    # Hidden from type checkers, to which a module `__getattr__` would make every misspelt name right.
    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{home}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_MODULES})
