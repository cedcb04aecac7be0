from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import capabilities

HERE = Path(capabilities.__file__).parent

NEEDS_WHAT_IS_MISSING = """
import capabilities
capabilities.CAPABILITIES["a-unicorn"] = lambda: "extinct"
def test_passes():
    pass
def test_needs():
    capabilities.need("a-unicorn")
"""
SKIPS_ON_ITS_OWN = """
import pytest
def test_passes():
    pass
@pytest.mark.skip(reason="today is a bad day")
def test_skips():
    pass
"""


def run_pytest(folder: Path, source: str, *options: str, **environment: str) -> tuple[int, str]:
    """Exit code and output of pytest over one test file under the suite's own conftest.py."""
    for path in HERE.glob("*.py"):
        shutil.copy(path, folder)
    (folder / "test_it.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", *options]
    environ = {k: v for k, v in os.environ.items() if k != "NOBOUNCE_REQUIRE" and not k.startswith("PYTEST_")}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_missing_capability_skips_and_is_named(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, NEEDS_WHAT_IS_MISSING)
    assert code == 0, output
    assert "1 passed, 1 skipped" in output
    assert "missing capability: a-unicorn (extinct)" in output


@pytest.mark.parametrize("require", ["a-unicorn", "all", "all,-cuda"])
def test_a_required_capability_fails_instead(tmp_path: Path, require: str) -> None:
    source = f'{NEEDS_WHAT_IS_MISSING}\nimport os; os.environ["NOBOUNCE_REQUIRE"] = "{require}"\n'
    code, output = run_pytest(tmp_path, source)
    assert code == 1, output
    assert "required capability a-unicorn is missing: extinct" in output


def test_a_capability_taken_away_skips(tmp_path: Path) -> None:
    source = f'{NEEDS_WHAT_IS_MISSING}\nimport os; os.environ["NOBOUNCE_REQUIRE"] = "all,-a-unicorn"\n'
    assert run_pytest(tmp_path, source)[0] == 0


def test_an_unknown_required_capability_is_refused(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, NEEDS_WHAT_IS_MISSING, NOBOUNCE_REQUIRE="all,-cudda")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "NOBOUNCE_REQUIRE names 'cudda'" in output


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_a_skip_past_need_fails_the_run(tmp_path: Path, options: tuple[str, ...]) -> None:
    code, output = run_pytest(tmp_path, SKIPS_ON_ITS_OWN, *options)
    assert code == 1, output
    assert "skipped without capabilities.need" in output
    assert "today is a bad day" in output


def test_a_module_skipped_for_a_package_fails_the_run(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, 'import pytest\npytest.importorskip("unicorn")\ndef test(): pass\n')
    assert code == 1, output
    assert "could not import 'unicorn'" in output


def test_a_leaked_descriptor_fails_the_test_that_asks(tmp_path: Path) -> None:
    leak = "import os\ndef test(fd_guard):\n    os.open('/dev/null', os.O_RDONLY)\n"
    code, output = run_pytest(tmp_path, leak)
    assert code == 1, output
    assert "descriptors left open" in output


def test_nobody_cannot_read_what_root_hides(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    secret.chmod(0)
    done = capabilities.as_nobody(f"drop()\nopen({str(secret)!r})")
    assert done.returncode == 1
    assert "PermissionError" in done.stderr
