"""Findings and verdicts: what was looked at, where it was read, and what follows. Plain, frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from nobounce.facts.types import Known

Layer = Literal[
    "settings",
    "file",
    "file system",
    "block",
    "nvme",
    "pci",
    "iommu",
    "kernel",
    "driver",
    "runtime",
    "device",
    "access",
]
LAYERS: tuple[Layer, ...] = get_args(Layer)
"""From what the user sets down to what the process may open: the order in which findings are shown."""
VerdictName = Literal["fastpath", "fallback", "impossible", "unknown"]
VERDICTS: tuple[VerdictName, ...] = ("fastpath", "fallback", "unknown", "impossible")
"""From best to worst; of several files and devices the worst one gives the exit code."""

EXIT_CODES: dict[VerdictName, int] = {"fastpath": 0, "fallback": 1, "unknown": 3, "impossible": 4}


@dataclass(frozen=True, slots=True)
class Finding:
    """One layer's answer to "can the bytes go direct?": yes, no or unknown, and the file that told.

    `code` is the refusal code that a "no" leads to; `decides` is False for what is worth knowing but stops
    nothing (a downtrained link); `needs_root` says that root would know.
    """

    layer: Layer
    answer: Known
    sentence: str
    read_from: str
    code: str = ""
    decides: bool = True
    needs_root: bool = False


@dataclass(frozen=True, slots=True)
class Cure:
    """The cheapest change that helps, as one sentence, and the command to type ("" where there is none)."""

    sentence: str
    command: str = ""

    def __str__(self) -> str:
        return f"{self.sentence}: {self.command}" if self.command else self.sentence


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a read of one file into one device's memory.

    `decided_by` are the findings that made the verdict, `findings` all of them in the order of the
    layers. `direct_to` says what fastpath means here: the device's own memory ("device") or host memory,
    which is no P2P ("host").
    """

    path: str
    device: str
    verdict: VerdictName
    findings: tuple[Finding, ...] = ()
    decided_by: tuple[Finding, ...] = ()
    cure: Cure | None = None
    direct_to: Literal["device", "host"] = "device"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]


@dataclass(frozen=True, slots=True)
class Component:
    """One of hipFile's four lines (G-2): a name and whether it is there; `note` says why
    not, or why it is not known."""

    name: str
    answer: Known
    read_from: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Volume:
    """One row of the table of volumes (G-8), with the verdict for a file there on each device."""

    mount_point: str
    fstype: str
    device: str
    backing: str
    o_direct: Known
    hipfile: Known
    read_from: str
    verdicts: dict[str, VerdictName] = field(default_factory=dict)
    options: tuple[str, ...] = ()


def by_layer(findings: list[Finding]) -> tuple[Finding, ...]:
    """In the order of the layers, equal ones once."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda f: LAYERS.index(f.layer)))


def worst(verdicts: list[Verdict]) -> int:
    """The exit code for several verdicts: that of the worst."""
    return max(verdicts, key=lambda v: VERDICTS.index(v.verdict)).exit_code if verdicts else 0
