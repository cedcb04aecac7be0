"""Network cards: the interfaces of /sys/class/net that stand on a PCI device, and RDMA ports."""

from __future__ import annotations

from dataclasses import dataclass

from nobounce.facts.source import Source
from nobounce.facts.sysfs import bdfs_in, names, number, real, text


@dataclass(frozen=True, slots=True)
class Nic:
    """One interface; `mbits` is its speed in Mbit/s, `rdma` the names of the RDMA devices
    of the same PCI function."""

    name: str
    bdf: str
    mbits: int | None
    state: str
    rdma: tuple[str, ...]


def nics(source: Source) -> list[Nic]:
    """Every interface with a PCI device behind it."""
    rdma: dict[str, list[str]] = {}
    for name in names(source, "/sys/class/infiniband"):
        path = real(source, f"/sys/class/infiniband/{name}/device")
        if path is not None and bdfs_in(path):
            rdma.setdefault(bdfs_in(path)[-1], []).append(name)
    found = []
    for name in names(source, "/sys/class/net"):
        path = real(source, f"/sys/class/net/{name}/device")
        on_bus = bdfs_in(path) if path is not None else ()
        if not on_bus:
            continue
        speed = number(source, f"/sys/class/net/{name}/speed")
        found.append(
            Nic(
                name,
                on_bus[-1],
                speed if speed is not None and speed > 0 else None,
                text(source, f"/sys/class/net/{name}/operstate") or "",
                tuple(rdma.get(on_bus[-1], ())),
            )
        )
    return found
