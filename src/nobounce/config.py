"""Every environment variable and its default, in one table.

Variables are read once, at first use, and kept for the life of the process (hipFile B-1). HIPFILE_* keep
hipFile's names and meaning, but a boolean takes true/false/1/0/yes/no/on/off in any case, and anything else
is an error that names the variable: hipFile takes `1` for unset and says nothing (J-25).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from nobounce.errors import ConfigError
from nobounce.records import record

_BOOLEANS = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}

PUBLISHED = "hipfile-0.5"
"""The profile under which the hipfile module, and the reading of its variables, are as published."""

MIB = 1 << 20
ASYNC_BUFFER_NBYTES = 16 * MIB


@record
class Variable:
    """One row of the table. `kind` is "bool", "int" (bytes where the name says so) or "text"."""

    name: str
    field: str
    kind: str
    default: bool | int | str
    help: str
    zero_is_default: bool = False
    choices: tuple[str, ...] = ()
    least: int = 0


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "HIPFILE_ALLOW_COMPAT_MODE",
        "allow_compat_mode",
        "bool",
        True,
        "false: no fallback, no retry, no page-cache route",
    ),
    Variable(
        "HIPFILE_FORCE_COMPAT_MODE",
        "force_compat_mode",
        "bool",
        False,
        "true: everything goes through fallback",
    ),
    Variable(
        "HIPFILE_UNSUPPORTED_FILE_SYSTEMS",
        "unsupported_file_systems",
        "bool",
        False,
        "true: hip devices try the direct path on any file system",
    ),
    Variable(
        "HIPFILE_ASYNC_BUFFER_SIZE",
        "async_buffer_nbytes",
        "int",
        ASYNC_BUFFER_NBYTES,
        "bytes of the bounce ring that one stream may hold; 0: 16 MiB in the hipfile module, else what a "
        "sync read may",
        zero_is_default=True,
    ),
    Variable(
        "HIPFILE_STATS_LEVEL", "stats_level", "int", 1, "0 counts nothing, 1 basic, 2 detailed, 3 the most"
    ),
    Variable(
        "NOBOUNCE_PROFILE",
        "profile",
        "text",
        "",
        "hipfile-0.5: the hipfile module behaves as the published library in every detail",
        choices=("", PUBLISHED),
    ),
    Variable(
        "NOBOUNCE_DEVICE", "device", "text", "", "device used when none is named, such as cpu or cuda:0"
    ),
    Variable("NOBOUNCE_SIM_DEVICES", "sim_devices", "int", 2, "how many sim devices there are", least=1),
    Variable(
        "NOBOUNCE_IO_THREADS", "io_threads", "int", 0, "I/O threads of the process; 0 chooses by core count"
    ),
    Variable(
        "NOBOUNCE_CHUNK_SIZE",
        "chunk_nbytes",
        "int",
        8 * MIB,
        "bytes of one chunk of a large transfer",
        least=64 * 1024,
    ),
    Variable(
        "NOBOUNCE_PAGE_CACHE_DMA",
        "page_cache_dma",
        "text",
        "auto",
        "threads that let a GPU read straight from the page cache; auto chooses by core count",
        choices=("auto", "0", "1", "2", "4"),
    ),
    Variable(
        "NOBOUNCE_RELAY",
        "relay",
        "text",
        "auto",
        "who reads for a GPU's bounce ring: io_uring's kernel workers, its polling threads, or I/O threads; "
        "auto chooses by core "
        "count and size",
        choices=("auto", "io_uring", "polled", "threads"),
    ),
    Variable(
        "NOBOUNCE_RETRY_ERRNOS",
        "retry_errnos",
        "text",
        "ENODEV,EREMOTEIO",
        "errors of the direct path after which fallback is tried, by name",
    ),
    Variable(
        "NOBOUNCE_TRACE",
        "trace",
        "text",
        "",
        "file to write a Chrome/Perfetto trace to, or a folder; the process id goes before the ending: "
        "out.json is out.123.json",
    ),
    Variable(
        "NOBOUNCE_TRACE_EVENTS",
        "trace_events",
        "int",
        250_000,
        "events that the trace of one process may hold; later ones are counted and dropped",
        least=1000,
    ),
    Variable(
        "NOBOUNCE_STATS_COLLECTOR",
        "stats_collector",
        "text",
        "",
        "set by `nobounce stats`: the abstract socket that each process hands its counters to, and the "
        "secret for it",
    ),
)


@record
class Settings:
    """What is in force. `origin` maps each field to "default" or to the variable that set it."""

    allow_compat_mode: bool = True
    force_compat_mode: bool = False
    unsupported_file_systems: bool = False
    async_buffer_nbytes: int = ASYNC_BUFFER_NBYTES
    stats_level: int = 1
    profile: str = ""
    device: str = ""
    sim_devices: int = 2
    io_threads: int = 0
    chunk_nbytes: int = 8 * MIB
    page_cache_dma: str = "auto"
    relay: str = "auto"
    retry_errnos: str = "ENODEV,EREMOTEIO"
    trace: str = ""
    trace_events: int = 250_000
    stats_collector: str = ""
    origin: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Parse `environment`. Raises ConfigError naming the first variable that makes no sense."""
        values: dict[str, bool | int | str] = {}
        origin: list[tuple[str, str]] = []
        published = environment.get("NOBOUNCE_PROFILE", "").strip() == PUBLISHED
        for variable in VARIABLES:
            text = environment.get(variable.name)
            if text is None or (text.strip() == "" and variable.kind != "text"):
                origin.append((variable.field, "default"))
                continue
            if published and variable.name.startswith("HIPFILE_"):
                understood = _parse_as_published(variable, text)
                if understood is None:
                    origin.append((variable.field, "default"))
                    continue
                values[variable.field] = understood
            else:
                values[variable.field] = _parse(variable, text)
            asked = variable.zero_is_default and not text.strip().strip("0")
            origin.append((variable.field, "default" if asked else variable.name))
        return cls(**values, origin=tuple(origin))  # type: ignore[arg-type]

    def check_contradiction(self) -> None:
        """Raise ConfigError when no backend is left (hipFile B-10: ALLOW=false with
        FORCE=true fails all I/O)."""
        if self.force_compat_mode and not self.allow_compat_mode:
            raise ConfigError(
                "HIPFILE_ALLOW_COMPAT_MODE=false forbids fallback and HIPFILE_FORCE_COMPAT_MODE=true "
                "forbids fastpath: "
                "no backend is left. Unset one of them."
            )


