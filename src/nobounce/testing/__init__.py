"""For tests of programs and runtimes: conformance classes, and faults on demand.
Needs pytest for the classes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nobounce.testing import faults
    from nobounce.testing.rig import Rig
    from nobounce.testing.runtimes import RuntimeTests

__all__ = ["Rig", "RuntimeTests", "faults"]

_MODULES = {"Rig": "rig", "RuntimeTests": "runtimes"}


def __getattr__(name: str) -> Any:
    if name == "faults":
        return import_module("nobounce.testing.faults")
    if name in _MODULES:
        return getattr(import_module(f"nobounce.testing.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
