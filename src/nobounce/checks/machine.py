"""One machine's facts, each asked for once and only when something needs it."""

from __future__ import annotations

from functools import cached_property

from nobounce.config import Settings
from nobounce.facts.access import Container, container, wsl
from nobounce.facts.gpus import Gpu, amd_gpus, nvidia_gpus
from nobounce.facts.kernel import dkms_build
from nobounce.facts.kfd import KfdTopology, topology
from nobounce.facts.libraries import HipLibrary, candidates, hip_libraries
from nobounce.facts.mounts import Mount, parse_mountinfo
from nobounce.facts.nvidia import NvidiaFacts, StorageFacts, nvidia_driver, nvidia_storage
from nobounce.facts.source import MOUNTINFO, Source
from nobounce.facts.sysfs import text
from nobounce.facts.virtual import SmiGpu, amdsmi_gpus


class Machine:
    """Facts for a check, from one source under one set of settings."""

    def __init__(self, source: Source, settings: Settings) -> None:
        self.source = source
        self.settings = settings

    @cached_property
    def kfd(self) -> KfdTopology:
        return topology(self.source)

    @cached_property
    def nvidia(self) -> NvidiaFacts:
        return nvidia_driver(self.source)

    @cached_property
    def nvidia_storage(self) -> StorageFacts:
        return nvidia_storage(self.source, self.nvidia.gpus)

    @cached_property
    def gpus(self) -> list[Gpu]:
        """Every GPU, AMD's first."""
        return amd_gpus(self.source, self.kfd) + nvidia_gpus(self.source, self.nvidia)

    @cached_property
    def hip_libraries(self) -> list[HipLibrary]:
        return hip_libraries(self.source)

    @cached_property
    def dkms_build(self) -> int | None:
        return dkms_build(self.source)

    @cached_property
    def smi(self) -> list[SmiGpu] | None:
        return amdsmi_gpus(self.source)

    @cached_property
    def mounts(self) -> list[Mount]:
        return parse_mountinfo(text(self.source, MOUNTINFO) or "")

    @cached_property
    def in_guest(self) -> bool:
        """Whether a hypervisor says that it runs this machine (the CPU's hypervisor flag)."""
        for line in (text(self.source, "/proc/cpuinfo") or "").splitlines():
            if line.startswith("flags"):
                return " hypervisor" in line
        return False

    @cached_property
    def container(self) -> tuple[Container, str]:
        return container(self.source)

    @cached_property
    def wsl(self) -> bool:
        return wsl(self.source)

    def libraries(self, stem: str) -> list[str]:
        return candidates(self.source, stem)
