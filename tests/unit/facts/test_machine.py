"""What of the machine a process may use, on made-up trees: both versions of control groups, limits at any level, captures."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from nobounce.facts import machine
from nobounce.facts.machine import MachineFacts, machine_facts
from nobounce.facts.source import MOUNTINFO, CapturedSource, RecordingSource
from trees import Tree

GIB = 1 << 30
MIB = 1 << 20


def tree(mounts: str, groups: str, files: dict[str, str], **environment: str) -> Tree:
    made = Tree()
    made.probes[("physical_memory",)] = 64 * GIB
    made.probes[("online_cpus",)] = 16
    made.probes[("affinity",)] = 16
    made.text[MOUNTINFO] = mounts
    made.text["/proc/self/cgroup"] = groups
    made.text.update(files)
    made.environ.update(environment)
    return made


V2 = "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = (
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "37 31 0:34 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
    "39 31 0:36 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
)
DOCKER_V1 = V1.replace(" / /sys", " /docker/abc /sys")


def facts(mounts: str, groups: str, files: dict[str, str], **environment: str) -> MachineFacts:
    """Asked of the tree, and of a capture of it: the same."""
    recording = RecordingSource(tree(mounts, groups, files, **environment))
    found = machine_facts(recording)
    assert machine_facts(CapturedSource.from_json(recording.to_json())) == found
    return found


def test_without_control_groups_it_is_the_machine() -> None:
    found = facts("", "", {})
    assert (found.memory_nbytes, found.cpus, found.tasks, found.ranks) == (64 * GIB, 16, None, 1)
    assert found.memory_from == "sysconf(_SC_PHYS_PAGES)"


def test_nothing_can_be_asked_at_all() -> None:
    found = machine_facts(CapturedSource({}))
    assert (found.memory_nbytes, found.cpus, found.own_cpus) == (0, 1, 1)


@pytest.mark.parametrize(
    ("level", "group"),
    [("", "/a/b"), ("/a", "/a/b"), ("/a/b", "/a/b"), ("", "/")],
)
def test_version_2_limits_hold_at_any_level(level: str, group: str) -> None:
    folder = f"/sys/fs/cgroup{level}"
    found = facts(
        V2,
        f"0::{group}\n",
        {
            f"{folder}/memory.max": "419430400\n",
            f"{folder}/cpu.max": "250000 100000\n",
            f"{folder}/pids.max": "64\n",
        },
    )
    assert (found.memory_nbytes, found.memory_from) == (400 * MIB, f"{folder}/memory.max")
    assert (found.cpus, found.cpus_from) == (3, f"{folder}/cpu.max")
    assert (found.tasks, found.tasks_from) == (64, f"{folder}/pids.max")


def test_the_lowest_level_limit_counts_and_max_is_none() -> None:
    found = facts(
        V2,
        "0::/a/b/c\n",
        {
            "/sys/fs/cgroup/a/memory.max": str(8 * GIB),
            "/sys/fs/cgroup/a/b/memory.max": str(4 * GIB),
            "/sys/fs/cgroup/a/b/c/memory.max": "max",
            "/sys/fs/cgroup/a/b/c/cpu.max": "max 100000",
            "/sys/fs/cgroup/a/b/c/pids.max": "max",
        },
    )
    assert (found.memory_nbytes, found.cpus, found.tasks) == (4 * GIB, 16, None)


def test_memory_high_is_a_limit_too() -> None:
    found = facts(
        V2, "0::/a\n", {"/sys/fs/cgroup/a/memory.max": "max", "/sys/fs/cgroup/a/memory.high": str(GIB)}
    )
    assert found.memory_nbytes == GIB


def test_version_1_in_a_container_without_a_cgroup_namespace() -> None:
    """The mount shows the container's group as its root; /proc/self/cgroup shows the host's path to it."""
    found = facts(
        DOCKER_V1,
        "9:memory:/docker/abc\n8:pids:/docker/abc/job\n7:cpu,cpuacct:/docker/abc\n6:cpuset:/docker/abc\n",
        {
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
            "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000",
            "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            "/sys/fs/cgroup/pids/job/pids.max": "2",
        },
    )
    assert (found.memory_nbytes, found.cpus, found.tasks) == (2 * GIB, 1, 2)


def test_version_1_without_limits() -> None:
    found = facts(
        V1,
        "9:memory:/\n7:cpu,cpuacct:/\n0::/\n",
        {
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
    )
    assert (found.memory_nbytes, found.cpus) == (64 * GIB, 16)


def test_hybrid_hierarchies_are_both_read() -> None:
    found = facts(
        V1 + V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"),
        "9:memory:/x\n0::/y\n",
        {
            "/sys/fs/cgroup/memory/x/memory.limit_in_bytes": str(3 * GIB),
            "/sys/fs/cgroup/unified/y/pids.max": "100",
        },
    )
    assert (found.memory_nbytes, found.tasks) == (3 * GIB, 100)


def test_a_group_outside_the_namespace_shows_the_mount_alone() -> None:
    found = facts(
        V2,
        "0::/../../other\n",
        {"/sys/fs/cgroup/other/memory.max": str(GIB), "/sys/fs/cgroup/memory.max": str(2 * GIB)},
    )
    assert found.memory_nbytes in (GIB, 2 * GIB)


def test_ranks_share_what_they_are_not_bound_apart() -> None:
    assert facts("", "", {}, LOCAL_WORLD_SIZE="8").own_cpus == 2
    assert facts("", "", {}, LOCAL_WORLD_SIZE="8").own_memory_nbytes == 8 * GIB
    bound = tree("", "", {}, LOCAL_WORLD_SIZE="4")
    bound.probes[("affinity",)] = 4
    assert machine_facts(bound).own_cpus == 4, "its own four, which are its share"
    assert facts("", "", {}, LOCAL_WORLD_SIZE="64").own_cpus == 1
    assert facts("", "", {}, LOCAL_WORLD_SIZE="no number").ranks == 1


def test_a_set_of_cpus_is_what_the_ranks_share() -> None:
    limited = tree(V2, "0::/a\n", {"/sys/fs/cgroup/a/cpuset.cpus.effective": "0-3,8\n"}, LOCAL_WORLD_SIZE="2")
    limited.probes[("affinity",)] = 5
    found = machine_facts(limited)
    assert (found.cpus, found.own_cpus) == (5, 2)


def test_the_cpus_of_now_follow_what_the_process_binds_itself_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's and the group's are asked for once, the process's own each time."""
    kept = facts("", "", {}, LOCAL_WORLD_SIZE="2")
    assert (kept.cpus, kept.ranks) == (16, 2)
    monkeypatch.setattr(machine, "_live", kept)
    for bound, own in ((16, 8), (8, 8), (3, 3), (1, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, bound=bound: set(range(bound)))
        assert machine.own_cpus() == own
    monkeypatch.setattr(machine, "_live", replace(kept, ranks=64))
    assert machine.own_cpus() == 1
