"""Every test starts and ends with a closed driver and nothing registered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import hipfile_rig
from capabilities import need
from hipfile_rig import Rig
from nobounce import hipfile
from nobounce.hipfile.driver import STATE
from nobounce.hipfile.store import Store


@pytest.fixture(autouse=True)
def closed_driver() -> Iterator[None]:
    hipfile_rig.settings()
    yield
    while hipfile.use_count():
        hipfile.driver_close()
    STATE.store = Store()
    assert not STATE.files
    assert not STATE.buffers


def _rig(name: str, folder: Path) -> Iterator[Rig]:
    need("o_direct")
    rig = Rig(name, folder)
    hipfile.use(rig.device)
    yield rig
    rig.close()
    hipfile.use(None)
    assert hipfile.outstanding() == 0


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """On sim:0, whose memory the host cannot reach."""
    yield from _rig("sim:0", tmp_path)


@pytest.fixture(params=["sim:0", "cpu"])
def each(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    """On sim:0 and on cpu."""
    yield from _rig(request.param, tmp_path)


@pytest.fixture
def cpu(tmp_path: Path) -> Iterator[Rig]:
    yield from _rig("cpu", tmp_path)


@pytest.fixture(params=["fastpath", "fallback"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend, forced."""
    hipfile_rig.only(request.param)
    return str(request.param)


@pytest.fixture(params=["read", "write"])
def op(request: pytest.FixtureRequest) -> str:
    return str(request.param)
