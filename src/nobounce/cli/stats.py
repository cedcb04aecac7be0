"""nobounce stats: what a program moved and which way, at its end, or of running ones as they go."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nobounce import outfile
from nobounce.cli import ending
from nobounce.cli.children import run_program
from nobounce.cli.options import Json
from nobounce.cli.output import DONE, NOT_MET, clean, complain, document, run
from nobounce.errors import ArgumentError, FileError, counted

if TYPE_CHECKING:
    import subprocess

    from nobounce.observe.attach import Attached
    from nobounce.observe.snapshot import Stats
    from nobounce.observe.verify import ProcessIO, Verdict

FORMATS = ("text", "json", "csv", "prometheus")


def command(
    program: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- PROGRAM ARGS...", help="The program to run and report on.", show_default=False
        ),
    ] = None,
    pid: Annotated[
        list[int] | None,
        typer.Option("--pid", "-p", help="Attach to a running process; may be given several times."),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the report there, not to stderr."),
    ] = None,
    as_json: Json = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="A row per process, device, backend and direction.")
    ] = False,
    as_prometheus: Annotated[bool, typer.Option("--prometheus", help="Prometheus' text format.")] = False,
    watch: Annotated[
        str | None, typer.Option(metavar="INTERVAL", help="Show live rates, such as every 1s or 500ms.")
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="With --pid: one snapshot, at once.")] = False,
    expect: Annotated[
        str | None,
        typer.Option(metavar="fastpath", help="Fail with 1 if anything bounced, failed, or nothing moved."),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare with the kernel's own counters.")] = False,
) -> None:
    """Run a program, or attach to one, and report bytes by backend, reasons, latencies and errors."""

    def action() -> int:
        chosen = [f for f, on in zip(FORMATS[1:], (as_json, as_csv, as_prometheus), strict=True) if on]
        if len(chosen) > 1:
            raise ArgumentError(f"--{chosen[0]} and --{chosen[1]}: choose one")
        if bool(program) == bool(pid):
            raise ArgumentError("give either --pid PID or -- PROGRAM ARGS...")
        if now and not pid:
            raise ArgumentError("--now is for --pid")
        if expect not in (None, "fastpath"):
            raise ArgumentError(f"--expect {expect!r}: only fastpath can be expected")
        interval = parse_interval(watch)
        with contextlib.ExitStack() as stack:
            # Now, not when the program has run for hours: where the report cannot be
            # written, that is said first.
            out = None if output is None else stack.enter_context(outfile.create(output))
            session = _Session(chosen[0] if chosen else "text", out, interval, expect, verify)
            return session.launch(program) if program else session.attach(pid or [], now)

    raise typer.Exit(run("stats", as_json, action, "stderr" if output is None else ""))


def parse_interval(text: str | None) -> float | None:
    """Seconds of "1s", "500ms", "2". Raises ArgumentError."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|s|)", text.strip())
    seconds = float(found[1]) / (1000 if found[2] == "ms" else 1) if found else 0.0
    if not 0.01 <= seconds <= 86400:
        raise ArgumentError(f"--watch {text!r} is no interval: write 1s or 500ms")
    return seconds


