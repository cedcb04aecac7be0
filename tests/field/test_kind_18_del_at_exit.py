"""Objects that live to the very end of the interpreter go in silence, wherever they are kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MADE = r"""
import gc, sys, threading
import nobounce
from nobounce import hipfile
path, name, keep = sys.argv[1:]
device = nobounce.Device(name)
def made():
    f, b, s = nobounce.open(path), device.allocate(8192), device.create_stream()
    t = f.read_async(b, stream=s)
    t.result()
    failed = f.write_async(b, stream=s)
    assert failed.exception() is not None
    batch = nobounce.Batch()
    batch.read(f, b, file_offsets=0, nbytes=4096)
    batch.wait()
    own = hipfile.FileHandle(path, 0)
    own.open()
    return [f, b, s, t, failed, batch, own, s.record(), nobounce.open(path), device.allocate(16),
            b.numpy() if name == "cpu" else bytearray(b.copy_to(bytearray(8192), stream=s).view()),
            nobounce.from_dlpack(device.allocate(16)) if hasattr(nobounce, "from_dlpack") else None]
class Cycle:
    pass
cycle = Cycle()
cycle.self, cycle.made = cycle, made()
class Late:
    "What it keeps goes when the interpreter has emptied the modules: every name in them is None."
    def __init__(self):
        self.made, self.finalizing = made(), sys.is_finalizing
        self.modules = [vars(m) for n, m in sys.modules.items() if n.partition(".")[0] == "nobounce"]
    def __del__(self, say=sys.stdout.write):
        for names in self.modules:
            for name in list(names):
                if not name.startswith("__"):
                    names[name] = None
        say("emptied\n" if self.finalizing() else "too soon\n")
        while self.made:
            self.made.pop(0)
if keep == "sys":
    sys.kept = [Late(), cycle]
elif keep == "builtins":
    import builtins
    builtins.kept = [Late(), cycle]
elif keep == "thread":
    kept = made()
    threading.Thread(target=lambda made=made(): threading.Event().wait(), daemon=True).start()
else:
    kept = [Late(), cycle]
"""


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("keep", ["sys", "builtins", "thread", "global"])
def test_it_is_silent(keep: str, device: str, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(8192))
    command = [sys.executable, "-X", "dev", "-W", "ignore", "-c", MADE, str(path), device, keep]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout == ("" if keep == "thread" else "emptied\n")


HALF_MADE = r"""
import gc, importlib, pkgutil
import nobounce
for module in pkgutil.walk_packages(nobounce.__path__, "nobounce."):
    if module.name.split(".")[1] not in ("cli", "testing", "compat") and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
def below(cls):
    for sub in type.__subclasses__(cls):
        yield sub
        yield from below(sub)
found = {c for c in below(object) if c.__module__.startswith("nobounce") and hasattr(c, "__del__")}
for cls in found:
    cls.__new__(cls)
print(len(found))
"""


def test_what_was_never_made_goes_in_silence() -> None:
    """Ctrl-C may come between the object and its first line."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HALF_MADE],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 0)
    assert int(done.stdout) > 8
