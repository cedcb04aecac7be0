"""`check --probe`: a small real transfer of one file to one device, and what its receipt says."""

from __future__ import annotations

import dataclasses
from typing import Any

from nobounce.checks.findings import Finding, Verdict, by_layer
from nobounce.errors import NobounceError

NBYTES = 1 << 20
"""Large enough for the kernel's own counters to be asked (design: chunks of 1 MiB and more)."""


def transfer(path: str, device: str) -> dict[str, Any]:
    """Read up to 1 MiB of the file into the device's memory, auto-routed; never raises for
    what the machine refuses."""
    from nobounce.device import Device
    from nobounce.io.opening import open as open_file

    try:
        target = Device(device)
        with open_file(path) as file:
            size = min(NBYTES, -(-file.nbytes // 4096) * 4096)
            if size == 0:
                return {"says": "the file is empty: nothing to read", "backend": None, "receipt": None}
            with target.allocate(size) as buffer:
                receipt = file.read(buffer, cache="avoid")
    except NobounceError as e:
        return {"says": f"not possible: {e}", "backend": None, "receipt": None}
    data = receipt.to_dict()
    direct, relayed = data["fastpath_bytes"], data["fallback_bytes"]
    says = f"{direct} bytes went direct and {relayed} through fallback (evidence: {data['evidence']})"
    if data["reasons"]:
        says += ": " + ", ".join(f"{code} {n}" for code, n in data["reasons"].items())
    return {"says": says, "backend": "fallback" if relayed else "fastpath", "receipt": data}


def settle(verdict: Verdict, probe: dict[str, Any] | None) -> Verdict:
    """What was tried beats what was not known, and a contradiction is shown: the transfer's word counts."""
    backend = None if probe is None else probe["backend"]
    if backend is None or backend == verdict.verdict or probe is None:
        return verdict
    answer = "yes" if backend == "fastpath" else "no"
    known = (
        "was not known"
        if verdict.verdict == "unknown"
        else f"says {verdict.verdict}, the transfer says {backend}"
    )
    finding = Finding(
        "runtime",
        answer,  # type: ignore[arg-type]
        f"the real transfer settles what {known}" if verdict.verdict == "unknown" else f"the check {known}",
        "the receipt of the probe",
        "probe",
    )
    return dataclasses.replace(
        verdict,
        verdict=backend,
        findings=by_layer([*verdict.findings, finding]),
        decided_by=(finding,),
        cure=None if backend == "fastpath" else verdict.cure,
    )
