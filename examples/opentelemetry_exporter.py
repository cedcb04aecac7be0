"""Transfers as OpenTelemetry spans: a span from submission to end, with bytes by backend, the reasons and the error.

    pip install opentelemetry-sdk
    python examples/opentelemetry_exporter.py FILE [DEVICE]

The spans go to the console here; give `TracerProvider` another exporter to send them elsewhere.
"""

from __future__ import annotations

import sys
import time

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from opentelemetry.trace import Status, StatusCode, Tracer

import nobounce


class Exporter:
    """Callbacks for `nobounce.subscribe`. The span stays with the operation from its entry to its exit."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        # Operations tell time by the monotonic clock, spans by the calendar's.
        self._epoch = time.time_ns() - time.monotonic_ns()

    def enter(self, operation) -> None:
        span = self._tracer.start_span(f"nobounce {operation.op}", start_time=self._time(operation.queued_at))
        span.set_attribute("file.path", operation.filename)
        span.set_attribute("nobounce.device", operation.device)
        span.set_attribute("nobounce.file_offset", operation.file_offset)
        span.set_attribute("nobounce.requested_bytes", operation.nbytes)
        operation.notes[self] = span

    def start(self, operation) -> None:
        operation.notes[self].add_event("first byte", timestamp=self._time(operation.started_at))

    def exit(self, operation) -> None:
        span = operation.notes.pop(self)
        receipt = operation.receipt
        if receipt is not None:
            span.set_attribute("nobounce.fastpath_bytes", receipt.fastpath_bytes)
            span.set_attribute("nobounce.fallback_bytes", receipt.fallback_bytes)
            span.set_attribute("nobounce.evidence", receipt.evidence)
            for code, nbytes in receipt.reasons.items():
                span.set_attribute(f"nobounce.reason.{code}", nbytes)
        if operation.error is not None:
            span.record_exception(operation.error)
            span.set_status(Status(StatusCode.ERROR, str(operation.error)))
        span.end(self._time(operation.ended_at))

    def _time(self, seconds: float) -> int:
        return int(seconds * 1e9) + self._epoch


def main() -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter()))
    trace.set_tracer_provider(provider)
    exporter = Exporter(trace.get_tracer("nobounce"))

    device = nobounce.Device(sys.argv[2] if len(sys.argv) > 2 else "cpu")
    with (
        nobounce.subscribe(on_enter=exporter.enter, on_start=exporter.start, on_exit=exporter.exit),
        nobounce.open(sys.argv[1]) as f,
        device.allocate(f.nbytes) as buffer,
        device.create_stream() as stream,
    ):
        f.read(buffer)
        f.read_async(buffer, stream=stream).result()
    provider.shutdown()


if __name__ == "__main__":
    main()
