"""What became of the blocks of one call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nobounce.errors import TransferTimeoutError
from nobounce.records import field, record

if TYPE_CHECKING:
    import numpy as np


@record
class BlockResult:
    """`found` says of each key, in the call's order, whether its block is in the rows (after `put`: in the store), as bools.

    `errors` holds, by the key's place in the call, why a block that the store has did not arrive: damaged, unreadable. The rows of keys
    that were not found are as they were, those of `errors` undefined. `nbytes` moved.
    """

    found: np.ndarray[Any, Any]
    nbytes: int
    errors: dict[int, Exception] = field(default_factory=dict)

    def check(self) -> BlockResult:
        """Raise the first error, if there is one; returns the result itself. A key that is not there is no error."""
        for index in sorted(self.errors):
            error = self.errors[index]
            if len(self.errors) > 1:
                error.add_note(f"{len(self.errors) - 1} more of the {len(self.found)} blocks failed")
            raise error
        return self


class BlockTransfer:
    """A `put` or `get` in its place in a stream. Dropping it loses nothing: it goes on, and the store holds what it needs.

    `found` is known at once for `get`: the keys that are in the store; for `put` it is None until the end.
    """

    def __init__(self, found: np.ndarray[Any, Any] | None) -> None:
        self._early = found
        self._ended = threading.Event()
        self._result: BlockResult | None = None
        self._error: Exception | None = None

    @property
    def found(self) -> np.ndarray[Any, Any] | None:
        return self._result.found if self._result is not None else self._early

    def done(self) -> bool:
        """Whether it has ended; a `put` is acknowledged then, unless `result` raises."""
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> BlockResult:
        """Wait for the end. Raises TransferTimeoutError after `timeout` seconds, and what kept all of it from being carried out; a
        `put` raises its first block's error."""
        if not self._ended.wait(timeout):
            raise TransferTimeoutError(f"the blocks have not arrived within {timeout} s; they go on")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _end(self, make: Callable[[], BlockResult]) -> None:
        try:
            self._result = make()
        except Exception as e:
            self._error = e
        finally:
            self._ended.set()
