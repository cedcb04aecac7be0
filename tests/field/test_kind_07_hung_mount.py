"""Kind 7: Ctrl-C beside a mount that hangs (s3fs-fuse#731). One line at once, 130 or 143, and no process stays."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from capabilities import need
from hung_mount import hung_mount
from nobounce.cli import ending

AT_ONCE = 5.0
"""Seconds: a quarter of one on a machine that is left alone."""


@pytest.mark.parametrize(
    ("verb", "number", "words"),
    [
        ("cp", signal.SIGINT, "interrupted"),
        ("cp", signal.SIGTERM, "ended by SIGTERM"),
        ("load", signal.SIGINT, "interrupted"),
        ("check", signal.SIGINT, "interrupted"),
    ],
)
def test_a_signal_beside_a_hung_mount_is_one_line_at_once_and_the_end(
    tmp_path: Path, verb: str, number: signal.Signals, words: str
) -> None:
    need("root", "fuse")
    folder = tmp_path / "mount"
    folder.mkdir()
    with hung_mount(folder, 8 << 20) as mounted:
        command = [sys.executable, "-m", "nobounce", verb, str(mounted.path)]
        command += [str(tmp_path / "copy")] if verb == "cp" else []
        command += ["--device", "cpu"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            try:
                mounted.wait_until_it_hangs(child.pid)
                begin = time.monotonic()
                child.send_signal(number)
                assert child.stderr is not None
                assert child.stderr.readline() == f"nobounce {verb}: {words}\n"
                assert time.monotonic() - begin < AT_ONCE
                _, rest = child.communicate(timeout=60)
            finally:
                child.kill()
        assert (child.returncode, rest) == (128 + number, "")
        assert time.monotonic() - begin < ending.GRACE_SECONDS + 2 * AT_ONCE
