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
        json.dumps({"schema": SCHEMA, "answers": {"k": {"value": 1}}}),
        "[" * 100_000,
        '{"schema": "' + SCHEMA + '", "answers": ',
    ],
)
def test_what_is_no_capture_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        CapturedSource.from_json(text)


STATX = [0o100644, 1, 2, [8, 1], [0, 0], -1, 5, 42, 512, 512, None]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (["mode", "x"], {"errno": 10**30}),
        (["mode", "x"], {"errno": -5}),
        (["mode", "x"], {"errno": 0}),
        (["mode", "x"], {"errno": True}),
        (["mode", "x"], {"errno": 5, "value": 1}),
        (["mode", "x"], {"value": 1 << 40}),
        (["read", "x"], {"value": "\u4e00"}),
        (["listdir", "x"], {"value": ["a", 1]}),
        (["uname"], {"value": ["Linux"]}),
        (["exists", "x"], {"value": 1}),
        (["statx", "x"], {"value": STATX[:-1]}),
        (["statx", "x"], {"value": [*STATX[:3], [8], *STATX[4:]]}),
        (["statx", "x"], {"value": ["0", *STATX[1:]]}),
        (["statx", "x"], {"value": None}),
        (["probe:access_mode", "x"], {"value": []}),
        ([], {"value": 1}),
        ([[]], {"value": 1}),
    ],
)
def test_a_malformed_answer_is_found_when_the_capture_is_read(question: object, answer: object) -> None:
    good = {json.dumps(["statx", "x"]): {"value": STATX}, json.dumps(["probe:new", 1]): {"value": {"a": [1]}}}
    CapturedSource.from_json(json.dumps({"schema": SCHEMA, "answers": good}))
    with pytest.raises(ValueError, match="malformed"):
        CapturedSource.from_json(
            json.dumps({"schema": SCHEMA, "answers": {**good, json.dumps(question): answer}})
        )


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
        found = examine(LiveSource(), fd, trial=True)
    assert (found.kind, found.direct_fd) == ("fifo", "unknown")


def test_the_mount_table_is_whole_and_read_again_after_a_fork() -> None:
    source = LiveSource()
    here = source.read_bytes(MOUNTINFO)
    assert here == Path(MOUNTINFO).read_bytes()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if source.read_bytes(MOUNTINFO) == Path(MOUNTINFO).read_bytes() else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_source_that_is_gone_leaves_no_descriptor(fd_guard: None) -> None:
    for _ in range(20):
        assert LiveSource().read_bytes(MOUNTINFO)


def test_a_number_that_is_another_file_s_by_now_is_neither_read_nor_closed(tmp_path: Path) -> None:
    """A daemon closes every descriptor, then opens its log: it may get the mount table's number."""
    source = LiveSource()
    source.read_bytes(MOUNTINFO)
    number = source._mounts._fd
    (tmp_path / "log").write_bytes(b"mine")
    log = os.open(tmp_path / "log", os.O_RDONLY)
    os.dup2(log, number)
    try:
        assert source.read_bytes(MOUNTINFO) == Path(MOUNTINFO).read_bytes()
        assert os.read(number, 4) == b"mine"
    finally:
        os.close(log)
        os.close(number)
