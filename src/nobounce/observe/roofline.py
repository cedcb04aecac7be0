"""Which limit holds a transfer rate back: the disk, the host's memory or the link, and what
the next one would allow.

A direct transfer needs the disk and the link. One through fallback also writes and reads host
memory once more per byte, so that memory carries it at half its copying rate; what comes from the
page cache needs no disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

GIB = 1 << 30
NEAR = 0.7
"""From this share of a limit on, the limit is what holds a rate back."""

NEEDS: dict[str, dict[str, float]] = {
    "fastpath read": {"disk read": 1, "link to device": 1},
    "fastpath write": {"disk write": 1, "link from device": 1},
    "fallback read": {"disk read": 1, "host memory": 2, "link to device": 1},
    "fallback write": {"disk write": 1, "host memory": 2, "link from device": 1},
    "cached read": {"host memory": 1, "link to device": 1},
}
"""How often each byte crosses each part, by the way it takes."""


@dataclass(frozen=True, slots=True)
class Roof:
    """One way's measured rate under its limits (bytes per second each), tightest first,
    and a sentence about it."""

    way: str
    measured: float
    limits: tuple[tuple[str, float], ...]
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def roofs(measured: Mapping[str, float], limits: Mapping[str, float]) -> list[Roof]:
    """A Roof for each way with a rate above 0; limits that are not known (or 0) are left out."""
    found = []
    for way, rate in measured.items():
        if rate <= 0:
            continue
        known = [
            (name, limits[name] / times) for name, times in NEEDS[way].items() if limits.get(name, 0) > 0
        ]
        known.sort(key=lambda item: item[1])
        disks = [n for n in NEEDS[way] if n.startswith("disk") and limits.get(n, 0) <= 0]
        found.append(
            Roof(
                way,
                rate,
                tuple(known),
                _sentence(rate, known, bool(disks)) + (_unknown(disks[0]) if disks else ""),
            )
        )
    return found


def _unknown(name: str) -> str:
    how = (
        "nobounce report --limits-dir FOLDER measures it, in a file made in FOLDER"
        if name == "disk write"
        else "the traced file is gone, too small, or refuses O_DIRECT: nobounce bench FOLDER measures it, "
        "for --limits"
    )
    return f" ({name}: not measured; {how})"


def speed(rate: float) -> str:
    """Bytes per second for a person."""
    return f"{rate / GIB:.2f} GiB/s" if rate >= GIB / 10 else f"{rate / (1 << 20):.2f} MiB/s"


def _sentence(rate: float, known: list[tuple[str, float]], open_question: bool) -> str:
    if not known:
        return f"{speed(rate)}: none of the limits that it has on this machine is known"
    name, limit = known[0]
    share = rate / limit
    if share < NEAR and open_question:
        return (
            f"{speed(rate)} is {share:.0%} of what the {name} allows ({speed(limit)}), which does not hold "
            "it back"
        )
    if share < NEAR:
        return (
            f"{speed(rate)} is {share:.0%} of what the {name} allows ({speed(limit)}): none of the limits "
            "holds it "
            "back, but how it is used (small or few transfers at once, waiting, computing)"
        )
    text = f"the {name} holds it back: {speed(rate)} of {speed(limit)} ({share:.0%})"
    if len(known) > 1:
        text += f"; without it the {known[1][0]} would allow {speed(known[1][1])}"
    return text
