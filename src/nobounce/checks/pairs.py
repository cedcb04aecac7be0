"""The way between one file's disks and one GPU: PCI distance, root complex, IOMMU, ACS,
and links below their best."""

from __future__ import annotations

from nobounce.checks.findings import Finding
from nobounce.checks.machine import Machine
from nobounce.facts.acs import REDIRECTING, acs_control, between, names_of
from nobounce.facts.gpus import Gpu
from nobounce.facts.iommu import iommu_of, kernel_options
from nobounce.facts.pci import (
    DEVICES,
    DISTANCE_TEXT,
    PciDevice,
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
        sentence = (
            f"what carries the bytes of {file.filesystem.fstype} is no block device that can be seen from "
            "here"
        )
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
    redirecting = redirects(machine, disk, gpu)
    if not redirecting:
        return Finding("pci", "yes", where, disk.path, "no-p2p")
    allowed, why, path = root_complex_allows(machine.source, disk, gpu)
    if allowed == "yes":
        return Finding("pci", "yes", f"{where}, and should ACS send requests up: {why}", path, "no-p2p")
    certain = {bdf: control for bdf, control in redirecting.items() if control is not None}
    for bdf, control in certain.items():
        sentence = (
            f"{where}, but ACS of {bdf} ({names_of(control)}) sends peer requests to the root complex, "
            f"unless pci=disable_acs_redir={';'.join(certain)} is on the kernel's command line: {why}"
        )
        return Finding("pci", allowed, sentence, f"{DEVICES}/{bdf}/config", "no-p2p")
    bdf = next(iter(redirecting))
    sentence = f"{where}; whether ACS of {bdf} sends peer requests up is readable by root alone"
    as_root = machine.source.effective_uid() != 0
    if not as_root:
        sentence = f"{where}; whether ACS of {bdf} sends peer requests up cannot be read"
    return Finding("pci", "unknown", sentence, f"{DEVICES}/{bdf}/config", "no-p2p", needs_root=as_root)


def redirects(machine: Machine, disk: PciDevice, gpu: PciDevice) -> dict[str, int | None]:
    """The functions between two devices whose ACS sends peer requests up, with its control register,
    and those of which that is not known (None). None for two devices of different bridges of the root:
    all goes through it anyway."""
    if distance(disk, gpu) in (*CROSSES, "unknown"):
        return {}
    controls = {bdf: acs_control(machine.source, bdf) for bdf in between(disk, gpu)}
    return {bdf: c for bdf, c in controls.items() if c is None or c & REDIRECTING}


def _iommu(machine: Machine, disk: PciDevice, gpu: PciDevice, name: str) -> list[Finding]:
    if distance(disk, gpu) in ("same-switch", "same-device") and not redirects(machine, disk, gpu):
        return []
    for device, label in ((gpu, name), (disk, f"NVMe {disk.bdf}")):
        one = iommu_of(machine.source, device)
        if one.translated == "no":
            continue
        answer: Known = "unknown"
        asked = kernel_options(machine.source).get("iommu", "")
        said = f"{one.kind}; iommu={asked} on the kernel's command line" if asked else one.kind
        sentence = (
            f"an IOMMU translates the addresses of {label} ({said}), which peer requests through the root "
            "complex often fail on"
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
