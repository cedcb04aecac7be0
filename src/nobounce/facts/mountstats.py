"""/proc/self/mountstats: what the NFS client counts for each mount (net/sunrpc/stats.c, fs/nfs/super.c)."""

from __future__ import annotations

import re

from nobounce.facts.mounts import decode

NFS = frozenset({"nfs", "nfs4"})
_DEVICE = r"(?m)^device \S+ mounted on (\S+) with fstype (\S+)"
_BYTES = r"(?m)^\s+bytes:\s+(\d+) (\d+) (\d+) (\d+)"


def direct_bytes(text: str, mount_point: str) -> tuple[int, int] | None:
    """(read, written) bytes that all processes have moved by O_DIRECT on an NFS mount; None
    where the text does not say."""
    found = None
    mounts = list(re.finditer(_DEVICE, text))
    for n, mount in enumerate(mounts):
        if decode(mount[1]) == mount_point and mount[2] in NFS:  # the topmost of several is the last
            end = mounts[n + 1].start() if n + 1 < len(mounts) else len(text)
            found = re.compile(_BYTES).search(text, mount.end(), end)
    return (int(found[3]), int(found[4])) if found else None


def nfs_direct_bytes(mount_point: str) -> tuple[int, int] | None:
    """The same of this machine, now."""
    try:
        with open("/proc/self/mountstats", encoding="utf-8", errors="surrogateescape") as f:
            return direct_bytes(f.read(), mount_point)
    except OSError:
        return None
