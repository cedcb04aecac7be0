from __future__ import annotations

from collections.abc import Iterator

import pytest

from command_server import CommandServer, serving


@pytest.fixture(scope="session")
def commands() -> Iterator[CommandServer]:
    """The command line, imported once for all tests of the session."""
    with serving() as server:
        yield server
