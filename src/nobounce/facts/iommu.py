"""Whether an IOMMU translates a device's addresses: the type of its group in /sys/kernel/iommu_groups.

"identity" is passthrough; "DMA" and "DMA-FQ" translate. No group means that no IOMMU
stands before the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from nobounce.facts.pci import PciDevice
from nobounce.facts.source import Source
from nobounce.facts.sysfs import text
from nobounce.facts.types import Known

GROUPS = "/sys/kernel/iommu_groups"


@dataclass(frozen=True, slots=True)
class IommuFacts:
    """The group of one device, its type ("" where there is none), and whether addresses are translated."""

    group: int | None
    kind: str
    translated: Known
    read_from: str


def iommu_of(source: Source, device: PciDevice) -> IommuFacts:
    """The IOMMU before a device."""
    if device.iommu_group is None:
        return IommuFacts(None, "", "no", f"/sys/bus/pci/devices/{device.bdf}/iommu_group")
    path = f"{GROUPS}/{device.iommu_group}/type"
    kind = text(source, path) or ""
    translated: Known = "no" if kind == "identity" else "yes" if kind.startswith("DMA") else "unknown"
    return IommuFacts(device.iommu_group, kind, translated, path)


def kernel_options(source: Source) -> dict[str, str]:
    """The words of /proc/cmdline; a word without a value is ""."""
    found: dict[str, str] = {}
    for word in (text(source, "/proc/cmdline") or "").split():
        key, _, value = word.partition("=")
        found[key] = value
    return found
