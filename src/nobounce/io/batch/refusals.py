"""Calls of a batch that cannot run."""

from __future__ import annotations

from nobounce.errors import ArgumentError, RouteError
from nobounce.io import hooks
from nobounce.io.batch.columns import Share
from nobounce.io.batch.group import Group
from nobounce.route.many import INVALID, REFUSED


def refuse(groups: list[Group], shares: list[Share], count: int, *, strict: bool) -> None:
    """Raise for a call that cannot run at all, or with `strict` for its first bad request."""
    import numpy as np

    bad, hopeless = 0, True
    for group, share in zip(groups, shares, strict=True):
        kinds = group.answer.kinds
        mine = np.flatnonzero((kinds == INVALID) | (kinds == REFUSED))
        bad += len(mine)
        hopeless = hopeless and group.answer.hopeless and bool((kinds == REFUSED).any())
        if not len(mine) or not strict:
            continue
        error = group.error_at(int(mine[0]))
        note = f"request {int(share.rows[mine[0]])} of {count} (strict: none of them runs)"
        if isinstance(error, ArgumentError):
            raise ArgumentError(f"{note}: {error}") from error
        if error is not None:
            error.add_note(note)
            raise error
    if hopeless and bad == count and groups:
        for group in groups:
            error = group.error_at(int(np.flatnonzero(group.answer.kinds == REFUSED)[0]))
            if isinstance(error, RouteError):
                hooks.unrouted(group.op, group.target.device_name, int(group.nbytes.sum()), None, error)
        error = groups[0].error_at(int(np.flatnonzero(groups[0].answer.kinds == REFUSED)[0]))
        if error is not None:
            raise error
