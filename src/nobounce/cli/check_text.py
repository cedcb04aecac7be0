"""A verdict and a survey as people read them."""

from __future__ import annotations

from typing import Any

from nobounce.checks.findings import Verdict
from nobounce.checks.report import Library, Survey
from nobounce.cli.output import table
from nobounce.errors import printable


def verdict_text(verdict: Verdict, tried: dict[str, Any] | None = None) -> str:
    """A verdict as people read it: each layer's answer, the file that told, and the cure."""
    head = f"{printable(verdict.path)} on {verdict.device}: {verdict.verdict}"
    if verdict.verdict == "fastpath" and verdict.direct_to == "host":
        head += " (direct to host memory: no page cache and no relay, but not P2P)"
    lines = [head]
    for f in verdict.findings:
        mark = f.answer if f.decides else {"yes": " - ", "no": " ! ", "unknown": " ? "}[f.answer]
        decided = " <- decides" if f in verdict.decided_by else ""
        code = f" [{f.code}]" if f.answer == "no" and f.code else ""
        lines.append(f"  {mark:<7}  {f.layer:<11}  {printable(f.sentence)}{code}{decided}")
        lines.append(f"  {'':<7}  {'':<11}    read from {printable(f.read_from)}")
    if tried is not None:
        lines.append(f"  probe: {printable(str(tried['says']))}")
    if verdict.cure is not None:
        lines.append(f"  cure: {printable(verdict.cure.sentence)}" + (":" if verdict.cure.command else ""))
        if verdict.cure.command:
            lines.append(f"    {printable(verdict.cure.command)}")
    return "\n".join(lines)


_SHOWN = {"yes": "yes", "no": "no", "unknown": "unverified"}


def survey_text(found: Survey) -> str:
    """hipFile's report (G-2, G-8), with a column and a row for each device."""
    lines = []
    if found.volumes:
        names = [d.name for d in found.devices]
        rows = [
            [
                printable(v.mount_point),
                v.fstype,
                printable(v.device),
                printable(v.backing),
                _SHOWN[v.o_direct],
                _SHOWN[v.hipfile],
                *(v.verdicts.get(n, "") for n in names),
            ]
            for v in found.volumes
        ]
        headings = [
            "MOUNTPOINT",
            "FSTYPE",
            "DEVICE",
            "BACKING",
            "O_DIRECT",
            "HIPFILE",
            *(n.upper() for n in names),
        ]
        lines += ["Mounted volumes:", table(headings, rows)]
    else:
        lines.append("No block-backed volumes found.")
    width = max(len(c.name) for c in found.components)
    words = {"yes": "True", "no": "False", "unknown": "unknown"}
    lines += ["", "AIS support in:"]
    lines += [f"  {c.name:<{width}} : {words[c.answer]}" for c in found.components]
    lines += ["", "Devices:"]
    devices = [
        [d.name, printable(d.model) or "-", d.bdf or "-", d.direct, printable(d.why)] for d in found.devices
    ]
    lines.append(table(["DEVICE", "MODEL", "PCI", "DIRECT", "WHY"], devices))
    return "\n".join(lines)


def libraries_text(found: list[Library]) -> str:
    """The libraries found, one a line."""
    lines = ["HIP and CUDA libraries:"]
    lines += [f"  {printable(x.path)}" + (f" ({printable(x.note)})" if x.note else "") for x in found]
    return "\n".join(lines if found else [*lines, "  none found"])
