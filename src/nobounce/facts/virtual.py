"""Is a GPU an SR-IOV virtual function, on which direct I/O does not work? On the host, physfn says so;
in a guest only AMD's own library does (amdsmi: virtualization mode GUEST), and only where it is
installed (hipFile G-13)."""

from __future__ import annotations

import importlib.util
import subprocess
from dataclasses import dataclass
from typing import Any

from nobounce.facts.libraries import ask_child
from nobounce.facts.source import Source
from nobounce.facts.sysfs import there

AMDSMI_FOLDER = "/opt/rocm/share/amd_smi"


@dataclass(frozen=True, slots=True)
class SmiGpu:
    """One GPU as amdsmi shows it: `mode` is BAREMETAL, HOST, GUEST, PASSTHROUGH, UNKNOWN, or
    "" where the query failed."""

    bdf: str
    name: str
    mode: str

    @property
    def label(self) -> str:
        return f"{self.bdf} ({self.name})" if self.name else self.bdf


_ASK = """
import json, sys
sys.path.append(sys.argv[1])
import amdsmi
found = []
amdsmi.amdsmi_init()
try:
    for index, handle in enumerate(amdsmi.amdsmi_get_processor_handles()):
        one = {"bdf": f"gpu {index}", "name": "", "mode": ""}
        for key, call in (
            ("bdf", lambda: amdsmi.amdsmi_get_gpu_device_bdf(handle)),
            ("name", lambda: amdsmi.amdsmi_get_gpu_asic_info(handle)["market_name"]),
            ("mode", lambda: amdsmi.amdsmi_get_gpu_virtualization_mode(handle)),
        ):
            try:
                value = call()
            except Exception:
                continue
            if key == "mode":
                value = value.get("mode", value) if isinstance(value, dict) else value
                value = getattr(value, "name", str(value)).rsplit("_", 1)[-1]
            one[key] = str(value)
        found.append(one)
finally:
    amdsmi.amdsmi_shut_down()
print(json.dumps(found))
"""


def amdsmi_gpus(source: Source) -> list[SmiGpu] | None:
    """Every GPU that amdsmi lists, or None where it is not installed or does not work."""

    def live() -> Any:
        if not there(source, AMDSMI_FOLDER) and importlib.util.find_spec("amdsmi") is None:
            return None
        return ask_child(_ASK, AMDSMI_FOLDER)

    try:
        return parse_smi(source.probe("amdsmi", (), live))
    except (OSError, subprocess.SubprocessError):
        return None


def parse_smi(found: Any) -> list[SmiGpu] | None:
    """The child's answer; None for anything that is no list, and entries of another shape are passed over."""
    if not isinstance(found, list):
        return None
    return [
        SmiGpu(str(one.get("bdf", "")).lower(), str(one.get("name", "")), str(one.get("mode", "")).upper())
        for one in found
        if isinstance(one, dict)
    ]


def guests(found: list[SmiGpu] | None) -> list[SmiGpu]:
    """Those that are virtual functions: HOST, PASSTHROUGH and BAREMETAL are not."""
    return [g for g in found or [] if g.mode == "GUEST"]
