"""What the running kernel and its drivers were built with and have loaded: for
P2PDMA and AMD's direct I/O."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
import zlib
from dataclasses import dataclass

from nobounce.facts.source import Source
from nobounce.facts.sysfs import text, there
from nobounce.facts.types import Known

KALLSYMS = "/proc/kallsyms"
AIS_SYMBOL = "kfd_ais_rw_file"
TRUSTED_BUILD = 2327936
"""amdgpu-dkms builds above this one set the KFD capability bit, which then says more than
the kernel's configuration."""


@dataclass(frozen=True, slots=True)
class ConfigAnswer:
    """Whether CONFIG_name=y: yes or no with the file that told, unknown where no
    configuration can be read."""

    answer: Known
    read_from: str


def config_paths(source: Source) -> tuple[str, str, str]:
    """Where the kernel's configuration may be found."""
    release = source.uname()[2]
    return f"/boot/config-{release}", f"/lib/modules/{release}/build/.config", "/proc/config.gz"


def kernel_config(source: Source, name: str) -> ConfigAnswer:
    """CONFIG_`name`, from all three places: yes if any says =y; a module (=m) does
    not count (hipFile G-4)."""
    wanted = f"CONFIG_{name}=y"
    denied, tried = "", config_paths(source)
    for path in tried:
        lines = _config_lines(source, path, name)
        if lines is None:
            continue
        if wanted in lines:
            return ConfigAnswer("yes", path)
        denied = denied or path
    return ConfigAnswer("no", denied) if denied else ConfigAnswer("unknown", ", ".join(tried))


def _config_lines(source: Source, path: str, name: str) -> list[str] | None:
    """The lines of a configuration that speak of `name`: unpacked where it is read, so
    that a capture stays small."""

    def live() -> list[str]:
        with open(path, "rb") as f:
            raw = f.read(1 << 24)
        if path.endswith(".gz"):
            try:
                raw = gzip.decompress(raw)
            except (OSError, EOFError, zlib.error):
                return []
        mark = f"CONFIG_{name}".encode()
        return [line.decode("utf-8", "replace").strip() for line in raw.splitlines() if mark in line]

    try:
        found = source.probe("kernel_config", (path, name), live)
    except OSError:
        return None
    return [str(line) for line in found] if isinstance(found, list) else None


def dkms_build(source: Source) -> int | None:
    """The build number of the amdgpu DKMS module, or None where there is none (an in-tree driver)."""

    def live() -> str:
        program = shutil.which("dkms") or shutil.which("dkms", path="/usr/sbin:/sbin")
        if program is None:
            raise FileNotFoundError(2, "no dkms")
        done = subprocess.run(
            [program, "status", "amdgpu"], capture_output=True, text=True, check=False, timeout=10
        )
        return done.stdout

    try:
        found = source.probe("dkms_status", ("amdgpu",), live)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_dkms(str(found), source.uname()[2])


def parse_dkms(found: str, release: str) -> int | None:
    """The build number in `dkms status`, of the running kernel's entry if there is one, else the largest.

    Both styles: "amdgpu/6.8.5-2041575.22.04, 6.8.0-45-generic, x86_64: installed" and "amdgpu,
    6.8.5-2041575.22.04, ...".
    """
    here: list[int] = []
    every: list[int] = []
    for line in found.splitlines():
        match = re.match(r"\s*amdgpu(?:/|,\s*)([^,\s:]+)", line)
        build = re.match(r"[^-]*-([0-9]{1,18})", match[1]) if match else None
        if build is None:
            continue
        every.append(int(build[1]))
        rest = line[match.end() :] if match else ""
        if re.search(rf"[,\s]{re.escape(release)}[,:\s]", rest + " "):
            here.append(int(build[1]))
    return max(here or every, default=None)


def ais_symbol(source: Source) -> tuple[Known, str]:
    """(is kfd_ais_rw_file in the kernel, why or where): from /proc/kallsyms, which may hide
    modules from all but root."""
    if not there(source, "/sys/module/amdgpu"):
        return "no", "/sys/module/amdgpu"

    def live() -> list[bool]:
        with open(KALLSYMS, "rb") as f:
            names = f.read()
        return [f" {AIS_SYMBOL}".encode() in names, b"[amdgpu]" in names]

    try:
        has, shows_modules = source.probe("kallsyms", (AIS_SYMBOL,), live)
    except (OSError, TypeError, ValueError):
        return "unknown", KALLSYMS
    if has:
        return "yes", KALLSYMS
    hidden = not shows_modules and source.effective_uid() != 0
    return ("unknown" if hidden else "no"), KALLSYMS


def module_loaded(source: Source, name: str) -> bool:
    return there(source, f"/sys/module/{name}")


def module_version(source: Source, name: str) -> str | None:
    return text(source, f"/sys/module/{name}/version")
