"""Mutated traces: `report` makes a right page of each, or refuses it in one sentence that names the file and the place."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import nobounce
from fuzz.mutators import Mutator
from nobounce import config
from nobounce.cli.main import app
from nobounce.config import Settings
from nobounce.errors import FormatError
from nobounce.io import hooks
from nobounce.observe import start, traceread
from nobounce.observe.analyse import analyse
from nobounce.observe.html import render
from scale import cases

KIB = 1 << 10


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A trace with every kind of record: transfers of all ways, chunks, copies, a batch, a refusal, an error, a process's end."""
    folder = tmp_path_factory.mktemp("trace")
    data = folder / "data"
    data.write_bytes(bytes(256 * KIB))
    start.reset()  # earlier tests of this process have done I/O: observers are put in once
    config.override(Settings(trace=str(folder / "t.json")))
    hooks.start()
    tracer: Any = start._closers[0]
    device = nobounce.Device("sim:0")
    with nobounce.open(data, "r+") as f, device.allocate(256 * KIB) as buffer, device.create_stream() as s:
        f.read(buffer)
        f.read(buffer, require="fallback")
        f.write(buffer, nbytes=5000, file_offset=1)
        f.read_async(buffer, stream=s, nbytes=8 * KIB).result()
        with pytest.raises(nobounce.RouteError):
            f.read(buffer, nbytes=100, file_offset=3, require="fastpath")
        with nobounce.Batch(capacity=4) as batch:
            batch.read(f, buffer, file_offsets=[0, 4096, 8192], nbytes=4096, cache="avoid")
    tracer.close()
    start.reset()
    config.override(None)
    raw = Path(*traceread.find(str(folder / "t.json"))).read_bytes()
    assert {"transfer", "batch", "chunk"} <= set(re.findall(r'"cat":"(\w+)"', raw.decode()))
    return raw


def strict(text: str) -> Any:
    """As a browser parses it."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON: a blank page")

    return json.loads(text, parse_constant=refuse)


def judge(path: Path) -> bool:
    """Whether the trace was read rather than refused; anything but a right page or a refusal fails."""
    try:
        page = render(analyse(traceread.read([str(path)]), {}), "t")
    except FormatError as error:
        refused = error
    else:
        refused = None
    if refused is not None:
        assert refused.filename == str(path)
        assert re.fullmatch(re.escape(str(path)) + ": [^\n]{3,400}", str(refused))
        return False
    held = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert held is not None
    data = strict(held[1])
    assert data["totals"]["transfers"] >= 0
    page.encode()
    return True


def test_mutated_traces(trace: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    read = 0
    number = cases(50_000, 200)
    for seed in range(number):
        path.write_bytes(Mutator(seed).trace(trace))
        try:
            read += judge(path)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    assert number // 20 < read < number - number // 20  # the mutators reach both ends


def test_traces_that_another_tool_wrote_again(trace: bytes, tmp_path: Path) -> None:
    """The same records as one JSON object, and as a bare list of events."""
    path = tmp_path / "t.json"
    whole = json.loads(trace)
    for seed in range(cases(20_000, 100)):
        mutator = Mutator(seed)
        changed = mutator.mutate(whole if seed % 2 else whole["traceEvents"])
        path.write_text(json.dumps(changed, indent=random.Random(seed).choice([None, 1])))
        judge(path)


def test_the_command_ends_with_one_line(trace: bytes, tmp_path: Path) -> None:
    path, page = tmp_path / "t.json", tmp_path / "page.html"
    for seed in range(cases(1_000, 15)):
        path.write_bytes(Mutator(seed).trace(trace))
        config.override(None)
        done = CliRunner().invoke(app, ["report", str(path), "--no-measure", "-o", str(page)])
        assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
        assert done.exit_code in (0, 1)
        if done.exit_code:
            assert re.fullmatch(r"nobounce report: [^\n]+\n", done.stderr), done.stderr
