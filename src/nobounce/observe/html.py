"""The report page: one file that needs nothing else, not even a network. Observable Plot draws;
this only fills the page in."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from nobounce.errors import counted, printable
from nobounce.observe.batches import LANES

GIB = 1 << 30


def render(data: Mapping[str, Any], title: str) -> str:
    """The page for what `analyse` found. Names are escaped: the data is JSON inside the page, and
    is only ever set as text."""
    page = files("nobounce.observe").joinpath("page")

    def part(name: str) -> str:
        return page.joinpath(name).read_text(encoding="utf-8")

    # "<" ends a script element wherever it stands; U+2028 and U+2029 are line ends to old parsers.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    values = {
        "TITLE": html.escape(printable(title)),
        "STYLE": part("page.css"),
        "SUMMARY": _summary(data),
        "DATA": text.replace("\u2029", "\\u2029"),
        "D3": part("d3.min.js"),
        "PLOT": part("plot.umd.min.js"),
        "SCRIPT": part("page.js"),
        "LICENSES": html.escape(part("LICENSES.txt")),
    }
    out = []
    for piece in part("page.html").split("@@"):
        out.append(values.get(piece, piece))
    return "".join(out)


def _summary(data: Mapping[str, Any]) -> str:
    """The figures that matter, readable without any script."""
    t = data["totals"]
    rows = [
        ("fastpath_bytes", "Fastpath", f"{t['fastpath_bytes']:,} bytes"),
        ("fallback_bytes", "Fallback", f"{t['fallback_bytes']:,} bytes"),
        ("cached_bytes", "of it from the page cache", f"{t['cached_bytes']:,} bytes"),
        ("host_traffic_bytes", "Host traffic of relaying", f"{t['host_traffic_bytes']:,} bytes"),
        (
            "transfers",
            "Transfers",
            f"{t['transfers']:,}"
            + (f" and {t['batch_requests']:,} batch requests" if t["batch_requests"] else ""),
        ),
        ("errors", "Errors, retries", f"{t['errors']:,}, {t['retries']:,}"),
        *([("refused", "Refused requests, by reason", _refused(t["refused"]))] if t["refused"] else []),
        ("seconds", "Time", f"{data['seconds']:.3f} s, {counted(len(data['processes']), 'process')}"),
    ]
    cells = "".join(
        f'<div class="figure"><dt>{html.escape(label)}</dt><dd '
        f'id="figure-{key}">{html.escape(text)}</dd></div>'
        for key, label, text in rows
    )
    notes = "".join(f"<li>{html.escape(n)}</li>" for n in _notes(data))
    roofs = "".join(
        f"<li><b>{html.escape(r['way'])}</b>: {html.escape(r['sentence'])}</li>" for r in data["roofs"]
    )
    found = f'<dl class="figures">{cells}</dl>'
    if roofs:
        found += f'<ul id="roof-sentences">{roofs}</ul>'
    return found + (f'<ul class="notes" id="notes">{notes}</ul>' if notes else "")


def _refused(codes: Mapping[str, int]) -> str:
    return ", ".join(f"{printable(code)} {n:,}" for code, n in codes.items())


def _notes(data: Mapping[str, Any]) -> list[str]:
    left = data["left_out"]
    notes = []
    if left["events_dropped"]:
        notes.append(
            f"The trace dropped {left['events_dropped']:,} events over its limit: sums here are of the rest."
        )
    if left["files_cut"]:
        notes.append(
            f"{counted(left['files_cut'], 'trace file')} without an end: the process was killed, or left "
            "through os._exit."
            + (" The limit of events was reached before: more is missing." if left["limits_reached"] else "")
        )
    if left["slices_not_shown"]:
        notes.append(
            f"The timeline shows the longest slices; {left['slices_not_shown']:,} shorter ones are only in "
            "the sums."
        )
    if left["batches_without_slice"]:
        notes.append(
            f"{left['batches_without_slice']:,} groups of batches have no slice of their own, as more than "
            f"{LANES} ran at once "
            "or none of their requests did: they are only in the sums."
        )
    told = data["counters"]
    if told is not None and not left["events_dropped"]:
        same = all(told[k] == data["totals"][k] for k in ("fastpath_bytes", "fallback_bytes"))
        notes.append(
            "The counters of the processes agree with the trace."
            if same
            else f"The counters say fastpath {told['fastpath_bytes']:,} and fallback "
            f"{told['fallback_bytes']:,} bytes, which is not what the trace holds."
        )
    return notes
