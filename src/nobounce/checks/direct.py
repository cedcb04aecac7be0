"""The DirectFacts of a device from facts alone: what the runtimes report of
themselves, where no runtime works.

The conditions are those that real transfers meet later, as errors of the driver: HIP calls, kernel and driver
support, virtual functions, memory that PCI peers reach. Each comes with the file it was read from.
"""

from __future__ import annotations

from nobounce.checks.components import amdgpu, hip_runtime, kernel_p2pdma, trusted_driver
from nobounce.checks.conditions import DeviceView, settle
from nobounce.checks.findings import Finding
from nobounce.checks.machine import Machine
from nobounce.checks.reach import amd_access, nvidia_access
from nobounce.errors import counted
from nobounce.facts.access import VISIBILITY, variables
from nobounce.facts.gpus import Gpu
from nobounce.facts.kernel import module_version
from nobounce.facts.kfd import interface_version
from nobounce.facts.libraries import CUDA, CUFILE
from nobounce.facts.nvidia import CUFILE_JSON, NVIDIA_FS, PROC, registry
from nobounce.facts.pci import DEVICES
from nobounce.facts.sysfs import number, text
from nobounce.facts.types import Known
from nobounce.facts.virtual import guests
from nobounce.route.types import DirectFacts, MemoryKind

CPU = DirectFacts("cpu", True, file_rule="probe", memory_kinds=frozenset(MemoryKind), p2p="no")
SIM = DirectFacts(
    "sim",
    True,
    file_rule="probe",
    memory_kinds=frozenset({MemoryKind.DEVICE}),
    p2p="yes",
    virtual_function="no",
)
HIP = DirectFacts("hip", True, file_rule="hipfile", min_mem_align=4096, min_offset_align=4096)
CUDA_DIRECT = DirectFacts("cuda", True, file_rule="probe", min_mem_align=4096, min_offset_align=4096)
"""What the runtimes report where nothing is missing; a test holds them to it."""


def view_of(machine: Machine, name: str) -> DeviceView:
    """A device by name. Raises nothing: a device that is not there says so in `absent`."""
    kind = name.partition(":")[0]
    if kind == "cpu":
        return DeviceView(name, CPU, CPU)
    if kind == "sim":
        count = machine.settings.sim_devices
        if int(name.partition(":")[2] or 0) >= count:
            because = f"there is no {name}, only {counted(count, 'simulated device')}"
            missing = Finding("device", "no", because, "/proc/self/environ", code="no-device")
            return DeviceView(name, SIM, SIM, (missing,), None, because)
        note = Finding(
            "device", "yes", f"{name} is simulated: its memory is host memory", "nobounce", decides=False
        )
        return DeviceView(name, SIM, SIM, (note,))
    full = name if ":" in name else f"{name}:0"
    gpu = next((g for g in machine.gpus if g.name == full), None)
    if gpu is None:
        return _missing(machine, full)
    return _amd(machine, gpu) if gpu.runtime == "hip" else _nvidia(machine, gpu)


def every_device(machine: Machine) -> list[str]:
    """What a check looks at unless told: NOBOUNCE_DEVICE, else the GPUs, or cpu where there is none."""
    if machine.settings.device:
        return [machine.settings.device]
    return [g.name for g in machine.gpus] or ["cpu"]


def _missing(machine: Machine, name: str) -> DeviceView:
    kind = name.partition(":")[0]
    base = HIP if kind == "hip" else CUDA_DIRECT
    findings = amd_access(machine, None) if kind == "hip" else nvidia_access(machine)
    have = [g.name for g in machine.gpus if g.runtime == kind]
    hiding = variables(machine.source, VISIBILITY)
    because = f"there is no {name}" + (f", only {', '.join(have)}" if have else "")
    if hiding:
        because += "; " + ", ".join(f"{k}={v}" for k, v in hiding.items()) + " may hide it"
    path = "/sys/class/kfd/kfd/topology/nodes" if kind == "hip" else machine.nvidia.read_from
    if machine.wsl and kind == "hip":  # no KFD there, but the runtime may work
        best, worst = settle(base, findings)
        return DeviceView(name, best, worst, tuple(f for f in findings if f.code != "no-device"))
    missing = Finding("device", "no", because, path, code="no-device")
    return DeviceView(name, base, base, (*findings, missing), None, because)


