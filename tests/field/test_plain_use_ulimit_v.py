"""From plain use: what fails for `ulimit -v` says so, on every device, instead of blaming the machine's memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

ALLOCATE = """
import resource, sys
import nobounce
device = nobounce.Device(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
try:
    device.allocate(int(sys.argv[2]))
except nobounce.OutOfMemoryError as e:
    print(e)
"""


@pytest.mark.parametrize(("device", "nbytes"), [("sim:0", 1 << 20), ("cpu", 4 << 30)])
def test_an_allocation_names_the_limit_on_addresses(device: str, nbytes: int) -> None:
    command = [sys.executable, "-c", ALLOCATE, device, str(nbytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"`ulimit -v` allows this process {2 << 30} bytes" in done.stdout
