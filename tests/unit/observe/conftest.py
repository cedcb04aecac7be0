"""Observation starts afresh in each test, and jobs can be made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from made_up import made_up_job
from nobounce.io import hooks
from nobounce.observe import start


@pytest.fixture
def job() -> Callable[..., Any]:
    return made_up_job


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    before = hooks.observers
    start.reset()
    yield
    start.reset()
    for observer in hooks.observers:
        if observer not in before:
            hooks.remove(observer)
