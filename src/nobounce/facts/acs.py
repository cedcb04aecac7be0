"""PCIe Access Control Services (ACS): whether a function on the way between two peers sends their
requests up to the root.

The ACS capability is in extended configuration space, which root alone may read. Its control register has a
bit for each service; the kernel's P2PDMA (pci_bridge_has_acs_redir in drivers/pci/p2pdma.c) looks at three of
them, in every function between the peers, the peers and the bridge above both included:

* P2P Request Redirect and P2P Completion Redirect send requests, or the answers to
  them, up to the root complex;
* P2P Egress Control blocks requests between ports that a vector names, or sends them up.

With any of them set a peer's bus address is not used: the request goes through the host bridge, if that is
trusted, and through its IOMMU. The other bits stop no peer: Source Validation drops requests under a false
name, Translation Blocking those that a device has translated itself (ATS), which an NVMe controller does not;
Upstream Forwarding passes on what another bridge below has sent up; Direct Translated P2P lets translated
requests past the redirection, and so helps no other.
"""

from __future__ import annotations

from collections.abc import Iterator

from nobounce.facts.pci import DEVICES, PciDevice
from nobounce.facts.source import Source

SOURCE_VALIDATION, TRANSLATION_BLOCKING, REQUEST_REDIRECT, COMPLETION_REDIRECT = 0x01, 0x02, 0x04, 0x08
UPSTREAM_FORWARDING, EGRESS_CONTROL, DIRECT_TRANSLATED = 0x10, 0x20, 0x40
REDIRECTING = REQUEST_REDIRECT | COMPLETION_REDIRECT | EGRESS_CONTROL

NAMES: dict[int, str] = {
    SOURCE_VALIDATION: "Source Validation",
    TRANSLATION_BLOCKING: "Translation Blocking",
    REQUEST_REDIRECT: "P2P Request Redirect",
    COMPLETION_REDIRECT: "P2P Completion Redirect",
    UPSTREAM_FORWARDING: "Upstream Forwarding",
    EGRESS_CONTROL: "P2P Egress Control",
    DIRECT_TRANSLATED: "Direct Translated P2P",
}

_ACS, _PCI_EXPRESS = 0x000D, 0x10
_LEGACY, _WHOLE = 256, 4096
_ALL_ONES = 0xFFFFFFFF
"""What a function that does not answer reads as."""


def acs_control(source: Source, bdf: str) -> int | None:
    """The ACS control register of a function: 0 for one without the capability, None
    where it cannot be read."""
    try:
        space = source.read_bytes(f"{DEVICES}/{bdf}/config", _WHOLE)
    except OSError:
        return None
    if len(space) < _LEGACY or _word(space, 0) == _ALL_ONES:
        return None
    if len(space) == _LEGACY:  # a PCI function has no more; of a PCIe function no more can be reached
        return None if _PCI_EXPRESS in _capabilities(space) else 0
    if _word(space, _LEGACY) == _ALL_ONES:
        return None
    found = (at for identifier, at in extended_capabilities(space) if identifier == _ACS)
    at = next(found, None)
    return 0 if at is None else _word(space, at + 4) >> 16


def extended_capabilities(space: bytes) -> Iterator[tuple[int, int]]:
    """(identifier, where it begins) of the capabilities in extended configuration space
    that have 8 bytes and more."""
    at, left = _LEGACY, (_WHOLE - _LEGACY) // 8
    while at >= _LEGACY and at + 8 <= len(space) and left:
        header = _word(space, at)
        yield header & 0xFFFF, at
        at, left = header >> 20 & 0xFFC, left - 1


def names_of(control: int) -> str:
    """The services of a control register that stand between peers, for a person."""
    return ", ".join(name for bit, name in NAMES.items() if bit & control & REDIRECTING)


def between(one: PciDevice, other: PciDevice) -> list[str]:
    """The functions whose ACS the kernel looks at: the peers, the bridges between them, and
    the nearest one above both."""
    above = [b for b in one.parents[1:] if b in other.parents]
    own = [b for d in (one, other) for b in (d.bdf, *reversed(d.parents[1:])) if b not in above]
    return own + above[-1:]


def _word(space: bytes, at: int) -> int:
    return int.from_bytes(space[at : at + 4], "little")


def _capabilities(space: bytes) -> Iterator[int]:
    """The identifiers in the list of capabilities of the first 256 bytes."""
    at, left = space[0x34] & 0xFC, 48
    if not space[0x06] & 0x10:  # the status register says whether there is a list
        return
    while at >= 0x40 and left:
        yield space[at]
        at, left = space[at + 1] & 0xFC, left - 1
