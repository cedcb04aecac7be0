from __future__ import annotations

import pytest

from capabilities import need


@pytest.fixture(autouse=True)
def _libcst() -> None:
    need("libcst")