class _Session:
    def __init__(
        self,
        form: str,
        output: outfile.OutFile | None,
        watch: float | None,
        expect: str | None,
        verify: bool,
    ) -> None:
        self.form, self.output, self.watch, self.expect, self.verify = form, output, watch, expect, verify
        self._pairs: dict[int, tuple[Stats, ProcessIO]] = {}
        self._last: Stats | None = None
        self._missed = 0
        self._shown_at = time.monotonic()

    def launch(self, program: list[str]) -> int:
        from nobounce.observe.collect import Collector
        from nobounce.observe.verify import children_io, device_io

        disks, before = device_io() if self.verify else {}, children_io()
        with Collector() as collector:

            def tick(_: subprocess.Popen[bytes]) -> None:
                self._show(collector.read())

            variables = {"NOBOUNCE_STATS_COLLECTOR": collector.address}
            code = run_program(program, variables, tick if self.watch is not None else None)
            collector.finish()
            parts, self._missed = collector.read(), collector.missed
        kernel = children_io() - before
        return self._end(parts, code, (parts, kernel, disks) if self.verify else None)

    def attach(self, pids: list[int], now: bool) -> int:
        from nobounce.observe.attach import attach, is_stopped
        from nobounce.observe.verify import device_io

        with contextlib.ExitStack() as stack:
            attached = [stack.enter_context(attach(pid)) for pid in dict.fromkeys(pids)]
            for pid in [a.pid for a in attached if self.form == "text" and is_stopped(a.pid)]:
                complain(f"nobounce stats: process {pid} is stopped: it moves nothing until SIGCONT")
            self._sample(attached)
            before, disks = dict(self._pairs), device_io() if self.verify else {}
            try:
                for _ in () if now else _until_gone(attached, min(self.watch or 0.05, 0.05)):
                    self._sample(attached)
                    if self.watch is not None:
                        self._show([a.read() for a in attached])
            except KeyboardInterrupt as e:  # Ctrl-C is how one asks for the report
                if not ending.by_ctrl_c(e):
                    raise
                ending.resume()
            self._sample(attached)
            parts = [a.read() for a in attached]
        if not self.verify:
            return self._end(parts, DONE, None)
        kernel: ProcessIO | None = None
        ours = []
        for pid, (stats, kernels) in self._pairs.items():
            moved = kernels - before[pid][1]
            kernel = moved if kernel is None else kernel + moved
            ours.append(stats - before[pid][0])
        return self._end(parts, DONE, (ours, kernel, disks))

    def _sample(self, attached: list[Attached]) -> None:
        """Our counters, then the kernel's, which go with the process: the last that
        could be read are kept."""
        if self.verify:
            from nobounce.observe.verify import process_io

            for one in attached:
                stats = one.read()
                found = process_io(one.pid)
                if found is not None:
                    self._pairs[one.pid] = stats, found

    def _show(self, parts: list[Stats]) -> None:
        from nobounce.observe.report_text import rates
        from nobounce.observe.snapshot import total

        if not parts or self.watch is None or time.monotonic() - self._shown_at < self.watch:
            return
        self._shown_at = time.monotonic()
        current = total(parts)
        if self._last is not None and set(self._last.pids) <= set(current.pids):
            interval = current - self._last
            if self.form == "json":
                line = json.dumps(document("stats", live=True, total=interval.to_dict()))
            else:
                line = rates(interval)
            complain(line)
        self._last = current

    def _end(
        self,
        parts: list[Stats],
        code: int,
        check: tuple[list[Stats], ProcessIO | None, dict[str, ProcessIO]] | None,
    ) -> int:
        from nobounce.observe.snapshot import total

        verdict: Verdict | None = None
        if check is not None:
            from nobounce.observe.verify import device_io, verify

            ours, kernel, disks = check
            after = device_io()
            verdict = verify(total(ours), kernel, {n: after[n] - disks[n] for n in after if n in disks})
        unmet = self._unmet(parts, verdict)
        text = self._render(parts, verdict, unmet, code)
        if self.output is None:
            sys.stderr.write(clean(text))
        else:
            try:
                self.output.write(text.encode("utf-8", "backslashreplace"))
                self.output.commit()
            except FileError:
                sys.stderr.write(clean(text))  # what was counted is not lost with the file
                raise
        for line in unmet:
            complain(f"nobounce stats: {line}")
        return code or (NOT_MET if unmet else DONE)

    def _unmet(self, parts: list[Stats], verdict: Verdict | None) -> list[str]:
        from nobounce.observe.snapshot import total

        found = []
        if self._missed and (self.expect is not None or verdict is not None):
            found.append(self._left_out())
        if self.expect is not None:
            s = total(parts)
            if s.fallback_bytes or s.errors or not s.fastpath_bytes:
                found.append(
                    f"expected fastpath alone: {s.fastpath_bytes} bytes fastpath, {s.fallback_bytes} bytes "
                    f"fallback, {counted(s.errors, 'error')}"
                )
        if verdict is not None and verdict.agrees is False:
            found.append("the kernel's counters disagree")
        return found

    def _render(self, parts: list[Stats], verdict: Verdict | None, unmet: list[str], code: int) -> str:
        from nobounce.observe import report_text
        from nobounce.observe.snapshot import total

        whole = total(parts)
        if self.form == "csv":
            return report_text.csv_text(parts)
        if self.form == "prometheus":
            return report_text.prometheus(parts)
        if self.form == "json":
            fields: dict[str, Any] = {"total": whole.to_dict(), "processes": [p.to_dict() for p in parts]}
            fields["left_out"] = self._missed
            if verdict is not None:
                fields["verify"] = verdict.to_dict()
            return json.dumps(document("stats", exit_code=code, unmet=unmet, **fields), indent=2) + "\n"
        if not parts and not self._missed:
            return "nobounce stats: no process used nobounce, or HIPFILE_STATS_LEVEL is 0\n"
        text = report_text.report(whole, parts)
        if self._missed:
            text += f"Left out: {self._left_out()}\n"
        if verdict is not None:
            text += "".join(f"verify: {line}\n" for line in verdict.lines)
        return text

    def _left_out(self) -> str:
        return (
            f"the statistics of {counted(self._missed, 'process')} could not be read: "
            "another version of nobounce, or no descriptor was left (ulimit -n)"
        )


def _until_gone(attached: list[Attached], pause: float) -> Iterator[None]:
    """Once a `pause` until every process has ended."""
    import select

    from nobounce.observe.attach import has_ended

    handles: list[int] = []
    others: list[int] = []
    try:
        for one in attached:
            try:
                handles.append(os.pidfd_open(one.pid))
            except ProcessLookupError:
                continue
            except OSError:  # a container's filter, or no descriptor left
                others.append(one.pid)
        while handles or others:
            ready, _, _ = select.select(handles, [], [], pause)
            for fd in ready:
                handles.remove(fd)
                os.close(fd)
            others = [pid for pid in others if not has_ended(pid)]
            yield
    finally:
        for fd in handles:
            os.close(fd)
