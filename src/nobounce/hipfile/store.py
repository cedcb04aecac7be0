"""Configuration parameters: staged while the driver is closed, applied by open, dropped
by close (hipFile A-23).

Two of them decide routes (allow and force compatibility mode), one bounds a direct call and one a batch; a
stats level is what it is elsewhere. The others are kept and given back: what they tune does not exist here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nobounce.config import Settings, settings
from nobounce.hipfile.types import (
    MAX_BATCH_IO,
    MAX_RW_COUNT,
    BoolParameter,
    SizeTParameter,
    StringParameter,
)

Parameter = SizeTParameter | BoolParameter | StringParameter
Key = tuple[type, int]

KIB = 1 << 10
DIRECT_ALIGN_KIB = 64
"""Multiple that the largest direct transfer must be of; 4 KiB for poll threshold, cache
and pinned sizes (A-23)."""
ALIGN_KIB = 4

_ALIGNED: dict[Key, int] = {
    (SizeTParameter, SizeTParameter.PROPERTIES_MAX_DIRECT_IO_SIZE_KB): DIRECT_ALIGN_KIB,
    (SizeTParameter, SizeTParameter.PROPERTIES_MAX_DEVICE_CACHE_SIZE_KB): ALIGN_KIB,
    (SizeTParameter, SizeTParameter.PROPERTIES_PER_BUFFER_CACHE_SIZE_KB): ALIGN_KIB,
    (SizeTParameter, SizeTParameter.PROPERTIES_MAX_DEVICE_PINNED_MEM_SIZE_KB): ALIGN_KIB,
    (SizeTParameter, SizeTParameter.POLLTHRESHOLD_SIZE_KB): ALIGN_KIB,
}

_DEFAULTS: dict[Key, Any] = {
    (SizeTParameter, SizeTParameter.EXECUTION_MAX_IO_QUEUE_DEPTH): 128,
    (SizeTParameter, SizeTParameter.PROPERTIES_MAX_DIRECT_IO_SIZE_KB): MAX_RW_COUNT
    // KIB
    // DIRECT_ALIGN_KIB
    * DIRECT_ALIGN_KIB,
    (SizeTParameter, SizeTParameter.PROPERTIES_IO_BATCHSIZE): MAX_BATCH_IO,
    (BoolParameter, BoolParameter.EXECUTION_PARALLEL_IO): True,
}

_FROM_SETTINGS: dict[Key, Callable[[Settings], Any]] = {
    (SizeTParameter, SizeTParameter.PROFILE_STATS): lambda s: s.stats_level,
    (SizeTParameter, SizeTParameter.PROPERTIES_PER_BUFFER_CACHE_SIZE_KB): lambda s: (
        s.async_buffer_nbytes // KIB
    ),
    (BoolParameter, BoolParameter.PROPERTIES_ALLOW_COMPAT_MODE): lambda s: s.allow_compat_mode,
    (BoolParameter, BoolParameter.FORCE_COMPAT_MODE): lambda s: s.force_compat_mode,
}

_EMPTY: dict[type, Any] = {SizeTParameter: 0, BoolParameter: False, StringParameter: ""}


def key_of(parameter: Parameter) -> Key:
    """The parameter's key: the three enums all count from 0."""
    return type(parameter), int(parameter)


class Store:
    """Staged and applied values. Its user holds the driver's lock."""

    def __init__(self) -> None:
        self._staged: dict[Key, Any] = {}
        self._applied: dict[Key, Any] = {}

    def stage(self, parameter: Parameter, value: Any) -> None:
        """Keep a value for the next open. ValueError where it breaks the parameter's alignment or range."""
        key = key_of(parameter)
        align = _ALIGNED.get(key)
        if align is not None and value % align:
            raise ValueError(f"{parameter.name} is {value} KiB, which is not a multiple of {align}")
        if parameter is SizeTParameter.PROPERTIES_IO_BATCHSIZE and not 1 <= value <= MAX_BATCH_IO:
            raise ValueError(f"{parameter.name} is {value}, which is not between 1 and {MAX_BATCH_IO}")
        if parameter is SizeTParameter.PROPERTIES_MAX_DIRECT_IO_SIZE_KB and value == 0:
            raise ValueError(f"{parameter.name} is 0")
        self._staged[key] = value

    def staged(self) -> dict[Key, Any]:
        """A copy of the staged values, for `restore`."""
        return dict(self._staged)

    def restore(self, staged: dict[Key, Any]) -> None:
        """Go back to what `staged` gave."""
        self._staged = staged

    def apply(self) -> None:
        """What open does. A log folder that does not exist is not applied (A-23)."""
        self._applied, self._staged = self._staged, {}
        log_dir = key_of(StringParameter.LOG_DIR)
        if not os.path.isdir(self._applied.get(log_dir, os.curdir)):
            del self._applied[log_dir]

    def drop(self) -> None:
        """What close does."""
        self._applied = {}

    def is_set(self, parameter: Parameter) -> bool:
        """Whether a value is applied."""
        return key_of(parameter) in self._applied

    def get(self, parameter: Parameter) -> Any:
        """The applied value, else the staged one, else the default."""
        key = key_of(parameter)
        for values in (self._applied, self._staged, _DEFAULTS):
            if key in values:
                return values[key]
        derived = _FROM_SETTINGS.get(key)
        return derived(settings()) if derived is not None else _EMPTY[key[0]]

    def settings(self) -> Settings:
        """The process's settings with the applied parameters in force. Raises ConfigError."""
        base = settings()
        if not self._applied:
            return base
        return replace(
            base,
            allow_compat_mode=self.get(BoolParameter.PROPERTIES_ALLOW_COMPAT_MODE),
            force_compat_mode=self.get(BoolParameter.FORCE_COMPAT_MODE),
        )
