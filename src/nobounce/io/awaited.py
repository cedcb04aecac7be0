"""What only awaiting needs: asyncio takes 25 ms to import, and a program that awaits has it already."""

from __future__ import annotations

import asyncio

from nobounce.errors import TransferCancelledError


class AwaitedCancelledError(TransferCancelledError, asyncio.CancelledError):
    """An awaited transfer was cancelled. To asyncio it is what a cancelled Future raises:
    the task ends as cancelled."""
