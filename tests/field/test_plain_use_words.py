"""Wrong and ugly words of the command line, each with what is right."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import nobounce
from command_server import CommandServer
from nobounce.errors import counted


@pytest.fixture
def model(tmp_path: Path) -> Path:
    raw = json.dumps({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(8))
    return path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compare", "m.safetensors", "--size", "1X"], "--size '1X' is no size"),
        (["compare", "m.safetensors", "--slice", "1X"], "--slice '1X' is no size"),
        (["bench", ".", "--size", "1X"], "--size '1X' is no size"),
        (["bench", ".", "--size", "9" * 5000], "is no size"),
        (["roundtrip", "a", "b", "--slice", "\u202e"], r"--slice '\u202e' is no size"),
        (["load", "m.safetensors", "-d", "cpu:1"], "device 'cpu:1': there is only cpu"),
        (["load", ""], "argument 1 is empty"),
        (["check", ""], "argument 1 is empty"),
        (["cp", "m.safetensors", ""], "argument 2 is empty"),
        (["stats", "-o", "", "--", "true", ""], "argument 2 is empty"),
        (["stats", "--", ""], "there is no program ''"),
        (["load"], "Missing argument 'PATH...'"),
        (["load", "--\u202ebogus"], r"No such option: --\u202ebogus"),
        (["lo\u202ead"], r"No such command 'lo\u202ead'"),
        (["cp", "a", "b", "c\nd"], "argument(s) (c\\"),
    ],
)
def test_wrong_usage_is_one_line_that_names_it_and_2(
    commands: CommandServer, model: Path, arguments: list[str], said: str
) -> None:
    done = commands.run(*arguments, cwd=model.parent)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
    assert done.stderr.startswith("nobounce")


@pytest.mark.parametrize("verb", ["load", "stats", "trace", "check"])
def test_wrong_usage_with_json_is_an_object_where_results_go(
    commands: CommandServer, tmp_path: Path, verb: str
) -> None:
    done = commands.run(verb, "--json", "--bogus", cwd=tmp_path)
    text, other = (done.stderr, done.stdout) if verb in ("stats", "trace") else (done.stdout, done.stderr)
    told = json.loads(text)
    assert (done.code, other, told["schema"]) == (2, "", f"nobounce.{verb}/1")
    assert "--bogus" in told["error"]["message"]


def test_no_argument_at_all_shows_the_help_and_is_2(commands: CommandServer, tmp_path: Path) -> None:
    done = commands.run(cwd=tmp_path)
    assert (done.code, done.stderr) == (2, "")
    assert "roundtrip" in done.stdout


def test_usage_lines_show_arguments_as_they_are_written(commands: CommandServer, tmp_path: Path) -> None:
    for verb, usage in {
        "load": "PATH...",
        "check": "[PATH...]",
        "stats": "[-- PROGRAM ARGS...]",
        "cp": "SOURCE DEST",
        "config": "",
    }.items():
        done = commands.run(verb, "--help", cwd=tmp_path)
        assert f"Usage: nobounce {verb} [OPTIONS] {usage}".rstrip() in {
            line.strip() for line in done.stdout.splitlines()
        }


@pytest.mark.parametrize("verb", ["load", "explain", "check"])
def test_a_device_that_makes_no_sense_names_its_variable(
    commands: CommandServer, model: Path, verb: str
) -> None:
    done = commands.run(verb, model, cwd=model.parent, env={"NOBOUNCE_DEVICE": "gpu"})
    assert done.code == 2
    assert "NOBOUNCE_DEVICE: device 'gpu': choose " in done.stderr


def test_a_device_that_is_not_there_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(text: str) -> object:
        raise nobounce.UnavailableError(f"{text}: not here")

    monkeypatch.setenv("NOBOUNCE_DEVICE", "hip")
    monkeypatch.setattr("nobounce.runtimes.registry.parse_device", absent)
    with pytest.raises(nobounce.UnavailableError, match="NOBOUNCE_DEVICE=hip: hip: not here"):
        nobounce.default_device()


def test_config_escapes_what_variables_hold(commands: CommandServer, tmp_path: Path) -> None:
    done = commands.run("config", cwd=tmp_path, env={"NOBOUNCE_RETRY_ERRNOS": "a\u202e\x1b[2J\nb"})
    assert r"a\u202e\x1b[2J\nb" in done.stdout
    assert not {"\u202e", "\x1b"} & set(done.stdout)


def test_one_is_one(commands: CommandServer, model: Path) -> None:
    for verb in ("load", "inspect", "explain"):
        assert (
            "1 tensor,"
            in commands.run(
                verb, model, *(["-d", "cpu"] if verb != "inspect" else []), cwd=model.parent
            ).stdout
        )
    assert [counted(n, "process") for n in (0, 1, 2)] == ["0 processes", "1 process", "2 processes"]


def test_small_slices_compare_a_small_part_unless_asked(commands: CommandServer, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(b"")
    os.truncate(data, 64 << 20)
    done = commands.run("compare", data, "--slice", "1", "--size", "64MiB", "-d", "cpu", cwd=tmp_path)
    assert done.code == 2
    assert "choose a larger --slice or a smaller --size" in done.stderr
    done = commands.run("compare", data, "--slice", "1", "--rounds", "1", "-d", "cpu", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["held_equal"]["nbytes"] == 1 << 14


def test_public_modules_are_attributes() -> None:
    code = """
import sys, nobounce
assert not {"nobounce.errors", "nobounce.hipfile"} & set(sys.modules)
assert nobounce.errors.NobounceError is nobounce.NobounceError
nobounce.hipfile, nobounce.testing
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert {"errors", "hipfile", "testing"} <= set(dir(nobounce))
