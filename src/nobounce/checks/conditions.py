"""Conditions of a direct path, and the DirectFacts they add up to: at best, and at worst
where something is not known."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nobounce.checks.findings import Finding
from nobounce.facts.gpus import Gpu
from nobounce.route.types import DirectFacts


@dataclass(frozen=True, slots=True)
class DeviceView:
    """One device as facts show it. `best` takes what is not known for granted, `worst` does not: where
    the judge answers the same to both, the verdict is known. `absent` says why the device cannot be used
    at all, "" where it can."""

    name: str
    best: DirectFacts
    worst: DirectFacts
    findings: tuple[Finding, ...] = ()
    gpu: Gpu | None = None
    absent: str = ""


def settle(base: DirectFacts, findings: list[Finding]) -> tuple[DirectFacts, DirectFacts]:
    """(at best, at worst): the first "no" takes the direct path away from both, an
    "unknown" from the second alone."""
    deciding = [f for f in findings if f.decides and f.code]
    no = next((f for f in deciding if f.answer == "no"), None)
    if no is not None:
        without = _without(base, no)
        return without, without
    doubt = next((f for f in deciding if f.answer == "unknown"), None)
    return base, base if doubt is None else _without(base, doubt)


def _without(base: DirectFacts, finding: Finding) -> DirectFacts:
    if finding.code == "virtual-function":  # the judge's own condition
        return replace(base, virtual_function="yes")
    return replace(base, available=False, because=finding.sentence, code=finding.code)
