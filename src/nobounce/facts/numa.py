"""NUMA nodes: their CPUs, memory and distances, from /sys/devices/system/node."""

from __future__ import annotations

import re

from nobounce.facts.source import Source
from nobounce.facts.sysfs import names, text, whole
from nobounce.records import record

NODES = "/sys/devices/system/node"


@record
class NumaNode:
    """One node; `distances` are to every node in order, 10 being its own, and `nbytes` is its memory."""

    number: int
    cpus: str
    nbytes: int | None
    distances: tuple[int, ...]


def numa_nodes(source: Source) -> list[NumaNode]:
    """Every node, in order."""
    found = []
    for name in names(source, NODES):
        match = re.fullmatch(r"node([0-9]{1,9})", name)
        if not match:
            continue
        where = f"{NODES}/{name}"
        words = (text(source, f"{where}/distance") or "").split()
        distances = tuple(n for n in map(whole, words) if n is not None)
        memory = re.search(r"MemTotal:\s+([0-9]{1,15}) kB", text(source, f"{where}/meminfo") or "")
        nbytes = int(memory[1]) * 1024 if memory else None
        found.append(NumaNode(int(match[1]), text(source, f"{where}/cpulist") or "", nbytes, distances))
    return sorted(found, key=lambda n: n.number)
