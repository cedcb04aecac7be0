from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_NAMES = {
    "config": ("Settings", "settings"),
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
    "route.types": ("Reason", "Refusal", "Route", "Score"),
}
"""Every public name but the version, under the module it lives in, loaded at first use (PEP 562)."""

_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(["__version__", *_HOME])

if TYPE_CHECKING:
    from nobounce.config import Settings as Settings
    from nobounce.config import settings as settings
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
    from nobounce.route.types import Reason as Reason
    from nobounce.route.types import Refusal as Refusal
    from nobounce.route.types import Route as Route
    from nobounce.route.types import Score as Score
else:
    # Hidden from type checkers, to which a module `__getattr__` would make every misspelt name right.
    def __getattr__(name: str) -> object:
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{home}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
