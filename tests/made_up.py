"""Jobs that have ended, made up for tests of what counts them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nobounce.io.receipt import Receipt, Segment
from nobounce.route.types import Reason, Refusal


def made_up_job(
    *ways: tuple[str, int],
    device: str = "sim:0",
    op: str = "read",
    seconds: float = 0.001,
    stream: int | None = None,
    error: BaseException | None = None,
    requested: int | None = None,
    refusals: tuple[str, ...] = (),
) -> Any:
    """A job that has ended: `ways` are (reason code, bytes), "direct" being the direct path."""
    position, segments = 0, []
    reasons = {code: Reason(code, "") for code, _ in ways}
    for code, nbytes in ways:
        backend = "fastpath" if code == "direct" else "fallback"
        relayed = code not in ("direct", "cached")
        segments.append(Segment(backend, position, position, nbytes, reasons[code], relayed))  # type: ignore[arg-type]
        position += nbytes
    wanted = position if requested is None else requested
    receipt = Receipt(
        op,
        "f",
        device,
        wanted,
        position,
        tuple(segments),
        queued_at=1.0,
        started_at=1.0,
        ended_at=1.0 + seconds,  # type: ignore[arg-type]
    )
    target = SimpleNamespace(op=op, device_name=device, filename="f")
    direct = sum(n for code, n in ways if code == "direct")
    return SimpleNamespace(
        receipt=receipt,
        error=error,
        target=target,
        stream=stream,
        requested=wanted,
        direct_nbytes=direct,
        operation=None,
        refusals=tuple(Refusal(code, "") for code in refusals),
    )
