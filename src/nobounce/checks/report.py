"""What `nobounce check` finds, as data: verdicts for paths, or the survey of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nobounce.checks.components import components
from nobounce.checks.conditions import DeviceView
from nobounce.checks.cures import root_command
from nobounce.checks.direct import every_device, view_of
from nobounce.checks.files import ModelAt, looks
from nobounce.checks.findings import Component, Finding, Verdict, Volume
from nobounce.checks.machine import Machine
from nobounce.checks.verdict import verdict_for
from nobounce.checks.volumes import Volumes
from nobounce.facts.libraries import CUDA, CUDART, CUFILE, LIBHIPFILE
from nobounce.facts.virtual import guests


@dataclass(frozen=True, slots=True)
class Library:
    """A HIP or CUDA library found; `note` says what it offers."""

    path: str
    note: str


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One device in the survey."""

    name: str
    model: str
    bdf: str
    direct: str
    why: str


@dataclass(frozen=True, slots=True)
class Survey:
    """A machine without a file in question: hipFile's four lines, its volumes and
    devices, and what to warn of."""

    system: tuple[str, str, str, str, str]
    components: tuple[Component, ...]
    volumes: tuple[Volume, ...]
    devices: tuple[DeviceRow, ...]
    warnings: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 if all four are true, 3 if none is false but some are not known, else 1."""
        answers = [c.answer for c in self.components]
        return 0 if set(answers) == {"yes"} else 1 if "no" in answers else 3


def check_paths(
    machine: Machine, paths: list[str], devices: list[str], model: ModelAt | None = None
) -> list[Verdict]:
    """A verdict for every file and device; a path stands for the files of the model there, a
    folder else for its files."""
    views = [view_of(machine, name) for name in devices or every_device(machine)]
    volumes = Volumes(machine)
    found = []
    for seen in (one for path in paths for one in looks(machine, path, model)):
        found += [verdict_for(machine, seen, view, lambda view=view: volumes.better(view)) for view in views]  # type: ignore[misc]
    return found


def survey(machine: Machine, devices: list[str]) -> Survey:
    """The machine as a whole."""
    views = [view_of(machine, name) for name in devices or [*(g.name for g in machine.gpus), "cpu"]]
    volumes = Volumes(machine)
    four = components(machine, volumes.rows)
    warnings = [f"{c.name}: {c.note}" for c in four if c.note and c.answer != "yes"]
    virtual = guests(machine.smi) if machine.kfd.gpus else []
    if virtual:
        listed = ", ".join(g.label for g in virtual)
        warnings.append(f"SR-IOV virtual function(s), on which direct I/O is not available: {listed}")
    rows = tuple(_row(v) for v in views)
    open_questions = any(c.answer == "unknown" for c in four) or any(
        v.o_direct == "unknown" for v in volumes.rows
    )
    if open_questions and machine.source.effective_uid() != 0:
        warnings.append(f"what is not known or unverified here, root may know: {root_command()}")
    return Survey(machine.source.uname(), tuple(four), tuple(volumes.judged(views)), rows, tuple(warnings))


def _row(view: DeviceView) -> DeviceRow:
    model = view.gpu.model if view.gpu is not None else ""
    bdf = view.gpu.bdf if view.gpu is not None else ""
    if view.absent:
        return DeviceRow(view.name, model, bdf, "no", view.absent)
    if view.gpu is None:
        return DeviceRow(view.name, model, bdf, "yes", "direct to host memory, which is no P2P")
    answers = [f for f in view.findings if f.decides and f.answer != "yes"]
    no = [f for f in answers if f.answer == "no"]
    first = (no or answers)[:1]
    return DeviceRow(
        view.name,
        model,
        bdf,
        "no" if no else "unknown" if answers else "yes",
        first[0].sentence if first else "",
    )


def libraries(machine: Machine) -> list[Library]:
    """The HIP and CUDA libraries on this machine."""
    found = [
        Library(
            x.path,
            "AIS supported" if x.ais == "yes" else f"AIS NOT supported: {x.because}" if x.because else "",
        )
        for x in machine.hip_libraries
    ]
    for stem in (LIBHIPFILE, CUDA, CUDART, CUFILE):
        found += [Library(path, "") for path in machine.libraries(stem)]
    return found


def finding_data(finding: Finding) -> dict[str, Any]:
    """A finding as --json shows it."""
    return {
        "layer": finding.layer,
        "answer": finding.answer,
        "sentence": finding.sentence,
        "read_from": finding.read_from,
        "code": finding.code,
        "decides": finding.decides,
        "needs_root": finding.needs_root,
    }


def verdict_data(verdict: Verdict) -> dict[str, Any]:
    """A verdict as --json shows it."""
    cure = verdict.cure
    return {
        "path": verdict.path,
        "device": verdict.device,
        "verdict": verdict.verdict,
        "direct_to": verdict.direct_to,
        "decided_by": [finding_data(f) for f in verdict.decided_by],
        "findings": [finding_data(f) for f in verdict.findings],
        "cure": None if cure is None else {"sentence": cure.sentence, "command": cure.command},
    }


def survey_data(found: Survey) -> dict[str, Any]:
    """A survey as --json shows it."""
    return {
        "system": list(found.system),
        "components": [
            {"name": c.name, "answer": c.answer, "read_from": c.read_from, "note": c.note}
            for c in found.components
        ],
        "volumes": [
            {
                "mount_point": v.mount_point,
                "fstype": v.fstype,
                "device": v.device,
                "backing": v.backing,
                "o_direct": v.o_direct,
                "hipfile": v.hipfile,
                "read_from": v.read_from,
                "verdicts": v.verdicts,
            }
            for v in found.volumes
        ],
        "devices": [
            {"name": d.name, "model": d.model, "pci": d.bdf, "direct": d.direct, "why": d.why}
            for d in found.devices
        ],
        "warnings": list(found.warnings),
    }
