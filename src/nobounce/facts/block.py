"""The stack of block devices below a file: partitions, device mapper, MD, loop, down to
disks and NVMe controllers.

/sys/dev/block/MAJ:MIN leads to the device; a partition lies inside its disk's folder, and `slaves` names the
devices that a mapped device stands on. Which driver a disk belongs to is told by its name, as the kernel
gives it; of device mapper, by the prefix of dm/uuid. An NVMe namespace lies below its controller, unless
native multipath put it below the subsystem: then every controller of the subsystem is a path to it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal

from nobounce.facts.source import Source
from nobounce.facts.sysfs import bdfs_in, names, number, real, text, there
from nobounce.facts.types import BlockFacts, FileFacts, Known

Kind = Literal[
    "partition",
    "nvme",
    "nvme-multipath",
    "lvm",
    "crypt",
    "multipath",
    "dm",
    "md",
    "loop",
    "virtio",
    "scsi",
    "other",
]
BACKING: dict[str, str] = {"multipath": "mpath", "nvme-multipath": "nvme"}
MOST_LEVELS = 16

_BY_NAME: tuple[tuple[str, Kind], ...] = (
    (r"nvme\d", "nvme"),
    (r"md\d|md_", "md"),
    (r"loop\d", "loop"),
    (r"vd[a-z]|xvd[a-z]", "virtio"),
    (r"sd[a-z]|hd[a-z]|sr\d", "scsi"),
)
_BY_UUID: tuple[tuple[str, Kind], ...] = (("LVM-", "lvm"), ("mpath-", "multipath"), ("CRYPT-", "crypt"))
_CONTROLLER = re.compile(r"nvme\d+")


@dataclass(frozen=True, slots=True)
class Controller:
    """An NVMe controller: `transport` is pcie, rdma, tcp, fc, loop or "" where the kernel does not say."""

    name: str
    path: str
    transport: str
    bdf: str | None


@dataclass(frozen=True, slots=True)
class BlockNode:
    """One device of a stack and what it stands on; `detail` is the MD level, the loop file or
    the mapped device's name."""

    name: str
    kind: Kind
    path: str
    detail: str = ""
    below: tuple[BlockNode, ...] = ()
    controllers: tuple[Controller, ...] = ()
    complete: bool = True
    """False where what it stands on could not be read."""

    @property
    def backing(self) -> str:
        """hipFile's word for it (G-9)."""
        disk = self.below[0] if self.kind == "partition" and self.below else self
        return disk.name if disk.kind == "other" else BACKING.get(disk.kind, disk.kind)

    @property
    def disk(self) -> BlockNode:
        """The device itself, or the disk that a partition is of."""
        return self.below[0] if self.kind == "partition" and self.below else self


def block_of(source: Source, device: tuple[int, int]) -> BlockNode | None:
    """The stack below a device number, or None where /sys does not know it."""
    path = real(source, f"/sys/dev/block/{device[0]}:{device[1]}")
    return None if path is None else _node(source, path, MOST_LEVELS)


def block_by_name(source: Source, name: str) -> BlockNode | None:
    """The stack below a device of /sys/class/block."""
    path = real(source, f"/sys/class/block/{name}")
    return None if path is None else _node(source, path, MOST_LEVELS)


def _node(source: Source, path: str, levels: int) -> BlockNode:
    name = os.path.basename(path)
    if levels == 0:
        return BlockNode(name, "other", path, complete=False)
    if there(source, f"{path}/partition"):
        return BlockNode(name, "partition", path, below=(_node(source, os.path.dirname(path), levels - 1),))
    if name.startswith("dm-"):
        uuid = text(source, f"{path}/dm/uuid") or ""
        kind: Kind = next((k for prefix, k in _BY_UUID if uuid.lower().startswith(prefix.lower())), "dm")
        below, complete = _slaves(source, path, levels)
        return BlockNode(name, kind, path, text(source, f"{path}/dm/name") or "", below, (), complete)
    kind = next((k for pattern, k in _BY_NAME if re.match(pattern, name)), "other")
    if kind == "md":
        below, complete = _slaves(source, path, levels)
        return BlockNode(name, "md", path, text(source, f"{path}/md/level") or "", below, (), complete)
    if kind == "loop":
        return BlockNode(name, "loop", path, text(source, f"{path}/loop/backing_file") or "")
    if kind == "nvme":
        return _nvme(source, name, path)
    return BlockNode(name, kind, path)


