"""nobounce topology: GPUs, disks and network cards in their places, as a tree, as JSON or as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from nobounce import outfile
from nobounce.cli.options import Json
from nobounce.cli.output import DONE, complain, document, emit_json, run, say, table
from nobounce.cli.streams import can_show
from nobounce.config import settings
from nobounce.errors import printable
from nobounce.facts.source import LiveSource

if TYPE_CHECKING:
    from nobounce.checks.topology import Branch, Topology

DRAWN = ("├── ", "└── ", "│   ", "    ")
TYPED = ("+-- ", "`-- ", "|   ", "    ")
"""How a branch, the last one, what goes on beside and what does not are shown; the
latter in every encoding."""
Svg = Annotated[str | None, typer.Option("--svg", metavar="FILE", help="Write a picture, too.")]


def command(as_json: Json = False, svg: Svg = None) -> None:
    """Show where GPUs, NVMe disks and network cards sit, and how far each disk is from each GPU."""

    def action() -> int:
        from nobounce.checks.machine import Machine
        from nobounce.checks.topology import topology_data, topology_of

        found = topology_of(Machine(LiveSource(), settings()))
        if svg is not None:
            from nobounce.checks.svg import draw

            outfile.write(svg, draw(found).encode("utf-8", "backslashreplace"))
            complain(f"nobounce topology: wrote {printable(svg)}")
        if as_json:
            emit_json(document("topology", **topology_data(found)))
        else:
            say(topology_text(found))
        return DONE

    raise typer.Exit(run("topology", as_json, action))


def _tree(branches: Sequence[Branch], lead: str, guides: Sequence[str]) -> list[str]:
    """The lines of the branches, each behind `lead` and its guide."""
    more, last, down, blank = guides
    lines = []
    for i, branch in enumerate(branches):
        said = branch.title
        if branch.device is not None and branch.device.bdf:
            said += f"  {branch.device.bdf}"
        if branch.details:
            said += f"  {branch.details}"
        end = i == len(branches) - 1
        lines.append(f"{lead}{last if end else more}{printable(said)}")
        lines += _tree(branch.below, lead + (blank if end else down), guides)
    return lines


def topology_text(found: Topology) -> str:
    """The tree, the distances and the links between GPUs."""
    from nobounce.checks.topology import as_tree
    from nobounce.facts.pci import DISTANCE_TEXT

    drawn = can_show("".join(DRAWN))
    parts = ["\n".join(["this machine", *_tree(as_tree(found), "", DRAWN if drawn else TYPED)])]
    if found.ways:
        rows = [
            [
                printable(w.storage),
                w.gpu,
                DISTANCE_TEXT[w.distance],
                {True: "same", False: "other", None: "?"}[w.same_numa_node],
            ]
            for w in found.ways
        ]
        parts.append(table(["STORAGE", "GPU", "DISTANCE", "NUMA NODE"], rows))
    if found.links:
        rows = [
            [x.one, x.other, x.kind, f"{x.max_bandwidth / 1000:g} GB/s" if x.max_bandwidth else "?"]
            for x in found.links
        ]
        parts.append(table(["GPU", "GPU", "LINK", "BANDWIDTH"], rows))
    if not found.devices:
        parts.append("no GPU, NVMe disk or network card found")
    return "\n\n".join(parts)
