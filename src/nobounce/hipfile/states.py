"""States of one operation of a batch, and the moves between them (hipFile E-5)."""

from __future__ import annotations

import enum

from nobounce.errors import InternalError
from nobounce.hipfile.types import Status


class OpState(enum.Enum):
    """Where an operation is. Running shows publicly as Pending; Timeout and Invalid are never produced."""

    WAITING = enum.auto()
    PENDING = enum.auto()
    RUNNING = enum.auto()
    COMPLETE = enum.auto()
    CANCELED = enum.auto()
    INVALID = enum.auto()
    TIMEOUT = enum.auto()
    FAILED = enum.auto()

    @property
    def terminal(self) -> bool:
        """Whether the operation has ended."""
        return self not in (OpState.WAITING, OpState.PENDING, OpState.RUNNING)

    @property
    def public(self) -> Status:
        """What events show."""
        return Status.PENDING if self is OpState.RUNNING else Status[self.name]


_MOVES: dict[OpState, frozenset[OpState]] = {
    OpState.WAITING: frozenset({OpState.PENDING, OpState.INVALID, OpState.FAILED}),
    OpState.PENDING: frozenset({OpState.RUNNING, OpState.CANCELED, OpState.FAILED}),
    OpState.RUNNING: frozenset({OpState.COMPLETE, OpState.FAILED, OpState.TIMEOUT}),
    OpState.CANCELED: frozenset({OpState.CANCELED, OpState.FAILED}),
}
_FROM_TERMINAL = frozenset({OpState.FAILED})


def check_move(old: OpState, new: OpState) -> None:
    """Raise InternalError for a move that the published library does not know."""
    if new not in _MOVES.get(old, _FROM_TERMINAL):
        raise InternalError(f"an operation of a batch cannot go from {old.name} to {new.name}")
