"""Sources: what a recording keeps, a capture gives back, and what is no capture."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from nobounce.facts.block import block_facts
from nobounce.facts.file import examine
from nobounce.facts.source import MOUNTINFO, SCHEMA, CapturedSource, LiveSource, RecordingSource, Source


def test_answers_survive_the_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"caf\xc3\xa9\xff\n")
    (tmp_path / "link").symlink_to("x")
    recording = RecordingSource(LiveSource())

    def ask(source: Source) -> list[object]:
        return [
            source.read_bytes(str(path)),
            source.read_text(str(path)),
            source.readlink(str(tmp_path / "link")),
            source.realpath(str(tmp_path / "link")),
            source.listdir(str(tmp_path)),
            source.exists(str(path)),
            source.exists(str(tmp_path / "nothing")),
            source.access(str(path), os.R_OK),
            source.environment("HOME"),
            source.environment("NOBOUNCE_NOT_SET"),
            source.uname(),
            source.effective_uid(),
            source.mode(str(path)),
            source.probe("sum", (1, 2), lambda: 3),
        ]

    live = ask(recording)
    captured = CapturedSource.from_json(recording.to_json())
    assert ask(captured) == live
    assert json.loads(captured.to_json()) == json.loads(recording.to_json())
    assert live[1] == "café\udcff\n"
    assert stat.S_ISREG(int(str(live[12])))


def test_errors_survive_with_their_errno(tmp_path: Path) -> None:
    recording = RecordingSource(LiveSource())
    with pytest.raises(FileNotFoundError):
        recording.read_bytes(str(tmp_path / "nothing"))
    with pytest.raises(NotADirectoryError):
        recording.listdir(MOUNTINFO)
    captured = CapturedSource.from_json(recording.to_json())
    with pytest.raises(FileNotFoundError):
        captured.read_bytes(str(tmp_path / "nothing"))
    with pytest.raises(NotADirectoryError) as info:
        captured.listdir(MOUNTINFO)
    assert info.value.errno == errno.ENOTDIR


def test_what_was_never_asked_is_not_there_and_live_is_never_called() -> None:
    captured = CapturedSource({})
    with pytest.raises(FileNotFoundError):
        captured.probe("danger", (), lambda: pytest.fail("asked this machine"))
    with pytest.raises(FileNotFoundError):
        captured.read_text(MOUNTINFO)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "7",
        '{"schema": "other", "answers": {}}',
        json.dumps({"schema": SCHEMA, "answers": []}),
        json.dumps({"schema": SCHEMA, "answers": {"k": 3}}),
        json.dumps({"schema": SCHEMA, "answers": {"k": {"errno": "x"}}}),
        json.dumps({"schema": SCHEMA, "answers": {"k": {}}}),
        '{"schema": "' + SCHEMA + '", "answers": ',
    ],
)
def test_what_is_no_capture_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        CapturedSource.from_json(text)


def test_an_opened_file_is_closed_and_in_a_capture_there_is_no_descriptor(
    tmp_path: Path, fd_guard: None
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x" * 4096)
    recording = RecordingSource(LiveSource())
    with recording.opened(str(path)) as fd:
        assert os.read(fd, 1) == b"x"
        live = examine(recording, fd, path=str(path), trial=True)
        block = block_facts(recording, live)
    with pytest.raises(OSError):
        os.fstat(fd)
    captured = CapturedSource.from_json(recording.to_json())
    with captured.opened(str(path)) as fd:
        assert fd == -1
        again = examine(captured, fd, path=str(path), trial=True)
    assert again == live
    assert block_facts(captured, again) == block
    with pytest.raises(FileNotFoundError), recording.opened(str(tmp_path / "nothing")):
        pytest.fail("opened")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with LiveSource().opened(str(tmp_path / "pipe")) as fd:
        assert fd >= 0


def test_the_mount_table_is_whole_and_read_again_after_a_fork() -> None:
    source = LiveSource()
    here = source.read_bytes(MOUNTINFO)
    assert here == Path(MOUNTINFO).read_bytes()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if source.read_bytes(MOUNTINFO) == Path(MOUNTINFO).read_bytes() else 1)
    assert os.waitpid(pid, 0)[1] == 0
