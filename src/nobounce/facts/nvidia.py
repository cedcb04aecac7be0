"""NVIDIA's driver and what GPUDirect Storage needs: nvidia-fs, or the driver's own PCI P2PDMA (CUDA
12.8, driver 570 and on).

P2PDMA shows as a `p2pmem` folder with a size at the GPU's PCI device; its existence alone is not enough,
since some drivers leave it there with size 0.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from nobounce.facts.pci import DEVICES, NVIDIA, all_devices
from nobounce.facts.source import Source
from nobounce.facts.sysfs import names, number, text, there

PROC = "/proc/driver/nvidia"
NVIDIA_FS = "/proc/driver/nvidia-fs"
CUFILE_JSON = "/etc/cufile.json"


@dataclass(frozen=True, slots=True)
class NvidiaFacts:
    """The driver's version, its GPUs by PCI address in ascending order ("" where nothing tells it), and each
    GPU's model and UUID where they can be read."""

    version: str | None
    gpus: tuple[str, ...]
    models: tuple[str, ...]
    uuids: tuple[str, ...]
    read_from: str


@dataclass(frozen=True, slots=True)
class StorageFacts:
    """Which of the two ways to direct storage is there: `nvidia_fs` holds the module's version, `p2pdma` the
    GPUs whose memory the driver has published for PCI peers. `cufile` is cufile.json's properties that bear
    on it, `odd` why it cannot be read."""

    nvidia_fs: str | None
    p2pdma: tuple[str, ...]
    cufile: dict[str, Any]
    odd: str = ""

    def way(self, bdf: str) -> str:
        """ "nvidia-fs", "p2pdma" or "" for one GPU."""
        return "nvidia-fs" if self.nvidia_fs is not None else "p2pdma" if bdf in self.p2pdma else ""


def nvidia_driver(source: Source) -> NvidiaFacts:
    """The driver as /proc/driver/nvidia shows it; in containers that lack it, GPUs by their PCI class."""
    # "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build"
    match = re.search(
        r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)*)(?:\s|$)", text(source, f"{PROC}/version") or ""
    )
    folder = sorted(names(source, f"{PROC}/gpus"))
    models, uuids, gpus = [], [], []
    for name in folder:
        information = text(source, f"{PROC}/gpus/{name}/information") or ""
        fields = {
            k.strip(): v.strip() for k, _, v in (line.partition(":") for line in information.splitlines())
        }
        gpus.append(_short(name))
        models.append(fields.get("Model", ""))
        uuids.append(fields.get("GPU UUID", ""))
    if gpus:
        return NvidiaFacts(
            match[1] if match else None, tuple(gpus), tuple(models), tuple(uuids), f"{PROC}/gpus"
        )
    seen = [
        bdf
        for bdf in all_devices(source)
        if number(source, f"{DEVICES}/{bdf}/vendor", 0) == NVIDIA
        and (number(source, f"{DEVICES}/{bdf}/class", 0) or 0) >> 16 == 0x03
    ]
    told = DEVICES
    if not seen:  # a container may show nothing but the device nodes
        seen, told = ["" for n in names(source, "/dev") if re.fullmatch(r"nvidia\d+", n)], "/dev"
    blank = ("",) * len(seen)
    return NvidiaFacts(match[1] if match else None, tuple(seen), blank, blank, told)


def _short(bdf: str) -> str:
    """The kernel's four-digit domain where the driver writes eight."""
    return bdf[4:].lower() if re.fullmatch(r"0000[0-9a-fA-F]{4}:.*", bdf) else bdf.lower()


def nvidia_storage(source: Source, gpus: tuple[str, ...]) -> StorageFacts:
    """What the direct path to these GPUs could use."""
    version = None
    if there(source, NVIDIA_FS) and there(source, "/sys/module/nvidia_fs"):
        version = text(source, "/sys/module/nvidia_fs/version") or ""
    p2pdma = tuple(bdf for bdf in gpus if bdf and (number(source, f"{DEVICES}/{bdf}/p2pmem/size") or 0) > 0)
    raw = text(source, CUFILE_JSON)
    found, odd = parse_cufile(raw) if raw is not None else ({}, "")
    return StorageFacts(version, p2pdma, found, odd)


def parse_cufile(raw: str) -> tuple[dict[str, Any], str]:
    """(the `properties` of a cufile.json, what is odd about it): JSON with comments and trailing commas."""
    kept = []
    for line in raw.splitlines():
        match = re.match(r'((?:[^"/]|"(?:[^"\\]|\\.)*"|/(?!/))*)//', line)
        kept.append(match[1] if match else line)
    try:
        data = json.loads(re.sub(r",(\s*[}\]])", r"\1", "\n".join(kept)))
    except (ValueError, RecursionError) as e:
        return {}, f"{CUFILE_JSON} is no JSON: {e}"
    found = data.get("properties") if isinstance(data, dict) else None
    return (found, "") if isinstance(found, dict) else ({}, f"{CUFILE_JSON} has no properties")


def registry(source: Source) -> str:
    """The driver's RegistryDwords, where settings of its static BAR and of P2PDMA stand;
    "" where there are none."""
    for line in (text(source, f"{PROC}/params") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "RegistryDwords":
            return value.strip().strip('"')
    return ""
