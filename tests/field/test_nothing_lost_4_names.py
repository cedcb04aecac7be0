"""Nothing lost, 4: "nobody can attach to the statistics of this process: Address already in use" was said, unasked, where two
containers share a network namespace, and both programs are process 1."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from capabilities import need
from nobounce.observe.attach import attach
from watched import NBYTES

CODE = """
import logging, os, sys, nobounce
logging.basicConfig(level=logging.INFO)
nobounce.open(sys.argv[1]).read(nobounce.Device("cpu").allocate(65536), require="fallback")
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").write_bytes(os.urandom(NBYTES))
    return tmp_path / "data"


@contextmanager
def container(data: Path, *, variables: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process 1 of its own, in the network that the test is in. The block yields unshare, whose child it is."""
    command = ["unshare", "--pid", "--fork", "--kill-child", "--", sys.executable, "-c", CODE, str(data)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(variables or {})},
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "1\n"
            yield child
        finally:
            child.kill()


def inside(child: subprocess.Popen[str]) -> int:
    """The number here of the only child."""
    return int(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text())


def said(child: subprocess.Popen[str]) -> str:
    _, errors = child.communicate(timeout=60)
    return errors


def test_two_processes_1_of_one_network_both_show_their_statistics_and_say_nothing(data: Path) -> None:
    need("mount")
    with container(data) as one, container(data) as two:
        for child in (one, two):
            with attach(inside(child)) as reader:
                found = reader.read()
            assert found.pids == (inside(child),)
            assert found.fallback_bytes == NBYTES
        command = [sys.executable, "-m", "nobounce", "stats", "--now", "--json"]
        numbers = [f"-p{inside(child)}" for child in (one, two)]
        done = subprocess.run([*command, *numbers], capture_output=True, text=True, check=False, timeout=60)
        assert json.loads(done.stderr)["total"]["fallback_bytes"] == 2 * NBYTES
        assert sorted(json.loads(done.stderr)["total"]["pids"]) == sorted(map(inside, (one, two)))
        assert said(one) == said(two) == ""


def test_a_program_in_a_container_reports_to_nobounce_stats(data: Path) -> None:
    need("mount")
    code = CODE.replace("sys.stdin.read()", "")
    command = [sys.executable, "-m", "nobounce", "stats", "--json", "--", "unshare", "--pid", "--fork", "--"]
    done = subprocess.run(
        [*command, sys.executable, "-c", code, str(data)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    told = json.loads(done.stderr)
    assert told["total"]["fallback_bytes"] == NBYTES
    assert told["total"]["pids"] != [1]


@pytest.fixture
def squatter() -> Iterator[tuple[str, socket.socket]]:
    """Another user at the name of a collector that has ended, as it is still named in processes that it left behind."""
    need("unprivileged")
    name = f"NOBOUNCESTATS-{os.getpid():x}-{os.urandom(8).hex()}"
    with socket.socket(socket.AF_UNIX) as s:
        os.seteuid(65534)
        try:
            s.bind("\0" + name)
            s.listen(1)
        finally:
            os.seteuid(0)
        yield name, s


def left_behind(data: Path, name: str) -> tuple[float, list[str]]:
    """The seconds of a first read in a process left behind, and what it says."""
    code = CODE.replace("nobounce.open", "begin = time.monotonic()\nnobounce.open", 1)
    code = code.replace("os.getpid()", "time.monotonic() - begin").replace(
        "import logging", "import time, logging"
    )
    variables = {**os.environ, "NOBOUNCE_STATS_COLLECTOR": f"{name}:secret"}
    command = [sys.executable, "-c", code, str(data)]
    done = subprocess.run(
        command, input="", capture_output=True, text=True, check=True, timeout=60, env=variables
    )
    return float(done.stdout), done.stderr.splitlines()


def test_a_squatter_at_the_collectors_name_gets_nothing_and_costs_one_info_line(
    data: Path, squatter: tuple[str, socket.socket]
) -> None:
    name, listener = squatter
    seconds, lines = left_behind(data, name)
    (line,) = lines
    assert line.startswith(
        "INFO:nobounce:the collector of `nobounce stats` gets no statistics of this process"
    )
    assert seconds < 20, "it waits a second for room, not for ever"
    peer, _ = listener.accept()
    with peer:
        assert socket.recv_fds(peer, 64, 4)[:2] == (b"", [])


def test_a_squatter_who_answers_nobody_costs_a_second(
    data: Path, squatter: tuple[str, socket.socket]
) -> None:
    name, _ = squatter
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            s = stack.enter_context(socket.socket(socket.AF_UNIX))
            s.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                s.connect("\0" + name)
        seconds, lines = left_behind(data, name)
    assert len(lines) == 1
    assert seconds < 20, "it waits a second for room, not for ever"
