"""What a group of a batch has come to: sums over its requests, as a trace shows them on the group's slice."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from nobounce.errors import printable
from nobounce.observe.places import CACHED
from nobounce.records import field, record

if TYPE_CHECKING:
    from nobounce.io.batch.group import Group
    from nobounce.io.hooks import BatchEnds
    from nobounce.route.types import Refusal

LANES = 32
"""Groups under way at once that get a track of their own; of more than these only the sums are shown."""


def fallback_code(group: Group, index: int, split: bool) -> str:
    """The reason code of a request's bytes that went by fallback: its own, that of an edge,
    or of a failed direct try."""
    known = group.answer.reason_list
    if 0 <= index < len(known):
        return known[index].code
    return "unaligned-edge" if split else "direct-failed"


@record(frozen=False)
class GroupSums:
    """Requests by status, bytes by way and reason. `lane`: which track the group's
    slice is on, -1 for none."""

    begun: float
    thread: int
    lane: int = -1
    flow: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    fastpath: int = 0
    fallback: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)

    def ended(self, group: Group, ends: BatchEnds, status: str) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + len(ends.done)
        if status != "complete":
            return
        bounced = ends.done - ends.direct
        direct = int(ends.direct.sum())
        self.fastpath += direct
        self.fallback += int(bounced.sum())
        if direct:
            self.reasons["direct"] = self.reasons.get("direct", 0) + direct
        at = bounced.nonzero()[0]
        for index, split in sorted(set(zip(ends.reasons[at].tolist(), ends.split[at].tolist(), strict=True))):
            code = fallback_code(group, index, split)
            mine = int(bounced[(ends.reasons == index) & (ends.split == split)].sum())
            self.reasons[code] = self.reasons.get(code, 0) + mine

    def turned_away(self, refusals: tuple[Refusal, ...], count: int) -> None:
        for refusal in refusals:
            self.refused[refusal.code] = self.refused.get(refusal.code, 0) + count

    def args(self, group: Group) -> dict[str, Any]:
        """The slice's arguments, with a receipt that has the keys of a transfer's."""
        relayed = 0 if group.target.ring is None else self.fallback
        receipt = {
            "fastpath_bytes": self.fastpath,
            "fallback_bytes": self.fallback,
            "cached_bytes": sum(n for code, n in self.reasons.items() if code in CACHED),
            "host_traffic_bytes": 2 * relayed,
            "reasons": self.reasons,
            "retries": [],
        }
        ways = [w for w in ("fastpath", "fallback") if receipt[f"{w}_bytes"]]
        args: dict[str, Any] = {
            "filename": printable(group.target.filename),
            "device": group.target.device_name,
            "requests": sum(self.statuses.values()),
            "statuses": self.statuses,
            "nbytes": self.fastpath + self.fallback,
            "backend": "+".join(ways),
            "reason": max(self.reasons.items(), key=lambda item: item[1], default=("", 0))[0],
            "receipt": receipt,
        }
        if self.refused:
            args["refused"] = self.refused
        return args


class Lanes:
    """Tracks for groups that run at the same time: the lowest free one, so that
    slices on one never overlap."""

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self._lock = threading.Lock()

    def take(self) -> int:
        """A lane, or -1 where all are taken."""
        with self._lock:
            free = next((n for n in range(LANES) if n not in self._taken), -1)
            if free >= 0:
                self._taken.add(free)
            return free

    def give(self, lane: int) -> None:
        with self._lock:
            self._taken.discard(lane)
