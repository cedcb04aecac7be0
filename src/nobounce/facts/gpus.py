"""The GPUs of this machine as their runtimes number them, found without any runtime.

HIP numbers KFD's nodes in order, after ROCR_VISIBLE_DEVICES and then HIP_VISIBLE_DEVICES (or
CUDA_VISIBLE_DEVICES) have taken their pick. CUDA numbers by PCI address only with
CUDA_DEVICE_ORDER=PCI_BUS_ID; otherwise the fastest comes first, which makes no difference where
all GPUs are of one model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

from nobounce.facts.kfd import KfdNode, KfdTopology
from nobounce.facts.nvidia import NvidiaFacts
from nobounce.facts.pci import PciDevice, pci_device
from nobounce.facts.source import Source
from nobounce.facts.sysfs import whole

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU (or partition of one) under the name that nobounce gives it: `certain` is False
    where the number may differ."""

    name: str
    runtime: Literal["hip", "cuda"]
    bdf: str
    pci: PciDevice | None
    node: KfdNode | None = None
    model: str = ""
    certain: bool = True


def amd_gpus(source: Source, topology: KfdTopology) -> list[Gpu]:
    """AMD GPUs in HIP's order."""
    nodes = list(topology.gpus)
    nodes = visible(nodes, source.environment("ROCR_VISIBLE_DEVICES"), [_amd_uuid(n) for n in nodes])
    second = source.environment("HIP_VISIBLE_DEVICES")
    if second is None:
        second = source.environment("CUDA_VISIBLE_DEVICES")
    nodes = visible(nodes, second, [_amd_uuid(n) for n in nodes])
    found = []
    for i, node in enumerate(nodes):
        pci = pci_device(source, node.bdf) or pci_device(source, f"{node.slot}.0")
        found.append(Gpu(f"hip:{i}", "hip", node.bdf if pci is None else pci.bdf, pci, node, node.gfx))
    return found


def _amd_uuid(node: KfdNode) -> str:
    return f"GPU-{node.properties.get('unique_id', 0):x}"


def nvidia_gpus(source: Source, driver: NvidiaFacts) -> list[Gpu]:
    """NVIDIA GPUs in CUDA's order as far as it can be told."""
    rows = list(zip(driver.gpus, driver.models, driver.uuids, strict=True))
    by_address = source.environment("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    certain = (by_address or len(set(driver.models)) <= 1) and "" not in driver.gpus
    rows = visible(rows, source.environment("CUDA_VISIBLE_DEVICES"), [r[2] for r in rows])
    return [
        Gpu(f"cuda:{i}", "cuda", bdf, pci_device(source, bdf), None, model, certain)
        for i, (bdf, model, _) in enumerate(rows)
    ]


def visible(items: list[T], wanted: str | None, uuids: list[str]) -> list[T]:
    """What a visibility variable leaves: numbers or UUID prefixes; as the runtimes do, the first
    bad entry ends the list."""
    if wanted is None:
        return items
    chosen: list[T] = []
    for word in (w.strip() for w in wanted.split(",")):
        index = whole(word)
        if index is not None and index < len(items):
            one = items[index]
        else:
            matching = [i for i, uuid in enumerate(uuids) if word and uuid.lower().startswith(word.lower())]
            if len(matching) != 1:
                break
            one = items[matching[0]]
        chosen.append(one)
    return chosen
