"""Where GPUs, disks and network cards sit: NUMA nodes, PCIe paths, xGMI links, and how far
each disk is from each GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from nobounce.checks.machine import Machine
from nobounce.facts.gpus import Gpu
from nobounce.facts.net import nics
from nobounce.facts.numa import NumaNode, numa_nodes
from nobounce.facts.pci import DEVICES, DISTANCE_TEXT, Distance, Link, PciDevice, distance, pci_device
from nobounce.facts.source import Source
from nobounce.facts.storage import nvmes
from nobounce.facts.sysfs import number, text, whole

Kind = Literal["gpu", "nvme", "nic"]
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Placed:
    """One device in its place. `parents` are the host bridge and the bridges above it;
    `facts` what sysfs says of it."""

    name: str
    kind: Kind
    bdf: str
    label: str
    numa_node: int | None
    parents: tuple[str, ...]
    link: Link | None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def root(self) -> str:
        """The host bridge, or "" for what is on no bus of this machine (a remote disk)."""
        return self.parents[0] if self.parents else ""

    def details(self) -> str:
        """The facts in one line."""
        parts = [f"{k} {v}" for k, v in self.facts.items() if v not in (None, "")]
        if self.link is not None and self.link.width is not None:
            best = Link(self.link.max_speed, self.link.max_width, None, None)
            parts.append(f"PCIe {self.link}" + (f" (of {best})" if self.link.downtrained else ""))
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Way:
    """How far a disk is from a GPU."""

    storage: str
    gpu: str
    distance: Distance
    same_numa_node: bool | None


@dataclass(frozen=True, slots=True)
class GpuLink:
    """A link between two GPUs, as KFD has it; bandwidth in MB/s."""

    kind: str
    one: str
    other: str
    max_bandwidth: int
    weight: int


@dataclass(frozen=True, slots=True)
class Topology:
    """Everything, in order."""

    numa_nodes: tuple[NumaNode, ...]
    devices: tuple[Placed, ...]
    ways: tuple[Way, ...]
    links: tuple[GpuLink, ...]


def topology_of(machine: Machine) -> Topology:
    """Look at the whole machine. Raises nothing: what cannot be read is left out."""
    source = machine.source
    found: list[tuple[Placed, PciDevice | None]] = [_gpu(source, g) for g in machine.gpus]
    for disk in nvmes(source):
        bdf = disk.controller.bdf
        facts = {
            "size": _gib(disk.nbytes),
            "firmware": disk.firmware,
            "state": disk.state if disk.state != "live" else None,
            "transport": disk.controller.transport if disk.controller.transport != "pcie" else None,
        }
        found.append(_placed(source, disk.controller.name, "nvme", bdf, disk.model, facts, disk.numa_node))
    for nic in nics(source):
        speed = None if nic.mbits is None else f"{nic.mbits / 1000:g} Gbit/s"
        facts = {"speed": speed, "state": nic.state, "RDMA": ", ".join(nic.rdma) or None}
        found.append(_placed(source, nic.name, "nic", nic.bdf, "", facts))
    ways = [
        _way(disk, gpu) for disk in found if disk[0].kind == "nvme" for gpu in found if gpu[0].kind == "gpu"
    ]
    return Topology(
        tuple(numa_nodes(source)), tuple(p for p, _ in found), tuple(ways), tuple(_links(machine))
    )


def _placed(
    source: Source,
    name: str,
    kind: Kind,
    bdf: str | None,
    label: str,
    facts: dict[str, Any],
    node: int | None = None,
) -> tuple[Placed, PciDevice | None]:
    pci = None if bdf is None else pci_device(source, bdf)
    numa = pci.numa_node if pci is not None and pci.numa_node is not None else node
    parents = () if pci is None else pci.parents
    return Placed(name, kind, bdf or "", label, numa, parents, None if pci is None else pci.link, facts), pci


def _gpu(source: Source, gpu: Gpu) -> tuple[Placed, PciDevice | None]:
    entry = f"{DEVICES}/{gpu.bdf}"
    total = number(source, f"{entry}/mem_info_vram_total")
    used = number(source, f"{entry}/mem_info_vram_used")
    seen = number(source, f"{entry}/mem_info_vis_vram_total")
    clock = gpu.node.memory_clock_mhz if gpu.node is not None else None
    if gpu.node is not None:
        total, seen = total or gpu.node.vram_nbytes or None, seen or gpu.node.visible_nbytes or None
    top = None if gpu.node is None else gpu.node.properties.get("max_engine_clk_fcompute")
    facts = {
        "memory": _gib(total),
        "used": _gib(used),
        "reachable over PCI": _gib(seen) if seen is not None and total is not None and seen < total else None,
        "largest BAR": _gib(max(gpu.pci.bars, default=0)) if gpu.pci is not None and total is None else None,
        "engine clock": _clock(text(source, f"{entry}/pp_dpm_sclk"), top),
        "memory clock": _clock(text(source, f"{entry}/pp_dpm_mclk"), clock),
        "virtual function": "yes" if gpu.pci is not None and gpu.pci.is_vf == "yes" else None,
    }
    return _placed(source, gpu.name, "gpu", gpu.bdf, gpu.model, facts)


def _gib(nbytes: int | None) -> str | None:
    return f"{nbytes / GIB:.1f} GiB" if nbytes else None


def _clock(levels: str | None, top: int | None) -> str | None:
    """The current level of a pp_dpm file ("1: 1300Mhz *"), else the highest that KFD states."""
    for line in (levels or "").splitlines():
        match = re.match(r"\d+: (\d+)M[hH]z \*", line.strip())
        if match:
            return f"{match[1]} MHz"
    return f"up to {top} MHz" if top else None


def _way(disk: tuple[Placed, PciDevice | None], gpu: tuple[Placed, PciDevice | None]) -> Way:
    far: Distance = "unknown" if disk[1] is None or gpu[1] is None else distance(disk[1], gpu[1])
    a, b = disk[0].numa_node, gpu[0].numa_node
    return Way(disk[0].name, gpu[0].name, far, None if a is None or b is None else a == b)


def _links(machine: Machine) -> list[GpuLink]:
    """Links between GPUs, each once; what is between a GPU and a CPU shows in the tree."""
    names = {g.node.number: g.name for g in machine.gpus if g.node is not None}
    found: dict[frozenset[str], GpuLink] = {}
    for gpu in machine.gpus:
        for link in gpu.node.links if gpu.node is not None else ():
            other = names.get(link.node_to)
            if other is None or other == gpu.name:
                continue
            pair = frozenset({gpu.name, other})
            known = found.get(pair)
            if known is None or (known.kind != "xGMI" and link.kind == "xGMI"):
                one, two = sorted(pair, key=_in_order)
                found[pair] = GpuLink(link.kind, one, two, link.max_bandwidth, link.weight)
    return list(found.values())


def _in_order(name: str) -> tuple[str, int]:
    kind, _, number_ = name.partition(":")
    return kind, whole(number_) or 0


def topology_data(found: Topology) -> dict[str, Any]:
    """A topology as --json shows it."""
    return {
        "numa_nodes": [
            {"number": n.number, "cpus": n.cpus, "nbytes": n.nbytes, "distances": list(n.distances)}
            for n in found.numa_nodes
        ],
        "devices": [
            {
                "name": d.name,
                "kind": d.kind,
                "pci": d.bdf,
                "label": d.label,
                "numa_node": d.numa_node,
                "parents": list(d.parents),
                "link": None
                if d.link is None
                else {
                    "speed": d.link.speed,
                    "width": d.link.width,
                    "max_speed": d.link.max_speed,
                    "max_width": d.link.max_width,
                    "downtrained": d.link.downtrained,
                },
                "facts": {k: v for k, v in d.facts.items() if v not in (None, "")},
            }
            for d in found.devices
        ],
        "ways": [
            {
                "storage": w.storage,
                "gpu": w.gpu,
                "distance": w.distance,
                "text": DISTANCE_TEXT[w.distance],
                "same_numa_node": w.same_numa_node,
            }
            for w in found.ways
        ],
        "links": [
            {
                "kind": x.kind,
                "one": x.one,
                "other": x.other,
                "max_bandwidth": x.max_bandwidth,
                "weight": x.weight,
            }
            for x in found.links
        ],
    }


@dataclass(frozen=True, slots=True)
class Branch:
    """A node of the tree: a NUMA node, a host bridge, a bridge or a device."""

    title: str
    details: str = ""
    device: Placed | None = None
    below: tuple[Branch, ...] = ()


def as_tree(found: Topology) -> list[Branch]:
    """NUMA nodes, below them host bridges, bridges and devices; bridges with one way down are passed over."""
    places: list[int | None] = [n.number for n in found.numa_nodes]
    places += [d.numa_node for d in found.devices if d.numa_node not in places]
    made = []
    for place in dict.fromkeys(places):
        here = [d for d in found.devices if d.numa_node == place]
        node = next((n for n in found.numa_nodes if n.number == place), None)
        title = "no NUMA node" if place is None else f"NUMA node {place}"
        details = f"CPUs {node.cpus}, {_gib(node.nbytes) or '?'}" if node is not None else ""
        roots = [_under(here, 0, root) for root in dict.fromkeys(d.root for d in here)]
        made.append(Branch(title, details, below=tuple(roots)))
    return made


def _under(devices: list[Placed], depth: int, name: str) -> Branch:
    """The branch `name` at `depth` of the devices' paths."""
    here = [d for d in devices if (d.parents[depth] if depth < len(d.parents) else "") == name]
    leaves = [
        Branch(f"{d.name} {d.label}".strip(), d.details(), d) for d in here if len(d.parents) <= depth + 1
    ]
    deeper = [d for d in here if len(d.parents) > depth + 1]
    branches = [_under(deeper, depth + 1, n) for n in dict.fromkeys(d.parents[depth + 1] for d in deeper)]
    below = (*leaves, *branches)
    title = name or "not on a bus of this machine"
    if depth > 0 and len(below) == 1:
        return below[0]  # a bridge with one way down says nothing
    return Branch(title if depth == 0 else f"bridge {title}", below=below)
