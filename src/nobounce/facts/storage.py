"""NVMe controllers and their namespaces, from /sys/class/nvme."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nobounce.facts.block import Controller, controller
from nobounce.facts.source import Source
from nobounce.facts.sysfs import names, number, real, text, whole


@dataclass(frozen=True, slots=True)
class Nvme:
    """One controller: `nbytes` is the size of its namespaces together."""

    controller: Controller
    model: str
    firmware: str
    state: str
    numa_node: int | None
    namespaces: tuple[str, ...]
    nbytes: int


def nvmes(source: Source) -> list[Nvme]:
    """Every NVMe controller, local or remote."""
    found = []
    for name in sorted(names(source, "/sys/class/nvme"), key=_in_order):
        path = real(source, f"/sys/class/nvme/{name}")
        if path is None:
            continue
        spaces = [n for n in names(source, path) if re.fullmatch(r"nvme\d+(c\d+)?n\d+", n)]
        sectors = [number(source, f"{path}/{n}/size") or 0 for n in spaces]
        node = number(source, f"{path}/numa_node")
        found.append(
            Nvme(
                controller(source, path),
                text(source, f"{path}/model") or "",
                text(source, f"{path}/firmware_rev") or "",
                text(source, f"{path}/state") or "",
                node if node is not None and node >= 0 else None,
                tuple(spaces),
                sum(sectors) * 512,
            )
        )
    return found


def _in_order(name: str) -> tuple[int, str]:
    return whole("".join(c for c in name if c.isdigit())) or 0, name
