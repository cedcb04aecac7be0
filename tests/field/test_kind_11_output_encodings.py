"""Output encodings: names are escaped and tables degrade, whatever the encoding."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from command_server import CommandServer

ODD = "modèle-\N{SNOWMAN}-\u202e-\udcff"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252:strict", "utf-8"])
def test_every_verb_prints_odd_names_in_every_encoding(
    commands: CommandServer, tmp_path: Path, encoding: str
) -> None:
    (tmp_path / ODD).write_bytes(bytes(8192))
    for arguments in (
        ["explain", ODD, "-d", "cpu"],
        ["check", ODD, "-d", "cpu"],
        ["cp", ODD, ODD + "2", "-d", "cpu"],
        ["inspect", ODD],
        ["load", f"--{ODD}"],
    ):
        done = commands.run(*arguments, cwd=tmp_path, env={"PYTHONIOENCODING": encoding.partition(":")[0]})
        said = done.stdout + done.stderr
        assert "Traceback" not in said
        assert said.count("mod") >= 1
        assert "\u202e" not in said
        assert os.fsencode("\udcff").decode("latin-1") not in said
    assert (tmp_path / (ODD + "2")).read_bytes() == bytes(8192)


def test_the_tree_of_topology_degrades(commands: CommandServer, tmp_path: Path) -> None:
    drawn, typed = (
        commands.run("topology", cwd=tmp_path, env={"PYTHONIOENCODING": e}).stdout for e in ("utf-8", "ascii")
    )
    assert "└── " in drawn
    assert "`-- " in typed
    assert typed == drawn.replace("├── ", "+-- ").replace("└── ", "`-- ").replace("│   ", "|   ")


def test_help_degrades(commands: CommandServer, tmp_path: Path) -> None:
    for encoding in ("ascii", "latin-1"):
        done = commands.run("load", "--help", cwd=tmp_path, env={"PYTHONIOENCODING": encoding})
        assert done.code == 0
        assert done.stdout.isascii()
        assert "\\u" not in done.stdout
