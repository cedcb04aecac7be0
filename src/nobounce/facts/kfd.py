"""AMD's KFD topology: GPUs, their memory and the links between them (/sys/class/kfd/kfd/topology).

A node is a CPU (gpu_id 0) or a GPU, or one partition of a GPU in CPX and DPX mode: partitions share the PCI
address and differ in gpu_id and render node. A container sees every node's folder, but reading one that its
device cgroup hides fails with EPERM: such nodes are left out, as the runtime leaves them out. `generation_id`
changes with the topology, so it is read before and after.
"""

from __future__ import annotations

import fcntl
import os
import struct
from dataclasses import dataclass

from nobounce.facts.source import Source
from nobounce.facts.sysfs import integer, names, number, text, whole

TOPOLOGY = "/sys/class/kfd/kfd/topology"
AIS_BIT = 0x40
NO_PEER_DMA = 1 << 4
LINK_TYPES = {1: "HyperTransport", 2: "PCIe", 5: "QPI", 11: "xGMI"}
_TRIES = 3
_GET_VERSION = 0x80084B01
"""AMDKFD_IOC_GET_VERSION: two 32-bit numbers (include/uapi/linux/kfd_ioctl.h)."""


@dataclass(frozen=True, slots=True)
class KfdLink:
    """A link between two nodes; bandwidths in MB/s as the driver states them."""

    kind: str
    node_from: int
    node_to: int
    weight: int
    min_bandwidth: int
    max_bandwidth: int
    peer_dma: bool


@dataclass(frozen=True, slots=True)
class KfdNode:
    """A node of the topology. `properties` are all keys with a number; sizes in bytes."""

    number: int
    gpu_id: int
    path: str
    properties: dict[str, int]
    vram_nbytes: int
    visible_nbytes: int
    memory_clock_mhz: int | None
    links: tuple[KfdLink, ...]

    @property
    def is_gpu(self) -> bool:
        return self.gpu_id != 0 and self.properties.get("simd_count", 0) != 0

    @property
    def bdf(self) -> str:
        location, domain = self.properties.get("location_id", 0), self.properties.get("domain", 0)
        return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 31:02x}.{location & 7}"

    @property
    def slot(self) -> str:
        """The PCI address without the function, which numbers partitions on some GPUs."""
        return self.bdf.rpartition(".")[0]

    @property
    def gfx(self) -> str:
        """The architecture, such as gfx942."""
        version = self.properties.get("gfx_target_version", 0)
        return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else ""

    @property
    def ais(self) -> bool:
        """The capability bit that a new enough driver sets when its direct I/O is up on this GPU."""
        return bool(self.properties.get("capability", 0) & AIS_BIT)

    @property
    def render_node(self) -> str | None:
        minor = self.properties.get("drm_render_minor", 0)
        return f"/dev/dri/renderD{minor}" if minor > 0 else None


@dataclass(frozen=True, slots=True)
class KfdTopology:
    """Every node that can be read; `hidden` counts those that cannot, `generation`
    is the driver's counter."""

    nodes: tuple[KfdNode, ...]
    hidden: int
    generation: int | None

    @property
    def gpus(self) -> tuple[KfdNode, ...]:
        return tuple(n for n in self.nodes if n.is_gpu)


def topology(source: Source) -> KfdTopology:
    """The topology as it stands; read again if it changes meanwhile. Empty where there is no KFD."""
    for _ in range(_TRIES):
        before = number(source, f"{TOPOLOGY}/generation_id")
        nodes, hidden = _nodes(source)
        if number(source, f"{TOPOLOGY}/generation_id") == before:
            break
    return KfdTopology(tuple(nodes), hidden, before)


def _nodes(source: Source) -> tuple[list[KfdNode], int]:
    found, hidden = [], 0
    numbers = (whole(n) for n in names(source, f"{TOPOLOGY}/nodes"))
    for node in sorted(n for n in numbers if n is not None):
        path = f"{TOPOLOGY}/nodes/{node}"
        gpu_id = number(source, f"{path}/gpu_id")
        raw = text(source, f"{path}/properties")
        if gpu_id is None or raw is None:
            hidden += 1
            continue
        found.append(_node(source, node, gpu_id, path, parse_properties(raw)))
    return found, hidden


def _node(source: Source, number_: int, gpu_id: int, path: str, properties: dict[str, int]) -> KfdNode:
    vram = visible = 0
    clock: int | None = None
    links: list[KfdLink] = []
    if gpu_id:
        for bank in names(source, f"{path}/mem_banks"):
            values = parse_properties(text(source, f"{path}/mem_banks/{bank}/properties") or "")
            if values.get("heap_type") in (1, 2):
                vram += values.get("size_in_bytes", 0)
                visible += values.get("size_in_bytes", 0) if values["heap_type"] == 1 else 0
                clock = values.get("mem_clk_max", clock)
    for folder in ("io_links", "p2p_links"):
        for one in names(source, f"{path}/{folder}"):
            values = parse_properties(text(source, f"{path}/{folder}/{one}/properties") or "")
            if "node_to" in values:
                links.append(_link(values))
    return KfdNode(number_, gpu_id, path, properties, vram, visible, clock, tuple(links))


def _link(values: dict[str, int]) -> KfdLink:
    kind = values.get("type", 0)
    return KfdLink(
        LINK_TYPES.get(kind, f"type {kind}"),
        values.get("node_from", -1),
        values["node_to"],
        values.get("weight", 0),
        values.get("min_bandwidth", 0),
        values.get("max_bandwidth", 0),
        not values.get("flags", 0) & NO_PEER_DMA,
    )


def parse_properties(found: str) -> dict[str, int]:
    """`key value` lines; a line of another shape is passed over."""
    values: dict[str, int] = {}
    for line in found.splitlines():
        key, _, value = line.strip().partition(" ")
        found_number = integer(value)
        if found_number is not None:
            values[key] = found_number
    return values


def interface_version(source: Source) -> str | None:
    """The version of KFD's interface as /dev/kfd tells it, such as "1.18"; None for who may not open it."""

    def live() -> list[int]:
        fd = os.open("/dev/kfd", os.O_RDWR | os.O_CLOEXEC)
        try:
            return list(struct.unpack("=II", fcntl.ioctl(fd, _GET_VERSION, bytes(8))))
        finally:
            os.close(fd)

    try:
        major, minor = source.probe("kfd_version", (), live)
    except (OSError, TypeError, ValueError):
        return None
    return f"{major}.{minor}"
