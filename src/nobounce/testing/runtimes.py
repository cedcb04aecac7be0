"""The conformance class for runtimes: one test per rule of the HIP runtime, named by its number.

    class TestMine(RuntimeTests):
        capabilities = MyRuntime.capabilities
        devices = 2

        @pytest.fixture
        def runtime(self):
            return MyRuntime()

Tests of powers that `capabilities` does not declare, or that need more `devices`, are left out. Rules are
numbered as in docs/rules/hip.md; each test's docstring states its rule.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nobounce.runtimes.base import Runtime
from nobounce.testing.requirements import requires
from nobounce.testing.rig import Rig, raises_status
from nobounce.testing.rules_copies import CopyRules
from nobounce.testing.rules_copy_arguments import CopyArgumentRules
from nobounce.testing.rules_errors import ErrorRules
from nobounce.testing.rules_events import EventRules
from nobounce.testing.rules_memory import MemoryRules
from nobounce.testing.rules_null_stream import NullStreamRules
from nobounce.testing.rules_powers import (
    HostRegistrationRules,
    ManagedMemoryRules,
    OrderedMemoryRules,
    PeerRules,
)
from nobounce.testing.rules_streams import StreamRules
from nobounce.testing.rules_waits import WaitRules

__all__ = ["Rig", "RuntimeTests", "raises_status", "requires"]


class RuntimeTests(
    StreamRules,
    NullStreamRules,
    EventRules,
    WaitRules,
    CopyRules,
    CopyArgumentRules,
    ErrorRules,
    MemoryRules,
    OrderedMemoryRules,
    ManagedMemoryRules,
    HostRegistrationRules,
    PeerRules,
):
    """Subclass it with a `runtime` fixture."""

    @pytest.fixture
    def runtime(self) -> Runtime:
        raise TypeError("a subclass of RuntimeTests needs a fixture `runtime`")

    @pytest.fixture
    def rig(self, runtime: Runtime) -> Iterator[Rig]:
        made = Rig(runtime)
        yield made
        made.close()
