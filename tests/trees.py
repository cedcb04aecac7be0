"""Machines made of nothing: trees of /sys and /proc with answers to everything that a Source can be asked.

    tree = Tree().cpu().nvme("nvme0n1", "0000:03:00.0").mount("/data", "xfs", "nvme0n1").file("/data/model.bin")

A question that the tree has no answer to is ENOENT, as in a capture; `captured` turns the answers asked for into one.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections.abc import Callable
from typing import Any

from nobounce.facts.source import MOUNTINFO, CapturedSource, RecordingSource, Source

GIB = 1 << 30
ROOT_PORT = "0000:00:01.1"
SECTOR = 512


class Tree(Source):
    """A machine. Every method that builds returns the tree."""

    def __init__(self) -> None:
        self.text: dict[str, str | int] = {}
        self.links: dict[str, str] = {}
        self.folders: dict[str, set[str]] = {"/": set()}
        self.probes: dict[tuple[Any, ...], Any] = {}
        self.environ: dict[str, str] = {}
        self.stats: dict[str, Any] = {}
        self.uid = 0
        self.name = ("Linux", "testhost", "6.8.0-45-generic", "#1 SMP", "x86_64")
        self.asked: list[tuple[str, tuple[Any, ...]]] = []
        self._mounts: list[str] = []
        self._numbers: dict[str, tuple[int, int]] = {}

    # answering

    def _ask(self, question: str, key: tuple[Any, ...], live: Callable[[], Any]) -> Any:
        self.asked.append((question, key))
        if question == "environment":
            return self.environ.get(key[0])
        if question == "uname":
            return list(self.name)
        if question == "euid":
            return self.uid
        if question.startswith("probe:"):
            return self._answer(self.probes, (question[6:], *key))
        if question in ("statx", "open", "mode", "open_direct"):
            return self._answer(self.probes, (question, key[0]))
        path = key[0]
        if question == "readlink":
            return self._answer(
                self.links, self._real(posixpath.dirname(path)) + "/" + posixpath.basename(path)
            )
        if question == "exists":
            return self._exists(path)
        real = self._real(path)
        if question == "realpath":
            if not self._exists(path):
                raise OSError(errno.ENOENT, "no such file", path)
            return real
        if question == "read":
            return self._answer(self.text, real)
        if question == "listdir":
            if real not in self.folders:
                raise OSError(errno.ENOENT, "no such folder", path)
            return sorted(self.folders[real])
        raise OSError(errno.ENOENT, question, path)

    def _answer(self, table: Any, key: Any) -> Any:
        if key not in table:
            raise OSError(errno.ENOENT, "no answer", str(key))
        value = table[key]
        if isinstance(value, OSError):
            raise value
        return value

    def _exists(self, path: str) -> bool:
        real = self._real(path)
        return real in self.text or real in self.folders

    def _real(self, path: str) -> str:
        done = ""
        rest = [p for p in path.split("/") if p]
        for _ in range(500):
            if not rest:
                return done or "/"
            part = rest.pop(0)
            if part == "..":
                done = posixpath.dirname(done)
                continue
            here = f"{done}/{part}"
            if here in self.links:
                target = self.links[here]
                if target.startswith("/"):
                    done = ""
                rest = [p for p in target.split("/") if p] + rest
            else:
                done = here
        raise OSError(errno.ELOOP, "too many links", path)

    def captured(self, use: Callable[[Source], Any]) -> CapturedSource:
        """A capture of what `use` asks."""
        recording = RecordingSource(self)
        use(recording)
        return CapturedSource(recording.answers)

    # files, links, answers

    def put(self, path: str, text: str) -> Tree:
        self.text[path] = text
        return self._enter(path)

    def fail(self, path: str, code: int) -> Tree:
        """A file that is there and cannot be read."""
        self.text[path] = OSError(code, os.strerror(code), path)  # type: ignore[assignment]
        return self._enter(path)

    def link(self, path: str, target: str) -> Tree:
        self.links[path] = target
        return self._enter(path)

    def folder(self, path: str) -> Tree:
        self.folders.setdefault(path, set())
        return self._enter(path)

    def _enter(self, path: str) -> Tree:
        while path != "/":
            parent = posixpath.dirname(path)
            self.folders.setdefault(parent, set()).add(posixpath.basename(path))
            path = parent
        return self

    def answer(self, name: str, *key: Any, value: Any) -> Tree:
        """What a probe gives."""
        self.probes[(name, *key)] = value
        return self

    def env(self, **variables: str) -> Tree:
        self.environ.update(variables)
        return self

    # processor, kernel

    def cpu(self, vendor: str = "AuthenticAMD", family: int = 25, *, guest: bool = False) -> Tree:
        flags = "fpu sse2" + (" hypervisor" if guest else "")
        return self.put(
            "/proc/cpuinfo",
            f"processor : 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nflags\t: {flags}\n",
        )

    def kernel(self, *names: str, path: str = "/boot/config-6.8.0-45-generic") -> Tree:
        """A kernel configuration with CONFIG_name=y for each name."""
        for one in ("PCI_P2PDMA",):
            self.answer(
                "kernel_config",
                path,
                one,
                value=[f"CONFIG_{one}=y"] if one in names else [f"# CONFIG_{one} is not set"],
            )
        return self

    def amdgpu(self, *, symbol: bool | None = True, dkms: str | None = None) -> Tree:
        self.folder("/sys/module/amdgpu")
        if symbol is None:
            self.answer("kallsyms", "kfd_ais_rw_file", value=OSError(errno.EACCES, "hidden"))
        else:
            self.answer("kallsyms", "kfd_ais_rw_file", value=[symbol, True])
        if dkms is not None:
            self.answer("dkms_status", "amdgpu", value=dkms)
        return self

    def hip_library(self, path: str = "/opt/rocm/lib/libamdhip64.so.7", *, ais: bool = True) -> Tree:
        self.put(path, "ELF")
        return self.answer(
            "hip_library", path, value={"version": 70200000, "hipAmdFileRead": ais, "hipAmdFileWrite": ais}
        )

    # PCI

    def pci(
        self,
        bdf: str,
        *parents: str,
        root: str = "pci0000:00",
        vendor: int = 0x144D,
        pci_class: int = 0x010802,
        numa: int = 0,
        group: int | None = None,
        translated: bool = False,
        speed: tuple[str, str] = ("16.0 GT/s PCIe", "16.0 GT/s PCIe"),
        width: tuple[str, str] = ("4", "4"),
    ) -> Tree:
        """A function below `parents` (root port first); bridges are made on the way."""
        path = f"/sys/devices/{root}"
        for one in (*parents, bdf):
            path += f"/{one}"
            self.link(f"/sys/bus/pci/devices/{one}", path)
            last = one == bdf
            self.put(f"{path}/class", f"{pci_class if last else 0x060400:#08x}\n")
            self.put(f"{path}/vendor", f"{vendor:#06x}\n")
            self.put(f"{path}/numa_node", f"{numa}\n")
        self.put(f"{path}/current_link_speed", speed[0] + "\n").put(f"{path}/max_link_speed", speed[1] + "\n")
        self.put(f"{path}/current_link_width", width[0] + "\n").put(f"{path}/max_link_width", width[1] + "\n")
        if group is not None:
            self.put(f"/sys/kernel/iommu_groups/{group}/type", "DMA-FQ\n" if translated else "identity\n")
            self.link(f"{path}/iommu_group", f"/sys/kernel/iommu_groups/{group}")
        return self

    def acs(self, bdf: str, control: int | None) -> Tree:
        """The configuration space of a PCIe function as root reads it, with an ACS control register (None: without ACS)."""
        legacy = bytearray(256)
        legacy[0x00:0x04], legacy[0x06], legacy[0x34], legacy[0x40] = b"\x02\x10\x01\x00", 0x10, 0x40, 0x10
        first = _extended(0x0001, 0 if control is None else 0x148) + bytes(0x40)
        acs = b"" if control is None else _extended(0x000D, 0) + b"\x7f\0" + control.to_bytes(2, "little")
        space = (bytes(legacy) + first.ljust(0x48, b"\0") + acs).ljust(4096, b"\0")
        return self.put(f"{self.pci_path(bdf)}/config", space.decode("latin-1"))

    def pci_path(self, bdf: str) -> str:
        return self._real(f"/sys/bus/pci/devices/{bdf}")

    # block devices

    def number(self, name: str) -> tuple[int, int]:
        if name not in self._numbers:
            self._numbers[name] = (259, len(self._numbers))
        return self._numbers[name]

    def block(self, name: str, folder: str) -> str:
        """Register a block device that lies in `folder`; returns its path."""
        path = f"{folder}/{name}"
        major, minor = self.number(name)
        self.folder(path)
        self.link(f"/sys/dev/block/{major}:{minor}", path)
        self.link(f"/sys/class/block/{name}", path)
        self.answer("rdev", f"/dev/{name}", value=[major, minor])
        if "/block" in folder or "nvme" in name:
            self.put(f"{path}/queue/logical_block_size", "512\n")
            self.put(f"{path}/queue/dma_alignment", "3\n")
            self.put(f"{path}/queue/max_sectors_kb", "1280\n")
        return path

    def nvme(self, name: str, bdf: str, *parents: str, **pci: Any) -> Tree:
        """A local NVMe disk."""
        self.pci(bdf, *(parents or (ROOT_PORT,)), **pci)
        short = name.partition("n1")[0] if name.count("n") > 1 else name
        folder = f"{self.pci_path(bdf)}/nvme/{short}"
        self._controller(short, folder, "pcie", bdf)
        path = self.block(name, folder)
        self.put(f"{path}/size", "7501476528\n")
        return self

    def _controller(self, name: str, folder: str, transport: str, address: str) -> None:
        self.put(f"{folder}/transport", transport + "\n").put(f"{folder}/address", address + "\n")
        self.put(f"{folder}/model", "Fast Disk 9000\n").put(f"{folder}/state", "live\n")
        self.put(f"{folder}/firmware_rev", "1.0\n").put(f"{folder}/numa_node", "0\n")
        self.link(f"/sys/class/nvme/{name}", folder)

    def nvme_fabrics(self, name: str, transport: str = "tcp") -> Tree:
        short = name.partition("n1")[0] if name.count("n") > 1 else name
        folder = f"/sys/devices/virtual/nvme-fabrics/ctl/{short}"
        self._controller(short, folder, transport, "traddr=10.1.2.3,trsvcid=4420,src_addr=10.1.2.9")
        self.block(name, folder)
        return self

    def nvme_multipath(self, name: str, *paths: tuple[str, str]) -> Tree:
        """A namespace below a subsystem with (transport, address) paths."""
        subsystem = "/sys/devices/virtual/nvme-subsystem/nvme-subsys7"
        for i, (transport, address) in enumerate(paths):
            short = f"nvme{70 + i}"
            if transport == "pcie":
                self.pci(address, ROOT_PORT)
                folder = f"{self.pci_path(address)}/nvme/{short}"
            else:
                folder = f"/sys/devices/virtual/nvme-fabrics/ctl/{short}"
            self._controller(short, folder, transport, address)
            self.link(f"{subsystem}/{short}", folder)
        self.block(name, subsystem)
        return self

    def partition(self, name: str, of: str) -> Tree:
        path = self.block(name, self._real(f"/sys/class/block/{of}"))
        return self.put(f"{path}/partition", "1\n")

    def mapped(self, name: str, uuid: str, *slaves: str, label: str = "") -> Tree:
        """A device-mapper device: `uuid` starts with LVM-, mpath- or CRYPT-."""
        path = self.block(name, "/sys/devices/virtual/block")
        self.put(f"{path}/dm/uuid", uuid + "\n").put(f"{path}/dm/name", (label or name) + "\n")
        self.folder(f"{path}/slaves")
        for slave in slaves:
            self.link(f"{path}/slaves/{slave}", self._real(f"/sys/class/block/{slave}"))
        self.answer("rdev", f"/dev/mapper/{label or name}", value=list(self.number(name)))
        return self

    def lvm(self, name: str, *slaves: str) -> Tree:
        return self.mapped(name, "LVM-" + "a" * 64, *slaves, label=f"vg-{name}")

    def md(self, name: str, level: str, *slaves: str) -> Tree:
        path = self.block(name, "/sys/devices/virtual/block")
        self.put(f"{path}/md/level", level + "\n").folder(f"{path}/slaves")
        for slave in slaves:
            self.link(f"{path}/slaves/{slave}", self._real(f"/sys/class/block/{slave}"))
        return self

    def loop(self, name: str, backing: str) -> Tree:
        path = self.block(name, "/sys/devices/virtual/block")
        return self.put(f"{path}/loop/backing_file", backing + "\n")

    def disk(self, name: str) -> Tree:
        """A disk that its name alone tells: vda, sda, pmem0 ..."""
        self.block(name, "/sys/devices/pci0000:00/0000:00:02.0/virtio1/block")
        return self

    # mounts and files

    def mount(
        self,
        point: str,
        fstype: str,
        device: str,
        options: str = "rw",
        *,
        anonymous: bool = False,
        o_direct: int = 0,
        data: str | None = "ordered",
        align: int = 512,
    ) -> Tree:
        """A mount of a block device, or of another source if `device` is no block device of this tree."""
        known = device in self._numbers
        major, minor = self.number(device) if known and not anonymous else (0, 60 + len(self._mounts))
        source = f"/dev/{device}" if known else device
        escaped = point.replace(" ", "\\040")
        self._mounts.append(
            f"{100 + len(self._mounts)} 1 {major}:{minor} / {escaped} {options} - {fstype} {source} {options}"
        )
        self.text[MOUNTINFO] = "\n".join(self._mounts) + "\n"
        self._enter(MOUNTINFO)
        if fstype == "ext4" and data is not None:
            lines = "rw\n" + ("" if data == "none" else f"data={data}\n")
            self.put(f"/proc/fs/ext4/{device}/options", lines)
        return self.answer(
            "direct_in", point, value=[o_direct, align if not o_direct else 0, align if not o_direct else 0]
        )

    def file(
        self,
        path: str,
        *,
        nbytes: int = 1 << 20,
        align: int | None = 512,
        direct: int = 0,
        kind: int = stat.S_IFREG,
        opens: int = 0,
        device: str | None = None,
        direct_read: str = "yes",
    ) -> Tree:
        """A file on the innermost mount above it; `device` makes it that block device."""
        mounts = [line.split(" ") for line in self._mounts]
        above = [m for m in mounts if path.startswith(m[4].replace("\\040", " ").rstrip("/") + "/")]
        mount = max(above, key=lambda m: len(m[4])) if above else ["1", "", "0:1"]
        major, minor = (int(n) for n in mount[2].split(":"))
        rdev = self.number(device) if device else (0, 0)
        mode = (stat.S_IFBLK if device else kind) | 0o644
        fields = [mode, nbytes, 12, [major, minor], list(rdev), 1, 1, int(mount[0]), align, align, None]
        for name, code, value in (("mode", 0, mode), ("open", opens, True), ("statx", 0, fields)):
            self.probes[(name, path)] = OSError(code, os.strerror(code), path) if code else value
        self.probes[("open_direct", path)] = direct
        self.probes[("access_mode", path)] = os.O_RDONLY
        self.probes[("direct_read", path)] = direct_read
        self._enter(path)
        return self

    # GPUs

    def kfd_node(
        self,
        number: int,
        *,
        gpu_id: int = 0,
        bdf: str = "0000:c1:00.0",
        ais: bool = False,
        minor: int = 128,
        unique_id: int = 0x1234,
        vram: int = 192 * GIB,
        visible: int | None = None,
        links: tuple[tuple[int, int], ...] = (),
        gfx: int = 90402,
        xcc: int = 8,
    ) -> Tree:
        """A node of KFD's topology; links are (type, node)."""
        path = f"/sys/class/kfd/kfd/topology/nodes/{number}"
        domain, bus, rest = bdf.split(":")
        slot, function = rest.split(".")
        location = int(bus, 16) << 8 | int(slot, 16) << 3 | int(function)
        values = {
            "cpu_cores_count": 0 if gpu_id else 64,
            "simd_count": 1216 if gpu_id else 0,
            "capability": 0x2C77A280 | (0x40 if ais else 0),
            "gfx_target_version": gfx if gpu_id else 0,
            "location_id": location if gpu_id else 0,
            "domain": int(domain, 16),
            "drm_render_minor": minor if gpu_id else -1,
            "unique_id": unique_id if gpu_id else 0,
            "num_xcc": xcc,
            "io_links_count": len(links),
        }
        self.put(f"{path}/gpu_id", f"{gpu_id}\n")
        self.put(f"{path}/properties", "".join(f"{k} {v}\n" for k, v in values.items()))
        if gpu_id:
            seen = vram if visible is None else visible
            self._bank(path, 0, 1, seen)
            if seen < vram:
                self._bank(path, 1, 2, vram - seen)
        for i, (kind, to) in enumerate(links):
            self.put(
                f"{path}/io_links/{i}/properties",
                f"type {kind}\nnode_from {number}\nnode_to {to}\nweight 15\nmin_bandwidth 50000\nmax_bandwidth 64000\nflags 0\n",
            )
        return self.put("/sys/class/kfd/kfd/topology/generation_id", "2\n")

    def _bank(self, path: str, number: int, heap: int, nbytes: int) -> None:
        self.put(
            f"{path}/mem_banks/{number}/properties",
            f"heap_type {heap}\nsize_in_bytes {nbytes}\nmem_clk_max 1300\n",
        )

    def node_state(self, path: str, code: int = 0, group: str = "render") -> Tree:
        """What opening a device node gives."""
        return self.answer("open_node", path, value=[code, group])

    def amd_gpu(
        self, number: int = 1, bdf: str = "0000:c1:00.0", *parents: str, root: str = "pci0000:00", **node: Any
    ) -> Tree:
        """An AMD GPU with its PCI function, KFD node and device nodes."""
        pci = {k: node.pop(k) for k in ("group", "translated", "numa", "width", "speed") if k in node}
        minor = node.get("minor", 127 + number)
        self.pci(
            bdf,
            *(parents or (ROOT_PORT,)),
            root=root,
            vendor=0x1002,
            pci_class=0x038000,
            **{"width": ("16", "16"), **pci},
        )
        node.setdefault("gpu_id", 1000 + number)
        self.kfd_node(number, bdf=bdf, **{**node, "minor": minor})
        return self.node_state("/dev/kfd").node_state(f"/dev/dri/renderD{minor}")

    def nvidia_gpu(
        self,
        bdf: str = "0000:c1:00.0",
        *parents: str,
        model: str = "NVIDIA H200",
        p2pmem: int | None = None,
        **pci: Any,
    ) -> Tree:
        self.pci(
            bdf,
            *(parents or (ROOT_PORT,)),
            vendor=0x10DE,
            pci_class=0x030200,
            **{"width": ("16", "16"), **pci},
        )
        self.put(
            "/proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue Jan\n",
        )
        uuid = f"GPU-{int(bdf[5:7], 16):08x}-0000-0000-0000-000000000000"
        self.put(f"/proc/driver/nvidia/gpus/{bdf}/information", f"Model: \t\t {model}\nGPU UUID: \t {uuid}\n")
        if p2pmem is not None:
            self.put(f"{self.pci_path(bdf)}/p2pmem/size", f"{p2pmem}\n")
        self.put("/usr/local/cuda/lib64/libcufile.so", "ELF").put("/usr/local/cuda/lib64/libcuda.so", "ELF")
        return self.node_state("/dev/nvidiactl", group="root")

    def nvidia_fs(self, version: str = "2.24.2") -> Tree:
        self.put("/sys/module/nvidia_fs/version", version + "\n")
        return self.put("/proc/driver/nvidia-fs/devcount", "1\n")


def ready_amd(tree: Tree | None = None, **gpu: Any) -> Tree:
    """A bare-metal machine whose AMD GPU has everything that its direct path needs; the disk is a neighbour of the GPU."""
    tree = tree or Tree()
    tree.cpu().kernel("PCI_P2PDMA").amdgpu().hip_library()
    tree.amd_gpu(1, "0000:c1:00.0", ROOT_PORT, **gpu)
    tree.nvme("nvme0n1", "0000:03:00.0").mount("/data", "xfs", "nvme0n1")
    return tree.file("/data/model.bin")


def _extended(identifier: int, following: int) -> bytes:
    """The header of a PCIe extended capability."""
    return (identifier | 1 << 16 | following << 20).to_bytes(4, "little")
