"""Whether stream-ordered memory is used in order (HIP rule 113), which a GPU leaves to chance.

Each allocation, and each stream's latest use of one, is a ticket. A ticket travels with order: along a
stream, through events, and by the rules of the null stream. An op that uses the memory must have the
allocation's ticket; one that frees it must have those of all uses. Once the host has waited for a ticket it
needs no watching any more.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

from nobounce.errors import DeviceError, RuntimeStatus
from nobounce.runtimes.host.ops import NO_TICKETS, HostStream, Op

_numbers = itertools.count(1)


class Ordered:
    """The tickets of one allocation."""

    __slots__ = ("ticket", "uses")

    def __init__(self) -> None:
        self.ticket = next(_numbers)
        self.uses: dict[HostStream, int] = {}


class Tickets:
    """The tickets of one runtime. The executor's lock is held around each call but `knows`."""

    def __init__(self) -> None:
        self.live: set[int] = set()

    def admit(
        self,
        stream: HostStream,
        after: Iterable[Op],
        implicit: bool,
        *,
        call: str,
        allocates: Ordered | None,
        touches: Collection[Ordered],
        frees: Ordered | None,
    ) -> None:
        """Take an op's place in `stream`. Raises DeviceError, and changes nothing, when the
        order does not allow it."""
        seen = self._seen(stream, after, implicit)
        for memory in touches if frees is None else (*touches, frees):
            if memory.ticket in self.live and memory.ticket not in seen:
                raise use_before_alloc(call)
        if frees is not None and any(t in self.live and t not in seen for t in frees.uses.values()):
            raise _out_of_order(
                call, "FreeBeforeUse", "memory that another stream uses is freed with no event between"
            )
        fresh = [] if allocates is None else [allocates.ticket]
        for memory in touches:
            self.live.discard(memory.uses.get(stream, 0))  # the stream's next op implies its last one
            memory.uses[stream] = next(_numbers)
            fresh.append(memory.uses[stream])
        if frees is not None:
            self.live -= {frees.ticket, *frees.uses.values()}
        self.live.update(fresh)
        self._spread(stream, seen.union(fresh))

    def _seen(self, stream: HostStream, after: Iterable[Op], implicit: bool) -> frozenset[int]:
        seen = stream.tickets
        for op in after:
            seen |= op.tickets
        if implicit and stream is stream.device.null:
            seen |= stream.device.blocking_tickets
        elif implicit and not stream.nonblocking:
            seen |= stream.device.null.tickets
        return seen

    def _spread(self, stream: HostStream, seen: frozenset[int]) -> None:
        stream.tickets = seen = seen & self.live if seen else NO_TICKETS
        if seen:
            device = stream.device
            device.tickets = (device.tickets & self.live) | seen
            if not stream.nonblocking:
                device.blocking_tickets = (device.blocking_tickets & self.live) | seen

    def knows(self, memory: Ordered) -> bool:
        """Whether the host has waited for the allocation."""
        return memory.ticket not in self.live


def use_before_alloc(call: str) -> DeviceError:
    return _out_of_order(
        call, "UseBeforeAlloc", "memory allocated in another stream's order is used with no event between"
    )


def _out_of_order(call: str, name: str, detail: str) -> DeviceError:
    return DeviceError(call, RuntimeStatus.InvalidValue, name=name, detail=f"{detail} (HIP rule 113)")