def _slaves(source: Source, path: str, levels: int) -> tuple[tuple[BlockNode, ...], bool]:
    found = names(source, f"{path}/slaves")
    below = []
    for name in found:
        target = real(source, f"{path}/slaves/{name}")
        if target is not None:
            below.append(_node(source, target, levels - 1))
    return tuple(below), bool(found) and len(below) == len(found)


def _nvme(source: Source, name: str, path: str) -> BlockNode:
    parent = os.path.dirname(path)
    if "/nvme-subsystem/" not in path:
        return BlockNode(name, "nvme", path, controllers=(controller(source, parent),))
    paths = [n for n in names(source, parent) if _CONTROLLER.fullmatch(n)]
    found = [real(source, f"{parent}/{n}") for n in paths]
    controllers = tuple(controller(source, c) for c in found if c is not None)
    return BlockNode(name, "nvme-multipath", path, controllers=controllers, complete=bool(controllers))


def controller(source: Source, path: str) -> Controller:
    """An NVMe controller by its folder below /sys/devices."""
    on_bus = bdfs_in(path)
    transport = text(source, f"{path}/transport")
    if transport is None:
        transport = "pcie" if on_bus else ""
    bdf = on_bus[-1] if on_bus and transport == "pcie" else None
    return Controller(os.path.basename(path), path, transport, bdf)


def peer(node: BlockNode) -> tuple[Known, str, str]:
    """(can every leg reach another PCI device by DMA, why not, the file of /sys that told): hipFile G-11."""
    disk = node.disk
    if disk.kind == "nvme":
        return _controllers(disk)
    if disk.kind == "nvme-multipath":
        answer, why, path = _controllers(disk)
        if answer == "yes" and len(disk.controllers) > 1:
            why = (
                f"{disk.name} has {len(disk.controllers)} NVMe paths, and only newer kernels do P2P through "
                "a multipath head"
            )
            return "unknown", why, os.path.dirname(disk.path)
        return answer, why, path
    if disk.kind == "lvm":
        return _lvm(disk)
    return "no", _WHY[disk.kind].format(name=disk.name, detail=disk.detail), _told(disk)


def _controllers(disk: BlockNode) -> tuple[Known, str, str]:
    for one in disk.controllers:
        path = f"{one.path}/transport"
        if one.transport not in ("pcie", ""):
            return "no", f"{disk.name} is reached over {one.transport}, not over this machine's PCIe", path
        if one.transport == "":
            return "unknown", f"the transport of {one.name} cannot be read", path
    if not disk.controllers:
        return "unknown", f"no controller of {disk.name} can be read", os.path.dirname(disk.path)
    return "yes", "", f"{disk.controllers[0].path}/transport"


def _lvm(node: BlockNode) -> tuple[Known, str, str]:
    if not node.complete:
        return "unknown", f"what {node.name} stands on cannot be read", f"{node.path}/slaves"
    answers = [peer(leg) for leg in node.below]
    for wanted in ("no", "unknown"):
        for answer, why, path in answers:
            if answer == wanted:
                return answer, f"the LVM volume {node.detail or node.name} stands on it, and {why}", path
    return "yes", "", f"{node.path}/slaves"


_WHY: dict[Kind, str] = {
    "crypt": "{name} ({detail}) is encrypted by dm-crypt, which passes every byte through host memory",
    "multipath": "{name} ({detail}) is a device-mapper multipath device, which does not pass P2P requests on",
    "dm": "{name} ({detail}) is a device-mapper device other than LVM, which does not pass P2P requests on",
    "md": "{name} is MD RAID ({detail}), which does not pass P2P requests on",
    "loop": "{name} is a loop device over the file {detail}, so its bytes pass through host memory",
    "virtio": "{name} is a virtual disk (virtio), whose bytes the hypervisor brings through host memory",
    "scsi": "{name} is a SCSI or SATA disk, which has no P2P support",
    "other": "{name} is no NVMe device",
    "partition": "the disk of {name} cannot be read",
    "nvme": "{name} cannot be read",
    "nvme-multipath": "{name} cannot be read",
    "lvm": "{name} cannot be read",
}


