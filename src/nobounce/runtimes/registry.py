"""Which runtimes there are: one instance of each per process, made at first use.

The GPU runtimes live in modules of their own that are imported when one is asked for. Each such module has
`create() -> Runtime`, which raises UnavailableError with the reason where the runtime is not there.
"""

from __future__ import annotations

import importlib
import os
import threading

from nobounce.errors import ArgumentError, DeviceError, NobounceError, UnavailableError
from nobounce.runtimes.base import Runtime

NAMES = ("cpu", "sim", "cuda", "hip")
_HOMES = {"cpu": "host", "sim": "host", "cuda": "gpu", "hip": "gpu"}

_instances: dict[str, Runtime] = {}
_lock = threading.RLock()


def get(name: str) -> Runtime:
    """The process's runtime of that name. Raises ArgumentError for an unknown name,
    UnavailableError with the reason."""
    made = _instances.get(name)
    if made is not None:
        return made
    if name not in NAMES:
        raise ArgumentError(f"runtime {name!r}: choose one of {', '.join(NAMES)}")
    with _lock:
        if name not in _instances:
            _instances[name] = _create(name)
        return _instances[name]


def loaded() -> list[Runtime]:
    """The runtimes in use by now: only theirs can be the addresses and handles that come from outside."""
    return list(_instances.values())


def _create(name: str) -> Runtime:
    module = f"nobounce.runtimes.{_HOMES[name]}.{name}"
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name != module:
            raise UnavailableError(f"{name}: needs the package {e.name}: {e}") from e
        raise UnavailableError(f"{name}: this version of nobounce has no {name} runtime") from e
    except ImportError as e:
        raise UnavailableError(f"{name}: {e}") from e
    made: Runtime = loaded.create()
    return made


def absent_because(name: str) -> str:
    """Why the runtime cannot be used, or "" when it can: one sentence whatever the
    library answers (HIP rule 81)."""
    try:
        runtime = get(name)
        count = runtime.device_count()
    except (UnavailableError, DeviceError) as e:
        return str(e)
    return "" if count else f"{name}: no device"


def parse_device(text: str) -> tuple[Runtime, int]:
    """The runtime and the ordinal of "cpu", "sim:0", "cuda:1" ...; without a number, 0.

    Raises ArgumentError, naming the choices, for a name or number that does not exist;
    UnavailableError with the reason.
    """
    name, colon, number = text.partition(":")
    if name not in NAMES or (colon and not (number.isascii() and number.isdigit())):
        raise ArgumentError(f"device {text!r}: choose {', '.join(_choices())}")
    runtime = get(name)
    ordinal = int(number) if colon else 0
    count = runtime.device_count()
    if ordinal >= count:
        if not count:
            raise UnavailableError(f"{name}: no device")
        names = [device_name(runtime, i) for i in range(count)]
        raise ArgumentError(f"device {text!r}: there is only {', '.join(names)}")
    return runtime, ordinal


def device_name(runtime: Runtime, ordinal: int) -> str:
    """What `parse_device` takes for that device: "cpu", "sim:0"."""
    return "cpu" if runtime.name == "cpu" else f"{runtime.name}:{ordinal}"


def _choices() -> list[str]:
    """Every device that can be named now; runtimes that fail to load are left out."""
    names = []
    for name in NAMES:
        try:
            runtime = get(name)
            names += [device_name(runtime, i) for i in range(runtime.device_count())]
        except NobounceError:
            continue
    return names


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)
