"""Every block-backed volume: hipFile's table (G-7 to G-12), with the verdict of the judge
for each device beside it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from typing import Any

from nobounce import scratch
from nobounce.checks.conditions import DeviceView
from nobounce.checks.files import Look
from nobounce.checks.findings import VerdictName, Volume
from nobounce.checks.machine import Machine
from nobounce.checks.verdict import verdict_for
from nobounce.facts.block import BlockNode, stacks_below, summary
from nobounce.facts.filesystem import ext4_journal
from nobounce.facts.mounts import Mount
from nobounce.facts.pci import distance, pci_device
from nobounce.facts.source import MOUNTINFO, Source
from nobounce.facts.statx import statx
from nobounce.facts.types import FileFacts, FileSystemFacts, Known

PSEUDO = frozenset(
    [
        "autofs",
        "bpf",
        "cgroup",
        "cgroup2",
        "configfs",
        "debugfs",
        "devpts",
        "devtmpfs",
        "efivarfs",
        "fusectl",
        "hugetlbfs",
        "mqueue",
        "nsfs",
        "overlay",
        "proc",
        "pstore",
        "ramfs",
        "rpc_pipefs",
        "securityfs",
        "squashfs",
        "sysfs",
        "tmpfs",
        "tracefs",
    ]
)
PROBED = ("ext4", "xfs")
"""Only on these is O_DIRECT tried (G-10)."""


def listed(mount: Mount) -> bool:
    """Whether a mount has a row: block-backed, so neither pseudo nor network file systems (G-7)."""
    return mount.fstype not in PSEUDO and mount.source.startswith("/dev/")


def label(fstype: str, journal: str | None) -> str:
    """FSTYPE as the table shows it: ext4 with its mode."""
    return f"ext4 ({journal or 'ordered'})" if fstype == "ext4" else fstype


def file_system_fits(fstype: str, journal: str | None) -> bool:
    """hipFile's file systems: xfs, and ext4 with data=ordered."""
    return fstype == "xfs" or (fstype == "ext4" and (journal or "ordered") == "ordered")


def capable(fits: bool, peer: Known, o_direct: Known) -> Known:
    """The HIPFILE column (G-11)."""
    if not fits or peer == "no":
        return "no"
    return "unknown" if peer == "unknown" else o_direct


def try_direct(source: Source, folder: str) -> tuple[Known, int, int]:
    """(does O_DIRECT work in a folder, memory and offset alignment in bytes or 0): by a nameless
    temporary file, or, where there are none, by a hidden one that is removed at once. "unknown" where
    it may not be made (G-10)."""

    def live() -> list[Any]:
        try:
            fd = scratch.nameless(folder, os.O_DIRECT)
        except OSError as e:
            return [e.errno, 0, 0]
        try:
            found = statx(fd)
            return [0, found.dio_mem_align or 0, found.dio_offset_align or 0]
        finally:
            os.close(fd)

    try:
        code, mem, offset = source.probe("direct_in", (folder,), live)
    except (OSError, TypeError, ValueError):
        return "unknown", 0, 0
    return ("yes" if code == 0 else "no" if code == errno.EINVAL else "unknown"), mem, offset