def _amd(machine: Machine, gpu: Gpu) -> DeviceView:
    found = amd_access(machine, gpu)
    blocked = next((f for f in found if f.code == "no-device"), None)
    library = hip_runtime(machine)
    found.append(
        Finding(
            "runtime",
            library.answer,
            "the HIP runtime has hipAmdFileRead and hipAmdFileWrite"
            if library.answer == "yes"
            else library.note,
            library.read_from,
            "no-amd-file-calls",
        )
    )
    found += _amd_driver(machine, gpu) + _amd_notes(machine)
    found.append(_virtual(machine, gpu))
    bar = _visible_memory(machine, gpu)
    if bar is not None:
        found.append(bar)
    best, worst = settle(HIP, found)
    absent = ""
    if blocked is not None:
        absent = blocked.sentence
    elif not machine.hip_libraries:
        absent = library.note
    return DeviceView(gpu.name, best, worst, tuple(found), gpu, absent)


def _amd_driver(machine: Machine, gpu: Gpu) -> list[Finding]:
    symbol = amdgpu(machine)
    sentence = "amdgpu has the direct path (kfd_ais_rw_file)" if symbol.answer == "yes" else symbol.note
    found = [
        Finding(
            "driver",
            symbol.answer,
            sentence,
            symbol.read_from,
            "missing-module",
            needs_root=symbol.answer == "unknown",
        )
    ]
    if trusted_driver(machine) and gpu.node is not None:
        ais = gpu.node.ais
        sentence = (
            f"amdgpu says that direct I/O is {'up' if ais else 'not up'} on {gpu.name} (capability bit 0x40)"
        )
        found.append(
            Finding("driver", "yes" if ais else "no", sentence, f"{gpu.node.path}/properties", "no-p2p")
        )
    else:
        kernel = kernel_p2pdma(machine)
        sentence = "the kernel has PCI P2PDMA" if kernel.answer == "yes" else kernel.note
        found.append(Finding("kernel", kernel.answer, sentence, kernel.read_from, "no-p2p"))
    return found


def _amd_notes(machine: Machine) -> list[Finding]:
    """What a bug report would want to know of the driver."""
    found = []
    version = interface_version(machine.source)
    if version is not None:
        found.append(Finding("driver", "yes", f"KFD's interface is {version}", "/dev/kfd", decides=False))
    parameter = "/sys/module/amdgpu/parameters/pcie_p2p"
    if text(machine.source, parameter) == "N":
        sentence = "amdgpu is loaded with pcie_p2p off: GPUs do not reach each other over PCIe"
        found.append(Finding("driver", "unknown", sentence, parameter, decides=False))
    driver = module_version(machine.source, "amdgpu")
    if driver is not None:
        build = "" if machine.dkms_build is None else f", DKMS build {machine.dkms_build}"
        found.append(
            Finding("driver", "yes", f"amdgpu {driver}{build}", "/sys/module/amdgpu/version", decides=False)
        )
    return found


def _virtual(machine: Machine, gpu: Gpu) -> Finding:
    """yes means here: it is no virtual function."""
    path = f"{DEVICES}/{gpu.bdf}/physfn"
    if gpu.pci is not None and gpu.pci.is_vf == "yes":
        return Finding("pci", "no", f"{gpu.name} is an SR-IOV virtual function", path, "virtual-function")
    listed = machine.smi
    if listed is not None:
        if any(g.bdf == gpu.bdf for g in guests(listed)):
            return Finding(
                "pci",
                "no",
                f"{gpu.name} is an SR-IOV virtual function, says amdsmi",
                "amdsmi",
                "virtual-function",
            )
        if any(g.bdf == gpu.bdf and g.mode not in ("", "UNKNOWN") for g in listed):
            return Finding("pci", "yes", f"{gpu.name} is no virtual function", "amdsmi", "virtual-function")
    if not machine.in_guest:
        return Finding(
            "pci",
            "yes",
            f"{gpu.name} is no virtual function: this machine is no guest and physfn is absent",
            path,
            "virtual-function",
        )
    return Finding(
        "pci",
        "unknown",
        f"{gpu.name} may be an SR-IOV virtual function: this is a virtual machine and amdsmi, which would "
        "know, does not tell",
        path,
        "virtual-function",
    )


