"""What of the machine this process may use: memory, CPUs and threads, by the limits
of its control groups too.

A container sees the machine's memory and CPUs in /proc and sysconf(3), and is killed, slowed down or refused
threads by the limits of a control group (cgroups(7)). A limit may stand at any level above the process, in
version 1 or 2 of the hierarchy, or in both at once (hybrid), so every level that this process can see is
read. What lies above the root of a cgroup namespace it cannot see.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from nobounce.facts.mounts import parse_mountinfo
from nobounce.facts.numa import NODES
from nobounce.facts.source import MOUNTINFO, LiveSource, Source
from nobounce.facts.sysfs import names, text, whole
from nobounce.records import record

CGROUPS = "/proc/self/cgroup"
RANKS = "LOCAL_WORLD_SIZE"
"""Set by torchrun and its like: the processes of one job on this host, which share its CPUs and memory."""
CONTROLLERS = ("memory", "cpu", "cpuset", "pids")
_ONLINE = "sysconf(_SC_NPROCESSORS_ONLN)"
_MEMORY = "sysconf(_SC_PHYS_PAGES)"


@record
class MachineFacts:
    """What this process may use, the lowest limit of each, and the file or call that told it.

    `cpus` are the machine's, no more than its control group's set has or a quota pays for; `affinity` are
    those that this process itself is bound to. `tasks` is how many threads and processes the group may hold,
    None without a limit. `ranks` processes of one job share all of it. `nodes` are the machine's NUMA nodes.
    """

    memory_nbytes: int
    memory_from: str
    cpus: int
    cpus_from: str
    affinity: int
    tasks: int | None
    tasks_from: str
    ranks: int
    nodes: int

    @property
    def own_cpus(self) -> int:
        """CPUs of this process, at least 1: its share of what the ranks have in common,
        unless it is bound to fewer."""
        return max(1, min(self.affinity, self.cpus // self.ranks))

    @property
    def own_memory_nbytes(self) -> int:
        """This rank's share of the memory, in bytes."""
        return self.memory_nbytes // self.ranks


def machine_facts(source: Source) -> MachineFacts:
    """Ask for all of them. Never raises: a limit that cannot be read is none."""
    memory, memory_from = _probe(source, "physical_memory", _physical_memory), _MEMORY
    cpus, cpus_from = _probe(source, "online_cpus", lambda: os.sysconf("SC_NPROCESSORS_ONLN")), _ONLINE
    affinity = _probe(source, "affinity", lambda: len(os.sched_getaffinity(0)))
    tasks, tasks_from = None, ""
    for name, path in _levels(source):
        if name == "memory":
            limits = [_number(source, f"{path}/{file}") for file in _MEMORY_FILES]
            for limit, file in zip(limits, _MEMORY_FILES, strict=True):
                if limit is not None and (limit < memory or not memory):
                    memory, memory_from = limit, f"{path}/{file}"
        elif name in ("cpu", "cpuset"):
            found = _quota(source, path) if name == "cpu" else _set(source, path)
            if found is not None and (found[0] < cpus or not cpus):
                cpus, cpus_from = found
        elif name == "pids":
            limit = _number(source, f"{path}/pids.max")
            if limit is not None and (tasks is None or limit < tasks):
                tasks, tasks_from = limit, f"{path}/pids.max"
    ranks = max(1, whole(source.environment(RANKS) or "") or 1)
    nodes = max(1, sum(re.fullmatch(r"node[0-9]+", name) is not None for name in names(source, NODES)))
    cpus = max(1, cpus)
    return MachineFacts(
        memory, memory_from, cpus, cpus_from, affinity or cpus, tasks, tasks_from, ranks, nodes
    )


_MEMORY_FILES = ("memory.limit_in_bytes", "memory.max", "memory.high")
"""Version 1's, and both of version 2: above `high` a process is slowed down until it hardly moves."""


def _physical_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")


def _probe(source: Source, name: str, live: object) -> int:
    """0 where the capture does not say."""
    try:
        found = source.probe(name, (), live)  # type: ignore[arg-type]
    except OSError:
        return 0
    return found if type(found) is int and 0 <= found < 1 << 63 else 0


def _levels(source: Source) -> Iterator[tuple[str, str]]:
    """(controller, folder) of each level from this process's group up to the root of the mount."""
    mounts = [m for m in parse_mountinfo(text(source, MOUNTINFO) or "") if m.fstype in ("cgroup", "cgroup2")]
    for line in (text(source, CGROUPS) or "").splitlines():
        number, _, rest = line.partition(":")
        listed, _, path = rest.partition(":")
        version_2 = number == "0" and not listed
        wanted = CONTROLLERS if version_2 else tuple(listed.split(","))
        for controller in CONTROLLERS:
            if controller not in wanted:
                continue
            for mount in mounts:
                ours = mount.fstype == "cgroup2" if version_2 else controller in mount.super_options
                if ours and (version_2 or mount.fstype == "cgroup"):
                    for folder in _folders(mount.mount_point, mount.root, path):
                        yield controller, folder
                    break


def _folders(mount_point: str, root: str, path: str) -> Iterator[str]:
    """The group's folder and every one above it. A group outside what is mounted here (another
    namespace's) shows the mount alone."""
    below = (
        path.removeprefix(root.rstrip("/")) if path == root or path.startswith(root.rstrip("/") + "/") else ""
    )
    parts = [name for name in below.split("/") if name and name != ".."]
    while True:
        yield "/".join([mount_point.rstrip("/"), *parts])
        if not parts:
            return
        parts.pop()


def _number(source: Source, path: str) -> int | None:
    """The limit in a file; None for "max" and for version 1's "none", which is the
    largest number of whole pages."""
    found = whole(text(source, path) or "")
    return None if found is None or found >= 1 << 62 else found


def _quota(source: Source, folder: str) -> tuple[int, str] | None:
    """(CPUs that the quota of a level pays for, rounded up, the file): cpu.max of version
    2, cpu.cfs_* of version 1."""
    words = (text(source, f"{folder}/cpu.max") or "").split()
    path = f"{folder}/cpu.max"
    if len(words) != 2:
        path = f"{folder}/cpu.cfs_quota_us"
        words = [text(source, f"{folder}/{name}") or "" for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    quota, period = whole(words[0]), whole(words[1])  # "max" and "-1" are no numbers of digits alone
    return (max(1, -(-quota // period)), path) if quota and period else None


def _set(source: Source, folder: str) -> tuple[int, str] | None:
    """(CPUs in the set of a level, the file)."""
    for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
        count = 0
        for part in (text(source, f"{folder}/{name}") or "").split(","):
            first, _, last = part.partition("-")
            low, high = whole(first), whole(last or first)
            count += 0 if low is None or high is None else max(0, high - low + 1)
        if count:
            return count, f"{folder}/{name}"
    return None


_live: MachineFacts | None = None


def this_machine() -> MachineFacts:
    """The facts of this process, asked for once; in a forked child again, which may be in another group."""
    global _live
    if _live is None:
        _live = machine_facts(LiveSource())
    return _live


def own_cpus() -> int:
    """`MachineFacts.own_cpus` now: a program may bind itself to CPUs while it runs. Takes a microsecond."""
    kept = this_machine()
    return max(1, min(len(os.sched_getaffinity(0)), kept.cpus // kept.ranks))


def forget() -> None:
    """Ask again at the next use."""
    global _live
    _live = None


os.register_at_fork(after_in_child=forget)
