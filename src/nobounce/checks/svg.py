"""A topology as a picture: one SVG that stands alone, light or dark as its reader's
system is, all text escaped."""

from __future__ import annotations

from html import escape

from nobounce.checks.topology import Branch, Topology, as_tree

ROW, GAP, INDENT, MARGIN, WIDTH = 40, 8, 18, 24, 560
CHARACTER = 6.6
"""Mean width of a character at 12 px."""

STYLE = """
svg { font: 12px system-ui, sans-serif; background: var(--page); }
svg { --page: #ffffff; --ink: #1b1f24; --faint: #57606a; --card: #f3f5f7; --line: #c5ccd3;
      --gpu: #8250df; --nvme: #1a7f37; --nic: #0969da; --near: #c9efd2; --mid: #fdf0c4; --far: #fbd9d3; }
@media (prefers-color-scheme: dark) {
  svg { --page: #0d1117; --ink: #e6edf3; --faint: #9aa4af; --card: #171c23; --line: #3d444d;
        --gpu: #b392f0; --nvme: #56d364; --nic: #79b8ff; --near: #144620; --mid: #4d3c09; --far: #5c1d18; }
}
text { fill: var(--ink); } .faint { fill: var(--faint); } .head { font-size: 14px; font-weight: 600; }
.card { fill: var(--card); stroke: var(--line); } .wire { stroke: var(--line); fill: none; }
.gpu { fill: var(--gpu); } .nvme { fill: var(--nvme); } .nic { fill: var(--nic); }
.near { fill: var(--near); } .mid { fill: var(--mid); } .far { fill: var(--far); }
"""

_NEAR = {
    "same-device": "near",
    "same-switch": "near",
    "same-root-port": "near",
    "same-host-bridge": "mid",
    "other-host-bridge": "far",
    "unknown": "card",
}


class _Drawing:
    def __init__(self) -> None:
        self.parts: list[str] = []
        self.y = MARGIN
        self.width = WIDTH + 2 * MARGIN

    def text(self, x: float, y: float, said: str, style: str = "", room: float = 0) -> None:
        most = int(room / CHARACTER) if room else 0
        shown = said if not most or len(said) <= most else said[: max(1, most - 1)] + "…"
        title = f"<title>{clean(said)}</title>" if shown != said else ""
        kind = f' class="{style}"' if style else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}"{kind}>{clean(shown)}{title}</text>')

    def box(self, x: float, y: float, width: float, height: float, style: str) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="{style}"/>'
        )

    def branch(self, branch: Branch, depth: int, above: tuple[float, float] | None) -> None:
        x, y = MARGIN + depth * INDENT, self.y
        room = MARGIN + WIDTH - x
        if above is not None:
            self.parts.append(f'<path class="wire" d="M{above[0]:g} {above[1]:g}V{y + 14:g}H{x:g}"/>')
        if branch.device is not None:
            self.box(x, y, room, ROW, "card")
            self.box(x, y, 5, ROW, branch.device.kind)
            self.text(x + 14, y + 16, f"{branch.title}  {branch.device.bdf}", room=room - 20)
            self.text(x + 14, y + 32, branch.details, "faint", room - 20)
            self.y += ROW + GAP
            return
        style = "head" if depth == 0 else "faint"
        self.text(
            x + 4, y + 18, branch.title + (f"  {branch.details}" if branch.details else ""), style, room
        )
        self.y += 26
        for below in branch.below:
            self.branch(below, depth + 1, (x + 8, y + 24))

    def matrix(
        self, heading: str, rows: list[str], columns: list[str], cells: dict[tuple[str, str], tuple[str, str]]
    ) -> None:
        cell, left = 150, 110
        self.y += 12
        self.text(MARGIN, self.y + 14, heading, "head")
        self.y += 24
        for i, column in enumerate(columns):
            self.text(MARGIN + left + i * cell + 6, self.y + 16, column, room=cell - 8)
        for row in rows:
            self.y += 26
            self.text(MARGIN, self.y + 16, row, room=left - 6)
            for i, column in enumerate(columns):
                said, style = cells.get((row, column), ("", "card"))
                x = MARGIN + left + i * cell
                self.box(x, self.y, cell - 4, 23, style)
                self.text(x + 6, self.y + 16, said, room=cell - 12)
        self.y += 36
        self.width = max(self.width, MARGIN * 2 + left + cell * len(columns))


def clean(said: str) -> str:
    """Text for XML: escaped, and without characters that XML does not know."""
    known = "".join(c if c.isprintable() else "?" for c in said)
    return escape(known, quote=True)


def draw(found: Topology) -> str:
    """The picture."""
    drawing = _Drawing()
    for branch in as_tree(found):
        drawing.branch(branch, 0, None)
    gpus = [d.name for d in found.devices if d.kind == "gpu"]
    disks = [d.name for d in found.devices if d.kind == "nvme"]
    if found.ways:
        cells = {(w.storage, w.gpu): (w.distance.replace("-", " "), _NEAR[w.distance]) for w in found.ways}
        drawing.matrix("From each disk to each GPU", disks, gpus, cells)
    if found.links:
        shown = {}
        for link in found.links:
            said = link.kind + (f" {link.max_bandwidth / 1000:g} GB/s" if link.max_bandwidth else "")
            style = "near" if link.kind == "xGMI" else "mid"
            shown[(link.one, link.other)] = shown[(link.other, link.one)] = (said, style)
        drawing.matrix("Between GPUs", gpus, gpus, shown)
    if not found.devices:
        drawing.text(MARGIN, drawing.y + 18, "no GPU, NVMe disk or network card found", "faint")
        drawing.y += 30
    height = drawing.y + MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {drawing.width:g} {height:g}" '
        f'width="{drawing.width:g}" height="{height:g}" role="img" aria-labelledby="title">'
    )
    return "\n".join(
        [
            head,
            '<title id="title">Topology of this machine</title>',
            f"<style>{STYLE}</style>",
            *drawing.parts,
            "</svg>\n",
        ]
    )
