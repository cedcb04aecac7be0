"""Records of traces that are not what they claim: one sentence with file and place. Cut traces are good up to their last whole line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nobounce import config
from nobounce.cli.main import app
from nobounce.errors import FormatError
from nobounce.observe import traceread
from nobounce.observe.analyse import analyse

HEAD = '{"displayTimeUnit":"ms","traceEvents":['
RECEIPT: dict[str, Any] = {
    "fastpath_bytes": 4096,
    "fallback_bytes": 0,
    "cached_bytes": 0,
    "host_traffic_bytes": 0,
    "reasons": {"direct": 4096},
    "retries": [],
}
ARGS: dict[str, Any] = {"filename": "f", "device": "cpu", "nbytes": 4096, "receipt": RECEIPT}
EVENT: dict[str, Any] = {
    "ph": "X",
    "name": "read",
    "cat": "transfer",
    "pid": 1,
    "tid": 2,
    "ts": 1.5,
    "dur": 3,
    "args": ARGS,
}
END = '],"otherData":{"schema":"x","pid":1,"events":2,"dropped":0,"stats":{"level":1,"fastpath_bytes":8192}}}'


def changed(place: str, value: Any, event: dict[str, Any] = EVENT) -> dict[str, Any]:
    key, _, rest = place.partition(".")
    return {**event, key: changed(rest, value, event[key]) if rest else value}


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "t.json"
    path.write_text("\n".join([HEAD, *lines]))
    return path


def refused(path: Path) -> str:
    """The sentence, without the file's name: that of `read`, and of the command with its exit code."""
    with pytest.raises(FormatError) as caught:
        traceread.read([str(path)])
    config.override(None)
    page = path.with_suffix(".html")
    done = CliRunner().invoke(app, ["report", str(path), "--no-measure", "-o", str(page)])
    assert (done.exit_code, done.stderr) == (1, f"nobounce report: {caught.value}\n")
    assert not page.exists()
    return str(caught.value).removeprefix(f"{path}: ")


NUMBERS = ["ts", "dur", "args.nbytes", "args.receipt.fastpath_bytes", "args.receipt.fallback_bytes"]
NUMBERS += ["args.receipt.cached_bytes", "args.receipt.host_traffic_bytes", "args.receipt.reasons.direct"]


@pytest.mark.parametrize("place", NUMBERS)
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1], "a list"),
        ({}, "an object"),
        ("1", "a string"),
        (None, "null"),
        (True, "true"),
        (-(1 << 63), "-9223372036854775808"),
    ],
)
def test_what_stands_where_a_number_belongs(place: str, value: Any, said: str, tmp_path: Path) -> None:
    line = json.dumps(changed(place, value))
    assert refused(write(tmp_path, json.dumps(EVENT) + ",", line, END)).startswith(
        f"line 3: {place} is {said}, expected "
    )
    whole = tmp_path / "t.json"
    whole.write_text(json.dumps({"traceEvents": [EVENT, changed(place, value)]}))
    assert refused(whole).startswith(f"event 1: {place} is {said}, expected ")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000])
@pytest.mark.parametrize("place", ["ts", "args.nbytes", "args.filename"])
def test_numbers_that_no_browser_reads(place: str, number: str, tmp_path: Path) -> None:
    line = json.dumps(changed(place, "@")).replace('"@"', number)
    assert refused(write(tmp_path, line + ",", END)).startswith("line 2: not JSON: ")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("pid", [1]),
        ("tid", {}),
        ("name", ["read"]),
        ("args", []),
        ("args", "x"),
        ("args.filename", 1),
        ("args.device", ["cpu"]),
        ("args.receipt", [1]),
        ("args.receipt.reasons", [1]),
        ("args.receipt.retries", 3),
        ("args.receipt.retries", [3]),
    ],
)
def test_other_kinds_in_the_wrong_place(place: str, value: Any, tmp_path: Path) -> None:
    assert refused(write(tmp_path, json.dumps(changed(place, value)), END)).startswith(f"line 2: {place}")


@pytest.mark.parametrize(
    "args",
    [
        {"statuses": {"failed": [1]}},
        {"statuses": 1},
        {"refused": {"x": "y"}},
        {"refused": [[]]},
        {"requests": None},
    ],
)
def test_batches(args: dict[str, Any], tmp_path: Path) -> None:
    event = {**EVENT, "cat": "batch", "name": "batch read", "args": {**ARGS, **args}}
    assert refused(write(tmp_path, json.dumps(event), END)).startswith(f"line 2: args.{next(iter(args))}")


@pytest.mark.parametrize(
    "end",
    [
        '{"dropped":[]}',
        '{"stats":{"level":"1"}}',
        '{"processes":{}}',
        '{"processes":[1]}',
        '{"processes":[{"dropped":null}]}',
        "[]",
    ],
)
def test_the_end_of_a_trace(end: str, tmp_path: Path) -> None:
    assert refused(write(tmp_path, json.dumps(EVENT), f'],"otherData":{end}}}', "")).startswith(
        "line 3: otherData"
    )


def test_a_name_that_is_no_direction_has_no_rate(tmp_path: Path) -> None:
    for name in ("", "read x", "a write"):
        path = write(tmp_path, json.dumps({**EVENT, "name": name}), END)
        assert analyse(traceread.read([str(path)]), {})["roofs"] == []


def test_a_trace_cut_anywhere_is_good_up_to_its_last_whole_line(tmp_path: Path) -> None:
    lines = [json.dumps(EVENT) + ",", json.dumps(EVENT), END]
    whole = "\n".join([HEAD, *lines]) + "\n"
    path = tmp_path / "t.json"
    for length in range(len(HEAD), len(whole) + 1):
        path.write_text(whole[:length])
        trace = traceread.read([str(path)])
        ends = [len("\n".join([HEAD, *lines[: n + 1]])) for n in range(3)]
        # a record is whole without the comma that begins the next one
        assert len(trace.events) == (length >= ends[0] - 1) + (length >= ends[1])
        assert trace.cut == (length < ends[2])
        analyse(trace, {})


def test_a_damaged_line_in_the_middle_is_no_cut(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps(EVENT)[:50], json.dumps(EVENT), END)
    assert refused(path).startswith("line 2: not JSON: ")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "{",
        "[]",
        '{"limits":[]}',
        '{"limits":{"disk read":[1]}}',
        '{"limits":{"disk read":NaN}}',
        '{"limits":{"x":1e400}}',
        "\xff",
    ],
)
def test_limits_of_a_stranger(text: str, tmp_path: Path) -> None:
    trace, limits = write(tmp_path, json.dumps(EVENT), END), tmp_path / "limits.json"
    limits.write_bytes(text.encode("latin-1"))
    config.override(None)
    done = CliRunner().invoke(app, ["report", str(trace), "--limits", str(limits), "-o", str(tmp_path / "p")])
    assert done.exit_code == 1
    assert done.stderr.startswith(f"nobounce report: {limits}: not the JSON of `nobounce bench`: ")
    assert done.stderr.count("\n") == 1


def test_deep_nesting_is_refused_before_it_is_printed_again(tmp_path: Path) -> None:
    for depth in (70, 900, 100_000):
        line = json.dumps(changed("args.more", "@", {**EVENT, "args": {**ARGS, "more": 1}})).replace(
            '"@"', "[" * depth + "]" * depth
        )
        assert "nested too deeply" in refused(write(tmp_path, line, END))
