"""Properties, their setters, and configuration parameters (hipFile A-22, A-23).

The published library answers 5030 to all of these on AMD; so does this one under
NOBOUNCE_PROFILE=hipfile-0.5. Otherwise they work as the cross-platform tests intend: set while closed (5026
while open), applied by open, dropped by close.
"""

from __future__ import annotations

from typing import Any

from nobounce.errors import OpError
from nobounce.hipfile.dispatch import public
from nobounce.hipfile.driver import API_VERSION, STATE, published_profile
from nobounce.hipfile.status import SUCCESS, Error
from nobounce.hipfile.store import Parameter
from nobounce.hipfile.types import (
    BoolParameter,
    DriverControlFlags,
    DriverProps,
    FeatureFlags,
    NvfsProps,
    SizeTParameter,
    StringParameter,
)

_NOT_IMPLEMENTED = Error(OpError.INTERNAL_ERROR)
_INVALID = Error(OpError.INVALID_VALUE)


@public
def driver_get_properties() -> tuple[Error, DriverProps | None]:
    """What the driver can do and is set to; sizes in KiB, the timeout in milliseconds."""
    if published_profile():
        return _NOT_IMPLEMENTED, None
    with STATE.lock:
        get = STATE.store.get
        control = (get(BoolParameter.PROPERTIES_USE_POLL_MODE) << DriverControlFlags.USE_POLL_MODE) | (
            get(BoolParameter.PROPERTIES_ALLOW_COMPAT_MODE) << DriverControlFlags.ALLOW_COMPAT_MODE
        )
        features = 1 << FeatureFlags.BATCH_IO | 1 << FeatureFlags.STREAMS
        return SUCCESS, DriverProps(
            NvfsProps(
                major_version=API_VERSION[0],
                minor_version=API_VERSION[1],
                poll_thresh_size=get(SizeTParameter.POLLTHRESHOLD_SIZE_KB),
                max_direct_io_size=get(SizeTParameter.PROPERTIES_MAX_DIRECT_IO_SIZE_KB),
                driver_status_flags=0,
                driver_control_flags=control,
            ),
            feature_flags=features | get(BoolParameter.EXECUTION_PARALLEL_IO) << FeatureFlags.PARALLEL_IO,
            max_device_cache_size=get(SizeTParameter.PROPERTIES_MAX_DEVICE_CACHE_SIZE_KB),
            per_buffer_cache_size=get(SizeTParameter.PROPERTIES_PER_BUFFER_CACHE_SIZE_KB),
            max_device_pinned_mem_size=get(SizeTParameter.PROPERTIES_MAX_DEVICE_PINNED_MEM_SIZE_KB),
            max_batch_io_count=get(SizeTParameter.PROPERTIES_IO_BATCHSIZE),
            max_batch_io_timeout_msecs=get(SizeTParameter.PROPERTIES_BATCH_IO_TIMEOUT_MS),
        )


@public
def driver_set_poll_mode(poll: bool, poll_threshold_size: int) -> Error:
    """Poll for completions of up to `poll_threshold_size` KiB, a multiple of 4."""
    return _stage(
        (BoolParameter.PROPERTIES_USE_POLL_MODE, poll),
        (SizeTParameter.POLLTHRESHOLD_SIZE_KB, poll_threshold_size),
    )


@public
def driver_set_max_direct_io_size(max_direct_io_size: int) -> Error:
    """Largest single direct transfer in KiB, a multiple of 64; larger requests become several."""
    return _stage((SizeTParameter.PROPERTIES_MAX_DIRECT_IO_SIZE_KB, max_direct_io_size))


@public
def driver_set_max_cache_size(max_cache_size: int) -> Error:
    """Device memory for internal buffers in KiB, a multiple of 4."""
    return _stage((SizeTParameter.PROPERTIES_MAX_DEVICE_CACHE_SIZE_KB, max_cache_size))


@public
def driver_set_max_pinned_mem_size(max_pinned_mem_size: int) -> Error:
    """Device memory that may be pinned in KiB, a multiple of 4."""
    return _stage((SizeTParameter.PROPERTIES_MAX_DEVICE_PINNED_MEM_SIZE_KB, max_pinned_mem_size))


@public
def get_parameter_size_t(parameter: int) -> tuple[Error, int]:
    """The value in force while open; while closed the one staged, else the default.
    5022 for an unknown number."""
    return _get(SizeTParameter, parameter, 0)


@public
def get_parameter_bool(parameter: int) -> tuple[Error, bool]:
    """As `get_parameter_size_t`."""
    return _get(BoolParameter, parameter, False)


@public
def get_parameter_string(parameter: int) -> tuple[Error, str]:
    """As `get_parameter_size_t`."""
    return _get(StringParameter, parameter, "")


@public
def set_parameter_size_t(parameter: int, value: int) -> Error:
    """Stage a value for the next open. 5026 while open, 5022 for an unknown number
    or a value out of range."""
    return _set(SizeTParameter, parameter, value)


@public
def set_parameter_bool(parameter: int, value: bool) -> Error:
    """As `set_parameter_size_t`."""
    return _set(BoolParameter, parameter, value)


@public
def set_parameter_string(parameter: int, value: str) -> Error:
    """As `set_parameter_size_t`. A log folder that does not exist when the driver opens is not applied."""
    return _set(StringParameter, parameter, value)


def _get(kind: type[Parameter], number: int, nothing: Any) -> tuple[Error, Any]:
    if published_profile():
        return _NOT_IMPLEMENTED, nothing
    try:
        parameter = kind(number)
    except ValueError:
        return _INVALID, nothing
    with STATE.lock:
        return SUCCESS, STATE.store.get(parameter)


def _set(kind: type[Parameter], number: int, value: Any) -> Error:
    if published_profile():
        return _NOT_IMPLEMENTED
    try:
        parameter = kind(number)
    except ValueError:
        return _INVALID
    return _stage((parameter, value))


def _stage(*changes: tuple[Parameter, Any]) -> Error:
    """Stage all or none."""
    if published_profile():
        return _NOT_IMPLEMENTED
    with STATE.lock:
        if STATE.count:
            return Error(OpError.DRIVER_ALREADY_OPEN)
        before = STATE.store.staged()
        try:
            for parameter, value in changes:
                STATE.store.stage(parameter, _checked(parameter, value))
        except ValueError:
            STATE.store.restore(before)
            return _INVALID
    return SUCCESS


def _checked(parameter: Parameter, value: Any) -> Any:
    """The value in the parameter's type. ValueError where it is none of it."""
    if isinstance(parameter, StringParameter):
        if isinstance(value, str):
            return value
    elif isinstance(parameter, BoolParameter):
        if isinstance(value, bool):
            return value
    elif isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64:
        return value
    raise ValueError(f"{parameter.name} is {value!r}")
