"""Reading traces back: whole ones, and those of processes that were killed while they wrote.

A trace of ours has one event a line, so a file that ends in the middle is good up to its last whole line. A
line before that one that is no event, or an event that is not what it claims (`records`), refuses the file.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nobounce.errors import FileError, FormatError, named_errors
from nobounce.facts import regular
from nobounce.observe import records
from nobounce.observe.trace import SCHEMA, in_folder
from nobounce.outfile import CURES, OutFile

Event = dict[str, Any]
_END = '],"otherData":'


@dataclass
class Trace:
    """Events, and what each process said at its end (`otherData`); `cut` counts
    files that end in the middle."""

    events: list[Event] = field(default_factory=list)
    processes: list[dict[str, Any]] = field(default_factory=list)
    cut: int = 0

    @property
    def dropped(self) -> int:
        """Events over the limit that were not written."""
        return sum(p.get("dropped", 0) for p in self.processes)


def find(path: str) -> list[str]:
    """The file itself, or else the files of single processes that NOBOUNCE_TRACE=path
    has made. Raises FileError."""
    path = in_folder(path)
    if os.path.exists(path):
        return [path]
    stem, ending = os.path.splitext(path)
    found = sorted(
        p for p in glob.glob(f"{glob.escape(stem)}.*{glob.escape(ending)}") if _is_process(p, stem, ending)
    )
    if not found:
        raise FileError.from_oserror(FileNotFoundError(2, "no such file"), path, "open")
    return found


def _is_process(path: str, stem: str, ending: str) -> bool:
    return path[len(stem) + 1 : len(path) - len(ending)].isdigit()


def read(paths: Sequence[str]) -> Trace:
    """Every event of these files. Raises FileError, FormatError, and ArgumentError for
    what is no regular file."""
    trace = Trace()
    for path in paths:
        _read_one(path, trace)
    return trace


def _read_one(path: str, trace: Trace) -> None:
    try:
        with open(path, encoding="utf-8", errors="replace", opener=regular.opener) as f:
            first = f.readline()
            if first.rstrip() != '{"displayTimeUnit":"ms","traceEvents":[':
                _read_foreign(path, first + f.read(), trace)
                return
            ended = False
            for number, line in enumerate(f, 2):
                text = line.rstrip(",\n")
                if not text:
                    continue
                try:
                    if text.startswith(_END):
                        _add_end(records.loads(text[len(_END) : -1]), trace, path, f"line {number}")
                        ended = True
                    else:
                        trace.events.append(_checked(records.loads(text), path, f"line {number}"))
                except ValueError as e:
                    if isinstance(e, FormatError):
                        raise
                    if line.endswith("\n"):
                        raise FormatError(f"line {number}: not JSON: {e!s:.200}", filename=path) from None
            trace.cut += not ended
    except OSError as e:
        raise FileError.from_oserror(e, path, "read") from e


def _read_foreign(path: str, text: str, trace: Trace) -> None:
    """A trace that another tool has written out again."""
    try:
        whole = records.loads(text)
    except ValueError as e:
        raise FormatError(f"not a trace in Chrome's JSON format: {e!s:.200}", filename=path) from None
    events = whole.get("traceEvents") if isinstance(whole, dict) else whole
    if not isinstance(events, list):
        raise FormatError("not a trace in Chrome's JSON format: it has no list traceEvents", filename=path)
    trace.events += [_checked(event, path, f"event {i}") for i, event in enumerate(events)]
    if isinstance(whole, dict) and "otherData" in whole:
        _add_end(whole["otherData"], trace, path, "the end")


def _checked(event: Any, path: str, place: str) -> Event:
    if wrong := records.event_fault(event):
        raise FormatError(f"{place}: {wrong}", filename=path)
    return event  # type: ignore[no-any-return]


def _add_end(other: Any, trace: Trace, path: str, place: str) -> None:
    if wrong := records.end_fault(other):
        raise FormatError(f"{place}: {wrong}", filename=path)
    trace.processes += other.get("processes", [other])


def _parse(text: str) -> Any:
    try:
        return records.loads(text) if text.strip() else None
    except ValueError:
        return None


def merge(paths: Sequence[str], into: OutFile) -> dict[str, Any]:
    """Put the traces of several processes into one file, line by line; returns what its
    end says. Raises FileError."""
    ends = Trace()
    count = 0
    with (
        named_errors(into.path, "write", CURES),
        open(into.fd, "w", encoding="utf-8", errors="backslashreplace", closefd=False) as out,
    ):
        out.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for line in _lines(paths, ends):
            out.write(f",\n{line}" if count else line)
            count += 1
        other = {
            "schema": SCHEMA,
            "processes": ends.processes,
            "dropped": ends.dropped,
            "cut": ends.cut,
        }
        out.write(f"\n{_END}{json.dumps(other)}}}\n")
    return {**other, "events": count}


def _lines(paths: Iterable[str], ends: Trace) -> Iterator[str]:
    for path in paths:
        with open(path, encoding="utf-8", errors="replace") as f:
            f.readline()
            ended = False
            for line in f:
                text = line.rstrip("\n").rstrip(",")
                if text.startswith(_END):
                    other = _parse(text[len(_END) : -1])
                    ended = not records.end_fault(other)
                    ends.processes += [other] if ended else []
                elif not records.event_fault(_parse(text)):
                    yield text
            ends.cut += not ended
