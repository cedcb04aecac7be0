"""What stands between this process and a device node: containers, cgroups, groups, permissions, WSL."""

from __future__ import annotations

import errno
import grp
import os
from dataclasses import dataclass
from typing import Literal

from nobounce.facts.source import Source
from nobounce.facts.sysfs import text, there

Container = Literal["", "docker", "podman", "kubernetes", "lxc", "container"]


@dataclass(frozen=True, slots=True)
class NodeAccess:
    """A device node: ok, absent, denied (permission bits), or hidden (the device
    cgroup refuses it: EPERM)."""

    path: str
    state: Literal["ok", "absent", "denied", "hidden", "error"]
    group: str = ""


def container(source: Source) -> tuple[Container, str]:
    """(the kind of container that this process is in, the file that told); "" for none that shows."""
    if there(source, "/.dockerenv"):
        return "docker", "/.dockerenv"
    if there(source, "/run/.containerenv"):
        return "podman", "/run/.containerenv"
    if source.environment("KUBERNETES_SERVICE_HOST") is not None:
        return "kubernetes", "$KUBERNETES_SERVICE_HOST"
    groups = text(source, "/proc/1/cgroup") or ""
    for mark, kind in (
        ("kubepods", "kubernetes"),
        ("/docker", "docker"),
        ("libpod", "podman"),
        ("/lxc", "lxc"),
    ):
        if mark in groups:
            return kind, "/proc/1/cgroup"  # type: ignore[return-value]
    if source.environment("container"):
        return "container", "$container"
    return "", "/proc/1/cgroup"


def wsl(source: Source) -> bool:
    """Windows Subsystem for Linux: its GPUs show through /dev/dxg, and storage is virtual."""
    release = source.uname()[2].lower()
    return "microsoft" in release or there(source, "/dev/dxg")


def node_access(source: Source, path: str) -> NodeAccess:
    """Whether this process may open a device node for reading and writing. Opening
    these nodes starts nothing."""

    def live() -> list[object]:
        try:
            gid = os.stat(path).st_gid
        except OSError as e:
            return [e.errno, ""]
        try:
            group = grp.getgrgid(gid).gr_name
        except KeyError:
            group = str(gid)
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as e:
            return [e.errno, group]
        return [0, group]

    try:
        code, group = source.probe("open_node", (path,), live)
        code = int(code)
    except (OSError, TypeError, ValueError):
        return NodeAccess(path, "absent")
    states = {0: "ok", errno.ENOENT: "absent", errno.EACCES: "denied", errno.EPERM: "hidden"}
    return NodeAccess(path, states.get(code, "error"), str(group))  # type: ignore[arg-type]


def groups(source: Source) -> list[str]:
    """The names of this process's groups."""

    def live() -> list[str]:
        found = []
        for gid in sorted({os.getegid(), *os.getgroups()}):
            try:
                found.append(grp.getgrgid(gid).gr_name)
            except KeyError:
                found.append(str(gid))
        return found

    try:
        return [str(g) for g in source.probe("groups", (), live)]
    except (OSError, TypeError):
        return []


def cgroup_rules(source: Source) -> list[str] | None:
    """The device rules of this process's cgroup: version 1 lists them, version 2 keeps
    them in a program: None."""
    path = "/sys/fs/cgroup/devices/devices.list"
    found = text(source, path)
    return None if found is None else found.splitlines()


VISIBILITY = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
DEBUG = (
    "AMD_LOG_LEVEL",
    "AMD_SERIALIZE_COPY",
    "AMD_SERIALIZE_KERNEL",
    "CUDA_LAUNCH_BLOCKING",
    "GPU_MAX_HW_QUEUES",
    "HIP_LAUNCH_BLOCKING",
    "HSA_ENABLE_DEBUG",
    "HSA_ENABLE_SDMA",
    "HSA_TOOLS_LIB",
    "ROCPROFILER_REGISTER_FORCE_LOAD",
)


def variables(source: Source, wanted: tuple[str, ...]) -> dict[str, str]:
    """Those of `wanted` that are set."""
    found = ((name, source.environment(name)) for name in wanted)
    return {name: value for name, value in found if value is not None}
