"""Limits that are measured, and what an interrupt leaves."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from nobounce.observe import limits


def test_an_interrupt_while_the_disk_is_measured_is_that_and_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(4 * limits.CHUNK))
    before = threading.active_count()
    main, real, sent = threading.main_thread().ident, os.preadv, threading.Event()

    def read(*arguments: object) -> int:
        if not sent.is_set():
            sent.set()
            signal.pthread_kill(main or 0, signal.SIGINT)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(limits.os, "preadv", read)
    with pytest.raises(KeyboardInterrupt):
        limits.disk_read(str(path), seconds=30.0)
    assert threading.active_count() == before
