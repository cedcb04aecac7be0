"""A capture may come from anybody: whatever stands in it, `check --replay` judges it or refuses it by name."""

from __future__ import annotations

import copy
import functools
import io
import json
import random
import re
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
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
from nobounce.facts import answers, source
from nobounce.facts.source import SCHEMA, CapturedSource, RecordingSource, Source
from trees import Tree, ready_amd

REAL = Path(__file__).parents[2] / "captures" / "h200.json"
PATHS, DEVICES = ["/s/m", "/tmp/x", "/none"], ["hip:0", "cuda:0", "sim:0", "cpu"]
CODES = {0, 1, 2, 3, 4}

NUMBERS = [None, True, 0, -1, 1 << 63, 10**30, 10**4000, 1.5, float("nan")]
WORDS = [
    "",
    "junk",
    "\x00\xff",
    "../../x",
    "-9" * 30,
    "9" * 400,
    "9" * 5000,
    "0x" + "f" * 400,
    "\u00b2",
    "1\u00b2",
    "\u0663",
    "\ud800",
]
SHAPES: list[Any] = [[], [1], ["x"], ["x", "y"], [[0, 0]], [0, 0], [None] * 3, {}, {"version": []}]
JUNK = [*NUMBERS, *WORDS, *SHAPES]
"""Values that some question does not expect, or expects smaller."""


def _use(one: Source) -> None:
    machine = Machine(one, Settings())
    for verdict in check_paths(machine, PATHS, DEVICES):
        verdict_text(verdict, None)
        json.dumps(verdict_data(verdict))
    found = survey(machine, [])
    survey_text(found)
    json.dumps(survey_data(found))
    libraries_text(libraries(machine))
    draw(topology_of(machine))


def _recorded(tree: Source) -> dict[str, dict[str, Any]]:
    recording = RecordingSource(tree)
    _use(recording)
    return recording.answers


def _rich() -> Tree:
    tree = ready_amd().lvm("dm-0", "nvme0n1").mount("/s", "ext4", "dm-0").file("/s/m")
    return tree.nvidia_gpu("0000:d1:00.0").nvme_fabrics("nvme9n1").mount("/remote", "xfs", "nvme9n1")


@functools.cache
def _captures() -> list[dict[str, dict[str, Any]]]:
    return [_recorded(_rich()), json.loads(REAL.read_text())["answers"]]


