"""The way between one file's disks and one GPU: PCI distance, root complex, IOMMU, ACS, and links below their best."""

from __future__ import annotations

from nobounce.checks.findings import Finding
from nobounce.checks.machine import Machine
from nobounce.facts.gpus import Gpu
from nobounce.facts.iommu import iommu_of, kernel_options
from nobounce.facts.pci import (
    DEVICES,
    DISTANCE_TEXT,
    PciDevice,
    acs_redirects,
    distance,
    pci_device,
    root_complex_allows,
)
from nobounce.facts.types import BlockFacts, FileFacts, Known

CROSSES = ("same-root-port", "same-host-bridge", "other-host-bridge")


def block_findings(file: FileFacts, gpu: Gpu, storage_way: str) -> list[Finding]:
    """The block stack as the GPU's direct path takes it."""
    block = file.block
    if block is None:
        sentence = f"what carries the bytes of {file.filesystem.fstype} is no block device that can be seen from here"
        return [Finding("block", "unknown", sentence, file.filesystem.decided_by, "no-p2p")]
    answer, sentence = (
        block.peer,
        block.because or f"{block.name} ({block.backing}) is local NVMe all the way down",
    )
    code = "block-stack"
    if gpu.runtime == "cuda" and storage_way == "nvidia-fs" and block.backing == "md" and block.nvme:
        # nvidia-fs splits requests over MD RAID itself
        answer, sentence = (
            "unknown",
            f"{block.name} is MD RAID, of which nvidia-fs takes some levels over NVMe",
        )
    return [Finding("block", answer, sentence, block.decided_by, code)]


def pair_findings(machine: Machine, block: BlockFacts | None, gpu: Gpu) -> list[Finding]:
    """What lies between every NVMe controller below the file and the GPU."""
    found: list[Finding] = []
    if gpu.pci is None:
        return found
    found += _link(gpu.pci, gpu.name)
    for bdf in block.nvme if block is not None else ():
        disk = pci_device(machine.source, bdf)
        if disk is None:
            sentence = f"the PCI device {bdf} cannot be read"
            found.append(Finding("pci", "unknown", sentence, f"{DEVICES}/{bdf}", "no-p2p"))
            continue
        found += _link(disk, f"NVMe {bdf}")
        found.append(_way(machine, disk, gpu.pci, gpu.name))
        if disk.numa_node is not None and gpu.pci.numa_node not in (None, disk.numa_node):
            sentence = f"NVMe {bdf} is on NUMA node {disk.numa_node} and {gpu.name} on {gpu.pci.numa_node}"
            found.append(Finding("pci", "yes", sentence, f"{DEVICES}/{bdf}/numa_node", decides=False))
        found += _iommu(machine, disk, gpu.pci, gpu.name)
    return found


def _way(machine: Machine, disk: PciDevice, gpu: PciDevice, name: str) -> Finding:
    far = distance(disk, gpu)
    where = f"NVMe {disk.bdf} and {name} ({gpu.bdf}) are {DISTANCE_TEXT[far]}"
    if far == "unknown":
        return Finding(
            "pci", "unknown", f"how far NVMe {disk.bdf} is from {name} is not known", disk.path, "no-p2p"
        )
    if far in CROSSES:
        allowed, why, path = root_complex_allows(machine.source, disk, gpu)
        return Finding("pci", allowed, f"{where}: {why}", path, "no-p2p")
    shared = set(disk.parents) & set(gpu.parents)
    ports = [b for d in (disk, gpu) for b in d.parents[1:] if b not in shared]
    redirects = [acs_redirects(machine.source, b) for b in ports]
    if "yes" in redirects or "unknown" in redirects:
        allowed, why, path = root_complex_allows(machine.source, disk, gpu)
        if allowed == "yes":
            return Finding("pci", "yes", f"{where}, and should ACS send requests up: {why}", path, "no-p2p")
        if "yes" in redirects:
            port = ports[redirects.index("yes")]
            sentence = f"{where}, but ACS of {port} sends peer requests to the root complex: {why}"
            return Finding("pci", allowed, sentence, f"{DEVICES}/{port}/config", "no-p2p")
        port = ports[redirects.index("unknown")]
        sentence = f"{where}; whether ACS of {port} sends peer requests up is readable by root alone"
        return Finding(
            "pci",
            "unknown",
            sentence,
            f"{DEVICES}/{port}/config",
            "no-p2p",
            needs_root=machine.source.effective_uid() != 0,
        )
    return Finding("pci", "yes", where, disk.path, "no-p2p")


def _iommu(machine: Machine, disk: PciDevice, gpu: PciDevice, name: str) -> list[Finding]:
    if distance(disk, gpu) in ("same-switch", "same-device"):
        return []
    for device, label in ((gpu, name), (disk, f"NVMe {disk.bdf}")):
        one = iommu_of(machine.source, device)
        if one.translated == "no":
            continue
        answer: Known = "unknown"
        asked = kernel_options(machine.source).get("iommu", "")
        said = f"{one.kind}; iommu={asked} on the kernel's command line" if asked else one.kind
        sentence = (
            f"an IOMMU translates the addresses of {label} ({said}), which peer requests through the root complex often fail on"
            if one.translated == "yes"
            else f"whether an IOMMU translates the addresses of {label} cannot be read"
        )
        return [Finding("iommu", answer, sentence, one.read_from, "iommu-translated")]
    return [
        Finding("iommu", "yes", "no IOMMU translates between them", iommu_of(machine.source, gpu).read_from)
    ]


def _link(device: PciDevice, label: str) -> list[Finding]:
    link = device.link
    if not link.downtrained:
        return []
    best = f"{'?' if link.max_speed is None else f'{link.max_speed:g}'} GT/s x{link.max_width or '?'}"
    sentence = f"the PCIe link of {label} runs at {link}, below its {best} (an idle device may lower it)"
    return [Finding("pci", "yes", sentence, f"{DEVICES}/{device.bdf}/current_link_speed", decides=False)]
