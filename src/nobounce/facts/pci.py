"""PCI devices and the paths between them, from /sys/bus/pci/devices.

The real path of a device lists the bridges that lead to it:
/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0. What two paths share says how far a peer transfer travels.
Two devices below one switch need nothing of the host; all others cross its root complex, where the kernel
allows P2PDMA only for AMD CPUs from Zen on and a list of Intel host bridges (drivers/pci/p2pdma.c).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from nobounce.facts.source import Source
from nobounce.facts.sysfs import bdfs_in, integer, names, number, real, text, there, whole
from nobounce.facts.types import Known

DEVICES = "/sys/bus/pci/devices"
AMD, NVIDIA = 0x1002, 0x10DE
_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")

Distance = Literal[
    "same-device", "same-switch", "same-root-port", "same-host-bridge", "other-host-bridge", "unknown"
]

DISTANCE_TEXT: dict[Distance, str] = {
    "same-device": "the same device",
    "same-switch": "below one PCIe switch",
    "same-root-port": "below one root port",
    "same-host-bridge": "below one host bridge",
    "other-host-bridge": "below different host bridges",
    "unknown": "not known",
}


@dataclass(frozen=True, slots=True)
class Link:
    """A PCIe link: speeds in GT/s, widths in lanes; None where the kernel does not say."""

    speed: float | None
    width: int | None
    max_speed: float | None
    max_width: int | None

    @property
    def downtrained(self) -> bool:
        """Whether it runs below what device and slot can do."""
        slow = self.speed is not None and self.max_speed is not None and self.speed < self.max_speed
        narrow = self.width is not None and self.max_width is not None and self.width < self.max_width
        return slow or narrow

    def __str__(self) -> str:
        speed = "?" if self.speed is None else f"{self.speed:g}"
        return f"{speed} GT/s x{'?' if self.width is None else self.width}"


@dataclass(frozen=True, slots=True)
class PciDevice:
    """One function. `bars` are the sizes of its memory regions in bytes; `is_vf` is yes for an SR-IOV virtual
    function as the host sees it (physfn), else unknown: in a guest nothing here tells."""

    bdf: str
    path: str
    vendor: int | None
    device: int | None
    pci_class: int | None
    numa_node: int | None
    link: Link
    bars: tuple[int, ...]
    is_vf: Known
    iommu_group: int | None
    driver: str | None
    p2pmem_nbytes: int | None

    @property
    def parents(self) -> tuple[str, ...]:
        """Host bridge, root port, bridges ..., from the root on, without the device itself."""
        parts = self.path.split("/")
        root = [p for p in parts if _ROOT.fullmatch(p)]
        return (*root[:1], *bdfs_in(self.path)[:-1])


def pci_device(source: Source, bdf: str) -> PciDevice | None:
    """A PCI function by its address, or None where there is none."""
    entry = f"{DEVICES}/{bdf}"
    path = real(source, entry) if bdf else None
    if path is None:
        return None
    node = number(source, f"{entry}/numa_node")
    group = real(source, f"{entry}/iommu_group")
    driver = real(source, f"{entry}/driver")
    tail = "" if group is None else group.rsplit("/", 1)[-1]
    return PciDevice(
        bdf,
        path,
        number(source, f"{entry}/vendor", 0),
        number(source, f"{entry}/device", 0),
        number(source, f"{entry}/class", 0),
        node if node is not None and node >= 0 else None,
        link_of(source, entry),
        parse_resources(text(source, f"{entry}/resource") or ""),
        "yes" if there(source, f"{entry}/physfn") else "unknown",
        whole(tail),
        None if driver is None else driver.rsplit("/", 1)[-1],
        number(source, f"{entry}/p2pmem/size"),
    )


def link_of(source: Source, entry: str) -> Link:
    """The link of a device's folder."""
    return Link(
        parse_speed(text(source, f"{entry}/current_link_speed")),
        _width(number(source, f"{entry}/current_link_width")),
        parse_speed(text(source, f"{entry}/max_link_speed")),
        _width(number(source, f"{entry}/max_link_width")),
    )


def parse_speed(found: str | None) -> float | None:
    """GT/s of "16.0 GT/s PCIe"; None for "Unknown" and for anything else."""
    match = re.match(r"([0-9]{1,4}(?:\.[0-9]{1,4})?) ?GT/s", found or "")
    return float(match[1]) if match else None


def _width(found: int | None) -> int | None:
    return found if found is not None and 0 < found <= 32 else None


def parse_resources(found: str) -> tuple[int, ...]:
    """Sizes in bytes of the memory regions in a `resource` file: lines of start, end and flags."""
    sizes = []
    for line in found.splitlines()[:6]:
        try:
            start, end, flags = (integer(word, 16) for word in line.split())
        except ValueError:
            continue
        if start is None or end is None or flags is None:
            continue
        if end > start and flags & 0x200:
            sizes.append(end - start + 1)
    return tuple(sizes)


def distance(one: PciDevice, other: PciDevice) -> Distance:
    """How far a transfer between two devices travels."""
    if one.bdf.rpartition(".")[0] == other.bdf.rpartition(".")[0]:
        return "same-device"
    a, b = one.parents, other.parents
    if not a or not b:
        return "unknown"
    shared = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        shared += 1
    named: tuple[Distance, ...] = ("other-host-bridge", "same-host-bridge", "same-root-port", "same-switch")
    return named[min(shared, 3)]


_INTEL_BRIDGES: dict[int, bool] = {
    0x3C00: True,
    0x3C01: True,
    0x2F00: True,
    0x2F01: True,
    0x2020: False,
    0x2030: False,
    0x2031: False,
    0x2032: False,
    0x2033: False,
    0x09A2: False,
}
"""The kernel's list of Intel host bridges; True: only between devices of the same host bridge."""


def root_complex_allows(source: Source, one: PciDevice, other: PciDevice) -> tuple[Known, str, str]:
    """(may P2PDMA cross the root complex between these two, why, the file that told)."""
    cpuinfo = "/proc/cpuinfo"
    vendor, family = _cpu(text(source, cpuinfo) or "")
    if vendor == "AuthenticAMD" and family >= 0x17:
        return "yes", "AMD CPUs from Zen on pass peer requests through their root complex", cpuinfo
    roots = [d.parents[0].removeprefix("pci") if d.parents else "" for d in (one, other)]
    for root in roots:
        path = f"{DEVICES}/{root}:00.0/device"
        bridge = number(source, path, 0)
        if bridge is None:
            return "unknown", "the host bridge cannot be read", path
        only_same = _INTEL_BRIDGES.get(bridge)
        if only_same is None:
            return (
                "unknown",
                f"host bridge {bridge:#06x} is not on the kernel's list of those that pass peer requests",
                path,
            )
        if only_same and roots[0] != roots[1]:
            return "no", "these host bridges pass peer requests only between their own devices", path
    return (
        "yes",
        "the host bridge is on the kernel's list of those that pass peer requests",
        f"{DEVICES}/{roots[0]}:00.0/device",
    )


def _cpu(found: str) -> tuple[str, int]:
    vendor, family = "", 0
    for line in found.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "vendor_id":
            vendor = value.strip()
        elif key.strip() == "cpu family":
            family = whole(value.strip()) or 0
            break
    return vendor, family


def all_devices(source: Source) -> list[str]:
    """The address of every PCI function."""
    return names(source, DEVICES)