def _parse(variable: Variable, text: str) -> bool | int | str:
    value = text.strip()
    if variable.kind == "bool":
        parsed = _BOOLEANS.get(value.lower())
        if parsed is None:
            raise ConfigError(
                f"{variable.name}={text!r} is neither true nor false (true/false/1/0/yes/no/on/off)"
            )
        return parsed
    if variable.kind == "int":
        if not (value.isascii() and value.isdigit()):
            raise ConfigError(f"{variable.name}={text!r} is not a whole number")
        number = min(int(value), (1 << 63) - 1)
        if number == 0 and variable.zero_is_default:
            return variable.default
        if number < variable.least:
            raise ConfigError(f"{variable.name}={text!r} is below {variable.least}")
        return min(number, 3) if variable.field == "stats_level" else number
    if variable.choices and value not in variable.choices:
        raise ConfigError(
            f"{variable.name}={text!r} is not one of {', '.join(c for c in variable.choices if c)}"
        )
    return value


def _parse_as_published(variable: Variable, text: str) -> bool | int | None:
    """hipFile's own reading: true and false in any case, base 10, None (unset) for
    anything else (B-2, B-3)."""
    if variable.kind == "bool":
        return {"true": True, "false": False}.get(text.lower())
    if not (text.isascii() and text.isdigit()):
        return None
    number = min(int(text), (1 << 63) - 1)
    if number == 0 and variable.zero_is_default:
        return None
    return min(number, 3) if variable.field == "stats_level" else number


_lock = threading.Lock()
_settings: Settings | None = None


def settings() -> Settings:
    """The settings of this process, read from the environment at first use. Raises ConfigError."""
    global _settings
    current = _settings
    if current is None:
        with _lock:
            if _settings is None:
                _settings = Settings.from_environment(os.environ)
            current = _settings
    return current


def override(settings_or_none: Settings | None) -> None:
    """Put other settings in force, or with None have the environment read again. For
    tests and child set-up."""
    global _settings
    with _lock:
        _settings = settings_or_none
