"""Which conformance tests apply to a runtime: those whose powers it declares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from nobounce.runtimes.base import Capabilities
from nobounce.testing.rig import Rig

F = TypeVar("F", bound=Callable[..., Any])

_NEEDS = "nobounce_needs"


def requires(*capabilities: str, devices: int = 1) -> Callable[[F], F]:
    """Mark a test as one for runtimes that declare `capabilities` and have so many devices."""

    def mark(test: F) -> F:
        setattr(test, _NEEDS, (capabilities, devices))
        return test

    return mark


class DeclaredTests:
    """Base of conformance classes: a subclass that names its `capabilities` and `devices`
    loses the tests beyond them."""

    capabilities: ClassVar[Capabilities] = Capabilities()
    devices: ClassVar[int] = 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "capabilities" not in cls.__dict__:
            return
        for name in dir(cls):
            needs = getattr(getattr(cls, name), _NEEDS, None)
            if needs is None:
                continue
            capabilities, devices = needs
            if devices > cls.devices or not all(getattr(cls.capabilities, c) for c in capabilities):
                setattr(cls, name, None)  # pytest collects no test from None


def fill_bytes(rig: Rig, address: int, value: int, stream: int, nbytes: int = 4096) -> None:
    """Shorthand for the op that tests use most."""
    rig.runtime.fill_async(address, value, nbytes, stream)
