"""The file systems that integration tests run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from filesystems import Machine, machine


@pytest.fixture(scope="session")
def disks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Real file systems on loop devices, by name, made on first use."""
    with machine(tmp_path_factory.mktemp("disks")) as made:
        yield made