class Mutator:
    """Changes one place of a JSON value at a time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def mutate(self, value: Any) -> Any:
        """The value with a change somewhere in it."""
        if isinstance(value, list) and value and self.random.random() < 0.7:
            index = self.random.randrange(len(value))
            return self.random.choice(
                [
                    [*value[:index], self.mutate(value[index]), *value[index + 1 :]],
                    value[:index] + value[index + 1 :],
                    [*value, value[index]],
                ]
            )
        if isinstance(value, dict) and value and self.random.random() < 0.8:
            key = self.random.choice(sorted(value))
            rest = {k: v for k, v in value.items() if k != key}
            return self.random.choice(
                [
                    {**value, key: self.mutate(value[key])},
                    rest,
                    {**rest, self.random.choice(WORDS): value[key]},
                ]
            )
        if isinstance(value, str) and value and self.random.random() < 0.8:
            return self._text(value)
        return self.random.choice(JUNK)

    def _text(self, value: str) -> str:
        """A word of it replaced, dropped or doubled; or cut off somewhere."""
        if self.random.random() < 0.2:
            return value[: self.random.randrange(len(value))]
        words = value.split(" ")
        index = self.random.randrange(len(words))
        words[index] = self.random.choice(
            [
                self.random.choice(WORDS),
                "",
                f"{words[index]} {words[index]}",
                words[index] + "9" * 400,
                words[index] + "\u00b2",
                "-1",
            ]
        )
        return self.random.choice([" ", " ", "\n"]).join(words)

    def answers(self, found: dict[str, Any]) -> dict[str, Any]:
        """Some answers changed."""
        changed = dict(found)
        keys = sorted(found)
        for _ in range(self.random.choice([1, 1, 2, 5, 20])):
            key = self.random.choice(keys)
            if "value" in found[key] and self.random.random() < 0.95:
                changed[key] = {"value": self.mutate(copy.deepcopy(found[key]["value"]))}
            else:
                changed[key] = self.mutate(copy.deepcopy(found[key]))
        return changed


def _judge(found: dict[str, Any]) -> bool:
    """Whether the capture was judged rather than refused."""
    try:
        judged = CapturedSource.from_json(json.dumps({"schema": SCHEMA, "answers": found}))
    except ValueError:
        return False
    _use(judged)
    return True


@given(seed=st.integers(0, 1 << 40), which=st.integers(0, 1))
def test_a_mutated_capture_is_judged_or_refused(seed: int, which: int) -> None:
    _judge(Mutator(seed).answers(_captures()[which]))


def _with(question: str, value: Any) -> dict[str, Any]:
    """The answers of a machine, with every one to this question, or to all that begin with it, changed."""
    changed = {k: {"value": value} if k.startswith(question) else a for k, a in _captures()[0].items()}
    assert changed != _captures()[0], question
    return changed


@pytest.mark.parametrize(
    ("question", "value"),
    [
        ("probe:direct_in", [22, None, []]),
        ("probe:direct_in", [22, 0, "junk"]),
        ("probe:rdev", ["x", "y"]),
        ("probe:rdev", [1]),
        ("probe:kfd_version", [1, []]),
        ("probe:open_node", ["0", ""]),
        ("probe:open_node", [0]),
        ("probe:kallsyms", [1, 2, 3]),
        ("probe:kernel_config", "CONFIG_PCI_P2PDMA=y"),
        ("probe:ldconfig", [1]),
        ("probe:glob", {}),
        ("probe:sites", [None]),
        ("probe:dkms_status", None),
        ("probe:dkms_status", ["amdgpu"]),
        ("probe:open_node", None),
        ("statx", [33188, 1 << 63, 1, [0, 0], [0, 0], 0, 0, 27, 512, 512, None]),
        ("statx", [33188, 4096, 1, [0, 0], [0, 0], 0, 0, 27, 512, 1 << 63, None]),
    ],
)
def test_an_answer_of_the_wrong_shape_is_refused_with_its_question(question: str, value: Any) -> None:
    one = {json.dumps([question, "/x"]): {"value": value}}
    with pytest.raises(ValueError, match=question):
        CapturedSource.from_json(json.dumps({"schema": SCHEMA, "answers": one}))


@pytest.mark.parametrize(
    ("question", "value"),
    [
        ('["environment", "HIP_VISIBLE_DEVICES"', "\u00b2,0"),
        ('["environment", "CUDA_VISIBLE_DEVICES"', "9" * 5000),
        ('["listdir", "/sys/class/nvme"', ["nvme\u00b2", "nvme" + "9" * 5000]),
        ('["listdir", "/sys/class/kfd/kfd/topology/nodes"', ["0", "\u00b2", "9" * 5000]),
        (
            '["read", "/sys/class/kfd/kfd/topology/nodes/1/mem_banks',
            "heap_type 1\nsize_in_bytes 1" + "0" * 400,
        ),
        ('["read", "/sys/bus/pci/devices', "9" * 400),
        ('["realpath", "/sys/bus/pci/devices', "/sys/devices/pci0000:00/\u00b2"),
        (
            '["read", "/proc/cpuinfo"',
            "vendor_id: AuthenticAMD\ncpu family: \u00b2\n".encode().decode("latin-1"),
        ),
        ('["probe:hip_library"', {"version": 10**4000, "hipAmdFileRead": True, "hipAmdFileWrite": True}),
        ('["probe:amdsmi"', [{"bdf": [], "mode": {}}, 1]),
    ],
)
def test_numbers_that_no_machine_has_are_none(question: str, value: Any) -> None:
    assert _judge(_with(question, value))


def test_every_question_has_a_shape() -> None:
    asked = {
        match[1]
        for path in Path(source.__file__).parents[1].rglob("*.py")
        for match in re.finditer(r"""\.probe\(\s*"(\w+)\"""", path.read_text())
    }
    assert len(asked) > 10
    assert {f"probe:{name}" for name in asked} <= answers._SHAPES.keys()
    asked = set(re.findall(r"""_ask\("(\w+)\"""", Path(source.__file__).read_text()))
    assert asked <= answers._SHAPES.keys()


def _tar(capture_json: str, request_json: str) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name, text in (("capture.json", capture_json), ("request.json", request_json)):
            content = text.encode("utf-8", "surrogatepass")
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return raw.getvalue()


def _replay(content: bytes, *more: str) -> None:
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


@given(seed=st.integers(0, 1 << 40), more=st.sampled_from([[], ["-v"], ["--json"]]))
def test_a_mutated_capture_and_request_end_in_one_of_the_exit_codes(seed: int, more: list[str]) -> None:
    mutator = Mutator(seed)
    request = mutator.mutate(copy.deepcopy(REQUEST)) if seed % 3 else {**REQUEST, "paths": []}
    changed = mutator.answers(_captures()[seed % 2])
    _replay(_tar(json.dumps({"schema": SCHEMA, "answers": changed}), json.dumps(request)), *more)


@given(data=st.data())
def test_a_damaged_tar_ends_in_one_of_the_exit_codes(data: st.DataObject) -> None:
    small = {k: _captures()[0][k] for k in sorted(_captures()[0])[:3]}
    content = bytearray(_tar(json.dumps({"schema": SCHEMA, "answers": small}), json.dumps(REQUEST)))
    for at, byte in data.draw(st.dictionaries(st.integers(0, len(content) - 1), st.integers(0, 255))).items():
        content[at] = byte
    del content[data.draw(st.integers(0, len(content))) :]
    _replay(bytes(content))


@pytest.mark.parametrize(
    "request_json",
    [
        "[" * 100_000,
        "{",
        "[]",
        '{"schema": "x"}',
        json.dumps({**REQUEST, "devices": ["hip:" + "9" * 5000]}),
        json.dumps({**REQUEST, "devices": ["hip:\u0663"]}),
        json.dumps({**REQUEST, "devices": [["hip:0"]]}),
        '{"schema": "' + capture.SCHEMA + '", "paths": [' + "9" * 5000 + "]}",
    ],
)
def test_a_request_that_is_none_is_refused_by_name(request_json: str) -> None:
    config.override(None)
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        file.write(_tar(json.dumps({"schema": SCHEMA, "answers": {}}), request_json))
        file.flush()
        done = CliRunner().invoke(app, ["check", "--replay", file.name])
    assert done.exit_code == 2, repr(done.exception)
    assert "nobounce check: " in done.output