def _visible_memory(machine: Machine, gpu: Gpu) -> Finding | None:
    """Whether PCI peers can reach all of the GPU's memory: a BAR as large as it."""
    entry = f"{DEVICES}/{gpu.bdf}"
    total = number(machine.source, f"{entry}/mem_info_vram_total")
    seen = number(machine.source, f"{entry}/mem_info_vis_vram_total")
    path = f"{entry}/mem_info_vis_vram_total"
    if (total is None or seen is None) and gpu.node is not None and gpu.node.vram_nbytes:
        total, seen = gpu.node.vram_nbytes, gpu.node.visible_nbytes
        path = f"{gpu.node.path}/mem_banks"
    if not total or seen is None:
        return None
    answer: Known = "yes" if seen >= total else "no"
    gib = 1 << 30
    sentence = f"{seen / gib:.0f} of {total / gib:.0f} GiB of memory can be reached over PCI" + (
        "" if answer == "yes" else ": large BAR is off"
    )
    return Finding("pci", answer, sentence, path, "no-p2p")


def _nvidia(machine: Machine, gpu: Gpu) -> DeviceView:
    found = nvidia_access(machine)
    blocked = next((f for f in found if f.code == "no-device"), None)
    storage = machine.nvidia_storage
    way = storage.way(gpu.bdf)
    if way == "nvidia-fs":
        version = f" {storage.nvidia_fs}" if storage.nvidia_fs else ""
        found.append(Finding("driver", "yes", f"nvidia-fs{version} is loaded", NVIDIA_FS, "no-nvidia-fs"))
    elif way == "p2pdma":
        path = f"{DEVICES}/{gpu.bdf}/p2pmem/size"
        found.append(
            Finding("driver", "yes", f"{gpu.name} offers memory to PCI P2PDMA", path, "no-nvidia-fs")
        )
    else:
        sentence = "neither nvidia-fs is loaded nor does the GPU offer memory to PCI P2PDMA"
        found.append(
            Finding(
                "driver", "no", sentence, f"/sys/module/nvidia_fs, {DEVICES}/{gpu.bdf}/p2pmem", "no-nvidia-fs"
            )
        )
    libraries = machine.libraries(CUFILE)
    if libraries:
        found.append(Finding("runtime", "yes", "libcufile is installed", libraries[0], "no-cufile-library"))
    else:
        # The CUDA package may bring its own, which no linker cache lists.
        sentence = "libcufile is in none of the usual places"
        found.append(Finding("runtime", "unknown", sentence, "/etc/ld.so.cache", "no-cufile-library"))
    found += _nvidia_notes(machine)
    if storage.odd:
        found.append(Finding("settings", "unknown", storage.odd, CUFILE_JSON, decides=False))
    if not gpu.bdf:
        sentence = f"the PCI address of {gpu.name} is not shown here, so its distance to disks is not known"
        found.append(Finding("pci", "unknown", sentence, machine.nvidia.read_from, "no-p2p"))
    elif not gpu.certain:
        sentence = (
            "CUDA numbers the fastest GPU first, so the numbers here (by PCI address) may differ: set "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
        found.append(Finding("device", "unknown", sentence, machine.nvidia.read_from, decides=False))
    if not machine.libraries(CUDA):
        found.append(
            Finding(
                "runtime",
                "unknown",
                "libcuda is in none of the usual places",
                "/etc/ld.so.cache",
                decides=False,
            )
        )
    best, worst = settle(CUDA_DIRECT, found)
    return DeviceView(gpu.name, best, worst, tuple(found), gpu, "" if blocked is None else blocked.sentence)


def _nvidia_notes(machine: Machine) -> list[Finding]:
    """The driver's version and the settings that bear on the direct path."""
    found = []
    if machine.nvidia.version is not None:
        path = f"{PROC}/version"
        found.append(
            Finding("driver", "yes", f"NVIDIA's driver is {machine.nvidia.version}", path, decides=False)
        )
    dwords = registry(machine.source)
    if dwords:
        sentence = f"the driver runs with RegistryDwords {dwords}"
        found.append(Finding("driver", "yes", sentence, f"{PROC}/params", decides=False))
    for name in ("use_pci_p2pdma", "allow_compat_mode", "use_poll_mode"):
        if name in machine.nvidia_storage.cufile:
            sentence = f"{name} is {str(machine.nvidia_storage.cufile[name]).lower()}"
            found.append(Finding("settings", "yes", sentence, CUFILE_JSON, decides=False))
    return found
