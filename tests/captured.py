"""Captures to attack: those of made-up and of real machines, everything that is asked of one, and `check --replay` of a file."""

from __future__ import annotations

import functools
import io
import json
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from nobounce import config
from nobounce.checks import capture
from nobounce.checks.machine import Machine
from nobounce.checks.report import check_paths, libraries, survey, survey_data, verdict_data
from nobounce.checks.svg import draw
from nobounce.checks.topology import topology_of
from nobounce.cli.check_text import libraries_text, survey_text, verdict_text
from nobounce.cli.main import app
from nobounce.config import Settings
from nobounce.facts.source import SCHEMA, CapturedSource, RecordingSource, Source
from trees import Tree, ready_amd

REAL = Path(__file__).parent / "captures" / "h200.json"
PATHS, DEVICES = ["/s/m", "/tmp/x", "/none"], ["hip:0", "cuda:0", "sim:0", "cpu"]
CODES = {0, 1, 2, 3, 4}


def use(one: Source) -> None:
    machine = Machine(one, Settings())
    for verdict in check_paths(machine, PATHS, DEVICES):
        verdict_text(verdict, None)
        json.dumps(verdict_data(verdict))
    found = survey(machine, [])
    survey_text(found)
    json.dumps(survey_data(found))
    libraries_text(libraries(machine))
    draw(topology_of(machine))


def recorded(tree: Source) -> dict[str, dict[str, Any]]:
    recording = RecordingSource(tree)
    use(recording)
    return recording.answers


def rich() -> Tree:
    tree = ready_amd().lvm("dm-0", "nvme0n1").mount("/s", "ext4", "dm-0").file("/s/m")
    return tree.nvidia_gpu("0000:d1:00.0").nvme_fabrics("nvme9n1").mount("/remote", "xfs", "nvme9n1")


@functools.cache
def captures() -> list[dict[str, dict[str, Any]]]:
    return [recorded(rich()), json.loads(REAL.read_text())["answers"]]


def judge(found: dict[str, Any]) -> bool:
    """Whether the capture was judged rather than refused."""
    try:
        judged = CapturedSource.from_json(json.dumps({"schema": SCHEMA, "answers": found}))
    except ValueError:
        return False
    use(judged)
    return True


def tar(capture_json: str, request_json: str) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as out:
        for name, text in (("capture.json", capture_json), ("request.json", request_json)):
            content = text.encode("utf-8", "surrogatepass")
            info = tarfile.TarInfo(name)
            info.size = len(content)
            out.addfile(info, io.BytesIO(content))
    return raw.getvalue()


def replay(content: bytes, *more: str) -> None:
    """The command ends with one of its codes, and what it prints is no traceback."""
    config.override(None)
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        file.write(content)
        file.flush()
        done = CliRunner().invoke(app, ["check", "--replay", file.name, *more])
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    assert done.exit_code in CODES
    assert "Traceback" not in done.output
    if done.exit_code == 2:
        assert "nobounce check: " in done.output or '"error"' in done.output


REQUEST = {
    "schema": capture.SCHEMA,
    "paths": PATHS,
    "devices": DEVICES,
    "settings": {"allow_compat_mode": True},
}
