"""A capture may come from anybody: whatever stands in it, `check --replay` judges it or refuses it by name."""

from __future__ import annotations

import copy
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from captured import REQUEST, captures, judge, replay, tar
from fuzz.mutators import Mutator
from nobounce import config
from nobounce.checks import capture
from nobounce.cli.main import app
from nobounce.facts import answers, source
from nobounce.facts.source import SCHEMA, CapturedSource


@given(seed=st.integers(0, 1 << 40), which=st.integers(0, 1))
def test_a_mutated_capture_is_judged_or_refused(seed: int, which: int) -> None:
    judge(Mutator(seed).answers(captures()[which]))


def _with(question: str, value: Any) -> dict[str, Any]:
    """The answers of a machine, with every one to this question, or to all that begin with it, changed."""
    changed = {k: {"value": value} if k.startswith(question) else a for k, a in captures()[0].items()}
    assert changed != captures()[0], question
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
    assert judge(_with(question, value))


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


@given(seed=st.integers(0, 1 << 40), more=st.sampled_from([[], ["-v"], ["--json"]]))
def test_a_mutated_capture_and_request_end_in_one_of_the_exit_codes(seed: int, more: list[str]) -> None:
    mutator = Mutator(seed)
    request = mutator.mutate(copy.deepcopy(REQUEST)) if seed % 3 else {**REQUEST, "paths": []}
    changed = mutator.answers(captures()[seed % 2])
    replay(tar(json.dumps({"schema": SCHEMA, "answers": changed}), json.dumps(request)), *more)


@given(data=st.data())
def test_a_damaged_tar_ends_in_one_of_the_exit_codes(data: st.DataObject) -> None:
    small = {k: captures()[0][k] for k in sorted(captures()[0])[:3]}
    content = bytearray(tar(json.dumps({"schema": SCHEMA, "answers": small}), json.dumps(REQUEST)))
    for at, byte in data.draw(st.dictionaries(st.integers(0, len(content) - 1), st.integers(0, 255))).items():
        content[at] = byte
    del content[data.draw(st.integers(0, len(content))) :]
    replay(bytes(content))


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
        file.write(tar(json.dumps({"schema": SCHEMA, "answers": {}}), request_json))
        file.flush()
        done = CliRunner().invoke(app, ["check", "--replay", file.name])
    assert done.exit_code == 2, repr(done.exception)
    assert "nobounce check: " in done.output
