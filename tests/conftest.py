"""Fixtures for every test, and the rule that a test skips through capabilities.need or not at all."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest

from capabilities import MissingCapability, required
from filesystems import Machine, machine
from nobounce import config
from nobounce.io import hooks
from nobounce.io.file import _SOURCE

hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(autouse=True)
def reset_config() -> Iterator[None]:
    """Each test reads the environment anew."""
    config.override(None)
    yield
    config.override(None)


@pytest.fixture(scope="session")
def disks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Real file systems on loop devices, by name, made on first use."""
    with machine(tmp_path_factory.mktemp("disks")) as made:
        yield made


@pytest.fixture
def fd_guard() -> Iterator[None]:
    """The test must close every descriptor that it opens; those the process opens once and keeps are opened before."""
    hooks.start()
    _SOURCE.read_bytes("/proc/self/mountinfo")
    before = _descriptors()
    yield
    gc.collect()
    leaked = {fd: path for fd, path in _descriptors().items() if before.get(fd) != path}
    assert not leaked, f"descriptors left open: {leaked}"


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the listing's own descriptor
    return found


_BY_NEED = "skipped_by_need"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    error = call.excinfo.value if call.excinfo else None
    setattr(outcome.get_result(), _BY_NEED, isinstance(error, MissingCapability))


class SkipsAreNamed:
    """Ends the session with an error if a test was skipped past `need`. Runs where reports come together."""

    def __init__(self) -> None:
        self.unnamed: list[str] = []

    def _look(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not getattr(report, _BY_NEED, False) and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            self.unnamed.append(f"{report.nodeid}: {reason}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._look(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unnamed and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.unnamed:
            terminalreporter.section("skipped without capabilities.need(...)", red=True, bold=True)
            for line in self.unnamed:
                terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    # Of background jobs and under nohup these are ignored, and children would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        required()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipsAreNamed())
