"""Blocks of one call that move."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nobounce.kv.result import BlockResult, BlockTransfer

if TYPE_CHECKING:
    from nobounce.protocols import SomeStream

    Array = np.ndarray[Any, Any]


class Blocks(NamedTuple):
    """Blocks of one call that move: their places in the call, their slots, their rows and their keys' digests."""

    at: Array
    slots: Array
    rows: Array
    digests: list[bytes]


def nothing(stream: SomeStream | None) -> BlockResult | BlockTransfer:
    """The result of a call without keys."""
    result = BlockResult(np.zeros(0, bool), 0)
    if stream is None:
        return result
    transfer = BlockTransfer(result.found)
    transfer._end(lambda: result)
    return transfer