class Volumes:
    """The rows, made once: mounts of one device share its stack, its journaling mode
    and the trial of O_DIRECT."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._stacks: dict[tuple[tuple[int, int], str], list[BlockNode]] = {}
        self._trials: dict[tuple[Any, ...], tuple[Known, int, int]] = {}
        self._journals: dict[tuple[int, int], tuple[Any, str]] = {}
        self._looks: list[tuple[Volume, Look]] | None = None
        self._better: dict[str, list[str]] = {}

    @property
    def looks(self) -> list[tuple[Volume, Look]]:
        if self._looks is None:
            self._looks = [self._row(m) for m in self._machine.mounts if listed(m)]
        return self._looks

    @property
    def rows(self) -> list[Volume]:
        return [row for row, _ in self.looks]

    def judged(self, views: Iterable[DeviceView]) -> list[Volume]:
        """The rows with a verdict for each device."""
        views = list(views)
        made = []
        for row, look in self.looks:
            verdicts = {v.name: self._verdict(row, look, v) for v in views}
            made.append(
                Volume(
                    row.mount_point,
                    row.fstype,
                    row.device,
                    row.backing,
                    row.o_direct,
                    row.hipfile,
                    row.read_from,
                    verdicts,
                    row.options,
                )
            )
        return made

    def _verdict(self, row: Volume, look: Look, view: DeviceView) -> VerdictName:
        found = verdict_for(self._machine, look, view).verdict
        # What could not be tried is not promised.
        return "unknown" if found == "fastpath" and row.o_direct == "unknown" else found

    def better(self, view: DeviceView) -> list[str]:
        """Mount points where a file would go direct on this device, nearest first."""
        if view.name not in self._better:
            found = [
                (self._far(look, view), row.mount_point)
                for row, look in self.looks
                if "ro" not in row.options and self._verdict(row, look, view) == "fastpath"
            ]
            self._better[view.name] = [point for _, point in sorted(found, key=lambda f: f[0])]
        return self._better[view.name]

    def _far(self, look: Look, view: DeviceView) -> int:
        order = (
            "same-device",
            "same-switch",
            "same-root-port",
            "same-host-bridge",
            "other-host-bridge",
            "unknown",
        )
        block = None if look.facts is None else look.facts.block
        if view.gpu is None or view.gpu.pci is None or block is None:
            return 0
        far = [0]
        for bdf in block.nvme:
            disk = pci_device(self._machine.source, bdf)
            far.append(len(order) if disk is None else order.index(distance(disk, view.gpu.pci)))
        return max(far)

    def _row(self, mount: Mount) -> tuple[Volume, Look]:
        source = self._machine.source
        key = (mount.device, mount.source if mount.device[0] == 0 else "")
        if key not in self._stacks:
            self._stacks[key] = stacks_below(source, mount.device, mount.fstype, mount.source)
        stacks = self._stacks[key]
        journal, told = self._journal(mount)
        o_direct, mem, offset = self._try(mount)
        block = summary(stacks)
        fits = file_system_fits(mount.fstype, journal)
        name = block.name if block is not None else mount.source.rpartition("/")[2]
        row = Volume(
            mount.mount_point,
            label(mount.fstype, journal),
            name,
            "?" if block is None else block.backing,
            o_direct,
            capable(fits, "unknown" if block is None else block.peer, o_direct),
            MOUNTINFO if block is None else block.decided_by,
            {},
            mount.options,
        )
        system = FileSystemFacts(
            mount.fstype,
            mount.source,
            mount.mount_point,
            mount.options,
            journal,
            told,
            False,
            mount.read_only,
        )
        facts = FileFacts(
            path=mount.mount_point,
            kind="regular",
            nbytes=1 << 20,
            inode=0,
            device=mount.device,
            rdev=(0, 0),
            mount_id=mount.mount_id,
            mtime_ns=0,
            ctime_ns=0,
            dio_mem_align=mem or None,
            dio_offset_align=offset or None,
            dio_read_offset_align=None,
            access_mode="r",
            direct_fd="refused" if o_direct == "no" else "ok",
            direct_errno=errno.EINVAL if o_direct == "no" else None,
            filesystem=system,
            direct_probe="yes" if o_direct != "no" else "no",
            block=block,
        )
        return row, Look(mount.mount_point, facts, (), tuple(stacks))

    def _journal(self, mount: Mount) -> tuple[Any, str]:
        if mount.fstype != "ext4":
            return None, MOUNTINFO
        if mount.device not in self._journals:
            self._journals[mount.device] = ext4_journal(self._machine.source, mount)
        return self._journals[mount.device]

    def _try(self, mount: Mount) -> tuple[Known, int, int]:
        if mount.fstype not in PROBED:
            return "unknown", 0, 0
        if mount.read_only:
            return "unknown", 0, 0
        known = self._trials.get((mount.device,))
        if known is None:
            known = try_direct(self._machine.source, mount.mount_point)
            if known[0] != "unknown":
                self._trials[(mount.device,)] = known
        return known
