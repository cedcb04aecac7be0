"""hipFile's four lines (G-2 to G-7): kernel P2PDMA, HIP runtime, amdgpu, a hipFile-capable volume.

They keep hipFile's logic with one difference: what cannot be read is unknown, not false.
"""

from __future__ import annotations

from nobounce.checks.findings import Component, Volume
from nobounce.checks.machine import Machine
from nobounce.facts.kernel import AIS_SYMBOL, TRUSTED_BUILD, ais_symbol, kernel_config
from nobounce.facts.kfd import TOPOLOGY
from nobounce.facts.types import Known

NAMES = ("Kernel P2PDMA support", "HIP runtime", "amdgpu", "hipFile-capable volume")


def trusted_driver(machine: Machine) -> bool:
    """Whether amdgpu is new enough for its capability bit to say whether direct I/O is up (G-4:
    above, not at, the threshold)."""
    build = machine.dkms_build
    return build is not None and build > TRUSTED_BUILD


def kernel_p2pdma(machine: Machine) -> Component:
    """From the capability bit of any GPU with a new enough driver, else from the
    kernel's configuration (G-4)."""
    if trusted_driver(machine):
        for node in machine.kfd.gpus:
            if node.ais:
                return Component(NAMES[0], "yes", f"{node.path}/properties")
        note = f"amdgpu-dkms build {machine.dkms_build} sets the direct I/O capability bit on no GPU"
        return Component(NAMES[0], "no", f"{TOPOLOGY}/nodes", note)
    found = kernel_config(machine.source, "PCI_P2PDMA")
    notes: dict[Known, str] = {
        "yes": "",
        "no": "the kernel is built without CONFIG_PCI_P2PDMA=y",
        "unknown": "no kernel configuration can be read, so P2PDMA support is not known",
    }
    return Component(NAMES[0], found.answer, found.read_from, notes[found.answer])


def hip_runtime(machine: Machine) -> Component:
    """True if any HIP library found has both direct calls (G-5)."""
    found = machine.hip_libraries
    for library in found:
        if library.ais == "yes":
            return Component(NAMES[1], "yes", library.path)
    if not found:
        return Component(NAMES[1], "no", "/opt/rocm/lib", "no libamdhip64 is found")
    first = next((x for x in found if x.ais == "unknown"), found[0])
    return Component(NAMES[1], first.ais, first.path, f"{first.path}: {first.because}")


def amdgpu(machine: Machine) -> Component:
    """Whether the driver in the kernel has the direct path (G-6)."""
    answer, path = ais_symbol(machine.source)
    notes: dict[Known, str] = {
        "yes": "",
        "no": f"{path} has no {AIS_SYMBOL}"
        if path.startswith("/proc")
        else "the amdgpu driver is not loaded",
        "unknown": f"{path} cannot be read or hides the symbols of modules from this user",
    }
    return Component(NAMES[2], answer, path, notes[answer])


def capable_volume(rows: list[Volume]) -> Component:
    """True if any row of the table says so (G-12)."""
    for answer in ("yes", "unknown"):
        for row in rows:
            if row.hipfile == answer:
                return Component(NAMES[3], answer, row.read_from, "" if answer == "yes" else _WHY)
    return Component(
        NAMES[3], "no", "/proc/self/mountinfo", "no volume is ext4 (data=ordered) or xfs on local NVMe"
    )


_WHY = "a volume looks capable, but O_DIRECT could not be tried there"


def components(machine: Machine, rows: list[Volume]) -> list[Component]:
    """The four lines in hipFile's order."""
    return [kernel_p2pdma(machine), hip_runtime(machine), amdgpu(machine), capable_volume(rows)]
