"""Opening regular files alone, without waiting for a pipe."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from nobounce.errors import ArgumentError
from nobounce.facts import regular


def test_a_regular_file_is_opened_and_what_is_not_there_is_the_system_s_error(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("text")
    with open(path, opener=regular.opener) as f:
        assert f.read() == "text"
        assert not os.get_inheritable(f.fileno())
    with pytest.raises(FileNotFoundError):
        regular.opener(str(tmp_path / "none"), os.O_RDONLY)


def test_anything_else_is_named_and_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("opened"))
    for path, kind in (
        (tmp_path / "pipe", "a pipe"),
        (tmp_path / "socket", "a socket"),
        (tmp_path, "a folder"),
        (Path("/dev/null"), "a character device"),
    ):
        with pytest.raises(ArgumentError, match=f"is {kind}: name a regular file"):
            regular.opener(str(path), os.O_RDONLY)


def test_a_pipe_that_takes_the_file_s_place_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pipe = tmp_path / "x", tmp_path / "pipe"
    path.write_text("text")
    os.mkfifo(pipe)
    status, opened = os.stat(path), []
    monkeypatch.setattr(os, "stat", lambda _: status)
    plain = os.open

    def recorded(name: str, flags: int) -> int:
        assert flags & os.O_NONBLOCK, "this would wait"
        opened.append(plain(name, flags))
        return opened[-1]

    monkeypatch.setattr(os, "open", recorded)
    with pytest.raises(ArgumentError, match="is a pipe"):
        regular.opener(str(pipe), os.O_RDONLY)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_what_the_shell_pipes_is_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"text")
    os.close(writing)
    try:
        with open(f"/dev/fd/{reading}", opener=regular.opener) as f:
            assert f.read() == "text"
    finally:
        os.close(reading)