def _told(node: BlockNode) -> str:
    inside = {
        "crypt": "dm/uuid",
        "multipath": "dm/uuid",
        "dm": "dm/uuid",
        "md": "md/level",
        "loop": "loop/backing_file",
    }
    return f"{node.path}/{inside[node.kind]}" if node.kind in inside else node.path


def legs(node: BlockNode) -> list[BlockNode]:
    """The disks at the bottom of a stack."""
    if not node.below:
        return [node]
    return [leg for one in node.below for leg in legs(one)]


def summary(nodes: list[BlockNode]) -> BlockFacts | None:
    """The stacks below one file system (several for btrfs) as one answer: the worst of them."""
    if not nodes:
        return None
    answers = [peer(n) for n in nodes]
    order: list[Known] = ["no", "unknown", "yes"]
    worst = min(range(len(nodes)), key=lambda i: order.index(answers[i][0]))
    nvme = {c.bdf: None for n in nodes for leg in legs(n) for c in leg.controllers if c.bdf is not None}
    answer, why, path = answers[worst]
    return BlockFacts(nodes[worst].name, nodes[worst].backing, answer, why, path, tuple(nvme))


def stacks_of(source: Source, file: FileFacts) -> list[BlockNode]:
    """The stacks below a file: its file system's devices, or the block device that it is.
    None found: an empty list."""
    if file.kind == "block":
        node = block_of(source, file.rdev)
        return [] if node is None else [node]
    return stacks_below(source, file.device, file.filesystem.fstype, file.filesystem.source)


def stacks_below(source: Source, device: tuple[int, int], fstype: str, mounted: str) -> list[BlockNode]:
    """The stacks below a mount. btrfs has anonymous device numbers and may span several devices: its source
    leads to one of them and /sys/fs/btrfs to all."""
    if device[0] != 0:
        node = block_of(source, device)
        return [] if node is None else [node]
    if not mounted.startswith("/dev/"):
        return []
    number_of = device_number(source, mounted)
    node = None if number_of is None else block_of(source, number_of)
    if node is None:
        return []
    if fstype == "btrfs":
        for uuid in names(source, "/sys/fs/btrfs"):
            members = names(source, f"/sys/fs/btrfs/{uuid}/devices")
            if node.name in members:
                found = (block_by_name(source, name) for name in members)
                return [n for n in found if n is not None] or [node]
    return [node]


def device_number(source: Source, path: str) -> tuple[int, int] | None:
    """(major, minor) of a device node."""

    def live() -> list[int]:
        rdev = os.stat(path).st_rdev
        return [os.major(rdev), os.minor(rdev)]

    try:
        major, minor = source.probe("rdev", (path,), live)
    except (OSError, TypeError, ValueError):
        return None
    return major, minor


def block_facts(source: Source, file: FileFacts) -> BlockFacts | None:
    """What the judge wants to know of the stack below a file; None where there is none (a
    network file system, overlay)."""
    return summary(stacks_of(source, file))


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """/sys/block/DISK/queue, bytes; None where the kernel does not say."""

    logical_block_nbytes: int | None
    physical_block_nbytes: int | None
    dma_alignment: int | None
    max_hw_nbytes: int | None
    max_nbytes: int | None
    max_segments: int | None
    rotational: bool | None
    scheduler: str


def queue_limits(source: Source, disk: BlockNode) -> QueueLimits:
    """The limits of a disk's queue. `dma_alignment` is the alignment in bytes (the
    kernel keeps it less one)."""
    where = f"{disk.path}/queue"

    def kib(name: str) -> int | None:
        found = number(source, f"{where}/{name}")
        return None if found is None else found * 1024

    mask, spins = number(source, f"{where}/dma_alignment"), number(source, f"{where}/rotational")
    return QueueLimits(
        number(source, f"{where}/logical_block_size"),
        number(source, f"{where}/physical_block_size"),
        None if mask is None else mask + 1,
        kib("max_hw_sectors_kb"),
        kib("max_sectors_kb"),
        number(source, f"{where}/max_segments"),
        None if spins is None else bool(spins),
        text(source, f"{where}/scheduler") or "",
    )
